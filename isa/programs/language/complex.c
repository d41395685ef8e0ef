// Complex numbers of float and double: arithmetic with its special cases, by value through calls, in arrays; a
// Mandelbrot set and roots of a polynomial.
#include <complex.h>
#include <math.h>
#include <stdio.h>

__attribute__((noinline)) static double complex step(double complex z, double complex c) { return z * z + c; }

__attribute__((noinline)) static float complex single(float complex a, float complex b) { return a / b - a * conjf(b); }

static int escape(double complex c) {
    double complex z = 0;
    for (int i = 0; i < 60; i++) {
        z = step(z, c);
        if (creal(z) * creal(z) + cimag(z) * cimag(z) > 4)
            return i;
    }
    return 60;
}

// All roots at once by Durand and Kerner.
static void roots(const double complex *coefficients, int degree, double complex *found) {
    for (int i = 0; i < degree; i++)
        found[i] = (i ? found[i - 1] : 1) * (0.4 + 0.9 * I);
    for (int round = 0; round < 60; round++)
        for (int i = 0; i < degree; i++) {
            double complex value = coefficients[0], below = coefficients[0];
            for (int k = 1; k <= degree; k++)
                value = value * found[i] + coefficients[k];
            for (int k = 0; k < degree; k++)
                if (k != i)
                    below *= found[i] - found[k];
            found[i] -= value / below;
        }
}

int main(void) {
    for (int y = -8; y <= 8; y++) {
        for (int x = -40; x <= 16; x += 2)
            putchar(" .:-=+*#%@"[escape(x / 20.0 + y / 8.0 * I) * 9 / 60]);
        putchar('\n');
    }
    const double complex coefficients[] = {1, -3, 3 + I, -5, 2 - 2 * I};
    double complex found[4];
    roots(coefficients, 4, found);
    for (int i = 0; i < 4; i++) {
        double complex value = coefficients[0];
        for (int k = 1; k <= 4; k++)
            value = value * found[i] + coefficients[k];
        printf("root %+.8f %+.8f, rest below 1e-12: %d\n", creal(found[i]), cimag(found[i]), cabs(value) < 1e-12);
    }
    float complex a = 1.5f - 2.25f * I;
    for (int i = 0; i < 10; i++) {
        a = single(a, 0.75f + 0.5f * I);
        a /= 1.0f + crealf(a) * crealf(a);
        printf("single %+.5f %+.5f\n", (double)crealf(a), (double)cimagf(a));
    }
    volatile double infinite = INFINITY, zero = 0;
    double complex z = (infinite + 2 * I) * (1 + zero * I), quotient = (1 + I) / (zero + zero * I);
    printf("special %d %d %d\n", isinf(creal(z)) || isinf(cimag(z)), isinf(creal(quotient)) != 0,
           creal(conj(3 + 4 * I)) == 3);
    printf("exp %.10f %.10f\n", creal(cexp(0.5 + 1.25 * I)), cimag(cexp(0.5 + 1.25 * I)));
    return 0;
}
