// Recursion 50,000 frames deep, three times, with pointers from the deepest frame into all others.
#include <stdio.h>

enum { DEPTH = 50000 };

struct frame {
    const struct frame *caller;
    unsigned value;
};

static unsigned gather(const struct frame *frame) {
    unsigned sum = 0;
    for (; frame; frame = frame->caller)
        sum = sum * 33 + frame->value;
    return sum;
}

static unsigned dive(const struct frame *caller, unsigned left, unsigned seed, double weight) {
    struct frame mine = {caller, seed};
    if (left == 0)
        return gather(&mine) + (unsigned)weight;
    unsigned below = dive(&mine, left - 1, seed * 1664525 + 1013904223, weight * 0.5 + left);
    return below ^ mine.value ^ (unsigned)(weight * 3);
}

int main(void) {
    for (unsigned round = 0; round < 3; round++)
        printf("round %u: %08x\n", round, dive(NULL, DEPTH, round, 1.5));
    return 0;
}
