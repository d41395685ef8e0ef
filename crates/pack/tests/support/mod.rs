//! Programs as godwit-cc writes them, with nothing in them.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};

use godwit_pack::Set;

/// The ELF machines of the sets.
pub(crate) const MACHINES: [u16; 2] = [62, 183];
/// Where the build identity is in an executable of the tests.
pub(crate) const IDENTITY: usize = 0x1000;

/// An executable that maps nothing but its record.
pub(crate) fn executable(machine: u16) -> Vec<u8> {
    let mut file = vec![0; 0x1050];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    for (at, half) in [(16, 2), (18, machine), (52, 64), (54, 56), (56, 1)] {
        put(at, &half.to_le_bytes());
    }
    // The version, and a part that is loaded and may be written.
    for (at, word) in [(20, 1), (64, 1), (68, 6_u32)] {
        put(at, &word.to_le_bytes());
    }
    // Where the headers of parts are; offset, address, and bytes in the file and in memory of the one.
    for (at, long) in [(32, 64), (72, 0x1000), (80, 0x7000_0000), (96, 0x50), (104, 0x50_u64)] {
        put(at, &long.to_le_bytes());
    }
    put(IDENTITY, &[9; 32]);
    put(IDENTITY + 32, b"GODWREST\x01");
    file
}

/// A program of godwit-cc's in a directory; its path without a suffix.
pub(crate) fn program(directory: &Path, name: &str) -> PathBuf {
    let file = directory.join(name);
    for (set, machine) in Set::ALL.into_iter().zip(MACHINES) {
        fs::write(of_set(&file, set), executable(machine)).unwrap();
    }
    file
}

pub(crate) fn of_set(file: &Path, set: Set) -> PathBuf {
    format!("{}.{}", file.display(), set.name()).into()
}

/// This machine's place in [`Set::ALL`], and the other one's.
pub(crate) fn places() -> (usize, usize) {
    match Set::native() {
        Some(Set::Aarch64) => (1, 0),
        _ => (0, 1),
    }
}
