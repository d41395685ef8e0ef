// Shapes of code that were once captured wrongly, or may be: loops around recursion whose base case does not loop,
// calls as arguments of calls, the address of a parameter, large frames, deep recursion, aligned locals, pointers into
// arrays, strings that could be merged, and polls right at the entry of functions with large arguments.
#include "library.h"

#define APART __attribute__((noinline))

static APART int shallow(int n) { return n <= 1 ? n : shallow(n - 1) + shallow(n - 2); }

// The recursion's base case never loops, so the loop itself must be polled.
static APART long loop_of_calls(int n, int depth) {
    long sum = 0;
    for (int i = 0; i < n; i++)
        sum += shallow(depth) * i;
    return sum;
}

struct big {
    long words[20];
};

static APART long by_value(struct big b, int n) {
    b.words[n % 20] += n;
    if (n == 0)
        return b.words[0] + b.words[7] + b.words[19];
    return by_value(b, n - 1) + b.words[(n * 3) % 20];
}

static APART long of_address(int n, long x) {
    long *p = &x;
    if (n > 0)
        *p += of_address(n - 1, x + n);
    return *p;
}

static APART int deep(int n, const struct big *above) {
    struct big mine = *above;
    mine.words[n % 20] ^= n;
    if (n == 0) {
        long sum = 0;
        for (int i = 0; i < 20; i++)
            sum = sum * 31 + mine.words[i];
        return (int)sum;
    }
    return deep(n - 1, &mine) + (int)mine.words[5];
}

static APART long aligned_locals(int n) {
    _Alignas(128) long a[16];
    _Alignas(32) char b[33];
    for (int i = 0; i < 16; i++)
        a[i] = i * n;
    for (int i = 0; i < 33; i++)
        b[i] = (char)(i + n);
    long bad = ((long)a % 128) + ((long)b % 32);
    if (n > 0)
        bad += aligned_locals(n - 1) != 0 ? 0 : 1000;
    return bad + a[3] + b[32];
}

static APART const char *find(const char *text, char c) {
    while (*text && *text != c)
        text++;
    return text;
}

static APART int three(int a, int b, int c) { return a * 100 + b * 10 + c; }

static const char *const same[] = {"tail", "detail", "tail", "a tail"};

// Static initialisers with addresses: functions, other variables, one past the end.
static int table[8] = {1, 2, 3, 4, 5, 6, 7, 8};
static int *const middle = &table[3], *const end = table + 8;
static int (*const pointers[])(int) = {shallow, shallow, 0};

int main(void) {
    print("loop %ld\n", loop_of_calls(20, 7));
    struct big b;
    for (int i = 0; i < 20; i++)
        b.words[i] = i * i;
    print("by value %ld\n", by_value(b, 25));
    print("address %ld\n", of_address(20, 3));
    print("deep %d\n", deep(400, &b));
    print("aligned %ld\n", aligned_locals(9));
    print("nested %d\n", three(shallow(3), shallow(three(0, 0, 4)), shallow(shallow(5))));
    const char *text = "the quick brown fox";
    int at = 0;
    for (const char *p = text; *(p = find(p, ' ')); p++)
        at = at * 32 + (int)(p - text);
    print("find %d\n", at);
    for (int i = 0; i < 4; i++)
        print("%s ", same[i]);
    print("%d %d %d %d\n", same[0] == same[2], *middle, (int)(end - middle), pointers[0](6) + (pointers[2] ? 1 : 0));
    return 0;
}
