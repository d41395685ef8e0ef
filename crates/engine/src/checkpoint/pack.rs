//! Writes an archive as a stream, with the digest of each member at its end.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;

use flate2::write::GzEncoder;
use sha2::{Digest as _, Sha256};

use super::SUMS;

/// How an archive is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compression {
    /// By zstd: Podman's default.
    Zstd,
    /// By gzip.
    Gzip,
    /// Not at all.
    None,
}

impl Compression {
    /// The one of this name; empty for the default.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "" | "zstd" => Some(Self::Zstd),
            "gzip" => Some(Self::Gzip),
            "none" => Some(Self::None),
            _ => None,
        }
    }
}

/// Where an archive goes.
enum Compressed<W: Write> {
    Zstd(zstd::stream::write::Encoder<'static, W>),
    Gzip(GzEncoder<W>),
    None(W),
}

impl<W: Write> Write for Compressed<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        match self {
            Self::Zstd(encoder) => encoder.write(data),
            Self::Gzip(encoder) => encoder.write(data),
            Self::None(plain) => plain.write(data),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Zstd(encoder) => encoder.flush(),
            Self::Gzip(encoder) => encoder.flush(),
            Self::None(plain) => plain.flush(),
        }
    }
}

/// An archive that is being written. Dropped before its end it is cut off.
pub struct Packer<W: Write> {
    archive: tar::Builder<Valve<Compressed<W>>>,
    /// Lines as `sha256sum` writes them.
    sums: String,
}

/// Lets an archive through until it is shut: its writer would else write an end when it is dropped, which makes a whole one
/// of what is not.
struct Valve<W> {
    to: Option<W>,
}

impl<W: Write> Write for Valve<W> {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.to.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.write(data)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.as_mut().ok_or(io::ErrorKind::BrokenPipe)?.flush()
    }
}

impl<W: Write> Drop for Packer<W> {
    fn drop(&mut self) {
        self.archive.get_mut().to = None;
    }
}

/// What is read, and its digest.
struct Hashed<R> {
    from: R,
    hasher: Sha256,
}

impl<R: Read> Read for Hashed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.from.read(buffer)?;
        self.hasher.update(&buffer[..read]);
        Ok(read)
    }
}

impl<W: Write> Packer<W> {
    /// An archive that goes there.
    ///
    /// # Errors
    /// It cannot be compressed.
    pub fn new(to: W, compression: Compression) -> io::Result<Self> {
        let to = match compression {
            Compression::Zstd => {
                let mut encoder = zstd::stream::write::Encoder::new(to, 3)?;
                encoder.include_checksum(true)?;
                Compressed::Zstd(encoder)
            }
            Compression::Gzip => Compressed::Gzip(GzEncoder::new(to, flate2::Compression::fast())),
            Compression::None => Compressed::None(to),
        };
        Ok(Self { archive: tar::Builder::new(Valve { to: Some(to) }), sums: String::new() })
    }

    fn header(size: u64) -> tar::Header {
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Regular);
        header.set_mode(0o600);
        header.set_size(size);
        header
    }

    /// Adds a member with this content.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn content(&mut self, name: &str, content: &[u8]) -> io::Result<()> {
        let size = u64::try_from(content.len()).map_err(io::Error::other)?;
        self.archive.append_data(&mut Self::header(size), name, content)?;
        self.sums.push_str(&format!("{:x}  {name}\n", Sha256::digest(content)));
        Ok(())
    }

    /// Adds a file, which nobody changes meanwhile.
    ///
    /// # Errors
    /// It cannot be read or written.
    pub fn file(&mut self, name: &str, path: &Path) -> io::Result<()> {
        let file = File::open(path)?;
        let size = file.metadata()?.len();
        let mut hashed = Hashed { from: file.take(size), hasher: Sha256::new() };
        self.archive.append_data(&mut Self::header(size), name, &mut hashed)?;
        if hashed.from.limit() > 0 {
            return Err(io::Error::other(format!("{} has become shorter", path.display())));
        }
        self.sums.push_str(&format!("{:x}  {name}\n", hashed.hasher.finalize()));
        Ok(())
    }

    /// Adds all files of a directory, in the order of their names, as members below `name`.
    ///
    /// # Errors
    /// One cannot be read or written.
    pub fn directory(&mut self, name: &str, directory: &Path) -> io::Result<()> {
        // checkpointctl looks for it.
        let mut header = Self::header(0);
        header.set_entry_type(tar::EntryType::Directory);
        header.set_mode(0o700);
        self.archive.append_data(&mut header, format!("{name}/"), io::empty())?;
        let entries: io::Result<Vec<_>> = fs::read_dir(directory)?.collect();
        let mut entries = entries?;
        entries.sort_by_key(fs::DirEntry::file_name);
        for entry in entries {
            if entry.file_type()?.is_file() {
                let file = entry.file_name();
                let file = file.to_str().ok_or_else(|| io::Error::other("a file has no name in UTF-8"))?;
                self.file(&format!("{name}/{file}"), &entry.path())?;
            }
        }
        Ok(())
    }

    /// Ends the archive.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn finish(mut self) -> io::Result<W> {
        let sums = std::mem::take(&mut self.sums);
        let size = u64::try_from(sums.len()).map_err(io::Error::other)?;
        self.archive.append_data(&mut Self::header(size), SUMS, sums.as_bytes())?;
        self.archive.finish()?;
        let to = self.archive.get_mut().to.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let mut to = match to {
            Compressed::Zstd(encoder) => encoder.finish()?,
            Compressed::Gzip(encoder) => encoder.finish()?,
            Compressed::None(plain) => plain,
        };
        to.flush()?;
        Ok(to)
    }
}
