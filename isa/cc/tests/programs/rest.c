/* A process that waits in every way there is, and a child of it. Each line of standard input makes all of them do one
 * step, so between two lines whoever has started it knows where each thread is. What it prints is the same, however often
 * it rests meanwhile. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { MILLION = 1000000 };

static atomic_bool over;
static sem_t done;
static int to_reader[2], to_epoll, in_handler[2], to_child[2], from_child[2];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int turn;
static atomic_long alarms, expired, ticks, slept;
static pthread_t waiter, handled;
static _Thread_local long steps_of_thread;

static long now(clockid_t clock)
{
    struct timespec time;
    CHECK(!clock_gettime(clock, &time));
    return time.tv_sec * 1000000000L + time.tv_nsec;
}

/* Checks its own result: what a register or a local loses shows. */
static void *compute(void *seed)
{
    uint64_t first = (uint64_t)(uintptr_t)seed, forward = first;
    while (!over) {
        for (int i = 0; i < 1000; i++)
            forward = forward * 6364136223846793005u + 1442695040888963407u;
        for (int i = 0; i < 1000; i++)
            forward = (forward - 1442695040888963407u) * 13877824140714322085u;
        CHECK(forward == first);
    }
    return 0;
}

static void *reads(void *unused)
{
    char byte;
    while (read(to_reader[0], &byte, 1) == 1 && ++steps_of_thread)
        sem_post(&done);
    return (void *)(steps_of_thread + (long)unused);
}

static void *waits_for_condition(void *unused)
{
    pthread_mutex_lock(&lock);
    for (int seen = 0; turn >= 0;) {
        while (turn == seen)
            pthread_cond_wait(&changed, &lock);
        if (turn >= 0) {
            seen = turn;
            steps_of_thread++;
            sem_post(&done);
        }
    }
    pthread_mutex_unlock(&lock);
    return (void *)(steps_of_thread + (long)unused);
}

static void *sleeps(void *unused)
{
    long before = now(CLOCK_MONOTONIC);
    while (!over) {
        CHECK(!nanosleep(&(struct timespec){.tv_nsec = MILLION}, 0));
        long after = now(CLOCK_MONOTONIC);
        CHECK(after - before >= MILLION);
        before = after;
        slept++;
    }
    return unused;
}

/* An eventfd and a timer, with data of 64 bits. */
static void *polls(void *unused)
{
    int set = epoll_create1(EPOLL_CLOEXEC), timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
    struct itimerspec every = {{0, 2 * MILLION}, {0, 2 * MILLION}};
    struct epoll_event event = {EPOLLIN, {.u64 = 0x1122334455667788}}, tick = {EPOLLIN, {.u64 = UINT64_MAX}};
    CHECK(!epoll_ctl(set, EPOLL_CTL_ADD, to_epoll, &event) && !epoll_ctl(set, EPOLL_CTL_ADD, timer, &tick));
    CHECK(!timerfd_settime(timer, 0, &every, 0));
    while (!over) {
        struct epoll_event found[2];
        int count = epoll_wait(set, found, 2, -1);
        CHECK(count > 0);
        for (int i = 0; i < count; i++) {
            uint64_t number;
            int is_tick = found[i].data.u64 == UINT64_MAX;
            CHECK(is_tick || found[i].data.u64 == 0x1122334455667788);
            CHECK(read(is_tick ? timer : to_epoll, &number, sizeof number) == sizeof number);
            if (is_tick) {
                ticks++;
            } else {
                CHECK(number == 1);
                steps_of_thread++;
                sem_post(&done);
            }
        }
    }
    close(set);
    close(timer);
    return (void *)(steps_of_thread + (long)unused);
}

static void *waits_for_signal(void *unused)
{
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    while (!over) {
        siginfo_t information;
        CHECK(sigwaitinfo(&set, &information) == SIGUSR1 && information.si_pid == getpid());
        steps_of_thread++;
        sem_post(&done);
    }
    return (void *)(steps_of_thread + (long)unused);
}

/* Its handler waits for a byte itself, so the process rests while the handler runs. */
static void on_usr2(int signal)
{
    char byte;
    CHECK(signal == SIGUSR2 && read(in_handler[0], &byte, 1) == 1 && byte == 'x');
    sem_post(&done);
}

static void *is_interrupted(void *unused)
{
    sigset_t all;
    sigfillset(&all);
    sigdelset(&all, SIGUSR2);
    while (!over)
        CHECK(sigsuspend(&all) == -1 && errno == EINTR);
    return unused;
}

static void on_alarm(int signal) { alarms += signal == SIGALRM; }
static void on_expiry(int signal, siginfo_t *information, void *context)
{
    CHECK(signal == SIGRTMIN && information->si_value.sival_int == 77 && context);
    expired++;
}

/* The child of a fork has one thread and answers over pipes. */
static void child(void)
{
    unsigned char byte;
    close(to_child[1]);
    close(from_child[0]);
    while (read(to_child[0], &byte, 1) == 1) {
        byte = (unsigned char)(byte * 3 + 1);
        if (write(from_child[1], &byte, 1) != 1)
            _exit(2);
    }
    _exit(7);
}

static void step(int number)
{
    uint64_t one = 1;
    unsigned char byte = (unsigned char)number;
    CHECK(write(to_reader[1], "r", 1) == 1);
    CHECK(write(to_epoll, &one, sizeof one) == sizeof one);
    CHECK(!pthread_kill(waiter, SIGUSR1));
    CHECK(write(in_handler[1], "x", 1) == 1);
    pthread_mutex_lock(&lock);
    turn = number;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < 5; i++)
        while (sem_wait(&done))
            CHECK(errno == EINTR);
    CHECK(write(to_child[1], &byte, 1) == 1 && read(from_child[0], &byte, 1) == 1);
    CHECK(byte == (unsigned char)(number * 3 + 1));
    long seen_alarms = alarms, seen_expired = expired, seen_ticks = ticks, seen_sleeps = slept;
    /* All kinds of timers go on. */
    while (alarms == seen_alarms || expired == seen_expired || ticks == seen_ticks || slept == seen_sleeps)
        nanosleep(&(struct timespec){.tv_nsec = MILLION}, 0);
    printf("step %d\n", number);
    fflush(stdout);
}

int main(void)
{
    struct sigaction on_usr = {.sa_handler = on_usr2}, alarm = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
    struct sigaction expiry = {.sa_sigaction = on_expiry, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGRTMIN, .sigev_value.sival_int = 77};
    pthread_t threads[8];
    void *(*const functions[8])(void *) = {compute, compute, reads, waits_for_condition, sleeps, polls, waits_for_signal,
                                           is_interrupted};
    sigset_t timers, old;
    timer_t timer;
    char line[100];
    int number = 0, status;

    CHECK(!sem_init(&done, 0, 0) && !pipe(to_reader) && !pipe(in_handler) && !pipe(to_child) && !pipe(from_child));
    CHECK((to_epoll = eventfd(0, EFD_CLOEXEC)) >= 0);
    pid_t forked = fork();
    if (!forked)
        child();
    close(to_child[0]);
    close(from_child[1]);
    sigemptyset(&timers);
    sigaddset(&timers, SIGALRM);
    sigaddset(&timers, SIGRTMIN);
    sigaddset(&timers, SIGUSR1);
    sigaddset(&timers, SIGUSR2);
    /* The threads leave the timers' signals to the main thread. */
    CHECK(!sigaction(SIGUSR2, &on_usr, 0) && !sigaction(SIGALRM, &alarm, 0) && !sigaction(SIGRTMIN, &expiry, 0));
    CHECK(!pthread_sigmask(SIG_BLOCK, &timers, &old));
    for (int i = 0; i < 8; i++)
        CHECK(!pthread_create(&threads[i], 0, functions[i], i < 2 ? (void *)(uintptr_t)(i + 5) : 0));
    waiter = threads[6];
    handled = threads[7];
    sigdelset(&timers, SIGUSR1);
    sigdelset(&timers, SIGUSR2);
    CHECK(!pthread_sigmask(SIG_UNBLOCK, &timers, 0));
    CHECK(!setitimer(ITIMER_REAL, &(struct itimerval){{0, 3000}, {0, 3000}}, 0));
    CHECK(!timer_create(CLOCK_MONOTONIC, &event, &timer));
    CHECK(!timer_settime(timer, 0, &(struct itimerspec){{0, 4 * MILLION}, {0, 4 * MILLION}}, 0));
    CHECK(!pthread_kill(handled, SIGUSR2));

    printf("ready\n");
    fflush(stdout);
    for (ssize_t got; (got = read(0, line, sizeof line)) > 0;)
        for (ssize_t i = 0; i < got; i++) {
            if (line[i] == '\n') {
                step(++number);
                CHECK(!pthread_kill(handled, SIGUSR2));
            }
        }

    over = 1;
    close(to_reader[1]);
    close(to_child[1]);
    CHECK(waitpid(forked, &status, 0) == forked && WIFEXITED(status) && WEXITSTATUS(status) == 7);
    CHECK(write(in_handler[1], "x", 1) == 1);
    CHECK(write(to_epoll, &(uint64_t){1}, 8) == 8 && !pthread_kill(waiter, SIGUSR1));
    pthread_mutex_lock(&lock);
    turn = -1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    for (int i = 0; i < 8; i++) {
        void *result;
        CHECK(!pthread_join(threads[i], &result));
        if (i == 2 || i == 3)
            CHECK((long)result == number);
        if (i == 5 || i == 6)
            CHECK((long)result == number || (long)result == number + 1);
    }
    return finish();
}
