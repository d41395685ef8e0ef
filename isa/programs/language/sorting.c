// qsort, bsearch and lsearch-like work with callbacks, which recurse and sort themselves.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct person {
    char name[12];
    int age;
    double size;
};

static unsigned calls;

static int by_name(const void *a, const void *b) {
    calls++;
    return strcmp(((const struct person *)a)->name, ((const struct person *)b)->name);
}
static int by_size(const void *a, const void *b) {
    double x = ((const struct person *)a)->size, y = ((const struct person *)b)->size;
    calls++;
    return (x > y) - (x < y);
}
static int by_pointer(const void *a, const void *b) {
    const struct person *const *x = a, *const *y = b;
    return (*x)->age != (*y)->age ? ((*x)->age > (*y)->age) - ((*x)->age < (*y)->age) : by_name(*x, *y);
}
static int letters(const void *a, const void *b) { return *(const char *)a - *(const char *)b; }

// Compares words by their sorted letters, and sorts them in copies for it.
static int by_letters(const void *a, const void *b) {
    char x[12], y[12];
    strcpy(x, a);
    strcpy(y, b);
    qsort(x, strlen(x), 1, letters);
    qsort(y, strlen(y), 1, letters);
    int order = strcmp(x, y);
    return order ? order : strcmp(a, b);
}
static int by_value(const void *a, const void *b) {
    const int64_t *x = a, *y = b;
    return (*x > *y) - (*x < *y);
}

int main(void) {
    enum { COUNT = 100 };
    static struct person people[COUNT];
    const struct person *pointers[COUNT];
    static char words[][12] = {"listen", "silent", "tea", "eat", "godwit", "enlist", "ate", "tinsel", "stone", "notes"};
    static int64_t numbers[500];
    uint32_t seed = 17, hash = 0;

    for (int i = 0; i < COUNT; i++) {
        seed = seed * 1664525 + 1013904223;
        snprintf(people[i].name, sizeof people[i].name, "%c%c%02d", 'a' + (seed >> 8) % 26, 'a' + (seed >> 16) % 26, i);
        people[i].age = (int)(seed >> 24) % 50;
        people[i].size = 1.5 + (double)(seed >> 12 & 0xff) / 512;
        pointers[i] = &people[i];
    }
    qsort(people, COUNT, sizeof *people, by_name);
    for (int i = 1; i < COUNT; i++)
        if (strcmp(people[i - 1].name, people[i].name) > 0)
            printf("not in order at %d\n", i);
    printf("first %s %d, last %s %d\n", people[0].name, people[0].age, people[COUNT - 1].name, people[COUNT - 1].age);
    int hits = 0;
    for (int i = 0; i < COUNT; i++) {
        struct person key = people[i];
        struct person *found = bsearch(&key, people, COUNT, sizeof *people, by_name);
        hits += found == &people[i];
        key.name[0] = '!';
        hits += bsearch(&key, people, COUNT, sizeof *people, by_name) != NULL;
    }
    printf("found %d\n", hits);
    qsort(pointers, COUNT, sizeof *pointers, by_pointer);
    for (int i = 0; i < COUNT; i += 25)
        printf("by age %d %s\n", pointers[i]->age, pointers[i]->name);
    qsort(people, COUNT, sizeof *people, by_size);
    for (int i = 1; i < COUNT; i++)
        if (people[i - 1].size > people[i].size)
            printf("not in order at %d\n", i);
    qsort(words, sizeof words / sizeof *words, sizeof *words, by_letters);
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        printf("%s ", words[i]);
    for (int i = 0; i < 500; i++)
        numbers[i] = (int64_t)((seed = seed * 1664525 + 1013904223) - UINT64_C(0x80000000)) * 3;
    qsort(numbers, 500, sizeof *numbers, by_value);
    for (int i = 0; i < 500; i++)
        hash = hash * 31 + (uint32_t)(numbers[i] >> 3);
    printf("\nnumbers %08x, called: %d\n", hash, calls > 500);
    return 0;
}
