// Types: thread-local variables, bit fields, unions, complex numbers, long double, __int128, atomics, vectors, small
// integers and booleans as live values, structures passed and returned in every way.
#include "library.h"

#define APART __attribute__((noinline))

static volatile int noise;

// A loop that is polled, so that whatever is live here is captured.
static APART int pause_here(int n) {
    for (int i = 0; i < n; i++)
        noise += i;
    return noise;
}

static _Thread_local long counter = 41;
static _Thread_local char buffer[40];
static _Thread_local struct {
    int a;
    _Alignas(64) double b;
} aligned = {3, 2.5};

struct bits {
    unsigned a : 3;
    int b : 5;
    unsigned long c : 40;
    _Bool d : 1;
};
union either {
    double d;
    unsigned long u;
    unsigned char bytes[8];
};

typedef float float4 __attribute__((vector_size(16)));
typedef int int4 __attribute__((vector_size(16)));
typedef double double2 __attribute__((vector_size(16)));

struct small {
    char a;
    short b;
};
struct floats {
    float x, y, z;
};
struct large {
    long values[9];
};

static APART struct small make_small(int i) { return (struct small){(char)(i + pause_here(2)), (short)(i * 3)}; }
static APART struct floats make_floats(float f, struct small s) {
    pause_here(1);
    return (struct floats){f, f * s.a, f - s.b};
}
static APART struct large make_large(struct floats f, struct large l, int i) {
    l.values[i % 9] += (long)f.x + pause_here(3);
    l.values[8] ^= (long)(f.z * 3);
    return l;
}

static APART _Complex double roots(_Complex double z, int n) {
    for (int i = 0; i < n; i++) {
        z = z * z + (0.25 - 0.5i);
        pause_here(1);
        z = z / (1.5 + 0.5i);
    }
    return z;
}

static APART long double series(int n) {
    long double sum = 0, term = 1;
    for (int i = 1; i < n; i++) {
        sum += term;
        term /= i;
        pause_here(1);
    }
    return sum;
}

static APART float4 mix(float4 a, float4 b, int n) {
    for (int i = 0; i < n; i++) {
        int4 larger = a > b;
        float4 sum = a + b * 0.25f;
        pause_here(1);
        a = (float4)(((int4)sum & larger) | ((int4)a & ~larger)) * 0.9f;
        b = b - 0.125f;
    }
    return a;
}

static APART long flags(int n) {
    long result = 0;
    for (int i = 0; i < n; i++) {
        _Bool even = i % 2 == 0, third = i % 3 == 0;
        signed char c = (signed char)(i * 29);
        unsigned short s = (unsigned short)(i * 7919);
        pause_here(1);
        result = result * 3 + (even ? c : s) + third;
    }
    return result;
}

static APART unsigned long wide(int n) {
    unsigned _BitInt(77) w = 1;
    __int128 i = -5;
    for (int k = 0; k < n; k++) {
        w = w * 31 + (unsigned)k;
        i = i * 7 - k;
        pause_here(1);
    }
    i /= 12345;
    return (unsigned long)(w >> 13) ^ (unsigned long)(i >> 3);
}

static APART long atomics(int n) {
    static _Atomic long total;
    static _Atomic int small;
    static _Atomic unsigned char tiny;
    long seen = 0;
    for (int i = 0; i < n; i++) {
        long expected = total;
        pause_here(1);
        while (!__c11_atomic_compare_exchange_weak(&total, &expected, expected * 3 + i, 5, 5))
            ;
        seen ^= __c11_atomic_fetch_add(&small, i, 5) + __c11_atomic_exchange(&tiny, (unsigned char)i, 5);
    }
    return total + seen;
}

static void show(const char *name, long double value) {
    union {
        long double value;
        unsigned long words[2];
    } u = {value};
    print("%s %lx %lx\n", name, u.words[1], u.words[0]);
}

int main(void) {
    for (int i = 0; i < 20; i++) {
        counter += pause_here(1);
        buffer[i] = (char)('a' + i);
        aligned.b *= 1.25;
        aligned.a++;
    }
    print("thread %ld %s %f %d %d\n", counter, buffer, aligned.b, aligned.a, (int)((long)&aligned.b % 64));

    struct bits b = {0};
    for (int i = 0; i < 20; i++) {
        b.a += 3;
        b.b -= 1;
        b.c = b.c * 5 + (unsigned)pause_here(1);
        b.d ^= 1;
    }
    print("bits %d %d %ld %d\n", b.a, b.b, (long)b.c, b.d);
    union either e = {.d = 1.5};
    e.bytes[2] = (unsigned char)pause_here(4);
    print("union %lx %f\n", e.u, e.d);

    _Complex double z = roots(0.5 + 0.25i, 15);
    print("complex %f %f\n", __real__ z, __imag__ z);
    show("long double", series(25));
    float4 m = mix((float4){1, 2, 3, 4}, (float4){4, 3, 2, 1}, 9);
    print("vector %f %f %f %f\n", (double)m[0], (double)m[1], (double)m[2], (double)m[3]);
    print("flags %ld\n", flags(40));
    print("wide %lx\n", wide(40));
    print("atomics %ld\n", atomics(30));

    struct large l = {{1, 2, 3, 4, 5, 6, 7, 8, 9}};
    for (int i = 0; i < 12; i++)
        l = make_large(make_floats((float)i * 1.5f, make_small(i)), l, i);
    for (int i = 0; i < 9; i++)
        print("%ld ", l.values[i]);
    print("\n");
    return 0;
}
