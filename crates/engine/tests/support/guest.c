/* Holds one kernel object, says "ready", and waits: for tests of what a dump cannot hold or must keep.
 *
 *   guest io_uring        an io_uring instance
 *   guest unix PATH       a connection to a unix socket
 *   guest stopped         a child that SIGTSTP has stopped; at SIGUSR1 it says what it sees of the child ("child CODE
 *                         SIGNAL", as waitid(2) tells), at SIGUSR2 it lets it go on. The child says "continued" when
 *                         its handler for SIGCONT runs, and "ran" whenever it runs otherwise
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
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

static void continued(int signal)
{
	(void)signal;
	write(1, "continued\n", 10);
}

static int watch_stopped(void)
{
	siginfo_t seen;
	sigset_t asked;
	int got;
	pid_t child = fork();

	if (child == 0) {
		signal(SIGCONT, continued);
		/* With a parent in another group it can be stopped by a terminal's signal. */
		setpgid(0, 0);
		for (;;) {
			kill(getpid(), SIGTSTP);
			write(1, "ran\n", 4);
		}
	}
	sigemptyset(&asked);
	sigaddset(&asked, SIGUSR1);
	sigaddset(&asked, SIGUSR2);
	sigprocmask(SIG_BLOCK, &asked, NULL);
	if (child < 0 || waitid(P_PID, child, &seen, WSTOPPED | WNOWAIT))
		return -1;
	puts("ready");
	fflush(stdout);
	while (!sigwait(&asked, &got)) {
		if (got == SIGUSR2) {
			kill(child, SIGCONT);
			continue;
		}
		seen.si_code = 0;
		seen.si_status = 0;
		waitid(P_PID, child, &seen, WSTOPPED | WCONTINUED | WNOWAIT | WNOHANG);
		printf("child %d %d\n", seen.si_code, seen.si_status);
		fflush(stdout);
	}
	return -1;
}

int main(int argc, char **argv)
{
	int held = -1;

	if (argc == 2 && !strcmp(argv[1], "io_uring"))
		held = hold_io_uring();
	else if (argc == 3 && !strcmp(argv[1], "unix"))
		held = hold_connection(argv[2]);
	else if (argc == 2 && !strcmp(argv[1], "stopped"))
		held = watch_stopped();
	if (held < 0) {
		perror(argv[1]);
		return 1;
	}
	puts("ready");
	fflush(stdout);
	for (;;)
		pause();
}
