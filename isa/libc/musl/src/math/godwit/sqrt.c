/* One instruction on every set, with the same result. */
#include <math.h>

double sqrt(double x)
{
	return __builtin_sqrt(x);
}
