// The runtime's side of capture and resume: what compiled functions call at a poll, when they give up their frame, and
// when they take one back; and setjmp and longjmp, which use the same early return.
//
// The continuation buffer holds frames, the innermost lowest. A frame is its values and then a trailer of 8 bytes:
//
//     | values of site, gw_sites[site].size bytes | u32 site | u32 GW_TRAILER |
#include "private.h"

#define GW_TRAILER 0x47574652U // "GWFR", read as a number

// More than a frame that is taken off and what it calls first need.
enum { LEAST_STACK = 64 << 10 };

struct trailer {
    uint32_t site;
    uint32_t mark;
};

static char *buffer_begin(const struct gw_thread *thread) {
    return (char *)gw_quarter_begin(thread->slot, GW_CONTINUATION);
}

// Behind a buffer that is full, frames are in memory of this kind, the outermost in the last one, each up to the
// thread's continuation pointer. It is no part of what a state or a process at rest has, so it is there only from a
// stop for a rest until that has failed, and the frames are taken back.
struct gw_spill {
    struct gw_spill *before;
    char *continuation; // where the frames before this memory end
    uint64_t size;
};

enum { PROT_READ_WRITE = 3, MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x4022 };

static struct gw_spill **spill_of(const struct gw_thread *thread) { return &gw_native_threads[thread->slot].spill; }

static uint64_t room_left(const struct gw_thread *thread) {
    const struct gw_spill *spill = *spill_of(thread);
    uint64_t end = spill ? (uint64_t)spill + spill->size : gw_quarter_end(thread->slot, GW_CONTINUATION);
    return end - (uint64_t)thread->continuation;
}

static void make_room(struct gw_thread *thread, uint64_t needed) {
    uint64_t size = gw_quarter_end(thread->slot, GW_CONTINUATION) - gw_quarter_begin(thread->slot, GW_CONTINUATION);
    if (thread->state == GW_JUMPING && needed <= size) {
        // Nobody wants what the frames between give up.
        thread->continuation = buffer_begin(thread);
        return;
    }
    // The guard behind the buffer would end the process as well, but say nothing.
    if (!gw_may_fail())
        gw_fail("the continuation buffer is full: the call chain is too deep to be captured", 0, 0);
    size += (needed + sizeof(struct gw_spill) + GW_PAGE - 1) & -GW_PAGE;
    long memory = gw_call(GW_NR_mmap, 0, (long)size, PROT_READ_WRITE, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0);
    if (gw_is_error(memory))
        gw_fail("no memory for a call chain that is too deep to rest", 0, memory);
    struct gw_spill *spill = (struct gw_spill *)memory;
    *spill = (struct gw_spill){*spill_of(thread), thread->continuation, size};
    *spill_of(thread) = spill;
    thread->continuation = (char *)(spill + 1);
}

static void unmap(struct gw_spill *spill) {
    long error = gw_call(GW_NR_munmap, (long)spill, (long)spill->size, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot unmap frames", 0, error);
}

// Frees memory of that kind from which all frames have been taken back.
static void leave_empty_spill(struct gw_thread *thread) {
    struct gw_spill *spill = *spill_of(thread);
    if (!spill || thread->continuation != (char *)(spill + 1))
        return;
    thread->continuation = spill->continuation;
    *spill_of(thread) = spill->before;
    unmap(spill);
}

// In the child of a fork, of a thread that is not there.
void gw_drop_spill(uint32_t slot) {
    struct gw_spill **spill = &gw_native_threads[slot].spill;
    while (*spill) {
        struct gw_spill *last = *spill;
        *spill = last->before;
        unmap(last);
    }
}

// Of all frames that a thread has given up.
uint64_t gw_frame_bytes(const struct gw_thread *thread) {
    uint64_t bytes = 0;
    const char *end = thread->continuation;
    for (const struct gw_spill *spill = *spill_of(thread); spill; spill = spill->before) {
        bytes += (uint64_t)(end - (const char *)(spill + 1));
        end = spill->continuation;
    }
    return bytes + (uint64_t)(end - buffer_begin(thread));
}

// Part of the program: runs the handler of the signal that this thread holds.
void __gw_deliver(void);

// Behind a poll's branch. All registers are kept, so that a poll costs the loop around it none.
__attribute__((preserve_all)) void __gw_poll_slow(void) {
    struct gw_thread *thread = gw_this_thread();
    if (thread->state != GW_RUNNING)
        gw_fail("a poll was reached during an early return", 0, 0);
    if (thread->uninterrupted)
        return;
    // A handler that is captured, or left by longjmp, has started the early return, which the caller goes on with. Its
    // frames lie below the caller's, so at a resume it goes on in place of this call.
    while (thread->request & GW_REQUEST_SIGNAL) {
        // It may also be left from the handler of a fault that it has caused.
        struct gw_anchor anchor;
        if (__gw_anchor(&anchor, 0) == 0)
            __gw_deliver();
        thread->anchors = anchor.before;
        if (thread->state != GW_RUNNING)
            return;
    }
    if (thread->request & GW_REQUEST_COUNT)
        gw_count_polls(thread);
    if (thread->request & GW_REQUEST_CAPTURE) {
        gw_stop_world(thread);
        __atomic_fetch_and(&thread->request, ~(uint32_t)GW_REQUEST_CAPTURE, __ATOMIC_SEQ_CST);
        thread->state = GW_CAPTURING;
    }
}

// Makes room for a frame; the caller stores its values to the result and returns.
__attribute__((preserve_all)) char *__gw_push(uint32_t site) {
    struct gw_thread *thread = gw_this_thread();
    uint64_t size = __gw_sites[site].size;
    if (size + sizeof(struct trailer) > room_left(thread))
        make_room(thread, size + sizeof(struct trailer));
    char *values = thread->continuation;
    struct trailer *trailer = (struct trailer *)(values + size);
    trailer->site = site;
    trailer->mark = GW_TRAILER;
    thread->continuation = values + size + sizeof(struct trailer);
    return values;
}

// The innermost frame waits at a poll, which is over.
static void nothing(void) {}

// Takes the outermost frame off the buffer; the clone that is returned finds it through the control block.
void *__gw_next(void) {
    struct gw_thread *thread = gw_this_thread();
    // Another set's frames may have been smaller, or those of the functions that these clones go on for.
    if ((uintptr_t)__builtin_frame_address(0) < gw_native_stack_begin(thread->slot) + LEAST_STACK)
        gw_fail("the native stack is full: the call chain is too deep to go on with on this instruction set", 0, 0);
    leave_empty_spill(thread);
    if (thread->continuation == buffer_begin(thread))
        return (void *)nothing;
    const struct trailer *trailer = (const struct trailer *)thread->continuation - 1;
    if (trailer->mark != GW_TRAILER || trailer->site >= __gw_site_count)
        gw_fail("the continuation buffer is damaged", 0, 0);
    const struct gw_site *site = &__gw_sites[trailer->site];
    thread->site = trailer->site;
    thread->frame = (char *)trailer - site->size;
    thread->continuation = thread->frame;
    return (void *)(uintptr_t)site->clone;
}

// The clone of a large function works on a copy of its frame, and gives up the first part of that.
void __gw_unpack(char *slots) {
    const struct gw_thread *thread = gw_this_thread();
    __builtin_memcpy(slots, thread->frame, __gw_sites[thread->site].size);
}

void __gw_repack(uint32_t site, const char *slots) { __builtin_memcpy(__gw_push(site), slots, __gw_sites[site].size); }

// Runs a captured thread on from its outermost frame. A thread's first function returns int or pointer.
long gw_call_next(void *unused) {
    (void)unused;
    return ((long (*)(void))__gw_next())();
}

// A jmp_buf, for the C library an array of at least 22 longs and a signal mask.
struct jump {
    void *frame; // the activation that called setjmp
    char *data_stack;
    uint32_t number; // which setjmp of its function
    uint32_t has_mask;
    uint64_t mask;
};

void __gw_setjmp(void *buffer, void *frame, uint32_t number, int keep_mask) {
    struct jump *jump = buffer;
    jump->frame = frame;
    jump->data_stack = gw_this_thread()->data_stack;
    jump->number = number;
    jump->has_mask = keep_mask != 0;
    if (keep_mask)
        jump->mask = gw_signals_of(gw_this_thread())->mask;
}

// Returns, and everybody else does until the frame is reached.
void __gw_longjmp(void *buffer, int value) {
    struct gw_thread *thread = gw_this_thread();
    const struct jump *jump = buffer;
    thread->jump_frame = jump->frame;
    thread->jump_stack = jump->data_stack;
    thread->jump_number = jump->number;
    thread->jump_value = value != 0 ? value : 1;
    if (jump->has_mask) {
        gw_signals_of(thread)->mask = jump->mask & ~GW_NEVER_BLOCKED;
        gw_apply_mask(thread);
    }
    thread->state = GW_JUMPING;
}

// The frame is reached: the number of its setjmp in the upper half, the value in the lower. Anchors of the functions
// that have been left are below it on the native stack.
uint64_t gw_land(uint64_t stack_pointer) {
    struct gw_thread *thread = gw_this_thread();
    const struct gw_anchor *anchor = thread->anchors;
    while (anchor && anchor->stack_pointer < stack_pointer)
        anchor = anchor->before;
    thread->anchors = (void *)anchor;
    thread->state = GW_RUNNING;
    thread->jump_frame = 0;
    thread->data_stack = thread->jump_stack;
    // The frames between gave up values that nobody wants.
    thread->continuation = buffer_begin(thread);
    return (uint64_t)thread->jump_number << 32 | (uint32_t)thread->jump_value;
}
