// Which addresses the program's memory has. The kernel would choose others on another set or in another process, so
// the program gets them from here: brk from a fixed heap, mmap from a fixed region, lowest free address first. The
// table of mappings is sorted by address and lies at GW_MAP_TABLE; it is neutral memory and travels with the state.
//
// Nothing in this file suspends, so the table and the kernel's view never differ in a state, and the lock that keeps
// threads apart is free in it.
#include "gw/memory.h"
#include "gw/thread.h"
#include "memory.h"

#define NOSUSPEND __attribute__((annotate("gw_nosuspend")))

enum { ENOMEM = 12, EACCES = 13, EEXIST = 17, EINVAL = 22 };
enum { PROT_READ_WRITE = 3 };
enum {
    MAP_SHARED = 1,
    MAP_PRIVATE = 2,
    MAP_TYPE = 15,
    MAP_FIXED = 0x10,
    MAP_ANONYMOUS = 0x20,
    MAP_NORESERVE = 0x4000,
    MAP_FIXED_NOREPLACE = 0x100000
};
enum { MAP_TYPE_AND_ANONYMOUS = 0x23 };
enum { MREMAP_MAYMOVE = 1, MREMAP_FIXED = 2 };

// isa/ABI.md: what __gw_kernel returns for a call that did not take effect.
#define GW_ABANDONED (-4096L)

long __gw_kernel(long nr, long a, long b, long c, long d, long e, long f);
void __gw_lock(uint32_t *word);
void __gw_unlock(uint32_t *word);

struct gw_neutral __gw_neutral;

static struct gw_mapping *const table = (struct gw_mapping *)GW_MAP_TABLE;

static unsigned long page_up(unsigned long n) { return (n + GW_PAGE - 1) & -GW_PAGE; }

NOSUSPEND static int is_error(long result) { return (unsigned long)result >= -4096UL; }

// The first mapping that ends behind this address.
NOSUSPEND static unsigned long find(unsigned long address) {
    unsigned long low = 0;
    unsigned long high = __gw_neutral.mappings;
    while (low < high) {
        unsigned long middle = low + (high - low) / 2;
        if (table[middle].end <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

NOSUSPEND static void insert(unsigned long index, struct gw_mapping mapping) {
    __builtin_memmove(&table[index + 1], &table[index], (__gw_neutral.mappings - index) * sizeof *table);
    table[index] = mapping;
    __gw_neutral.mappings++;
}

// Is there room for two more entries, and is the table there at all?
NOSUSPEND static long prepare_table(void) {
    if (__gw_neutral.mappings != 0)
        return __gw_neutral.mappings + 2 > (GW_MAP_BEGIN - GW_MAP_TABLE) / sizeof *table ? -ENOMEM : 0;
    long result = __gw_kernel(NR_mmap, (long)GW_MAP_TABLE, (long)(GW_MAP_BEGIN - GW_MAP_TABLE), PROT_READ_WRITE,
                              MAP_PRIVATE | MAP_FIXED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return is_error(result) ? result : 0;
}

// Makes an address the beginning of a mapping if it lies inside one.
NOSUSPEND static void split(unsigned long address) {
    unsigned long i = find(address);
    if (i == __gw_neutral.mappings || table[i].begin >= address)
        return;
    struct gw_mapping upper = table[i];
    upper.begin = address;
    table[i].end = address;
    insert(i + 1, upper);
}

// Forgets what lies in the range.
NOSUSPEND static void remove_range(unsigned long begin, unsigned long end) {
    split(begin);
    split(end);
    unsigned long first = find(begin);
    unsigned long behind = first;
    while (behind < __gw_neutral.mappings && table[behind].begin < end)
        behind++;
    __builtin_memmove(&table[first], &table[behind], (__gw_neutral.mappings - behind) * sizeof *table);
    __gw_neutral.mappings -= behind - first;
}

// Can these two, the second behind the first, be one?
NOSUSPEND static int are_alike(const struct gw_mapping *a, const struct gw_mapping *b) {
    return a->end == b->begin && a->prot == b->prot && a->flags == b->flags && (a->flags & MAP_ANONYMOUS);
}

// Neighbours in the range that are alike become one, as in the kernel: or the table would grow with every allocation,
// and mremap find only a part of what it is to move.
NOSUSPEND static void join(unsigned long begin, unsigned long end) {
    unsigned long i = find(begin);
    if (i > 0)
        i--;
    unsigned long kept = i;
    while (++i < __gw_neutral.mappings) {
        if (are_alike(&table[kept], &table[i]))
            table[kept].end = table[i].end;
        else if (table[i].begin > end)
            break;
        else
            table[++kept] = table[i];
    }
    if (i == kept + 1 || kept >= __gw_neutral.mappings)
        return;
    __builtin_memmove(&table[kept + 1], &table[i], (__gw_neutral.mappings - i) * sizeof *table);
    __gw_neutral.mappings -= i - kept - 1;
}

NOSUSPEND static void add(struct gw_mapping mapping) {
    insert(find(mapping.begin), mapping);
    join(mapping.begin, mapping.end);
}

NOSUSPEND static unsigned long find_free(unsigned long length) {
    unsigned long at = GW_MAP_BEGIN;
    for (unsigned long i = 0; i < __gw_neutral.mappings; i++) {
        if (table[i].begin >= at && table[i].begin - at >= length)
            break;
        if (table[i].end > at)
            at = table[i].end;
    }
    return at + length <= GW_MAP_END ? at : 0;
}

NOSUSPEND static int is_ours(unsigned long address, unsigned long length) {
    return address >= GW_MAP_BEGIN && length <= GW_MAP_END - GW_MAP_BEGIN && address + length <= GW_MAP_END;
}

NOSUSPEND static int is_heap(unsigned long address, unsigned long length) {
    return address >= GW_HEAP_BEGIN && length <= GW_HEAP_END - GW_HEAP_BEGIN &&
           address + length <= page_up(__gw_neutral.heap_end);
}

// Is all of it the program's to map and unmap? Malloc puts a page that cannot be used at the begin of the heap.
NOSUSPEND static int is_mapped_freely(unsigned long address, unsigned long length) {
    return is_ours(address, length) || is_heap(address, length);
}

NOSUSPEND static long gw_brk(unsigned long end) {
    unsigned long old = __gw_neutral.heap_end;
    if (old == 0)
        old = __gw_neutral.heap_end = GW_HEAP_BEGIN;
    if (end < GW_HEAP_BEGIN || end > GW_HEAP_END)
        return (long)old;
    unsigned long mapped = page_up(old);
    unsigned long wanted = page_up(end);
    long result = prepare_table();
    if (result == 0 && wanted > mapped)
        result = __gw_kernel(NR_mmap, (long)mapped, (long)(wanted - mapped), PROT_READ_WRITE,
                             MAP_PRIVATE | MAP_FIXED_NOREPLACE | MAP_ANONYMOUS, -1, 0);
    else if (result == 0 && wanted < mapped)
        result = __gw_kernel(NR_munmap, (long)wanted, (long)(mapped - wanted), 0, 0, 0, 0);
    if (result == GW_ABANDONED)
        return result;
    // As the kernel's: the old end says that it did not work.
    if (is_error(result))
        return (long)old;
    if (wanted > mapped)
        add((struct gw_mapping){mapped, wanted, PROT_READ_WRITE, MAP_PRIVATE | MAP_ANONYMOUS});
    else if (wanted < mapped)
        remove_range(wanted, mapped);
    __gw_neutral.heap_end = end;
    return (long)end;
}

NOSUSPEND static long gw_mmap(unsigned long address, unsigned long length, long prot, long flags, long file,
                              long offset) {
    if (length == 0)
        return -EINVAL;
    if ((flags & MAP_SHARED) && !(flags & MAP_ANONYMOUS)) {
        long error = gw_as_private(prot, file);
        if (error != 0)
            return error;
        flags = (flags & ~(long)MAP_TYPE) | MAP_PRIVATE;
    }
    length = page_up(length);
    long result = prepare_table();
    if (result != 0)
        return result;
    if (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)) {
        if (!is_mapped_freely(address, length))
            return -ENOMEM;
        unsigned long next = find(address);
        if ((flags & MAP_FIXED_NOREPLACE) && next < __gw_neutral.mappings && table[next].begin < address + length)
            return -EEXIST;
    } else {
        address = find_free(length);
        if (address == 0)
            return -ENOMEM;
    }
    flags = (flags & ~(long)MAP_FIXED_NOREPLACE) | MAP_FIXED;
    result = __gw_kernel(NR_mmap, (long)address, (long)length, prot, flags, file, offset);
    if (is_error(result))
        return result;
    remove_range(address, address + length);
    add((struct gw_mapping){address, address + length, (unsigned)prot, (unsigned)flags & MAP_TYPE_AND_ANONYMOUS});
    return result;
}

NOSUSPEND static long gw_munmap(unsigned long address, unsigned long length) {
    length = page_up(length);
    if (length == 0 || address % GW_PAGE != 0 || !is_mapped_freely(address, length))
        return -EINVAL;
    long result = prepare_table();
    if (result == 0)
        result = __gw_kernel(NR_munmap, (long)address, (long)length, 0, 0, 0, 0);
    if (!is_error(result))
        remove_range(address, address + length);
    return result;
}

NOSUSPEND static long gw_mremap(unsigned long address, unsigned long old, unsigned long length, long flags,
                                unsigned long target) {
    old = page_up(old);
    length = page_up(length);
    if (old == 0 || length == 0 || address % GW_PAGE != 0 || !is_ours(address, old))
        return -EINVAL;
    long result = prepare_table();
    if (result != 0)
        return result;
    unsigned long i = find(address);
    if (i == __gw_neutral.mappings || table[i].begin > address || table[i].end < address + old)
        return -EINVAL;
    struct gw_mapping mapping = table[i];
    unsigned long behind = find(address + old);
    int grows_in_place = behind == __gw_neutral.mappings || table[behind].begin >= address + length;
    if (flags & MREMAP_FIXED) {
        if (!is_ours(target, length) || (target < address + old && address < target + length))
            return -EINVAL;
    } else if (length <= old || grows_in_place) {
        target = address;
    } else {
        if (!(flags & MREMAP_MAYMOVE))
            return -ENOMEM;
        target = find_free(length);
        if (target == 0)
            return -ENOMEM;
    }
    if (target == address)
        flags &= ~(long)(MREMAP_FIXED | MREMAP_MAYMOVE);
    else
        flags |= MREMAP_FIXED | MREMAP_MAYMOVE;
    result = __gw_kernel(NR_mremap, (long)address, (long)old, (long)length, flags, (long)target, 0);
    if (is_error(result))
        return result;
    remove_range(address, address + old);
    remove_range(target, target + length);
    mapping.begin = target;
    mapping.end = target + length;
    add(mapping);
    return result;
}

NOSUSPEND static long gw_mprotect(unsigned long address, unsigned long length, long prot) {
    length = page_up(length);
    // What the table does not have is loaded as it is at the start: variables, and stacks.
    if (!is_mapped_freely(address, length))
        return prot == PROT_READ_WRITE ? 0 : -EACCES;
    long result = prepare_table();
    if (result == 0)
        result = __gw_kernel(NR_mprotect, (long)address, (long)length, prot, 0, 0, 0);
    if (is_error(result))
        return result;
    split(address);
    split(address + length);
    for (unsigned long i = find(address); i < __gw_neutral.mappings && table[i].begin < address + length; i++)
        table[i].prot = (unsigned)prot;
    join(address, address + length);
    return result;
}

static uint32_t memory_lock;

NOSUSPEND void gw_lock_memory(void) { __gw_lock(&memory_lock); }

NOSUSPEND void gw_unlock_memory(void) { __gw_unlock(&memory_lock); }

NOSUSPEND static long call(long nr, long a, long b, long c, long d, long e, long f) {
    switch (nr) {
    case NR_brk:
        return gw_brk((unsigned long)a);
    case NR_mmap:
        return gw_mmap((unsigned long)a, (unsigned long)b, c, d, e, f);
    case NR_munmap:
        return gw_munmap((unsigned long)a, (unsigned long)b);
    case NR_mremap:
        return gw_mremap((unsigned long)a, (unsigned long)b, (unsigned long)c, d, (unsigned long)e);
    default:
        return gw_mprotect((unsigned long)a, (unsigned long)b, c);
    }
}

NOSUSPEND long gw_memory_call(long nr, long a, long b, long c, long d, long e, long f) {
    gw_lock_memory();
    long result = call(nr, a, b, c, d, e, f);
    gw_unlock_memory();
    return result;
}
