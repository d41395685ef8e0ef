//! The destination's side of what a process has written in private mappings of files: pages by address, zeros among them,
//! until they are put into CRIU's images. Whatever is not here has not come, or is gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::ADDRESSES;
use crate::{PAGE_SIZE, Range};

/// [`PAGE_SIZE`] for lengths.
const PAGE: usize = 4096;

/// The pages of one process.
#[derive(Debug)]
pub struct Copies {
    /// In the order in which they came first: by their addresses each would take a huge page, where shared memory has such.
    file: File,
    pages: Mutex<Pages>,
}

#[derive(Debug, Default)]
struct Pages {
    /// Where each is in the file, in pages.
    slots: BTreeMap<u64, u64>,
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
        // A slot is noted once its page is in it.
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
        Ok(())
    }

    /// These pages are gone.
    ///
    /// # Errors
    /// They are no pages of an address space.
    pub fn forget(&self, range: &Range) -> io::Result<()> {
        let range = within(range)?;
        let mut pages = self.lock();
        let had: Vec<u64> = pages.slots.range(range).map(|(address, _)| *address).collect();
        for address in had {
            let slot = pages.slots.remove(&address);
            pages.free.extend(slot);
        }
        Ok(())
    }

    /// What they take of the machine's memory, bytes.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// The first pages in this range that are here, as many as lie side by side.
    #[must_use]
    pub fn next(&self, within: &Range) -> Option<Range> {
        if within.is_empty() {
            return None;
        }
        let pages = self.lock();
        let mut addresses = pages.slots.range(within.clone()).map(|(address, _)| *address);
        let start = addresses.next()?;
        let mut end = start + PAGE_SIZE;
        while addresses.next() == Some(end) {
            end += PAGE_SIZE;
        }
        Some(start..end)
    }

    /// Takes pages from this address on: they are here no more.
    ///
    /// # Errors
    /// One of them is not here, or the kernel cannot read it.
    pub fn take(&self, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut pages = self.lock();
        let mut done = 0;
        while done < buffer.len() {
            let mut slot_of = |page: usize| pages.slots.remove(&(address + page as u64));
            let Some(slot) = slot_of(done) else {
                let page = address + done as u64;
                return Err(io::Error::other(format!("the page at {page:#x} has not come")));
            };
            // Those that came together lie together.
            let mut end = done + PAGE;
            while end < buffer.len()
                && pages.slots.get(&(address + end as u64)) == Some(&(slot + ((end - done) / PAGE) as u64))
            {
                pages.slots.remove(&(address + end as u64));
                end += PAGE;
            }
            let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
            let (at, length) = (slot * PAGE_SIZE, (end - done) as u64);
            self.file.read_exact_at(&mut buffer[done..end], at)?;
            let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            fallocate(&self.file, mode, number(at)?, number(length)?)?;
            done = end;
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
    use super::*;

    const P: u64 = PAGE_SIZE;

    #[test]
    fn what_has_come_is_told_from_what_has_not_whatever_it_is() {
        let copies = Copies::new().unwrap();
        let high = 0x7fff_0000_0000;
        copies.write(high, &[5; 2 * PAGE]).unwrap();
        copies.write(high + P, &[[0; PAGE], [0; PAGE], [8; PAGE]].concat()).unwrap();
        copies.write(P, &[6; PAGE]).unwrap();
        copies.write(high + 3 * P, &[7; PAGE]).unwrap();
        assert_eq!(copies.next(&(0..ADDRESSES)), Some(P..2 * P));
        assert_eq!(copies.next(&(2 * P..high)), None);
        assert_eq!(copies.next(&(high + P..high + 3 * P)), Some(high + P..high + 3 * P));
        assert_eq!(copies.next(&(high..ADDRESSES)), Some(high..high + 4 * P));
        assert_eq!(copies.next(&(high + P..high + P)), None, "nothing is in an empty range");
        let mut buffer = [1; 4 * PAGE];
        copies.take(high, &mut buffer).unwrap();
        assert!(buffer == [[5; PAGE], [0; PAGE], [0; PAGE], [7; PAGE]].concat()[..]);
        assert!(copies.take(high, &mut buffer[..PAGE]).is_err(), "it is here no more");
        copies.take(P, &mut buffer[..PAGE]).unwrap();
        assert_eq!(copies.next(&(0..ADDRESSES)), None);
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        if !huge.is_ok_and(|text| text.contains("[always]") || text.contains("[force]")) {
            assert_eq!(copies.allocated().unwrap(), 0);
        }
    }

    #[test]
    fn what_is_gone_is_here_no_more_and_its_place_is_used_again() {
        let copies = Copies::new().unwrap();
        copies.write(0, &[1; 8 * PAGE]).unwrap();
        let before = copies.allocated().unwrap();
        copies.forget(&(2 * P..ADDRESSES)).unwrap();
        assert_eq!(copies.next(&(0..ADDRESSES)), Some(0..2 * P));
        copies.write(1 << 40, &[2; 6 * PAGE]).unwrap();
        assert_eq!(copies.allocated().unwrap(), before);
        let mut buffer = [0; 6 * PAGE];
        copies.take(1 << 40, &mut buffer).unwrap();
        assert!(buffer == [2; 6 * PAGE]);
        assert!(copies.take(2 * P, &mut buffer[..PAGE]).is_err());
    }

    #[test]
    fn what_no_process_has_is_refused() {
        let copies = Copies::new().unwrap();
        for bad in [ADDRESSES..ADDRESSES + P, 1..P, 0..P + 1, P..P, u64::MAX - P..u64::MAX] {
            assert!(copies.forget(&bad).is_err(), "{bad:x?}");
        }
        assert!(copies.write(ADDRESSES, &[1; PAGE]).is_err());
    }
}
