// Who the program is. Numbers of threads and of the process live in the program's memory (owners of mutexes, for
// pthread_kill), so they must stay what they are when the kernel's change in a move: the program sees the process's
// number as it was when it began, and numbers of threads that are made of their slots. Kernel calls that take such a
// number get the kernel's here.
//
// Nothing in this file suspends, so no number goes stale between its translation and the call.
#include "identity.h"
#include "memory.h"
#include "signals.h"

enum {
    NR_ioprio_set = 30,
    NR_ioprio_get = 31,
    NR_exit = 93,
    NR_set_tid_address = 96,
    NR_set_robust_list = 99,
    NR_get_robust_list = 100,
    NR_clock_settime = 112,
    NR_clock_getres = 114,
    NR_sched_setparam = 118,
    NR_sched_getaffinity = 123,
    NR_sched_rr_get_interval = 127,
    NR_setpriority = 140,
    NR_getpriority = 141,
    NR_setpgid = 154,
    NR_getpgid = 155,
    NR_getsid = 156,
    NR_getpid = 172,
    NR_gettid = 178,
    NR_prlimit64 = 261,
    NR_process_vm_readv = 270,
    NR_process_vm_writev = 271,
    NR_sched_setattr = 274,
    NR_sched_getattr = 275,
    NR_execve = 221,
    NR_execveat = 281,
    NR_pidfd_open = 434,
};
enum { ESRCH = 3, ENOSYS = 38 };
enum { ROBUST_LIST_HEAD = 24 };

long __gw_real_id(long id);
_Noreturn void __gw_thread_end(int status);
long __gw_exec(long nr, long a, long b, long c, long d, long e);
long __gw_fork(long flags, long b, long c, long d, long e);

struct gw_threads __gw_threads;

// Puts the kernel's number in the place of the program's; an error if there is no such thread (any more). Zero and
// negative ones stand for other things than one process.
NOSUSPEND static long translate(long *id) {
    long real = (int)*id > 0 ? __gw_real_id((int)*id) : *id;
    if ((int)*id > 0 && real < 0)
        return real;
    *id = real;
    return 0;
}

// The clock of a process or a thread holds its number, inverted, above three bits.
NOSUSPEND static long real_clock(long *clock) {
    enum { KIND = 7 };
    long id = ~((int)*clock >> 3);
    if ((int)*clock >= 0)
        return 0;
    long error = translate(&id);
    if (error == 0)
        *clock = (long)(int)((unsigned)~(int)id << 3 | (unsigned)(*clock & KIND));
    return error;
}

// struct sigevent names the thread that gets the signal.
NOSUSPEND static long create_timer(long clock, const int *event, long timer) {
    enum { SIGEV_THREAD_ID = 4, NOTIFY = 3, THREAD = 4, INTS = 16 };
    int copy[INTS];
    long error = real_clock(&clock);
    if (error == 0 && event && event[NOTIFY] == SIGEV_THREAD_ID) {
        __builtin_memcpy(copy, event, sizeof copy);
        long id = copy[THREAD];
        error = translate(&id);
        copy[THREAD] = (int)id;
        event = copy;
    }
    return error != 0 ? error : __gw_kernel(NR_timer_create, clock, (long)event, timer, 0, 0, 0);
}

// Those that move waiters to a lock with inherited priority; see inheritance.c for the lock.
NOSUSPEND static int moves_waiters(long operation) {
    enum { COMMAND = 127, WAIT_REQUEUE_PI = 11, CMP_REQUEUE_PI };
    long command = operation & COMMAND;
    return command == WAIT_REQUEUE_PI || command == CMP_REQUEUE_PI;
}

// The list is remembered only. The C library goes through it when a thread ends; the kernel would compare the owners
// with its own numbers of threads and find none.
NOSUSPEND static long set_robust_list(unsigned long head, unsigned long length) {
    if (length != ROBUST_LIST_HEAD)
        return -EINVAL;
    gw_self()->robust_list = head;
    return 0;
}

NOSUSPEND static long get_robust_list(int thread, uint64_t *head, uint64_t *length) {
    const struct gw_thread *of = gw_self();
    if (thread != 0 && (uint32_t)thread != of->tid)
        return __gw_real_id(thread) < 0 ? -ESRCH : -EPERM;
    if (!gw_is_writable(head, sizeof *head) || !gw_is_writable(length, sizeof *length))
        return -EFAULT;
    *head = of->robust_list;
    *length = ROBUST_LIST_HEAD;
    return 0;
}

NOSUSPEND static long fork_process(long flags, long b, long c, long d, long e) {
    // The child must not find the table of mappings half changed.
    gw_lock_memory();
    long result = __gw_fork(flags, b, c, d, e);
    gw_unlock_memory();
    return result;
}

NOSUSPEND long gw_own_call(long nr, long a, long b, long c, long d, long e, long f) {
    enum { PRIO_PROCESS = 0, IOPRIO_WHO_PROCESS = 1 };
    long error = 0;
    switch (nr) {
    case NR_getpid:
        return (long)__gw_threads.process;
    case NR_gettid:
        return (long)gw_self()->tid;
    case NR_set_tid_address:
        gw_self()->child_word = (uint32_t *)a;
        return (long)gw_self()->tid;
    case NR_exit:
        __gw_thread_end((int)a);
    case NR_clone:
        return fork_process(a, b, c, d, e);
    case NR_execve:
    case NR_execveat:
        return __gw_exec(nr, a, b, c, d, e);
    case NR_set_robust_list:
        return set_robust_list((unsigned long)a, (unsigned long)b);
    case NR_get_robust_list:
        return get_robust_list((int)a, (uint64_t *)b, (uint64_t *)c);
    case NR_futex:
        if (moves_waiters(b))
            return -ENOSYS;
        break;
    case NR_timer_create:
        return create_timer(a, (const int *)b, c);
    case NR_clock_settime:
    case NR_clock_gettime:
    case NR_clock_getres:
    case NR_clock_nanosleep:
        error = real_clock(&a);
        break;
    case NR_ioprio_set:
    case NR_ioprio_get:
        error = a == IOPRIO_WHO_PROCESS ? translate(&b) : 0;
        break;
    case NR_setpriority:
    case NR_getpriority:
        error = a == PRIO_PROCESS ? translate(&b) : 0;
        break;
    case NR_tgkill:
    case NR_rt_tgsigqueueinfo:
    case NR_setpgid:
        error = translate(&a);
        error = error != 0 ? error : translate(&b);
        break;
    case NR_kill:
    case NR_tkill:
    case NR_rt_sigqueueinfo:
    case NR_sched_rr_get_interval:
    case NR_getpgid:
    case NR_getsid:
    case NR_prlimit64:
    case NR_process_vm_readv:
    case NR_process_vm_writev:
    case NR_sched_setattr:
    case NR_sched_getattr:
    case NR_pidfd_open:
        error = translate(&a);
        break;
    default:
        error = nr >= NR_sched_setparam && nr <= NR_sched_getaffinity ? translate(&a) : 0;
    }
    if (error != 0)
        return error;
    return __gw_kernel(nr, a, b, c, d, e, f);
}
