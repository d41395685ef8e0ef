//! Files copied out of a container's filesystem and into it, as tar archives.
//!
//! The container's processes may change what is copied while it is copied, and lay links for it: every path is resolved as
//! the container sees it ([`crate::beneath`]), and nothing outside can be reached. Files, directories and symbolic links
//! are copied; devices, FIFOs and sockets, which are not contents, are passed over.
//!
//! A file that is written appears whole, or not at all: it takes the place of one that was there by rename(2). What was
//! copied before a failure stays, as with cp(1).

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Statx};
use rustix::io::Errno;

use crate::beneath::{self, Attributes, Links, Node, Root};
use crate::image::archive::{Member, MemberKind, Reader, Stream, TarFault};

/// Bytes of a file handled at a time.
const CHUNK: usize = 256 << 10;
/// How many directories deep files are copied: each is open until all below it is copied.
const MAX_DEPTH: usize = 256;
/// The permission bits that whoever copies files gives away; those that change who a program runs as are not among them.
const PERMISSIONS: u32 = 0o777;

/// Why files could not be copied: a sentence, in which paths are the container's.
#[derive(Debug, thiserror::Error)]
pub enum CopyError {
    /// Something failed.
    #[error("cannot {action} {path} of the service")]
    Io {
        /// What was done.
        action: &'static str,
        /// With what.
        path: String,
        /// What the system said.
        source: io::Error,
    },
    /// What is asked for does not fit what is there.
    #[error("{path} of the service {reason}")]
    Unfit {
        /// The path.
        path: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The archive.
    #[error("the tar archive cannot be read: {0}")]
    Archive(String),
    /// Whoever reads the archive has gone.
    #[error("the copy was not taken to its end")]
    Gone(#[source] io::Error),
}

impl CopyError {
    fn io(action: &'static str, path: &[u8], source: impl Into<io::Error>) -> Self {
        Self::Io { action, path: shown(path), source: source.into() }
    }

    fn unfit(path: &[u8], reason: &'static str) -> Self {
        Self::Unfit { path: shown(path), reason }
    }
}

impl From<TarFault> for CopyError {
    fn from(fault: TarFault) -> Self {
        Self::Archive(match fault {
            TarFault::NotTar => "it is none".into(),
            TarFault::Read { offset, source } => format!("after {offset} bytes: {source}"),
            TarFault::Header { offset, reason } => format!("after {offset} bytes: {reason}"),
        })
    }
}

/// A path below the root, as a user writes it.
fn shown(path: &[u8]) -> String {
    format!("/{}", String::from_utf8_lossy(path).trim_start_matches('/'))
}

/// What was copied.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copied {
    /// Files, directories and links.
    pub files: u64,
    /// Bytes of files.
    pub bytes: u64,
}

/// The root directory of a container.
#[derive(Debug)]
pub struct Filesystem(Root);

impl Filesystem {
    /// That of the process, with all that is mounted for it.
    ///
    /// # Errors
    /// It has ended.
    pub fn of_process(pid: u32) -> io::Result<Self> {
        Self::at(&Path::new("/proc").join(pid.to_string()).join("root"))
    }

    /// The one that is put together here.
    ///
    /// # Errors
    /// There is none.
    pub fn at(root: &Path) -> io::Result<Self> {
        Ok(Self(Root::open(root, Links::InRoot)?))
    }

    /// Where a path leads, links followed: as it is called inside.
    ///
    /// # Errors
    /// There is nothing.
    pub fn resolve(&self, path: &[u8]) -> Result<PathBuf, CopyError> {
        let path = relative(path);
        self.0.path_of(path).map_err(|error| CopyError::io("find", path, error))
    }

    /// Writes an archive of what is at a path, with the path's last component as the name at its top; where that is `.`, or
    /// nothing, of what is in the directory.
    ///
    /// # Errors
    /// There is nothing, or it cannot be read or written to its end.
    pub fn copy_out(&self, path: &[u8], to: impl Write) -> Result<Copied, CopyError> {
        let below = relative(path);
        let top = match last(path) {
            b"" | b"." | b".." => &b""[..],
            name => name,
        };
        let found =
            self.0.open_at(below, OFlags::PATH).map_err(|error| CopyError::io("find", below, error))?;
        let stat = stat(found.as_fd()).map_err(|error| CopyError::io("examine", below, error))?;
        let mut writer =
            Writer { archive: tar::Builder::new(to), copied: Copied::default(), from: below.to_vec() };
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => writer.directory(found, &stat, top, 0)?,
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK;
                let file =
                    self.0.open_at(below, flags).map_err(|error| CopyError::io("open", below, error))?;
                writer.file(file, top)?;
            }
            _ => return Err(CopyError::unfit(below, "is neither a file nor a directory")),
        }
        let mut to = writer.archive.into_inner().map_err(CopyError::Gone)?;
        to.flush().map_err(CopyError::Gone)?;
        Ok(writer.copied)
    }

    /// Writes what an archive has to a path: into the directory that is there; else the only name at the archive's top becomes
    /// the path's last component.
    ///
    /// # Errors
    /// The archive, or what is there.
    pub fn copy_in(&self, how: &CopyIn, from: impl Read) -> Result<Copied, CopyError> {
        let place = self.place(how)?;
        let mut reader = Reader::new(Unskippable(from));
        let mut extracting =
            Extracting { root: &self.0, how, place, top: None, copied: Copied::default(), made: Vec::new() };
        while let Some(member) = reader.next()? {
            extracting.member(&member, &mut reader)?;
        }
        extracting.end()
    }

    fn place(&self, how: &CopyIn) -> Result<Place, CopyError> {
        let path = relative(&how.path);
        let found = match self.0.open_at(path, OFlags::PATH) {
            Ok(found) => Some(stat(found.as_fd()).map_err(|error| CopyError::io("examine", path, error))?),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(CopyError::io("find", path, error)),
        };
        let is_directory =
            found.map(|stat| FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Directory);
        if is_directory == Some(true) {
            let within = self.0.path_of(path).map_err(|error| CopyError::io("find", path, error))?;
            return Ok(Place { within: below(&within), rename: None, is_file: false });
        }
        let name = last(path);
        if matches!(name, b"" | b"." | b"..") || (path.ends_with(b"/") && !how.contents) {
            return Err(CopyError::unfit(
                path,
                if is_directory.is_none() { "does not exist" } else { "is not a directory" },
            ));
        }
        let parent =
            &path[..path.len() - name.len() - path.iter().rev().take_while(|byte| **byte == b'/').count()];
        let within = self.0.directory(parent).and_then(|_| self.0.path_of(parent));
        let within = within.map_err(|error| CopyError::io("find the directory", parent, error))?;
        let is_file = is_directory == Some(false);
        if !how.contents {
            return Ok(Place { within: below(&within), rename: Some(name.to_vec()), is_file });
        }
        if is_file {
            return Err(CopyError::unfit(path, "is not a directory"));
        }
        let made = self.0.directory(parent).and_then(|parent| {
            rustix::fs::mkdirat(&parent, name, Mode::RWXU)?;
            let node = Node::at(parent.as_fd(), name)?;
            let attributes = Attributes { mode: 0o755, ..Attributes::default() };
            node.set_what_is_supported(false, &attributes).map_err(|fault| fault.error)
        });
        made.map_err(|error| CopyError::io("make the directory", path, error))?;
        Ok(Place { within: below(&within.join(OsStr::from_bytes(name))), rename: None, is_file: false })
    }
}

/// Where an archive is written to, and how.
#[derive(Debug, Clone)]
pub struct CopyIn {
    /// The path, as the container sees it.
    pub path: Vec<u8>,
    /// It is a directory, which is made where it is not there.
    pub contents: bool,
    /// Owners are those of the archive; else root.
    pub keep_owners: bool,
}

/// The path without the slashes before it: the empty path is the root.
fn relative(path: &[u8]) -> &[u8] {
    let slashes = path.iter().take_while(|byte| **byte == b'/').count();
    &path[slashes..]
}

/// The last component, slashes behind it passed over.
fn last(path: &[u8]) -> &[u8] {
    let slashes = path.iter().rev().take_while(|byte| **byte == b'/').count();
    beneath::split(&path[..path.len() - slashes]).1
}

/// The same without links, as it is resolved again.
fn below(path: &Path) -> Vec<u8> {
    relative(path.as_os_str().as_bytes()).to_vec()
}

fn stat(fd: BorrowedFd<'_>) -> io::Result<Statx> {
    Ok(rustix::fs::statx(fd, "", AtFlags::EMPTY_PATH, rustix::fs::StatxFlags::BASIC_STATS)?)
}

struct Writer<W: Write> {
    archive: tar::Builder<W>,
    copied: Copied,
    /// What is copied, for messages.
    from: Vec<u8>,
}

impl<W: Write> Writer<W> {
    fn failed(&self, action: &'static str, error: impl Into<io::Error>) -> CopyError {
        CopyError::io(action, &self.from, error)
    }

    fn header(stat: &Statx, kind: tar::EntryType) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(u32::from(stat.stx_mode) & 0o7777);
        header.set_uid(stat.stx_uid.into());
        header.set_gid(stat.stx_gid.into());
        // A time before 1970 has no place in the header.
        header.set_mtime(u64::try_from(stat.stx_mtime.tv_sec).unwrap_or(0));
        header.set_size(0);
        header
    }

    fn add(&mut self, mut header: tar::Header, name: &[u8], data: impl Read) -> Result<(), CopyError> {
        self.copied.files += 1;
        self.archive.append_data(&mut header, OsStr::from_bytes(name), data).map_err(CopyError::Gone)
    }

    fn directory(
        &mut self,
        directory: OwnedFd,
        found: &Statx,
        name: &[u8],
        depth: usize,
    ) -> Result<(), CopyError> {
        if depth > MAX_DEPTH {
            return Err(CopyError::unfit(&self.from, "has directories that are nested more than 256 deep"));
        }
        let prefix = if name.is_empty() { Vec::new() } else { [name, b"/"].concat() };
        if !prefix.is_empty() {
            self.add(Self::header(found, tar::EntryType::Directory), &prefix, io::empty())?;
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let listed = rustix::fs::openat(&directory, ".", flags, Mode::empty())
            .map_err(|error| self.failed("list", error))?;
        drop(directory);
        for entry in beneath::names(listed.as_fd()).map_err(|error| self.failed("list", error))? {
            self.entry(listed.as_fd(), &entry, &[&prefix[..], &entry].concat(), depth + 1)?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        parent: BorrowedFd<'_>,
        entry: &[u8],
        name: &[u8],
        depth: usize,
    ) -> Result<(), CopyError> {
        let node = match Node::at(parent, entry) {
            // It was removed since it was listed.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            node => node.map_err(|error| self.failed("examine", error))?,
        };
        let stat = node.statx().map_err(|error| self.failed("examine", error))?;
        match FileType::from_raw_mode(stat.stx_mode.into()) {
            FileType::Directory => self.directory(node.into(), &stat, name, depth),
            FileType::Symlink => {
                let target = node.link_target().map_err(|error| self.failed("read a link in", error))?;
                self.link(&stat, name, &target)
            }
            FileType::RegularFile => {
                let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
                match rustix::fs::openat(parent, entry, flags, Mode::empty()) {
                    Ok(file) => self.file(file, name),
                    // It was removed, or a link was put in its place, since it was listed.
                    Err(Errno::NOENT | Errno::LOOP) => Ok(()),
                    Err(error) => Err(self.failed("open a file in", error)),
                }
            }
            _ => Ok(()),
        }
    }

    fn link(&mut self, found: &Statx, name: &[u8], target: &[u8]) -> Result<(), CopyError> {
        self.copied.files += 1;
        let mut header = Self::header(found, tar::EntryType::Symlink);
        let (name, target) = (OsStr::from_bytes(name), OsStr::from_bytes(target));
        self.archive.append_link(&mut header, name, target).map_err(CopyError::Gone)
    }

    /// As many bytes as it has when it is opened: what is written behind them meanwhile is not copied.
    fn file(&mut self, file: OwnedFd, name: &[u8]) -> Result<(), CopyError> {
        let found = stat(file.as_fd()).map_err(|error| self.failed("examine", error))?;
        if FileType::from_raw_mode(found.stx_mode.into()) != FileType::RegularFile {
            return Ok(());
        }
        let mut header = Self::header(&found, tar::EntryType::Regular);
        header.set_size(found.stx_size);
        let mut contents = Exactly { file: File::from(file), left: found.stx_size, fault: None };
        let added = self.add(header, name, &mut contents);
        match contents.fault {
            Some(fault) => {
                Err(CopyError::io("read a file in", &[&self.from[..], b": ", name].concat(), fault))
            }
            None => added,
        }?;
        self.copied.bytes += found.stx_size;
        Ok(())
    }
}

/// A file of which so many bytes are read: that there are fewer is an error, which the archive's writer does not see.
struct Exactly {
    file: File,
    left: u64,
    fault: Option<io::Error>,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        if most == 0 {
            return Ok(0);
        }
        let read = self.file.read(&mut buffer[..most]).and_then(|read| match read {
            0 => Err(io::Error::other("it became shorter while it was copied")),
            read => Ok(read),
        });
        match read {
            Ok(read) => {
                self.left -= read as u64;
                Ok(read)
            }
            Err(error) => {
                let kind = error.kind();
                self.fault = Some(error);
                Err(kind.into())
            }
        }
    }
}

/// A stream of which bytes are passed over by reading them.
struct Unskippable<R>(R);

impl<R: Read> Read for Unskippable<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl<R: Read> Stream for Unskippable<R> {
    fn skip(&mut self, count: u64) -> io::Result<()> {
        let skipped = io::copy(&mut (&mut self.0).take(count), &mut io::sink())?;
        if skipped == count { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
    }
}

/// Where an archive is written to.
struct Place {
    /// The directory, without links.
    within: Vec<u8>,
    /// What the only name at the archive's top becomes.
    rename: Option<Vec<u8>>,
    /// There is something that is no directory.
    is_file: bool,
}

struct Extracting<'a> {
    root: &'a Root,
    how: &'a CopyIn,
    place: Place,
    /// The name at the archive's top, where there may be one only.
    top: Option<Vec<u8>>,
    copied: Copied,
    /// Directories that were made, and the times they get once everything is in them.
    made: Vec<(Vec<u8>, (i64, u32))>,
}

impl Extracting<'_> {
    /// The path below the root for one in the archive; nothing for the directory that is there.
    fn path(&mut self, name: &[u8]) -> Result<Option<Vec<u8>>, CopyError> {
        let parts = name.split(|byte| *byte == b'/').filter(|part| !part.is_empty() && *part != b".");
        let mut parts: Vec<&[u8]> = parts.collect();
        if let (Some(renamed), Some(first)) = (&self.place.rename, parts.first_mut()) {
            let top = self.top.get_or_insert_with(|| first.to_vec());
            if top != first {
                return Err(CopyError::Archive(format!(
                    "{} and {} are both at its top, and {} is not a directory to copy them into",
                    String::from_utf8_lossy(top),
                    String::from_utf8_lossy(first),
                    shown(&self.how.path),
                )));
            }
            *first = renamed;
        }
        if parts.is_empty() {
            return Ok(None);
        }
        let below = parts.join(&b'/');
        beneath::check_path(&below)
            .map_err(|reason| CopyError::Archive(format!("{}: {reason}", String::from_utf8_lossy(name))))?;
        let within = &self.place.within;
        Ok(Some(if within.is_empty() { below } else { [&within[..], b"/", &below].concat() }))
    }

    fn member<S: Stream>(&mut self, member: &Member, reader: &mut Reader<S>) -> Result<(), CopyError> {
        let Some(path) = self.path(&member.path)? else { return Ok(()) };
        if self.place.is_file && member.kind == MemberKind::Directory {
            return Err(CopyError::unfit(&path, "is not a directory, and gets none in its place"));
        }
        let (parent, name) = beneath::split(&path);
        let parent = self
            .root
            .directory(parent)
            .map_err(|error| CopyError::io("find the directory of", &path, error))?;
        match member.kind {
            MemberKind::Directory => self.directory(member, &path, parent.as_fd(), name)?,
            MemberKind::File => {
                let temporary = Temporary::name(name);
                let flags =
                    OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(&parent, &temporary[..], flags, Mode::RUSR | Mode::WUSR)
                    .map_err(|error| CopyError::io("make", &path, error))?;
                let temporary = Temporary { parent: parent.as_fd(), name: temporary };
                let bytes = contents(&File::from(file), member, reader, &path)?;
                self.put(temporary, member, &path, name)?;
                self.copied.bytes += bytes;
            }
            MemberKind::Symlink => {
                let temporary = Temporary::name(name);
                rustix::fs::symlinkat(&member.link[..], &parent, &temporary[..])
                    .map_err(|error| CopyError::io("make the link", &path, error))?;
                self.put(Temporary { parent: parent.as_fd(), name: temporary }, member, &path, name)?;
            }
            MemberKind::HardLink => {
                let Some(target) = self.path(&member.link)? else {
                    return Err(CopyError::Archive("a hard link leads to a directory".into()));
                };
                let (above, target_name) = beneath::split(&target);
                let above =
                    self.root.directory(above).map_err(|error| CopyError::io("find", &target, error))?;
                let temporary = Temporary::name(name);
                rustix::fs::linkat(&above, target_name, &parent, &temporary[..], AtFlags::empty())
                    .map_err(|error| CopyError::io("link to", &target, error))?;
                Temporary { parent: parent.as_fd(), name: temporary }.become_(name, &path)?;
            }
            MemberKind::CharacterDevice | MemberKind::BlockDevice | MemberKind::Fifo | MemberKind::Other => {
                return Ok(());
            }
        }
        self.copied.files += 1;
        Ok(())
    }

    fn directory(
        &mut self,
        member: &Member,
        path: &[u8],
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), CopyError> {
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                // One that is there stays as it is; so does a link to one.
                let there = self.root.directory(path);
                return there.map(drop).map_err(|error| CopyError::io("use as a directory", path, error));
            }
            Err(error) => return Err(CopyError::io("make the directory", path, error)),
        }
        let node = Node::at(parent, name).map_err(|error| CopyError::io("examine", path, error))?;
        self.set(&node, member, path)?;
        self.made.push((path.to_vec(), member.mtime));
        Ok(())
    }

    /// Gives what was made its attributes and its name.
    fn put(
        &self,
        temporary: Temporary<'_>,
        member: &Member,
        path: &[u8],
        name: &[u8],
    ) -> Result<(), CopyError> {
        let node = Node::at(temporary.parent, &temporary.name)
            .map_err(|error| CopyError::io("examine", path, error))?;
        self.set(&node, member, path)?;
        temporary.become_(name, path)
    }

    fn set(&self, node: &Node, member: &Member, path: &[u8]) -> Result<(), CopyError> {
        let id = |id: u64| {
            let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| CopyError::Archive(format!("the owner of {} is out of range", shown(path))))
        };
        let (uid, gid, mode) = match self.how.keep_owners {
            true => (id(member.uid)?, id(member.gid)?, member.mode),
            false => (0, 0, member.mode & PERMISSIONS),
        };
        let attributes = Attributes { mode, uid, gid, mtime: member.mtime, xattrs: Vec::new() };
        node.set_what_is_supported(member.kind == MemberKind::Symlink, &attributes)
            .map_err(|fault| CopyError::io("set owner and mode of", path, fault.error))?;
        node.set_mtime(member.mtime).map_err(|error| CopyError::io("set the time of", path, error))
    }

    fn end(self) -> Result<Copied, CopyError> {
        if self.copied.files == 0 && !self.how.contents {
            return Err(CopyError::Archive("there is nothing in it".into()));
        }
        for (path, mtime) in self.made.iter().rev() {
            // The container's processes may have put something else in its place.
            let Ok(node) = self.root.node(path) else { continue };
            node.set_mtime(*mtime).map_err(|error| CopyError::io("set the time of", path, error))?;
        }
        Ok(self.copied)
    }
}

/// Writes a file's contents; zeros become holes.
fn contents<S: Stream>(
    file: &File,
    member: &Member,
    reader: &mut Reader<S>,
    path: &[u8],
) -> Result<u64, CopyError> {
    use std::os::unix::fs::FileExt as _;
    let written = |result: io::Result<()>| result.map_err(|error| CopyError::io("write", path, error));
    written(file.set_len(member.size))?;
    let mut buffer = vec![0; CHUNK];
    let zeros = vec![0; CHUNK];
    let whole = [(0, member.stored)];
    for (offset, length) in member.sparse.as_deref().unwrap_or(&whole) {
        let (mut offset, mut left) = (*offset, *length);
        while left > 0 {
            let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
            let read = reader.read_data(&mut buffer[..most])?;
            if read == 0 {
                return Err(CopyError::Archive(format!("the data of {} are cut off", shown(path))));
            }
            if buffer[..read] != zeros[..read] {
                written(file.write_all_at(&buffer[..read], offset))?;
            }
            (offset, left) = (offset + read as u64, left - read as u64);
        }
    }
    Ok(member.size)
}

/// What was made under another name, which goes when it does not get its own.
struct Temporary<'a> {
    parent: BorrowedFd<'a>,
    name: Vec<u8>,
}

impl Temporary<'_> {
    /// A name that nobody else has: another copy of the same file has another number.
    fn name(of: &[u8]) -> Vec<u8> {
        use std::sync::atomic::{AtomicU64, Ordering};
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = format!(".godwit-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let kept = of.len().min(beneath::MAX_NAME - number.len() - 1);
        [b".", &of[..kept], number.as_bytes()].concat()
    }

    fn become_(self, name: &[u8], path: &[u8]) -> Result<(), CopyError> {
        let renamed = rustix::fs::renameat(self.parent, &self.name[..], self.parent, name);
        match renamed {
            Ok(()) => {
                // It has its name: there is nothing to remove.
                std::mem::forget(self);
                Ok(())
            }
            Err(Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY) => {
                Err(CopyError::unfit(path, "is a directory, and gets no file in its place"))
            }
            Err(Errno::BUSY) => {
                Err(CopyError::unfit(path, "is a mount of its own, and gets nothing in its place"))
            }
            Err(error) => Err(CopyError::io("put in its place", path, error)),
        }
    }
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // The error that brings it here is the one to tell.
        let _ = rustix::fs::unlinkat(self.parent, &self.name[..], AtFlags::empty());
    }
}

#[cfg(test)]
mod tests;
