/* What the runtime answers in place of the kernel, or translates: a pointer to where nothing is gives EFAULT, as the
 * kernel's does. Meanwhile another thread polls: under GODWIT_STATE_TURN it asks for captures at any moment. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/sem.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, ROUNDS = 20 };
static const long SET = 8, SIGNAL = SIGUSR1, NONE = 0, MONOTONIC = CLOCK_MONOTONIC, HERE = AT_FDCWD;

#define FAULTS(...) CHECK(syscall(__VA_ARGS__) == -1 && errno == EFAULT)
/* Where qemu-user 7.2 does not know the call, or does not say that it could not write. */
#define FAULTS_OR(error, ...) CHECK(syscall(__VA_ARGS__) == -1 && (errno == EFAULT || errno == (error)))

static atomic_int is_over;

static void *poll_on(void *unused)
{
    volatile unsigned sum = 0;

    while (!is_over)
        sum += 3;
    return unused;
}

static void nothing(int number) { (void)number; }

/* Calls whose arguments are translated on x86-64. */
static void translated(char *pages, void *bad)
{
    const struct stat untouched = {.st_ino = 7};
    struct stat *there = (struct stat *)pages;
    int epoll = epoll_create1(0), set = semget(IPC_PRIVATE, 1, 0600);

    CHECK(epoll >= 0 && set >= 0);
    FAULTS(SYS_fstat, 0L, bad);
    FAULTS(SYS_newfstatat, HERE, "/", bad, NONE);
    FAULTS(SYS_epoll_ctl, (long)epoll, (long)EPOLL_CTL_ADD, 0L, bad);
    FAULTS_OR(ENOSYS, SYS_openat2, HERE, "/", bad, 24L);
    FAULTS(SYS_semctl, (long)set, NONE, (long)IPC_STAT, bad);
    FAULTS(SYS_semctl, (long)set, NONE, (long)IPC_SET, bad);
    *there = untouched;
    CHECK(syscall(SYS_newfstatat, HERE, "/nowhere", there, NONE) == -1 && errno == ENOENT && there->st_ino == 7);
    CHECK(!semctl(set, 0, IPC_RMID) && !close(epoll));
}

/* The kernel, or the runtime in its place, has to say how much of the time was left, and cannot. */
static void interrupted(void *bad)
{
    struct timespec time = {5, 0};
    struct itimerval soon = {{0, 1000}, {0, 1000}}, never = {{0, 0}, {0, 0}};

    CHECK(!setitimer(ITIMER_REAL, &soon, 0));
    for (int i = 0; i < ROUNDS; i++)
        FAULTS_OR(EINTR, SYS_nanosleep, &time, bad);
    CHECK(!setitimer(ITIMER_REAL, &never, 0));
}

static void answered(void *bad)
{
    static long in_data[16];
    struct pollfd none = {-1, 0, 0};

    for (int i = 0; i < ROUNDS; i++) {
        FAULTS(SYS_rt_sigaction, SIGNAL, bad, NONE, SET);
        FAULTS(SYS_rt_sigaction, SIGNAL, NONE, bad, SET);
        FAULTS(SYS_rt_sigprocmask, (long)SIG_BLOCK, bad, NONE, SET);
        FAULTS(SYS_rt_sigprocmask, (long)SIG_BLOCK, NONE, bad, SET);
        FAULTS(SYS_rt_sigpending, bad, SET);
        FAULTS(SYS_sigaltstack, bad, NONE);
        FAULTS(SYS_sigaltstack, NONE, bad);
        FAULTS(SYS_rt_sigsuspend, bad, SET);
        FAULTS(SYS_rt_sigtimedwait, bad, NONE, 0, SET);
        FAULTS(SYS_timer_create, MONOTONIC, bad, in_data);
        FAULTS(SYS_ppoll, &none, 1L, bad, NONE, SET);
        FAULTS(SYS_signalfd4, -1L, bad, SET, NONE);
        FAULTS_OR(ENOSYS, SYS_get_robust_list, NONE, bad, in_data);
        FAULTS(SYS_clock_gettime, MONOTONIC, bad);
    }
}

/* The kernel cannot clear this word when the thread ends, and says nothing. */
static void *end_with_bad_word(void *number)
{
    *(atomic_int *)number = (int)syscall(SYS_set_tid_address, (void *)8);
    syscall(SYS_exit, 0);
    return 0;
}

static void end_a_thread(void)
{
    static atomic_int number;
    pthread_t thread;

    CHECK(!pthread_create(&thread, 0, end_with_bad_word, &number));
    while (!number || !syscall(SYS_tgkill, getpid(), number, 0))
        ;
    CHECK(errno == ESRCH);
}

int main(void)
{
    static long in_data[16];
    char *pages = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = {.sa_handler = nothing};
    pthread_t other;

    CHECK(pages != MAP_FAILED && !mprotect(pages + PAGE, PAGE, PROT_NONE));
    CHECK(!sigaction(SIGALRM, &action, 0) && !pthread_create(&other, 0, poll_on, 0));
    void *bad[] = {(void *)8, pages + PAGE, pages + PAGE - 4, (void *)-4096L};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        answered(bad[i]);
        translated(pages, bad[i]);
        interrupted(bad[i]);
    }
    end_a_thread();
    FAULTS(SYS_timer_create, MONOTONIC, NONE, pages + PAGE);
    FAULTS(SYS_timer_create, MONOTONIC, NONE, (void *)8);
    /* And where something is, in the data and at the end of a page. */
    for (long *good = in_data;; good = (long *)(pages + PAGE) - 4) {
        CHECK(!syscall(SYS_rt_sigprocmask, (long)SIG_BLOCK, NONE, good, SET));
        CHECK(!syscall(SYS_rt_sigaction, SIGNAL, NONE, good, SET) && !syscall(SYS_rt_sigaction, SIGNAL, good, NONE, SET));
        CHECK(!syscall(SYS_sigaltstack, NONE, good));
        if (good != in_data)
            break;
    }
    int *number = (int *)(pages + PAGE) - 1;
    CHECK(!syscall(SYS_timer_create, MONOTONIC, NONE, number) && !syscall(SYS_timer_delete, *number));
    is_over = 1;
    CHECK(!pthread_join(other, 0));
    return finish();
}
