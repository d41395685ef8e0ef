//! What is in a store, and the removal of what no service uses.
//!
//! Whoever is about to use layers that no table names yet (an image that is being imported, a service that is about
//! to arrive) takes a [`Hold`]. A [`Collector`] exists only while there is none, and nobody gets one before the
//! collector is gone. So a layer cannot vanish between the look for it and the note that it is used.

use std::collections::BTreeSet;
use std::fs::{self, FileTimes};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tempfile::TempDir;

use super::store::{PARTS, remove_directory};
use super::{Digest, ImageError, Store};

/// A layer of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredLayer {
    /// The digest of its blob.
    pub digest: Digest,
    /// Bytes of its blob and of the tar stream in it: about what it takes on the disk.
    pub bytes: u64,
    /// When it came, or [`Store::touch`] noted its use for the last time.
    pub last_used: SystemTime,
}

/// How many use layers that no table names yet.
#[derive(Debug, Default)]
pub(super) struct Holds(Mutex<usize>);

impl Holds {
    fn lock(&self) -> MutexGuard<'_, usize> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// While this is there, nothing is removed from the store.
#[derive(Debug)]
#[must_use]
pub struct Hold(Arc<Holds>);

impl Drop for Hold {
    fn drop(&mut self) {
        *self.0.lock() -= 1;
    }
}

/// The one that removes layers from a store.
#[derive(Debug)]
pub struct Collector<'a> {
    pub(super) store: &'a Store,
    /// Nobody gets a [`Hold`] while this is locked.
    _nobody: MutexGuard<'a, usize>,
    /// Under new names in `tmp`: to be deleted.
    graves: Vec<TempDir>,
}

impl Store {
    /// Keeps all layers in the store until the hold is dropped. Waits for a collector to end, which takes
    /// milliseconds.
    pub fn hold(&self) -> Hold {
        *self.holds.lock() += 1;
        Hold(Arc::clone(&self.holds))
    }

    /// The right to remove layers; `None` while there is a [`Hold`].
    #[must_use]
    pub fn collector(&self) -> Option<Collector<'_>> {
        let holds = self.holds.lock();
        (*holds == 0).then(|| Collector { store: self, _nobody: holds, graves: Vec::new() })
    }

    /// All layers, the one that was used longest ago first.
    pub fn layers(&self) -> Result<Vec<StoredLayer>, ImageError> {
        let mut digests = BTreeSet::new();
        for part in PARTS {
            let fault = |error| self.fault(&format!("read {part}"), error);
            for entry in fs::read_dir(self.directory().join(part)).map_err(fault)? {
                let name = entry.map_err(fault)?.file_name();
                // Nothing else is there, unless somebody put it there by hand.
                digests.extend(format!("sha256:{}", name.display()).parse::<Digest>());
            }
        }
        let mut layers = Vec::new();
        for digest in digests {
            // `None`: it has just been removed.
            if let Some(last_used) = self.last_used(&digest)? {
                layers.push(StoredLayer { bytes: self.bytes(&digest)?, digest, last_used });
            }
        }
        layers.sort_by(|a, b| (a.last_used, &a.digest).cmp(&(b.last_used, &b.digest)));
        Ok(layers)
    }

    /// Notes that a service uses the layer.
    pub fn touch(&self, digest: &Digest) -> Result<(), ImageError> {
        let fault = |error| self.fault(&format!("note the use of layer {digest}"), error);
        // A layer of another platform is not unpacked: its blob alone is there.
        for part in [NOTE, BLOBS] {
            match fs::File::open(self.directory().join(part).join(digest.hex())) {
                Ok(file) => {
                    return file.set_times(FileTimes::new().set_modified(SystemTime::now())).map_err(fault);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(fault(error)),
            }
        }
        Ok(())
    }

    /// Of the blob, and of the tar stream that was unpacked.
    fn bytes(&self, digest: &Digest) -> Result<u64, ImageError> {
        let blob = match self.open_blob(digest) {
            Ok((_, bytes)) => bytes,
            Err(ImageError::NoBlob { .. }) => 0,
            Err(error) => return Err(error),
        };
        let note = match fs::read_to_string(self.directory().join(NOTE).join(digest.hex())) {
            Ok(note) => note,
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            Err(error) => return Err(self.fault(&format!("examine layer {digest}"), error)),
        };
        // Earlier versions did not note it.
        let unpacked = note.lines().nth(1).and_then(|bytes| bytes.parse().ok()).unwrap_or(0);
        Ok(blob.saturating_add(unpacked))
    }

    /// Of a layer that was not used, when it came.
    fn last_used(&self, digest: &Digest) -> Result<Option<SystemTime>, ImageError> {
        let fault = |error| self.fault(&format!("examine layer {digest}"), error);
        for part in [NOTE, BLOBS, "layers/sha256"] {
            match fs::symlink_metadata(self.directory().join(part).join(digest.hex())) {
                Ok(metadata) => return metadata.modified().map(Some).map_err(fault),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(fault(error)),
            }
        }
        Ok(None)
    }
}

/// Whose time of change is that of the last use.
const NOTE: &str = "diff_ids/sha256";
/// The same of a layer that is not unpacked.
const BLOBS: &str = "blobs/sha256";

impl Collector<'_> {
    /// Takes a layer out of the store. Its files are deleted by [`Collector::delete`]; after a crash, when the store
    /// is opened.
    pub fn remove(&mut self, digest: &Digest) -> Result<(), ImageError> {
        let store = self.store;
        for part in PARTS {
            let fault = |error| store.fault(&format!("remove layer {digest} from {part}"), error);
            let grave = TempDir::new_in(store.directory().join("tmp")).map_err(fault)?;
            match fs::rename(store.directory().join(part).join(digest.hex()), grave.path().join("gone")) {
                Ok(()) => self.graves.push(grave),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(fault(error)),
            }
        }
        Ok(())
    }

    /// Deletes the files of all removed layers, when others may use the store again.
    pub fn delete(self) -> Result<(), ImageError> {
        let Self { store, _nobody, graves } = self;
        drop(_nobody);
        graves.into_iter().try_for_each(remove_directory).map_err(|error| store.fault("clear tmp", error))
    }
}
