// Threads: they compute, wait for each other, recurse, jump, have locals of
// their own that others write to; slots whose thread has ended, or has not
// begun, lie beside them; numbers of threads stay what they are.
#include "threads.h"
#include "library.h"

enum { THREADS = 4, ROUNDS = 30 };

typedef struct {
    thread thread;
    unsigned long id, result;
    unsigned long *mailbox; // a local of the thread
    int ready;
} worker;

static worker workers[THREADS];
static int sum_lock;
static unsigned long sum;
static int arrived, round_of_all;
static _Thread_local unsigned long own = 77;

static unsigned long mix(unsigned long x) { return (x ^ x >> 29) * 0xbf58476d1ce4e5b9U; }

static unsigned long recurse(unsigned long seed, int depth) {
    unsigned long room[3] = {seed, seed * 3, seed * 7};
    return depth == 0 ? mix(seed) : recurse(room[seed % 3], depth - 1) ^ room[1];
}

static void meet(void) {
    int seen = __atomic_load_n(&round_of_all, __ATOMIC_ACQUIRE);
    if (__atomic_add_fetch(&arrived, 1, __ATOMIC_ACQ_REL) == THREADS) {
        arrived = 0;
        __atomic_store_n(&round_of_all, seen + 1, __ATOMIC_RELEASE);
        wake(&round_of_all);
    } else {
        wait_while(&round_of_all, seen);
    }
}

static void leap(jmp_buf *back, int value) {
    recurse((unsigned long)value, 3);
    longjmp(*back, value);
}

static int work(void *argument) {
    worker *self = argument;
    unsigned long mailbox = 0;
    jmp_buf back;
    volatile unsigned long landed = 0;
    int tid = (int)__gw_syscall(TEST_NR_gettid, 0, 0, 0, 0, 0, 0);

    self->mailbox = &mailbox;
    own += self->id;
    meet();
    for (int i = 0; i < ROUNDS; i++) {
        // To the next one's stack.
        __atomic_store_n(workers[(self->id + 1) % THREADS].mailbox, mix(own + (unsigned)i), __ATOMIC_RELEASE);
        meet();
        own = recurse(own ^ mailbox, i % 7);
        lock(&sum_lock);
        sum += own;
        unlock(&sum_lock);
        if (setjmp(back) == 0)
            leap(&back, i + 1);
        landed++;
        meet();
    }
    if (tid != self->thread.tid || tid != (int)__gw_syscall(TEST_NR_gettid, 0, 0, 0, 0, 0, 0))
        leave(4);
    self->result = own ^ landed;
    return 0;
}

static int ends_at_once(void *argument) {
    *(unsigned long *)argument = mix(5);
    return 0;
}

int main(void) {
    thread ended;
    unsigned long value = 0;
    void *unused = __gw_thread_new();
    begin(&ended, ends_at_once, &value);
    for (unsigned long i = 0; i < THREADS; i++) {
        workers[i].id = i;
        begin(&workers[i].thread, work, &workers[i]);
    }
    for (int i = 0; i < THREADS; i++) {
        join(&workers[i].thread);
        print("worker %d: %lx\n", i, workers[i].result);
    }
    join(&ended);
    if (!unused)
        leave(5);
    __gw_thread_free(unused);
    print("sum %lx, value %lx, main's own %lu\n", sum, value, own);
    return 0;
}
