/* A service that cannot move while it has a POSIX message queue: a TCP server that opens, closes and removes one when
 * it is told to.
 *
 *     queue PORT
 *
 * Takes "open", "close" and "remove", each with a newline, and answers "done". */
#include <fcntl.h>
#include <mqueue.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#define NAME "/held"

int main(int count, char **arguments)
{
	struct sockaddr_in address = { .sin_family = AF_INET };
	char line[16];
	mqd_t queue = -1;

	if (count != 2)
		return 2;
	address.sin_port = htons(atoi(arguments[1]));
	int server = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(server, (struct sockaddr *)&address, sizeof(address)) || listen(server, 8))
		return 1;
	FILE *client = fdopen(accept(server, NULL, NULL), "r+");
	while (client && fgets(line, sizeof(line), client)) {
		if (!strcmp(line, "open\n") && (queue = mq_open(NAME, O_CREAT | O_RDWR, 0600, NULL)) == -1)
			return 1;
		if (!strcmp(line, "close\n") && mq_close(queue))
			return 1;
		if (!strcmp(line, "remove\n") && mq_unlink(NAME))
			return 1;
		fflush(client);
		fputs("done\n", client);
		fflush(client);
	}
	return 0;
}
