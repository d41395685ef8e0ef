//! The destination's side of a segment: a file that CRIU maps or opens, or that gets its names in a tmpfs.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use libc::c_void;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use nix::unistd::ftruncate;
use rustix::fs::{Timespec, Timestamps, UTIME_OMIT, futimens};

use super::filler::Filling;
use super::{Filler, IpcNamespace, Kind, LARGEST};
use crate::process::nameless::LONGEST_NAME;
use crate::{PAGE_SIZE, Range};

/// A segment on its way into processes that do not exist yet.
#[derive(Debug)]
pub struct Replica {
    file: File,
    size: AtomicU64,
    /// When it was last modified at the source, seconds since 1970 and nanoseconds, where that is to be kept.
    modified: Mutex<Option<(i64, u32)>>,
    /// Where it is written, if another process is charged for it.
    filling: RwLock<Option<Filling>>,
    /// Of one that processes map whole, whatever its size: what lies behind its end in the last page.
    rest: Option<Rest>,
}

/// The last page of a file, as a mapping: what is written there behind the end does not make the file larger.
#[derive(Debug)]
struct Rest(NonNull<c_void>);

// SAFETY: it is written through raw pointers, one writer at a time, and lives as long as the value.
unsafe impl Send for Rest {}
// SAFETY: as above: each page is one stream's.
unsafe impl Sync for Rest {}

impl Rest {
    fn new(file: &File, size: u64) -> io::Result<Option<Self>> {
        if size.is_multiple_of(PAGE_SIZE) {
            return Ok(None);
        }
        let offset = i64::try_from(size / PAGE_SIZE * PAGE_SIZE).map_err(io::Error::other)?;
        let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let at = unsafe { mmap(None, PAGE, access, MapFlags::MAP_SHARED, file, offset)? };
        Ok(Some(Self(at)))
    }

    /// Writes the last bytes of the page.
    fn write(&self, bytes: &[u8]) {
        let Some(start) = PAGE.get().checked_sub(bytes.len()) else { return };
        // SAFETY: both are within the page, which nobody else of this process looks at. Nobody can cut the file short.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), self.0.as_ptr().cast::<u8>().add(start), bytes.len());
        }
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length, and nothing refers to it.
        let _ = unsafe { munmap(self.0, PAGE.get()) };
    }
}

/// Bytes that are allocated at once.
const AT_ONCE: u64 = 64 << 20;

/// [`PAGE_SIZE`] for mappings.
const PAGE: NonZeroUsize = NonZeroUsize::MIN.saturating_add(4095);

impl Replica {
    /// Makes an empty one, in the way in which the segment was made: one of a tmpfs in this directory of its filesystem,
    /// without a name.
    ///
    /// # Errors
    /// The kernel refuses, or the size or name is none that a segment can have.
    pub fn new(kind: &Kind, size: u64, tmpfs: Option<&Path>) -> io::Result<Self> {
        let length = is_size(size)?;
        let file = match kind {
            Kind::Anonymous => anonymous(size)?,
            Kind::Memfd { name, sealable } => {
                if name.len() > LONGEST_NAME {
                    return Err(io::Error::other("the name of a memory file is too long"));
                }
                let mut flags = MFdFlags::MFD_CLOEXEC;
                flags.set(MFdFlags::MFD_ALLOW_SEALING, *sealable);
                let file = File::from(memfd_create(name.as_str(), flags)?);
                ftruncate(&file, length)?;
                file
            }
            Kind::SystemV { .. } => return Err(io::Error::other("a segment of System V in no namespace")),
            Kind::Copied { .. } => return Err(io::Error::other("copies of pages are no file")),
            Kind::Tmpfs { .. } => {
                let directory =
                    tmpfs.ok_or_else(|| io::Error::other("a file of a tmpfs that is not there"))?;
                let mut how = File::options();
                let file =
                    how.read(true).write(true).mode(0o000).custom_flags(libc::O_TMPFILE).open(directory)?;
                ftruncate(&file, length)?;
                file
            }
        };
        Ok(Self::of(file, size, None))
    }

    /// Makes an empty segment of System V, with this identifier and key.
    ///
    /// # Errors
    /// The kernel refuses, or the size is none that a segment can have.
    pub fn of_system_v(namespace: &IpcNamespace, identifier: u32, key: u32, size: u64) -> io::Result<Self> {
        is_size(size)?;
        let file = namespace.create(identifier, key, size)?;
        let rest = Rest::new(&file, size)?;
        Ok(Self::of(file, size, rest))
    }

    fn of(file: File, size: u64, rest: Option<Rest>) -> Self {
        Self { file, size: size.into(), modified: Mutex::new(None), filling: RwLock::new(None), rest }
    }

    /// Gives one of a tmpfs another size. Nothing may be written to it meanwhile.
    ///
    /// # Errors
    /// The kernel refuses, or it is none that a segment can have.
    pub fn resize(&self, size: u64) -> io::Result<()> {
        ftruncate(&self.file, is_size(size)?)?;
        self.size.store(size, Ordering::Relaxed);
        let mut filling = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = filling.take() {
            *filling = Some(before.filler().map(self)?);
        }
        drop(filling);
        self.set_modified()
    }

    /// Its bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// From now on it was last modified at this time, whatever is still written to it.
    ///
    /// # Errors
    /// The kernel does not set it.
    pub fn keep_modified(&self, time: (i64, u32)) -> io::Result<()> {
        *self.modified.lock().unwrap_or_else(PoisonError::into_inner) = Some(time);
        self.set_modified()
    }

    fn set_modified(&self) -> io::Result<()> {
        let modified = *self.modified.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((seconds, nanoseconds)) = modified else { return Ok(()) };
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: nanoseconds.into() },
        };
        Ok(futimens(&self.file, &times)?)
    }

    /// Charges what is written from now on to this filler, or to this process again.
    ///
    /// # Errors
    /// The filler cannot map it.
    pub fn charge_to(&self, filler: Option<&Arc<Filler>>) -> io::Result<()> {
        let filling = filler.map(|filler| filler.map(self)).transpose()?;
        let mut now = self.filling.write().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *now, filling);
        // Writers need not wait until it is unmapped.
        drop((now, before));
        Ok(())
    }

    /// Writes pages from this offset on.
    ///
    /// # Errors
    /// They are not within it, or there is no memory.
    pub fn write(&self, offset: u64, pages: &[u8]) -> io::Result<()> {
        let range = self.within(&(offset..offset.saturating_add(pages.len() as u64)))?;
        // What the last page has behind the end is no part of it, and would make it larger.
        let length = usize::try_from(range.end - range.start).map_err(io::Error::other)?;
        match &*self.filling.read().unwrap_or_else(PoisonError::into_inner) {
            Some(filling) => filling.write(offset, &pages[..length]),
            None => self.file.write_all_at(&pages[..length], offset),
        }?;
        if let Some(rest) = &self.rest {
            // There is some only behind the end, and the page is there by now.
            rest.write(&pages[length..]);
        }
        self.set_modified()
    }

    /// Makes these pages, where there are none, with no content.
    ///
    /// # Errors
    /// They are not within it, or there is no memory.
    pub fn allocate(&self, range: &Range) -> io::Result<()> {
        let Range { mut start, end } = self.within(range)?;
        let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
        while start < end {
            // A signal undoes what one call has made.
            let length = (end - start).min(AT_ONCE);
            match fallocate(&self.file, FallocateFlags::FALLOC_FL_KEEP_SIZE, number(start)?, number(length)?)
            {
                Ok(()) => start += length,
                Err(Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    /// These pages read as zero from now on, and take no memory.
    ///
    /// # Errors
    /// They are not within it.
    pub fn clear(&self, range: &Range) -> io::Result<()> {
        let Range { start, end } = self.within(range)?;
        // Else the rest of the last page would stay.
        let end = if self.rest.is_some() { end.next_multiple_of(PAGE_SIZE) } else { end };
        let number = |number: u64| i64::try_from(number).map_err(io::Error::other);
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        fallocate(&self.file, mode, number(start)?, number(end - start)?)?;
        self.set_modified()
    }

    /// The part of whole pages that is within it.
    fn within(&self, range: &Range) -> io::Result<Range> {
        let size = self.size();
        if range.start >= range.end || range.end > size.next_multiple_of(PAGE_SIZE) {
            return Err(io::Error::other(format!(
                "pages at {range:x?} are not within shared memory of {size} bytes"
            )));
        }
        Ok(range.start..range.end.min(size))
    }

    /// What it takes of the machine's memory, bytes.
    ///
    /// # Errors
    /// The kernel does not tell.
    pub fn allocated(&self) -> io::Result<u64> {
        Ok(self.file.metadata()?.blocks() * 512)
    }

    /// Where other processes of root find it, as long as it is held here.
    #[must_use]
    pub fn path(&self) -> String {
        format!("/proc/{}/fd/{}", std::process::id(), self.file.as_raw_fd())
    }
}

/// A size that a segment can have, as the kernel takes it.
fn is_size(size: u64) -> io::Result<i64> {
    if size == 0 || size > LARGEST {
        return Err(io::Error::other(format!("shared memory of {size} bytes is not taken")));
    }
    i64::try_from(size).map_err(io::Error::other)
}

/// Shared anonymous memory as a file, which is nowhere mapped.
fn anonymous(size: u64) -> io::Result<File> {
    let length = usize::try_from(size).ok().and_then(NonZeroUsize::new).ok_or(Errno::EINVAL)?;
    let (access, flags) =
        (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE);
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let mapped = unsafe { mmap_anonymous(None, length, access, flags)? };
    let start = mapped.as_ptr().addr() as u64;
    let end = start + size.next_multiple_of(PAGE_SIZE);
    let path = format!("/proc/self/map_files/{start:x}-{end:x}");
    let file = File::options().read(true).write(true).open(path);
    // SAFETY: the mapping was made above with this length, and nothing refers to it.
    unsafe { munmap(mapped, length.get()) }?;
    file
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn pages_arrive_in_a_replica_and_no_byte_lies_behind_its_end() {
        let memfd = Kind::Memfd { name: "name".into(), sealable: true };
        for (kind, size) in [(Kind::Anonymous, 4 * PAGE_SIZE), (memfd, 3 * PAGE_SIZE + 100)] {
            let replica = Replica::new(&kind, size, None).unwrap();
            replica.write(PAGE_SIZE, &[7; 8192]).unwrap();
            replica.write(3 * PAGE_SIZE, &[8; 4096]).unwrap();
            replica.clear(&(2 * PAGE_SIZE..3 * PAGE_SIZE)).unwrap();
            let bytes = std::fs::read(replica.path()).unwrap();
            assert_eq!(bytes.len() as u64, size, "{kind:?}");
            let page = |number: usize| {
                bytes[number * 4096..].iter().take(4096).collect::<std::collections::BTreeSet<_>>()
            };
            assert_eq!([0, 1, 2, 3].map(page), [[&0], [&7], [&0], [&8]].map(Into::into), "{kind:?}");
            for beyond in [4 * PAGE_SIZE, u64::MAX - 10, LARGEST] {
                assert!(replica.write(beyond, &[1; 4096]).is_err());
                assert!(replica.clear(&(beyond..beyond.saturating_add(PAGE_SIZE))).is_err());
            }
            let link = std::fs::read_link(replica.path()).unwrap();
            let name = if kind == Kind::Anonymous { "/dev/zero (deleted)" } else { "/memfd:name (deleted)" };
            assert_eq!(link.to_str(), Some(name));
        }
        assert!(
            Replica::new(&Kind::Anonymous, LARGEST + 1, None).is_err()
                && Replica::new(&Kind::Anonymous, 0, None).is_err()
                && Replica::new(&Kind::Tmpfs { number: 0 }, 1, None).is_err()
        );
    }

    #[test]
    fn a_file_of_a_tmpfs_has_no_name_another_size_and_the_time_of_its_original() {
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let replica = Replica::new(&Kind::Tmpfs { number: 0 }, 2 * PAGE_SIZE, Some(shm.path())).unwrap();
        assert_eq!(std::fs::read_dir(shm.path()).unwrap().count(), 0);
        replica.write(0, &[7; 8192]).unwrap();
        replica.keep_modified((1_000_000_000, 7)).unwrap();
        for (size, zeros) in [(3 * PAGE_SIZE, 4096), (PAGE_SIZE + 1, 0), (2 * PAGE_SIZE, 4095)] {
            replica.resize(size).unwrap();
            let bytes = std::fs::read(replica.path()).unwrap();
            assert_eq!((bytes.len() as u64, replica.size()), (size, size));
            assert_eq!(bytes.iter().filter(|byte| **byte == 0).count(), zeros, "{size}");
            assert!(replica.write(size.next_multiple_of(PAGE_SIZE), &[1; 4096]).is_err());
            assert_eq!(replica.file.metadata().unwrap().mtime(), 1_000_000_000);
        }
        replica.clear(&(0..PAGE_SIZE)).unwrap();
        replica.write(PAGE_SIZE, &[8; 4096]).unwrap();
        let metadata = replica.file.metadata().unwrap();
        assert_eq!((metadata.mtime(), metadata.mtime_nsec(), metadata.nlink()), (1_000_000_000, 7, 0));
    }
}
