// A process with a child that has ended and was not waited for, and one that writes into memory which both share. SIGUSR1 stops
// the second child, SIGUSR2 continues it.
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static pid_t helper;

static void on_signal(int signal) { kill(helper, signal == SIGUSR1 ? SIGSTOP : SIGCONT); }

static void fail(const char *what) {
    printf("wrong: %s\n", what);
    exit(1);
}

static void pause_for(long milliseconds) {
    struct timespec left = {0, milliseconds * 1000000};
    while (nanosleep(&left, &left) != 0) {
    }
}

int main(void) {
    volatile unsigned long *shared = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        fail("no shared memory");
    pid_t ended = fork();
    if (ended == 0)
        _exit(7);
    helper = fork();
    if (helper == 0)
        for (;; shared[0]++)
            pause_for(1);
    if (ended < 0 || helper < 0)
        fail("no children");
    signal(SIGUSR1, on_signal);
    signal(SIGUSR2, on_signal);
    for (unsigned long turn = 1;; turn++) {
        unsigned long before = shared[0];
        siginfo_t found = {0};
        if (waitid(P_PID, ended, &found, WEXITED | WNOWAIT) != 0 || found.si_status != 7)
            fail("the child that has ended");
        shared[1 + turn % 1000 * 100] = turn;
        while (shared[0] == before)
            pause_for(5);
        printf("turn %lu of process %d\n", turn, getpid());
        fflush(stdout);
    }
}
