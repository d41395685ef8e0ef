// A service of two threads for a crossing: at each tick of a timer the main thread sends a number through a pipe, and
// the other one adds it to what it has and prints a line. Values are in registers, on stacks of both threads, in
// variables of each kind and in the heap while it moves; its lines are the same however often it does.
//
//     service LINES
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

enum { WORDS = 1 << 18, DEPTH = 12 };

static volatile sig_atomic_t ticks;
static int ends[2];
static unsigned long *heap;
static const unsigned long factor = 6364136223846793005UL;
static unsigned long mixed = 1;
static __thread unsigned long own = 42;

static void on_tick(int signal) {
    (void)signal;
    ticks++;
}

static void fail(const char *what) {
    fprintf(stderr, "service: %s: %s\n", what, strerror(errno));
    exit(1);
}

// Calls within calls, each with a variable of its own.
static double deep(int depth, double value) {
    volatile double here = value * 1.0001;
    if (depth == 0)
        return here;
    double below = deep(depth - 1, here + depth);
    return below + here;
}

static void *print(void *lines) {
    unsigned long number, sum = 0;
    own = 7;
    for (long line = 0; line < *(long *)lines; line++) {
        if (read(ends[0], &number, sizeof number) != sizeof number)
            fail("read");
        for (int i = 0; i < WORDS; i++) {
            mixed = mixed * factor + number;
            heap[i] ^= mixed;
        }
        sum += heap[number * 4099 % WORDS];
        own = own * 3 + number;
        char text[128];
        int length = snprintf(text, sizeof text, "%lu %lx %lx %.9f\n", number, sum, own, deep(DEPTH, number));
        if (write(1, text, length) != length)
            fail("write");
    }
    return 0;
}

int main(int count, char **arguments) {
    long lines = count > 1 ? atol(arguments[1]) : 20;
    struct sigaction action = {.sa_handler = on_tick};
    struct itimerval each = {{0, 20000}, {0, 20000}};
    sigset_t tick, before;
    pthread_t thread;
    heap = calloc(WORDS, sizeof *heap);
    if (!heap || pipe(ends) != 0)
        fail("memory and a pipe");
    sigemptyset(&tick);
    sigaddset(&tick, SIGALRM);
    // Only while the main thread waits for it, so that no tick is lost between a look and a wait.
    pthread_sigmask(SIG_BLOCK, &tick, &before);
    if (pthread_create(&thread, 0, print, &lines) != 0 || sigaction(SIGALRM, &action, 0) != 0 ||
        setitimer(ITIMER_REAL, &each, 0) != 0)
        fail("a thread and a timer");
    for (unsigned long number = 1; number <= (unsigned long)lines; number++) {
        sig_atomic_t seen = ticks;
        while (ticks == seen)
            sigsuspend(&before);
        number = (unsigned long)(deep(DEPTH, number) * 0) + number;
        if (write(ends[1], &number, sizeof number) != sizeof number)
            fail("write");
    }
    pthread_join(thread, 0);
    printf("end %lu\n", own);
    return 0;
}
