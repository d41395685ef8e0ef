// The control block of a thread, at the thread pointer, and the slot it lies in. Neutral: the same on every set and
// part of a state. isa/ABI.md, sections 3 and 4; the plugin knows the offsets that it uses (isa/plugin/Program.h).
#ifndef GW_THREAD_H
#define GW_THREAD_H

#include <stddef.h>
#include <stdint.h>

// Other threads and signal handlers set bits of it, so every change is atomic.
enum gw_request {
    GW_REQUEST_CAPTURE = 1, // leave at the next poll
    GW_REQUEST_COUNT = 2,   // polls are counted (GODWIT_STATE_POLLS, GODWIT_STATE_TURN)
    GW_REQUEST_SIGNAL = 4,  // a signal is held (gw/signals.h): its handler runs at the next poll
};

enum gw_thread_state {
    GW_RUNNING = 0,
    GW_CAPTURING = 1, // every function saves its frame and returns
    GW_JUMPING = 2,   // a longjmp is on its way to its frame
    GW_IDLE = 3,      // no thread runs in the slot: it has not started yet, or has ended and nobody has joined it
};

struct gw_thread {
    struct gw_thread *self;
    volatile uint32_t request;
    uint32_t state;
    char *data_stack;
    char *continuation; // next free byte of the continuation buffer
    char *frame;        // what __gw_next has taken off last, for the clone it yields
    uint32_t site;
    uint32_t slot;
    void *jump_frame; // the activation that a longjmp goes to; null when none is on its way
    char *jump_stack; // its data stack pointer
    uint32_t jump_number;
    int32_t jump_value;
    uint64_t fp_environment; // while parked: rounding mode and exception flags, coded as FPCR and FPSR
    uint32_t tid;            // as the program knows it
    uint32_t unused;
    uint32_t *child_word;   // set to zero, and its waiters woken, when the thread ends (CLONE_CHILD_CLEARTID)
    uint32_t uninterrupted; // not zero: polls do nothing, and no kernel call is given up (the handler of a fault runs)
    uint64_t robust_list;   // what set_robust_list was told, for get_robust_list
    void *anchors;          // the innermost of them (private/capture.c); no part of a state
};

_Static_assert(offsetof(struct gw_thread, request) == 8, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, state) == 12, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, data_stack) == 16, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, frame) == 32, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, site) == 40, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, jump_frame) == 48, "isa/plugin/Program.h");
_Static_assert(offsetof(struct gw_thread, uninterrupted) == 96, "SET/entry.S");
_Static_assert(offsetof(struct gw_thread, anchors) == 112, "isa/plugin/Program.h");
_Static_assert(sizeof(struct gw_thread) <= 256, "the C library's part begins at 256");

#define GW_LIBRARY_OFFSET 256 // the C library's part of the control block
#define GW_TLS_OFFSET 2048    // the thread's TLS block

#define GW_PAGE 4096UL
#define GW_GUARD (64UL << 10)

#define GW_HEAP_BEGIN 0x100000000UL
#define GW_HEAP_END 0x1000000000UL
#define GW_SLOTS_BEGIN 0x1000000000UL
#define GW_MAIN_SLOT_SIZE (256UL << 20)
#define GW_SLOT_SIZE (64UL << 20)
#define GW_SLOTS 2045U
#define GW_MAP_TABLE 0x3000000000UL
#define GW_MAP_BEGIN 0x3004000000UL
#define GW_MAP_END 0x7000000000UL

// A slot's quarters, low to high. Each begins with a guard that is never mapped.
// Left free at the top of a data stack. Functions such as syscall and fcntl read more arguments than were passed: on
// other machines those are registers, here they lie behind the arguments in memory.
#define GW_STACK_GAP 64

enum gw_quarter { GW_NATIVE_STACK, GW_CONTINUATION, GW_DATA_STACK, GW_CONTROL };

static inline uintptr_t gw_slot_size(uint32_t slot) { return slot == 0 ? GW_MAIN_SLOT_SIZE : GW_SLOT_SIZE; }

static inline uintptr_t gw_slot_begin(uint32_t slot) {
    return slot == 0 ? GW_SLOTS_BEGIN : GW_SLOTS_BEGIN + GW_MAIN_SLOT_SIZE + (slot - 1) * GW_SLOT_SIZE;
}

static inline uintptr_t gw_quarter_begin(uint32_t slot, enum gw_quarter quarter) {
    return gw_slot_begin(slot) + quarter * (gw_slot_size(slot) / 4) + GW_GUARD;
}

static inline uintptr_t gw_quarter_end(uint32_t slot, enum gw_quarter quarter) {
    return gw_slot_begin(slot) + (quarter + 1) * (gw_slot_size(slot) / 4);
}

// Numbers of threads, as the program sees them, hold the slot in their lowest bits. They begin above all of the
// kernel's and stay below 2^30, since the C library keeps flags above them.
#define GW_TID_SLOT_BITS 11
#define GW_TID_FIRST_GENERATION 2048U // 2^22
#define GW_TID_GENERATIONS ((1U << 19) - GW_TID_FIRST_GENERATION)

// One per program, part of a state: who the program believes to be, and which slots are taken.
struct gw_threads {
    uint32_t process; // the number of the process when it began; the main thread's too
    uint32_t made;    // threads made so far
    uint8_t used[GW_SLOTS];
};

extern struct gw_threads __gw_threads;

static inline struct gw_thread *gw_thread_of_slot(uint32_t slot) {
    return (struct gw_thread *)gw_quarter_begin(slot, GW_CONTROL);
}

#endif
