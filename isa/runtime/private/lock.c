// Locks and waiting for the runtime itself. A thread that holds one is never suspended, so in a state they are all
// free. Signal handlers take none of them, but for the handler of a fault, which takes that of the actions: the code
// under that lock does not fault.
#include "private.h"

// On EINTR and EAGAIN the caller looks again, so no result needs a look here.
void gw_wait(uint32_t *word, uint32_t value, int operation) {
    (void)gw_call(GW_NR_futex, (long)word, GW_FUTEX_WAIT | operation, value, 0, 0, 0);
}

void gw_wake(uint32_t *word, int operation) {
    (void)gw_call(GW_NR_futex, (long)word, GW_FUTEX_WAKE | operation, INT32_MAX, 0, 0, 0);
}

// By the kernel, to which it does not matter where the program's word is.
void gw_clear_and_wake(uint32_t *word) {
    enum { SET_TO_ZERO = 0 };
    (void)gw_call(GW_NR_futex, (long)word, GW_FUTEX_WAKE_OP, INT32_MAX, 0, (long)word, SET_TO_ZERO);
}

// 0: free, 1: held, 2: held, and somebody may be waiting.
void __gw_lock(uint32_t *word) {
    uint32_t found = 0;
    if (__atomic_compare_exchange_n(word, &found, 1, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
        return;
    while (__atomic_exchange_n(word, 2, __ATOMIC_ACQUIRE) != 0)
        gw_wait(word, 2, GW_FUTEX_PRIVATE);
}

void __gw_unlock(uint32_t *word) {
    if (__atomic_exchange_n(word, 0, __ATOMIC_RELEASE) == 2)
        (void)gw_call(GW_NR_futex, (long)word, GW_FUTEX_WAKE | GW_FUTEX_PRIVATE, 1, 0, 0, 0);
}
