// Fast Fourier transform, the problem of NAS "FT": a diffusion equation on a cube with periodic borders is solved by a
// transform in three dimensions, a factor per wave number and step, and the transform back.
//
// Verified: Parseval's identity, one coefficient by the definition of the transform, the mean (which diffusion keeps),
// and that a step of length zero gives the start back. Prints 8 digits: `sin`, `cos` and `exp` may differ in the last
// bit between C libraries.
#include "kernel.h"
#include <complex.h>
#include <math.h>

enum { STEPS = 4 };

typedef double complex cell;

static cell times(cell a, cell b) {
    // Without the special cases for infinities, which would be a call.
    double real = creal(a) * creal(b) - cimag(a) * cimag(b), imaginary = creal(a) * cimag(b) + cimag(a) * creal(b);
    return real + imaginary * I;
}

// In place, of a length that is a power of two; roots[k] is exp(-2 pi i k / length), or its conjugate for the way back.
static void transform_line(cell *line, size_t length, const cell *roots) {
    for (size_t i = 1, j = 0; i < length; i++) {
        size_t bit = length >> 1;
        for (; j & bit; bit >>= 1)
            j ^= bit;
        j ^= bit;
        if (i < j) {
            cell kept = line[i];
            line[i] = line[j];
            line[j] = kept;
        }
    }
    for (size_t half = 1; half < length; half *= 2)
        for (size_t start = 0; start < length; start += 2 * half)
            for (size_t k = 0; k < half; k++) {
                cell odd = times(line[start + half + k], roots[k * (length / (2 * half))]), even = line[start + k];
                line[start + k] = even + odd;
                line[start + half + k] = even - odd;
            }
}

static void transform(cell *cube, size_t n, const cell *roots, cell *line) {
    const size_t strides[3] = {1, n, n * n};
    for (int axis = 0; axis < 3; axis++) {
        size_t stride = strides[axis], outer = strides[(axis + 1) % 3], inner = strides[(axis + 2) % 3];
        for (size_t a = 0; a < n; a++)
            for (size_t b = 0; b < n; b++) {
                cell *start = cube + a * outer + b * inner;
                for (size_t i = 0; i < n; i++)
                    line[i] = start[i * stride];
                transform_line(line, n, roots);
                for (size_t i = 0; i < n; i++)
                    start[i * stride] = line[i];
            }
    }
}

static double square_of_wave(size_t k, size_t n) {
    double wave = k <= n / 2 ? (double)k : (double)k - (double)n;
    return wave * wave;
}

int main(int argc, char **argv) {
    size_t bits = (size_t)kernel_size(argc, argv, 4, 2, 9), n = (size_t)1 << bits, cells = n * n * n;
    cell *start = kernel_allocate(cells, sizeof *start), *waves = kernel_allocate(cells, sizeof *waves);
    cell *result = kernel_allocate(cells, sizeof *result), *line = kernel_allocate(n, sizeof *line);
    cell *forth = kernel_allocate(n, sizeof *forth), *back = kernel_allocate(n, sizeof *back), mean = 0, direct = 0;
    const double turn = 2 * acos(-1.0);
    double energy = 0, energy_of_waves = 0, worst = 0;
    uint64_t seed = 577215;

    for (size_t k = 0; k < n; k++) {
        double angle = turn * (double)k / (double)n;
        forth[k] = cos(angle) - sin(angle) * I;
        back[k] = cos(angle) + sin(angle) * I;
    }
    for (size_t i = 0; i < cells; i++) {
        double real = kernel_uniform(&seed);
        start[i] = waves[i] = real + kernel_uniform(&seed) * I;
        mean += start[i];
        energy += creal(start[i]) * creal(start[i]) + cimag(start[i]) * cimag(start[i]);
    }
    mean /= (double)cells;
    transform(waves, n, forth, line);
    for (size_t i = 0; i < cells; i++)
        energy_of_waves += creal(waves[i]) * creal(waves[i]) + cimag(waves[i]) * cimag(waves[i]);
    const size_t wx = 1, wy = n / 2, wz = 3 % n;
    for (size_t z = 0; z < n; z++)
        for (size_t y = 0; y < n; y++)
            for (size_t x = 0; x < n; x++)
                direct += times(start[(z * n + y) * n + x], forth[(wx * x + wy * y + wz * z) % n]);

    for (int step = 0; step <= STEPS; step++) {
        for (size_t z = 0; z < n; z++)
            for (size_t y = 0; y < n; y++)
                for (size_t x = 0; x < n; x++) {
                    double wave = square_of_wave(x, n) + square_of_wave(y, n) + square_of_wave(z, n);
                    size_t i = (z * n + y) * n + x;
                    result[i] = waves[i] * (exp(-1e-3 * step * wave) / (double)cells);
                }
        transform(result, n, back, line);
        cell sum = 0, now = 0;
        for (size_t i = 0; i < cells; i++) {
            now += result[i];
            sum += i % 7 == 0 ? result[i] : 0;
            if (step == 0 && cabs(result[i] - start[i]) > worst)
                worst = cabs(result[i] - start[i]);
        }
        printf("ft: step %d: sum of each seventh cell %.8e %.8e\n", step, creal(sum), cimag(sum));
        if (cabs(now / (double)cells - mean) > 1e-12)
            return kernel_failed("the mean");
    }
    cell found = waves[(wz * n + wy) * n + wx];
    free(start);
    free(waves);
    free(result);
    free(line);
    free(forth);
    free(back);
    if (fabs(energy_of_waves / (double)cells - energy) > 1e-12 * energy)
        return kernel_failed("Parseval's identity");
    if (cabs(found - direct) > 1e-9 * (double)cells)
        return kernel_failed("a coefficient by definition");
    if (worst > 1e-12)
        return kernel_failed("the way there and back");
    return kernel_passed();
}
