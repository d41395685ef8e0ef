/* The handler of a fault waits for a byte: until it has one, the process cannot rest. */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

static char *page;
static int told[2];

static void on_fault(int signal)
{
    char byte;
    CHECK(signal == SIGSEGV && write(1, "ready\n", 6) == 6);
    CHECK(read(0, &byte, 1) == 1 && !mprotect(page, 4096, PROT_READ | PROT_WRITE));
}

static void *reads(void *unused)
{
    char byte;
    CHECK(read(told[0], &byte, 1) == 1);
    return unused;
}

int main(void)
{
    struct sigaction action = {.sa_handler = on_fault};
    pthread_t thread;
    page = mmap(0, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED && !sigaction(SIGSEGV, &action, 0) && !pipe(told));
    CHECK(!pthread_create(&thread, 0, reads, 0));
    *(volatile char *)page = 1;
    CHECK(page[0] == 1 && write(told[1], "x", 1) == 1 && !pthread_join(thread, 0));
    return finish();
}
