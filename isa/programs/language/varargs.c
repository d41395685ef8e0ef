// Variable arguments of all types, va_copy, a va_list passed on, many arguments of both register classes.
#include <complex.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct small {
    int a;
    char b;
};
struct pair {
    double x, y;
};
struct mixed {
    long n;
    double d;
};
struct large {
    long values[5];
};
typedef int vector __attribute__((vector_size(16)));

static unsigned long hash;

static void mix(const void *bytes, size_t size) {
    const unsigned char *b = bytes;
    for (size_t i = 0; i < size; i++)
        hash = (hash ^ b[i]) * 0x100000001b3UL;
}

// One letter per argument.
static void take(const char *types, va_list list) {
    for (; *types; types++) {
        switch (*types) {
        case 'i': {
            int v = va_arg(list, int);
            mix(&v, sizeof v);
            break;
        }
        case 'l': {
            long v = va_arg(list, long);
            mix(&v, sizeof v);
            break;
        }
        case 'd': {
            double v = va_arg(list, double);
            mix(&v, sizeof v);
            break;
        }
        case 's': {
            const char *v = va_arg(list, const char *);
            mix(v, strlen(v));
            break;
        }
        case 'S': {
            struct small v = va_arg(list, struct small);
            mix(&v.a, sizeof v.a);
            mix(&v.b, 1);
            break;
        }
        case 'P': {
            struct pair v = va_arg(list, struct pair);
            mix(&v, sizeof v);
            break;
        }
        case 'M': {
            struct mixed v = va_arg(list, struct mixed);
            mix(&v, sizeof v);
            break;
        }
        case 'L': {
            struct large v = va_arg(list, struct large);
            mix(&v, sizeof v);
            break;
        }
        case 'Q': {
            long double v = va_arg(list, long double);
            double rough = (double)v;
            mix(&rough, sizeof rough);
            break;
        }
        case 'H': {
            __int128 v = va_arg(list, __int128);
            mix(&v, sizeof v);
            break;
        }
        case 'C': {
            double complex v = va_arg(list, double complex);
            mix(&v, sizeof v);
            break;
        }
        case 'V': {
            vector v = va_arg(list, vector);
            mix(&v, sizeof v);
            break;
        }
        default:
            printf("no type '%c'\n", *types);
        }
    }
}

__attribute__((noinline)) static unsigned long all(const char *types, ...) {
    va_list list;
    hash = 14695981039346656037UL;
    va_start(list, types);
    take(types, list);
    va_end(list);
    return hash;
}

__attribute__((noinline)) static unsigned long twice(const char *types, ...) {
    va_list list, copy;
    va_start(list, types);
    hash = 1;
    if (*types) {
        // One is taken before the copy.
        mix("first", 5);
        (void)va_arg(list, int);
    }
    va_copy(copy, list);
    take(types + 1, list);
    unsigned long one = hash;
    hash = 1;
    mix("first", 5);
    take(types + 1, copy);
    va_end(copy);
    va_end(list);
    return one == hash ? one : 0;
}

__attribute__((noinline)) static long sum_recursively(int left, va_list *list) {
    if (left == 0)
        return 0;
    long value = va_arg(*list, int);
    return value * left + sum_recursively(left - 1, list);
}

static long sum(int count, ...) {
    va_list list;
    va_start(list, count);
    long result = sum_recursively(count, &list);
    long after = va_arg(list, long);
    va_end(list);
    return result * 1000 + after;
}

static int format(char *buffer, size_t size, const char *text, ...) {
    va_list list, copy;
    va_start(list, text);
    va_copy(copy, list);
    int needed = vsnprintf(NULL, 0, text, copy);
    va_end(copy);
    int written = vsnprintf(buffer, size, text, list);
    va_end(list);
    return needed == written ? needed : -1;
}

int main(void) {
    struct small s = {-5, 'q'};
    struct pair p = {1.5, -2.5};
    struct mixed m = {77, 0.125};
    struct large l = {{1, 2, 3, 4, 5}};
    vector v = {1, -2, 3, -4};
    char buffer[200];

    printf("integers %016lx\n", all("iiiiiiiiiiii", 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12));
    printf("longs %016lx\n", all("lililililil", 1L, 2, -3L, 4, 5L, 6, 7L, 8, -9L, 10, 11L));
    printf("doubles %016lx\n", all("dddddddddddd", 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12.));
    printf("both %016lx\n", all("ididididididididididid", 1, 1., 2, 2., 3, 3., 4, 4., 5, 5., 6, 6., 7, 7., 8, 8., 9, 9.,
                                10, 10., 11, 11.));
    printf("strings %016lx\n", all("sisds", "one", 2, "three", 4., "five"));
    printf("structs %016lx\n", all("SPMLSPMLSPML", s, p, m, l, s, p, m, l, s, p, m, l));
    printf("wide %016lx\n", all("iQiHdQlHQQ", 1, 2.0L, 3, (__int128)4 << 70, 5., 6.5L, 7L, -(__int128)8, 9.25L, 10.L));
    printf("complex %016lx\n",
           all("CiCdCCCCC", 1. + 2. * I, 3, 4. - 5. * I, 6., 7. * I, p.x + I, 1. + I, 2. + I, 3. + I));
    printf("vectors %016lx\n", all("ViVdVVVVVVVV", v, 1, v + v, 2., v * v, v, v, v, v, v, v, v));
    printf("copy %016lx\n", twice("iisdLPQi", 1, 2, "text", 3.5, l, p, 4.75L, 5));
    printf("passed on %ld\n", sum(10, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 999L));
    int length = format(buffer, sizeof buffer, "%d %s %.3f %c %lx %5.1e %-6d| %*d %+d %%", 42, "text", 3.14159, 'z',
                        0xdeadbeefUL, 12345.678, 7, 8, 9, 10);
    printf("%d \"%s\"\n", length, buffer);
    return 0;
}
