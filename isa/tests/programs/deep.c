// A chain of 50,000 calls, each with locals on the data stack. Every call polls at its entry, so the number of polls
// says how deep the program is.
#include "library.h"

static __attribute__((noinline)) long deep(int n, const long *above) {
    long mine[4] = {n, above[0], above[1] ^ n, 3};
    if (n == 0)
        return mine[1] + mine[2];
    return deep(n - 1, mine) + mine[n & 3];
}

int main(void) {
    long first[4] = {1, 2, 3, 4};
    long sum = 0;
    for (int i = 0; i < 3; i++)
        sum = sum * 7 + deep(50000 - i, first);
    print("%ld\n", sum);
    return 0;
}
