//! Files of this machine into an archive.
//!
//! The source may be a directory that a service can write to: a bind mount, or a volume. Below what the user has named,
//! files are opened from the open directory that they are in, and no link is followed.

use std::{
    ffi::OsStr,
    fs::File,
    io::{self, Read, Write},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    },
    path::{Component, Path},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use rustix::fs::{self, Mode, OFlags};

use super::pieces::{Outgoing, PIECE, Pieces, Valve, cut_off};

type Archive = tar::Builder<Valve<io::BufWriter<Outgoing>>>;

/// Passes an archive on from standard input.
pub(super) fn read_in(pieces: &Pieces) -> anyhow::Result<()> {
    let mut input = io::stdin().lock();
    let mut buffer = vec![0; PIECE];
    loop {
        let length = input.read(&mut buffer).inspect_err(|_| cut_off(pieces));
        let length = length.context("the archive on standard input cannot be read")?;
        if length == 0 || pieces.blocking_send(Ok(Bytes::copy_from_slice(&buffer[..length]))).is_err() {
            // Whoever takes it has what it needs, or has failed and says why.
            return Ok(());
        }
    }
}

/// Makes an archive of what is at a path, with the path's last component as the name at its top; where `contents` is meant,
/// of what is in the directory.
pub(super) fn pack(path: &Path, contents: bool, pieces: Pieces) -> anyhow::Result<()> {
    let out = io::BufWriter::with_capacity(PIECE, Outgoing(pieces.clone()));
    let mut archive = tar::Builder::new(Valve::new(out));
    let packed = add_all(&mut archive, path, contents).and_then(|()| {
        archive.finish()?;
        Ok(archive.get_mut().flush()?)
    });
    if packed.is_err() {
        archive.get_mut().shut();
    }
    drop(archive);
    if packed.is_err() && pieces.is_closed() {
        // Whoever takes it has failed, and says why.
        return Ok(());
    }
    packed.inspect_err(|_| cut_off(&pieces))
}

fn add_all(archive: &mut Archive, path: &Path, contents: bool) -> anyhow::Result<()> {
    let top = match path.components().next_back() {
        Some(Component::Normal(name)) if !contents => name,
        _ => OsStr::new(""),
    };
    // The path itself may be a link to what is meant.
    let found = fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let found = File::from(found.with_context(|| format!("cannot copy {}", path.display()))?);
    let kind = found.metadata().with_context(|| format!("cannot copy {}", path.display()))?;
    if kind.is_dir() {
        add_directory(archive, found.as_fd(), path, Path::new(top))
    } else if kind.is_file() {
        add_file(archive, found.as_fd(), path, Path::new(top))
    } else {
        bail!("{} is neither a file nor a directory", path.display())
    }
}

/// Opens what an `O_PATH` descriptor is of, and nothing that took its place.
fn reopen(found: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    Ok(fs::open(format!("/proc/self/fd/{}", found.as_raw_fd()), flags | OFlags::CLOEXEC, Mode::empty())?)
}

fn header(found: &std::fs::Metadata) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_metadata(found);
    header
}

/// `path` is for messages.
fn add_directory(
    archive: &mut Archive,
    found: BorrowedFd<'_>,
    path: &Path,
    name: &Path,
) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    let directory = File::from(reopen(found, OFlags::RDONLY | OFlags::DIRECTORY).with_context(failed)?);
    if !name.as_os_str().is_empty() {
        let mut header = header(&directory.metadata().with_context(failed)?);
        header.set_size(0);
        archive.append_data(&mut header, name, io::empty())?;
    }
    let mut entries = Vec::new();
    for entry in fs::Dir::read_from(&directory).with_context(failed)? {
        let entry = entry.with_context(failed)?.file_name().to_bytes().to_vec();
        if entry != b"." && entry != b".." {
            entries.push(entry);
        }
    }
    entries.sort_unstable();
    for entry in entries {
        let entry = OsStr::from_bytes(&entry);
        let (path, name) = (path.join(entry), name.join(entry));
        let failed = || format!("cannot read {}", path.display());
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = File::from(fs::openat(&directory, entry, flags, Mode::empty()).with_context(failed)?);
        let kind = found.metadata().with_context(failed)?;
        if kind.is_dir() {
            add_directory(archive, found.as_fd(), &path, &name)?;
        } else if kind.is_file() {
            add_file(archive, found.as_fd(), &path, &name)?;
        } else if kind.is_symlink() {
            let target = fs::readlinkat(&found, "", Vec::new()).with_context(failed)?;
            let mut header = header(&kind);
            header.set_size(0);
            archive.append_link(&mut header, &name, OsStr::from_bytes(target.as_bytes()))?;
        }
    }
    Ok(())
}

/// As many bytes as it has when it is opened: who goes on writing to it must not write into the archive.
fn add_file(archive: &mut Archive, found: BorrowedFd<'_>, path: &Path, name: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    let file = File::from(reopen(found, OFlags::RDONLY).with_context(failed)?);
    let metadata = file.metadata().with_context(failed)?;
    let mut header = header(&metadata);
    archive.append_data(&mut header, name, Exactly(file.take(metadata.size()))).with_context(failed)
}

/// A file of which it is an error that there is less than was said.
struct Exactly(io::Take<File>);

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let left = self.0.limit();
        match self.0.read(buffer)? {
            0 if left > 0 && !buffer.is_empty() => {
                Err(io::Error::other("it became shorter while it was copied"))
            }
            read => Ok(read),
        }
    }
}
