// What the kernel tells about an open file, in one form on every set.
#include "private.h"

enum { AT_EMPTY_PATH = 0x1000, STATX_BASIC_STATS = 0x7ff };
enum { F_GETFD = 1, F_GETFL = 3, FD_CLOEXEC = 1, O_CLOEXEC = 02000000 };
enum { S_IFMT = 0170000, S_IFIFO = 0010000, S_IFCHR = 0020000, S_IFDIR = 0040000 };
enum { S_IFREG = 0100000, S_IFSOCK = 0140000 };

// struct statx, which is the same on all sets; struct stat is not.
struct answer {
    uint32_t mask, block_size;
    uint64_t attributes;
    uint32_t links, user, group;
    uint16_t mode, pad;
    uint64_t inode, size, blocks, attributes_mask;
    uint64_t times[8];
    uint32_t special_major, special_minor, device_major, device_minor;
    uint64_t rest[14];
};

_Static_assert(sizeof(struct answer) == 256, "struct statx has 256 bytes");

static uint32_t kind_of(uint32_t mode) {
    switch (mode & S_IFMT) {
    case S_IFREG:
        return GW_REGULAR;
    case S_IFDIR:
        return GW_DIRECTORY;
    case S_IFCHR:
        return GW_CHARACTER;
    case S_IFIFO:
        return GW_PIPE;
    case S_IFSOCK:
        return GW_SOCKET;
    default:
        return GW_OTHER;
    }
}

long gw_look_at(int number, struct gw_file *file) {
    struct answer answer;
    long error = gw_call(GW_NR_statx, number, (long)"", AT_EMPTY_PATH, STATX_BASIC_STATS, (long)&answer, 0);
    if (error != 0)
        return error;
    *file = (struct gw_file){
        .inode = answer.inode,
        .device = (uint64_t)answer.device_major << 32 | answer.device_minor,
        .special = (uint64_t)answer.special_major << 32 | answer.special_minor,
        .size = answer.size,
        .kind = kind_of(answer.mode),
        .deleted = answer.links == 0,
    };
    return 0;
}

// The threads of this process that the kernel has, also a main thread that has ended; or an error: not where /proc is.
// The directory of them has two links more.
long gw_count_threads(void) {
    enum { AT_FDCWD = -100, STATX_NLINK = 4 };
    struct answer answer;
    long error = gw_call(GW_NR_statx, AT_FDCWD, (long)"/proc/self/task", 0, STATX_NLINK, (long)&answer, 0);
    return error != 0 ? error : (long)answer.links - 2;
}

// Flags as open takes them on this set, with O_CLOEXEC; or an error.
long gw_status_flags(int number) {
    long flags = gw_call(GW_NR_fcntl, number, F_GETFL, 0, 0, 0, 0);
    long close = gw_call(GW_NR_fcntl, number, F_GETFD, 0, 0, 0, 0);
    if (flags < 0 || close < 0)
        return flags < 0 ? flags : close;
    return flags | (close & FD_CLOEXEC ? O_CLOEXEC : 0);
}

// "DIRECTORY/NUMBER": the directory ends with a slash, and all of it fits.
void gw_number_path(char *path, const char *directory, uint32_t number) {
    char digits[12];
    int count = 0;
    do
        digits[count++] = (char)('0' + number % 10);
    while ((number /= 10) != 0);
    while (*directory)
        *path++ = *directory++;
    while (count > 0)
        *path++ = digits[--count];
    *path = 0;
}
