/* Products and quotients of complex numbers, which the front end calls by these names. They are part
 * of the program, since sets pass structures of numbers in different ways to functions that are not.
 * The ways out of infinities and NaNs are those of C11's annex G. */
#include <math.h>

/* The parts of a number whose other part is infinite count as 1 or 0, with their sign. */
#define BOX(x) copysign(isinf(x) ? 1 : 0, x)
#define ZERO_FOR_NAN(x) do { if (isnan(x)) (x) = copysign(0, x); } while (0)

/* The compiler's own word for a complex type: <complex.h> would make its operators call us again. */
#define PRODUCT(name, real) \
real _Complex name(real a, real b, real c, real d) \
{ \
	real ac = a * c, bd = b * d, ad = a * d, bc = b * c; \
	real x = ac - bd, y = ad + bc; \
	int again = 0; \
	real _Complex z; \
\
	if (isnan(x) && isnan(y)) { \
		if (isinf(a) || isinf(b)) { \
			a = BOX(a); \
			b = BOX(b); \
			ZERO_FOR_NAN(c); \
			ZERO_FOR_NAN(d); \
			again = 1; \
		} \
		if (isinf(c) || isinf(d)) { \
			c = BOX(c); \
			d = BOX(d); \
			ZERO_FOR_NAN(a); \
			ZERO_FOR_NAN(b); \
			again = 1; \
		} \
		if (!again && (isinf(ac) || isinf(bd) || isinf(ad) || isinf(bc))) { \
			ZERO_FOR_NAN(a); \
			ZERO_FOR_NAN(b); \
			ZERO_FOR_NAN(c); \
			ZERO_FOR_NAN(d); \
			again = 1; \
		} \
		if (again) { \
			x = INFINITY * (a * c - b * d); \
			y = INFINITY * (a * d + b * c); \
		} \
	} \
	__real__ z = x; \
	__imag__ z = y; \
	return z; \
}

/* The divisor is scaled by a power of two, so that its square neither overflows nor vanishes. */
#define QUOTIENT(name, real, fmax, fabs, logb, scalbn) \
real _Complex name(real a, real b, real c, real d) \
{ \
	int scale = 0; \
	real exponent = logb(fmax(fabs(c), fabs(d))), square, x, y; \
	real _Complex z; \
\
	if (isfinite(exponent)) { \
		scale = (int)exponent; \
		c = scalbn(c, -scale); \
		d = scalbn(d, -scale); \
	} \
	square = c * c + d * d; \
	x = scalbn((a * c + b * d) / square, -scale); \
	y = scalbn((b * c - a * d) / square, -scale); \
	if (isnan(x) && isnan(y)) { \
		if (square == 0 && (!isnan(a) || !isnan(b))) { \
			x = copysign(INFINITY, c) * a; \
			y = copysign(INFINITY, c) * b; \
		} else if ((isinf(a) || isinf(b)) && isfinite(c) && isfinite(d)) { \
			a = BOX(a); \
			b = BOX(b); \
			x = INFINITY * (a * c + b * d); \
			y = INFINITY * (b * c - a * d); \
		} else if (isinf(exponent) && exponent > 0 && isfinite(a) && isfinite(b)) { \
			c = BOX(c); \
			d = BOX(d); \
			x = 0 * (a * c + b * d); \
			y = 0 * (b * c - a * d); \
		} \
	} \
	__real__ z = x; \
	__imag__ z = y; \
	return z; \
}

PRODUCT(__mulsc3, float)
PRODUCT(__muldc3, double)
PRODUCT(__multc3, long double)
QUOTIENT(__divsc3, float, fmaxf, fabsf, logbf, scalbnf)
QUOTIENT(__divdc3, double, fmax, fabs, logb, scalbn)
QUOTIENT(__divtc3, long double, fmaxl, fabsl, logbl, scalbnl)
