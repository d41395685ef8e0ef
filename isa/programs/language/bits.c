// Bit fields of all widths, signed and unsigned, packed structs, unions, flexible arrays, enumerations, _Bool.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct fields {
    unsigned a : 1;
    signed b : 3;
    unsigned c : 7;
    unsigned : 0;
    unsigned long d : 33;
    signed long e : 17;
    _Bool f : 1;
    unsigned char g : 5;
};
struct __attribute__((packed)) packed {
    char a;
    uint32_t b;
    uint16_t c : 11, d : 5;
    double e;
};
union number {
    uint64_t bits;
    double real;
    float parts[2];
    struct {
        uint64_t mantissa : 52, exponent : 11, sign : 1;
    };
};
struct tagged {
    enum { NONE, INTEGER, REAL, TEXT } kind;
    union {
        long integer;
        double real;
        char text[12];
    };
};
struct flexible {
    int count;
    short values[];
};

__attribute__((noinline)) static struct fields step(struct fields f, int i) {
    f.a ^= 1;
    f.b += 3;
    f.c = (unsigned)(f.c * 5 + i) & 127;
    f.d = f.d * 3 + f.c;
    f.e -= (signed)f.c;
    f.f = i % 3 == 0;
    f.g = (unsigned char)((f.g + f.a + 7) & 31);
    return f;
}

__attribute__((noinline)) static double weigh(const struct tagged *t) {
    switch (t->kind) {
    case INTEGER:
        return (double)t->integer;
    case REAL:
        return t->real;
    case TEXT:
        return (double)strlen(t->text);
    default:
        return -1;
    }
}

int main(void) {
    struct fields f = {0};
    for (int i = 0; i < 50; i++) {
        f = step(f, i);
        if (i % 10 == 9)
            printf("fields %u %d %u %lu %ld %d %u\n", f.a, f.b, f.c, (unsigned long)f.d, (long)f.e, f.f, f.g);
    }
    printf("sizes %zu %zu %zu %zu\n", sizeof(struct fields), sizeof(struct packed), sizeof(union number),
           sizeof(struct flexible));

    struct packed p = {'x', 0xdeadbeef, 0, 0, 0.5};
    for (int i = 0; i < 20; i++) {
        p.b = p.b << 3 | p.b >> 29;
        p.c = (uint16_t)((p.c + p.b) & 0x7ff);
        p.d = (uint16_t)((p.d ^ p.c) & 31);
        p.e = p.e * 1.5 - i;
    }
    printf("packed %c %08x %u %u %.10f\n", p.a, p.b, p.c, p.d, p.e);

    union number n = {.real = -1234.5678};
    printf("number %016lx %lx %u %u\n", (unsigned long)n.bits, (unsigned long)n.mantissa, (unsigned)n.exponent,
           (unsigned)n.sign);
    n.exponent += 3;
    n.sign = 0;
    printf("number %.6f\n", n.real);

    struct tagged values[] = {
        {INTEGER, {.integer = -7}}, {REAL, {.real = 2.75}}, {TEXT, {.text = "godwit"}}, {NONE, {0}}};
    double sum = 0;
    for (int i = 0; i < 40; i++)
        sum = sum * 0.75 + weigh(&values[(i * 7) % 4]);
    printf("tagged %.12f\n", sum);

    struct flexible *list = malloc(sizeof *list + 30 * sizeof list->values[0]);
    if (!list)
        return 3;
    list->count = 30;
    for (int i = 0; i < list->count; i++)
        list->values[i] = (short)(i * 1000 - 12000);
    long total = 0;
    for (int i = 0; i < list->count; i++)
        total += list->values[i] * (i & 3);
    printf("flexible %ld\n", total);
    free(list);
    _Bool truth = (_Bool)0x100, lie = (_Bool)0.0;
    printf("bool %d %d\n", truth, lie);
    return 0;
}
