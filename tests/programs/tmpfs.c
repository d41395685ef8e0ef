/* A service that keeps files in memory: in /dev/shm and in a tmpfs on /scratch. Two processes change them all the time,
 * and look whether all are as they were left. Usage: tmpfs MIB
 *
 *   mapper   /dev/shm/mapped, MIB MiB: pages through a mapping and by pwrite(2); holds a lock on it
 *   churner  /scratch: a file that grows and is cut short, one that is replaced by rename(2), small ones that come and go
 *   server   files that stay: two names with owner, mode and time; an open one without a name; a FIFO with a byte in it;
 *            a socket that listens; this program, which is started; and the size of both filesystems
 *
 * Asked by a byte on port 7000, all look at all of it; the answer is "ok N", N the changes so far, or what is wrong.
 * Asked by an "l", the server gives an open file another name and deletes its first, before it answers. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { WORKERS = 2, PAGE = 4096, PORT = 7000, HOT = 64, KEPT = 300001, LEAST = 70001, MOST = 2000000, SMALL = 40 };

static const long SHM = 64L << 20, SCRATCH = 32L << 20;

/* Of all processes. */
struct common {
    /* A worker that is asked looks at its files. */
    atomic_ulong asked, answered[WORKERS], changed[WORKERS];
    char wrong[300];
};

static struct common *common;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static void wrong(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(common->wrong, sizeof common->wrong, format, arguments);
    va_end(arguments);
}

static unsigned long chance(unsigned long *seed) {
    *seed = *seed * 6364136223846793005UL + 1442695040888963407UL;
    return *seed >> 33;
}

/* The byte at a place of the content that this number stands for. */
static unsigned char byte(unsigned long number, unsigned long at) {
    unsigned long word = (number * 1000003 + at / 8) * 6364136223846793005UL;
    /* It cannot be compressed. */
    word = (word ^ word >> 29) * 0x9e3779b97f4a7c15UL;
    return (unsigned char)((word ^ word >> 32) >> at % 8 * 8);
}

static void fill(unsigned char *to, unsigned long number, unsigned long from, unsigned long length) {
    for (unsigned long at = 0; at < length; at++)
        to[at] = byte(number, from + at);
}

static void put(int file, unsigned long number, unsigned long from, unsigned long length) {
    static unsigned char content[MOST];
    fill(content, number, from, length);
    if (pwrite(file, content, length, (off_t)from) != (ssize_t)length)
        fail("pwrite");
}

/* Whether a file has exactly this content. */
static void look(int file, const char *name, unsigned long number, unsigned long length) {
    static unsigned char content[MOST + 1];
    ssize_t got = pread(file, content, sizeof content, 0);
    if (got != (ssize_t)length) {
        wrong("%s has %zd bytes and not %lu", name, got, length);
        return;
    }
    for (unsigned long at = 0; at < length; at++)
        if (content[at] != byte(number, at)) {
            wrong("%s, content %lu of %lu bytes, is another at %lu", name, number, length, at);
            return;
        }
}

static void look_at(const char *name, unsigned long number, unsigned long length) {
    int file = open(name, O_RDONLY);
    if (file < 0) {
        wrong("%s: %s", name, strerror(errno));
        return;
    }
    look(file, name, number, length);
    close(file);
}

static int make(const char *name) {
    int file = open(name, O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0)
        fail(name);
    return file;
}

static int is_asked(unsigned long worker, unsigned long *asked) {
    *asked = atomic_load(&common->asked);
    return *asked != atomic_load(&common->answered[worker]);
}

static void done(unsigned long worker) {
    atomic_fetch_add(&common->changed[worker], 1);
    nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void look_at_page(const unsigned char *mapped, unsigned long page, unsigned long version) {
    for (unsigned long at = 0; at < PAGE; at++)
        if (mapped[page * PAGE + at] != byte(version, page * PAGE + at)) {
            wrong("page %lu of /dev/shm/mapped, version %lu, is another at %lu", page, version, at);
            return;
        }
}

static void mapper(unsigned long length) {
    unsigned long pages = length / PAGE, seed = 7, asked, *versions = calloc(pages, sizeof *versions);
    int file = make("/dev/shm/mapped");
    if (versions == NULL || ftruncate(file, (off_t)length) != 0 || flock(file, LOCK_EX) != 0)
        fail("mapper");
    unsigned char *mapped = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED)
        fail("mmap");
    for (unsigned long page = 0; page < pages; page++)
        fill(mapped + page * PAGE, 0, page * PAGE, PAGE);
    for (;;) {
        if (is_asked(0, &asked)) {
            for (unsigned long page = 0; page < pages; page++)
                look_at_page(mapped, page, versions[page]);
            atomic_store(&common->answered[0], asked);
        }
        /* Mostly the same few pages, and now and then any. */
        unsigned long page = chance(&seed) % (chance(&seed) % 16 ? HOT : pages);
        look_at_page(mapped, page, versions[page]);
        versions[page]++;
        if (versions[page] % 2)
            fill(mapped + page * PAGE, versions[page], page * PAGE, PAGE);
        else
            put(file, versions[page], page * PAGE, PAGE);
        done(0);
    }
}

static void churner(void) {
    unsigned long seed = 9, asked, grown = 0, replaced = 0, length = 0, small[SMALL] = {0};
    int file = make("/scratch/grows");
    char name[64], other[64];
    for (unsigned long step = 1;; step++) {
        if (is_asked(1, &asked)) {
            look(file, "/scratch/grows", 1, grown);
            if (replaced != 0)
                look_at("/scratch/replaced", replaced, length);
            for (int of = 0; of < SMALL; of++) {
                snprintf(name, sizeof name, "/scratch/directory/%d", of);
                if (small[of] != 0)
                    look_at(name, small[of], small[of] % 5000);
                else if (access(name, F_OK) == 0)
                    wrong("%s is there again", name);
            }
            atomic_store(&common->answered[1], asked);
        }
        if (grown > MOST - 9000) {
            grown = LEAST + chance(&seed) % 100000;
            if (ftruncate(file, (off_t)grown) != 0)
                fail("ftruncate");
        } else {
            unsigned long more = chance(&seed) % 9000;
            put(file, 1, grown, more);
            grown += more;
        }
        if (step % 50 == 0) {
            replaced = step;
            length = LEAST + chance(&seed) % 300000;
            int new = make("/scratch/new");
            put(new, replaced, 0, length);
            close(new);
            if (rename("/scratch/new", "/scratch/replaced") != 0)
                fail("rename");
        }
        unsigned long of = chance(&seed) % SMALL, to = chance(&seed) % SMALL;
        snprintf(name, sizeof name, "/scratch/directory/%lu", of);
        snprintf(other, sizeof other, "/scratch/directory/%lu", to);
        if (small[of] == 0) {
            int new = make(name);
            put(new, small[of] = step, 0, step % 5000);
            close(new);
        } else if (to != of && chance(&seed) % 2) {
            if (rename(name, other) != 0)
                fail("rename");
            small[to] = small[of];
            small[of] = 0;
        } else if (unlink(name) != 0)
            fail("unlink");
        else
            small[of] = 0;
        done(1);
    }
}

static int nameless, listening, linked;

static void lay_out(void) {
    /* Whole seconds: CRIU's archives of a cold move have no others. */
    struct timespec times[2] = {{.tv_sec = 900000000}, {.tv_sec = 1000000000}};
    if (mkdir("/scratch/directory", 0750) != 0)
        fail("mkdir");
    int kept = make("/scratch/kept");
    put(kept, 3, 0, KEPT);
    if (fchown(kept, 7, 8) != 0 || fchmod(kept, 04640) != 0 || link("/scratch/kept", "/scratch/directory/link") != 0 ||
        futimens(kept, times) != 0)
        fail("kept");
    close(kept);
    nameless = make("/scratch/nameless");
    put(nameless, 4, 0, KEPT);
    linked = make("/scratch/first");
    put(linked, 5, 0, KEPT);
    static char program[8 << 20];
    int self = open("/proc/self/exe", O_RDONLY), copy = make("/scratch/program");
    ssize_t length = read(self, program, sizeof program);
    /* What is behind the program does not matter. */
    if (length <= 0 || write(copy, program, (size_t)length) != length || ftruncate(copy, length + KEPT) != 0 ||
        pwrite(copy, program, (size_t)length < KEPT ? (size_t)length : KEPT, length) <= 0 || fchmod(copy, 0755) != 0)
        fail("program");
    close(self);
    close(copy);
    if (unlink("/scratch/nameless") != 0 || mkfifo("/scratch/fifo", 0620) != 0)
        fail("fifo");
    /* Open for both, it keeps what is in it. */
    if (write(open("/scratch/fifo", O_RDWR), "f", 1) != 1)
        fail("fifo");
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/scratch/socket"};
    listening = socket(AF_UNIX, SOCK_STREAM, 0);
    if (bind(listening, (struct sockaddr *)&address, sizeof address) != 0 || listen(listening, 4) != 0)
        fail("socket");
}

/* Nobody may have it open for writing then. */
static void start_program(void) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        close(2);
        execl("/scratch/program", "program", NULL);
        _exit(errno);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 2)
        wrong("the program ends with %d: %s", status, strerror(WEXITSTATUS(status)));
}

static void look_at_what_stays(void) {
    start_program();
    struct statvfs filesystem;
    if (statvfs("/dev/shm", &filesystem) != 0 || (long)(filesystem.f_blocks * filesystem.f_frsize) != SHM)
        wrong("/dev/shm has %lu blocks", filesystem.f_blocks);
    if (statvfs("/scratch", &filesystem) != 0 || (long)(filesystem.f_blocks * filesystem.f_frsize) != SCRATCH)
        wrong("/scratch has %lu blocks", filesystem.f_blocks);
    struct stat root, kept, link, fifo;
    if (stat("/dev/shm", &root) != 0 || (root.st_mode & 07777) != 01777)
        wrong("the mode of /dev/shm is %o", root.st_mode);
    if (stat("/scratch/directory", &root) != 0 || (root.st_mode & 07777) != 0750)
        wrong("the mode of the directory is %o", root.st_mode);
    look_at("/scratch/kept", 3, KEPT);
    if (stat("/scratch/kept", &kept) != 0 || stat("/scratch/directory/link", &link) != 0 || kept.st_ino != link.st_ino ||
        kept.st_nlink != 2 || kept.st_uid != 7 || kept.st_gid != 8 || (kept.st_mode & 07777) != 04640 ||
        kept.st_mtim.tv_sec != 1000000000 || kept.st_mtim.tv_nsec != 0)
        wrong("kept: %lu names, owner %u:%u, mode %o, time %ld", kept.st_nlink, kept.st_uid, kept.st_gid, kept.st_mode,
              (long)kept.st_mtim.tv_sec);
    look(nameless, "nameless", 4, KEPT);
    look(linked, "linked", 5, KEPT);
    char in_fifo = 0;
    int reader = open("/scratch/fifo", O_RDWR | O_NONBLOCK);
    if (stat("/scratch/fifo", &fifo) != 0 || (fifo.st_mode & 07777) != 0620 || read(reader, &in_fifo, 1) != 1 ||
        in_fifo != 'f' || write(reader, "f", 1) != 1)
        wrong("the FIFO has %d", in_fifo);
    close(reader);
    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = "/scratch/socket"};
    int client = socket(AF_UNIX, SOCK_STREAM, 0);
    if (connect(client, (struct sockaddr *)&address, sizeof address) != 0)
        wrong("the socket: %s", strerror(errno));
    else
        close(accept(listening, NULL, NULL));
    close(client);
}

/* Waits until all workers have come so far. */
static void await(atomic_ulong *of, unsigned long least) {
    for (int worker = 0; worker < WORKERS; worker++)
        while (atomic_load(&of[worker]) < least)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

int main(int count, char **arguments) {
    unsigned long length = count == 2 ? strtoul(arguments[1], NULL, 10) << 20 : 0;
    if (length == 0) {
        fprintf(stderr, "usage: tmpfs MIB\n");
        return 2;
    }
    umask(0);
    common = mmap(NULL, sizeof *common, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (common == MAP_FAILED)
        fail("mmap");
    lay_out();
    for (int worker = 0; worker < WORKERS; worker++) {
        pid_t child = fork();
        if (child < 0)
            fail("fork");
        if (child == 0) {
            if (prctl(PR_SET_PDEATHSIG, SIGKILL) != 0)
                fail("prctl");
            if (worker == 0)
                mapper(length);
            churner();
        }
    }
    await(common->changed, 1);
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(PORT)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 4) != 0)
        fail("listen");
    for (;;) {
        int client = accept(listener, NULL, NULL);
        char asked;
        while (client >= 0 && read(client, &asked, 1) == 1) {
            if (asked == 'l' && (link("/scratch/first", "/scratch/second") != 0 || unlink("/scratch/first") != 0))
                fail("link");
            unsigned long changed = 0;
            await(common->answered, atomic_fetch_add(&common->asked, 1) + 1);
            look_at_what_stays();
            for (int worker = 0; worker < WORKERS; worker++)
                changed += atomic_load(&common->changed[worker]);
            if (common->wrong[0] != 0)
                dprintf(client, "%s\n", common->wrong);
            else
                dprintf(client, "ok %lu\n", changed);
        }
        close(client);
    }
}
