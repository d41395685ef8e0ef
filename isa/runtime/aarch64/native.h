// What the private runtime needs to know about arm64: numbers of the kernel calls that it makes itself, the thread
// pointer, the floating-point environment, where a signal frame keeps the program counter.
#ifndef GW_NATIVE_H
#define GW_NATIVE_H

#include <stdint.h>

enum {
    GW_NR_dup3 = 24,
    GW_NR_fcntl = 25,
    GW_NR_flock = 32,
    GW_NR_chdir = 49,
    GW_NR_openat = 56,
    GW_NR_close = 57,
    GW_NR_getdents64 = 61,
    GW_NR_lseek = 62,
    GW_NR_read = 63,
    GW_NR_write = 64,
    GW_NR_pread64 = 67,
    GW_NR_pwrite64 = 68,
    GW_NR_ppoll = 73,
    GW_NR_readlinkat = 78,
    GW_NR_exit = 93,
    GW_NR_exit_group = 94,
    GW_NR_set_tid_address = 96,
    GW_NR_futex = 98,
    GW_NR_setitimer = 103,
    GW_NR_timer_create = 107,
    GW_NR_timer_gettime = 108,
    GW_NR_timer_getoverrun = 109,
    GW_NR_timer_settime = 110,
    GW_NR_timer_delete = 111,
    GW_NR_clock_gettime = 113,
    GW_NR_sched_yield = 124,
    GW_NR_kill = 129,
    GW_NR_tgkill = 131,
    GW_NR_rt_sigaction = 134,
    GW_NR_rt_sigprocmask = 135,
    GW_NR_rt_sigtimedwait = 137,
    GW_NR_rt_sigqueueinfo = 138,
    GW_NR_umask = 166,
    GW_NR_prctl = 167,
    GW_NR_getpid = 172,
    GW_NR_gettid = 178,
    GW_NR_brk = 214,
    GW_NR_munmap = 215,
    GW_NR_execve = 221,
    GW_NR_mmap = 222,
    GW_NR_mprotect = 226,
    GW_NR_madvise = 233,
    GW_NR_rt_tgsigqueueinfo = 240,
    GW_NR_kcmp = 272,
    GW_NR_renameat2 = 276,
    GW_NR_memfd_create = 279,
    GW_NR_statx = 291,
};

// A kernel call of the runtime itself, which no request ends.
static inline long gw_call(long number, long a, long b, long c, long d, long e, long f) {
    register long x8 __asm__("x8") = number;
    register long x0 __asm__("x0") = a;
    register long x1 __asm__("x1") = b;
    register long x2 __asm__("x2") = c;
    register long x3 __asm__("x3") = d;
    register long x4 __asm__("x4") = e;
    register long x5 __asm__("x5") = f;
    __asm__ volatile("svc #0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
    return x0;
}

static inline long gw_set_thread_pointer(void *thread) {
    __asm__ volatile("msr tpidr_el0, %0" : : "r"(thread) : "memory");
    return 0;
}

// FPCR in the upper word (rounding mode), FPSR in the lower (exception flags).
static inline uint64_t gw_fp_environment(void) {
    uint64_t control;
    uint64_t status;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control), "=r"(status));
    return (control & 3UL << 22) << 32 | (status & 0x1f);
}

static inline void gw_set_fp_environment(uint64_t environment) {
    uint64_t control = environment >> 32 & 3UL << 22;
    uint64_t status = environment & 0x1f;
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1" : : "r"(control), "r"(status));
}

// The generic flags of open are arm64's.
static inline uint32_t gw_generic_open_flags(uint32_t own) { return own; }
static inline uint32_t gw_own_open_flags(uint32_t generic) { return generic; }

// Without it the kernel returns from a handler through its own page, which a process that comes from another set lacks.
#define GW_SA_RESTORER 0x04000000UL

// struct ucontext: flags, link, stack and 128 bytes of mask, then from 176 the fault address, x0 to x30, sp and pc.
static inline uint64_t *gw_program_counter(void *context) { return (uint64_t *)context + 22 + 1 + 31 + 1; }

// And the result of a kernel call, x0.
static inline uint64_t *gw_result_register(void *context) { return (uint64_t *)context + 22 + 1; }

// The mask that holds when the handler has returned.
static inline void gw_set_context_mask(void *context, uint64_t mask) {
    __builtin_memcpy((char *)context + 40, &mask, sizeof mask);
}

static inline uint64_t gw_context_mask(const void *context) {
    uint64_t mask;
    __builtin_memcpy(&mask, (const char *)context + 40, sizeof mask);
    return mask;
}

#endif
