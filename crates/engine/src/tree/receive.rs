//! Makes a tree from items that may be hostile.
//!
//! Each item is checked before it is used; a path is resolved below the root without following
//! any link (see [`crate::beneath`]). A name that comes again is made anew, except a directory,
//! which keeps what is in it, and a file that is kept, of which parts are written. Making or removing a name moves its directory's modification time,
//! so the times of all directories touched are set when the round is over.

mod check;
mod held;

use std::collections::BTreeMap;
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::ops::Bound;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use godwit_criu::images::Device;
use rustix::fs::{AtFlags, CWD, FallocateFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use self::check::check;
use self::held::Held;
use super::item::{Data, End, Entry, Hold, Hole, Item, Kind, MAX_DATA, Remove};
use super::send::MAX_XATTR_TOTAL;
use super::{TreeError, Written, open_root};
use crate::beneath::{self, Attributes, MAX_NAME, MAX_PATH, Node, Root, SetFault};

/// As how many bytes a hole counts: it costs the filesystem as much as a block.
const HOLE_COSTS: u64 = 4096;

/// What a receiver takes in one round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Names that come or go.
    pub entries: u64,
    /// Bytes of file content.
    pub bytes: u64,
    /// Whether any device may come, beside those that every container has.
    pub devices: bool,
}

/// Files whose content comes in another way, and which are there without a name.
pub trait Contents: std::fmt::Debug + Send {
    /// A path by which linkat(2) finds the file of this number and size; none if there is no such file.
    fn find(&self, number: u32, size: u64) -> Option<String>;
    /// It has its name and its attributes. It is to have been modified at this time, seconds since 1970 and nanoseconds,
    /// also when content comes later.
    fn named(&self, number: u32, modified: (i64, u32)) -> io::Result<()>;
}

/// As many bytes as paths may have on average, where they are many.
const MEAN_PATH: u64 = 256;
const LEAST_PATHS: u64 = 1 << 20;

/// Whether there is no such path, where what leads to it may be of any kind.
fn is_not_there(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// Takes the items of one round.
#[derive(Debug)]
pub struct Receiver {
    path: PathBuf,
    root: Root,
    limits: Limits,
    contents: Option<Box<dyn Contents>>,
    names: u64,
    path_bytes: u64,
    entries: u64,
    bytes: u64,
    /// Bytes that are counted as if they had come: of holes.
    holes: u64,
    open: Option<OpenFile>,
    held: Held,
    /// Makes names that no sender knows.
    random: RandomState,
    /// Modification times that directories shall have in the end.
    directories: BTreeMap<Vec<u8>, (i64, u32)>,
    /// Files that were written.
    files: Vec<Vec<u8>>,
    ended: bool,
}

#[derive(Debug)]
struct OpenFile {
    path: Vec<u8>,
    file: File,
    node: Node,
    attributes: Attributes,
    size: u64,
    position: u64,
}

impl Receiver {
    /// For one round into the directory `root`, which holds what earlier rounds brought.
    pub fn new(root: &Path, limits: Limits) -> Result<Self, TreeError> {
        let opened = open_root(root)?;
        Ok(Self {
            path: root.to_path_buf(),
            root: opened,
            limits,
            contents: None,
            names: 0,
            path_bytes: 0,
            entries: 0,
            bytes: 0,
            holes: 0,
            open: None,
            held: Held::default(),
            random: RandomState::new(),
            directories: BTreeMap::new(),
            files: Vec::new(),
            ended: false,
        })
    }

    /// Takes the content of some files from there, into a tmpfs: extended attributes that it does not keep are dropped, as
    /// they are by tar(1). Up to Linux 6.5 those are the attributes of users.
    #[must_use]
    pub fn with(self, contents: Box<dyn Contents>) -> Self {
        Self { contents: Some(contents), ..self }
    }

    /// Applies one item. After an error the tree is useless.
    pub fn apply(&mut self, item: Item) -> Result<(), TreeError> {
        if self.ended {
            return Err(self.refused(b"", "it comes after the end"));
        }
        let is_of_earlier = match &item {
            Item::Hold(_) | Item::Hole(_) => true,
            Item::Entry(entry) => entry.kept || entry.held.is_some(),
            _ => false,
        };
        if is_of_earlier && self.contents.is_some() {
            return Err(self.refused(b"", "it is of an earlier round, and there is only one"));
        }
        match item {
            Item::Data(data) => self.data(&data),
            Item::Hole(hole) => self.hole(hole),
            Item::Hold(hold) => {
                self.close()?;
                self.count_name(&hold.path)?;
                self.hold(&hold)
            }
            Item::Entry(entry) => {
                self.close()?;
                self.count_name(&entry.path)?;
                self.entries += 1;
                self.entry(entry)
            }
            Item::Remove(remove) => {
                self.close()?;
                self.count_name(&remove.path)?;
                self.remove(&remove)
            }
            Item::End(end) => {
                self.close()?;
                self.end(end)
            }
        }
    }

    /// Sets what can be set only in the end; an error when the round was not complete. The tree is
    /// in the page cache then, see [`Written::sync`] and [`super::sync`].
    pub fn finish(mut self) -> Result<Written, TreeError> {
        if !self.ended {
            return Err(TreeError::Incomplete { root: self.path });
        }
        // What had no name any more when its turn came.
        for name in std::mem::take(&mut self.held.names).into_values() {
            let root = self.root.directory(b"").map_err(|error| self.fault("open", b"", error))?;
            beneath::remove_tree(root.as_fd(), &name).map_err(|error| self.fault("remove", &name, error))?;
        }
        for (path, mtime) in &self.directories {
            self.root
                .node(path)
                .and_then(|node| node.set_mtime(*mtime))
                .map_err(|error| self.fault("set the time of", path, error))?;
        }
        let directories = self.directories.into_keys().collect();
        Ok(Written { path: self.path, root: self.root, files: self.files, directories })
    }

    fn data(&mut self, data: &Data) -> Result<(), TreeError> {
        let length = data.bytes.len() as u64;
        let mut open = self.part(data.offset, length)?;
        if data.bytes.len() > MAX_DATA {
            return Err(self.refused(&open.path, "a part of its bytes is larger than 256 KiB"));
        }
        self.bytes = self.bytes.saturating_add(length);
        self.check_bytes()?;
        open.file
            .write_all_at(&data.bytes, data.offset)
            .map_err(|error| self.fault("write", &open.path, error))?;
        open.position = data.offset + length;
        self.open = Some(open);
        Ok(())
    }

    fn hole(&mut self, Hole { offset, length }: Hole) -> Result<(), TreeError> {
        let mut open = self.part(offset, length)?;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punched = rustix::fs::fallocate(&open.file, punch, offset, length);
        // A filesystem without holes gets zeros, as many as a sender may send.
        let has_none = matches!(punched, Err(Errno::OPNOTSUPP | Errno::NOSYS));
        let costs = if has_none { length.max(HOLE_COSTS) } else { HOLE_COSTS };
        self.holes = self.holes.saturating_add(costs);
        self.check_bytes()?;
        match has_none {
            true => write_zeros(&open.file, offset, length),
            false => punched.map_err(io::Error::from),
        }
        .map_err(|error| self.fault("make a hole in", &open.path, error))?;
        open.position = offset + length;
        self.open = Some(open);
        Ok(())
    }

    /// Takes the file that is open, if this may be its next part. After an error it is needed no more.
    fn part(&mut self, offset: u64, length: u64) -> Result<OpenFile, TreeError> {
        let Some(open) = self.open.take() else {
            return Err(self.refused(b"", "a part of a file comes without a file"));
        };
        let reason = if length == 0 {
            "a part of it is empty"
        } else if offset < open.position {
            "a part of it comes twice"
        } else if offset.checked_add(length).is_none_or(|end| end > open.size) {
            "a part of it is beyond its size"
        } else {
            return Ok(open);
        };
        Err(self.refused(&open.path, reason))
    }

    /// What is written may not be more than was agreed.
    fn check_bytes(&self) -> Result<(), TreeError> {
        if self.bytes.saturating_add(self.holes) > self.limits.bytes {
            let limit = self.limits.bytes;
            return Err(TreeError::Limit { root: self.path.clone(), limit, unit: "bytes" });
        }
        Ok(())
    }

    /// Takes a file's name away, for another one that comes later.
    fn hold(&mut self, Hold { path, number }: &Hold) -> Result<(), TreeError> {
        if self.held.names.contains_key(number) {
            return Err(self.refused(path, "it is to be held under a number that is taken"));
        }
        if path.is_empty() {
            return Err(self.refused(path, "the root cannot be held"));
        }
        if let Err(reason) = beneath::check_path(path) {
            return Err(self.refused(path, reason));
        }
        let (parent_path, name) = beneath::split(path);
        let parent = self
            .root
            .directory(parent_path)
            .map_err(|error| self.fault("open the directory of", path, error))?;
        self.file_at(path, parent.as_fd(), name)?;
        let root = self.root.directory(b"").map_err(|error| self.fault("open", b"", error))?;
        let aside = format!(".godwit-{:016x}", self.random.hash_one(number)).into_bytes();
        self.touch(parent_path)?;
        self.touch(b"")?;
        rustix::fs::renameat_with(&parent, name, &root, &aside[..], RenameFlags::NOREPLACE)
            .map_err(|error| self.fault("rename", path, error.into()))?;
        self.held.names.insert(*number, aside);
        self.held.root.get_or_insert(root);
        Ok(())
    }

    /// Gives a held file its name.
    fn let_go(
        &mut self,
        path: &[u8],
        number: u32,
        parent: std::os::fd::BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), TreeError> {
        let Some(aside) = self.held.names.remove(&number) else {
            return Err(self.refused(path, "it is to be a file that is not held"));
        };
        self.clear(parent, path, name)?;
        let root = self.root.directory(b"").map_err(|error| self.fault("open", b"", error))?;
        rustix::fs::renameat_with(&root, &aside[..], parent, name, RenameFlags::NOREPLACE)
            .map_err(|error| self.fault("rename", path, error.into()))
    }

    /// A regular file of an earlier round.
    fn file_at(
        &self,
        path: &[u8],
        parent: std::os::fd::BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<Node, TreeError> {
        let node = self.made(parent, path, name)?;
        if self.file_type(path, &node)? != FileType::RegularFile {
            return Err(self.refused(path, "its content is to be used, and it is no file"));
        }
        Ok(node)
    }

    fn entry(&mut self, entry: Entry) -> Result<(), TreeError> {
        let kind = match check(&entry) {
            Ok(kind) => kind,
            Err(reason) => return Err(self.refused(&entry.path, reason)),
        };
        let path = entry.path.clone();
        if kind == Kind::Directory {
            return self.directory(&path, &attributes(entry));
        }
        let (parent_path, name) = beneath::split(&path);
        let parent = self
            .root
            .directory(parent_path)
            .map_err(|error| self.fault("open the directory of", &path, error))?;
        self.touch(parent_path)?;
        if kind == Kind::HardLink {
            return self.hard_link(&entry, parent.as_fd());
        }
        if let Some(number) = entry.held {
            self.let_go(&path, number, parent.as_fd(), name)?;
        }
        if entry.kept || entry.held.is_some() {
            let node = self.file_at(&path, parent.as_fd(), name)?;
            let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let file = rustix::fs::openat(CWD, node.magic(), flags, Mode::empty())
                .map_err(|error| self.fault("open", &path, error.into()))?;
            return self.begin(entry, parent.as_fd(), File::from(file));
        }
        self.clear(parent.as_fd(), &path, name)?;
        let make = |this: &Self, result: rustix::io::Result<()>| {
            result.map_err(|error| this.fault("make", &path, error.into()))
        };
        match (kind, entry.content) {
            (Kind::File, Some(number)) => return self.named(entry, number, parent.as_fd(), name),
            (Kind::File, None) => {
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&parent, name, flags, Mode::RUSR | Mode::WUSR)
                    .map_err(|error| self.fault("make", &path, error.into()))?;
                return self.begin(entry, parent.as_fd(), File::from(file));
            }
            (Kind::Symlink, _) => make(self, rustix::fs::symlinkat(&entry.link_target[..], &parent, name))?,
            _ => {
                let file_type = match kind {
                    Kind::CharacterDevice => FileType::CharacterDevice,
                    Kind::BlockDevice => FileType::BlockDevice,
                    Kind::Fifo => FileType::Fifo,
                    _ => FileType::Socket,
                };
                let (major, minor) = (entry.rdev_major, entry.rdev_minor);
                let is_block = kind == Kind::BlockDevice;
                let is_device = is_block || kind == Kind::CharacterDevice;
                if is_device && !self.limits.devices && !(Device { is_block, major, minor }).is_given() {
                    return Err(self.refused(&path, "it is a device that no container is given"));
                }
                let device = rustix::fs::makedev(entry.rdev_major, entry.rdev_minor);
                make(self, rustix::fs::mknodat(&parent, name, file_type, Mode::RUSR | Mode::WUSR, device))?;
            }
        }
        let node = self.made(parent.as_fd(), &path, name)?;
        self.set(&path, &node, kind, &attributes(entry))
    }

    /// From here on the content of a file comes.
    fn begin(
        &mut self,
        entry: Entry,
        parent: std::os::fd::BorrowedFd<'_>,
        file: File,
    ) -> Result<(), TreeError> {
        let (path, size) = (entry.path.clone(), entry.size);
        rustix::fs::ftruncate(&file, size)
            .map_err(|error| self.fault("set the size of", &path, error.into()))?;
        let node = self.made(parent, &path, beneath::split(&path).1)?;
        self.open = Some(OpenFile { path, file, node, attributes: attributes(entry), size, position: 0 });
        Ok(())
    }

    /// Gives a file whose content comes in another way its name.
    fn named(
        &mut self,
        entry: Entry,
        number: u32,
        parent: std::os::fd::BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), TreeError> {
        let path = entry.path.clone();
        let found = self.contents.as_ref().and_then(|contents| contents.find(number, entry.size));
        let Some(file) = found else {
            return Err(self.refused(&path, "its content is to come in another way, and does not"));
        };
        rustix::fs::linkat(CWD, file, parent, name, AtFlags::SYMLINK_FOLLOW)
            .map_err(|error| self.fault("give a name to", &path, error.into()))?;
        let node = self.made(parent, &path, name)?;
        let attributes = attributes(entry);
        self.set(&path, &node, Kind::File, &attributes)?;
        match &self.contents {
            Some(contents) => contents.named(number, attributes.mtime),
            None => Ok(()),
        }
        .map_err(|error| self.fault("set the time of", &path, error))
    }

    fn directory(&mut self, path: &[u8], attributes: &Attributes) -> Result<(), TreeError> {
        let present = self.root.node_if_any(path).map_err(|error| self.fault("look at", path, error))?;
        let node = match present {
            Some(node) if self.file_type(path, &node)? == FileType::Directory => node,
            _ => {
                let (parent_path, name) = beneath::split(path);
                let parent = self
                    .root
                    .directory(parent_path)
                    .map_err(|error| self.fault("open the directory of", path, error))?;
                self.touch(parent_path)?;
                self.clear(parent.as_fd(), path, name)?;
                rustix::fs::mkdirat(&parent, name, Mode::RWXU)
                    .map_err(|error| self.fault("make the directory", path, error.into()))?;
                self.made(parent.as_fd(), path, name)?
            }
        };
        self.set_all_but_time(path, &node, false, attributes)?;
        self.directories.insert(path.to_vec(), attributes.mtime);
        Ok(())
    }

    fn hard_link(&mut self, entry: &Entry, parent: std::os::fd::BorrowedFd<'_>) -> Result<(), TreeError> {
        let (path, target) = (&entry.path, &entry.hard_link_of);
        let node =
            self.root.node(target).map_err(|error| self.fault("find the link's target", target, error))?;
        if self.file_type(target, &node)? == FileType::Directory {
            return Err(self.refused(path, "it is a hard link to a directory"));
        }
        let name = beneath::split(path).1;
        self.clear(parent, path, name)?;
        let (target_parent, target_name) = beneath::split(target);
        let target_parent = self
            .root
            .directory(target_parent)
            .map_err(|error| self.fault("open the directory of", target, error))?;
        rustix::fs::linkat(&target_parent, target_name, parent, name, AtFlags::empty())
            .map_err(|error| self.fault("make the hard link", path, error.into()))
    }

    fn remove(&mut self, remove: &Remove) -> Result<(), TreeError> {
        if remove.path.is_empty() {
            return Err(self.refused(b"", "the root cannot be removed"));
        }
        if let Err(reason) = beneath::check_path(&remove.path) {
            return Err(self.refused(&remove.path, reason));
        }
        let (parent_path, name) = beneath::split(&remove.path);
        match self.root.node(&remove.path) {
            Ok(_) => {}
            // What it was beneath may be gone, or a link now, by a round that broke off.
            Err(error) if is_not_there(&error) => return Ok(()),
            Err(error) => return Err(self.fault("look at", &remove.path, error)),
        }
        let parent = self
            .root
            .directory(parent_path)
            .map_err(|error| self.fault("open the directory of", &remove.path, error))?;
        self.touch(parent_path)?;
        self.clear(parent.as_fd(), &remove.path, name)
    }

    fn end(&mut self, end: End) -> Result<(), TreeError> {
        if end.entries != self.entries || end.bytes != self.bytes {
            return Err(self.refused(b"", "the counts at its end differ from what came"));
        }
        self.ended = true;
        Ok(())
    }

    /// Ends the file that is written.
    fn close(&mut self) -> Result<(), TreeError> {
        if let Some(open) = self.open.take() {
            drop(open.file);
            self.set(&open.path, &open.node, Kind::File, &open.attributes)?;
            self.files.push(open.path);
        }
        Ok(())
    }

    fn set(&self, path: &[u8], node: &Node, kind: Kind, attributes: &Attributes) -> Result<(), TreeError> {
        self.set_all_but_time(path, node, kind == Kind::Symlink, attributes)?;
        node.set_mtime(attributes.mtime).map_err(|error| self.fault("set the time of", path, error))
    }

    fn set_all_but_time(
        &self,
        path: &[u8],
        node: &Node,
        is_link: bool,
        attributes: &Attributes,
    ) -> Result<(), TreeError> {
        let set = match node.set_attributes(is_link, attributes) {
            Err(fault) if self.contents.is_some() && fault.is_unsupported() => {
                tracing::debug!(path = %beneath::display(path), attribute = %fault.what, "this kernel keeps no such attribute in a tmpfs, and it is dropped");
                node.set_what_is_supported(is_link, attributes)
            }
            set => set,
        };
        set.map_err(|fault| self.not_set(path, fault))
    }

    /// Removes what has the name, with all below.
    fn clear(
        &mut self,
        parent: std::os::fd::BorrowedFd<'_>,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), TreeError> {
        beneath::remove_tree(parent, name).map_err(|error| self.fault("remove", path, error))?;
        self.directories.remove(path);
        let below = [path, b"/"].concat();
        let range = (Bound::Included(below.clone()), Bound::Unbounded);
        let gone: Vec<Vec<u8>> = self
            .directories
            .range(range)
            .map(|(directory, _)| directory.clone())
            .take_while(|directory| directory.starts_with(&below))
            .collect();
        for directory in gone {
            self.directories.remove(&directory);
        }
        Ok(())
    }

    /// Keeps the modification time of a directory that is about to be changed.
    fn touch(&mut self, directory: &[u8]) -> Result<(), TreeError> {
        if !self.directories.contains_key(directory) {
            let stat = self
                .root
                .node(directory)
                .and_then(|node| node.statx())
                .map_err(|error| self.fault("look at", directory, error))?;
            self.directories.insert(directory.to_vec(), (stat.stx_mtime.tv_sec, stat.stx_mtime.tv_nsec));
        }
        Ok(())
    }

    fn made(&self, parent: std::os::fd::BorrowedFd<'_>, path: &[u8], name: &[u8]) -> Result<Node, TreeError> {
        Node::at(parent, name).map_err(|error| self.fault("look at", path, error))
    }

    fn file_type(&self, path: &[u8], node: &Node) -> Result<FileType, TreeError> {
        let stat = node.statx().map_err(|error| self.fault("look at", path, error))?;
        Ok(FileType::from_raw_mode(stat.stx_mode.into()))
    }

    fn count_name(&mut self, path: &[u8]) -> Result<(), TreeError> {
        self.names += 1;
        self.path_bytes += path.len() as u64;
        let limit = self.limits.entries;
        if self.names > limit {
            return Err(TreeError::Limit { root: self.path.clone(), limit, unit: "entries" });
        }
        // They are in memory until the end of the round.
        let limit = limit.saturating_mul(MEAN_PATH).max(LEAST_PATHS);
        if self.path_bytes > limit {
            return Err(TreeError::Limit { root: self.path.clone(), limit, unit: "bytes of paths" });
        }
        Ok(())
    }

    fn fault(&self, action: &str, path: &[u8], source: io::Error) -> TreeError {
        TreeError::Io {
            root: self.path.clone(),
            action: action.to_owned(),
            path: beneath::display(path),
            source,
        }
    }

    fn not_set(&self, path: &[u8], fault: SetFault) -> TreeError {
        self.fault(&format!("set the {} of", fault.what), path, fault.error)
    }

    fn refused(&self, path: &[u8], reason: &'static str) -> TreeError {
        TreeError::Refused { root: self.path.clone(), path: beneath::display(path), reason }
    }
}

fn write_zeros(file: &File, mut offset: u64, mut length: u64) -> io::Result<()> {
    while length > 0 {
        let now = usize::try_from(length).unwrap_or(MAX_DATA).min(MAX_DATA);
        file.write_all_at(&vec![0; now], offset)?;
        offset += now as u64;
        length -= now as u64;
    }
    Ok(())
}

fn attributes(entry: Entry) -> Attributes {
    Attributes {
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime: (entry.mtime_seconds, entry.mtime_nanoseconds),
        xattrs: entry.xattrs.into_iter().map(|xattr| (xattr.name, xattr.value)).collect(),
    }
}
