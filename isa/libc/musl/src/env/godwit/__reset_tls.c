/* Gives the calling thread's TLS variables their first values again: a thread that serves one timer
 * after another looks like a new one each time. */
#include <string.h>
#include "pthread_impl.h"

/* isa/ABI.md, section 4: where the block is, behind the control block. */
#define GW_TLS_OFFSET 2048

extern const char __gw_tls_image[];
extern const unsigned long __gw_tls_image_size, __gw_tls_size;

void __reset_tls()
{
	char *block = (char *)__builtin_thread_pointer() + GW_TLS_OFFSET;

	memcpy(block, __gw_tls_image, __gw_tls_image_size);
	memset(block + __gw_tls_image_size, 0, __gw_tls_size - __gw_tls_image_size);
}
