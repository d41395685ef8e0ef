// How all threads come to stand still for a capture, or for rest.
//
//     somebody asks (signal, timer, counted poll)
//        → a thread that sees the request at a poll stops the world: it sets the request of every live thread and
//          sends each GW_SIGNAL, which takes it out of a kernel call that has not taken effect
//        → each gives up its frames and parks
//        → when all have parked, timers are taken down and then each takes its pending signals from the kernel
//        → the last one writes the state and ends the process
//
// Where the process stays, signals and timers stay the kernel's: the last one lets all go on (GODWIT_STATE_TURN), or
// waits until it is told to (rest.c).
//
// A thread is live from just before the kernel starts it until it is about to end. Handlers only set bits; all else is
// done under one lock, outside of handlers.
#include "private.h"

enum { EAGAIN = 11 };
enum { SIG_UNBLOCK = 1, SIGNAL_SET_BYTES = 8 };

struct gw_native_thread gw_native_threads[GW_SLOTS];
uint32_t gw_process;

// What has been asked for.
enum { WANTS_STATE = 1, WANTS_REST = 2 };

static struct {
    uint32_t lock;
    uint32_t live;       // threads that take part
    uint32_t parked;     // of these
    uint32_t emptied;    // of these, since all have parked: their pending signals are in the table
    uint32_t stops;      // that are over
    uint32_t bell;       // changes when parked threads have to look again
    uint32_t slots;      // all live ones are below
    uint32_t stopping;   // requests have been sent
    uint32_t passed_on;  // as one signal to the process, which each thread sends again when it parks
    uint32_t left_out;   // the child of a fork: a state is of one process, so this one is not captured
    uint32_t wanted;     // WANTS_…: a handler has seen a request that no stop has taken up yet
    uint32_t for_rest;   // this stop is
    uint32_t has_failed; // the rest: a thread has more frames than its buffer holds
    uint64_t polls;      // counted since the last stop
    uint64_t requested;  // when the capture was asked for; 0: not
    uint64_t rest_time;  // when rest was; 0: not
} world;

static uint32_t lasting_request(void) { return gw_settings.polls != 0 && !world.left_out ? GW_REQUEST_COUNT : 0; }

static void note_time(uint64_t *time) {
    uint64_t none = 0;
    uint64_t now = gw_nanoseconds();
    (void)__atomic_compare_exchange_n(time, &none, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

static void ask(struct gw_thread *thread, uint32_t what) {
    __atomic_fetch_or(&world.wanted, what, __ATOMIC_SEQ_CST);
    __atomic_fetch_or(&thread->request, GW_REQUEST_CAPTURE, __ATOMIC_SEQ_CST);
}

// Are there settings that ask for captures by signals?
static int is_captured_by_signals(void) {
    return !world.left_out && (gw_settings.polls != 0 || gw_settings.signal != 0 || gw_settings.timer != 0);
}

static void note_capture(void) {
    if (gw_settings.report)
        note_time(&world.requested);
}

// Does it come from a thread that stops the world? A plain one may, while such ones are passed on; whoever else has
// sent it then sends it again (isa/ABI.md, section 7).
static int is_stop(const struct gw_signal_info *of) {
    return of->code == GW_SI_TKILL ||
           (of->code == GW_SI_USER && __atomic_load_n(&world.passed_on, __ATOMIC_SEQ_CST) != 0);
}

// Of a signal 58 that kill has sent. It is the only one that the kernel takes where a user has as many in queues as may
// be, so it has to be enough to let a process go on. Where settings ask for it, and nothing is to be taken back, it
// asks for a capture.
static int is_go_on(const struct gw_signal_info *of) {
    return of->code == GW_SI_USER && (gw_is_rest_wanted() || !is_captured_by_signals());
}

// The kernel's handler of signal 58, and of that of GODWIT_STATE_SIGNAL.
void gw_on_request(int signal, void *information, void *context) {
    struct gw_thread *thread = gw_this_thread();
    const struct gw_signal_info *of = information;
    if (gw_hear_of_rest(of)) {
        // Else it was taken back: a stop that is under way lets all go on at its end.
        if (gw_is_rest_wanted()) {
            note_time(&world.rest_time);
            ask(thread, WANTS_REST);
        }
    } else if (signal == GW_SIGNAL && is_stop(of)) {
        // Who stops the world has set the request already.
    } else if (signal == GW_SIGNAL && is_go_on(of)) {
        gw_take_rest_back();
    } else if (is_captured_by_signals()) {
        note_capture();
        ask(thread, WANTS_STATE);
    }
    gw_leave_window(thread, context, 1);
}

// The thread that waits at rest takes it from the kernel itself. No thread's request changes there, since it is what a
// restored process is judged by.
void gw_hear_at_rest(const struct gw_signal_info *of) {
    if (gw_hear_of_rest(of) || is_stop(of))
        return;
    if (is_go_on(of)) {
        gw_take_rest_back();
    } else if (is_captured_by_signals()) {
        note_capture();
        __atomic_fetch_or(&world.wanted, WANTS_STATE, __ATOMIC_SEQ_CST);
    }
}

static void listen(uint64_t signal) {
    enum { SA_SIGINFO = 4, SA_RESTART = 0x10000000 };
    struct {
        void (*handler)(int, void *, void *);
        uint64_t flags;
        void (*restorer)(void);
        uint64_t mask;
    } action = {gw_entry_request, SA_SIGINFO | SA_RESTART | GW_SA_RESTORER, gw_entry_return, UINT64_MAX};
    long error = gw_call(GW_NR_rt_sigaction, (long)signal, (long)&action, 0, SIGNAL_SET_BYTES, 0, 0);
    // Whoever started the program may have it blocked.
    uint64_t set = 1UL << (signal - 1);
    if (error == 0)
        error = gw_call(GW_NR_rt_sigprocmask, SIG_UNBLOCK, (long)&set, 0, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot listen for a signal", 0, error);
}

// With the lock. To the process: some thread that is not parked takes it, since those that are block it.
static void pass_on(void) {
    long error = gw_call(GW_NR_kill, gw_process, GW_SIGNAL, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot stop a thread", 0, error);
}

// With the lock.
static void send_stop(uint32_t slot) {
    uint32_t tid = __atomic_load_n(&gw_native_threads[slot].tid, __ATOMIC_SEQ_CST);
    // It has not begun yet: its first kernel call or poll will see the request.
    if (tid == 0)
        return;
    long error = gw_call(GW_NR_tgkill, gw_process, tid, GW_SIGNAL, 0, 0, 0);
    // The user's limit of queued signals is reached. The kernel takes one of kill's in spite of that, but that cannot
    // be sent to one thread.
    if (error == -EAGAIN)
        __atomic_store_n(&world.passed_on, 1, __ATOMIC_SEQ_CST);
    else if (error != 0)
        gw_fail("cannot stop a thread", 0, error);
}

// With the lock: takes up what is wanted.
static void mark_stop(void) {
    uint32_t wanted = __atomic_load_n(&world.wanted, __ATOMIC_SEQ_CST);
    world.for_rest = (wanted & WANTS_REST) != 0;
    // Who sees it before it has the lock sees what the stop is for.
    __atomic_store_n(&world.stopping, 1, __ATOMIC_RELEASE);
    // One after the other. Polls that are counted ask for a state, and nothing else says so.
    __atomic_fetch_and(&world.wanted, world.for_rest ? ~(uint32_t)WANTS_REST : ~(uint32_t)WANTS_STATE,
                       __ATOMIC_SEQ_CST);
    for (uint32_t slot = 0; slot < world.slots; slot++)
        if (gw_native_threads[slot].live)
            __atomic_fetch_or(&gw_thread_of_slot(slot)->request, GW_REQUEST_CAPTURE, __ATOMIC_SEQ_CST);
}

// With the lock.
static void begin_stop(const struct gw_thread *self) {
    mark_stop();
    for (uint32_t slot = 0; slot < world.slots; slot++)
        if (gw_native_threads[slot].live && slot != self->slot)
            send_stop(slot);
    if (world.passed_on)
        pass_on();
}

// At a poll that has seen GW_REQUEST_CAPTURE.
void gw_stop_world(struct gw_thread *thread) {
    if (__atomic_load_n(&world.stopping, __ATOMIC_ACQUIRE))
        return;
    __gw_lock(&world.lock);
    if (!world.stopping)
        begin_stop(thread);
    __gw_unlock(&world.lock);
}

// By a thread on its way to park, which cannot give up its frames: may the stop come to nothing? Then it will.
int gw_may_fail(void) {
    if (!world.for_rest)
        return 0;
    __atomic_store_n(&world.has_failed, 1, __ATOMIC_SEQ_CST);
    return 1;
}

// Polls are counted over all threads; those between the request and the park do not count. Where there are several, nor
// does a thread's first one behind a stop: threads that wait have to come back to their kernel calls, or they would
// stop the world among themselves at each poll of that way, and the one they wait for would hardly get on.
void gw_count_polls(struct gw_thread *thread) {
    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    int is_first = native->resumed;
    native->resumed = 0;
    if (is_first && __atomic_load_n(&world.live, __ATOMIC_RELAXED) > 1)
        return;
    if (__atomic_load_n(&world.stopping, __ATOMIC_RELAXED) ||
        __atomic_add_fetch(&world.polls, 1, __ATOMIC_RELAXED) != gw_settings.polls)
        return;
    if (gw_settings.report)
        note_time(&world.requested);
    __atomic_fetch_or(&thread->request, GW_REQUEST_CAPTURE, __ATOMIC_SEQ_CST);
}

static void ring(void) {
    __atomic_fetch_add(&world.bell, 1, __ATOMIC_RELEASE);
    gw_wake(&world.bell, GW_FUTEX_PRIVATE);
}

// With the lock. All signals are blocked, in all threads.
static void rest(void) {
    // Whoever asked sees by `over` that it will not come.
    if (world.has_failed && gw_is_rest_wanted())
        gw_take_rest_back();
    world.has_failed = 0;
    if (gw_is_rest_wanted())
        gw_stand_still(world.live, world.rest_time);
    world.rest_time = 0;
    // Also if it was asked for twice.
    __atomic_fetch_and(&world.wanted, ~(uint32_t)WANTS_REST, __ATOMIC_SEQ_CST);
}

// With the lock. The last one that was passed on may have found no receiver: nobody is to take it for another's.
static void end_passing_on(void) {
    static const uint64_t no_time[2];
    struct gw_signal_info information = {0};
    if (!world.passed_on)
        return;
    while (gw_next_request(&information, no_time))
        gw_hear_at_rest(&information);
    world.passed_on = 0;
}

// With the lock, when every live thread is parked.
static void finish_stop(void) {
    uint64_t parked = gw_settings.report ? gw_nanoseconds() : 0;
    for (uint32_t slot = 0; slot < world.slots; slot++)
        if (gw_native_threads[slot].live)
            __atomic_fetch_and(&gw_thread_of_slot(slot)->request, GW_REQUEST_SIGNAL, __ATOMIC_SEQ_CST);
    end_passing_on();
    if (world.for_rest) {
        rest();
    } else if (!gw_settings.turn) {
        if (!gw_settings.save)
            gw_fail("a capture was asked for, but GODWIT_STATE_SAVE does not say where to", 0, 0);
        gw_save_signals();
        gw_save_state(gw_settings.save);
        if (gw_settings.report)
            gw_report_capture(world.requested, parked, gw_nanoseconds());
        if (gw_settings.next) {
            gw_block_signals();
            gw_become_next();
        }
        gw_exit(GW_EXIT_CAPTURED);
    }
    for (uint32_t slot = 0; slot < world.slots; slot++)
        if (gw_native_threads[slot].live)
            __atomic_fetch_or(&gw_thread_of_slot(slot)->request, lasting_request(), __ATOMIC_SEQ_CST);
    if (!world.for_rest) {
        world.polls = 0;
        __atomic_store_n(&world.requested, 0, __ATOMIC_RELAXED);
    }
    world.parked = 0;
    __atomic_store_n(&world.stopping, 0, __ATOMIC_RELEASE);
    world.stops++;
    // Somebody asked again meanwhile. No thread is in a kernel call that it would have to be taken out of: all see
    // their request on their way back.
    if (__atomic_load_n(&world.wanted, __ATOMIC_SEQ_CST))
        mark_stop();
    ring();
}

// With the lock, when every live thread is parked: no other comes or goes any more.
static void empty_queue(struct gw_thread *thread) {
    if (world.emptied == 0) {
        gw_begin_pending();
        ring();
    }
    gw_take_pending(thread);
    world.emptied++;
}

// All frames of this thread have returned. Comes back when it is to go on.
void gw_park(struct gw_thread *thread) {
    // What the stop is for stays the same until this thread has parked.
    int is_rest = world.for_rest != 0;
    int stays = is_rest || gw_settings.turn;
    if (is_rest)
        gw_settle_for_rest(thread);
    __gw_lock(&world.lock);
    uint32_t stop = world.stops;
    world.parked++;
    int takes_signals = !stays;
    // At rest it does so already.
    int blocks_all = is_rest || world.passed_on;
    if (!is_rest && blocks_all)
        gw_block_signals();
    else if (takes_signals)
        gw_hold_signals();
    if (world.passed_on && world.parked != world.live)
        pass_on();
    while (world.stops == stop) {
        if (world.parked == world.live && takes_signals) {
            takes_signals = 0;
            empty_queue(thread);
        }
        if (world.parked == world.live && (stays || world.emptied == world.live)) {
            finish_stop();
            break;
        }
        uint32_t bell = __atomic_load_n(&world.bell, __ATOMIC_ACQUIRE);
        __gw_unlock(&world.lock);
        gw_wait(&world.bell, bell, GW_FUTEX_PRIVATE);
        __gw_lock(&world.lock);
    }
    __gw_unlock(&world.lock);
    if (blocks_all)
        gw_apply_mask(thread);
    gw_native_threads[thread->slot].resumed = 1;
}

// A thread that is about to be started. During a stop it is told to park as soon as it can.
void gw_enter_world(struct gw_thread *thread) {
    __gw_lock(&world.lock);
    uint32_t request = lasting_request() | (world.stopping ? GW_REQUEST_CAPTURE : 0);
    __atomic_store_n(&thread->request, (thread->request & GW_REQUEST_SIGNAL) | request, __ATOMIC_SEQ_CST);
    gw_native_threads[thread->slot].live = 1;
    world.live++;
    if (thread->slot >= world.slots)
        world.slots = thread->slot + 1;
    __gw_unlock(&world.lock);
}

// A thread that has changed its last bit of neutral memory, or could not be started. Its signals are blocked; a request
// that only it has seen goes on to the others.
void gw_leave_world(struct gw_thread *thread) {
    __gw_lock(&world.lock);
    gw_native_threads[thread->slot].live = 0;
    world.live--;
    if (!world.stopping && __atomic_load_n(&world.wanted, __ATOMIC_SEQ_CST))
        begin_stop(thread);
    if (world.stopping)
        ring();
    // It may have taken the one that was for all.
    if (world.passed_on && world.parked != world.live)
        pass_on();
    __gw_unlock(&world.lock);
}

// The child of a fork has this thread only, and nobody who could be asked to stop.
void gw_forked_world(struct gw_thread *thread) {
    for (uint32_t slot = 0; slot < world.slots; slot++)
        gw_native_threads[slot].live = slot == thread->slot;
    // They are for the process that started the program, and it does not wait for this child.
    gw_settings.messages = 0;
    // Captures in place write no state.
    world.left_out = !gw_settings.turn;
    world.lock = 0;
    world.live = 1;
    world.parked = 0;
    world.stopping = 0;
    world.passed_on = 0;
    world.wanted = 0;
    world.rest_time = 0;
    gw_forked_rest();
    uint32_t stays = GW_REQUEST_SIGNAL | lasting_request();
    __atomic_fetch_and(&thread->request, stays, __ATOMIC_SEQ_CST);
}

static void start_timer(uint64_t microseconds) {
    enum { CLOCK_MONOTONIC = 1, SIGEV_SIGNAL = 0, MILLION = 1000000 };
    struct {
        uint64_t value;
        int signal, notify;
        char rest[48];
    } event = {.signal = GW_SIGNAL, .notify = SIGEV_SIGNAL};
    int timer;
    long error = gw_call(GW_NR_timer_create, CLOCK_MONOTONIC, (long)&event, (long)&timer, 0, 0, 0);
    // A time of zero would not arm it.
    uint64_t time[4] = {0, 0, microseconds / MILLION, microseconds % MILLION * 1000 + (microseconds == 0)};
    if (error == 0)
        error = gw_call(GW_NR_timer_settime, timer, 0, (long)time, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot start the timer of GODWIT_STATE_TIMER", 0, error);
}

// From now on requests for rest are heard, and the process says so.
void gw_listen(void) {
    listen(GW_SIGNAL);
    gw_begin_listening();
}

// From now on the settings' requests are heard. Threads that are there already begin to count when they enter.
void gw_arm(void) {
    if (gw_settings.signal != 0 && gw_settings.signal != GW_SIGNAL)
        listen(gw_settings.signal);
    if (gw_settings.timer != 0)
        start_timer(gw_settings.timer);
}
