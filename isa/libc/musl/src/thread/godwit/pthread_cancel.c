/* Cancellation without a look at registers: the runtime returns GW_CANCELLED from a system call that
 * was not begun, or was ended before it took effect, since the flag that it was shown is set. */
#define _GNU_SOURCE
#include <string.h>
#include "pthread_impl.h"
#include "syscall.h"

/* No error of the kernel's: those end at -4095. */
#define GW_CANCELLED (-4097)

long __gw_syscall_cp(volatile int *, long, long, long, long, long, long, long);
hidden long __cancel(void), __syscall_cp_c(syscall_arg_t, syscall_arg_t, syscall_arg_t, syscall_arg_t,
	syscall_arg_t, syscall_arg_t, syscall_arg_t);

long __cancel(void)
{
	pthread_t self = __pthread_self();

	if (self->canceldisable == PTHREAD_CANCEL_ENABLE || self->cancelasync)
		pthread_exit(PTHREAD_CANCELED);
	self->canceldisable = PTHREAD_CANCEL_DISABLE;
	return -ECANCELED;
}

long __syscall_cp_c(syscall_arg_t nr, syscall_arg_t u, syscall_arg_t v, syscall_arg_t w,
	syscall_arg_t x, syscall_arg_t y, syscall_arg_t z)
{
	pthread_t self = __pthread_self();
	int state = self->canceldisable;
	long result;

	if (state && (state == PTHREAD_CANCEL_DISABLE || nr == SYS_close))
		return __syscall(nr, u, v, w, x, y, z);

	result = __gw_syscall_cp(&self->cancel, nr, u, v, w, x, y, z);
	if (result == GW_CANCELLED)
		return __cancel();
	if (result == -EINTR && nr != SYS_close && self->cancel
	    && self->canceldisable != PTHREAD_CANCEL_DISABLE)
		return __cancel();
	return result;
}

/* The signal ends a system call of the thread it is sent to; that call then sees the flag. What is
 * left to do here is the asynchronous kind, which may end a thread anywhere. */
static void cancel_handler(int sig, siginfo_t *si, void *ctx)
{
	pthread_t self = __pthread_self();

	a_barrier();
	if (!self->cancel || self->canceldisable == PTHREAD_CANCEL_DISABLE || !self->cancelasync)
		return;
	__syscall(SYS_rt_sigprocmask, SIG_UNBLOCK, SIGALL_SET, 0, _NSIG / 8);
	pthread_exit(PTHREAD_CANCELED);
}

void __testcancel(void)
{
	pthread_t self = __pthread_self();

	if (self->cancel && !self->canceldisable)
		__cancel();
}

static void init_cancellation(void)
{
	struct sigaction sa = {
		.sa_flags = SA_SIGINFO | SA_RESTART,
		.sa_sigaction = cancel_handler,
	};

	memset(&sa.sa_mask, -1, _NSIG / 8);
	__libc_sigaction(SIGCANCEL, &sa, 0);
}

int pthread_cancel(pthread_t t)
{
	static int init;

	if (!init) {
		init_cancellation();
		init = 1;
	}
	a_store(&t->cancel, 1);
	if (t == pthread_self()) {
		if (t->canceldisable == PTHREAD_CANCEL_ENABLE && t->cancelasync)
			pthread_exit(PTHREAD_CANCELED);
		return 0;
	}
	return pthread_kill(t, SIGCANCEL);
}
