// Recursion, callbacks, varargs, variable-length arrays, floating point, 128-bit integers, a tree on the heap.
#include "library.h"

#define APART __attribute__((noinline))

struct record {
    double a, b, c;
    long k;
    int t[3];
};
struct node {
    struct node *left, *right;
    long key;
    double weight;
    const char *name;
};

static unsigned long seed = 88172645463325252UL;

static unsigned long next_random(void) {
    seed ^= seed << 13;
    seed ^= seed >> 7;
    seed ^= seed << 17;
    return seed;
}

static long compared;

static int compare_ints(const void *a, const void *b) {
    int x = *(const int *)a, y = *(const int *)b;
    compared++;
    return x < y ? -1 : x > y;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    compared++;
    return x < y ? -1 : x > y;
}

static APART struct node *insert(struct node *n, long key, const char *name) {
    if (!n) {
        n = allocate(sizeof *n);
        *n = (struct node){0, 0, key, (double)key * 0.37, name};
        return n;
    }
    if (key < n->key)
        n->left = insert(n->left, key, name);
    else
        n->right = insert(n->right, key, name);
    n->weight += n->weight * 0.001;
    return n;
}

// A large argument by value, changed on the way.
static APART double walk(const struct node *n, long *count, struct record r) {
    if (!n)
        return 0;
    ++*count;
    r.a += n->weight;
    r.t[n->key % 3]++;
    double left = walk(n->left, count, r);
    double right = walk(n->right, count, r);
    return left * 0.5 + right * 0.25 + n->weight + r.a * 1e-3 + r.t[1] + n->name[0];
}

static APART int ackermann(int m, int n) {
    if (m == 0)
        return n + 1;
    return ackermann(m - 1, n == 0 ? 1 : ackermann(m, n - 1));
}

static double odd(int n, double x, float y);

static double even(int n, double x, float y) {
    if (!n)
        return x + y;
    return odd(n - 1, x * 1.0001 + 0.5, y * 0.99f) * 0.999 + x - y;
}

static double odd(int n, double x, float y) {
    if (!n)
        return x - y;
    return even(n - 1, x * 0.9998 - 0.25, y * 1.01f) + x * y;
}

static APART struct record make_record(int i) {
    struct record r = {i * 1.5, i * 2.5, i / 3.0, i * 7L, {i, i + 1, i + 2}};
    for (int j = 0; j < 200 + i; j++) {
        r.a += r.b * 1e-3;
        r.k ^= (r.k << 1) + j;
        r.t[j % 3] += j;
    }
    return r;
}

static double add(double a, double b) { return a + b; }
static double scale(double a, double b) { return a * b * 0.01; }
static double subtract(double a, double b) { return a - b; }
static double (*const operations[])(double, double) = {add, scale, subtract};

static APART unsigned __int128 power(unsigned long a, unsigned long b, int n) {
    unsigned __int128 r = a;
    for (int i = 0; i < n; i++) {
        r = r * b + (unsigned long)i;
        r ^= r >> 61;
    }
    return r;
}

static APART int hanoi(int n, int *from, int *to, int *via) {
    if (!n)
        return 0;
    int moves = hanoi(n - 1, from, via, to);
    --*from;
    ++*to;
    return moves + 1 + hanoi(n - 1, via, to, from);
}

static APART double arrays(int n) {
    double values[n];
    int order[n + 1];
    for (int i = 0; i < n; i++) {
        values[i] = i * 0.5;
        order[i] = n - i;
    }
    sort(order, (size_t)n, sizeof *order, compare_ints);
    double sum = 0;
    for (int i = 0; i < n; i++)
        sum += values[order[i] - 1] * order[i];
    return sum;
}

static APART float vectors(float *restrict a, float *restrict b, int n) {
    for (int k = 0; k < 20; k++) {
        for (int i = 0; i < n; i++)
            a[i] = a[i] * 0.75f + b[i];
        for (int i = 0; i < n; i++)
            b[i] = a[i] - b[i] * 0.5f;
    }
    float sum = 0;
    for (int i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

struct pair {
    double a, b;
};
struct four {
    long a, b, c, d;
};

static APART void mixed(const char *kinds, ...) {
    va_list list, copy;
    va_start(list, kinds);
    va_copy(copy, list);
    for (; *kinds; kinds++)
        switch (*kinds) {
        case 'd':
            print("%d ", va_arg(list, int));
            break;
        case 'l':
            print("%ld ", va_arg(list, long));
            break;
        case 'f':
            print("%f ", va_arg(list, double));
            break;
        case 'p': {
            struct pair p = va_arg(list, struct pair);
            print("%f ", p.a + p.b);
            break;
        }
        case 'q': {
            struct four f = va_arg(list, struct four);
            print("%ld ", f.a + f.d);
            break;
        }
        case 'L': {
            long double x = va_arg(list, long double);
            print("%f ", (double)(x * 3));
            break;
        }
        }
    print("first %d\n", va_arg(copy, int));
    va_end(copy);
    va_end(list);
}

int main(int argc, char **argv) {
    print("%d %s\n", argc, argc > 1 ? argv[1] : "none");
    for (int round = 0; round < 2; round++) {
        int a[100];
        for (int i = 0; i < 100; i++)
            a[i] = (int)(next_random() % 1000);
        sort(a, 100, sizeof *a, compare_ints);
        unsigned long hash = 0;
        for (int i = 0; i < 100; i++)
            hash = hash * 31 + (unsigned)a[i];
        double d[40], sum = 0;
        for (int i = 0; i < 40; i++)
            d[i] = (double)(next_random() % 100000) / 7.0;
        sort(d, 40, sizeof *d, compare_doubles);
        for (int i = 0; i < 40; i++)
            sum += d[i] * i;
        print("sorted %lx %f\n", hash, sum);

        static const char *const names[] = {"alpha", "beta", "gamma", "delta"};
        struct node *tree = 0;
        for (int i = 0; i < 60; i++)
            tree = insert(tree, (long)(next_random() % 5000), names[i & 3]);
        long count = 0;
        double weight = walk(tree, &count, make_record(round));
        print("tree %ld %f\n", count, weight);

        print("ackermann %d, even and odd %f\n", ackermann(2, 4), even(100, 1.25, 3.5f));
        double x = 1;
        for (int i = 0; i < 100; i++)
            x = operations[(next_random() >> 20) % 3](x, d[i % 40]);
        unsigned __int128 p = power(next_random(), next_random(), 200);
        print("calls %f, power %lx %lx\n", x, (unsigned long)(p >> 64), (unsigned long)p);

        int pegs[3] = {7, 0, 0};
        int moves = hanoi(7, pegs, pegs + 1, pegs + 2);
        print("hanoi %d: %d %d %d\n", moves, pegs[0], pegs[1], pegs[2]);
        mixed("dfldfpqLdddddddf", round, round * 0.25, 1L << 40, 5, 0.5, (struct pair){1.5, round},
              (struct four){1, 2, 3, 40 + round}, 0.125L, 1, 2, 3, 4, 5, 6, 7, 3.5);
        print("arrays %f\n", arrays(20 + round));

        float *fa = allocate(4 * 67), *fb = allocate(4 * 67);
        for (int i = 0; i < 67; i++) {
            fa[i] = (float)i * 0.3f;
            fb[i] = (float)(257 - i);
        }
        print("vectors %f\n", (double)vectors(fa, fb, 67));
        release(fa);
        release(fb);
    }
    print("compared %ld\n", compared);
    return 42;
}
