/* Programs that change their memory in every way there is, at full speed and for ever, and that
 * know at every moment what each of their pages has to hold.
 *
 *   torture CASE SEED [CASE SEED]...     one process for each pair, all below the first one
 *
 * A page that was written describes itself: key (its address when it was first written), version,
 * touches (writes of one word since), a checksum of these, and then words that follow from key and
 * version. Beside it stands a model: what was written last. Each check compares both. Whoever finds
 * a difference says so on standard error, and the whole service ends with status 1.
 *
 * The first process listens on port 7000. Whoever connects gets "ok NUMBER\n" when every program has
 * looked at all of its pages from the beginning since then; NUMBER counts all operations so far.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define HUGE (2UL << 20)
#define MAX_REGIONS 20
#define MAX_PAGES 256
#define HUGE_PAGES 1024
#define MAX_CHILDREN 2
#define MAX_THREADS 3
#define MAX_PROGRAMS 256
#define FILE_PAGES 256
#define FILE_KEY 0xf11e0000UL
#define SPARSE_SLOTS 192

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25
#endif
#ifndef MADV_GUARD_INSTALL
#define MADV_GUARD_INSTALL 102
#define MADV_GUARD_REMOVE 103
#endif

enum kind { FREE, ANON, SHARED, MEMFD, MEMFD_PRIVATE, FILE_PRIVATE, FILE_SHARED, BIG, SPARSE, LOCKED, HEAP, KINDS };

enum operation {
    WRITE, TOUCH, CHECK, CHECK_ALL,
    MAP, UNMAP, CUT, REMAP, BRK, PROTECT, DISCARD, PUNCH, GUARD, LOCK, ADVISE,
    FORK, EXEC, THREAD, REAP, OPERATIONS,
};

struct recipe {
    const char *name;
    /* Generations of processes and threads below a program. */
    unsigned depth;
    /* Weights. Writing and checking is always in it. */
    unsigned operation[OPERATIONS];
    unsigned kind[KINDS];
    /* Pages are discarded before they become guard pages: while pages follow a service that runs
     * already, the kernel tells of the one and not of the other. */
    bool tells;
    /* Pages of a region at most, where it has not the usual number. */
    unsigned pages;
};

static const struct recipe recipes[] = {
    {"map", 3, {[MAP] = 8, [UNMAP] = 4, [CUT] = 4, [REMAP] = 12, [BRK] = 8, [PROTECT] = 6}, {[ANON] = 4}},
    {"fork", 3, {[MAP] = 3, [UNMAP] = 1, [FORK] = 3, [REAP] = 3}, {[ANON] = 4, [SHARED] = 1}},
    {"exec", 3, {[MAP] = 3, [UNMAP] = 1, [EXEC] = 3, [REAP] = 3, [BRK] = 2}, {[ANON] = 4}},
    {"threads", 3, {[MAP] = 6, [UNMAP] = 4, [CUT] = 2, [REMAP] = 3, [THREAD] = 4, [REAP] = 3}, {[ANON] = 4}},
    {"huge", 3, {[MAP] = 2, [UNMAP] = 1, [CUT] = 1, [DISCARD] = 6, [PROTECT] = 3, [ADVISE] = 4, [REMAP] = 1}, {[BIG] = 1}},
    {"discard", 3, {[MAP] = 2, [UNMAP] = 1, [DISCARD] = 40, [REMAP] = 2}, {[ANON] = 4, [FILE_PRIVATE] = 1, [SHARED] = 1}},
    {"shared", 3, {[MAP] = 3, [UNMAP] = 1, [FORK] = 2, [REAP] = 2, [PUNCH] = 3, [DISCARD] = 3}, {[SHARED] = 4}},
    {"memfd", 3, {[MAP] = 3, [UNMAP] = 1, [FORK] = 1, [REAP] = 1, [PUNCH] = 4, [DISCARD] = 3}, {[MEMFD] = 3, [MEMFD_PRIVATE] = 2}},
    {"file", 3, {[MAP] = 4, [UNMAP] = 2, [CUT] = 2, [DISCARD] = 6, [PROTECT] = 2}, {[FILE_PRIVATE] = 4}},
    {"filefork", 3, {[MAP] = 6, [UNMAP] = 5, [FORK] = 3, [REAP] = 3}, {[FILE_PRIVATE] = 1}},
    /* Areas small enough that a child comes to have the same ones as its parent, with other rights. */
    {"rights", 3, {[MAP] = 4, [UNMAP] = 3, [PROTECT] = 12, [LOCK] = 12, [FORK] = 3, [REAP] = 3}, {[ANON] = 2, [LOCKED] = 4, [FILE_PRIVATE] = 2, [MEMFD_PRIVATE] = 2}, .pages = 3},
    {"filewrite", 3, {[MAP] = 1, [UNMAP] = 1}, {[FILE_SHARED] = 4}},
    {"sparse", 3, {[MAP] = 1, [UNMAP] = 1, [DISCARD] = 10}, {[SPARSE] = 1}},
    {"lock", 3, {[MAP] = 3, [UNMAP] = 1, [CUT] = 1, [LOCK] = 8, [DISCARD] = 4}, {[LOCKED] = 3, [ANON] = 3}},
    {"guard", 3, {[MAP] = 3, [UNMAP] = 2, [CUT] = 1, [GUARD] = 10, [PROTECT] = 10, [REMAP] = 3}, {[ANON] = 4}},
    {"toldguard", 3, {[MAP] = 3, [UNMAP] = 2, [CUT] = 1, [GUARD] = 10, [PROTECT] = 10, [REMAP] = 3}, {[ANON] = 4}, .tells = true},
    {"churn", 3, {[MAP] = 4, [UNMAP] = 2, [FORK] = 12, [EXEC] = 4, [REAP] = 16}, {[ANON] = 4}},
};

struct page {
    uint64_t key;
    uint32_t version; /* 0: as it was mapped, zero or the file's */
    uint32_t touches;
    uint8_t protection; /* PROT_* */
    bool guard;
    bool mine;   /* nobody else writes it */
    uint8_t lent; /* to which child, from 1; 0: to none */
};

struct region {
    enum kind kind;
    char *at;
    size_t pages;
    size_t stride;    /* bytes from one page to the next */
    size_t scatter;   /* page i is i * stride + hash of i below this */
    size_t first;     /* index in the file of the first page */
    bool split;       /* perhaps more than one area for the kernel */
    char *alias;      /* the same pages once more */
    int fd;
    struct page *page;
};

struct engine {
    uint64_t random;
    const struct recipe *recipe;
    unsigned depth;
    bool main; /* of its process's first thread */
    uint64_t operations;
    size_t locked;
    struct region region[MAX_REGIONS];
    pid_t child[MAX_CHILDREN];
    struct {
        pthread_t thread;
        struct engine *engine;
        bool lives;
        atomic_bool over;
    } thread[MAX_THREADS];
    atomic_bool *over;
    struct page pages[MAX_REGIONS][HUGE_PAGES];
};

struct status {
    atomic_uint_fast64_t checks;
    atomic_uint_fast64_t operations;
};

static struct status *status; /* one for each program, shared by all */
static struct status *own;
static const char *case_name = "";
static uint64_t case_seed;
static struct recipe own_recipe;
/* Where address space is taken and given back, nobody else's may be. */
static pthread_mutex_t space = PTHREAD_MUTEX_INITIALIZER;

static void fail(const char *format, ...) {
    char text[1024];
    int length = snprintf(text, sizeof text, "torture %s %lu, process %d: ", case_name, case_seed, getpid());
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(text + length, sizeof text - (size_t)length - 1, format, arguments);
    va_end(arguments);
    text[length++] = '\n';
    if (write(2, text, (size_t)length) < 0) {}
    _exit(1);
}

static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15UL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9UL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebUL;
    return x ^ (x >> 31);
}

static uint64_t next(struct engine *e) { return mix(e->random += 0x632be59bd9b4e019UL); }
static uint64_t below(struct engine *e, uint64_t limit) { return next(e) % limit; }

/* --- Pages ----------------------------------------------------------------------------------- */

static void fill(uint64_t *page, uint64_t key, uint64_t version, uint64_t touches) {
    uint64_t base = mix(key ^ version << 32);
    page[0] = key;
    page[1] = version;
    page[2] = touches;
    page[3] = mix(base ^ touches);
    for (size_t i = 4; i < WORDS; i++)
        page[i] = base * (i | 1) + version;
}

static bool is_right(const uint64_t *page, uint64_t key, uint64_t version, uint64_t touches) {
    uint64_t base = mix(key ^ version << 32);
    if (page[0] != key || page[1] != version || page[2] != touches || page[3] != mix(base ^ touches))
        return false;
    uint64_t wrong = 0;
    for (size_t i = 4; i < WORDS; i++)
        wrong |= page[i] ^ (base * (i | 1) + version);
    return wrong == 0;
}

static bool is_zero(const uint64_t *page) {
    uint64_t all = 0;
    for (size_t i = 0; i < WORDS; i++)
        all |= page[i];
    return all == 0;
}

static bool is_of_file(const struct region *r) { return r->kind == FILE_PRIVATE || r->kind == MEMFD_PRIVATE; }
static bool is_shared(const struct region *r) { return r->kind == SHARED || r->kind == MEMFD || r->kind == FILE_SHARED; }

static char *address(const struct region *r, size_t i) {
    size_t off = i * r->stride;
    if (r->scatter)
        off += mix(i) % r->scatter * PAGE;
    return r->at + off;
}

static void expect(const struct region *r, size_t i, const void *at) {
    const struct page *p = &r->page[i];
    const uint64_t *words = at;
    bool right;
    if (p->version)
        right = is_right(words, p->key, p->version, p->touches);
    else if (is_of_file(r))
        right = is_right(words, FILE_KEY + r->first + i, 1, 0);
    else
        right = is_zero(words);
    if (!right)
        fail("kind %d, page %zu of %zu at %p (view %p) should hold key %lx version %u touches %u "
             "and holds %lx %lx %lx %lx %lx ... %lx",
             r->kind, i, r->pages, (void *)address(r, i), at, p->key, p->version, p->touches, words[0], words[1],
             words[2], words[3], words[4], words[WORDS - 1]);
}

static void check(const struct region *r, size_t i) {
    const struct page *p = &r->page[i];
    if (!p->mine || p->guard || !(p->protection & PROT_READ))
        return;
    expect(r, i, address(r, i));
    if (r->alias)
        expect(r, i, r->alias + i * PAGE);
}

static bool is_writable(const struct page *p) { return p->mine && !p->guard && (p->protection & PROT_WRITE); }

static void write_page(struct engine *e, struct region *r, size_t i) {
    struct page *p = &r->page[i];
    if (!is_writable(p))
        return;
    p->key = (uint64_t)address(r, i);
    p->version++;
    p->touches = 0;
    if (r->alias && below(e, 4) == 0) {
        if (r->fd >= 0 && below(e, 2)) {
            uint64_t words[WORDS];
            fill(words, p->key, p->version, 0);
            if (pwrite(r->fd, words, PAGE, (off_t)(i * PAGE)) != (ssize_t)PAGE)
                fail("pwrite: %s", strerror(errno));
        } else
            fill((uint64_t *)(r->alias + i * PAGE), p->key, p->version, 0);
    } else
        fill((uint64_t *)address(r, i), p->key, p->version, 0);
}

static void touch_page(struct region *r, size_t i) {
    struct page *p = &r->page[i];
    if (!is_writable(p) || !p->version)
        return;
    uint64_t *words = (uint64_t *)address(r, i);
    p->touches++;
    words[2] = p->touches;
    words[3] = mix(mix(p->key ^ (uint64_t)p->version << 32) ^ p->touches);
}

static void set_pages(struct region *r, size_t from, size_t to, bool all) {
    for (size_t i = from; i < to; i++) {
        if (all)
            r->page[i] = (struct page){.protection = PROT_READ | PROT_WRITE, .mine = true};
        r->page[i].version = 0;
        r->page[i].touches = 0;
        r->page[i].key = 0;
    }
}

/* --- Regions --------------------------------------------------------------------------------- */

static struct region *some_region(struct engine *e) {
    struct region *found = NULL;
    unsigned seen = 0;
    for (size_t i = 0; i < MAX_REGIONS; i++)
        if (e->region[i].kind != FREE && below(e, ++seen) == 0)
            found = &e->region[i];
    return found;
}

static struct region *free_region(struct engine *e) {
    for (size_t i = 0; i < MAX_REGIONS; i++)
        if (e->region[i].kind == FREE) {
            struct region *r = &e->region[i];
            *r = (struct region){.kind = FREE, .fd = -1, .stride = PAGE, .page = e->pages[i]};
            return r;
        }
    return NULL;
}

/* A part of a region's pages, never none. */
static void some_pages(struct engine *e, const struct region *r, size_t *from, size_t *to) {
    *from = below(e, r->pages);
    size_t most = r->pages - *from;
    *to = *from + 1 + below(e, below(e, 4) ? (most < 8 ? most : 8) : most);
}

static bool is_lent(const struct region *r) {
    for (size_t i = 0; i < r->pages; i++)
        if (r->page[i].lent || !r->page[i].mine)
            return true;
    return false;
}

static int numbered_file(struct engine *e) {
    char path[64];
    snprintf(path, sizeof path, "/data/w%d-%lx", getpid(), next(e));
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        fail("open %s: %s", path, strerror(errno));
    return fd;
}

static void unlink_file(int fd) {
    char link[64], path[128];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length > 0) {
        path[length] = 0;
        unlink(path);
    }
}

static void map(struct engine *e) {
    struct region *r = free_region(e);
    if (!r)
        return;
    unsigned total = 0;
    for (size_t k = 0; k < KINDS; k++)
        total += e->recipe->kind[k];
    uint64_t dice = below(e, total);
    enum kind kind = ANON;
    for (size_t k = 0; k < KINDS; k++) {
        if (dice < e->recipe->kind[k]) {
            kind = (enum kind)k;
            break;
        }
        dice -= e->recipe->kind[k];
    }
    size_t most = e->recipe->pages ? e->recipe->pages : below(e, 4) ? 32 : MAX_PAGES;
    size_t pages = 1 + below(e, most), length = pages * PAGE;
    const int rw = PROT_READ | PROT_WRITE;
    char *at = MAP_FAILED;
    r->pages = pages;
    switch (kind) {
    case ANON:
        at = mmap(NULL, length, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        break;
    case LOCKED:
        if (e->locked + pages > 256)
            return;
        at = mmap(NULL, length, rw, MAP_PRIVATE | MAP_ANONYMOUS | (below(e, 2) ? MAP_LOCKED : 0), -1, 0);
        if (at != MAP_FAILED && mlock(at, length) < 0)
            fail("mlock of %zu pages: %s", pages, strerror(errno));
        break;
    case SHARED:
        at = mmap(NULL, length, rw, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        break;
    case MEMFD:
    case FILE_SHARED:
        r->fd = kind == MEMFD ? memfd_create("torture", MFD_CLOEXEC) : numbered_file(e);
        if (r->fd < 0 || ftruncate(r->fd, (off_t)length) < 0)
            fail("memfd: %s", strerror(errno));
        at = mmap(NULL, length, rw, MAP_SHARED, r->fd, 0);
        r->alias = mmap(NULL, length, rw, MAP_SHARED, r->fd, 0);
        if (r->alias == MAP_FAILED)
            fail("alias: %s", strerror(errno));
        break;
    case MEMFD_PRIVATE: {
        int fd = memfd_create("private", MFD_CLOEXEC);
        for (size_t i = 0; i < pages; i++) {
            uint64_t words[WORDS];
            fill(words, FILE_KEY + i, 1, 0);
            if (pwrite(fd, words, PAGE, (off_t)(i * PAGE)) != (ssize_t)PAGE)
                fail("memfd: %s", strerror(errno));
        }
        at = mmap(NULL, length, rw, MAP_PRIVATE, fd, 0);
        close(fd);
        break;
    }
    case FILE_PRIVATE: {
        int fd = open("/data/base", O_RDONLY | O_CLOEXEC);
        r->first = below(e, FILE_PAGES - pages + 1);
        at = mmap(NULL, length, rw, MAP_PRIVATE, fd, (off_t)(r->first * PAGE));
        close(fd);
        break;
    }
    case BIG: {
        r->pages = pages = e->recipe == &own_recipe ? 512 : 512 * (1 + below(e, HUGE_PAGES / 512));
        length = pages * PAGE;
        char *all = mmap(NULL, length + HUGE, rw, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (all == MAP_FAILED)
            break;
        at = (char *)(((uintptr_t)all + HUGE - 1) & ~(HUGE - 1));
        if (at > all)
            munmap(all, (size_t)(at - all));
        munmap(at + length, (size_t)(all + HUGE - at));
        if (madvise(at, length, MADV_HUGEPAGE) < 0)
            fail("MADV_HUGEPAGE: %s", strerror(errno));
        break;
    }
    case SPARSE:
        r->pages = pages = SPARSE_SLOTS;
        for (size_t i = 0; i < MAX_REGIONS; i++)
            if (e->region[i].kind == SPARSE)
                return; /* One is enough: whoever compares reads tables of it all. */
        /* Larger than the machine's memory; of the random ones, 768 MiB. */
        r->stride = 4UL << 20;
        if (e->recipe != &own_recipe)
            while (pages * r->stride <= (size_t)sysconf(_SC_PHYS_PAGES) * PAGE)
                r->stride *= 2;
        r->scatter = r->stride / PAGE;
        length = pages * r->stride;
        at = mmap(NULL, length, rw, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        break;
    default:
        return;
    }
    if (at == MAP_FAILED)
        fail("mmap of kind %d, %zu pages: %s", kind, pages, strerror(errno));
    r->kind = kind;
    r->at = at;
    set_pages(r, 0, pages, true);
    if (kind == LOCKED)
        e->locked += pages;
    for (size_t i = 0; i < pages; i++)
        if (below(e, 2))
            write_page(e, r, i);
}

static void unmap(struct region *r, struct engine *e) {
    if (r->kind == HEAP)
        return;
    size_t length = r->pages * r->stride;
    if (munmap(r->at, length) < 0 || (r->alias && munmap(r->alias, length) < 0))
        fail("munmap: %s", strerror(errno));
    if (r->fd >= 0) {
        if (r->kind == FILE_SHARED)
            unlink_file(r->fd);
        close(r->fd);
    }
    if (r->kind == LOCKED)
        e->locked -= r->pages;
    r->kind = FREE;
}

/* Unmaps an end of a region, or a hole in its midst. */
static void cut(struct engine *e, struct region *r) {
    if ((r->kind != ANON && r->kind != BIG && r->kind != FILE_PRIVATE && r->kind != LOCKED) || r->pages < 2)
        return;
    size_t from, to;
    some_pages(e, r, &from, &to);
    if (to - from == r->pages)
        return;
    struct region *rest = NULL;
    if (from > 0 && to < r->pages && !(rest = free_region(e)))
        return;
    if (munmap(r->at + from * PAGE, (to - from) * PAGE) < 0)
        fail("munmap: %s", strerror(errno));
    if (r->kind == LOCKED)
        e->locked -= to - from;
    if (rest) {
        rest->kind = r->kind;
        rest->at = r->at + to * PAGE;
        rest->pages = r->pages - to;
        rest->first = r->first + to;
        rest->split = r->split;
        memcpy(rest->page, r->page + to, rest->pages * sizeof *r->page);
        r->pages = from;
    } else if (from == 0) {
        r->at += to * PAGE;
        r->first += to;
        r->pages -= to;
        memmove(r->page, r->page + to, r->pages * sizeof *r->page);
    } else
        r->pages = from;
}

/* Moves, grows and shrinks. */
static void remap(struct engine *e, struct region *r) {
    if (r->kind != ANON && r->kind != BIG && r->kind != SHARED && r->kind != FILE_PRIVATE)
        return;
    /* Several areas cannot be moved as one on all kernels. */
    if (r->split)
        return;
    size_t most = r->kind == BIG ? HUGE_PAGES : MAX_PAGES, pages = r->pages;
    /* Beyond the end of a file there is nothing, and one of shared memory has its size for ever. */
    if (r->kind == ANON || r->kind == BIG)
        pages = below(e, 3) ? pages : 1 + below(e, most);
    else if (r->kind == FILE_PRIVATE && below(e, 3) == 0)
        pages = 1 + below(e, r->pages);
    if (pages < r->pages) {
        /* By itself, because a call that both shrinks and moves may fail in between. */
        if (mremap(r->at, r->pages * PAGE, pages * PAGE, 0) == MAP_FAILED)
            fail("mremap: %s", strerror(errno));
        r->pages = pages;
    }
    char *to = NULL;
    int flags = MREMAP_MAYMOVE;
    size_t target = pages * PAGE;
    if (below(e, 2)) {
        to = mmap(NULL, target, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (to == MAP_FAILED)
            fail("mmap: %s", strerror(errno));
        flags |= MREMAP_FIXED;
        if (r->kind == ANON && pages == r->pages && below(e, 3) == 0)
            flags |= MREMAP_DONTUNMAP;
    }
    char *at = mremap(r->at, r->pages * PAGE, target, flags, to);
    if (at == MAP_FAILED)
        fail("mremap of %zu pages of kind %d at %p to %zu at %p, flags %x: %s", r->pages, r->kind, (void *)r->at,
             pages, (void *)to, flags, strerror(errno));
    if (flags & MREMAP_DONTUNMAP) {
        /* What it left is mapped, and reads as zero. */
        for (size_t i = 0; i < r->pages; i++)
            if (!r->page[i].guard && (r->page[i].protection & PROT_READ) && !is_zero((uint64_t *)(r->at + i * PAGE)))
                fail("what mremap left at %p is not zero", (void *)(r->at + i * PAGE));
        munmap(r->at, r->pages * PAGE);
    }
    if (pages > r->pages) {
        set_pages(r, r->pages, pages, true);
        /* It grows with the rights of its last area. */
        for (size_t i = r->pages; i < pages; i++)
            r->page[i].protection = r->page[r->pages - 1].protection;
    }
    r->pages = pages;
    r->at = at;
}

static void change_heap(struct engine *e) {
    if (!e->main)
        return;
    struct region *heap = NULL;
    for (size_t i = 0; i < MAX_REGIONS; i++)
        if (e->region[i].kind == HEAP)
            heap = &e->region[i];
    if (!heap) {
        heap = free_region(e);
        if (!heap)
            return;
        uintptr_t now = (uintptr_t)sbrk(0);
        if (sbrk((intptr_t)(-now & (PAGE - 1))) == (void *)-1)
            fail("sbrk: %s", strerror(errno));
        heap->kind = HEAP;
        heap->at = sbrk(0);
        heap->pages = 0;
    }
    char *end = heap->at + heap->pages * PAGE;
    if (sbrk(0) != end)
        return; /* The library has put something behind it. */
    size_t pages = 1 + below(e, MAX_PAGES);
    if (brk(heap->at + pages * PAGE) < 0)
        fail("brk: %s", strerror(errno));
    if (pages > heap->pages)
        set_pages(heap, heap->pages, pages, true);
    heap->pages = pages;
}

static void protect(struct engine *e, struct region *r) {
    if (r->kind == SPARSE || r->alias || r->kind == HEAP || is_shared(r))
        return;
    size_t from, to;
    some_pages(e, r, &from, &to);
    const int all[] = {PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE, PROT_READ | PROT_WRITE};
    int protection = all[below(e, 4)];
    if (mprotect(address(r, from), (to - from) * PAGE, protection) < 0)
        fail("mprotect: %s", strerror(errno));
    r->split = true;
    for (size_t i = from; i < to; i++)
        r->page[i].protection = (uint8_t)protection;
}

static void discard(struct engine *e, struct region *r) {
    size_t from, to;
    some_pages(e, r, &from, &to);
    if (r->kind == SPARSE)
        to = from + 1;
    if (r->kind == BIG && below(e, 3) == 0) {
        from = from / 512 * 512;
        to = from + 512 < r->pages ? from + 512 : r->pages;
    }
    int advice = r->kind == LOCKED ? MADV_DONTNEED_LOCKED : MADV_DONTNEED;
    if (madvise(address(r, from), (to - from) * PAGE, advice) < 0) {
        if (errno == EINVAL)
            return; /* Locked, or the kernel does not know it: refused as a whole. */
        fail("madvise: %s", strerror(errno));
    }
    /* Of shared memory only the mapping is gone, not what is in it. */
    if (!is_shared(r))
        set_pages(r, from, to, false);
}

/* Shared memory loses its content for all. */
static void punch(struct engine *e, struct region *r) {
    if (r->kind != SHARED && r->kind != MEMFD)
        return;
    size_t from, to;
    some_pages(e, r, &from, &to);
    for (size_t i = from; i < to; i++)
        if (!r->page[i].mine)
            return;
    int failed;
    if (r->kind == MEMFD && below(e, 2))
        failed = fallocate(r->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(from * PAGE), (off_t)((to - from) * PAGE));
    else
        failed = madvise(address(r, from), (to - from) * PAGE, MADV_REMOVE);
    if (failed)
        fail("a hole in shared memory: %s", strerror(errno));
    set_pages(r, from, to, false);
}

static void guard(struct engine *e, struct region *r) {
    if (r->kind != ANON)
        return;
    size_t from, to;
    some_pages(e, r, &from, &to);
    bool install = below(e, 2);
    if (install && e->recipe->tells && madvise(address(r, from), (to - from) * PAGE, MADV_DONTNEED) < 0)
        fail("madvise: %s", strerror(errno));
    if (madvise(address(r, from), (to - from) * PAGE, install ? MADV_GUARD_INSTALL : MADV_GUARD_REMOVE) < 0) {
        if (errno == EINVAL)
            return; /* Before Linux 6.13 there are none. */
        fail("guard: %s", strerror(errno));
    }
    for (size_t i = from; i < to; i++) {
        if (install)
            set_pages(r, i, i + 1, false);
        r->page[i].guard = install;
    }
}

static void lock(struct engine *e, struct region *r) {
    if (r->kind != LOCKED)
        return;
    size_t from, to;
    some_pages(e, r, &from, &to);
    int failed;
    switch (below(e, 3)) {
    case 0:
        failed = munlock(address(r, from), (to - from) * PAGE);
        break;
    case 1:
        failed = mlock2(address(r, from), (to - from) * PAGE, MLOCK_ONFAULT);
        break;
    default:
        failed = mlock(address(r, from), (to - from) * PAGE);
    }
    /* They are locked also where a page cannot be brought in because of its rights. */
    if (failed && errno != ENOMEM)
        fail("mlock: %s", strerror(errno));
}

static void advise(struct engine *e, struct region *r) {
    if (r->kind != BIG)
        return;
    size_t from = below(e, r->pages) / 512 * 512;
    const int all[] = {MADV_NOHUGEPAGE, MADV_HUGEPAGE, MADV_HUGEPAGE, MADV_COLLAPSE};
    size_t to = from + 512 < r->pages ? from + 512 : r->pages;
    r->split = true;
    /* What cannot be collapsed just now is not. */
    madvise(address(r, from), (to - from) * PAGE, all[below(e, 4)]);
}

/* --- Processes and threads ------------------------------------------------------------------- */

static void run(struct engine *e, uint64_t operations);
static void reap(struct engine *e, bool wait);

static void check_all(struct engine *e) {
    for (size_t n = 0; n < MAX_REGIONS; n++)
        if (e->region[n].kind != FREE)
            for (size_t i = 0; i < e->region[n].pages; i++)
                check(&e->region[n], i);
}

static void tidy(struct engine *e) {
    for (size_t n = 0; n < MAX_REGIONS; n++)
        if (e->region[n].kind == FILE_SHARED && !is_lent(&e->region[n]))
            unlink_file(e->region[n].fd);
}

static void fork_child(struct engine *e, bool exec) {
    size_t slot = 0;
    while (slot < MAX_CHILDREN && e->child[slot])
        slot++;
    if (slot == MAX_CHILDREN || e->depth >= e->recipe->depth)
        return;
    uint64_t seed = next(e), operations = 20 + below(e, below(e, 8) ? 300 : 6000);
    unsigned turn = exec ? 2 : (unsigned)below(e, 2);
    pid_t pid = fork();
    if (pid < 0)
        fail("fork: %s", strerror(errno));
    if (pid == 0 && exec) {
        char numbers[5][32];
        snprintf(numbers[0], 32, "%lu", case_seed);
        snprintf(numbers[1], 32, "%lu", seed);
        snprintf(numbers[2], 32, "%u", e->depth + 1);
        snprintf(numbers[3], 32, "%lu", operations);
        snprintf(numbers[4], 32, "%lu", 1 + seed % 3);
        execl("/torture", "/torture", "--again", case_name, numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], NULL);
        fail("exec: %s", strerror(errno));
    }
    for (size_t n = 0; n < MAX_REGIONS; n++) {
        struct region *r = &e->region[n];
        if (r->kind == FREE || !is_shared(r))
            continue;
        for (size_t i = 0; i < r->pages; i++) {
            struct page *p = &r->page[i];
            bool given = p->mine && i % 2 == turn;
            if (pid == 0)
                p->mine = given, p->lent = 0;
            else if (given)
                p->mine = false, p->lent = (uint8_t)(slot + 1);
        }
    }
    if (pid) {
        e->child[slot] = pid;
        return;
    }
    memset(e->child, 0, sizeof e->child);
    for (size_t i = 0; i < MAX_THREADS; i++)
        e->thread[i].lives = false;
    pthread_mutex_init(&space, NULL);
    e->random = seed;
    e->depth++;
    e->over = NULL;
    own = NULL;
    check_all(e);
    run(e, operations);
    reap(e, true);
    check_all(e);
    tidy(e);
    _exit(0);
}

/* What a child has made of the pages it was lent must be in itself right. */
static void take_back(struct engine *e, size_t slot) {
    for (size_t n = 0; n < MAX_REGIONS; n++) {
        struct region *r = &e->region[n];
        if (r->kind == FREE || !is_shared(r))
            continue;
        for (size_t i = 0; i < r->pages; i++) {
            struct page *p = &r->page[i];
            if (p->lent != slot + 1)
                continue;
            const uint64_t *words = (const uint64_t *)address(r, i);
            p->lent = 0;
            p->mine = true;
            p->key = words[0];
            p->version = (uint32_t)words[1];
            p->touches = (uint32_t)words[2];
            expect(r, i, words);
        }
    }
}

static void *run_thread(void *engine) {
    struct engine *e = engine;
    run(e, 200 + below(e, 3000));
    reap(e, true);
    check_all(e);
    pthread_mutex_lock(&space);
    for (size_t n = 0; n < MAX_REGIONS; n++)
        if (e->region[n].kind != FREE)
            unmap(&e->region[n], e);
    pthread_mutex_unlock(&space);
    atomic_store(e->over, true);
    return NULL;
}

static void begin_thread(struct engine *e) {
    size_t slot = 0;
    while (slot < MAX_THREADS && e->thread[slot].lives)
        slot++;
    if (slot == MAX_THREADS || !e->main || e->depth >= e->recipe->depth)
        return;
    struct engine *other = mmap(NULL, sizeof *other, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (other == MAP_FAILED)
        fail("mmap: %s", strerror(errno));
    other->random = next(e);
    other->recipe = e->recipe;
    other->depth = e->recipe->depth; /* It makes no processes of its own. */
    atomic_store(&e->thread[slot].over, false);
    other->over = &e->thread[slot].over;
    e->thread[slot].engine = other;
    e->thread[slot].lives = true;
    int failed = pthread_create(&e->thread[slot].thread, NULL, run_thread, other);
    if (failed)
        fail("pthread_create: %s", strerror(failed));
}

static void reap(struct engine *e, bool wait) {
    for (size_t slot = 0; slot < MAX_CHILDREN; slot++) {
        if (!e->child[slot])
            continue;
        int ended;
        pid_t pid = waitpid(e->child[slot], &ended, wait ? 0 : WNOHANG);
        if (pid < 0)
            fail("waitpid: %s", strerror(errno));
        if (pid == 0)
            continue;
        if (ended)
            fail("child %d ended with status %x", pid, ended);
        e->child[slot] = 0;
        take_back(e, slot);
    }
    for (size_t slot = 0; slot < MAX_THREADS; slot++) {
        if (!e->thread[slot].lives || !(wait || atomic_load(&e->thread[slot].over)))
            continue;
        if (pthread_join(e->thread[slot].thread, NULL))
            fail("pthread_join failed");
        munmap(e->thread[slot].engine, sizeof(struct engine));
        e->thread[slot].lives = false;
    }
}

/* --- The loop -------------------------------------------------------------------------------- */

static void operate(struct engine *e, enum operation operation) {
    struct region *r = some_region(e);
    if (operation == MAP || (!r && operation != BRK && operation < FORK)) {
        map(e);
        return;
    }
    switch (operation) {
    case UNMAP:
        if (!is_lent(r))
            unmap(r, e);
        break;
    case CUT:
        cut(e, r);
        break;
    case REMAP:
        remap(e, r);
        break;
    case BRK:
        change_heap(e);
        break;
    case PROTECT:
        protect(e, r);
        break;
    case DISCARD:
        discard(e, r);
        break;
    case PUNCH:
        punch(e, r);
        break;
    case GUARD:
        guard(e, r);
        break;
    case LOCK:
        lock(e, r);
        break;
    case ADVISE:
        advise(e, r);
        break;
    case FORK:
    case EXEC:
        fork_child(e, operation == EXEC);
        break;
    case THREAD:
        begin_thread(e);
        break;
    case REAP:
        reap(e, false);
        break;
    default:
        break;
    }
}

static void run(struct engine *e, uint64_t operations) {
    unsigned total = 0;
    for (size_t o = MAP; o < OPERATIONS; o++)
        total += e->recipe->operation[o];
    for (uint64_t n = 0; n < operations; n++) {
        e->operations++;
        if (own && e->main)
            atomic_fetch_add(&own->operations, 1);
        struct region *r;
        uint64_t dice = below(e, 16);
        if (n % 64 == 63) {
            check_all(e);
            if (own && e->main)
                atomic_fetch_add(&own->checks, 1);
        } else if (dice < 12 && (r = some_region(e)) && r->pages) {
            size_t from, to;
            some_pages(e, r, &from, &to);
            for (size_t i = from; i < to; i++) {
                check(r, i);
                if (dice < 5)
                    write_page(e, r, i);
                else if (dice < 9)
                    touch_page(r, i);
            }
        } else {
            uint64_t which = below(e, total);
            enum operation o = MAP;
            while (which >= e->recipe->operation[o])
                which -= e->recipe->operation[o++];
            /* The lock is held over all of these, for there may be threads. */
            pthread_mutex_lock(&space);
            operate(e, o);
            pthread_mutex_unlock(&space);
        }
    }
}

/* --- Start ----------------------------------------------------------------------------------- */

static const struct recipe *recipe(const char *name, uint64_t seed) {
    for (size_t i = 0; i < sizeof recipes / sizeof *recipes; i++)
        if (strcmp(recipes[i].name, name) == 0)
            return &recipes[i];
    if (strcmp(name, "random") != 0)
        fail("there is no such case");
    /* Some operations and kinds in random proportions. */
    struct engine e = {.random = mix(seed)};
    own_recipe = (struct recipe){.name = name, .depth = 2, .tells = true, .pages = 24};
    static const uint8_t limit[OPERATIONS] = {[CUT] = 4, [REMAP] = 6, [BRK] = 4, [PROTECT] = 4, [DISCARD] = 8, [PUNCH] = 4,
                                              [GUARD] = 4, [LOCK] = 4, [ADVISE] = 4, [FORK] = 2, [EXEC] = 1, [THREAD] = 2};
    for (size_t o = 0; o < OPERATIONS; o++)
        own_recipe.operation[o] = limit[o] && below(&e, 2) ? 1 + (unsigned)below(&e, limit[o]) : 0;
    own_recipe.operation[MAP] = 4;
    own_recipe.operation[UNMAP] = 3;
    own_recipe.operation[REAP] = 3;
    for (size_t k = 1; k < HEAP; k++)
        own_recipe.kind[k] = (k == BIG || k == SPARSE || k == FILE_SHARED) ? below(&e, 4) == 0 : (unsigned)below(&e, 4);
    own_recipe.kind[ANON] += 3;
    return &own_recipe;
}

static struct engine *engine(const char *name, uint64_t seed, uint64_t random, unsigned depth) {
    case_name = name;
    case_seed = seed;
    struct engine *e = mmap(NULL, sizeof *e, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (e == MAP_FAILED)
        fail("mmap: %s", strerror(errno));
    e->random = random;
    e->depth = depth;
    e->main = true;
    e->recipe = recipe(name, seed);
    return e;
}

/* A process of the program after exec: CASE SEED RANDOM DEPTH OPERATIONS TIMES. */
static int again(char **word) {
    uint64_t seed = strtoul(word[3], NULL, 10), random = strtoul(word[4], NULL, 10);
    uint64_t operations = strtoul(word[6], NULL, 10), times = strtoul(word[7], NULL, 10);
    struct engine *e = engine(word[2], seed, random, (unsigned)strtoul(word[5], NULL, 10));
    run(e, operations);
    reap(e, true);
    check_all(e);
    tidy(e);
    if (times == 0)
        return 0;
    char then[32], left[32];
    snprintf(then, sizeof then, "%lu", next(e));
    snprintf(left, sizeof left, "%lu", times - 1);
    execl("/torture", "/torture", "--again", word[2], word[3], then, word[5], word[6], left, NULL);
    fail("exec: %s", strerror(errno));
    return 1;
}

static void write_base(void) {
    mkdir("/data", 0700);
    int fd = open("/data/base", O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    if (fd < 0)
        fail("/data/base: %s", strerror(errno));
    for (size_t i = 0; i < FILE_PAGES; i++) {
        uint64_t words[WORDS];
        fill(words, FILE_KEY + i, 1, 0);
        if (write(fd, words, PAGE) != (ssize_t)PAGE)
            fail("/data/base: %s", strerror(errno));
    }
    close(fd);
}

static void ended(int signal) {
    (void)signal;
    int how;
    pid_t pid;
    while ((pid = waitpid(-1, &how, WNOHANG)) > 0)
        if (how)
            fail("program %d ended with status %x", pid, how);
}

static void answer(int listener, size_t programs) {
    int connection = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    if (connection < 0)
        return;
    uint64_t operations = 0;
    for (size_t i = 0; i < programs; i++) {
        uint64_t before = atomic_load(&status[i].checks);
        /* The one that is under way may have begun before. */
        while (atomic_load(&status[i].checks) < before + 2)
            usleep(1000);
        operations += atomic_load(&status[i].operations);
    }
    dprintf(connection, "ok %lu\n", operations);
    close(connection);
}

int main(int count, char **word) {
    if (count == 8 && strcmp(word[1], "--again") == 0)
        return again(word);
    size_t programs = (size_t)(count - 1) / 2;
    if (programs == 0 || programs > MAX_PROGRAMS)
        fail("usage: torture CASE SEED [CASE SEED]...");
    write_base();
    status = mmap(NULL, programs * sizeof *status, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in any = {.sin_family = AF_INET, .sin_port = htons(7000)};
    if (bind(listener, (struct sockaddr *)&any, sizeof any) < 0 || listen(listener, 8) < 0)
        fail("port 7000: %s", strerror(errno));
    for (size_t i = 0; i < programs; i++) {
        pid_t pid = fork();
        if (pid < 0)
            fail("fork: %s", strerror(errno));
        if (pid == 0) {
            close(listener);
            own = &status[i];
            uint64_t seed = strtoul(word[2 + 2 * i], NULL, 10);
            struct engine *e = engine(word[1 + 2 * i], seed, seed, 0);
            for (;;)
                run(e, 1UL << 40);
        }
    }
    /* Processes are stopped when they arrive at a node, of which their parents hear nothing so: the
     * signal's frame would be a difference in the parent's stack. */
    struct sigaction action = {.sa_handler = ended, .sa_flags = SA_NOCLDSTOP};
    sigaction(SIGCHLD, &action, NULL);
    ended(0);
    for (;;)
        answer(listener, programs);
}
