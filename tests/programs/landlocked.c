/* A service of which a thread confines itself by Landlock: a TCP server on a port.
 *
 *     landlocked PORT
 *
 * "files", "network", "signals" and "everything" let a thread confine itself so; it is answered "done", or "fails" and why.
 * "ask" is answered "free" or "confined": what the thread meets. "end" ends the thread. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

/* Those of <linux/landlock.h>, which distributions have in several versions. */
#define CREATE_RULESET 444
#define RESTRICT_SELF 446
#define ALL_FILES 0x1fffUL
#define MAKE_DIR (1UL << 7)
#define BIND_TCP (1UL << 0)
#define SCOPE_SIGNAL (1UL << 1)

static const struct kind {
	const char *name;
	unsigned long files, network, scope;
} kinds[] = {
	{ "files", MAKE_DIR, 0, 0 },
	{ "network", 0, BIND_TCP, 0 },
	{ "signals", 0, 0, SCOPE_SIGNAL },
	{ "everything", ALL_FILES, BIND_TCP, SCOPE_SIGNAL },
};

/* What the thread is asked and answers. */
static int question[2], answers[2];
static pid_t other;

static void answer(const char *text)
{
	if (write(answers[1], text, strlen(text) + 1) < 0)
		abort();
}

static int is_denied(const struct kind *kind)
{
	struct sockaddr_in any = { .sin_family = AF_INET };

	if (kind->files)
		return mkdir("/made", 0700) < 0 && errno == EACCES ? 1 : (rmdir("/made"), 0);
	if (kind->network) {
		int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		int denied = bind(server, (struct sockaddr *)&any, sizeof(any)) < 0 && errno == EACCES;
		close(server);
		return denied;
	}
	return kill(other, 0) < 0 && errno == EPERM;
}

static void *confined(void *of)
{
	const struct kind *kind = of;
	unsigned long handled[] = { kind->files, kind->network, kind->scope };
	size_t size = kind->scope ? 24 : kind->network ? 16 : 8;
	char text[200], byte;
	int ruleset = syscall(CREATE_RULESET, handled, size, 0);

	if (ruleset < 0 || prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(RESTRICT_SELF, ruleset, 0)) {
		snprintf(text, sizeof(text), "fails: %s", strerror(errno));
		answer(text);
		return NULL;
	}
	close(ruleset);
	answer("done");
	while (read(question[0], &byte, 1) == 1 && byte == '?')
		answer(is_denied(kind) ? "confined" : "free");
	return NULL;
}

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	char line[64], text[200];
	pthread_t thread;
	int on = 1;

	if (count != 2 || pipe(question) || pipe(answers))
		return 2;
	/* A process outside of the thread's domain. */
	other = fork();
	if (!other)
		for (;;)
			pause();
	address.sin_port = htons(atoi(arguments[1]));
	int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(server, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || listen(server, 8))
		return 1;
	FILE *client = fdopen(accept(server, NULL, NULL), "r+");
	while (client && fgets(line, sizeof(line), client)) {
		line[strcspn(line, "\n")] = 0;
		fflush(client);
		if (!strcmp(line, "end")) {
			if (write(question[1], ".", 1) != 1 || pthread_join(thread, NULL))
				return 1;
			strcpy(text, "done");
		} else {
			size_t at = 0;
			while (at < sizeof(kinds) / sizeof(*kinds) && strcmp(kinds[at].name, line))
				at++;
			if (at < sizeof(kinds) / sizeof(*kinds))
				pthread_create(&thread, NULL, confined, (void *)&kinds[at]);
			else if (write(question[1], "?", 1) != 1)
				return 1;
			ssize_t length = read(answers[0], text, sizeof(text) - 1);
			text[length < 0 ? 0 : length] = 0;
			if (!strncmp(text, "fails", 5))
				pthread_join(thread, NULL);
		}
		fprintf(client, "%s\n", text);
		fflush(client);
	}
	return 0;
}
