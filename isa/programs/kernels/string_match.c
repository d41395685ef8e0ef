// String match, the problem of Phoenix: which words of a text are one of a few keys that are only known in an encoded
// form. Each word is encoded and compared.
//
// Verified against a count of the plain keys in the plain text by Horspool's search.
#include "kernel.h"
#include <string.h>

enum { KEYS = 4, LONGEST = 16 };

static const char *const keys[KEYS] = {"plover", "sandpiper", "curlew", "godwit"};

static char *make_text(size_t words, size_t *length) {
    char *text = kernel_allocate(words * (LONGEST + 1) + 1, 1), *end = text;
    uint64_t seed = 8080;
    for (size_t i = 0; i < words; i++) {
        uint64_t random = kernel_random(&seed);
        if (random % 97 < KEYS) {
            size_t size = strlen(keys[random % 97]);
            memcpy(end, keys[random % 97], size);
            end += size;
        } else {
            size_t size = 3 + (random >> 8) % 10;
            for (size_t k = 0; k < size; k++)
                *end++ = (char)('a' + (kernel_random(&seed) >> 7) % 26);
        }
        *end++ = '\n';
    }
    *length = (size_t)(end - text);
    return text;
}

// Not secret, only some work per byte that depends on the bytes before.
static void encode(const char *word, size_t size, uint8_t *result) {
    uint32_t state = 0x5a;
    for (size_t i = 0; i < LONGEST; i++) {
        uint8_t byte = i < size ? (uint8_t)word[i] : (uint8_t)size;
        state = state * 31 + byte;
        result[i] = (uint8_t)(state >> 3 ^ byte << 1);
    }
}

static void match(const char *text, size_t length, uint8_t encoded[KEYS][LONGEST], uint64_t counts[KEYS]) {
    for (size_t i = 0; i < length;) {
        uint8_t word[LONGEST];
        const char *end = memchr(text + i, '\n', length - i);
        size_t size = (size_t)(end - (text + i));
        encode(text + i, size, word);
        for (int k = 0; k < KEYS; k++)
            counts[k] += memcmp(word, encoded[k], LONGEST) == 0;
        i += size + 1;
    }
}

// How often "\n" key "\n" stands in the text, whose first word counts as if a line ended before it.
static uint64_t search(const char *text, size_t length, const char *key) {
    size_t size = strlen(key), shift[256];
    uint64_t found = 0;
    for (int c = 0; c < 256; c++)
        shift[c] = size;
    for (size_t i = 0; i + 1 < size; i++)
        shift[(uint8_t)key[i]] = size - 1 - i;
    for (size_t at = 0; at + size < length; at += shift[(uint8_t)text[at + size - 1]])
        found += (at == 0 || text[at - 1] == '\n') && text[at + size] == '\n' && strncmp(text + at, key, size) == 0;
    return found;
}

int main(int argc, char **argv) {
    size_t words = (size_t)kernel_size(argc, argv, 2000, 10, 50000000), length;
    char *text = make_text(words, &length);
    uint8_t encoded[KEYS][LONGEST];
    uint64_t counts[KEYS] = {0};
    int fine = 1;

    for (int k = 0; k < KEYS; k++)
        encode(keys[k], strlen(keys[k]), encoded[k]);
    match(text, length, encoded, counts);
    for (int k = 0; k < KEYS; k++) {
        printf("string_match: %s %" PRIu64 "\n", keys[k], counts[k]);
        fine &= counts[k] == search(text, length, keys[k]);
    }
    free(text);
    return fine ? kernel_passed() : kernel_failed("the search finds another number");
}
