// Thread-local variables of one thread: initialised, zero, aligned, static in a function, with their address taken.
#include <stdint.h>
#include <stdio.h>

static _Thread_local int counter = 7;
_Thread_local double shared_real = 0.5;
static _Thread_local char room[300];
static _Thread_local _Alignas(64) uint64_t aligned[8];
static __thread int *to_counter;
static _Thread_local struct {
    int a;
    const char *name;
} record = {5, "record"};

__attribute__((noinline)) static int bump(void) {
    static _Thread_local int calls = 100;
    counter += 3;
    return calls++;
}

static uint64_t recurse(int n) {
    room[n] = (char)(n * 3);
    aligned[n % 8] += (uint64_t)n * n;
    if (n == 0)
        return aligned[0];
    uint64_t below = recurse(n - 1);
    shared_real = shared_real * 0.999 + (double)room[n];
    return below + aligned[n % 8];
}

int main(void) {
    int last = 0;
    to_counter = &counter;
    for (int i = 0; i < 50; i++)
        last = bump();
    *to_counter -= 1;
    printf("counter %d, calls %d\n", counter, last);
    printf("recursion %llu %.9f\n", (unsigned long long)recurse(250), shared_real);
    printf("alignment %d, room %d %d\n", (int)((uintptr_t)aligned % 64), room[100], room[299]);
    record.a += counter;
    printf("%s %d\n", record.name, record.a);
    return 0;
}
