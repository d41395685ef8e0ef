// vfork: a fork whose parent waits until the child executes a program or ends. The kernel's own wait could not be left
// for a capture or for rest, and a child that shares the memory would share the data stack, so the parent waits at a
// pipe instead: its other end is the child's alone, and is closed when the child executes a program or ends.
#include "processes.h"
#include "identity.h"
#include "memory.h"
#include "signals.h"

enum { NR_close = 57, NR_pipe2 = 59, NR_read = 63, O_CLOEXEC = 02000000, EMFILE = 24, ENFILE = 23 };
enum { CLONE_VM = 0x100, CLONE_VFORK = 0x4000, SIGNAL_OF_PARENT = 0xff };

long __gw_fork(long flags, long b, long c, long d, long e);
long __gw_syscall(long nr, long a, long b, long c, long d, long e, long f);

// Children share no memory, so the one flag says nothing more than the other.
NOSUSPEND int gw_is_vfork(long flags, long stack) {
    return stack == 0 && (flags & CLONE_VFORK) && (flags & ~(long)(CLONE_VM | CLONE_VFORK | SIGNAL_OF_PARENT)) == 0;
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
        result = __gw_fork(flags & ~(long)(CLONE_VM | CLONE_VFORK), 0, 0, 0, 0);
        // The numbers are this function's own, so closing them cannot fail.
        (void)__gw_kernel(NR_close, ends[result != 0], 0, 0, 0, 0, 0);
        if (result < 0)
            (void)__gw_kernel(NR_close, ends[0], 0, 0, 0, 0, 0);
        *wait = ends[0];
    } else if (result == -EMFILE || result == -ENFILE) {
        result = -EAGAIN;
    }
    gw_unlock_memory();
    thread->uninterrupted--;
    return result;
}

long gw_vfork(long flags) {
    int wait;
    long result;
    while ((result = fork_with_pipe(flags, &wait)) == GW_ABANDONED)
        gw_settle();
    if (result == 0)
        gw_signals_forked();
    if (result <= 0)
        return result;
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
