// Matrix multiplication, the problem of Phoenix, on doubles that hold small integers: so every sum is exact.
//
// Verified as Freivalds (1977) does it: A (B x) = C x for several x.
#include "kernel.h"

static void multiply(const double *a, const double *b, double *c, size_t n) {
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < n; k++) {
            double factor = a[i * n + k];
            for (size_t j = 0; j < n; j++)
                c[i * n + j] += factor * b[k * n + j];
        }
}

static void apply(const double *a, const double *x, double *result, size_t n) {
    for (size_t i = 0; i < n; i++) {
        result[i] = 0;
        for (size_t j = 0; j < n; j++)
            result[i] += a[i * n + j] * x[j];
    }
}

int main(int argc, char **argv) {
    size_t n = (size_t)kernel_size(argc, argv, 40, 1, 4000);
    double *a = kernel_allocate(n * n, sizeof *a), *b = kernel_allocate(n * n, sizeof *b);
    double *c = kernel_allocate(n * n, sizeof *c), *x = kernel_allocate(4 * n, sizeof *x), trace = 0;
    double *bx = x + n, *abx = x + 2 * n, *cx = x + 3 * n;
    uint64_t seed = 12345;
    int fine = 1;

    for (size_t i = 0; i < n * n; i++) {
        a[i] = (double)(kernel_random(&seed) % 201) - 100;
        b[i] = (double)(kernel_random(&seed) % 201) - 100;
    }
    multiply(a, b, c, n);
    for (int round = 0; round < 5; round++) {
        for (size_t i = 0; i < n; i++)
            x[i] = (double)(kernel_random(&seed) % 1001) - 500;
        apply(b, x, bx, n);
        apply(a, bx, abx, n);
        apply(c, x, cx, n);
        for (size_t i = 0; i < n; i++)
            fine &= abx[i] == cx[i];
    }
    for (size_t i = 0; i < n; i++)
        trace += c[i * n + i];
    printf("matrix_multiply: %zu rows, trace %.0f\n", n, trace);
    free(a);
    free(b);
    free(c);
    free(x);
    return fine ? kernel_passed() : kernel_failed("A (B x) is not C x");
}
