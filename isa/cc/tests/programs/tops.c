/* Functions such as syscall, fcntl and prctl read more arguments than were passed: on other machines those are
 * registers. The first function on a stack calls them here, where the stack ends behind the arguments. */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, STACK = 16 * PAGE };

static volatile int handled;

static void *in_a_thread(void *unused)
{
    (void)unused;
    return (void *)(syscall(SYS_getpid) + fcntl(0, F_GETFD));
}

static void on_an_alternate_stack(int number)
{
    (void)number;
    handled = syscall(SYS_getpid) == getpid();
}

static void handle(int signal, stack_t *stack)
{
    struct sigaction action = {.sa_handler = on_an_alternate_stack, .sa_flags = SA_ONSTACK};

    handled = 0;
    CHECK(!sigaltstack(stack, 0) && !sigaction(signal, &action, 0) && !raise(signal) && handled);
}

int main(void)
{
    char *memory = mmap(0, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    stack_t stack = {.ss_sp = memory, .ss_size = STACK};
    pthread_t thread;
    void *result = 0;

    CHECK(memory != MAP_FAILED && !mprotect(memory + STACK, PAGE, PROT_NONE));
    handle(SIGUSR1, &stack);
    CHECK(!pthread_create(&thread, 0, in_a_thread, 0) && !pthread_join(thread, &result));
    CHECK((long)result == getpid() + fcntl(0, F_GETFD));
    return finish();
}
