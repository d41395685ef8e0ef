// What the kernel hands to a program when it starts: arguments, environment, auxiliary vector. The program gets copies
// in neutral memory, and the kernel's stack that they came on is given up, since it lies at the end of the addresses
// that this node has: a process that has it cannot go on where they end earlier.
#include "private.h"

enum {
    AT_NULL = 0,
    AT_IGNORE = 1,
    AT_PAGESZ = 6,
    AT_UID = 11,
    AT_EGID = 14,
    AT_PLATFORM = 15,
    AT_CLKTCK = 17,
    AT_SECURE = 23,
    AT_BASE_PLATFORM = 24,
    AT_RANDOM = 25,
    AT_EXECFN = 31
};
enum { RANDOM_BYTES = 16 };

// Room on the data stack, which grows down.
static void *reserve(struct gw_thread *thread, uint64_t bytes) {
    thread->data_stack -= (bytes + 15) & ~15UL;
    return thread->data_stack;
}

static uint64_t bytes_of(char **strings, uint64_t count) {
    uint64_t bytes = 0;
    for (uint64_t i = 0; i < count; i++)
        bytes += gw_string_length(strings[i]) + 1;
    return bytes;
}

// Returns where the copies of the strings, which follow one another, end.
static char *copy_strings(char **copies, char **strings, uint64_t count, char *to) {
    for (uint64_t i = 0; i < count; i++) {
        uint64_t bytes = gw_string_length(strings[i]) + 1;
        copies[i] = __builtin_memcpy(to, strings[i], bytes);
        to += bytes;
    }
    copies[count] = 0;
    return to;
}

static uint64_t entries_of(const unsigned long *auxv) {
    uint64_t entries = 0;
    while (auxv[2 * entries] != AT_NULL)
        entries++;
    return entries;
}

// What of it is the same on each set. The kernel's own has the addresses of the copies, too.
static unsigned long *copy_auxv(struct gw_thread *thread, unsigned long *auxv) {
    uint64_t entries = entries_of(auxv);
    unsigned long *copies = reserve(thread, (entries + 1) * 2 * sizeof *copies);
    unsigned long *next = copies;
    for (uint64_t i = 0; i < entries; i++) {
        unsigned long type = auxv[2 * i];
        unsigned long *value = &auxv[2 * i + 1];
        if (type == AT_RANDOM || type == AT_EXECFN) {
            uint64_t bytes = type == AT_RANDOM ? RANDOM_BYTES : gw_string_length((const char *)*value) + 1;
            *value = (unsigned long)__builtin_memcpy(reserve(thread, bytes), (const void *)*value, bytes);
        } else if (type == AT_PLATFORM || type == AT_BASE_PLATFORM) {
            // Words that stay where they are, and go with the stack.
            auxv[2 * i] = AT_IGNORE;
            continue;
        } else if (type != AT_PAGESZ && type != AT_SECURE && type != AT_CLKTCK && !(type >= AT_UID && type <= AT_EGID))
            continue;
        *next++ = type;
        *next++ = type == AT_PAGESZ ? GW_PAGE : *value;
    }
    next[0] = next[1] = AT_NULL;
    return copies;
}

// `variables` of the environment are the program's. Programs that show a title of their own write over the strings, and
// rely on their order: arguments, then environment, with nothing between.
void gw_copy_arguments(struct gw_thread *thread, const struct gw_first_stack *stack, uint64_t variables,
                       struct gw_arguments *copies) {
    uint64_t arguments = (uint64_t)stack->argc;
    copies->argc = stack->argc;
    copies->argv = reserve(thread, (arguments + 1) * sizeof *copies->argv);
    copies->envp = reserve(thread, (variables + 1) * sizeof *copies->envp);
    copies->strings = reserve(thread, bytes_of(stack->argv, arguments) + bytes_of(stack->envp, variables));
    copies->variables = copy_strings(copies->argv, stack->argv, arguments, copies->strings);
    copies->end = copy_strings(copies->envp, stack->envp, variables, copies->variables);
    copies->auxv = copy_auxv(thread, stack->auxv);
}

// As <linux/prctl.h> has it.
struct memory_map {
    uint64_t start_code, end_code, start_data, end_data, start_brk, brk, start_stack;
    uint64_t arg_start, arg_end, env_start, env_end, auxv;
    uint32_t auxv_bytes, executable;
};
_Static_assert(sizeof(struct memory_map) == 104, "struct prctl_mm_map");

// Nothing runs on it any more, and nothing points into it. The main thread's native stack is called the stack from now
// on. A kernel that restores no processes (CONFIG_CHECKPOINT_RESTORE) cannot be told, and neither can qemu-user: there
// the stack stays, and whoever wants to move the process to where it has no place says so.
void gw_give_up_first_stack(const struct gw_first_stack *stack, const struct gw_arguments *copies) {
    enum { PR_SET_MM = 35, PR_SET_MM_MAP = 14 };
    // Of what the kernel maps below the arguments 128 KiB (setup_arg_pages of fs/exec.c). 128 MiB below are nobody
    // else's.
    const uint64_t below = 1UL << 20;
    uint64_t now = (uint64_t)gw_call(GW_NR_brk, 0, 0, 0, 0, 0, 0);
    struct memory_map map = {
        .start_code = (uint64_t)gw_entry_resume,
        .end_code = (uint64_t)__gw_text_end,
        .start_data = (uint64_t)__gw_neutral_data_begin,
        .end_data = (uint64_t)__gw_neutral_bss_begin,
        .start_brk = now,
        .brk = now,
        .start_stack = gw_quarter_end(0, GW_NATIVE_STACK) - sizeof(long),
        .arg_start = (uint64_t)copies->strings,
        .arg_end = (uint64_t)copies->variables,
        .env_start = (uint64_t)copies->variables,
        .env_end = (uint64_t)copies->end,
        .auxv = (uint64_t)stack->auxv,
        .auxv_bytes = (uint32_t)((entries_of(stack->auxv) + 1) * 2 * sizeof *stack->auxv),
        .executable = UINT32_MAX, // as it is
    };
    // Another order of things than below, or other pages: it is not known what would be unmapped.
    if (stack->page != GW_PAGE || stack->end == 0 || stack->end % GW_PAGE != 0)
        return;
    if (gw_call(GW_NR_prctl, PR_SET_MM, PR_SET_MM_MAP, (long)&map, sizeof map, 0, 0) != 0)
        return;
    uint64_t begin = (stack->begin & -GW_PAGE) - below;
    (void)gw_call(GW_NR_munmap, (long)begin, (long)(stack->end - begin), 0, 0, 0, 0);
}

// What the kernel has put on it (create_elf_tables of fs/binfmt_elf.c): the name of the executable is the last string,
// and a null pointer behind it ends the stack.
void gw_find_first_stack(long *kernel_stack, struct gw_first_stack *stack) {
    stack->begin = (uint64_t)kernel_stack;
    stack->end = stack->page = 0;
    stack->argc = (int)kernel_stack[0];
    stack->argv = (char **)(kernel_stack + 1);
    stack->envp = stack->argv + stack->argc + 1;
    char **behind = stack->envp;
    while (*behind)
        behind++;
    stack->auxv = (unsigned long *)(behind + 1);
    for (const unsigned long *entry = stack->auxv; entry[0] != AT_NULL; entry += 2)
        if (entry[0] == AT_PAGESZ)
            stack->page = entry[1];
        else if (entry[0] == AT_EXECFN)
            stack->end = entry[1] + gw_string_length((const char *)entry[1]) + 1 + sizeof(void *);
}
