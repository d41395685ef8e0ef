//! What a restored process has where the pager means to put pages: its page tables and areas, looked
//! at from outside.
//!
//! A page that is there before the pager has put it there is not the source's. It can be a page of
//! zeros: with transparent huge pages the kernel makes 512 pages of one that CRIU touches.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use nix::errno::Errno;

use crate::process::{AreaKind, Process, ProcessError};
use crate::tracker::{Protect, Scanner};
use crate::{PAGE_SIZE, Range, Space};

/// Bits of an entry of `/proc/PID/pagemap` (Documentation/admin-guide/mm/pagemap.rst).
const PRESENT: u64 = 1 << 63;
const SWAPPED: u64 = 1 << 62;
/// From Linux 6.15 on.
const GUARD: u64 = 1 << 58;
/// The kind of a swapped page.
const SWAP_KIND: u64 = 0x1f;
/// The last of them is no swap but a marker: a guard page before Linux 6.15, for example. It has no
/// content (include/linux/swap.h, `SWP_PTE_MARKER`).
const MARKER: u64 = 31;

/// Bytes of entries read at once.
const BLOCK: usize = 64 * 1024;

/// The page tables of one process, which stay its own when its PID is used again.
#[derive(Debug)]
pub(crate) struct Tables {
    process: Process,
    pagemap: File,
}

impl Tables {
    /// Those of the process with this PID in the node's PID namespace, which must be this one inside.
    pub(crate) fn open(pid: i32, space: Space) -> Result<Self, ProcessError> {
        let process = Process::open(pid)?;
        if process.space() != space {
            let line = format!("NSpid: {}, and not {space}", process.space());
            return Err(ProcessError::Parse { pid, file: "status", line });
        }
        let pagemap = process.open_file("pagemap")?;
        Ok(Self { process, pagemap })
    }

    /// Where it may have pages in this range; all of it where the kernel does not tell.
    pub(crate) fn populated(&self, span: &Range) -> io::Result<Vec<Range>> {
        let mut populated = Vec::new();
        if span.is_empty() {
            return Ok(populated);
        }
        let each = |range, _| populated.push(range);
        match Scanner::of_all().scan(self.pagemap.as_fd(), span, Protect::No, each) {
            Ok(()) => Ok(populated),
            // Before Linux 6.7.
            Err(Errno::ENOTTY | Errno::EINVAL) => Ok(vec![span.clone()]),
            Err(errno) => Err(errno.into()),
        }
    }

    /// The first address in these ranges at which it has a page.
    pub(crate) fn first_page(&self, ranges: impl Iterator<Item = Range>) -> io::Result<Option<u64>> {
        for range in ranges {
            if let Some(address) = self.first_in(&range)? {
                return Ok(Some(address));
            }
        }
        Ok(None)
    }

    /// Whether it has a page with content at this address, of which it is certain that something is there.
    pub(crate) fn has_page(&self, address: u64) -> io::Result<bool> {
        Ok(self.first_in(&(address..address + PAGE_SIZE))?.is_some())
    }

    /// Whether it has private anonymous memory at this address.
    pub(crate) fn has_private_area(&self, address: u64) -> Result<bool, ProcessError> {
        let areas = self.process.areas()?;
        Ok(areas.iter().any(|area| area.kind == AreaKind::Private && area.range.contains(&address)))
    }

    /// What its mappings are, as the kernel writes it.
    pub(crate) fn maps(&self) -> Result<String, ProcessError> {
        self.process.text("maps")
    }

    /// Whether another process of its PID namespace has a guard page at this address.
    pub(crate) fn has_relative_with_guard(&self, address: u64) -> io::Result<bool> {
        let namespace = |pid: i32| std::fs::read_link(format!("/proc/{pid}/ns/pid"));
        let own = namespace(self.process.pid())?;
        for entry in std::fs::read_dir("/proc")? {
            let Some(pid) = entry?.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // Those that end meanwhile, and the kernel's, have no such file.
            if pid == self.process.pid() || namespace(pid).map_or(true, |namespace| namespace != own) {
                continue;
            }
            let Ok(pagemap) = File::open(format!("/proc/{pid}/pagemap")) else { continue };
            let mut entry = [0; 8];
            if pagemap.read_exact_at(&mut entry, address / PAGE_SIZE * 8).is_ok()
                && is_marker(u64::from_ne_bytes(entry))
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn first_in(&self, range: &Range) -> io::Result<Option<u64>> {
        let mut block =
            vec![0; BLOCK.min(usize::try_from((range.end - range.start) / PAGE_SIZE * 8).unwrap_or(BLOCK))];
        let mut address = range.start;
        while address < range.end {
            let left = usize::try_from((range.end - address) / PAGE_SIZE * 8).unwrap_or(BLOCK);
            let wanted = left.min(block.len());
            let read = self.pagemap.read_at(&mut block[..wanted], address / PAGE_SIZE * 8)?;
            if read < 8 {
                // There is no such address space any more.
                return Err(Errno::ESRCH.into());
            }
            for entry in block[..read].as_chunks::<8>().0 {
                if has_content(u64::from_ne_bytes(*entry)) {
                    return Ok(Some(address));
                }
                address += PAGE_SIZE;
            }
        }
        Ok(None)
    }
}

/// Whether an entry is that of a page with content, in memory or swapped out.
fn has_content(entry: u64) -> bool {
    entry & (PRESENT | SWAPPED) != 0 && !is_marker(entry)
}

/// Whether an entry is that of a guard page.
fn is_marker(entry: u64) -> bool {
    entry & GUARD != 0 || (entry & PRESENT == 0 && entry & SWAPPED != 0 && entry & SWAP_KIND == MARKER)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn guards_and_holes_have_no_content_and_swapped_pages_do() {
        let number = 0x0012_3456;
        assert!(!has_content(0));
        assert!(has_content(PRESENT | number));
        assert!(has_content(SWAPPED | number << 5 | 3));
        assert!(!has_content(SWAPPED | GUARD));
        // As Linux 6.13 shows a guard: a marker, and which.
        assert!(!has_content(SWAPPED | 4 << 5 | MARKER));
    }

    #[test]
    fn the_first_page_among_holes_is_found_and_zero_pages_count() {
        let length = 64 * 4096;
        let (access, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, which no reference points to.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED);
        // SAFETY: the mapping just made; one page must be one page here.
        unsafe { libc::madvise(start, length, libc::MADV_NOHUGEPAGE) };
        let base = start.expose_provenance() as u64;
        let page = |n: u64| base + n * PAGE_SIZE;
        let pid = i32::try_from(std::process::id()).unwrap();
        let space = Process::open(pid).unwrap().space();
        let tables = Tables::open(pid, space).unwrap();
        assert!(Tables::open(pid, space + 1).is_err());
        let all = base..page(64);
        let first = |ranges: &[Range]| tables.first_page(ranges.iter().cloned()).unwrap();
        assert_eq!(tables.populated(&(base..base)).unwrap(), []);
        assert_eq!(first(std::slice::from_ref(&all)), None);
        // SAFETY: within the mapping. Read, it is the zero page.
        unsafe { start.cast::<u8>().add(40 * 4096).read_volatile() };
        // SAFETY: as above.
        unsafe { start.cast::<u8>().add(50 * 4096).write_volatile(1) };
        let found = tables.populated(&all).unwrap();
        assert!(found == [page(40)..page(41), page(50)..page(51)] || found == [all], "{found:x?}");
        assert_eq!(first(&found), Some(page(40)));
        assert_eq!(first(&[base..page(40), page(41)..page(60)]), Some(page(50)));
        assert_eq!(first(&[base..page(40), page(41)..page(50), page(51)..page(64)]), None);
        assert!(tables.has_page(page(50)).unwrap() && !tables.has_page(page(49)).unwrap());
        assert!(tables.has_private_area(page(49)).unwrap() && !tables.has_private_area(0).unwrap());
        // SAFETY: nothing points to it any more.
        unsafe { libc::munmap(start, length) };
    }
}
