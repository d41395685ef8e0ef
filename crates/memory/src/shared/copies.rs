//! The destination's side of what a process has written in private mappings of files: pages by address, of which each is
//! known to have come, until they are put into CRIU's images.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use rangemap::RangeSet;

use super::ADDRESSES;
use crate::{PAGE_SIZE, Range};

/// [`PAGE_SIZE`] for lengths.
const PAGE: usize = 4096;

/// Most ranges of zeros: each takes memory here, and none where it comes from.
const MOST_ZEROS: usize = 1 << 16;

/// The pages of one process.
#[derive(Debug)]
pub struct Copies {
    /// In the order in which they came first, so that a page takes a page, however large those of shared memory are.
    file: File,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    /// Where those with content are in the file, in pages.
    slots: BTreeMap<u64, u64>,
    /// Those that are zero, or that the process has no more.
    zeros: RangeSet<u64>,
    /// Slots that are free again, below the first that was never used.
    free: Vec<u64>,
    next: u64,
}

impl Copies {
    /// There are none yet.
    ///
    /// # Errors
    /// The kernel has no memory.
    pub fn new() -> io::Result<Self> {
        let file = File::from(memfd_create("godwit-copies", MFdFlags::MFD_CLOEXEC)?);
        Ok(Self { file, pages: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, Pages> {
        // It is changed in single steps.
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whole pages from this address on have come.
    ///
    /// # Errors
    /// They are no pages of an address space, or there is no memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> io::Result<()> {
        let range = within(&(address..address.saturating_add(bytes.len() as u64)))?;
        let mut pages = self.lock();
        for (address, page) in (range.start..range.end).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
            let slot = match pages.slots.get(&address) {
                Some(slot) => *slot,
                None => pages.free.pop().unwrap_or_else(|| {
                    pages.next += 1;
                    pages.next - 1
                }),
            };
            self.file.write_all_at(page, slot * PAGE_SIZE)?;
            pages.slots.insert(address, slot);
        }
        pages.zeros.remove(range);
        Ok(())
    }

    /// These pages have come as zeros, or are gone.
    ///
    /// # Errors
    /// They are no pages of an address space, or there are more ranges of them than any process has.
    pub fn clear(&self, range: &Range) -> io::Result<()> {
        let range = within(range)?;
        let mut pages = self.lock();
        let had: Vec<u64> = pages.slots.range(range.clone()).map(|(address, _)| *address).collect();
        for address in had {
            let slot = pages.slots.remove(&address);
            pages.free.extend(slot);
        }
        pages.zeros.insert(range);
        match pages.zeros.len() {
            ranges if ranges > MOST_ZEROS => Err(io::Error::other("too many ranges of zeros")),
            _ => Ok(()),
        }
    }

    /// What their contents take, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.lock().next * PAGE_SIZE
    }

    /// The first pages in this range that have come, as many as lie side by side.
    #[must_use]
    pub fn next(&self, within: &Range) -> Option<Range> {
        let pages = self.lock();
        let with_content =
            |from: u64| pages.slots.range(from..within.end).next().map(|(address, _)| *address);
        let of_zeros = |from: u64| {
            let zeros = pages.zeros.overlapping(from..within.end).next();
            zeros.map(|range| range.start.max(from)..range.end.min(within.end))
        };
        let (content, zeros) = (with_content(within.start), of_zeros(within.start));
        let start = content.into_iter().chain(zeros.map(|range| range.start)).min()?;
        let mut end = start;
        while end < within.end {
            end = match (pages.slots.contains_key(&end), pages.zeros.get(&end)) {
                (true, _) => end + PAGE_SIZE,
                (false, Some(zeros)) => zeros.end.min(within.end),
                (false, None) => break,
            };
        }
        Some(start..end)
    }

    /// Takes pages from this address on: they are here no more.
    ///
    /// # Errors
    /// One of them has not come, or the kernel cannot read it.
    pub fn take(&self, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut pages = self.lock();
        for (address, page) in (address..).step_by(PAGE).zip(buffer.as_chunks_mut::<PAGE>().0) {
            match pages.slots.remove(&address) {
                Some(slot) => {
                    self.file.read_exact_at(page, slot * PAGE_SIZE)?;
                    let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
                    let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
                    fallocate(&self.file, mode, number(slot * PAGE_SIZE)?, number(PAGE_SIZE)?)?;
                }
                None if pages.zeros.contains(&address) => page.fill(0),
                None => return Err(io::Error::other(format!("the page at {address:#x} has not come"))),
            }
        }
        Ok(())
    }
}

/// The range, if it is one of pages of an address space.
fn within(range: &Range) -> io::Result<Range> {
    let is_whole = range.start.is_multiple_of(PAGE_SIZE) && range.end.is_multiple_of(PAGE_SIZE);
    match range.start < range.end && range.end <= ADDRESSES && is_whole {
        true => Ok(range.clone()),
        false => Err(io::Error::other(format!("pages at {range:x?} are in no address space"))),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn what_has_come_is_told_from_what_has_not_whatever_it_is() {
        let copies = Copies::new().unwrap();
        let high = 0x7fff_0000_0000;
        copies.write(high, &[5; 2 * PAGE]).unwrap();
        copies.clear(&(high + P..high + 40 * P)).unwrap();
        copies.write(P, &[6; PAGE]).unwrap();
        copies.write(high + 3 * P, &[7; PAGE]).unwrap();
        let all = 0..ADDRESSES;
        assert_eq!(copies.next(&all), Some(P..2 * P));
        assert_eq!(copies.next(&(2 * P..high)), None);
        let part = high + P..high + 9 * P;
        assert_eq!(copies.next(&part), Some(part));
        assert_eq!(copies.next(&(high..ADDRESSES)), Some(high..high + 40 * P));
        assert_eq!(copies.bytes(), 3 * P, "zeros take none, and what they free is used again");
        let mut buffer = [1; 4 * PAGE];
        copies.take(high, &mut buffer).unwrap();
        assert!(buffer == [[5; PAGE], [0; PAGE], [0; PAGE], [7; PAGE]].concat()[..]);
        assert!(copies.take(high, &mut buffer[..PAGE]).is_err(), "it is here no more");
        assert!(copies.take(high + 40 * P, &mut buffer[..PAGE]).is_err(), "it has not come");
        copies.take(P, &mut buffer[..PAGE]).unwrap();
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        if !huge.is_ok_and(|text| text.contains("[always]") || text.contains("[force]")) {
            assert_eq!(copies.file.metadata().unwrap().blocks(), 0);
        }
    }

    #[test]
    fn what_no_process_has_is_refused() {
        let copies = Copies::new().unwrap();
        for bad in [ADDRESSES..ADDRESSES + P, 1..P, 0..P + 1, P..P, u64::MAX - P..u64::MAX] {
            assert!(copies.clear(&bad).is_err(), "{bad:x?}");
        }
        assert!(copies.write(ADDRESSES, &[1; PAGE]).is_err());
        let clear = |page: u64| copies.clear(&(2 * page * P..(2 * page + 1) * P));
        assert!((0..MOST_ZEROS as u64).all(|page| clear(page).is_ok()));
        assert!(clear(MOST_ZEROS as u64).is_err());
        // All that there could be takes no time.
        copies.clear(&(0..ADDRESSES)).unwrap();
        assert_eq!(copies.next(&(5 * P..ADDRESSES)), Some(5 * P..ADDRESSES));
    }
}
