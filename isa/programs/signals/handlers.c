// Signals: handlers with and without siginfo, masks, nested handlers, alternate stacks, raise and kill, sigprocmask,
// pending signals, sigsuspend, sigwait and sigwaitinfo, and a jump out of a handler.
#include <errno.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile sig_atomic_t order, depth, deepest, value_seen;
static sigjmp_buf place;
static char stack[65536];
static volatile int on_stack;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static void note(int number) { order = order * 10 + (number == SIGUSR1 ? 1 : number == SIGUSR2 ? 2 : 3); }

static void nested(int number) {
    depth++;
    deepest = depth > deepest ? depth : deepest;
    note(number);
    if (number == SIGUSR1)
        raise(SIGUSR2);
    depth--;
}

static void with_info(int number, siginfo_t *info, void *context) {
    (void)context;
    note(number);
    value_seen = info->si_signo == number && info->si_code == SI_QUEUE && info->si_pid == getpid()
                     ? info->si_value.sival_int
                     : -1;
}

static void on_other_stack(int number) {
    char here;
    uintptr_t at = (uintptr_t)&here;
    note(number);
    on_stack = at >= (uintptr_t)stack && at < (uintptr_t)stack + sizeof stack;
}

static void leave(int number) {
    note(number);
    siglongjmp(place, number);
}

static void handle(int number, void (*handler)(int), int flags, int masked) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    if (masked)
        sigaddset(&action.sa_mask, masked);
    check(sigaction(number, &action, NULL) == 0, "sigaction");
}

int main(void) {
    sigset_t set, old, pending;
    struct sigaction action, before;
    int number = 0;

    handle(SIGUSR1, nested, 0, 0);
    handle(SIGUSR2, nested, 0, 0);
    raise(SIGUSR1);
    printf("nested: order %d, depth %d\n", (int)order, (int)deepest);
    order = deepest = 0;
    handle(SIGUSR1, nested, 0, SIGUSR2);
    raise(SIGUSR1);
    printf("masked: order %d, depth %d\n", (int)order, (int)deepest);

    order = 0;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    check(sigprocmask(SIG_BLOCK, &set, &old) == 0, "sigprocmask");
    check(kill(getpid(), SIGUSR2) == 0, "kill");
    printf("blocked: order %d", (int)order);
    check(sigpending(&pending) == 0, "sigpending");
    printf(", pending %d %d\n", sigismember(&pending, SIGUSR1), sigismember(&pending, SIGUSR2));
    check(sigsuspend(&old) == -1 && errno == EINTR, "sigsuspend");
    printf("suspended: order %d\n", (int)order);
    check(kill(getpid(), SIGUSR1) == 0 && sigwait(&set, &number) == 0, "sigwait");
    printf("sigwait: %d, order %d\n", number == SIGUSR1, (int)order);
    check(sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 1234}) == 0, "sigqueue");
    siginfo_t info;
    check(sigwaitinfo(&set, &info) == SIGUSR2, "sigwaitinfo");
    printf("sigwaitinfo: %d\n", info.si_value.sival_int);
    check(sigprocmask(SIG_SETMASK, &old, NULL) == 0, "sigprocmask");

    order = 0;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = with_info;
    action.sa_flags = SA_SIGINFO | SA_RESETHAND;
    check(sigaction(SIGUSR2, &action, &before) == 0 && before.sa_handler == nested, "sigaction");
    check(sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 77}) == 0, "sigqueue");
    check(sigaction(SIGUSR2, NULL, &before) == 0, "sigaction");
    printf("queued: order %d, value %d, reset %d\n", (int)order, (int)value_seen, before.sa_handler == SIG_DFL);

    order = 0;
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack}, current;
    check(sigaltstack(&alternate, NULL) == 0 && sigaltstack(NULL, &current) == 0, "sigaltstack");
    handle(SIGUSR1, on_other_stack, SA_ONSTACK, 0);
    raise(SIGUSR1);
    printf("alternate stack: order %d, on it %d, size %d\n", (int)order, on_stack, current.ss_size == sizeof stack);

    order = 0;
    handle(SIGUSR1, leave, 0, 0);
    for (volatile int i = 0; i < 3; i++) {
        number = sigsetjmp(place, 1);
        if (number == 0)
            raise(SIGUSR1);
        check(sigprocmask(SIG_BLOCK, NULL, &set) == 0, "sigprocmask");
        printf("jumped out: %d, blocked %d\n", number == SIGUSR1, sigismember(&set, SIGUSR1));
    }
    printf("order %d\n", (int)order);
    return 0;
}
