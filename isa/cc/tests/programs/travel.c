/* Work inside the C library that calls back, formats and allocates: what leaves in its middle on one
 * set must end on another as if nothing had been. */
#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct item {
    int key;
    char *name;
};

static int by_name(const void *left, const void *right)
{
    return strcmp(((const struct item *)left)->name, ((const struct item *)right)->name);
}

int main(void)
{
    enum { ITEMS = 150 };
    struct item items[ITEMS], wanted = {0, "item 43.500000"};
    long double sum = 0;
    regex_t expression;

    for (int i = 0; i < ITEMS; i++) {
        char text[40];

        items[i].key = i * 7919 % 1009;
        snprintf(text, sizeof text, "item %.6f", items[i].key / 2.0);
        items[i].name = strdup(text);
        sum += 1.0L / (i + 1);
    }
    qsort(items, ITEMS, sizeof *items, by_name);
    for (int i = 0; i < ITEMS; i += 10)
        printf("%d %s\n", items[i].key, items[i].name);
    if (bsearch(&wanted, items, ITEMS, sizeof *items, by_name))
        puts("found");
    if (regcomp(&expression, "^item ([0-9]+)\\.(0|5)0*$", REG_EXTENDED) == 0) {
        int halves = 0;
        regmatch_t match[3];

        for (int i = 0; i < ITEMS; i++)
            if (regexec(&expression, items[i].name, 3, match, 0) == 0)
                halves += items[i].name[match[2].rm_so] == '5';
        printf("%d halves, %.30Lf\n", halves, sum);
        regfree(&expression);
    }
    for (int i = 0; i < ITEMS; i++)
        free(items[i].name);
    return 0;
}
