// Every kernel call of the program. This code is part of the program and can be captured. A call that a request has
// ended before it took effect is issued again behind the poll, unless it was waiting and a handler has run that ends
// it. When a call is over, so are the handlers of the signals that it has let through.
#include "identity.h"
#include "inheritance.h"
#include "memory.h"
#include "processes.h"
#include "signals.h"

long __gw_syscall(long nr, long a, long b, long c, long d, long e, long f);
long __gw_syscall_cp(volatile int *cancel, long nr, long a, long b, long c, long d, long e, long f);

// signalfd must not take the reserved signal.
NOSUSPEND static long signal_descriptor(long descriptor, const uint64_t *mask, long size, long flags) {
    uint64_t allowed;
    // The kernel says what is wrong with it.
    if (!mask || !gw_is_readable(mask, sizeof *mask))
        return __gw_kernel(NR_signalfd4, descriptor, (long)mask, size, flags, 0, 0);
    allowed = *mask & ~GW_NEVER_BLOCKED;
    return __gw_kernel(NR_signalfd4, descriptor, (long)&allowed, size, flags, 0, 0);
}

// One attempt.
NOSUSPEND static long issue(long nr, long a, long b, long c, long d, long e, long f) {
    long result;
    // The kernel takes a signal's number as an int.
    switch (nr) {
    case NR_kill:
    case NR_tkill:
    case NR_rt_sigqueueinfo:
    case NR_pidfd_send_signal:
        return (int)b == GW_RESERVED_SIGNAL ? -EINVAL : gw_own_call(nr, a, b, c, d, e, f);
    case NR_tgkill:
    case NR_rt_tgsigqueueinfo:
        return (int)c == GW_RESERVED_SIGNAL ? -EINVAL : gw_own_call(nr, a, b, c, d, e, f);
    case NR_rt_sigaction:
        return gw_sigaction((int)a, (const void *)b, (void *)c, (unsigned long)d);
    case NR_rt_sigprocmask:
        return gw_sigprocmask((int)a, (const uint64_t *)b, (uint64_t *)c, (unsigned long)d);
    case NR_rt_sigpending:
        return gw_sigpending((uint64_t *)a, (unsigned long)b);
    case NR_sigaltstack:
        return gw_sigaltstack((const void *)a, (void *)b);
    case NR_signalfd4:
        return signal_descriptor(a, (const uint64_t *)b, c, d);
    case NR_timer_create:
        return gw_timer_create((int)a, (const void *)b, (int *)c);
    case NR_timer_gettime:
    case NR_timer_getoverrun:
    case NR_timer_settime:
    case NR_timer_delete:
        return gw_timer_call(nr, (int)a, b, c, d);
    case NR_clock_gettime:
        return gw_clock_gettime((int)a, (struct gw_time *)b);
    case NR_clone:
        result = gw_own_call(nr, a, b, c, d, e, f);
        if (result == 0) {
            gw_signals_forked();
            gw_processes_forked();
        }
        return result;
    case NR_close:
    case NR_dup3:
    case NR_close_range:
    case NR_fcntl:
        return gw_meets_held_end(nr, a, b, c) ? gw_beside_held_end(nr, a, b, c) : gw_own_call(nr, a, b, c, d, e, f);
    default:
        return gw_is_memory_call(nr) ? gw_memory_call(nr, a, b, c, d, e, f) : gw_own_call(nr, a, b, c, d, e, f);
    }
}

static inline long perform(volatile int *cancel, long nr, long a, long b, long c, long d, long e, long f) {
    struct gw_signals *signals = gw_signals_of(gw_self());
    int entered = 0;
    signals->interrupted = GW_NOT_INTERRUPTED;
    for (;;) {
        if (cancel && *cancel)
            return GW_CANCELLED;
        signals->entered = 0;
        long result = issue(nr, a, b, c, d, e, f);
        entered |= signals->entered != 0;
        gw_settle();
        if (gw_is_unfounded(signals, nr, result))
            continue;
        if (result != GW_ABANDONED)
            return result;
        if (gw_ends(signals, nr, entered))
            return -EINTR;
    }
}

long __gw_syscall(long nr, long a, long b, long c, long d, long e, long f) {
    if (nr == NR_clone && gw_is_vfork(a, b))
        return gw_vfork(a, (long *)c);
    if (gw_is_lock_call(nr, b))
        return gw_lock_call((uint32_t *)a, b, d);
    return gw_is_wait(nr) ? gw_waiting_call(0, nr, a, b, c, d, e, f) : perform(0, nr, a, b, c, d, e, f);
}

// A cancellation point.
long __gw_syscall_cp(volatile int *cancel, long nr, long a, long b, long c, long d, long e, long f) {
    return gw_is_wait(nr) ? gw_waiting_call(cancel, nr, a, b, c, d, e, f) : perform(cancel, nr, a, b, c, d, e, f);
}
