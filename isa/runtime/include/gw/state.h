// The file that a captured program leaves. Little endian, all numbers unsigned.
//
//     header    "GWSTATE\0", u32 version, u32 sections, u8 identity[32], u64 length of the file,
//               u32 CRC-32C of the file behind the header, u32 CRC-32C of the header before this field
//     section   u32 type, u32 value, u64 address, u64 length; BYTES, DESCRIPTOR, PROCESS and LOCK are followed by their
//               bytes, padded with zeros to 8
//     …
//
// The identity is the build's (SHA-256 over the neutral program and its layout); a state of another build is refused.
// A file is checked whole, lengths and both sums, before a byte of memory is changed. Version 2 has a
// section for each slot that is in use, also where no thread runs in it (GW_IDLE in its control block).
#ifndef GW_STATE_H
#define GW_STATE_H

#include <stdint.h>

#define GW_STATE_MAGIC "GWSTATE"
#define GW_STATE_VERSION 2U

enum gw_section_type {
    GW_SECTION_BYTES = 1,      // `length` bytes at `address`; all memory that no section names is zero
    GW_SECTION_MAPPING = 2,    // memory to map before bytes are loaded: `value` = PROT_*
    GW_SECTION_THREAD = 3,     // `value` = a slot that is in use; slot 0 always is
    GW_SECTION_PAST_END = 4,   // as MAPPING, but behind the end of a mapped file: touching it raises SIGBUS
    GW_SECTION_DESCRIPTOR = 5, // `value` = number; a struct gw_state_descriptor and the path follow. In order of number
    GW_SECTION_PROCESS = 6,    // one at most: a struct gw_state_process and the working directory follow
    GW_SECTION_LOCK = 7,       // `value` = number of a descriptor; a struct gw_state_lock and its path follow
};

struct gw_state_header {
    char magic[8];
    uint32_t version;
    uint32_t sections;
    uint8_t identity[32];
    uint64_t length;
    uint32_t body_sum;
    uint32_t header_sum;
};

struct gw_state_section {
    uint32_t type;
    uint32_t value;
    uint64_t address;
    uint64_t length;
};

enum gw_descriptor_kind {
    GW_REGULAR = 1,
    GW_DIRECTORY = 2,
    GW_CHARACTER = 3, // a device such as /dev/null
    GW_PIPE = 4,      // with a name or without
    GW_SOCKET = 5,
    GW_OTHER = 6, // epoll, eventfd, timerfd, signalfd, block devices, …
};

enum gw_descriptor_bits {
    GW_INHERITED = 1, // still what the process was started with, as 0, 1 and 2 mostly are: a new process has its own
    GW_DELETED = 2,   // no name leads to the file any more
};

struct gw_state_descriptor {
    uint32_t kind;
    uint32_t bits;
    uint32_t flags;  // generic O_…, without those that only matter while opening; O_CLOEXEC
    uint32_t shares; // a number with the same open file description: an inherited one, or the lowest; or its own
    uint64_t offset;
    uint64_t size;    // of a regular file
    uint64_t inode;   // with `device`, tells whether what stands at the path is the same file
    uint64_t device;  // of the file system: major in the upper half, minor in the lower
    uint64_t special; // of a device: the same of itself
};

struct gw_state_process {
    uint32_t umask;
    uint32_t reserved; // 0
};

enum gw_lock_kind {
    GW_LOCK_PROCESS = 1,     // fcntl, of the process
    GW_LOCK_DESCRIPTION = 2, // fcntl, of the open file description
    GW_LOCK_WHOLE = 3,       // flock
    GW_LOCK_OTHER = 4,       // a lease, which cannot be taken again
};

struct gw_state_lock {
    uint32_t kind;
    uint32_t writes; // nobody else may have one; else others may read
    uint64_t begin;
    uint64_t length; // 0: to the end of the file, however long it becomes
    uint64_t inode;  // of the file, with `device`
    uint64_t device;
};

#define GW_PATH_MAX 4095U // bytes of a path in a section

// The program ends with this status when it has left a state.
#define GW_EXIT_CAPTURED 86

#endif
