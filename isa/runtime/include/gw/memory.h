// Where the program's memory is: the heap that brk moves, and the table of what mmap gave out. Neutral, part of a
// state.
#ifndef GW_MEMORY_H
#define GW_MEMORY_H

#include <stdint.h>

struct gw_mapping {
    uint64_t begin;
    uint64_t end;
    uint32_t prot;  // PROT_*
    uint32_t flags; // MAP_SHARED or MAP_PRIVATE, and MAP_ANONYMOUS
};

// One per program; the mappings lie in the table at GW_MAP_TABLE, in order of address, without overlap.
struct gw_neutral {
    uint64_t heap_end;
    uint64_t mappings;
};

extern struct gw_neutral __gw_neutral;

#endif
