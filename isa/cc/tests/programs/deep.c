/* A thread that calls itself as often as its argument says, and at the bottom does a step for each line of its input. For a
 * 'd' it calls itself a million times more. The clones of its function have larger native frames than the function. */
#include "check.h"
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

enum { MORE = 1000000 };

struct four {
    uint64_t a, b, c, d;
};

static struct four next(struct four v) { return (struct four){v.a * 3 + v.b, v.b ^ v.c, v.c + v.d, v.d * 7}; }

static uint64_t fold(uint64_t below, struct four v) { return below * 31 + v.a * v.b + v.c * v.d; }

static volatile int never, number;

static uint64_t dive(uint64_t a, uint64_t b, uint64_t c, uint64_t d, unsigned long depth);
static uint64_t (*volatile again)(uint64_t, uint64_t, uint64_t, uint64_t, unsigned long) = dive;

/* Whether it is to go deeper. */
static __attribute__((noinline)) int bottom(void)
{
    char byte;
    printf("ready\n");
    fflush(stdout);
    while (read(0, &byte, 1) == 1) {
        if (byte == 'd')
            return 1;
        printf("step %d\n", ++number);
        fflush(stdout);
    }
    return 0;
}

static uint64_t dive(uint64_t a, uint64_t b, uint64_t c, uint64_t d, unsigned long depth)
{
    if (depth == 0 && !bottom())
        return a;
    struct four v = next((struct four){a, b, c, d});
    uint64_t below = again(v.a, v.b, v.c, v.d, depth == 0 ? MORE - 1 : depth - 1);
    /* Calls behind which all of this is needed still. */
    if (never) {
        below += again(a, b, c, d, 1) * a;
        below ^= again(b, a, d, c, 2) * b;
        below += again(c, d, a, b, 3) * c;
        below ^= again(d, c, b, a, 4) * d;
        below += again(a, c, b, d, 5) * a;
        below ^= again(b, d, a, c, 6) * b;
    }
    return fold(below, (struct four){a, b, c, d});
}

/* The same without a stack. */
static uint64_t expected(unsigned long depth)
{
    struct four *values = malloc((depth + 1) * sizeof *values);
    values[0] = (struct four){1, 2, 3, 4};
    for (unsigned long i = 1; i <= depth; i++)
        values[i] = next(values[i - 1]);
    uint64_t result = values[depth].a;
    while (depth-- > 0)
        result = fold(result, values[depth]);
    free(values);
    return result;
}

static void *begin(void *argument)
{
    unsigned long depth = *(unsigned long *)argument;
    uint64_t found = dive(1, 2, 3, 4, depth);
    CHECK(found == expected(depth) || found == expected(depth + MORE));
    return 0;
}

int main(int count, char **arguments)
{
    pthread_t thread;
    unsigned long depth = count > 1 ? strtoul(arguments[1], 0, 10) : 0;
    CHECK(!pthread_create(&thread, 0, begin, &depth) && !pthread_join(thread, 0));
    return finish();
}
