// Threads: what the C library asks for to make them, and how they begin and end. Every thread has a slot of the address
// plan (isa/ABI.md, section 3); which slots are in use is neutral (__gw_threads), which kernel thread runs in one is
// not.
//
// The kernel writes to no neutral memory when a thread ends, or it would do so behind the back of a capture: it clears
// the thread's native number, and the thread itself clears what the program asked the kernel to clear.
#include "private.h"

enum { PROT_READ_WRITE = 3, MAP_PRIVATE_ANONYMOUS_FIXED_NORESERVE = 0x4032, MADV_NOHUGEPAGE = 15 };
enum { ESRCH = 3, EINVAL = 22, SIG_SETMASK = 2, SIGNAL_SET_BYTES = 8 };
// CLONE_VM, FS, FILES, SIGHAND, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID.
enum { CLONE_THREAD_FLAGS = 0x3d0f00 };

void *__gw_thread_new(void);
long __gw_thread_start(struct gw_thread *thread, int (*function)(void *), void *argument, int flags, uint32_t *parent,
                       uint32_t *child);
void __gw_thread_free(struct gw_thread *thread);
_Noreturn void __gw_thread_exit(struct gw_thread *thread);
_Noreturn void __gw_thread_end(int status);
long __gw_real_id(long id);
void __gw_forked(void);
long gw_clone(long flags, void *stack, uint32_t *word, void *block);

// With it, each slot that is used has its memory.
static uint32_t slots_lock;
// The thread that has the number of the process.
static uint32_t main_slot;

void gw_map_slot(uint32_t slot) {
    for (int quarter = GW_NATIVE_STACK; quarter <= GW_CONTROL; quarter++) {
        uint64_t begin = gw_quarter_begin(slot, (enum gw_quarter)quarter);
        uint64_t length = gw_quarter_end(slot, (enum gw_quarter)quarter) - begin;
        long result = gw_call(GW_NR_mmap, (long)begin, (long)length, PROT_READ_WRITE,
                              MAP_PRIVATE_ANONYMOUS_FIXED_NORESERVE, -1, 0);
        if (result != (long)begin)
            gw_fail("cannot map a thread's stacks", 0, result);
        // Of each a few pages are used: a huge one would be 2 MB that move with the process. A kernel without huge
        // pages knows no such advice.
        long error = gw_call(GW_NR_madvise, (long)begin, (long)length, MADV_NOHUGEPAGE, 0, 0, 0);
        if (error != 0 && error != -EINVAL)
            gw_fail("cannot keep huge pages from a thread's stacks", 0, error);
    }
}

static void unmap_slot(uint32_t slot) {
    long error = gw_call(GW_NR_munmap, (long)gw_slot_begin(slot), (long)gw_slot_size(slot), 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot unmap a thread's stacks", 0, error);
}

// Until the kernel thread that ran in the slot is gone for good: it needs its native stack to the last.
static void wait_for_end(uint32_t slot) {
    uint32_t *word = &gw_native_threads[slot].tid;
    for (;;) {
        uint32_t tid = __atomic_load_n(word, __ATOMIC_ACQUIRE);
        if (tid == 0)
            return;
        // Not a private futex, since the kernel wakes it as one that is not.
        gw_wait(word, tid, 0);
    }
}

enum { MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x4022, PROT_NONE = 0 };
// From a sixteenth of the slot's native stack on, frames get room for sixteen times what they are: a clone's native
// frame has its frame's values in it, and registers besides.
enum { FEW_FRAMES = 16, TIMES_FRAMES = 16 };

// The top of the native stack on which a thread takes its frames back. Those of clones may be larger than those of the
// functions that they go on for, and another set's are, so a chain of calls that had fitted might fit no more. Where
// the kernel has no memory left, the slot's stack has to do.
char *gw_make_room(const struct gw_thread *thread, char *stack_top) {
    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    uint64_t frames = gw_frame_bytes(thread);
    uint64_t own = gw_slot_size(thread->slot) / 4;
    if (frames <= own / FEW_FRAMES)
        return stack_top;
    uint64_t size = (own + frames * TIMES_FRAMES + GW_PAGE - 1) & -GW_PAGE;
    long room = gw_call(GW_NR_mmap, 0, (long)size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0);
    if (gw_is_error(room))
        return stack_top;
    native->room = (char *)room;
    native->room_size = size;
    if (gw_call(GW_NR_mprotect, room, (long)GW_GUARD, PROT_NONE, 0, 0, 0) == 0)
        return native->room + size;
    gw_give_up_room(thread->slot);
    return stack_top;
}

// When nothing runs on it.
void gw_give_up_room(uint32_t slot) {
    struct gw_native_thread *native = &gw_native_threads[slot];
    if (!native->room)
        return;
    long error = gw_call(GW_NR_munmap, (long)native->room, (long)native->room_size, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot unmap a thread's native stack", 0, error);
    native->room = 0;
}

// Of the stack that the slot's thread runs on.
uint64_t gw_native_stack_begin(uint32_t slot) {
    const char *room = gw_native_threads[slot].room;
    return room ? (uint64_t)room + GW_GUARD : gw_quarter_begin(slot, GW_NATIVE_STACK);
}

// Threads that have left the world may still be on their way out of it. What they ended on is not needed any more.
void gw_wait_for_ended_threads(void) {
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++)
        if (!gw_native_threads[slot].live) {
            wait_for_end(slot);
            gw_give_up_room(slot);
        }
}

// Does this lie in a slot that is taken, and not in its native stack?
int gw_is_of_used_slot(uint64_t begin, uint64_t end) {
    uint64_t behind_main = GW_SLOTS_BEGIN + GW_MAIN_SLOT_SIZE;
    if (begin < GW_SLOTS_BEGIN || begin >= GW_MAP_TABLE)
        return 0;
    uint32_t slot = begin < behind_main ? 0 : (uint32_t)((begin - behind_main) / GW_SLOT_SIZE + 1);
    if (!__gw_threads.used[slot])
        return 0;
    for (int quarter = GW_CONTINUATION; quarter <= GW_CONTROL; quarter++)
        if (begin >= gw_quarter_begin(slot, (enum gw_quarter)quarter) && begin <= end &&
            end <= gw_quarter_end(slot, (enum gw_quarter)quarter))
            return 1;
    return 0;
}

// Makes room for a thread; null when all slots are taken. The C library fills in its part and starts it.
void *__gw_thread_new(void) {
    uint32_t slot = 1;
    __gw_lock(&slots_lock);
    while (slot < GW_SLOTS && __gw_threads.used[slot])
        slot++;
    if (slot == GW_SLOTS) {
        __gw_unlock(&slots_lock);
        return 0;
    }
    uint32_t generation = GW_TID_FIRST_GENERATION + __gw_threads.made++ % GW_TID_GENERATIONS;
    // A thread that has freed its slot itself takes no lock any more that this one holds.
    wait_for_end(slot);
    gw_give_up_room(slot);
    gw_map_slot(slot);
    struct gw_thread *thread = gw_thread_of_slot(slot);
    thread->self = thread;
    thread->slot = slot;
    thread->tid = generation << GW_TID_SLOT_BITS | slot;
    thread->state = GW_IDLE;
    thread->continuation = (char *)gw_quarter_begin(slot, GW_CONTINUATION);
    thread->data_stack = (char *)gw_quarter_end(slot, GW_DATA_STACK) - GW_STACK_GAP;
    __gw_threads.used[slot] = 1;
    __gw_unlock(&slots_lock);
    if (__gw_tls_size > (uintptr_t)gw_signals_of(thread) - (uintptr_t)thread - GW_TLS_OFFSET)
        gw_fail("the thread-local variables are larger than a thread's slot", 0, 0);
    __builtin_memcpy((char *)thread + GW_TLS_OFFSET, __gw_tls_image, __gw_tls_image_size);
    return thread;
}

static char *runtime_stack_top(const struct gw_thread *thread) {
    return (char *)gw_quarter_end(thread->slot, GW_NATIVE_STACK);
}

static void set_mask(const uint64_t *mask, uint64_t *old) {
    long error = gw_call(GW_NR_rt_sigprocmask, SIG_SETMASK, (long)mask, (long)old, SIGNAL_SET_BYTES, 0, 0);
    if (error != 0)
        gw_fail("cannot block signals", 0, error);
}

// Lets the kernel start a thread that has entered the world.
static long start(struct gw_thread *thread) {
    static const uint64_t all = UINT64_MAX;
    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    // The thread unblocks them itself. (qemu-user also needs it: a signal that comes to the caller right now would
    // leave them blocked in the new thread for good.)
    uint64_t mask;
    set_mask(&all, &mask);
    long result = gw_clone(CLONE_THREAD_FLAGS, runtime_stack_top(thread), &native->tid, thread);
    set_mask(&mask, 0);
    return result;
}

// As clone with the flags of a C library; the numbers are those that the program knows.
long __gw_thread_start(struct gw_thread *thread, int (*function)(void *), void *argument, int flags, uint32_t *parent,
                       uint32_t *child) {
    enum { CLONE_DETACHED = 0x400000 };
    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    if ((flags & ~CLONE_DETACHED) != CLONE_THREAD_FLAGS)
        return -EINVAL;
    uint32_t tid = thread->tid;
    *native = (struct gw_native_thread){.function = function, .argument = argument};
    thread->child_word = child;
    gw_inherit_signals(thread);
    // Before the thread runs: it may look.
    *parent = tid;
    thread->state = GW_RUNNING;
    gw_enter_world(thread);
    long result = start(thread);
    if (gw_is_error(result)) {
        thread->state = GW_IDLE;
        gw_leave_world(thread);
        return result;
    }
    // By now it may have ended.
    return (long)tid;
}

// After a join, or when it was not started.
void __gw_thread_free(struct gw_thread *thread) {
    uint32_t slot = thread->slot;
    wait_for_end(slot);
    __gw_lock(&slots_lock);
    gw_give_up_room(slot);
    unmap_slot(slot);
    __gw_threads.used[slot] = 0;
    __gw_unlock(&slots_lock);
}

static long call_function(void *slot_number) {
    const struct gw_native_thread *native = &gw_native_threads[(uintptr_t)slot_number];
    return native->function(native->argument);
}

_Noreturn void gw_thread_main(struct gw_thread *thread) {
    uint32_t slot = thread->slot;
    long (*function)(void *) = gw_native_threads[slot].function ? call_function : gw_call_next;
    if (function == gw_call_next)
        gw_resume_signals(thread);
    else
        gw_apply_mask(thread);
    long status = gw_run(thread, runtime_stack_top(thread) - GW_RUNTIME_STACK, function, (void *)(uintptr_t)slot);
    gw_end_thread(thread, (int)status);
}

// The bare end of a kernel thread. What it leaves to the program is done before, while a capture would wait for it.
_Noreturn static void end(struct gw_thread *thread, int status, int free_slot) {
    uint32_t *word = thread->child_word;
    uint32_t slot = thread->slot;
    // A request for a capture that comes from now on must not end here.
    gw_block_signals();
    gw_end_signals(thread);
    thread->child_word = 0;
    thread->state = GW_IDLE;
    if (free_slot) {
        __gw_lock(&slots_lock);
        __gw_threads.used[slot] = 0;
        __gw_unlock(&slots_lock);
    }
    if (word)
        gw_clear_and_wake(word);
    gw_leave_world(thread);
    for (;;)
        gw_call(GW_NR_exit, status, 0, 0, 0, 0, 0);
}

_Noreturn void gw_end_thread(struct gw_thread *thread, int status) { end(thread, status, 0); }

// The kernel call exit of the program.
_Noreturn void __gw_thread_end(int status) { end(gw_this_thread(), status, 0); }

// A detached thread ends: nobody will free its slot. Who takes it next waits until the kernel is done with it.
_Noreturn void __gw_thread_exit(struct gw_thread *thread) { end(thread, 0, 1); }

// The kernel's number of a process or a thread that the program knows by `id`; others are passed on as they are.
long __gw_real_id(long id) {
    if (id <= 0)
        return id;
    if (id == __gw_threads.process) {
        uint32_t tid = __atomic_load_n(&gw_native_threads[main_slot].tid, __ATOMIC_ACQUIRE);
        // The first thread's number is the process's, and stays that when the thread has ended.
        return tid != 0 ? (long)tid : (long)gw_process;
    }
    if (id < (long)GW_TID_FIRST_GENERATION << GW_TID_SLOT_BITS)
        return id;
    uint32_t slot = (uint32_t)id & ((1U << GW_TID_SLOT_BITS) - 1);
    if (slot >= GW_SLOTS)
        return -ESRCH;
    const struct gw_native_thread *native = &gw_native_threads[slot];
    while (__atomic_load_n(&native->live, __ATOMIC_ACQUIRE) && gw_thread_of_slot(slot)->tid == id) {
        uint32_t tid = __atomic_load_n(&native->tid, __ATOMIC_ACQUIRE);
        if (tid != 0)
            return (long)tid;
        // A thread of a state file that the first thread is about to start.
        (void)gw_call(GW_NR_sched_yield, 0, 0, 0, 0, 0, 0);
    }
    return -ESRCH;
}

static void take_number_of_process(struct gw_thread *thread) {
    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    gw_process = (uint32_t)gw_call(GW_NR_getpid, 0, 0, 0, 0, 0, 0);
    native->tid = gw_process;
    main_slot = thread->slot;
    (void)gw_call(GW_NR_set_tid_address, (long)&native->tid, 0, 0, 0, 0, 0);
}

// The process's first thread, before it runs anything of the program.
void gw_begin_main(struct gw_thread *thread) {
    take_number_of_process(thread);
    if (__gw_threads.process == 0) {
        __gw_threads.process = gw_process;
        __gw_threads.used[0] = 1;
        thread->tid = gw_process;
    }
    gw_enter_world(thread);
}

// The child of a fork finds no slot half made.
void gw_lock_slots(void) { __gw_lock(&slots_lock); }

void gw_unlock_slots(void) { __gw_unlock(&slots_lock); }

// In the child of a fork: this thread only is left, and it is another process's now.
void __gw_forked(void) {
    struct gw_thread *thread = gw_this_thread();
    slots_lock = 0;
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++) {
        if (slot == thread->slot)
            continue;
        // Memory without a thread, also where the thread had parked or was about to begin.
        if (__gw_threads.used[slot]) {
            gw_thread_of_slot(slot)->state = GW_IDLE;
            gw_thread_of_slot(slot)->continuation = (char *)gw_quarter_begin(slot, GW_CONTINUATION);
        }
        // Also of one that was about to end: no kernel clears it here.
        gw_native_threads[slot].tid = 0;
        gw_give_up_room(slot);
        gw_drop_spill(slot);
    }
    gw_forked_world(thread);
    take_number_of_process(thread);
    __gw_threads.process = gw_process;
    thread->tid = gw_process;
}

// All threads that were at rest are in the world before one of them goes on.
void gw_enter_restored_threads(void) {
    gw_process = (uint32_t)gw_call(GW_NR_getpid, 0, 0, 0, 0, 0, 0);
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++) {
        struct gw_thread *thread = gw_thread_of_slot(slot);
        if (!__gw_threads.used[slot] || thread->state != GW_RUNNING)
            continue;
        if (thread->tid == __gw_threads.process)
            main_slot = slot;
        gw_enter_world(thread);
    }
}

// The thread pointer came with the thread. The control block of another slot was not looked at.
static int is_in_use(const struct gw_thread *thread) {
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++)
        if (__gw_threads.used[slot] && gw_thread_of_slot(slot) == thread)
            return 1;
    return 0;
}

void gw_begin_restored_thread(struct gw_thread *thread) {
    static const char why[] = "a thread was restored that the program does not have, or twice";
    if (!is_in_use(thread))
        gw_fail(why, 0, 0);

    struct gw_native_thread *native = &gw_native_threads[thread->slot];
    uint32_t none = 0;
    uint32_t tid = (uint32_t)gw_call(GW_NR_gettid, 0, 0, 0, 0, 0, 0);
    // The kernel's main thread is the program's.
    if ((tid == gw_process) != (thread->tid == __gw_threads.process))
        gw_fail("a thread was restored as another one", 0, 0);
    if (!native->live || !__atomic_compare_exchange_n(&native->tid, &none, tid, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        gw_fail(why, 0, 0);
    (void)gw_call(GW_NR_set_tid_address, (long)&native->tid, 0, 0, 0, 0, 0);
}

void gw_start_loaded_threads(void) {
    static uint8_t loaded[GW_SLOTS];
    // All are in the world before any of them runs: the first ones may end others, free slots and take new ones while
    // the last ones are being started.
    for (uint32_t slot = 1; slot < GW_SLOTS; slot++)
        if (__gw_threads.used[slot] && gw_thread_of_slot(slot)->state == GW_RUNNING) {
            loaded[slot] = 1;
            gw_enter_world(gw_thread_of_slot(slot));
        }
    for (uint32_t slot = 1; slot < GW_SLOTS; slot++) {
        long result = loaded[slot] ? start(gw_thread_of_slot(slot)) : 0;
        if (gw_is_error(result))
            gw_fail("cannot start a thread of the state file", gw_settings.resume, result);
    }
}
