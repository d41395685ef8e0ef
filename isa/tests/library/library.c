// The small C library of the tests; see library.h.
#include "library.h"

enum { NR_write = 64, NR_exit_group = 94, NR_brk = 214 };

int __gw_main(int argc, char **argv, char **envp, const unsigned long *auxv);
int main(int argc, char **argv);
void __gw_run_constructors(void);
void __gw_run_destructors(void);

static char line[512];
static size_t used;

static void flush(void) {
    for (size_t done = 0; done < used;) {
        long result = __gw_syscall(NR_write, 1, (long)(line + done), (long)(used - done), 0, 0, 0);
        if (result <= 0)
            leave(120);
        done += (size_t)result;
    }
    used = 0;
}

static void put(char c) {
    line[used++] = c;
    if (c == '\n' || used == sizeof line)
        flush();
}

static void put_number(unsigned long n, unsigned base) {
    char digits[24];
    int i = 0;
    do {
        digits[i++] = "0123456789abcdef"[n % base];
        n /= base;
    } while (n);
    while (i)
        put(digits[--i]);
}

static void put_signed(long n) {
    if (n < 0)
        put('-');
    put_number(n < 0 ? -(unsigned long)n : (unsigned long)n, 10);
}

static void print_list(const char *format, va_list list) {
    for (; *format; format++) {
        if (*format != '%') {
            put(*format);
            continue;
        }
        int wide = *++format == 'l';
        if (wide)
            format++;
        switch (*format) {
        case 'd':
            put_signed(wide ? va_arg(list, long) : va_arg(list, int));
            break;
        case 'u':
            put_number(wide ? va_arg(list, unsigned long) : va_arg(list, unsigned), 10);
            break;
        case 'x':
            put_number(wide ? va_arg(list, unsigned long) : va_arg(list, unsigned), 16);
            break;
        case 's':
            for (const char *s = va_arg(list, const char *); *s; s++)
                put(*s);
            break;
        case 'c':
            put((char)va_arg(list, int));
            break;
        case 'f': {
            union {
                double value;
                unsigned long bits;
            } number = {va_arg(list, double)};
            put_number(number.bits, 16);
            break;
        }
        default:
            leave(121);
        }
    }
}

void print(const char *format, ...) {
    va_list list;
    va_start(list, format);
    print_list(format, list);
    va_end(list);
}

size_t length(const char *s) {
    size_t n = 0;
    while (s[n])
        n++;
    return n;
}

// Lists of free blocks by size in units of 16 bytes; a word in front of each block says which.
static void *free_blocks[64];

void *allocate(size_t bytes) {
    static char *end;
    size_t units = (bytes + 31) / 16;
    if (units < 64 && free_blocks[units]) {
        void *block = free_blocks[units];
        free_blocks[units] = *(void **)block;
        return block;
    }
    if (!end)
        end = (char *)__gw_syscall(NR_brk, 0, 0, 0, 0, 0, 0);
    char *block = end;
    end = (char *)__gw_syscall(NR_brk, (long)(block + units * 16), 0, 0, 0, 0, 0);
    if (end != block + units * 16)
        leave(122);
    *(size_t *)block = units;
    return block + 16;
}

void release(void *block) {
    if (!block)
        return;
    size_t units = *(size_t *)((char *)block - 16);
    if (units < 64) {
        *(void **)block = free_blocks[units];
        free_blocks[units] = block;
    }
}

static void swap(char *a, char *b, size_t size) {
    for (size_t i = 0; i < size; i++) {
        char c = a[i];
        a[i] = b[i];
        b[i] = c;
    }
}

void sort(void *items, size_t count, size_t size, int (*compare)(const void *, const void *)) {
    char *base = items;
    while (count > 1) {
        swap(base, base + count / 2 * size, size);
        size_t smaller = 0;
        for (size_t i = 1; i < count; i++)
            if (compare(base + i * size, base) < 0)
                swap(base + ++smaller * size, base + i * size, size);
        swap(base, base + smaller * size, size);
        sort(base, smaller, size, compare);
        base += (smaller + 1) * size;
        count -= smaller + 1;
    }
}

void leave(int status) {
    __gw_run_destructors();
    for (;;)
        __gw_syscall(NR_exit_group, status, 0, 0, 0, 0, 0);
}

char **gw_test_environment;

int __gw_main(int argc, char **argv, char **envp, const unsigned long *auxv) {
    (void)auxv;
    gw_test_environment = envp;
    __gw_run_constructors();
    leave(main(argc, argv));
}
