/* The C library: sorting, searching, patterns, times, strings, wide characters, streams. */
#define _GNU_SOURCE
#include "check.h"
#include <errno.h>
#include <fnmatch.h>
#include <getopt.h>
#include <glob.h>
#include <iconv.h>
#include <inttypes.h>
#include <locale.h>
#include <regex.h>
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <wchar.h>
#include <wctype.h>

static int constructed;
__attribute__((constructor)) static void construct(void) { constructed = 42; }
__attribute__((destructor)) static void destruct(void) { puts("destructor"); }
static void at_exit(void) { puts("atexit"); }

__attribute__((weak)) int weak_function(void);
__attribute__((weak)) int weak_default(void) { return 1; }

static int compared;
static int by_value(const void *left, const void *right)
{
    int l = *(const int *)left, r = *(const int *)right;
    compared++;
    return (l > r) - (l < r);
}

static int by_value_down(const void *left, const void *right, void *argument)
{
    ++*(int *)argument;
    return by_value(right, left);
}

static void sorting(void)
{
    int numbers[1000], key = 500 * 7 % 1009, count = 0;

    for (int i = 0; i < 1000; i++)
        numbers[i] = (i + 1) * 7 % 1009;
    qsort(numbers, 1000, sizeof *numbers, by_value);
    for (int i = 1; i < 1000; i++)
        CHECK(numbers[i - 1] < numbers[i]);
    CHECK(compared > 5000 && *(int *)bsearch(&key, numbers, 1000, sizeof *numbers, by_value) == key);
    qsort_r(numbers, 1000, sizeof *numbers, by_value_down, &count);
    CHECK(numbers[0] > numbers[999] && count > 5000);

    void *tree = 0;
    for (int i = 0; i < 1000; i++)
        CHECK(tsearch(&numbers[i], &tree, by_value));
    CHECK(**(int **)tfind(&key, &tree, by_value) == key);
    for (int i = 0; i < 1000; i++)
        CHECK(tdelete(&numbers[i], &tree, by_value));
    CHECK(!tree && hcreate(10) && hsearch((ENTRY){"key", "value"}, ENTER));
    CHECK(!strcmp(hsearch((ENTRY){"key", 0}, FIND)->data, "value"));
}

static void patterns(void)
{
    regex_t expression;
    regmatch_t match[3];

    CHECK(!regcomp(&expression, "^([a-z]+)-([0-9]{2,3})$", REG_EXTENDED));
    CHECK(!regexec(&expression, "word-123", 3, match, 0) && match[1].rm_eo == 4 && match[2].rm_so == 5);
    CHECK(regexec(&expression, "word-1", 3, match, 0) == REG_NOMATCH);
    regfree(&expression);
    CHECK(regcomp(&expression, "(", REG_EXTENDED) == REG_EPAREN);
    CHECK(!fnmatch("*.[ch]", "file.c", 0) && fnmatch("*.[ch]", "file.o", 0) == FNM_NOMATCH);
    glob_t found;
    CHECK(!glob("/etc/host*", 0, 0, &found) && found.gl_pathc > 0);
    globfree(&found);
}

static void times(void)
{
    struct tm parts = {.tm_year = 124, .tm_mon = 1, .tm_mday = 29, .tm_hour = 12};
    char text[80];
    time_t then;

    setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3", 1);
    tzset();
    then = mktime(&parts);
    CHECK(then == 1709204400 && parts.tm_wday == 4 && parts.tm_yday == 59);
    CHECK(strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S %Z %j %U %a %b", &parts));
    CHECK(!strcmp(text, "2024-02-29 12:00:00 CET 060 08 Thu Feb"));
    then += 150 * 86400;
    CHECK(localtime(&then)->tm_isdst == 1 && gmtime(&then)->tm_hour == 11);
    memset(&parts, 0, sizeof parts);
    CHECK(strptime("1999-12-31 23:59", "%Y-%m-%d %H:%M", &parts) && parts.tm_year == 99 && timegm(&parts) == 946684740);
    struct timespec now, later;
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &now) && !nanosleep(&(struct timespec){0, 1000000}, 0));
    CHECK(!clock_gettime(CLOCK_MONOTONIC, &later));
    CHECK((later.tv_sec - now.tv_sec) * 1000000000L + later.tv_nsec - now.tv_nsec >= 1000000);
}

static void strings(void)
{
    char buffer[64], *rest = buffer, big[5000];

    strcpy(buffer, "a,b,,c");
    CHECK(!strcmp(strsep(&rest, ","), "a") && !strcmp(strtok(rest, ","), "b") && !strcmp(strtok(0, ","), "c"));
    CHECK(strstr("a needle in hay", "needle") && !strstr("hay", "needle") && memmem("abcdef", 6, "cde", 3));
    CHECK(!strcasecmp("ABC", "abc") && strverscmp("a9", "a10") < 0 && strspn("aabbc", "ab") == 4);
    CHECK(!strcmp(strerror(ENOENT), "No such file or directory") && !strcmp(strsignal(11), "Segmentation fault"));
    for (int from = 0; from < 40; from++)
        for (int to = 0; to < 40; to += 7) {
            for (int i = 0; i < 5000; i++)
                big[i] = (char)(i * 31);
            memmove(big + to, big + from, 4000);
            CHECK(big[to] == (char)(from * 31) && big[to + 3999] == (char)((from + 3999) * 31));
            memset(big + from, from, (size_t)to);
            CHECK(!to || (big[from] == from && big[from + to - 1] == from));
        }
    setlocale(LC_ALL, "C.UTF-8");
    wchar_t wide[16];
    CHECK(mbstowcs(wide, "\xc3\xa4\xe2\x82\xac", 16) == 2 && wide[0] == 0xe4 && wide[1] == 0x20ac);
    CHECK(wcstombs(buffer, L"\u00e4\u20ac", 64) == 5 && iswalpha(0xe4) && towupper(0xe4) == 0xc4);
    CHECK(swprintf(wide, 16, L"%ls-%d", L"\u20ac", 7) == 3 && wide[0] == 0x20ac);
    iconv_t convert = iconv_open("UTF-16LE", "UTF-8");
    char *in = "\xe2\x82\xac", *out = buffer;
    size_t in_left = 3, out_left = 64;
    CHECK(iconv(convert, &in, &in_left, &out, &out_left) == 0 && buffer[0] == '\xac' && buffer[1] == 0x20);
    iconv_close(convert);
    char *arguments[] = {"program", "-a", "--long=x", "file", 0};
    struct option options[] = {{"long", required_argument, 0, 'l'}, {0}};
    CHECK(getopt_long(4, arguments, "a", options, 0) == 'a');
    CHECK(getopt_long(4, arguments, "a", options, 0) == 'l' && !strcmp(optarg, "x"));
    CHECK(getopt_long(4, arguments, "a", options, 0) == -1 && optind == 3);
}

static void streams(void)
{
    char name[] = "/tmp/godwit-library-XXXXXX", *line = 0, *memory;
    size_t size = 0;
    int descriptor = mkstemp(name), number;
    FILE *file = fdopen(descriptor, "w+");

    CHECK(file && fprintf(file, "line one\nline %d\n", 2) == 16 && !fseek(file, 0, SEEK_SET));
    CHECK(getline(&line, &size, file) == 9 && ftell(file) == 9 && ungetc('x', file) == 'x' && getc(file) == 'x');
    CHECK(fscanf(file, "line %d", &number) == 1 && number == 2 && getc(file) == '\n' && getc(file) == EOF && feof(file));
    CHECK(!setvbuf(file, 0, _IONBF, 0) && !fseek(file, -2, SEEK_END) && getc(file) == '2' && !fclose(file));
    struct stat status;
    CHECK(!stat(name, &status) && status.st_size == 16 && S_ISREG(status.st_mode) && (status.st_mode & 0777) == 0600);
    CHECK(!unlink(name) && !fopen(name, "r") && errno == ENOENT);
    file = open_memstream(&memory, &size);
    for (int i = 0; i < 1000; i++)
        fprintf(file, "%d,", i);
    CHECK(!fclose(file) && size == 3890 && strlen(memory) == 3890);
    file = fmemopen(memory, size, "r");
    CHECK(fscanf(file, "0,1,%d", &number) == 1 && number == 2 && !fclose(file));
    free(memory);
    free(line);
    file = popen("echo from the shell; exit 3", "r");
    char answer[64];
    CHECK(file && fgets(answer, sizeof answer, file) && !strcmp(answer, "from the shell\n"));
    CHECK(pclose(file) == 3 << 8);
    CHECK(system("exit 5") == 5 << 8);
}

static void memory(void)
{
    void *blocks[200];

    for (int round = 0; round < 20; round++) {
        for (int i = 0; i < 200; i++) {
            size_t size = (size_t)(i * i * (round + 1) % 100000) + 1;
            blocks[i] = malloc(size);
            memset(blocks[i], i, size);
        }
        for (int i = 0; i < 200; i += 2)
            blocks[i] = realloc(blocks[i], 200000);
        for (int i = 0; i < 200; i++) {
            CHECK(*(unsigned char *)blocks[i] == i);
            free(blocks[i]);
        }
    }
    void *aligned = 0;
    CHECK(!posix_memalign(&aligned, 4096, 100) && (uintptr_t)aligned % 4096 == 0);
    free(aligned);
    unsigned char *zeros = calloc(1000, 1000);
    CHECK(zeros && !zeros[0] && !zeros[999999]);
    free(zeros);
    void *volatile never = calloc(SIZE_MAX / 2, 3);
    CHECK(!never && errno == ENOMEM);
}

int main(int count, char **arguments)
{
    CHECK(constructed == 42 && !weak_function && weak_default() == 1);
    CHECK(count == 3 && !strcmp(arguments[1], "one") && !strcmp(arguments[2], "two words") && !arguments[3]);
    CHECK(getenv("GODWIT_TEST") && !strcmp(getenv("GODWIT_TEST"), "value") && !getenv("GODWIT_ARGV0"));
    atexit(at_exit);
    sorting();
    patterns();
    times();
    strings();
    streams();
    memory();
    return finish();
}
