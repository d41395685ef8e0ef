//! Names below a directory, resolved so that nothing outside of it can be reached.
//!
//! Layers and trees come from strangers. Their paths are never handed to the kernel as they are:
//! a path is checked ([`check_path`]), its parent directory is opened by openat2(2) relative to a
//! descriptor of the root, and the last component is used with calls that do not follow links.
//! Attributes are set through an `O_PATH` descriptor of the very inode that was made, so devices
//! and fifos are never opened.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use rustix::fs::{
    self, AtFlags, CWD, FileType, Gid, Mode, OFlags, RawMode, RenameFlags, ResolveFlags, Statx, StatxFlags,
    Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

/// Longest path below a root, in bytes: the kernel's `PATH_MAX` less its closing NUL.
pub(crate) const MAX_PATH: usize = 4095;
/// Longest name of one component, in bytes: the kernel's `NAME_MAX`.
pub(crate) const MAX_NAME: usize = 255;
/// openat2(2) answers EAGAIN when something was renamed while it resolved; so often it is asked again.
const RESOLVE_ATTEMPTS: usize = 64;
/// How many directories are open at once while a tree is removed: far fewer than the 1024
/// descriptors a process has by default.
const MAX_OPEN_DEPTH: usize = 64;
/// SELinux labels belong to the node's policy, not to the tree, and are neither read nor set.
const NODE_XATTR: &[u8] = b"security.selinux";

/// One extended attribute: name and value.
pub(crate) type XattrPair = (Vec<u8>, Vec<u8>);

/// A path that may be used below a root: relative, no empty, `.` or `..` component, no NUL, not
/// too long. The empty path is the root itself.
pub(crate) fn check_path(path: &[u8]) -> Result<(), &'static str> {
    if path.is_empty() {
        return Ok(());
    }
    if path.len() > MAX_PATH {
        return Err("it is longer than 4095 bytes");
    }
    if path.contains(&0) {
        return Err("it holds a NUL byte");
    }
    for component in path.split(|byte| *byte == b'/') {
        match component {
            b"" => return Err("it is absolute or has an empty component"),
            b"." | b".." => return Err("it has a component that is . or .."),
            long if long.len() > MAX_NAME => return Err("one of its components is longer than 255 bytes"),
            _ => {}
        }
    }
    Ok(())
}

/// Splits a path into its parent (empty for the root) and its last component.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

/// Attributes an inode gets once it is made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Attributes {
    /// Permission, setuid, setgid and sticky bits.
    pub(crate) mode: u32,
    /// Owner.
    pub(crate) uid: u32,
    /// Group.
    pub(crate) gid: u32,
    /// Modification time: seconds since 1970 and nanoseconds.
    pub(crate) mtime: (i64, u32),
    /// Extended attributes; those not listed are removed.
    pub(crate) xattrs: Vec<XattrPair>,
}

/// How symbolic links in the directories of a path are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Links {
    /// A link anywhere is an error.
    Refused,
    /// Links are resolved as if the root were `/`.
    InRoot,
    /// Links that lead out are an error.
    Beneath,
}

/// A directory below which names are resolved.
#[derive(Debug)]
pub(crate) struct Root {
    fd: OwnedFd,
    resolve: ResolveFlags,
    /// Whether it is a file, and no directory.
    is_file: bool,
}

impl Root {
    /// Opens the directory `path`.
    pub(crate) fn open(path: &Path, links: Links) -> io::Result<Self> {
        let fd = fs::openat(CWD, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self::of(fd, links))
    }

    /// Opens the directory `path`, or the regular file, below which nothing is.
    pub(crate) fn open_or_file(path: &Path, links: Links) -> io::Result<Self> {
        let fd = fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
        match FileType::from_raw_mode(fs::fstat(&fd)?.st_mode) {
            FileType::Directory => Ok(Self::of(fd, links)),
            FileType::RegularFile => Ok(Self { is_file: true, ..Self::of(fd, links) }),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// The directory that is open.
    pub(crate) fn of(fd: OwnedFd, links: Links) -> Self {
        let resolve = match links {
            Links::Refused => ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS,
            Links::InRoot => ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS,
            Links::Beneath => ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS,
        };
        Self { fd, resolve, is_file: false }
    }

    /// The same, but nothing that is mounted below it can be reached.
    pub(crate) fn without_mounts(mut self) -> Self {
        self.resolve |= ResolveFlags::NO_XDEV;
        self
    }

    /// Opens `path` with `flags`; the empty path is the root.
    pub(crate) fn open_at(&self, path: &[u8], flags: OFlags) -> io::Result<OwnedFd> {
        let path = if path.is_empty() { b"." } else { path };
        let mut attempt = 0;
        loop {
            match fs::openat2(&self.fd, path, flags | OFlags::CLOEXEC, Mode::empty(), self.resolve) {
                Err(Errno::AGAIN | Errno::INTR) if attempt < RESOLVE_ATTEMPTS => attempt += 1,
                other => return Ok(other?),
            }
        }
    }

    /// The absolute path below the root, which stands for `/`, of what `path` leads to.
    pub(crate) fn path_of(&self, path: &[u8]) -> io::Result<PathBuf> {
        self.path_to(self.open_at(path, OFlags::PATH)?.as_fd())
    }

    /// The same of what is open.
    pub(crate) fn path_to(&self, opened: BorrowedFd<'_>) -> io::Result<PathBuf> {
        let absolute = |opened: BorrowedFd<'_>| {
            fs::readlink(format!("/proc/self/fd/{}", opened.as_raw_fd()), Vec::new())
                .map(|path| PathBuf::from(OsString::from_vec(path.into_bytes())))
        };
        let (root, found) = (absolute(self.fd.as_fd())?, absolute(opened)?);
        let below = found.strip_prefix(&root).map_err(io::Error::other)?;
        Ok(Path::new("/").join(below))
    }

    /// Opens the directory `path` as a place to work in.
    pub(crate) fn directory(&self, path: &[u8]) -> io::Result<OwnedFd> {
        self.open_at(path, OFlags::PATH | OFlags::DIRECTORY)
    }

    /// Opens the inode at `path` itself, whatever it is, without following a last link.
    pub(crate) fn node(&self, path: &[u8]) -> io::Result<Node> {
        if self.is_file && path.is_empty() {
            return Ok(Node { fd: self.fd.try_clone()? });
        }
        Ok(Node { fd: self.open_at(path, OFlags::PATH | OFlags::NOFOLLOW)? })
    }

    /// The inode at `path`, or none when there is none.
    pub(crate) fn node_if_any(&self, path: &[u8]) -> io::Result<Option<Node>> {
        match self.node(path) {
            Ok(node) => Ok(Some(node)),
            Err(error) if matches!(Errno::from_io_error(&error), Some(Errno::NOENT | Errno::NOTDIR)) => {
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

impl AsFd for Root {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// One inode, held by an `O_PATH` descriptor.
#[derive(Debug)]
pub(crate) struct Node {
    fd: OwnedFd,
}

impl Node {
    /// The entry `name` of the directory `parent`, not followed.
    pub(crate) fn at(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Self { fd: fs::openat(parent, name, flags, Mode::empty())? })
    }

    /// A path by which calls that take no descriptor reach the inode; a link is not followed.
    pub(crate) fn magic(&self) -> String {
        format!("/proc/self/fd/{}", self.fd.as_raw_fd())
    }

    /// Kind, sizes, times, identity.
    pub(crate) fn statx(&self) -> io::Result<Statx> {
        Ok(fs::statx(&self.fd, "", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)?)
    }

    /// Where a symbolic link leads.
    pub(crate) fn link_target(&self) -> io::Result<Vec<u8>> {
        Ok(fs::readlinkat(&self.fd, "", Vec::new())?.into_bytes())
    }

    /// All extended attributes sorted by name, SELinux labels excepted.
    pub(crate) fn xattrs(&self) -> io::Result<Vec<XattrPair>> {
        let path = self.magic();
        let mut pairs = Vec::new();
        for name in self.xattr_names()? {
            match read_growing(|buffer| fs::getxattr(&path, &name, buffer)) {
                Ok(value) => pairs.push((name, value)),
                // Removed since it was listed.
                Err(Errno::NODATA) => {}
                Err(error) => return Err(error.into()),
            }
        }
        pairs.sort();
        Ok(pairs)
    }

    /// One extended attribute, if it is there and the filesystem has any.
    pub(crate) fn xattr(&self, name: &[u8]) -> io::Result<Option<Vec<u8>>> {
        let path = self.magic();
        match read_growing(|buffer| fs::getxattr(&path, name, buffer)) {
            Ok(value) => Ok(Some(value)),
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    fn xattr_names(&self) -> io::Result<Vec<Vec<u8>>> {
        let path = self.magic();
        let list = match read_growing(|buffer| fs::listxattr(&path, buffer)) {
            Ok(list) => list,
            Err(Errno::OPNOTSUPP) => Vec::new(),
            Err(error) => return Err(error.into()),
        };
        let names = list.split(|byte| *byte == 0).filter(|name| !name.is_empty() && *name != NODE_XATTR);
        Ok(names.map(<[u8]>::to_vec).collect())
    }

    /// Whether it is a file that gives capabilities to who executes it.
    pub(crate) fn has_capabilities(&self) -> io::Result<bool> {
        Ok(self.xattr_names()?.iter().any(|name| name == b"security.capability"))
    }

    /// Sets one extended attribute.
    pub(crate) fn set_xattr(&self, name: &[u8], value: &[u8]) -> io::Result<()> {
        Ok(fs::setxattr(self.magic(), name, value, XattrFlags::empty())?)
    }

    /// Sets the modification time and leaves the access time.
    pub(crate) fn set_mtime(&self, (seconds, nanoseconds): (i64, u32)) -> io::Result<()> {
        let times = Timestamps {
            last_access: Timespec { tv_sec: 0, tv_nsec: fs::UTIME_OMIT },
            last_modification: Timespec { tv_sec: seconds, tv_nsec: i64::from(nanoseconds) },
        };
        Ok(fs::utimensat(CWD, self.magic(), &times, AtFlags::empty())?)
    }

    /// Sets owner, mode and extended attributes, but not the time. The order matters: a change
    /// of owner clears setuid bits and file capabilities; an access list overrides the mode.
    pub(crate) fn set_attributes(&self, is_link: bool, attributes: &Attributes) -> Result<(), SetFault> {
        let owner = (Uid::from_raw(attributes.uid), Gid::from_raw(attributes.gid));
        fs::chownat(&self.fd, "", Some(owner.0), Some(owner.1), AtFlags::EMPTY_PATH)
            .map_err(|error| SetFault::new("owner", error))?;
        if !is_link {
            let mode = Mode::from_raw_mode(RawMode::from(attributes.mode & 0o7777));
            fs::chmodat(CWD, self.magic(), mode, AtFlags::empty())
                .map_err(|error| SetFault::new("mode", error))?;
        }
        let present =
            self.xattr_names().map_err(|error| SetFault { what: "extended attributes".into(), error })?;
        for name in present {
            if !attributes.xattrs.iter().any(|(wanted, _)| *wanted == name) {
                match fs::removexattr(self.magic(), &name) {
                    Ok(()) | Err(Errno::NODATA) => {}
                    Err(error) => return Err(SetFault::xattr(&name, error.into())),
                }
            }
        }
        for (name, value) in &attributes.xattrs {
            if name != NODE_XATTR {
                self.set_xattr(name, value).map_err(|error| SetFault::xattr(name, error))?;
            }
        }
        Ok(())
    }
}

impl Node {
    /// As [`Node::set_attributes`], without the extended attributes that the filesystem does not know.
    pub(crate) fn set_what_is_supported(
        &self,
        is_link: bool,
        attributes: &Attributes,
    ) -> Result<(), SetFault> {
        let none = Attributes { xattrs: Vec::new(), ..attributes.clone() };
        self.set_attributes(is_link, &none)?;
        for (name, value) in attributes.xattrs.iter().filter(|(name, _)| name != NODE_XATTR) {
            match self.set_xattr(name, value).map_err(|error| SetFault::xattr(name, error)) {
                Err(fault) if fault.is_unsupported() => {}
                set => set?,
            }
        }
        Ok(())
    }
}

impl From<OwnedFd> for Node {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl From<Node> for OwnedFd {
    fn from(node: Node) -> Self {
        node.fd
    }
}

impl AsFd for Node {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Which attribute could not be set.
#[derive(Debug)]
pub(crate) struct SetFault {
    /// The attribute.
    pub(crate) what: String,
    /// The system's answer.
    pub(crate) error: io::Error,
}

impl SetFault {
    /// Whether the filesystem does not know it.
    pub(crate) fn is_unsupported(&self) -> bool {
        Errno::from_io_error(&self.error) == Some(Errno::OPNOTSUPP)
    }

    fn new(what: &str, error: Errno) -> Self {
        Self { what: what.into(), error: error.into() }
    }

    fn xattr(name: &[u8], error: io::Error) -> Self {
        Self { what: format!("extended attribute {}", String::from_utf8_lossy(name)), error }
    }
}

/// Removes `name` in `parent`, with everything below it; no error when there is nothing.
pub(crate) fn remove_tree(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<()> {
    match fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    // Open directories from the top to the one being emptied, with their names.
    let mut stack = vec![(name.to_vec(), open_listed(parent, name)?)];
    let mut moved = 0_u64;
    while let Some((_, directory)) = stack.last() {
        match unlink_up_to_directory(directory)? {
            None => {
                if let Some((emptied, _)) = stack.pop() {
                    let above = stack.last().map_or(parent, |(_, above)| above.as_fd());
                    fs::unlinkat(above, &emptied[..], AtFlags::REMOVEDIR)?;
                }
            }
            // A tree deeper than descriptors should be spent on is cut: the rest goes to the top.
            Some(child) if stack.len() >= MAX_OPEN_DEPTH => {
                let top = &stack[0].1;
                loop {
                    moved += 1;
                    let name = format!(".removed-{moved}");
                    match fs::renameat_with(directory, &child[..], top, name, RenameFlags::NOREPLACE) {
                        Ok(()) => break,
                        Err(Errno::EXIST) => {}
                        Err(error) => return Err(error.into()),
                    }
                }
            }
            Some(child) => {
                let opened = open_listed(directory.as_fd(), &child)?;
                stack.push((child, opened));
            }
        }
    }
    Ok(())
}

/// Unlinks what is in a directory until there is a directory among it, and names that.
fn unlink_up_to_directory(directory: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    for entry in fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name == b"." || name == b".." {
            continue;
        }
        match fs::unlinkat(directory, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR | Errno::PERM) => return Ok(Some(name.to_vec())),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(None)
}

/// Names in a directory, sorted, without `.` and `..`.
pub(crate) fn names(directory: BorrowedFd<'_>) -> io::Result<Vec<Vec<u8>>> {
    let mut names = Vec::new();
    for entry in fs::Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(name.to_vec());
        }
    }
    names.sort();
    Ok(names)
}

/// For messages.
pub(crate) fn display(path: &[u8]) -> String {
    if path.is_empty() { "/".into() } else { OsStr::from_bytes(path).to_string_lossy().into_owned() }
}

fn open_listed(parent: BorrowedFd<'_>, name: &[u8]) -> io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(fs::openat(parent, name, flags, Mode::empty())?)
}

/// Calls `read` with growing buffers until the value fits.
fn read_growing(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    // Attributes are small as a rule; the kernel's bound on a value or a list is 64 KiB.
    let mut buffer = vec![0; 1024];
    loop {
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < 1 << 20 => buffer.resize(buffer.len() * 8, 0),
            Err(error) => return Err(error),
        }
    }
}
