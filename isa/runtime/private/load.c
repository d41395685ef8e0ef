// Reads a state into a process that has just started and whose memory is still as the executable has it. The file is
// mapped and checked whole, then used; so a bad file changes nothing.
#include "private.h"

enum { AT_FDCWD = -100, O_RDONLY_CLOEXEC = 02000000, SEEK_END = 2 };
enum { PROT_READ = 1, PROT_WRITE = 2 };
enum { MAP_PRIVATE = 2, MAP_ANONYMOUS_FIXED_NORESERVE = 0x4032, MAP_FIXED_NOREPLACE = 0x100000 };
enum {
    MAP_SHARED_ANONYMOUS = 0x21,
    MAP_FIXED = 0x10,
    MAP_NORESERVE = 0x4000,
    MAP_PRIVATE_ANONYMOUS_NORESERVE = 0x4022
};

struct state {
    const char *path;
    const char *bytes;
    uint64_t length;
};

static void refuse(const struct state *s, const char *why) { gw_fail(why, s->path, 0); }

static void refuse_if(const struct state *s, const char *why) {
    if (why)
        refuse(s, why);
}

static struct state map_file(const char *path) {
    long file = gw_call(GW_NR_openat, AT_FDCWD, (long)path, O_RDONLY_CLOEXEC, 0, 0, 0);
    if (gw_is_error(file))
        gw_fail("cannot open the state file", path, file);
    long length = gw_call(GW_NR_lseek, file, 0, SEEK_END, 0, 0, 0);
    if (gw_is_error(length))
        gw_fail("cannot tell the length of the state file", path, length);
    if ((uint64_t)length < sizeof(struct gw_state_header))
        gw_fail("not a state file, since it is too short:", path, 0);
    long bytes = gw_call(GW_NR_mmap, 0, length, PROT_READ, MAP_PRIVATE, file, 0);
    if (gw_is_error(bytes))
        gw_fail("cannot map the state file", path, bytes);
    long error = gw_call(GW_NR_close, file, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot close the state file", path, error);
    return (struct state){path, (const char *)bytes, (uint64_t)length};
}

static int has_bytes(const struct gw_state_section *section) {
    return section->type == GW_SECTION_BYTES || section->type == GW_SECTION_DESCRIPTOR ||
           section->type == GW_SECTION_PROCESS || section->type == GW_SECTION_LOCK;
}

static uint64_t body_bytes(const struct gw_state_section *section) {
    return has_bytes(section) ? (section->length + 7) & ~7UL : 0;
}

static int is_mapping(const struct gw_state_section *section) {
    return section->type == GW_SECTION_MAPPING || section->type == GW_SECTION_PAST_END;
}

static int is_within(uint64_t begin, uint64_t end, uint64_t outer_begin, uint64_t outer_end) {
    return begin >= outer_begin && begin <= end && end <= outer_end;
}

// Where brk and mmap give out memory. Slots are mapped by whoever starts their thread.
static int is_mappable(uint64_t begin, uint64_t end) {
    return is_within(begin, end, GW_HEAP_BEGIN, GW_HEAP_END) || is_within(begin, end, GW_MAP_TABLE, GW_MAP_END);
}

// Which slots the state has sections for.
static uint8_t named[GW_SLOTS];

static int is_of_thread(uint64_t begin, uint64_t end) {
    if (begin < GW_SLOTS_BEGIN || begin >= GW_MAP_TABLE)
        return 0;
    uint64_t behind_main = GW_SLOTS_BEGIN + GW_MAIN_SLOT_SIZE;
    uint32_t slot = begin < behind_main ? 0 : (uint32_t)((begin - behind_main) / GW_SLOT_SIZE + 1);
    if (!named[slot])
        return 0;
    for (int quarter = GW_CONTINUATION; quarter <= GW_CONTROL; quarter++)
        if (is_within(begin, end, gw_quarter_begin(slot, (enum gw_quarter)quarter),
                      gw_quarter_end(slot, (enum gw_quarter)quarter)))
            return 1;
    return 0;
}

// Does the state map this memory? Bytes mostly follow their mapping, so that is looked at first.
static int is_mapped(const struct state *s, uint64_t begin, uint64_t end) {
    static const struct gw_state_section *latest;
    if (latest && is_within(begin, end, latest->address, latest->address + latest->length))
        return 1;
    uint64_t at = sizeof(struct gw_state_header);
    while (s->length - at >= sizeof *latest) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        at += sizeof *section;
        if (section->type == GW_SECTION_MAPPING &&
            is_within(begin, end, section->address, section->address + section->length)) {
            latest = section;
            return 1;
        }
        at += body_bytes(section);
    }
    return 0;
}

// May these bytes be written by a state?
static int is_neutral(const void *state, uint64_t begin, uint64_t length) {
    const struct state *s = state;
    uint64_t end = begin + length;
    if (is_mappable(begin, end))
        return is_mapped(s, begin, end);
    return is_within(begin, end, (uint64_t)__gw_neutral_data_begin, (uint64_t)__gw_neutral_data_end) ||
           is_of_thread(begin, end);
}

static void check_section(const struct state *s, const struct gw_state_section *section) {
    switch (section->type) {
    case GW_SECTION_BYTES:
        if (!is_neutral(s, section->address, section->length))
            refuse(s, "the state file names memory that is not the program's:");
        break;
    case GW_SECTION_MAPPING:
    case GW_SECTION_PAST_END:
        if (!is_mappable(section->address, section->address + section->length) || section->length == 0 ||
            (section->address | section->length) % GW_PAGE != 0 || section->value > (PROT_READ | PROT_WRITE))
            refuse(s, "the state file maps memory that is not the program's:");
        break;
    case GW_SECTION_THREAD:
        break;
    case GW_SECTION_DESCRIPTOR:
    case GW_SECTION_PROCESS:
    case GW_SECTION_LOCK:
        refuse_if(s, gw_unsound_descriptor(section, (const char *)(section + 1)));
        break;
    default:
        refuse(s, "the state file has a section of an unknown type:");
    }
}

static void check(const struct state *s) {
    struct gw_state_header header;
    __builtin_memcpy(&header, s->bytes, sizeof header);
    if (__builtin_memcmp(header.magic, GW_STATE_MAGIC, sizeof header.magic) != 0)
        refuse(s, "not a state file:");
    if (header.version != GW_STATE_VERSION)
        refuse(s, "the state file is of another version of the format:");
    if (gw_crc32c(0, &header, offsetof(struct gw_state_header, header_sum)) != header.header_sum)
        refuse(s, "the state file's header is damaged:");
    if (header.length != s->length)
        refuse(s, "the state file is truncated, or something was appended:");
    if (gw_crc32c(0, s->bytes + sizeof header, s->length - sizeof header) != header.body_sum)
        refuse(s, "the state file is damaged:");
    if (__builtin_memcmp(header.identity, __gw_build_identity, sizeof header.identity) != 0)
        refuse(s, "the state file is of another program, or of another build of this one:");

    uint64_t at = sizeof header;
    for (uint32_t i = 0; i < header.sections; i++) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        if (s->length - at < sizeof *section)
            refuse(s, "the state file's sections are longer than the file:");
        at += sizeof *section;
        if (section->length > s->length && has_bytes(section))
            refuse(s, "the state file's sections are longer than the file:");
        if (body_bytes(section) > s->length - at)
            refuse(s, "the state file's sections are longer than the file:");
        if (section->type == GW_SECTION_THREAD) {
            if (section->value >= GW_SLOTS || named[section->value])
                refuse(s, "the state file has a thread that cannot be:");
            named[section->value] = 1;
        }
        at += body_bytes(section);
    }
    if (at != s->length)
        refuse(s, "the state file's sections do not add up:");
    // Only now can all of them be walked, which the check of one may do.
    at = sizeof header;
    for (uint32_t i = 0; i < header.sections; i++) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        check_section(s, section);
        at += sizeof *section + body_bytes(section);
    }
    if (!named[0])
        refuse(s, "the state file's sections do not add up:");
}

static void check_mappings(const struct state *s) {
    refuse_if(s, gw_unsound_mappings(is_neutral, s));
    uint64_t at = sizeof(struct gw_state_header);
    while (at < s->length) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        if (is_mapping(section))
            refuse_if(s, gw_unsound_section(section));
        at += sizeof *section + body_bytes(section);
    }
    refuse_if(s, gw_unsound_rest());
}

static void expect(const struct state *s, int is_fine, long result) {
    if (!is_fine)
        gw_fail("cannot share the memory of the state file", s->path, result);
}

static int is_zero(const uint64_t *page) {
    for (unsigned i = 0; i < GW_PAGE / sizeof *page; i++)
        if (page[i] != 0)
            return 0;
    return 1;
}

// What the program shares with the children that it forks is shared again: with those that it has from now on.
static void copy_pages(char *to, const char *from, long length) {
    for (long at = 0; at < length; at += GW_PAGE)
        if (!is_zero((const uint64_t *)(from + at)))
            __builtin_memcpy(to + at, from + at, GW_PAGE);
}

static void share(const struct state *s, const struct gw_mapping *m) {
    long length = (long)(m->end - m->begin);
    long result = gw_call(GW_NR_mprotect, (long)m->begin, length, PROT_READ, 0, 0, 0);
    expect(s, result == 0, result);
    long copy = gw_call(GW_NR_mmap, 0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE_ANONYMOUS_NORESERVE, -1, 0);
    expect(s, !gw_is_error(copy), copy);
    copy_pages((char *)copy, (const char *)m->begin, length);
    result = gw_call(GW_NR_mmap, (long)m->begin, length, PROT_READ | PROT_WRITE,
                     MAP_SHARED_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
    expect(s, result == (long)m->begin, result);
    copy_pages((char *)m->begin, (const char *)copy, length);
    result = gw_call(GW_NR_munmap, copy, length, 0, 0, 0, 0);
    expect(s, result == 0, result);
    result = gw_call(GW_NR_mprotect, (long)m->begin, length, m->prot, 0, 0, 0);
    expect(s, result == 0, result);
}

static void share_mappings(const struct state *s) {
    const struct gw_mapping *mappings = (const struct gw_mapping *)GW_MAP_TABLE;
    for (uint64_t i = 0; i < __gw_neutral.mappings; i++)
        if (mappings[i].flags == MAP_SHARED_ANONYMOUS)
            share(s, &mappings[i]);
}

// The program's own list of slots in use and the sections must say the same.
static void check_threads(const struct state *s) {
    uint32_t parked = 0;
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++) {
        if ((__gw_threads.used[slot] != 0) != named[slot])
            refuse(s, "the state file's threads are not those of the program:");
        if (!named[slot])
            continue;
        refuse_if(s, gw_unsound_slot(slot, is_neutral, s));
        parked += gw_thread_of_slot(slot)->state == GW_RUNNING;
    }
    if (parked == 0 || __gw_threads.process == 0 || __gw_threads.process >= GW_TID_FIRST_GENERATION << GW_TID_SLOT_BITS)
        refuse(s, "the state file has no thread to go on with:");
    refuse_if(s, gw_unsound_numbers());
    refuse_if(s, gw_unsound_signals());
}

static void map(const struct state *s, const struct gw_state_section *section) {
    long result = section->type == GW_SECTION_PAST_END
                      ? gw_map_past_end(section->address, section->length, section->value)
                      : gw_call(GW_NR_mmap, (long)section->address, (long)section->length, PROT_READ | PROT_WRITE,
                                MAP_ANONYMOUS_FIXED_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    if (result != (long)section->address)
        gw_fail("cannot map the memory of the state file", s->path, result);
}

static void restore_descriptors(const struct state *s) {
    int is_complete = 0;
    gw_begin_descriptors();
    uint64_t at = sizeof(struct gw_state_header);
    while (at < s->length) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        at += sizeof *section;
        if (section->type == GW_SECTION_DESCRIPTOR)
            gw_restore_descriptor(section, s->bytes + at);
        if (section->type == GW_SECTION_PROCESS) {
            gw_restore_process(section, s->bytes + at);
            is_complete = 1;
        }
        at += body_bytes(section);
    }
    gw_finish_descriptors(is_complete);
    for (at = sizeof(struct gw_state_header); at < s->length;) {
        const struct gw_state_section *section = (const struct gw_state_section *)(s->bytes + at);
        at += sizeof *section;
        if (section->type == GW_SECTION_LOCK)
            gw_restore_lock(section, s->bytes + at);
        at += body_bytes(section);
    }
}

void gw_load_state(const char *path) {
    struct state s = map_file(path);
    check(&s);

    uint32_t sections = ((const struct gw_state_header *)s.bytes)->sections;
    // The executable's first values must not shine through where the state is zero; bss is zero still.
    __builtin_memset(__gw_neutral_data_begin, 0, (uint64_t)(__gw_neutral_bss_begin - __gw_neutral_data_begin));
    for (int pass = 0; pass < 3; pass++) {
        uint64_t at = sizeof(struct gw_state_header);
        for (uint32_t i = 0; i < sections; i++) {
            const struct gw_state_section *section = (const struct gw_state_section *)(s.bytes + at);
            at += sizeof *section;
            if (pass == 0 && is_mapping(section))
                map(&s, section);
            if (pass == 0 && section->type == GW_SECTION_THREAD && section->value != 0)
                gw_map_slot(section->value);
            if (pass == 1 && section->type == GW_SECTION_BYTES)
                __builtin_memcpy((void *)section->address, s.bytes + at, section->length);
            if (pass == 2 && section->type == GW_SECTION_MAPPING && section->value != (PROT_READ | PROT_WRITE)) {
                long error =
                    gw_call(GW_NR_mprotect, (long)section->address, (long)section->length, section->value, 0, 0, 0);
                if (error != 0)
                    gw_fail("cannot protect the memory of the state file", path, error);
            }
            at += body_bytes(section);
        }
    }
    check_threads(&s);
    check_mappings(&s);
    share_mappings(&s);
    restore_descriptors(&s);
    long error = gw_call(GW_NR_munmap, (long)s.bytes, (long)s.length, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot unmap the state file", path, error);
}
