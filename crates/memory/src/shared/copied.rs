//! The pages of a process that are copies of a file's: it has mapped the file privately and written to them, as the
//! dynamic linker does in each library. userfaultfd takes no such mapping, so that they have to be there at the restore.
//!
//! What is executable is left to CRIU, whose parasite may change a page of it during the dump.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use nix::errno::Errno;

use crate::process::{Area, AreaKind, Process, ProcessError};
use crate::tracker::{Scanner, copied_entries};
use crate::{PAGE_SIZE, Range};

/// [`PAGE_SIZE`] for lengths.
const PAGE: usize = 4096;

/// Those of one process.
#[derive(Debug)]
pub(super) struct Copied {
    process: Process,
    scanner: Mutex<Scanner>,
}

impl Copied {
    pub(super) fn of(process: Process) -> Self {
        Self { process, scanner: Mutex::new(Scanner::small()) }
    }

    /// Its PID; none once it has ended.
    pub(super) fn pid(&self) -> Option<i32> {
        (!self.process.has_ended()).then(|| self.process.pid())
    }

    /// What it has locked; nothing once it has ended.
    pub(super) fn locked_kib(&self) -> u64 {
        self.process.status().map_or(0, |status| status.locked_kib)
    }

    pub(super) fn start_time(&self) -> u64 {
        self.process.start_time()
    }

    /// Where they are, in ascending order.
    pub(super) fn populated(&self) -> io::Result<Vec<Range>> {
        let areas = self.process.areas_now().map_err(failed)?;
        let pagemap = self.process.open_file("pagemap").map_err(failed)?;
        let mut populated: Vec<Range> = Vec::new();
        let mut add = |pages: Range| match populated.last_mut() {
            Some(last) if last.end == pages.start => last.end = pages.end,
            _ => populated.push(pages),
        };
        let mut scanner = self.scanner.lock().unwrap_or_else(PoisonError::into_inner);
        let is_copied = |area: &&Area| area.kind == AreaKind::PrivateFile && !area.executable;
        for Area { range, .. } in areas.iter().filter(is_copied) {
            match scanner.copied(pagemap.as_fd(), range, &mut add) {
                Ok(()) => {}
                // Before Linux 6.7.
                Err(Errno::ENOTTY) => copied_entries(&pagemap, range, &mut add)?,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(populated)
    }

    /// Reads whole pages from this address on.
    pub(super) fn read(&self, address: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < buffer.len() {
            match self.process.read(address + done as u64, &mut buffer[done..]).map_err(failed)? {
                0 => {
                    let page = address + done as u64;
                    let end = done + PAGE.min(buffer.len() - done);
                    if self.process.first_with_content(&(page..page + PAGE_SIZE)).map_err(failed)?.is_some() {
                        return Err(io::Error::other(format!("the page at {page:#x} cannot be read")));
                    }
                    // It was given back meanwhile: the next look does not find it.
                    buffer[done..end].fill(0);
                    done = end;
                }
                read => done += read,
            }
        }
        Ok(())
    }
}

fn failed(error: ProcessError) -> io::Error {
    match error {
        ProcessError::Gone { .. } => io::Error::new(io::ErrorKind::NotFound, error),
        error => io::Error::other(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io::Write;
    use std::num::NonZeroUsize;

    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};

    use super::super::{ADDRESSES, Segment};
    use super::*;

    #[test]
    fn what_was_written_to_a_private_mapping_of_a_file_is_found_by_address() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(&[b'f'; 8 * PAGE]).unwrap();
        let length = NonZeroUsize::new(8 * PAGE).unwrap();
        let map = |access| {
            let access = access | ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping, which no reference points to.
            let at = unsafe { mmap(None, length, access, MapFlags::MAP_PRIVATE, &file, 0).unwrap() };
            for (page, value) in [(1, b'w'), (2, 0), (5, b'w')] {
                // SAFETY: within the mapping.
                unsafe { at.cast::<u8>().add(page * PAGE).write_bytes(value, PAGE) };
            }
            // SAFETY: as above. It is the file's page.
            unsafe { at.cast::<u8>().add(7 * PAGE).read_volatile() };
            at
        };
        let [data, code] = [ProtFlags::empty(), ProtFlags::PROT_EXEC].map(map);
        let segment = Segment::copied(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(segment.size(), ADDRESSES);
        assert!(segment.start_time().is_some() && segment.has_its_size().unwrap());
        assert_eq!(segment.writer(), i32::try_from(std::process::id()).ok());
        let page = |at: std::ptr::NonNull<_>, page: u64| at.addr().get() as u64 + page * PAGE_SIZE;
        let found = |at| {
            let all = segment.populated().unwrap();
            let inside = |address: u64| address.clamp(page(at, 0), page(at, 8)) - page(at, 0);
            let numbers =
                all.iter().map(|range| inside(range.start) / PAGE_SIZE..inside(range.end) / PAGE_SIZE);
            numbers.filter(|range| !range.is_empty()).collect::<Vec<_>>()
        };
        assert_eq!(found(data), [1..3, 5..6]);
        assert_eq!(found(code), Vec::<Range>::new());
        let mut buffer = vec![1; 3 * PAGE];
        segment.read(page(data, 1), &mut buffer).unwrap();
        assert!(buffer == [[b'w'; PAGE], [0; PAGE], [b'f'; PAGE]].concat());
        for at in [data, code] {
            // SAFETY: nothing points to it.
            unsafe { munmap(at, length.get()).unwrap() };
        }
    }
}
