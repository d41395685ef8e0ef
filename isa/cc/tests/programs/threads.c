/* Threads: every kind of object that they meet at, cancellation wherever a thread may be, their ends. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <threads.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 8, ROUNDS = 2000 };

static _Thread_local int own = 7;
static _Thread_local char own_zero[100];
static _Thread_local long long own_aligned __attribute__((aligned(64))) = 9;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t condition = PTHREAD_COND_INITIALIZER;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_barrier_t barrier;
static pthread_spinlock_t spin;
static pthread_key_t key;
static sem_t semaphore;
static atomic_int destroyed, initialised, serial;
static int counted, spun, read_sum, turn;

static void initialise(void) { initialised++; }
static void destroy(void *value) { destroyed += value == &own; }

static void *work(void *argument)
{
    intptr_t number = (intptr_t)argument;

    CHECK(own == 7 && own_aligned == 9 && (uintptr_t)&own_aligned % 64 == 0);
    for (unsigned i = 0; i < sizeof own_zero; i++)
        CHECK(own_zero[i] == 0);
    own = (int)number;
    memset(own_zero, (int)number + 1, sizeof own_zero);
    pthread_once(&once, initialise);
    pthread_setspecific(key, number == 0 ? &own : argument);
    if (pthread_barrier_wait(&barrier) == PTHREAD_BARRIER_SERIAL_THREAD)
        serial++;
    for (int i = 0; i < ROUNDS; i++) {
        pthread_mutex_lock(&mutex);
        counted++;
        pthread_mutex_unlock(&mutex);
        pthread_spin_lock(&spin);
        spun++;
        pthread_spin_unlock(&spin);
        if (i % 100 == number) {
            pthread_rwlock_wrlock(&rwlock);
            read_sum++;
            pthread_rwlock_unlock(&rwlock);
        } else {
            pthread_rwlock_rdlock(&rwlock);
            CHECK(read_sum >= 0);
            pthread_rwlock_unlock(&rwlock);
        }
    }
    pthread_mutex_lock(&mutex);
    while (turn != number)
        pthread_cond_wait(&condition, &mutex);
    turn++;
    pthread_cond_broadcast(&condition);
    pthread_mutex_unlock(&mutex);
    CHECK(own == (int)number && own_zero[99] == (int)number + 1);
    errno = (int)number;
    sem_post(&semaphore);
    if (number % 2)
        pthread_exit((void *)(number * 10));
    return (void *)(number * 10);
}

static void together(void)
{
    pthread_t threads[THREADS];
    void *result;

    CHECK(!pthread_barrier_init(&barrier, 0, THREADS) && !pthread_key_create(&key, destroy));
    CHECK(!sem_init(&semaphore, 0, 0) && !pthread_spin_init(&spin, 0));
    own = 1234;
    for (intptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_create(&threads[i], 0, work, (void *)i));
    for (int i = 0; i < THREADS; i++)
        sem_wait(&semaphore);
    for (intptr_t i = 0; i < THREADS; i++)
        CHECK(!pthread_join(threads[i], &result) && result == (void *)(i * 10));
    CHECK(counted == THREADS * ROUNDS && spun == counted && read_sum == THREADS * ROUNDS / 100);
    CHECK(initialised == 1 && serial == 1 && turn == THREADS && own == 1234);
    /* The key's value is its thread's own variable, which another thread sees elsewhere. */
    CHECK(destroyed == 0 || destroyed == 1);
}

static int pipe_ends[2];
static atomic_int cleaned, ready;

static void clean(void *unused)
{
    (void)unused;
    cleaned++;
}

static void *blocked_in_read(void *unused)
{
    char byte;
    (void)unused;
    pthread_cleanup_push(clean, 0);
    ready = 1;
    if (read(pipe_ends[0], &byte, 1) != 0)
        CHECK(!"the read came back");
    pthread_cleanup_pop(0);
    return 0;
}

static void *blocked_in_condition(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&mutex);
    pthread_cleanup_push(clean, 0);
    ready = 1;
    for (;;)
        pthread_cond_wait(&condition, &mutex);
    pthread_cleanup_pop(0);
    return 0;
}

static void unlock(void *locked) { pthread_mutex_unlock(locked); }

static void *blocked_in_sleep(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&mutex);
    pthread_cleanup_push(unlock, &mutex);
    pthread_cleanup_push(clean, 0);
    ready = 1;
    sleep(1000);
    pthread_cleanup_pop(0);
    pthread_cleanup_pop(0);
    return 0;
}

static void *computing(void *unused)
{
    volatile unsigned long number = 0;
    (void)unused;
    pthread_setcanceltype(PTHREAD_CANCEL_ASYNCHRONOUS, 0);
    pthread_cleanup_push(clean, 0);
    ready = 1;
    for (;;)
        number++;
    pthread_cleanup_pop(0);
    return 0;
}

static void *disabled(void *unused)
{
    char byte = 0;
    (void)unused;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, 0);
    ready = 1;
    CHECK(read(pipe_ends[0], &byte, 1) == 1 && byte == 'x');
    pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, 0);
    pthread_cleanup_push(clean, 0);
    pthread_testcancel();
    CHECK(!"the thread went on");
    pthread_cleanup_pop(0);
    return 0;
}

static void cancelled(void *(*body)(void *), int write_first)
{
    pthread_t thread;
    void *result = 0;
    int before = cleaned;

    ready = 0;
    CHECK(!pthread_create(&thread, 0, body, 0));
    while (!ready)
        sched_yield();
    CHECK(!pthread_cancel(thread));
    if (write_first)
        CHECK(write(pipe_ends[1], "x", 1) == 1);
    CHECK(!pthread_join(thread, &result) && result == PTHREAD_CANCELED && cleaned == before + 1);
}

static atomic_int detached_ran;
static void *detached(void *unused)
{
    (void)unused;
    detached_ran++;
    return 0;
}

static void ends(void)
{
    pthread_attr_t attributes;
    pthread_t thread;
    struct timespec soon;
    size_t size = 0;

    pthread_attr_init(&attributes);
    CHECK(!pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED));
    CHECK(!pthread_attr_setstacksize(&attributes, 1 << 20) && !pthread_attr_getstacksize(&attributes, &size));
    CHECK(size == 1 << 20);
    for (int i = 0; i < 100; i++) {
        CHECK(!pthread_create(&thread, &attributes, detached, 0));
        while (detached_ran != i + 1)
            sched_yield();
    }
    for (int i = 0; i < 300; i++)
        CHECK(!pthread_create(&thread, 0, detached, 0) && !pthread_join(thread, 0));
    CHECK(detached_ran == 400);
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec += 2000000;
    if (soon.tv_nsec >= 1000000000)
        soon.tv_sec++, soon.tv_nsec -= 1000000000;
    pthread_mutex_lock(&mutex);
    CHECK(pthread_cond_timedwait(&condition, &mutex, &soon) == ETIMEDOUT);
    pthread_mutex_unlock(&mutex);
    CHECK(sem_timedwait(&semaphore, &soon) == -1 && errno == ETIMEDOUT);
}

static int c11(void *argument) { return *(int *)argument + 1; }

static void *owner(void *locked)
{
    pthread_mutex_lock(locked);
    return 0;
}

static void kinds(void)
{
    pthread_mutexattr_t attributes;
    pthread_mutex_t other;
    pthread_t thread;
    thrd_t thread11;
    int value = 41, result;

    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE);
    CHECK(!pthread_mutex_init(&other, &attributes) && !pthread_mutex_lock(&other) && !pthread_mutex_lock(&other));
    CHECK(!pthread_mutex_unlock(&other) && !pthread_mutex_unlock(&other) && pthread_mutex_unlock(&other) == EPERM);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK);
    CHECK(!pthread_mutex_init(&other, &attributes) && !pthread_mutex_lock(&other) && pthread_mutex_lock(&other) == EDEADLK);
    pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_NORMAL);
    /* qemu's user mode has no robust lists. */
    if (!pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST)) {
        CHECK(!pthread_mutex_init(&other, &attributes) && !pthread_create(&thread, 0, owner, &other) && !pthread_join(thread, 0));
        CHECK(pthread_mutex_lock(&other) == EOWNERDEAD && !pthread_mutex_consistent(&other) && !pthread_mutex_unlock(&other));
    }
    CHECK(thrd_create(&thread11, c11, &value) == thrd_success && thrd_join(thread11, &result) == thrd_success && result == 42);
}

int main(void)
{
    CHECK(!pipe(pipe_ends));
    together();
    cancelled(blocked_in_read, 0);
    cancelled(computing, 0);
    cancelled(disabled, 1);
    cancelled(blocked_in_sleep, 0);
    cancelled(blocked_in_condition, 0);
    pthread_mutex_unlock(&mutex);
    ends();
    kinds();
    return finish();
}
