// How threads end: detached, by pthread_exit deep in calls, one after another that each makes its successor, the main
// thread before the others, and at last all by exit while some are blocked for good.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { DETACHED = 24, CHAIN = 40 };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER, never = PTHREAD_COND_INITIALIZER;
static int finished, blocked;
static uint64_t sum;
static pthread_t first;

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}

static void *detached(void *argument) {
    check(pthread_detach(pthread_self()), "detach");
    check(pthread_mutex_lock(&mutex), "lock");
    sum += (uintptr_t)argument;
    finished++;
    check(pthread_cond_signal(&changed), "signal");
    check(pthread_mutex_unlock(&mutex), "unlock");
    return NULL;
}

static void leave(uint64_t value, int depth) {
    volatile uint64_t room[4] = {value, value + 1, value + 2, value + 3};
    if (depth == 0)
        pthread_exit((void *)(uintptr_t)room[1]);
    leave(room[depth & 3] + 1, depth - 1);
}

static void *deep(void *argument) {
    leave((uintptr_t)argument, 50);
    return NULL;
}

// Each makes the next and ends with what that one ended with.
static void *chain(void *argument) {
    uintptr_t left = (uintptr_t)argument;
    pthread_t next;
    void *result = (void *)1;
    if (left > 0) {
        check(pthread_create(&next, NULL, chain, (void *)(left - 1)), "create");
        check(pthread_join(next, &result), "join");
    }
    return (void *)((uintptr_t)result * 3 % 1000003);
}

static void tell_blocked(void) {
    blocked++;
    check(pthread_cond_broadcast(&changed), "broadcast");
}

static void *waits(void *unused) {
    (void)unused;
    check(pthread_mutex_lock(&mutex), "lock");
    tell_blocked();
    for (;;)
        check(pthread_cond_wait(&never, &mutex), "wait");
}

static void *sleeps(void *unused) {
    const struct timespec long_time = {.tv_sec = 10000};
    (void)unused;
    check(pthread_mutex_lock(&mutex), "lock");
    tell_blocked();
    check(pthread_mutex_unlock(&mutex), "unlock");
    for (;;)
        nanosleep(&long_time, NULL);
}

// Goes on when the main thread has ended.
static void *last(void *unused) {
    pthread_t threads[2];
    void *result = NULL;
    (void)unused;
    check(pthread_join(first, &result), "join of the main thread");
    printf("the main thread ended with %d\n", (int)(uintptr_t)result);
    check(pthread_create(&threads[0], NULL, waits, NULL), "create");
    check(pthread_create(&threads[1], NULL, sleeps, NULL), "create");
    check(pthread_mutex_lock(&mutex), "lock");
    while (blocked < 2)
        check(pthread_cond_wait(&changed, &mutex), "wait");
    check(pthread_mutex_unlock(&mutex), "unlock");
    printf("%d are blocked\n", blocked);
    exit(0);
}

int main(int argc, char **argv) {
    pthread_t thread;
    void *result = NULL;
    (void)argc, (void)argv;

    for (uintptr_t i = 0; i < DETACHED; i++)
        check(pthread_create(&thread, NULL, detached, (void *)i), "create");
    check(pthread_mutex_lock(&mutex), "lock");
    while (finished < DETACHED)
        check(pthread_cond_wait(&changed, &mutex), "wait");
    check(pthread_mutex_unlock(&mutex), "unlock");
    printf("detached: %d, sum %llu\n", finished, (unsigned long long)sum);

    check(pthread_create(&thread, NULL, deep, (void *)7), "create");
    check(pthread_join(thread, &result), "join");
    printf("deep: %d\n", (int)(uintptr_t)result);
    check(pthread_create(&thread, NULL, chain, (void *)CHAIN), "create");
    check(pthread_join(thread, &result), "join");
    printf("chain: %d\n", (int)(uintptr_t)result);

    first = pthread_self();
    check(pthread_create(&thread, NULL, last, NULL), "create");
    pthread_exit((void *)9);
}
