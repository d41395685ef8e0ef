/* As musl's, with the static destructors in the function that the plugin makes of them. */
#include <stdlib.h>
#include "libc.h"

static void dummy(void) {}

/* atexit.c and __stdio_exit.c override these. */
weak_alias(dummy, __funcs_on_exit);
weak_alias(dummy, __stdio_exit);

void __gw_run_destructors(void);

_Noreturn void exit(int code)
{
	__funcs_on_exit();
	__gw_run_destructors();
	__stdio_exit();
	_Exit(code);
}
