// Products and quotients of complex numbers, which the front end asks for by these names; programs with the full C
// library have its own. libgcc's differ between the sets in the last digit, since it lets the compiler contract.
// C11 Annex G.5.1, with the recovery of infinities that it shows.

#define NOSUSPEND __attribute__((annotate("gw_nosuspend")))

// One set of functions for each type: the letter in the names, the type, and its suffix of builtins.
#define DEFINE(letters, type, suffix)                                                                                  \
    NOSUSPEND _Complex type __mul##letters##3(type a, type b, type c, type d);                                         \
    NOSUSPEND _Complex type __div##letters##3(type a, type b, type c, type d);                                         \
                                                                                                                       \
    static type box_##letters(type x) {                                                                                \
        return __builtin_copysign##suffix(__builtin_isinf(x) ? (type)1 : (type)0, x);                                  \
    }                                                                                                                  \
                                                                                                                       \
    static type unbox_##letters(type x) { return __builtin_isnan(x) ? __builtin_copysign##suffix((type)0, x) : x; }    \
                                                                                                                       \
    static _Complex type make_##letters(type real, type imaginary) {                                                   \
        _Complex type z;                                                                                               \
        __real__ z = real;                                                                                             \
        __imag__ z = imaginary;                                                                                        \
        return z;                                                                                                      \
    }                                                                                                                  \
                                                                                                                       \
    _Complex type __mul##letters##3(type a, type b, type c, type d) {                                                  \
        type ac = a * c, bd = b * d, ad = a * d, bc = b * c;                                                           \
        type real = ac - bd, imaginary = ad + bc;                                                                      \
        if (!__builtin_isnan(real) || !__builtin_isnan(imaginary))                                                     \
            return make_##letters(real, imaginary);                                                                    \
        int again = 0;                                                                                                 \
        if (__builtin_isinf(a) || __builtin_isinf(b)) {                                                                \
            a = box_##letters(a), b = box_##letters(b);                                                                \
            c = unbox_##letters(c), d = unbox_##letters(d);                                                            \
            again = 1;                                                                                                 \
        }                                                                                                              \
        if (__builtin_isinf(c) || __builtin_isinf(d)) {                                                                \
            c = box_##letters(c), d = box_##letters(d);                                                                \
            a = unbox_##letters(a), b = unbox_##letters(b);                                                            \
            again = 1;                                                                                                 \
        }                                                                                                              \
        if (!again && (__builtin_isinf(ac) || __builtin_isinf(bd) || __builtin_isinf(ad) || __builtin_isinf(bc))) {    \
            a = unbox_##letters(a), b = unbox_##letters(b);                                                            \
            c = unbox_##letters(c), d = unbox_##letters(d);                                                            \
            again = 1;                                                                                                 \
        }                                                                                                              \
        if (again) {                                                                                                   \
            real = __builtin_inf##suffix() * (a * c - b * d);                                                          \
            imaginary = __builtin_inf##suffix() * (a * d + b * c);                                                     \
        }                                                                                                              \
        return make_##letters(real, imaginary);                                                                        \
    }                                                                                                                  \
                                                                                                                       \
    _Complex type __div##letters##3(type a, type b, type c, type d) {                                                  \
        /* The divisor is scaled by a power of two, so that its square neither overflows nor vanishes. */              \
        int exponent = 0;                                                                                              \
        type ac = c < 0 ? -c : c, ad = d < 0 ? -d : d;                                                                 \
        type larger = ac > ad || __builtin_isnan(ad) ? ac : ad;                                                        \
        if (larger > 0 && !__builtin_isinf(larger) && !__builtin_isnan(larger)) {                                      \
            while (larger >= (type)0x1p16 * (type)0x1p16)                                                              \
                larger *= (type)0x1p-32, exponent += 32;                                                               \
            while (larger >= 2)                                                                                        \
                larger *= (type)0.5, exponent++;                                                                       \
            while (larger < (type)0x1p-31)                                                                             \
                larger *= (type)0x1p32, exponent -= 32;                                                                \
            while (larger < 1)                                                                                         \
                larger *= 2, exponent--;                                                                               \
        }                                                                                                              \
        type scaled_c = scale_##letters(c, -exponent), scaled_d = scale_##letters(d, -exponent);                       \
        type denominator = scaled_c * scaled_c + scaled_d * scaled_d;                                                  \
        type real = scale_##letters((a * scaled_c + b * scaled_d) / denominator, -exponent);                           \
        type imaginary = scale_##letters((b * scaled_c - a * scaled_d) / denominator, -exponent);                      \
        if (!__builtin_isnan(real) || !__builtin_isnan(imaginary))                                                     \
            return make_##letters(real, imaginary);                                                                    \
        if (denominator == 0 && (!__builtin_isnan(a) || !__builtin_isnan(b))) {                                        \
            type infinity = __builtin_copysign##suffix(__builtin_inf##suffix(), c);                                    \
            return make_##letters(infinity * a, infinity * b);                                                         \
        }                                                                                                              \
        if ((__builtin_isinf(a) || __builtin_isinf(b)) && __builtin_isfinite(c) && __builtin_isfinite(d)) {            \
            a = box_##letters(a), b = box_##letters(b);                                                                \
            return make_##letters(__builtin_inf##suffix() * (a * c + b * d),                                           \
                                  __builtin_inf##suffix() * (b * c - a * d));                                          \
        }                                                                                                              \
        if (__builtin_isinf(larger) && __builtin_isfinite(a) && __builtin_isfinite(b)) {                               \
            c = box_##letters(c), d = box_##letters(d);                                                                \
            return make_##letters((type)0 * (a * c + b * d), (type)0 * (b * c - a * d));                               \
        }                                                                                                              \
        return make_##letters(real, imaginary);                                                                        \
    }

// x * 2^n, in steps that no type's range is too small for.
#define DEFINE_SCALE(letters, type)                                                                                    \
    static type scale_##letters(type x, int n) {                                                                       \
        for (; n >= 32; n -= 32)                                                                                       \
            x *= (type)0x1p32;                                                                                         \
        for (; n <= -32; n += 32)                                                                                      \
            x *= (type)0x1p-32;                                                                                        \
        for (; n > 0; n--)                                                                                             \
            x *= 2;                                                                                                    \
        for (; n < 0; n++)                                                                                             \
            x *= (type)0.5;                                                                                            \
        return x;                                                                                                      \
    }

DEFINE_SCALE(sc, float)
DEFINE_SCALE(dc, double)
DEFINE_SCALE(tc, long double)
DEFINE(sc, float, f)
DEFINE(dc, double, )
DEFINE(tc, long double, l)
