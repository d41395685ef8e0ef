// Function pointers: tables, in structs, returned, compared, with state, a small interpreter, and callbacks that call
// callbacks.
#include <stdio.h>
#include <string.h>

typedef long operation(long, long);

static long plus(long a, long b) { return a + b; }
static long minus(long a, long b) { return a - b; }
static long multiply(long a, long b) { return a * b; }
static long power(long a, long b) {
    long result = 1;
    while (b-- > 0)
        result = multiply(result, a);
    return result;
}

static operation *const operations[] = {plus, minus, multiply, power};

static operation *choose(char sign) {
    switch (sign) {
    case '+':
        return plus;
    case '-':
        return minus;
    case '*':
        return multiply;
    default:
        return power;
    }
}

struct shape {
    const char *name;
    double (*area)(const struct shape *);
    void (*scale)(struct shape *, double);
    double a, b;
};

static double area_of_box(const struct shape *s) { return s->a * s->b; }
static double area_of_ring(const struct shape *s) { return 3.25 * (s->a * s->a - s->b * s->b); }
static void scale_both(struct shape *s, double factor) {
    s->a *= factor;
    s->b *= factor;
}
static void scale_first(struct shape *s, double factor) { s->a *= factor; }

struct visitor {
    int (*visit)(struct visitor *, int);
    struct visitor *inner;
    int sum, calls;
};

static int visit_sum(struct visitor *v, int value) {
    v->calls++;
    v->sum += value;
    return v->inner ? v->inner->visit(v->inner, value / 2) : 0;
}
static int visit_even(struct visitor *v, int value) {
    v->calls++;
    if (value & 1)
        return 1;
    v->sum ^= value;
    return v->inner ? v->inner->visit(v->inner, value + 1) : 2;
}

static int for_each(const int *values, int count, int (*each)(void *, int), void *state) {
    int result = 0;
    for (int i = 0; i < count; i++)
        result = result * 3 + each(state, values[i]);
    return result;
}
static int call_visitor(void *state, int value) {
    struct visitor *v = state;
    return v->visit(v, value);
}
static int nested(void *state, int value) {
    int part[3] = {value, value + 1, value * 2};
    return for_each(part, 3, call_visitor, state) & 0xff;
}

typedef double mapper(double);
static double half(double x) { return x * 0.5; }
static double square(double x) { return x * x; }
static double apply_times(mapper *f, int times, double x) { return times == 0 ? x : f(apply_times(f, times - 1, x)); }

typedef void *(*chain)(int *);
static void *last(int *n) {
    *n += 100;
    return NULL;
}
static void *middle(int *n) {
    *n *= 3;
    return *n < 50 ? (void *)middle : (void *)last;
}

int main(void) {
    long total = 0;
    for (int i = 0; i < 4; i++)
        for (long a = -3; a < 4; a++)
            total = total * 7 + operations[i](a, i + 2);
    printf("table %ld %ld\n", total, choose('-')(choose('*')(6, 7), choose('^')(2, 5)));
    printf("same %d %d\n", choose('+') == operations[0], choose('+') == operations[1]);

    struct shape shapes[] = {{"box", area_of_box, scale_both, 2, 3}, {"ring", area_of_ring, scale_first, 5, 4}};
    for (int i = 0; i < 6; i++) {
        struct shape *s = &shapes[i & 1];
        s->scale(s, 1.5);
        printf("%s %.6f\n", s->name, s->area(s));
    }

    struct visitor inner = {visit_sum, NULL, 0, 0}, middle_one = {visit_even, &inner, 0, 0},
                   outer = {visit_sum, &middle_one, 0, 0};
    int values[] = {1, 5, 8, 12, 7, 64, 33, 90};
    int result = for_each(values, 8, call_visitor, &outer);
    result += for_each(values, 8, nested, &outer);
    printf("visitors %d: %d/%d %d/%d %d/%d\n", result, outer.sum, outer.calls, middle_one.sum, middle_one.calls,
           inner.sum, inner.calls);
    printf("maps %.6f %.6f\n", apply_times(half, 12, 4096), apply_times(square, 4, 1.5));

    int n = 2, steps = 0;
    for (void *next = (void *)middle; next; steps++) {
        chain step;
        memcpy(&step, &next, sizeof step);
        next = step(&n);
    }
    printf("chain %d %d\n", n, steps);
    return 0;
}
