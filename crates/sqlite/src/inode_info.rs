//! `struct unixInodeInfo`: how it is recognized in the memory of a process, and how it is changed.
//!
//! Its layout has been the same since SQLite 3.25 (2018), in processes of 64 bits. SQLite clears it before it is filled, so
//! that its padding is zero.

use godwit_memory::process::{AreaKind, Piece, Process, ProcessError, Reader};
use godwit_memory::tracker::populated;

/// Bytes of the structure, without what only other systems have.
const SIZE: usize = 80;
/// Bytes at its beginning that are the identity (`struct unixFileId`).
const IDENTITY: usize = 16;

/// Members, by their offsets.
const MUTEX: usize = 16;
const SHARED_LOCKS: usize = 24;
const LOCKS: usize = 28;
const LOCK_KIND: usize = 32;
const PROCESS_LOCK: usize = 33;
const PADDING: [std::ops::Range<usize>; 2] = [34..40, 52..56];
const UNUSED: usize = 40;
const REFERENCES: usize = 48;
const SHARED_MEMORY: usize = 56;
const NEXT: usize = 64;
const PREVIOUS: usize = 72;

/// The strongest of SQLite's locks (`EXCLUSIVE_LOCK`).
const STRONGEST: u8 = 4;
/// So many connections to one database no process has.
const MOST: u32 = 1 << 20;
/// Pointers of a process are below this.
const END: u64 = 1 << 56;
/// Of one database more are not looked for: a program has it once for each copy of SQLite in it.
const MOST_PLACES: usize = 16;
/// Of what looks like an identity more is not looked at: a process may fill its memory with it.
const MOST_CANDIDATES: usize = 1 << 16;

/// What a file is known by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Identity {
    /// The device, as stat(2) tells it.
    pub device: u64,
    /// The inode number.
    pub inode: u64,
}

impl Identity {
    fn bytes(self) -> [u8; IDENTITY] {
        let mut bytes = [0; IDENTITY];
        let (device, inode) = bytes.split_at_mut(8);
        device.copy_from_slice(&self.device.to_ne_bytes());
        inode.copy_from_slice(&self.inode.to_ne_bytes());
        bytes
    }
}

/// Where a process remembers each of these files. It reads all of the process's private memory that is of no file: some
/// gigabytes a second.
pub(crate) fn find(
    process: &Process,
    files: &[Identity],
    wanted: &dyn Fn() -> bool,
) -> Result<Vec<Vec<u64>>, ProcessError> {
    let mut places = vec![Vec::new(); files.len()];
    let search = Search::of(files);
    let mut candidates = Vec::new();
    let mut reader = Reader::new();
    for area in process.areas_now()? {
        if area.kind != AreaKind::Private || !area.writable {
            continue;
        }
        for pages in populated(process, &area.range)? {
            let mut pieces = reader.pieces(process, pages);
            while let Some(piece) = pieces.next() {
                if let Piece::Data { start, bytes } = piece?
                    && candidates.len() < MOST_CANDIDATES
                {
                    search.add(start, bytes, &mut candidates);
                }
                if !wanted() {
                    return Ok(places);
                }
            }
        }
    }
    for (index, place) in candidates {
        let (file, places) = (files[index], &mut places[index]);
        if places.len() < MOST_PLACES && is_at(process, place, file)? {
            places.push(place);
        }
    }
    Ok(places)
}

/// A search for several identities at once.
struct Search {
    /// By inode and device; the place in the order of the files.
    sorted: Vec<(u64, u64, usize)>,
    /// The smallest inode and the largest one.
    inodes: std::ops::RangeInclusive<u64>,
    /// By device.
    devices: Vec<(u64, usize)>,
}

impl Search {
    fn of(files: &[Identity]) -> Self {
        let indexed = || files.iter().enumerate();
        let mut sorted: Vec<_> = indexed().map(|(index, file)| (file.inode, file.device, index)).collect();
        sorted.sort_unstable();
        let end = |of: Option<&(u64, u64, usize)>| of.map_or(0, |(inode, ..)| *inode);
        let inodes = end(sorted.first())..=end(sorted.last());
        Self { inodes, sorted, devices: indexed().map(|(index, file)| (file.device, index)).collect() }
    }

    /// Adds the addresses at which one of them may begin.
    fn add(&self, start: u64, bytes: &[u8], found: &mut Vec<(usize, u64)>) {
        let (words, _) = bytes.as_chunks::<8>();
        for (offset, pair) in (start..).step_by(8).zip(words.windows(2)) {
            let inode = u64::from_ne_bytes(pair[1]);
            if !self.inodes.contains(&inode) {
                continue;
            }
            let device = u64::from_ne_bytes(pair[0]);
            let wanted = (inode, device);
            if let Ok(at) = self.sorted.binary_search_by_key(&wanted, |(inode, device, _)| (*inode, *device))
            {
                found.push((self.sorted[at].2, offset));
            }
        }
        // One whose second half is in the next piece.
        if let Some((last, before)) = words.split_last() {
            let device = u64::from_ne_bytes(*last);
            let address = start + before.len() as u64 * 8;
            let begins = self.devices.iter().filter(|(of, _)| *of == device);
            found.extend(begins.map(|(_, index)| (*index, address)));
        }
    }
}

/// Whether the structure of this file is at this place.
pub(crate) fn is_at(process: &Process, place: u64, identity: Identity) -> Result<bool, ProcessError> {
    // Who tells the place may be another node.
    if place >= END {
        return Ok(false);
    }
    let mut bytes = [0; SIZE];
    // It may lie across areas that are read one after the other.
    let mut read = 0;
    while read < SIZE {
        match process.read(place + read as u64, &mut bytes[read..])? {
            0 => return Ok(false),
            more => read += more,
        }
    }
    Ok(bytes.starts_with(&identity.bytes()) && is_inode_info(&bytes))
}

/// Whether what follows an identity is what SQLite has there.
fn is_inode_info(bytes: &[u8; SIZE]) -> bool {
    let number = |at: usize| u32::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
    let is_pointer = |at: usize| {
        let value = u64::from_ne_bytes(std::array::from_fn(|index| bytes[at + index]));
        value == 0 || (4096..END).contains(&value) && value.is_multiple_of(8)
    };
    [MUTEX, UNUSED, SHARED_MEMORY, NEXT, PREVIOUS].into_iter().all(is_pointer)
        && (1..MOST).contains(&number(REFERENCES))
        && number(SHARED_LOCKS) < MOST
        && number(LOCKS) < MOST
        && bytes[LOCK_KIND] <= STRONGEST
        && bytes[PROCESS_LOCK] <= 1
        && PADDING.into_iter().all(|range| bytes[range].iter().all(|byte| *byte == 0))
}

/// Has a process that does not run remember another file at a place where it remembers one; whether it did.
///
/// A page that has yet to come is waited for: not for an asynchronous thread.
///
/// # Errors
/// [`ProcessError::Gone`] when the process has ended.
pub fn correct(process: &Process, place: u64, from: Identity, to: Identity) -> Result<bool, ProcessError> {
    let is_there = is_at(process, place, from)?;
    if is_there {
        process.write(place, &to.bytes())?;
    }
    Ok(is_there)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FILE: Identity = Identity { device: 0x803, inode: 131_842 };

    /// The structure of a database with a connection, at which another one is.
    fn example() -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        bytes[..IDENTITY].copy_from_slice(&FILE.bytes());
        bytes[MUTEX..MUTEX + 8].copy_from_slice(&0x5555_1234_5678_u64.to_ne_bytes());
        bytes[NEXT..NEXT + 8].copy_from_slice(&0x7fff_1234_5678_u64.to_ne_bytes());
        bytes[REFERENCES] = 1;
        bytes
    }

    #[test]
    fn what_is_not_as_sqlite_has_it_is_not_taken_for_it() {
        assert!(is_inode_info(&example()));
        let differs = |at: usize, value: u8| {
            let mut bytes = example();
            bytes[at] = value;
            bytes
        };
        // No pointer, none below the first page, none of this size; locks that there are not; padding that is used.
        for (at, value) in [
            (MUTEX, 1),
            (UNUSED, 8),
            (PREVIOUS + 7, 1),
            (LOCK_KIND, 5),
            (PROCESS_LOCK, 2),
            (34, 1),
            (55, 1),
            (REFERENCES, 0),
            (REFERENCES + 3, 1),
            (LOCKS + 3, 0x80),
        ] {
            assert!(!is_inode_info(&differs(at, value)), "{at}: {value}");
        }
        // As struct stat goes on: the number of links, the mode and the owner, the size.
        let mut stat = differs(MUTEX, 1);
        stat[MUTEX + 1..MUTEX + 8].fill(0);
        assert!(!is_inode_info(&stat));
    }

    #[test]
    fn an_identity_is_found_at_each_word_and_where_a_piece_ends() {
        let mut bytes = vec![0; 4096];
        bytes[8..24].copy_from_slice(&FILE.bytes());
        bytes[4088..].copy_from_slice(&FILE.bytes()[..8]);
        // Not at a word.
        bytes[100..116].copy_from_slice(&FILE.bytes());
        let mut found = Vec::new();
        Search::of(&[Identity { device: 0, inode: 7 }, FILE]).add(0x1000, &bytes, &mut found);
        assert_eq!(found, [(1, 0x1008), (1, 0x1ff8)]);
    }
}
