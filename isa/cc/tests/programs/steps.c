/* Does a step for each line of its input. With an argument meanwhile, until the input ends:
 *
 *     threads   three threads that compute or wait
 *     forks     child after child, each of which waits for the next one
 *     starts    thread after thread, each of which waits for the next one
 *     ended     none, but one that has ended and is not joined
 *     closed    none, but memory where the kernel would say that the main thread has ended is not accessible */
#define _GNU_SOURCE
#include "check.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

static atomic_bool over;
static int never[2];

static void *compute(void *unused)
{
    while (!over)
        for (volatile int i = 0; i < 1000; i++)
            ;
    return unused;
}

static void *wait_for_end(void *unused)
{
    char byte;
    CHECK(read(never[0], &byte, 1) == 0);
    return unused;
}

/* Whoever follows closes the pipe at which its forerunner waits. */
static void *fork_on(void *unused)
{
    int last[2] = {-1, -1}, next[2], status;
    pid_t before = 0;
    while (!over) {
        CHECK(!pipe(next));
        pid_t child = fork();
        if (!child) {
            char byte;
            close(last[1]);
            close(next[1]);
            _exit(read(next[0], &byte, 1) == 0 ? 21 : 22);
        }
        close(next[0]);
        if (before) {
            close(last[1]);
            CHECK(waitpid(before, &status, 0) == before && WIFEXITED(status) && WEXITSTATUS(status) == 21);
        }
        last[1] = next[1];
        before = child;
    }
    close(last[1]);
    CHECK(waitpid(before, &status, 0) == before && WEXITSTATUS(status) == 21);
    return unused;
}

static void *wait_at(void *end)
{
    char byte;
    CHECK(read(*(int *)end, &byte, 1) == 0);
    return end;
}

static void *start_on(void *unused)
{
    int ends[2][2];
    pthread_t threads[2];
    void *result;
    for (unsigned i = 0;; i++) {
        int is_last = over;
        if (i > 0 && is_last) {
            close(ends[(i - 1) % 2][1]);
            CHECK(!pthread_join(threads[(i - 1) % 2], &result) && result == &ends[(i - 1) % 2][0]);
            return unused;
        }
        CHECK(!pipe(ends[i % 2]) && !pthread_create(&threads[i % 2], 0, wait_at, &ends[i % 2][0]));
        if (i == 0)
            continue;
        close(ends[(i - 1) % 2][1]);
        CHECK(!pthread_join(threads[(i - 1) % 2], &result) && result == &ends[(i - 1) % 2][0]);
        close(ends[(i - 1) % 2][0]);
    }
}

static atomic_int number_of_ended;

static void *end(void *unused)
{
    number_of_ended = gettid();
    return unused;
}

int main(int count, char **arguments)
{
    const char *mode = count > 1 ? arguments[1] : "";
    void *(*functions[3])(void *) = {0};
    pthread_t threads[3];
    char line[64];
    int number = 0;

    CHECK(!pipe(never));
    if (!strcmp(mode, "threads"))
        functions[0] = compute, functions[1] = compute, functions[2] = wait_for_end;
    else if (!strcmp(mode, "forks"))
        functions[0] = fork_on, functions[1] = compute;
    else if (!strcmp(mode, "starts"))
        functions[0] = start_on, functions[1] = compute;
    else if (!strcmp(mode, "ended"))
        functions[0] = end;
    else if (!strcmp(mode, "closed")) {
        char *page = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(page != MAP_FAILED && syscall(SYS_set_tid_address, page) == getpid() && !mprotect(page, 4096, PROT_NONE));
    }
    for (int i = 0; i < 3; i++)
        CHECK(!functions[i] || !pthread_create(&threads[i], 0, functions[i], 0));
    if (functions[0] == end)
        while (!number_of_ended || !syscall(SYS_tkill, number_of_ended, 0))
            sched_yield();
    printf("ready\n");
    fflush(stdout);
    for (ssize_t got; (got = read(0, line, sizeof line)) > 0;)
        for (ssize_t i = 0; i < got; i++)
            if (line[i] == '\n') {
                printf("step %d\n", ++number);
                fflush(stdout);
            }
    over = 1;
    close(never[1]);
    for (int i = 0; i < 3; i++)
        CHECK(!functions[i] || !pthread_join(threads[i], 0));
    return finish();
}
