// A family for a crossing: a parent, a child that takes turns with it in memory that both share, and a child that has
// ended, for which the parent asks only in the end. Its lines are the same however often it moves.
//
//     family LINES
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 1 << 16 };

struct shared {
    unsigned long turns;
    unsigned long words[WORDS];
};

// Among the variables of the program, and locked.
static unsigned long own[1 << 12];

static void fail(const char *what) {
    fprintf(stderr, "family: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void turn(struct shared *shared, unsigned long number) {
    for (int i = 0; i < WORDS; i++)
        shared->words[i] = (shared->words[i] ^ number) * 6364136223846793005UL + i;
    own[number % (1 << 12)] += ++shared->turns;
}

static void take_turns(struct shared *shared, int from, int to) {
    unsigned long number;
    while (read(from, &number, sizeof number) == sizeof number) {
        turn(shared, 3 * number);
        number = own[3 * number];
        if (write(to, &number, sizeof number) != sizeof number)
            fail("write");
    }
}

int main(int count, char **arguments) {
    unsigned long lines = count > 1 ? strtoul(arguments[1], 0, 10) : 20;
    struct timespec moment = {0, 10000000};
    int down[2], up[2], status;
    siginfo_t information;
    struct shared *shared = mmap(0, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED || mlock(own, sizeof own) != 0 || pipe(down) != 0 || pipe(up) != 0)
        fail("memory and pipes");
    pid_t ended = fork();
    if (ended == 0)
        _exit(7);
    // Waits for its end, and leaves it.
    if (ended < 0 || waitid(P_PID, ended, &information, WEXITED | WNOWAIT) != 0)
        fail("a child that ends");
    pid_t other = fork();
    if (other < 0)
        fail("a child");
    if (other == 0) {
        close(down[1]);
        close(up[0]);
        take_turns(shared, down[0], up[1]);
        _exit(shared->turns == 2 * lines ? 8 : 1);
    }
    for (unsigned long number = 1; number <= lines; number++) {
        unsigned long answer;
        turn(shared, number);
        if (write(down[1], &number, sizeof number) != sizeof number || read(up[0], &answer, sizeof answer) != sizeof answer)
            fail("a turn of the child");
        printf("%lu %lu %lx %lx\n", number, answer, own[number], shared->words[number * 4099 % WORDS]);
        fflush(stdout);
        nanosleep(&moment, 0);
    }
    close(down[1]);
    for (int child = 0; child < 2; child++) {
        if (waitpid(child ? other : ended, &status, 0) < 0 || !WIFEXITED(status))
            fail("waitpid");
        printf("child %d: %d\n", child, WEXITSTATUS(status));
    }
    return 0;
}
