//! The store: blobs come in verified, layers are unpacked once, both appear whole or not at all.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use rustix::fs::FlockOperation;
use tempfile::{NamedTempFile, TempDir};

use super::collect::Holds;
use super::digest::Hashing;
use super::named::NAMES;
use super::{Digest, ImageError, LayerFault, layer};
use crate::beneath;

/// Only root may look in: layers hold setuid programs and device nodes of strangers.
const DIRECTORY_MODE: u32 = 0o700;

/// The directories in which a layer has its name. The first of them says that it can be used, so that it loses its
/// name there first.
pub(super) const PARTS: [&str; 3] = ["layers/sha256", "diff_ids/sha256", "blobs/sha256"];

/// A directory of blobs and unpacked layers. Several may have it open at once; a clone is the
/// same opening.
#[derive(Debug, Clone)]
pub struct Store {
    directory: PathBuf,
    /// Holds the lock file's shared lock for as long as the store or a writer is there.
    lock: Arc<File>,
    /// Of all clones.
    pub(super) holds: Arc<Holds>,
    /// The same: only one changes what a name stands for.
    pub(super) naming: Arc<Mutex<()>>,
}

impl Store {
    /// Opens the store in `directory`, which is made when it is not there. What an interrupted
    /// user left half-made is removed, unless others have the store open.
    pub fn open(directory: &Path) -> Result<Self, ImageError> {
        let fault = |action: &str| {
            let (store, action) = (directory.to_path_buf(), action.to_owned());
            move |source: io::Error| ImageError::Store { store, action, source }
        };
        for part in PARTS.into_iter().chain(["tmp", NAMES]) {
            let mut builder = fs::DirBuilder::new();
            builder.recursive(true).mode(DIRECTORY_MODE);
            builder.create(directory.join(part)).map_err(fault("make its directories"))?;
        }
        let directory = directory.canonicalize().map_err(fault("find its directory"))?;
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let lock = options.open(directory.join("lock")).map_err(fault("open its lock"))?;
        let alone = rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok();
        let store = Self { directory, lock: Arc::new(lock), holds: Arc::default(), naming: Arc::default() };
        if alone {
            store.sweep().map_err(|error| store.fault("remove what was half-made in tmp", error))?;
        }
        rustix::fs::flock(&store.lock, FlockOperation::LockShared)
            .map_err(|error| store.fault("take its lock", error.into()))?;
        Ok(store)
    }

    /// The directory it is in.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Whether the layer is there, unpacked.
    #[must_use]
    pub fn has_layer(&self, digest: &Digest) -> bool {
        self.layer_path(digest).is_dir()
    }

    /// Whether the layer's blob is there, to be sent to another node.
    #[must_use]
    pub fn has_blob(&self, digest: &Digest) -> bool {
        self.blob_path(digest).is_file()
    }

    /// Where the layer is when it is unpacked: a lower directory for overlayfs.
    #[must_use]
    pub fn layer_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join("layers/sha256").join(digest.hex())
    }

    /// Opens a blob to send it: the file and its length in bytes.
    pub fn open_blob(&self, digest: &Digest) -> Result<(File, u64), ImageError> {
        let file = match File::open(self.blob_path(digest)) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(ImageError::NoBlob { store: self.directory.clone(), digest: digest.clone() });
            }
            Err(error) => return Err(self.fault(&format!("open blob {digest}"), error)),
        };
        let length =
            file.metadata().map_err(|error| self.fault(&format!("examine blob {digest}"), error))?.len();
        Ok((file, length))
    }

    /// Takes in a blob of which digest and length are announced.
    pub fn blob_writer(&self, digest: &Digest, length: u64) -> Result<BlobWriter, ImageError> {
        self.writer(Some((digest.clone(), length)))
    }

    /// Takes in a blob whose digest is not known before.
    pub(super) fn new_blob_writer(&self) -> Result<BlobWriter, ImageError> {
        self.writer(None)
    }

    /// Unpacks the blob with this digest, plain or compressed by gzip or zstd as its first bytes
    /// say. No work when that was done before.
    pub fn unpack(&self, digest: &Digest) -> Result<(), ImageError> {
        if self.has_layer(digest) { Ok(()) } else { self.unpack_now(digest, None) }
    }

    /// As [`Store::unpack`], and refuses a layer whose tar stream has another digest than
    /// `diff_id`.
    pub fn unpack_verified(&self, digest: &Digest, diff_id: &Digest) -> Result<(), ImageError> {
        if self.has_layer(digest)
            && let Some(found) = self.diff_id(digest)
        {
            if found != *diff_id {
                let fault = LayerFault::DiffId { expected: diff_id.clone(), found };
                return Err(ImageError::Layer { digest: digest.clone(), fault });
            }
            return Ok(());
        }
        self.unpack_now(digest, Some(diff_id))
    }

    /// Bytes that can be written to the store's filesystem.
    pub fn available_bytes(&self) -> Result<u64, ImageError> {
        Ok(self.space()?.0)
    }

    /// Bytes that can be written to the store's filesystem, and bytes that it has in all.
    pub fn space(&self) -> Result<(u64, u64), ImageError> {
        let stat = rustix::fs::statvfs(&self.directory)
            .map_err(|error| self.fault("ask for the free space", error.into()))?;
        Ok((stat.f_bavail.saturating_mul(stat.f_frsize), stat.f_blocks.saturating_mul(stat.f_frsize)))
    }

    pub(super) fn fault(&self, action: &str, source: io::Error) -> ImageError {
        ImageError::Store { store: self.directory.clone(), action: action.to_owned(), source }
    }

    fn blob_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join("blobs/sha256").join(digest.hex())
    }

    fn diff_id_path(&self, digest: &Digest) -> PathBuf {
        self.directory.join("diff_ids/sha256").join(digest.hex())
    }

    fn diff_id(&self, digest: &Digest) -> Option<Digest> {
        fs::read_to_string(self.diff_id_path(digest)).ok()?.lines().next()?.parse().ok()
    }

    fn writer(&self, expected: Option<(Digest, u64)>) -> Result<BlobWriter, ImageError> {
        let file = NamedTempFile::with_prefix_in("blob", self.directory.join("tmp"))
            .map_err(|error| self.fault("make a file in tmp", error))?;
        Ok(BlobWriter { store: self.clone(), file: Hashing::new(file), expected })
    }

    fn unpack_now(&self, digest: &Digest, diff_id: Option<&Digest>) -> Result<(), ImageError> {
        let (blob, _) = self.open_blob(digest)?;
        let scratch = TempDir::with_prefix_in("layer", self.directory.join("tmp"))
            .map_err(|error| self.fault("make a directory in tmp", error))?;
        let tree = scratch.path().join("tree");
        fs::create_dir(&tree).map_err(|error| self.fault("make a directory in tmp", error))?;
        let unpacked = layer::unpack(blob, &tree).and_then(|found| match diff_id {
            Some(expected) if *expected != found.0 => {
                Err(LayerFault::DiffId { expected: expected.clone(), found: found.0 })
            }
            _ => Ok(found),
        });
        let (diff_id, bytes) = match unpacked {
            Ok(unpacked) => unpacked,
            Err(fault) => {
                remove_directory(scratch).map_err(|error| self.fault("clear tmp", error))?;
                return Err(ImageError::Layer { digest: digest.clone(), fault });
            }
        };
        self.keep(digest, &diff_id, bytes, &tree)
            .map_err(|error| self.fault(&format!("put layer {digest} in its place"), error))?;
        remove_directory(scratch).map_err(|error| self.fault("clear tmp", error))
    }

    /// Writes an unpacked tree to disk and gives it its name.
    fn keep(&self, digest: &Digest, diff_id: &Digest, bytes: u64, tree: &Path) -> io::Result<()> {
        let mut note = NamedTempFile::new_in(self.directory.join("tmp"))?;
        writeln!(note, "{diff_id}\n{bytes}")?;
        note.persist(self.diff_id_path(digest))?;
        rustix::fs::syncfs(File::open(tree)?)?;
        match fs::rename(tree, self.layer_path(digest)) {
            Ok(()) => {}
            // Another user of the store was quicker.
            Err(_) if self.has_layer(digest) => {}
            Err(error) => return Err(error),
        }
        File::open(self.directory.join("layers/sha256"))?.sync_all()
    }

    /// Empties `tmp`.
    fn sweep(&self) -> io::Result<()> {
        let tmp = File::open(self.directory.join("tmp"))?;
        for name in beneath::names(tmp.as_fd())? {
            match beneath::remove_tree(tmp.as_fd(), &name) {
                // A program that outlived its godwitd still writes there; the next start sweeps again.
                Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                    tracing::warn!(name = %String::from_utf8_lossy(&name), "something writes into what an earlier life of this daemon left");
                }
                removed => removed?,
            }
        }
        Ok(())
    }
}

/// A blob on its way in. Dropped without [`BlobWriter::finish`], it leaves nothing.
pub struct BlobWriter {
    store: Store,
    file: Hashing<NamedTempFile>,
    expected: Option<(Digest, u64)>,
}

impl BlobWriter {
    /// Verifies length and digest, writes the blob to disk and gives it its name.
    pub fn finish(self) -> Result<Digest, ImageError> {
        let Self { store, file, expected } = self;
        let (file, received, received_bytes) = file.into_parts();
        if let Some((expected, expected_bytes)) = expected
            && (expected != received || expected_bytes != received_bytes)
        {
            return Err(ImageError::Mismatch { expected, expected_bytes, received, received_bytes });
        }
        let keep = || -> io::Result<()> {
            file.as_file().sync_all()?;
            file.persist(store.blob_path(&received))?;
            File::open(store.directory.join("blobs/sha256"))?.sync_all()
        };
        keep().map_err(|error| store.fault(&format!("put blob {received} in its place"), error))?;
        Ok(received)
    }

    /// As [`BlobWriter::finish`], for a blob of which only the digest is known before.
    pub(super) fn finish_as(mut self, digest: &Digest) -> Result<Digest, ImageError> {
        self.expected = Some((digest.clone(), self.file.count()));
        self.finish()
    }

    /// How many bytes have come.
    #[must_use]
    pub fn written(&self) -> u64 {
        self.file.count()
    }
}

impl Write for BlobWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some((digest, length)) = &self.expected
            && self.file.count() + bytes.len() as u64 > *length
        {
            let message = format!("blob {digest}: more than the {length} bytes that were announced came");
            return Err(io::Error::new(io::ErrorKind::InvalidData, message));
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl std::fmt::Debug for BlobWriter {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("BlobWriter")
            .field("expected", &self.expected)
            .field("written", &self.written())
            .finish_non_exhaustive()
    }
}

/// Removes a scratch directory by descriptors: what is in it may have paths of any length.
pub(super) fn remove_directory(scratch: TempDir) -> io::Result<()> {
    let path = scratch.keep();
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(()) };
    beneath::remove_tree(File::open(parent)?.as_fd(), name.as_encoded_bytes())
}
