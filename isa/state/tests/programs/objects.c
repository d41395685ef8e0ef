// Objects that only the kernel has, in use all the time: a pipe and a socket with bytes on their way, epoll, eventfd,
// timerfd, a file without a name, the process itself. Prints what went wrong, and sums; its status is 5.
#include "library.h"

enum { NR_EVENTFD2 = 19, NR_EPOLL_CREATE1 = 20, NR_EPOLL_CTL = 21, NR_EPOLL_PWAIT = 22, NR_FCNTL = 25 };
enum { NR_FLOCK = 32, NR_UNLINKAT = 35, NR_OPENAT = 56, NR_PIPE2 = 59, NR_READ = 63, NR_WRITE = 64, NR_PREAD64 = 67 };
enum { NR_TIMERFD_CREATE = 85, NR_TIMERFD_SETTIME = 86, NR_GETPID = 172, NR_SOCKETPAIR = 199 };
enum { O_CLOEXEC = 02000000, O_RDWR = 2, O_CREAT = 0100, AT_FDCWD = -100, F_GETFD = 1, ROUNDS = 1000 };

struct event {
    unsigned events, pad;
    unsigned long data;
};

static long call(long nr, long a, long b, long c) { return __gw_syscall(nr, a, b, c, 0, 0, 0); }

static void expect(const char *what, long found, long expected) {
    if (found != expected)
        print("%s: %ld instead of %ld\n", what, found, expected);
}

static long ready(long epoll, long timeout) {
    struct event event = {0};
    long count = __gw_syscall(NR_EPOLL_PWAIT, epoll, (long)&event, 1, timeout, 0, 8);
    return count == 1 ? (long)event.data : -count;
}

int main(int argc, char **argv) {
    int pipe[2], socket[2];
    if (argc < 2)
        return 1;
    long process = call(NR_GETPID, 0, 0, 0);
    expect("pipe", call(NR_PIPE2, (long)pipe, O_CLOEXEC, 0), 0);
    expect("socket", __gw_syscall(NR_SOCKETPAIR, 1, 1, 0, (long)socket, 0, 0), 0);
    long number = call(NR_EVENTFD2, 0, O_CLOEXEC, 0);
    long timer = call(NR_TIMERFD_CREATE, 1, 0, 0);
    long epoll = call(NR_EPOLL_CREATE1, O_CLOEXEC, 0, 0);
    struct event event = {1, 0, 77};
    expect("watch", __gw_syscall(NR_EPOLL_CTL, epoll, 1, socket[1], (long)&event, 0, 0), 0);
    long file = __gw_syscall(NR_OPENAT, AT_FDCWD, (long)argv[1], O_RDWR | O_CREAT | O_CLOEXEC, 0600, 0, 0);
    expect("unlink", call(NR_UNLINKAT, AT_FDCWD, (long)argv[1], 0), 0);
    expect("lock", call(NR_FLOCK, file, 2 | 4, 0), 0);

    unsigned long sum = 0;
    for (int round = 0; round < ROUNDS; round++) {
        long out = round, in = -1;
        expect("nothing to read", ready(epoll, 0), 0);
        expect("write to the pipe", call(NR_WRITE, pipe[1], (long)&out, 8), 8);
        expect("write to the socket", call(NR_WRITE, socket[0], (long)&out, 8), 8);
        expect("write to the eventfd", call(NR_WRITE, number, (long)&(long){round + 1}, 8), 8);
        expect("write to the file", call(NR_WRITE, file, (long)&out, 8), 8);
        // Places for a capture while all this is on its way.
        for (int i = 0; i < 10; i++)
            sum = sum * 31 + (unsigned long)(round ^ i);
        expect("something to read", ready(epoll, -1), 77);
        expect("read from the socket", call(NR_READ, socket[1], (long)&in, 8), 8);
        expect("what the socket had", in, round);
        expect("read from the pipe", call(NR_READ, pipe[0], (long)&in, 8), 8);
        expect("what the pipe had", in, round);
        expect("read from the eventfd", call(NR_READ, number, (long)&in, 8), 8);
        expect("what the eventfd had", in, round + 1);
        expect("read from the file", __gw_syscall(NR_PREAD64, file, (long)&in, 8, 8L * round, 0, 0), 8);
        expect("what the file had", in, round);
        expect("process", call(NR_GETPID, 0, 0, 0), process);
        expect("close on exec", call(NR_FCNTL, pipe[0], F_GETFD, 0), 1);
        expect("stay on exec", call(NR_FCNTL, timer, F_GETFD, 0), 0);
        if (round % 50 == 0) {
            // A wait that is captured, if a request comes in time.
            long times[4] = {0, 0, 0, 2000000};
            expect("set the timer", __gw_syscall(NR_TIMERFD_SETTIME, timer, 0, (long)times, 0, 0, 0), 0);
            expect("read from the timer", call(NR_READ, timer, (long)&in, 8), 8);
            expect("what the timer had", in, 1);
        }
    }
    print("sum %lx\n", sum);
    return 5;
}
