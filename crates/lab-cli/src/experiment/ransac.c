// A service that fits a line to points of which many are not on it, by RANSAC (Fischler and Bolles, Communications of the ACM
// 24, 1981): it takes two points at random, counts the points near the line through them, and keeps the line with most.
//
//     ransac PORT
//
// A client sends the number of bytes of its points as a line, and then the points: two doubles each, x and y. The answer is how
// many are near the line, its slope, its value at 0, and an empty line.
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

enum { TRIALS = 200, MOST_BYTES = 1 << 26 };
static const double NEAR = 0.5;

struct point {
    double x, y;
};

struct line {
    double slope, offset;
    size_t near;
};

static void fail(const char *what) {
    perror(what);
    exit(1);
}

// The same ones for each question.
static size_t below(size_t limit, uint64_t *random) {
    *random = *random * 6364136223846793005 + 1442695040888963407;
    return (*random >> 33) % limit;
}

static struct line fit(const struct point *points, size_t count) {
    uint64_t random = 1;
    struct line best = {0};
    for (int trial = 0; trial < TRIALS; trial++) {
        struct point a = points[below(count, &random)], b = points[below(count, &random)];
        if (a.x == b.x)
            continue;
        struct line line = {.slope = (b.y - a.y) / (b.x - a.x)};
        line.offset = a.y - line.slope * a.x;
        for (size_t at = 0; at < count; at++)
            line.near += fabs(points[at].y - (line.slope * points[at].x + line.offset)) < NEAR;
        if (line.near > best.near)
            best = line;
    }
    return best;
}

// Answers one client until it ends.
static void serve(FILE *client) {
    size_t bytes;
    while (fscanf(client, "%zu", &bytes) == 1 && fgetc(client) == '\n') {
        size_t count = bytes / sizeof(struct point);
        if (bytes > MOST_BYTES || count < 2)
            return;
        struct point *points = malloc(count * sizeof *points);
        if (!points)
            fail("memory");
        if (fread(points, sizeof *points, count, client) == count) {
            struct line best = fit(points, count);
            if (dprintf(fileno(client), "%zu %.3f %.3f\n\n", best.near, best.slope, best.offset) < 0)
                perror("the answer");
        }
        free(points);
    }
}

int main(int argc, char **argv) {
    if (argc != 2)
        return 2;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    int listener = socket(AF_INET, SOCK_STREAM, 0), on = 1;
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 16) != 0)
        fail("socket");
    for (;;) {
        int connection = accept(listener, 0, 0);
        if (connection < 0 || setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on) != 0)
            fail("accept");
        FILE *client = fdopen(connection, "r");
        if (!client)
            fail("a stream");
        serve(client);
        fclose(client);
    }
}
