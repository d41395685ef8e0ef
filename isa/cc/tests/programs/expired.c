/* Timers that expire while the program is being captured: none is lost, and none fires twice.
 *
 *   expired        goes on until it is captured, by the signal that a thread sends itself (SIGUSR2)
 *
 * Timers of a microsecond expire again at once when their signal is taken. And the capture cannot end before this
 * program wants it to: main is in the handler of a fault, which is never captured, until a timer has expired whose
 * signal is another thread's that has parked. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

enum { PAGE = 4096, LIBRARY = 256, CONTINUATION = 24, SLOT = 64 << 20 };

static atomic_int notified, stays, begun;
static pthread_t worker;
static timer_t to_thread, at_once;
static char *page;

static void notify(union sigval value) { notified += value.sival_int; }

/* Has the thread given up its frames, and so parked? Its continuation pointer has left the buffer's begin by then
 * (isa/ABI.md, sections 3 and 4). */
static int has_parked(const char *block)
{
    uint64_t at = (uint64_t)*(char *volatile *)(block + CONTINUATION);

    return at % (SLOT / 4) > 64 << 10;
}

static void *work(void *unused)
{
    volatile unsigned sum = 0;

    begun = 1;
    while (stays)
        sum += 3;
    return unused;
}

static int has_expired(timer_t timer)
{
    struct itimerspec left;

    CHECK(!timer_gettime(timer, &left));
    return !left.it_value.tv_sec && !left.it_value.tv_nsec;
}

static void fault(int number, siginfo_t *information, void *context)
{
    struct itimerspec soon = {.it_value.tv_nsec = 20000000};

    (void)number, (void)information, (void)context;
    CHECK(!pthread_kill(worker, SIGUSR2));
    /* The thread of the timer was made before the worker: its slot is the one below. */
    while (!has_parked((char *)worker - LIBRARY) || !has_parked((char *)worker - LIBRARY - SLOT))
        ;
    CHECK(!timer_settime(to_thread, 0, &soon, 0) && !timer_settime(at_once, 0, &soon, 0));
    while (!has_expired(to_thread) || !has_expired(at_once))
        ;
    CHECK(!mprotect(page, PAGE, PROT_READ | PROT_WRITE));
}

static timer_t make(clockid_t clock, int signal, long nanoseconds)
{
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = signal};
    struct itimerspec setting = {.it_value.tv_nsec = nanoseconds, .it_interval.tv_nsec = nanoseconds};
    timer_t timer;

    CHECK(!timer_create(clock, &event, &timer) && !timer_settime(timer, 0, &setting, 0));
    return timer;
}

/* How many of a signal come; the time-out is for one that does not. */
static int come(int signal, int most, siginfo_t *last, int seconds)
{
    sigset_t set;
    int count = 0;

    sigemptyset(&set);
    sigaddset(&set, signal);
    while (count < most && sigtimedwait(&set, last, &(struct timespec){seconds, 0}) == signal)
        count++;
    return count;
}

int main(void)
{
    struct itimerval fast = {{0, 1}, {0, 1}}, slow = {{1000, 0}, {1000, 0}}, left;
    struct sigevent event = {.sigev_notify = SIGEV_THREAD, .sigev_notify_function = notify, .sigev_value.sival_int = 1};
    struct sigaction action = {.sa_sigaction = fault, .sa_flags = SA_SIGINFO};
    struct itimerspec once = {.it_value.tv_nsec = 1}, never = {};
    timer_t monotonic, real, expired;
    siginfo_t information;
    sigset_t all;

    sigfillset(&all);
    sigdelset(&all, SIGSEGV);
    CHECK(!sigprocmask(SIG_BLOCK, &all, 0) && !sigaction(SIGSEGV, &action, 0));
    page = mmap(0, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    CHECK(!timer_create(CLOCK_MONOTONIC, &event, &to_thread));
    stays = 1;
    CHECK(!pthread_create(&worker, 0, work, 0));
    while (!begun)
        ;

    CHECK(!setitimer(ITIMER_REAL, &fast, 0));
    CHECK(!setitimer(ITIMER_VIRTUAL, &slow, 0) && !setitimer(ITIMER_PROF, &slow, 0));
    monotonic = make(CLOCK_MONOTONIC, SIGRTMIN + 1, 1000);
    real = make(CLOCK_REALTIME, SIGRTMIN + 2, 1000);
    expired = make(CLOCK_MONOTONIC, SIGRTMIN + 3, 1000);
    CHECK(!timer_settime(expired, 0, &once, 0));
    at_once = make(CLOCK_MONOTONIC, SIGRTMIN + 4, 1000);
    CHECK(!timer_settime(at_once, 0, &never, 0) && come(SIGRTMIN + 4, 1, &information, 0) <= 1);

    *(volatile char *)page = 1;
    /* Captured here. */
    stays = 0;
    CHECK(!pthread_join(worker, 0));

    CHECK(come(SIGALRM, 3, &information, 20) == 3);
    CHECK(!getitimer(ITIMER_REAL, &left) && left.it_interval.tv_usec == 1);
    CHECK(!getitimer(ITIMER_VIRTUAL, &left) && left.it_value.tv_sec > 900 && left.it_interval.tv_sec == 1000);
    CHECK(!getitimer(ITIMER_PROF, &left) && left.it_value.tv_sec > 900 && left.it_interval.tv_sec == 1000);
    CHECK(come(SIGRTMIN + 1, 1, &information, 20) == 1 && information.si_code == SI_TIMER);
    /* It has expired again and again before the capture. */
    CHECK(information.si_overrun > 0 && timer_getoverrun(monotonic) == information.si_overrun);
    CHECK(come(SIGRTMIN + 1, 3, &information, 20) == 3);
    CHECK(!timer_settime(monotonic, 0, &once, 0) && timer_getoverrun(monotonic) == 0);
    CHECK(come(SIGRTMIN + 2, 3, &information, 20) == 3 && timer_getoverrun(real) == information.si_overrun);
    CHECK(come(SIGRTMIN + 3, 2, &information, 1) == 1);
    CHECK(come(SIGRTMIN + 4, 2, &information, 1) == 1);
    for (int i = 0; i < 2000 && !notified; i++)
        nanosleep(&(struct timespec){0, 10000000}, 0);
    CHECK(notified == 1);
    return finish();
}
