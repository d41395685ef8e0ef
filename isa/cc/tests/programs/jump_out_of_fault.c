/* Leaves the handler of a fault by siglongjmp. */
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>

static sigjmp_buf place;
static void leave(int signal) { siglongjmp(place, signal); }

int main(void)
{
    signal(SIGSEGV, leave);
    if (sigsetjmp(place, 1) == 0)
        *(volatile int *)16 = 1;
    puts("survived");
    return 0;
}
