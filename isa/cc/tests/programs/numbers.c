/* Numbers: their text in both directions, arithmetic that no set has in hardware, rounding, and the
 * mathematical functions to the last bit. What is printed must be the same on every set. */
#include "check.h"
#include <complex.h>
#include <errno.h>
#include <fenv.h>
#include <float.h>
#include <math.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static const char *text(const char *format, ...)
{
    static char buffer[8][400];
    static int next;
    va_list arguments;

    next = (next + 1) % 8;
    va_start(arguments, format);
    vsnprintf(buffer[next], sizeof buffer[next], format, arguments);
    va_end(arguments);
    return buffer[next];
}
#define SAME(expected, ...) CHECK(!strcmp(expected, text(__VA_ARGS__)))

static void printing(void)
{
    SAME("3.14159265358979311599796346854418516159057617187500", "%.50f", M_PI);
    SAME("-0", "%g", -0.0);
    SAME("inf INF -inf nan", "%f %F %e %g", INFINITY, INFINITY, -INFINITY, (double)NAN);
    SAME("4.9406564584124654e-324", "%.17g", 5e-324);
    SAME("0x1p-1074", "%a", 5e-324);
    SAME("0x1.fffffffffffffp+1023", "%a", DBL_MAX);
    SAME("2 4 4 6", "%.0f %.0f %.0f %.0f", 2.5, 3.5, 4.5, 5.5);
    SAME("1e+100|0001.50|1.5   |+1.5", "%g|%07.2f|%-6g|%+g", 1e100, 1.5, 1.5, 1.5);
    SAME("0xc.9p+0 0x1.92p+3", "%s %a", "0xc.9p+0", 12.5625);
    CHECK(LDBL_MANT_DIG == 113 && sizeof(long double) == 16);
    SAME("0.333333333333333333333333333333333317", "%.36Lf", 1.0L / 3);
    SAME("1.18973149535723176508575932662800702e+4932", "%.36Lg", LDBL_MAX);
    SAME("6.47517511943802511092443895822764655e-4966", "%.36Lg", LDBL_TRUE_MIN);
    SAME("1.41421356237309504880168872420969798", "%.36Lg", sqrtl(2));
    SAME("0x1.921fb54442d18469898cc51701b8p+1", "%La", 4 * atanl(1));
    SAME("-9223372036854775808 18446744073709551615 1777777777777777777777", "%lld %llu %llo", INT64_MIN,
         UINT64_MAX, UINT64_MAX);
    SAME("  42|42   |00042|+42|0x2a|052|%|c|str|s", "%4d|%-5d|%05d|%+d|%#x|%#o|%%|%c|%s|%.1s", 42, 42, 42, 42, 42,
         42, 'c', "str", "str");
    SAME("7 b a", "%3$d %2$s %1$s", "a", "b", 7);
    SAME("    x", "%*s", 5, "x");
}

static void reading(void)
{
    char *end;

    CHECK(strtod("0x1.8p1", &end) == 3 && !*end);
    CHECK(strtod("1e400", &end) == INFINITY && errno == ERANGE);
    CHECK(strtod("2.2250738585072011e-308", &end) == 0x0.fffffffffffffp-1022);
    CHECK(strtod("2.2250738585072014e-308", &end) == DBL_MIN);
    CHECK(strtod("9007199254740993", &end) == 9007199254740992.0);
    CHECK(strtod("9007199254740993.00000000000000000000000000000000001", &end) == 9007199254740994.0);
    CHECK(strtof("16777217", &end) == 16777216.0f);
    CHECK(isnan(strtod("nan(12)", &end)) && !*end);
    CHECK(strtold("0.333333333333333333333333333333333317", &end) == 1.0L / 3);
    CHECK(strtold("6.4751751194380251109244389582276465525e-4966", &end) == LDBL_TRUE_MIN);
    CHECK(strtoll("-9223372036854775809", &end, 10) == INT64_MIN && errno == ERANGE);
    CHECK(strtoull("0xFFFFFFFFFFFFFFFF", &end, 0) == UINT64_MAX);
    CHECK(strtol("zz", &end, 36) == 35 * 36 + 35);

    int i;
    long double l;
    double d;
    char word[8];
    CHECK(sscanf("42 1.25 2.5e10 word", "%d %Lf %lf %7s", &i, &l, &d, word) == 4);
    CHECK(i == 42 && l == 1.25L && d == 2.5e10 && !strcmp(word, "word"));
}

static void wide(void)
{
    volatile __int128 a = (__int128)0x0123456789abcdef << 64 | 0xfedcba9876543210, b = -1234567890123456789;
    volatile unsigned __int128 u = ~(unsigned __int128)0;
    __int128 q = a / b, r = a % b;

    CHECK(q * b + r == a && r < -b && q < 0);
    CHECK((uint64_t)(u / 10 >> 64) == 0x1999999999999999 && (uint64_t)(u % 10) == 5);
    CHECK((double)a == 1512366075204170929049582354406559215.0 && (__int128)(double)b == -1234567890123456768);
    CHECK(isinf((float)u));
    CHECK((long double)b == -1234567890123456789.0L && (__int128)(long double)b == b);
    CHECK(__builtin_mul_overflow(b, b, &(__int128){0}) == 0);
    CHECK(__builtin_mul_overflow(a, a, &(__int128){0}) == 1);
    __int128 over = a;
    CHECK(__builtin_add_overflow(over, over, &over) == 0 && over == 2 * a);
}

static void quad(void)
{
    volatile long double x = 1.1L, y = -3, huge = LDBL_MAX, tiny = LDBL_TRUE_MIN, nan = NAN;

    CHECK(x * x != 1.21L && fabsl(x * x - 1.21L) < 1e-33L);
    CHECK(y / 3 == -1 && (int)y == -3 && (unsigned long)-y == 3 && (float)y == -3 && (double)x == 1.1);
    CHECK(huge * 2 == INFINITY && tiny / 2 == 0 && tiny > 0 && !(nan == nan) && !(nan < 1) && nan != 1);
    CHECK(fmodl(1e30L, 7) == 1e30L - 7 * floorl(1e30L / 7));
    CHECK(ldexpl(1, -16494) == tiny && ilogbl(tiny) == -16494 && frexpl(0.75L, &(int){0}) == 0.75L);
    CHECK(fmal(x, x, -x * x) != 0 && fabsl(fmal(x, x, -x * x)) < 1e-34L);
    CHECK(lrintl(2.5L) == 2 && llroundl(2.5L) == 3 && roundl(-2.5L) == -3 && truncl(-2.7L) == -2);
    volatile float complex e = 1 + 2 * I, e2 = 3 - 4 * I, e3 = 1 + 1 * I;
    volatile double complex c = e, c2 = e2, c3 = e3, inf = CMPLX(INFINITY, NAN), zero = 0;
    volatile long double complex d = e, d2 = e2, d3 = e3;
    CHECK(crealf(e * e2) == 11 && cimagf(e * e2) == 2 && crealf(e * e2 / e3) == 6.5f && cimagf(e * e2 / e3) == -4.5f);
    CHECK(creal(c * c2) == 11 && cimag(c * c2) == 2 && creal(c * c2 / c3) == 6.5 && cimag(c * c2 / c3) == -4.5);
    CHECK(creall(d * d2) == 11 && cimagl(d * d2) == 2 && creall(d * d2 / d3) == 6.5L && cimagl(d * d2 / d3) == -4.5L);
    CHECK(isinf(creal(inf * c)) && isinf(creal(c / zero)) && creal(c / inf) == 0 && isinf(creal(inf / c)));
    volatile double complex huge_complex = CMPLX(1e300, 1e300);
    CHECK(creal(huge_complex / huge_complex) == 1 && cimag(huge_complex / huge_complex) == 0);
    CHECK(cabs(cexp(I * acos(-1)) + 1) < 1e-15 && creal(csqrt(-4)) == 0 && cimag(csqrt(-4)) == 2);
}

static void rounding(void)
{
    static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    volatile double one = 1, ten = 10;
    volatile long double quad_one = 1, quad_ten = 10;
    volatile float f = 0.1f;
    fenv_t saved;

    for (int i = 0; i < 4; i++) {
        CHECK(!fesetround(modes[i]) && fegetround() == modes[i]);
        printf("%a %a %La %ld %.1f %.3f\n", one / ten, -one / ten, quad_one / quad_ten, lrint(2.5), 0.25, (double)f);
        printf("%a %a\n", strtod("0.1", 0), nearbyint(-1.5));
    }
    CHECK(!fesetround(FE_TONEAREST));
    feclearexcept(FE_ALL_EXCEPT);
    CHECK(fetestexcept(FE_ALL_EXCEPT) == 0);
    volatile double quotient = one / (ten - ten);
    CHECK(isinf(quotient) && fetestexcept(FE_ALL_EXCEPT) == FE_DIVBYZERO);
    feholdexcept(&saved);
    CHECK(fetestexcept(FE_ALL_EXCEPT) == 0);
    quotient = one / ten;
    CHECK(fetestexcept(FE_ALL_EXCEPT) == FE_INEXACT);
    fesetround(FE_UPWARD);
    feupdateenv(&saved);
    CHECK(fegetround() == FE_TONEAREST && fetestexcept(FE_ALL_EXCEPT) == (FE_INEXACT | FE_DIVBYZERO));
    fesetenv(FE_DFL_ENV);
    feraiseexcept(FE_OVERFLOW | FE_INVALID);
    CHECK(fetestexcept(FE_ALL_EXCEPT) == (FE_OVERFLOW | FE_INVALID));
    volatile long double big = LDBL_MAX;
    feclearexcept(FE_ALL_EXCEPT);
    big = big * big;
    CHECK(isinf(big) && fetestexcept(FE_OVERFLOW));
    feclearexcept(FE_ALL_EXCEPT);
}

static void functions(void)
{
    static double (*const one[])(double) = {sin, cos, tan, asin, acos, atan, sinh, cosh, tanh, exp, exp2, expm1, log,
                                            log2, log10, log1p, cbrt, sqrt, erf, erfc, tgamma, lgamma, floor, ceil,
                                            rint, round, trunc, j0, j1, y0, asinh, atanh};
    static double (*const two[])(double, double) = {pow, atan2, fmod, remainder, hypot, fdim, fmax, fmin, nextafter};
    static long double (*const quads[])(long double) = {sinl, cosl, tanl, expl, logl, sqrtl, cbrtl, atanl, tgammal};
    static const double points[] = {0.1, -0.7, 1.5, 3.25, -12.0625, 1e-5, 700.25, 1e15, 1e-310};

    for (unsigned p = 0; p < sizeof points / sizeof *points; p++) {
        double x = points[p];
        for (unsigned i = 0; i < sizeof one / sizeof *one; i++)
            if (!isnan(one[i](x)))
                printf("%a ", one[i](x));
        for (unsigned i = 0; i < sizeof two / sizeof *two; i++)
            if (!isnan(two[i](x, 2.75)))
                printf("%a ", two[i](x, 2.75));
        for (unsigned i = 0; i < sizeof quads / sizeof *quads; i++)
            if (!isnan(quads[i](x)))
                printf("%.25Lg ", quads[i](x));
        printf("%a %a %a\n", (double)sinf((float)x), (double)powf((float)fabs(x), 1.25f), fma(x, x, -0.3));
    }
    CHECK(pow(2, 0.5) == 0x1.6a09e667f3bcdp+0 && fma(0x1p-1022, 0x1p-52, 1) == 1);
    int quotient;
    CHECK(remquo(29, 3, &quotient) == -1 && (quotient & 7) == (10 & 7));
}

int main(void)
{
    printing();
    reading();
    wide();
    quad();
    rounding();
    functions();
    return finish();
}
