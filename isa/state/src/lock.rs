//! What a state says of a lock on a file: the runtime takes it again in a new process, or refuses
//! (`isa/runtime/private/locks.c`, `reopen.c`).

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use crate::FormatError;
use crate::descriptor;

/// Bytes in front of the path (`struct gw_state_lock`).
pub(crate) const LOCK: usize = 40;

/// Whose a lock is, and of what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// `fcntl`, of the process.
    Process,
    /// `fcntl`, of the open file description.
    Description,
    /// `flock`.
    Whole,
    /// A lease, which cannot be taken again.
    Other,
}

impl LockKind {
    const ALL: [Self; 4] = [Self::Process, Self::Description, Self::Whole, Self::Other];

    fn number(self) -> u32 {
        match self {
            Self::Process => 1,
            Self::Description => 2,
            Self::Whole => 3,
            Self::Other => 4,
        }
    }

    /// As people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Process => "lock",
            Self::Description => "lock of the description",
            Self::Whole => "flock",
            Self::Other => "lease",
        }
    }
}

/// A lock on a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lock {
    /// The number of a descriptor of the file.
    pub number: u32,
    /// Whose it is.
    pub kind: LockKind,
    /// Nobody else may have one; else others may read.
    pub writes: bool,
    /// The first byte.
    pub begin: u64,
    /// How many; 0: up to the end.
    pub length: u64,
    /// The file, on its device.
    pub inode: u64,
    /// Of the file system.
    pub device: u64,
    /// What the kernel called the file.
    pub path: OsString,
}

impl Lock {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(LOCK + self.path.len());
        for field in [self.kind.number(), u32::from(self.writes)] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        for field in [self.begin, self.length, self.inode, self.device] {
            bytes.extend_from_slice(&field.to_le_bytes());
        }
        bytes.extend_from_slice(self.path.as_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8], number: u32, at: (u32, u64)) -> Result<Self, FormatError> {
        let wrong = |why| FormatError::Lock { index: at.0, offset: at.1, number, why };
        let (head, path) = bytes.split_first_chunk::<LOCK>().ok_or_else(|| wrong("is cut off"))?;
        let (word, long) = (|at| descriptor::u32_at(head, at), |at| descriptor::u64_at(head, at));
        let kind = LockKind::ALL.into_iter().find(|known| known.number() == word(0));
        let lock = Self {
            number,
            kind: kind.ok_or_else(|| wrong("is of an unknown kind"))?,
            writes: word(4) == 1,
            begin: long(8),
            length: long(16),
            inode: long(24),
            device: long(32),
            path: OsString::from_vec(path.to_vec()),
        };
        if word(4) > 1 {
            return Err(wrong("has unknown flags"));
        }
        lock.check().map_err(wrong)?;
        Ok(lock)
    }

    pub(crate) fn check(&self) -> Result<(), &'static str> {
        descriptor::path(&self.path)?;
        if i32::try_from(self.number).is_err() {
            return Err("has an impossible number");
        }
        let end = self.begin.checked_add(self.length);
        if end.is_none_or(|end| i64::try_from(end).is_err()) {
            return Err("ends behind the end of any file");
        }
        Ok(())
    }
}
