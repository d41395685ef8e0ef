//! Shared memory that is filled while its processes run: the pager maps it, and reads pages of the store into the mapping.
//!
//! Each page that is to come has a placeholder, which is filled in place. A page that the processes have given back
//! meanwhile (`MADV_REMOVE`) has none any more, and what was to come of it must not come. So the mapping is
//! registered with a userfaultfd of the pager's own: the kernel then makes no page there, and the read fails.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;

use libc::c_void;
use nix::errno::Errno;
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};

use super::store::Store;
use super::uffd::{HOLE, Outcome, Uffd};
use crate::{PAGE_SIZE, Range};

/// What the kernel does with pages of shared memory that are larger than [`PAGE_SIZE`].
const HUGE: &str = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";

/// Shared memory of the service.
#[derive(Debug)]
pub(crate) struct Segment {
    /// Device and inode.
    file: (u64, u64),
    start: NonNull<c_void>,
    length: NonZeroUsize,
    /// Keeps the kernel from making pages in the mapping.
    own: Uffd,
}

/// How often a page is tried again that the kernel has, and does not let be written.
const TRIES: u32 = 16;

// SAFETY: the mapping is only ever written by the kernel on our behalf, and lives as long as the value.
unsafe impl Send for Segment {}

/// Whether the pager can fill shared memory of processes that run.
///
/// # Errors
/// Why not: the kernel is older than Linux 5.19 (6.10 on arm64), or gives shared memory huge pages, of which it keeps a part
/// that was given back, filled with zeros.
pub fn fills_shared() -> io::Result<()> {
    Uffd::own()?;
    match std::fs::read_to_string(HUGE) {
        Ok(setting) if !setting.contains("[never]") && !setting.contains("[deny]") => {
            Err(io::Error::other(format!("{HUGE} is not \"never\" but {}", setting.trim_end())))
        }
        // The kernel has no such pages.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        setting => setting.map(drop),
    }
}

impl Segment {
    /// Opens it at this path; it has `size` bytes.
    pub(crate) fn open(path: &Path, size: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        let metadata = file.metadata()?;
        let length = usize::try_from(size.next_multiple_of(PAGE_SIZE)).ok().and_then(NonZeroUsize::new);
        let length = length.filter(|_| metadata.len() == size);
        let length = length
            .ok_or_else(|| io::Error::other(format!("it has {} bytes and not {size}", metadata.len())))?;
        let own = Uffd::own()?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let start = unsafe { mmap(None, length, protection, MapFlags::MAP_SHARED, &file, 0) }?;
        let file = (metadata.dev(), metadata.ino());
        let segment = Self { file, start, length, own };
        // SAFETY: the range is the mapping just made; it changes nothing but what a core dump has.
        let _ = unsafe { madvise(start, length.get(), MmapAdvise::MADV_DONTDUMP) };
        let at = start.addr().get() as u64;
        segment.own.register_own(&(at..at + length.get() as u64))?;
        Ok(segment)
    }

    /// Device and inode, by which it is found in the mappings of processes.
    pub(crate) fn file(&self) -> (u64, u64) {
        self.file
    }

    /// Its bytes, in whole pages.
    pub(crate) fn size(&self) -> u64 {
        self.length.get() as u64
    }

    /// Fills those of these pages that it has with the slots from this one on.
    pub(crate) fn fill(&self, range: &Range, slot: u64, store: &Store) -> io::Result<()> {
        if range.end > self.size() {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let (mut at, mut tries) = (range.start, 0);
        while at < range.end {
            let offset = i64::try_from(slot * PAGE_SIZE + (at - range.start)).map_err(io::Error::other)?;
            let length = usize::try_from(range.end - at).map_err(io::Error::other)?;
            let start = self.start.as_ptr().wrapping_byte_add(usize::try_from(at).map_err(io::Error::other)?);
            // SAFETY: the range is within the mapping, as checked, to which no reference points. The kernel checks each page.
            let read = unsafe { libc::pread(store.as_fd().as_raw_fd(), start, length, offset) };
            match Errno::result(read) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                // A page may have gone while it was filled: the rest of it with it.
                Ok(read) => (at, tries) = (at + u64::try_from(read).map_err(io::Error::other)?, 0),
                Err(Errno::EINTR) => {}
                Err(Errno::EFAULT) => {
                    match self.own.go_on(start.addr() as u64 / PAGE_SIZE * PAGE_SIZE, PAGE_SIZE) {
                        HOLE => (at, tries) = ((at + 1).next_multiple_of(PAGE_SIZE), 0),
                        // It came back from the swap, or will.
                        Outcome::Filled(_) | Outcome::Exists | Outcome::Again | Outcome::NoMemory
                            if tries < TRIES =>
                        {
                            tries += 1;
                        }
                        other => {
                            return Err(io::Error::other(format!(
                                "the page at {at:#x} cannot be written: {other:?}"
                            )));
                        }
                    }
                }
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing refers to it.
        let _ = unsafe { munmap(self.start, self.length.get()) };
    }
}
