// Conjugate gradient, the problem of NAS "CG": the eigenvalue of a sparse symmetric matrix nearest to a shift by the
// inverse power method, with a conjugate gradient solver inside.
//
// The matrix is diagonally dominant, so positive definite. Verified: the residual of the last solution, computed from
// the list of entries by columns (not from the rows that the solver uses), and the eigenvalue by a Rayleigh quotient.
#include "kernel.h"
#include <math.h>

enum { PER_ROW = 6, STEPS = 25, ROUNDS = 15 };

struct entry {
    uint32_t row, column;
    double value;
};
struct matrix {
    size_t size, filled;
    size_t *starts;
    uint32_t *columns;
    double *values;
};

// Symmetric pairs off the diagonal; the diagonal is larger than the sum of its row.
static struct entry *make_entries(size_t size, size_t *filled) {
    struct entry *entries = kernel_allocate(size * (2 * PER_ROW + 1), sizeof *entries);
    double *rows = kernel_allocate(size, sizeof *rows);
    uint64_t seed = 1618033;
    size_t count = 0;
    for (size_t i = 0; i < size; i++)
        for (int k = 0; k < PER_ROW; k++) {
            size_t j = kernel_random(&seed) % size;
            double value = kernel_uniform(&seed) - 0.5;
            if (i == j)
                continue;
            entries[count++] = (struct entry){(uint32_t)i, (uint32_t)j, value};
            entries[count++] = (struct entry){(uint32_t)j, (uint32_t)i, value};
            rows[i] += fabs(value);
            rows[j] += fabs(value);
        }
    for (size_t i = 0; i < size; i++)
        entries[count++] = (struct entry){(uint32_t)i, (uint32_t)i, rows[i] + 0.1 + kernel_uniform(&seed)};
    free(rows);
    *filled = count;
    return entries;
}

static struct matrix make_matrix(const struct entry *entries, size_t filled, size_t size) {
    struct matrix m = {size, filled, kernel_allocate(size + 2, sizeof *m.starts),
                       kernel_allocate(filled, sizeof *m.columns), kernel_allocate(filled, sizeof *m.values)};
    for (size_t i = 0; i < filled; i++)
        m.starts[entries[i].row + 2]++;
    for (size_t i = 2; i < size + 2; i++)
        m.starts[i] += m.starts[i - 1];
    for (size_t i = 0; i < filled; i++) {
        size_t place = m.starts[entries[i].row + 1]++;
        m.columns[place] = entries[i].column;
        m.values[place] = entries[i].value;
    }
    return m;
}

static void multiply(const struct matrix *m, const double *x, double *result) {
    for (size_t i = 0; i < m->size; i++) {
        double sum = 0;
        for (size_t k = m->starts[i]; k < m->starts[i + 1]; k++)
            sum += m->values[k] * x[m->columns[k]];
        result[i] = sum;
    }
}

static double dot(const double *a, const double *b, size_t size) {
    double sum = 0;
    for (size_t i = 0; i < size; i++)
        sum += a[i] * b[i];
    return sum;
}

// Solves m * z = x; r, p and q are room to work in.
static void solve(const struct matrix *m, const double *x, double *z, double *r, double *p, double *q) {
    for (size_t i = 0; i < m->size; i++) {
        z[i] = 0;
        r[i] = p[i] = x[i];
    }
    double rho = dot(r, r, m->size);
    for (int step = 0; step < STEPS && rho > 1e-28; step++) {
        multiply(m, p, q);
        double alpha = rho / dot(p, q, m->size);
        for (size_t i = 0; i < m->size; i++) {
            z[i] += alpha * p[i];
            r[i] -= alpha * q[i];
        }
        double before = rho;
        rho = dot(r, r, m->size);
        double beta = rho / before;
        for (size_t i = 0; i < m->size; i++)
            p[i] = r[i] + beta * p[i];
    }
}

int main(int argc, char **argv) {
    size_t size = (size_t)kernel_size(argc, argv, 400, 10, 10000000), filled;
    struct entry *entries = make_entries(size, &filled);
    struct matrix m = make_matrix(entries, filled, size);
    double *work = kernel_allocate(6 * size, sizeof *work);
    double *x = work, *z = work + size, *r = work + 2 * size, *p = work + 3 * size, *q = work + 4 * size,
           *check = work + 5 * size, zeta = 0, residual = 0;

    for (size_t i = 0; i < size; i++)
        x[i] = 1 / sqrt((double)size);
    for (int round = 0; round < ROUNDS; round++) {
        solve(&m, x, z, r, p, q);
        zeta = 1 / dot(x, z, size);
        residual = 0;
        for (size_t i = 0; i < size; i++)
            check[i] = -x[i];
        for (size_t i = 0; round == ROUNDS - 1 && i < filled; i++)
            check[entries[i].column] += entries[i].value * z[entries[i].row];
        residual = sqrt(dot(check, check, size));
        double norm = sqrt(dot(z, z, size));
        for (size_t i = 0; i < size; i++)
            x[i] = z[i] / norm;
    }
    multiply(&m, x, q);
    double rayleigh = dot(x, q, size);
    printf("cg: %zu rows, %zu entries, zeta %.15e, Rayleigh quotient %.15e\n", size, filled, zeta, rayleigh);
    free(entries);
    free(m.starts);
    free(m.columns);
    free(m.values);
    free(work);
    if (!(residual < 1e-4))
        return kernel_failed("the residual of the last solution");
    if (!(rayleigh > 0 && fabs(rayleigh - zeta) < 0.05 * zeta))
        return kernel_failed("the Rayleigh quotient");
    return kernel_passed();
}
