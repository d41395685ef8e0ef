// Mutexes with priority inheritance: many threads at one, with and without a time-out, error checks, a condition
// variable, and a robust one whose owner ends.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { THREADS = 4, TURNS = 300 };

static void expect(int result, int expected, const char *what) {
    if (result != expected) {
        printf("%s gives %d instead of %d\n", what, result, expected);
        exit(1);
    }
}

static void prepare(pthread_mutex_t *mutex, int type, int robust) {
    pthread_mutexattr_t attributes;
    int protocol = -1;
    expect(pthread_mutexattr_init(&attributes), 0, "pthread_mutexattr_init");
    expect(pthread_mutexattr_setprotocol(&attributes, PTHREAD_PRIO_INHERIT), 0, "pthread_mutexattr_setprotocol");
    expect(pthread_mutexattr_getprotocol(&attributes, &protocol), 0, "pthread_mutexattr_getprotocol");
    expect(protocol, PTHREAD_PRIO_INHERIT, "the protocol");
    expect(pthread_mutexattr_settype(&attributes, type), 0, "pthread_mutexattr_settype");
    expect(pthread_mutexattr_setrobust(&attributes, robust), 0, "pthread_mutexattr_setrobust");
    expect(pthread_mutex_init(mutex, &attributes), 0, "pthread_mutex_init");
    expect(pthread_mutexattr_destroy(&attributes), 0, "pthread_mutexattr_destroy");
}

static struct timespec soon(long nanoseconds) {
    struct timespec time;
    expect(clock_gettime(CLOCK_REALTIME, &time), 0, "clock_gettime");
    time.tv_nsec += nanoseconds;
    time.tv_sec += time.tv_nsec / 1000000000;
    time.tv_nsec %= 1000000000;
    return time;
}

static pthread_mutex_t counted, checked, left;
static pthread_cond_t turned = PTHREAD_COND_INITIALIZER;
static volatile uint64_t count;
static uint64_t turn;

static void *counts(void *argument) {
    (void)argument;
    for (int i = 0; i < TURNS; i++) {
        if (i % 3 == 0) {
            while (pthread_mutex_trylock(&counted) == EBUSY) {
                struct timespec until = soon(1000000);
                int result = pthread_mutex_timedlock(&counted, &until);
                if (result == 0)
                    break;
                expect(result, ETIMEDOUT, "pthread_mutex_timedlock");
            }
        } else {
            expect(pthread_mutex_lock(&counted), 0, "pthread_mutex_lock");
        }
        uint64_t seen = count;
        for (volatile int work = 0; work < 50; work++)
            ;
        count = seen + 1;
        expect(pthread_mutex_unlock(&counted), 0, "pthread_mutex_unlock");
    }
    return NULL;
}

// Each in its turn.
static void *takes_turns(void *argument) {
    uint64_t self = (uintptr_t)argument;
    for (int i = 0; i < TURNS; i++) {
        expect(pthread_mutex_lock(&counted), 0, "pthread_mutex_lock");
        while (turn % THREADS != self)
            expect(pthread_cond_wait(&turned, &counted), 0, "pthread_cond_wait");
        turn++;
        expect(pthread_cond_broadcast(&turned), 0, "pthread_cond_broadcast");
        expect(pthread_mutex_unlock(&counted), 0, "pthread_mutex_unlock");
    }
    return NULL;
}

static void *ends_with_both(void *argument) {
    (void)argument;
    expect(pthread_mutex_unlock(&checked), EPERM, "pthread_mutex_unlock by another thread");
    expect(pthread_mutex_trylock(&checked), EBUSY, "pthread_mutex_trylock by another thread");
    struct timespec until = soon(20000000);
    expect(pthread_mutex_timedlock(&checked, &until), ETIMEDOUT, "pthread_mutex_timedlock by another thread");
    expect(pthread_mutex_lock(&left), 0, "pthread_mutex_lock of the robust one");
    return NULL;
}

static void run(void *(*work)(void *)) {
    pthread_t threads[THREADS];
    for (uintptr_t i = 0; i < THREADS; i++)
        expect(pthread_create(&threads[i], NULL, work, (void *)i), 0, "pthread_create");
    for (int i = 0; i < THREADS; i++)
        expect(pthread_join(threads[i], NULL), 0, "pthread_join");
}

int main(void) {
    prepare(&counted, PTHREAD_MUTEX_NORMAL, PTHREAD_MUTEX_STALLED);
    run(counts);
    printf("%llu of %d\n", (unsigned long long)count, THREADS * TURNS);
    run(takes_turns);
    printf("%llu turns\n", (unsigned long long)turn);

    prepare(&checked, PTHREAD_MUTEX_ERRORCHECK, PTHREAD_MUTEX_STALLED);
    prepare(&left, PTHREAD_MUTEX_ERRORCHECK, PTHREAD_MUTEX_ROBUST);
    expect(pthread_mutex_lock(&checked), 0, "pthread_mutex_lock");
    expect(pthread_mutex_lock(&checked), EDEADLK, "pthread_mutex_lock twice");
    pthread_t thread;
    expect(pthread_create(&thread, NULL, ends_with_both, NULL), 0, "pthread_create");
    expect(pthread_join(thread, NULL), 0, "pthread_join");
    expect(pthread_mutex_unlock(&checked), 0, "pthread_mutex_unlock");
    expect(pthread_mutex_lock(&left), EOWNERDEAD, "pthread_mutex_lock of what is left");
    expect(pthread_mutex_consistent(&left), 0, "pthread_mutex_consistent");
    expect(pthread_mutex_unlock(&left), 0, "pthread_mutex_unlock");
    expect(pthread_mutex_lock(&left), 0, "pthread_mutex_lock of what is mended");
    expect(pthread_mutex_unlock(&left), 0, "pthread_mutex_unlock");
    printf("errors and owners are as they should be\n");
    return 0;
}
