/* Locks a page of its main thread's native stack, whose address it is told, and ends when its input does. */
#define _GNU_SOURCE
#include "check.h"
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int main(int count, char **arguments)
{
    char byte;
    CHECK(count == 2 && !mlock((void *)strtoul(arguments[1], 0, 10), 4096));
    CHECK(write(1, "ready\n", 6) == 6);
    CHECK(read(0, &byte, 1) == 0);
    return finish();
}
