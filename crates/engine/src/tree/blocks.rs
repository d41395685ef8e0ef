//! What a receiver has of the content of files, block by block, so that only blocks that differ are sent again.
//!
//! A block is known by its hash. What the receiver has is what was sent, whatever the file was when it was read; so a
//! file that was written meanwhile is compared with that, and no time and no inode number is relied on for it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use rustix::fs::FileType;

use super::item::MAX_DATA;
use super::listing::Listing;
use super::snapshot::{Changes, Record, Snapshot};

/// Makes the hash of a block. Two blocks with the same hash are taken for equal.
#[derive(Clone)]
pub struct BlockHash(Arc<Hash>);

type Hash = dyn Fn(&[u8]) -> u128 + Send + Sync;

/// A file is read in pieces of this size, bytes: a whole number of blocks.
pub(super) const PIECE: u64 = MAX_DATA as u64;

/// Size of a block of a small file, bytes: a page, as the page cache writes it.
const SMALLEST_BLOCK: u64 = 4096;

/// A file has larger blocks when it would have more than these.
const MOST_BLOCKS_OF_ONE: u64 = 256 << 10;

/// Files have larger blocks when all together would have more than these.
const MOST_BLOCKS: u64 = 4 << 20;

/// Memory for what is known of all files, bytes, more than [`MOST_BLOCKS`] take. Further files are sent whole.
pub(super) const MOST_MEMORY: u64 = 128 << 20;

/// What a file takes of it beside its pieces, and a piece beside its hashes, bytes: entries of two maps. Paths are not
/// counted: the snapshot has them, too.
const FILE_MEMORY: u64 = 512;
const PIECE_MEMORY: u64 = 64;

/// A smaller file is sent whole, bytes: names and times cost as much.
pub(super) const SMALLEST_FILE: u64 = 64 << 10;

/// Stands for the hash of a block that is a hole.
pub(super) const HOLE: u128 = 0;

/// The blocks that a receiver has of one file.
#[derive(Debug, Clone, Default)]
pub(super) struct Blocks {
    inode: u64,
    size: u64,
    block: u64,
    /// Hashes of the blocks of each piece that is not one hole, by the piece's number.
    pieces: BTreeMap<u64, Box<[u128]>>,
}

/// What a receiver has of all files.
#[derive(Debug)]
pub(super) struct Known {
    hash: BlockHash,
    files: BTreeMap<Vec<u8>, Blocks>,
    /// Memory that they take, bytes.
    memory: u64,
    /// Size of the smallest blocks of files that are new.
    block: u64,
}

/// With what the content of a file begins at the receiver, before anything of it is sent.
#[derive(Debug, Default)]
pub(super) enum Beginning {
    /// Nothing.
    #[default]
    Empty,
    /// What the path has.
    Kept(Blocks),
    /// What the receiver was told to hold under this number.
    Held(u32, Blocks),
}

/// Beginnings of a round's files by their paths, and the paths of what is to be held, by number.
#[derive(Debug, Default)]
pub(super) struct Beginnings {
    pub(super) of: HashMap<Vec<u8>, Beginning>,
    pub(super) held: Vec<Vec<u8>>,
}

impl BlockHash {
    /// A function that makes different hashes of different blocks, also where who wrote the blocks wants it otherwise.
    pub fn new(hash: impl Fn(&[u8]) -> u128 + Send + Sync + 'static) -> Self {
        Self(Arc::new(hash))
    }

    pub(super) fn of(&self, block: &[u8]) -> u128 {
        (self.0)(block).max(HOLE + 1)
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("BlockHash")
    }
}

impl Blocks {
    /// Of a file of this size, of which nothing has been sent, in blocks of this size or larger ones.
    pub(super) fn none(inode: u64, size: u64, block: u64) -> Self {
        Self { inode, size, block: block_for(size, MOST_BLOCKS_OF_ONE).max(block), pieces: BTreeMap::new() }
    }

    /// The same after this was there: with blocks of its size.
    pub(super) fn again(&self, inode: u64, size: u64) -> Self {
        Self { inode, size, block: self.block, pieces: BTreeMap::new() }
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// The offsets and lengths of the blocks of a piece.
    pub(super) fn of_piece(&self, piece: u64) -> impl Iterator<Item = (u64, u64)> {
        let (size, block) = (self.size, self.block);
        let (start, end) = (piece * PIECE, size.min((piece + 1) * PIECE));
        (0..)
            .map(move |number| start + number * block)
            .take_while(move |offset| *offset < end)
            .map(move |offset| (offset, block.min(size - offset)))
    }

    /// The first piece from this one on that is not one hole.
    pub(super) fn next_piece(&self, from: u64) -> Option<u64> {
        self.pieces.range(from..).next().map(|(piece, _)| *piece)
    }

    /// The size of each.
    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// The hashes of each piece that is not one hole.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (u64, &[u128])> {
        self.pieces.iter().map(|(number, hashes)| (*number, &**hashes))
    }

    /// Those that another node tells of, none of which has come yet; none where there are no such blocks.
    pub(super) fn told(size: u64, block: u64) -> Option<Self> {
        let is_one = block.is_power_of_two() && (SMALLEST_BLOCK..=PIECE).contains(&block);
        // No file is larger.
        let is_size = i64::try_from(size).is_ok();
        (is_one && is_size).then(|| Self { inode: 0, size, block, pieces: BTreeMap::new() })
    }

    /// Those of a piece, as another node tells. How much memory that takes, bytes; none where the file has no such piece.
    pub(super) fn learn_told(&mut self, piece: u64, hashes: Vec<u128>) -> Option<u64> {
        let is_there = piece.checked_mul(PIECE).is_some_and(|start| start < self.size);
        let is_whole = is_there && self.of_piece(piece).count() == hashes.len();
        (is_whole && !self.pieces.contains_key(&piece)).then(|| self.learn(piece, hashes))
    }

    /// The same of a file that has this inode here.
    pub(super) fn with_inode(self, inode: u64) -> Self {
        Self { inode, ..self }
    }

    /// Whether the block at `offset` has this hash.
    pub(super) fn has(&self, (offset, length): (u64, u64), hash: u128) -> bool {
        if offset >= self.size {
            return hash == HOLE;
        }
        let hashes = self.pieces.get(&(offset / PIECE));
        let found = hashes.and_then(|hashes| hashes.get(usize::try_from(offset % PIECE / self.block).ok()?));
        self.block.min(self.size - offset) == length && *found.unwrap_or(&HOLE) == hash
    }

    /// The receiver has these blocks of a piece, all of them. How much memory that takes, bytes.
    pub(super) fn learn(&mut self, piece: u64, hashes: Vec<u128>) -> u64 {
        let memory = piece_memory(&hashes);
        self.pieces.insert(piece, hashes.into_boxed_slice());
        memory
    }

    /// Memory that they take, bytes.
    pub(super) fn memory(&self) -> u64 {
        FILE_MEMORY + self.pieces.values().map(|hashes| piece_memory(hashes)).sum::<u64>()
    }
}

fn piece_memory(hashes: &[u128]) -> u64 {
    PIECE_MEMORY + size_of_val(hashes) as u64
}

/// The smallest size of blocks of which so many bytes have no more than these, or a piece.
fn block_for(bytes: u64, most: u64) -> u64 {
    let mut block = SMALLEST_BLOCK;
    while block < PIECE && bytes / block > most {
        block *= 2;
    }
    block
}

impl Known {
    pub(super) fn new(hash: BlockHash) -> Self {
        Self { hash, files: BTreeMap::new(), memory: 0, block: SMALLEST_BLOCK }
    }

    pub(super) fn hash(&self) -> &BlockHash {
        &self.hash
    }

    /// Nothing of a file that is new.
    pub(super) fn none(&self, inode: u64, size: u64) -> Blocks {
        Blocks::none(inode, size, self.block)
    }

    /// How much memory there is for one more file, bytes.
    pub(super) fn room(&self) -> u64 {
        MOST_MEMORY.saturating_sub(self.memory)
    }

    /// The receiver has this file now.
    pub(super) fn keep(&mut self, path: &[u8], blocks: Blocks) {
        let memory = blocks.memory();
        if blocks.size >= SMALLEST_FILE && memory <= self.room() {
            self.memory += memory;
            self.files.insert(path.to_vec(), blocks);
        }
    }

    /// The receiver says that it has these.
    pub(super) fn learn(&mut self, listing: Listing, snapshot: &Snapshot) {
        for (path, blocks) in listing.into_blocks(snapshot) {
            self.keep(&path, blocks);
        }
    }

    /// What a file began with is needed no more.
    pub(super) fn release(&mut self, blocks: &Blocks) {
        self.memory = self.memory.saturating_sub(blocks.memory());
    }

    /// Memory that it takes, bytes.
    pub(super) fn memory(&self) -> u64 {
        self.memory
    }

    /// Forgets all files but those that the receiver has for certain.
    pub(super) fn keep_certain(&mut self, certain: &Snapshot) {
        self.files.retain(|path, _| certain.is_settled(path));
        // What began a round that broke off was not released.
        self.memory = self.files.values().map(Blocks::memory).fold(0, u64::saturating_add);
    }

    fn by_inode(&self) -> HashMap<u64, Vec<u8>> {
        self.files.iter().map(|(path, blocks)| (blocks.inode, path.clone())).collect()
    }

    /// With what the files begin that are changed between the last round and this snapshot. What is known of them is
    /// forgotten, and of all that is not there any more.
    pub(super) fn begin(&mut self, snapshot: &Snapshot, changes: &Changes) -> Beginnings {
        let mut begun = Beginnings::default();
        if !changes.frozen {
            self.block = block_for(snapshot.bytes(), MOST_BLOCKS);
        }
        let by_inode = self.by_inode();
        let may_begin = |record: &Record| is_file(record) && record.size >= SMALLEST_FILE;
        // Of a file with several names the first one brings the content.
        let mut seen = HashSet::new();
        let files: Vec<(&Vec<u8>, &Record)> = changes
            .changed
            .iter()
            .filter(|(_, record)| may_begin(record) && seen.insert(record.inode))
            .collect();
        // First those that the receiver has under another name, which may be in use for another file now.
        for (path, record) in &files {
            let Some(was) = by_inode.get(&record.inode).filter(|was| was != path) else { continue };
            let is_there = snapshot.record(was).is_some_and(|there| there.inode == record.inode);
            if is_there && !changes.changed.contains_key(was) {
                continue;
            }
            let Ok(number) = u32::try_from(begun.held.len()) else { break };
            if let Some(blocks) = self.files.remove(was) {
                begun.held.push(was.clone());
                begun.of.insert((*path).clone(), Beginning::Held(number, blocks));
            }
        }
        for (path, _) in &files {
            if !begun.of.contains_key(*path)
                && let Some(blocks) = self.files.remove(*path)
            {
                begun.of.insert((*path).clone(), Beginning::Kept(blocks));
            }
        }
        let is_there =
            |path: &[u8]| !changes.changed.contains_key(path) && snapshot.record(path).is_some_and(is_file);
        let gone: Vec<Vec<u8>> = self.files.keys().filter(|path| !is_there(path)).cloned().collect();
        for blocks in gone.iter().filter_map(|path| self.files.remove(path)).collect::<Vec<_>>() {
            self.release(&blocks);
        }
        begun
    }

    /// What the receiver has of these changed files, under whatever name; of one with several names once.
    pub(super) fn of_changed<'a>(&'a self, changes: &'a Changes) -> Vec<(&'a [u8], &'a Blocks)> {
        let by_inode = self.by_inode();
        let mut seen = HashSet::new();
        let files = changes.changed.iter().filter(|(_, record)| is_file(record) && seen.insert(record.inode));
        files
            .filter_map(|(path, record)| {
                let named = by_inode.get(&record.inode).and_then(|was| self.files.get(was));
                Some((path.as_slice(), named.or_else(|| self.files.get(path))?))
            })
            .collect()
    }
}

fn is_file(record: &Record) -> bool {
    record.file_type == FileType::RegularFile
}
