// What all kernels share: the size from the command line, random numbers that are the same everywhere, a checksum,
// and the verdict. A kernel prints its results, then one line "verification: passed" or "verification: FAILED: why",
// and its exit status says the same.
#ifndef KERNEL_H
#define KERNEL_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

// The first argument, or `usual` when there is none.
static inline long kernel_size(int argc, char **argv, long usual, long least, long most) {
    if (argc < 2)
        return usual;
    char *end;
    long size = strtol(argv[1], &end, 10);
    if (*argv[1] == '\0' || *end != '\0' || size < least || size > most) {
        fprintf(stderr, "%s: the size \"%s\" is not a number from %ld to %ld\n", argv[0], argv[1], least, most);
        exit(2);
    }
    return size;
}

static inline void *kernel_allocate(size_t count, size_t each) {
    void *memory = calloc(count, each);
    if (!memory) {
        fprintf(stderr, "no memory for %zu times %zu bytes\n", count, each);
        exit(3);
    }
    return memory;
}

// splitmix64 (Steele, Lea, Flood, 2014).
static inline uint64_t kernel_random(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15U;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9U;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebU;
    return z ^ (z >> 31);
}

// Uniform in [0, 1), a multiple of 2^-53, so exact.
static inline double kernel_uniform(uint64_t *state) { return (double)(kernel_random(state) >> 11) * 0x1p-53; }

// One step of FNV-1a, on eight bytes.
static inline uint64_t kernel_mix(uint64_t hash, uint64_t value) {
    for (int i = 0; i < 8; i++)
        hash = (hash ^ ((value >> (8 * i)) & 255)) * 0x100000001b3U;
    return hash;
}

static inline int kernel_passed(void) {
    puts("verification: passed");
    return EXIT_SUCCESS;
}

static inline int kernel_failed(const char *why) {
    printf("verification: FAILED: %s\n", why);
    return EXIT_FAILURE;
}

#endif
