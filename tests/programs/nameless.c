/* A service that has files which CRIU may find by no name: a TCP server on a port.
 *
 *     nameless PORT
 *
 * Each line is a word and at most one path. "open FILE" opens a file that is there, and deletes it; "mapped FILE" maps and
 * deletes it; "linked FILE" opens it, gives it the name FILE.other and deletes the first one; "inotify FILE" and "fanotify FILE"
 * watch a file of their own that is deleted while it is open; "listens SOCKET" waits for one who passes a file, or what
 * watches files, and "receives" takes it; "elsewhere DIRECTORY" opens a file there and unmounts the directory. "use" reads what it has, and "end" closes
 * and unmaps all. Each is answered "done", or "fails" and why. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/fanotify.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define LENGTH 4096

static int file = -1, watch = -1, listener = -1;
static char *mapped;
static char text[LENGTH];

static int fails(void)
{
	return -1;
}

static int opened(const char *path, int flags)
{
	file = open(path, flags | O_CLOEXEC, 0600);
	return file < 0 || pread(file, text, sizeof(text), 0) < 0 ? fails() : 0;
}

static int use(void)
{
	char now[LENGTH] = "";

	if (file >= 0 && (pread(file, now, sizeof(now), 0) < 0 || memcmp(now, text, sizeof(now))))
		return fails();
	if (mapped && memcmp(mapped, text, sizeof(text)))
		return fails();
	/* One that was received is of a file of others. */
	if (watch >= 0 && file >= 0) {
		struct pollfd told = { .fd = watch, .events = POLLIN };
		if (pwrite(file, "x", 1, 0) != 1 || pread(file, text, sizeof(text), 0) < 1)
			return fails();
		errno = ENOMSG;
		return poll(&told, 1, 0) == 1 && read(watch, now, sizeof(now)) > 0 ? 0 : fails();
	}
	return 0;
}

static int end(void)
{
	if (mapped)
		munmap(mapped, LENGTH);
	for (int *one[] = { &file, &watch, &listener, NULL }, **at = one; *at; at++) {
		if (**at >= 0)
			close(**at);
		**at = -1;
	}
	mapped = NULL;
	memset(text, 0, sizeof(text));
	return 0;
}

static int map(const char *path)
{
	if (opened(path, O_RDONLY))
		return -1;
	mapped = mmap(NULL, LENGTH, PROT_READ, MAP_PRIVATE, file, 0);
	close(file);
	file = -1;
	return mapped == MAP_FAILED ? fails() : unlink(path);
}

static int linked(const char *path)
{
	char other[300];

	snprintf(other, sizeof(other), "%s.other", path);
	return opened(path, O_RDONLY) || link(path, other) ? fails() : unlink(path);
}

static int watches(const char *path, int with_fanotify)
{
	if (opened(path, O_RDWR | O_CREAT))
		return -1;
	watch = with_fanotify ? fanotify_init(FAN_CLASS_NOTIF | FAN_CLOEXEC, O_RDONLY) : inotify_init1(IN_CLOEXEC);
	if (watch < 0)
		return fails();
	if (with_fanotify ? fanotify_mark(watch, FAN_MARK_ADD, FAN_MODIFY, AT_FDCWD, path) :
			    inotify_add_watch(watch, path, IN_MODIFY) < 0)
		return fails();
	return unlink(path);
}

static int listens(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };

	snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
	unlink(path);
	listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	return bind(listener, (struct sockaddr *)&address, sizeof(address)) || listen(listener, 1) ? fails() : 0;
}

static int receives(void)
{
	char byte, room[CMSG_SPACE(sizeof(int))];
	struct iovec part = { &byte, 1 };
	struct msghdr message = { .msg_iov = &part, .msg_iovlen = 1, .msg_control = room, .msg_controllen = sizeof(room) };
	int from = accept(listener, NULL, NULL);

	if (recvmsg(from, &message, MSG_CMSG_CLOEXEC) != 1 || !CMSG_FIRSTHDR(&message))
		return fails();
	memcpy(&file, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(file));
	close(from);
	close(listener);
	listener = -1;
	struct stat told;
	if (fstat(file, &told))
		return fails();
	if (!S_ISREG(told.st_mode) && !S_ISDIR(told.st_mode)) {
		watch = file;
		file = -1;
		return 0;
	}
	/* A directory has nothing to read. */
	return pread(file, text, sizeof(text), 0) < 0 && errno != EISDIR ? fails() : 0;
}

static int elsewhere(const char *directory)
{
	char path[300];

	snprintf(path, sizeof(path), "%s/file", directory);
	if (mount("nameless", directory, "tmpfs", 0, NULL) || opened(path, O_RDWR | O_CREAT))
		return fails();
	return umount2(directory, MNT_DETACH);
}

static int obey(const char *word, const char *path)
{
	if (!strcmp(word, "open"))
		return opened(path, O_RDONLY) || unlink(path) ? fails() : 0;
	if (!strcmp(word, "mapped"))
		return map(path);
	if (!strcmp(word, "linked"))
		return linked(path);
	if (!strcmp(word, "inotify") || !strcmp(word, "fanotify"))
		return watches(path, *word == 'f');
	if (!strcmp(word, "listens"))
		return listens(path);
	if (!strcmp(word, "receives"))
		return receives();
	if (!strcmp(word, "elsewhere"))
		return elsewhere(path);
	if (!strcmp(word, "end"))
		return end();
	return strcmp(word, "use") ? fails() : use();
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
			fprintf(asks, "fails: %s %s: %s\n", word, path, strerror(errno));
		else
			fprintf(asks, "done\n");
		fflush(asks);
	}
	return 0;
}
