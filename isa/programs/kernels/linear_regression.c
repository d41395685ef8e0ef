// Linear regression, the problem of Phoenix: the line through points with coordinates of one byte, by five sums.
//
// Verified against the formula on centred coordinates, which needs a second look at the points, and the sums against
// those of a histogram of pairs.
#include "kernel.h"
#include <math.h>

enum { ROUNDS = 20 };

struct sums {
    uint64_t x, y, xx, yy, xy;
};

static struct sums add_up(const uint8_t *points, size_t count) {
    struct sums s = {0, 0, 0, 0, 0};
    for (size_t i = 0; i < count; i++) {
        uint64_t x = points[2 * i], y = points[2 * i + 1];
        s.x += x;
        s.y += y;
        s.xx += x * x;
        s.yy += y * y;
        s.xy += x * y;
    }
    return s;
}

static struct sums add_up_pairs(const uint8_t *points, size_t count) {
    uint64_t *pairs = kernel_allocate(65536, sizeof *pairs);
    struct sums s = {0, 0, 0, 0, 0};
    for (size_t i = 0; i < count; i++)
        pairs[points[2 * i] * 256 + points[2 * i + 1]]++;
    for (uint64_t x = 0; x < 256; x++)
        for (uint64_t y = 0; y < 256; y++) {
            uint64_t times = pairs[x * 256 + y];
            s.x += times * x;
            s.y += times * y;
            s.xx += times * x * x;
            s.yy += times * y * y;
            s.xy += times * x * y;
        }
    free(pairs);
    return s;
}

int main(int argc, char **argv) {
    size_t count = (size_t)kernel_size(argc, argv, 5000, 100, 400000000);
    uint8_t *points = kernel_allocate(count, 2);
    uint64_t seed = 99;
    struct sums s = {0, 0, 0, 0, 0};

    for (size_t i = 0; i < count; i++) {
        uint64_t random = kernel_random(&seed);
        points[2 * i] = (uint8_t)random;
        points[2 * i + 1] = (uint8_t)((3 * (random & 255) + (random >> 8 & 255)) / 4);
    }
    for (size_t round = 0; round < ROUNDS; round++) {
        // Another start in each round, so that the work cannot be done once for all of them.
        struct sums part = add_up(points + 2 * round, count - round);
        s = round == 0 ? part : s;
        if (part.x > s.x || part.xx > s.xx)
            return kernel_failed("a part is larger than the whole");
    }
    struct sums pairs = add_up_pairs(points, count);
    double n = (double)count;
    double slope = (n * (double)s.xy - (double)s.x * (double)s.y) / (n * (double)s.xx - (double)s.x * (double)s.x);
    double offset = ((double)s.y - slope * (double)s.x) / n;
    double mean_x = (double)s.x / n, mean_y = (double)s.y / n, top = 0, bottom = 0;
    for (size_t i = 0; i < count; i++) {
        top += (points[2 * i] - mean_x) * (points[2 * i + 1] - mean_y);
        bottom += (points[2 * i] - mean_x) * (points[2 * i] - mean_x);
    }
    printf("linear_regression: %zu points, slope %.12f, offset %.12f\n", count, slope, offset);
    free(points);
    if (s.x != pairs.x || s.y != pairs.y || s.xx != pairs.xx || s.yy != pairs.yy || s.xy != pairs.xy)
        return kernel_failed("the sums");
    if (fabs(slope - top / bottom) > 1e-9 || fabs(offset - (mean_y - top / bottom * mean_x)) > 1e-6)
        return kernel_failed("the line");
    return kernel_passed();
}
