// Files, directories and devices that are open while the program is captured; its status is 5.
//     files DIRECTORY           the ordinary kinds, and everything that belongs to them: prints what it finds afterwards
//     files DIRECTORY deleted   one that was unlinked; and pipe, socket, epoll, each as the only such
#include "library.h"

#define APART __attribute__((noinline))

enum { NR_GETCWD = 17, NR_EPOLL_CREATE1 = 20, NR_DUP = 23, NR_DUP3 = 24, NR_FCNTL = 25, NR_UNLINKAT = 35 };
enum { NR_CHDIR = 49, NR_OPENAT = 56, NR_CLOSE = 57, NR_PIPE2 = 59, NR_GETDENTS64 = 61, NR_LSEEK = 62 };
enum { NR_READ = 63, NR_WRITE = 64, NR_UMASK = 166, NR_SOCKETPAIR = 199 };
enum { AT_FDCWD = -100, O_WRONLY = 1, O_RDWR = 2, O_CREAT = 0100, O_TRUNC = 01000, O_APPEND = 02000 };
enum { O_NONBLOCK = 04000, O_DIRECTORY = 040000, O_CLOEXEC = 02000000, F_GETFD = 1, F_GETFL = 3, SEEK_CUR = 1 };
enum { ROUNDS = 48000 };

static volatile unsigned long sink = 1;

static long call(long nr, long a, long b, long c) { return __gw_syscall(nr, a, b, c, 0, 0, 0); }
static long open_file(const char *path, int flags) {
    return __gw_syscall(NR_OPENAT, AT_FDCWD, (long)path, flags, 0666, 0, 0);
}

static int equal(const char *a, const char *b) { return length(a) == length(b) && memcmp(a, b, length(a)) == 0; }

// Where the program is captured.
static APART unsigned long work(void) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < ROUNDS; i++)
        sum = sum * 31 + i + sink;
    return sum;
}

static void show(const char *name, long number) {
    // Without O_LARGEFILE, which the kernel sets for itself, and O_NOFOLLOW, which qemu 8.2 makes of it.
    print("%s is %ld: flags %lx %ld, at %ld\n", name, number, call(NR_FCNTL, number, F_GETFL, 0) & ~0500000L,
          call(NR_FCNTL, number, F_GETFD, 0), call(NR_LSEEK, number, 0, SEEK_CUR));
}

static int one(const char *what) {
    int pair[2];
    if (equal(what, "pipe"))
        call(NR_PIPE2, (long)pair, 0, 0);
    else if (equal(what, "socket"))
        __gw_syscall(NR_SOCKETPAIR, 1, 1, 0, (long)pair, 0, 0);
    else if (equal(what, "epoll"))
        call(NR_EPOLL_CREATE1, 0, 0, 0);
    else {
        open_file("gone", O_RDWR | O_CREAT);
        call(NR_UNLINKAT, AT_FDCWD, (long)"gone", 0);
    }
    print("ready %lx\n", work());
    return 5;
}

int main(int argc, char **argv) {
    char text[64];
    if (argc < 2 || call(NR_CHDIR, (long)argv[1], 0, 0) != 0)
        return 1;
    // Whoever runs the tests may have handed on more than three.
    for (int number = 3; number < 300; number++)
        call(NR_CLOSE, number, 0, 0);
    if (argc > 2)
        return one(argv[2]);
    call(NR_UMASK, 027, 0, 0);
    long a = open_file("a", O_RDWR | O_CREAT | O_TRUNC);
    call(NR_WRITE, a, (long)"0123456789", 10);
    call(NR_LSEEK, a, 3, 0);
    long twin = call(NR_DUP, a, 0, 0);
    long alone = open_file("a", O_NONBLOCK);
    long log = open_file("log", O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC);
    call(NR_WRITE, log, (long)"first\n", 6);
    long high = call(NR_DUP3, log, 200, O_CLOEXEC);
    long null = open_file("/dev/null", O_WRONLY | O_CLOEXEC);
    long directory = open_file(".", O_DIRECTORY);
    // A gap below, which the next open is to fill; and no standard input.
    long gap = open_file("/dev/zero", 0);
    long zero = open_file("/dev/zero", 0);
    call(NR_CLOSE, gap, 0, 0);
    call(NR_CLOSE, 0, 0, 0);
    // Standard error goes into the log.
    call(NR_DUP3, log, 2, 0);
    long output = call(NR_DUP, 1, 0, 0); // takes 0

    print("work %lx\n", work());

    show("a", a);
    call(NR_READ, twin, (long)text, 2);
    text[2] = 0;
    print("read %s\n", text);
    show("a", a);
    show("alone", alone);
    call(NR_WRITE, high, (long)"second\n", 7);
    call(NR_WRITE, 2, (long)"third\n", 6);
    show("log", log);
    show("high", high);
    show("null", null);
    show("directory", directory);
    show("zero", zero);
    print("read %ld from zero, wrote %ld to null\n", call(NR_READ, zero, (long)text, 5),
          call(NR_WRITE, null, (long)"x", 1));
    long entries = 0, bytes;
    char names[512];
    while ((bytes = call(NR_GETDENTS64, directory, (long)names, sizeof names)) > 0)
        for (long at = 0; at < bytes; at += *(unsigned short *)(names + at + 16))
            entries++;
    print("%ld entries\n", entries);
    call(NR_GETCWD, (long)names, sizeof names, 0);
    print("in %s, umask %lx\n", equal(names, argv[1]) ? "place" : names, call(NR_UMASK, 0, 0, 0));
    print("the next is %ld\n", open_file("log", 0));
    call(NR_WRITE, output, (long)"on output\n", 10);
    return 5;
}
