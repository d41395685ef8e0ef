/* Child processes: vfork, posix_spawn, system, popen, exec. With an argument: what tests of rest look at. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef SYS_close_range
#define SYS_close_range 436
#endif

extern char **environ;

static int status_of(pid_t child)
{
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

static int has_byte(int end)
{
    return poll(&(struct pollfd){.fd = end, .events = POLLIN}, 1, 0) == 1;
}

/* Until the parent does nothing: one that did not wait for this child would by then have gone on to where it waits. */
static void until_parent_waits(void)
{
    char path[40], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)getppid());
    for (;;) {
        int file = open(path, O_RDONLY);
        ssize_t got = read(file, text, sizeof text - 1);
        close(file);
        text[got > 0 ? got : 0] = 0;
        char *name_end = strrchr(text, ')');
        if (name_end && name_end[1] == ' ' && name_end[2] == 'S')
            return;
        sched_yield();
    }
}

static void vforks(void)
{
    int told[2], input[2];
    volatile int own = 1;
    CHECK(!pipe(told) && !pipe(input));
    int free_before = open("/dev/null", O_RDONLY);
    close(free_before);

    pid_t child = vfork();
    if (!child) {
        own = 2;
        until_parent_waits();
        _exit(write(told[1], "x", 1) == 1 ? 3 : 4);
    }
    CHECK(has_byte(told[0]) && status_of(child) == 3 && own == 1);
    char byte;
    CHECK(read(told[0], &byte, 1) == 1);

    /* Until it executes a program, and not until that ends. */
    child = vfork();
    if (!child) {
        until_parent_waits();
        if (write(told[1], "x", 1) != 1 || dup2(input[0], 0))
            _exit(4);
        close(input[1]);
        execl("/bin/sh", "sh", "-c", "read line; exit 5", (char *)0);
        _exit(6);
    }
    CHECK(has_byte(told[0]) && write(input[1], "\n", 1) == 1 && status_of(child) == 5);
    CHECK(read(told[0], &byte, 1) == 1);

    /* As some libraries call it. */
    child = (pid_t)syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, 0, 0, 0, 0);
    if (!child)
        _exit(8);
    CHECK(status_of(child) == 8);
    /* A child that dies without a word. */
    child = vfork();
    if (!child)
        kill(getpid(), SIGKILL), pause();
    CHECK(status_of(child) == -SIGKILL);
    /* Its own number, under which it can send itself a signal. */
    child = vfork();
    if (!child)
        raise(SIGKILL);
    CHECK(status_of(child) == -SIGKILL);

    /* A child that closes every descriptor that it does not know: one by one, at a stroke, or by putting another there. */
    for (int way = 0; way < 3; way++) {
        child = vfork();
        if (!child) {
            int kept = told[1];
            if (way == 1)
                syscall(SYS_close_range, kept + 1, ~0U, 0), syscall(SYS_close_range, 0, kept - 1, 0);
            for (int i = 0; i < 100; i++)
                if (i != kept && way != 1)
                    way == 0 ? close(i) : dup2(kept, i);
            until_parent_waits();
            _exit(write(kept, "x", 1) == 1 ? 30 + way : 4);
        }
        CHECK(has_byte(told[0]) && status_of(child) == 30 + way && read(told[0], &byte, 1) == 1);
    }

    /* A child's child that executes nothing is not waited for: it ends when the parent lets it. */
    child = vfork();
    if (!child) {
        if (!fork()) {
            close(told[0]);
            close(input[1]);
            _exit(read(input[0], &byte, 1) == 1 && write(told[1], "x", 1) == 1 ? 0 : 4);
        }
        _exit(33);
    }
    CHECK(!has_byte(told[0]) && status_of(child) == 33);
    CHECK(write(input[1], "x", 1) == 1 && read(told[0], &byte, 1) == 1);
    /* Nothing is left open. */
    int free_after = open("/dev/null", O_RDONLY);
    CHECK(free_after == free_before && !close(free_after));
    for (int i = 0; i < 2; i++)
        close(told[i]), close(input[i]);

    /* No number is left for the pipe at which the parent waits. */
    struct rlimit limit, none;
    int first = open("/dev/null", O_RDONLY);
    close(first);
    CHECK(!getrlimit(RLIMIT_NOFILE, &limit));
    none = (struct rlimit){(rlim_t)first, limit.rlim_max};
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    child = vfork();
    if (!child)
        _exit(0);
    CHECK(child == -1 && errno == EAGAIN);
    CHECK(!setrlimit(RLIMIT_NOFILE, &limit));
}

static void spawns(void)
{
    posix_spawn_file_actions_t actions;
    posix_spawnattr_t attributes;
    sigset_t set;
    pid_t child;
    int ends[2];
    char line[32] = {0};

    CHECK(!pipe(ends) && !posix_spawn_file_actions_init(&actions));
    CHECK(!posix_spawn_file_actions_adddup2(&actions, ends[1], 1) && !posix_spawn_file_actions_addclose(&actions, ends[0]));
    CHECK(!posix_spawnp(&child, "echo", &actions, 0, (char *[]){"echo", "spawned", 0}, environ));
    close(ends[1]);
    CHECK(read(ends[0], line, sizeof line) == 8 && !strcmp(line, "spawned\n") && status_of(child) == 0);
    close(ends[0]);
    posix_spawn_file_actions_destroy(&actions);

    CHECK(posix_spawn(&child, "/nowhere/at/all", 0, 0, (char *[]){"all", 0}, environ) == ENOENT);
    CHECK(posix_spawn(&child, "/dev/null", 0, 0, (char *[]){"null", 0}, environ) == EACCES);
    CHECK(waitpid(-1, 0, WNOHANG) == -1 && errno == ECHILD);

    /* The mask and the actions are the child's own. */
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    CHECK(!posix_spawnattr_init(&attributes) && !posix_spawnattr_setsigmask(&attributes, &set));
    CHECK(!posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK));
    CHECK(!posix_spawn(&child, "/bin/sh", 0, &attributes, (char *[]){"sh", "-c", "kill -TERM $$; exit 11", 0}, environ));
    CHECK(status_of(child) == 11);
    CHECK(!posix_spawn(&child, "/bin/sh", 0, 0, (char *[]){"sh", "-c", "kill -TERM $$; exit 11", 0}, environ));
    CHECK(status_of(child) == -SIGTERM);
}

static void shells(void)
{
    char text[64] = {0};
    CHECK(WEXITSTATUS(system("exit 12")) == 12 && system(0) == 1);
    FILE *from = popen("echo one; echo two", "r");
    CHECK(from && fread(text, 1, sizeof text, from) == 8 && !strcmp(text, "one\ntwo\n") && pclose(from) == 0);
    FILE *to = popen("read word; test \"$word\" = through", "w");
    CHECK(to && fputs("through\n", to) >= 0 && pclose(to) == 0);
    CHECK(popen("true", "x") == 0 && errno == EINVAL);
}

static atomic_bool over;

static void *allocates(void *unused)
{
    while (!over) {
        void *volatile memory = malloc(100);
        free(memory);
    }
    return unused;
}

/* The child of a process with threads may allocate: none of them holds a lock in it that nobody will give back. */
static void busy_threads(void)
{
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_create(&threads[i], 0, allocates, 0));
    for (int i = 0; i < 300; i++) {
        pid_t child = vfork();
        if (!child) {
            void *volatile memory = malloc(100);
            free(memory);
            _exit(18);
        }
        CHECK(status_of(child) == 18);
    }
    over = 1;
    for (int i = 0; i < 3; i++)
        CHECK(!pthread_join(threads[i], 0));
}

static void *in_thread(void *result)
{
    pid_t child = vfork();
    if (!child)
        execl("/bin/sh", "sh", "-c", "exit 13", (char *)0);
    *(int *)result = status_of(child) == 13 && WEXITSTATUS(system("exit 14")) == 14;
    return 0;
}

static void threads(void)
{
    pthread_t thread[4];
    int results[4] = {0};
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_create(&thread[i], 0, in_thread, &results[i]));
    for (int i = 0; i < 4; i++)
        CHECK(!pthread_join(thread[i], 0) && results[i]);
}

static void forks(void)
{
    pid_t child = fork();
    if (!child) {
        pid_t grandchild = fork();
        if (!grandchild) {
            execl("/bin/sh", "sh", "-c", "exit 42", (char *)0);
            _exit(1);
        }
        _exit(status_of(grandchild) == 42 ? 15 : 16);
    }
    CHECK(status_of(child) == 15);
    siginfo_t information;
    child = fork();
    if (!child)
        _exit(17);
    CHECK(!waitid(P_PID, (id_t)child, &information, WEXITED) && information.si_status == 17);
    CHECK(execl("/nowhere", "nowhere", (char *)0) == -1 && errno == ENOENT);
}

/* The parent waits in vfork until its child has read a byte. */
static int held(void)
{
    char byte;
    pid_t child = vfork();
    if (!child) {
        printf("ready\n");
        fflush(stdout);
        _exit(read(0, &byte, 1) == 1 ? 9 : 10);
    }
    CHECK(status_of(child) == 9);
    return finish();
}

static void *compute(void *unused)
{
    for (volatile unsigned long i = 0;; i++)
        ;
    return unused;
}

/* Becomes itself again and again, while another thread runs. */
static int executes(char **arguments)
{
    int left = atoi(arguments[2]);
    pthread_t thread;
    char text[16];
    if (left == 0)
        return finish();
    CHECK(!pthread_create(&thread, 0, compute, 0));
    snprintf(text, sizeof text, "%d", left - 1);
    execl(arguments[0], arguments[0], "executes", text, (char *)0);
    return 1;
}

int main(int count, char **arguments)
{
    /* Some of this waits for ever where it goes wrong. */
    alarm(300);
    if (count > 1 && !strcmp(arguments[1], "held"))
        return held();
    if (count > 2 && !strcmp(arguments[1], "executes"))
        return executes(arguments);
    vforks();
    spawns();
    shells();
    threads();
    busy_threads();
    forks();
    return finish();
}
