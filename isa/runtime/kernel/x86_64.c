/* The kernel interface on x86-64: what differs from the generic (arm64's) interface is translated. */
#include "kernel.h"

typedef unsigned int u32;
typedef unsigned long u64;

/* Without a C library: small and rare copies. */
static void copy(void *to, const void *from, u64 size) { __builtin_memcpy(to, from, size); }

__asm__(".text\n"
        ".globl __gw_sigreturn\n"
        ".hidden __gw_sigreturn\n"
        ".type __gw_sigreturn, @function\n"
        "__gw_sigreturn:\n"
        "    movl $15, %eax\n" /* rt_sigreturn */
        "    syscall\n"
        ".size __gw_sigreturn, . - __gw_sigreturn\n");

/* The open flags that have other places: generic, x86-64. */
static const struct {
    u64 generic, own;
} open_flags[] = {
    {040000, 0200000},  /* O_DIRECTORY */
    {0100000, 0400000}, /* O_NOFOLLOW */
    {0200000, 040000},  /* O_DIRECT */
    {0400000, 0100000}, /* O_LARGEFILE */
};
#define OPEN_FLAGS (sizeof open_flags / sizeof *open_flags)

static u64 own_open_flags(u64 generic) {
    u64 own = generic & ~0740000UL;

    for (u64 i = 0; i < OPEN_FLAGS; i++)
        if (generic & open_flags[i].generic)
            own |= open_flags[i].own;
    return own;
}

static u64 generic_open_flags(u64 own) {
    u64 generic = own & ~0740000UL;

    for (u64 i = 0; i < OPEN_FLAGS; i++)
        if (own & open_flags[i].own)
            generic |= open_flags[i].generic;
    return generic;
}

/* openat2(directory, path, how, size): `how` begins with the flags; what follows them stays. */
static long call_openat2(long number, const long a[6]) {
    enum { ROOM = 64, FLAGS = 8 };
    char how[ROOM];
    u64 size = (u64)a[3], flags;
    long result;

    if (size < FLAGS)
        return -GW_EINVAL;
    /* The kernel knows 24 bytes; longer ones of zeros it would take, and no program passes them. */
    if (size > ROOM)
        return -GW_E2BIG;
    result = __gw_reach((void *)a[2], size, 0);
    if (result != 0)
        return result;
    copy(how, (const void *)a[2], size);
    copy(&flags, how, sizeof flags);
    flags = own_open_flags(flags);
    copy(how, &flags, sizeof flags);
    return __gw_native(number, a[0], a[1], (long)how, a[3], 0, 0);
}

static long call_fcntl(long number, const long a[6]) {
    enum { F_GETFL = 3, F_SETFL = 4 };
    long result;

    if (a[1] == F_SETFL)
        return __gw_native(number, a[0], a[1], (long)own_open_flags((u64)a[2]), 0, 0, 0);
    result = gw_native6(number, a);
    if (a[1] == F_GETFL && !gw_failed(result))
        result = (long)generic_open_flags((u64)result);
    return result;
}

struct own_stat {
    u64 device, inode, links;
    u32 mode, user, group, pad;
    u64 special;
    long size, block_size, blocks;
    long times[6];
    long unused[3];
};

struct generic_stat {
    u64 device, inode;
    u32 mode, links, user, group;
    u64 special, pad;
    long size;
    int block_size, pad2;
    long blocks;
    long times[6];
    u32 unused[2];
};

_Static_assert(sizeof(struct own_stat) == 144, "struct stat of x86-64 has 144 bytes");
_Static_assert(sizeof(struct generic_stat) == 128, "the generic struct stat has 128 bytes");

/* A call that writes a struct stat where argument `place` points. */
static long call_stat(long number, const long arguments[6], int place) {
    struct own_stat own;
    struct generic_stat *generic = (struct generic_stat *)arguments[place];
    long a[6], result;

    copy(a, arguments, sizeof a);
    a[place] = (long)&own;
    result = gw_native6(number, a);
    /* Only now: a call that fails leaves what is there as it is. */
    if (result == 0)
        result = __gw_reach(generic, sizeof *generic, 1);
    if (result != 0)
        return result;
    *generic = (struct generic_stat){
        .device = own.device,
        .inode = own.inode,
        .mode = own.mode,
        .links = (u32)own.links,
        .user = own.user,
        .group = own.group,
        .special = own.special,
        .size = own.size,
        .block_size = (int)own.block_size,
        .blocks = own.blocks,
    };
    copy(generic->times, own.times, sizeof own.times);
    return result;
}

/* x86-64 packs it, so that it is as on i386; everybody else aligns the data. */
struct own_event {
    u32 events;
    u64 data;
} __attribute__((packed));

struct generic_event {
    u32 events, pad;
    u64 data;
};

static long call_epoll_ctl(long number, const long a[6]) {
    const struct generic_event *generic = (const struct generic_event *)a[3];
    enum { DELETE = 2 };
    struct own_event own;
    long result;

    if (a[1] == DELETE)
        return gw_native6(number, a);
    result = __gw_reach((void *)a[3], sizeof *generic, 0);
    if (result != 0)
        return result;
    own = (struct own_event){generic->events, generic->data};
    return __gw_native(number, a[0], a[1], a[2], (long)&own, 0, 0);
}

/* The kernel's array is the smaller one: it is taken into the caller's, and spread from its end. */
static long call_epoll_wait(long number, const long a[6]) {
    char *array = (char *)a[1];
    long count = gw_native6(number, a);

    if (gw_failed(count))
        return count;
    for (long i = count - 1; i >= 0; i--) {
        struct own_event own;
        struct generic_event generic;

        copy(&own, array + (u64)i * sizeof own, sizeof own);
        generic = (struct generic_event){own.events, 0, own.data};
        copy(array + (u64)i * sizeof generic, &generic, sizeof generic);
    }
    return count;
}

struct ipc_permissions {
    char bytes[48];
};

struct own_semaphores {
    struct ipc_permissions permissions;
    long operated, unused1, changed, unused2;
    u64 count, unused3, unused4;
};

struct generic_semaphores {
    struct ipc_permissions permissions;
    long operated, changed;
    u64 count, unused3, unused4;
};

/* semctl(set, number, command, argument): some commands pass a struct semid_ds. */
static long call_semctl(long number, const long a[6]) {
    enum { IPC_SET = 1, IPC_STAT = 2, SEM_STAT = 18, SEM_STAT_ANY = 20 };
    struct generic_semaphores *generic = (struct generic_semaphores *)a[3];
    struct own_semaphores own = {0};
    long result, reached;

    if (a[2] == IPC_SET) {
        result = __gw_reach(generic, sizeof *generic, 0);
        if (result != 0)
            return result;
        own.permissions = generic->permissions;
        return __gw_native(number, a[0], a[1], a[2], (long)&own, 0, 0);
    }
    if (a[2] != IPC_STAT && a[2] != SEM_STAT && a[2] != SEM_STAT_ANY)
        return gw_native6(number, a);
    result = __gw_native(number, a[0], a[1], a[2], (long)&own, 0, 0);
    if (gw_failed(result))
        return result;
    reached = __gw_reach(generic, sizeof *generic, 1);
    if (reached != 0)
        return reached;
    *generic = (struct generic_semaphores){
        .permissions = own.permissions,
        .operated = own.operated,
        .changed = own.changed,
        .count = own.count,
    };
    return result;
}

long gw_translate(enum gw_kind kind, long number, const long a[6]) {
    enum { MAP_32BIT = 0x40 };

    switch (kind) {
    case GW_open_flags_1:
        return __gw_native(number, a[0], (long)own_open_flags((u64)a[1]), a[2], a[3], a[4], a[5]);
    case GW_open_flags_2:
        return __gw_native(number, a[0], a[1], (long)own_open_flags((u64)a[2]), a[3], a[4], a[5]);
    case GW_openat2:
        return call_openat2(number, a);
    case GW_fcntl:
        return call_fcntl(number, a);
    case GW_stat_1:
        return call_stat(number, a, 1);
    case GW_stat_2:
        return call_stat(number, a, 2);
    case GW_epoll_ctl:
        return call_epoll_ctl(number, a);
    case GW_epoll_wait:
        return call_epoll_wait(number, a);
    case GW_semctl:
        return call_semctl(number, a);
    case GW_mmap:
        return __gw_native(number, a[0], a[1], a[2], a[3] & ~(long)MAP_32BIT, a[4], a[5]);
    case GW_clone:
        /* Thread pointer and place for the child's number change places. */
        return __gw_native(number, a[0], a[1], a[2], a[4], a[3], 0);
    default:
        return gw_native6(number, a);
    }
}
