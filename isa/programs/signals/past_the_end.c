// Private mappings of files that are longer than their file, or whose file was made shorter since: what there is of the
// file stays, with what the program has changed in it, and what there is not still raises SIGBUS, whatever protection it
// has, also when the file was deleted and closed. The handler of the fault puts memory there.
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, ROUNDS = 4000 };

static volatile sig_atomic_t faults, bus, hidden;
static char *volatile touched;
static volatile uint64_t sink = 1;

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

// A page of a file that is not there is replaced; one that is there and may not be read becomes readable.
static void on_fault(int number) {
    char *page = (char *)((uintptr_t)touched & ~(uintptr_t)(PAGE - 1));
    faults++;
    if (number == SIGBUS) {
        bus++;
        check(mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == page, "mmap");
        page[1] = (char)bus;
    } else {
        hidden++;
        check(mprotect(page, PAGE, PROT_READ) == 0, "mprotect");
    }
}

// A file, whose name is filled in.
static int file_of(size_t bytes, char *name) {
    int file = mkstemp(name);
    check(file >= 0, "mkstemp");
    for (size_t i = 0; i < bytes; i++) {
        char byte = (char)(i * 7 + i / PAGE);
        check(write(file, &byte, 1) == 1, "write");
    }
    return file;
}

static char *map(int file, size_t pages, int protection, off_t offset) {
    char *memory = mmap(NULL, pages * PAGE, protection, MAP_PRIVATE, file, offset);
    check(memory != MAP_FAILED, "mmap");
    return memory;
}

// Whether a page is one that its file does not have: asked of the kernel, which copies from it, so that nothing is raised.
static int is_behind_the_end(char *page) {
    char name[] = "/tmp/past-the-end-XXXXXX";
    int file = mkstemp(name);
    check(file >= 0, "mkstemp");
    ssize_t written = write(file, page, 1);
    check(written == 1 || errno == EFAULT, "write");
    check(close(file) == 0 && unlink(name) == 0, "close");
    return written < 0;
}

// Three pages, changed, of a file that was cut to one page and a bit since. What moves before the cut has a copy of its
// own, which is not cut (POSIX leaves open what such a mapping shows): then it is done again.
static char *cut_off(int *file, char *name) {
    for (;;) {
        strcpy(name, "/tmp/past-the-end-XXXXXX");
        *file = file_of(3 * PAGE, name);
        char *memory = map(*file, 3, PROT_READ | PROT_WRITE, 0);
        memory[5] = 'a';
        memory[PAGE + 200] = 'b';
        memory[2 * PAGE + 5] = 'c';
        check(ftruncate(*file, PAGE + 100) == 0, "ftruncate");
        if (is_behind_the_end(memory + 2 * PAGE))
            return memory;
        check(munmap(memory, 3 * PAGE) == 0 && close(*file) == 0 && unlink(name) == 0, "munmap");
    }
}

static uint64_t work(void) {
    uint64_t sum = 0;
    for (int i = 0; i < ROUNDS; i++)
        sum = sum * 31 + (uint64_t)i + sink;
    return sum;
}

static void look(const char *name, char *memory, int pages) {
    uint64_t sum = 0;
    faults = bus = hidden = 0;
    for (int i = 0; i < pages * PAGE; i++) {
        touched = memory + i;
        sum = sum * 33 + (unsigned char)*(volatile char *)touched;
    }
    printf("%s: sum %llx, faults %d, of these behind the end %d, hidden %d\n", name, (unsigned long long)sum,
           (int)faults, (int)bus, (int)hidden);
}

int main(void) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_fault;
    sigemptyset(&action.sa_mask);
    check(sigaction(SIGBUS, &action, NULL) == 0 && sigaction(SIGSEGV, &action, NULL) == 0, "sigaction");

    char names[2][32] = {"/tmp/past-the-end-XXXXXX", "/tmp/past-the-end-XXXXXX"};
    int first = file_of(PAGE + 100, names[0]);
    char *longer = map(first, 4, PROT_READ | PROT_WRITE, 0);
    longer[3] = 'x';
    longer[PAGE + 50] = 'y';
    char *beyond = map(first, 2, PROT_READ, 8 * PAGE);
    char *nothing = map(first, 3, PROT_NONE, 0);
    int second;
    char *cut = cut_off(&second, names[1]);
    // In the middle of a mapping, with another protection.
    char *parts = map(second, 3, PROT_READ, 0);
    check(mprotect(parts + 2 * PAGE, PAGE, PROT_READ | PROT_WRITE) == 0, "mprotect");
    // In this order: what is open and has no name cannot be opened again.
    check(close(first) == 0 && close(second) == 0, "close");
    check(unlink(names[0]) == 0 && unlink(names[1]) == 0, "unlink");

    printf("work %llx\n", (unsigned long long)work());
    look("longer", longer, 4);
    look("beyond", beyond, 2);
    printf("work %llx\n", (unsigned long long)work());
    look("nothing", nothing, 3);
    look("cut", cut, 3);
    look("parts", parts, 3);
    look("longer again", longer, 4);
    return 0;
}
