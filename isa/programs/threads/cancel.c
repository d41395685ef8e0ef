// Cancellation: of a thread blocked in read, in a condition variable, in nanosleep; deferred while it is disabled; at
// pthread_testcancel; with clean-up handlers, which run in reverse.
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int ends[2];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
static sem_t ready, goes_on;
static unsigned cleaned;

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}

static void clean(void *digit) { cleaned = cleaned * 10 + (unsigned)(uintptr_t)digit; }

static void unlock(void *lock) {
    clean((void *)7);
    check(pthread_mutex_unlock(lock), "unlock");
}

static void *in_read(void *argument) {
    char byte;
    (void)argument;
    pthread_cleanup_push(clean, (void *)1);
    pthread_cleanup_push(clean, (void *)2);
    check(sem_post(&ready), "sem_post");
    if (read(ends[0], &byte, 1) != 0)
        printf("read came back\n");
    pthread_cleanup_pop(0);
    pthread_cleanup_pop(0);
    return NULL;
}

static void *in_wait(void *argument) {
    (void)argument;
    check(pthread_mutex_lock(&mutex), "lock");
    pthread_cleanup_push(unlock, &mutex);
    check(sem_post(&ready), "sem_post");
    for (;;)
        check(pthread_cond_wait(&never, &mutex), "wait");
    pthread_cleanup_pop(0);
    return NULL;
}

static void *in_sleep(void *argument) {
    const struct timespec long_time = {.tv_sec = 1000};
    (void)argument;
    pthread_cleanup_push(clean, (void *)3);
    check(sem_post(&ready), "sem_post");
    nanosleep(&long_time, NULL);
    printf("the sleep is over\n");
    pthread_cleanup_pop(0);
    return NULL;
}

static void *disabled(void *argument) {
    int old;
    (void)argument;
    check(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &old), "setcancelstate");
    check(sem_post(&ready), "sem_post");
    check(sem_wait(&goes_on), "sem_wait");
    pthread_testcancel();
    clean((void *)4);
    check(pthread_setcancelstate(old, NULL), "setcancelstate");
    pthread_testcancel();
    printf("not cancelled\n");
    return NULL;
}

static void *computing(void *argument) {
    volatile uint64_t work = 1;
    (void)argument;
    pthread_cleanup_push(clean, (void *)5);
    check(sem_post(&ready), "sem_post");
    for (;;) {
        for (int i = 0; i < 1000; i++)
            work = work * 3 + 1;
        pthread_testcancel();
    }
    pthread_cleanup_pop(0);
    return NULL;
}

static void *leaves(void *argument) {
    pthread_cleanup_push(clean, (void *)6);
    check(sem_post(&ready), "sem_post");
    pthread_exit(argument);
    pthread_cleanup_pop(0);
    return NULL;
}

static void cancel(void *(*body)(void *), const char *name) {
    pthread_t thread;
    void *result = NULL;
    cleaned = 0;
    check(pthread_create(&thread, NULL, body, (void *)42), "pthread_create");
    check(sem_wait(&ready), "sem_wait");
    if (body != leaves)
        check(pthread_cancel(thread), "pthread_cancel");
    if (body == disabled)
        check(sem_post(&goes_on), "sem_post");
    check(pthread_join(thread, &result), "pthread_join");
    printf("%s: cancelled %d, result %ld, cleaned %u\n", name, result == PTHREAD_CANCELED,
           result == PTHREAD_CANCELED ? 0 : (long)(intptr_t)result, cleaned);
}

int main(void) {
    check(pipe(ends), "pipe");
    check(sem_init(&ready, 0, 0), "sem_init");
    check(sem_init(&goes_on, 0, 0), "sem_init");
    cancel(in_read, "read");
    cancel(in_wait, "wait");
    check(pthread_mutex_trylock(&mutex), "the mutex of a cancelled thread");
    cancel(in_sleep, "sleep");
    cancel(disabled, "disabled");
    cancel(computing, "computing");
    cancel(leaves, "pthread_exit");
    return 0;
}
