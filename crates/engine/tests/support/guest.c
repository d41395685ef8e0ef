/* Holds one kernel object, says "ready", and waits: for tests of what cannot be dumped.
 *
 *   guest io_uring        an io_uring instance
 *   guest unix PATH       a connection to a unix socket
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static int hold_io_uring(void)
{
	char params[120] = { 0 };

	return syscall(425 /* io_uring_setup */, 4, params);
}

static int hold_connection(const char *path)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);

	strncpy(address.sun_path, path, sizeof(address.sun_path) - 1);
	return connect(fd, (struct sockaddr *)&address, sizeof(address));
}

int main(int argc, char **argv)
{
	int held = -1;

	if (argc == 2 && !strcmp(argv[1], "io_uring"))
		held = hold_io_uring();
	else if (argc == 3 && !strcmp(argv[1], "unix"))
		held = hold_connection(argv[2]);
	if (held < 0) {
		perror(argv[1]);
		return 1;
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
