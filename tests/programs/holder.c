/* A service that holds what it is told to: a TCP server on a port.
 *
 *     holder PORT
 *
 * Each line is a word and at most one path: "named DIRECTORY" makes a file without a name, and gives it one
 * there; "open FILE" opens one for appending; "linklocal" connects to itself over a link-local address; "ring" sets up an AIO
 * context; "locked FILE" takes a lock of each kind. Each is answered "done", or "fails" and why. "use" uses what it has, and is answered so, too. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <linux/aio_abi.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define TEXT "of the service"

static int file = -1, client = -1, accepted = -1, listener = -1;
static char name[256], locked[256];
static struct sockaddr_in6 own;
static aio_context_t ring;
static const char *why;

static int fails(const char *what)
{
	why = what;
	return -1;
}

/* As databases and package managers write a file that nobody is to see before it is whole. */
static int named(const char *directory)
{
	char path[64];

	file = open(directory, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
	if (file < 0 || write(file, TEXT, strlen(TEXT)) < 0)
		return fails("O_TMPFILE");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", file);
	snprintf(name, sizeof(name), "%s/named", directory);
	unlink(name);
	return linkat(AT_FDCWD, path, AT_FDCWD, name, AT_SYMLINK_FOLLOW) ? fails("linkat") : 0;
}

static int opened(const char *path)
{
	file = open(path, O_CREAT | O_RDWR | O_APPEND | O_CLOEXEC, 0644);
	return file < 0 || write(file, "x", 1) != 1 ? fails("open") : 0;
}

/* Of a process and of an open file: bytes 0 to 9, and 20 to 29. */
static struct flock range(int start)
{
	return (struct flock){ .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = 10 };
}

static int lock(const char *path)
{
	struct flock of_process = range(0), of_file = range(20);
	int one = open(path, O_CREAT | O_RDWR | O_CLOEXEC, 0644);

	if (flock(one, LOCK_EX | LOCK_NB) || fcntl(one, F_SETLK, &of_process) || fcntl(one, F_OFD_SETLK, &of_file))
		return fails("locks");
	snprintf(locked, sizeof(locked), "%s", path);
	return 0;
}

/* Whether another process meets all of them: a number for one that it does not meet. */
static int meets_locks(void)
{
	struct flock of_process = range(0), of_file = range(20), none = range(10);
	int other = open(locked, O_RDWR | O_CLOEXEC);

	if (!flock(other, LOCK_EX | LOCK_NB) || errno != EWOULDBLOCK)
		return 1;
	if (fcntl(other, F_GETLK, &of_process) || of_process.l_type != F_WRLCK || of_process.l_pid != getppid())
		return 2;
	/* Of an open file, which no process is said to have. */
	if (fcntl(other, F_GETLK, &of_file) || of_file.l_type != F_WRLCK || of_file.l_pid != -1)
		return 3;
	return fcntl(other, F_GETLK, &none) || none.l_type != F_UNLCK ? 4 : 0;
}

static int linklocal(void)
{
	struct ifaddrs *all, *one;
	socklen_t size = sizeof(own);

	if (getifaddrs(&all))
		return fails("getifaddrs");
	for (one = all; one; one = one->ifa_next) {
		struct sockaddr_in6 *address = (struct sockaddr_in6 *)one->ifa_addr;
		if (address && address->sin6_family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&address->sin6_addr))
			own = *address;
	}
	freeifaddrs(all);
	errno = EADDRNOTAVAIL;
	if (!own.sin6_scope_id)
		return fails("a link-local address");
	listener = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	client = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (bind(listener, (struct sockaddr *)&own, sizeof(own)) || listen(listener, 8) ||
	    getsockname(listener, (struct sockaddr *)&own, &size) || connect(client, (struct sockaddr *)&own, sizeof(own)))
		return fails("connect");
	accepted = accept(listener, NULL, NULL);
	return accepted < 0 ? fails("accept") : 0;
}

static int use(void)
{
	struct stat mine, there;
	char text[64] = "";

	if (*name) {
		if (pread(file, text, sizeof(text), 0) != (ssize_t)strlen(TEXT) || strcmp(text, TEXT))
			return fails("the text of the file");
		if (fstat(file, &mine) || stat(name, &there) || mine.st_ino != there.st_ino || mine.st_nlink != 1)
			return fails("the name of the file");
	} else if (file >= 0 && write(file, "x", 1) != 1)
		return fails("write");
	if (client >= 0) {
		int again = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
		if (write(client, "x", 1) != 1 || read(accepted, text, 1) != 1)
			return fails("the connection");
		if (connect(again, (struct sockaddr *)&own, sizeof(own)))
			return fails("another connection");
		close(accept(listener, NULL, NULL));
		close(again);
	}
	if (ring) {
		int null = open("/dev/null", O_WRONLY | O_CLOEXEC);
		struct iocb request = { .aio_fildes = null, .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (long)text, .aio_nbytes = 1 };
		struct iocb *requests[] = { &request };
		struct io_event event;
		if (syscall(SYS_io_submit, ring, 1, requests) != 1 || syscall(SYS_io_getevents, ring, 1, 1, &event, NULL) != 1)
			return fails("the ring");
		close(null);
	}
	if (*locked) {
		static char what[] = "lock 0 of another process";
		int status, child = fork();
		if (!child)
			_exit(meets_locks());
		if (waitpid(child, &status, 0) != child || status) {
			what[5] = '0' + WEXITSTATUS(status);
			return fails(what);
		}
	}
	return 0;
}

static int obey(const char *word, const char *path)
{
	if (!strcmp(word, "named"))
		return named(path);
	if (!strcmp(word, "open"))
		return opened(path);
	if (!strcmp(word, "linklocal"))
		return linklocal();
	if (!strcmp(word, "ring"))
		return syscall(SYS_io_setup, 1, &ring) ? fails("io_setup") : 0;
	if (!strcmp(word, "locked"))
		return lock(path);
	return strcmp(word, "use") ? fails("an unknown word") : use();
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	char line[300], word[16], path[250];
	int on = 1;

	if (count != 2)
		return 2;
	address.sin_port = htons(atoi(arguments[1]));
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || listen(server, 8))
		return 1;
	FILE *asks = fdopen(accept(server, NULL, NULL), "r+");
	while (asks && fgets(line, sizeof(line), asks)) {
		*word = *path = 0;
		sscanf(line, "%15s %240s", word, path);
		fflush(asks);
		errno = 0;
		if (obey(word, path))
			fprintf(asks, "fails: %s: %s\n", why, strerror(errno));
		else
			fprintf(asks, "done\n");
		fflush(asks);
	}
	return 0;
}
