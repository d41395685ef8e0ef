/* The two uses that musl makes of clone: a thread, which the runtime starts in its slot, and the
 * child of posix_spawn, which here is an ordinary fork: a child that shares the memory would share
 * the data stack too. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <unistd.h>
#include "pthread_impl.h"

long __gw_thread_start(void *, int (*)(void *), void *, int, int *, int *);
void __gw_thread_free(void *);

int __clone(int (*func)(void *), void *stack, int flags, void *arg, ...)
{
	va_list ap;
	int *ptid, *ctid;
	char *td;
	long result;

	if (!(flags & CLONE_THREAD)) {
		if (flags != (CLONE_VM | CLONE_VFORK | SIGCHLD))
			return -ENOSYS;
		result = __syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
		if (!result)
			__syscall(SYS_exit, func(arg));
		return result;
	}
	va_start(ap, arg);
	ptid = va_arg(ap, int *);
	td = va_arg(ap, char *);
	ctid = va_arg(ap, int *);
	va_end(ap);
	result = __gw_thread_start(td - GW_PTHREAD_OFFSET, func, arg, flags, ptid, ctid);
	if (result < 0)
		__gw_thread_free(td - GW_PTHREAD_OFFSET);
	return result;
}
