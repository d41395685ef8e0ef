// The C library's functions on strings, memory, characters and numbers, and its formatted output and input.
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static void words(const char *text) {
    char copy[100], *rest;
    strcpy(copy, text);
    for (char *word = strtok_r(copy, " ,.", &rest); word; word = strtok_r(NULL, " ,.", &rest))
        printf("[%s]", word);
    putchar('\n');
}

static void numbers(void) {
    static const char *const texts[] = {"0",   "-17",   "0x7fFz",   "0777",    " +42", "99999999999999999999",
                                        "abc", "1e400", "-2.5e-3q", "0x1.8p3", "inf",  "1e-310"};
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        char *end;
        errno = 0;
        long value = strtol(texts[i], &end, 0);
        int error = errno == ERANGE;
        size_t used = (size_t)(end - texts[i]);
        errno = 0;
        double real = strtod(texts[i], &end);
        printf("%s: %ld %d %zu, %g %d %zu\n", texts[i], value, error, used, real, errno == ERANGE,
               (size_t)(end - texts[i]));
    }
}

int main(void) {
    char a[64] = "black-tailed ", b[64], c[64];
    strcat(a, "godwit");
    strncpy(b, a, sizeof b);
    printf("%zu %d %d %d\n", strlen(a), strcmp(a, "black") > 0, strncmp(a, "black", 5), strcmp("a", "b") < 0);
    printf("%s %s %s\n", strchr(a, '-'), strrchr(a, 'd'), strstr(a, "tail"));
    printf("%zu %zu %s\n", strspn(a, "abclk"), strcspn(a, " "), strpbrk(a, "wxyz"));
    memmove(b + 3, b, 10);
    memset(c, '.', sizeof c);
    memcpy(c + 2, b, 8);
    c[20] = '\0';
    printf("%.20s %s %d %s\n", b, c, memcmp("abc", "abd", 3) < 0, (char *)memchr(a, 't', 20));
    words("the quick, brown fox. jumps over");
    char *copy = strdup(a);
    if (!copy)
        return 3;
    for (char *p = copy; *p; p++)
        *p = (char)(isalpha((unsigned char)*p) ? toupper((unsigned char)*p) : '_');
    puts(copy);
    free(copy);
    numbers();
    printf("%5d|%-5d|%05d|%+d|% d|%x|%X|%#o|%c|%%|%s|%.2s|%10.3s|\n", 42, 42, 42, 42, 42, 255, 255, 8, 'c', "text",
           "text", "text");
    printf("%ld %lld %hd %hhd %zu %jd %" PRIx64 " %" PRIu32 "\n", LONG_MIN, LLONG_MAX, (short)-3, (signed char)-4,
           (size_t)5, (intmax_t)-6, (uint64_t)0x123456789abcdef0, (uint32_t)7);
    printf("%f %e %g %a %.0f %.1f %10.4f|%-10.2e|%G\n", 3.14159, 31415.9, 0.00001, 1.0, 2.5, 0.05, 2.71828, 1e10,
           1e-10);
    printf("%.17g %.17g %g %g %g\n", 0.1, 1e23, 1.0 / 0.0, -1.0 / 0.0, 5e-324);
    int i = 0, n = 0;
    unsigned x = 0;
    char word[20] = "";
    double d = 0;
    int got = sscanf("12 word 0xff 3.75 rest", "%d %19s %x %lf%n", &i, word, &x, &d, &n);
    printf("%d: %d %s %u %g %d\n", got, i, word, x, d, n);
    struct tm when = {.tm_year = 126, .tm_mon = 10, .tm_mday = 21, .tm_hour = 19, .tm_min = 30};
    strftime(b, sizeof b, "%Y-%m-%d %H:%M %A %j", &when);
    printf("%s\n", b);
    char *block = NULL;
    unsigned hash = 0;
    for (size_t size = 1; size < 300000; size = size * 3 + 1) {
        block = realloc(block, size);
        if (!block)
            return 3;
        memset(block + size / 3, (int)(size & 0xff), size - size / 3);
        for (size_t k = 0; k < size; k += 97)
            hash = hash * 31 + (unsigned char)block[k];
    }
    free(block);
    printf("memory %08x\n", hash);
    printf("%d %ld %lld %d\n", abs(-5), labs(-6L), llabs(-7LL), div(17, 5).quot * 10 + div(17, 5).rem);
    return 0;
}
