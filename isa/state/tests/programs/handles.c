// Has something of everything that the runtime keeps records of: handlers, a signal that waits, an alternate stack, a
// timer, a heap, mappings. Prints what became of it; its status is 5.
#include "library.h"

#define APART __attribute__((noinline))

enum { NR_TIMER_CREATE = 107, NR_TIMER_SETTIME = 110, NR_KILL = 129, NR_SIGALTSTACK = 132, NR_SIGACTION = 134 };
enum { NR_SIGPROCMASK = 135, NR_GETPID = 172, NR_BRK = 214, NR_MMAP = 222 };
enum { SIGUSR1 = 10, SIGUSR2 = 12, SA_ONSTACK = 0x08000000, SIG_BLOCK = 0, SIG_UNBLOCK = 1, SIGNAL_SET = 8 };
enum { PAGE = 4096, READ_WRITE = 3, PRIVATE_ANONYMOUS = 0x22, MONOTONIC = 1, ROUNDS = 24000 };

struct action {
    void (*handler)(int);
    unsigned long flags, restorer, mask;
};

static char stack[16384] __attribute__((aligned(16)));
static volatile int seen;
static volatile unsigned long sink = 1;

static long call(long nr, long a, long b, long c, long d) { return __gw_syscall(nr, a, b, c, d, 0, 0); }

static void handler(int signal) {
    char here;
    int on_stack = &here >= stack && &here < stack + sizeof stack;
    seen += signal * (on_stack ? 100 : 1);
}

// Where the program is captured.
static APART unsigned long work(void) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < ROUNDS; i++)
        sum = sum * 31 + i + sink;
    return sum;
}

int main(void) {
    struct action action = {handler, SA_ONSTACK, 0, 0};
    struct {
        void *begin;
        int flags, pad;
        unsigned long size;
    } alternate = {stack, 0, 0, sizeof stack};
    struct {
        long value;
        int signal, notify;
        long rest[6];
    } event = {0, SIGUSR1, 0, {0}};
    long hour[4] = {0, 0, 3600, 0};
    unsigned long blocked = 1UL << (SIGUSR2 - 1);
    int timer;
    long failed = call(NR_SIGACTION, SIGUSR1, (long)&action, 0, SIGNAL_SET);
    failed |= call(NR_SIGACTION, SIGUSR2, (long)&action, 0, SIGNAL_SET);
    failed |= call(NR_SIGALTSTACK, (long)&alternate, 0, 0, 0);
    failed |= call(NR_SIGPROCMASK, SIG_BLOCK, (long)&blocked, 0, SIGNAL_SET);
    failed |= call(NR_KILL, call(NR_GETPID, 0, 0, 0, 0), SIGUSR2, 0, 0);
    failed |= call(NR_TIMER_CREATE, MONOTONIC, (long)&event, (long)&timer, 0);
    failed |= call(NR_TIMER_SETTIME, timer, 0, (long)hour, 0);
    long heap = call(NR_BRK, 0, 0, 0, 0);
    call(NR_BRK, heap + 2 * PAGE, 0, 0, 0);
    long *mapped = (long *)__gw_syscall(NR_MMAP, 0, 3 * PAGE, READ_WRITE, PRIVATE_ANONYMOUS, -1, 0);
    *mapped = 7;
    *(long *)heap = 8;
    if (failed)
        return 1;

    unsigned long sum = work();

    failed = call(NR_SIGPROCMASK, SIG_UNBLOCK, (long)&blocked, 0, SIGNAL_SET);
    print("work %lx, failed %ld, handled %ld, memory %ld\n", sum, failed, (long)seen, *mapped + *(long *)heap);
    return 5;
}
