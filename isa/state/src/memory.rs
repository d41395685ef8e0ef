//! The memory of a captured program: what its sections give, and zeros.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::plan::{self, Quarter, Region};
use crate::section::Section;

/// A view of a state's memory.
#[derive(Clone, Debug)]
pub struct Memory<'a> {
    /// By address; the sections do not overlap.
    pieces: BTreeMap<u64, &'a [u8]>,
}

impl<'a> Memory<'a> {
    pub(crate) fn of(sections: &'a [Section]) -> Self {
        let pieces = sections
            .iter()
            .filter_map(|section| match section {
                Section::Bytes { address, bytes } => Some((*address, &**bytes)),
                Section::Mapping { .. }
                | Section::PastEnd { .. }
                | Section::Thread { .. }
                | Section::Descriptor(_)
                | Section::Process(_)
                | Section::Lock(_) => None,
            })
            .collect();
        Self { pieces }
    }

    /// Reads memory; what no section gives is zero.
    pub fn read(&self, address: u64, into: &mut [u8]) {
        into.fill(0);
        let end = address.saturating_add(into.len() as u64);
        let first = self.pieces.range(..=address).next_back().map_or(address, |(begin, _)| *begin);
        for (&begin, bytes) in self.pieces.range(first..end) {
            let from = begin.max(address);
            let to = (begin + bytes.len() as u64).min(end);
            if from >= to {
                continue;
            }
            // Both ends are within the piece and within `into`, so the differences fit.
            let (Ok(length), Ok(source), Ok(target)) =
                (usize::try_from(to - from), usize::try_from(from - begin), usize::try_from(from - address))
            else {
                continue;
            };
            into[target..target + length].copy_from_slice(&bytes[source..source + length]);
        }
    }

    /// Reads a number of 32 bits.
    #[must_use]
    pub fn u32(&self, address: u64) -> u32 {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    /// Reads a number of 64 bits.
    #[must_use]
    pub fn u64(&self, address: u64) -> u64 {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// The pieces that are not zero, in order of address.
    pub fn pieces(&self) -> impl Iterator<Item = (u64, &'a [u8])> + '_ {
        self.pieces.iter().map(|(address, bytes)| (*address, *bytes))
    }
}

/// What a state's memory is for, in bytes that the file holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Variables.
    pub data: u64,
    /// The heap: bytes in the file.
    pub heap: u64,
    /// The heap: bytes of address space.
    pub heap_mapped: u64,
    /// `mmap`, with the table of mappings: bytes in the file.
    pub mappings: u64,
    /// `mmap`: bytes of address space.
    pub mapped: u64,
    /// Continuation frames of all threads.
    pub continuations: u64,
    /// Data stacks of all threads.
    pub data_stacks: u64,
    /// Control blocks and thread-local variables of all threads.
    pub control: u64,
}

impl Usage {
    /// Adds up the sections of a state.
    #[must_use]
    pub fn of(sections: &[Section]) -> Self {
        let mut usage = Self::default();
        for section in sections {
            let Some(range) = section.range() else { continue };
            let length = range.end - range.start;
            let is_mapping = matches!(section, Section::Mapping { .. } | Section::PastEnd { .. });
            let sum = match (plan::region_of(&range), is_mapping) {
                (Some(Region::Heap), true) => &mut usage.heap_mapped,
                (Some(Region::Map), true) => &mut usage.mapped,
                (Some(Region::Data), false) => &mut usage.data,
                (Some(Region::Heap), false) => &mut usage.heap,
                (Some(Region::Map | Region::MapTable), false) => &mut usage.mappings,
                (Some(Region::Thread(_, Quarter::Continuation)), false) => &mut usage.continuations,
                (Some(Region::Thread(_, Quarter::DataStack)), false) => &mut usage.data_stacks,
                (Some(Region::Thread(_, Quarter::Control)), false) => &mut usage.control,
                _ => continue,
            };
            *sum += length;
        }
        usage
    }
}
