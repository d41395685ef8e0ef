//! Files copied out of a container's filesystem and into it, as tar archives.
//!
//! The container's processes may change what is copied while it is copied, and lay links for it: every path is resolved as
//! the container sees it ([`crate::beneath`]), what was examined is what is opened, and nothing outside can be reached.
//! Files, directories and symbolic links are copied; devices, FIFOs and sockets, which are not contents, are passed over,
//! and so are the filesystems in which the kernel makes files as they are read.
//!
//! A file that is written appears whole, or not at all: it takes the place of one that was there by rename(2). What was
//! copied before a failure stays, as with cp(1).

mod into;
mod out;

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, OFlags, Statx};

use crate::beneath::{self, Links, Root};
use crate::image::archive::TarFault;
use crate::processes::mounts::MountNamespace;
use crate::processes::process;

/// How many directories deep files are copied: each is open until all below it is copied.
const MAX_DEPTH: usize = 256;

/// Filesystems in which the kernel makes files as they are read, by their magic numbers (statfs(2)).
const MADE_BY_THE_KERNEL: [u64; 11] = [
    0x9fa0,      // proc
    0x6265_6572, // sysfs
    0x27_e0eb,   // cgroup
    0x6367_7270, // cgroup2
    0x1cd1,      // devpts
    0x1980_0202, // mqueue
    0x6462_6720, // debugfs
    0x7472_6163, // tracefs
    0x7363_6673, // securityfs
    0xcafe_4a11, // bpf
    0x6e73_6673, // nsfs
];

/// Why files could not be copied: a sentence, in which paths are the container's.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Something failed.
    #[error("cannot {action} {path} of the service")]
    Io {
        /// What was done.
        action: &'static str,
        /// With what.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// What is asked for does not fit what is there.
    #[error("{path} of the service {reason}")]
    Unfit {
        /// The path.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The archive.
    #[error("the tar archive cannot be read: {0}")]
    Archive(String),
    /// Whoever reads the archive has gone.
    #[error("the copy was not taken to its end")]
    Gone(#[source] io::Error),
    /// Its mounts have gone with it: what was copied may be below them.
    #[error("the service ended while files were copied: not all of them may be in their places")]
    Ended,
}

impl CopyError {
    fn io(action: &'static str, path: &[u8], source: impl Into<io::Error>) -> Self {
        Self::Io { action, path: shown(path), source: source.into() }
    }

    fn unfit(path: &[u8], reason: &'static str) -> Self {
        Self::Unfit { path: shown(path), reason }
    }
}

impl From<TarFault> for CopyError {
    fn from(fault: TarFault) -> Self {
        Self::Archive(match fault {
            TarFault::NotTar => "it is none".into(),
            TarFault::Read { offset, source } => format!("after {offset} bytes: {source}"),
            TarFault::Header { offset, reason } => format!("after {offset} bytes: {reason}"),
        })
    }
}

/// A path below the root, as a user writes it.
fn shown(path: &[u8]) -> String {
    format!("/{}", String::from_utf8_lossy(path).trim_start_matches('/'))
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Files, directories and links.
    pub files: u64,
    /// Bytes of files.
    pub bytes: u64,
}

/// Where an archive is written to, and how.
#[derive(Debug, Clone)]
pub struct CopyIn {
    /// The path, as the container sees it.
    pub path: Vec<u8>,
    /// It is a directory, which is made where it is not there.
    pub contents: bool,
    /// Owners are those of the archive; else root.
    pub keep_owners: bool,
}

/// The root directory of a container.
#[derive(Debug)]
pub struct Filesystem {
    root: Root,
    whose: Whose,
}

#[derive(Debug)]
enum Whose {
    /// A container's that runs: the PID of one of its processes, and when that began.
    Process(u32, u64),
    /// A container's that does not run: where it would mount something, in words of the container.
    Ended(Vec<PathBuf>),
}

impl Filesystem {
    /// That of the process, with all that is mounted for it.
    ///
    /// # Errors
    /// It has ended.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        let gone = || io::Error::from(io::ErrorKind::NotFound);
        let began = process::start_time(pid).ok_or_else(gone)?;
        let root = Root::of(MountNamespace::of(pid)?.into_root(), Links::InRoot);
        // Its PID may have become another process's before that was opened.
        let filesystem = Self { root, whose: Whose::Process(pid, began) };
        if filesystem.is_there() { Ok(filesystem) } else { Err(gone()) }
    }

    /// That of a container that does not run, put together without what is mounted at these paths: nothing there can be
    /// reached.
    ///
    /// # Errors
    /// There is none.
    pub fn of_ended(root: &Path, mounts: impl IntoIterator<Item = PathBuf>) -> io::Result<Self> {
        let root = Root::open(root, Links::InRoot)?;
        let resolved = |path: PathBuf| root.path_of(relative(path.as_os_str().as_bytes())).unwrap_or(path);
        let mounts = mounts.into_iter().map(resolved).collect();
        Ok(Self { root, whose: Whose::Ended(mounts) })
    }

    /// Writes an archive of what is at a path, with the path's last component as the name at its top; where that is `.`, or
    /// nothing, of what is in the directory.
    ///
    /// # Errors
    /// There is nothing, or it cannot be read or written to its end.
    pub fn copy_out(&self, path: &[u8], to: impl Write) -> Result<Copied, CopyError> {
        let copied = out::copy(self, path, to)?;
        if self.is_there() { Ok(copied) } else { Err(CopyError::Ended) }
    }

    /// Writes what an archive has to a path: into the directory that is there; else the only name at the archive's top becomes
    /// the path's last component.
    ///
    /// # Errors
    /// The archive, or what is there.
    pub fn copy_in(&self, how: &CopyIn, from: impl Read) -> Result<Copied, CopyError> {
        let copied = into::copy(self, how, from)?;
        if self.is_there() { Ok(copied) } else { Err(CopyError::Ended) }
    }

    /// A container that runs has not ended meanwhile.
    fn is_there(&self) -> bool {
        match self.whose {
            Whose::Process(pid, began) => process::lives(pid, began),
            Whose::Ended(_) => true,
        }
    }

    /// What was opened is not in a mount that a container which has ended does not have now.
    fn is_shown(&self, opened: BorrowedFd<'_>, path: &[u8]) -> Result<(), CopyError> {
        let Whose::Ended(mounts) = &self.whose else { return Ok(()) };
        if mounts.is_empty() {
            return Ok(());
        }
        let real = self.root.path_to(opened).map_err(|error| CopyError::io("find", path, error))?;
        self.is_no_mount(&real, path)
    }

    /// The same of a path without links.
    fn is_no_mount(&self, real: &Path, path: &[u8]) -> Result<(), CopyError> {
        let Whose::Ended(mounts) = &self.whose else { return Ok(()) };
        match mounts.iter().any(|mount| real.starts_with(mount)) {
            true => Err(CopyError::unfit(path, "is in a mount, which it has only while it runs")),
            false => Ok(()),
        }
    }
}

/// The path without the slashes before it: the empty path is the root.
fn relative(path: &[u8]) -> &[u8] {
    let slashes = path.iter().take_while(|byte| **byte == b'/').count();
    &path[slashes..]
}

/// The last component, slashes behind it passed over.
fn last(path: &[u8]) -> &[u8] {
    let slashes = path.iter().rev().take_while(|byte| **byte == b'/').count();
    beneath::split(&path[..path.len() - slashes]).1
}

fn stat(fd: BorrowedFd<'_>) -> io::Result<Statx> {
    Ok(rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::BASIC_STATS)?)
}

fn kind(stat: &Statx) -> FileType {
    FileType::from_raw_mode(stat.stx_mode.into())
}

/// Opens what an `O_PATH` descriptor was examined by, and nothing that took its place.
fn reopen(examined: BorrowedFd<'_>, flags: OFlags) -> io::Result<std::os::fd::OwnedFd> {
    use std::os::fd::AsRawFd as _;
    let path = format!("/proc/self/fd/{}", examined.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::CLOEXEC, rustix::fs::Mode::empty())?)
}

/// Whether the kernel makes the files of its filesystem as they are read.
fn is_made_by_the_kernel(fd: impl AsFd) -> io::Result<bool> {
    let kind = rustix::fs::fstatfs(fd)?.f_type;
    Ok(u64::try_from(kind).is_ok_and(|kind| MADE_BY_THE_KERNEL.contains(&(kind & 0xffff_ffff))))
}

#[cfg(test)]
mod tests;
