// What the private runtime needs to know about x86-64: numbers of the kernel calls that it makes itself, the thread
// pointer, the floating-point environment, where a signal frame keeps the program counter.
#ifndef GW_NATIVE_H
#define GW_NATIVE_H

#include <stdint.h>

enum {
    GW_NR_read = 0,
    GW_NR_write = 1,
    GW_NR_close = 3,
    GW_NR_lseek = 8,
    GW_NR_mmap = 9,
    GW_NR_mprotect = 10,
    GW_NR_munmap = 11,
    GW_NR_brk = 12,
    GW_NR_rt_sigaction = 13,
    GW_NR_rt_sigprocmask = 14,
    GW_NR_pread64 = 17,
    GW_NR_pwrite64 = 18,
    GW_NR_sched_yield = 24,
    GW_NR_madvise = 28,
    GW_NR_setitimer = 38,
    GW_NR_getpid = 39,
    GW_NR_execve = 59,
    GW_NR_exit = 60,
    GW_NR_kill = 62,
    GW_NR_fcntl = 72,
    GW_NR_flock = 73,
    GW_NR_chdir = 80,
    GW_NR_umask = 95,
    GW_NR_rt_sigtimedwait = 128,
    GW_NR_rt_sigqueueinfo = 129,
    GW_NR_prctl = 157,
    GW_NR_arch_prctl = 158,
    GW_NR_gettid = 186,
    GW_NR_futex = 202,
    GW_NR_getdents64 = 217,
    GW_NR_set_tid_address = 218,
    GW_NR_timer_create = 222,
    GW_NR_timer_settime = 223,
    GW_NR_timer_gettime = 224,
    GW_NR_timer_getoverrun = 225,
    GW_NR_timer_delete = 226,
    GW_NR_clock_gettime = 228,
    GW_NR_exit_group = 231,
    GW_NR_tgkill = 234,
    GW_NR_openat = 257,
    GW_NR_ppoll = 271,
    GW_NR_rt_tgsigqueueinfo = 297,
    GW_NR_readlinkat = 267,
    GW_NR_dup3 = 292,
    GW_NR_kcmp = 312,
    GW_NR_renameat2 = 316,
    GW_NR_memfd_create = 319,
    GW_NR_statx = 332,
};

// A kernel call of the runtime itself, which no request ends.
static inline long gw_call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}

static inline long gw_set_thread_pointer(void *thread) {
    enum { ARCH_SET_FS = 0x1002 };
    return gw_call(GW_NR_arch_prctl, ARCH_SET_FS, (long)thread, 0, 0, 0, 0);
}

// MXCSR as FPCR (rounding mode, bits 22 and 23) and FPSR (exception flags, bits 0 to 4) of arm64, in one word each.
static inline uint64_t gw_fp_environment(void) {
    static const uint8_t rounding[4] = {0, 2, 1, 3}; // nearest, down, up, to zero
    uint32_t mxcsr = __builtin_ia32_stmxcsr();
    uint32_t flags = (mxcsr & 1) | (mxcsr >> 1 & 0x1e); // without "denormal operand"
    return (uint64_t)rounding[mxcsr >> 13 & 3] << 54 | flags;
}

static inline void gw_set_fp_environment(uint64_t environment) {
    static const uint8_t rounding[4] = {0, 2, 1, 3};
    enum { ALL_MASKED = 0x1f80 };
    uint32_t flags = environment & 0x1f;
    __builtin_ia32_ldmxcsr(ALL_MASKED | (uint32_t)rounding[environment >> 54 & 3] << 13 | (flags & 1) |
                           (flags & 0x1e) << 1);
}

// The flags of open that have other places: O_DIRECTORY, O_NOFOLLOW, O_DIRECT, O_LARGEFILE (as in kernel/x86_64.c).
static inline uint32_t gw_generic_open_flags(uint32_t own) {
    uint32_t generic = own & ~0740000U;
    generic |= own & 0200000 ? 040000 : 0;
    generic |= own & 0400000 ? 0100000 : 0;
    generic |= own & 040000 ? 0200000 : 0;
    return generic | (own & 0100000 ? 0400000 : 0);
}

static inline uint32_t gw_own_open_flags(uint32_t generic) {
    uint32_t own = generic & ~0740000U;
    own |= generic & 040000 ? 0200000 : 0;
    own |= generic & 0100000 ? 0400000 : 0;
    own |= generic & 0200000 ? 040000 : 0;
    return own | (generic & 0400000 ? 0100000 : 0);
}

#define GW_SA_RESTORER 0x04000000UL

// struct ucontext: flags, link and stack, then the registers, of which rip is the 17th.
static inline uint64_t *gw_program_counter(void *context) { return (uint64_t *)context + 5 + 16; }

// And the result of a kernel call, rax, the 14th.
static inline uint64_t *gw_result_register(void *context) { return (uint64_t *)context + 5 + 13; }

// The mask that holds when the handler has returned, behind 256 bytes of registers.
static inline void gw_set_context_mask(void *context, uint64_t mask) {
    __builtin_memcpy((char *)context + 40 + 256, &mask, sizeof mask);
}

static inline uint64_t gw_context_mask(const void *context) {
    uint64_t mask;
    __builtin_memcpy(&mask, (const char *)context + 40 + 256, sizeof mask);
    return mask;
}

#endif
