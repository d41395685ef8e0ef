// The life of a process: it begins at _start (entry.S), which calls gw_start here on the kernel's stack.
//
//     settings from the environment → slot of the main thread → first contents, or those of a state
//        → run on the slot's native stack until the program ends or everything has returned early
//        → in the latter case: park (world.c), and go on when that is over
#include "private.h"

enum {
    AT_NULL = 0,
    AT_PAGESZ = 6,
    AT_UID = 11,
    AT_EGID = 14,
    AT_CLKTCK = 17,
    AT_SECURE = 23,
    AT_RANDOM = 25,
    AT_EXECFN = 31
};
enum { RANDOM_BYTES = 16 };
// How much of the native stack is overwritten between two turns: more than a chain of small calls uses.
enum { POISONED = 128 << 10 };

struct gw_settings gw_settings;

int __gw_main(int argc, char **argv, char **envp, const unsigned long *auxv);

_Noreturn void gw_start(long *kernel_stack);
long gw_on_stack(void *top, long (*function)(void *), void *argument);

// What the program's main gets, all in neutral memory.
struct arguments {
    int argc;
    char **argv;
    char **envp;
    unsigned long *auxv;
};

// The value of a variable "NAME=value" if its name is this one.
static const char *value_of(const char *variable, const char *name) {
    while (*name && *variable == *name)
        variable++, name++;
    return *name == 0 && *variable == '=' ? variable + 1 : 0;
}

static uint64_t number(const char *variable, const char *text) {
    uint64_t value = 0;
    if (*text == 0)
        gw_fail("a number is missing in the environment:", variable, 0);
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || value > UINT64_MAX / 10 - 10)
            gw_fail("not a number in the environment:", variable, 0);
        value = value * 10 + (uint64_t)(*text - '0');
    }
    return value;
}

// Is this variable the runtime's own? Then it is taken, and the program does not see it.
static int take_setting(const char *variable) {
    static const char prefix[] = "GODWIT_STATE_";
    const char *value;
    for (unsigned i = 0; i < sizeof prefix - 1; i++)
        if (variable[i] != prefix[i])
            return 0;
    if ((value = value_of(variable, "GODWIT_STATE_SAVE")))
        gw_settings.save = value;
    else if ((value = value_of(variable, "GODWIT_STATE_RESUME")))
        gw_settings.resume = value;
    else if ((value = value_of(variable, "GODWIT_STATE_MESSAGES")))
        gw_settings.messages = value;
    else if ((value = value_of(variable, "GODWIT_STATE_POLLS")))
        gw_settings.polls = number(variable, value);
    else if ((value = value_of(variable, "GODWIT_STATE_TURN"))) {
        gw_settings.polls = number(variable, value);
        gw_settings.turn = 1;
    } else if ((value = value_of(variable, "GODWIT_STATE_TIMER")))
        gw_settings.timer = number(variable, value);
    else if ((value = value_of(variable, "GODWIT_STATE_SIGNAL")))
        gw_settings.signal = number(variable, value);
    else if (value_of(variable, "GODWIT_STATE_NEXT"))
        gw_settings.next = variable;
    else if ((value = value_of(variable, "GODWIT_STATE_KEPT")))
        gw_settings.kept = number(variable, value) != 0;
    else if ((value = value_of(variable, "GODWIT_STATE_REPORT")))
        gw_settings.report = number(variable, value) != 0;
    else
        gw_fail("unknown setting in the environment:", variable, 0);
    return 1;
}

// Room on the data stack, which grows down.
static void *reserve(struct gw_thread *thread, uint64_t bytes) {
    thread->data_stack -= (bytes + 15) & ~15UL;
    return thread->data_stack;
}

static char *copy_string(struct gw_thread *thread, const char *string) {
    uint64_t bytes = gw_string_length(string) + 1;
    return __builtin_memcpy(reserve(thread, bytes), string, bytes);
}

static char **copy_strings(struct gw_thread *thread, char **strings, uint64_t count) {
    char **copies = reserve(thread, (count + 1) * sizeof *copies);
    for (uint64_t i = 0; i < count; i++)
        copies[i] = copy_string(thread, strings[i]);
    copies[count] = 0;
    return copies;
}

// Moves what the program may see of its environment to the front; says how many that are.
static uint64_t take_settings(char **envp) {
    uint64_t kept = 0;
    for (uint64_t i = 0; envp[i]; i++)
        if (!take_setting(envp[i]))
            envp[kept++] = envp[i];
    return kept;
}

static unsigned long *copy_auxv(struct gw_thread *thread, const unsigned long *auxv) {
    unsigned long entries = 0;
    while (auxv[2 * entries] != AT_NULL)
        entries++;
    unsigned long *copies = reserve(thread, (entries + 1) * 2 * sizeof *copies);
    unsigned long *next = copies;
    for (unsigned long i = 0; i < entries; i++) {
        unsigned long type = auxv[2 * i];
        unsigned long value = auxv[2 * i + 1];
        if (type == AT_RANDOM)
            value = (unsigned long)__builtin_memcpy(reserve(thread, RANDOM_BYTES), (const void *)value, RANDOM_BYTES);
        else if (type == AT_EXECFN)
            value = (unsigned long)copy_string(thread, (const char *)value);
        else if (type == AT_PAGESZ)
            value = GW_PAGE;
        else if (type != AT_SECURE && type != AT_CLKTCK && !(type >= AT_UID && type <= AT_EGID))
            continue;
        *next++ = type;
        *next++ = value;
    }
    next[0] = next[1] = AT_NULL;
    return copies;
}

static void first_contents(struct gw_thread *thread, struct arguments *arguments, long *kernel_stack) {
    long argc = kernel_stack[0];
    char **argv = (char **)(kernel_stack + 1);
    char **envp = argv + argc + 1;
    uint64_t variables = 0;
    while (envp[variables])
        variables++;
    const unsigned long *auxv = (const unsigned long *)(envp + variables + 1);
    variables = take_settings(envp);
    envp[variables] = 0;
    gw_settings.environment = envp;
    // A state brings its own; what it has no bytes for must stay zero.
    if (gw_settings.resume)
        return;

    thread->self = thread;
    thread->slot = 0;
    thread->continuation = (char *)gw_quarter_begin(0, GW_CONTINUATION);
    thread->data_stack = (char *)gw_quarter_end(0, GW_DATA_STACK);
    if (__gw_tls_size > (uintptr_t)gw_signals_of(thread) - (uintptr_t)thread - GW_TLS_OFFSET)
        gw_fail("the thread-local variables are larger than a thread's slot", 0, 0);
    __builtin_memcpy((char *)thread + GW_TLS_OFFSET, __gw_tls_image, __gw_tls_image_size);

    arguments->argc = (int)argc;
    arguments->argv = copy_strings(thread, argv, (uint64_t)argc);
    arguments->envp = copy_strings(thread, envp, variables);
    arguments->auxv = copy_auxv(thread, auxv);
}

static long call_main(void *argument) {
    const struct arguments *a = argument;
    return __gw_main(a->argc, a->argv, a->envp, a->auxv);
}

long gw_run(struct gw_thread *thread, char *stack_top, long (*function)(void *), void *argument) {
    for (;;) {
        char *top = stack_top;
        if (function == gw_call_next) {
            gw_set_fp_environment(thread->fp_environment);
            top = gw_make_room(thread, stack_top);
        }
        long result = gw_on_stack(top, function, argument);
        gw_give_up_room(thread->slot);
        if (thread->state == GW_JUMPING)
            gw_fail("longjmp to a function that has returned", 0, 0);
        if (thread->state == GW_RUNNING)
            return result;
        // All frames have returned. Native registers and stack hold nothing of the program any more; in a turn that is
        // proved by overwriting the stack.
        thread->state = GW_RUNNING;
        thread->fp_environment = gw_fp_environment();
        if (gw_settings.turn)
            __builtin_memset(stack_top - POISONED, 0xa5, POISONED);
        gw_park(thread);
        function = gw_call_next;
    }
}

_Noreturn void gw_start(long *kernel_stack) {
    struct gw_thread *thread = gw_thread_of_slot(0);
    struct arguments arguments;
    gw_map_slot(0);
    long error = gw_set_thread_pointer(thread);
    if (error != 0)
        gw_fail("cannot set the thread pointer", 0, error);
    first_contents(thread, &arguments, kernel_stack);
    if (gw_settings.save)
        gw_note_inherited_descriptors();

    long (*function)(void *) = call_main;
    if (gw_settings.resume) {
        gw_load_state(gw_settings.resume);
        function = gw_call_next;
    }
    gw_begin_main(thread);
    // A request that came before waits until it is handled: it is let through behind this only.
    gw_listen();
    gw_begin_signals(thread);
    gw_arm();
    if (gw_settings.resume) {
        gw_start_loaded_threads();
        gw_load_signals();
        // The program's main thread had ended, as this one does now.
        if (thread->state == GW_IDLE)
            gw_end_thread(thread, 0);
    }
    gw_exit((int)gw_run(thread, (char *)gw_quarter_end(0, GW_NATIVE_STACK), function, &arguments));
}
