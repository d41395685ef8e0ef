// vfork: a fork whose parent waits until the child executes a program or ends. The kernel's own wait could not be left
// for a capture or for rest, and a child that shares the memory would share the data stack, so the parent waits at a
// pipe instead: its other end is the child's alone, and is closed when the child executes a program or ends. Until then
// the child cannot close it, as programs do that close all descriptors which they do not know, and its own children do
// not have it.
#include "processes.h"
#include "identity.h"
#include "memory.h"
#include "signals.h"

enum { NR_pipe2 = 59, NR_read = 63, O_CLOEXEC = 02000000, EBADF = 9, EMFILE = 24, ENFILE = 23 };
enum { F_DUPFD_CLOEXEC = 1030, CLOSE_RANGE_CLOEXEC = 4 };
enum { CLONE_VM = 0x100, CLONE_VFORK = 0x4000, SIGNAL_OF_PARENT = 0xff };
// Of the C library's vfork: tell by the third argument at which descriptor to wait. The kernel knows no flag above 32
// bits.
#define TELL_END (1L << 32)

long __gw_fork(long flags, long b, long c, long d, long e);
long __gw_syscall(long nr, long a, long b, long c, long d, long e, long f);

// In a child whose parent may wait: the end of the pipe that it holds.
enum { NONE = -1 };
static int held = NONE;

// Children share no memory, so the one flag says nothing more than the other.
NOSUSPEND int gw_is_vfork(long flags, long stack) {
    const long known = CLONE_VM | CLONE_VFORK | SIGNAL_OF_PARENT | TELL_END;
    return stack == 0 && (flags & CLONE_VFORK) && (flags & ~known) == 0;
}

// What only the process's own parent waits for is not for its children.
NOSUSPEND void gw_processes_forked(void) {
    struct gw_thread *thread = gw_self();
    thread->uninterrupted++;
    // The number is this file's own, so closing it cannot fail.
    if (held != NONE)
        (void)__gw_kernel(NR_close, held, 0, 0, 0, 0, 0);
    held = NONE;
    thread->uninterrupted--;
}

NOSUSPEND int gw_is_held_end(long number) { return held != NONE && (int)number == held; }

// Something else is to have the number.
NOSUSPEND static long replace(long source, long flags) {
    struct gw_thread *thread = gw_self();
    enum { FIRST = 3 };
    int old = held;
    thread->uninterrupted++;
    long moved = __gw_kernel(NR_fcntl, old, F_DUPFD_CLOEXEC, old + 1, 0, 0, 0);
    if (moved < 0)
        moved = __gw_kernel(NR_fcntl, old, F_DUPFD_CLOEXEC, FIRST, 0, 0, 0);
    long result = moved < 0 ? moved : __gw_kernel(NR_dup3, source, old, flags, 0, 0, 0);
    if (result >= 0)
        held = (int)moved;
    else if (moved >= 0)
        (void)__gw_kernel(NR_close, moved, 0, 0, 0, 0, 0);
    thread->uninterrupted--;
    return result;
}

// A call that would close the end, or show it to the program, which does not know that it has it.
NOSUSPEND long gw_beside_held_end(long nr, long a, long b, long c) {
    if (nr == NR_dup3 && !gw_is_held_end(a))
        return replace(a, c);
    if (nr != NR_close_range)
        return -EBADF;
    struct gw_thread *thread = gw_self();
    uint32_t first = (uint32_t)a, last = (uint32_t)b, number = (uint32_t)held;
    long result = 0;
    thread->uninterrupted++;
    if (first < number)
        result = __gw_kernel(NR_close_range, first, number - 1, c, 0, 0, 0);
    if (result == 0 && number < last)
        result = __gw_kernel(NR_close_range, number + 1, last, c, 0, 0, 0);
    thread->uninterrupted--;
    return result;
}

NOSUSPEND int gw_meets_held_end(long nr, long a, long b, long c) {
    if (held == NONE)
        return 0;
    if (nr == NR_close_range)
        return (uint32_t)a <= (uint32_t)held && (uint32_t)held <= (uint32_t)b && !(c & CLOSE_RANGE_CLOEXEC);
    return gw_is_held_end(a) || (nr == NR_dup3 && gw_is_held_end(b));
}

// No other thread may fork in between: its child would have the pipe's other end as well, and might never close it.
NOSUSPEND static long fork_with_pipe(long flags, int *wait) {
    struct gw_thread *thread = gw_self();
    int ends[2];
    if (gw_must_settle())
        return GW_ABANDONED;
    thread->uninterrupted++;
    gw_lock_memory();
    long result = __gw_kernel(NR_pipe2, (long)ends, O_CLOEXEC, 0, 0, 0, 0);
    if (result == 0) {
        result = __gw_fork(flags & ~(CLONE_VM | CLONE_VFORK | TELL_END), 0, 0, 0, 0);
        // The numbers are this function's own, so closing them cannot fail.
        (void)__gw_kernel(NR_close, ends[result != 0], 0, 0, 0, 0, 0);
        if (result < 0)
            (void)__gw_kernel(NR_close, ends[0], 0, 0, 0, 0, 0);
        if (result == 0) {
            gw_processes_forked();
            held = ends[1];
        }
        *wait = ends[0];
    } else if (result == -EMFILE || result == -ENFILE) {
        result = -EAGAIN;
    }
    gw_unlock_memory();
    thread->uninterrupted--;
    return result;
}

long gw_vfork(long flags, long *told) {
    int wait;
    long result;
    if ((flags & TELL_END) && !gw_is_writable(told, sizeof *told))
        return -EFAULT;
    while ((result = fork_with_pipe(flags, &wait)) == GW_ABANDONED)
        gw_settle();
    if (result == 0)
        gw_signals_forked();
    if (result <= 0)
        return result;
    if (flags & TELL_END) {
        *told = wait;
        return result;
    }
    // Nothing is ever written, so it ends with the end of the pipe; a handler may end it before.
    char byte;
    long end;
    while ((end = __gw_syscall(NR_read, wait, (long)&byte, 1, 0, 0, 0)) == -EINTR) {
    }
    // Else another thread has closed the number, and it is somebody else's.
    if (end == 0)
        (void)__gw_syscall(NR_close, wait, 0, 0, 0, 0, 0);
    return result;
}
