/* Tells its clocks to whoever connects to port 7001, in milliseconds: "MONOTONIC BOOTTIME REALTIME". Looks at the first
 * two all the time, and ends with status 1 when one of them goes back.
 */
#include <netinet/in.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static long long tell(clockid_t clock) {
    struct timespec now;
    if (clock_gettime(clock, &now)) fail("clock_gettime");
    return now.tv_sec * 1000LL + now.tv_nsec / 1000000;
}

int main(void) {
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(7001)};
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 8)) fail("listen");
    long long monotonic = 0, boottime = 0;
    for (;;) {
        struct pollfd wait = {.fd = listener, .events = POLLIN};
        int come = poll(&wait, 1, 10);
        long long before[] = {monotonic, boottime};
        monotonic = tell(CLOCK_MONOTONIC);
        boottime = tell(CLOCK_BOOTTIME);
        if (monotonic < before[0] || boottime < before[1]) {
            fprintf(stderr, "a clock went back: %lld to %lld, %lld to %lld\n", before[0], monotonic, before[1], boottime);
            return 1;
        }
        if (come != 1) continue;
        int client = accept(listener, NULL, NULL);
        if (client < 0) continue;
        char text[100];
        int length = snprintf(text, sizeof text, "%lld %lld %lld\n", monotonic, boottime, tell(CLOCK_REALTIME));
        if (write(client, text, (size_t)length) != length) perror("write");
        close(client);
    }
}
