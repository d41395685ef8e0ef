// Signals, as the program sees them: actions, masks, alternate stacks, and the delivery of a signal that its thread
// holds, which is the call of an ordinary function of the program (gw/signals.h tells how it comes to be held).
#include "signals.h"

enum { SIG_BLOCK = 0, SIG_UNBLOCK = 1, SIG_SETMASK = 2, SIGNAL_SET_BYTES = 8 };
enum { SS_ONSTACK = 1, SS_DISABLE = 2 };
#define SS_AUTODISARM (1U << 31)
enum { MINSIGSTKSZ = 5120, SA_RESTORER = 0x04000000 };

// Private, since neutral code does not know the set's own numbers and handlers.
void __gw_signal_context(void *context, long mask);
void __gw_kernel_mask(long mask);
long __gw_listen(long signal, long handling, long flags);
long __gw_inherited(long signal);
void __gw_put_back(void *information);
long __gw_reach(void *address, unsigned long size, int writes);
void __gw_lock(uint32_t *word);
void __gw_unlock(uint32_t *word);
int fegetenv(void *environment);
int fesetenv(const void *environment);

void __gw_deliver(void);

struct gw_signal_table __gw_signal_table;

// As the kernel takes and gives them.
struct kernel_action {
    uint64_t handler, flags, restorer, mask;
};
struct kernel_stack {
    uint64_t begin;
    uint32_t flags, padding;
    uint64_t size;
};

// Everything of a delivery that has to outlive its handler.
struct delivery {
    struct gw_signal_info information;
    struct gw_context context;
    struct gw_action action;
    uint32_t fp_environment[2];
    uint32_t interrupted;
    uint32_t switches_stack;
    char *data_stack;
    uint64_t alternate[3]; // the alternate stack that SS_AUTODISARM took away
};

NOSUSPEND static struct gw_signals *own(void) { return gw_signals_of(gw_self()); }

// Actions are the process's. No poll comes while it is held, so no capture meets it.
NOSUSPEND static void lock(void) { __gw_lock(&__gw_signal_table.lock); }
NOSUSPEND static void unlock(void) { __gw_unlock(&__gw_signal_table.lock); }

NOSUSPEND static int is_signal(int signal) { return signal >= 1 && signal <= GW_SIGNALS; }

NOSUSPEND static struct gw_action *action_of(int signal) {
    struct gw_action *action = &__gw_signal_table.actions[signal - 1];
    if (!action->known)
        action->handler = (uint64_t)__gw_inherited(signal);
    return action;
}

// Most of what the program hands over are locals: no kernel call is needed to know that they are there.
NOSUSPEND static int is_local(const void *address, unsigned long size) {
    const struct gw_thread *thread = gw_self();
    uintptr_t begin = (uintptr_t)address, end = gw_quarter_end(thread->slot, GW_DATA_STACK);
    return !gw_off_own_stack(thread) && begin >= (uintptr_t)thread->data_stack && begin <= end && size <= end - begin;
}

// No request may end the kernel call: that would be no answer.
NOSUSPEND static int reach(void *address, unsigned long size, int writes) {
    struct gw_thread *thread = gw_self();
    if (is_local(address, size))
        return 1;
    thread->uninterrupted++;
    long result = __gw_reach(address, size, writes);
    thread->uninterrupted--;
    return result == 0;
}

NOSUSPEND int gw_is_readable(const void *address, unsigned long size) { return reach((void *)address, size, 0); }

// What is there is overwritten, which the caller is about to do.
NOSUSPEND int gw_is_writable(void *address, unsigned long size) { return reach(address, size, 1); }

NOSUSPEND long gw_sigaction(int signal, const void *wanted, void *old, unsigned long size) {
    if (gw_must_settle())
        return GW_ABANDONED;
    if (size != SIGNAL_SET_BYTES || !is_signal(signal) || signal == GW_RESERVED_SIGNAL ||
        (wanted && (signal == GW_SIGKILL || signal == GW_SIGSTOP)))
        return -EINVAL;
    struct kernel_action new = {0};
    if (wanted && !gw_is_readable(wanted, sizeof new))
        return -EFAULT;
    if (wanted)
        __builtin_memcpy(&new, wanted, sizeof new);
    lock();
    struct gw_action before = *action_of(signal);
    long result = 0;
    if (wanted) {
        result = __gw_listen(signal, new.handler > GW_SIG_IGN ? GW_SIG_HANDLED : (long)new.handler, (long)new.flags);
        if (result == 0)
            __gw_signal_table.actions[signal - 1] =
                (struct gw_action){new.handler, new.flags & ~(uint64_t)SA_RESTORER, new.mask & ~GW_NEVER_BLOCKED, 1};
    }
    unlock();
    if (old && result == 0) {
        struct kernel_action shown = {before.handler, before.flags, 0, before.mask};
        if (!gw_is_writable(old, sizeof shown))
            return -EFAULT;
        __builtin_memcpy(old, &shown, sizeof shown);
    }
    return result;
}

NOSUSPEND long gw_sigprocmask(int how, const uint64_t *wanted, uint64_t *old, unsigned long size) {
    struct gw_signals *signals = own();
    if (gw_must_settle())
        return GW_ABANDONED;
    if (size != SIGNAL_SET_BYTES || (wanted && (how < SIG_BLOCK || how > SIG_SETMASK)))
        return -EINVAL;
    if (wanted && !gw_is_readable(wanted, sizeof *wanted))
        return -EFAULT;
    uint64_t before = signals->mask;
    if (wanted) {
        uint64_t set = *wanted;
        uint64_t mask = how == SIG_BLOCK ? before | set : how == SIG_UNBLOCK ? before & ~set : set;
        signals->mask = mask & ~GW_NEVER_BLOCKED;
        __gw_kernel_mask((long)gw_kernel_mask(signals));
        // One that came before the mask had changed blocks all others until it is delivered.
        if (signals->held)
            __gw_kernel_mask((long)gw_kernel_mask(signals));
    }
    if (old && !gw_is_writable(old, sizeof *old))
        return -EFAULT;
    if (old)
        *old = before;
    return 0;
}

NOSUSPEND long gw_sigpending(uint64_t *pending, unsigned long size) {
    long result = __gw_kernel(NR_rt_sigpending, (long)pending, (long)size, 0, 0, 0, 0);
    // A shorter set is the first bytes of a whole one, in which none of these is.
    if (result == 0 && size == SIGNAL_SET_BYTES)
        *pending &= ~GW_NEVER_BLOCKED;
    return result;
}

NOSUSPEND long gw_sigaltstack(const void *wanted, void *old) {
    struct gw_signals *signals = own();
    if (gw_must_settle())
        return GW_ABANDONED;
    struct kernel_stack before = {signals->alternate_stack,
                                  gw_alternate_state(gw_self()) | (uint32_t)signals->alternate_flags, 0,
                                  signals->alternate_size};
    if (wanted) {
        struct kernel_stack new;
        if (!gw_is_readable(wanted, sizeof new))
            return -EFAULT;
        __builtin_memcpy(&new, wanted, sizeof new);
        uint32_t mode = new.flags & ~SS_AUTODISARM;
        if (gw_alternate_state(gw_self()) == SS_ONSTACK)
            return -EPERM;
        if (mode != 0 && mode != SS_ONSTACK && mode != SS_DISABLE)
            return -EINVAL;
        if (mode == SS_DISABLE)
            new.begin = new.size = 0;
        else if (new.size < MINSIGSTKSZ)
            return -ENOMEM;
        signals->alternate_stack = new.begin;
        signals->alternate_size = new.size;
        signals->alternate_flags = new.flags & SS_AUTODISARM;
    }
    if (old && !gw_is_writable(old, sizeof before))
        return -EFAULT;
    if (old)
        __builtin_memcpy(old, &before, sizeof before);
    return 0;
}

// The child of a fork has its parent's actions, and the lock may have been another thread's.
NOSUSPEND void gw_signals_forked(void) {
    __gw_signal_table.lock = 0;
    gw_timers_forked();
}

NOSUSPEND static void set_kernel_mask(const struct gw_signals *signals) {
    __gw_kernel_mask((long)gw_kernel_mask(signals));
}

// Takes the signal that is held. Nothing is left to do when its handler may not run now: the kernel gets it back.
NOSUSPEND static int take(struct delivery *d) {
    struct gw_thread *thread = gw_self();
    struct gw_signals *signals = own();
    __builtin_memcpy(&d->information, &signals->information, sizeof d->information);
    int was_held = signals->held != 0;
    signals->held = 0;
    __atomic_fetch_and(&thread->request, ~(uint32_t)GW_REQUEST_SIGNAL, __ATOMIC_RELAXED);
    int signal = d->information.signal;
    // Only a forged state says otherwise.
    if (!was_held || !is_signal(signal)) {
        set_kernel_mask(signals);
        return 0;
    }
    uint64_t bit = gw_signal_bit(signal);
    lock();
    d->action = *action_of(signal);
    int runs = d->action.handler > GW_SIG_IGN && !(signals->mask & bit);
    if (runs && (d->action.flags & GW_SA_RESETHAND)) {
        __gw_signal_table.actions[signal - 1].handler = GW_SIG_DFL;
        (void)__gw_listen(signal, GW_SIG_DFL, (long)d->action.flags);
    }
    unlock();
    if (!runs) {
        if (d->action.handler != GW_SIG_IGN)
            __gw_put_back(&d->information);
        set_kernel_mask(signals);
        return 0;
    }
    gw_name_delivered(&d->information);
    uint64_t after = signals->has_after ? signals->after : signals->mask;
    signals->has_after = 0;
    __gw_signal_context(&d->context, (long)after);
    if (signals->interrupted == GW_NOT_INTERRUPTED)
        signals->interrupted = d->action.flags & GW_SA_RESTART ? GW_RESTARTS : GW_ENDS_WITH_EINTR;
    d->interrupted = signals->interrupted;
    signals->mask |= d->action.mask | (d->action.flags & GW_SA_NODEFER ? 0 : bit);
    signals->mask &= ~GW_NEVER_BLOCKED;
    (void)fegetenv(d->fp_environment);
    d->switches_stack = (d->action.flags & GW_SA_ONSTACK) && gw_alternate_state(thread) == 0;
    d->alternate[0] = signals->alternate_stack;
    d->alternate[1] = signals->alternate_size;
    d->alternate[2] = signals->alternate_flags;
    if (signals->alternate_flags)
        signals->alternate_stack = signals->alternate_size = signals->alternate_flags = 0;
    set_kernel_mask(signals);
    return 1;
}

NOSUSPEND static void finish(const struct delivery *d) {
    struct gw_signals *signals = own();
    signals->mask = d->context.mask[0] & ~GW_NEVER_BLOCKED;
    signals->interrupted = d->interrupted;
    if (d->alternate[2]) {
        signals->alternate_stack = d->alternate[0];
        signals->alternate_size = d->alternate[1];
        signals->alternate_flags = d->alternate[2];
    }
    (void)fesetenv(d->fp_environment);
    set_kernel_mask(signals);
}

// Called by the slow half of a poll when a signal is held. It can be captured like every function of the program, also
// in the middle of the handler.
void __gw_deliver(void) {
    struct delivery d;
    if (!take(&d))
        return;
    // Signals that the kernel lets through now come on top, so they are handled first.
    gw_settle();
    struct gw_thread *thread = gw_self();
    char *volatile *data_stack = &thread->data_stack;
    if (d.switches_stack) {
        d.data_stack = *data_stack;
        if (!gw_off_own_stack(thread))
            own()->own_stack = d.data_stack;
        *data_stack = (char *)((d.alternate[0] + d.alternate[1] - GW_STACK_GAP) & ~15UL);
    }
    if (d.action.flags & GW_SA_SIGINFO)
        ((void (*)(int, void *, void *))d.action.handler)(d.information.signal, &d.information, &d.context);
    else
        ((void (*)(int))d.action.handler)(d.information.signal);
    if (d.switches_stack)
        *data_stack = d.data_stack;
    finish(&d);
}
