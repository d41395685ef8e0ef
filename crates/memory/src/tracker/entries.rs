//! Page tables as `/proc/PID/pagemap` gives them, eight bytes a page, for kernels without
//! `PAGEMAP_SCAN` (before Linux 6.7). Reading them costs 2 MiB for each GiB of mappings, used or not.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use crate::{PAGE_SIZE, Range};

const SOFT_DIRTY: u64 = 1 << 55;
/// Set beside [`SWAPPED`] from Linux 6.15 on.
const GUARD: u64 = 1 << 58;
/// The page is a file's, or shared anonymous memory.
const FILE: u64 = 1 << 61;
const SWAPPED: u64 = 1 << 62;
const PRESENT: u64 = 1 << 63;

/// Bytes of entries read at once.
const BLOCK: usize = 64 * 1024;

/// Gives the populated pages of a range in ascending order, each with whether its soft-dirty bit is
/// set. Pages of the zero page count as populated: they cannot be told from others here.
pub(super) fn pages(pagemap: &File, range: &Range, mut each: impl FnMut(Range, bool)) -> Result<(), Errno> {
    walk(pagemap, range, |page, entry| {
        if let Some(dirty) = soft_dirty(entry) {
            each(page, dirty);
        }
    })
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
