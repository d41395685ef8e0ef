//! Reads what changed in a tree and yields it as items, while the tree may go on changing.
//!
//! Nothing that an earlier scan found is believed: each path is examined again when its turn
//! comes. What differs from the scan then, or cannot be sent because it or its directory went
//! away, is named in [`Sent::unsettled`], so that the next round sends it again whatever its
//! times say. (A directory that is renamed away and back leaves its files' times untouched.)

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::FileType;

use super::blocks::{Beginning, Beginnings, BlockHash, Blocks, Known};
use super::content::{Comparing, Reader};
use super::item::{End, Entry, Hold, Item, Kind, Remove, Xattr};
use super::listing::Listing;
use super::snapshot::{Changes, Record, Snapshot, has_gone};
use super::{TreeError, open_source, writeback};
use crate::beneath::{self, Node, Root};

/// Most bytes of names and values of one path's extended attributes: sixteen of the largest the
/// kernel allows, and half of an item.
pub(super) const MAX_XATTR_TOTAL: usize = 512 << 10;

/// What a round sent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Sent {
    /// Names sent.
    pub entries: u64,
    /// Names removed.
    pub removed: u64,
    /// Bytes of file content.
    pub bytes: u64,
    /// Paths that were not as the scan had found them.
    pub unsettled: Vec<Vec<u8>>,
}

/// A tree that is sent in rounds: keeps what the receiver has.
#[derive(Debug)]
pub(super) struct TreeSender {
    pub(super) root: PathBuf,
    pub(super) last: Option<Snapshot>,
    /// What the receiver has of files, where it takes parts of them.
    pub(super) known: Option<Known>,
    /// Whether the receiver's tree outlives the conversation.
    lasts: bool,
    /// What the receiver says that it has, where nothing has been sent yet.
    onto: Option<Listing>,
    /// What the receiver has for certain, where it lasts, as long as the round that was sent last may not have come.
    certain: Option<Snapshot>,
}

/// A round that is known but not sent.
#[derive(Debug)]
pub(super) struct Round {
    pub(super) snapshot: Snapshot,
    /// What will be sent.
    pub(super) changes: Changes,
    /// How many bytes of content the receiver lacks; of a frozen tree at most so many.
    pub(super) bytes: u64,
}

impl TreeSender {
    /// The tree below `root`, for a receiver that has nothing of it.
    pub(super) fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf(), last: None, known: None, lasts: false, onto: None, certain: None }
    }

    /// The same tree is at this path now.
    pub(super) fn moved_to(&mut self, root: &Path) {
        root.clone_into(&mut self.root);
    }

    /// For a receiver that keeps its tree when a round breaks off: the next one brings that in order. See [`Self::doubted`].
    pub(super) fn lasting(self, lasts: bool) -> Self {
        Self { lasts, ..self }
    }

    /// After a round of which it is not known how much has come, and whatever became of it at the receiver: what it was to
    /// change is sent again, whole. None where it was the first: the receiver has nothing of use.
    pub(super) fn doubted(mut self) -> Option<Self> {
        let certain = self.certain.take()?;
        if let Some(known) = &mut self.known {
            known.keep_certain(&certain);
        }
        self.last = Some(certain);
        Some(self)
    }

    /// The attributes of the root are sent again.
    pub(super) fn doubt_root(&mut self) {
        if let Some(last) = &mut self.last {
            last.doubt(b"");
        }
    }

    /// The last round has come.
    pub(super) fn settle(&mut self) {
        self.certain = None;
    }

    /// Memory that it takes about, bytes.
    pub(super) fn memory(&self) -> u64 {
        let snapshots = self.last.iter().chain(&self.certain).map(Snapshot::memory);
        snapshots.fold(self.known.as_ref().map_or(0, Known::memory), u64::saturating_add)
    }

    /// What the receiver has when the last round has come: names, and bytes of files.
    pub(super) fn there(&self) -> (u64, u64) {
        self.last.as_ref().map_or((0, 0), |last| (last.entries(), last.bytes()))
    }

    /// Sends only the blocks of files that differ from what the receiver has, from the second round on. For a receiver that
    /// takes [`Hold`], [`Hole`], and files that begin with what was there.
    pub(super) fn by_blocks(self, hash: BlockHash) -> Self {
        Self { known: Some(Known::new(hash)), ..self }
    }

    /// For a receiver that says what it has: sends what differs from that, and of large files only blocks that do.
    pub(super) fn onto(self, listing: Listing) -> Self {
        let known = Some(Known::new(listing.hash().clone()));
        Self { known, onto: Some(listing), ..self }
    }

    /// Finds what the receiver lacks; an error where another filesystem begins in the tree. `frozen` says that no process writes to the tree until the round
    /// is sent.
    pub(super) fn next_round(&self, frozen: bool) -> Result<Round, TreeError> {
        let mut round = self.find_round(frozen)?;
        if let Some(known) = self.known.as_ref().filter(|_| !frozen) {
            round.bytes = self.missing(known, &round.changes)?;
        }
        Ok(round)
    }

    /// As [`TreeSender::next_round`], where nobody asks how many bytes will cross, which takes reading all changed files: the
    /// round says at most how many.
    pub(super) fn find_round(&self, frozen: bool) -> Result<Round, TreeError> {
        let snapshot = if frozen { Snapshot::scan_frozen(&self.root)? } else { Snapshot::scan(&self.root)? };
        let snapshot = snapshot.whole()?;
        let changes = match (&self.last, &self.onto) {
            (Some(last), _) => snapshot.changes_since(last),
            (None, Some(there)) => there.changes_to(&snapshot, &self.root)?,
            (None, None) => snapshot.everything(),
        };
        let bytes = changes.bytes();
        Ok(Round { snapshot, changes, bytes })
    }

    /// Compares the changed files with what the receiver has: how many bytes of content it lacks.
    fn missing(&self, known: &Known, changes: &Changes) -> Result<u64, TreeError> {
        let top = open_source(&self.root)?;
        let mut missing = HashMap::new();
        for (path, there) in known.of_changed(changes) {
            let compared = || -> io::Result<u64> {
                let node = top.node(path)?;
                let stat = node.statx()?;
                if FileType::from_raw_mode(stat.stx_mode.into()) != FileType::RegularFile {
                    return Ok(stat.stx_size);
                }
                let blocks = there.again(stat.stx_ino, stat.stx_size);
                let mut bytes = 0;
                let mut comparing = Comparing { hash: Some(known.hash()), there, is_there: true, room: 0 };
                let reader = Reader::open(&node, stat.stx_size)?;
                comparing.content(reader, blocks, &mut |item| {
                    if let Item::Data(data) = item {
                        bytes += data.bytes.len() as u64;
                    }
                    Ok::<_, io::Error>(())
                })?;
                Ok(bytes)
            };
            match compared() {
                Ok(bytes) => drop(missing.insert(path.to_vec(), bytes)),
                // The round itself looks again.
                Err(error) if has_gone(&error) => {}
                Err(source) => {
                    return Err(TreeError::Io {
                        root: self.root.clone(),
                        action: "compare".into(),
                        path: beneath::display(path),
                        source,
                    });
                }
            }
        }
        Ok(changes.bytes_but_for(|path| missing.get(path).copied()))
    }

    /// Sends a round; after an error the receiver's copy is useless, but where it [lasts](Self::lasting).
    pub(super) fn send<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        round: Round,
        sink: &mut impl FnMut(Item) -> Result<(), E>,
    ) -> Result<Sent, TreeError> {
        let Round { mut snapshot, changes, .. } = round;
        if let (Some(there), Some(known)) = (self.onto.take(), &mut self.known) {
            known.learn(there, &snapshot);
        }
        let begun = self.known.as_mut().map(|known| known.begin(&snapshot, &changes)).unwrap_or_default();
        let known = self.known.as_mut().map(|known| (known, begun));
        let before = self.last.take().filter(|_| self.lasts);
        self.certain = before.map(|before| before.doubting(&changes));
        let sent = send_all(&self.root, &changes, &Elsewhere::new(), known, sink)?;
        snapshot.unsettle(&sent);
        self.last = Some(snapshot);
        Ok(sent)
    }
}

/// By their inodes, the numbers of files whose content is sent in another way.
pub type Elsewhere = BTreeMap<u64, u32>;

/// Sends `changes` of the tree below `root` to `sink`, closed by an [`End`]. See [`TreeSender`] for
/// several rounds.
pub fn send<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    root: &Path,
    changes: &Changes,
    sink: &mut impl FnMut(Item) -> Result<(), E>,
) -> Result<Sent, TreeError> {
    send_without(root, changes, &Elsewhere::new(), sink)
}

/// The same, without the content of some files.
pub fn send_without<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    root: &Path,
    changes: &Changes,
    elsewhere: &Elsewhere,
    sink: &mut impl FnMut(Item) -> Result<(), E>,
) -> Result<Sent, TreeError> {
    send_all(root, changes, elsewhere, None, sink)
}

fn send_all<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
    root: &Path,
    changes: &Changes,
    elsewhere: &Elsewhere,
    known: Option<(&mut Known, Beginnings)>,
    sink: &mut impl FnMut(Item) -> Result<(), E>,
) -> Result<Sent, TreeError> {
    let mut sink = |item: Item| {
        sink(item).map_err(|error| TreeError::Sink { root: root.to_path_buf(), source: error.into() })
    };
    let top = open_source(root)?;
    let (known, begun) = match known {
        Some((known, begun)) => (Some(known), begun),
        None => (None, Beginnings::default()),
    };
    for (path, number) in begun.held.into_iter().zip(0..) {
        sink(Item::Hold(Hold { path, number }))?;
    }
    let mut sender = Sender {
        root,
        top,
        frozen: changes.frozen,
        elsewhere,
        known,
        begun: begun.of,
        sent: Sent::default(),
        inodes: HashMap::new(),
        skipped: HashSet::new(),
    };
    for path in &changes.removed {
        sink(Item::Remove(Remove { path: path.clone() }))?;
        sender.sent.removed += 1;
    }
    for (path, record) in &changes.changed {
        sender.path(path, record, &mut sink)?;
    }
    if let Some(known) = &mut sender.known {
        for beginning in sender.begun.values() {
            if let Beginning::Kept(there) | Beginning::Held(_, there) = beginning {
                known.release(there);
            }
        }
    }
    let sent = sender.sent;
    sink(Item::End(End { entries: sent.entries, bytes: sent.bytes }))?;
    Ok(sent)
}

struct Sender<'a> {
    root: &'a Path,
    top: Root,
    frozen: bool,
    elsewhere: &'a Elsewhere,
    known: Option<&'a mut Known>,
    /// With what the content of files begins at the receiver.
    begun: HashMap<Vec<u8>, Beginning>,
    sent: Sent,
    /// Inodes with several names, and the path each was sent as.
    inodes: HashMap<u64, Vec<u8>>,
    /// Paths that were not sent, so that nothing below them can be.
    skipped: HashSet<Vec<u8>>,
}

impl Sender<'_> {
    fn path(
        &mut self,
        path: &[u8],
        scanned: &Record,
        sink: &mut impl FnMut(Item) -> Result<(), TreeError>,
    ) -> Result<(), TreeError> {
        if !path.is_empty() && self.skipped.contains(beneath::split(path).0) {
            self.skip(path);
            return Ok(());
        }
        let Some((node, entry, record)) = self.look(path)? else {
            self.skip(path);
            return Ok(());
        };
        // What is below a directory was scanned only if it was one then.
        if record.file_type != scanned.file_type {
            self.skip(path);
            return Ok(());
        }
        if !record.same(scanned) {
            self.sent.unsettled.push(path.to_vec());
        }
        if record.has_names() {
            if let Some(first) = self.inodes.get(&record.inode) {
                let hard_link_of = first.clone();
                let kind = Kind::HardLink.into();
                sink(Item::Entry(Entry { path: path.to_vec(), kind, hard_link_of, ..Entry::default() }))?;
                self.sent.entries += 1;
                return Ok(());
            }
            self.inodes.insert(record.inode, path.to_vec());
        }
        if record.file_type != FileType::RegularFile || entry.size == 0 || entry.content.is_some() {
            sink(Item::Entry(entry))?;
            self.sent.entries += 1;
            return Ok(());
        }
        let beginning = self.begun.remove(path).unwrap_or_default();
        let (kept, held) = match &beginning {
            Beginning::Empty => (false, None),
            Beginning::Kept(_) => (true, None),
            Beginning::Held(number, _) => (false, Some(*number)),
        };
        let size = entry.size;
        sink(Item::Entry(Entry { kept, held, ..entry }))?;
        self.sent.entries += 1;
        let reader = Reader::open(&node, size).map_err(|error| self.fault("open", path, error))?;
        if !self.frozen {
            writeback::write_back(reader.file()).map_err(|error| self.fault("write back", path, error))?;
        }
        let none = Blocks::default();
        let (there, is_there, blocks) = match (&beginning, &self.known) {
            (Beginning::Kept(there) | Beginning::Held(_, there), _) => {
                (there, true, there.again(record.inode, size))
            }
            (Beginning::Empty, Some(known)) => (&none, false, known.none(record.inode, size)),
            (Beginning::Empty, None) => (&none, false, Blocks::none(record.inode, size, 0)),
        };
        let (mut hash, mut room) =
            self.known.as_ref().map_or((None, 0), |known| (Some(known.hash()), known.room()));
        if self.frozen {
            // No other round will compare.
            room = 0;
            hash = hash.filter(|_| is_there);
        }
        let mut comparing = Comparing { hash, there, is_there, room };
        let mut bytes = 0;
        let blocks = comparing.content(reader, blocks, &mut |item| {
            if let Item::Data(data) = &item {
                bytes += data.bytes.len() as u64;
            }
            sink(item).map_err(Fault::Sink)
        });
        self.sent.bytes += bytes;
        let blocks = match blocks {
            Ok(blocks) => blocks,
            Err(Fault::Sink(error)) => return Err(error),
            Err(Fault::Read(error)) => return Err(self.fault("read", path, error)),
        };
        if let Some(known) = &mut self.known {
            if let Beginning::Kept(there) | Beginning::Held(_, there) = &beginning {
                known.release(there);
            }
            if let Some(blocks) = blocks {
                known.keep(path, blocks);
            }
        }
        Ok(())
    }

    fn skip(&mut self, path: &[u8]) {
        self.skipped.insert(path.to_vec());
        self.sent.unsettled.push(path.to_vec());
    }

    /// The entry for a path as it is now; none when it is gone.
    fn look(&self, path: &[u8]) -> Result<Option<(Node, Entry, Record)>, TreeError> {
        let read = || -> io::Result<_> {
            let node = self.top.node(path)?;
            let stat = node.statx()?;
            let link_target = if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Symlink {
                node.link_target()?
            } else {
                Vec::new()
            };
            let xattrs = node.xattrs()?;
            Ok((node, stat, link_target, xattrs))
        };
        let (node, stat, link_target, xattrs) = match read() {
            Ok(all) => all,
            Err(error) if has_gone(&error) => return Ok(None),
            Err(error) => return Err(self.fault("look at", path, error)),
        };
        let not_carried = |reason| TreeError::NotCarried {
            root: self.root.to_path_buf(),
            path: beneath::display(path),
            reason,
        };
        if xattrs.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>() > MAX_XATTR_TOTAL {
            return Err(not_carried("its extended attributes are larger than 512 KiB together"));
        }
        let record = Record::new(&stat);
        let kind = kind_of(record.file_type).ok_or_else(|| not_carried("it is of an unknown kind"))?;
        let is_device = matches!(kind, Kind::CharacterDevice | Kind::BlockDevice);
        let entry = Entry {
            path: path.to_vec(),
            kind: kind.into(),
            mode: record.mode,
            uid: record.uid,
            gid: record.gid,
            mtime_seconds: stat.stx_mtime.tv_sec,
            mtime_nanoseconds: stat.stx_mtime.tv_nsec,
            xattrs: xattrs.into_iter().map(|(name, value)| Xattr { name, value }).collect(),
            rdev_major: if is_device { record.rdev.0 } else { 0 },
            rdev_minor: if is_device { record.rdev.1 } else { 0 },
            link_target,
            hard_link_of: Vec::new(),
            size: if kind == Kind::File { record.size } else { 0 },
            content: self.elsewhere.get(&record.inode).copied().filter(|_| kind == Kind::File),
            kept: false,
            held: None,
        };
        Ok(Some((node, entry, record)))
    }

    fn fault(&self, action: &str, path: &[u8], source: io::Error) -> TreeError {
        TreeError::Io {
            root: self.root.to_path_buf(),
            action: action.to_owned(),
            path: beneath::display(path),
            source,
        }
    }
}

/// Why the content of a file could not be handed on.
enum Fault {
    Read(io::Error),
    Sink(TreeError),
}

impl From<io::Error> for Fault {
    fn from(error: io::Error) -> Self {
        Self::Read(error)
    }
}

/// The kind an inode of this type is sent as.
pub(super) fn kind_of(file_type: FileType) -> Option<Kind> {
    Some(match file_type {
        FileType::RegularFile => Kind::File,
        FileType::Directory => Kind::Directory,
        FileType::Symlink => Kind::Symlink,
        FileType::CharacterDevice => Kind::CharacterDevice,
        FileType::BlockDevice => Kind::BlockDevice,
        FileType::Fifo => Kind::Fifo,
        FileType::Socket => Kind::Socket,
        FileType::Unknown => return None,
    })
}
