// The part of the kernel interface that gives out addresses. Results as the kernel's, or GW_ABANDONED: nothing has
// changed, and the call is to be issued again.
#ifndef GW_NEUTRAL_MEMORY_H
#define GW_NEUTRAL_MEMORY_H

enum { NR_brk = 214, NR_munmap = 215, NR_mremap = 216, NR_mmap = 222, NR_mprotect = 226 };

static inline int gw_is_memory_call(long nr) {
    return nr == NR_brk || nr == NR_munmap || nr == NR_mremap || nr == NR_mmap || nr == NR_mprotect;
}

long gw_memory_call(long nr, long a, long b, long c, long d, long e, long f);

// Around what must not see the table of mappings half changed.
void gw_lock_memory(void);
void gw_unlock_memory(void);

// shared.c
long gw_as_private(long prot, long file);

#endif
