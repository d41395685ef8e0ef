/* A service of processes that share memory: they write its pages all the time, and look whether each page is as it
 * was written last. Usage: shared MIB [CHILD]
 *
 *   server ──fork──▶ WORKERS ──fork──▶ a child that writes one page and ends, for each CHILD pages (200; 0: none)
 *
 * There are four segments of so many MiB: anonymous memory, one of System V, a memory file that nobody has open, and one
 * that all have open, and write by pwrite(2), too; its size is sealed. The one of System V has no whole number of pages. A
 * small one has no processes, and the first worker makes one anew with the same key all the time. A page belongs to one worker, which knows from its own, private
 * memory how often the page was written. Each worker has a private mapping of a file, too, of which it has written some
 * pages, zeros among them, and writes others all the time. Asked by a byte on port 7000, all workers look at all of their pages; the answer
 * is "ok N", N the pages written so far, or what is wrong. Asked by "l", the server first forks a process that locks a page of the
 * anonymous memory, and stays. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { LESS = 100, NEW = 1 << 20, WORKERS = 3, COPIES = 64, PAGE = 4096, WORDS = PAGE / 8, PORT = 7000, HOT = 64, SEGMENTS = 4, ANEW = 64, KEY = 0x4711, MODE = 0640, SEALS = F_SEAL_SHRINK | F_SEAL_GROW };

/* Of all processes. */
struct common {
    /* A worker that is asked looks at its pages. */
    atomic_ulong asked, answered[WORKERS], written[WORKERS];
    char wrong[200];
};

static struct common *common;
static unsigned long *segments[SEGMENTS];
static int opened, system_v, small, new_segment;
static unsigned char *new_at;
static unsigned char *copies;
static unsigned long pages, each_child = 200;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void *map(int fd, size_t length) {
    int how = fd < 0 ? MAP_SHARED | MAP_ANONYMOUS : MAP_SHARED;
    void *at = mmap(NULL, length, PROT_READ | PROT_WRITE, how, fd, 0);
    if (at == MAP_FAILED)
        fail("mmap");
    return at;
}

static void *attach(size_t length) {
    /* So that the identifiers are none that every namespace begins with. */
    int gone = shmget(IPC_PRIVATE, 1, MODE);
    if (gone < 0 || shmctl(gone, IPC_RMID, NULL) != 0)
        fail("shmget");
    small = shmget(KEY + 1, PAGE, IPC_CREAT | MODE);
    system_v = shmget(KEY, length - LESS, IPC_CREAT | MODE);
    void *at = shmat(system_v, NULL, 0), *of_small = shmat(small, NULL, 0);
    if (at == (void *)-1 || of_small == (void *)-1)
        fail("shmat");
    memset(of_small, 's', PAGE);
    shmdt(of_small);
    return at;
}

/* Another one with the same key, filled with this. */
static void make_anew(unsigned char with) {
    if (new_at != NULL && (shmctl(new_segment, IPC_RMID, NULL) != 0 || shmdt(new_at) != 0))
        fail("shmdt");
    new_segment = shmget(KEY + 2, NEW, IPC_CREAT | IPC_EXCL | MODE);
    new_at = shmat(new_segment, NULL, 0);
    if (new_at == (void *)-1)
        fail("shmat");
    memset(new_at, with, NEW);
}

static void look_at_new(unsigned char with) {
    for (int at = 0; at < NEW; at++)
        if (((volatile unsigned char *)new_at)[at] != with) {
            snprintf(common->wrong, sizeof common->wrong, "byte %d of the new segment: %d and not %d", at, new_at[at], with);
            return;
        }
}

static unsigned long *page_at(unsigned long page) { return segments[page / pages] + page % pages * WORDS; }

static unsigned long word(unsigned long page, unsigned long version, unsigned long at) {
    return (page * 1000003 + version) * 6364136223846793005UL + at;
}

static void write_page(unsigned long page, unsigned long version) {
    unsigned long content[WORDS];
    for (unsigned long at = 0; at < WORDS; at++)
        content[at] = word(page, version, at);
    if (page / pages == SEGMENTS - 1 && version % 2 == 1) {
        if (pwrite(opened, content, PAGE, (off_t)(page % pages * PAGE)) != PAGE)
            fail("pwrite");
    } else
        memcpy(page_at(page), content, PAGE);
}

static void look(unsigned long page, unsigned long version) {
    volatile unsigned long *words = page_at(page);
    for (unsigned long at = 0; at < WORDS; at++)
        if (words[at] != word(page, version, at)) {
            snprintf(common->wrong, sizeof common->wrong, "page %lu, version %lu, word %lu: %lx and not %lx", page,
                     version, at, words[at], word(page, version, at));
            return;
        }
}

/* What fills a page of a worker's private mapping: of the file (every other such page is written, and given back beside
 * one of zeros), zeros, always the same, or another each time. */
static int copy_of(int page, unsigned long worker, unsigned long version) {
    switch (page % 4) {
    case 0:
        return page % 8 == 4 && version % 64 < 32 ? 'g' : 'f';
    case 1:
        return 0;
    case 2:
        return 'a' + (int)worker;
    default:
        return version % 3 == 0 ? 0 : (int)(version % 251);
    }
}

static void map_copies(void) {
    unsigned char page[PAGE];
    int file = open("/copies", O_RDWR | O_CREAT | O_TRUNC, 0600);
    memset(page, 'f', sizeof page);
    for (int number = 0; file >= 0 && number < COPIES; number++)
        if (write(file, page, sizeof page) != PAGE)
            fail("write");
    copies = mmap(NULL, COPIES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (file < 0 || copies == MAP_FAILED)
        fail("copies");
    close(file);
}

static void look_at_copies(unsigned long worker, unsigned long version) {
    for (int at = 0; at < COPIES * PAGE; at++)
        if (((volatile unsigned char *)copies)[at] != copy_of(at / PAGE, worker, version)) {
            snprintf(common->wrong, sizeof common->wrong, "byte %d of the copies of worker %lu: %d and not %d", at, worker,
                     copies[at], copy_of(at / PAGE, worker, version));
            return;
        }
}

static void look_at_system_v(void) {
    struct shmid_ds status;
    unsigned char *of_small = shmat(small, NULL, SHM_RDONLY);
    if (shmget(KEY, 1, 0) != system_v || shmget(KEY + 1, PAGE, 0) != small || shmctl(system_v, IPC_STAT, &status) != 0)
        snprintf(common->wrong, sizeof common->wrong, "the segments of System V have other names");
    else if ((status.shm_perm.mode & 0777) != MODE || status.shm_segsz != pages * PAGE - LESS ||
             status.shm_nattch < WORKERS)
        snprintf(common->wrong, sizeof common->wrong, "mode %o, %zu bytes, attached by %lu",
                 (unsigned int)status.shm_perm.mode, status.shm_segsz, (unsigned long)status.shm_nattch);
    else if (of_small == (void *)-1 || of_small[0] != 's' || of_small[PAGE - 1] != 's')
        snprintf(common->wrong, sizeof common->wrong, "the small segment is empty");
    shmdt(of_small);
}

static unsigned long chance(unsigned long *seed) {
    *seed = *seed * 6364136223846793005UL + 1442695040888963407UL;
    return *seed >> 33;
}

static void work(unsigned long worker) {
    unsigned long *versions = calloc(SEGMENTS * pages, sizeof *versions), seed = worker, done = 0, version = 0;
    if (versions == NULL || prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
        fail("worker");
    for (unsigned long page = worker; page < SEGMENTS * pages; page += WORKERS)
        write_page(page, 0);
    for (int page = 0; page < COPIES; page++)
        if (page % 8 != 0)
            memset(copies + page * PAGE, copy_of(page, worker, version), PAGE);
    atomic_store(&common->written[worker], 1);
    if (worker == 0)
        make_anew(0);
    for (;;) {
        version++;
        if (worker == 0 && version % ANEW == 0)
            make_anew((unsigned char)(version / ANEW));
        for (int page = 3; page < COPIES; page += 4)
            memset(copies + page * PAGE, copy_of(page, worker, version), PAGE);
        for (int page = 4; page < COPIES && version % 32 == 0; page += 8) {
            if (version % 64 != 0)
                madvise(copies + page * PAGE, PAGE, MADV_DONTNEED);
            else
                memset(copies + page * PAGE, copy_of(page, worker, version), PAGE);
        }
        unsigned long asked = atomic_load(&common->asked);
        if (asked != atomic_load(&common->answered[worker])) {
            for (unsigned long page = worker; page < SEGMENTS * pages; page += WORKERS)
                look(page, versions[page]);
            look_at_copies(worker, version);
            look_at_system_v();
            if (worker == 0)
                look_at_new((unsigned char)(version / ANEW));
            int seals = fcntl(opened, F_GET_SEALS);
            if (seals != SEALS)
                snprintf(common->wrong, sizeof common->wrong, "the memory file's seals are %x", seals);
            atomic_store(&common->answered[worker], asked);
        }
        /* Mostly the same few pages, and now and then any. */
        unsigned long range = chance(&seed) % 16 ? HOT : SEGMENTS * pages / WORKERS;
        unsigned long page = chance(&seed) % range * WORKERS + worker;
        if (page >= SEGMENTS * pages)
            continue;
        look(page, versions[page]);
        versions[page]++;
        if (each_child != 0 && ++done % each_child == 0) {
            pid_t child = fork();
            if (child == 0) {
                write_page(page, versions[page]);
                _exit(0);
            }
            if (child < 0 || waitpid(child, NULL, 0) != child)
                fail("child");
        } else
            write_page(page, versions[page]);
        atomic_fetch_add(&common->written[worker], 1);
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
}

/* A process that stays, with the first page of the anonymous memory locked. */
static void lock_a_page(void) {
    int locked[2];
    char byte;
    if (pipe(locked) != 0)
        fail("pipe");
    pid_t child = fork();
    if (child == 0) {
        if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || mlock(segments[0], PAGE) != 0 || write(locked[1], "l", 1) != 1)
            fail("mlock");
        for (;;)
            pause();
    }
    close(locked[1]);
    if (child < 0 || read(locked[0], &byte, 1) != 1)
        fail("a process that locks memory");
    close(locked[0]);
}

/* Waits until all workers have come so far. */
static void await(atomic_ulong *of, unsigned long least) {
    for (int worker = 0; worker < WORKERS; worker++)
        while (atomic_load(&of[worker]) < least)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

int main(int count, char **arguments) {
    size_t length = count == 2 || count == 3 ? strtoul(arguments[1], NULL, 10) << 20 : 0;
    pages = length / PAGE;
    if (count == 3)
        each_child = strtoul(arguments[2], NULL, 10);
    if (pages == 0) {
        fprintf(stderr, "usage: shared MIB [CHILD]\n");
        return 2;
    }
    common = map(-1, sizeof *common);
    map_copies();
    segments[0] = map(-1, length);
    segments[1] = attach(length);
    for (int segment = 2; segment < SEGMENTS; segment++) {
        int stays_open = segment == SEGMENTS - 1;
        opened = memfd_create("shared", stays_open ? MFD_ALLOW_SEALING : 0);
        if (opened < 0 || ftruncate(opened, (off_t)length) != 0)
            fail("memfd");
        segments[segment] = map(opened, length);
        if (!stays_open)
            close(opened);
        else if (fcntl(opened, F_ADD_SEALS, SEALS) != 0)
            fail("seals");
    }
    for (unsigned long worker = 0; worker < WORKERS; worker++) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0)
            work(worker);
    }
    await(common->written, 1);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 4) != 0)
        fail("listen");
    for (;;) {
        int client = accept(listener, NULL, NULL);
        char byte;
        while (client >= 0 && read(client, &byte, 1) == 1) {
            unsigned long written = 0;
            if (byte == 'l')
                lock_a_page();
            await(common->answered, atomic_fetch_add(&common->asked, 1) + 1);
            for (int worker = 0; worker < WORKERS; worker++)
                written += atomic_load(&common->written[worker]);
            if (common->wrong[0] != 0)
                dprintf(client, "%s\n", common->wrong);
            else
                dprintf(client, "ok %lu\n", written);
        }
        close(client);
    }
}
