// Memory from brk and mmap, also such that cannot be written or not be touched at all, in use before and after a capture.
// Prints sums; its status is 5.
#include "library.h"

#define APART __attribute__((noinline))

enum { NR_BRK = 214, NR_MUNMAP = 215, NR_MMAP = 222, NR_MPROTECT = 226 };
enum { NONE = 0, READ = 1, WRITE = 2, PRIVATE_ANONYMOUS = 0x22, PAGE = 4096, ROUNDS = 24000 };

static unsigned char *map(long pages, long protection) {
    return (unsigned char *)__gw_syscall(NR_MMAP, 0, pages * PAGE, protection, PRIVATE_ANONYMOUS, -1, 0);
}

static APART unsigned long sum(const unsigned char *bytes, unsigned long count) {
    unsigned long total = 0;
    for (unsigned long i = 0; i < count; i++)
        total = total * 33 + bytes[i];
    return total;
}

// Where the program is captured.
static APART unsigned long work(const unsigned char *a, const unsigned char *b) {
    unsigned long total = 0;
    for (int i = 0; i < ROUNDS; i++)
        total += sum(a + i % 64, 16) ^ sum(b + i % 64, 8);
    return total;
}

int main(void) {
    unsigned char *heap = (unsigned char *)__gw_syscall(NR_BRK, 0, 0, 0, 0, 0, 0);
    __gw_syscall(NR_BRK, (long)heap + 5 * PAGE + 100, 0, 0, 0, 0, 0);
    memset(heap + PAGE - 30, 7, 4 * PAGE + 130);

    unsigned char *written = map(8, READ | WRITE), *fixed = map(4, READ | WRITE), *hidden = map(2, READ | WRITE);
    for (int i = 0; i < 8 * PAGE; i++)
        written[i] = (unsigned char)(i * 13);
    memset(fixed, 3, 4 * PAGE);
    memset(hidden, 5, 2 * PAGE);
    // A hole in the first, which stays one; the second is read only, the third nothing.
    __gw_syscall(NR_MUNMAP, (long)written + 3 * PAGE, PAGE, 0, 0, 0, 0);
    __gw_syscall(NR_MPROTECT, (long)fixed, 4 * PAGE, READ, 0, 0, 0);
    __gw_syscall(NR_MPROTECT, (long)hidden, 2 * PAGE, NONE, 0, 0, 0);

    print("work %lx\n", work(heap + 2 * PAGE, written + PAGE));

    print("heap %lx\n", sum(heap, 5 * PAGE + 100));
    print("written %lx %lx\n", sum(written, 3 * PAGE), sum(written + 4 * PAGE, 4 * PAGE));
    print("fixed %lx\n", sum(fixed, 4 * PAGE));
    __gw_syscall(NR_MPROTECT, (long)hidden, 2 * PAGE, READ, 0, 0, 0);
    print("hidden %lx\n", sum(hidden, 2 * PAGE));
    // The hole is the lowest free place, in every process.
    unsigned char *hole = map(1, READ | WRITE), *behind = map(3, READ | WRITE);
    print("hole %ld, behind %ld, heap at %ld\n", (long)(hole - written), (long)(behind - written),
          __gw_syscall(NR_BRK, 0, 0, 0, 0, 0, 0) - (long)heap);
    print("zero %lx\n", sum(hole, PAGE) + sum(behind, 3 * PAGE));
    return 5;
}
