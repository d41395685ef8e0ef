//! Files of this machine into an archive.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Component, Path},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;

use super::pieces::{Outgoing, PIECE, Pieces, cut_off};

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
    let packed = (|| {
        let top = match path.components().next_back() {
            Some(Component::Normal(name)) if !contents => name,
            _ => OsStr::new(""),
        };
        let out = io::BufWriter::with_capacity(PIECE, Outgoing(pieces.clone()));
        let mut archive = tar::Builder::new(out);
        archive.follow_symlinks(false);
        // The path itself may be a link to what is meant.
        let found = fs::metadata(path).with_context(|| format!("cannot copy {}", path.display()))?;
        if found.is_dir() {
            add_directory(&mut archive, path, Path::new(top))?;
        } else if found.is_file() {
            add_file(&mut archive, path, Path::new(top))?;
        } else {
            bail!("{} is neither a file nor a directory", path.display());
        }
        Ok(archive.into_inner()?.flush()?)
    })();
    if packed.is_err() && pieces.is_closed() {
        // Whoever takes it has failed, and says why.
        return Ok(());
    }
    packed.inspect_err(|_| cut_off(&pieces))
}

fn add_directory<W: Write>(archive: &mut tar::Builder<W>, path: &Path, name: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    if !name.as_os_str().is_empty() {
        archive.append_dir(name, path).with_context(failed)?;
    }
    let mut entries =
        fs::read_dir(path).with_context(failed)?.collect::<Result<Vec<_>, _>>().with_context(failed)?;
    entries.sort_by_key(fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), name.join(entry.file_name()));
        let kind = entry.file_type().with_context(failed)?;
        if kind.is_dir() {
            add_directory(archive, &path, &name)?;
        } else if kind.is_file() {
            add_file(archive, &path, &name)?;
        } else if kind.is_symlink() {
            let failed = || format!("cannot read {}", path.display());
            archive.append_path_with_name(&path, &name).with_context(failed)?;
        }
    }
    Ok(())
}

/// As many bytes as it has when it is opened: who goes on writing to it must not write into the archive.
fn add_file<W: Write>(archive: &mut tar::Builder<W>, path: &Path, name: &Path) -> anyhow::Result<()> {
    let failed = || format!("cannot read {}", path.display());
    // A FIFO that has taken its place is not waited for.
    let file = fs::OpenOptions::new().read(true).custom_flags(nix::libc::O_NONBLOCK).open(path);
    let file = file.with_context(failed)?;
    let found = file.metadata().with_context(failed)?;
    if !found.is_file() {
        bail!("{} was replaced while it was copied", path.display());
    }
    let mut header = tar::Header::new_gnu();
    header.set_metadata(&found);
    let mut contents = file.take(found.size());
    let begun = archive.append_data(&mut header, name, Exactly(&mut contents));
    begun.with_context(failed)
}

/// A file of which it is an error that there is less than was said.
struct Exactly<'a>(&'a mut io::Take<fs::File>);

impl Read for Exactly<'_> {
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
