// Rest: all threads stand still in place, with nothing of the program's in registers or on native stacks, until
// somebody lets the process go on here, or its memory goes on elsewhere (restored.c). world.c brings the threads here.
#include "private.h"

enum { SIGNAL_SET_BYTES = 8, SIG_BLOCK = 0, SIG_UNBLOCK = 1, MADV_DONTNEED = 4 };
enum { EINTR = 4, EAGAIN = 11, EINVAL = 22 };

// Not static: the linker places it (isa/link/src/layout.rs).
struct gw_rest gw_rest __attribute__((section(".gw.rest"))) = {.magic = GW_REST_MAGIC, .version = GW_REST_VERSION};

void gw_begin_listening(void) { __atomic_store_n(&gw_rest.ready, 1, __ATOMIC_RELEASE); }

static void raise(uint64_t *highest, uint64_t number) {
    uint64_t found = __atomic_load_n(highest, __ATOMIC_SEQ_CST);
    while (found < number &&
           !__atomic_compare_exchange_n(highest, &found, number, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
    }
}

int gw_is_rest_wanted(void) {
    return __atomic_load_n(&gw_rest.number, __ATOMIC_SEQ_CST) > __atomic_load_n(&gw_rest.over, __ATOMIC_SEQ_CST);
}

// Takes a request down. Says whether the signal is one. Both numbers only rise, so requests come to the same in every
// order, and however often each of them comes.
int gw_hear_of_rest(const struct gw_signal_info *information) {
    uint32_t value;
    __builtin_memcpy(&value, information->rest, sizeof value);
    if (information->signal != GW_SIGNAL || information->code != GW_SI_REST)
        return 0;
    uint32_t request = value & ((1U << GW_REST_NUMBER_SHIFT) - 1);
    if (request == GW_REST_BEGIN)
        raise(&gw_rest.number, value >> GW_REST_NUMBER_SHIFT);
    else if (request == GW_REST_END)
        raise(&gw_rest.over, value >> GW_REST_NUMBER_SHIFT);
    return 1;
}

// A signal without a number: go on, whatever has been asked for. Where nothing has been, the next rest is taken back,
// so that the sender sees by `over` that it was heard.
void gw_take_rest_back(void) {
    uint64_t number = __atomic_load_n(&gw_rest.number, __ATOMIC_SEQ_CST);
    uint64_t over = __atomic_load_n(&gw_rest.over, __ATOMIC_SEQ_CST);
    raise(&gw_rest.over, number > over ? number : over + 1);
}

// The child of a fork has not been asked.
void gw_forked_rest(void) { gw_rest.number = gw_rest.over; }

// By each thread, before it stands still. The kernel delivers a stop that was sent to it at the end of the call; one
// that comes later stays pending, and says nothing that its receiver does not know. What the program's part of the
// native stack holds is of no use; the kernel keeps it where the program has locked its memory.
void gw_settle_for_rest(const struct gw_thread *thread) {
    uint64_t begin = gw_quarter_begin(thread->slot, GW_NATIVE_STACK);
    uint64_t length = gw_quarter_end(thread->slot, GW_NATIVE_STACK) - GW_RUNTIME_STACK - begin;
    long error = gw_call(GW_NR_madvise, (long)begin, (long)length, MADV_DONTNEED, 0, 0, 0);
    if (error != 0 && error != -EINVAL)
        gw_fail("cannot empty a thread's native stack", 0, error);
    gw_block_signals();
}

// The next signal 58 that is pending, or that comes. Says whether there was one: not where `time` is over, and not
// where somebody has frozen the process or looked at it as a debugger does.
int gw_next_request(struct gw_signal_info *information, const uint64_t *time) {
    uint64_t set = gw_signal_bit(GW_SIGNAL);
    long signal = gw_call(GW_NR_rt_sigtimedwait, (long)&set, (long)information, (long)time, SIGNAL_SET_BYTES, 0, 0);
    if (signal < 0 && signal != -EINTR && signal != -EAGAIN)
        gw_fail("cannot wait for a request", 0, signal);
    return signal > 0;
}

// The last thread that has parked waits here, all signals blocked, until the process is let go on.
void gw_stand_still(uint32_t threads, uint64_t requested) {
    // They would be threads that nobody knows where the memory goes on.
    gw_wait_for_ended_threads();
    // Those of a state that was loaded have long been sent.
    __gw_signal_table.pending_count = 0;
    gw_begin_rest_time();
    gw_rest.threads = threads;
    gw_rest.park_nanoseconds = gw_nanoseconds() - requested;
    while (gw_is_rest_wanted()) {
        struct gw_signal_info information = {0};
        __atomic_store_n(&gw_rest.resting, 1, __ATOMIC_SEQ_CST);
        if (gw_next_request(&information, 0))
            gw_hear_at_rest(&information);
    }
    __atomic_store_n(&gw_rest.resting, 0, __ATOMIC_SEQ_CST);
    gw_end_rest_time();
}

static void change_mask(int how) {
    uint64_t set = gw_signal_bit(GW_SIGNAL);
    long error = gw_call(GW_NR_rt_sigprocmask, how, (long)&set, 0, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot hold back the signal that asks for rest", 0, error);
}

void gw_hold_requests(void) { change_mask(SIG_BLOCK); }

void gw_let_requests_through(void) { change_mask(SIG_UNBLOCK); }
