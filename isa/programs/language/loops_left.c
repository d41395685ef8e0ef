// Short counted loops that are left from their middle, back to a loop around them: the outer loop's poll must not come to
// lie in the inner one, which has none.
#include <stdio.h>

static volatile unsigned rounds, seen;

// The jump back is at the end of a block of the inner loop.
__attribute__((noinline)) static unsigned leave(unsigned most) {
    unsigned sum = 0;
again:
    rounds++;
#pragma clang loop unroll(disable)
    for (unsigned i = 0; i < 12; i++) {
        seen += i;
        if (seen % 5 == 3) {
            sum = sum * 3 + seen;
            if (rounds < most)
                goto again;
            sum ^= rounds;
        }
        seen ^= sum;
        sum += seen >> 2;
    }
    return sum;
}

// From two places, one of them to a loop farther out.
__attribute__((noinline)) static unsigned leave_two(unsigned most) {
    unsigned sum = 1;
outer:
    rounds++;
    sum += rounds;
inner:
    seen++;
#pragma clang loop unroll(disable)
    for (unsigned i = 0; i < 9; i++) {
        seen += sum;
        if (seen % 7 == 1 && rounds < most)
            goto outer;
        sum = sum * 5 + i;
        if (seen % 11 == 2) {
            sum ^= seen;
            if (rounds++ < most)
                goto inner;
        }
    }
    return sum;
}

int main(void) {
    printf("leave %u\n", leave(400));
    rounds = 0;
    printf("leave_two %u\n", leave_two(400));
    return 0;
}
