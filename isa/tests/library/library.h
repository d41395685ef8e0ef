// The small C library of the tests: enough to print, allocate and end. It is neutral, so it is captured like the rest.
#ifndef GW_TEST_LIBRARY_H
#define GW_TEST_LIBRARY_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
    long words[48];
} jmp_buf[1];

int setjmp(jmp_buf) __attribute__((returns_twice));
_Noreturn void longjmp(jmp_buf, int);

// %d %u %x (int), %ld %lu %lx (long), %s %c, and %f: the bits of a double. Lines are written one by one.
void print(const char *format, ...);
void *allocate(size_t bytes);
void release(void *);
_Noreturn void leave(int status);
void sort(void *items, size_t count, size_t size, int (*compare)(const void *, const void *));
size_t length(const char *);
void *memcpy(void *, const void *, size_t);
void *memset(void *, int, size_t);
int memcmp(const void *, const void *, size_t);
long __gw_syscall(long nr, long a, long b, long c, long d, long e, long f);

#endif
