/* The pthread structure of the main thread, in the control block that the runtime has made. TLS
 * variables are in that block as well and are no concern of the C library. */
#define SYSCALL_NO_TLS 1
#include <stddef.h>
#include "pthread_impl.h"
#include "libc.h"
#include "atomic.h"
#include "syscall.h"

_Static_assert(sizeof(struct pthread) <= GW_PTHREAD_ROOM, "a pthread structure must fit its place in the control block");

volatile int __thread_list_lock;

int __init_tp(void *p)
{
	pthread_t td = p;

	td->self = td;
	libc.can_do_threads = 1;
	td->detach_state = DT_JOINABLE;
	td->tid = __syscall(SYS_set_tid_address, &__thread_list_lock);
	td->locale = &libc.global_locale;
	td->robust_list.head = &td->robust_list.head;
	td->next = td->prev = td;
	return 0;
}

void __init_tls(size_t *aux)
{
	__init_tp(__pthread_self());
}
