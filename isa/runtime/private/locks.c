// Locks on files (fcntl, flock), for the state. The kernel tells of them with each descriptor; those that belong to an
// open file description are told of with every number of it, those that belong to the process with every number of the
// file.
#include "private.h"

enum { AT_FDCWD = -100, O_RDONLY_CLOEXEC = 02000000 };
enum { O_ACCMODE = 3, O_RDONLY = 0, O_WRONLY = 1 };
enum { LINE = 256, WORDS = 9 };

struct line {
    char text[LINE];
    uint32_t length;
};

static int is(const char *word, const char *other) {
    while (*word && *word == *other)
        word++, other++;
    return *word == *other;
}

// Cuts a line into words; says how many there are.
static int cut(char *text, const char **words) {
    int count = 0;
    for (char *at = text; *at && count < WORDS;) {
        while (*at == ' ' || *at == '\t')
            *at++ = 0;
        if (*at)
            words[count++] = at;
        while (*at && *at != ' ' && *at != '\t')
            at++;
    }
    return count;
}

static uint64_t number_of(const char *digits) {
    uint64_t number = 0;
    while (*digits >= '0' && *digits <= '9')
        number = number * 10 + (uint64_t)(*digits++ - '0');
    return number;
}

static uint32_t kind_of(const char *word) {
    if (is(word, "POSIX"))
        return GW_LOCK_PROCESS;
    if (is(word, "OFDLCK"))
        return GW_LOCK_DESCRIPTION;
    return is(word, "FLOCK") ? GW_LOCK_WHOLE : GW_LOCK_OTHER;
}

// Is this number one by which the lock is to be taken again?
static int is_told_here(const struct gw_state_lock *lock, uint32_t number, const struct gw_state_descriptor *d) {
    uint32_t access = d->flags & O_ACCMODE;
    // Of an open file description: by its first number, and not if it is that of whoever started the program.
    if (lock->kind != GW_LOCK_PROCESS)
        return d->shares == number && !(d->bits & GW_INHERITED);
    return lock->writes ? access != O_RDONLY : access != O_WRONLY;
}

// "lock:	1: POSIX  ADVISORY  WRITE 4711 fd:00:815 10 19": number, kind, mode, way, process, file, first and last
// byte.
static void take_line(struct line *line, uint32_t number, const struct gw_state_descriptor *d, const char *path,
                      gw_put_section *put, void *writer) {
    const char *words[WORDS];
    line->text[line->length] = 0;
    if (cut(line->text, words) != WORDS || !is(words[0], "lock:"))
        return;
    struct gw_state_lock lock = {
        .kind = kind_of(words[2]),
        .writes = is(words[4], "WRITE"),
        .begin = number_of(words[7]),
        .inode = d->inode,
        .device = d->device,
    };
    if (!is(words[8], "EOF"))
        lock.length = number_of(words[8]) - lock.begin + 1;
    if (is_told_here(&lock, number, d))
        put(writer, GW_SECTION_LOCK, number, &lock, sizeof lock, path);
}

void gw_save_locks(uint32_t number, const struct gw_state_descriptor *d, const char *path, gw_put_section *put,
                   void *writer) {
    static char bytes[4096];
    char name[GW_NUMBER_PATH];
    struct line line = {.length = 0};
    gw_number_path(name, "/proc/thread-self/fdinfo/", number);
    long file = gw_call(GW_NR_openat, AT_FDCWD, (long)name, O_RDONLY_CLOEXEC, 0, 0, 0);
    long count = file;
    while (count >= 0 && (count = gw_call(GW_NR_read, file, (long)bytes, sizeof bytes, 0, 0, 0)) > 0)
        for (long i = 0; i < count; i++) {
            if (bytes[i] == '\n') {
                take_line(&line, number, d, path, put, writer);
                line.length = 0;
            } else if (line.length + 1 < LINE) {
                line.text[line.length++] = bytes[i];
            }
        }
    if (count < 0)
        gw_fail("cannot tell which locks the program has on an open file for the state:", path, count);
    long error = gw_call(GW_NR_close, file, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot close", name, error);
}
