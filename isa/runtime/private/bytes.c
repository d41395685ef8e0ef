// memcpy and its family, which the code generators call as well.
#include <stddef.h>
#include <stdint.h>

typedef uint64_t word __attribute__((may_alias, aligned(1)));
typedef uint64_t words __attribute__((vector_size(16), may_alias, aligned(1)));

void *memcpy(void *restrict to, const void *restrict from, size_t length);
void *memmove(void *to, const void *from, size_t length);
void *memset(void *to, int byte, size_t length);
int memcmp(const void *a, const void *b, size_t length);
int bcmp(const void *a, const void *b, size_t length);

// Small lengths by two overlapping accesses of a size that fits, without a loop.
static inline __attribute__((always_inline)) int copy_small(char *to, const char *from, size_t length) {
    if (length >= 16) {
        if (length > 32)
            return 0;
        words first = *(const words *)from;
        words last = *(const words *)(from + length - 16);
        *(words *)to = first;
        *(words *)(to + length - 16) = last;
    } else if (length >= 8) {
        word first = *(const word *)from;
        word last = *(const word *)(from + length - 8);
        *(word *)to = first;
        *(word *)(to + length - 8) = last;
    } else if (length >= 4) {
        typedef uint32_t half __attribute__((may_alias, aligned(1)));
        half first = *(const half *)from;
        half last = *(const half *)(from + length - 4);
        *(half *)to = first;
        *(half *)(to + length - 4) = last;
    } else if (length > 0) {
        char first = from[0];
        char middle = from[length / 2];
        char last = from[length - 1];
        to[0] = first;
        to[length / 2] = middle;
        to[length - 1] = last;
    }
    return 1;
}

void *memcpy(void *restrict to, const void *restrict from, size_t length) { return memmove(to, from, length); }

void *memmove(void *to, const void *from, size_t length) {
    char *t = to;
    const char *f = from;
    if (copy_small(t, f, length))
        return to;
    if ((uintptr_t)t - (uintptr_t)f >= length) {
        // The last 32 bytes are read before anything they overlap with is written.
        words last0 = *(const words *)(f + length - 32);
        words last1 = *(const words *)(f + length - 16);
        char *end = t + length;
        for (; t < end - 32; t += 32, f += 32) {
            words a = *(const words *)f;
            words b = *(const words *)(f + 16);
            *(words *)t = a;
            *(words *)(t + 16) = b;
        }
        *(words *)(end - 32) = last0;
        *(words *)(end - 16) = last1;
    } else {
        words first0 = *(const words *)f;
        words first1 = *(const words *)(f + 16);
        for (; length > 32; length -= 32) {
            words a = *(const words *)(f + length - 32);
            words b = *(const words *)(f + length - 16);
            *(words *)(t + length - 32) = a;
            *(words *)(t + length - 16) = b;
        }
        *(words *)t = first0;
        *(words *)(t + 16) = first1;
    }
    return to;
}

void *memset(void *to, int byte, size_t length) {
    char *t = to;
    uint64_t pattern = 0x0101010101010101UL * (unsigned char)byte;
    words wide = {pattern, pattern};
    if (length >= 16) {
        for (char *end = t + length - 16; t < end; t += 16)
            *(words *)t = wide;
        *(words *)((char *)to + length - 16) = wide;
    } else if (length >= 8) {
        *(word *)t = pattern;
        *(word *)(t + length - 8) = pattern;
    } else {
        for (size_t i = 0; i < length; i++)
            t[i] = (char)byte;
    }
    return to;
}

int memcmp(const void *a, const void *b, size_t length) {
    const unsigned char *x = a;
    const unsigned char *y = b;
    for (; length >= 8; length -= 8, x += 8, y += 8) {
        word left = *(const word *)x;
        word right = *(const word *)y;
        if (left != right)
            return __builtin_bswap64(left) < __builtin_bswap64(right) ? -1 : 1;
    }
    for (; length > 0; length--, x++, y++)
        if (*x != *y)
            return *x < *y ? -1 : 1;
    return 0;
}

int bcmp(const void *a, const void *b, size_t length) { return memcmp(a, b, length); }
