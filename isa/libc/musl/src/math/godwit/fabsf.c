/* One instruction on every set, with the same result. */
#include <math.h>

float fabsf(float x)
{
	return __builtin_fabsf(x);
}
