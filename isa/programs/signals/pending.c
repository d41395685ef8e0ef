// What is under way when nobody looks: queued signals with their values in order, masks, ignored signals, an alternate
// stack, handlers that are not called yet, and timers of all kinds, with a computation between cause and effect.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { SIGNALS = 5 };

static char stack[32768];
static volatile sig_atomic_t calls, on_stack, values, deep;

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

// Some work, in which a capture may come.
static unsigned work(void) { return (unsigned)(recurse(12345, 40) & 0xffff); }

static void handler(int number, siginfo_t *info, void *context) {
    char here;
    (void)context;
    calls++;
    values = values * 10 + (info->si_code == SI_QUEUE ? info->si_value.sival_int : 0);
    deep ^= (int)work();
    on_stack += (uintptr_t)&here >= (uintptr_t)stack && (uintptr_t)&here < (uintptr_t)stack + sizeof stack;
    stack_t now;
    check(sigaltstack(NULL, &now) == 0, "sigaltstack");
    printf("handler of %s: value %d, on the stack %d, flags %d\n", number == SIGALRM ? "alarm" : "queued", (int)values,
           (int)on_stack, now.ss_flags);
}

int main(void) {
    struct sigaction action;
    sigset_t all, old, pending;
    siginfo_t info;
    int real = SIGRTMIN + 2;

    memset(&action, 0, sizeof action);
    action.sa_sigaction = handler;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    check(sigaltstack(&alternate, NULL) == 0, "sigaltstack");
    check(sigaction(real, &action, NULL) == 0 && sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
    check(signal(SIGUSR2, SIG_IGN) != SIG_ERR, "signal");
    printf("work %u\n", work());

    sigemptyset(&all);
    sigaddset(&all, real);
    sigaddset(&all, SIGUSR1);
    sigaddset(&all, SIGALRM);
    check(sigprocmask(SIG_BLOCK, &all, &old) == 0, "sigprocmask");
    for (int i = 1; i <= SIGNALS; i++)
        check(sigqueue(getpid(), real, (union sigval){.sival_int = i}) == 0, "sigqueue");
    check(raise(SIGUSR1) == 0 && raise(SIGUSR2) == 0, "raise");
    printf("work %u\n", work());
    check(sigpending(&pending) == 0, "sigpending");
    printf("pending: %d %d %d\n", sigismember(&pending, real), sigismember(&pending, SIGUSR1),
           sigismember(&pending, SIGUSR2));
    for (int i = 1; i <= 2; i++) {
        check(sigwaitinfo(&all, &info) == (i == 1 ? SIGUSR1 : real), "sigwaitinfo");
        printf("waited for: %d, own %d, work %u\n", info.si_code == SI_QUEUE ? info.si_value.sival_int : 0,
               info.si_pid == getpid(), work());
    }
    check(sigprocmask(SIG_SETMASK, &old, NULL) == 0, "sigprocmask");
    printf("handled: %d calls, values %d, on the stack %d, %d\n", (int)calls, (int)values, (int)on_stack, (int)deep);

    // Timers run on while nobody waits for them.
    struct itimerval soon = {{0, 0}, {0, 20000}}, left;
    calls = 0;
    check(setitimer(ITIMER_REAL, &soon, NULL) == 0, "setitimer");
    sigdelset(&all, SIGUSR1);
    check(sigprocmask(SIG_BLOCK, &all, NULL) == 0, "sigprocmask");
    sigset_t none = old;
    while (calls == 0) {
        (void)work();
        check(sigsuspend(&none) == -1 && errno == EINTR, "sigsuspend");
    }
    check(getitimer(ITIMER_REAL, &left) == 0, "getitimer");
    printf("alarm: %d, left %d\n", (int)calls, (int)left.it_value.tv_usec);

    timer_t timer, other;
    struct sigevent event;
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = real;
    event.sigev_value.sival_int = 9;
    check(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0, "timer_create");
    check(timer_create(CLOCK_REALTIME, NULL, &other) == 0 && timer_delete(other) == 0, "timer_create");
    struct itimerspec often = {{0, 5000000}, {0, 5000000}}, setting;
    check(timer_settime(timer, 0, &often, NULL) == 0, "timer_settime");
    for (int i = 0; i < 3; i++) {
        check(sigwaitinfo(&all, &info) == real, "sigwaitinfo");
        printf("timer: %d %d, work %u\n", info.si_code == SI_TIMER, info.si_value.sival_int, work());
    }
    check(timer_gettime(timer, &setting) == 0, "timer_gettime");
    printf("interval %ld\n", setting.it_interval.tv_nsec);
    struct timespec at;
    check(clock_gettime(CLOCK_MONOTONIC, &at) == 0, "clock_gettime");
    at.tv_nsec += 10000000;
    at.tv_sec += at.tv_nsec / 1000000000;
    at.tv_nsec %= 1000000000;
    struct itimerspec once = {{0, 0}, at};
    check(timer_settime(timer, TIMER_ABSTIME, &once, NULL) == 0, "timer_settime");
    // One of the former kind may still be queued.
    struct timespec first;
    do {
        check(sigwaitinfo(&all, &info) == real && clock_gettime(CLOCK_MONOTONIC, &first) == 0, "sigwaitinfo");
    } while (first.tv_sec < at.tv_sec || (first.tv_sec == at.tv_sec && first.tv_nsec < at.tv_nsec));
    printf("until: %d\n", info.si_value.sival_int);
    check(timer_delete(timer) == 0 && timer_gettime(timer, &setting) == -1 && errno == EINVAL, "timer_delete");
    return 0;
}
