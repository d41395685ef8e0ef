// Embarrassingly parallel, the problem of NAS "EP": pairs of normal deviates by the polar method (Marsaglia and Bray,
// 1964), counted by square annulus.
//
// Verified: the generator's last state against a jump ahead by squaring; the share of accepted pairs against pi / 4
// and the sums against zero, within five standard deviations; the counts against the number of accepted pairs.
// Prints sums with 9 digits: `log` may differ in its last bit between C libraries.
#include "kernel.h"
#include <math.h>

enum { ANNULI = 10 };

// A linear congruential generator modulo 2^64 (Knuth's MMIX), so that a jump ahead is possible.
static const uint64_t FACTOR = 6364136223846793005U, ADDEND = 1442695040888963407U, START = 271828183;

static double next(uint64_t *state) {
    *state = *state * FACTOR + ADDEND;
    return (double)(*state >> 11) * 0x1p-52 - 1.0;
}

static uint64_t jump(uint64_t state, uint64_t steps) {
    uint64_t factor = FACTOR, addend = ADDEND;
    for (; steps; steps >>= 1) {
        if (steps & 1)
            state = state * factor + addend;
        addend = (factor + 1) * addend;
        factor *= factor;
    }
    return state;
}

int main(int argc, char **argv) {
    uint64_t pairs = (uint64_t)kernel_size(argc, argv, 20000, 1000, 1000000000);
    uint64_t state = START, counts[ANNULI] = {0}, accepted = 0, counted = 0;
    double sum_x = 0, sum_y = 0;

    for (uint64_t i = 0; i < pairs; i++) {
        double x = next(&state), y = next(&state), square = x * x + y * y;
        if (square >= 1.0 || square == 0.0)
            continue;
        double scale = sqrt(-2.0 * log(square) / square);
        x *= scale;
        y *= scale;
        double larger = fabs(x) > fabs(y) ? fabs(x) : fabs(y);
        counts[larger < ANNULI ? (int)larger : ANNULI - 1]++;
        accepted++;
        sum_x += x;
        sum_y += y;
    }
    printf("ep: %" PRIu64 " pairs, %" PRIu64 " accepted, sums %.9e %.9e\n", pairs, accepted, sum_x, sum_y);
    for (int i = 0; i < ANNULI; i++) {
        printf("ep: annulus %d: %" PRIu64 "\n", i, counts[i]);
        counted += counts[i];
    }
    double share = (double)accepted / (double)pairs, expected = acos(-1.0) / 4;
    if (state != jump(START, 2 * pairs))
        return kernel_failed("the generator's last state");
    if (counted != accepted)
        return kernel_failed("the counts");
    if (fabs(share - expected) > 5 * sqrt(expected * (1 - expected) / (double)pairs))
        return kernel_failed("the share of accepted pairs");
    if (fabs(sum_x) > 5 * sqrt((double)accepted) || fabs(sum_y) > 5 * sqrt((double)accepted))
        return kernel_failed("the sums");
    return kernel_passed();
}
