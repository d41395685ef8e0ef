//! The page store: a sparse memfd of page-sized slots. The client writes into it, the kernel copies
//! out of it (UFFDIO_COPY), and slots that are done with are punched out. Slots are never used twice.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap, munmap};
use nix::unistd::ftruncate;

use crate::PAGE_SIZE;

/// Size of the store's address range, in bytes, where the address space has room for it: enough for
/// a service of 1 TiB to be rewritten eight times on its way. Of 47 bits of addresses sixteen stores have so much, and whoever
/// comes after them less: the tests of a migration have many in one process.
const LARGEST: u64 = 1 << 43;

/// The smallest that is of use, on kernels with 39-bit addresses.
const SMALLEST: u64 = 1 << 36;

/// The memfd and its mapping, which is as large as the file.
#[derive(Debug)]
pub(crate) struct Store {
    fd: OwnedFd,
    base: NonNull<std::ffi::c_void>,
    bytes: u64,
}

// SAFETY: the mapping is only ever read by the kernel on our behalf, and lives as long as the value.
unsafe impl Send for Store {}
// SAFETY: as above; no method hands out references into the mapping.
unsafe impl Sync for Store {}

impl Store {
    pub(crate) fn new() -> io::Result<Self> {
        Self::of_size(LARGEST)
    }

    fn of_size(mut bytes: u64) -> io::Result<Self> {
        let fd = memfd_create("godwit-pages", MFdFlags::MFD_CLOEXEC)?;
        loop {
            match map(&fd, bytes) {
                Ok(base) => return Ok(Self { fd, base, bytes }),
                Err(Errno::ENOMEM | Errno::EFBIG) if bytes > SMALLEST => bytes /= 2,
                Err(errno) => return Err(errno.into()),
            }
        }
    }

    /// The first slot that does not exist.
    pub(crate) fn slots(&self) -> u64 {
        self.bytes / PAGE_SIZE
    }

    /// The address of `pages` slots for UFFDIO_COPY, which are mapped now so that the kernel finds
    /// them without a fault. They must have been written: a hole would be filled with a page.
    pub(crate) fn populated(&self, slot: u64, pages: u64) -> io::Result<*const u8> {
        let out_of_range = || io::Error::from(io::ErrorKind::InvalidInput);
        let offset = usize::try_from(slot * PAGE_SIZE).map_err(|_| out_of_range())?;
        let length = usize::try_from(pages * PAGE_SIZE).map_err(|_| out_of_range())?;
        if slot + pages > self.slots() {
            return Err(out_of_range());
        }
        // SAFETY: the range is inside the mapping, as checked.
        let start = unsafe { self.base.byte_add(offset) };
        // SAFETY: populating changes no contents and the range is ours.
        let result = unsafe { madvise(start, length, MmapAdvise::MADV_POPULATE_READ) };
        match result {
            // EINVAL: before Linux 5.14. UFFDIO_COPY then faults the pages in itself, more slowly.
            Ok(()) | Err(Errno::EINVAL) => Ok(start.as_ptr().cast()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives the memory of slots back.
    pub(crate) fn punch(&self, slots: std::ops::Range<u64>) -> io::Result<()> {
        let out_of_range = |_| io::Error::from(io::ErrorKind::InvalidInput);
        let offset = i64::try_from(slots.start * PAGE_SIZE).map_err(out_of_range)?;
        let length = i64::try_from((slots.end - slots.start) * PAGE_SIZE).map_err(out_of_range)?;
        let mode = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&self.fd, mode, offset, length)?)
    }
}

impl AsFd for Store {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Ok(length) = usize::try_from(self.bytes) {
            // SAFETY: the mapping was made by `map` with this length and nothing refers to it.
            let _ = unsafe { munmap(self.base, length) };
        }
    }
}

fn map(fd: &OwnedFd, bytes: u64) -> Result<NonNull<std::ffi::c_void>, Errno> {
    let size = i64::try_from(bytes).map_err(|_| Errno::EFBIG)?;
    let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new).ok_or(Errno::EFBIG)?;
    ftruncate(fd, size)?;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let base = unsafe {
        mmap(None, length, ProtFlags::PROT_READ, MapFlags::MAP_SHARED | MapFlags::MAP_NORESERVE, fd, 0)?
    };
    // Pages are populated one chunk at a time; a core dump of this would be absurd.
    // SAFETY: the range is the mapping just made.
    let _ = unsafe { madvise(base, length.get(), MmapAdvise::MADV_DONTDUMP) };
    Ok(base)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    /// Fails unless the store takes so many pages. Where shared memory comes in huge pages it takes more.
    fn assert_takes(store: &Store, pages: i64) {
        let setting = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
        if !setting.is_ok_and(|text| text.contains("[always]") || text.contains("[force]")) {
            assert_eq!(nix::sys::stat::fstat(&store.fd).unwrap().st_blocks, pages * 8);
        }
    }

    #[test]
    fn punched_slots_give_their_memory_back_and_others_keep_their_contents() {
        let store = Store::new().unwrap();
        let file = File::from(store.fd.try_clone().unwrap());
        file.write_all_at(&[7; 3 * 4096], 100 * PAGE_SIZE).unwrap();
        assert_takes(&store, 3);
        let page = store.populated(102, 1).unwrap();
        store.punch(100..102).unwrap();
        assert_takes(&store, 1);
        // SAFETY: the slot is populated and nobody writes to it.
        assert_eq!(unsafe { page.add(4095).read() }, 7);
        assert_takes(&store, 1);
    }

    #[test]
    fn a_slot_past_the_end_is_refused() {
        let store = Store::of_size(SMALLEST).unwrap();
        assert!(store.populated(store.slots(), 1).is_err());
    }
}
