//! State files byte by byte, also those that no writer would make, with right checksums.

#![allow(dead_code, reason = "each test binary uses some of it")]

use bytes::Bytes;
use godwit_isa_state::plan::{Quarter, Slot};
use godwit_isa_state::{BuildIdentity, HEADER, MAGIC, Section, VERSION};

pub(crate) const BYTES: u32 = 1;
pub(crate) const MAPPING: u32 = 2;
pub(crate) const THREAD: u32 = 3;
pub(crate) const PAST_END: u32 = 4;
pub(crate) const DESCRIPTOR: u32 = 5;
pub(crate) const PROCESS: u32 = 6;
pub(crate) const LOCK: u32 = 7;

/// Writes length and both checksums anew, so that only what is said differs from a sound file.
pub(crate) fn seal(file: &mut [u8]) {
    let length = file.len() as u64;
    file[48..56].copy_from_slice(&length.to_le_bytes());
    let body = crc32c::crc32c(&file[HEADER..]);
    file[56..60].copy_from_slice(&body.to_le_bytes());
    seal_header(file);
}

/// Writes the header's checksum anew.
pub(crate) fn seal_header(file: &mut [u8]) {
    let header = crc32c::crc32c(&file[..60]);
    file[60..64].copy_from_slice(&header.to_le_bytes());
}

/// A section with any field, and what follows its header.
pub(crate) fn raw(kind: u32, value: u32, address: u64, length: u64, contents: &[u8]) -> Vec<u8> {
    let mut section = Vec::new();
    section.extend_from_slice(&kind.to_le_bytes());
    section.extend_from_slice(&value.to_le_bytes());
    section.extend_from_slice(&address.to_le_bytes());
    section.extend_from_slice(&length.to_le_bytes());
    section.extend_from_slice(contents);
    section
}

/// A file of such sections.
pub(crate) fn file(build: [u8; 32], sections: &[Vec<u8>]) -> Vec<u8> {
    let mut file = MAGIC.to_vec();
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(&u32::try_from(sections.len()).expect("few").to_le_bytes());
    file.extend_from_slice(&build);
    file.resize(HEADER, 0);
    file.extend(sections.iter().flatten());
    seal(&mut file);
    file
}

/// Where the sections of a sound file begin, and where the last ends.
pub(crate) fn borders(file: &[u8]) -> Vec<usize> {
    let mut at = HEADER;
    let mut borders = vec![at];
    while at < file.len() {
        let kind = u32::from_le_bytes(file[at..at + 4].try_into().expect("four"));
        let length = u64::from_le_bytes(file[at + 16..at + 24].try_into().expect("eight"));
        let bytes = if [BYTES, DESCRIPTOR, PROCESS, LOCK].contains(&kind) {
            usize::try_from(length).expect("in the file")
        } else {
            0
        };
        at += 24 + bytes.next_multiple_of(8);
        borders.push(at);
    }
    borders
}

/// A parked thread without frames: its section and that of its control block.
pub(crate) fn thread(slot: Slot) -> [Section; 2] {
    let block = slot.control_block();
    let mut bytes = Vec::new();
    bytes.extend_from_slice(&block.to_le_bytes());
    bytes.extend_from_slice(&[0; 8]);
    bytes.extend_from_slice(&slot.quarter(Quarter::DataStack).end.to_le_bytes());
    bytes.extend_from_slice(&slot.quarter(Quarter::Continuation).start.to_le_bytes());
    bytes.extend_from_slice(&[0; 12]);
    bytes.extend_from_slice(&slot.number().to_le_bytes());
    [Section::Thread { slot }, memory(block, &bytes)]
}

/// A section of bytes.
pub(crate) fn memory(address: u64, bytes: &[u8]) -> Section {
    Section::Bytes { address, bytes: Bytes::copy_from_slice(bytes) }
}

/// Any build.
pub(crate) const BUILD: BuildIdentity = BuildIdentity([7; 32]);
