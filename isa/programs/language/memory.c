// Memory that the program asks the kernel for: the break and mappings grow, shrink and move, and each page keeps its
// protection. What may be read and written is asked of system calls, which say EFAULT where a program would be killed.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 8 };

static char *brk_to(char *end) { return (char *)syscall(SYS_brk, end); }

static int readable(const char *page) { return faccessat(AT_FDCWD, page, F_OK, 0) == 0 || errno != EFAULT; }

static int writable(char *page) {
    char kept = 0;
    if (readable(page))
        kept = *page;
    if (getrandom(page, 1, 0) != 1)
        return 0;
    *page = kept;
    return 1;
}

// A letter for each page: what may be done with it.
static void show(const char *what, char *memory, int pages) {
    printf("%s ", what);
    for (int i = 0; i < pages; i++)
        putchar(!readable(memory + i * PAGE) ? '-' : writable(memory + i * PAGE) ? 'w' : 'r');
    putchar('\n');
}

static void fill(char *memory, int pages, unsigned seed) {
    for (int i = 0; i < pages; i++)
        for (int j = 0; j < PAGE; j += 64)
            memory[i * PAGE + j] = (char)(seed += i * 7 + j);
}

static uint32_t sum(const char *memory, int pages) {
    uint32_t total = 0;
    for (int i = 0; i < pages * PAGE; i += 16)
        total = total * 31 + (unsigned char)memory[i];
    return total;
}

static void protect(char *memory, int first, int count, int protection) {
    if (mprotect(memory + first * PAGE, (size_t)count * PAGE, protection) != 0)
        printf("mprotect of %d pages: %s\n", count, strerror(errno));
}

static void exercise(const char *what, char *memory) {
    fill(memory, PAGES, 5);
    show(what, memory, PAGES);
    protect(memory, 1, 2, PROT_READ);
    protect(memory, 4, 1, PROT_NONE);
    show(what, memory, PAGES);
    protect(memory, 2, 3, PROT_READ | PROT_WRITE);
    show(what, memory, PAGES);
    printf("%s %08x\n", what, sum(memory, PAGES));
}

// s for a page that the program shares with the children that it may have: given back, it has what it had. p for one of
// its own, which is empty then. /proc/self/maps would tell, but does not move with the program.
static char kind(char *page) {
    uint32_t before = sum(page, 1);
    if (madvise(page, PAGE, MADV_DONTNEED) != 0)
        return '?';
    return sum(page, 1) == before ? 's' : 'p';
}

int main(void) {
    // The first allocation maps a page over the break's, and does not tell of an error that there was none.
    errno = ENOENT;
    void *volatile allocated = malloc(100);
    printf("allocated: %d, %s\n", allocated != 0, strerror(errno));

    char *begin = (char *)(((uintptr_t)brk_to(0) + PAGE - 1) & -(uintptr_t)PAGE);
    printf("grown: %d\n", brk_to(begin + PAGES * PAGE) == begin + PAGES * PAGE);
    exercise("break", begin);
    brk_to(begin + 2 * PAGE);
    brk_to(begin + PAGES * PAGE);
    show("break again", begin, PAGES);
    printf("break again %08x\n", sum(begin, PAGES));
    printf("taken out: %d\n", munmap(begin + 3 * PAGE, 2 * PAGE));
    show("break with a hole", begin, PAGES);
    char *inside = mmap(begin + 4 * PAGE, 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("in the break: %d\n", inside == begin + 4 * PAGE);
    show("break with a hole", begin, PAGES);

    char *map = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    exercise("mapping", map);
    munmap(map + 3 * PAGE, PAGE);
    show("mapping with a hole", map, PAGES);
    char *other = mmap(map + 3 * PAGE, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    printf("in its place: %d\n", other == map + 3 * PAGE);
    show("mapping", map, PAGES);
    char *large = mremap(map + 4 * PAGE, 4 * PAGE, 64 * PAGE, MREMAP_MAYMOVE);
    printf("moved %08x\n", sum(large, 64));
    show("moved", large, PAGES);

    char *shared = mmap(0, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    exercise("shared", shared);
    printf("shared %08x\n", sum(shared, PAGES));
    printf("kinds %c%c\n", kind(shared + PAGE), kind(map + PAGE));
    return 0;
}
