//! The parts of a state.

use std::ops::Range;

use bytes::Bytes;

use crate::descriptor::{Descriptor, Process};
use crate::lock::Lock;
use crate::plan::Slot;

/// A part of a state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Section {
    /// Memory with its contents. All memory that no section gives is zero.
    Bytes {
        /// Where it is.
        address: u64,
        /// What it holds.
        bytes: Bytes,
    },
    /// Memory to map before any bytes are put there: of the heap or of `mmap`.
    Mapping {
        /// Where it begins.
        address: u64,
        /// Bytes, whole pages.
        length: u64,
        /// `PROT_READ` and `PROT_WRITE`.
        protection: u32,
    },
    /// Memory behind the end of a file that is mapped there: touching it raises SIGBUS.
    PastEnd {
        /// Where it begins.
        address: u64,
        /// Bytes, whole pages.
        length: u64,
        /// `PROT_READ` and `PROT_WRITE`.
        protection: u32,
    },
    /// A thread, whose memory is given by other sections.
    Thread {
        /// Where its stacks and its control block are.
        slot: Slot,
    },
    /// An open descriptor. They are in order of their numbers.
    Descriptor(Descriptor),
    /// Working directory and the like; one at most.
    Process(Process),
    /// A lock on a file, by the number of one of its descriptors.
    Lock(Lock),
}

impl Section {
    /// The memory it is about, if it is about memory.
    pub(crate) fn range(&self) -> Option<Range<u64>> {
        match self {
            Self::Bytes { address, bytes } => Some(*address..*address + bytes.len() as u64),
            Self::Mapping { address, length, .. } | Self::PastEnd { address, length, .. } => {
                Some(*address..*address + *length)
            }
            Self::Thread { .. } | Self::Descriptor(_) | Self::Process(_) | Self::Lock(_) => None,
        }
    }
}
