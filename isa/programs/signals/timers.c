// Timers: an interval timer and a POSIX timer interrupt a computation whose result must not change; one is read with
// sigwaitinfo; alarm ends a read on an empty pipe with EINTR, and with SA_RESTART a read goes on.
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t ticks, pipe_to_fill = -1;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static void tick(int number) {
    int kept = errno;
    (void)number;
    ticks++;
    if (pipe_to_fill >= 0 && write(pipe_to_fill, "t", 1) != 1)
        abort();
    errno = kept;
}

static void handle(int number, int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = tick;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    check(sigaction(number, &action, NULL) == 0, "sigaction");
}

static uint64_t recurse(uint64_t seed, int depth) {
    uint64_t room[3] = {seed * 3, seed ^ seed >> 11, seed + 7};
    return depth == 0 ? room[seed % 3] : recurse(room[seed % 3], depth - 1) * 5 + room[(seed >> 8) % 3];
}

// Works until there were enough ticks, at least 50 rounds; the result is that of the first 50.
static uint64_t work_until(int enough) {
    uint64_t result = 1, first = 0;
    for (int round = 0; round < 50 || ticks < enough; round++) {
        result = recurse(result, 100);
        if (round == 49)
            first = result;
    }
    return first;
}

int main(void) {
    struct itimerval interval = {{0, 2000}, {0, 2000}}, none = {{0, 0}, {0, 0}};
    struct sigevent event;
    struct itimerspec soon = {{0, 3000000}, {0, 3000000}}, stop = {{0, 0}, {0, 0}};
    timer_t timer;
    sigset_t set;
    int ends[2];
    char byte = 0;

    handle(SIGALRM, SA_RESTART);
    printf("without %016llx\n", (unsigned long long)work_until(0));
    check(setitimer(ITIMER_REAL, &interval, NULL) == 0, "setitimer");
    printf("with    %016llx\n", (unsigned long long)work_until(5));
    check(setitimer(ITIMER_REAL, &none, NULL) == 0, "setitimer");
    printf("five ticks: %d\n", ticks >= 5);

    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    check(sigprocmask(SIG_BLOCK, &set, NULL) == 0, "sigprocmask");
    memset(&event, 0, sizeof event);
    event.sigev_notify = SIGEV_SIGNAL;
    event.sigev_signo = SIGUSR1;
    event.sigev_value.sival_int = 55;
    check(timer_create(CLOCK_MONOTONIC, &event, &timer) == 0, "timer_create");
    check(timer_settime(timer, 0, &soon, NULL) == 0, "timer_settime");
    for (int i = 0; i < 3; i++) {
        siginfo_t info;
        check(sigwaitinfo(&set, &info) == SIGUSR1, "sigwaitinfo");
        printf("timer %d %d\n", info.si_code == SI_TIMER, info.si_value.sival_int);
    }
    check(timer_settime(timer, 0, &stop, NULL) == 0 && timer_delete(timer) == 0, "timer_delete");

    check(pipe(ends) == 0, "pipe");
    handle(SIGALRM, 0);
    // Repeats, so that a signal just before the read does no harm.
    check(setitimer(ITIMER_REAL, &interval, NULL) == 0, "setitimer");
    ssize_t got = read(ends[0], &byte, 1);
    printf("interrupted %d\n", got == -1 && errno == EINTR);
    check(setitimer(ITIMER_REAL, &none, NULL) == 0, "setitimer");
    handle(SIGALRM, SA_RESTART);
    pipe_to_fill = ends[1];
    check(setitimer(ITIMER_REAL, &interval, NULL) == 0, "setitimer");
    got = read(ends[0], &byte, 1);
    check(setitimer(ITIMER_REAL, &none, NULL) == 0, "setitimer");
    printf("restarted %d %c\n", got == 1, byte);
    return 0;
}
