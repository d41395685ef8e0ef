// Fibonacci numbers by double recursion: nothing but calls.
//
// Verified against fast doubling, and the number of calls against its closed form, 2 fib(n + 1) - 1.
#include "kernel.h"

static uint64_t calls_of(uint64_t next) { return 2 * next - 1; }

__attribute__((noinline)) static uint64_t fib(unsigned n) { return n < 2 ? n : fib(n - 1) + fib(n - 2); }

__attribute__((noinline)) static uint64_t count_calls(unsigned n) {
    return n < 2 ? 1 : 1 + count_calls(n - 1) + count_calls(n - 2);
}

// fib(2k) = fib(k) (2 fib(k+1) - fib(k)), fib(2k+1) = fib(k+1)^2 + fib(k)^2.
static void doubling(unsigned n, uint64_t *this, uint64_t *next) {
    uint64_t a = 0, b = 1;
    for (unsigned bit = 1U << 31; bit; bit >>= 1) {
        uint64_t twice = a * (2 * b - a), after = a * a + b * b;
        a = n & bit ? after : twice;
        b = n & bit ? twice + after : after;
    }
    *this = a;
    *next = b;
}

int main(int argc, char **argv) {
    unsigned n = (unsigned)kernel_size(argc, argv, 16, 1, 60), few = n < 20 ? n : 20;
    uint64_t expected, next, ignored;
    doubling(n, &expected, &ignored);
    uint64_t found = fib(n);
    doubling(few, &ignored, &next);
    printf("fib: fib(%u) = %" PRIu64 "\n", n, found);
    if (found != expected)
        return kernel_failed("fast doubling gives another number");
    if (count_calls(few) != calls_of(next))
        return kernel_failed("the number of calls");
    return kernel_passed();
}
