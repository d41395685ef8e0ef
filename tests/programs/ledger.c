// A service of two processes and five threads that keeps sums, for moves to executables of another instruction set: each
// number that a client sends goes over a socket to the child, which adds it to the client's sum and answers. All of it is
// lost or wrong if a value in a register, on a stack, in a variable or in the heap is.
//
//     ledger PORT
//
// A request is one number of 8 bytes, little endian; the answer has four: the client's sum, the machine (1: x86-64, 2: arm64),
// how many processes and helpers have been seen, and a checksum of the child's memory. A request of 0 has the main process
// start a child that ends at once, and wait for it.
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORDS = 1 << 18, MOST = 1024, DEPTH = 8 };

struct question {
    uint64_t client, number;
};

struct answer {
    uint64_t sum, machine, seen, checksum;
};

static volatile sig_atomic_t ticks;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t moved = PTHREAD_COND_INITIALIZER;
static uint64_t turns;
static __thread uint64_t own = 42;

static void fail(const char *what) {
    fprintf(stderr, "ledger: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void on_tick(int signal) {
    (void)signal;
    ticks++;
}

// All of it, whatever arrives at once.
static int get(int from, void *into, size_t wanted) {
    for (size_t done = 0; done < wanted;) {
        ssize_t more = read(from, (char *)into + done, wanted - done);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            return 0;
        done += more;
    }
    return 1;
}

static void put(int to, const void *what, size_t length) {
    for (size_t done = 0; done < length;) {
        ssize_t more = write(to, (const char *)what + done, length - done);
        if (more < 0 && errno == EINTR)
            continue;
        if (more <= 0)
            fail("write");
        done += more;
    }
}

// Calls within calls, each with values of its own.
static double deep(int depth, double value) {
    volatile double here = value * 1.0001;
    if (depth == 0)
        return here;
    double below = deep(depth - 1, here + depth);
    return below + here;
}

static uint64_t machine(void) {
    struct utsname names;
    if (uname(&names) != 0)
        fail("uname");
    return strcmp(names.machine, "x86_64") == 0 ? 1 : 2;
}

// A thread that computes for ever, and one that is woken each millisecond.
static void *compute(void *nothing) {
    for (;;) {
        own = own * 6364136223846793005UL + (uint64_t)deep(DEPTH, own % 1000);
        struct timespec pause = {0, 200000};
        if (own % 8 == 0)
            nanosleep(&pause, 0);
    }
    return nothing;
}

static void *wait_for_turns(void *nothing) {
    pthread_mutex_lock(&lock);
    for (;;) {
        pthread_cond_wait(&moved, &lock);
        turns++;
    }
    return nothing;
}

// The child: sums by client, and memory that each number changes.
static void keep(int socket) {
    static uint64_t sums[MOST];
    uint64_t *heap = calloc(WORDS, sizeof *heap), checksum = 0;
    struct question question;
    pthread_t helper;
    if (!heap || pthread_create(&helper, 0, compute, 0) != 0)
        fail("memory and a thread");
    while (get(socket, &question, sizeof question)) {
        sums[question.client % MOST] += question.number;
        uint64_t *word = &heap[question.number * 4099 % WORDS];
        checksum -= *word;
        *word = *word * 31 + question.number;
        checksum += *word;
        struct answer answer = {sums[question.client % MOST], machine(), 0, checksum};
        put(socket, &answer, sizeof answer);
    }
    exit(0);
}

static int listens(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    int one = 1, socket_ = socket(AF_INET, SOCK_STREAM, 0);
    if (socket_ < 0 || setsockopt(socket_, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one) != 0 ||
        bind(socket_, (struct sockaddr *)&address, sizeof address) != 0 || listen(socket_, 128) != 0)
        fail("listen");
    return socket_;
}

static int starts_child(void) {
    pid_t child = fork();
    if (child == 0)
        _exit(7);
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            fail("waitpid");
    return WIFEXITED(status) && WEXITSTATUS(status) == 7;
}

int main(int count, char **arguments) {
    int port = count > 1 ? atoi(arguments[1]) : 7000, ends[2];
    struct sigaction action = {.sa_handler = on_tick, .sa_flags = SA_RESTART}, ignored = {.sa_handler = SIG_IGN};
    struct itimerval each = {{0, 1000}, {0, 1000}};
    uint64_t seen = 1;
    pthread_t threads[2];
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        fail("socketpair");
    if (fork() == 0) {
        close(ends[0]);
        keep(ends[1]);
    }
    close(ends[1]);
    if (sigaction(SIGPIPE, &ignored, 0) != 0 || sigaction(SIGALRM, &action, 0) != 0 ||
        pthread_create(&threads[0], 0, compute, 0) != 0 || pthread_create(&threads[1], 0, wait_for_turns, 0) != 0 ||
        setitimer(ITIMER_REAL, &each, 0) != 0)
        fail("threads and a timer");
    int events = epoll_create1(EPOLL_CLOEXEC), listening = listens(port);
    struct epoll_event event = {.events = EPOLLIN, .data.u64 = (uint64_t)listening};
    if (events < 0 || epoll_ctl(events, EPOLL_CTL_ADD, listening, &event) != 0)
        fail("epoll");
    for (;;) {
        int ready = epoll_wait(events, &event, 1, -1);
        pthread_cond_signal(&moved);
        if (ready < 0 && errno == EINTR)
            continue;
        if (ready != 1)
            fail("epoll_wait");
        int from = (int)event.data.u64;
        if (from == listening) {
            int one = 1, client = accept(listening, 0, 0);
            if (client < 0)
                continue;
            setsockopt(client, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            event = (struct epoll_event){.events = EPOLLIN, .data.u64 = (uint64_t)client};
            if (epoll_ctl(events, EPOLL_CTL_ADD, client, &event) != 0)
                fail("epoll_ctl");
            continue;
        }
        struct question question = {from, 0};
        struct answer answer;
        if (!get(from, &question.number, sizeof question.number)) {
            close(from);
            continue;
        }
        if (question.number == 0)
            seen += starts_child();
        put(ends[0], &question, sizeof question);
        if (!get(ends[0], &answer, sizeof answer))
            fail("the child");
        answer.seen = seen;
        put(from, &answer, sizeof answer);
    }
}
