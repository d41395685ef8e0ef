//! Files of a container into an archive.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;

use rustix::fs::{Dir, FileType, OFlags, Statx};
use rustix::io::Errno;

use super::{
    Copied, CopyError, Filesystem, MAX_DEPTH, is_made_by_the_kernel, kind, last, relative, reopen, stat,
};
use crate::beneath::Node;

pub(super) fn copy(from: &Filesystem, path: &[u8], to: impl Write) -> Result<Copied, CopyError> {
    let below = relative(path);
    let top = match last(path) {
        b"" | b"." | b".." => &b""[..],
        name => name,
    };
    let failed = |action| move |error| CopyError::io(action, below, error);
    let found = from.root.open_at(below, OFlags::PATH).map_err(failed("find"))?;
    from.is_shown(found.as_fd(), below)?;
    let stat = stat(found.as_fd()).map_err(failed("examine"))?;
    if is_made_by_the_kernel(&found).map_err(failed("examine"))? {
        return Err(CopyError::unfit(
            below,
            "is made by the kernel as it is read: `godwit exec` shows it (`cat`)",
        ));
    }
    let archive = tar::Builder::new(Valve { to, is_shut: false });
    let mut writer = Writer { archive, copied: Copied::default(), from: below.to_vec(), filesystem: from };
    let copied = match kind(&stat) {
        FileType::Directory => writer.directory(found.as_fd(), &stat, top, 0),
        FileType::RegularFile => writer.file(found.as_fd(), top),
        _ => Err(CopyError::unfit(below, "is neither a file nor a directory")),
    };
    let copied = copied.and_then(|()| {
        writer.archive.finish().and_then(|()| writer.archive.get_mut().flush()).map_err(CopyError::Gone)
    });
    writer.archive.get_mut().is_shut = true;
    copied.map(|()| writer.copied)
}

/// Lets an archive through until it is shut: its writer would else write an end when it is dropped, which makes a whole one
/// of what is not.
struct Valve<W> {
    to: W,
    is_shut: bool,
}

impl<W: Write> Write for Valve<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        if self.is_shut { Err(io::ErrorKind::BrokenPipe.into()) } else { self.to.write(data) }
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.is_shut { Err(io::ErrorKind::BrokenPipe.into()) } else { self.to.flush() }
    }
}

struct Writer<'a, W: Write> {
    archive: tar::Builder<Valve<W>>,
    copied: Copied,
    /// What is copied, for messages.
    from: Vec<u8>,
    filesystem: &'a Filesystem,
}

/// It was removed since it was listed.
fn is_gone(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::SRCH | Errno::STALE))
}

impl<W: Write> Writer<'_, W> {
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
        directory: BorrowedFd<'_>,
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
        // At the root of what was given, that was looked at.
        if depth > 0 && is_made_by_the_kernel(directory).map_err(|error| self.failed("examine", error))? {
            return Ok(());
        }
        if self.filesystem.is_shown(directory, &self.from).is_err() {
            return Ok(());
        }
        let listed = reopen(directory, OFlags::RDONLY | OFlags::DIRECTORY)
            .map_err(|error| self.failed("list", error))?;
        for entry in Dir::read_from(&listed).map_err(|error| self.failed("list", error))? {
            let entry = entry.map_err(|error| self.failed("list", error))?;
            let entry = entry.file_name().to_bytes();
            if entry != b"." && entry != b".." {
                self.entry(listed.as_fd(), entry, &[&prefix[..], entry].concat(), depth + 1)?;
            }
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
            Err(error) if is_gone(&error) => return Ok(()),
            node => node.map_err(|error| self.failed("examine", error))?,
        };
        let stat = node.statx().map_err(|error| self.failed("examine", error))?;
        match kind(&stat) {
            FileType::Directory => self.directory(node.as_fd(), &stat, name, depth),
            FileType::RegularFile => self.file(node.as_fd(), name),
            FileType::Symlink => match node.link_target() {
                Err(error) if is_gone(&error) => Ok(()),
                target => {
                    let target = target.map_err(|error| self.failed("read a link in", error))?;
                    self.link(&stat, name, &target)
                }
            },
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
    fn file(&mut self, examined: BorrowedFd<'_>, name: &[u8]) -> Result<(), CopyError> {
        let in_it = |error| CopyError::io("read", &[&self.from[..], b": ", name].concat(), error);
        // A device that has taken its place since it was examined would be opened by this alone.
        let file: OwnedFd = match reopen(examined, OFlags::RDONLY | OFlags::NONBLOCK) {
            Err(error) if is_gone(&error) => return Ok(()),
            file => file.map_err(in_it)?,
        };
        let found = stat(file.as_fd()).map_err(in_it)?;
        let mut header = Self::header(&found, tar::EntryType::Regular);
        header.set_size(found.stx_size);
        let mut contents = Exactly { file: File::from(file), left: found.stx_size, fault: None };
        let added = self.add(header, name, &mut contents);
        match contents.fault {
            Some(fault) => Err(CopyError::io("read", &[&self.from[..], b": ", name].concat(), fault)),
            None => added,
        }?;
        self.copied.bytes += found.stx_size;
        Ok(())
    }
}

/// A file of which so many bytes are read: that there are fewer is an error, which the archive's writer does not see.
pub(super) struct Exactly {
    pub(super) file: File,
    pub(super) left: u64,
    pub(super) fault: Option<io::Error>,
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
