// Which calls a handler ends with EINTR and which go on, with SA_RESTART and without: as signal(7) has it. The handler
// of a timer that repeats comes into each; what must go on is ended by a byte that the handler writes at its third
// call.
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <semaphore.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t calls, to_write = -1;
static sem_t semaphore;
static int ends[2];

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static void tick(int number) {
    int kept = errno;
    (void)number;
    if (++calls == 3 && to_write >= 0) {
        if (write(to_write, "t", 1) != 1)
            abort();
        sem_post(&semaphore);
    }
    errno = kept;
}

static void arm(int flags) {
    struct sigaction action;
    struct itimerval interval = {{0, 3000}, {0, 3000}};
    memset(&action, 0, sizeof action);
    action.sa_handler = tick;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    calls = 0;
    check(sigaction(SIGALRM, &action, NULL) == 0, "sigaction");
    check(setitimer(ITIMER_REAL, &interval, NULL) == 0, "setitimer");
}

static void disarm(void) {
    struct itimerval none = {{0, 0}, {0, 0}};
    check(setitimer(ITIMER_REAL, &none, NULL) == 0, "setitimer");
}

static void show(const char *what, int flags, long result, int error) {
    disarm();
    printf("%s %s: %s\n", what, flags ? "with SA_RESTART" : "without",
           result >= 0      ? "went on"
           : error == EINTR ? "EINTR"
                            : "something else");
}

static void drain(void) {
    struct pollfd ready = {ends[0], POLLIN, 0};
    char byte;
    while (poll(&ready, 1, 0) == 1)
        check(read(ends[0], &byte, 1) == 1, "read");
    while (sem_trywait(&semaphore) == 0)
        ;
}

#define ATTEMPT(what, call)                                                                                            \
    do {                                                                                                               \
        drain();                                                                                                       \
        arm(flags);                                                                                                    \
        errno = 0;                                                                                                     \
        long result = (call);                                                                                          \
        show(what, flags, result, errno);                                                                              \
    } while (0)

static void all(int flags) {
    struct pollfd ready = {ends[0], POLLIN, 0};
    struct timespec ten = {10, 0}, left = {0, 0};
    struct timeval some = {10, 0};
    struct epoll_event event = {EPOLLIN, {0}};
    sigset_t usr1, none;
    fd_set readable;
    char byte;
    int poller = epoll_create1(0);
    check(poller >= 0 && epoll_ctl(poller, EPOLL_CTL_ADD, ends[0], &event) == 0, "epoll");
    sigemptyset(&none);
    sigemptyset(&usr1);
    sigaddset(&usr1, SIGUSR1);

    to_write = ends[1];
    ATTEMPT("read", read(ends[0], &byte, 1));
    ATTEMPT("sem_wait", sem_wait(&semaphore));
    ATTEMPT("poll", poll(&ready, 1, 10000));
    ATTEMPT("ppoll", ppoll(&ready, 1, &ten, &none));
    FD_ZERO(&readable);
    FD_SET(ends[0], &readable);
    ATTEMPT("select", select(ends[0] + 1, &readable, NULL, NULL, &some));
    FD_SET(ends[0], &readable);
    ATTEMPT("pselect", pselect(ends[0] + 1, &readable, NULL, NULL, &ten, &none));
    ATTEMPT("epoll_wait", epoll_wait(poller, &event, 1, 10000));
    ATTEMPT("epoll_pwait", epoll_pwait(poller, &event, 1, 10000, &none));
    ATTEMPT("nanosleep", nanosleep(&ten, &left));
    printf("left %d\n", left.tv_sec == 9);
    left.tv_sec = 0;
    ATTEMPT("clock_nanosleep", -(long)(errno = clock_nanosleep(CLOCK_MONOTONIC, 0, &ten, &left)));
    printf("left %d\n", left.tv_sec == 9);
    // musl's own waits on, whatever the kernel says.
    ATTEMPT("sigtimedwait", syscall(SYS_rt_sigtimedwait, &usr1, NULL, &ten, 8));
    ATTEMPT("sigsuspend", sigsuspend(&none));
    ATTEMPT("pause", pause());
    to_write = -1;
    check(close(poller) == 0, "close");

    // The child ends when it reads its byte, which the handler writes, or when there is nobody who could.
    int child_ends[2], status;
    check(pipe(child_ends) == 0, "pipe");
    pid_t child = fork();
    if (child == 0) {
        close(child_ends[1]);
        _exit(read(child_ends[0], &byte, 1) == 1 ? 7 : 8);
    }
    check(child > 0, "fork");
    to_write = child_ends[1];
    ATTEMPT("waitpid", waitpid(child, &status, 0));
    if (!flags) {
        check(write(child_ends[1], "x", 1) == 1, "write");
        check(waitpid(child, &status, 0) == child, "waitpid");
    }
    printf("child %d\n", WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    to_write = -1;
    check(close(child_ends[0]) == 0 && close(child_ends[1]) == 0, "close");
}

int main(void) {
    check(pipe(ends) == 0 && sem_init(&semaphore, 0, 0) == 0, "pipe");
    all(0);
    all(SA_RESTART);
    return 0;
}
