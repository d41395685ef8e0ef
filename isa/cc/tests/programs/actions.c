/* Threads change the action of a signal at once. A fault meets one action whole, and a thread that waits for another
 * one lets it run.
 *
 *   actions              faults, while another thread changes their action
 *   actions real-time    the same call by two threads on one processor, where the one that waits comes before the other
 *                        (needs the rights of root) */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, FAULTS = 20000, MEETINGS = 2000 };

static atomic_int begun, is_over;
static int torn, handled;
static char *page;

/* Each of the two handlers has one of these signals in the mask of its action, and not the other. */
static void expect(int blocked, int open)
{
    sigset_t mask;

    CHECK(!sigprocmask(SIG_BLOCK, 0, &mask) && !mprotect(page, PAGE, PROT_READ | PROT_WRITE));
    torn += !sigismember(&mask, blocked) || sigismember(&mask, open);
    handled++;
}

static void one(int number) { (void)number, expect(SIGUSR1, SIGUSR2); }
static void other(int number) { (void)number, expect(SIGUSR2, SIGUSR1); }

static void listen_by_turns(int signal)
{
    struct sigaction first = {.sa_handler = one}, second = {.sa_handler = other};

    sigaddset(&first.sa_mask, SIGUSR1);
    sigaddset(&second.sa_mask, SIGUSR2);
    CHECK(!sigaction(signal, &first, 0) && !sigaction(signal, &second, 0));
}

static void *change(void *unused)
{
    while (!is_over)
        listen_by_turns(SIGSEGV);
    return unused;
}

static void fault_beside_changes(void)
{
    pthread_t thread;

    page = mmap(0, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    listen_by_turns(SIGSEGV);
    CHECK(!pthread_create(&thread, 0, change, 0));
    for (int i = 0; i < FAULTS; i++) {
        CHECK(!mprotect(page, PAGE, PROT_READ));
        *(volatile char *)page = 1;
    }
    is_over = 1;
    CHECK(!pthread_join(thread, 0) && handled == FAULTS && torn == 0);
}

static void take_turns(int priority)
{
    struct sched_param parameter = {.sched_priority = priority};

    CHECK(!syscall(SYS_sched_setscheduler, 0, SCHED_FIFO, &parameter));
}

/* Wakes at any moment of what the other thread does, and comes before it. */
static void *come_between(void *unused)
{
    take_turns(2);
    begun = 1;
    for (int i = 0; i < MEETINGS; i++) {
        nanosleep(&(struct timespec){0, 20000 + i}, 0);
        listen_by_turns(SIGUSR1);
    }
    is_over = 1;
    return unused;
}

static void meet_on_one_processor(void)
{
    cpu_set_t processor;
    pthread_t thread;
    unsigned number;

    CHECK(!syscall(SYS_getcpu, &number, 0, 0));
    CPU_ZERO(&processor);
    CPU_SET(number, &processor);
    CHECK(!sched_setaffinity(0, sizeof processor, &processor));
    CHECK(!pthread_create(&thread, 0, come_between, 0));
    while (!begun)
        ;
    take_turns(1);
    while (!is_over)
        listen_by_turns(SIGUSR1);
    CHECK(!pthread_join(thread, 0));
}

int main(int count, char **arguments)
{
    (void)arguments;
    if (count > 1)
        meet_on_one_processor();
    else
        fault_beside_changes();
    return finish();
}
