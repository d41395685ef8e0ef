// k-means, the problem of Phoenix: points with integer coordinates are put into clusters by their nearest centre, and
// each centre moves to the mean of its points, until nothing changes.
//
// Verified: the sum of squared distances never grows, and at the end each point's cluster is the nearest one by a
// search in another order, and each centre is the mean of its points.
#include "kernel.h"
#include <string.h>

enum { DIMENSIONS = 3, CLUSTERS = 16, RANGE = 1000, MOST_ROUNDS = 60 };

typedef int32_t point[DIMENSIONS];

static uint64_t distance(const point a, const point b) {
    uint64_t sum = 0;
    for (int d = 0; d < DIMENSIONS; d++) {
        int64_t difference = a[d] - b[d];
        sum += (uint64_t)(difference * difference);
    }
    return sum;
}

static uint64_t assign(point *points, size_t count, point *centres, uint8_t *clusters, size_t *changed) {
    uint64_t total = 0;
    *changed = 0;
    for (size_t i = 0; i < count; i++) {
        uint64_t least = UINT64_MAX;
        uint8_t best = 0;
        for (uint8_t k = 0; k < CLUSTERS; k++) {
            uint64_t here = distance(points[i], centres[k]);
            if (here < least) {
                least = here;
                best = k;
            }
        }
        *changed += clusters[i] != best;
        clusters[i] = best;
        total += least;
    }
    return total;
}

static void move(point *points, size_t count, const uint8_t *clusters, point *centres) {
    int64_t sums[CLUSTERS][DIMENSIONS] = {0}, members[CLUSTERS] = {0};
    for (size_t i = 0; i < count; i++) {
        members[clusters[i]]++;
        for (int d = 0; d < DIMENSIONS; d++)
            sums[clusters[i]][d] += points[i][d];
    }
    for (int k = 0; k < CLUSTERS; k++)
        for (int d = 0; members[k] && d < DIMENSIONS; d++)
            centres[k][d] = (int32_t)(sums[k][d] / members[k]);
}

static int settled(point *points, size_t count, const uint8_t *clusters, point *centres) {
    point again[CLUSTERS];
    memcpy(again, centres, sizeof again);
    move(points, count, clusters, again);
    if (memcmp(again, centres, sizeof again) != 0)
        return 0;
    for (size_t i = 0; i < count; i++)
        for (int k = CLUSTERS; k-- > 0;)
            if (distance(points[i], centres[k]) < distance(points[i], centres[clusters[i]]))
                return 0;
    return 1;
}

int main(int argc, char **argv) {
    size_t count = (size_t)kernel_size(argc, argv, 500, CLUSTERS, 50000000), changed = 1;
    point *points = kernel_allocate(count, sizeof *points), centres[CLUSTERS];
    uint8_t *clusters = kernel_allocate(count, 1);
    uint64_t seed = 7777, before = UINT64_MAX, hash = 0, total = 0;
    int rounds = 0, grew = 0;

    for (size_t i = 0; i < count; i++)
        for (int d = 0; d < DIMENSIONS; d++)
            points[i][d] = (int32_t)(kernel_random(&seed) % RANGE);
    for (int k = 0; k < CLUSTERS; k++)
        memcpy(centres[k], points[(size_t)k * count / CLUSTERS], sizeof centres[k]);
    while (changed && rounds < MOST_ROUNDS) {
        total = assign(points, count, centres, clusters, &changed);
        // Centres are rounded to integers, which may cost up to one unit per dimension and point.
        grew |= total > before && total - before > count * DIMENSIONS;
        before = total;
        rounds++;
        if (changed)
            move(points, count, clusters, centres);
    }
    for (int k = 0; k < CLUSTERS; k++)
        for (int d = 0; d < DIMENSIONS; d++)
            hash = kernel_mix(hash, (uint64_t)centres[k][d]);
    int fine = changed != 0 || settled(points, count, clusters, centres);
    printf("kmeans: %zu points, %d rounds, sum of squares %" PRIu64 ", centres %016" PRIx64 "\n", count, rounds, total,
           hash);
    free(points);
    free(clusters);
    if (grew)
        return kernel_failed("the sum of squared distances grew");
    return fine ? kernel_passed() : kernel_failed("the clusters are not settled");
}
