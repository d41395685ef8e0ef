//! What a directory has, told to who will send a tree into it and has no memory of what is there.
//!
//! ```text
//!   receiver                         sender
//!   list ───────── Listed… ────────► Listing::add … TreeSender::onto     then rounds as ever
//! ```
//! A name is taken for equal if all that is carried of it is: what stat(2) tells but for change times and inodes, and keyed
//! hashes of its extended attributes, its target and its content. So it does not matter how the directory came to be what
//! it is: a round that broke off, or a program that has written to it, costs what it has changed.
//!
//! Of an inode with several names nothing is taken for equal: a receiver writes into a file in place, and that must be no
//! other file's content.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use prost::Message;
use rustix::fs::FileType;

use super::blocks::{BlockHash, Blocks, MOST_MEMORY, SMALLEST_FILE};
use super::content::{self, Comparing, Reader, Wanted};
use super::item::Item;
use super::send::kind_of;
use super::snapshot::{Changes, Record, Snapshot, has_gone};
use super::{DecodeError, Kind, MAX_ITEM, TreeError, open_root, writeback};
use crate::beneath::{self, Node, Root};

/// Bytes of a hash on the wire.
const HASH: usize = 16;

/// One name of a directory.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Name {
    /// Path below the root; empty for the root.
    #[prost(bytes = "vec", tag = "1")]
    pub path: Vec<u8>,
    /// What it is; never a hard link.
    #[prost(enumeration = "Kind", tag = "2")]
    pub kind: i32,
    /// Permission, setuid, setgid and sticky bits.
    #[prost(uint32, tag = "3")]
    pub mode: u32,
    /// Owner.
    #[prost(uint32, tag = "4")]
    pub uid: u32,
    /// Group.
    #[prost(uint32, tag = "5")]
    pub gid: u32,
    /// Modification time, seconds since 1970.
    #[prost(sint64, tag = "6")]
    pub mtime_seconds: i64,
    /// Modification time, nanoseconds.
    #[prost(uint32, tag = "7")]
    pub mtime_nanoseconds: u32,
    /// Size of a regular file in bytes.
    #[prost(uint64, tag = "8")]
    pub size: u64,
    /// Device number, for devices.
    #[prost(uint32, tag = "9")]
    pub rdev_major: u32,
    /// Device number, for devices.
    #[prost(uint32, tag = "10")]
    pub rdev_minor: u32,
    /// Whether it is an inode with several names.
    #[prost(bool, tag = "11")]
    pub several: bool,
    /// Hash of its extended attributes and its target.
    #[prost(bytes = "vec", tag = "12")]
    pub attributes: Vec<u8>,
    /// Hash of the content of a small file.
    #[prost(bytes = "vec", tag = "13")]
    pub content: Vec<u8>,
    /// Size of the blocks of a large file, whose pieces follow; 0 where they do not.
    #[prost(uint64, tag = "14")]
    pub block: u64,
}

/// Hashes of the blocks of a part of the file before it; parts that are holes are left out.
#[derive(Clone, PartialEq, Eq, Message)]
pub struct Piece {
    /// Which part.
    #[prost(uint64, tag = "1")]
    pub number: u64,
    /// Sixteen bytes for each block.
    #[prost(bytes = "vec", tag = "2")]
    pub hashes: Vec<u8>,
}

/// One piece of what is told of a directory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Listed {
    /// A name.
    Name(Name),
    /// Blocks of the file before.
    Piece(Piece),
}

/// What goes over the wire.
#[derive(Clone, PartialEq, Message)]
struct Envelope {
    #[prost(oneof = "Told", tags = "1, 2")]
    told: Option<Told>,
}

#[derive(Clone, PartialEq, prost::Oneof)]
enum Told {
    #[prost(message, tag = "1")]
    Name(Name),
    #[prost(message, tag = "2")]
    Piece(Piece),
}

impl Listed {
    /// As bytes.
    #[must_use]
    pub fn encode(self) -> Vec<u8> {
        let told = match self {
            Self::Name(name) => Told::Name(name),
            Self::Piece(piece) => Told::Piece(piece),
        };
        Envelope { told: Some(told) }.encode_to_vec()
    }

    /// From the bytes of one.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        if bytes.len() > MAX_ITEM {
            return Err(DecodeError::TooLong { length: bytes.len() });
        }
        match Envelope::decode(bytes)?.told {
            Some(Told::Name(name)) => Ok(Self::Name(name)),
            Some(Told::Piece(piece)) => Ok(Self::Piece(piece)),
            None => Err(DecodeError::Unknown),
        }
    }
}

/// Tells what is below `root`, to which nobody writes; an error where another filesystem begins in it, or where it has more
/// names, or longer ones in all, than these.
pub fn list<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    root: &Path,
    (hash, wanted): (&BlockHash, &Wanted),
    (names, path_bytes): (u64, u64),
    sink: &mut impl FnMut(Listed) -> Result<(), E>,
) -> Result<(), TreeError> {
    let found = Snapshot::scan_at_most(root, true, names, path_bytes)?.ok_or(TreeError::Limit {
        root: root.to_path_buf(),
        limit: names,
        unit: "names",
    })?;
    let found = found.whole()?;
    let mut sink = |listed: Listed| {
        sink(listed).map_err(|error| TreeError::Sink { root: root.to_path_buf(), source: error.into() })
    };
    let top = open_root(root)?;
    let fault = |action: &str, path: &[u8], source| TreeError::Io {
        root: root.to_path_buf(),
        action: action.to_owned(),
        path: beneath::display(path),
        source,
    };
    let mut room = MOST_MEMORY;
    for (path, record) in found.records() {
        let read = || -> io::Result<_> {
            wanted.check()?;
            let node = top.node(path)?;
            let attributes = attributes(&node, record, hash)?;
            Ok((attributes, Content::of(&node, record, (hash, wanted), room)?))
        };
        let (attributes, content) = read().map_err(|error| fault("read", path, error))?;
        let mut name = Name {
            path: path.clone(),
            kind: kind_of(record.file_type).unwrap_or(Kind::Invalid).into(),
            mode: record.mode,
            uid: record.uid,
            gid: record.gid,
            mtime_seconds: i64::try_from(record.mtime.div_euclid(NANOSECONDS)).unwrap_or(0),
            mtime_nanoseconds: u32::try_from(record.mtime.rem_euclid(NANOSECONDS)).unwrap_or(0),
            size: if record.file_type == FileType::RegularFile { record.size } else { 0 },
            rdev_major: record.rdev.0,
            rdev_minor: record.rdev.1,
            several: record.has_names(),
            attributes: attributes.to_le_bytes().to_vec(),
            ..Name::default()
        };
        match content {
            Content::Unknown => sink(Listed::Name(name))?,
            Content::Whole(hash) => {
                name.content = hash.to_le_bytes().to_vec();
                sink(Listed::Name(name))?;
            }
            Content::Blocks(blocks) => {
                room = room.saturating_sub(blocks.memory());
                name.block = blocks.block();
                sink(Listed::Name(name))?;
                for (number, hashes) in blocks.pieces() {
                    let hashes = hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect();
                    sink(Listed::Piece(Piece { number, hashes }))?;
                }
            }
        }
    }
    Ok(())
}

const NANOSECONDS: i128 = 1_000_000_000;

/// What is known of the content of a file.
#[derive(Debug)]
enum Content {
    /// Nothing, or there is none.
    Unknown,
    Whole(u128),
    Blocks(Blocks),
}

impl Content {
    /// Reads a file, for whose blocks there is so much room.
    fn of(
        node: &Node,
        record: &Record,
        (hash, wanted): (&BlockHash, &Wanted),
        room: u64,
    ) -> io::Result<Self> {
        if record.file_type != FileType::RegularFile || record.size == 0 || record.has_names() {
            return Ok(Self::Unknown);
        }
        if record.size < SMALLEST_FILE {
            return Ok(whole(node, record.size)?.map_or(Self::Unknown, |bytes| Self::Whole(hash.of(&bytes))));
        }
        let none = Blocks::default();
        let mut comparing = Comparing { hash: Some(hash), there: &none, is_there: false, room };
        let reader = Reader::open(node, record.size)?.while_wanted(wanted);
        let blocks = Blocks::none(record.inode, record.size, 0);
        let learned = comparing.content(reader, blocks, &mut |_| Ok::<_, io::Error>(()))?;
        Ok(learned.filter(|blocks| blocks.memory() <= room).map_or(Self::Unknown, Self::Blocks))
    }
}

/// The content of a small file; none if it is shorter by now.
fn whole(node: &Node, size: u64) -> io::Result<Option<Vec<u8>>> {
    let file = content::open(node)?;
    writeback::write_back(&file)?;
    let mut bytes = vec![0; usize::try_from(size).map_err(io::Error::other)?];
    match file.read_exact_at(&mut bytes, 0) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

/// Hash of all that is carried of a name and that stat(2) does not tell.
fn attributes(node: &Node, record: &Record, hash: &BlockHash) -> io::Result<u128> {
    let mut bytes = Vec::new();
    let mut add = |word: &[u8]| {
        bytes.extend_from_slice(&(word.len() as u64).to_le_bytes());
        bytes.extend_from_slice(word);
    };
    if record.file_type == FileType::Symlink {
        add(&node.link_target()?);
    }
    for (name, value) in node.xattrs()? {
        add(&name);
        add(&value);
    }
    Ok(hash.of(&bytes))
}

/// What a receiver says that it has.
#[derive(Debug)]
pub struct Listing {
    hash: BlockHash,
    wanted: Wanted,
    names: BTreeMap<Vec<u8>, There>,
    /// Memory for blocks, bytes.
    memory: u64,
    path_bytes: u64,
    most: (u64, u64),
    /// The file whose blocks come.
    open: Option<Vec<u8>>,
}

#[derive(Debug)]
struct There {
    record: Record,
    several: bool,
    attributes: u128,
    content: Content,
}

/// Why a comparison ends before the end of a file.
enum Ended {
    Differs,
    Failed(io::Error),
}

impl From<io::Error> for Ended {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl Listing {
    /// Nothing yet, of a receiver that makes its hashes with this function. At most so many names are taken, and so many
    /// bytes of paths. It is compared with files as long as that is wanted.
    #[must_use]
    pub fn new(hash: BlockHash, wanted: Wanted, most: (u64, u64)) -> Self {
        Self { hash, wanted, names: BTreeMap::new(), memory: 0, path_bytes: 0, most, open: None }
    }

    /// Takes one piece of it, from a receiver that may be hostile. An error says which rule it breaks.
    pub fn add(&mut self, listed: Listed) -> Result<(), &'static str> {
        match listed {
            Listed::Name(name) => self.name(name),
            Listed::Piece(piece) => self.piece(&piece),
        }
    }

    fn name(&mut self, name: Name) -> Result<(), &'static str> {
        beneath::check_path(&name.path)?;
        self.path_bytes = self.path_bytes.saturating_add(name.path.len() as u64);
        if self.names.len() as u64 >= self.most.0 || self.path_bytes > self.most.1 {
            return Err("it has more names than are sent ahead");
        }
        let file_type = match Kind::try_from(name.kind).unwrap_or(Kind::Invalid) {
            Kind::File => FileType::RegularFile,
            Kind::Directory => FileType::Directory,
            Kind::Symlink => FileType::Symlink,
            Kind::CharacterDevice => FileType::CharacterDevice,
            Kind::BlockDevice => FileType::BlockDevice,
            Kind::Fifo => FileType::Fifo,
            Kind::Socket => FileType::Socket,
            Kind::HardLink | Kind::Invalid => return Err("a name is of an unknown kind"),
        };
        let hash = |bytes: &[u8]| bytes.try_into().map(u128::from_le_bytes);
        let attributes = hash(&name.attributes).map_err(|_| "a hash has another length")?;
        let content = match (name.content.as_slice(), name.block) {
            ([], 0) => Content::Unknown,
            (bytes, 0) => Content::Whole(hash(bytes).map_err(|_| "a hash has another length")?),
            ([], block) => {
                let blocks = Blocks::told(name.size, block).ok_or("a file has blocks of an unknown size")?;
                self.grow(blocks.memory())?;
                Content::Blocks(blocks)
            }
            _ => return Err("a file is small and large"),
        };
        self.open = matches!(content, Content::Blocks(_)).then(|| name.path.clone());
        let record = Record {
            file_type,
            mode: name.mode,
            uid: name.uid,
            gid: name.gid,
            inode: 0,
            links: 1,
            size: name.size,
            blocks: 0,
            rdev: (name.rdev_major, name.rdev_minor),
            mtime: i128::from(name.mtime_seconds) * NANOSECONDS + i128::from(name.mtime_nanoseconds),
            ctime: 0,
        };
        let there = There { record, several: name.several, attributes, content };
        match self.names.insert(name.path, there) {
            Some(_) => Err("a name comes twice"),
            None => Ok(()),
        }
    }

    fn piece(&mut self, piece: &Piece) -> Result<(), &'static str> {
        let path = self.open.as_ref().ok_or("blocks come without a file")?;
        let Some(Content::Blocks(blocks)) = self.names.get_mut(path).map(|there| &mut there.content) else {
            return Err("blocks come without a file");
        };
        let (hashes, []) = piece.hashes.as_chunks::<HASH>() else { return Err("a hash has another length") };
        let hashes = hashes.iter().map(|hash| u128::from_le_bytes(*hash)).collect();
        let memory = blocks.learn_told(piece.number, hashes).ok_or("blocks are not of the file")?;
        self.grow(memory)
    }

    fn grow(&mut self, memory: u64) -> Result<(), &'static str> {
        self.memory = self.memory.saturating_add(memory);
        if self.memory > MOST_MEMORY { Err("it tells of more blocks than are remembered") } else { Ok(()) }
    }

    /// Bytes of its files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.names.values().map(|there| there.record.size).fold(0, u64::saturating_add)
    }

    pub(super) fn hash(&self) -> &BlockHash {
        &self.hash
    }

    /// What of it is below each of these paths, no path but in the longest of these; and the topmost names that are in none
    /// of them, and none of those that are `made`.
    pub(super) fn split(self, parts: &[&[u8]], made: &[Vec<u8>]) -> (Vec<Self>, Vec<Vec<u8>>) {
        let new = || Self::new(self.hash.clone(), self.wanted.clone(), self.most);
        let mut split: Vec<Self> = parts.iter().map(|_| new()).collect();
        let mut strays: Vec<Vec<u8>> = Vec::new();
        for (path, there) in self.names {
            let of = parts.iter().enumerate().filter_map(|(nth, at)| Some((nth, below(at, &path)?)));
            match of.min_by_key(|(_, rest)| rest.len()) {
                Some((nth, rest)) => drop(split[nth].names.insert(rest.to_vec(), there)),
                None if path.is_empty() || made.contains(&path) => {}
                // Those below one that goes need no word.
                None if strays.last().is_some_and(|stray| below(stray, &path).is_some()) => {}
                None => strays.push(path),
            }
        }
        (split, strays)
    }

    /// What has to be sent for the receiver to have this snapshot, of the tree below `root`.
    pub(super) fn changes_to(&self, snapshot: &Snapshot, root: &Path) -> Result<Changes, TreeError> {
        let top = open_root(root)?;
        let mut changed = BTreeMap::new();
        for (path, record) in snapshot.records() {
            let same = match self.has(path, record, &top) {
                // The round itself looks again.
                Err(error) if has_gone(&error) => false,
                same => same.map_err(|source| TreeError::Io {
                    root: root.to_path_buf(),
                    action: "compare".into(),
                    path: beneath::display(path),
                    source,
                })?,
            };
            if !same {
                changed.insert(path.clone(), *record);
            }
        }
        let is_there = |path: &[u8]| snapshot.record(path).is_some();
        let gone = self.names.keys().filter(|path| !path.is_empty() && !is_there(path));
        let removed = gone.filter(|path| is_there(beneath::split(path).0)).cloned().collect();
        Ok(Changes { changed, removed, frozen: snapshot.is_frozen() })
    }

    /// Whether the receiver has it as it is.
    fn has(&self, path: &[u8], record: &Record, top: &Root) -> io::Result<bool> {
        let Some(there) = self.names.get(path) else { return Ok(false) };
        if record.has_names() || there.several || !same(record, &there.record) {
            return Ok(false);
        }
        self.wanted.check()?;
        let node = top.node(path)?;
        // The service runs: something else may be there by now, which must not be read.
        if !Record::new(&node.statx()?).same(record) {
            return Ok(false);
        }
        if attributes(&node, record, &self.hash)? != there.attributes {
            return Ok(false);
        }
        if record.file_type != FileType::RegularFile || record.size == 0 {
            return Ok(true);
        }
        match &there.content {
            Content::Unknown => Ok(false),
            Content::Whole(hash) if record.size < SMALLEST_FILE => {
                Ok(whole(&node, record.size)?.is_some_and(|bytes| self.hash.of(&bytes) == *hash))
            }
            Content::Whole(_) => Ok(false),
            Content::Blocks(blocks) => {
                let reader = Reader::open(&node, record.size)?.while_wanted(&self.wanted);
                writeback::write_back(reader.file())?;
                let mut comparing =
                    Comparing { hash: Some(&self.hash), there: blocks, is_there: true, room: 0 };
                let of = blocks.again(record.inode, record.size);
                match comparing.content(reader, of, &mut |_: Item| Err(Ended::Differs)) {
                    Ok(_) => Ok(true),
                    Err(Ended::Differs) => Ok(false),
                    Err(Ended::Failed(error)) => Err(error),
                }
            }
        }
    }

    /// What it says of the content of large files, with the inodes that the files have here: those of their names, or of other
    /// names that have the same size and time. What was renamed so crosses by its blocks; that it is equal is not believed.
    pub(super) fn into_blocks(self, snapshot: &Snapshot) -> Vec<(Vec<u8>, Blocks)> {
        let seen = |record: &Record| (record.size, record.mtime);
        let file = |path: &[u8]| snapshot.record(path).filter(|record| is_single_file(record));
        let renamed: HashMap<_, u64> = snapshot
            .records()
            .iter()
            .filter(|(path, record)| {
                is_single_file(record)
                    && self.names.get(*path).is_none_or(|there| seen(&there.record) != seen(record))
            })
            .map(|(_, record)| (seen(record), record.inode))
            .collect();
        let listed: HashSet<_> = self.names.values().map(|there| seen(&there.record)).collect();
        let inode = |path: &[u8], there: &Record| match (file(path), renamed.get(&seen(there))) {
            (Some(here), _) if seen(here) == seen(there) => here.inode,
            (_, Some(inode)) => *inode,
            (Some(here), None) if !listed.contains(&seen(here)) => here.inode,
            // No file's: what has its name here has another one there.
            _ => 0,
        };
        let inodes: Vec<_> = self.names.iter().map(|(path, there)| inode(path, &there.record)).collect();
        let blocks = self.names.into_iter().zip(inodes).filter_map(|((path, there), inode)| {
            let Content::Blocks(blocks) = there.content else { return None };
            // One of several names is made anew.
            let is_file = there.record.file_type == FileType::RegularFile && !there.several;
            is_file.then(|| (path, blocks.with_inode(inode)))
        });
        blocks.collect()
    }
}

fn is_single_file(record: &Record) -> bool {
    record.file_type == FileType::RegularFile && !record.has_names() && record.size >= SMALLEST_FILE
}

/// Whether all is equal that stat(2) tells and that is carried.
fn same(one: &Record, other: &Record) -> bool {
    let of = |record: &Record| (record.file_type, record.mode, record.uid, record.gid, record.rdev);
    let is_file = one.file_type == FileType::RegularFile;
    of(one) == of(other) && one.mtime == other.mtime && (!is_file || one.size == other.size)
}

/// The rest of a path that is this one or below it.
fn below<'a>(at: &[u8], path: &'a [u8]) -> Option<&'a [u8]> {
    match (at, path.strip_prefix(at)?) {
        ([], rest) => Some(rest),
        (_, []) => Some(&[]),
        (_, rest) => rest.strip_prefix(b"/"),
    }
}
