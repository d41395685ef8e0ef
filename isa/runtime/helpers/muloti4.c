/* Helpers that LLVM's back ends call and libgcc does not have. */

typedef __int128 i128;
typedef unsigned __int128 u128;

i128 __muloti4(i128 left, i128 right, int *overflow);

/* The product of two 128-bit numbers; `overflow` tells whether it is too wide. */
i128 __muloti4(i128 left, i128 right, int *overflow) {
    const u128 most = ~(u128)0 >> 1;
    const int negative = (left < 0) != (right < 0);
    const u128 l = left < 0 ? -(u128)left : (u128)left, r = right < 0 ? -(u128)right : (u128)right;
    /* By halves, since multiplying wide numbers with a check is this function. */
    const unsigned long l_high = (unsigned long)(l >> 64), r_high = (unsigned long)(r >> 64);
    const u128 cross = (u128)l_high * (unsigned long)r + (u128)r_high * (unsigned long)l;
    const u128 low = (u128)(unsigned long)l * (unsigned long)r;
    const u128 product = low + (cross << 64);

    *overflow = (l_high && r_high) || cross >> 64 || product < low || product > most + (u128)negative;
    return (i128)(negative ? -product : product);
}
