// Pages of mapped files that lie behind the end of their file: whoever touches one gets SIGBUS. While a state is
// written they must not be touched, and where it goes on they have to be like that again.
//
// The kernel tells of a page when a call of its reads there: a file in memory takes the page, or the call fails. That
// also holds when somebody makes the file shorter at this moment.
#include "private.h"

enum { MFD_CLOEXEC = 1, MFD_NOEXEC_SEAL = 8, EINVAL = 22, EFAULT = 14 };
enum { MAP_PRIVATE_FIXED_NOREPLACE = 0x100012 };

static int scratch = -1;

static int memory_file(void) {
    static const char name[] = "godwit";
    // Some systems refuse a file that could be executed; older kernels do not know that flag.
    long file = gw_call(GW_NR_memfd_create, (long)name, MFD_CLOEXEC | MFD_NOEXEC_SEAL, 0, 0, 0, 0);
    if (file == -EINVAL)
        file = gw_call(GW_NR_memfd_create, (long)name, MFD_CLOEXEC, 0, 0, 0, 0);
    if (file < 0)
        gw_fail("cannot make a file in memory, which mappings of files need in a state", 0, file);
    return (int)file;
}

static void close_file(int file) {
    long error = gw_call(GW_NR_close, file, 0, 0, 0, 0, 0);
    if (error != 0)
        gw_fail("cannot close a file in memory", 0, error);
}

// Reads `length` bytes of a page into the file in memory; says whether the page is there.
static int take(uint64_t address, uint64_t length) {
    if (scratch < 0)
        scratch = memory_file();
    long done = gw_call(GW_NR_pwrite64, scratch, (long)address, (long)length, 0, 0, 0);
    if (done == (long)length)
        return 1;
    if (done != -EFAULT)
        gw_fail("cannot look at a mapping of a file for the state", 0, done);
    return 0;
}

int gw_page_is_there(uint64_t page) { return take(page, 1); }

int gw_copy_page(uint64_t page, char *copy) {
    if (!take(page, GW_PAGE))
        return 0;
    long done = gw_call(GW_NR_pread64, scratch, (long)copy, GW_PAGE, 0, 0, 0);
    if (done != (long)GW_PAGE)
        gw_fail("cannot copy a page of a mapped file for the state", 0, done);
    return 1;
}

void gw_end_pages(void) {
    if (scratch >= 0)
        close_file(scratch);
    scratch = -1;
}

// All of a mapping of an empty file is behind its end.
long gw_map_past_end(uint64_t address, uint64_t length, uint32_t protection) {
    int empty = memory_file();
    long result = gw_call(GW_NR_mmap, (long)address, (long)length, protection, MAP_PRIVATE_FIXED_NOREPLACE, empty, 0);
    close_file(empty);
    return result;
}
