// Handlers of faults: one makes the page accessible and returns, so that the instruction goes on, on its own stack and
// on an alternate one, with another signal pending meanwhile; kernel calls in it; and the same signals sent by raise.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGES = 6, PAGE = 4096 };

static char stack[65536];
static char *memory;
static volatile sig_atomic_t faults, right_place, on_stack, others;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static uint64_t recurse(uint64_t seed, int depth) {
    uint64_t room[2] = {seed * 3, seed + 7};
    return depth == 0 ? room[seed & 1] : recurse(room[seed & 1], depth - 1) * 5 + room[1];
}

static void other(int number) {
    (void)number;
    others++;
}

static void on_fault(int number, siginfo_t *info, void *context) {
    char here;
    char *page = (char *)((uintptr_t)info->si_addr & ~(uintptr_t)(PAGE - 1));
    sigset_t now;
    (void)context;
    faults++;
    right_place += number == SIGSEGV && info->si_code == SEGV_ACCERR && page >= memory && page < memory + PAGES * PAGE;
    on_stack += (uintptr_t)&here >= (uintptr_t)stack && (uintptr_t)&here < (uintptr_t)stack + sizeof stack;
    check(raise(SIGUSR1) == 0, "raise");
    check(recurse(faults, 30) != 0, "recurse");
    check(sigprocmask(SIG_BLOCK, NULL, &now) == 0 && sigismember(&now, SIGSEGV) && sigismember(&now, SIGUSR1), "mask");
    check(mprotect(page, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
}

static void sent(int number, siginfo_t *info, void *context) {
    (void)context;
    printf("sent %d: %d\n", number == SIGSEGV ? 1 : number == SIGFPE ? 2 : 3, info->si_code == SI_TKILL);
}

static void handle(int number, void (*handler)(int, siginfo_t *, void *), int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | flags;
    sigemptyset(&action.sa_mask);
    sigaddset(&action.sa_mask, SIGUSR1);
    check(sigaction(number, &action, NULL) == 0, "sigaction");
}

// Writes to each page of the protected memory, at the bottom of a recursion with locals.
static uint64_t touch(int depth) {
    volatile uint64_t room[8];
    for (int i = 0; i < 8; i++)
        room[i] = (uint64_t)depth * 11 + (uint64_t)i;
    if (depth > 0)
        return touch(depth - 1) + room[depth & 7];
    for (int i = 0; i < PAGES; i++)
        memory[i * PAGE + 17] = (char)(i + 1);
    return room[3];
}

static void round_of_faults(int flags) {
    faults = right_place = on_stack = others = 0;
    check(mprotect(memory, PAGES * PAGE, PROT_READ) == 0, "mprotect");
    handle(SIGSEGV, on_fault, flags);
    uint64_t sum = touch(20);
    for (int i = 0; i < PAGES; i++)
        sum += (uint64_t)memory[i * PAGE + 17];
    sigset_t now;
    check(sigprocmask(SIG_BLOCK, NULL, &now) == 0, "sigprocmask");
    printf("faults %d, at the right place %d, on the stack %d, another %d, sum %llu, blocked %d\n", (int)faults,
           (int)right_place, (int)on_stack, others > 0, (unsigned long long)sum,
           sigismember(&now, SIGSEGV) || sigismember(&now, SIGUSR1));
}

int main(void) {
    struct sigaction action;
    memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    memset(&action, 0, sizeof action);
    action.sa_handler = other;
    sigemptyset(&action.sa_mask);
    check(sigaction(SIGUSR1, &action, NULL) == 0, "sigaction");
    round_of_faults(0);
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    check(sigaltstack(&alternate, NULL) == 0, "sigaltstack");
    round_of_faults(SA_ONSTACK);
    handle(SIGSEGV, sent, 0);
    handle(SIGFPE, sent, 0);
    handle(SIGBUS, sent, 0);
    check(raise(SIGSEGV) == 0 && raise(SIGFPE) == 0 && raise(SIGBUS) == 0, "raise");
    return 0;
}
