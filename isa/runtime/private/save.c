// Writes the state of a parked program. What is zero is not written, a page at a time: memory that no section names is
// zero when it is loaded.
#include "private.h"

enum { BUFFER = 256 << 10 };
enum { AT_FDCWD = -100, O_WRONLY_CREATE_TRUNCATE = 01101, O_CLOEXEC = 02000000, MODE = 0600 };
enum { PROT_READ_WRITE = 3, MAP_ANONYMOUS = 0x20 };

struct writer {
    const char *path;
    int file;
    uint32_t sections;
    uint32_t body_sum;
    uint64_t length; // of everything written or buffered, header included
    uint64_t used;
};

static char buffer[BUFFER];

static void write_all(struct writer *w, const char *bytes, uint64_t length) {
    while (length > 0) {
        long done = gw_call(GW_NR_write, w->file, (long)bytes, (long)length, 0, 0, 0);
        if (done <= 0)
            gw_fail("cannot write the state file", w->path, done);
        bytes += done;
        length -= (uint64_t)done;
    }
}

static void flush(struct writer *w) {
    write_all(w, buffer, w->used);
    w->used = 0;
}

static void put(struct writer *w, const void *bytes, uint64_t length) {
    w->body_sum = gw_crc32c(w->body_sum, bytes, length);
    w->length += length;
    if (length > BUFFER - w->used)
        flush(w);
    if (length > BUFFER) {
        write_all(w, bytes, length);
        return;
    }
    __builtin_memcpy(buffer + w->used, bytes, length);
    w->used += length;
}

static void put_section(struct writer *w, enum gw_section_type type, uint32_t value, uint64_t address,
                        uint64_t length) {
    struct gw_state_section section = {(uint32_t)type, value, address, length};
    put(w, &section, sizeof section);
    w->sections++;
}

static void put_bytes(struct writer *w, uint64_t begin, uint64_t end) {
    static const char zeros[8];
    put_section(w, GW_SECTION_BYTES, 0, begin, end - begin);
    put(w, (const void *)begin, end - begin);
    put(w, zeros, -(end - begin) & 7);
}

static void put_with_path(void *writer, enum gw_section_type type, uint32_t value, const void *head,
                          uint64_t head_length, const char *path) {
    static const char zeros[8];
    uint64_t length = head_length + gw_string_length(path);
    put_section(writer, type, value, 0, length);
    put(writer, head, head_length);
    put(writer, path, length - head_length);
    put(writer, zeros, -length & 7);
}

static int is_zero(uint64_t begin, uint64_t end) {
    const char *byte = (const char *)begin;
    while ((uint64_t)byte < end && ((uint64_t)byte & 7) != 0)
        if (*byte++ != 0)
            return 0;
    for (; (uint64_t)byte + 8 <= end; byte += 8) {
        uint64_t word;
        __builtin_memcpy(&word, byte, sizeof word);
        if (word != 0)
            return 0;
    }
    while ((uint64_t)byte < end)
        if (*byte++ != 0)
            return 0;
    return 1;
}

// The runs of pages that are not zero.
static void put_memory(struct writer *w, uint64_t begin, uint64_t end) {
    uint64_t run = begin; // where the bytes begin that are not written yet and not zero
    uint64_t at = begin;
    while (at < end) {
        uint64_t next = (at | (GW_PAGE - 1)) + 1;
        if (next > end)
            next = end;
        if (is_zero(at, next)) {
            if (at > run)
                put_bytes(w, run, at);
            run = next;
        }
        at = next;
    }
    if (end > run)
        put_bytes(w, run, end);
}

static void put_thread(struct writer *w, uint32_t slot) {
    const struct gw_thread *thread = gw_thread_of_slot(slot);
    put_section(w, GW_SECTION_THREAD, slot, 0, 0);
    put_memory(w, gw_quarter_begin(slot, GW_CONTINUATION), (uint64_t)thread->continuation);
    // A handler on an alternate stack: that is the program's memory, and its own stack ends where it was left.
    const char *end = gw_off_own_stack(thread) ? gw_signals_of(thread)->own_stack : thread->data_stack;
    put_memory(w, (uint64_t)end, gw_quarter_end(slot, GW_DATA_STACK));
    put_memory(w, (uint64_t)thread, (uint64_t)thread + GW_TLS_OFFSET + __gw_tls_size);
    put_memory(w, (uint64_t)gw_signals_of(thread), gw_quarter_end(slot, GW_CONTROL));
}

// A mapping of a file: runs of pages that are there, and of such that are behind the end of the file.
static void put_file_mapping(struct writer *w, const struct gw_mapping *m) {
    static char copy[GW_PAGE] __attribute__((aligned(8)));
    for (uint64_t at = m->begin; at < m->end;) {
        int is_there = gw_page_is_there(at);
        uint64_t end = at + GW_PAGE;
        while (end < m->end && gw_page_is_there(end) == is_there)
            end += GW_PAGE;
        put_section(w, is_there ? GW_SECTION_MAPPING : GW_SECTION_PAST_END, m->prot, at, end - at);
        for (; at < end; at += GW_PAGE) {
            if (!is_there)
                continue;
            if (!gw_copy_page(at, copy))
                gw_fail("a file that the program has mapped was made shorter while the state was written; capture it "
                        "again:",
                        w->path, 0);
            if (is_zero((uint64_t)copy, (uint64_t)copy + GW_PAGE))
                continue;
            put_section(w, GW_SECTION_BYTES, 0, at, GW_PAGE);
            put(w, copy, GW_PAGE);
        }
    }
}

static void put_mappings(struct writer *w) {
    const struct gw_mapping *mappings = (const struct gw_mapping *)GW_MAP_TABLE;
    if (__gw_neutral.mappings == 0)
        return;
    put_section(w, GW_SECTION_MAPPING, PROT_READ_WRITE, GW_MAP_TABLE, GW_MAP_BEGIN - GW_MAP_TABLE);
    put_memory(w, GW_MAP_TABLE, (uint64_t)(mappings + __gw_neutral.mappings));
    for (uint64_t i = 0; i < __gw_neutral.mappings; i++) {
        const struct gw_mapping *m = &mappings[i];
        uint64_t length = m->end - m->begin;
        // What the program may not read has to be looked at all the same; this process ends anyway.
        if ((m->prot & 1) == 0) {
            long error = gw_call(GW_NR_mprotect, (long)m->begin, (long)length, 1, 0, 0, 0);
            if (error != 0)
                gw_fail("cannot read a protected mapping for the state file", w->path, error);
        }
        if (m->flags & MAP_ANONYMOUS) {
            put_section(w, GW_SECTION_MAPPING, m->prot, m->begin, length);
            put_memory(w, m->begin, m->end);
        } else {
            put_file_mapping(w, m);
        }
    }
    gw_end_pages();
}

void gw_save_state(const char *path) {
    static char part[4096];
    uint64_t length = gw_string_length(path);
    if (length + sizeof ".part" > sizeof part)
        gw_fail("the path of the state file is too long:", path, 0);
    __builtin_memcpy(part, path, length);
    __builtin_memcpy(part + length, ".part", sizeof ".part");

    struct gw_state_header header = {.magic = GW_STATE_MAGIC, .version = GW_STATE_VERSION};
    struct writer w = {.path = part, .length = sizeof header};
    long file = gw_call(GW_NR_openat, AT_FDCWD, (long)part, O_WRONLY_CREATE_TRUNCATE | O_CLOEXEC, MODE, 0, 0);
    if (file < 0)
        gw_fail("cannot create the state file", part, file);
    w.file = (int)file;
    write_all(&w, (const char *)&header, sizeof header); // its place; the sums come last

    put_memory(&w, (uint64_t)__gw_neutral_data_begin, (uint64_t)__gw_neutral_data_end);
    put_mappings(&w);
    // Those without a thread as well: they hold what is read when it is joined, and the main thread's the arguments.
    for (uint32_t slot = 0; slot < GW_SLOTS; slot++)
        if (__gw_threads.used[slot])
            put_thread(&w, slot);
    gw_save_descriptors(put_with_path, &w, (int)file);
    flush(&w);

    __builtin_memcpy(header.identity, __gw_build_identity, sizeof header.identity);
    header.sections = w.sections;
    header.length = w.length;
    header.body_sum = w.body_sum;
    header.header_sum = gw_crc32c(0, &header, offsetof(struct gw_state_header, header_sum));
    long error = gw_call(GW_NR_lseek, file, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot go back to the beginning of the state file", part, error);
    write_all(&w, (const char *)&header, sizeof header);
    error = gw_call(GW_NR_close, file, 0, 0, 0, 0, 0);
    if (error == 0)
        error = gw_call(GW_NR_renameat2, AT_FDCWD, (long)part, AT_FDCWD, (long)path, 0, 0);
    if (error != 0)
        gw_fail("cannot finish the state file", path, error);
}
