// A thread that calls itself as often as the argument says, which may be more than its stacks can hold.
#include "library.h"
#include "threads.h"

static unsigned long result;

static unsigned long fold(unsigned long a, unsigned long b, unsigned long c, unsigned long d, unsigned long depth);
static unsigned long (*volatile again)(unsigned long, unsigned long, unsigned long, unsigned long,
                                       unsigned long) = fold;

static unsigned long fold(unsigned long a, unsigned long b, unsigned long c, unsigned long d, unsigned long depth) {
    return depth == 0 ? a ^ b : again(b * 3 + c, a ^ d, c + 1, d * 7, depth - 1) * 31 + a * b + c * d;
}

static int dive(void *depth) {
    result = fold(1, 2, 3, 4, *(unsigned long *)depth);
    return 0;
}

int main(int argc, char **argv) {
    thread diver;
    unsigned long depth = 0;
    for (const char *digit = argc > 1 ? argv[1] : "1000"; *digit; digit++)
        depth = depth * 10 + (unsigned long)(*digit - '0');
    begin(&diver, dive, &depth);
    join(&diver);
    print("%lx\n", result);
    return 0;
}
