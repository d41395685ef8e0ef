// Ackermann's function: deep recursion with little else.
//
// Verified against A(2, n) = 2 n + 3 and A(3, n) = 2^(n + 3) - 3.
#include "kernel.h"

__attribute__((noinline)) static uint64_t ackermann(uint64_t m, uint64_t n) {
    if (m == 0)
        return n + 1;
    if (n == 0)
        return ackermann(m - 1, 1);
    return ackermann(m - 1, ackermann(m, n - 1));
}

int main(int argc, char **argv) {
    uint64_t n = (uint64_t)kernel_size(argc, argv, 3, 1, 14), times = n < 8 ? 1 : 8, found = 0;
    for (uint64_t i = 0; i < times; i++)
        found += ackermann(3, n - (i & 1));
    uint64_t two = ackermann(2, n);
    printf("ackermann: A(3, %" PRIu64 ") summed = %" PRIu64 ", A(2, %" PRIu64 ") = %" PRIu64 "\n", n, found, n, two);
    uint64_t expected = 0;
    for (uint64_t i = 0; i < times; i++)
        expected += (UINT64_C(1) << (n - (i & 1) + 3)) - 3;
    if (found != expected || two != 2 * n + 3)
        return kernel_failed("the closed form gives another number");
    return kernel_passed();
}
