// Handlers that leave by siglongjmp what is computing or waiting: the loop of the function that called sigsetjmp, a
// recursion, a handler that was interrupted by another one, and a wait with a mask of its own.
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>

static sigjmp_buf place;
static volatile uint64_t sink;
static volatile sig_atomic_t inner;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed\n", what);
        exit(1);
    }
}

static void handle(int number, void (*handler)(int)) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    sigemptyset(&action.sa_mask);
    check(sigaction(number, &action, NULL) == 0, "sigaction");
}

static void leave(int number) { siglongjmp(place, number); }

static void raise_other(int number) {
    (void)number;
    raise(SIGUSR2);
    printf("not reached\n");
}

static void note(int number) { inner = inner * 10 + (number == SIGUSR1 ? 1 : 2); }

static void set_alarm(void) {
    struct itimerval soon = {{0, 0}, {0, 2000}};
    check(setitimer(ITIMER_REAL, &soon, NULL) == 0, "setitimer");
}

static uint64_t recurse(uint64_t seed, int depth) {
    uint64_t room[2] = {seed * 3, seed + 7};
    return depth == 0 ? room[seed & 1] : recurse(room[seed & 1], depth - 1) + room[1];
}

static void show(const char *where, int result) {
    sigset_t now;
    check(sigprocmask(SIG_BLOCK, NULL, &now) == 0, "sigprocmask");
    printf("%s: %d, blocked %d %d %d\n", where, result, sigismember(&now, SIGALRM), sigismember(&now, SIGUSR1),
           sigismember(&now, SIGUSR2));
}

int main(void) {
    volatile int rounds = 0;
    handle(SIGALRM, leave);
    int result = sigsetjmp(place, 1);
    if (rounds++ < 3) {
        set_alarm();
        for (;;)
            sink = sink * 3 + 1;
    }
    show("out of a loop", result == SIGALRM);

    rounds = 0;
    result = sigsetjmp(place, 1);
    if (rounds++ < 3) {
        set_alarm();
        for (;;)
            sink = recurse(sink, 200);
    }
    show("out of a recursion", result == SIGALRM);

    handle(SIGUSR1, raise_other);
    handle(SIGUSR2, leave);
    result = sigsetjmp(place, 1);
    if (result == 0)
        raise(SIGUSR1);
    show("out of two handlers", result == SIGUSR2);
    if (sigsetjmp(place, 0) == 0)
        raise(SIGUSR1);
    show("and without the mask", 1);

    sigset_t set, none;
    sigemptyset(&none);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGUSR2);
    check(sigprocmask(SIG_SETMASK, &set, NULL) == 0, "sigprocmask");
    handle(SIGUSR1, leave);
    result = sigsetjmp(place, 1);
    if (result == 0) {
        raise(SIGUSR1);
        sigsuspend(&none);
    }
    show("out of sigsuspend", result == SIGUSR1);

    // Two at once: both handlers run before sigsuspend is over, the one with the lower number last.
    handle(SIGUSR1, note);
    handle(SIGUSR2, note);
    raise(SIGUSR1);
    raise(SIGUSR2);
    sigsuspend(&none);
    show("both handled", inner);
    return 0;
}
