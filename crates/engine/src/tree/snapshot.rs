//! What a tree looked like at one time, and what differs since another time.
//!
//! A path counts as changed when anything stat(2) tells of it differs, or when its change time is
//! so young that a later write in the same clock tick would have left it as it is: not older than
//! the start of the earlier scan less [`CLOCK_MARGIN_NANOSECONDS`]. A write through a shared
//! mapping moves the change time only on the first write to a page since the page was written
//! back; [`super::send()`] therefore writes a file's pages back before it reads them, and the rule
//! holds for such writes too (on filesystems that write back; not on tmpfs).

use std::collections::{BTreeMap, HashSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, FileType, OFlags, Statx, StatxFlags};
use rustix::io::Errno;

use super::{Elsewhere, Sent, TreeError, open_root};
use crate::beneath::{self, Links, MAX_PATH, Root};

/// How far the clock that files are stamped with may stay behind the precise one: it moves once a
/// timer tick, 10 ms at the lowest rate kernels are built with; twice that.
const CLOCK_MARGIN_NANOSECONDS: i128 = 20_000_000;

/// The change time of what is to be sent again whatever its times say.
const UNSETTLED: i128 = i128::MIN;

/// A file up to this size may be kept in its inode and have no blocks.
const INLINE_BYTES: u64 = 4096;

/// What stat(2) tells of one path.
#[derive(Debug, Clone, Copy)]
pub(super) struct Record {
    pub(super) file_type: FileType,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) inode: u64,
    pub(super) links: u32,
    pub(super) size: u64,
    pub(super) blocks: u64,
    pub(super) rdev: (u32, u32),
    /// Nanoseconds since 1970.
    pub(super) mtime: i128,
    /// Nanoseconds since 1970.
    pub(super) ctime: i128,
}

impl Record {
    /// Whether nothing shows a change. The blocks on disk are left out: they move when the kernel
    /// writes back, long after the write.
    pub(super) fn same(&self, other: &Self) -> bool {
        let identity = |record: &Self| (record.file_type, record.inode, record.links, record.rdev);
        let attributes = |record: &Self| (record.mode, record.uid, record.gid, record.size);
        identity(self) == identity(other)
            && attributes(self) == attributes(other)
            && (self.mtime, self.ctime) == (other.mtime, other.ctime)
    }

    pub(super) fn new(stat: &Statx) -> Self {
        let nanoseconds = |time: rustix::fs::StatxTimestamp| {
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        Self {
            file_type: FileType::from_raw_mode(stat.stx_mode.into()),
            mode: u32::from(stat.stx_mode) & 0o7777,
            uid: stat.stx_uid,
            gid: stat.stx_gid,
            inode: stat.stx_ino,
            links: stat.stx_nlink,
            size: stat.stx_size,
            blocks: stat.stx_blocks,
            rdev: (stat.stx_rdev_major, stat.stx_rdev_minor),
            mtime: nanoseconds(stat.stx_mtime),
            ctime: nanoseconds(stat.stx_ctime),
        }
    }

    /// Whether it is an inode that has several names.
    pub(super) fn has_names(&self) -> bool {
        self.links > 1 && self.file_type != FileType::Directory
    }
}

/// A tree as it was found by one walk.
#[derive(Debug, Clone)]
pub struct Snapshot {
    root: PathBuf,
    /// When the walk began, nanoseconds since 1970.
    started: i128,
    frozen: bool,
    records: BTreeMap<Vec<u8>, Record>,
    /// A directory in it where another filesystem begins, if there is one.
    other: Option<Vec<u8>>,
}

/// What has to be sent to bring a copy of an earlier state up to date.
#[derive(Debug, Clone, Default)]
pub struct Changes {
    /// Paths that are new or changed, parents first.
    pub(super) changed: BTreeMap<Vec<u8>, Record>,
    /// Topmost paths that are gone.
    pub(super) removed: Vec<Vec<u8>>,
    /// Whether nobody writes to the tree, so that nothing has to be written back first.
    pub(super) frozen: bool,
}

impl Changes {
    /// Whether there is nothing to send.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changed.is_empty() && self.removed.is_empty()
    }

    /// How many paths are new or changed.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.changed.len() as u64
    }

    /// Bytes of the paths that are new or changed.
    #[must_use]
    pub fn path_bytes(&self) -> u64 {
        self.changed.keys().map(|path| path.len() as u64).fold(0, u64::saturating_add)
    }

    /// How many paths are gone, those below a directory that is gone not counted.
    #[must_use]
    pub fn removals(&self) -> u64 {
        self.removed.len() as u64
    }

    /// Bytes that the files to be sent have on disk: an estimate of what [`super::send()`] will
    /// yield, too low only where the filesystem compresses. Holes are not counted, files with
    /// several names once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes_but_for(|_| None)
    }

    /// The same, where of some files it is known how many bytes of them are missing.
    pub(super) fn bytes_but_for(&self, missing: impl Fn(&[u8]) -> Option<u64>) -> u64 {
        bytes_of(&self.changed, missing)
    }
}

fn bytes_of(records: &BTreeMap<Vec<u8>, Record>, missing: impl Fn(&[u8]) -> Option<u64>) -> u64 {
    let mut counted = HashSet::new();
    let files = records.iter().filter(|(_, record)| record.file_type == FileType::RegularFile);
    files
        .filter(|(_, record)| record.links < 2 || counted.insert(record.inode))
        .map(|(path, record)| {
            let all = record.size.min(record.blocks.saturating_mul(512).max(INLINE_BYTES));
            missing(path).unwrap_or(all)
        })
        .fold(0, u64::saturating_add)
}

impl Snapshot {
    /// Walks the tree below `root` while others may write to it. It stays on the filesystem of
    /// the root: a directory on another one is taken as empty.
    pub fn scan(root: &Path) -> Result<Self, TreeError> {
        Self::walk_all(root, false)
    }

    /// As [`Snapshot::scan`], for a tree that nobody writes to until it is sent: sending needs no
    /// write-back then and is quicker.
    pub fn scan_frozen(root: &Path) -> Result<Self, TreeError> {
        Self::walk_all(root, true)
    }

    /// As [`Snapshot::scan`], or, if `frozen`, as [`Snapshot::scan_frozen`]; none of a tree with more paths than `entries`,
    /// or with paths of more bytes in all.
    pub fn scan_at_most(
        root: &Path,
        frozen: bool,
        entries: u64,
        path_bytes: u64,
    ) -> Result<Option<Self>, TreeError> {
        Self::walk(root, frozen, entries, path_bytes)
    }

    /// All of the tree, for a receiver that has nothing.
    #[must_use]
    pub fn everything(&self) -> Changes {
        Changes { changed: self.records.clone(), removed: Vec::new(), frozen: self.frozen }
    }

    /// What is new, changed or gone since `earlier`, a scan of the same tree.
    #[must_use]
    pub fn changes_since(&self, earlier: &Self) -> Changes {
        let certain_before = earlier.started - CLOCK_MARGIN_NANOSECONDS;
        let unchanged = |path: &Vec<u8>, record: &Record| {
            record.ctime < certain_before && earlier.records.get(path).is_some_and(|was| was.same(record))
        };
        let mut changed: BTreeMap<Vec<u8>, Record> = self
            .records
            .iter()
            .filter(|(path, record)| !unchanged(path, record))
            .map(|(path, record)| (path.clone(), *record))
            .collect();
        // A changed inode is made anew at the receiver, so all of its names have to come again.
        let inodes: HashSet<u64> =
            changed.values().filter(|record| record.has_names()).map(|record| record.inode).collect();
        for (path, record) in &self.records {
            if record.has_names() && inodes.contains(&record.inode) {
                changed.insert(path.clone(), *record);
            }
        }
        let is_top = |path: &[u8]| self.records.contains_key(beneath::split(path).0);
        let gone = earlier.records.keys().filter(|path| !self.records.contains_key(*path));
        let removed = gone.filter(|path| is_top(path)).cloned().collect();
        Changes { changed, removed, frozen: self.frozen }
    }

    /// Refuses a tree in which another filesystem begins, or a subvolume: what is there would be missing from a copy.
    pub fn whole(self) -> Result<Self, TreeError> {
        match &self.other {
            None => Ok(self),
            Some(path) => Err(TreeError::NotWhole { path: beneath::display(path), root: self.root }),
        }
    }

    /// Whether nobody writes to the tree.
    pub(super) fn is_frozen(&self) -> bool {
        self.frozen
    }

    /// What was found at a path.
    pub(super) fn record(&self, path: &[u8]) -> Option<&Record> {
        self.records.get(path)
    }

    /// Makes [`Snapshot::changes_since`] this snapshot name again what a send of it could not send
    /// as it was found.
    pub fn unsettle(&mut self, sent: &Sent) {
        for path in &sent.unsettled {
            if let Some(record) = self.records.get_mut(path) {
                record.ctime = UNSETTLED;
            }
        }
    }

    /// What a receiver that had this has for certain while these changes are on their way: what they touch is named again by
    /// [`Snapshot::changes_since`] this, or as gone.
    pub(super) fn doubting(mut self, changes: &Changes) -> Self {
        for path in &changes.removed {
            let below = [path, &b"/"[..]].concat();
            let range = self.records.range_mut(path.clone()..);
            // What begins with it may be another name, and lie between.
            for (_, record) in range
                .take_while(|(at, _)| at.starts_with(path))
                .filter(|(at, _)| *at == path || at.starts_with(&below))
            {
                record.ctime = UNSETTLED;
            }
        }
        for (path, record) in &changes.changed {
            self.records.insert(path.clone(), Record { ctime: UNSETTLED, ..*record });
        }
        // The receiver sets the times of their directories in the end.
        for path in changes.removed.iter().chain(changes.changed.keys()).filter(|path| !path.is_empty()) {
            if let Some(record) = self.records.get_mut(beneath::split(path).0) {
                record.ctime = UNSETTLED;
            }
        }
        self
    }

    /// [`Snapshot::changes_since`] this names the path again.
    pub(super) fn doubt(&mut self, path: &[u8]) {
        if let Some(record) = self.records.get_mut(path) {
            record.ctime = UNSETTLED;
        }
    }

    /// Whether a receiver that has this has the path as it was found.
    pub(super) fn is_settled(&self, path: &[u8]) -> bool {
        self.record(path).is_some_and(|record| record.ctime != UNSETTLED)
    }

    /// Memory that it takes about, bytes.
    pub(super) fn memory(&self) -> u64 {
        let of = |path: &Vec<u8>| (path.len() + size_of::<Vec<u8>>() + size_of::<Record>()) as u64;
        self.records.keys().map(of).fold(0, u64::saturating_add)
    }

    /// How many paths the tree has, the root included.
    #[must_use]
    pub fn entries(&self) -> u64 {
        self.records.len() as u64
    }

    /// Bytes the tree's files take on disk, files with several names counted once.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        bytes_of(&self.records, |_| None)
    }

    /// The regular files that take at least so many bytes, not opened (`O_PATH`); at most `most`, the largest. Those with
    /// file capabilities are left out: whoever writes to such a file takes them away.
    pub fn large_files(&self, least: u64, most: usize) -> Result<Vec<OwnedFd>, TreeError> {
        let mut seen = HashSet::new();
        let mut large: Vec<_> = self
            .records
            .iter()
            .filter(|(_, record)| record.file_type == FileType::RegularFile)
            .map(|(path, record)| (record.size.min(record.blocks.saturating_mul(512)), path, record.inode))
            .filter(|(bytes, _, inode)| *bytes >= least && seen.insert(*inode))
            .collect();
        large.sort_unstable_by_key(|(bytes, ..)| std::cmp::Reverse(*bytes));
        let root = open_root(&self.root)?;
        let mut files = Vec::new();
        for (_, path, inode) in large.into_iter().take(most) {
            let open = || -> io::Result<Option<OwnedFd>> {
                let node = root.node(path)?;
                let stat = node.statx()?;
                let same = Record::new(&stat).file_type == FileType::RegularFile && stat.stx_ino == inode;
                Ok((same && !node.has_capabilities()?).then(|| node.into()))
            };
            match open() {
                Ok(file) => files.extend(file),
                Err(error) if has_gone(&error) => {}
                Err(source) => {
                    return Err(TreeError::Io {
                        root: self.root.clone(),
                        action: "open".into(),
                        path: beneath::display(path),
                        source,
                    });
                }
            }
        }
        Ok(files)
    }

    /// Bytes of its files without those of these inodes.
    #[must_use]
    pub fn bytes_without(&self, elsewhere: &Elsewhere) -> u64 {
        let mut changes = self.everything();
        changes.changed.retain(|_, record| !elsewhere.contains_key(&record.inode));
        changes.bytes()
    }

    pub(super) fn records(&self) -> &BTreeMap<Vec<u8>, Record> {
        &self.records
    }

    fn walk_all(root: &Path, frozen: bool) -> Result<Self, TreeError> {
        let all = Self::walk(root, frozen, u64::MAX, u64::MAX)?;
        all.ok_or_else(|| TreeError::NotCarried {
            root: root.to_path_buf(),
            path: "/".into(),
            reason: "it has more names than can be counted",
        })
    }

    fn walk(root: &Path, frozen: bool, entries: u64, path_bytes: u64) -> Result<Option<Self>, TreeError> {
        let fault = |action: &str, path: &[u8], source: io::Error| TreeError::Io {
            root: root.to_path_buf(),
            action: action.to_owned(),
            path: beneath::display(path),
            source,
        };
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let started = i128::try_from(since_1970.as_nanos()).unwrap_or(i128::MAX);
        let top = Root::open_or_file(root, Links::Refused)
            .map_err(|error| fault("open the directory", b"", error))?;
        let top_stat =
            top.node(b"").and_then(|node| node.statx()).map_err(|error| fault("look at", b"", error))?;
        let device = (top_stat.stx_dev_major, top_stat.stx_dev_minor);
        let top_record = Record::new(&top_stat);
        let mut pending = match top_record.file_type {
            FileType::Directory => vec![Vec::new()],
            _ => Vec::new(),
        };
        let mut records = BTreeMap::from([(Vec::new(), top_record)]);
        let mut bytes = 0_u64;
        let mut other = None;
        while let Some(directory) = pending.pop() {
            let opened = top.open_at(&directory, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW);
            let opened = match opened {
                Ok(opened) => opened,
                Err(error) if !directory.is_empty() && has_gone(&error) => continue,
                Err(error) => return Err(fault("read the directory", &directory, error)),
            };
            for entry in rustix::fs::Dir::read_from(&opened)
                .map_err(|error| fault("read the directory", &directory, error.into()))?
            {
                let entry = entry.map_err(|error| fault("read the directory", &directory, error.into()))?;
                let name = entry.file_name().to_bytes();
                if name == b"." || name == b".." {
                    continue;
                }
                let path = if directory.is_empty() { name.to_vec() } else { [&directory, name].join(&b'/') };
                bytes = bytes.saturating_add(path.len() as u64);
                if records.len() as u64 >= entries || bytes > path_bytes {
                    return Ok(None);
                }
                if path.len() > MAX_PATH {
                    return Err(TreeError::NotCarried {
                        root: root.to_path_buf(),
                        path: beneath::display(&path),
                        reason: "its path is longer than 4095 bytes",
                    });
                }
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                let stat = match rustix::fs::statx(&opened, name, flags, StatxFlags::BASIC_STATS) {
                    Ok(stat) => stat,
                    Err(Errno::NOENT) => continue,
                    Err(error) => return Err(fault("look at", &path, error.into())),
                };
                let record = Record::new(&stat);
                let same_device = (stat.stx_dev_major, stat.stx_dev_minor) == device;
                if record.file_type == FileType::Directory {
                    match same_device {
                        true => pending.push(path.clone()),
                        false => drop(other.get_or_insert_with(|| path.clone())),
                    }
                }
                records.insert(path, record);
            }
        }
        Ok(Some(Self { root: root.to_path_buf(), started, frozen, records, other }))
    }

    /// The directory that was walked.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// Whether an error says that a path is not there any more, or something else is in its place.
pub(super) fn has_gone(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::STALE | Errno::NXIO)
    )
}
