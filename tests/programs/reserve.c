/* A service that has reserved 64 GiB of memory of which it uses none, and waits.
 *
 *     reserve [uncounted]
 *
 * "uncounted": the kernel does not count it (MAP_NORESERVE). */
#include <sys/mman.h>
#include <unistd.h>

int main(int count, char **arguments)
{
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | (count > 1 ? MAP_NORESERVE : 0);

	(void)arguments;
	if (mmap(NULL, 64UL << 30, PROT_NONE, flags, -1, 0) == MAP_FAILED)
		return 1;
	for (;;)
		pause();
}
