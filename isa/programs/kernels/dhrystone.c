// A mix of small procedures as Dhrystone has it: records that are assigned and chained, strings that are compared,
// enumerations, parameters by value and by reference, arrays of one and two dimensions.
//
// Verified: each result has a closed form in the number of rounds.
#include "kernel.h"
#include <string.h>

#define APART __attribute__((noinline))

enum kind { FIRST, SECOND, THIRD, KINDS };

struct record {
    struct record *next;
    enum kind kind, chosen;
    int64_t number;
    char text[32];
};

static struct record *chain;
static int64_t total, table[50], square[50][50];
static char chosen_letter;

static APART enum kind other_kind(enum kind kind) { return kind == FIRST ? THIRD : kind == SECOND ? FIRST : SECOND; }

static APART int64_t add_and_count(int64_t a, int64_t b, int64_t *sum) {
    *sum = a + b + 2;
    total++;
    return *sum - a;
}

static APART int strings_in_order(const char *a, const char *b) {
    size_t at = 2;
    while (a[at] == b[at] && a[at] != '\0')
        at++;
    chosen_letter = b[at];
    return strcmp(a, b) < 0;
}

static APART void fill(int64_t *line, int64_t (*plane)[50], int64_t index, int64_t value) {
    line[index] = value;
    line[index + 1] = line[index];
    line[index + 7] = index;
    for (int64_t i = index; i <= index + 1; i++)
        plane[index][i] = index;
    plane[index][index - 1]++;
    plane[index + 9][index] = line[index];
}

static APART void change(struct record *record) {
    struct record *next = record->next;
    *next = *record;
    next->next = record;
    record->number = 5;
    next->number = record->number + 2;
    next->kind = other_kind(record->kind);
    next->chosen = next->kind == THIRD ? FIRST : next->chosen;
}

int main(int argc, char **argv) {
    int64_t rounds = kernel_size(argc, argv, 500, 1, 1000000000), sum = 0, parts = 0, ordered = 0, letters = 0;
    struct record *other = kernel_allocate(1, sizeof *other);
    char first[32], second[32];

    chain = kernel_allocate(1, sizeof *chain);
    *chain = (struct record){other, FIRST, SECOND, 40, "a text in a record, some text"};
    strcpy(first, "two strings that are alike 1");
    for (int64_t round = 0; round < rounds; round++) {
        strcpy(second, "two strings that are alike 2");
        second[27] = (char)('0' + (round & 3));
        ordered += strings_in_order(first, second);
        letters += chosen_letter - '0';
        parts += add_and_count(round & 7, 3, &sum);
        fill(table, square, 8 + (round & 15), sum);
        chain->kind = (enum kind)(round % KINDS);
        chain->next = other;
        change(chain);
        total += other->kind;
        parts += other->number;
    }
    int64_t plane = 0;
    for (int i = 0; i < 50; i++)
        for (int k = 0; k < 50; k++)
            plane = plane * 3 + square[i][k];
    printf("dhrystone: %" PRId64 " rounds, total %" PRId64 ", parts %" PRId64 ", ordered %" PRId64 ", plane %" PRIx64
           ", \"%s\"\n",
           rounds, total, parts, ordered, (uint64_t)plane, other->text);

    // Kinds go FIRST -> THIRD, SECOND -> FIRST, THIRD -> SECOND, which are 2, 0, 1.
    int64_t kinds = rounds / 3 * 3 + (rounds % 3 >= 1 ? 2 : 0);
    // The letter is the digit 0, 2 or 3; with the digit 1 the strings are equal, and it is the end of the string.
    int64_t digits = rounds / 4 * (5 - '0') + (rounds % 4 == 2 ? -'0' : rounds % 4 == 3 ? 2 - '0' : 0);
    int64_t larger = rounds / 4 * 2 + (rounds % 4 == 3);
    int fine = total == rounds + kinds && parts == 5 * rounds + 7 * rounds && ordered == larger && letters == digits;
    fine &= strcmp(other->text, "a text in a record, some text") == 0 && other->next == chain;
    free(other);
    free(chain);
    return fine ? kernel_passed() : kernel_failed("a closed form gives another number");
}
