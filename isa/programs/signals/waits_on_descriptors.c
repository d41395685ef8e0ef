// Time-outs of calls that wait for descriptors, while another thread computes: each ends, and not before its time.
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <time.h>
#include <unistd.h>

enum { MILLISECONDS = 60, MILLION = 1000000, BILLION = 1000000000 };

static volatile int stop;
static volatile uint64_t result;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static int64_t now(void) {
    struct timespec time;
    check(clock_gettime(CLOCK_MONOTONIC, &time) == 0, "clock_gettime");
    return (int64_t)time.tv_sec * BILLION + time.tv_nsec;
}

static void *compute(void *unused) {
    uint64_t value = 1;
    while (!stop)
        value = value * 6364136223846793005u + 1;
    result = value;
    return unused;
}

static void show(const char *what, int64_t began, int got) {
    printf("%s: %d, %s\n", what, got,
           now() - began >= (int64_t)MILLISECONDS * MILLION - MILLION ? "in time" : "too early");
}

int main(void) {
    int ends[2], poller = epoll_create1(0);
    pthread_t thread;
    check(poller >= 0 && pipe(ends) == 0, "pipe");
    struct epoll_event event = {.events = EPOLLIN};
    struct pollfd ready = {ends[0], POLLIN, 0};
    struct timespec time = {0, (long)MILLISECONDS * MILLION};
    sigset_t none;
    fd_set readable;
    sigemptyset(&none);
    check(epoll_ctl(poller, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll_ctl");
    check(pthread_create(&thread, NULL, compute, NULL) == 0, "pthread_create");

    int64_t began = now();
    show("poll", began, poll(&ready, 1, MILLISECONDS));
    began = now();
    show("epoll_wait", began, epoll_wait(poller, &event, 1, MILLISECONDS));
    began = now();
    show("epoll_pwait", began, epoll_pwait(poller, &event, 1, MILLISECONDS, &none));
    FD_ZERO(&readable);
    FD_SET(ends[0], &readable);
    began = now();
    show("pselect", began, pselect(ends[0] + 1, &readable, NULL, NULL, &time, &none));

    stop = 1;
    check(pthread_join(thread, NULL) == 0, "pthread_join");
    printf("computed %d\n", result != 0);
    return 0;
}
