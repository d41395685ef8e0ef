// Mutexes with priority inheritance; called by neutral/syscall.c only. Results as the kernel's.
#ifndef GW_NEUTRAL_INHERITANCE_H
#define GW_NEUTRAL_INHERITANCE_H

#include <stdint.h>

// Does a kernel call take or leave such a mutex? `operation` is its second argument.
int gw_is_lock_call(long nr, long operation);
// Does it. `until` is the address of a time, or 0.
long gw_lock_call(uint32_t *word, long operation, long until);

#endif
