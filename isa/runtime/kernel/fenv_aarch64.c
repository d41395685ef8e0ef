/* The floating-point environment on arm64, whose constants the C library uses on every set. */
typedef struct {
    unsigned int control, status;
} environment;

enum { EXCEPTIONS = 31, ROUNDING = 0xc00000 };

static unsigned int control(void) {
    unsigned long value;
    __asm__ volatile("mrs %0, fpcr" : "=r"(value));
    return (unsigned int)value;
}

static unsigned int status(void) {
    unsigned long value;
    __asm__ volatile("mrs %0, fpsr" : "=r"(value));
    return (unsigned int)value;
}

static void set_control(unsigned int value) { __asm__ volatile("msr fpcr, %0" ::"r"((unsigned long)value)); }

static void set_status(unsigned int value) { __asm__ volatile("msr fpsr, %0" ::"r"((unsigned long)value)); }

int feclearexcept(int exceptions) {
    set_status(status() & ~((unsigned int)exceptions & EXCEPTIONS));
    return 0;
}

int feraiseexcept(int exceptions) {
    set_status(status() | ((unsigned int)exceptions & EXCEPTIONS));
    return 0;
}

int fetestexcept(int exceptions) { return (int)(status() & (unsigned int)exceptions & EXCEPTIONS); }

int fegetround(void) { return (int)(control() & ROUNDING); }

int __fesetround(int mode) {
    set_control((control() & ~(unsigned int)ROUNDING) | ((unsigned int)mode & ROUNDING));
    return 0;
}

/* Only what the neutral interface knows: the rest of both registers is the machine's own. */
int fegetenv(environment *to) {
    *to = (environment){control() & ROUNDING, status() & EXCEPTIONS};
    return 0;
}

int fesetenv(const environment *from) {
    environment wanted = {0, 0};

    if (from != (const environment *)-1)
        wanted = *from;
    set_control((control() & ~(unsigned int)ROUNDING) | (wanted.control & ROUNDING));
    set_status((status() & ~(unsigned int)EXCEPTIONS) | (wanted.status & EXCEPTIONS));
    return 0;
}
