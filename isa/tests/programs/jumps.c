// setjmp and longjmp: out of deep recursion, in loops, nested, to two places, past variable-length arrays, and from
// callbacks; with values that live across the setjmp in registers and in memory.
#include "library.h"

#define APART __attribute__((noinline))

static jmp_buf outer, inner;
static volatile int noise;

static APART int dive(int depth, jmp_buf target, int value) {
    int local[4] = {depth, value, depth * 2, 1};
    if (depth == 0)
        longjmp(target, value);
    int result = dive(depth - 1, target, value);
    return result + local[depth & 3];
}

static APART long retry(int n) {
    long sum = 0;
    volatile int tries = 0;
    for (int i = 0; i < n; i++) {
        double scale = i * 0.5 + 1;
        long before = sum;
        int value = setjmp(inner);
        if (value == 0) {
            tries++;
            dive(i % 5, inner, i + 1);
            leave(99);
        }
        sum = before + (long)((double)value * scale) + tries;
        noise++;
    }
    return sum;
}

static APART int nested(int depth) {
    jmp_buf here;
    int kept = depth * 7;
    int value = setjmp(here);
    if (value != 0)
        return value + kept;
    if (depth == 0)
        longjmp(outer, 1000 + kept);
    if (depth % 3 == 0)
        dive(depth, here, depth);
    return nested(depth - 1) + kept;
}

static APART double over_arrays(int n) {
    jmp_buf here;
    double total = 0;
    volatile int round = 0;
    if (setjmp(here) != 0)
        round++;
    {
        double values[n + round];
        for (int i = 0; i < n + round; i++)
            values[i] = i * 1.25 + round;
        if (round < 4)
            dive(3, here, 1);
        for (int i = 0; i < n + round; i++)
            total += values[i];
    }
    return total + round;
}

static jmp_buf found;
static int wanted;

static int look(const void *a, const void *b) {
    if (*(const int *)a == wanted || *(const int *)b == wanted)
        longjmp(found, wanted);
    return *(const int *)a - *(const int *)b;
}

// Which of two places is jumped to is known at run time only; a value lives into both.
static APART long two_places(int seed) {
    jmp_buf first, second;
    long a = seed * 3L, b = seed * 5L;
    int x = setjmp(first);
    if (x > 2)
        return a * 100 + b + x;
    a += 17;
    int y = setjmp(second);
    b += y;
    if (y > 3)
        return b * 1000 + a;
    if ((seed + x + y) % 2)
        dive(2, first, x + 1);
    dive(1, second, y + 1);
    return -1;
}

int main(void) {
    print("retry %ld\n", retry(12));
    int value = setjmp(outer);
    if (value == 0)
        print("nested %d\n", nested(11));
    else
        print("outer %d\n", value);
    print("arrays %f\n", over_arrays(9));
    int items[30];
    for (int i = 0; i < 30; i++)
        items[i] = i * 37 % 31;
    wanted = 12;
    value = setjmp(found);
    if (value == 0)
        sort(items, 30, sizeof *items, look);
    print("found %d\n", value);
    for (int i = 0; i < 6; i++)
        print("places %ld\n", two_places(i));
    print("zero %d noise %d\n", setjmp(inner) ? 1 : 0, noise);
    return 0;
}
