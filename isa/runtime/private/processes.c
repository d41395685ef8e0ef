// New processes and new programs: signal 58 must not meet one that does not handle it yet, or it would end it, nor be
// lost to one that forgets what its parent was asked for.
#include "private.h"

long __gw_exec(long number, long a, long b, long c, long d, long e);
long __gw_fork(long flags, long b, long c, long d, long e);
long __gw_kernel(long number, long a, long b, long c, long d, long e, long f);
void __gw_forked(void);

// The next program unblocks it when it listens (world.c), one of another compiler never.
long __gw_exec(long number, long a, long b, long c, long d, long e) {
    gw_hold_requests();
    long error = __gw_kernel(number, a, b, c, d, e, 0);
    gw_let_requests_through();
    return error;
}

// The child is another process once it knows that it is one.
long __gw_fork(long flags, long b, long c, long d, long e) {
    enum { CLONE = 220 };
    gw_hold_requests();
    gw_lock_slots();
    long result = __gw_kernel(CLONE, flags, b, c, d, e, 0);
    if (result == 0)
        __gw_forked();
    else
        gw_unlock_slots();
    gw_let_requests_through();
    return result;
}
