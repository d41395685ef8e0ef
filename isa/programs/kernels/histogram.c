// Histogram, the problem of Phoenix: how often each value of red, green and blue occurs in a picture.
//
// Verified: counts, sums and sums of squares from the histogram against those of the picture itself.
#include "kernel.h"

enum { CHANNELS = 3, VALUES = 256, ROUNDS = 8 };

static void make_picture(uint8_t *picture, size_t pixels) {
    uint64_t seed = 4711;
    for (size_t i = 0; i < pixels; i++) {
        uint64_t random = kernel_random(&seed);
        picture[CHANNELS * i] = (uint8_t)random;
        picture[CHANNELS * i + 1] = (uint8_t)((random >> 8 & 255) * (random >> 16 & 255) >> 8);
        picture[CHANNELS * i + 2] = (uint8_t)((i * 255) / pixels);
    }
}

static void count(const uint8_t *picture, size_t pixels, uint64_t counts[CHANNELS][VALUES]) {
    for (size_t i = 0; i < pixels; i++)
        for (size_t c = 0; c < CHANNELS; c++)
            counts[c][picture[CHANNELS * i + c]]++;
}

int main(int argc, char **argv) {
    size_t pixels = (size_t)kernel_size(argc, argv, 20000, 1, 300000000);
    uint8_t *picture = kernel_allocate(pixels, CHANNELS);
    static uint64_t counts[CHANNELS][VALUES];
    int fine = 1;

    make_picture(picture, pixels);
    for (int round = 0; round < ROUNDS; round++)
        count(picture, pixels, counts);
    for (size_t c = 0; c < CHANNELS; c++) {
        uint64_t hash = 0, total = 0, sum = 0, squares = 0, picture_sum = 0, picture_squares = 0;
        for (uint64_t value = 0; value < VALUES; value++) {
            hash = kernel_mix(hash, counts[c][value]);
            total += counts[c][value];
            sum += counts[c][value] * value;
            squares += counts[c][value] * value * value;
        }
        for (size_t i = 0; i < pixels; i++) {
            uint64_t value = picture[CHANNELS * i + c];
            picture_sum += value;
            picture_squares += value * value;
        }
        printf("histogram: channel %zu: %016" PRIx64 "\n", c, hash);
        fine &= total == ROUNDS * pixels && sum == ROUNDS * picture_sum && squares == ROUNDS * picture_squares;
    }
    free(picture);
    return fine ? kernel_passed() : kernel_failed("counts, sums or squares");
}
