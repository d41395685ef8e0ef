// Asks for memory shared with a file that it can write, which is refused; for such that it only reads, and for a copy,
// which travel. Its status is 5.
#include "library.h"

enum { NR_OPENAT = 56, NR_CLOSE = 57, NR_WRITE = 64, NR_MMAP = 222, AT_FDCWD = -100, O_RDWR_CREAT = 0102 };
enum { SHARED = 1, PRIVATE = 2, ANONYMOUS = 0x20, READ_WRITE = 3, ROUNDS = 24000 };

static volatile unsigned long sink = 1;

__attribute__((noinline)) static unsigned long work(void) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < ROUNDS; i++)
        sum = sum * 31 + i + sink;
    return sum;
}

int main(int argc, char **argv) {
    if (argc < 2)
        return 1;
    long file = __gw_syscall(NR_OPENAT, AT_FDCWD, (long)argv[1], O_RDWR_CREAT, 0600, 0, 0);
    __gw_syscall(NR_WRITE, file, (long)"contents", 8, 0, 0, 0);
    for (int twice = 0; twice < 2; twice++)
        print("shared: %ld\n", __gw_syscall(NR_MMAP, 0, 4096, READ_WRITE, SHARED, file, 0));
    char *copy = (char *)__gw_syscall(NR_MMAP, 0, 4096, READ_WRITE, PRIVATE, file, 0);
    long reading = __gw_syscall(NR_OPENAT, AT_FDCWD, (long)argv[1], 0, 0, 0, 0);
    const char *read = (const char *)__gw_syscall(NR_MMAP, 0, 4096, 1, SHARED, reading, 0);
    print("writable: %ld\n", __gw_syscall(NR_MMAP, 0, 4096, 1, SHARED, file, 0));
    __gw_syscall(NR_CLOSE, reading, 0, 0, 0, 0, 0);
    char *own = (char *)__gw_syscall(NR_MMAP, 0, 4096, READ_WRITE, SHARED | ANONYMOUS, -1, 0);
    __gw_syscall(NR_CLOSE, file, 0, 0, 0, 0, 0);
    copy[0] = 'C';
    own[0] = 'x';
    print("work %lx\n", work());
    print("copy %s, own %s, read %s\n", copy, own, read);
    return 5;
}
