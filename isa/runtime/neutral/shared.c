// Memory that is shared with a file is not the program's alone: others see what it writes, and it sees what others
// write. A state could only carry a copy, so such mappings are refused, with an error by which programs know to read
// and write the file instead. A private mapping of a file is a copy from the beginning, and travels.
//
// Programs also share where they only want to read (the C library its time zones): what is mapped for reading, of a
// file that was opened for reading, is made private. The program cannot tell, unless somebody else writes to the file
// after the move.
#include "memory.h"

#define NOSUSPEND __attribute__((annotate("gw_nosuspend")))

enum { NR_fcntl = 25, NR_write = 64, STANDARD_ERROR = 2, ENODEV = 19 };
// isa/ABI.md: a request came before the call took effect.
enum { GW_ABANDONED = -4096 };
enum { PROT_WRITE = 2, F_GETFL = 3, O_ACCMODE = 3, O_RDONLY = 0 };

long __gw_kernel(long nr, long a, long b, long c, long d, long e, long f);

// May the memory be private instead? 0, or what mmap returns.
NOSUSPEND long gw_as_private(long prot, long file) {
    static int said;
    static const char sentence[] =
        "godwit: the program asked for memory shared with a file that it can write (mmap with MAP_SHARED), which "
        "cannot move to another machine: refused with ENODEV.\n";

    long flags = __gw_kernel(NR_fcntl, file, F_GETFL, 0, 0, 0, 0);
    if (flags < 0)
        return flags;
    if (!(prot & PROT_WRITE) && (flags & O_ACCMODE) == O_RDONLY)
        return 0;
    // Most programs say no more than that a file cannot be mapped.
    if (!said) {
        long result = __gw_kernel(NR_write, STANDARD_ERROR, (long)sentence, (long)sizeof sentence - 1, 0, 0, 0);
        if (result == GW_ABANDONED)
            return result;
        said = 1;
    }
    return -ENODEV;
}
