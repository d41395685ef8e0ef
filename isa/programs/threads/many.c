// As many threads at once as the first argument says (48 if there is none): all meet, half of them end, the others wait
// to be let go, while new ones take the places of those that ended.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { MOST = 2000 };

static pthread_t threads[MOST];
static pthread_barrier_t barrier;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t go = PTHREAD_COND_INITIALIZER;
static uint64_t sum;
static int may_go;
static _Thread_local uint64_t mine;

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}

static void add(uint64_t value) {
    check(pthread_mutex_lock(&mutex), "lock");
    sum += value;
    check(pthread_mutex_unlock(&mutex), "unlock");
}

static void *thread(void *argument) {
    uint64_t id = (uintptr_t)argument;
    uint64_t local[4] = {id, id * 3, id * 5, id * 7};
    int result = pthread_barrier_wait(&barrier);
    check(result == PTHREAD_BARRIER_SERIAL_THREAD ? 0 : result, "barrier");
    mine += local[id & 3];
    add(mine);
    if (id % 2 == 0)
        return (void *)(uintptr_t)mine;
    check(pthread_mutex_lock(&mutex), "lock");
    while (!may_go)
        check(pthread_cond_wait(&go, &mutex), "wait");
    check(pthread_mutex_unlock(&mutex), "unlock");
    return (void *)(uintptr_t)(mine + local[1]);
}

static void *late(void *argument) {
    mine += (uintptr_t)argument * 11;
    add(mine);
    return (void *)(uintptr_t)mine;
}

int main(int argc, char **argv) {
    int count = argc > 1 ? atoi(argv[1]) : 48;
    uint64_t results = 0;
    pthread_attr_t attributes;
    void *result;

    if (count < 2 || count > MOST)
        return 2;
    check(pthread_attr_init(&attributes), "attributes");
    check(pthread_attr_setstacksize(&attributes, 256 << 10), "stack size");
    check(pthread_barrier_init(&barrier, NULL, (unsigned)count), "barrier");
    for (int i = 0; i < count; i++)
        check(pthread_create(&threads[i], &attributes, thread, (void *)(uintptr_t)i), "create");
    for (int i = 0; i < count; i += 2) {
        check(pthread_join(threads[i], &result), "join");
        results += (uintptr_t)result;
        check(pthread_create(&threads[i], &attributes, late, (void *)(uintptr_t)i), "create");
    }
    check(pthread_mutex_lock(&mutex), "lock");
    may_go = 1;
    check(pthread_cond_broadcast(&go), "broadcast");
    check(pthread_mutex_unlock(&mutex), "unlock");
    for (int i = 0; i < count; i++) {
        check(pthread_join(threads[i], &result), "join");
        results = results * 31 + (uintptr_t)result;
    }
    printf("%d threads: sum %llu, results %llx\n", count, (unsigned long long)sum, (unsigned long long)results);
    return 0;
}
