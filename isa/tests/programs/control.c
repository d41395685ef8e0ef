// Ways of control flow: computed goto, switches with jump tables, goto into loops (irreducible), tail calls, calls of
// functions that never return, constructors, weak symbols, function pointers to private functions.
#include "library.h"

#define APART __attribute__((noinline))

static unsigned long sum;

static APART long interpret(const unsigned char *code) {
    static const void *const operations[] = {&&push, &&add, &&multiply, &&jump, &&stop};
    long stack[16];
    int top = 0;
    const unsigned char *pc = code;
#define NEXT goto *operations[*pc++]
    NEXT;
push:
    stack[top++] = *pc++;
    NEXT;
add:
    top--;
    stack[top - 1] += stack[top];
    NEXT;
multiply:
    top--;
    stack[top - 1] *= stack[top];
    NEXT;
jump:
    if (--stack[0] > 0) {
        sum += (unsigned long)stack[top - 1];
        pc = code + *pc;
    } else {
        pc++;
    }
    NEXT;
stop:
    return stack[top - 1] + stack[0];
}

static APART int choose(unsigned n) {
    switch (n % 11) {
    case 0: return (int)n * 3;
    case 1: return choose(n / 2) + 1;
    case 2: return 5;
    case 3: return choose(n - 3) ^ 0x55;
    case 4: return (int)n - 9;
    case 5: return choose(n / 3) * 2;
    case 6: return -7;
    case 7: return choose(n - 1) + choose(n / 4);
    case 8: return (int)(n & 0x3f);
    case 9: return choose(n - 2) - 1;
    default: return choose(n / 5) + 11;
    }
}

// Two ways into one loop.
static APART unsigned irreducible(unsigned n, int enter) {
    unsigned x = n;
    if (enter)
        goto middle;
top:
    x = x * 1664525u + 1013904223u;
    sum += x >> 28;
middle:
    x ^= x >> 13;
    if (n-- > 0) {
        if (x & 1)
            goto top;
        goto middle;
    }
    return x;
}

static APART long tail(long n, long accumulator) {
    if (n == 0)
        return accumulator;
    return tail(n - 1, accumulator * 3 + n);
}

static long tail_odd(long n, long a);
static APART long tail_even(long n, long a) { return n == 0 ? a : tail_odd(n - 1, a + 2); }
static APART long tail_odd(long n, long a) { return n == 0 ? -a : tail_even(n - 1, a * 3); }

static int order[4], ordered;
static __attribute__((constructor(200))) void second(void) { order[ordered++] = 2; }
static __attribute__((constructor(101))) void first(void) {
    for (volatile int i = 0; i < 50; i++)
        ;
    order[ordered++] = 1;
}
static __attribute__((constructor)) void last(void) { order[ordered++] = 3; }
static __attribute__((destructor)) void farewell(void) { print("farewell %lu\n", sum); }

__attribute__((weak)) int optional(int);
__attribute__((weak)) int replaced(void) { return 4; }

typedef void *(*copier)(void *, const void *, size_t);
static copier copy = memcpy;

// A linker set: variables of one section, walked between its ends.
#define IN_SET __attribute__((section("numbers"), used))
IN_SET static int number_a = 3;
IN_SET static int number_b = 5;
IN_SET static int number_c = 7;
extern int __start_numbers[], __stop_numbers[];

static APART void finish(int status) {
    for (int i = 0; i < 100; i++)
        sum += (unsigned)i;
    leave(status);
}

int main(void) {
    print("order %d %d %d\n", order[0], order[1], order[2]);
    static const unsigned char program[] = {0, 40, 0, 1, 0, 3, 2, 0, 5, 1, 3, 4, 4};
    print("interpret %ld\n", interpret(program));
    long chosen = 0;
    for (unsigned i = 0; i < 60; i++)
        chosen = chosen * 7 + choose(i * 13);
    print("choose %ld\n", chosen);
    print("irreducible %u %u\n", irreducible(80, 0), irreducible(70, 1));
    print("tail %ld %ld\n", tail(40, 1), tail_even(30, 1));
    print("weak %d %d\n", optional ? 1 : 0, replaced());
    char text[8];
    copier also = memcpy;
    copy(text, "copied", 7);
    print("%s %d\n", text, copy == also);
    int total = 0;
    for (int *n = __start_numbers; n < __stop_numbers; n++)
        total = total * 10 + *n;
    print("set %d of %d %d %d\n", total, number_a, number_b, number_c);
    int value = 3;
    __asm__ volatile("" : "+r"(value) : : "memory");
    __asm__ volatile("# a comment; $0 %0\n\t// and another" : "+r"(value));
    print("barrier %d\n", value);
    finish(7);
}
