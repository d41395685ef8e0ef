// What a state, or restored memory, says in records of the runtime's own (control blocks, signals, the table of
// mappings) is looked at before anyone goes by it: a number that is too large would lead out of a table, an address
// that is none of the program's to a crash, a forgotten mark to a thread that never hears of anything again. What the
// program itself has in memory nobody can judge.
#include "private.h"

enum { PROT_READ_WRITE = 3, MAP_TYPE_AND_ANONYMOUS = 0x23, SS_AUTODISARM = (int)(1U << 31) };
enum { SIGEV_SIGNAL = 0, SIGEV_NONE = 1, SIGEV_THREAD_ID = 4, EVENT_SIGNAL = 8, EVENT_NOTIFY = 12, MADE = 2 };
// isa/ABI.md, section 3: where neutral functions are, each at a multiple of 16.
#define GW_TEXT_BEGIN 0x04000000UL
#define GW_TEXT_END 0x08000000UL
#define GW_NEUTRAL_BEGIN 0x08000000UL
#define GW_NEUTRAL_END 0x70000000UL

static const char damaged_thread[] = "the state's thread is damaged:";
static const char damaged_signals[] = "the state's signals are damaged:";
static const char damaged_mappings[] = "the state's mappings are damaged:";

// One that a handler may be for.
static int is_handled(int64_t signal) {
    return signal >= 1 && signal <= GW_SIGNALS && !(gw_signal_bit((int)signal) & GW_NEVER_BLOCKED);
}

static int is_function(uint64_t address) {
    return address >= GW_TEXT_BEGIN && address < GW_TEXT_END && address % 16 == 0;
}

// Could the program have memory there? Whether it has is its own business.
static int is_in_plan(uint64_t begin, uint64_t length) {
    uint64_t end = begin + length;
    return end >= begin &&
           ((begin >= GW_NEUTRAL_BEGIN && end <= GW_NEUTRAL_END) || (begin >= GW_HEAP_BEGIN && end <= GW_MAP_END));
}

static int is_own_number(const struct gw_thread *thread) {
    uint32_t generation = thread->tid >> GW_TID_SLOT_BITS;
    if (thread->tid == __gw_threads.process)
        return 1;
    return (thread->tid & ((1U << GW_TID_SLOT_BITS) - 1)) == thread->slot && generation >= GW_TID_FIRST_GENERATION &&
           generation < GW_TID_FIRST_GENERATION + GW_TID_GENERATIONS;
}

static const char *unsound_thread(const struct gw_thread *thread, gw_has_memory *has, const void *state) {
    const struct gw_signals *signals = gw_signals_of(thread);
    uint32_t request = signals->held ? GW_REQUEST_SIGNAL : 0;
    if (thread->request != request || thread->uninterrupted != 0 || thread->jump_frame || !is_own_number(thread))
        return damaged_thread;
    // It is written to when the thread ends.
    if (thread->child_word &&
        ((uint64_t)thread->child_word % sizeof(uint32_t) != 0 || !has(state, (uint64_t)thread->child_word, 4)))
        return damaged_thread;
    // The next local lies below.
    if (gw_off_own_stack(thread) && !has(state, (uint64_t)thread->data_stack - 16, 16))
        return damaged_thread;
    if (((signals->mask | signals->after) & GW_NEVER_BLOCKED) || signals->has_after > 1 ||
        signals->interrupted > GW_ENDS_WITH_EINTR || signals->held > 1 ||
        (signals->held && !is_handled(signals->information.signal)) ||
        (signals->alternate_flags & ~(uint64_t)(uint32_t)SS_AUTODISARM) ||
        (signals->alternate_size != 0 && !is_in_plan(signals->alternate_stack, signals->alternate_size)))
        return damaged_signals;
    return 0;
}

// A slot in use: a parked thread with something to go on with, or memory without a thread.
const char *gw_unsound_slot(uint32_t slot, gw_has_memory *has, const void *state) {
    const struct gw_thread *thread = gw_thread_of_slot(slot);
    uint64_t control = gw_quarter_begin(slot, GW_CONTROL);
    if (!has(state, control, sizeof *thread) || !has(state, (uint64_t)gw_signals_of(thread), sizeof(struct gw_signals)))
        return damaged_thread;
    uint64_t continuation = (uint64_t)thread->continuation;
    int has_frames = continuation != gw_quarter_begin(slot, GW_CONTINUATION);
    // In the handler of a signal the data stack pointer may be in an alternate stack.
    uint64_t data_stack = (uint64_t)(gw_off_own_stack(thread) ? gw_signals_of(thread)->own_stack : thread->data_stack);
    if (thread->self != thread || thread->slot != slot || thread->state != (has_frames ? GW_RUNNING : GW_IDLE) ||
        continuation < gw_quarter_begin(slot, GW_CONTINUATION) ||
        continuation > gw_quarter_end(slot, GW_CONTINUATION) || data_stack < gw_quarter_begin(slot, GW_DATA_STACK) ||
        data_stack > gw_quarter_end(slot, GW_DATA_STACK))
        return damaged_thread;
    return has_frames ? unsound_thread(thread, has, state) : 0;
}

// Of all that have been looked at: one thread at most has the process's number.
const char *gw_unsound_numbers(void) {
    uint32_t main_threads = 0;
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++) {
        const struct gw_thread *thread = gw_thread_of_slot(slot);
        if (__gw_threads.used[slot] && thread->state == GW_RUNNING && thread->tid == __gw_threads.process)
            main_threads++;
    }
    return main_threads > 1 ? damaged_thread : 0;
}

static int is_sound_action(int signal, const struct gw_action *action) {
    if (action->known == 0)
        return 1;
    return action->known == 1 && is_handled(signal) && (action->mask & GW_NEVER_BLOCKED) == 0 &&
           (action->handler <= GW_SIG_IGN || is_function(action->handler));
}

static int is_sound_timer(const struct gw_timer *timer) {
    int signal;
    int notify;
    __builtin_memcpy(&signal, (const char *)timer->event + EVENT_SIGNAL, sizeof signal);
    __builtin_memcpy(&notify, (const char *)timer->event + EVENT_NOTIFY, sizeof notify);
    if (timer->used != MADE || notify == SIGEV_NONE)
        return timer->used == 0 || timer->used == MADE;
    // Any that the kernel takes, also SIGKILL, but the reserved one.
    return (notify == SIGEV_SIGNAL || notify == SIGEV_THREAD_ID) && signal >= 1 && signal <= GW_SIGNALS &&
           signal != GW_RESERVED_SIGNAL;
}

static int is_sound_pending(const struct gw_pending *pending) {
    int32_t signal;
    __builtin_memcpy(&signal, pending->information, sizeof signal);
    if (!is_handled(signal))
        return 0;
    // Sent to the process, or to a thread that is there to get it.
    return pending->slot == GW_SLOTS || (pending->slot < GW_SLOTS && __gw_threads.used[pending->slot] &&
                                         gw_thread_of_slot((uint32_t)pending->slot)->state == GW_RUNNING);
}

// It is deleted when the rest is over, so it must be none of the program's.
static int is_sound_rest_timer(const struct gw_signal_table *table) {
    uint64_t number = table->rest_timer - 1;
    if (table->rest_timer == 0)
        return 1;
    for (int i = 0; i < GW_TIMERS; i++)
        if (table->timers[i].used == MADE && (uint64_t)(uint32_t)table->timers[i].kernel_number == number)
            return 0;
    return number <= INT32_MAX;
}

const char *gw_unsound_signals(void) {
    const struct gw_signal_table *table = &__gw_signal_table;
    if (table->pending_count > GW_PENDING)
        return "the state has more pending signals than there can be:";
    for (int signal = 1; signal <= GW_SIGNALS; signal++)
        if (!is_sound_action(signal, &table->actions[signal - 1]))
            return damaged_signals;
    for (int i = 0; i < GW_TIMERS; i++)
        if (!is_sound_timer(&table->timers[i]))
            return damaged_signals;
    for (uint32_t i = 0; i < table->pending_count; i++)
        if (!is_sound_pending(&table->pending[i]))
            return damaged_signals;
    return is_sound_rest_timer(table) ? 0 : damaged_signals;
}

static const struct gw_mapping *const mappings = (const struct gw_mapping *)GW_MAP_TABLE;
// Of the table, which no section has named yet.
static uint64_t bytes_left;

const char *gw_unsound_mappings(gw_has_memory *has, const void *state) {
    uint64_t count = __gw_neutral.mappings;
    uint64_t heap_end = __gw_neutral.heap_end;
    uint64_t last = 0;
    if (count > (GW_MAP_BEGIN - GW_MAP_TABLE) / sizeof *mappings ||
        (count != 0 && !has(state, GW_MAP_TABLE, count * sizeof *mappings)) ||
        (heap_end != 0 && (heap_end < GW_HEAP_BEGIN || heap_end > GW_HEAP_END)))
        return damaged_mappings;
    for (uint64_t i = 0; i < count; i++) {
        const struct gw_mapping *m = &mappings[i];
        int is_heap = m->begin >= GW_HEAP_BEGIN && m->end <= GW_HEAP_END;
        if (m->begin < last || m->begin >= m->end || (m->begin | m->end) % GW_PAGE != 0 || m->prot > PROT_READ_WRITE ||
            (m->flags & ~(uint32_t)MAP_TYPE_AND_ANONYMOUS) != 0 ||
            !(is_heap || (m->begin >= GW_MAP_BEGIN && m->end <= GW_MAP_END)))
            return damaged_mappings;
        last = m->end;
        bytes_left += m->end - m->begin;
    }
    return 0;
}

const char *gw_unsound_section(const struct gw_state_section *section) {
    if (section->address == GW_MAP_TABLE)
        return 0;
    uint64_t low = 0;
    uint64_t high = __gw_neutral.mappings;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (mappings[middle].end <= section->address)
            low = middle + 1;
        else
            high = middle;
    }
    if (low == __gw_neutral.mappings || mappings[low].begin > section->address ||
        mappings[low].end < section->address + section->length || mappings[low].prot != section->value)
        return damaged_mappings;
    bytes_left -= section->length;
    return 0;
}

// No two sections have the same memory, so they and the table say the same when they have as much.
const char *gw_unsound_rest(void) { return bytes_left == 0 ? 0 : damaged_mappings; }
