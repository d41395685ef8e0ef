//! Files of a tmpfs that are read now and then, and not held open meanwhile: a file that is deleted would keep its content
//! as long as anybody has it open, and the service would lack the room. So a file is known by its handle
//! (name_to_handle_at(2)), which stays valid whatever its names are, and goes with the file.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use nix::errno::Errno;

/// The longest handle of any filesystem: `MAX_HANDLE_SZ`.
const LONGEST: usize = 128;

/// `struct file_handle`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Raw {
    length: u32,
    kind: i32,
    handle: [u8; LONGEST],
}

/// A file of a filesystem.
#[derive(Debug)]
pub(super) struct Handle {
    /// A directory of it.
    filesystem: Arc<OwnedFd>,
    raw: Raw,
}

/// Whether two open files of one filesystem are the same: an inode's number may be used again, with another generation.
pub(super) fn is_same(one: &impl AsFd, other: &impl AsFd) -> io::Result<bool> {
    let (one, other) = (raw(one)?, raw(other)?);
    let length = usize::try_from(one.length).unwrap_or(LONGEST).min(LONGEST);
    Ok((one.length, one.kind) == (other.length, other.kind) && one.handle[..length] == other.handle[..length])
}

/// The kernel's handle of a file, which may be open as a path only.
fn raw(file: &impl AsFd) -> io::Result<Raw> {
    let mut raw = Raw { length: 128, kind: 0, handle: [0; LONGEST] };
    let mut mount = 0;
    // SAFETY: the handle has the room that its length tells, and all pointers are to what lives here.
    let done = unsafe {
        libc::syscall(
            libc::SYS_name_to_handle_at,
            file.as_fd().as_raw_fd(),
            c"".as_ptr(),
            &raw mut raw,
            &raw mut mount,
            libc::AT_EMPTY_PATH,
        )
    };
    Errno::result(done)?;
    Ok(raw)
}

impl Handle {
    /// Of this file, which may be open as a path only.
    pub(super) fn of(filesystem: &Arc<OwnedFd>, file: &impl AsFd) -> io::Result<Self> {
        Ok(Self { filesystem: Arc::clone(filesystem), raw: raw(file)? })
    }

    /// Opens it for reading. It has gone where the error is `ESTALE`.
    pub(super) fn open(&self) -> io::Result<File> {
        let mut raw = self.raw;
        // Waiting for nobody who holds a lease.
        let flags = libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NOATIME | libc::O_NONBLOCK;
        let filesystem = self.filesystem.as_raw_fd();
        // SAFETY: the handle is one that the kernel has made, with its length.
        let fd = unsafe { libc::syscall(libc::SYS_open_by_handle_at, filesystem, &raw mut raw, flags) };
        let fd = Errno::result(i32::try_from(fd).unwrap_or(-1))?;
        // SAFETY: a new descriptor that nobody else owns.
        Ok(File::from(unsafe { OwnedFd::from_raw_fd(fd) }))
    }
}
