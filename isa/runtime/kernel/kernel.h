/*
 * The kernel interface: one system call with arm64's numbers, constants and layouts, on every
 * instruction set. It is native code, one object for each set; it keeps no state, takes no lock, and
 * never suspends. `isa/ABI.md` says who calls it.
 */
#ifndef GW_KERNEL_H
#define GW_KERNEL_H

/* Performs a call; the result, or -errno. -4096 and -4097 (ended before it took effect) are passed on. */
long __gw_kernel(long number, long a, long b, long c, long d, long e, long f);

/* The instruction itself, with the set's own number. The runtime has it. */
long __gw_native(long number, long a, long b, long c, long d, long e, long f);

/*
 * Is there memory of the program's behind a pointer that it has handed over? 0 or -EFAULT, as the kernel would answer;
 * or GW_ABANDONED. `size` is 8 bytes to a page. When it is to be written, its first and its last 8 bytes may be.
 */
long __gw_reach(void *address, unsigned long size, int writes);

/* What the kernel returns to from a signal handler. */
void __gw_sigreturn(void);

/* How the arguments of a call are translated: the last column of calls.h. */
enum gw_kind {
    GW_REFUSED,
    GW_same,
    GW_open_flags_1,
    GW_open_flags_2,
    GW_openat2,
    GW_fcntl,
    GW_stat_1,
    GW_stat_2,
    GW_epoll_ctl,
    GW_epoll_wait,
    GW_semctl,
    GW_sigaction,
    GW_mmap,
    GW_mprotect,
    GW_clone,
    GW_prctl,
};

/* The set's own part: the call `number` (the set's own) of this kind, with generic arguments. */
long gw_translate(enum gw_kind kind, long number, const long arguments[6]);

/* Error numbers, flags and layouts that are the same on every set. */
enum {
    GW_EAGAIN = 11,
    GW_EFAULT = 14,
    GW_EACCES = 13,
    GW_EINVAL = 22,
    GW_ENOSYS = 38,
    GW_E2BIG = 7,
};

/* As the kernel takes it on both sets. */
struct gw_sigaction {
    void *handler;
    unsigned long flags;
    void (*restorer)(void);
    unsigned long mask;
};

enum { GW_SA_RESTORER = 0x04000000 };

static inline long gw_native6(long number, const long a[6]) {
    return __gw_native(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/* Is this result an error? -4096 and -4097 (ended for a capture, by cancellation) count: nothing has been written. */
static inline int gw_failed(long result) { return (unsigned long)result >= (unsigned long)-4097L; }

#endif
