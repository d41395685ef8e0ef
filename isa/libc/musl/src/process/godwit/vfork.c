/* The parent waits until its child executes a program or ends; the child has a copy of the memory. So it is musl's fork
 * (locks that other threads hold, the child's only thread) without the handlers of pthread_atfork. The parent waits behind
 * it, when it holds none of the locks any more: at a descriptor that the runtime tells for this bit of the flags, which no
 * kernel looks at. Where the kernel itself has the parent wait (plain executables), there is none. */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <unistd.h>
#include "aio_impl.h"
#include "fork_impl.h"
#include "libc.h"
#include "lock.h"
#include "pthread_impl.h"
#include "syscall.h"

#define TELL_END (1L << 32)

static pid_t begin(long *);
static pid_t fork_with_locks(long *);

#undef SYS_fork
#undef SIGCHLD
#define SIGCHLD (17 | CLONE_VFORK | TELL_END), 0, (long)end
#define dummy dummy_of_begin
#define _Fork(unused) begin(long *end)
#include "../_Fork.c"
#undef dummy
#undef _Fork

#define _Fork() begin(end)
#define fork(unused) fork_with_locks(long *end)
#define __fork_handler(which) ((void)0)
#include "../fork.c"

pid_t vfork(void)
{
	long end = -1;
	pid_t child = fork_with_locks(&end);
	char byte;

	if (child <= 0 || end < 0)
		return child;
	/* Nothing is ever written. A handler may end the call; another thread may close the number. */
	while (__syscall(SYS_read, end, &byte, 1) == -EINTR);
	__syscall(SYS_close, end);
	return child;
}
