// Signals and threads: each thread has its own mask, pthread_kill goes to one, a signal to the process goes to the
// thread that does not block it, and a thread waits for signals with sigwait.
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { THREADS = 3, SIGNALS = 20 };

static _Thread_local volatile sig_atomic_t mine;
static sem_t ready, handled;
static volatile sig_atomic_t stop[THREADS];

static void check(int result, const char *what) {
    if (result != 0) {
        printf("%s gives %d\n", what, result);
        exit(1);
    }
}

static void count(int number) {
    (void)number;
    mine++;
    sem_post(&handled);
}

static void *waits_for_handlers(void *argument) {
    uintptr_t id = (uintptr_t)argument;
    volatile uint64_t work = id;
    check(sem_post(&ready), "sem_post");
    while (!stop[id])
        work = work * 3 + 1;
    return (void *)(uintptr_t)mine;
}

static void *waits_for_signals(void *argument) {
    sigset_t *set = argument;
    uintptr_t sum = 0;
    check(sem_post(&ready), "sem_post");
    for (;;) {
        int number;
        check(sigwait(set, &number), "sigwait");
        if (number == SIGTERM)
            return (void *)sum;
        sum++;
        check(sem_post(&handled), "sem_post");
    }
}

static void wait_for(sem_t *semaphore) {
    // A handler in this thread may interrupt it.
    while (sem_wait(semaphore) != 0)
        ;
}

int main(void) {
    pthread_t threads[THREADS], waiter;
    struct sigaction action;
    sigset_t set, now;
    void *result;

    check(sem_init(&ready, 0, 0), "sem_init");
    check(sem_init(&handled, 0, 0), "sem_init");
    memset(&action, 0, sizeof action);
    action.sa_handler = count;
    action.sa_flags = SA_RESTART;
    sigemptyset(&action.sa_mask);
    check(sigaction(SIGUSR1, &action, NULL), "sigaction");
    for (uintptr_t i = 0; i < THREADS; i++)
        check(pthread_create(&threads[i], NULL, waits_for_handlers, (void *)i), "pthread_create");
    for (int i = 0; i < THREADS; i++)
        wait_for(&ready);
    for (int i = 0; i < SIGNALS; i++) {
        check(pthread_kill(threads[i % THREADS], SIGUSR1), "pthread_kill");
        wait_for(&handled);
    }
    for (int i = 0; i < THREADS; i++) {
        stop[i] = 1;
        check(pthread_join(threads[i], &result), "pthread_join");
        printf("thread %d handled %d\n", i, (int)(uintptr_t)result);
    }
    printf("main handled %d\n", (int)mine);

    sigemptyset(&set);
    sigaddset(&set, SIGUSR2);
    sigaddset(&set, SIGTERM);
    check(pthread_sigmask(SIG_BLOCK, &set, NULL), "pthread_sigmask");
    check(pthread_create(&waiter, NULL, waits_for_signals, &set), "pthread_create");
    wait_for(&ready);
    for (int i = 0; i < SIGNALS; i++) {
        check(kill(getpid(), SIGUSR2), "kill");
        wait_for(&handled);
    }
    check(kill(getpid(), SIGTERM), "kill");
    check(pthread_join(waiter, &result), "pthread_join");
    check(pthread_sigmask(SIG_BLOCK, NULL, &now), "pthread_sigmask");
    printf("waiter took %d, main blocks %d %d\n", (int)(uintptr_t)result, sigismember(&now, SIGUSR2),
           sigismember(&now, SIGUSR1));
    return 0;
}
