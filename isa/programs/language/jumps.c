// setjmp and longjmp: out of a deep recursion, nested, again and again to the same place, with volatile and with
// untouched locals, through a callback of qsort, as exceptions, and sigsetjmp.
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

static jmp_buf outermost;
static int depth_seen;

static void dive(jmp_buf *back, int depth, int bottom) {
    char room[64];
    snprintf(room, sizeof room, "%d", depth);
    depth_seen = atoi(room);
    if (depth == bottom)
        longjmp(*back, depth);
    dive(back, depth + 1, bottom);
    printf("not reached %s\n", room);
}

struct attempt {
    jmp_buf place;
    struct attempt *outer;
    const char *what;
};
static struct attempt *current;

static void raise_error(const char *what) {
    struct attempt *attempt = current;
    if (!attempt) {
        printf("nobody catches %s\n", what);
        exit(1);
    }
    current = attempt->outer;
    attempt->what = what;
    longjmp(attempt->place, 1);
}

static int parse_sum(const char **text);

static int parse_atom(const char **text) {
    if (**text == '(') {
        ++*text;
        int value = parse_sum(text);
        if (**text != ')')
            raise_error("a bracket is open");
        ++*text;
        return value;
    }
    if (**text < '0' || **text > '9')
        raise_error("no number");
    int value = 0;
    while (**text >= '0' && **text <= '9')
        value = value * 10 + *(*text)++ - '0';
    return value;
}

static int parse_product(const char **text) {
    int value = parse_atom(text);
    while (**text == '*' || **text == '/') {
        char sign = *(*text)++;
        int other = parse_atom(text);
        if (sign == '/' && other == 0)
            raise_error("division by zero");
        value = sign == '*' ? value * other : value / other;
    }
    return value;
}

static int parse_sum(const char **text) {
    int value = parse_product(text);
    while (**text == '+' || **text == '-')
        value += *(*text)++ == '+' ? parse_product(text) : -parse_product(text);
    return value;
}

static void evaluate(const char *text) {
    struct attempt attempt = {.outer = current};
    if (setjmp(attempt.place) == 0) {
        current = &attempt;
        const char *at = text;
        int value = parse_sum(&at);
        if (*at)
            raise_error("something follows");
        current = attempt.outer;
        printf("%s = %d\n", text, value);
    } else {
        printf("%s: %s\n", text, attempt.what);
    }
}

static int nested(int level) {
    jmp_buf here;
    volatile int tries = 0, inner = 0;
    const int fixed = level * 10;
    int result = setjmp(here);
    if (result < 3) {
        tries++;
        if (level > 0)
            inner = inner * 2 + nested(level - 1);
        longjmp(here, result + 1);
    }
    return tries * 100 + fixed + result + inner % 1000;
}

static int compared;
static int compare(const void *a, const void *b) {
    if (++compared == 20)
        longjmp(outermost, compared);
    return *(const int *)a - *(const int *)b;
}

static void across(int left) {
    jmp_buf inner;
    if (left == 0)
        longjmp(outermost, 55);
    // This buffer is not used: the jump goes past it.
    if (setjmp(inner) == 0)
        across(left - 1);
    printf("not reached %d\n", left);
}

int main(void) {
    jmp_buf place;
    sigjmp_buf signals;
    volatile int rounds = 0;
    int value;

    if ((value = setjmp(place)) == 0)
        dive(&place, 1, 50);
    printf("came back with %d from %d\n", value, depth_seen);
    value = setjmp(place);
    if (++rounds < 10)
        dive(&place, rounds, rounds * 3);
    printf("rounds %d, last %d\n", rounds, value);
    evaluate("1+2*(3+4)");
    evaluate("(1+2");
    evaluate("7/(3-3)");
    evaluate("2*x");
    evaluate("((((((9))))))-1)");
    printf("nested %d\n", nested(3));
    int numbers[64];
    for (int i = 0; i < 64; i++)
        numbers[i] = i * 37 % 64;
    switch (setjmp(outermost)) {
    case 0:
        qsort(numbers, 64, sizeof *numbers, compare);
        printf("not reached\n");
        break;
    case 20:
        printf("left qsort after %d\n", compared);
        across(12);
        break;
    default:
        printf("across\n");
    }
    if (sigsetjmp(signals, 1) == 0)
        siglongjmp(signals, 9);
    printf("longjmp with 0 gives %d\n", (value = setjmp(place)) == 0 ? (longjmp(place, 0), 0) : value);
    return 0;
}
