// Computed goto (a small stack machine), irreducible loops (entered in the middle), and a big switch.
#include <stdint.h>
#include <stdio.h>

enum code { PUSH, ADD, MULTIPLY, SUBTRACT, DUPLICATE, SWAP, OVER, JUMP_IF, CALL, RETURN, SHOW, STOP };

__attribute__((noinline)) static void show(int64_t value) { printf("machine %lld\n", (long long)value); }

static int64_t machine(const int16_t *code) {
    static const void *const labels[] = {&&push, &&add,  &&multiply, &&subtract, &&duplicate, &&swap,
                                         &&over, &&jump, &&call,     &&leave,    &&show_it,   &&stop};
    int64_t stack[64], *top = stack, count = 0;
    const int16_t *returns[64], **back = returns, *at = code;
#define NEXT goto *labels[count++, *at++]
    NEXT;
push:
    *top++ = *at++;
    NEXT;
add:
    top--;
    top[-1] += *top;
    NEXT;
multiply:
    top--;
    top[-1] *= *top;
    NEXT;
subtract:
    top--;
    top[-1] -= *top;
    NEXT;
duplicate:
    *top = top[-1];
    top++;
    NEXT;
swap: {
    int64_t kept = top[-1];
    top[-1] = top[-2];
    top[-2] = kept;
}
    NEXT;
over:
    *top = top[-2];
    top++;
    NEXT;
jump:
    at = *--top ? code + *at : at + 1;
    NEXT;
call:
    *back++ = at + 1;
    at = code + *at;
    NEXT;
leave:
    at = *--back;
    NEXT;
show_it:
    show(top[-1]);
    NEXT;
stop:
    return count;
}

// A table with holes, and with one label twice.
__attribute__((noinline)) static unsigned holes(const unsigned char *code) {
    static const void *const table[16] = {[1] = &&once, [2] = &&twice, [5] = &&twice, [6] = &&show_it, [9] = &&end};
    unsigned sum = 1, before = 0;
    goto *table[*code];
once:
    before = sum;
    sum = sum * 3 + *code;
    goto *table[*++code];
twice:
    sum = sum * 7 + before + *code;
    before++;
    goto *table[*++code];
show_it:
    show(sum);
    goto *table[*++code];
end:
    return sum ^ before;
}

// Labels that are kept in variables and compared, beside a table.
__attribute__((noinline)) static unsigned kept(unsigned n) {
    static const void *const table[] = {&&add, &&shift};
    const void *after = &&shift, *unused = 0;
    unsigned sum = n, rounds = 0;
    goto *table[n & 1];
add:
    sum += n;
    show(sum);
    if (after == &&add)
        after = &&end;
    goto *after;
shift:
    sum = sum << 1 ^ rounds;
    after = after == &&shift ? &&add : &&end;
    if (after != unused && ++rounds < n)
        goto *table[sum & 1];
    goto *after;
end:
    return sum + rounds;
}

// Two entries into one loop, and a way across two loops.
__attribute__((noinline)) static unsigned irreducible(unsigned n, unsigned entry) {
    unsigned sum = entry;
    if (entry & 1)
        goto middle;
top:
    sum = sum * 5 + n;
    if (sum % 7 == 0)
        goto lower;
middle:
    sum ^= n << 3;
    if (n-- == 0)
        return sum;
    if (sum % 3 == 0)
        goto top;
lower:
    sum += 11;
    if (sum % 5 == 1)
        goto middle;
    goto top;
}

// Duff's device.
static void copy(char *to, const char *from, int count) {
    int rounds = (count + 7) / 8;
    switch (count % 8) {
    case 0:
        do {
            *to++ = *from++;
            __attribute__((fallthrough));
        case 7:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 6:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 5:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 4:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 3:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 2:
            *to++ = *from++;
            __attribute__((fallthrough));
        case 1:
            *to++ = *from++;
        } while (--rounds > 0);
    }
}

#define CASE(n, action)                                                                                                \
    case n:                                                                                                            \
        x = x action;                                                                                                  \
        break;
#define FOUR(n) CASE(n, *3 + n) CASE(n + 1, ^(n * 77)) CASE(n + 2, -n) CASE(n + 3, / 3 + 1000 * n)
#define SIXTEEN(n) FOUR(n) FOUR(n + 4) FOUR(n + 8) FOUR(n + 12)

__attribute__((noinline)) static uint32_t big(uint32_t x, uint32_t which) {
    switch (which) {
        SIXTEEN(0)
        SIXTEEN(16)
        SIXTEEN(32)
        SIXTEEN(48)
        SIXTEEN(1000)
        SIXTEEN(100000)
    case 70 ... 90:
        return x + which;
    default:
        return big(x + 1, (which * 7 + x) % 120);
    }
    return x;
}

int main(void) {
    // Factorials: from "f n" the subroutine at 13 makes "f*n n+1", until n is 14.
    static const int16_t code[] = {PUSH, 1,    PUSH, 1,    CALL,     13,   DUPLICATE, PUSH, 14, SUBTRACT, JUMP_IF,
                                   4,    STOP, SWAP, OVER, MULTIPLY, SHOW, SWAP,      PUSH, 1,  ADD,      RETURN};
    char text[40] = {0};
    uint32_t x = 1;
    unsigned sum = 0;
    printf("steps %lld\n", (long long)machine(code));
    printf("holes %u\n", holes((const unsigned char[]){1, 5, 2, 6, 1, 1, 2, 6, 5, 9}));
    for (unsigned i = 0; i < 6; i++)
        printf("kept %u\n", kept(i));
    for (unsigned i = 0; i < 60; i++)
        sum = sum * 3 + irreducible(i * 3, i);
    printf("irreducible %08x\n", sum);
    copy(text, "a text of thirty-one characters", 31);
    printf("copy \"%s\"\n", text);
    for (uint32_t i = 0; i < 400; i++)
        x = big(x, i < 130 ? i : i < 260 ? 1000 + i % 20 : i % 3 ? i % 64 : 100000 + i % 16);
    printf("switch %08x\n", x);
    return 0;
}
