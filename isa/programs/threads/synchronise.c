// Threads with mutexes (normal, recursive, error-checking), condition variables, a barrier, a lock for readers and
// writers, once, keys with destructors, join with results, and thread-local variables.
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { THREADS = 4, ITEMS = 200, ROOM = 8 };

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}

// A queue with room for a few, between two makers and two takers.
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t not_full = PTHREAD_COND_INITIALIZER, not_empty = PTHREAD_COND_INITIALIZER;
static uint64_t queue[ROOM];
static unsigned queued, first;

static void put(uint64_t value) {
    check(pthread_mutex_lock(&mutex), "lock");
    while (queued == ROOM)
        check(pthread_cond_wait(&not_full, &mutex), "wait");
    queue[(first + queued++) % ROOM] = value;
    check(pthread_cond_signal(&not_empty), "signal");
    check(pthread_mutex_unlock(&mutex), "unlock");
}

static uint64_t take(void) {
    check(pthread_mutex_lock(&mutex), "lock");
    while (queued == 0)
        check(pthread_cond_wait(&not_empty, &mutex), "wait");
    uint64_t value = queue[first];
    first = (first + 1) % ROOM;
    queued--;
    check(pthread_cond_signal(&not_full), "signal");
    check(pthread_mutex_unlock(&mutex), "unlock");
    return value;
}

static void *maker(void *argument) {
    for (uintptr_t i = 1; i <= ITEMS; i++)
        put(i * (uintptr_t)argument);
    return NULL;
}

static void *taker(void *argument) {
    uint64_t sum = 0;
    (void)argument;
    for (int i = 0; i < ITEMS; i++)
        sum += take();
    return (void *)(uintptr_t)sum;
}

static pthread_barrier_t barrier;
static uint64_t cells[2][THREADS];
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_key_t key;
static int initialised, destroyed;
static _Thread_local uint64_t local = 5;
static pthread_mutex_t recursive;
static uint64_t guarded;
static pthread_rwlock_t rwlock = PTHREAD_RWLOCK_INITIALIZER;
static uint64_t shared;

static void destroy(void *value) {
    check(pthread_mutex_lock(&mutex), "lock");
    destroyed += *(int *)value;
    check(pthread_mutex_unlock(&mutex), "unlock");
    free(value);
}

static void initialise(void) {
    initialised++;
    check(pthread_key_create(&key, destroy), "pthread_key_create");
}

static void add(int depth) {
    check(pthread_mutex_lock(&recursive), "lock");
    guarded++;
    if (depth > 0)
        add(depth - 1);
    check(pthread_mutex_unlock(&recursive), "unlock");
}

static void *stepper(void *argument) {
    uintptr_t id = (uintptr_t)argument;
    check(pthread_once(&once, initialise), "pthread_once");
    int *mine = malloc(sizeof *mine);
    if (!mine)
        exit(3);
    *mine = (int)id + 1;
    check(pthread_setspecific(key, mine), "pthread_setspecific");
    for (int step = 0; step < 30; step++) {
        cells[(step + 1) & 1][id] = cells[step & 1][id] * 3 + cells[step & 1][(id + 1) % THREADS] + id;
        int result = pthread_barrier_wait(&barrier);
        check(result == PTHREAD_BARRIER_SERIAL_THREAD ? 0 : result, "pthread_barrier_wait");
        local += cells[(step + 1) & 1][id] & 7;
        add(step % 5);
        if (step % THREADS == (int)id) {
            check(pthread_rwlock_wrlock(&rwlock), "wrlock");
            shared += local;
            check(pthread_rwlock_unlock(&rwlock), "unlock");
        } else {
            check(pthread_rwlock_rdlock(&rwlock), "rdlock");
            local += shared == UINT64_MAX;
            check(pthread_rwlock_unlock(&rwlock), "unlock");
        }
    }
    if (*(int *)pthread_getspecific(key) != (int)id + 1)
        printf("thread %d has another's value\n", (int)id);
    return (void *)(uintptr_t)local;
}

int main(void) {
    pthread_t threads[THREADS];
    pthread_mutexattr_t attributes;
    pthread_mutex_t checking;
    void *result;

    for (uintptr_t i = 0; i < 2; i++) {
        check(pthread_create(&threads[i], NULL, maker, (void *)(i + 1)), "pthread_create");
        check(pthread_create(&threads[i + 2], NULL, taker, NULL), "pthread_create");
    }
    uint64_t sum = 0;
    for (int i = 0; i < THREADS; i++) {
        check(pthread_join(threads[i], &result), "pthread_join");
        sum += (uintptr_t)result;
    }
    printf("queue %llu\n", (unsigned long long)sum);

    check(pthread_mutexattr_init(&attributes), "init");
    check(pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_RECURSIVE), "settype");
    check(pthread_mutex_init(&recursive, &attributes), "init");
    check(pthread_mutexattr_settype(&attributes, PTHREAD_MUTEX_ERRORCHECK), "settype");
    check(pthread_mutex_init(&checking, &attributes), "init");
    check(pthread_mutex_lock(&checking), "lock");
    printf("locked twice: %d, trylock: %d\n", pthread_mutex_lock(&checking) == EDEADLK,
           pthread_mutex_trylock(&checking) == EBUSY);
    check(pthread_mutex_unlock(&checking), "unlock");

    check(pthread_barrier_init(&barrier, NULL, THREADS), "pthread_barrier_init");
    for (uintptr_t i = 0; i < THREADS; i++)
        cells[0][i] = i + 1;
    for (uintptr_t i = 0; i < THREADS; i++)
        check(pthread_create(&threads[i], NULL, stepper, (void *)i), "pthread_create");
    sum = 0;
    for (int i = 0; i < THREADS; i++) {
        check(pthread_join(threads[i], &result), "pthread_join");
        printf("stepper %d: %llu\n", i, (unsigned long long)(uintptr_t)result);
        sum += cells[0][i];
    }
    printf("cells %016llx, guarded %llu, once %d, destroyed %d, main's local %llu\n", (unsigned long long)sum,
           (unsigned long long)guarded, initialised, destroyed, (unsigned long long)local);
    return 0;
}
