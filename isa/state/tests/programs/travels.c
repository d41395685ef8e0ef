// Goes down a chain of calls, works at the bottom of it and comes up again; or ends in one of several ways.
//     travels DEPTH WORDS…    prints its arguments and sums that depend on every frame; its status is 7
//     travels wait            says "ready" and works until it is ended from outside, or captured and asked to go on
//     travels silent          the same with standard error closed
//     travels full            the same with a full pipe as standard error, which does not wait for a reader
//     travels kill            ends itself by SIGABRT
//     travels captured        ends with the status of a capture, without one
#include "library.h"

#define APART __attribute__((noinline))

enum { NR_FCNTL = 25, NR_CLOSE = 57, NR_WRITE = 64, F_SETFL = 4, O_WRONLY_NONBLOCK = 04001, STDERR = 2 };
enum { NR_KILL = 129, NR_GETPID = 172, SIGABRT = 6, ROUNDS = 16000 };

static volatile unsigned long sink = 1;

static APART unsigned long bottom(unsigned long rounds) {
    unsigned long sum = 0;
    for (unsigned long i = 0; i < rounds; i++)
        sum = sum * 31 + i + sink;
    return sum;
}

// What it keeps in its array is needed on the way up.
static APART unsigned long descend(unsigned depth, unsigned long *above) {
    unsigned long own[3] = {depth, *above, 0};
    own[2] = depth == 0 ? bottom(ROUNDS) : descend(depth - 1, own);
    return own[0] * 7 + own[1] * 5 + own[2];
}

static APART unsigned long outer(unsigned depth) {
    unsigned long first = 3;
    return descend(depth, &first) ^ first;
}

static int equal(const char *a, const char *b) { return length(a) == length(b) && memcmp(a, b, length(a)) == 0; }

static unsigned number(const char *text) {
    unsigned value = 0;
    while (*text >= '0' && *text <= '9')
        value = value * 10 + (unsigned)(*text++ - '0');
    return value;
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "0";
    if (equal(what, "silent"))
        __gw_syscall(NR_CLOSE, STDERR, 0, 0, 0, 0, 0);
    if (equal(what, "full")) {
        __gw_syscall(NR_FCNTL, STDERR, F_SETFL, O_WRONLY_NONBLOCK, 0, 0, 0);
        while (__gw_syscall(NR_WRITE, STDERR, (long)".", 1, 0, 0, 0) == 1)
            ;
    }
    if (equal(what, "wait") || equal(what, "silent") || equal(what, "full")) {
        print("ready\n");
        while (sink)
            sink = bottom(ROUNDS) | 1;
    }
    if (equal(what, "kill"))
        __gw_syscall(NR_KILL, __gw_syscall(NR_GETPID, 0, 0, 0, 0, 0, 0), SIGABRT, 0, 0, 0, 0);
    if (equal(what, "captured"))
        return 86;
    for (int i = 1; i < argc; i++)
        print("argument %d: %s\n", i, argv[i]);
    print("sum %lx\n", outer(number(what)));
    print("again %lx\n", outer(number(what) / 2));
    return 7;
}
