/* The runtime's own signal: programs that can move cannot have it, and it is in no mask of theirs. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { RESERVED = 58 };

static volatile sig_atomic_t seen;
static void count(int signal) { seen += signal; }

int main(void)
{
    struct sigaction action = {.sa_handler = count}, old;
    struct sigevent event = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = RESERVED};
    sigset_t set;
    timer_t timer;

    CHECK(SIGRTMAX == RESERVED - 1);
    CHECK(sigaction(RESERVED, &action, 0) == -1 && errno == EINVAL);
    CHECK(sigaction(RESERVED, 0, &old) == -1 && errno == EINVAL);
    CHECK(kill(getpid(), RESERVED) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_kill, getpid(), RESERVED | 1L << 32) == -1 && errno == EINVAL);
    CHECK(raise(RESERVED) == -1 && errno == EINVAL);
    CHECK(sigqueue(getpid(), RESERVED, (union sigval){0}) == -1 && errno == EINVAL);
    siginfo_t information = {.si_signo = RESERVED, .si_code = SI_QUEUE};
    CHECK(syscall(SYS_rt_sigqueueinfo, getpid(), RESERVED, &information) == -1 && errno == EINVAL);
    CHECK(syscall(SYS_pidfd_send_signal, -1, RESERVED, &information, 0) == -1 && errno == EINVAL);
    CHECK(timer_create(CLOCK_MONOTONIC, &event, &timer) == -1 && errno == EINVAL);
    sigfillset(&set);
    CHECK(!sigprocmask(SIG_BLOCK, &set, 0) && !sigprocmask(SIG_BLOCK, 0, &set));
    CHECK(sigismember(&set, RESERVED) == 0 && sigismember(&set, SIGRTMAX) == 1 && sigismember(&set, SIGUSR1) == 1);
    sigfillset(&action.sa_mask);
    CHECK(!sigaction(SIGRTMAX, &action, 0) && !sigaction(SIGRTMAX, 0, &old));
    CHECK(sigismember(&old.sa_mask, RESERVED) == 0 && sigismember(&old.sa_mask, SIGUSR1) == 1);
    CHECK(!raise(SIGRTMAX) && seen == 0);
    sigemptyset(&set);
    CHECK(!sigprocmask(SIG_SETMASK, &set, 0) && seen == SIGRTMAX);
    return finish();
}
