// Floating point that must be the same to the bit: rounding, denormals, signed zeros, infinities, comparisons with NaN,
// conversions in range, fma only where asked for, and functions whose result IEEE 754 fixes.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void show(const char *name, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    printf("%s %016llx\n", name, (unsigned long long)bits);
}

__attribute__((noinline)) static double not_fused(double a, double b, double c) { return a * b + c; }

__attribute__((noinline)) static float single(float a, float b) { return a / b * 3.0f - sqrtf(b); }

static double horner(const double *coefficients, int n, double x) {
    return n == 0 ? 0 : coefficients[0] + x * horner(coefficients + 1, n - 1, x);
}

int main(void) {
    volatile double zero = 0, one = 1, huge = 1e308, tiny = 4e-320, third = 1.0 / 3;
    double coefficients[30], sum = 0;
    float f = 1.1f;

    show("not fused", not_fused(third, 3, -1));
    show("fused", fma(third, 3, -1));
    show("overflow", huge * 10);
    show("denormal", tiny / 3);
    show("negative zero", -zero * one);
    show("root", sqrt(2 * one));
    show("remainder", fmod(1e300, 7.25));
    printf("compare %d %d %d %d\n", zero / zero == zero / zero, isnan(zero / zero), zero / zero < 1,
           !(zero / zero >= 1));
    printf("zero %d %d\n", zero == -zero, signbit(-zero) != 0);
    for (int i = 0; i < 30; i++)
        coefficients[i] = (i % 2 ? -1.0 : 1.0) / (i + 1);
    for (int i = 0; i < 200; i++)
        sum += horner(coefficients, 30, (i - 100) / 128.0) * 1e-3;
    show("horner", sum);
    for (int i = 0; i < 40; i++)
        f = single(f + 2.5f, (float)i + 0.5f) * 0.125f;
    show("single", f);
    printf("rounding %g %g %g %g %ld %ld\n", floor(-2.5), ceil(-2.5), trunc(-2.5), round(-2.5), lrint(2.5), lrint(3.5));
    printf("conversions %d %lld %u %g\n", (int)-1.9, (long long)9.2e18, (unsigned)4e9, (double)(float)0.1);
    printf("large %llu %.17g %.17g\n", (unsigned long long)1.8e19, (double)UINT64_C(18446744073709551557),
           (double)INT64_MIN);
    int exponent;
    double mantissa = frexp(-123.456, &exponent);
    show("mantissa", mantissa);
    printf("exponent %d %g %g %d\n", exponent, ldexp(0.75, 10), copysign(3, -zero), ilogb(1000));
    show("next", nextafter(1, 2));
    // Kahan's sum and the plain one.
    double kahan = 0, rest = 0, plain = 0;
    for (int i = 1; i < 2000; i++) {
        double y = 1.0 / i - rest, t = kahan + y;
        rest = t - kahan - y;
        kahan = t;
        plain += 1.0 / i;
    }
    show("kahan", kahan);
    show("plain", plain);
    printf("functions %.9f %.9f %.9f %.9f\n", sin(1.25), exp(-0.5), log(10), pow(1.5, 2.5));
    return 0;
}
