// Runs other programs again and again, all at once, and compares what each prints and ends with.
//
//     again PROGRAM SUM [PROGRAM SUM]…
//
// SUM is that of the right run, in hexadecimal: FNV-1a of 64 bits over the output and a byte with the status. It prints a line for each hundred runs
// of a program, and each one that differs, with what it printed.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SHOWN = 400 };

static uint64_t add(uint64_t sum, const unsigned char *bytes, size_t length) {
    for (size_t i = 0; i < length; i++)
        sum = (sum ^ bytes[i]) * 0x100000001b3;
    return sum;
}

static void fail(const char *what) {
    printf("wrong: %s\n", what);
    exit(1);
}

// One run: its sum, and the end of what it has printed.
static uint64_t run(const char *program, char *end) {
    int ends[2], status;
    if (pipe(ends) != 0)
        fail("pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        execl(program, program, (char *)0);
        _exit(127);
    }
    close(ends[1]);
    uint64_t sum = 0xcbf29ce484222325;
    unsigned char bytes[4096];
    ssize_t length;
    while ((length = read(ends[0], bytes, sizeof bytes)) > 0) {
        sum = add(sum, bytes, (size_t)length);
        size_t shown = length < SHOWN ? (size_t)length : SHOWN;
        memcpy(end, bytes + length - shown, shown);
        end[shown] = 0;
    }
    if (length < 0 || child < 0 || waitpid(child, &status, 0) != child)
        fail("a program that runs");
    close(ends[0]);
    unsigned char code = (unsigned char)(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
    return add(sum, &code, 1);
}

static void run_for_ever(const char *program, uint64_t due) {
    char end[SHOWN + 1] = "";
    for (unsigned long turn = 1;; turn++) {
        uint64_t sum = run(program, end);
        if (sum != due)
            printf("wrong: run %lu of %s has the sum %llx: %s\n", turn, program, (unsigned long long)sum, end);
        if (turn % 100 == 0)
            printf("%lu runs of %s\n", turn, program);
        fflush(stdout);
    }
}

int main(int count, char **arguments) {
    for (int i = 1; i + 1 < count; i += 2) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0)
            run_for_ever(arguments[i], strtoull(arguments[i + 1], 0, 16));
    }
    while (wait(0) > 0) {
    }
    return 1;
}
