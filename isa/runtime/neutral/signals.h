// The part of the kernel interface that is about signals, timers and clocks; called by neutral/syscall.c only. Results
// as the kernel's.
#ifndef GW_NEUTRAL_SIGNALS_H
#define GW_NEUTRAL_SIGNALS_H

#include "gw/signals.h"

#define NOSUSPEND __attribute__((annotate("gw_nosuspend"), noinline))

// isa/ABI.md: what __gw_kernel returns for a call that did not take effect.
#define GW_ABANDONED (-4096L)
// What a call of __gw_syscall_cp returns that cancellation came before.
#define GW_CANCELLED (-4097L)

enum { EINTR = 4, EAGAIN = 11, ENOMEM = 12, EFAULT = 14, EPERM = 1, EINVAL = 22 };

// Kernel calls; the generic numbers.
enum {
    NR_epoll_pwait = 22,
    NR_io_pgetevents = 292,
    NR_io_getevents = 4,
    NR_pselect6 = 72,
    NR_ppoll = 73,
    NR_signalfd4 = 74,
    NR_futex = 98,
    NR_nanosleep = 101,
    NR_timer_create = 107,
    NR_timer_gettime = 108,
    NR_timer_getoverrun = 109,
    NR_timer_settime = 110,
    NR_timer_delete = 111,
    NR_clock_gettime = 113,
    NR_clock_nanosleep = 115,
    NR_kill = 129,
    NR_tkill = 130,
    NR_tgkill = 131,
    NR_sigaltstack = 132,
    NR_rt_sigsuspend = 133,
    NR_rt_sigaction = 134,
    NR_rt_sigprocmask = 135,
    NR_rt_sigpending = 136,
    NR_rt_sigtimedwait = 137,
    NR_rt_sigqueueinfo = 138,
    NR_semtimedop = 192,
    NR_clone = 220,
    NR_rt_tgsigqueueinfo = 240,
    NR_recvmmsg = 243,
    NR_pidfd_send_signal = 424,
    NR_epoll_pwait2 = 441,
};

struct gw_time {
    long seconds;
    long nanoseconds;
};

// Private: the kernel's numbers in a siginfo become the program's.
void __gw_name_origin(void *information);
long __gw_kernel(long nr, long a, long b, long c, long d, long e, long f);
__attribute__((preserve_all)) void __gw_poll_slow(void);

static inline struct gw_thread *gw_self(void) { return (struct gw_thread *)__builtin_thread_pointer(); }

// A poll: whatever was asked for before is done when this is over.
static inline void gw_settle(void) {
    while ((gw_self()->request & (GW_REQUEST_CAPTURE | GW_REQUEST_SIGNAL)) && gw_self()->uninterrupted == 0)
        __gw_poll_slow();
}

// Is there something that has to come first? Calls that are answered here are given up for it like the kernel's.
static inline int gw_must_settle(void) {
    return (gw_self()->request & (GW_REQUEST_CAPTURE | GW_REQUEST_SIGNAL)) && gw_self()->uninterrupted == 0;
}

// signals.c
long gw_sigaction(int signal, const void *wanted, void *old, unsigned long size);
long gw_sigprocmask(int how, const uint64_t *wanted, uint64_t *old, unsigned long size);
long gw_sigpending(uint64_t *pending, unsigned long size);
long gw_sigaltstack(const void *wanted, void *old);
void gw_signals_forked(void);
// Is there memory of the program's behind a pointer that it has handed over? Of 8 bytes to a page.
int gw_is_readable(const void *address, unsigned long size);
int gw_is_writable(void *address, unsigned long size);

// timers.c
long gw_timer_create(int clock, const void *event, int *number);
long gw_timer_call(long nr, int number, long b, long c, long d);
long gw_clock_gettime(int clock, struct gw_time *time);
long gw_clock_ahead(int clock);
void gw_name_delivered(struct gw_signal_info *information);
void gw_timers_forked(void);

// waits.c
int gw_is_wait(long nr);
int gw_ends(struct gw_signals *signals, long nr, int entered);
int gw_is_unfounded(const struct gw_signals *signals, long nr, long result);
long gw_waiting_call(volatile int *cancel, long nr, long a, long b, long c, long d, long e, long f);

#endif
