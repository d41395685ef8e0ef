/* A service that cannot move while one of its processes has what it is told to have: a TCP server on a port.
 *
 *     obstacles PORT
 *
 * Each line is the name of something that CRIU cannot dump. A child process makes it and keeps it, and the answer is
 * "done", or "fails" and why. "end" ends the child and all that it has, and is answered when nothing of it is left. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/netlink.h>
#include <linux/perf_event.h>
#include <linux/rtnetlink.h>
#include <linux/seccomp.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define QUEUE "/held"
#define SOCKET "/waiting"
#define LARGE (257L << 20)
#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x80
#endif

/* The child tells its parent by this pipe. */
static int told;

static void tell(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vdprintf(told, format, arguments);
	va_end(arguments);
}

static void must(long result)
{
	if (result == -1) {
		tell("fails: %s", strerror(errno));
		_exit(1);
	}
}

static void keep(void)
{
	tell("done");
	for (;;)
		pause();
}

static int uring(struct io_uring_params *parameters)
{
	int ring = syscall(SYS_io_uring_setup, 4, parameters);

	must(ring);
	return ring;
}

static void io_uring(void)
{
	struct io_uring_params parameters = { 0 };

	uring(&parameters);
	keep();
}

static void io_uring_mapped(void)
{
	struct io_uring_params parameters = { 0 };
	int ring = uring(&parameters);
	size_t size = parameters.sq_off.array + parameters.sq_entries * sizeof(unsigned);

	must((long)mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING));
	close(ring);
	keep();
}

static void queue_open(void)
{
	must(mq_open(QUEUE, O_CREAT | O_RDWR, 0600, NULL));
	keep();
}

static void queue_closed(void)
{
	mqd_t queue = mq_open(QUEUE, O_CREAT | O_RDWR, 0600, NULL);

	must(queue);
	must(mq_close(queue));
	keep();
}

static void perf(void)
{
	struct perf_event_attr attributes = { .type = PERF_TYPE_SOFTWARE, .size = sizeof(attributes) };

	must(syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0));
	keep();
}

static void bpf(void)
{
	struct bpf_insn program[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = 0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr load = {
		.prog_type = BPF_PROG_TYPE_SOCKET_FILTER,
		.insns = (unsigned long)program,
		.insn_cnt = 2,
		.license = (unsigned long)"GPL",
	};

	must(syscall(SYS_bpf, BPF_PROG_LOAD, &load, sizeof(load)));
	keep();
}

static void userfaultfd(void)
{
	/* UFFD_USER_MODE_ONLY */
	must(syscall(SYS_userfaultfd, 1));
	keep();
}

static void notified(void)
{
	struct sock_filter all[] = { BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW) };
	struct sock_fprog filter = { .len = 1, .filter = all };

	must(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
	must(syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_NEW_LISTENER, &filter));
	keep();
}

static void filesystem(void)
{
	/* fsopen(2) */
	must(syscall(430, "tmpfs", 0));
	keep();
}

static void mptcp(void)
{
	must(socket(AF_INET, SOCK_STREAM, 262));
	keep();
}

static void vsock(void)
{
	must(socket(40, SOCK_STREAM, 0));
	keep();
}

static void xdp(void)
{
	must(socket(44, SOCK_RAW, 0));
	keep();
}

static void corked(void)
{
	int on = 1, connection = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9) };

	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	must(connect(connection, (struct sockaddr *)&to, sizeof(to)));
	must(setsockopt(connection, IPPROTO_UDP, 1 /* UDP_CORK */, &on, sizeof(on)));
	must(send(connection, "held back", 9, 0));
	keep();
}

static void unix_waits(int closed)
{
	struct sockaddr_un name = { .sun_family = AF_UNIX, .sun_path = SOCKET };
	int listener = socket(AF_UNIX, SOCK_STREAM, 0), client = socket(AF_UNIX, SOCK_STREAM, 0);

	unlink(SOCKET);
	must(bind(listener, (struct sockaddr *)&name, sizeof(name)));
	must(listen(listener, 8));
	must(connect(client, (struct sockaddr *)&name, sizeof(name)));
	must(closed ? close(client) : send(client, "not read", 8, 0));
	keep();
}

static void unix_data(void)
{
	unix_waits(0);
}

static void unix_closed(void)
{
	unix_waits(1);
}

static void pidfd_of_thread(void)
{
	/* PIDFD_THREAD */
	must(syscall(SYS_pidfd_open, getpid(), O_EXCL));
	keep();
}

static void deleted(void)
{
	int file = open("/large", O_CREAT | O_RDWR, 0600);

	must(file);
	must(posix_fallocate(file, 0, LARGE) ? -1 : 0);
	must(unlink("/large"));
	keep();
}

static void device(mode_t kind, dev_t number)
{
	unlink("/device");
	must(mknod("/device", kind | 0600, number));
	must(open("/device", O_PATH));
	keep();
}

static void character_device(void)
{
	device(S_IFCHR, makedev(10, 229));
}

static void graphics(void)
{
	device(S_IFCHR, makedev(226, 128));
}

static void block_device(void)
{
	device(S_IFBLK, makedev(7, 0));
}

static void traced(void)
{
	pid_t child = fork();

	must(child);
	if (!child)
		for (;;)
			pause();
	must(ptrace(PTRACE_SEIZE, child, 0, 0));
	keep();
}

/* The main thread has ended when it is a zombie. */
static void *keep_on(void *nothing)
{
	char path[64], text[512];

	snprintf(path, sizeof(path), "/proc/self/task/%d/stat", getpid());
	do {
		int file = open(path, O_RDONLY);
		must(file);
		ssize_t length = read(file, text, sizeof(text) - 1);
		must(length);
		text[length] = 0;
		close(file);
		sched_yield();
	} while (!strstr(text, ") Z "));
	keep();
	return nothing;
}

static void headless(void)
{
	pthread_t other;

	must(pthread_create(&other, NULL, keep_on, NULL) ? -1 : 0);
	pthread_exit(NULL);
}

static void leaderless(void)
{
	int leader_ended[2];
	char nothing;

	must(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0));
	must(pipe(leader_ended));
	pid_t leader = fork();
	must(leader);
	if (!leader) {
		must(setsid());
		if (!fork()) {
			close(leader_ended[0]);
			for (;;)
				pause();
		}
		_exit(0);
	}
	must(waitpid(leader, NULL, 0));
	(void)nothing;
	keep();
}

static void trap(void)
{
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGTRAP);
	must(sigprocmask(SIG_BLOCK, &set, NULL));
	must(raise(SIGTRAP) ? -1 : 0);
	keep();
}

static void namespace(int flag)
{
	must(unshare(flag));
	if (flag == CLONE_NEWPID || flag == CLONE_NEWTIME) {
		/* It is for children. */
		pid_t child = fork();
		must(child);
		if (child)
			for (;;)
				pause();
	}
	keep();
}

static void user_namespace(void)
{
	namespace(CLONE_NEWUSER);
}

static void pid_namespace(void)
{
	namespace(CLONE_NEWPID);
}

static void ipc_namespace(void)
{
	namespace(CLONE_NEWIPC);
}

static void uts_namespace(void)
{
	namespace(CLONE_NEWUTS);
}

static void time_namespace(void)
{
	namespace(CLONE_NEWTIME);
}

static void cgroup_namespace(void)
{
	namespace(CLONE_NEWCGROUP);
}

static void epoll_elsewhere(void)
{
	int epoll = epoll_create1(0), pipes[2];
	struct epoll_event event = { .events = EPOLLIN };

	must(pipe(pipes));
	must(epoll_ctl(epoll, EPOLL_CTL_ADD, pipes[0], &event));
	pid_t child = fork();
	must(child);
	if (!child)
		for (;;)
			pause();
	close(pipes[0]);
	keep();
}

static int netlink_socket(void)
{
	int connection = socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE);

	must(connection);
	return connection;
}

static int bound_netlink_socket(void)
{
	struct sockaddr_nl name = { .nl_family = AF_NETLINK };
	int connection = netlink_socket();

	must(bind(connection, (struct sockaddr *)&name, sizeof(name)));
	return connection;
}

static void listen_to(int connection, int group)
{
	must(setsockopt(connection, SOL_NETLINK, NETLINK_ADD_MEMBERSHIP, &group, sizeof(group)));
	keep();
}

static void netlink_unread(void)
{
	int connection = bound_netlink_socket();
	struct {
		struct nlmsghdr head;
		struct rtgenmsg body;
	} question = {
		.head = { sizeof(question), RTM_GETLINK, NLM_F_REQUEST | NLM_F_DUMP, 1, 0 },
		.body = { AF_UNSPEC },
	};

	/* The answer is there when the call returns. */
	must(send(connection, &question, sizeof(question), 0));
	keep();
}

static void netlink_groups(void)
{
	listen_to(bound_netlink_socket(), 33);
}

static void netlink_no_port(void)
{
	listen_to(netlink_socket(), 1);
}

static void packets(void)
{
	int pipes[2];

	must(pipe2(pipes, O_DIRECT));
	keep();
}

static void vdso(void)
{
	unsigned long from = 0, to = 0;
	char line[512];
	FILE *maps = fopen("/proc/self/maps", "r");

	while (maps && fgets(line, sizeof(line), maps) && !(strstr(line, "[vdso]") && sscanf(line, "%lx-%lx", &from, &to) == 2))
		;
	fclose(maps);
	must(munmap((void *)from, to - from));
	keep();
}

static void fifo_name(void)
{
	unlink("/device");
	must(mkfifo("/device", 0600));
	must(open("/device", O_PATH));
	keep();
}

static void socket_name(void)
{
	unlink("/device");
	must(mknod("/device", S_IFSOCK | 0600, 0));
	must(open("/device", O_PATH));
	keep();
}

static void nameless_terminal(void)
{
	int master = posix_openpt(O_RDWR | O_NOCTTY);

	must(master);
	must(grantpt(master));
	must(unlockpt(master));
	pid_t child = fork();
	must(child);
	if (child)
		for (;;)
			pause();
	must(setsid());
	int slave = open(ptsname(master), O_RDWR);
	must(slave);
	must(open("/dev/tty", O_RDWR));
	close(slave);
	close(master);
	keep();
}

static int secret(void)
{
	int memory = syscall(447 /* memfd_secret(2) */, 0);

	must(memory);
	must(ftruncate(memory, 4096));
	return memory;
}

static void secret_open(void)
{
	secret();
	keep();
}

static void secret_mapped(void)
{
	int memory = secret();

	must((long)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0));
	close(memory);
	keep();
}

/* This one moves, as the limit is raised meanwhile. */
static void no_room(void)
{
	long pages;
	FILE *file = fopen("/proc/self/statm", "r");

	must(file && fscanf(file, "%ld", &pages) == 1 ? 0 : -1);
	fclose(file);
	struct rlimit limit = { pages * sysconf(_SC_PAGESIZE), RLIM_INFINITY };
	must(setrlimit(RLIMIT_AS, &limit));
	keep();
}

static const struct {
	const char *name;
	void (*make)(void);
} all[] = {
	{ "io_uring", io_uring },
	{ "io_uring mapped", io_uring_mapped },
	{ "queue open", queue_open },
	{ "queue closed", queue_closed },
	{ "perf", perf },
	{ "bpf", bpf },
	{ "userfaultfd", userfaultfd },
	{ "seccomp notify", notified },
	{ "fscontext", filesystem },
	{ "mptcp", mptcp },
	{ "vsock", vsock },
	{ "xdp", xdp },
	{ "corked", corked },
	{ "unix data", unix_data },
	{ "unix closed", unix_closed },
	{ "pidfd of a thread", pidfd_of_thread },
	{ "deleted", deleted },
	{ "character device", character_device },
	{ "graphics", graphics },
	{ "block device", block_device },
	{ "traced", traced },
	{ "headless", headless },
	{ "leaderless", leaderless },
	{ "trap", trap },
	{ "user namespace", user_namespace },
	{ "PID namespace", pid_namespace },
	{ "IPC namespace", ipc_namespace },
	{ "UTS namespace", uts_namespace },
	{ "time namespace", time_namespace },
	{ "cgroup namespace", cgroup_namespace },
	{ "epoll of another's file", epoll_elsewhere },
	{ "netlink unread", netlink_unread },
	{ "netlink groups", netlink_groups },
	{ "netlink without a port", netlink_no_port },
	{ "packets", packets },
	{ "no vDSO", vdso },
	{ "name of a FIFO", fifo_name },
	{ "name of a socket", socket_name },
	{ "nameless terminal", nameless_terminal },
	{ "secret memory", secret_open },
	{ "secret memory mapped", secret_mapped },
	{ "no room", no_room },
};

/* The child that makes it, and what it says. */
static void make(const char *name, char *answer, size_t size)
{
	int pipes[2];
	size_t at;

	for (at = 0; at < sizeof(all) / sizeof(*all) && strcmp(all[at].name, name); at++)
		;
	if (at == sizeof(all) / sizeof(*all) || pipe(pipes)) {
		snprintf(answer, size, "fails: nothing is called %s", name);
		return;
	}
	if (!fork()) {
		close(pipes[0]);
		told = pipes[1];
		all[at].make();
		_exit(1);
	}
	close(pipes[1]);
	ssize_t length = read(pipes[0], answer, size - 1);
	answer[length < 0 ? 0 : length] = 0;
	close(pipes[0]);
}

/* Of all processes but this one nothing is left, as it is the first one of its PID namespace. */
static void end(void)
{
	kill(-1, SIGKILL);
	while (waitpid(-1, NULL, 0) > 0)
		;
	mq_unlink(QUEUE);
	unlink("/device");
	unlink(SOCKET);
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	char line[64], answer[200];
	int on = 1;

	if (count != 2)
		return 2;
	address.sin_port = htons(atoi(arguments[1]));
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || listen(server, 8))
		return 1;
	FILE *client = fdopen(accept(server, NULL, NULL), "r+");
	while (client && fgets(line, sizeof(line), client)) {
		line[strcspn(line, "\n")] = 0;
		strcpy(answer, "done");
		if (strcmp(line, "end"))
			make(line, answer, sizeof(answer));
		else
			end();
		fflush(client);
		fprintf(client, "%s\n", answer);
		fflush(client);
	}
	return 0;
}
