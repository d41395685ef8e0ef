// What the program has said about signals, and the signal that each thread holds. Neutral: part of a state.
//
// The kernel's handler of every signal that the program handles is the runtime's (private/signals.c). It only takes the
// signal down in the thread's page and asks for a poll; there, __gw_deliver (neutral/signals.c) runs the program's
// handler as an ordinary function, which can be captured. While a signal is held the kernel blocks all others in this
// thread, so they stay in the kernel's queue, in their order.
#ifndef GW_SIGNALS_H
#define GW_SIGNALS_H

#include "gw/thread.h"

#define GW_SIGNALS 64
// The runtime's own: it ends kernel calls for a capture. Never blocked, and refused to the program.
#define GW_RESERVED_SIGNAL 58
#define GW_SIGNAL_BYTES 128 // of a siginfo_t
#define GW_TIMERS 128
#define GW_TIMER_BASE (1 << 20) // number of the program's first timer; the kernel counts from 0
#define GW_PENDING 1024

enum {
    GW_SIGILL = 4,
    GW_SIGTRAP = 5,
    GW_SIGBUS = 7,
    GW_SIGFPE = 8,
    GW_SIGKILL = 9,
    GW_SIGSEGV = 11,
    GW_SIGSTOP = 19,
    GW_SIGSYS = 31,
};

static inline uint64_t gw_signal_bit(int signal) { return 1UL << (signal - 1); }

// Those that an instruction raises. They stay unblocked while a signal is held, or a fault would end the process.
#define GW_FAULTS                                                                                                      \
    (gw_signal_bit(GW_SIGILL) | gw_signal_bit(GW_SIGTRAP) | gw_signal_bit(GW_SIGBUS) | gw_signal_bit(GW_SIGFPE) |      \
     gw_signal_bit(GW_SIGSEGV) | gw_signal_bit(GW_SIGSYS))

// What never is in a mask of the program's.
#define GW_NEVER_BLOCKED (gw_signal_bit(GW_SIGKILL) | gw_signal_bit(GW_SIGSTOP) | gw_signal_bit(GW_RESERVED_SIGNAL))

enum { GW_SIG_DFL = 0, GW_SIG_IGN = 1, GW_SIG_HANDLED = 2 /* by the program; for __gw_listen */ };

enum {
    GW_SA_NOCLDSTOP = 1,
    GW_SA_NOCLDWAIT = 2,
    GW_SA_SIGINFO = 4,
    GW_SA_ONSTACK = 0x08000000,
    GW_SA_RESTART = 0x10000000,
    GW_SA_NODEFER = 0x40000000,
};
#define GW_SA_RESETHAND 0x80000000UL

enum { GW_SI_USER = 0, GW_SI_TIMER = -2, GW_SI_TKILL = -6 };

// The beginning of a siginfo_t, which is alike on all sets of 64 bits.
struct gw_signal_info {
    int signal, error, code, padding;
    int origin; // the timer (GW_SI_TIMER), or the process that sent it
    int overrun;
    char rest[GW_SIGNAL_BYTES - 24];
};

struct gw_action {
    uint64_t handler; // GW_SIG_DFL, GW_SIG_IGN or a neutral function
    uint64_t flags;
    uint64_t mask;
    uint64_t known; // not zero: set by the program; else it is what the process was started with
};

#define GW_OVERRUN_OF_KERNEL (-1)

// A timer of the program's. Its number is GW_TIMER_BASE and its place in the table.
struct gw_timer {
    uint32_t used; // 0: no, 1: being made, 2: yes
    int32_t kernel_number;
    int32_t clock;
    int32_t overrun; // of the signal that was delivered last; GW_OVERRUN_OF_KERNEL: the kernel's timer has it
    uint64_t event[8];
    uint64_t setting[4]; // interval and rest, taken down for a state
};

static inline int gw_is_timer(int number) { return number >= GW_TIMER_BASE && number < GW_TIMER_BASE + GW_TIMERS; }

struct gw_pending {
    uint64_t slot; // of the thread that it was sent to; GW_SLOTS: to the process
    char information[GW_SIGNAL_BYTES];
};

// One for the program.
struct gw_signal_table {
    struct gw_action actions[GW_SIGNALS]; // signal n at n - 1
    uint32_t lock;                        // across a kernel call at most (__gw_lock), never across a poll
    uint32_t pending_count;
    // What the program's clocks that count from the machine's start are ahead of the kernel's, in nanoseconds; and
    // what the program's showed when a state was written: CLOCK_MONOTONIC, CLOCK_BOOTTIME.
    int64_t clock_ahead[2];
    int64_t clock_shown[2];
    // Taken down for a state.
    uint64_t interval_timers[3][4];
    struct gw_timer timers[GW_TIMERS];
    struct gw_pending pending[GW_PENDING];
    // At rest: the kernel's number, plus one, of a timer that tells how long it lasts; 0: there is none.
    uint64_t rest_timer;
};
extern struct gw_signal_table __gw_signal_table;

enum gw_interrupted { GW_NOT_INTERRUPTED, GW_RESTARTS, GW_ENDS_WITH_EINTR };

// struct ucontext of arm64: what a handler gets as its third argument, on every set.
struct gw_context {
    uint64_t flags, link;
    uint64_t stack;
    uint32_t stack_flags, padding;
    uint64_t stack_size;
    uint64_t mask[16];
    uint64_t registers[1 + 1 + 31 + 3]; // alignment, fault address, x0 to x30, sp, pc, state
    char reserved[16 + 4096];
};

// One for each thread: the last page of its control quarter.
struct gw_signals {
    uint64_t mask; // the program's
    // A call with a mask of its own (sigsuspend): what the mask is behind the handler, when has_after.
    uint64_t after;
    uint32_t has_after;
    uint32_t interrupted; // enum gw_interrupted, by the first handler since the call began
    uint32_t entered;     // the kernel call that was given up had been begun
    uint32_t held;        // not zero: `information` is of a signal whose handler has not run yet
    uint64_t alternate_stack;
    uint64_t alternate_size; // 0: none
    uint64_t alternate_flags;
    // Where the thread's own data stack ends while the data stack pointer is in an alternate one.
    char *own_stack;
    struct gw_signal_info information;
};
_Static_assert(sizeof(struct gw_signals) <= GW_PAGE, "a page of the control quarter");
_Static_assert(offsetof(struct gw_signals, own_stack) == 56, "isa/state/src/thread.rs");

static inline struct gw_signals *gw_signals_of(const struct gw_thread *thread) {
    return (struct gw_signals *)(gw_quarter_end(thread->slot, GW_CONTROL) - GW_PAGE);
}

// Is the data stack pointer in an alternate stack?
static inline int gw_off_own_stack(const struct gw_thread *thread) {
    uintptr_t at = (uintptr_t)thread->data_stack;
    return at < gw_quarter_begin(thread->slot, GW_DATA_STACK) || at > gw_quarter_end(thread->slot, GW_DATA_STACK);
}

// ss_flags of the alternate stack: in use, not there, or neither.
static inline uint32_t gw_alternate_state(const struct gw_thread *thread) {
    enum { SS_ONSTACK = 1, SS_DISABLE = 2 };
    const struct gw_signals *signals = gw_signals_of(thread);
    uint64_t below_end = signals->alternate_stack + signals->alternate_size - (uint64_t)thread->data_stack;
    if (signals->alternate_size == 0)
        return SS_DISABLE;
    return below_end < signals->alternate_size ? SS_ONSTACK : 0;
}

// What the kernel's mask of a thread has to be.
static inline uint64_t gw_kernel_mask(const struct gw_signals *signals) {
    return (signals->held ? ~(GW_FAULTS & ~signals->mask) : signals->mask) & ~GW_NEVER_BLOCKED;
}

#endif
