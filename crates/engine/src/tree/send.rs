//! Reads what changed in a tree and yields it as items, while the tree may go on changing.
//!
//! Nothing that an earlier scan found is believed: each path is examined again when its turn
//! comes. What differs from the scan then, or cannot be sent because it or its directory went
//! away, is named in [`Sent::unsettled`], so that the next round sends it again whatever its
//! times say. (A directory that is renamed away and back leaves its files' times untouched.)

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use super::item::{Data, End, Entry, Item, Kind, MAX_DATA, Remove, Xattr};
use super::snapshot::{Changes, Record, Snapshot, has_gone};
use super::{TreeError, open_root, writeback};
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
pub struct TreeSender {
    root: PathBuf,
    last: Option<Snapshot>,
}

/// A round that is known but not sent.
#[derive(Debug)]
pub struct Round {
    snapshot: Snapshot,
    /// What will be sent.
    pub changes: Changes,
}

impl TreeSender {
    /// The tree below `root`, for a receiver that has nothing of it.
    #[must_use]
    pub fn new(root: &Path) -> Self {
        Self { root: root.to_path_buf(), last: None }
    }

    /// Finds what the receiver lacks. `frozen` says that no process writes to the tree until the round
    /// is sent.
    pub fn next_round(&self, frozen: bool) -> Result<Round, TreeError> {
        let snapshot = if frozen { Snapshot::scan_frozen(&self.root)? } else { Snapshot::scan(&self.root)? };
        let changes = match &self.last {
            Some(last) => snapshot.changes_since(last),
            None => snapshot.everything(),
        };
        Ok(Round { snapshot, changes })
    }

    /// Sends a round; after an error the receiver's copy is useless.
    pub fn send<E: Into<Box<dyn std::error::Error + Send + Sync>>>(
        &mut self,
        round: Round,
        sink: &mut impl FnMut(Item) -> Result<(), E>,
    ) -> Result<Sent, TreeError> {
        let Round { mut snapshot, changes } = round;
        let sent = send(&self.root, &changes, sink)?;
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
    let mut sink = |item: Item| {
        sink(item).map_err(|error| TreeError::Sink { root: root.to_path_buf(), source: error.into() })
    };
    let top = open_root(root)?;
    let mut sender = Sender {
        root,
        top,
        frozen: changes.frozen,
        elsewhere,
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
    let sent = sender.sent;
    sink(Item::End(End { entries: sent.entries, bytes: sent.bytes }))?;
    Ok(sent)
}

struct Sender<'a> {
    root: &'a Path,
    top: Root,
    frozen: bool,
    elsewhere: &'a Elsewhere,
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
        let (size, elsewhere) = (entry.size, entry.content.is_some());
        sink(Item::Entry(entry))?;
        self.sent.entries += 1;
        if record.file_type == FileType::RegularFile && size > 0 && !elsewhere {
            self.content(path, &node, size, sink)?;
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
        };
        Ok(Some((node, entry, record)))
    }

    /// The bytes of a file up to `size`, holes left out. A file that has shrunk ends early.
    fn content(
        &mut self,
        path: &[u8],
        node: &Node,
        size: u64,
        sink: &mut impl FnMut(Item) -> Result<(), TreeError>,
    ) -> Result<(), TreeError> {
        let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::CLOEXEC;
        let file = File::from(
            rustix::fs::openat(CWD, node.magic(), flags, Mode::empty())
                .map_err(|error| self.fault("open", path, error.into()))?,
        );
        if !self.frozen {
            writeback::write_back(&file).map_err(|error| self.fault("write back", path, error))?;
        }
        let mut position = 0;
        while position < size {
            let Some((start, end)) =
                next_data(&file, position, size).map_err(|error| self.fault("find data in", path, error))?
            else {
                break;
            };
            position = start;
            while position < end {
                let wanted = usize::try_from(end - position).unwrap_or(MAX_DATA).min(MAX_DATA);
                let mut bytes = vec![0; wanted];
                let read =
                    file.read_at(&mut bytes, position).map_err(|error| self.fault("read", path, error))?;
                if read == 0 {
                    return Ok(());
                }
                bytes.truncate(read);
                sink(Item::Data(Data { offset: position, bytes }))?;
                position += read as u64;
                self.sent.bytes += read as u64;
            }
        }
        Ok(())
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

/// The next range with data at or after `position` and below `size`.
pub(super) fn next_data(file: &File, position: u64, size: u64) -> io::Result<Option<(u64, u64)>> {
    let start = match rustix::fs::seek(file, SeekFrom::Data(position)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok(None),
        // A filesystem that knows no holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok(Some((position, size))),
        Err(error) => return Err(error.into()),
    };
    let end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
        Ok(end) => end,
        Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    Ok((start < size).then_some((start, end.min(size))))
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
