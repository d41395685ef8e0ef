// A process that does not come to rest: it waits in the handler of a fault, where its native stack is in use.
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

static void on_fault(int signal) {
    (void)signal;
    static const char text[] = "in the handler\n";
    write(1, text, strlen(text));
    for (;;)
        pause();
}

int main(void) {
    struct sigaction action = {.sa_handler = on_fault};
    sigaction(SIGSEGV, &action, 0);
    *(volatile int *)0 = 1;
    return 1;
}
