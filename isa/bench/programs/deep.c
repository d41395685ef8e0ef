// `deep DEPTH ROUNDS`: DEPTH calls deep, each with some locals, it takes ROUNDS rounds with a poll in each.
#include <stdio.h>
#include <stdlib.h>

static __attribute__((noinline)) long step(long x) {
    static volatile long seen;
    return x * 31 + ++seen;
}

static __attribute__((noinline)) long deep(long left, long rounds, const long *above) {
    long mine[2] = {left, above[0] ^ left};
    if (left > 0)
        return deep(left - 1, rounds, mine) + mine[left & 1];
    long sum = mine[1];
    for (long i = 0; i < rounds; i++)
        sum = step(sum ^ i);
    return sum;
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    long first[2] = {1, 2};
    printf("%ld\n", deep(strtol(argv[1], 0, 10), strtol(argv[2], 0, 10), first));
    return 0;
}
