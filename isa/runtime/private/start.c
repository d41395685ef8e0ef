// The life of a process: it begins at _start (entry.S), which calls gw_start here on the kernel's stack.
//
//     slot of the main thread → settings from the environment → first contents, or those of a state
//        → on the slot's native stack: run until the program ends or everything has returned early
//        → in the latter case: park (world.c), and go on when that is over
#include "private.h"

// How much of the native stack is overwritten between two turns: more than a chain of small calls uses.
enum { POISONED = 128 << 10 };

struct gw_settings gw_settings;
static struct gw_first_stack first_stack;
static struct gw_arguments arguments;

int __gw_main(int argc, char **argv, char **envp, const unsigned long *auxv);

_Noreturn void gw_start(long *kernel_stack);
long gw_on_stack(void *top, long (*function)(void *), void *argument);

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

// Moves what the program may see of its environment to the front; says how many that are.
static uint64_t take_settings(char **envp) {
    uint64_t kept = 0;
    for (uint64_t i = 0; envp[i]; i++)
        if (!take_setting(envp[i]))
            envp[kept++] = envp[i];
    return kept;
}

static void first_contents(struct gw_thread *thread, const struct gw_first_stack *stack, uint64_t variables) {
    thread->self = thread;
    thread->slot = 0;
    thread->continuation = (char *)gw_quarter_begin(0, GW_CONTINUATION);
    thread->data_stack = (char *)gw_quarter_end(0, GW_DATA_STACK);
    if (__gw_tls_size > (uintptr_t)gw_signals_of(thread) - (uintptr_t)thread - GW_TLS_OFFSET)
        gw_fail("the thread-local variables are larger than a thread's slot", 0, 0);
    __builtin_memcpy((char *)thread + GW_TLS_OFFSET, __gw_tls_image, __gw_tls_image_size);
    gw_copy_arguments(thread, stack, variables, &arguments);
}

static long call_main(void *unused) {
    (void)unused;
    return __gw_main(arguments.argc, arguments.argv, arguments.envp, arguments.auxv);
}

long gw_run(struct gw_thread *thread, char *stack_top, long (*function)(void *), void *argument) {
    for (;;) {
        char *top = stack_top;
        thread->anchors = 0;
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

// On the native stack of the main thread's slot, as it is after a rest.
static long begin(void *unused) {
    (void)unused;
    // A state brings what the thread pointer points at.
    struct gw_thread *thread = gw_thread_of_slot(0);
    const struct gw_settings *set = &gw_settings;
    // Words of the settings are still on it.
    if (!set->save && !set->resume && !set->messages && !set->next) {
        gw_settings.environment = 0;
        gw_give_up_first_stack(&first_stack, &arguments);
    }
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
    char *stack_top = (char *)gw_quarter_end(0, GW_NATIVE_STACK) - GW_RUNTIME_STACK;
    gw_exit((int)gw_run(thread, stack_top, function, 0));
}

_Noreturn void gw_start(long *kernel_stack) {
    struct gw_thread *thread = gw_thread_of_slot(0);
    gw_map_slot(0);
    long error = gw_set_thread_pointer(thread);
    if (error != 0)
        gw_fail("cannot set the thread pointer", 0, error);
    gw_find_first_stack(kernel_stack, &first_stack);
    uint64_t variables = take_settings(first_stack.envp);
    first_stack.envp[variables] = 0;
    gw_settings.environment = first_stack.envp;
    // A state brings its own; what it has no bytes for must stay zero.
    if (!gw_settings.resume)
        first_contents(thread, &first_stack, variables);
    (void)gw_on_stack((char *)gw_quarter_end(0, GW_NATIVE_STACK), begin, 0);
    __builtin_unreachable();
}
