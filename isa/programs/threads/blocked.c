// Threads that are blocked when the main thread goes on: in read on a pipe, in epoll_wait, in a futex, in nanosleep, in
// a mutex, in a condition variable with a deadline, in poll and in join. The main thread lets them go one by one.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

// Not from linux/futex.h, which is no part of a C library.
enum { FUTEX_WAIT_PRIVATE = 128, FUTEX_WAKE_PRIVATE = 129 };

static int to_reader[2], to_poller[2], event;
static _Atomic uint32_t word;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER, other = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t never = PTHREAD_COND_INITIALIZER;
static sem_t ready;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static int64_t now(void) {
    struct timespec time;
    check(clock_gettime(CLOCK_MONOTONIC, &time) == 0, "clock_gettime");
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void *reader(void *argument) {
    char text[16] = {0};
    (void)argument;
    check(sem_post(&ready) == 0, "sem_post");
    ssize_t got = read(to_reader[0], text, sizeof text - 1);
    check(got == 5, "read");
    return text[4] == '!' ? (void *)1 : NULL;
}

static void *epoller(void *argument) {
    struct epoll_event wanted = {.events = EPOLLIN, .data.u64 = 0x123456789abcdef0}, got = {0};
    int set = epoll_create1(0);
    uint64_t value = 0;
    (void)argument;
    check(set >= 0 && epoll_ctl(set, EPOLL_CTL_ADD, event, &wanted) == 0, "epoll_ctl");
    check(sem_post(&ready) == 0, "sem_post");
    check(epoll_wait(set, &got, 1, -1) == 1, "epoll_wait");
    check(read(event, &value, sizeof value) == sizeof value, "read of an eventfd");
    close(set);
    return got.data.u64 == wanted.data.u64 && value == 9 ? (void *)1 : NULL;
}

static void *futex_waiter(void *argument) {
    (void)argument;
    check(sem_post(&ready) == 0, "sem_post");
    while (atomic_load(&word) == 0) {
        long result = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, NULL, NULL, 0);
        check(result == 0 || errno == EAGAIN || errno == EINTR, "futex");
    }
    return (void *)(uintptr_t)(atomic_load(&word) == 77);
}

// Sleeps at least as long as it was told, whatever happens meanwhile.
static void *sleeper(void *argument) {
    struct timespec time = {.tv_nsec = 60000000};
    int64_t start = now();
    (void)argument;
    check(sem_post(&ready) == 0, "sem_post");
    while (nanosleep(&time, &time) != 0)
        check(errno == EINTR, "nanosleep");
    return (void *)(uintptr_t)(now() - start >= 60000000);
}

static void *locker(void *argument) {
    (void)argument;
    check(sem_post(&ready) == 0, "sem_post");
    check(pthread_mutex_lock(&mutex) == 0, "lock");
    check(pthread_mutex_unlock(&mutex) == 0, "unlock");
    return (void *)1;
}

static void *timed(void *argument) {
    struct timespec deadline;
    int result = 0;
    (void)argument;
    check(clock_gettime(CLOCK_REALTIME, &deadline) == 0, "clock_gettime");
    deadline.tv_nsec += 50000000;
    deadline.tv_sec += deadline.tv_nsec / 1000000000;
    deadline.tv_nsec %= 1000000000;
    check(sem_post(&ready) == 0, "sem_post");
    check(pthread_mutex_lock(&other) == 0, "lock");
    while (result == 0)
        result = pthread_cond_timedwait(&never, &other, &deadline);
    check(pthread_mutex_unlock(&other) == 0, "unlock");
    return (void *)(uintptr_t)(result == ETIMEDOUT);
}

static void *poller(void *argument) {
    struct pollfd one = {.fd = to_poller[0], .events = POLLIN};
    (void)argument;
    check(sem_post(&ready) == 0, "sem_post");
    check(poll(&one, 1, -1) == 1, "poll");
    return (void *)(uintptr_t)((one.revents & POLLHUP) != 0);
}

static void *joiner(void *argument) {
    void *result = NULL;
    check(sem_post(&ready) == 0, "sem_post");
    check(pthread_join(*(pthread_t *)argument, &result) == 0, "pthread_join");
    return result;
}

int main(void) {
    enum { READER, EPOLLER, FUTEX, SLEEPER, LOCKER, TIMED, POLLER, JOINER, COUNT };
    static const char *const names[COUNT] = {"read",  "epoll_wait", "futex", "nanosleep",
                                             "mutex", "timedwait",  "poll",  "join"};
    void *(*const bodies[COUNT])(void *) = {reader, epoller, futex_waiter, sleeper, locker, timed, poller, joiner};
    pthread_t threads[COUNT];
    uint64_t value = 9, spent = 1;

    event = eventfd(0, 0);
    check(event >= 0 && pipe(to_reader) == 0 && pipe(to_poller) == 0 && sem_init(&ready, 0, 0) == 0, "setup");
    check(pthread_mutex_lock(&mutex) == 0, "lock");
    for (int i = 0; i < COUNT; i++)
        check(pthread_create(&threads[i], NULL, bodies[i], &threads[READER]) == 0, "pthread_create");
    for (int i = 0; i < COUNT; i++)
        while (sem_wait(&ready) != 0)
            check(errno == EINTR, "sem_wait");
    // Work, during which they are most likely blocked; nothing depends on it.
    for (int i = 0; i < 200000; i++)
        spent = spent * 6364136223846793005U + (uint64_t)i;
    printf("all are there, %016llx\n", (unsigned long long)spent);
    check(write(to_reader[1], "hell!", 5) == 5 && write(event, &value, sizeof value) == sizeof value, "write");
    atomic_store(&word, 77);
    check(syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0) >= 0, "futex");
    check(pthread_mutex_unlock(&mutex) == 0, "unlock");
    check(close(to_poller[1]) == 0, "close");
    for (int i = 0; i < COUNT; i++) {
        void *result = NULL;
        // The reader is joined by another thread, which hands its result on.
        if (i == READER)
            continue;
        check(pthread_join(threads[i], &result) == 0, "pthread_join");
        printf("%s: %d\n", names[i], (int)(uintptr_t)result);
    }
    return 0;
}
