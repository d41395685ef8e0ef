// Signals, as the kernel sees them: the handler that takes down what the program handles, faults, whose handlers run at
// once, and what has to be told to the kernel about masks and actions. gw/signals.h says what is neutral about them.
#include "private.h"

enum { SIG_SETMASK = 2, SIGNAL_SET_BYTES = 8 };
enum { EINTR = 4 };
// Under the data stack pointer of a function that is interrupted: locals whose stores the compiler has put before that
// of the pointer.
enum { INTERRUPTED_GAP = 1024 };

extern char gw_window_begin[], gw_window_call[], gw_window_end[], gw_window_abandon[];

// Called from neutral code as well.
void __gw_signal_context(void *context, long mask);
void __gw_kernel_mask(long mask);
long __gw_listen(long signal, long handling, long flags);
long __gw_inherited(long signal);
void __gw_put_back(void *information);
void __gw_name_origin(void *of_signal);

// A kernel call that has not taken effect is given up, and issued again behind the poll. One that the kernel itself has
// ended for a signal of the runtime's, of which the program must not know, counts as given up as well.
void gw_leave_window(struct gw_thread *thread, void *context, int is_own_signal) {
    uint64_t *counter = gw_program_counter(context);
    if (thread->uninterrupted)
        return;
    if (*counter >= (uint64_t)gw_window_begin && *counter < (uint64_t)gw_window_end) {
        gw_signals_of(thread)->entered |= *counter >= (uint64_t)gw_window_call;
        *counter = (uint64_t)gw_window_abandon;
    } else if (is_own_signal && *counter == (uint64_t)gw_window_end &&
               *gw_result_register(context) == (uint64_t)-EINTR) {
        gw_signals_of(thread)->entered = 1;
        *counter = (uint64_t)gw_window_abandon;
    }
}

// GODWIT_STATE_SIGNAL: taken from the program, which may not block it either.
static uint64_t bit_of_request(void) {
    return gw_settings.signal - 1 < GW_SIGNALS ? gw_signal_bit((int)gw_settings.signal) : 0;
}

// The thread's mask as the kernel has to keep it. Called by a thread for itself.
void gw_apply_mask(struct gw_thread *thread) { __gw_kernel_mask((long)gw_kernel_mask(gw_signals_of(thread))); }

void __gw_kernel_mask(long mask) {
    uint64_t bits = (uint64_t)mask & ~GW_NEVER_BLOCKED & ~bit_of_request();
    long error = gw_call(GW_NR_rt_sigprocmask, SIG_SETMASK, (long)&bits, 0, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot set the signal mask", 0, error);
}

// What holds behind a handler. A fork or an exec that the signal has met holds requests for rest back, and goes on to.
static void set_mask_behind(void *context, uint64_t mask) {
    gw_set_context_mask(context, mask | (gw_context_mask(context) & gw_signal_bit(GW_SIGNAL)));
}

// Was it sent to one thread, by another or by a timer? Its number of the timer may be the kernel's or the program's.
static int is_of_thread(const struct gw_signal_info *information) {
    if (information->code == GW_SI_TIMER) {
        struct gw_signal_info named = *information;
        __gw_name_origin(&named);
        return gw_timer_is_of_thread(named.origin);
    }
    return information->code == GW_SI_TKILL;
}

// Sends a signal again that was taken from the kernel: to this thread if it was sent to one, else to the process.
static long send_again(const struct gw_signal_info *information) {
    long process = gw_call(GW_NR_getpid, 0, 0, 0, 0, 0, 0);
    if (is_of_thread(information)) {
        long thread = gw_call(GW_NR_gettid, 0, 0, 0, 0, 0, 0);
        return gw_call(GW_NR_rt_tgsigqueueinfo, process, thread, information->signal, (long)information, 0, 0);
    }
    return gw_call(GW_NR_rt_sigqueueinfo, process, information->signal, (long)information, 0, 0, 0);
}

void __gw_put_back(void *information) {
    long error = send_again(information);
    if (error != 0)
        gw_fail("cannot put a signal back that is blocked", 0, error);
}

// The context that a handler is shown: mask and alternate stack, no registers.
void __gw_signal_context(void *context, long mask) {
    const struct gw_thread *thread = gw_this_thread();
    const struct gw_signals *signals = gw_signals_of(thread);
    struct gw_context *shown = context;
    __builtin_memset(shown, 0, sizeof *shown);
    shown->stack = signals->alternate_stack;
    shown->stack_flags = gw_alternate_state(thread) | (uint32_t)signals->alternate_flags;
    shown->stack_size = signals->alternate_size;
    shown->mask[0] = (uint64_t)mask;
}

static int is_fault(const struct gw_signal_info *information) {
    return information->code > 0 && (gw_signal_bit(information->signal) & GW_FAULTS);
}

// A longjmp has left the handler of a fault. What the fault has interrupted never goes on: the thread returns natively
// to the activation that the longjmp names; or, where that is further out than a poll, to the poll, and early from
// there.
static _Noreturn void leave_fault(struct gw_thread *thread, void *native_context) {
    struct gw_signals *signals = gw_signals_of(thread);
    struct gw_anchor *anchor = thread->anchors;
    while (anchor && anchor->frame && anchor->frame != thread->jump_frame)
        anchor = anchor->before;
    if (!anchor)
        gw_fail("longjmp out of the handler of a fault (SIGSEGV, SIGBUS, SIGFPE, SIGILL or SIGTRAP raised by an "
                "instruction) to a function that has returned, or in a program that never calls sigsetjmp",
                0, 0);
    thread->uninterrupted = anchor->uninterrupted;
    thread->anchors = anchor;
    set_mask_behind(native_context, gw_kernel_mask(signals) & ~bit_of_request());
    uint64_t mask = gw_context_mask(native_context);
    long error = gw_call(GW_NR_rt_sigprocmask, SIG_SETMASK, (long)&mask, 0, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot set the signal mask", 0, error);
    gw_return_to(anchor);
}

// The instruction cannot go on before the handler has run, so it runs here, on top of what it interrupted. Nothing is
// captured meanwhile.
static void run_at_once(struct gw_thread *thread, const struct gw_signal_info *information, void *native_context) {
    struct gw_signals *signals = gw_signals_of(thread);
    struct gw_action *of_signal = &__gw_signal_table.actions[information->signal - 1];
    uint64_t bit = gw_signal_bit(information->signal);
    // Nothing faults that holds it, so it is another thread's at most.
    __gw_lock(&__gw_signal_table.lock);
    struct gw_action action = *of_signal;
    int is_handled = action.handler > GW_SIG_IGN;
    // No longer handled: the instruction is tried again, and the kernel judges.
    if (!is_handled || (action.flags & GW_SA_RESETHAND))
        (void)__gw_listen(information->signal, GW_SIG_DFL, 0);
    if (is_handled && (action.flags & GW_SA_RESETHAND))
        of_signal->handler = GW_SIG_DFL;
    __gw_unlock(&__gw_signal_table.lock);
    if (!is_handled)
        return;
    char *interrupted = thread->data_stack;
    uint64_t mask = signals->mask;
    char *top = interrupted - INTERRUPTED_GAP;
    if ((action.flags & GW_SA_ONSTACK) && gw_alternate_state(thread) == 0) {
        if (!gw_off_own_stack(thread))
            signals->own_stack = interrupted;
        top = (char *)(signals->alternate_stack + signals->alternate_size);
    }
    struct gw_context *context = (struct gw_context *)((uint64_t)(top - sizeof *context) & ~15UL);
    char *copy = (char *)context - GW_SIGNAL_BYTES;
    __builtin_memcpy(copy, information, GW_SIGNAL_BYTES);
    __gw_signal_context(context, (long)mask);

    signals->mask = (mask | action.mask | (action.flags & GW_SA_NODEFER ? 0 : bit)) & ~GW_NEVER_BLOCKED;
    thread->data_stack = copy;
    thread->uninterrupted++;
    // The handler may fault itself. All else waits in the kernel.
    __gw_kernel_mask((long)~(GW_FAULTS & ~signals->mask));
    ((void (*)(int, void *, void *))action.handler)(information->signal, copy, context);
    if (thread->state != GW_RUNNING)
        leave_fault(thread, native_context);
    thread->uninterrupted--;
    thread->data_stack = interrupted;
    signals->mask = context->mask[0] & ~GW_NEVER_BLOCKED;
    set_mask_behind(native_context, gw_kernel_mask(signals) & ~bit_of_request());
}

// The kernel's handler of everything that the program handles. All signals but the reserved one are blocked here.
void gw_on_signal(int number, void *information, void *context) {
    struct gw_thread *thread = gw_this_thread();
    struct gw_signals *signals = gw_signals_of(thread);
    (void)number;
    if (is_fault(information)) {
        run_at_once(thread, information, context);
        return;
    }
    if (signals->held) {
        // Let through between two changes of the mask, or a fault's number sent by somebody.
        __gw_put_back(information);
        set_mask_behind(context, ~GW_NEVER_BLOCKED & ~bit_of_request());
        return;
    }
    __builtin_memcpy(&signals->information, information, GW_SIGNAL_BYTES);
    signals->held = 1;
    __atomic_fetch_or(&thread->request, GW_REQUEST_SIGNAL, __ATOMIC_RELAXED);
    set_mask_behind(context, gw_kernel_mask(signals) & ~bit_of_request());
    gw_leave_window(thread, context, 0);
}

struct native_action {
    void (*handler)(int, void *, void *);
    uint64_t flags;
    void (*restorer)(void);
    uint64_t mask;
};

// Tells the kernel what the program wants of a signal: enum GW_SIG_…, and its flags.
long __gw_listen(long signal, long handling, long flags) {
    struct native_action action = {0};
    if ((uint64_t)signal == gw_settings.signal)
        return 0;
    action.flags = (uint64_t)flags & (GW_SA_NOCLDSTOP | GW_SA_NOCLDWAIT);
    if (handling == GW_SIG_HANDLED) {
        action.handler = gw_entry_signal;
        action.flags |= GW_SA_SIGINFO | GW_SA_RESTART;
        action.mask = ~GW_NEVER_BLOCKED;
    } else {
        action.handler = (void (*)(int, void *, void *))handling;
    }
    action.flags |= GW_SA_RESTORER;
    action.restorer = gw_entry_return;
    return gw_call(GW_NR_rt_sigaction, signal, (long)&action, 0, SIGNAL_SET_BYTES, 0, 0);
}

// What the process was started with, of a signal that the program has said nothing about.
long __gw_inherited(long signal) {
    struct native_action action;
    long error = gw_call(GW_NR_rt_sigaction, signal, 0, (long)&action, SIGNAL_SET_BYTES, 0, 0);
    return error == 0 && action.handler == (void (*)(int, void *, void *))GW_SIG_IGN ? GW_SIG_IGN : GW_SIG_DFL;
}

// The first thread of a process: its mask is what the process was started with, unless it goes on from a state.
void gw_begin_signals(struct gw_thread *thread) {
    struct gw_signals *signals = gw_signals_of(thread);
    if (gw_settings.resume) {
        __gw_kernel_mask(-1);
        return;
    }
    long error = gw_call(GW_NR_rt_sigprocmask, SIG_SETMASK, 0, (long)&signals->mask, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot read the signal mask", 0, error);
    signals->mask &= ~GW_NEVER_BLOCKED;
    gw_apply_mask(thread);
}

// A thread that its parent is about to start: the parent's mask, and nothing else.
void gw_inherit_signals(struct gw_thread *child) {
    struct gw_signals *signals = gw_signals_of(child);
    __builtin_memset(signals, 0, sizeof *signals);
    signals->mask = gw_signals_of(gw_this_thread())->mask;
}

// A thread that ends with all signals blocked: what it holds may be another thread's to handle.
void gw_end_signals(struct gw_thread *thread) {
    struct gw_signals *signals = gw_signals_of(thread);
    if (signals->held && !is_of_thread(&signals->information))
        __gw_put_back(&signals->information);
    signals->held = 0;
    __atomic_fetch_and(&thread->request, ~(uint32_t)GW_REQUEST_SIGNAL, __ATOMIC_SEQ_CST);
}

// The timer that has sent a signal, by the kernel's number; null: none. qemu's user mode shows another number than it
// gives at timer_create: there it is a timer of this signal and value.
static const struct gw_timer *sender_of(const struct gw_signal_info *information) {
    const struct gw_timer *alike = 0;
    for (int i = 0; i < GW_TIMERS; i++) {
        const struct gw_timer *timer = &__gw_signal_table.timers[i];
        if (timer->used != 2)
            continue;
        if (timer->kernel_number == information->origin)
            return timer;
        int signal;
        __builtin_memcpy(&signal, (const char *)timer->event + sizeof(uint64_t), sizeof signal);
        if (!alike && signal == information->signal && __builtin_memcmp(timer->event, information->rest, 8) == 0)
            alike = timer;
    }
    return alike;
}

// Numbers of the kernel's in what it tells of a signal become those that the program knows: of its timers, and its own
// as the sender. Those of other processes are nobody's but the kernel's.
void __gw_name_origin(void *of_signal) {
    struct gw_signal_info *information = of_signal;
    if ((information->code == GW_SI_USER || information->code == GW_SI_TKILL) &&
        (uint32_t)information->origin == gw_process)
        information->origin = (int)__gw_threads.process;
    // A signal of an earlier state has the program's number already.
    if (information->code != GW_SI_TIMER || gw_is_timer(information->origin))
        return;
    const struct gw_timer *timer = sender_of(information);
    if (timer)
        information->origin = GW_TIMER_BASE + (int)(timer - __gw_signal_table.timers);
}

// A thread that has parked for a state. What comes from now on waits in the kernel until gw_take_pending.
void gw_hold_signals(void) { __gw_kernel_mask(-1); }

// All threads have parked, and none has taken its signals yet.
void gw_begin_pending(void) {
    __gw_signal_table.pending_count = 0;
    gw_save_timers();
}

// Of one timer one signal is queued at most, and counts what came since. One that was pending in an earlier state was
// sent again by the runtime, so the kernel's timer may have sent another.
static int merge_with_earlier(struct gw_signal_info *information) {
    struct gw_signal_table *table = &__gw_signal_table;
    int is_of_kernel = !gw_is_timer(information->origin);
    __gw_name_origin(information);
    if (is_of_kernel)
        gw_timer_has_sent(information->origin);
    for (uint32_t i = 0; i < table->pending_count; i++) {
        struct gw_signal_info earlier;
        __builtin_memcpy(&earlier, table->pending[i].information, sizeof earlier);
        if (earlier.code != GW_SI_TIMER || earlier.origin != information->origin ||
            earlier.signal != information->signal)
            continue;
        uint32_t sum = (uint32_t)earlier.overrun + (uint32_t)information->overrun + 1;
        earlier.overrun = sum > INT32_MAX ? INT32_MAX : (int)sum;
        __builtin_memcpy(table->pending[i].information, &earlier, sizeof earlier);
        return 1;
    }
    return 0;
}

// Takes the signals from the kernel that are queued for this thread or for the process. All threads have parked before,
// so the program sends no more. One thread at a time.
void gw_take_pending(struct gw_thread *thread) {
    struct gw_signal_table *table = &__gw_signal_table;
    uint64_t all = ~GW_NEVER_BLOCKED;
    uint64_t no_time[2] = {0, 0};
    if (gw_signals_of(thread)->held)
        __gw_name_origin(&gw_signals_of(thread)->information);
    for (;;) {
        struct gw_signal_info information = {0};
        long signal =
            gw_call(GW_NR_rt_sigtimedwait, (long)&all, (long)&information, (long)no_time, SIGNAL_SET_BYTES, 0, 0);
        if (signal <= 0)
            return;
        if (information.code == GW_SI_TIMER && merge_with_earlier(&information))
            continue;
        if (information.code != GW_SI_TIMER)
            __gw_name_origin(&information);
        if (table->pending_count >= GW_PENDING)
            gw_fail("more signals are pending than a state can hold (1024)", 0, 0);
        struct gw_pending *pending = &table->pending[table->pending_count++];
        pending->slot = is_of_thread(&information) ? thread->slot : GW_SLOTS;
        __builtin_memcpy(pending->information, &information, sizeof information);
    }
}

// What of the kernel's is the process's as a whole is taken down, once, when all threads have parked.
void gw_save_signals(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    for (int signal = 1; signal <= GW_SIGNALS; signal++) {
        struct gw_action *action = &table->actions[signal - 1];
        if (!action->known && signal != GW_RESERVED_SIGNAL && __gw_inherited(signal) == GW_SIG_IGN)
            *action = (struct gw_action){.handler = GW_SIG_IGN, .known = 1};
    }
}

// All of a state is as it was, and threads may run on.
static uint32_t is_loaded;

static void send_pending(uint64_t slot) {
    struct gw_signal_table *table = &__gw_signal_table;
    for (uint32_t i = 0; i < table->pending_count; i++) {
        struct gw_signal_info information;
        if (table->pending[i].slot != slot)
            continue;
        __builtin_memcpy(&information, table->pending[i].information, sizeof information);
        long error = send_again(&information);
        if (error != 0)
            gw_fail("cannot send a signal of the state again", 0, error);
    }
}

// A thread of a state begins: its pending signals, and when all threads are there and all actions are installed, its
// mask, under which they are delivered.
void gw_resume_signals(struct gw_thread *thread) {
    __gw_kernel_mask(-1);
    send_pending(thread->slot);
    while (__atomic_load_n(&is_loaded, __ATOMIC_ACQUIRE) == 0)
        gw_wait(&is_loaded, 0, GW_FUTEX_PRIVATE);
    gw_apply_mask(thread);
}

// What the kernel refuses ends the process: all that is loaded was only checked for its place.
void gw_install_actions(void) {
    struct gw_signal_table *table = &__gw_signal_table;
    // Nobody holds it in a state; a forged one says otherwise.
    table->lock = 0;
    for (int signal = 1; signal <= GW_SIGNALS; signal++) {
        const struct gw_action *action = &table->actions[signal - 1];
        if (!action->known || signal == GW_RESERVED_SIGNAL || signal == GW_SIGKILL || signal == GW_SIGSTOP)
            continue;
        long handling = action->handler > GW_SIG_IGN ? GW_SIG_HANDLED : (long)action->handler;
        long error = __gw_listen(signal, handling, (long)action->flags);
        if (error != 0)
            gw_fail("cannot install a handler of the state again", 0, error);
    }
}

// The counterpart of gw_save_signals, by the first thread, when the others have been started.
void gw_load_signals(void) {
    gw_install_actions();
    // Before the timers, whose signals come later than these.
    send_pending(GW_SLOTS);
    gw_load_timers();
    __atomic_store_n(&is_loaded, 1, __ATOMIC_RELEASE);
    gw_wake(&is_loaded, GW_FUTEX_PRIVATE);
    gw_resume_signals(gw_this_thread());
}
