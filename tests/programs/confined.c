// confined: tells what a container sees of its confinement, at each connection to TCP port 7004; with --once a
// part of it on standard output.
//
// Its main process tells it, not a command that the engine would start anew beside it. The answer is lines
// "KEY: VALUE", in an order that depends on nothing that may change: what the kernel shows of the process,
// its limits and mounts, device nodes, what becomes of an access to each path given as an argument, and what
// becomes of system calls that a container should not make.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PORT = 7004 };

static int out;

static void fail(const char *what)
{
	perror(what);
	exit(1);
}

static void tell(const char *format, ...)
{
	va_list arguments;
	va_start(arguments, format);
	if (vdprintf(out, format, arguments) < 0)
		fail("telling");
	va_end(arguments);
}

static const char *outcome(long result)
{
	return result < 0 ? strerrorname_np(errno) : "done";
}

// A file of the kernel's, line by line.
static void file(const char *path)
{
	char line[4096];
	FILE *opened = fopen(path, "re");
	if (!opened) {
		tell("%s: %s\n", path, strerrorname_np(errno));
		return;
	}
	while (fgets(line, sizeof line, opened))
		tell("%s: %s%s", path, line, strchr(line, '\n') ? "" : "\n");
	fclose(opened);
}

static int by_name(const struct dirent **one, const struct dirent **other)
{
	return strcmp((*one)->d_name, (*other)->d_name);
}

// Every node below a directory.
static void nodes(const char *directory)
{
	struct dirent **entries;
	int count = scandir(directory, &entries, NULL, by_name);
	for (int i = 0; i < count; i++) {
		char path[4096], target[256] = "";
		struct stat status;
		if (strcmp(entries[i]->d_name, ".") == 0 || strcmp(entries[i]->d_name, "..") == 0)
			continue;
		if (snprintf(path, sizeof path, "%s/%s", directory, entries[i]->d_name) >= (int)sizeof path || lstat(path, &status) < 0)
			fail(entries[i]->d_name);
		if (S_ISLNK(status.st_mode) && readlink(path, target, sizeof target - 1) < 0)
			fail(path);
		tell("node %s: mode %o owner %u:%u device %u:%u %s\n", path, status.st_mode, status.st_uid, status.st_gid,
		     major(status.st_rdev), minor(status.st_rdev), target);
		if (S_ISDIR(status.st_mode))
			nodes(path);
		free(entries[i]);
	}
	if (count >= 0)
		free(entries);
}

// What becomes of reading, writing and changing a path that is not for containers.
static void path(const char *path)
{
	char byte;
	struct stat status;
	if (lstat(path, &status) < 0) {
		tell("path %s: %s\n", path, strerrorname_np(errno));
		return;
	}
	tell("path %s: mode %o device %u:%u\n", path, status.st_mode, major(status.st_rdev), minor(status.st_rdev));
	if (S_ISDIR(status.st_mode)) {
		struct dirent **entries;
		int count = scandir(path, &entries, NULL, by_name);
		tell("path %s: %s\n", path, count == 2 ? "empty" : "entries");
	} else {
		int opened = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
		tell("path %s: open for reading %s\n", path, outcome(opened));
		if (opened >= 0) {
			tell("path %s: read %s\n", path, read(opened, &byte, 1) == 1 ? "something" : "nothing");
			close(opened);
		}
		opened = open(path, O_WRONLY | O_CLOEXEC | O_NONBLOCK);
		tell("path %s: open for writing %s\n", path, outcome(opened));
		if (opened >= 0)
			close(opened);
	}
	// To what they are, so that nothing changes but the time of the change.
	tell("path %s: chmod %s\n", path, outcome(chmod(path, status.st_mode & 07777)));
	tell("path %s: chown %s\n", path, outcome(chown(path, status.st_uid, status.st_gid)));
}

struct call {
	const char *name;
	long number, arguments[5];
};

// System calls that a container may be denied, each in a process of its own. The arguments are such that a
// call which is let through changes nothing outside of that process.
static void calls(void)
{
	const struct call calls[] = {
		{"unshare(CLONE_NEWUSER)", SYS_unshare, {CLONE_NEWUSER}},
		{"unshare(CLONE_NEWNS)", SYS_unshare, {CLONE_NEWNS}},
		{"mount", SYS_mount, {(long)"none", (long)"/tmp", (long)"tmpfs", 0, 0}},
		{"umount2", SYS_umount2, {(long)"/nowhere", 0}},
		{"pivot_root", SYS_pivot_root, {(long)"/nowhere", (long)"/nowhere"}},
		{"keyctl", SYS_keyctl, {0, -3, 0, 0, 0}},
		{"add_key", SYS_add_key, {0, 0, 0, 0, 0}},
		{"request_key", SYS_request_key, {0, 0, 0, 0, 0}},
		{"bpf", SYS_bpf, {0, 0, 0}},
		{"perf_event_open", SYS_perf_event_open, {0, 0, -1, -1, 0}},
		{"userfaultfd", SYS_userfaultfd, {O_CLOEXEC}},
		{"io_uring_setup", SYS_io_uring_setup, {0, 0}},
		{"landlock_create_ruleset", SYS_landlock_create_ruleset, {0, 0, 1}},
		{"init_module", SYS_init_module, {0, 0, 0}},
		{"kexec_load", SYS_kexec_load, {0, 0, 0, 0}},
		{"reboot", SYS_reboot, {0, 0, 0, 0}},
		{"swapon", SYS_swapon, {(long)"/nowhere", 0}},
		{"settimeofday", SYS_settimeofday, {0, 1}},
		{"open_by_handle_at", SYS_open_by_handle_at, {-1, 0, 0}},
		{"syslog", SYS_syslog, {10, 0, 0}},
		{"sethostname", SYS_sethostname, {(long)"", -1}},
		{"chroot", SYS_chroot, {(long)"/"}},
		{"process_vm_readv", SYS_process_vm_readv, {1, 0, 0, 0, 0}},
		{"ptrace", SYS_ptrace, {0x4206, 99999, 0, 0}},
		{"acct", SYS_acct, {(long)"/nowhere"}},
		{"quotactl", SYS_quotactl, {0, 0, 0, 0}},
		{"socket(AF_VSOCK)", SYS_socket, {AF_VSOCK, SOCK_STREAM, 0}},
		{"socket(AF_PACKET)", SYS_socket, {AF_PACKET, SOCK_RAW, 0}},
		{"socket(AF_NETLINK, NETLINK_AUDIT)", SYS_socket, {AF_NETLINK, SOCK_RAW, 9}},
		{"personality(ADDR_NO_RANDOMIZE)", SYS_personality, {0x0040000}},
		{"an unknown system call", 4242, {0}},
	};
	for (size_t i = 0; i < sizeof calls / sizeof *calls; i++) {
		int status;
		pid_t child = fork();
		if (child < 0)
			fail("fork");
		if (child == 0) {
			const long *a = calls[i].arguments;
			tell("call %s: %s\n", calls[i].name, outcome(syscall(calls[i].number, a[0], a[1], a[2], a[3], a[4])));
			_exit(0);
		}
		if (waitpid(child, &status, 0) != child)
			fail("waitpid");
		if (status != 0)
			tell("call %s: ended by status %d\n", calls[i].name, status);
	}
}

static void process(void)
{
	int value;
	struct utsname name;
	struct sched_param param;
	mode_t mask = umask(0);
	umask(mask);
	tell("umask: %o\n", mask);
	tell("securebits: %d\n", prctl(PR_GET_SECUREBITS));
	tell("keepcaps: %d\n", prctl(PR_GET_KEEPCAPS));
	tell("dumpable: %d\n", prctl(PR_GET_DUMPABLE));
	tell("no_new_privs: %d\n", prctl(PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0));
	tell("thp disabled: %d\n", prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0));
	tell("subreaper: %d\n", prctl(PR_GET_CHILD_SUBREAPER, &value) == 0 ? value : -1);
	tell("death signal: %d\n", prctl(PR_GET_PDEATHSIG, &value) == 0 ? value : -1);
	tell("timer slack: %d\n", prctl(PR_GET_TIMERSLACK));
	for (int capability = 0; capability <= 63; capability++) {
		int held = prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_IS_SET, capability, 0, 0);
		if (held > 0)
			tell("ambient: %d\n", capability);
	}
	tell("personality: %d\n", personality(0xffffffff));
	tell("nice: %d\n", getpriority(PRIO_PROCESS, 0));
	tell("scheduler: %d %d\n", sched_getscheduler(0), sched_getparam(0, &param) == 0 ? param.sched_priority : -1);
	tell("io priority: %ld\n", syscall(SYS_ioprio_get, 1, 0));
	uname(&name);
	tell("host name: %s %s\n", name.nodename, name.domainname);
}

int main(int argc, char **argv)
{
	if (argc == 2 && strcmp(argv[1], "--once") == 0) {
		out = STDOUT_FILENO;
		process();
		calls();
		return 0;
	}
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
	int on = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
	if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) < 0 || listen(listener, 8) < 0)
		fail("listening");
	for (;;) {
		out = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
		if (out < 0)
			fail("accept");
		file("/proc/self/status");
		file("/proc/self/limits");
		file("/proc/self/mountinfo");
		file("/proc/self/oom_score_adj");
		file("/proc/self/coredump_filter");
		file("/proc/self/loginuid");
		file("/proc/self/attr/current");
		file("/proc/self/uid_map");
		process();
		nodes("/dev");
		for (int i = 1; i < argc; i++)
			path(argv[i]);
		calls();
		tell("end: of the answer\n");
		close(out);
	}
}
