/* musl's, except that a thread lives in a slot of the runtime (isa/ABI.md, section 3): control
 * block, data stack and native stack are there, and what musl maps holds thread-specific data only. */
#define _GNU_SOURCE
#include "pthread_impl.h"
#include "stdio_impl.h"
#include "libc.h"
#include "lock.h"
#include <sys/mman.h>

void *__gw_thread_new(void);

/* Where no slot is free, the caller goes the way it has for a mapping that failed. */
#define __copy_tls(unused) ({ \
		char *block = __gw_thread_new(); \
		if (!block) { \
			if (map) __munmap(map, size); \
			goto fail; \
		} \
		(pthread_t)(block + GW_PTHREAD_OFFSET); \
	})

#include "../pthread_create.c"
