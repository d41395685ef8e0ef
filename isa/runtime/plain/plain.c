/*
 * The runtime of executables that never move: what configure scripts run, and what the others are
 * measured against. The same contract as the real runtime's (isa/ABI.md), kept in the simplest way:
 * signals and threads are the kernel's own, the stack is the native one, nothing is captured.
 */
#include "../kernel/kernel.h"
#include "set.h"

typedef unsigned long u64;

/* The control block: its first word points at itself, the pthread structure is at 256, TLS at 2048. */
enum { BLOCK_TLS = 2048, PAGE = 4096 };

/* A thread has one mapping: guard, native stack, control block with TLS. */
enum { THREAD_GUARD = 65536, THREAD_STACK = 8 << 20 };

/* Generic system calls. */
enum {
    SYS_EXIT_GROUP = 94,
    SYS_MMAP = 222,
    SYS_MPROTECT = 226,
    SYS_MUNMAP = 215,
    SYS_RT_SIGACTION = 134,
};

enum { SYS_RT_SIGPROCMASK = 135, SIG_BLOCK = 0, SIG_SETMASK = 2 };
enum { SIGNAL_CANCEL = 33, CANCELLED = -4097 };

extern const char __gw_tls_image[];
extern const u64 __gw_tls_image_size, __gw_tls_size;
int __gw_main(int argc, char **argv, char **envp, const u64 *auxv);

static u64 tls_room(void) { return (BLOCK_TLS + __gw_tls_size + PAGE - 1) & ~(u64)(PAGE - 1); }

static void *block_at(char *memory) {
    *(void **)memory = memory;
    memcpy(memory + BLOCK_TLS, __gw_tls_image, __gw_tls_image_size);
    return memory;
}

static char *map(u64 size, u64 protection) {
    return (char *)__gw_kernel(SYS_MMAP, 0, (long)size, (long)protection, 0x22, -1, 0);
}

/* Called by _start with the stack as the kernel made it. */
void gw_plain_start(u64 *stack) {
    int argc = (int)stack[0];
    char **argv = (char **)(stack + 1), **envp = argv + argc + 1, **end = envp;
    static char first[BLOCK_TLS] __attribute__((aligned(16)));
    char *block;

    /* System calls look at the control block: until there is a real one, at one of zeros. */
    gw_set_thread_pointer(first);
    block = map(tls_room(), 3);
    if (gw_failed((long)block))
        __gw_kernel(SYS_EXIT_GROUP, 127, 0, 0, 0, 0, 0);
    gw_set_thread_pointer(block_at(block));
    while (*end)
        end++;
    __gw_kernel(SYS_EXIT_GROUP, __gw_main(argc, argv, envp, (const u64 *)(end + 1)), 0, 0, 0, 0, 0);
}

/* musl's signal for cancellation looks where it met the thread: in the window, the call is ended. */
static void (*cancel_handler)(int, void *, void *);

static void on_cancel(int number, void *information, void *context) {
    gw_leave_window(context);
    cancel_handler(number, information, context);
}

long __gw_syscall(long number, long a, long b, long c, long d, long e, long f) {
    if (number == SYS_RT_SIGACTION && a == SIGNAL_CANCEL && b) {
        struct gw_sigaction action = *(const struct gw_sigaction *)b;

        cancel_handler = (void (*)(int, void *, void *))action.handler;
        action.handler = (void *)on_cancel;
        return __gw_kernel(number, a, (long)&action, c, d, 0, 0);
    }
    return __gw_kernel(number, a, b, c, d, e, f);
}

/* The flag is looked at inside the window (SET.S), where the signal's handler can end the call. */
long __gw_syscall_cp(volatile int *cancel, long number, long a, long b, long c, long d, long e, long f) {
    volatile int **watched = gw_watched();
    long result;

    if (*cancel)
        return CANCELLED;
    *watched = cancel;
    result = __gw_kernel(number, a, b, c, d, e, f);
    *watched = 0;
    return result;
}

struct thread {
    char *memory;
    u64 size;
};

static struct thread *thread_of(void *block) { return (struct thread *)((char *)block + 64); }

void *__gw_thread_new(void) {
    u64 size = THREAD_GUARD + THREAD_STACK + tls_room();
    char *memory = map(size, 0), *block;

    if (gw_failed((long)memory))
        return 0;
    if (gw_failed(__gw_kernel(SYS_MPROTECT, (long)(memory + THREAD_GUARD), (long)(size - THREAD_GUARD), 3, 0, 0, 0))) {
        __gw_kernel(SYS_MUNMAP, (long)memory, (long)size, 0, 0, 0, 0);
        return 0;
    }
    block = block_at(memory + THREAD_GUARD + THREAD_STACK);
    *thread_of(block) = (struct thread){memory, size};
    return block;
}

long __gw_thread_start(void *block, int (*start)(void *), void *argument, int flags, int *ptid, int *ctid) {
    return gw_clone(start, block, flags, argument, ptid, block, ctid);
}

void __gw_thread_free(void *block) {
    struct thread thread = *thread_of(block);

    __gw_kernel(SYS_MUNMAP, (long)thread.memory, (long)thread.size, 0, 0, 0, 0);
}

/* The stack goes away under it: the last two calls are made without one. */
void __gw_thread_exit(void *block) {
    struct thread thread = *thread_of(block);

    gw_unmap_and_exit(thread.memory, thread.size);
}

/* A jmp_buf has 22 words of registers, whether the mask was saved, and the mask. */
enum { JUMP_SAVED = 22, JUMP_MASK = 23 };

_Noreturn void longjmp(u64 *buffer, int value);

/* The first half of sigsetjmp; SET.S goes on with setjmp. */
void gw_save_mask(u64 *buffer, int save) {
    buffer[JUMP_SAVED] = (u64)save;
    if (save)
        __gw_kernel(SYS_RT_SIGPROCMASK, SIG_BLOCK, 0, (long)&buffer[JUMP_MASK], 8, 0, 0);
}

_Noreturn void siglongjmp(u64 *buffer, int value) {
    if (buffer[JUMP_SAVED])
        __gw_kernel(SYS_RT_SIGPROCMASK, SIG_SETMASK, (long)&buffer[JUMP_MASK], 0, 8, 0, 0);
    longjmp(buffer, value);
}
