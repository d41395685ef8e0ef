//! The userfaultfd of one live address space: its messages and its ioctls.
//!
//! Source: `Documentation/admin-guide/mm/userfaultfd.rst`, `include/uapi/linux/userfaultfd.h`.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous};

use crate::PAGE_SIZE;

mod raw {
    //! The kernel's structures.

    #[repr(C)]
    #[derive(Debug, Clone, Copy)]
    pub(super) struct Range {
        pub(super) start: u64,
        pub(super) len: u64,
    }

    #[repr(C)]
    #[derive(Debug)]
    pub(super) struct Copy {
        pub(super) dst: u64,
        pub(super) src: u64,
        pub(super) len: u64,
        pub(super) mode: u64,
        pub(super) copy: i64,
    }

    #[repr(C)]
    #[derive(Debug)]
    pub(super) struct Zeropage {
        pub(super) range: Range,
        pub(super) mode: u64,
        pub(super) zeropage: i64,
    }

    #[repr(C)]
    #[derive(Debug)]
    pub(super) struct Continue {
        pub(super) range: Range,
        pub(super) mode: u64,
        pub(super) mapped: i64,
    }

    #[repr(C)]
    #[derive(Debug)]
    pub(super) struct Register {
        pub(super) range: Range,
        pub(super) mode: u64,
        pub(super) ioctls: u64,
    }

    #[repr(C)]
    #[derive(Debug)]
    pub(super) struct Api {
        pub(super) api: u64,
        pub(super) features: u64,
        pub(super) ioctls: u64,
    }

    // _IOR, although the kernel only reads the range.
    nix::ioctl_read!(wake, 0xAA, 0x02, Range);
    nix::ioctl_readwrite!(copy, 0xAA, 0x03, Copy);
    nix::ioctl_readwrite!(zeropage, 0xAA, 0x04, Zeropage);
    nix::ioctl_readwrite!(go_on, 0xAA, 0x07, Continue);
    nix::ioctl_readwrite!(register, 0xAA, 0x00, Register);
    nix::ioctl_readwrite!(api, 0xAA, 0x3F, Api);

    /// UFFD_API.
    pub(super) const API: u64 = 0xAA;

    /// UFFDIO_REGISTER_MODE_MISSING, _WP, _MINOR.
    pub(super) const MISSING: u64 = 1;
    pub(super) const WP: u64 = 2;
    pub(super) const MINOR: u64 = 4;

    /// UFFD_FEATURE_MISSING_SHMEM, _SIGBUS, _MINOR_SHMEM, _WP_HUGETLBFS_SHMEM.
    pub(super) const MISSING_SHMEM: u64 = 1 << 5;
    pub(super) const SIGBUS: u64 = 1 << 7;
    pub(super) const MINOR_SHMEM: u64 = 1 << 10;
    pub(super) const WP_SHMEM: u64 = 1 << 12;

    /// UFFD_PAGEFAULT_FLAG_MINOR.
    pub(super) const FAULT_MINOR: u64 = 4;
}

/// Bytes of a `struct uffd_msg`.
const MESSAGE: usize = 32;

/// Messages taken with one read.
const MESSAGES: usize = 32;

/// What a process has met or done.
#[derive(Debug)]
pub(crate) enum Event {
    /// A thread waits for the page at this address; `minor` says that the shared memory there has one, which is not mapped.
    Fault { address: u64, minor: bool },
    /// It forked; the descriptor is the child's.
    Fork(Uffd),
    /// Pages moved.
    Remap { from: u64, to: u64, len: u64 },
    /// Pages read as zero from now on.
    Remove(crate::Range),
    /// Pages are no longer mapped.
    Unmap(crate::Range),
}

/// What became of an ioctl.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// So many bytes from the beginning are there now, at least a page; who waited for them goes on.
    Filled(u64),
    /// The first page is there already.
    Exists,
    /// The address space is changing, or changed since its last message was read.
    Again,
    /// The range is not wholly inside one registered area.
    NoArea,
    /// The process has ended.
    Ended,
    /// There is no memory, or the service's cgroup is at its limit.
    NoMemory,
    /// Anything else: the kernel and we do not understand each other.
    Strange(Errno),
}

/// Of UFFDIO_CONTINUE: the shared memory has no page there.
pub(crate) const HOLE: Outcome = Outcome::Strange(Errno::EFAULT);

/// A page of this process that cannot be read: so nothing of it is put anywhere.
#[derive(Debug)]
pub(crate) struct Unreadable(NonNull<libc::c_void>);

// SAFETY: nobody reads or writes the page.
unsafe impl Send for Unreadable {}

impl Unreadable {
    /// It stays as long as this process lives.
    pub(crate) fn new() -> io::Result<Self> {
        let length = NonZeroUsize::MIN.saturating_add(4095);
        // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
        let page = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE) };
        Ok(Self(page?))
    }
}

/// A userfaultfd, non-blocking.
#[derive(Debug)]
pub(crate) struct Uffd(OwnedFd);

impl Uffd {
    /// Takes a descriptor that was received.
    pub(crate) fn new(fd: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&fd, FcntlArg::F_GETFL)?);
        fcntl(&fd, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self(fd))
    }

    /// One of this process, which has the features that it takes to fill shared memory.
    pub(crate) fn own() -> io::Result<Self> {
        // SAFETY: makes a descriptor.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        let fd = Errno::result(RawFd::try_from(fd).unwrap_or(-1))?;
        // SAFETY: just made, and nobody else's.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        let features = raw::MISSING_SHMEM | raw::SIGBUS | raw::MINOR_SHMEM | raw::WP_SHMEM;
        let mut request = raw::Api { api: raw::API, features, ioctls: 0 };
        // SAFETY: the structure is the one the ioctl takes.
        unsafe { raw::api(fd.as_raw_fd(), &raw mut request) }?;
        // Some kernels say yes to what they were built without.
        if request.features & features != features {
            return Err(io::Error::other("this kernel's userfaultfd does not have shared memory filled"));
        }
        Ok(Self(fd))
    }

    /// One that another part of this program has taken before.
    pub(crate) fn held(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Whether the process behind it is gone.
    pub(crate) fn has_ended(&self, unreadable: &Unreadable) -> bool {
        // Any address that can be one: the process is looked for before the area.
        self.copy(1 << 30, unreadable.0.as_ptr().cast(), PAGE_SIZE) == Outcome::Ended
    }

    /// Takes messages there are, at most [`MESSAGES`]; `true` if there may be more. The kernel gives
    /// faults before events, whatever came first.
    pub(crate) fn read(&self, into: &mut Vec<Event>) -> io::Result<bool> {
        let mut buffer = [0_u8; MESSAGE * MESSAGES];
        let length = match nix::unistd::read(&self.0, &mut buffer) {
            Ok(length) => length,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(false),
            Err(errno) => return Err(errno.into()),
        };
        for message in buffer[..length].as_chunks::<MESSAGE>().0 {
            into.push(event(message)?);
        }
        Ok(length == buffer.len())
    }

    /// UFFDIO_COPY: puts `len` bytes from `source` at `dst`.
    pub(crate) fn copy(&self, dst: u64, source: *const u8, len: u64) -> Outcome {
        let mut request = raw::Copy { dst, src: source.expose_provenance() as u64, len, mode: 0, copy: 0 };
        // SAFETY: the structure is the one the ioctl takes. The kernel checks the source itself and
        // writes only into the other process.
        let result = unsafe { raw::copy(self.0.as_raw_fd(), &raw mut request) };
        outcome(result, request.copy, len)
    }

    /// UFFDIO_ZEROPAGE at one page.
    pub(crate) fn zero(&self, dst: u64) -> Outcome {
        let mut request =
            raw::Zeropage { range: raw::Range { start: dst, len: PAGE_SIZE }, mode: 0, zeropage: 0 };
        // SAFETY: the structure is the one the ioctl takes; the kernel writes only into the other
        // process.
        let result = unsafe { raw::zeropage(self.0.as_raw_fd(), &raw mut request) };
        outcome(result, request.zeropage, PAGE_SIZE)
    }

    /// UFFDIO_CONTINUE: maps the pages that the shared memory has there; [`HOLE`] where it has none.
    pub(crate) fn go_on(&self, dst: u64, len: u64) -> Outcome {
        let mut request = raw::Continue { range: raw::Range { start: dst, len }, mode: 0, mapped: 0 };
        // SAFETY: the structure is the one the ioctl takes; the kernel writes only into the other
        // process's page tables.
        let result = unsafe { raw::go_on(self.0.as_raw_fd(), &raw mut request) };
        outcome(result, request.mapped, len)
    }

    /// UFFDIO_REGISTER of shared memory of the process: says when it touches a page that is not mapped, whether the memory
    /// has it or not.
    ///
    /// Nothing is protected, but the kernel must be told that something may be: otherwise MADV_COLLAPSE maps
    /// pages of which it has not said anything.
    pub(crate) fn register_shared(&self, range: &crate::Range) -> io::Result<()> {
        self.register(range, raw::MISSING | raw::MINOR | raw::WP)
    }

    /// UFFDIO_REGISTER of a mapping of this process, of one that is its [own](Self::own): the kernel does not make pages
    /// that the shared memory does not have, and fails a system call that needs one with EFAULT.
    pub(crate) fn register_own(&self, range: &crate::Range) -> io::Result<()> {
        self.register(range, raw::MISSING)
    }

    fn register(&self, range: &crate::Range, mode: u64) -> io::Result<()> {
        let range = raw::Range { start: range.start, len: range.end - range.start };
        let mut request = raw::Register { range, mode, ioctls: 0 };
        // SAFETY: the structure is the one the ioctl takes.
        unsafe { raw::register(self.0.as_raw_fd(), &raw mut request) }?;
        Ok(())
    }

    /// UFFDIO_WAKE: threads that wait in the range try again.
    pub(crate) fn wake(&self, range: &crate::Range) {
        if range.is_empty() {
            return;
        }
        let mut request = raw::Range { start: range.start, len: range.end - range.start };
        // SAFETY: the structure is the one the ioctl takes.
        let result = unsafe { raw::wake(self.0.as_raw_fd(), &raw mut request) };
        if let Err(errno) = result {
            tracing::warn!(?range, %errno, "UFFDIO_WAKE failed");
        }
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn outcome(result: Result<i32, Errno>, filled: i64, asked: u64) -> Outcome {
    match (result, u64::try_from(filled)) {
        (Ok(_), _) => Outcome::Filled(asked),
        (Err(_), Ok(filled)) if filled >= PAGE_SIZE => Outcome::Filled(filled),
        (Err(errno), _) => match errno {
            Errno::EEXIST => Outcome::Exists,
            Errno::EAGAIN | Errno::EINTR => Outcome::Again,
            Errno::ENOENT => Outcome::NoArea,
            // Kernels before 4.14 said ENOSPC.
            Errno::ESRCH | Errno::ENOSPC => Outcome::Ended,
            Errno::ENOMEM => Outcome::NoMemory,
            other => Outcome::Strange(other),
        },
    }
}

fn word(message: &[u8], index: usize) -> u64 {
    let mut bytes = [0; 8];
    bytes.copy_from_slice(&message[index * 8..index * 8 + 8]);
    u64::from_ne_bytes(bytes)
}

/// `struct uffd_msg`: a byte that says which, then from byte 8 on what.
fn event(message: &[u8]) -> io::Result<Event> {
    Ok(match message[0] {
        0x12 => Event::Fault {
            address: word(message, 2) & !(PAGE_SIZE - 1),
            minor: word(message, 1) & raw::FAULT_MINOR != 0,
        },
        0x13 => {
            let number = [message[8], message[9], message[10], message[11]];
            // SAFETY: the kernel made this descriptor for the reader of the message.
            let fd = unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(number)) };
            Event::Fork(Uffd::new(fd)?)
        }
        0x14 => Event::Remap { from: word(message, 1), to: word(message, 2), len: word(message, 3) },
        0x15 => Event::Remove(word(message, 1)..word(message, 2)),
        0x16 => Event::Unmap(word(message, 1)..word(message, 2)),
        other => {
            let reason = format!("userfaultfd message {other:#x} is unknown");
            return Err(io::Error::new(io::ErrorKind::InvalidData, reason));
        }
    })
}
