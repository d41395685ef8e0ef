// long double as IEEE binary128: arithmetic, conversions, comparisons, by value and in variable arguments. Its bits are
// printed, so that the C library's printf, whose long double may be another on the machine of the test, is not asked.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(long double) == 16 && __LDBL_MANT_DIG__ == 113, "built with another long double");

static void show(const char *name, long double value) {
    uint64_t words[2];
    memcpy(words, &value, sizeof words);
    printf("%s %016llx%016llx (%.15g)\n", name, (unsigned long long)words[1], (unsigned long long)words[0],
           (double)value);
}

// Newton's iteration, so that the library's function is not needed.
__attribute__((noinline)) static long double root(long double x) {
    long double guess = x;
    for (int i = 0; i < 60; i++)
        guess = (guess + x / guess) / 2;
    return guess;
}

// Machin's formula.
static long double arctangent_of_inverse(int n) {
    long double term = 1.0L / n, sum = term, square = (long double)n * n;
    for (int k = 1; k < 60; k++) {
        term /= -square;
        sum += term / (2 * k + 1);
    }
    return sum;
}

__attribute__((noinline)) static long double sum(int count, ...) {
    va_list list;
    va_start(list, count);
    long double result = 0;
    for (int i = 0; i < count; i++)
        result += i % 2 ? (long double)va_arg(list, double) : va_arg(list, long double);
    va_end(list);
    return result;
}

struct holder {
    char tag;
    long double values[3];
};

__attribute__((noinline)) static struct holder turn(struct holder h) {
    long double kept = h.values[0];
    h.values[0] = h.values[1] * 3;
    h.values[1] = h.values[2] - kept;
    h.values[2] = kept / 7;
    h.tag++;
    return h;
}

static long double exponential(long double x, int depth) {
    return depth > 40 ? 1.0L : 1.0L + x / depth * exponential(x, depth + 1);
}

int main(void) {
    show("root", root(2.0L));
    show("pi", 16 * arctangent_of_inverse(5) - 4 * arctangent_of_inverse(239));
    show("e", exponential(1.0L, 1));
    show("sum", sum(6, 1.1L, 2.2, 3.3L, 4.4, 5.5L, 6.6));
    struct holder h = {'a', {1.0L / 3, 2.0L / 3, 0.1L}};
    for (int i = 0; i < 12; i++)
        h = turn(h);
    show("holder", h.values[0]);
    show("holder", h.values[1]);
    show("holder", h.values[2]);
    long double factorial = 1;
    for (int i = 1; i <= 60; i++)
        factorial *= i;
    show("factorial", factorial);
    printf("conversions %lld %llu %d %g\n", (long long)(factorial / 1e65L), (unsigned long long)1.8e19L, (int)-2.75L,
           (double)(float)0.1L);
    printf("order %d %d %d %d\n", 0.1L < 0.1, 0.5L == 0.5, root(4) == 2.0L, -0.0L == 0.0L);
    long double small = 1;
    int steps = 0;
    for (; small > 0; small /= 1024)
        steps++;
    printf("smallest after %d steps, tag %c\n", steps, h.tag);
    return 0;
}
