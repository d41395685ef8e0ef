// Kernel calls that wait: with a time-out, which counts from the call's beginning however often the call is issued;
// with a signal mask of their own; and which of all calls a handler ends, as signal(7) has it.
#include "identity.h"
#include "signals.h"

enum { CLOCK_REALTIME = 0, CLOCK_MONOTONIC = 1, CLOCK_TAI = 11, TIMER_ABSTIME = 1 };
enum { BILLION = 1000000000, MILLION = 1000000 };
enum { FUTEX_WAIT = 0, FUTEX_WAIT_BITSET = 9, FUTEX_COMMAND = 127, FUTEX_CLOCK_REALTIME = 256 };

// Where a call keeps what it is about; no argument has the number None.
enum { None = 7 };
struct shape {
    uint8_t time;      // argument: a pointer to a relative time
    uint8_t left;      // argument: where to say how much of it was left
    uint8_t mask;      // argument: a pointer to a signal mask
    uint8_t mask_pair; // argument: a pointer to such a pointer and a size
};

// What is computed for one call. All of it is part of the frame, so it goes along in a capture.
struct wait {
    long arguments[6];
    struct shape shape;
    int is_timed;  // there is a deadline
    int is_issued; // so what is left of the time has to be looked up
    int in_millis; // the time is a number, not a pointer
    int absolute;  // the clock in `clock` has the time, which is not relative
    int clock;
    long deadline; // nanoseconds of the program's clock
    struct gw_time time;
    struct gw_time given;
    uint64_t mask;
    struct {
        uint64_t *mask;
        uint64_t size;
    } pair;
};

void __gw_kernel_mask(long mask);

NOSUSPEND int gw_is_wait(long nr) {
    switch (nr) {
    case NR_io_getevents:
    case NR_io_pgetevents:
    case NR_epoll_pwait:
    case NR_epoll_pwait2:
    case NR_pselect6:
    case NR_ppoll:
    case NR_futex:
    case NR_nanosleep:
    case NR_clock_nanosleep:
    case NR_rt_sigsuspend:
    case NR_rt_sigtimedwait:
    case NR_semtimedop:
    case NR_recvmmsg:
        return 1;
    default:
        return 0;
    }
}

NOSUSPEND static struct shape shape_of(long nr) {
    switch (nr) {
    case NR_nanosleep:
        return (struct shape){0, 1, None, None};
    case NR_clock_nanosleep:
        return (struct shape){2, 3, None, None};
    case NR_ppoll:
        return (struct shape){2, None, 3, None};
    case NR_pselect6:
    case NR_io_pgetevents:
        return (struct shape){4, None, None, 5};
    case NR_epoll_pwait:
    case NR_epoll_pwait2:
        return (struct shape){3, None, 4, None};
    case NR_rt_sigsuspend:
        return (struct shape){None, None, 0, None};
    case NR_rt_sigtimedwait:
        return (struct shape){2, None, None, None};
    case NR_recvmmsg:
    case NR_io_getevents:
        return (struct shape){4, None, None, None};
    default: // semtimedop, futex
        return (struct shape){3, None, None, None};
    }
}

// Calls that a handler may end, when it comes while they wait.
NOSUSPEND static int may_end(long nr) {
    // fcntl ioctl flock fallocate openat read write …v p… sendfile vmsplice splice tee waitid mq_timed… msgrcv msgsnd
    // semop accept connect send… recv… wait4 getrandom copy_file_range p…v2 openat2 futex_waitv
    static const uint16_t waiting[] = {25,  29,  32,  47,  56,  63,  64,  65,  66,  67,  68,  69,  70,
                                       71,  75,  76,  77,  95,  182, 183, 188, 189, 193, 202, 203, 206,
                                       207, 211, 212, 242, 260, 269, 278, 285, 286, 287, 437, 449};
    for (unsigned i = 0; i < sizeof waiting / sizeof *waiting; i++)
        if (waiting[i] == nr)
            return 1;
    return gw_is_wait(nr);
}

// Those that end whatever SA_RESTART says. The kernel knows that by itself; here it counts where a call was given up
// for a capture just before its handler came.
NOSUSPEND static int never_restarts(long nr) {
    enum { NR_msgrcv = 188, NR_msgsnd = 189, NR_semop = 193 };
    return nr == NR_msgrcv || nr == NR_msgsnd || nr == NR_semop ||
           (gw_is_wait(nr) && nr != NR_futex && nr != NR_recvmmsg);
}

// A call was given up. Does it end with EINTR, or is it issued again?
NOSUSPEND int gw_ends(struct gw_signals *signals, long nr, int entered) {
    uint32_t interrupted = signals->interrupted;
    signals->interrupted = GW_NOT_INTERRUPTED;
    if (interrupted == GW_NOT_INTERRUPTED || !entered || !may_end(nr))
        return 0;
    return interrupted == GW_ENDS_WITH_EINTR || never_restarts(nr);
}

// The kernel has ended a call for a signal sent to the process that another thread has then taken: a request of the
// runtime's, of which the program must not know. No handler has run, so nothing has ended the call.
NOSUSPEND int gw_is_unfounded(const struct gw_signals *signals, long nr, long result) {
    return result == -EINTR && signals->interrupted == GW_NOT_INTERRUPTED && may_end(nr);
}

NOSUSPEND static long now(int clock) {
    struct gw_time time = {0, 0};
    struct gw_thread *thread = gw_self();
    // Not given up for a request, since nothing is computed yet that it would be issued again with.
    thread->uninterrupted++;
    long error = gw_clock_gettime(clock, &time);
    thread->uninterrupted--;
    // A clock that cannot be read: the kernel says so when the call is issued.
    return error == 0 ? time.seconds * BILLION + time.nanoseconds : 0;
}

NOSUSPEND static int is_short(struct gw_time time) {
    // More than 200 years do not fit, and nobody will wait for their end.
    return time.seconds >= 0 && time.seconds < 6000000000L && time.nanoseconds >= 0 && time.nanoseconds < BILLION &&
           (time.seconds | time.nanoseconds) != 0;
}

NOSUSPEND static void find_time(struct wait *w, long nr) {
    long *a = w->arguments;
    w->clock = CLOCK_MONOTONIC;
    if (nr == NR_futex) {
        int command = (int)a[1] & FUTEX_COMMAND;
        if (command == FUTEX_WAIT_BITSET && !(a[1] & FUTEX_CLOCK_REALTIME))
            w->absolute = 1;
        else if (command != FUTEX_WAIT)
            return;
    }
    if (nr == NR_clock_nanosleep) {
        w->absolute = (a[1] & TIMER_ABSTIME) != 0;
        if (w->absolute || (a[0] != CLOCK_REALTIME && a[0] != CLOCK_TAI))
            w->clock = (int)a[0];
    }
    if (nr == NR_epoll_pwait) {
        w->in_millis = 1;
        w->is_timed = (int)a[3] > 0;
        w->deadline = w->is_timed ? now(w->clock) + (long)(int)a[3] * MILLION : 0;
        return;
    }
    // Where nothing is, the kernel says so.
    if (w->shape.time == None || a[w->shape.time] == 0 ||
        !gw_is_readable((const void *)a[w->shape.time], sizeof w->given))
        return;
    __builtin_memcpy(&w->given, (const void *)a[w->shape.time], sizeof w->given);
    w->is_timed = is_short(w->given);
    if (!w->is_timed)
        return;
    w->deadline = w->given.seconds * BILLION + w->given.nanoseconds;
    if (!w->absolute)
        w->deadline += now(w->clock);
    a[w->shape.time] = (long)&w->time;
}

NOSUSPEND static void find_mask(struct wait *w) {
    long *a = w->arguments;
    uint64_t **pointer = 0;
    if (w->shape.mask != None)
        pointer = (uint64_t **)&a[w->shape.mask];
    if (w->shape.mask_pair != None && a[w->shape.mask_pair] != 0 &&
        gw_is_readable((const void *)a[w->shape.mask_pair], sizeof w->pair)) {
        __builtin_memcpy(&w->pair, (const void *)a[w->shape.mask_pair], sizeof w->pair);
        a[w->shape.mask_pair] = (long)&w->pair;
        pointer = &w->pair.mask;
    }
    if (!pointer || !*pointer || !gw_is_readable(*pointer, sizeof w->mask)) {
        w->shape.mask = w->shape.mask_pair = None;
        return;
    }
    w->mask = **pointer & ~GW_NEVER_BLOCKED;
    *pointer = &w->mask;
}

NOSUSPEND static void begin(struct wait *w, long nr) {
    w->shape = shape_of(nr);
    find_time(w, nr);
    find_mask(w);
    if (nr == NR_rt_sigtimedwait && gw_is_readable((const void *)w->arguments[0], sizeof w->mask)) {
        // What is waited for, without the reserved signal.
        w->mask = *(const uint64_t *)w->arguments[0] & ~GW_NEVER_BLOCKED;
        w->arguments[0] = (long)&w->mask;
    }
}

NOSUSPEND static struct gw_time rest(const struct wait *w) {
    long left = w->deadline - now(w->clock);
    if (left < 0)
        left = 0;
    return (struct gw_time){left / BILLION, left % BILLION};
}

// The time that the kernel has to be told now.
NOSUSPEND static void aim(struct wait *w) {
    if (!w->is_timed)
        return;
    if (w->absolute) {
        long at = w->deadline - gw_clock_ahead(w->clock);
        if (at < 0)
            at = 0;
        w->time = (struct gw_time){at / BILLION, at % BILLION};
        return;
    }
    if (!w->is_issued) {
        w->time = w->given;
        w->is_issued = 1;
        return;
    }
    w->time = rest(w);
    if (w->in_millis)
        w->arguments[3] = w->time.seconds * 1000 + (w->time.nanoseconds + MILLION - 1) / MILLION;
}

NOSUSPEND static long issue(struct wait *w, long nr, struct gw_signals *signals) {
    const long *a = w->arguments;
    signals->entered = 0;
    long result = gw_own_call(nr, a[0], a[1], a[2], a[3], a[4], a[5]);
    // The kernel had changed to the call's mask, under which a signal came: its handler runs under it too.
    if (result == -EINTR && signals->held && (w->shape.mask != None || w->shape.mask_pair != None)) {
        signals->after = signals->mask;
        signals->has_after = 1;
        signals->mask = w->mask;
    }
    if (nr == NR_rt_sigtimedwait && result > 0 && a[1])
        gw_name_delivered((struct gw_signal_info *)a[1]);
    return result;
}

// No handler has run under the call's mask after all: the signal is ignored by now.
NOSUSPEND static void leave_mask(struct gw_signals *signals) {
    if (!signals->has_after)
        return;
    signals->has_after = 0;
    signals->mask = signals->after;
    __gw_kernel_mask((long)gw_kernel_mask(signals));
}

// The result of a call that a handler has ended.
NOSUSPEND static long tell_rest(const struct wait *w) {
    if (!w->is_timed || w->absolute || w->shape.left == None || w->arguments[w->shape.left] == 0)
        return -EINTR;
    void *place = (void *)w->arguments[w->shape.left];
    struct gw_time left = rest(w);
    if (!gw_is_writable(place, sizeof left))
        return -EFAULT;
    __builtin_memcpy(place, &left, sizeof left);
    return -EINTR;
}

long gw_waiting_call(volatile int *cancel, long nr, long a, long b, long c, long d, long e, long f) {
    struct gw_signals *signals = gw_signals_of(gw_self());
    struct wait w = {.arguments = {a, b, c, d, e, f}};
    int entered = 0;
    begin(&w, nr);
    signals->interrupted = GW_NOT_INTERRUPTED;
    for (;;) {
        if (cancel && *cancel)
            return GW_CANCELLED;
        aim(&w);
        long result = issue(&w, nr, signals);
        entered |= signals->entered != 0;
        gw_settle();
        leave_mask(signals);
        if (gw_is_unfounded(signals, nr, result))
            continue;
        if (result != GW_ABANDONED)
            return result;
        if (gw_ends(signals, nr, entered))
            return tell_rest(&w);
    }
}
