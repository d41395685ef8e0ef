// Principal components, the problem of Phoenix: mean and covariance of the rows of an integer matrix; and the first
// component by the power method.
//
// Verified: the trace against the variances by the other formula, x' C x against the variance of the rows' combination
// by x, and the component's residual.
#include "kernel.h"
#include <math.h>

enum { RANGE = 100, STEPS = 2000 };

static void make_means(const int32_t *m, size_t rows, size_t columns, double *means) {
    for (size_t i = 0; i < rows; i++) {
        int64_t sum = 0;
        for (size_t j = 0; j < columns; j++)
            sum += m[i * columns + j];
        means[i] = (double)sum / (double)columns;
    }
}

static void make_covariance(const int32_t *m, size_t rows, size_t columns, const double *means, double *covariance) {
    for (size_t i = 0; i < rows; i++)
        for (size_t k = i; k < rows; k++) {
            double sum = 0;
            for (size_t j = 0; j < columns; j++)
                sum += ((double)m[i * columns + j] - means[i]) * ((double)m[k * columns + j] - means[k]);
            covariance[i * rows + k] = covariance[k * rows + i] = sum / (double)(columns - 1);
        }
}

static void apply(const double *c, const double *x, double *result, size_t n) {
    for (size_t i = 0; i < n; i++) {
        double sum = 0;
        for (size_t k = 0; k < n; k++)
            sum += c[i * n + k] * x[k];
        result[i] = sum;
    }
}

static double dot(const double *a, const double *b, size_t n) {
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += a[i] * b[i];
    return sum;
}

// The variance of the row that is the sum of x[i] times row i.
static double variance_along(const int32_t *m, size_t rows, size_t columns, const double *x) {
    double mean = 0, square = 0;
    for (int pass = 0; pass < 2; pass++)
        for (size_t j = 0; j < columns; j++) {
            double value = 0;
            for (size_t i = 0; i < rows; i++)
                value += x[i] * (double)m[i * columns + j];
            if (pass == 0)
                mean += value / (double)columns;
            else
                square += (value - mean) * (value - mean);
        }
    return square / (double)(columns - 1);
}

int main(int argc, char **argv) {
    size_t rows = (size_t)kernel_size(argc, argv, 20, 4, 5000), columns = 2 * rows;
    int32_t *m = kernel_allocate(rows * columns, sizeof *m);
    double *covariance = kernel_allocate(rows * rows, sizeof *covariance),
           *means = kernel_allocate(rows, sizeof *means);
    double *x = kernel_allocate(rows, sizeof *x), *y = kernel_allocate(rows, sizeof *y);
    double trace = 0, variances = 0, value = 0, residual = 0;
    uint64_t seed = 2024;

    for (size_t j = 0; j < columns; j++) {
        // Something common to all rows, so that there is a first component that stands out.
        int32_t common = (int32_t)(kernel_random(&seed) % RANGE);
        for (size_t i = 0; i < rows; i++)
            m[i * columns + j] = common + (int32_t)(kernel_random(&seed) % (RANGE / 2));
    }
    make_means(m, rows, columns, means);
    make_covariance(m, rows, columns, means, covariance);
    for (size_t i = 0; i < rows; i++) {
        int64_t sum = 0, squares = 0, n = (int64_t)columns;
        for (size_t j = 0; j < columns; j++) {
            sum += m[i * columns + j];
            squares += (int64_t)m[i * columns + j] * m[i * columns + j];
        }
        variances += (double)(n * squares - sum * sum) / ((double)n * (double)(n - 1));
        trace += covariance[i * rows + i];
        x[i] = 1 / sqrt((double)rows);
    }
    for (int step = 0; step < STEPS; step++) {
        apply(covariance, x, y, rows);
        value = dot(x, y, rows);
        residual = 0;
        for (size_t i = 0; i < rows; i++)
            residual += (y[i] - value * x[i]) * (y[i] - value * x[i]);
        double norm = sqrt(dot(y, y, rows));
        if (sqrt(residual) < 1e-10 * value)
            break;
        for (size_t i = 0; i < rows; i++)
            x[i] = y[i] / norm;
    }
    double along = variance_along(m, rows, columns, x);
    printf("pca: %zu rows, trace %.12e, first component %.12e\n", rows, trace, value);
    free(m);
    free(covariance);
    free(means);
    free(x);
    free(y);
    if (fabs(trace - variances) > 1e-9 * trace)
        return kernel_failed("the trace");
    if (!(sqrt(residual) < 1e-9 * value))
        return kernel_failed("the component's residual");
    if (fabs(along - value) > 1e-9 * value)
        return kernel_failed("the variance along the component");
    return kernel_passed();
}
