// What a state says of the kernel's objects that a program has by number: a section for each open descriptor, and one
// for umask and working directory. It is written whether the process stays (exec mode, next.c) or another one goes on
// (reopen.c), since who writes it does not know.
#include "private.h"

enum { AT_FDCWD = -100, O_RDONLY_DIRECTORY_CLOEXEC = 02000000 }; // O_DIRECTORY has another value on each set
enum { F_GETFL = 3, F_SETFL = 4, O_NONBLOCK = 04000 };
enum { SEEK_CUR = 1, KCMP_FILE = 0 };
enum { PROT_READ_WRITE = 3, MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x4022 };
enum { MOST = 1 << 20 };

// Of this thread: where the main thread has ended, /proc/self shows nothing.
static const char own_descriptors[] = "/proc/thread-self/fd";

// A number and its file. A process has a few, seldom thousands, so that they are looked for one by one.
struct open {
    uint64_t inode, device;
    uint32_t number, kind;
};

struct list {
    struct open *items;
    uint32_t count;
};

static void add(struct list *list, struct open item) {
    if (!list->items) {
        long room = gw_call(GW_NR_mmap, 0, (long)MOST * (long)sizeof item, PROT_READ_WRITE,
                            MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0);
        if ((unsigned long)room >= (unsigned long)-4095L)
            gw_fail("no memory for the list of open files", 0, room);
        list->items = (struct open *)room;
    }
    if (list->count == MOST)
        gw_fail("the program has more than a million open files, more than a state holds", 0, 0);
    list->items[list->count++] = item;
}

// What the process was started with. As long as a number is of this file, it is not the program's own.
static struct list inherited;

static void note(uint32_t number) {
    struct gw_file file;
    if (gw_look_at((int)number, &file) == 0)
        add(&inherited, (struct open){file.inode, file.device, number, file.kind});
}

void gw_note_inherited_descriptors(void) { gw_each_descriptor(note); }

void gw_forget_inherited_descriptor(uint32_t number) {
    for (uint32_t i = 0; i < inherited.count; i++)
        if (inherited.items[i].number == number)
            inherited.items[i].kind = 0;
}

static int is_same_file(const struct open *open, const struct gw_file *file) {
    return open->inode == file->inode && open->device == file->device && open->kind == file->kind;
}

static int is_inherited(uint32_t number, const struct gw_file *file) {
    for (uint32_t i = 0; i < inherited.count; i++)
        if (inherited.items[i].number == number)
            return is_same_file(&inherited.items[i], file);
    return 0;
}

static uint32_t to_number(const char *digits) {
    uint32_t number = 0;
    while (*digits >= '0' && *digits <= '9')
        number = number * 10 + (uint32_t)(*digits++ - '0');
    return number;
}

// Calls for each open descriptor, in order of number, which is that of the directory.
void gw_each_descriptor(void (*call)(uint32_t number)) {
    struct entry {
        uint64_t inode, next;
        uint16_t length;
        uint8_t type;
        char name[];
    };
    static char entries[4096] __attribute__((aligned(8)));
    long directory = gw_call(GW_NR_openat, AT_FDCWD, (long)own_descriptors, O_RDONLY_DIRECTORY_CLOEXEC, 0, 0, 0);
    if (directory < 0)
        gw_fail("cannot tell which files are open for the state: cannot open", own_descriptors, directory);
    for (;;) {
        long bytes = gw_call(GW_NR_getdents64, directory, (long)entries, sizeof entries, 0, 0, 0);
        if (bytes < 0)
            gw_fail("cannot tell which files are open for the state: cannot read", own_descriptors, bytes);
        if (bytes == 0)
            break;
        for (long at = 0; at < bytes;) {
            const struct entry *entry = (const struct entry *)(entries + at);
            at += entry->length;
            if (entry->name[0] != '.' && to_number(entry->name) != (uint32_t)directory)
                call(to_number(entry->name));
        }
    }
    long error = gw_call(GW_NR_close, directory, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot close", own_descriptors, error);
}

// Do two numbers of the same file have one offset and one set of flags? Where the kernel does not say (qemu-user, a
// filter), it is seen by changing a flag of one of them for a moment.
static int is_shared(uint32_t a, uint32_t b) {
    static long process;
    if (process == 0)
        process = gw_call(GW_NR_getpid, 0, 0, 0, 0, 0, 0);
    long order = gw_call(GW_NR_kcmp, process, process, KCMP_FILE, a, b, 0);
    if (order >= 0)
        return order == 0;
    long flags = gw_call(GW_NR_fcntl, a, F_GETFL, 0, 0, 0, 0);
    if (flags < 0 || gw_call(GW_NR_fcntl, b, F_GETFL, 0, 0, 0, 0) != flags)
        return 0;
    if (gw_call(GW_NR_fcntl, a, F_SETFL, flags ^ O_NONBLOCK, 0, 0, 0) != 0)
        return 0;
    long seen = gw_call(GW_NR_fcntl, b, F_GETFL, 0, 0, 0, 0);
    long error = gw_call(GW_NR_fcntl, a, F_SETFL, flags, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot set back the flags of an open file", 0, error);
    return seen != flags;
}

// Those that have been written.
static struct list seen;
static gw_put_section *put_section;
static void *the_writer;
static uint32_t left_out;

static int find(const struct list *list, uint32_t number, const struct gw_file *file, uint32_t *found) {
    for (uint32_t i = 0; i < list->count; i++) {
        const struct open *open = &list->items[i];
        struct gw_file now;
        if (!is_same_file(open, file) || gw_look_at((int)open->number, &now) != 0 || !is_same_file(open, &now))
            continue;
        if (open->number == number || is_shared(open->number, number)) {
            *found = open->number;
            return 1;
        }
    }
    return 0;
}

// The number whose open file description this one has: an inherited one, since those are there first; or the lowest.
static uint32_t shares(uint32_t number, const struct gw_file *file) {
    uint32_t found = number;
    if (!find(&inherited, number, file, &found) && !find(&seen, number, file, &found))
        add(&seen, (struct open){file->inode, file->device, number, file->kind});
    return found;
}

static const char *path_of(const char *link) {
    static char path[GW_PATH_MAX + 1];
    long length = gw_call(GW_NR_readlinkat, AT_FDCWD, (long)link, (long)path, sizeof path, 0, 0);
    if (length < 0 || (uint64_t)length > GW_PATH_MAX)
        gw_fail("cannot tell the path of an open file for the state:", link, length < 0 ? length : 0);
    path[length] = 0;
    return path;
}

static const char *path_of_descriptor(uint32_t number) {
    static char link[GW_NUMBER_PATH];
    gw_number_path(link, "/proc/thread-self/fd/", number);
    return path_of(link);
}

static void save(uint32_t number) {
    struct gw_file file;
    if (number == left_out)
        return;
    long error = gw_look_at((int)number, &file);
    long flags = gw_status_flags((int)number);
    const char *path = path_of_descriptor(number);
    if (error != 0 || flags < 0)
        gw_fail("cannot look at an open file for the state:", path, error != 0 ? error : flags);
    // Where there is no position, there is none to go back to.
    long offset = gw_call(GW_NR_lseek, number, 0, SEEK_CUR, 0, 0, 0);
    struct gw_state_descriptor descriptor = {
        .kind = file.kind,
        .bits = (is_inherited(number, &file) ? GW_INHERITED : 0) | (file.deleted ? GW_DELETED : 0),
        .flags = gw_generic_open_flags((uint32_t)flags),
        .shares = shares(number, &file),
        .offset = offset > 0 ? (uint64_t)offset : 0,
        .size = file.kind == GW_REGULAR ? file.size : 0,
        .inode = file.inode,
        .device = file.device,
        .special = file.special,
    };
    put_section(the_writer, GW_SECTION_DESCRIPTOR, number, &descriptor, sizeof descriptor, path);
    if (file.kind == GW_REGULAR || file.kind == GW_DIRECTORY)
        gw_save_locks(number, &descriptor, path, put_section, the_writer);
}

void gw_save_descriptors(gw_put_section *put, void *writer, int state_file) {
    put_section = put;
    the_writer = writer;
    left_out = (uint32_t)state_file;

    long mask = gw_call(GW_NR_umask, 077, 0, 0, 0, 0, 0);
    (void)gw_call(GW_NR_umask, mask, 0, 0, 0, 0, 0); // never fails
    struct gw_state_process process = {.umask = (uint32_t)mask};
    put(writer, GW_SECTION_PROCESS, 0, &process, sizeof process, path_of("/proc/thread-self/cwd"));
    gw_each_descriptor(save);
}
