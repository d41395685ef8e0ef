// 128-bit integers: arithmetic, division, shifts, conversions, by value, in arrays; powers modulo a 61-bit prime.
#include <stdint.h>
#include <stdio.h>

typedef unsigned __int128 wide;
typedef __int128 signed_wide;

static void show(const char *name, wide value) {
    char text[40];
    int at = 39;
    text[at] = '\0';
    do
        text[--at] = (char)('0' + (int)(value % 10));
    while (value /= 10);
    printf("%s %s\n", name, text + at);
}

__attribute__((noinline)) static uint64_t power(uint64_t base, uint64_t exponent, uint64_t modulus) {
    wide result = 1, factor = base % modulus;
    for (; exponent; exponent >>= 1, factor = factor * factor % modulus)
        if (exponent & 1)
            result = result * factor % modulus;
    return (uint64_t)result;
}

__attribute__((noinline)) static signed_wide mixed(signed_wide a, int shift, signed_wide b, char add) {
    return (a >> shift) * b + add - b * (1 << (shift & 7));
}

static wide fibonacci(int n, wide *before) {
    if (n <= 1) {
        *before = 0;
        return (wide)n;
    }
    wide older, old = fibonacci(n - 1, &older);
    *before = old;
    return old + older;
}

int main(void) {
    const uint64_t prime = (UINT64_C(1) << 61) - 1;
    wide table[8], before;
    signed_wide value = -123456789;

    show("largest", ~(wide)0);
    for (uint64_t i = 2; i < 8; i++)
        printf("power %llu\n", (unsigned long long)power(i, prime - 1 - i, prime));
    show("fibonacci", fibonacci(186, &before));
    show("before", before);
    for (int i = 0; i < 8; i++)
        table[i] = ((wide)(i * 0x9e3779b9U) << (i * 13)) | (wide)i;
    for (int i = 0; i < 64; i++)
        table[i & 7] = (table[(i + 1) & 7] ^ (table[(i + 3) & 7] >> (i & 31))) * 0x100000001b3U;
    for (int i = 0; i < 8; i++)
        printf("table %016llx%016llx\n", (unsigned long long)(table[i] >> 64), (unsigned long long)table[i]);
    for (int i = 1; i < 20; i++)
        value = mixed(value * 1000003, i * 3, (signed_wide)i * -77777777777, (char)i);
    printf("signed %016llx%016llx %d\n", (unsigned long long)((wide)value >> 64), (unsigned long long)value, value < 0);
    printf("divide %lld %lld\n", (long long)((-((signed_wide)1 << 100)) / 1234567890123456789),
           (long long)((-((signed_wide)1 << 100)) % 1234567890123456789));
    printf("real %.17g %.17g\n", (double)(((wide)1 << 100) + 12345), (double)value);
    show("from real", (wide)1.5e30);
    return 0;
}
