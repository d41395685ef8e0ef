//! What a state says of the kernel's objects that a program has open: a record for each descriptor, and one for the
//! process. The runtime writes and restores them (`isa/runtime/private/descriptors.c`, `reopen.c`); a new process opens
//! files, directories and devices again, and refuses what has no path to open.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use crate::FormatError;

/// Bytes in front of the path (`struct gw_state_descriptor`).
pub(crate) const DESCRIPTOR: usize = 56;
/// Bytes in front of the working directory (`struct gw_state_process`).
pub(crate) const PROCESS: usize = 8;
/// Bytes of the longest path.
pub(crate) const LONGEST_PATH: usize = 4095;

const INHERITED: u32 = 1;
const DELETED: u32 = 2;
/// A terminal's other end, of which each opening makes a new one.
const PTMX: u64 = 5 << 32 | 2;

/// What a descriptor is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A file with bytes.
    Regular,
    /// A directory.
    Directory,
    /// A character device.
    Character,
    /// A pipe, with a name or without.
    Pipe,
    /// A socket.
    Socket,
    /// An epoll, an eventfd, a timerfd, …
    Other,
}

impl Kind {
    const ALL: [Self; 6] =
        [Self::Regular, Self::Directory, Self::Character, Self::Pipe, Self::Socket, Self::Other];

    fn number(self) -> u32 {
        match self {
            Self::Regular => 1,
            Self::Directory => 2,
            Self::Character => 3,
            Self::Pipe => 4,
            Self::Socket => 5,
            Self::Other => 6,
        }
    }

    /// As people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Regular => "file",
            Self::Directory => "directory",
            Self::Character => "device",
            Self::Pipe => "pipe",
            Self::Socket => "socket",
            Self::Other => "kernel object",
        }
    }
}

/// An open descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Descriptor {
    /// Its number.
    pub number: u32,
    /// What it is of.
    pub kind: Kind,
    /// The program was started with it, as with 0, 1 and 2: a new process has its own.
    pub inherited: bool,
    /// The file had no name any more.
    pub deleted: bool,
    /// `O_…` of arm64, without those that only matter while opening.
    pub flags: u32,
    /// A number with the same position and flags: an inherited one, or the lowest; or its own.
    pub shares: u32,
    /// The position in it.
    pub offset: u64,
    /// Bytes of a regular file.
    pub size: u64,
    /// The file, on its device.
    pub inode: u64,
    /// Of the file system: major number in the upper half, minor in the lower.
    pub device: u64,
    /// Of a device: the same of itself.
    pub special: u64,
    /// What the kernel called it.
    pub path: OsString,
}

/// What the program has beside descriptors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Permissions that new files do not get.
    pub umask: u32,
    /// The working directory.
    pub directory: OsString,
}

impl Descriptor {
    /// Whether a new process can have it: the reason when not. Whether the file is still the same is seen then only.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn opens_again(&self) -> Result<(), &'static str> {
        match self.kind {
            _ if self.inherited || self.shares != self.number => Ok(()),
            Kind::Pipe | Kind::Socket => Err("has another end"),
            Kind::Other => Err("lives in the kernel alone"),
            Kind::Character if self.special == PTMX => Err("would be another terminal"),
            _ if self.deleted => Err("was deleted"),
            Kind::Regular | Kind::Directory | Kind::Character => Ok(()),
        }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let bits = if self.inherited { INHERITED } else { 0 } | if self.deleted { DELETED } else { 0 };
        let mut bytes = Vec::with_capacity(DESCRIPTOR + self.path.len());
        for field in [self.kind.number(), bits, self.flags, self.shares] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        for field in [self.offset, self.size, self.inode, self.device, self.special] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        bytes.extend_from_slice(self.path.as_bytes());
        bytes
    }

    /// Reads a section's bytes. `highest` is the number of the one before.
    pub(crate) fn decode(
        bytes: &[u8],
        number: u32,
        highest: Option<u32>,
        at: (u32, u64),
    ) -> Result<Self, FormatError> {
        let wrong = |why| FormatError::Descriptor { index: at.0, offset: at.1, number, why };
        let (head, path) = bytes.split_first_chunk::<DESCRIPTOR>().ok_or_else(|| wrong("is cut off"))?;
        let kind = u32_at(head, 0);
        let bits = u32_at(head, 4);
        let descriptor = Self {
            number,
            kind: Kind::ALL
                .into_iter()
                .find(|known| known.number() == kind)
                .ok_or_else(|| wrong("is of an unknown kind"))?,
            inherited: bits & INHERITED != 0,
            deleted: bits & DELETED != 0,
            flags: u32_at(head, 8),
            shares: u32_at(head, 12),
            offset: u64_at(head, 16),
            size: u64_at(head, 24),
            inode: u64_at(head, 32),
            device: u64_at(head, 40),
            special: u64_at(head, 48),
            path: OsString::from_vec(path.to_vec()),
        };
        if bits & !(INHERITED | DELETED) != 0 {
            return Err(wrong("has unknown flags"));
        }
        descriptor.check(highest).map_err(wrong)?;
        Ok(descriptor)
    }

    /// What must hold for one alone, and for its number.
    pub(crate) fn check(&self, highest: Option<u32>) -> Result<(), &'static str> {
        path(&self.path)?;
        if i32::try_from(self.number).is_err() {
            return Err("has an impossible number");
        }
        if highest.is_some_and(|highest| self.number <= highest) {
            return Err("is not in ascending order of numbers");
        }
        if i32::try_from(self.shares).is_err() {
            return Err("shares with an impossible number");
        }
        Ok(())
    }
}

impl Process {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(PROCESS + self.directory.len());
        bytes.extend_from_slice(&self.umask.to_le_bytes());
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(self.directory.as_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], at: (u32, u64)) -> Result<Self, FormatError> {
        let wrong = |why| FormatError::Process { index: at.0, offset: at.1, why };
        let (head, directory) = bytes.split_first_chunk::<PROCESS>().ok_or_else(|| wrong("is cut off"))?;
        if u32_at(head, 4) != 0 {
            return Err(wrong("has an unknown field in use"));
        }
        let process = Self { umask: u32_at(head, 0), directory: OsString::from_vec(directory.to_vec()) };
        process.check().map_err(wrong)?;
        Ok(process)
    }

    pub(crate) fn check(&self) -> Result<(), &'static str> {
        path(&self.directory)
    }
}

pub(crate) fn path(path: &OsStr) -> Result<(), &'static str> {
    match path.as_bytes() {
        [] => Err("has no path"),
        path if path.len() > LONGEST_PATH => Err("has a path that is longer than any"),
        path if path.contains(&0) => Err("has a zero in its path"),
        _ => Ok(()),
    }
}

/// The callers' arrays are long enough for the offsets they name.
pub(crate) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

pub(crate) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    bytes[at..].first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}
