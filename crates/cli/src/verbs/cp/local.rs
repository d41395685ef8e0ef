//! This machine's end of a copy: files into an archive, an archive into files.

use std::{
    ffi::OsStr,
    fs,
    io::{self, Read, Write},
    os::unix::fs::FileTypeExt as _,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use tokio::sync::mpsc;

use super::Pieces;

/// Bytes of a piece of an archive.
const PIECE: usize = 256 << 10;

/// An archive that comes in pieces.
pub(super) struct Incoming {
    pieces: mpsc::Receiver<io::Result<Bytes>>,
    piece: Bytes,
}

impl Incoming {
    pub(super) fn new(pieces: mpsc::Receiver<io::Result<Bytes>>) -> Self {
        Self { pieces, piece: Bytes::new() }
    }
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.piece.is_empty() {
            match self.pieces.blocking_recv() {
                Some(piece) => self.piece = piece?,
                None => return Ok(0),
            }
        }
        let length = self.piece.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.piece.split_to(length));
        Ok(length)
    }
}

/// An archive that goes in pieces.
struct Outgoing(Pieces);

impl Write for Outgoing {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.0.blocking_send(Ok(Bytes::copy_from_slice(data))).map_err(|_| io::ErrorKind::BrokenPipe)?;
        Ok(data.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Passes an archive on to standard output.
pub(super) fn write_out(mut archive: Incoming) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    io::copy(&mut archive, &mut out)?;
    Ok(out.flush()?)
}

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

/// What has gone is not all.
fn cut_off(pieces: &Pieces) {
    let _ = pieces.blocking_send(Err(io::Error::other("it is cut off")));
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
            let mut file = fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
            archive.append_file(top, &mut file).with_context(|| format!("cannot read {}", path.display()))?;
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
        } else if !(kind.is_socket() || kind.is_fifo() || kind.is_block_device() || kind.is_char_device()) {
            archive
                .append_path_with_name(&path, &name)
                .with_context(|| format!("cannot read {}", path.display()))?;
        }
    }
    Ok(())
}

/// Writes what an archive has to a path: into the directory that is there; else the only name at the archive's top becomes
/// the path's. With `contents` the path is a directory, which is made where it is not there.
pub(super) fn unpack(archive: impl Read, to: &Path, contents: bool, keep_owners: bool) -> anyhow::Result<()> {
    if contents && !to.exists() {
        fs::create_dir(to).with_context(|| format!("cannot make the directory {}", to.display()))?;
    }
    let into = to.is_dir();
    if !into && (contents || to.to_string_lossy().ends_with('/')) {
        bail!("{} is not a directory", to.display());
    }
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_ownerships(keep_owners);
    archive.set_preserve_permissions(keep_owners);
    let mut directories = Vec::new();
    let mut is_empty = true;
    for entry in archive.entries()? {
        let mut entry = entry.context("the archive is damaged")?;
        let place = place(&entry.path()?, to, into)?;
        is_empty = false;
        if place != to {
            stays_within(&place, to)?;
        }
        let failed = || format!("cannot write {}", place.display());
        if entry.header().entry_type().is_dir() {
            if !place.is_dir() {
                fs::create_dir(&place).with_context(failed)?;
                directories.push((entry, place));
            }
            continue;
        }
        if place.is_dir() {
            bail!("{} is a directory, and gets no file in its place", place.display());
        }
        entry.unpack(&place).with_context(failed)?;
    }
    // Their modes and times last: what is written into them changes these.
    for (mut entry, place) in directories.into_iter().rev() {
        entry.unpack(&place).with_context(|| format!("cannot write {}", place.display()))?;
    }
    if is_empty && !contents {
        bail!("there is nothing to copy");
    }
    Ok(())
}

/// Where a member of an archive goes.
fn place(member: &Path, to: &Path, into: bool) -> anyhow::Result<PathBuf> {
    let mut parts = Vec::new();
    for part in member.components() {
        match part {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            _ => bail!("the archive has {}, which leads out of it", member.display()),
        }
    }
    if parts.is_empty() {
        bail!("the archive has a member without a name");
    }
    let below = if into { &parts[..] } else { &parts[1..] };
    Ok(below.iter().fold(to.to_path_buf(), |path, part| path.join(part)))
}

/// The directory that a member is in is not reached by a link that leads out of the one that gets them.
fn stays_within(place: &Path, to: &Path) -> anyhow::Result<()> {
    let real = |path: &Path| {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        path.canonicalize().with_context(|| format!("there is no directory {}", path.display()))
    };
    let (parent, within) = (real(place.parent().unwrap_or(Path::new(".")))?, real(to)?);
    if !parent.starts_with(&within) {
        bail!("{} is reached by a link that leads out of {}", place.display(), to.display());
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn packed(path: &Path, contents: bool) -> Vec<u8> {
        let (pieces, mut incoming) = mpsc::channel(1024);
        pack(path, contents, pieces).unwrap();
        let mut archive = Vec::new();
        while let Ok(piece) = incoming.try_recv() {
            archive.extend_from_slice(&piece.unwrap());
        }
        archive
    }

    fn tree() -> tempfile::TempDir {
        let scratch = tempfile::tempdir().unwrap();
        let source = scratch.path().join("source");
        fs::create_dir_all(source.join("deep")).unwrap();
        fs::write(source.join("file"), "one").unwrap();
        fs::write(source.join("deep/other"), "two").unwrap();
        symlink("file", source.join("link")).unwrap();
        scratch
    }

    #[test]
    fn a_path_says_where_what_is_copied_goes() {
        let scratch = tree();
        let at = |path: &str| scratch.path().join(path);
        let read = |path: &str| fs::read_to_string(at(path)).unwrap();
        let (whole, contents) = (packed(&at("source"), false), packed(&at("source/."), true));
        // Under another name; into a directory; its contents, into one that is there and into a new one.
        unpack(&whole[..], &at("new"), false, false).unwrap();
        assert_eq!(
            (read("new/file"), read("new/deep/other"), read("new/link")),
            ("one".into(), "two".into(), "one".into())
        );
        unpack(&whole[..], &at("new"), false, false).unwrap();
        assert_eq!(read("new/source/deep/other"), "two");
        fs::create_dir(at("there")).unwrap();
        unpack(&contents[..], &at("there"), true, false).unwrap();
        unpack(&contents[..], &at("made"), true, false).unwrap();
        assert_eq!((read("there/file"), read("made/deep/other")), ("one".into(), "two".into()));
        let file = packed(&at("source/file"), false);
        unpack(&file[..], &at("name"), false, false).unwrap();
        unpack(&file[..], &at("there/"), false, false).unwrap();
        assert_eq!((read("name"), read("there/file")), ("one".into(), "one".into()));
        assert!(unpack(&file[..], &at("none/"), false, false).is_err());
        assert!(unpack(&file[..], &at("none/x"), false, false).is_err());
        assert!(unpack(&contents[..], &at("name"), true, false).is_err());
        assert!(unpack(&whole[..], &at("name"), false, false).is_err());
        assert_eq!(read("name"), "one");
    }

    #[test]
    fn nothing_is_written_outside() {
        let scratch = tree();
        let outside = scratch.path().join("outside");
        let to = scratch.path().join("to");
        fs::create_dir(&outside).unwrap();
        fs::create_dir(&to).unwrap();
        let archive = |name: &str| {
            let mut builder = tar::Builder::new(Vec::new());
            let mut header = tar::Header::new_gnu();
            header.set_entry_type(tar::EntryType::Symlink);
            header.set_size(0);
            builder.append_link(&mut header, "x", &outside).unwrap();
            let mut header = tar::Header::new_gnu();
            header.set_size(4);
            header.set_mode(0o644);
            header.as_gnu_mut().unwrap().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_cksum();
            builder.append(&header, &b"harm"[..]).unwrap();
            builder.into_inner().unwrap()
        };
        for name in ["x/file", "../outside/file", "/outside/file"] {
            assert!(unpack(&archive(name)[..], &to, false, false).is_err(), "{name}");
        }
        assert_eq!(fs::read_dir(&outside).unwrap().count(), 0);
    }
}
