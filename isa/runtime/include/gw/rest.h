// How a process at rest is asked for, and what it says about itself (isa/ABI.md, section 7). The same on every set.
#ifndef GW_REST_H
#define GW_REST_H

#include <stdint.h>

// si_code of signal 58, queued by another process (rt_sigqueueinfo). No call of the program's can send it. Its value is
// what is asked for, and the number of the rest above. Two threads may handle two requests in any order, so not the
// order counts but the number: one that is over does not begin. As kill sends it, signal 58 ends every rest that was
// asked for.
enum { GW_SI_REST = -58 };
enum gw_rest_request { GW_REST_BEGIN = 1, GW_REST_END = 2 };
#define GW_REST_NUMBER_SHIFT 2

#define GW_REST_MAGIC "GODWREST"
#define GW_REST_VERSION 1

// At 0x7000_0020, behind the build's identity, which the layout writes at 0x7000_0000.
struct gw_rest {
    char magic[8];
    uint32_t version;
    uint32_t ready;            // not zero: requests are heard
    uint32_t resting;          // not zero: all threads stand still, and what follows is of this rest
    uint32_t threads;          // that stand still
    uint64_t number;           // of the rest
    uint64_t park_nanoseconds; // from the request's arrival until the last thread stood still
    uint64_t over;             // the highest number whose rest is over, or was taken back
};
_Static_assert(sizeof(struct gw_rest) == 48, "isa/ABI.md, section 7");

#endif
