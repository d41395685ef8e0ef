//! An archive into files of a container.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::{Copied, CopyError, CopyIn, Filesystem, kind, last, relative, shown, stat};
use crate::beneath::{self, Attributes, Links, Node, Root};
use crate::image::archive::{Member, MemberKind, Reader, Stream};

/// Bytes of a file handled at a time.
const CHUNK: usize = 256 << 10;
/// The permission bits that whoever copies files gives away; those that change who a program runs as are not among them.
const PERMISSIONS: u32 = 0o777;

pub(super) fn copy(to: &Filesystem, how: &CopyIn, from: impl Read) -> Result<Copied, CopyError> {
    let mut reader = Reader::new(Unskippable(from));
    // Nothing is made for what is no archive.
    let mut member = reader.next()?;
    let mut extracting = Extracting {
        filesystem: to,
        how,
        place: Place::find(to, how)?,
        top: None,
        copied: Copied::default(),
        open: Vec::new(),
        buffer: vec![0; CHUNK],
    };
    while let Some(found) = member {
        extracting.member(&found, &mut reader)?;
        member = reader.next()?;
    }
    extracting.end()
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
    /// The directory, open: its own mount, whatever becomes of those above.
    within: Root,
    /// Its path, for messages.
    path: Vec<u8>,
    /// What the only name at the archive's top becomes.
    rename: Option<Vec<u8>>,
    /// There is something that is no directory.
    is_file: bool,
}

impl Place {
    fn find(filesystem: &Filesystem, how: &CopyIn) -> Result<Self, CopyError> {
        let root = &filesystem.root;
        let path = relative(&how.path);
        let failed = |action| move |error| CopyError::io(action, path, error);
        let found = match root.open_at(path, OFlags::PATH) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(failed("find")(error)),
        };
        // What a link leads to is what is meant.
        let real =
            found.as_ref().map(|found| root.path_to(found.as_fd())).transpose().map_err(failed("find"))?;
        let is_directory = match &found {
            Some(found) => match kind(&stat(found.as_fd()).map_err(failed("examine"))?) {
                FileType::Directory => Some(true),
                FileType::RegularFile => Some(false),
                _ => return Err(CopyError::unfit(path, "is neither a file nor a directory")),
            },
            None => None,
        };
        let resolved = real.as_deref().map_or(path, |real| relative(real.as_os_str().as_bytes()));
        let place = |within: OwnedFd, path: &[u8], rename| -> Result<Self, CopyError> {
            filesystem.is_shown(within.as_fd(), path)?;
            let within = Root::of(within, Links::Beneath);
            Ok(Self { within, path: path.to_vec(), rename, is_file: is_directory == Some(false) })
        };
        if let (Some(found), Some(true)) = (found, is_directory) {
            return place(found, resolved, None);
        }
        let name = last(resolved);
        let missing = is_directory.is_none();
        if matches!(name, b"" | b"." | b"..") || (path.ends_with(b"/") && !how.contents) {
            return Err(CopyError::unfit(
                path,
                if missing { "does not exist" } else { "is not a directory" },
            ));
        }
        if how.contents && !missing {
            return Err(CopyError::unfit(path, "is not a directory"));
        }
        let slashes = resolved.iter().rev().take_while(|byte| **byte == b'/').count();
        let above = &resolved[..resolved.len() - slashes - name.len()];
        let above = &above[..above.len() - above.iter().rev().take_while(|byte| **byte == b'/').count()];
        let within =
            root.directory(above).map_err(|error| CopyError::io("find the directory", above, error))?;
        if !how.contents {
            return place(within, above, Some(name.to_vec()));
        }
        let made = place(within, above, None)?;
        let below = rustix::fs::mkdirat(made.within.as_fd(), name, Mode::RWXU).map_err(io::Error::from);
        let below = below.and_then(|()| made.within.directory(name));
        let below = below.map_err(failed("make the directory"))?;
        let attributes = Attributes { mode: 0o755, ..Attributes::default() };
        let node = Node::from(below.try_clone().map_err(failed("make the directory"))?);
        node.set_what_is_supported(false, &attributes)
            .map_err(|fault| CopyError::io("set the mode of", path, fault.error))?;
        place(below, resolved, None)
    }
}

/// A directory that was made, and the time it gets once everything is in it.
struct Open {
    /// Its path in the archive.
    path: Vec<u8>,
    node: Node,
    mtime: (i64, u32),
}

struct Extracting<'a> {
    filesystem: &'a Filesystem,
    how: &'a CopyIn,
    place: Place,
    /// The name at the archive's top, where there may be one only.
    top: Option<Vec<u8>>,
    copied: Copied,
    /// Directories that were made and that the archive has not left: each within the one before.
    open: Vec<Open>,
    buffer: Vec<u8>,
}

impl Extracting<'_> {
    /// The path within the directory for one in the archive; nothing for the directory itself.
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
        let path = parts.join(&b'/');
        beneath::check_path(&path)
            .map_err(|reason| CopyError::Archive(format!("{}: {reason}", String::from_utf8_lossy(name))))?;
        Ok(Some(path))
    }

    /// As the user calls it.
    fn full(&self, path: &[u8]) -> Vec<u8> {
        if self.place.path.is_empty() { path.to_vec() } else { [&self.place.path[..], b"/", path].concat() }
    }

    fn io(&self, action: &'static str, path: &[u8], error: impl Into<io::Error>) -> CopyError {
        CopyError::io(action, &self.full(path), error)
    }

    /// Opens a directory on the way to `path`.
    fn open(&self, directory: &[u8], path: &[u8]) -> Result<OwnedFd, CopyError> {
        match self.place.within.directory(directory) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::XDEV) => {}
            found => return found.map_err(|error| self.io("find the directory of", path, error)),
        }
        // An absolute link, which leads from the container's root, may lead to what is below the destination.
        let (root, full) = (&self.filesystem.root, self.full(directory));
        let found = root.directory(&full).and_then(|found| Ok((root.path_to(found.as_fd())?, found)));
        let (real, found) = found.map_err(|error| self.io("find the directory of", path, error))?;
        match relative(real.as_os_str().as_bytes()).strip_prefix(&self.place.path[..]) {
            Some(below) if self.place.path.is_empty() || below.is_empty() || below[0] == b'/' => Ok(found),
            _ => Err(CopyError::unfit(&full, "is a link that leads out of the destination")),
        }
    }

    /// Opens the directory that a path is in, and splits the name off.
    fn parent<'p>(&self, path: &'p [u8]) -> Result<(OwnedFd, &'p [u8]), CopyError> {
        let (above, name) = beneath::split(path);
        let parent = self.open(above, path)?;
        if let super::Whose::Ended(_) = self.filesystem.whose {
            let full = self.full(path);
            let real = self.filesystem.root.path_to(parent.as_fd());
            let real = real.map_err(|error| self.io("find", path, error))?;
            self.filesystem.is_no_mount(&real.join(std::ffi::OsStr::from_bytes(name)), &full)?;
        }
        Ok((parent, name))
    }

    fn member<S: Stream>(&mut self, member: &Member, reader: &mut Reader<S>) -> Result<(), CopyError> {
        let Some(path) = self.path(&member.path)? else { return Ok(()) };
        self.leave(&path)?;
        if self.place.is_file && member.kind == MemberKind::Directory {
            return Err(CopyError::unfit(
                &self.full(&path),
                "is not a directory, and gets none in its place",
            ));
        }
        let (parent, name) = self.parent(&path)?;
        match member.kind {
            MemberKind::Directory => self.directory(member, path.clone(), parent.as_fd(), name)?,
            MemberKind::File => self.file(member, reader, &path, parent.as_fd(), name)?,
            MemberKind::Symlink => self.link(member, &path, parent.as_fd(), name)?,
            MemberKind::HardLink => {
                let Some(target) = self.path(&member.link)? else {
                    return Err(CopyError::Archive("a hard link leads to a directory".into()));
                };
                let (above, target_name) = self.parent(&target)?;
                let temporary = Temporary::name(name);
                rustix::fs::linkat(&above, target_name, &parent, &temporary[..], AtFlags::empty())
                    .map_err(|error| self.io("link to", &target, error))?;
                self.put(Temporary { parent: parent.as_fd(), name: temporary }, name, &path)?;
            }
            MemberKind::CharacterDevice | MemberKind::BlockDevice | MemberKind::Fifo | MemberKind::Other => {
                return Ok(());
            }
        }
        self.copied.files += 1;
        Ok(())
    }

    /// Gives directories their times that the archive has left when it comes to this path; all of them, for the empty one.
    fn leave(&mut self, path: &[u8]) -> Result<(), CopyError> {
        while let Some(open) = self.open.pop_if(|open| {
            let below = path.strip_prefix(&open.path[..]);
            !below.is_some_and(|below| below.starts_with(b"/"))
        }) {
            open.node.set_mtime(open.mtime).map_err(|error| self.io("set the time of", &open.path, error))?;
        }
        Ok(())
    }

    fn directory(
        &mut self,
        member: &Member,
        path: Vec<u8>,
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), CopyError> {
        match rustix::fs::mkdirat(parent, name, Mode::RWXU) {
            Ok(()) => {}
            Err(Errno::EXIST) => {
                // One that is there stays as it is; so does a link to one.
                return self.open(&path, &path).map(drop);
            }
            Err(error) => return Err(self.io("make the directory", &path, error)),
        }
        let node = Node::at(parent, name).map_err(|error| self.io("examine", &path, error))?;
        self.set(&node, member, FileType::Directory, &path)?;
        if self.open.len() >= super::MAX_DEPTH {
            return Err(CopyError::unfit(&self.full(&path), "is nested more than 256 deep"));
        }
        self.open.push(Open { path, node, mtime: member.mtime });
        Ok(())
    }

    fn file<S: Stream>(
        &mut self,
        member: &Member,
        reader: &mut Reader<S>,
        path: &[u8],
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), CopyError> {
        let mode = Mode::RUSR | Mode::WUSR;
        // Without a name, so that nothing is left of it whatever happens; where the filesystem has no such files, with one.
        let nameless =
            rustix::fs::openat(parent, ".", OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC, mode);
        let (file, named) = match nameless {
            Ok(file) => (file, None),
            Err(Errno::OPNOTSUPP | Errno::ISDIR | Errno::NOENT | Errno::INVAL) => {
                let temporary = Temporary::name(name);
                let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(parent, &temporary[..], flags, mode);
                (
                    file.map_err(|error| self.io("make", path, error))?,
                    Some(Temporary { parent, name: temporary }),
                )
            }
            Err(error) => return Err(self.io("make", path, error)),
        };
        let file = File::from(file);
        self.contents(&file, member, reader, path)?;
        let node = Node::from(OwnedFd::from(file));
        self.set(&node, member, FileType::RegularFile, path)?;
        let temporary = match named {
            Some(temporary) => temporary,
            None => {
                let temporary = Temporary::name(name);
                let of = format!("/proc/self/fd/{}", node.as_fd().as_raw_fd());
                rustix::fs::linkat(rustix::fs::CWD, of, parent, &temporary[..], AtFlags::SYMLINK_FOLLOW)
                    .map_err(|error| self.io("make", path, error))?;
                Temporary { parent, name: temporary }
            }
        };
        self.put(temporary, name, path)?;
        self.copied.bytes += member.size;
        Ok(())
    }

    fn link(
        &self,
        member: &Member,
        path: &[u8],
        parent: BorrowedFd<'_>,
        name: &[u8],
    ) -> Result<(), CopyError> {
        let temporary = Temporary::name(name);
        rustix::fs::symlinkat(&member.link[..], parent, &temporary[..])
            .map_err(|error| self.io("make the link", path, error))?;
        let temporary = Temporary { parent, name: temporary };
        let node = Node::at(parent, &temporary.name).map_err(|error| self.io("examine", path, error))?;
        self.set(&node, member, FileType::Symlink, path)?;
        self.put(temporary, name, path)
    }

    fn set(&self, node: &Node, member: &Member, made: FileType, path: &[u8]) -> Result<(), CopyError> {
        let id = |id: u64| {
            let id = u32::try_from(id).ok().filter(|id| *id != u32::MAX);
            id.ok_or_else(|| CopyError::Archive(format!("the owner of {} is out of range", shown(path))))
        };
        // A process that may rename it may have put something of its own in its place; a file is known by its descriptor.
        let found = node.statx().map_err(|error| self.io("examine", path, error))?;
        let is_own = made == FileType::RegularFile || found.stx_uid == rustix::process::geteuid().as_raw();
        if kind(&found) != made || !is_own {
            return Err(CopyError::unfit(&self.full(path), "was replaced while it was copied"));
        }
        let (uid, gid, mode) = match self.how.keep_owners {
            true => (id(member.uid)?, id(member.gid)?, member.mode),
            false => (0, 0, member.mode & PERMISSIONS),
        };
        let attributes = Attributes { mode, uid, gid, mtime: member.mtime, xattrs: Vec::new() };
        node.set_what_is_supported(made == FileType::Symlink, &attributes)
            .map_err(|fault| self.io("set owner and mode of", path, fault.error))?;
        node.set_mtime(member.mtime).map_err(|error| self.io("set the time of", path, error))
    }

    /// Gives what was made its name.
    fn put(&self, temporary: Temporary<'_>, name: &[u8], path: &[u8]) -> Result<(), CopyError> {
        match rustix::fs::renameat(temporary.parent, &temporary.name[..], temporary.parent, name) {
            Ok(()) => {
                // Of two names of one file rename(2) leaves both, and the first is to go.
                drop(temporary);
                Ok(())
            }
            Err(Errno::ISDIR | Errno::EXIST | Errno::NOTEMPTY) => {
                Err(CopyError::unfit(&self.full(path), "is a directory, and gets no file in its place"))
            }
            Err(Errno::BUSY) => Err(CopyError::unfit(
                &self.full(path),
                "is a mount of its own, and gets nothing in its place",
            )),
            Err(error) => Err(self.io("put in its place", path, error)),
        }
    }

    /// Writes a file's contents; zeros become holes.
    fn contents<S: Stream>(
        &mut self,
        file: &File,
        member: &Member,
        reader: &mut Reader<S>,
        path: &[u8],
    ) -> Result<(), CopyError> {
        static ZEROS: [u8; CHUNK] = [0; CHUNK];
        file.set_len(member.size).map_err(|error| self.io("write", path, error))?;
        let whole = [(0, member.stored)];
        for (offset, length) in member.sparse.as_deref().unwrap_or(&whole) {
            let (mut offset, mut left) = (*offset, *length);
            while left > 0 {
                let most = usize::try_from(left).unwrap_or(CHUNK).min(CHUNK);
                let read = reader.read_data(&mut self.buffer[..most])?;
                if read == 0 {
                    return Err(CopyError::Archive(format!("the data of {} are cut off", shown(path))));
                }
                if self.buffer[..read] != ZEROS[..read] {
                    let written = file.write_all_at(&self.buffer[..read], offset);
                    written.map_err(|error| self.io("write", path, error))?;
                }
                (offset, left) = (offset + read as u64, left - read as u64);
            }
        }
        Ok(())
    }

    fn end(mut self) -> Result<Copied, CopyError> {
        if self.copied.files == 0 && !self.how.contents {
            return Err(CopyError::Archive("there is nothing in it".into()));
        }
        self.leave(b"")?;
        Ok(self.copied)
    }
}

/// What was made under another name, which goes unless it was renamed.
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
}

impl Drop for Temporary<'_> {
    fn drop(&mut self) {
        // Where it was renamed there is nothing; the error that brings another here is the one to tell.
        let _ = rustix::fs::unlinkat(self.parent, &self.name[..], AtFlags::empty());
    }
}
