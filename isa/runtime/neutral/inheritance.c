// Mutexes with priority inheritance (futex(2): FUTEX_LOCK_PI and its like). The word of such a lock has its owner's
// number among threads, and the kernel knows the program's numbers of threads only by other ones. So these locks are
// made of FUTEX_WAIT and FUTEX_WAKE. They exclude and report as the kernel's do; a thread that waits lends no priority
// to the owner.
#include "inheritance.h"
#include "signals.h"

enum {
    FUTEX_WAKE = 1,
    FUTEX_LOCK_PI = 6,
    FUTEX_UNLOCK_PI = 7,
    FUTEX_TRYLOCK_PI = 8,
    FUTEX_WAIT_BITSET = 9,
    FUTEX_LOCK_PI2 = 13,
    FUTEX_PRIVATE = 128,
    FUTEX_CLOCK_REALTIME = 256,
};
enum { EDEADLK = 35 };

#define WAITERS 0x80000000U
#define OWNER_DIED 0x40000000U
#define NUMBER 0x3fffffffU

NOSUSPEND int gw_is_lock_call(long nr, long operation) {
    if (nr != NR_futex)
        return 0;
    switch ((int)operation & ~(FUTEX_PRIVATE | FUTEX_CLOCK_REALTIME)) {
    case FUTEX_LOCK_PI:
    case FUTEX_LOCK_PI2:
    case FUTEX_TRYLOCK_PI:
    case FUTEX_UNLOCK_PI:
        return 1;
    default:
        return 0;
    }
}

NOSUSPEND static int change(uint32_t *word, uint32_t from, uint32_t to) {
    return __atomic_compare_exchange_n(word, &from, to, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

static long unlock(uint32_t *word, long private) {
    uint32_t held;
    do {
        held = __atomic_load_n(word, __ATOMIC_SEQ_CST);
        if ((held & NUMBER) != gw_self()->tid)
            return -EPERM;
    } while (!change(word, held, 0));
    if (!(held & WAITERS))
        return 0;
    long woken = gw_waiting_call(0, NR_futex, (long)word, FUTEX_WAKE | private, 1, 0, 0, 0);
    return woken < 0 ? woken : 0;
}

long gw_lock_call(uint32_t *word, long operation, long until) {
    int command = (int)operation & ~(FUTEX_PRIVATE | FUTEX_CLOCK_REALTIME);
    long private = operation & FUTEX_PRIVATE;
    // The first of these has always meant that clock.
    long clock = command == FUTEX_LOCK_PI ? FUTEX_CLOCK_REALTIME : operation & FUTEX_CLOCK_REALTIME;
    uint32_t waiters = 0;
    if ((unsigned long)word % sizeof *word != 0)
        return -EINVAL;
    // The kernel would be asked whether it is writable by writing, which other threads do meanwhile.
    if (!gw_is_readable(word, sizeof *word))
        return -EFAULT;
    if (command == FUTEX_UNLOCK_PI)
        return unlock(word, private);
    for (;;) {
        uint32_t held = __atomic_load_n(word, __ATOMIC_SEQ_CST);
        if ((held & NUMBER) == 0) {
            // What waits behind this thread is woken by it, and the word no longer tells whether anything does.
            if (change(word, held, gw_self()->tid | (held & (WAITERS | OWNER_DIED)) | waiters))
                return 0;
            continue;
        }
        if ((held & NUMBER) == gw_self()->tid)
            return -EDEADLK;
        if (command == FUTEX_TRYLOCK_PI)
            return -EAGAIN;
        if (!(held & WAITERS) && !change(word, held, held | WAITERS))
            continue;
        long result = gw_waiting_call(0, NR_futex, (long)word, FUTEX_WAIT_BITSET | private | clock,
                                      (long)(held | WAITERS), until, 0, 0xffffffffL);
        if (result != 0 && result != -EAGAIN && result != -EINTR)
            return result;
        waiters = WAITERS;
    }
}
