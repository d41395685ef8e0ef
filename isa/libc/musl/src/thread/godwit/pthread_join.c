/* musl's, which also gives the slot of the joined thread back to the runtime. */
#define _GNU_SOURCE
#include "pthread_impl.h"
#include <sys/mman.h>

void __gw_thread_free(void *);

#define __munmap(base, size) (__munmap(base, size), __gw_thread_free((char *)t - GW_PTHREAD_OFFSET))

#include "../pthread_join.c"
