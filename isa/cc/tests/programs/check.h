/* How the test programs here judge: CHECK says which line did not hold, finish() tells main's result. */
#include <stdio.h>

static int failures;

#define CHECK(condition) \
    do { \
        if (!(condition)) { \
            printf("%s:%d: %s does not hold\n", __FILE__, __LINE__, #condition); \
            failures++; \
        } \
    } while (0)

static inline int finish(void)
{
    printf(failures ? "%d checks failed\n" : "all checks hold\n", failures);
    return failures != 0;
}
