// Where the threads of a process go on whose memory was restored from the images of one at rest, under this set's
// executable: text and private data are as the file has them, native stacks are empty, neutral memory is as it was.
// Timers, descriptors, masks and pending signals are the kernel's, and who restored the process has brought them back.
//
//     each thread: SET/entry.S → gw_restored
//        → the first one looks at the runtime's records, and builds what is private; the others wait for it
//        → each takes its frames back
#include "private.h"

static uint32_t begun; // 0; 1: a thread builds what is private; 2: it is there
static const char came[] = "memory that was restored";

_Noreturn void gw_restored(void);

static void refuse_if(const char *why) {
    if (why)
        gw_fail(why, came, 0);
}

// Can it be read and written? The kernel takes a set of signals from the page, all of which are blocked already, and
// adds zero to a word there. The first of them also waits for a page that is still to come (userfaultfd), which the
// second does not.
static int is_accessible(uint64_t page) {
    enum { SIG_BLOCK = 0, SIGNAL_SET_BYTES = 8 };
    const long add_zero = 1L << 28;
    if (gw_call(GW_NR_rt_sigprocmask, SIG_BLOCK, (long)page, 0, SIGNAL_SET_BYTES, 0, 0) != 0)
        return 0;
    return gw_call(GW_NR_futex, (long)page, GW_FUTEX_WAKE_OP | GW_FUTEX_PRIVATE, 0, 0, (long)page, add_zero) >= 0;
}

// Is this the program's memory, and there? A native stack is not the program's.
static int has_memory(const void *unused, uint64_t begin, uint64_t length) {
    (void)unused;
    uint64_t end = begin + length;
    uint64_t first = begin & -GW_PAGE;
    int is_data = begin >= (uint64_t)__gw_neutral_data_begin && end <= (uint64_t)__gw_neutral_data_end;
    int is_given_out = (begin >= GW_HEAP_BEGIN && end <= GW_HEAP_END) || (begin >= GW_MAP_TABLE && end <= GW_MAP_END);
    if (end < begin)
        return 0;
    if (!is_data && !is_given_out && !gw_is_of_used_slot(begin, end))
        return 0;
    for (uint64_t page = first; page < end; page += GW_PAGE)
        if (!is_accessible(page))
            return 0;
    return 1;
}

static void check_records(void) {
    uint32_t running = 0;
    int has_main = 0;
    refuse_if(gw_unsound_mappings(has_memory, 0));
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++) {
        if (!__gw_threads.used[slot])
            continue;
        refuse_if(gw_unsound_slot(slot, has_memory, 0));
        const struct gw_thread *thread = gw_thread_of_slot(slot);
        uint64_t frames = gw_quarter_begin(slot, GW_CONTINUATION);
        if (!has_memory(0, frames, (uint64_t)thread->continuation - frames))
            refuse_if("the state's frames are not all there:");
        running += thread->state == GW_RUNNING;
        has_main |= thread->state == GW_RUNNING && thread->tid == __gw_threads.process;
    }
    if (running == 0 || __gw_threads.process == 0 ||
        __gw_threads.process >= GW_TID_FIRST_GENERATION << GW_TID_SLOT_BITS)
        refuse_if("the state has no thread to go on with:");
    refuse_if(gw_unsound_numbers());
    refuse_if(gw_unsound_signals());
    // All are there before one of them runs. A main thread that has ended is there as a zombie.
    long threads = gw_count_threads();
    if (threads >= 0 && threads < (long)running + !has_main)
        gw_fail("a thread that the program has was not restored", 0, 0);
}

// A request that came again when the process was at rest already may have been restored with what else was pending. It
// is of the rest that is over, and would begin another one that nobody waits for.
static void forget_requests(void) {
    static const uint64_t no_time[2];
    struct gw_signal_info information;
    while (gw_next_request(&information, no_time)) {
    }
}

static void build(void) {
    check_records();
    gw_enter_restored_threads();
    gw_add_rest_time();
    gw_install_actions();
    forget_requests();
    gw_listen();
}

_Noreturn void gw_restored(void) {
    struct gw_thread *thread = gw_this_thread();
    uint32_t none = 0;
    gw_block_signals();
    if (__atomic_compare_exchange_n(&begun, &none, 1, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        build();
        __atomic_store_n(&begun, 2, __ATOMIC_RELEASE);
        gw_wake(&begun, GW_FUTEX_PRIVATE);
    }
    while (__atomic_load_n(&begun, __ATOMIC_ACQUIRE) != 2)
        gw_wait(&begun, 1, GW_FUTEX_PRIVATE);
    gw_begin_restored_thread(thread);
    gw_apply_mask(thread);
    long status =
        gw_run(thread, (char *)gw_quarter_end(thread->slot, GW_NATIVE_STACK) - GW_RUNTIME_STACK, gw_call_next, 0);
    if (thread->tid == __gw_threads.process)
        gw_exit((int)status);
    gw_end_thread(thread, (int)status);
}
