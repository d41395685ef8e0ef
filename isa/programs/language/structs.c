// Structs by value: small, large, floats only, mixed, nested, with arrays, as arguments after many others, as results,
// through function pointers, and in recursion.
#include <stdint.h>
#include <stdio.h>

struct byte {
    unsigned char a;
};
struct three {
    char a, b, c;
};
struct two_floats {
    float x, y;
};
struct four_floats {
    float v[4];
};
struct three_doubles {
    double x, y, z;
};
struct mixed {
    double d;
    int i;
};
struct sixteen {
    uint64_t a, b;
};
struct large {
    int values[20];
    double sum;
    struct three inner;
};
union either {
    double d;
    uint64_t u;
};

__attribute__((noinline)) static struct byte next_byte(struct byte b) {
    return (struct byte){(unsigned char)(b.a * 7 + 1)};
}
__attribute__((noinline)) static struct three swap(struct three t) { return (struct three){t.c, t.a, (char)(t.b + 1)}; }
__attribute__((noinline)) static struct two_floats turn(struct two_floats f) {
    return (struct two_floats){f.y * 0.5f, -f.x};
}
__attribute__((noinline)) static struct four_floats add(struct four_floats a, struct four_floats b) {
    for (int i = 0; i < 4; i++)
        a.v[i] += b.v[3 - i] * 0.25f;
    return a;
}
__attribute__((noinline)) static struct three_doubles cross(struct three_doubles a, struct three_doubles b) {
    return (struct three_doubles){a.y * b.z - a.z * b.y, a.z * b.x - a.x * b.z, a.x * b.y - a.y * b.x};
}
__attribute__((noinline)) static struct mixed blend(int a, struct mixed m, double b, struct mixed n) {
    return (struct mixed){m.d * b + n.d, m.i + a * n.i};
}
__attribute__((noinline)) static struct sixteen rotate(struct sixteen s) {
    return (struct sixteen){s.b ^ s.a << 7, s.a * 0x9e3779b97f4a7c15U};
}
__attribute__((noinline)) static struct large grow(struct large l, int by) {
    l.sum = 0;
    for (int i = 0; i < 20; i++) {
        l.values[i] += by * i;
        l.sum += l.values[i] * 0.5;
    }
    l.inner = swap(l.inner);
    return l;
}
__attribute__((noinline)) static double late(int a, int b, int c, int d, int e, int f, int g, struct sixteen s,
                                             double h, struct mixed m, struct large l, struct three t,
                                             struct four_floats q) {
    return a + b * 2 + c * 3 + d * 4 + e * 5 + f * 6 + g * 7 + (double)(s.a & 0xff) + h + m.d + m.i + l.sum +
           l.values[3] + t.a + t.c + (double)q.v[2];
}
__attribute__((noinline)) static union either halve(union either e) {
    e.u -= UINT64_C(1) << 52;
    return e;
}

static struct large recurse(struct large l, int n) {
    if (n == 0)
        return l;
    struct large inner = recurse(grow(l, n), n - 1);
    inner.values[n % 20] += l.values[(n + 1) % 20];
    inner.sum += l.sum;
    return inner;
}

int main(void) {
    struct byte b = {3};
    struct three t = {'a', 'b', 'c'};
    struct two_floats f = {1.5f, 2.5f};
    struct four_floats q = {{1, 2, 3, 4}};
    struct three_doubles u = {1, 2, 3}, v = {-1, 0.5, 2};
    struct mixed m = {1.25, 3}, n = {0.5, -2};
    struct sixteen s = {1, 2};
    struct large l = {.values = {1, 2, 3}, .inner = {'x', 'y', 'z'}};
    struct large (*through)(struct large, int) = l.sum > 0 ? recurse : grow;
    union either e = {.d = 100};

    for (int i = 0; i < 30; i++) {
        b = next_byte(b);
        t = swap(t);
        f = turn(f);
        q = add(q, q);
        v = cross(u, v);
        v.x /= 4;
        m = blend(i, m, 0.75, n);
        s = rotate(s);
        l = through(l, i & 3);
        e = halve(e);
    }
    printf("byte %d, three %d %d %d\n", b.a, t.a, t.b, t.c);
    printf("floats %g %g, %g %g %g %g\n", (double)f.x, (double)f.y, (double)q.v[0], (double)q.v[1], (double)q.v[2],
           (double)q.v[3]);
    printf("doubles %.9g %.9g %.9g\n", v.x, v.y, v.z);
    printf("mixed %.12g %d, sixteen %016llx %016llx\n", m.d, m.i, (unsigned long long)s.a, (unsigned long long)s.b);
    printf("large %d %d %.3f %c%c%c\n", l.values[7], l.values[19], l.sum, l.inner.a & 127, l.inner.b & 127,
           l.inner.c & 127);
    printf("late %.9f\n", late(1, 2, 3, 4, 5, 6, 7, s, 8.5, m, l, t, q));
    l = recurse(l, 30);
    printf("recursion %d %d %.3f\n", l.values[0], l.values[13], l.sum);
    printf("either %g\n", e.d);
    return 0;
}
