// CRC-32C (Castagnoli), the sum of iSCSI and ext4, by tables for 8 bytes at a time (Intel's slicing-by-8).
#include "private.h"

#define POLYNOMIAL 0x82f63b78U // reflected

static uint32_t tables[8][256];

static void make_tables(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t sum = byte;
        for (int bit = 0; bit < 8; bit++)
            sum = sum >> 1 ^ (sum & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = sum;
    }
    for (uint32_t byte = 0; byte < 256; byte++)
        for (int table = 1; table < 8; table++)
            tables[table][byte] = tables[table - 1][byte] >> 8 ^ tables[0][tables[table - 1][byte] & 0xff];
}

uint32_t gw_crc32c(uint32_t sum, const void *bytes, uint64_t length) {
    const uint8_t *next = bytes;
    if (tables[0][1] == 0)
        make_tables();
    sum = ~sum;
    for (; length >= 8; length -= 8, next += 8) {
        uint64_t word;
        __builtin_memcpy(&word, next, sizeof word);
        word ^= sum;
        sum = 0;
        for (int table = 0; table < 8; table++)
            sum ^= tables[7 - table][word >> (8 * table) & 0xff];
    }
    for (; length > 0; length--)
        sum = sum >> 8 ^ tables[0][(sum ^ *next++) & 0xff];
    return ~sum;
}
