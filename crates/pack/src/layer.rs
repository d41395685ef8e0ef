//! The layers of an image: plain tar archives, spooled to files without names, whose digests name them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read, Seek as _, SeekFrom, Write};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

use crate::PackError;
use crate::program::MODE;

/// Permissions of a directory that is there for what is in it.
const DIRECTORY_MODE: u32 = 0o755;
/// Of the mode of a file, what an image keeps: permissions, set-user-ID and the like.
const PERMISSIONS: u32 = 0o7777;
/// What a name that means a removal begins with (image-spec, layer.md, "Whiteouts").
const WHITEOUT: &[u8] = b".wh.";

/// A blob of an image, in a file without a name.
#[derive(Debug)]
pub struct Blob {
    /// Hexadecimal digits of its SHA-256.
    pub(crate) hex: String,
    pub(crate) bytes: u64,
    content: File,
}

impl Blob {
    /// What `write` writes, on the disk on which the archive will be.
    pub(crate) fn new(
        output: &Path,
        write: impl FnOnce(&mut dyn Write) -> Result<(), PackError>,
    ) -> Result<Self, PackError> {
        let failed = |error| PackError::Write(output.to_owned(), error);
        let content = tempfile::tempfile_in(directory_of(output)).map_err(failed)?;
        let mut spool = Spool { file: io::BufWriter::new(content), hasher: Sha256::new(), bytes: 0 };
        write(&mut spool)?;
        let content = spool.file.into_inner().map_err(|error| failed(error.into_error()))?;
        let hex = spool.hasher.finalize().iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(Self { hex, bytes: spool.bytes, content })
    }

    /// Its digest as OCI writes it.
    #[must_use]
    pub fn digest(&self) -> String {
        format!("sha256:{}", self.hex)
    }

    /// Its length, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All of it, from its beginning.
    ///
    /// # Errors
    /// It cannot be read back.
    pub fn open(&self) -> io::Result<impl Read> {
        let mut content = &self.content;
        content.seek(SeekFrom::Start(0))?;
        Ok(content.take(self.bytes))
    }
}

struct Spool {
    file: io::BufWriter<File>,
    hasher: Sha256,
    bytes: u64,
}

impl Write for Spool {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hasher.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The directory that a file is in.
pub(crate) fn directory_of(file: &Path) -> &Path {
    file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or_else(|| Path::new("."))
}

/// A header that says nothing of the machine or of now.
pub(crate) fn header(kind: EntryType, mode: u32, bytes: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(mode);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(bytes);
    header
}

/// The executables of one set, by the programs' paths in the image, without the slash at their beginning.
pub(crate) fn programs(programs: &BTreeMap<&str, &[u8]>, output: &Path) -> Result<Blob, PackError> {
    let failed = |error| PackError::Write(output.to_owned(), error);
    let mut directories = BTreeSet::new();
    for path in programs.keys() {
        directories.extend(path.match_indices('/').map(|(at, _)| &path[..at]));
    }
    let write = |into: &mut dyn Write| -> io::Result<()> {
        let mut archive = Builder::new(into);
        for directory in &directories {
            let mut header = header(EntryType::Directory, DIRECTORY_MODE, 0);
            archive.append_data(&mut header, format!("{directory}/"), io::empty())?;
        }
        for (path, bytes) in programs {
            let mut header = header(EntryType::Regular, MODE, bytes.len() as u64);
            archive.append_data(&mut header, path, *bytes)?;
        }
        archive.finish()
    };
    Blob::new(output, |into| write(into).map_err(failed))
}

/// The files of a directory.
pub(crate) fn files(directory: &Path, output: &Path) -> Result<Blob, PackError> {
    let failed = |error| PackError::Write(output.to_owned(), error);
    // The directory itself may be a link to what is meant.
    let top = fs::metadata(directory).map_err(|error| PackError::Read(directory.to_owned(), error))?;
    if !top.is_dir() {
        return Err(PackError::Read(directory.to_owned(), io::ErrorKind::NotADirectory.into()));
    }
    Blob::new(output, |into| {
        let mut archive = Builder::new(into);
        add_below(&mut archive, directory, Path::new(""), &failed)?;
        archive.finish().map_err(failed)
    })
}

/// Adds what is below a directory, which is `inside` in the image. No link is followed.
fn add_below(
    archive: &mut Builder<&mut dyn Write>,
    directory: &Path,
    inside: &Path,
    failed: &impl Fn(io::Error) -> PackError,
) -> Result<(), PackError> {
    let unread = |path: &Path| {
        let path = path.to_owned();
        move |error| PackError::Read(path, error)
    };
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(directory).map_err(unread(directory))? {
        names.insert(entry.map_err(unread(directory))?.file_name());
    }
    for name in names {
        let (path, inside) = (directory.join(&name), inside.join(&name));
        if name.as_bytes().starts_with(WHITEOUT) {
            return Err(PackError::Whiteout(path));
        }
        let metadata = fs::symlink_metadata(&path).map_err(unread(&path))?;
        let mode = metadata.mode() & PERMISSIONS;
        if metadata.is_dir() {
            let mut header = header(EntryType::Directory, mode, 0);
            archive.append_data(&mut header, inside.join(""), io::empty()).map_err(failed)?;
            add_below(archive, &path, &inside, failed)?;
        } else if metadata.is_symlink() {
            let target = fs::read_link(&path).map_err(unread(&path))?;
            let mut header = header(EntryType::Symlink, 0o777, 0);
            archive.append_link(&mut header, &inside, &target).map_err(failed)?;
        } else if metadata.is_file() {
            add_file(archive, path, &inside, mode, failed)?;
        } else {
            return Err(PackError::Kind(path));
        }
    }
    Ok(())
}

fn add_file(
    archive: &mut Builder<&mut dyn Write>,
    path: PathBuf,
    inside: &Path,
    mode: u32,
    failed: &impl Fn(io::Error) -> PackError,
) -> Result<(), PackError> {
    let unread = |error| PackError::Read(path.clone(), error);
    // It may have become a link or a FIFO since it was looked at.
    let flags = i32::try_from((OFlags::NONBLOCK | OFlags::NOFOLLOW).bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(flags).open(&path).map_err(unread)?;
    let metadata = file.metadata().map_err(unread)?;
    if !metadata.is_file() {
        return Err(PackError::Changed(path));
    }
    let length = metadata.len();
    let mut content = Counted { file: file.take(length), read: 0, broken: None };
    let added = archive.append_data(&mut header(EntryType::Regular, mode, length), inside, &mut content);
    let Counted { read, broken, .. } = content;
    match (added, broken) {
        (_, Some(error)) => Err(unread(error)),
        (Ok(()), None) if read == length => Ok(()),
        (Ok(()), None) => Err(PackError::Changed(path)),
        (Err(error), None) => Err(failed(error)),
    }
}

/// A file that is read into an archive: what fails is told apart from what fails to be written.
struct Counted {
    file: io::Take<File>,
    read: u64,
    broken: Option<io::Error>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        match self.file.read(buffer) {
            Ok(read) => {
                self.read += read as u64;
                Ok(read)
            }
            Err(error) => {
                let kind = error.kind();
                self.broken = Some(error);
                Err(kind.into())
            }
        }
    }
}
