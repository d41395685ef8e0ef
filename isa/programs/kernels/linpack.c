// A dense system of linear equations by elimination with partial pivoting on columns, as Linpack does it.
//
// Verified: the scaled residual against the original matrix, and the solution, which is known (all ones).
#include "kernel.h"
#include <math.h>

static void make(double *a, double *b, size_t n) {
    uint64_t seed = 1325;
    for (size_t i = 0; i < n; i++)
        b[i] = 0;
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < n; i++) {
            a[j * n + i] = kernel_uniform(&seed) - 0.5;
            b[i] += a[j * n + i];
        }
}

static void add_scaled(size_t count, double factor, const double *restrict from, double *restrict to) {
    for (size_t i = 0; i < count; i++)
        to[i] += factor * from[i];
}

static size_t largest(const double *values, size_t count) {
    size_t best = 0;
    for (size_t i = 1; i < count; i++)
        if (fabs(values[i]) > fabs(values[best]))
            best = i;
    return best;
}

static int factor(double *a, size_t n, size_t *pivots) {
    for (size_t k = 0; k < n; k++) {
        double *column = a + k * n;
        size_t pivot = k + largest(column + k, n - k);
        pivots[k] = pivot;
        if (column[pivot] == 0)
            return 0;
        double kept = column[pivot];
        column[pivot] = column[k];
        column[k] = kept;
        for (size_t i = k + 1; i < n; i++)
            column[i] /= -kept;
        for (size_t j = k + 1; j < n; j++) {
            double *other = a + j * n, value = other[pivot];
            other[pivot] = other[k];
            other[k] = value;
            add_scaled(n - k - 1, value, column + k + 1, other + k + 1);
        }
    }
    return 1;
}

static void solve(const double *a, size_t n, const size_t *pivots, double *b) {
    for (size_t k = 0; k < n; k++) {
        double value = b[pivots[k]];
        b[pivots[k]] = b[k];
        b[k] = value;
        add_scaled(n - k - 1, value, a + k * n + k + 1, b + k + 1);
    }
    for (size_t k = n; k-- > 0;) {
        b[k] /= a[k * n + k];
        add_scaled(k, -b[k], a + k * n, b);
    }
}

int main(int argc, char **argv) {
    size_t n = (size_t)kernel_size(argc, argv, 60, 2, 10000);
    double *a = kernel_allocate(n * n, sizeof *a), *b = kernel_allocate(n, sizeof *b);
    double *x = kernel_allocate(n, sizeof *x), residual = 0, norm = 0, largest_side = 0, error = 0;
    size_t *pivots = kernel_allocate(n, sizeof *pivots);

    make(a, x, n);
    if (!factor(a, n, pivots))
        return kernel_failed("the matrix is singular");
    solve(a, n, pivots, x);
    make(a, b, n);
    for (size_t i = 0; i < n; i++) {
        double sum = -b[i], row = 0;
        for (size_t j = 0; j < n; j++) {
            sum += a[j * n + i] * x[j];
            row += fabs(a[j * n + i]);
        }
        norm = fmax(norm, row);
        largest_side = fmax(largest_side, fabs(b[i]));
        residual = fmax(residual, fabs(sum));
        error = fmax(error, fabs(x[i] - 1));
    }
    // As HPL scales it, with the norm of the largest row; the solution's norm is one.
    double scaled = residual / ((norm + largest_side) * (double)n * 0x1p-52);
    printf("linpack: %zu unknowns, residual %.14e, scaled %.14e, error %.14e\n", n, residual, scaled, error);
    free(a);
    free(b);
    free(x);
    free(pivots);
    if (!(scaled < 16))
        return kernel_failed("the scaled residual");
    if (!(error < 1e-6))
        return kernel_failed("the solution");
    return kernel_passed();
}
