/* Fills every kind of mapping with a pattern, rewrites a part of it all the time, and checks all of it
 * all the time and when it is asked.
 *
 *   pattern [without-huge-pages]         the latter with PR_SET_THP_DISABLE
 *
 * Each page that was written describes itself: its words follow from the number of its area, its own and
 * its version. What each page has to hold stands in a model, with a sum over all of it, so that a model
 * that has turned into zeros does not go with memory that has. A page of version 0 was never written, or
 * given back: it is zero, or the file's.
 *
 * It listens on port 7000. A connection sends one word and gets one line:
 *   check      "ok PAGES PASSES REWRITTEN" when all of it was looked at since then
 *   huge       "ok KILOBYTES" of huge pages that fresh memory with MADV_HUGEPAGE gets
 * Whoever finds a difference says so on standard error, and the program ends with status 1.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define HUGE (2UL << 20)
#define THREADS 48
#define AREAS 512
#define FILE_NUMBER 100000UL

enum what { WRITTEN, SPARSE, UNREADABLE };

struct area {
    const char *kind;
    char *at;
    /* The same pages once more, or nothing. */
    char *alias;
    size_t pages;
    /* What pages of version 0 hold: 0 for zeros, or the number of the file's pattern. */
    uint64_t file;
    /* Closed to the program but while it is looked at. */
    bool closed;
    uint32_t *version;
    uint64_t sum;
};

static struct area area[AREAS];
static size_t areas;
static uint64_t total, passes, rewritten;
/* Areas that must stay closed to everybody. */
static char *guard[THREADS];
static size_t guards;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t passed = PTHREAD_COND_INITIALIZER, written = PTHREAD_COND_INITIALIZER;
static int mouth[2];

static void fail(const char *format, ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(text, sizeof text - 1, format, arguments);
    va_end(arguments);
    text[length++] = '\n';
    if (write(2, text, (size_t)length) < 0) {}
    _exit(1);
}

/* SplitMix64's output function (Steele, Lea, Flood 2014). */
static uint64_t mixed(uint64_t x) {
    x += 0x9e3779b97f4a7c15UL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9UL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebUL;
    return x ^ (x >> 31);
}

static uint64_t base(uint64_t number, uint64_t page, uint64_t version) {
    return mixed(number << 40 ^ page << 20 ^ version) | 1;
}

static void fill(void *at, uint64_t number, uint64_t page, uint64_t version) {
    uint64_t *words = at, first = base(number, page, version);
    for (uint64_t i = 0; i < WORDS; i++)
        words[i] = first * (i + 1);
}

static void look(const struct area *a, size_t page, const char *at) {
    const uint64_t *words = (const uint64_t *)(at + page * PAGE);
    uint64_t number = (uint64_t)(a - area), version = a->version[page], first = 0;
    if (version)
        first = base(number, page, version);
    else if (a->file)
        first = base(a->file, page, 0);
    for (uint64_t i = 0; i < WORDS; i++)
        if (words[i] != first * (i + 1))
            fail("pattern: %s (area %lu), page %zu of %zu at %p, version %lu: word %lu is %lx and should be %lx",
                 a->kind, number, page, a->pages, (const void *)words, version, i, words[i], first * (i + 1));
}

static uint64_t sum_of(const struct area *a) {
    uint64_t sum = mixed((uint64_t)a->at) ^ mixed(a->pages);
    for (size_t page = 0; page < a->pages; page++)
        sum += mixed((uint64_t)page << 32 | a->version[page]);
    return sum;
}

static void rewrite(struct area *a, size_t page) {
    a->sum -= mixed((uint64_t)page << 32 | a->version[page]);
    a->version[page]++;
    a->sum += mixed((uint64_t)page << 32 | a->version[page]);
    char *at = a->alias && a->version[page] % 2 ? a->alias : a->at;
    fill(at + page * PAGE, (uint64_t)(a - area), page, a->version[page]);
}

/* Takes an area into the model; every page is written, or two of seven. */
static struct area *take(const char *kind, void *at, size_t pages, enum what what) {
    if (at == MAP_FAILED || !at)
        fail("pattern: %s of %zu pages: %s", kind, pages, strerror(errno));
    if (areas == AREAS)
        fail("pattern: too many areas");
    struct area *a = &area[areas++];
    *a = (struct area){.kind = kind, .at = at, .pages = pages, .version = calloc(pages, sizeof *a->version)};
    a->sum = sum_of(a);
    for (size_t page = 0; page < pages; page++)
        if (what != SPARSE || page % 7 == 1 || page % 7 == 5)
            rewrite(a, page);
    total += pages;
    if (what == UNREADABLE) {
        a->closed = true;
        if (mprotect(at, pages * PAGE, PROT_NONE))
            fail("pattern: mprotect: %s", strerror(errno));
    }
    return a;
}

static void *anonymous(size_t pages, int flags) {
    return mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_ANONYMOUS | flags, -1, 0);
}

/* At a border of huge pages. */
static char *aligned(size_t bytes) {
    char *all = anonymous((bytes + HUGE) / PAGE, MAP_PRIVATE);
    if (all == MAP_FAILED)
        fail("pattern: mmap: %s", strerror(errno));
    return (char *)(((uintptr_t)all + HUGE - 1) & ~(HUGE - 1));
}

static void advise(void *at, size_t pages, int advice) {
    if (madvise(at, pages * PAGE, advice) && errno != EINVAL)
        fail("pattern: madvise %d: %s", advice, strerror(errno));
}

static int file_of(const char *path, size_t pages, uint64_t number) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)(pages * PAGE)))
        fail("pattern: %s: %s", path, strerror(errno));
    for (size_t page = 0; number && page < pages; page++) {
        uint64_t words[WORDS];
        fill(words, number, page, 0);
        if (pwrite(fd, words, PAGE, (off_t)(page * PAGE)) != (ssize_t)PAGE)
            fail("pattern: %s: %s", path, strerror(errno));
    }
    return fd;
}

/* A file, or shared memory, that is mapped twice. */
static void shared(const char *kind, int fd, size_t pages, enum what what) {
    char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    char *alias = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (alias == MAP_FAILED)
        fail("pattern: %s: %s", kind, strerror(errno));
    take(kind, at, pages, what)->alias = alias;
}

/* Waits with the stack pointer below what it has filled; the writer goes there and back at will. */
static void *stand(void *size) {
    size_t pages = (size_t)size;
    char room[(pages + 1) * PAGE];
    /* What ran before may have left something there. */
    memset(room, 0, sizeof room);
    pthread_mutex_lock(&lock);
    take("a thread's stack", (char *)(((uintptr_t)room + PAGE - 1) & ~(PAGE - 1)), pages, pages % 2 ? WRITTEN : SPARSE);
    passes++;
    pthread_cond_broadcast(&passed);
    for (;;)
        pthread_cond_wait(&passed, &lock);
    return NULL;
}

static void begin_thread(void *(*run)(void *), void *argument, size_t stack) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, stack);
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, run, argument);
    if (failed)
        fail("pattern: pthread_create: %s", strerror(failed));
}

/* Threads with stacks of several sizes, and between them small areas that the kernel places beside them:
 * with other rights or advice than their neighbours, so that they stay areas of their own. */
static void threads(void) {
    for (size_t i = 0; i < THREADS; i++) {
        size_t pages = 3 + i % 5 * 11;
        pthread_mutex_lock(&lock);
        uint64_t before = passes;
        begin_thread(stand, (void *)pages, (pages + 20) * PAGE);
        while (passes == before)
            pthread_cond_wait(&passed, &lock);
        for (size_t small = 1; small < 4; small++) {
            char *at = anonymous(small + i % 3, MAP_PRIVATE);
            take("a small area", at, small + i % 3, small == 2 ? SPARSE : WRITTEN);
            if (small != 2)
                advise(at, small + i % 3, small == 1 ? MADV_DONTDUMP : MADV_MERGEABLE);
        }
        guard[guards++] = mmap(NULL, 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pthread_mutex_unlock(&lock);
    }
}

static void others(void) {
    const size_t huge = HUGE / PAGE;
    for (size_t i = 0; i < 24; i++)
        take("the heap", aligned_alloc(PAGE, (1 + i % 7) * PAGE), 1 + i % 7, i % 3 ? WRITTEN : SPARSE);
    uintptr_t end = (uintptr_t)sbrk(0);
    sbrk((intptr_t)(-end & (PAGE - 1)));
    take("brk", sbrk((intptr_t)(300 * PAGE)), 300, SPARSE);
    take("big memory", anonymous(4 * huge, MAP_PRIVATE), 4 * huge, WRITTEN);
    take("big memory with holes", anonymous(2 * huge + 77, MAP_PRIVATE), 2 * huge + 77, SPARSE);
    char *at = aligned(3 * HUGE);
    advise(at, 3 * huge, MADV_HUGEPAGE);
    take("memory of huge pages", at, 3 * huge, WRITTEN);
    at = aligned(2 * HUGE);
    advise(at, 2 * huge, MADV_HUGEPAGE);
    take("memory of huge pages with holes", at, 2 * huge, SPARSE);
    at = aligned(2 * HUGE);
    advise(at, 2 * huge, MADV_NOHUGEPAGE);
    take("memory without huge pages", at, 2 * huge, SPARSE);
    struct area *a = take("memory that was given back here and there", aligned(3 * HUGE), 3 * huge, WRITTEN);
    for (size_t page = 0; page + 9 < a->pages; page += 13 + page % 29) {
        advise(a->at + page * PAGE, 9, MADV_DONTNEED);
        memset(a->version + page, 0, 9 * sizeof *a->version);
    }
    a->sum = sum_of(a);
    take("shared memory", anonymous(huge + 5, MAP_SHARED), huge + 5, WRITTEN);
    take("shared memory with holes", anonymous(2 * huge, MAP_SHARED), 2 * huge, SPARSE);
    int fd = memfd_create("pattern", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(2 * HUGE)))
        fail("pattern: memfd: %s", strerror(errno));
    shared("a memfd with holes", fd, 2 * huge, SPARSE);
    shared("a file of a tmpfs", file_of("/dev/shm/pattern", huge, 0), huge, SPARSE);
    shared("a file", file_of("/pattern.shared", 300, 0), 300, WRITTEN);
    fd = file_of("/pattern.private", 700, FILE_NUMBER);
    for (size_t i = 0; i < 2; i++) {
        at = mmap(NULL, 700 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, fd, 0);
        /* The first is never written. */
        a = take("a private mapping of a file", at, i ? 700 : 0, SPARSE);
        if (!i) {
            a->pages = 700;
            a->version = calloc(700, sizeof *a->version);
            a->sum = sum_of(a);
            total += 700;
        }
        a->file = FILE_NUMBER;
    }
    take("memory closed to the program", anonymous(70, MAP_PRIVATE), 70, UNREADABLE);
    at = anonymous(2 * huge, MAP_PRIVATE);
    memset(at, 1, huge * PAGE);
    /* Written before it moves: what arrives is what was moved. */
    a = take("memory that moved", at, 600, WRITTEN);
    at = mremap(a->at, 2 * huge * PAGE, 2 * huge * PAGE + 5 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, aligned(4 * HUGE) + 3 * PAGE);
    if (at == MAP_FAILED)
        fail("pattern: mremap: %s", strerror(errno));
    a->at = at;
    a->sum = sum_of(a);
    at = mmap(NULL, 9 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_LOCKED, -1, 0);
    if (at != MAP_FAILED)
        take("locked memory", at, 9, SPARSE);
    take("memory that grows down", mmap(NULL, 40 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_GROWSDOWN, -1, 0), 40, SPARSE);
}

static void check(struct area *a) {
    if (a->sum != sum_of(a))
        fail("pattern: the model of %s (area %zu) has changed by itself", a->kind, (size_t)(a - area));
    if (a->closed && mprotect(a->at, a->pages * PAGE, PROT_READ))
        fail("pattern: mprotect: %s", strerror(errno));
    for (size_t page = 0; page < a->pages; page++) {
        look(a, page, a->at);
        if (a->alias)
            look(a, page, a->alias);
    }
    if (a->closed && mprotect(a->at, a->pages * PAGE, PROT_NONE))
        fail("pattern: mprotect: %s", strerror(errno));
}

static void *check_on(void *nothing) {
    for (;;) {
        uint64_t seen = 0;
        for (size_t i = 0; i < areas; i++) {
            pthread_mutex_lock(&lock);
            check(&area[i]);
            seen += area[i].pages;
            pthread_mutex_unlock(&lock);
        }
        if (seen != total)
            fail("pattern: there are %lu pages, and should be %lu", seen, total);
        for (size_t i = 0; i < guards; i++)
            if (write(mouth[1], guard[i], 1) != -1 || errno != EFAULT)
                fail("pattern: the guard at %p can be read", (void *)guard[i]);
        pthread_mutex_lock(&lock);
        /* The lock is not fair: without this the writer may get no turn for many passes. */
        for (uint64_t before = rewritten; rewritten == before;)
            pthread_cond_wait(&written, &lock);
        passes++;
        pthread_cond_broadcast(&passed);
        pthread_mutex_unlock(&lock);
    }
    return nothing;
}

static void *write_on(void *nothing) {
    for (uint64_t turn = 0;; turn++) {
        pthread_mutex_lock(&lock);
        struct area *a = &area[mixed(turn) % areas];
        /* Of each area a part is never written again. */
        for (size_t i = 0; i < 16 && !a->closed && a->pages; i++) {
            size_t page = mixed(turn ^ i << 50) % a->pages;
            if (page % 3 == 0 && a->version[page]) {
                rewrite(a, page);
                rewritten++;
            }
        }
        pthread_cond_signal(&written);
        pthread_mutex_unlock(&lock);
        usleep(200);
    }
    return nothing;
}

/* Kilobytes of huge pages that fresh memory gets. */
static unsigned long huge_kilobytes(void) {
    char *at = aligned(2 * HUGE), line[256];
    advise(at, 2 * HUGE / PAGE, MADV_HUGEPAGE);
    memset(at, 1, 2 * HUGE);
    FILE *smaps = fopen("/proc/self/smaps", "re");
    unsigned long start = 0, end = 0, kilobytes = 0, found = 0;
    while (smaps && fgets(line, sizeof line, smaps)) {
        unsigned long from, to;
        if (sscanf(line, "%lx-%lx ", &from, &to) == 2)
            start = from, end = to;
        else if (sscanf(line, "AnonHugePages: %lu", &kilobytes) == 1 && start <= (uintptr_t)at && (uintptr_t)at < end)
            found = kilobytes;
    }
    if (!smaps)
        fail("pattern: smaps: %s", strerror(errno));
    fclose(smaps);
    munmap(at, 2 * HUGE);
    return found;
}

static void answer(int connection) {
    char word[16] = {0};
    if (read(connection, word, sizeof word - 1) > 0 && strncmp(word, "huge", 4) == 0)
        dprintf(connection, "ok %lu\n", huge_kilobytes());
    else {
        pthread_mutex_lock(&lock);
        /* The one that is under way may have begun before. */
        for (uint64_t before = passes; passes < before + 2;)
            pthread_cond_wait(&passed, &lock);
        dprintf(connection, "ok %lu %lu %lu\n", total, passes, rewritten);
        pthread_mutex_unlock(&lock);
    }
    close(connection);
}

int main(int count, char **words) {
    if (count == 2 && strcmp(words[1], "without-huge-pages") == 0 && prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0))
        fail("pattern: PR_SET_THP_DISABLE: %s", strerror(errno));
    /* All of the heap below the break. */
    mallopt(M_MMAP_THRESHOLD, 1 << 30);
    char room[70 * PAGE];
    memset(room, 0, sizeof room);
    take("the main thread's stack", (char *)(((uintptr_t)room + PAGE - 1) & ~(PAGE - 1)), 69, SPARSE);
    if (pipe(mouth))
        fail("pattern: pipe: %s", strerror(errno));
    threads();
    others();
    passes = 0;
    begin_thread(check_on, NULL, 1 << 20);
    begin_thread(write_on, NULL, 1 << 20);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), yes = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(7000)};
    if (bind(listener, (struct sockaddr *)&any, sizeof any) < 0 || listen(listener, 8) < 0)
        fail("pattern: port 7000: %s", strerror(errno));
    for (;;) {
        int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        if (connection >= 0)
            answer(connection);
    }
}
