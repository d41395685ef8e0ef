// Integer sort, the problem of NAS "IS": keys with a bell-shaped distribution are ranked by counting, several times
// with a few keys changed in between, and sorted at the end.
//
// Verified: the ranks of some probes against a direct count of the smaller keys after each round; at the end the
// order, and that sum and sum of squares of the keys are those of before.
#include "kernel.h"

enum { ROUNDS = 10, PROBES = 4, KEY_BITS = 16, KEYS = 1 << KEY_BITS };

static void make_keys(uint32_t *keys, size_t count) {
    uint64_t seed = 314159265;
    for (size_t i = 0; i < count; i++) {
        uint32_t sum = 0;
        uint64_t random = kernel_random(&seed);
        for (int part = 0; part < 4; part++)
            sum += (random >> (16 * part)) & (KEYS - 1);
        keys[i] = sum / 4;
    }
}

// After it, starts[k] says how many keys are smaller than k.
static void rank_keys(const uint32_t *keys, size_t count, uint32_t *starts) {
    for (size_t k = 0; k <= KEYS; k++)
        starts[k] = 0;
    for (size_t i = 0; i < count; i++)
        starts[keys[i] + 1]++;
    for (size_t k = 0; k < KEYS; k++)
        starts[k + 1] += starts[k];
}

static size_t count_smaller(const uint32_t *keys, size_t count, uint32_t key) {
    size_t smaller = 0;
    for (size_t i = 0; i < count; i++)
        smaller += keys[i] < key;
    return smaller;
}

static void sums(const uint32_t *keys, size_t count, uint64_t *sum, uint64_t *squares) {
    *sum = *squares = 0;
    for (size_t i = 0; i < count; i++) {
        *sum += keys[i];
        *squares += (uint64_t)keys[i] * keys[i];
    }
}

int main(int argc, char **argv) {
    size_t count = (size_t)kernel_size(argc, argv, 20000, 100, 200000000);
    uint32_t *keys = kernel_allocate(count, sizeof *keys), *sorted = kernel_allocate(count, sizeof *sorted);
    uint32_t *starts = kernel_allocate(KEYS + 1, sizeof *starts);
    uint64_t hash = 0, sum, squares, sorted_sum, sorted_squares;

    make_keys(keys, count);
    for (uint32_t round = 1; round <= ROUNDS; round++) {
        keys[round] = round;
        keys[count - round] = KEYS - round;
        rank_keys(keys, count, starts);
        for (size_t probe = 0; probe < PROBES; probe++) {
            uint32_t key = keys[(probe * count) / PROBES + round];
            hash = kernel_mix(hash, starts[key]);
            if (starts[key] != count_smaller(keys, count, key))
                return kernel_failed("the rank of a probe");
        }
    }
    sums(keys, count, &sum, &squares);
    for (size_t i = 0; i < count; i++)
        sorted[starts[keys[i]]++] = keys[i];
    for (size_t i = 1; i < count; i++)
        if (sorted[i - 1] > sorted[i])
            return kernel_failed("the order");
    sums(sorted, count, &sorted_sum, &sorted_squares);
    printf("is: %zu keys, median %" PRIu32 ", ranks %016" PRIx64 "\n", count, sorted[count / 2], hash);
    free(keys);
    free(sorted);
    free(starts);
    if (sum != sorted_sum || squares != sorted_squares)
        return kernel_failed("the keys changed");
    return kernel_passed();
}
