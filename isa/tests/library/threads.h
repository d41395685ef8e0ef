// Threads for the tests without a C library's: what the runtime gives to one
// (isa/ABI.md, section 2), and a lock.
#ifndef GW_TEST_THREADS_H
#define GW_TEST_THREADS_H

#include "library.h"

enum { TEST_NR_futex = 98, TEST_NR_gettid = 178, TEST_FUTEX_WAIT = 0, TEST_FUTEX_WAKE = 1 };
// As pthread_create of musl.
enum { TEST_THREAD_FLAGS = 0x7d0f00 };

void *__gw_thread_new(void);
long __gw_thread_start(void *block, int (*function)(void *), void *argument, int flags, int *parent, int *child);
void __gw_thread_free(void *block);

typedef struct {
    void *block;
    int tid;
    int running; // the runtime makes it zero when the thread ends
} thread;

static inline void wait_while(int *word, int value) {
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) == value)
        __gw_syscall(TEST_NR_futex, (long)word, TEST_FUTEX_WAIT, value, 0, 0, 0);
}

static inline void wake(int *word) { __gw_syscall(TEST_NR_futex, (long)word, TEST_FUTEX_WAKE, 1 << 30, 0, 0, 0); }

static inline void begin(thread *t, int (*function)(void *), void *argument) {
    t->block = __gw_thread_new();
    t->running = 1;
    if (!t->block || __gw_thread_start(t->block, function, argument, TEST_THREAD_FLAGS, &t->tid, &t->running) < 0)
        leave(3);
}

static inline void join(thread *t) {
    wait_while(&t->running, 1);
    __gw_thread_free(t->block);
}

static inline void lock(int *word) {
    while (__atomic_exchange_n(word, 1, __ATOMIC_ACQUIRE))
        wait_while(word, 1);
}

static inline void unlock(int *word) {
    __atomic_store_n(word, 0, __ATOMIC_RELEASE);
    wake(word);
}

#endif
