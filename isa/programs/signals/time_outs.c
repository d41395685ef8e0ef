// Calls with a time-out while another thread computes: none ends before its time, none by EINTR, and each ends, however
// often it is issued anew; and the clock that counts from the start never goes back.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/select.h>
#include <time.h>

enum { MILLISECONDS = 60, MILLION = 1000000, BILLION = 1000000000 };

static volatile int stop;
static volatile uint64_t result;
static int64_t latest;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static int64_t now(void) {
    struct timespec time;
    check(clock_gettime(CLOCK_MONOTONIC, &time) == 0, "clock_gettime");
    int64_t shown = (int64_t)time.tv_sec * BILLION + time.tv_nsec;
    check(shown >= latest, "the clock goes on");
    latest = shown;
    return shown;
}

static void *compute(void *unused) {
    uint64_t value = 1;
    while (!stop)
        value = value * 6364136223846793005u + 1;
    result = value;
    return unused;
}

#define ATTEMPT(what, call, expected)                                                                                  \
    do {                                                                                                               \
        int64_t began = now();                                                                                         \
        errno = 0;                                                                                                     \
        long got = (call);                                                                                             \
        int64_t took = now() - began;                                                                                  \
        printf("%s: %s, %s\n", what,                                                                                   \
               (expected)       ? "timed out"                                                                          \
               : errno == EINTR ? "EINTR"                                                                              \
                                : "something else",                                                                    \
               took >= (int64_t)MILLISECONDS * MILLION - MILLION ? "in time" : "too early");                           \
        (void)got;                                                                                                     \
    } while (0)

static struct timespec from_now(clockid_t clock) {
    struct timespec time;
    check(clock_gettime(clock, &time) == 0, "clock_gettime");
    time.tv_nsec += (long)MILLISECONDS * MILLION;
    time.tv_sec += time.tv_nsec / BILLION;
    time.tv_nsec %= BILLION;
    return time;
}

int main(void) {
    pthread_t thread;
    struct timespec time = {0, (long)MILLISECONDS * MILLION}, at;
    struct timeval some = {0, MILLISECONDS * 1000};
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_condattr_t attribute;
    pthread_cond_t condition;
    sem_t semaphore;
    sigset_t usr1;
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);
    check(pthread_sigmask(SIG_BLOCK, &usr1, NULL) == 0 && sem_init(&semaphore, 0, 0) == 0, "preparation");
    check(pthread_condattr_init(&attribute) == 0 && pthread_condattr_setclock(&attribute, CLOCK_MONOTONIC) == 0 &&
              pthread_cond_init(&condition, &attribute) == 0,
          "condition");
    check(pthread_create(&thread, NULL, compute, NULL) == 0, "pthread_create");

    ATTEMPT("nanosleep", nanosleep(&time, NULL), got == 0);
    ATTEMPT("clock_nanosleep", clock_nanosleep(CLOCK_REALTIME, 0, &time, NULL), got == 0);
    // A deadline is counted from behind the clock's first reading: who is put aside between the two is not too early.
    ATTEMPT("clock_nanosleep until",
            (at = from_now(CLOCK_MONOTONIC), clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL)), got == 0);
    ATTEMPT("poll", poll(NULL, 0, MILLISECONDS), got == 0);
    ATTEMPT("select", select(0, NULL, NULL, NULL, &some), got == 0);
    ATTEMPT("sigtimedwait", sigtimedwait(&usr1, NULL, &time), got == -1 && errno == EAGAIN);
    at = from_now(CLOCK_REALTIME);
    // Until a time of day, which goes on while the program is on its way, as the time that the attempts take does not.
    printf("sem_timedwait: %s, ", sem_timedwait(&semaphore, &at) == -1 && errno == ETIMEDOUT ? "timed out" : "ended");
    struct timespec seen;
    check(clock_gettime(CLOCK_REALTIME, &seen) == 0, "clock_gettime");
    printf("%s\n", seen.tv_sec * BILLION + seen.tv_nsec >= at.tv_sec * BILLION + at.tv_nsec ? "in time" : "too early");
    check(pthread_mutex_lock(&mutex) == 0, "lock");
    ATTEMPT("pthread_cond_timedwait",
            (at = from_now(CLOCK_MONOTONIC), pthread_cond_timedwait(&condition, &mutex, &at)), got == ETIMEDOUT);
    check(pthread_mutex_unlock(&mutex) == 0, "unlock");

    stop = 1;
    check(pthread_join(thread, NULL) == 0, "pthread_join");
    printf("computed %d\n", result != 0);
    return 0;
}
