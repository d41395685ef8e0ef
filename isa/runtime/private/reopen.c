// What a state says of open descriptors, working directory and umask is made true again. In the process that was
// captured (GODWIT_STATE_KEPT) they are there, and only looked at. In another one, files, directories and character
// devices are opened by their paths; what has another end (pipes, sockets) or no path cannot be, and ends the process.
#include "private.h"

enum { AT_FDCWD = -100, SEEK_SET = 0, F_SETFD = 2, F_DUPFD_CLOEXEC = 1030, FD_CLOEXEC = 1 };
enum { O_CREAT = 0100, O_EXCL = 0200, O_NOCTTY = 0400, O_TRUNC = 01000, O_CLOEXEC = 02000000, O_PATH = 010000000 };
enum { ENOENT = 2, EBADF = 9, EAGAIN = 11, EACCES = 13, STANDARD = 3 };
enum { F_SETLK = 6, F_OFD_SETLK = 37, F_RDLCK = 0, F_WRLCK = 1, LOCK_SH = 1, LOCK_EX = 2, LOCK_NB = 4 };
#define GW_PTMX (5UL << 32 | 2) // opening it makes another terminal

static char sentence[GW_PATH_MAX + 512];
static uint64_t written;

static void say(const char *text) {
    while (*text && written + 1 < sizeof sentence)
        sentence[written++] = *text++;
    sentence[written] = 0;
}

static void say_number(uint32_t number) {
    char text[12];
    char *digit = text + sizeof text - 1;
    *digit = 0;
    do
        *--digit = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    say(digit);
}

static const char *name_of_kind(const struct gw_state_descriptor *d) {
    switch (d->kind) {
    case GW_REGULAR:
        return "a file";
    case GW_DIRECTORY:
        return "a directory";
    case GW_CHARACTER:
        return "a device";
    case GW_PIPE:
        return "a pipe";
    case GW_SOCKET:
        return "a socket";
    default:
        return "an object of the kernel";
    }
}

_Noreturn static void refuse(uint32_t number, const struct gw_state_descriptor *d, const char *path, const char *why,
                             long error) {
    say("descriptor ");
    say_number(number);
    say(", ");
    say(name_of_kind(d));
    say(" (");
    say(path);
    say("): ");
    say(why);
    gw_fail("the state cannot go on in this process:", sentence, error);
}

static int64_t highest = -1;

static int is_sound_lock(uint32_t number, const struct gw_state_lock *lock) {
    return number <= INT32_MAX && lock->kind >= GW_LOCK_PROCESS && lock->kind <= GW_LOCK_OTHER && lock->writes <= 1 &&
           lock->begin <= INT64_MAX && lock->length <= INT64_MAX - lock->begin;
}

const char *gw_unsound_descriptor(const struct gw_state_section *section, const char *bytes) {
    int is_process = section->type == GW_SECTION_PROCESS;
    int is_lock = section->type == GW_SECTION_LOCK;
    uint64_t head = is_process ? sizeof(struct gw_state_process)
                    : is_lock  ? sizeof(struct gw_state_lock)
                               : sizeof(struct gw_state_descriptor);
    if (section->address != 0 || section->length <= head || section->length > head + GW_PATH_MAX)
        return "the state file tells of an open file without a path, or with one that is too long:";
    for (uint64_t i = head; i < section->length; i++)
        if (bytes[i] == 0)
            return "the state file tells of an open file whose path has a zero in it:";
    if (is_process)
        return section->value == 0 ? 0 : "the state file's process is damaged:";
    if (is_lock)
        return is_sound_lock(section->value, (const struct gw_state_lock *)bytes) ? 0
                                                                                  : "the state file's lock is damaged:";
    if (section->value <= highest)
        return "the state file's descriptors are not in order:";
    highest = section->value;
    const struct gw_state_descriptor *d = (const struct gw_state_descriptor *)bytes;
    if (section->value > INT32_MAX || d->shares > INT32_MAX || d->kind < GW_REGULAR || d->kind > GW_OTHER ||
        d->bits > (GW_INHERITED | GW_DELETED))
        return "the state file's descriptor is damaged:";
    return 0;
}

static const char *copy_path(const char *bytes, uint64_t length) {
    static char path[GW_PATH_MAX + 1];
    __builtin_memcpy(path, bytes, length);
    path[length] = 0;
    return path;
}

// 0, 1 and 2 that the program has closed are closed: an open of its own is to get the number.
static void close_standard(uint32_t from, uint32_t to) {
    for (uint32_t number = from; number < to && number < STANDARD; number++) {
        gw_forget_inherited_descriptor(number);
        long error = gw_call(GW_NR_close, number, 0, 0, 0, 0, 0);
        if (error != 0 && error != -EBADF)
            gw_fail("cannot close a descriptor that the program had closed", 0, error);
    }
}

static uint32_t next; // the lowest number that was not looked at

// In the process that was captured.
static void expect(uint32_t number, const struct gw_state_descriptor *d, const char *path) {
    struct gw_file file;
    long error = gw_look_at((int)number, &file);
    if (error != 0)
        refuse(number, d, path, "it was closed between two legs", error);
    if (file.inode != d->inode || file.device != d->device || file.kind != d->kind)
        refuse(number, d, path, "between two legs it became another file", 0);
    long close = d->flags & O_CLOEXEC ? FD_CLOEXEC : 0;
    error = gw_call(GW_NR_fcntl, number, F_SETFD, close, 0, 0, 0);
    if (error != 0)
        refuse(number, d, path, "its flag for exec cannot be set", error);
}

static void take_from(uint32_t number, uint32_t other, const struct gw_state_descriptor *d, const char *path) {
    long result = gw_call(GW_NR_dup3, other, number, d->flags & O_CLOEXEC, 0, 0, 0);
    if (result != (long)number)
        refuse(number, d, path, "the number cannot be given to it", result);
}

static void check_same(uint32_t number, const struct gw_state_descriptor *d, const char *path, int opened) {
    struct gw_file file;
    long error = gw_look_at(opened, &file);
    if (error != 0)
        refuse(number, d, path, "it cannot be looked at", error);
    if (file.kind != d->kind || (d->kind == GW_CHARACTER ? file.special != d->special : file.inode != d->inode))
        refuse(number, d, path, "another one stands there now", 0);
    if (d->kind == GW_REGULAR && file.size < d->size)
        refuse(number, d, path, "it is shorter than it was when the state was written", 0);
}

static void open_again(uint32_t number, const struct gw_state_descriptor *d, const char *path) {
    if (d->kind > GW_CHARACTER || (d->kind == GW_CHARACTER && d->special == GW_PTMX))
        refuse(number, d, path,
               "it cannot be opened again in another process; godwit-state hop keeps the process, and all it has open",
               0);
    if (d->bits & GW_DELETED)
        refuse(number, d, path, "it was deleted while it was open, and no path leads to it", 0);
    uint32_t flags = (d->flags & ~(uint32_t)(O_CREAT | O_EXCL | O_TRUNC)) | O_NOCTTY;
    long opened = gw_call(GW_NR_openat, AT_FDCWD, (long)path, gw_own_open_flags(flags), 0, 0, 0);
    if (opened < 0)
        refuse(number, d, path, opened == -ENOENT ? "it is not there any more" : "it cannot be opened again as it was",
               opened);
    check_same(number, d, path, (int)opened);
    if (d->kind != GW_CHARACTER && !(d->flags & O_PATH)) {
        long offset = gw_call(GW_NR_lseek, opened, (long)d->offset, SEEK_SET, 0, 0, 0);
        if (offset != (long)d->offset)
            refuse(number, d, path, "its position cannot be set", offset);
    }
    if ((uint32_t)opened == number)
        return;
    take_from(number, (uint32_t)opened, d, path);
    long error = gw_call(GW_NR_close, opened, 0, 0, 0, 0, 0);
    if (error != 0)
        refuse(number, d, path, "a second number of it cannot be closed", error);
}

void gw_restore_descriptor(const struct gw_state_section *section, const char *bytes) {
    const struct gw_state_descriptor *d = (const struct gw_state_descriptor *)bytes;
    const char *path = copy_path(bytes + sizeof *d, section->length - sizeof *d);
    uint32_t number = section->value;
    close_standard(next, number);
    next = number + 1;
    if (!(d->bits & GW_INHERITED))
        gw_forget_inherited_descriptor(number);
    if (gw_settings.kept)
        expect(number, d, path);
    else if (d->bits & GW_INHERITED)
        return;
    else if (d->shares != number)
        take_from(number, d->shares, d, path);
    else
        open_again(number, d, path);
}

static long take_lock(uint32_t number, const struct gw_state_lock *lock) {
    struct {
        int16_t type, whence;
        int64_t begin, length;
        int32_t process;
    } range = {
        .type = lock->writes ? F_WRLCK : F_RDLCK, .begin = (int64_t)lock->begin, .length = (int64_t)lock->length};
    if (lock->kind == GW_LOCK_WHOLE)
        return gw_call(GW_NR_flock, number, (lock->writes ? LOCK_EX : LOCK_SH) | LOCK_NB, 0, 0, 0, 0);
    return gw_call(GW_NR_fcntl, number, lock->kind == GW_LOCK_PROCESS ? F_SETLK : F_OFD_SETLK, (long)&range, 0, 0, 0);
}

// When all descriptors are there: to close one of a file gives up the process's locks on it.
void gw_restore_lock(const struct gw_state_section *section, const char *bytes) {
    const struct gw_state_lock *lock = (const struct gw_state_lock *)bytes;
    const char *path = copy_path(bytes + sizeof *lock, section->length - sizeof *lock);
    static const struct gw_state_descriptor a_file = {.kind = GW_REGULAR};
    struct gw_file file;
    if (gw_settings.kept)
        return;
    if (lock->kind == GW_LOCK_OTHER)
        refuse(section->value, &a_file, path,
               "the program has a lease on it, which cannot be taken again; godwit-state hop keeps it", 0);
    long error = gw_look_at((int)section->value, &file);
    if (error != 0 || file.inode != lock->inode || file.device != lock->device)
        refuse(section->value, &a_file, path,
               "the program has a lock on it, but in this process the number is of another file", error);
    error = take_lock(section->value, lock);
    if (error == -EAGAIN || error == -EACCES)
        refuse(section->value, &a_file, path,
               "another process has locked what the program had locked; go on when that one has given it up", error);
    if (error != 0)
        refuse(section->value, &a_file, path, "the program's lock on it cannot be taken again", error);
}

// What there is to say while 2 becomes the program's is for whoever started this process.
void gw_begin_descriptors(void) {
    if (gw_settings.kept)
        return;
    long messages = gw_call(GW_NR_fcntl, gw_messages, F_DUPFD_CLOEXEC, highest + 1, 0, 0, 0);
    if (messages >= 0)
        gw_messages = (int)messages;
}

void gw_finish_descriptors(int is_complete) {
    if (is_complete)
        close_standard(next, STANDARD);
    if (gw_messages == 2)
        return;
    long error = gw_call(GW_NR_close, gw_messages, 0, 0, 0, 0, 0);
    gw_messages = 2;
    if (error != 0)
        gw_fail("cannot close a second number of standard error", 0, error);
}

void gw_restore_process(const struct gw_state_section *section, const char *bytes) {
    struct gw_state_process process;
    __builtin_memcpy(&process, bytes, sizeof process);
    if (gw_settings.kept)
        return;
    const char *path = copy_path(bytes + sizeof process, section->length - sizeof process);
    long error = gw_call(GW_NR_chdir, (long)path, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("the state cannot go on in this process: cannot enter its working directory", path, error);
    (void)gw_call(GW_NR_umask, process.umask, 0, 0, 0, 0, 0); // never fails
}
