// Variable-length arrays (of one and two dimensions, in loops, as parameters, with goto out of their scope) and alloca.
#include <alloca.h>
#include <stdio.h>
#include <string.h>

static long fill(int rows, int columns, long table[rows][columns]) {
    long sum = 0;
    for (int i = 0; i < rows; i++)
        for (int k = 0; k < columns; k++) {
            table[i][k] = i * 31 + k * 7;
            sum += table[i][k] ^ k;
        }
    return sum;
}

static long in_loop(int most) {
    long total = 0;
    for (int n = 1; n < most; n++) {
        int values[n];
        for (int i = 0; i < n; i++)
            values[i] = i * n;
        total += values[n / 2] + (long)(sizeof values / sizeof *values);
    }
    return total;
}

static long nested(int n) {
    long table[n][n + 1];
    long sum = fill(n, n + 1, table);
    {
        char text[2 * n];
        memset(text, 'a' + n % 26, sizeof text);
        sum += text[2 * n - 1];
        if (n > 3)
            sum += nested(n - 1);
        sum += text[0];
    }
    return sum + table[n - 1][n];
}

static long left_by_goto(int n) {
    long sum = 0;
again: {
    int values[n];
    for (int i = 0; i < n; i++)
        values[i] = i;
    sum += values[n - 1];
    if (--n > 0)
        goto again;
}
    return sum;
}

// Each call keeps its memory until it returns; the list goes through the frames.
struct link {
    struct link *before;
    int value;
};

static long links(struct link *before, int n) {
    long sum = 0;
    if (n == 0) {
        for (int place = 1; before; before = before->before, place++)
            sum += (long)before->value * place;
        return sum;
    }
    struct link *mine = NULL;
    for (int i = 0; i < 3; i++) {
        struct link *next = alloca(sizeof *next + (size_t)(i * n));
        next->before = mine ? mine : before;
        next->value = n * 10 + i;
        mine = next;
    }
    return links(mine, n - 1);
}

static long aligned(int n) {
    long sum = 0;
    char small[n];
    _Alignas(64) char large[128];
    memset(small, n, sizeof small);
    memset(large, 1, sizeof large);
    sum += (long)((size_t)large % 64);
    double wide[n];
    sum += (long)((size_t)wide % 8);
    for (int i = 0; i < n; i++)
        wide[i] = i;
    return sum + small[n - 1] + large[127] + (long)wide[n - 1];
}

int main(void) {
    long table[5][6];
    printf("fill %ld\n", fill(5, 6, table));
    printf("in loop %ld\n", in_loop(60));
    printf("nested %ld\n", nested(12));
    printf("left by goto %ld\n", left_by_goto(20));
    printf("alloca %ld\n", links(NULL, 25));
    printf("aligned %ld %ld\n", aligned(5), aligned(33));
    return 0;
}
