/* What the runtime answers in place of the kernel: a pointer to where nothing is gives EFAULT, as the kernel's does. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };
static const long SET = 8, SIGNAL = SIGUSR1, NONE = 0, MONOTONIC = CLOCK_MONOTONIC;

#define FAULTS(...) CHECK(syscall(__VA_ARGS__) == -1 && errno == EFAULT)

int main(void)
{
    static long in_data[16];
    char *pages = mmap(0, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct pollfd none = {-1, 0, 0};

    CHECK(pages != MAP_FAILED && !mprotect(pages + PAGE, PAGE, PROT_NONE));
    void *bad[] = {(void *)8, pages + PAGE, pages + PAGE - 4, (void *)-4096L};
    for (unsigned i = 0; i < sizeof bad / sizeof *bad; i++) {
        FAULTS(SYS_rt_sigaction, SIGNAL, bad[i], NONE, SET);
        FAULTS(SYS_rt_sigaction, SIGNAL, NONE, bad[i], SET);
        FAULTS(SYS_rt_sigprocmask, (long)SIG_BLOCK, bad[i], NONE, SET);
        FAULTS(SYS_rt_sigprocmask, (long)SIG_BLOCK, NONE, bad[i], SET);
        FAULTS(SYS_rt_sigpending, bad[i], SET);
        FAULTS(SYS_sigaltstack, bad[i], NONE);
        FAULTS(SYS_sigaltstack, NONE, bad[i]);
        FAULTS(SYS_rt_sigsuspend, bad[i], SET);
        FAULTS(SYS_rt_sigtimedwait, bad[i], NONE, 0, SET);
        FAULTS(SYS_timer_create, MONOTONIC, bad[i], in_data);
        FAULTS(SYS_ppoll, &none, 1L, bad[i], NONE, SET);
        FAULTS(SYS_signalfd4, -1L, bad[i], SET, NONE);
        FAULTS(SYS_get_robust_list, NONE, bad[i], in_data);
        FAULTS(SYS_clock_gettime, MONOTONIC, bad[i]);
    }
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
    return finish();
}
