// Vectors of 128 bits by GCC's extension: integers, floats, comparisons, shuffles, conversions, as arguments and
// results, live across calls, and in arrays.
#include <stdint.h>
#include <stdio.h>

typedef float floats __attribute__((vector_size(16)));
typedef double doubles __attribute__((vector_size(16)));
typedef int32_t ints __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(16)));
typedef int64_t longs __attribute__((vector_size(16)));
typedef uint8_t bytes __attribute__((vector_size(16)));

struct body {
    floats position, speed;
    double mass;
};

__attribute__((noinline)) static floats pull(floats from, floats to, float strength) {
    floats way = to - from;
    float distance = way[0] * way[0] + way[1] * way[1] + way[2] * way[2] + 0.5f;
    return way * (strength / distance);
}

__attribute__((noinline)) static ints rotate(ints v, int by) {
    words u = (words)v;
    return (ints)((u << by) | (u >> (32 - by)));
}

// Several vectors are live across the recursive call.
static doubles recurse(int n, doubles a, longs b, bytes c) {
    if (n == 0)
        return a;
    doubles inner = recurse(n - 1, a * 0.5 + (doubles){1, -1}, b + n, c ^ (uint8_t)n);
    doubles whole = {(double)b[0], (double)b[1]};
    return inner + whole * (double)(c[n & 15] & 15);
}

static struct body advance(struct body b, floats force) {
    b.speed += force * (float)(1 / b.mass);
    b.position += b.speed * 0.125f;
    return b;
}

int main(void) {
    struct body bodies[3] = {{{0, 0, 0, 0}, {0, 1, 0, 0}, 2}, {{1, 0, 2, 0}, {1, 0, 0, 0}, 4}, {{-1, 3, 1, 0}, {0}, 8}};
    for (int step = 0; step < 20; step++)
        for (int i = 0; i < 3; i++) {
            floats force = {0};
            for (int k = 0; k < 3; k++)
                if (k != i)
                    force += pull(bodies[i].position, bodies[k].position, (float)bodies[k].mass);
            bodies[i] = advance(bodies[i], force);
        }
    for (int i = 0; i < 3; i++)
        printf("body %.6f %.6f %.6f\n", (double)bodies[i].position[0], (double)bodies[i].position[1],
               (double)bodies[i].position[2]);

    ints v = {1, -2, 3, -4}, mask, sum = {0};
    for (int i = 1; i < 30; i++) {
        v = rotate(v, i) + (ints){i, i * 2, i * 3, i * 5};
        mask = v > sum;
        sum = (sum & ~mask) | (v & mask);
        v = __builtin_shufflevector(v, sum, 1, 6, 3, 4);
    }
    printf("ints %d %d %d %d / %d %d %d %d\n", v[0], v[1], v[2], v[3], sum[0], sum[1], sum[2], sum[3]);
    doubles d = recurse(25, (doubles){3, 4}, (longs){100, -100}, (bytes){1, 2, 3, 4, 5, 6, 7, 8});
    printf("doubles %.10f %.10f\n", d[0], d[1]);
    bytes b = {0};
    for (int i = 0; i < 100; i++)
        b = b * 3 + (uint8_t)i + (b >> 4);
    for (int i = 0; i < 16; i++)
        printf("%02x%c", b[i], i == 15 ? '\n' : ' ');
    floats f = __builtin_convertvector(sum, floats) / 3;
    printf("converted %.3f %.3f\n", (double)f[0], (double)f[3]);
    return 0;
}
