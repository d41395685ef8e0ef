/* The kernel interface where sets differ: numbers, flags and layouts mean the same to the program. */
#define _GNU_SOURCE
#include "check.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/sem.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

extern char **environ;
static char directory[] = "/tmp/godwit-kernel-XXXXXX";

static const char *in(const char *name)
{
    static char path[4][100];
    static int next;

    next = (next + 1) % 4;
    snprintf(path[next], sizeof path[next], "%s/%s", directory, name);
    return path[next];
}

static void files(void)
{
    struct { uint64_t flags, mode, resolve; } how = {.flags = O_RDONLY | O_DIRECTORY};
    struct stat status, other;
    int file;

    CHECK((file = open(in("file"), O_CREAT | O_EXCL | O_RDWR, 0600)) >= 0 && write(file, "0123456789", 10) == 10);
    CHECK(!symlink("file", in("link")) && !link(in("file"), in("second")));
    CHECK(open(in("file"), O_RDONLY | O_DIRECTORY) == -1 && errno == ENOTDIR);
    CHECK(open(in("link"), O_RDONLY | O_NOFOLLOW) == -1 && errno == ELOOP);
    CHECK(close(open(in("link"), O_RDONLY)) == 0 && close(open(directory, O_RDONLY | O_DIRECTORY)) == 0);
    /* qemu's user mode has no openat2. */
    if (syscall(SYS_openat2, -1, "", 0, 0) == -1 && errno != ENOSYS) {
        CHECK(close((int)syscall(SYS_openat2, AT_FDCWD, directory, &how, sizeof how)) == 0);
        CHECK(syscall(SYS_openat2, AT_FDCWD, in("file"), &how, sizeof how) == -1 && errno == ENOTDIR);
    }
    CHECK(fcntl(file, F_GETFL) % 4 == O_RDWR && !fcntl(file, F_SETFL, O_APPEND) && fcntl(file, F_GETFL) & O_APPEND);
    /* Not O_NOFOLLOW: qemu 8.2 leaves x86-64's O_LARGEFILE in there, which is the same bit. */
    CHECK(!(fcntl(file, F_GETFL) & (O_DIRECTORY | O_DIRECT)));
    int temporary = open(directory, O_TMPFILE | O_RDWR, 0600);
    CHECK(temporary >= 0 || errno == EOPNOTSUPP);

    CHECK(!fstat(file, &status) && status.st_size == 10 && status.st_nlink == 2 && status.st_mode == (S_IFREG | 0600));
    CHECK(status.st_uid == getuid() && status.st_gid == getgid() && status.st_blksize >= 512 && status.st_rdev == 0);
    CHECK(!lstat(in("link"), &other) && S_ISLNK(other.st_mode) && other.st_size == 4 && other.st_ino != status.st_ino);
    CHECK(!stat(in("second"), &other) && other.st_ino == status.st_ino && other.st_dev == status.st_dev);
    struct timespec times[2] = {{100, 1}, {200, 2}};
    CHECK(!futimens(file, times) && !fstat(file, &other));
    CHECK(other.st_atim.tv_sec == 100 && other.st_atim.tv_nsec == 1 && other.st_mtim.tv_sec == 200 && other.st_mtim.tv_nsec == 2);
    CHECK(!stat("/dev/null", &other) && S_ISCHR(other.st_mode) && other.st_rdev == 0x103);
    CHECK(stat(in("nothing"), &other) == -1 && errno == ENOENT);
    CHECK(!fstatat(AT_FDCWD, in("link"), &other, AT_SYMLINK_NOFOLLOW) && S_ISLNK(other.st_mode));
    struct statvfs system;
    CHECK(!statvfs(directory, &system) && system.f_bsize >= 512 && system.f_blocks > 0 && system.f_namemax >= 255);

    DIR *list = opendir(directory);
    int names = 0;
    for (struct dirent *entry; list && (entry = readdir(list));)
        names += !strcmp(entry->d_name, "file") + !strcmp(entry->d_name, "link") + !strcmp(entry->d_name, "second");
    CHECK(names == 3 && !closedir(list));

    char first[4], second[6];
    CHECK(preadv(file, (struct iovec[]){{first, 4}, {second, 6}}, 2, 0) == 10 && !memcmp(second, "456789", 6));
    struct flock lock = {.l_type = F_WRLCK, .l_len = 5};
    CHECK(!fcntl(file, F_SETLK, &lock));
    pid_t child = fork();
    if (!child) {
        struct flock seen = {.l_type = F_WRLCK, .l_len = 5};
        _exit(fcntl(file, F_GETLK, &seen) || seen.l_type != F_WRLCK || seen.l_pid != getppid() || seen.l_len != 5);
    }
    int result;
    CHECK(waitpid(child, &result, 0) == child && result == 0);
    close(file);
}

static void events(void)
{
    int ends[2], poll_descriptor = epoll_create1(EPOLL_CLOEXEC), event_descriptor = eventfd(0, EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLOUT, .data.u64 = 0x1122334455667788}, found[5] = {0};
    sigset_t set;

    CHECK(!pipe2(ends, O_DIRECT | O_CLOEXEC | O_NONBLOCK) && fcntl(ends[1], F_GETFL) & O_DIRECT);
    CHECK(fcntl(ends[0], F_GETFD) == FD_CLOEXEC && fcntl(ends[1], F_GETFL) & O_NONBLOCK);
    CHECK(!epoll_ctl(poll_descriptor, EPOLL_CTL_ADD, ends[1], &event));
    event = (struct epoll_event){.events = EPOLLOUT | EPOLLET, .data.u64 = UINT64_MAX};
    CHECK(!epoll_ctl(poll_descriptor, EPOLL_CTL_ADD, event_descriptor, &event));
    event = (struct epoll_event){.events = EPOLLIN, .data.ptr = &event};
    CHECK(!epoll_ctl(poll_descriptor, EPOLL_CTL_ADD, ends[0], &event) && write(ends[1], "x", 1) == 1);
    CHECK(epoll_wait(poll_descriptor, found, 5, 0) == 3);
    int known = 0;
    for (int i = 0; i < 3; i++)
        known += (found[i].data.u64 == 0x1122334455667788 && found[i].events == EPOLLOUT)
                 + 10 * (found[i].data.u64 == UINT64_MAX && found[i].events == EPOLLOUT)
                 + 100 * (found[i].data.ptr == &event && found[i].events == EPOLLIN);
    CHECK(known == 111 && found[3].events == 0);
    CHECK(!epoll_ctl(poll_descriptor, EPOLL_CTL_DEL, ends[0], 0));
    CHECK(epoll_ctl(poll_descriptor, EPOLL_CTL_DEL, ends[0], 0) == -1 && errno == ENOENT);

    uint64_t number = 5;
    CHECK(write(event_descriptor, &number, 8) == 8 && read(event_descriptor, &number, 8) == 8 && number == 5);
    struct pollfd polled = {.fd = ends[0], .events = POLLIN};
    CHECK(poll(&polled, 1, 0) == 1 && polled.revents == POLLIN);
    fd_set reading;
    FD_ZERO(&reading);
    FD_SET(ends[0], &reading);
    CHECK(select(ends[0] + 1, &reading, 0, 0, &(struct timeval){0}) == 1 && FD_ISSET(ends[0], &reading));
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    struct signalfd_siginfo information;
    int signal_descriptor = (sigprocmask(SIG_BLOCK, &set, 0), signalfd(-1, &set, SFD_CLOEXEC));
    CHECK(!raise(SIGUSR1) && read(signal_descriptor, &information, sizeof information) == sizeof information);
    CHECK(information.ssi_signo == SIGUSR1);
    int timer = timerfd_create(CLOCK_MONOTONIC, 0);
    CHECK(!timerfd_settime(timer, 0, &(struct itimerspec){.it_value.tv_nsec = 1000}, 0) && read(timer, &number, 8) == 8 && number == 1);
    int watch = inotify_init1(IN_NONBLOCK);
    CHECK(inotify_add_watch(watch, directory, IN_CREATE) == 1 && close(creat(in("new"), 0600)) == 0);
    char buffer[200];
    CHECK(read(watch, buffer, sizeof buffer) > 0 && !strcmp(((struct inotify_event *)buffer)->name, "new"));
}

static void sockets(void)
{
    int pair[2], sent = 77, received = -1, yes = 1, options = 0;
    socklen_t length = sizeof options;
    char control[CMSG_SPACE(sizeof(int))] = {0}, byte = 'b';
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};

    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    CHECK(fcntl(pair[0], F_GETFL) & O_NONBLOCK);
    CHECK(!setsockopt(pair[0], SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes));
    CHECK(!getsockopt(pair[0], SOL_SOCKET, SO_KEEPALIVE, &options, &length) && options == 1);
    struct timeval wait = {.tv_usec = 1000};
    CHECK(!setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &wait, sizeof wait));
    int pipe_ends[2];
    CHECK(!pipe(pipe_ends) && write(pipe_ends[1], &sent, sizeof sent) == sizeof sent);
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    *header = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(header), &pipe_ends[0], sizeof(int));
    CHECK(sendmsg(pair[0], &message, 0) == 1);
    memset(control, 0, sizeof control);
    CHECK(recvmsg(pair[1], &message, 0) == 1 && (header = CMSG_FIRSTHDR(&message)));
    int descriptor;
    memcpy(&descriptor, CMSG_DATA(header), sizeof descriptor);
    CHECK(read(descriptor, &received, sizeof received) == sizeof received && received == sent);
    struct ucred credentials;
    length = sizeof credentials;
    CHECK(!getsockopt(pair[0], SOL_SOCKET, SO_PEERCRED, &credentials, &length) && credentials.pid == getpid());
    int waiting;
    CHECK(write(pair[0], "abc", 3) == 3 && !ioctl(pair[1], FIONREAD, &waiting) && waiting == 3);
}

static void processes(void)
{
    char *arguments[] = {"sh", "-c", "exit $((40 + 2))", 0};
    posix_spawn_file_actions_t actions;
    pid_t child;
    int status;

    posix_spawn_file_actions_init(&actions);
    CHECK(!posix_spawnp(&child, "sh", &actions, 0, arguments, environ));
    CHECK(waitpid(child, &status, 0) == child && WEXITSTATUS(status) == 42);
    CHECK(posix_spawn(&child, "/nowhere/at/all", 0, 0, arguments, environ) == ENOENT);
    child = vfork();
    if (!child) {
        execl("/bin/sh", "sh", "-c", "exit 7", (char *)0);
        _exit(1);
    }
    siginfo_t information;
    CHECK(!waitid(P_PID, (id_t)child, &information, WEXITED) && information.si_status == 7 && information.si_code == CLD_EXITED);
    struct rusage usage;
    struct rlimit limit;
    CHECK(!getrusage(RUSAGE_CHILDREN, &usage) && !getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur >= 64);
    struct utsname names;
    CHECK(!uname(&names) && !strcmp(names.sysname, "Linux") && getauxval(AT_PAGESZ) == 4096);
    struct termios terminal;
    CHECK(tcgetattr(open("/dev/null", O_RDWR), &terminal) == -1 && errno == ENOTTY);
}

static void semaphores(void)
{
    int set = semget(IPC_PRIVATE, 3, 0600);
    struct semid_ds description;
    union { int value; struct semid_ds *description; unsigned short *array; } argument = {.value = 5};

    CHECK(set >= 0 && !semctl(set, 1, SETVAL, argument) && semctl(set, 1, GETVAL) == 5);
    CHECK(!semop(set, &(struct sembuf){1, -2, 0}, 1) && semctl(set, 1, GETVAL) == 3);
    argument.description = &description;
    CHECK(!semctl(set, 0, IPC_STAT, argument) && description.sem_nsems == 3 && description.sem_perm.mode == 0600);
    CHECK(description.sem_ctime > 1600000000 && description.sem_otime > 1600000000);
    description.sem_perm.mode = 0400;
    CHECK(!semctl(set, 0, IPC_SET, argument) && !semctl(set, 0, IPC_STAT, argument) && description.sem_perm.mode == 0400);
    CHECK(!semctl(set, 0, IPC_RMID));
}

static void refused(void)
{
    CHECK(mmap(0, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANON, -1, 0) == MAP_FAILED && errno == EACCES);
    char *memory = mmap(0, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANON, -1, 0);
    CHECK(memory != MAP_FAILED && mprotect(memory, 4096, PROT_READ | PROT_EXEC) == -1 && errno == EACCES);
    CHECK(!mprotect(memory, 4096, PROT_READ) && !munmap(memory, 8192));
    CHECK(prctl(PR_SET_SECCOMP, 1) == -1 && errno == EINVAL);
    for (const int *number = (const int[]){SYS_ptrace, SYS_seccomp, SYS_io_uring_setup, 435, 139, 9999, -1, 0}; *number; number++)
        CHECK(syscall(*number, 0, 0, 0, 0, 0, 0) == -1 && errno == ENOSYS);
    CHECK(!prctl(PR_SET_NAME, "neutral") && syscall(SYS_getpid) == getpid());
}

int main(void)
{
    CHECK(mkdtemp(directory));
    files();
    events();
    sockets();
    processes();
    semaphores();
    refused();
    CHECK(!unlink(in("file")) && !unlink(in("link")) && !unlink(in("second")) && !unlink(in("new")) && !rmdir(directory));
    return finish();
}
