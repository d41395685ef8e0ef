/* The end of a detached thread. Its stacks are in its slot, so what was mapped for it can go first. */
#include "pthread_impl.h"
#include "syscall.h"

_Noreturn void __gw_thread_exit(void *);

void __unmapself(void *base, size_t size)
{
	__syscall(SYS_munmap, base, size);
	__gw_thread_exit((char *)__pthread_self() - GW_PTHREAD_OFFSET);
}
