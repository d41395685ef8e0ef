/* Comparison of memory, in C for every set: the back end and the C library call it by these names. */
int memcmp(const void *left, const void *right, unsigned long size);
int bcmp(const void *left, const void *right, unsigned long size);

int memcmp(const void *left, const void *right, unsigned long size) {
    const unsigned char *l = left, *r = right;

    for (; size && *l == *r; size--)
        l++, r++;
    return size ? *l - *r : 0;
}

int bcmp(const void *left, const void *right, unsigned long size) { return memcmp(left, right, size); }
