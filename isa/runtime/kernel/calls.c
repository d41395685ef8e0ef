/*
 * Which system calls there are, and what is refused on every set. The translation of the rest is in
 * the file of the set.
 */
#include "kernel.h"

struct call {
    short number;
    unsigned char kind;
};

static const struct call calls[] = {
#ifdef __x86_64__
#define CALL(generic, name, own, kind) [generic] = {own, GW_##kind},
#else
#define CALL(generic, name, other, kind) [generic] = {generic, GW_##kind},
#endif
#include "calls.h"
#undef CALL
};

enum {
    PROT_EXEC = 4,
    CLONE_VM = 0x100,
    PR_SET_SECCOMP = 22,
    PR_SET_SYSCALL_USER_DISPATCH = 59,
};

/*
 * Code that a program makes at run time is of one instruction set only. Said once on standard error,
 * since most programs say no more than that some memory could not be had.
 */
static long refuse_executable(void) {
    static int said;
    static const char sentence[] =
        "godwit: the program asked for executable memory (a just-in-time compiler?), which cannot move "
        "to another instruction set: refused with EACCES.\n";

    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        (void)__gw_kernel(64, 2, (long)sentence, (long)sizeof sentence - 1, 0, 0, 0);
    return -GW_EACCES;
}

/* The kernel reads a new signal mask before it finds that there is no such operation, and it writes the old mask. */
static long touch(const char *at, int writes) {
    enum { RT_SIGPROCMASK = 135, BYTES = 8, SIG_BLOCK = 0, NO_OPERATION = 1 << 20 };
    long result = writes ? __gw_kernel(RT_SIGPROCMASK, SIG_BLOCK, 0, (long)at, BYTES, 0, 0)
                         : __gw_kernel(RT_SIGPROCMASK, NO_OPERATION, (long)at, 0, BYTES, 0, 0);

    return result == -GW_EINVAL ? 0 : result;
}

long __gw_reach(void *address, unsigned long size, int writes) {
    enum { BYTES = 8, PAGE = 4096 };
    char *begin = address, *last = begin + size - BYTES;
    long result = touch(begin, writes);

    /* Two pages at most: what is there at both ends is there in between. */
    if (result == 0 && (unsigned long)begin / PAGE != ((unsigned long)begin + size - 1) / PAGE)
        result = touch(last, writes);
    return result;
}

/* Installs the set's own way back from a handler, and hides it from who asks. */
static long set_action(long number, const long arguments[6]) {
    const struct gw_sigaction *wanted = (const struct gw_sigaction *)arguments[1];
    struct gw_sigaction *old = (struct gw_sigaction *)arguments[2];
    struct gw_sigaction action;
    long result;

    if (wanted) {
        result = __gw_reach((void *)arguments[1], sizeof action, 0);
        if (result != 0)
            return result;
        action = *wanted;
        action.flags |= GW_SA_RESTORER;
        action.restorer = __gw_sigreturn;
    }
    result = __gw_native(number, arguments[0], wanted ? (long)&action : 0, (long)old, arguments[3], 0, 0);
    if (old && !gw_failed(result)) {
        old->flags &= ~(unsigned long)GW_SA_RESTORER;
        old->restorer = 0;
    }
    return result;
}

long __gw_kernel(long number, long a, long b, long c, long d, long e, long f) {
    const long arguments[6] = {a, b, c, d, e, f};
    struct call call;

    if (number < 0 || (unsigned long)number >= sizeof calls / sizeof *calls)
        return -GW_ENOSYS;
    call = calls[number];
    switch ((enum gw_kind)call.kind) {
    case GW_REFUSED:
        return -GW_ENOSYS;
    case GW_same:
        return gw_native6(call.number, arguments);
    case GW_mmap:
    case GW_mprotect:
        if (c & PROT_EXEC)
            return refuse_executable();
        break;
    case GW_clone:
        /* A child that shares memory, or starts on a stack, is a thread: the runtime starts those. */
        if ((a & CLONE_VM) || b)
            return -GW_ENOSYS;
        break;
    case GW_prctl:
        if (a == PR_SET_SECCOMP || a == PR_SET_SYSCALL_USER_DISPATCH)
            return -GW_EINVAL;
        break;
    case GW_sigaction:
        return set_action(call.number, arguments);
    default:
        break;
    }
    return gw_translate((enum gw_kind)call.kind, call.number, arguments);
}
