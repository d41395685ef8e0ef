// Handlers of faults that are left by siglongjmp: to the function that faults, over a deep recursion with work on the
// way, out of a nested handler, out of one on an alternate stack, past a handler that a signal has run, in a thread; and
// the memory that is looked at is found again and again.
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGES = 16, PAGE = 4096, TURNS = 40 };

static _Thread_local sigjmp_buf *place;
static _Thread_local volatile sig_atomic_t nested;
static char *memory;
static char stack[65536];

static void check(int fine, const char *what) {
    if (!fine) {
        printf("%s failed: %d\n", what, errno);
        exit(1);
    }
}

static void handle(int number, void (*handler)(int), int flags) {
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_handler = handler;
    action.sa_flags = flags;
    sigemptyset(&action.sa_mask);
    check(sigaction(number, &action, NULL) == 0, "sigaction");
}

static void expect_mask(int blocked) {
    sigset_t now;
    check(sigprocmask(SIG_BLOCK, NULL, &now) == 0 && sigismember(&now, SIGSEGV) == 0, "the mask of faults");
    check(sigismember(&now, SIGUSR2) == blocked, "the mask of another signal");
}

static uint64_t work(uint64_t seed, int rounds) {
    uint64_t words[16];
    for (int i = 0; i < 16; i++)
        words[i] = seed + (uint64_t)i;
    for (int i = 0; i < rounds; i++)
        words[i % 16] = words[(i + 5) % 16] * 6364136223846793005u + (uint64_t)i;
    return words[seed % 16] ^ words[rounds % 16];
}

static void on_fault(int number) {
    // Some of its work is done under the fault.
    volatile uint64_t done = work((uint64_t)number, 20);
    (void)done;
    if (nested) {
        nested = 0;
        *(volatile char *)memory = 1;
    }
    siglongjmp(*place, number);
}

// Is a byte there? The fault is in the function that called sigsetjmp.
static int is_there(const char *address) {
    sigjmp_buf here, *before = place;
    place = &here;
    int result = sigsetjmp(here, 1);
    if (result == 0)
        result = *(volatile const char *)address == 0 ? 0 : -1;
    place = before;
    expect_mask(0);
    return result;
}

static uint64_t deep(uint64_t seed, int depth, volatile char *address) {
    uint64_t room[3] = {seed * 3, work(seed, 30), seed + 7};
    if (depth == 0)
        return *address = (char)room[0];
    return deep(room[seed % 3], depth - 1, address) * 5 + room[1];
}

// Over many functions, with values of its own that have to be there behind.
static uint64_t over_many(uint64_t seed) {
    sigjmp_buf here, *before = place;
    uint64_t kept = work(seed, 50);
    double fraction = (double)seed / 7;
    char text[32];
    snprintf(text, sizeof text, "%llu", (unsigned long long)seed);
    place = &here;
    int number = sigsetjmp(here, 1);
    if (number == 0) {
        printf("not reached: %llu\n", (unsigned long long)deep(seed, 25, memory));
    }
    place = before;
    check(number == SIGSEGV, "the number of the fault");
    check(strtoull(text, NULL, 10) == seed && fraction == (double)seed / 7, "values");
    return kept + work(seed + 1, 40);
}

// A function with much that lives over many calls.
static uint64_t large(uint64_t seed) {
    sigjmp_buf here, *before = place;
    uint64_t a = work(seed, 5), b = work(seed + 1, 6), c = work(seed + 2, 7), d = work(seed + 3, 8);
    uint64_t e = work(seed + 4, 5), f = work(seed + 5, 6), g = work(seed + 6, 7), h = work(seed + 7, 8);
    for (int i = 0; i < 6; i++) {
        place = &here;
        int number = sigsetjmp(here, 1);
        place = number == 0 ? place : before;
        if (number == 0)
            a += deep(a ^ b, 6, memory);
        b += work(c ^ (uint64_t)number, i + 3);
        c += work(d, i + 4);
        d += work(e ^ a, i + 5);
        e += work(f, i + 6);
        f += work(g ^ b, i + 7);
        g += work(h, i + 8);
        h += work(a ^ c, i + 9);
    }
    return a ^ b ^ c ^ d ^ e ^ f ^ g ^ h;
}

// From the inside of a handler that a poll has run.
static void of_signal(int number) {
    (void)number;
    printf("not reached: %llu\n", (unsigned long long)deep(3, 5, memory));
}

static int past_a_handler(void) {
    sigjmp_buf here, *before = place;
    place = &here;
    int number = sigsetjmp(here, 1);
    if (number == 0) {
        raise(SIGUSR1);
        printf("not reached\n");
    }
    place = before;
    return number;
}

// A handler that stays, in which another function lands.
static volatile sig_atomic_t stayed;

static void that_stays(int number) {
    (void)number;
    stayed += is_there(memory) == SIGSEGV;
}

static void *in_a_thread(void *argument) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < TURNS; i++)
        sum += over_many((uintptr_t)argument + i) + (uint64_t)is_there(memory + PAGE * (i % PAGES));
    return (void *)(uintptr_t)sum;
}

int main(void) {
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    memory = mmap(NULL, PAGES * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(memory != MAP_FAILED, "mmap");
    for (int i = 1; i < PAGES; i += 2)
        check(mprotect(memory + i * PAGE, PAGE, PROT_READ) == 0, "mprotect");
    handle(SIGSEGV, on_fault, 0);
    handle(SIGUSR1, of_signal, 0);

    uint64_t sum = 0;
    int faults = 0;
    for (uint64_t i = 0; i < TURNS; i++) {
        for (int page = 0; page < PAGES; page++)
            faults += is_there(memory + page * PAGE) == SIGSEGV;
        sum += over_many(i) + large(i);
    }
    printf("%d faults, sum %llu\n", faults, (unsigned long long)sum);

    for (int i = 0; i < TURNS; i++) {
        handle(SIGSEGV, on_fault, SA_NODEFER);
        nested = 1;
        sum += over_many((uint64_t)i);
        handle(SIGSEGV, on_fault, 0);
        check(past_a_handler() == SIGSEGV, "a jump past a handler");
        expect_mask(0);
    }
    handle(SIGUSR1, that_stays, 0);
    for (int i = 0; i < TURNS; i++)
        raise(SIGUSR1);
    printf("nested, past a handler, and %d in one that stays: %llu\n", (int)stayed, (unsigned long long)sum);

    check(sigaltstack(&alternate, NULL) == 0, "sigaltstack");
    handle(SIGSEGV, on_fault, SA_ONSTACK);
    for (int i = 0; i < TURNS; i++) {
        sum += over_many((uint64_t)i) + (uint64_t)is_there(memory);
        check(sigaltstack(NULL, &alternate) == 0 && alternate.ss_flags == 0, "leaving the alternate stack");
    }
    printf("on an alternate stack: %llu\n", (unsigned long long)sum);

    pthread_t threads[3];
    for (uintptr_t i = 0; i < 3; i++)
        check(pthread_create(&threads[i], NULL, in_a_thread, (void *)(i * 100)) == 0, "pthread_create");
    for (int i = 0; i < 3; i++) {
        void *result;
        check(pthread_join(threads[i], &result) == 0, "pthread_join");
        sum += (uintptr_t)result;
    }
    printf("in threads: %llu\n", (unsigned long long)sum);
    return 0;
}
