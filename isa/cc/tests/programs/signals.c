/* Signals: handlers, masks, alternate stacks, timers, waiting for them, and jumps out of them. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t seen, number, value, on_alternate;
static char alternate[65536];

static void count(int signal) { seen++, number = signal; }

static void inform(int signal, siginfo_t *information, void *context)
{
    char here;

    (void)context;
    seen++;
    number = signal;
    value = information->si_value.sival_int;
    on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
}

static void install(int signal, void (*handler)(int), int flags)
{
    struct sigaction action = {.sa_handler = handler, .sa_flags = flags}, old;

    CHECK(!sigaction(signal, &action, 0) && !sigaction(signal, 0, &old));
    CHECK(old.sa_handler == handler && (old.sa_flags & ~SA_RESTART) == (flags & ~SA_RESTART));
}

static void handlers(void)
{
    struct sigaction action = {.sa_sigaction = inform, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    sigset_t set, old, pending;

    install(SIGUSR1, count, 0);
    CHECK(!raise(SIGUSR1) && seen == 1 && number == SIGUSR1);
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, &set, &old) && !kill(getpid(), SIGUSR1) && seen == 1);
    CHECK(!sigpending(&pending) && sigismember(&pending, SIGUSR1) && !sigismember(&pending, SIGUSR2));
    CHECK(sigsuspend(&old) == -1 && errno == EINTR && seen == 2);
    CHECK(!sigprocmask(SIG_SETMASK, &old, 0));
    CHECK(!sigaltstack(&(stack_t){.ss_sp = alternate, .ss_size = sizeof alternate}, 0));
    CHECK(!sigaction(SIGUSR2, &action, 0) && !sigqueue(getpid(), SIGUSR2, (union sigval){.sival_int = 99}));
    CHECK(seen == 3 && number == SIGUSR2 && value == 99 && on_alternate);
    CHECK(sigaction(SIGKILL, &action, 0) == -1 && errno == EINVAL);
}

static void waiting(void)
{
    sigset_t set;
    siginfo_t information;
    int signal;

    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigaddset(&set, SIGRTMIN + 3);
    CHECK(!pthread_sigmask(SIG_BLOCK, &set, 0) && !kill(getpid(), SIGUSR1));
    CHECK(!sigwait(&set, &signal) && signal == SIGUSR1);
    CHECK(!sigqueue(getpid(), SIGRTMIN + 3, (union sigval){.sival_int = 5}));
    CHECK(sigwaitinfo(&set, &information) == SIGRTMIN + 3 && information.si_value.sival_int == 5);
    CHECK(information.si_pid == getpid() && information.si_code == SI_QUEUE);
    CHECK(sigtimedwait(&set, 0, &(struct timespec){0, 1000000}) == -1 && errno == EAGAIN);
    CHECK(!pthread_sigmask(SIG_UNBLOCK, &set, 0));
}

static volatile sig_atomic_t expired;
static void notify(union sigval argument)
{
    (void)argument;
    expired++;
}

static void timers(void)
{
    /* Again and again where a call is to be interrupted: the first may come before the call. */
    struct itimerval often = {.it_value.tv_usec = 3000, .it_interval.tv_usec = 3000}, never = {};
    timer_t timer;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1, .sigev_value.sival_int = 3};
    sigset_t blocked, old;
    int ends[2], before;
    char byte;

    CHECK(!pipe(ends));
    install(SIGALRM, count, 0);
    before = seen;
    CHECK(!setitimer(ITIMER_REAL, &often, 0));
    CHECK(read(ends[0], &byte, 1) == -1 && errno == EINTR && seen > before);
    CHECK(!setitimer(ITIMER_REAL, &never, 0));
    /* With SA_RESTART the handler runs and the read goes on: the child's byte ends it. */
    install(SIGALRM, count, SA_RESTART);
    before = seen;
    pid_t child = fork();
    if (!child) {
        usleep(20000);
        kill(getppid(), SIGALRM);
        usleep(20000);
        _exit(write(ends[1], "x", 1) != 1);
    }
    CHECK(read(ends[0], &byte, 1) == 1 && byte == 'x' && seen == before + 1);
    int status;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));

    install(SIGUSR1, count, 0);
    before = seen;
    sigemptyset(&blocked);
    sigaddset(&blocked, SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, &blocked, &old));
    CHECK(!timer_create(CLOCK_MONOTONIC, &event, &timer));
    CHECK(!timer_settime(timer, 0, &(struct itimerspec){.it_value.tv_nsec = 1000000}, 0));
    CHECK(sigsuspend(&old) == -1 && errno == EINTR && seen == before + 1);
    CHECK(!timer_delete(timer) && !sigprocmask(SIG_SETMASK, &old, 0));
    event = (struct sigevent){.sigev_notify = SIGEV_THREAD, .sigev_notify_function = notify};
    CHECK(!timer_create(CLOCK_REALTIME, &event, &timer));
    CHECK(!timer_settime(timer, 0, &(struct itimerspec){.it_value.tv_nsec = 1000000}, 0));
    while (!expired)
        usleep(100);
    CHECK(!timer_delete(timer));
    struct timespec left;
    install(SIGALRM, count, 0);
    CHECK(!setitimer(ITIMER_REAL, &often, 0));
    CHECK(nanosleep(&(struct timespec){1000, 0}, &left) == -1 && errno == EINTR && left.tv_sec >= 900);
    CHECK(!setitimer(ITIMER_REAL, &never, 0));
}

static jmp_buf outer, inner;
static sigjmp_buf from_handler;
static void jump_out(int signal) { siglongjmp(from_handler, signal); }

static int deep(int depth)
{
    volatile char room[100];
    room[depth % 100] = (char)depth;
    if (depth == 0)
        longjmp(outer, 0);
    return deep(depth - 1) + room[depth % 100];
}

static void jumps(void)
{
    volatile int rounds = 0;
    int result = setjmp(outer);
    sigset_t mask;

    if (rounds++ == 0)
        deep(1000);
    CHECK(result == 1 && rounds == 2);
    for (volatile int i = 1; i < 5; i++)
        if ((result = setjmp(inner)) == 0)
            longjmp(inner, i * 11);
        else
            CHECK(result == i * 11);
    install(SIGUSR1, jump_out, 0);
    for (volatile int i = 0; i < 3; i++) {
        result = sigsetjmp(from_handler, 1);
        if (!result) {
            raise(SIGUSR1);
            CHECK(!"raise came back");
        }
        CHECK(result == SIGUSR1 && !sigprocmask(SIG_BLOCK, 0, &mask) && !sigismember(&mask, SIGUSR1));
    }
    if (!sigsetjmp(from_handler, 0))
        raise(SIGUSR1);
    CHECK(!sigprocmask(SIG_BLOCK, 0, &mask) && sigismember(&mask, SIGUSR1));
    sigemptyset(&mask);
    CHECK(!sigprocmask(SIG_SETMASK, &mask, 0));
}

static void deaths(void)
{
    int status;
    pid_t child = fork();

    if (!child) {
        struct rlimit none = {0, 0};
        setrlimit(RLIMIT_CORE, &none);
        abort();
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    child = fork();
    if (!child) {
        signal(SIGTERM, SIG_DFL);
        raise(SIGTERM);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

int main(void)
{
    handlers();
    waiting();
    timers();
    jumps();
    deaths();
    return finish();
}
