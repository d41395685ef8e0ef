// What the files of the private runtime share. This code is native, one object per set, built without a C library; it
// is never suspended, and no neutral memory ever points at it.
#ifndef GW_PRIVATE_H
#define GW_PRIVATE_H

#include "gw/memory.h"
#include "gw/rest.h"
#include "gw/signals.h"
#include "gw/state.h"
#include "gw/thread.h"
#include "native.h"

struct gw_site {
    uint32_t clone; // address of the function that goes on from this site
    uint32_t size;  // bytes of the frame's values
};

// Made by the plugin and the layout.
extern const struct gw_site __gw_sites[];
extern const uint64_t __gw_site_count;
extern const char __gw_tls_image[];
extern const uint64_t __gw_tls_image_size, __gw_tls_size;
extern const uint8_t __gw_build_identity[32];
extern char __gw_text_end[], __gw_neutral_data_begin[], __gw_neutral_bss_begin[], __gw_neutral_data_end[];

// What the GODWIT_STATE_ variables ask for.
struct gw_settings {
    const char *save;
    const char *resume;
    const char *messages; // a file for what gw_fail says, since standard error is the program's; null: standard error
    const char *next;     // the variable that names the command to become when the state is written; null: end
    char **environment;   // what the process was started with, without settings; room for one variable more
    uint64_t polls;       // capture at this poll; 0: do not count
    uint64_t timer;       // microseconds; 0: none
    uint64_t signal;
    int turn;   // go on in place instead of leaving
    int kept;   // on resume: the process is the one that was captured, with all its descriptors
    int report; // say how long it took from the request to the file
};
extern struct gw_settings gw_settings;

// The signal that is the runtime's own. Sent by a thread to a thread of the program, it asks it to park; queued with
// GW_SI_REST, somebody asks for rest (gw/rest.h); otherwise somebody asks for a capture.
#define GW_SIGNAL GW_RESERVED_SIGNAL

static inline struct gw_thread *gw_this_thread(void) { return (struct gw_thread *)__builtin_thread_pointer(); }

static inline int gw_is_error(long result) { return (unsigned long)result >= (unsigned long)-4095L; }

// What is native about a thread of the program: gone after a capture.
struct gw_native_thread {
    uint32_t tid;     // the kernel's number; the kernel sets it to zero when the thread is gone
    uint32_t resumed; // no poll since the last stop
    uint32_t live;    // takes part in a capture
    char *room;       // a larger native stack, of a thread that goes on with many frames; null: its slot's
    uint64_t room_size;
    struct gw_spill *spill;  // frames that its continuation buffer has no room for; null: none (capture.c)
    int (*function)(void *); // what it begins with; null if it goes on from a state
    void *argument;
};
extern struct gw_native_thread gw_native_threads[GW_SLOTS];
extern uint32_t gw_process; // the kernel's number

// Where a function that a fault has left can be reached: what a call of __gw_anchor keeps. It is a local of the
// function, so in neutral memory, and of no use after a move; a thread's are dropped anew there. entry.S knows the
// offsets.
struct gw_anchor {
    struct gw_anchor *before;
    void *frame; // the activation that a longjmp goes to; null: a poll's, behind which the early return goes on
    uint32_t uninterrupted; // the thread's, at that time
    uint32_t unused;
    uint64_t program_counter;
    uint64_t stack_pointer;
    uint64_t registers[20];
};
_Static_assert(sizeof(struct gw_anchor) <= 256, "isa/plugin/Program.h");
// entry.S. The first returns 0, and 1 when the second has been called.
__attribute__((returns_twice)) int __gw_anchor(struct gw_anchor *anchor, void *frame);
_Noreturn void gw_return_to(const struct gw_anchor *anchor);

// capture.c
uint64_t gw_land(uint64_t stack_pointer);
long gw_call_next(void *unused);
uint64_t gw_frame_bytes(const struct gw_thread *thread);
void gw_drop_spill(uint32_t slot);

// arguments.c
struct gw_first_stack {
    uint64_t begin, end; // from what the kernel has put on it; no end: none was found
    uint64_t page;       // the kernel's pages
    int argc;
    char **argv;
    char **envp;
    unsigned long *auxv;
};
// What the program's main gets, all in neutral memory. The strings are in one piece: arguments, variables, end.
struct gw_arguments {
    int argc;
    char **argv;
    char **envp;
    unsigned long *auxv;
    char *strings, *variables, *end;
};
void gw_find_first_stack(long *kernel_stack, struct gw_first_stack *stack);
void gw_copy_arguments(struct gw_thread *thread, const struct gw_first_stack *stack, uint64_t variables,
                       struct gw_arguments *copies);
void gw_give_up_first_stack(const struct gw_first_stack *stack, const struct gw_arguments *copies);

// start.c: runs a thread until its function returns, with the stops in between.
long gw_run(struct gw_thread *thread, char *stack_top, long (*function)(void *), void *argument);

// lock.c: never held while a thread suspends or waits for another one's call.
void __gw_lock(uint32_t *word);
void __gw_unlock(uint32_t *word);
void gw_wait(uint32_t *word, uint32_t value, int operation);
void gw_wake(uint32_t *word, int operation);
void gw_clear_and_wake(uint32_t *word);
enum { GW_FUTEX_WAIT = 0, GW_FUTEX_WAKE = 1, GW_FUTEX_WAKE_OP = 5, GW_FUTEX_PRIVATE = 128 };

// world.c: all threads stop for a capture or for rest, and go on.
void gw_listen(void);
void gw_arm(void);
void gw_on_request(int signal, void *information, void *context);
void gw_hear_at_rest(const struct gw_signal_info *information);
void gw_count_polls(struct gw_thread *thread);
void gw_stop_world(struct gw_thread *thread);
int gw_may_fail(void);
void gw_park(struct gw_thread *thread);
void gw_enter_world(struct gw_thread *thread);
void gw_leave_world(struct gw_thread *thread);
void gw_forked_world(struct gw_thread *thread);

// threads.c
void gw_map_slot(uint32_t slot);
void gw_lock_slots(void);
void gw_unlock_slots(void);
void gw_begin_main(struct gw_thread *thread);
void gw_start_loaded_threads(void);
void gw_enter_restored_threads(void);
void gw_begin_restored_thread(struct gw_thread *thread);
void gw_wait_for_ended_threads(void);
char *gw_make_room(const struct gw_thread *thread, char *stack_top);
void gw_give_up_room(uint32_t slot);
uint64_t gw_native_stack_begin(uint32_t slot);
int gw_is_of_used_slot(uint64_t begin, uint64_t end);
// The top of a thread's native stack is for the runtime: what runs while the thread is parked.
#define GW_RUNTIME_STACK (64UL << 10)
_Noreturn void gw_end_thread(struct gw_thread *thread, int status);
_Noreturn void gw_thread_main(struct gw_thread *thread); // on a new thread's native stack

// save.c, load.c: end the process with a sentence on standard error when they fail.
void gw_save_state(const char *path);
void gw_load_state(const char *path);

// past_end.c: pages of mapped files, which may be behind the file's end. 0: it is not there, or no longer.
int gw_page_is_there(uint64_t page);
int gw_copy_page(uint64_t page, char *copy);
void gw_end_pages(void);
long gw_map_past_end(uint64_t address, uint64_t length, uint32_t protection);

// records.c: what is wrong with the runtime's own records in a state that has been loaded; null: nothing. Mappings
// first the table, then each section that maps memory, then the rest.
typedef int gw_has_memory(const void *state, uint64_t begin, uint64_t length);
const char *gw_unsound_slot(uint32_t slot, gw_has_memory *has, const void *state);
const char *gw_unsound_numbers(void);
const char *gw_unsound_signals(void);
const char *gw_unsound_mappings(gw_has_memory *has, const void *state);
const char *gw_unsound_section(const struct gw_state_section *section);
const char *gw_unsound_rest(void);

// rest.c
void gw_begin_listening(void);
int gw_hear_of_rest(const struct gw_signal_info *information);
void gw_take_rest_back(void);
int gw_is_rest_wanted(void);
int gw_next_request(struct gw_signal_info *information, const uint64_t *time);
void gw_forked_rest(void);
void gw_settle_for_rest(const struct gw_thread *thread);
void gw_stand_still(uint32_t threads, uint64_t requested);
void gw_hold_requests(void);
void gw_let_requests_through(void);

// SET/entry.S: what the kernel has the address of. They are the same on every set (isa/ABI.md, section 3).
void gw_entry_resume(void);
void gw_entry_request(int signal, void *information, void *context);
void gw_entry_signal(int signal, void *information, void *context);
void gw_entry_return(void);

// signals.c
void gw_on_signal(int number, void *information, void *context);
void gw_install_actions(void);
void gw_leave_window(struct gw_thread *thread, void *context, int is_own_signal);
void gw_apply_mask(struct gw_thread *thread);
void gw_begin_signals(struct gw_thread *thread);
void gw_inherit_signals(struct gw_thread *child);
void gw_end_signals(struct gw_thread *thread);
void gw_hold_signals(void);
void gw_begin_pending(void);
void gw_take_pending(struct gw_thread *thread);
void gw_save_signals(void);
void gw_load_signals(void);
void gw_resume_signals(struct gw_thread *thread);
long __gw_real_id(long id);

// timers.c: called by signals.c
void gw_save_timers(void);
void gw_timer_has_sent(int number);
int gw_timer_is_of_thread(int number);
void gw_load_timers(void);
void gw_begin_rest_time(void);
void gw_end_rest_time(void);
void gw_add_rest_time(void);

// What a section of a state says that is followed by bytes of its own.
typedef void gw_put_section(void *writer, enum gw_section_type type, uint32_t value, const void *head,
                            uint64_t head_length, const char *path);

// descriptors.c: open files, working directory, umask, for the state.
void gw_note_inherited_descriptors(void);
void gw_forget_inherited_descriptor(uint32_t number);
void gw_save_descriptors(gw_put_section *put, void *writer, int state_file);
void gw_each_descriptor(void (*call)(uint32_t number));

// reopen.c: the same on a resume. What it cannot open again ends the process.
const char *gw_unsound_descriptor(const struct gw_state_section *section, const char *bytes);
void gw_restore_descriptor(const struct gw_state_section *section, const char *bytes);
void gw_restore_lock(const struct gw_state_section *section, const char *bytes);
void gw_restore_process(const struct gw_state_section *section, const char *bytes);
void gw_begin_descriptors(void);
void gw_finish_descriptors(int is_complete);

// next.c
void gw_block_signals(void);
_Noreturn void gw_become_next(void);

// files.c: what both look at.
struct gw_file {
    uint64_t inode, device, special, size;
    uint32_t kind;
    int deleted;
};
long gw_look_at(int number, struct gw_file *file);
long gw_count_threads(void);
long gw_status_flags(int number);
#define GW_NUMBER_PATH 48
void gw_number_path(char *path, const char *directory, uint32_t number);

// locks.c: of an open file, for the state.
void gw_save_locks(uint32_t number, const struct gw_state_descriptor *d, const char *path, gw_put_section *put,
                   void *writer);

// crc32c.c
uint32_t gw_crc32c(uint32_t sum, const void *bytes, uint64_t length);

// Of CLOCK_MONOTONIC, for reports.
uint64_t gw_nanoseconds(void);

// report.c: the times of a capture on standard error.
void gw_report_capture(uint64_t requested, uint64_t parked, uint64_t saved);

// report.c: "godwit: <what> <object>: <why>" where GODWIT_STATE_MESSAGES says or on standard error, then exit with 125.
_Noreturn void gw_fail(const char *what, const char *object, long error);
_Noreturn void gw_exit(int status);
extern int gw_messages; // the number of standard error, which is another while descriptors are restored
uint64_t gw_string_length(const char *string);

#endif
