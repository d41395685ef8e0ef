/*
 * The floating-point environment on x86-64, in arm64's constants. Neutral programs have no x87
 * arithmetic, since their long double is 128 bits wide; but libgcc's arithmetic on it raises some
 * exceptions in the x87 status word, which therefore counts as well.
 */
typedef struct {
    unsigned int control, status;
} environment;

enum { EXCEPTIONS = 31, ROUNDING = 0xc00000, OWN_EXCEPTIONS = 0x3d, OWN_ROUNDING = 0x6000 };

static unsigned int mxcsr(void) {
    unsigned int value;
    __asm__ volatile("stmxcsr %0" : "=m"(value));
    return value;
}

static void set_mxcsr(unsigned int value) { __asm__ volatile("ldmxcsr %0" ::"m"(value)); }

/* The x87 status word has the exceptions at the same bits. */
static unsigned int raised(void) {
    unsigned short status;
    __asm__ volatile("fnstsw %0" : "=am"(status));
    return mxcsr() | (status & OWN_EXCEPTIONS);
}

/* Only all of them can be cleared there: those that stay move to the other register. */
static void set_raised(unsigned int own) {
    __asm__ volatile("fnclex");
    set_mxcsr((mxcsr() & ~(unsigned int)OWN_EXCEPTIONS) | own);
}

/* Bit 0 is the same; the denormal-operand bit, which arm64 has elsewhere, lies between it and the rest. */
static unsigned int own_exceptions(unsigned int generic) { return (generic & 1) | (generic & 30) << 1; }

static unsigned int generic_exceptions(unsigned int own) { return (own & 1) | (own >> 1 & 30); }

/* Up and down have each other's places. */
static unsigned int own_rounding(unsigned int generic) {
    return (generic & 0x400000) >> 8 | (generic & 0x800000) >> 10;
}

static unsigned int generic_rounding(unsigned int own) { return (own & 0x4000) << 8 | (own & 0x2000) << 10; }

int feclearexcept(int exceptions) {
    set_raised(raised() & OWN_EXCEPTIONS & ~own_exceptions((unsigned int)exceptions & EXCEPTIONS));
    return 0;
}

int feraiseexcept(int exceptions) {
    set_mxcsr(mxcsr() | own_exceptions((unsigned int)exceptions & EXCEPTIONS));
    return 0;
}

int fetestexcept(int exceptions) { return (int)(generic_exceptions(raised()) & (unsigned int)exceptions & EXCEPTIONS); }

int fegetround(void) { return (int)generic_rounding(mxcsr()); }

int __fesetround(int mode) {
    set_mxcsr((mxcsr() & ~(unsigned int)OWN_ROUNDING) | own_rounding((unsigned int)mode & ROUNDING));
    return 0;
}

int fegetenv(environment *to) {
    *to = (environment){generic_rounding(mxcsr()), generic_exceptions(raised())};
    return 0;
}

int fesetenv(const environment *from) {
    environment wanted = {0, 0};

    if (from != (const environment *)-1)
        wanted = *from;
    set_mxcsr((mxcsr() & ~(unsigned int)OWN_ROUNDING) | own_rounding(wanted.control & ROUNDING));
    set_raised(own_exceptions(wanted.status & EXCEPTIONS));
    return 0;
}
