// Word count, the problem of Phoenix: how often each word occurs in a text, by a hash table with chains; and the most
// frequent ones, by qsort.
//
// Verified: the counts add up to the number of words, and all of them are those of a sorted list of the words.
#include "kernel.h"
#include <string.h>

enum { BUCKETS = 1 << 14, SHOWN = 8, VOCABULARY = 5000, LONGEST = 12 };

struct word {
    struct word *next;
    const char *start;
    uint32_t size;
    uint32_t count;
};
struct table {
    struct word *buckets[BUCKETS];
    size_t words;
};

static char *make_text(size_t words) {
    char(*vocabulary)[LONGEST + 1] = kernel_allocate(VOCABULARY, sizeof *vocabulary);
    char *text = kernel_allocate(words * (LONGEST + 1) + 1, 1), *end = text;
    uint64_t seed = 1066;
    for (size_t i = 0; i < VOCABULARY; i++)
        for (size_t size = 2 + kernel_random(&seed) % (LONGEST - 2), k = 0; k < size; k++)
            vocabulary[i][k] = (char)('a' + kernel_random(&seed) % 26);
    for (size_t i = 0; i < words; i++) {
        // The product of two makes some words frequent and most of them rare.
        uint64_t random = kernel_random(&seed);
        const char *word = vocabulary[(random & 0xffff) * (random >> 16 & 0xffff) % 0xffffffff * VOCABULARY >> 32];
        size_t size = strlen(word);
        memcpy(end, word, size);
        end += size;
        *end++ = random >> 63 ? ' ' : '\n';
    }
    free(vocabulary);
    return text;
}

static int is_letter(char c) { return c >= 'a' && c <= 'z'; }

static void add(struct table *table, const char *start, uint32_t size) {
    uint32_t hash = 5381;
    for (uint32_t i = 0; i < size; i++)
        hash = hash * 33 ^ (uint8_t)start[i];
    struct word **place = &table->buckets[hash % BUCKETS];
    for (; *place; place = &(*place)->next)
        if ((*place)->size == size && memcmp((*place)->start, start, size) == 0) {
            (*place)->count++;
            return;
        }
    *place = kernel_allocate(1, sizeof **place);
    **place = (struct word){NULL, start, size, 1};
    table->words++;
}

static int by_text(const void *a, const void *b) {
    const struct word *x = a, *y = b;
    int order = memcmp(x->start, y->start, x->size < y->size ? x->size : y->size);
    return order ? order : (x->size > y->size) - (x->size < y->size);
}

static int by_count(const void *a, const void *b) {
    const struct word *x = a, *y = b;
    return x->count != y->count ? (x->count < y->count) - (x->count > y->count) : by_text(a, b);
}

int main(int argc, char **argv) {
    size_t words = (size_t)kernel_size(argc, argv, 3000, 10, 50000000), found = 0, listed = 0;
    char *text = make_text(words);
    struct table *table = kernel_allocate(1, sizeof *table);
    struct word *all = kernel_allocate(words, sizeof *all), *counted;
    int fine = 1;

    for (const char *c = text; *c;) {
        const char *start = c;
        while (is_letter(*c))
            c++;
        if (c > start) {
            add(table, start, (uint32_t)(c - start));
            all[found++] = (struct word){NULL, start, (uint32_t)(c - start), 1};
        }
        c += *c != '\0';
    }
    counted = kernel_allocate(table->words, sizeof *counted);
    for (size_t i = 0; i < BUCKETS; i++)
        for (struct word *word = table->buckets[i], *next; word; word = next) {
            next = word->next;
            counted[listed++] = *word;
            free(word);
        }
    qsort(counted, listed, sizeof *counted, by_count);
    for (size_t i = 0; i < SHOWN && i < listed; i++)
        printf("word_count: %.*s %" PRIu32 "\n", (int)counted[i].size, counted[i].start, counted[i].count);
    qsort(counted, listed, sizeof *counted, by_text);
    qsort(all, found, sizeof *all, by_text);
    size_t at = 0;
    for (size_t i = 0; i < listed; i++)
        for (uint32_t k = 0; k < counted[i].count; k++)
            fine &= at < found && by_text(&all[at++], &counted[i]) == 0;
    free(counted);
    free(all);
    free(table);
    free(text);
    if (found != words)
        return kernel_failed("the number of words");
    return fine && at == found ? kernel_passed() : kernel_failed("the sorted list has other counts");
}
