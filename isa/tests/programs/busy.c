// Runs for some seconds in one shape of code, so that a test can measure how long a request waits for a poll.
#include "library.h"
#include "threads.h"

#define APART __attribute__((noinline))

static volatile unsigned long sink;

static APART int fibonacci(int n) { return n < 2 ? n : fibonacci(n - 1) + fibonacci(n - 2); }

// A loop of calls of a recursive function that mostly ends at once.
static APART void recursion(void) {
    for (unsigned long i = 0; i < 4000000000UL; i++)
        sink += (unsigned long)fibonacci((int)(i & 3));
}

static APART void loop(void) {
    unsigned long x = 1;
    for (unsigned long i = 0; i < 8000000000UL; i++)
        x = x * 6364136223846793005UL + i;
    sink = x;
}

// Short counted loops, which have no polls of their own, in a long one.
static APART void nested(void) {
    unsigned char block[64] = {1};
    for (unsigned long i = 0; i < 200000000UL; i++) {
        for (int k = 1; k < 64; k++)
            block[k] = (unsigned char)(block[k - 1] * 3 + block[k] + i);
        block[0] ^= block[63];
    }
    sink = block[0];
}

static APART void irreducible(void) {
    unsigned long x = sink + 1, n = 4000000000UL;
    if (x & 8)
        goto middle;
top:
    x = x * 1664525u + 1013904223u;
middle:
    x ^= x >> 13;
    if (n-- > 0) {
        if (x & 1)
            goto top;
        goto middle;
    }
    sink = x;
}

typedef struct step {
    struct step (*next)(unsigned long);
    unsigned long value;
} step;
static step one(unsigned long), two(unsigned long);
static APART step one(unsigned long v) { return (step){v & 4 ? one : two, v * 3 + 1}; }
static APART step two(unsigned long v) { return (step){v & 2 ? two : one, v * 5 + 3}; }

static APART void indirect(void) {
    step s = {one, 7};
    for (unsigned long i = 0; i < 2000000000UL; i++)
        s = s.next(s.value);
    sink = s.value;
}

static APART void string(void) {
    static char text[1 << 16];
    for (size_t i = 0; i + 1 < sizeof text; i++)
        text[i] = 'a';
    for (unsigned long i = 0; i < 1000000UL; i++)
        sink += length(text);
}

// Blocked in the kernel.
static APART void sleep(void) {
    enum { NR_nanosleep = 101 };
    long time[2] = {20, 0};
    __gw_syscall(NR_nanosleep, (long)time, 0, 0, 0, 0, 0);
}

static int forever = 1;

static int computes(void *unused) {
    (void)unused;
    loop();
    return 0;
}

static int sleeps(void *unused) {
    (void)unused;
    sleep();
    return 0;
}

static int waits(void *unused) {
    (void)unused;
    wait_while(&forever, 1);
    return 0;
}

// More threads than the machine has processors, half of them blocked.
static APART void several(void) {
    enum { THREADS = 8 };
    thread threads[THREADS];
    int (*const functions[4])(void *) = {computes, sleeps, waits, computes};
    for (int i = 0; i < THREADS; i++)
        begin(&threads[i], functions[i & 3], 0);
    recursion();
    for (int i = 0; i < THREADS; i++)
        join(&threads[i]);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } kinds[] = {{"recursion", recursion}, {"loop", loop},     {"nested", nested}, {"irreducible", irreducible},
                 {"indirect", indirect},   {"string", string}, {"sleep", sleep},   {"threads", several}};
    for (size_t i = 0; argc > 1 && i < sizeof kinds / sizeof *kinds; i++)
        if (length(kinds[i].name) == length(argv[1]) && memcmp(kinds[i].name, argv[1], length(argv[1])) == 0) {
            kinds[i].run();
            return 0;
        }
    return 1;
}
