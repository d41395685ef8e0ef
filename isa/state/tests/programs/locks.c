// Locks on files while the program is captured: of the process, of an open file description, flock. Says what others
// would meet, by descriptions of its own that have no locks; its status is 5.
//     locks DIRECTORY          all of them
//     locks DIRECTORY lease    a lease instead
#include "library.h"

#define APART __attribute__((noinline))

enum { NR_DUP = 23, NR_FCNTL = 25, NR_FLOCK = 32, NR_CHDIR = 49, NR_OPENAT = 56, NR_CLOSE = 57, NR_WRITE = 64 };
enum { AT_FDCWD = -100, O_RDONLY = 0, O_RDWR = 2, O_CREAT = 0100, LOCK_EX = 2, LOCK_NB = 4 };
enum { F_SETLK = 6, F_SETLEASE = 1024, F_OFD_GETLK = 36, F_OFD_SETLK = 37, F_RDLCK = 0, F_WRLCK = 1, F_UNLCK = 2 };
enum { ROUNDS = 24000 };

struct range {
    short type, whence;
    long begin, length;
    int process;
};

static volatile unsigned long sink = 1;

static long call(long nr, long a, long b, long c) { return __gw_syscall(nr, a, b, c, 0, 0, 0); }
static long open_file(const char *path, int flags) {
    return __gw_syscall(NR_OPENAT, AT_FDCWD, (long)path, flags, 0666, 0, 0);
}

// Where the program is captured.
static APART unsigned long work(void) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < ROUNDS; i++)
        sum = sum * 31 + i + sink;
    return sum;
}

static void lock(const char *what, long file, int how, int type, long begin, long length) {
    struct range range = {(short)type, 0, begin, length, 0};
    print("%s: %ld\n", what, call(NR_FCNTL, file, how, (long)&range));
}

// What a description of somebody else's would meet where it wants to write.
static void ask(const char *what, long file, long begin, long length) {
    struct range range = {F_WRLCK, 0, begin, length, 0};
    long error = call(NR_FCNTL, file, F_OFD_GETLK, (long)&range);
    if (range.type == F_UNLCK)
        print("%s: %ld, free\n", what, error);
    else
        print("%s: %ld, %s from %ld, %ld long\n", what, error, range.type == F_RDLCK ? "read" : "write", range.begin,
              range.length);
}

int main(int argc, char **argv) {
    if (argc < 2 || call(NR_CHDIR, (long)argv[1], 0, 0) != 0)
        return 1;
    for (int number = 3; number < 300; number++)
        call(NR_CLOSE, number, 0, 0);
    long a = open_file("a", O_RDWR | O_CREAT);
    call(NR_WRITE, a, (long)"0123456789", 10);
    if (argc > 2) {
        long lease = open_file("a", O_RDONLY);
        call(NR_CLOSE, a, 0, 0);
        print("lease: %ld\n", call(NR_FCNTL, lease, F_SETLEASE, F_RDLCK));
        print("work %lx\n", work());
        return 5;
    }
    long reader = open_file("a", O_RDONLY), b = open_file("b", O_RDWR | O_CREAT), c = open_file("c", O_RDWR | O_CREAT);
    long other_a = open_file("a", O_RDWR), other_b = open_file("b", O_RDWR), other_c = open_file("c", O_RDWR);
    long twin = call(NR_DUP, b, 0, 0);
    lock("write lock", a, F_SETLK, F_WRLCK, 2, 3);
    lock("read lock", reader, F_SETLK, F_RDLCK, 7, 0);
    lock("lock of a description", c, F_OFD_SETLK, F_WRLCK, 100, 50);
    print("flock: %ld\n", call(NR_FLOCK, b, LOCK_EX, 0));

    print("work %lx\n", work());

    ask("in front", other_a, 0, 2);
    ask("written", other_a, 0, 7);
    ask("between", other_a, 5, 2);
    ask("read", other_a, 6, 100);
    ask("description", other_c, 0, 0);
    ask("its own", c, 0, 0);
    print("flock of another: %ld\n", call(NR_FLOCK, other_b, LOCK_EX | LOCK_NB, 0));
    // The same lock by another number: one gives it up for both.
    print("flock of the same: %ld\n", call(NR_FLOCK, twin, LOCK_EX | LOCK_NB, 0));
    call(NR_CLOSE, b, 0, 0);
    print("and still: %ld\n", call(NR_FLOCK, other_b, LOCK_EX | LOCK_NB, 0));
    call(NR_CLOSE, twin, 0, 0);
    print("and then: %ld\n", call(NR_FLOCK, other_b, LOCK_EX | LOCK_NB, 0));
    return 5;
}
