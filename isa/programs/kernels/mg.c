// Multigrid, the problem of NAS "MG": Poisson's equation on a cube with periodic borders and a few charges of both
// signs, by V cycles with damped Jacobi smoothing.
//
// Verified: each cycle shrinks the residual to less than a half, and the last solution satisfies the equation at the
// charges and in a sample of other cells.
#include "kernel.h"
#include <math.h>

enum { CYCLES = 6, CHARGES = 10, MOST_LEVELS = 9 };

struct level {
    size_t n;
    double *u, *f, *r;
};

static size_t at(size_t n, size_t z, size_t y, size_t x) {
    return ((z & (n - 1)) * n + (y & (n - 1))) * n + (x & (n - 1));
}

// r = f - (sum of the six neighbours - 6 u): the grid's width is part of f.
static void residual(const struct level *l) {
    size_t n = l->n;
    for (size_t z = 0; z < n; z++)
        for (size_t y = 0; y < n; y++) {
            const double *row = l->u + at(n, z, y, 0), *north = l->u + at(n, z, y + 1, 0),
                         *south = l->u + at(n, z, y - 1, 0), *up = l->u + at(n, z + 1, y, 0),
                         *down = l->u + at(n, z - 1, y, 0), *f = l->f + at(n, z, y, 0);
            double *r = l->r + at(n, z, y, 0);
            r[0] = f[0] - (row[n - 1] + row[1] + north[0] + south[0] + up[0] + down[0] - 6 * row[0]);
            for (size_t x = 1; x < n - 1; x++)
                r[x] = f[x] - (row[x - 1] + row[x + 1] + north[x] + south[x] + up[x] + down[x] - 6 * row[x]);
            r[n - 1] = f[n - 1] -
                       (row[n - 2] + row[0] + north[n - 1] + south[n - 1] + up[n - 1] + down[n - 1] - 6 * row[n - 1]);
        }
}

static void smooth(const struct level *l, int times) {
    size_t cells = l->n * l->n * l->n;
    for (int i = 0; i < times; i++) {
        residual(l);
        for (size_t k = 0; k < cells; k++)
            l->u[k] -= l->r[k] * (6.0 / 7.0 / 6.0);
    }
}

// The coarse right side: the mean of the 8 fine cells, times 4 for the doubled width, and zero as the first guess.
static void restrict_to(const struct level *fine, struct level *coarse) {
    size_t n = coarse->n;
    for (size_t z = 0; z < n; z++)
        for (size_t y = 0; y < n; y++)
            for (size_t x = 0; x < n; x++) {
                double sum = 0;
                for (size_t k = 0; k < 8; k++)
                    sum += fine->r[at(fine->n, 2 * z + (k >> 2), 2 * y + ((k >> 1) & 1), 2 * x + (k & 1))];
                coarse->f[at(n, z, y, x)] = sum / 8 * 4;
                coarse->u[at(n, z, y, x)] = 0;
            }
}

// Trilinear, with the weights 3/4 and 1/4 of cell centres.
static void prolong_to(const struct level *coarse, struct level *fine) {
    size_t n = fine->n, m = coarse->n;
    for (size_t z = 0; z < n; z++)
        for (size_t y = 0; y < n; y++)
            for (size_t x = 0; x < n; x++) {
                size_t near[3] = {z / 2, y / 2, x / 2};
                size_t far[3] = {(z & 1) ? near[0] + 1 : near[0] - 1, (y & 1) ? near[1] + 1 : near[1] - 1,
                                 (x & 1) ? near[2] + 1 : near[2] - 1};
                double sum = 0;
                for (int k = 0; k < 8; k++) {
                    double weight = ((k & 4) ? 0.25 : 0.75) * ((k & 2) ? 0.25 : 0.75) * ((k & 1) ? 0.25 : 0.75);
                    sum += weight * coarse->u[at(m, (k & 4) ? far[0] : near[0], (k & 2) ? far[1] : near[1],
                                                 (k & 1) ? far[2] : near[2])];
                }
                fine->u[at(n, z, y, x)] += sum;
            }
}

static void cycle(struct level *levels, int deepest, int depth) {
    if (depth == deepest) {
        smooth(&levels[depth], 20);
        return;
    }
    smooth(&levels[depth], 3);
    residual(&levels[depth]);
    restrict_to(&levels[depth], &levels[depth + 1]);
    cycle(levels, deepest, depth + 1);
    prolong_to(&levels[depth + 1], &levels[depth]);
    smooth(&levels[depth], 3);
}

static double norm(const double *values, size_t count) {
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += values[i] * values[i];
    return sqrt(sum);
}

static int satisfied(const struct level *l, size_t z, size_t y, size_t x, double bound) {
    size_t n = l->n;
    double laplace = -6 * l->u[at(n, z, y, x)];
    for (int axis = 0; axis < 3; axis++)
        for (int way = -1; way <= 1; way += 2)
            laplace += l->u[at(n, z + (size_t)(axis == 0 ? way : 0), y + (size_t)(axis == 1 ? way : 0),
                               x + (size_t)(axis == 2 ? way : 0))];
    return fabs(laplace - l->f[at(n, z, y, x)]) <= bound;
}

int main(int argc, char **argv) {
    int bits = (int)kernel_size(argc, argv, 4, 3, MOST_LEVELS), deepest = bits - 2, fine = 1;
    size_t n = (size_t)1 << bits, cells = n * n * n;
    struct level levels[MOST_LEVELS];
    uint64_t seed = 141421;

    for (int i = 0; i <= deepest; i++) {
        size_t m = n >> i;
        levels[i] =
            (struct level){m, kernel_allocate(m * m * m, sizeof(double)), kernel_allocate(m * m * m, sizeof(double)),
                           kernel_allocate(m * m * m, sizeof(double))};
    }
    for (int i = 0; i < 2 * CHARGES; i++)
        levels[0].f[kernel_random(&seed) & (cells - 1)] += i < CHARGES ? 1 : -1;
    double before = norm(levels[0].f, cells), first = before;
    for (int i = 0; i < CYCLES; i++) {
        cycle(levels, deepest, 0);
        residual(&levels[0]);
        double now = norm(levels[0].r, cells);
        printf("mg: cycle %d: residual %.14e\n", i + 1, now);
        if (!(now < before / 2))
            return kernel_failed("the residual does not shrink");
        before = now;
    }
    for (int i = 0; i < 1000; i++) {
        uint64_t random = kernel_random(&seed);
        fine &= satisfied(&levels[0], random % n, (random >> 20) % n, (random >> 40) % n, before * 1.01);
    }
    printf("mg: %zu cells, residual %.14e of %.14e\n", cells, before, first);
    for (int i = 0; i <= deepest; i++) {
        free(levels[i].u);
        free(levels[i].f);
        free(levels[i].r);
    }
    return fine ? kernel_passed() : kernel_failed("the equation in a sample of cells");
}
