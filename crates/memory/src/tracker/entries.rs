//! Page tables as `/proc/PID/pagemap` gives them, eight bytes a page, for kernels without
//! `PAGEMAP_SCAN` (before Linux 6.7). Reading them costs 2 MiB for each GiB of mappings, used or not.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{PAGE_SIZE, Range};

/// The page frame's number, in entries of pages that are present.
const FRAME: u64 = (1 << 55) - 1;
const SOFT_DIRTY: u64 = 1 << 55;
/// The page is in one page table only.
const EXCLUSIVE: u64 = 1 << 56;
/// Set beside [`SWAPPED`] from Linux 6.15 on.
const GUARD: u64 = 1 << 58;
/// The page is a file's, or shared anonymous memory.
const FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// Bytes of entries read at once.
const BLOCK: usize = 64 * 1024;

/// Gives the populated pages of a range in ascending order, each with whether its soft-dirty bit is
/// set. The range is private and of no file.
///
/// Where a process only reads, the kernel shows it a page of zeros that all share, and no bit says that a page with content
/// was there before. So those count as not populated.
pub(super) fn pages(pagemap: &File, range: &Range, mut each: impl FnMut(Range, bool)) -> Result<(), Errno> {
    let zero = zero_page();
    walk(pagemap, range, |page, entry| {
        if let Some(dirty) = soft_dirty(entry).filter(|_| !is_zeros(entry, zero)) {
            each(page, dirty || zero.is_none() && entry & EXCLUSIVE == 0);
        }
    })
}

/// Whether an entry of memory that is of no file is the page of zeros, or a part of the huge one, which has the mark of a file's:
/// nothing else of such memory has that.
fn is_zeros(entry: u64, zero: Option<u64>) -> bool {
    entry & PRESENT != 0 && (entry & FILE != 0 || zero == Some(entry & FRAME))
}

/// The frame of the kernel's page of zeros; none where it is not told, which takes `CAP_SYS_ADMIN`. Then each page that others
/// may have, too, may be that, and counts as written.
fn zero_page() -> Option<u64> {
    static ZERO: OnceLock<u64> = OnceLock::new();
    if let Some(zero) = ZERO.get() {
        return Some(*zero);
    }
    match frame_of_zeros() {
        Ok(zero) => Some(*ZERO.get_or_init(|| zero)),
        Err(error) => {
            tracing::warn!(%error, "the kernel's page of zeros is not found");
            None
        }
    }
}

/// The frame of a page of this process that is only read.
fn frame_of_zeros() -> std::io::Result<u64> {
    let length = NonZeroUsize::new(4096).ok_or(std::io::ErrorKind::InvalidInput)?;
    // SAFETY: a new mapping, which nobody else knows.
    let page = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_READ, MapFlags::MAP_PRIVATE) }?;
    // Beside others of its kind it may be a part of a huge one.
    // SAFETY: ours.
    unsafe { madvise(page, length.get(), MmapAdvise::MADV_NOHUGEPAGE) }.or_else(not_built_in)?;
    // SAFETY: it is mapped, and can be read.
    let content = unsafe { page.cast::<u8>().read_volatile() };
    debug_assert_eq!(content, 0);
    let mut entry = [0; 8];
    let address = page.as_ptr().addr() as u64;
    let read = File::open("/proc/self/pagemap")
        .and_then(|pagemap| pagemap.read_exact_at(&mut entry, address / PAGE_SIZE * 8));
    // SAFETY: it was mapped above, and nothing points into it.
    unsafe { munmap(page, length.get()) }?;
    read?;
    let entry = u64::from_ne_bytes(entry);
    match entry & (PRESENT | FILE) == PRESENT && entry & FRAME != 0 {
        true => Ok(entry & FRAME),
        false => Err(std::io::ErrorKind::Unsupported.into()),
    }
}

/// A kernel without huge pages knows no advice about them.
fn not_built_in(errno: Errno) -> Result<(), Errno> {
    if errno == Errno::EINVAL { Ok(()) } else { Err(errno) }
}

/// Gives the pages of a private mapping of a file that are no pages of the file.
pub(crate) fn copied(pagemap: &File, range: &Range, mut each: impl FnMut(Range)) -> Result<(), Errno> {
    walk(pagemap, range, |page, entry| {
        if soft_dirty(entry).is_some() && entry & FILE == 0 {
            each(page);
        }
    })
}

fn walk(pagemap: &File, range: &Range, mut each: impl FnMut(Range, u64)) -> Result<(), Errno> {
    let mut block = vec![0; BLOCK];
    let mut address = range.start;
    while address < range.end {
        let left = usize::try_from((range.end - address) / PAGE_SIZE * 8).unwrap_or(BLOCK);
        let wanted = left.min(BLOCK);
        let read = pagemap
            .read_at(&mut block[..wanted], address / PAGE_SIZE * 8)
            .map_err(|error| Errno::from_raw(error.raw_os_error().unwrap_or(libc::EIO)))?;
        if read < 8 {
            // There is no such address space any more.
            return Err(Errno::ESRCH);
        }
        let (entries, _) = block[..read].as_chunks::<8>();
        for entry in entries {
            each(address..address + PAGE_SIZE, u64::from_ne_bytes(*entry));
            address += PAGE_SIZE;
        }
    }
    Ok(())
}

/// Whether a page is soft-dirty; none when it is not populated.
fn soft_dirty(entry: u64) -> Option<bool> {
    (entry & (PRESENT | SWAPPED) != 0 && entry & GUARD == 0).then_some(entry & SOFT_DIRTY != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_tells_populated_and_soft_dirty() {
        let pfn = 0x0012_3456;
        assert_eq!(soft_dirty(0), None);
        assert_eq!(soft_dirty(SOFT_DIRTY), None, "a new mapping without a page");
        assert_eq!(soft_dirty(PRESENT | pfn), Some(false));
        assert_eq!(soft_dirty(PRESENT | SOFT_DIRTY | pfn), Some(true));
        assert_eq!(soft_dirty(SWAPPED | pfn), Some(false));
        assert_eq!(soft_dirty(SWAPPED | GUARD), None);
    }

    #[test]
    fn pages_that_are_only_read_are_not_populated() {
        let zero = zero_page().expect("root is told it");
        let entry = |bits: u64| is_zeros(bits, Some(zero));
        assert!(entry(PRESENT | zero) && entry(PRESENT | FILE | 1));
        assert!(!entry(PRESENT | (zero + 1)) && !entry(SWAPPED | FILE));
        let length = NonZeroUsize::new(8 * 4096).expect("it has bytes");
        let rights = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping, which nobody else knows.
        let pages_there =
            unsafe { mmap_anonymous(None, length, rights, MapFlags::MAP_PRIVATE) }.expect("mapped");
        // SAFETY: ours.
        unsafe { madvise(pages_there, length.get(), MmapAdvise::MADV_NOHUGEPAGE) }
            .or_else(not_built_in)
            .expect("advised");
        for page in 0..8 {
            // SAFETY: these pages are in it.
            let byte = unsafe { pages_there.cast::<u8>().add(page * 4096) };
            match page % 2 {
                // SAFETY: mapped for reading and writing.
                0 => unsafe { byte.write_volatile(1) },
                // SAFETY: the same.
                _ => assert_eq!(unsafe { byte.read_volatile() }, 0),
            }
        }
        let start = pages_there.as_ptr().addr() as u64;
        let pagemap = File::open("/proc/self/pagemap").expect("its page tables");
        let mut found = Vec::new();
        pages(&pagemap, &(start..start + 8 * PAGE_SIZE), |page, _| {
            found.push((page.start - start) / PAGE_SIZE)
        })
        .expect("read");
        assert_eq!(found, [0, 2, 4, 6]);
        // SAFETY: it was mapped above.
        unsafe { munmap(pages_there, length.get()) }.expect("unmapped");
    }

    #[test]
    fn populated_pages_of_this_process_are_found() {
        let pages_there = vec![1_u8; 64 * 4096];
        let start = (pages_there.as_ptr().addr() as u64).next_multiple_of(PAGE_SIZE);
        let range = start..start + 62 * PAGE_SIZE;
        let pagemap = File::open("/proc/self/pagemap").expect("its page tables");
        let mut found = 0;
        pages(&pagemap, &range, |_, _| found += 1).expect("read");
        assert_eq!(found, 62);
    }
}
