/* Arguments and environment lie one behind the other, where the kernel knows them; the kernel's own stack is gone, unless
 * the first argument is "stack". The others have to be "two words" and "last"; the environment is A=1 and B=2, or empty
 * where the first argument is "empty". */
#include "check.h"
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

extern char **environ;

/* What programs of both instruction sets can have at most, on the smallest of arm64's kernels. */
static const unsigned long END = 1UL << 39;

static int is_of_kernel(const char *line)
{
    static const char *const names[] = {"[vdso]", "[vvar]", "[vvar_vclock]", "[vsyscall]"};

    for (unsigned i = 0; i < sizeof names / sizeof *names; i++)
        if (strstr(line, names[i]))
            return 1;
    return 0;
}

/* Counts the areas of the program's beyond the end, and says what the kernel calls the stack. */
static unsigned areas_beyond(unsigned long *stack_end)
{
    char line[512];
    unsigned beyond = 0;
    unsigned long begin, end;
    FILE *maps = fopen("/proc/self/maps", "r");

    CHECK(maps);
    while (maps && fgets(line, sizeof line, maps)) {
        CHECK(sscanf(line, "%lx-%lx", &begin, &end) == 2);
        beyond += end > END && !is_of_kernel(line);
        if (strstr(line, "[stack]"))
            *stack_end = end;
    }
    CHECK(maps && !fclose(maps));
    return beyond;
}

static void file_has(const char *path, const char *bytes, size_t length)
{
    char found[512];
    FILE *file = fopen(path, "r");

    CHECK(file);
    if (!file)
        return;
    CHECK(fread(found, 1, sizeof found, file) == length && !memcmp(found, bytes, length));
    CHECK(!fclose(file));
}

static int is_below_end(const void *pointer) { return (unsigned long)pointer < END; }

int main(int argc, char **argv)
{
    static const char variables[] = "A=1\0B=2";
    int stays = argc == 4 && !strcmp(argv[1], "stack"), is_empty = argc == 4 && !strcmp(argv[1], "empty");
    size_t length = 0;
    unsigned long stack_end = 0;

    CHECK(argc == 4 && !strcmp(argv[2], "two words") && !strcmp(argv[3], "last") && !argv[4]);
    if (is_empty) {
        CHECK(!environ[0] && areas_beyond(&stack_end) == 0);
        file_has("/proc/self/environ", "", 0);
        return finish();
    }
    CHECK(!strcmp(environ[0], "A=1") && !strcmp(environ[1], "B=2") && !environ[2]);
    CHECK(getenv("B") == environ[1] + 2 && !getenv("GODWIT_STATE_SAVE"));
    for (int i = 0; i < argc; i++) {
        CHECK(argv[i] == argv[0] + length);
        length += strlen(argv[i]) + 1;
    }
    CHECK(environ[0] == argv[0] + length && environ[1] == environ[0] + sizeof "A=1");
    CHECK(is_below_end(argv) && is_below_end(argv[0]) && is_below_end(environ) && is_below_end(environ[1]));
    CHECK(is_below_end((void *)getauxval(AT_RANDOM)) && is_below_end((void *)getauxval(AT_EXECFN)));
    CHECK(getauxval(AT_RANDOM) && !access((char *)getauxval(AT_EXECFN), X_OK));
    CHECK((areas_beyond(&stack_end) == 0) == !stays && (stack_end < END) == !stays);
    if (stays)
        return finish();

    file_has("/proc/self/cmdline", argv[0], length);
    file_has("/proc/self/environ", variables, sizeof variables);
    /* A title may go on in the environment, once the arguments do not end with a null (get_mm_proctitle of fs/proc/base.c). */
    memset(argv[0], 'x', length + 2);
    argv[0][length + 2] = 0;
    file_has("/proc/self/cmdline", argv[0], length + 3);
    return finish();
}
