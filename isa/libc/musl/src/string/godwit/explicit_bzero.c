/* musl's uses inline assembly to keep the stores; here they are made through a volatile pointer. */
#define _BSD_SOURCE
#include <string.h>

void explicit_bzero(void *d, size_t n)
{
	void *(*volatile set)(void *, int, size_t) = memset;

	set(d, 0, n);
}
