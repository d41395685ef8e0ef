// The service of `godwit bench crossing` and of experiments, built by godwit-cc: it answers each word of its last client with
// the sum of all so far, and has processes and threads that wait as those of servers do.
//
//     sums PORT THREADS MEMORY [PROCESSES CONNECTIONS COMPUTING]
//
// Each process has THREADS threads and its share of MEMORY bytes. Of the threads beside the first COMPUTING compute without a
// pause. Of the others every other one waits in read(2) on a pipe, and the rest sleeps for 10 ms and then changes a page. The
// first process accepts CONNECTIONS connections that say nothing, and then the one of the client. When that ends it writes a
// byte to each of the others.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096 };

struct part {
    int pipe;
    unsigned char *memory;
    size_t pages;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *waits(void *argument) {
    struct part *part = argument;
    char byte;
    while (read(part->pipe, &byte, 1) != 0) {
    }
    return 0;
}

static void *changes(void *argument) {
    struct part *part = argument;
    struct timespec pause = {0, 10000000};
    for (size_t turn = 0;; turn++) {
        nanosleep(&pause, 0);
        part->memory[turn % part->pages * PAGE]++;
    }
    return 0;
}

static void *computes(void *argument) {
    volatile uint64_t *result = argument;
    for (uint64_t word = 1;;) {
        for (int turn = 0; turn < 1000000; turn++)
            word = word * 6364136223846793005 + 1442695040888963407;
        *result = word;
    }
}

static void begin_threads(size_t threads, size_t bytes, size_t computing) {
    int pipes[2];
    if (pipe(pipes) != 0)
        fail("pipe");
    unsigned char *memory = malloc(bytes);
    if (!memory)
        fail("memory");
    // Words that no two pages share.
    for (size_t at = 0; at + sizeof at <= bytes; at += sizeof at)
        memcpy(memory + at, &(uint64_t){(at + 1) * 0x9e3779b97f4a7c15}, sizeof at);
    size_t pages = bytes / PAGE / threads;
    for (size_t thread = 1; thread < threads; thread++) {
        struct part *part = malloc(sizeof *part);
        pthread_t unused;
        if (!part)
            fail("memory");
        *part = (struct part){pipes[0], memory + thread * pages * PAGE, pages};
        void *(*work)(void *) = thread <= computing ? computes : thread % 2 ? changes : waits;
        if (pthread_create(&unused, 0, work, thread <= computing ? (void *)part->memory : part) != 0)
            fail("a thread");
    }
}

// The further processes: each has its threads, and waits for good.
static void begin_processes(size_t processes, size_t threads, size_t bytes) {
    for (size_t process = 1; process < processes; process++) {
        pid_t child = fork();
        if (child < 0)
            fail("a process");
        if (child == 0) {
            begin_threads(threads, bytes, 0);
            for (;;)
                pause();
        }
    }
}

int main(int argc, char **argv) {
    if (argc != 4 && argc != 7)
        return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    size_t threads = strtoul(argv[2], 0, 10), processes = argc == 7 ? strtoul(argv[4], 0, 10) : 1;
    size_t connections = argc == 7 ? strtoul(argv[5], 0, 10) : 0, computing = argc == 7 ? strtoul(argv[6], 0, 10) : 0;
    int *idle = calloc(connections + 1, sizeof *idle);
    if (threads == 0 || processes == 0 || !idle)
        return 2;
    size_t bytes = strtoul(argv[3], 0, 10) / processes;
    begin_processes(processes, threads, bytes);
    begin_threads(threads, bytes, computing);
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 1024) != 0)
        fail("socket");
    for (size_t connection = 0; connection < connections; connection++)
        if ((idle[connection] = accept(listener, 0, 0)) < 0)
            fail("accept");
    int client = accept(listener, 0, 0);
    if (client < 0 || setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
        fail("accept");
    for (uint64_t sum = 0, word; recv(client, &word, sizeof word, MSG_WAITALL) == sizeof word;) {
        sum += word;
        if (send(client, &sum, sizeof sum, 0) != sizeof sum)
            fail("send");
    }
    for (size_t connection = 0; connection < connections; connection++)
        if (send(idle[connection], "", 1, 0) != 1)
            fail("send");
    // The client closes them when it has read that.
    for (size_t connection = 0; connection < connections; connection++)
        recv(idle[connection], &on, 1, 0);
    return 0;
}
