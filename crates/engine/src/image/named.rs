//! Images by name: what a reference of a registry stood for when it was pulled.
//!
//! ```text
//! <store>/names/<hex>    a record in JSON; <hex> is the SHA-256 of the reference
//! ```
//!
//! A record keeps no layer. It counts while all its layers are in the store, and is removed once one is gone.
//! Of its other platforms' layers the blobs count.

use std::fs;
use std::io::{self, Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use oci_spec::distribution::{ParseError, Reference};
use serde::{Deserialize, Serialize};
use tempfile::NamedTempFile;

use super::{Collector, Digest, Image, ImageError, Store};

/// Below the store's directory.
pub(super) const NAMES: &str = "names";
/// Largest record, in bytes: more than an image's configuration can have, and the paths of as many modules as it may have.
const MAX_RECORD: u64 = 16 << 20;

/// An image that was pulled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamedImage {
    /// What the manifest in the registry hashed to: an index, if the image is for several platforms.
    pub digest: Digest,
    /// Its layers, how it wants to be run, and the reference that it has.
    pub image: Image,
    /// When it was pulled, milliseconds since the epoch.
    pub pulled_ms: i64,
}

impl NamedImage {
    /// Whether it is the same image under the same name, whenever it came.
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.digest, &self.image) == (&other.digest, &other.image)
    }
}

/// A name as users of Docker write it, whole: `redis` is `docker.io/library/redis:latest`.
///
/// # Errors
/// If no registry could have it.
pub fn whole_reference(name: &str) -> Result<String, ParseError> {
    Ok(name.parse::<Reference>()?.to_string())
}

impl Store {
    /// Notes that a reference stands for an image, whose layers are in the store.
    pub fn name(&self, digest: Digest, image: Image) -> Result<NamedImage, ImageError> {
        let _alone = self.naming();
        self.name_now(digest, image)
    }

    /// The same of a reference that stands for another image until then; `None`: it does not, or no longer.
    pub fn rename(
        &self,
        before: &NamedImage,
        digest: Digest,
        image: Image,
    ) -> Result<Option<NamedImage>, ImageError> {
        let _alone = self.naming();
        let now = self.named(&before.image.reference)?;
        if now.is_some_and(|now| now.is_same(before)) {
            self.name_now(digest, image).map(Some)
        } else {
            Ok(None)
        }
    }

    fn naming(&self) -> MutexGuard<'_, ()> {
        self.naming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn name_now(&self, digest: Digest, image: Image) -> Result<NamedImage, ImageError> {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let pulled_ms = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        let named = NamedImage { digest, image, pulled_ms };
        let keep = || -> io::Result<()> {
            let record = serde_json::to_vec(&named)?;
            if record.len() as u64 > MAX_RECORD {
                return Err(io::Error::other(format!("its record has more than {MAX_RECORD} bytes")));
            }
            let mut file = NamedTempFile::new_in(self.directory().join("tmp"))?;
            file.write_all(&record)?;
            file.as_file().sync_all()?;
            file.persist(self.record(&named.image.reference))?;
            fs::File::open(self.directory().join(NAMES))?.sync_all()
        };
        keep().map_err(|error| self.fault(&format!("note image {}", named.image.reference), error))?;
        // What has just been pulled is not the first to go.
        for layer in named.image.blobs() {
            if let Err(error) = self.touch(layer) {
                tracing::warn!(%error, "the use of a layer is not noted");
            }
        }
        Ok(named)
    }

    /// What a reference stands for, if all its layers are here.
    pub fn named(&self, reference: &str) -> Result<Option<NamedImage>, ImageError> {
        let named = self.read(&self.record(reference))?;
        Ok(named.filter(|named| named.image.reference == reference && self.is_whole(&named.image)))
    }

    /// All images that have a name and all their layers, in the order of their names.
    pub fn all_named(&self) -> Result<Vec<NamedImage>, ImageError> {
        let mut all = self.records()?;
        all.retain(|(_, named)| self.is_whole(&named.image));
        let mut all: Vec<_> = all.into_iter().map(|(_, named)| named).collect();
        all.sort_by(|a, b| a.image.reference.cmp(&b.image.reference));
        Ok(all)
    }

    fn is_whole(&self, image: &Image) -> bool {
        image.layers.iter().all(|layer| self.has_layer(layer))
            && image.blobs().all(|blob| self.has_blob(blob))
    }

    fn record(&self, reference: &str) -> PathBuf {
        self.directory().join(NAMES).join(Digest::of(reference.as_bytes()).hex())
    }

    fn records(&self) -> Result<Vec<(PathBuf, NamedImage)>, ImageError> {
        let fault = |error| self.fault("read the names of images", error);
        let mut records = Vec::new();
        for entry in fs::read_dir(self.directory().join(NAMES)).map_err(fault)? {
            let path = entry.map_err(fault)?.path();
            if let Some(named) = self.read(&path)? {
                records.push((path, named));
            }
        }
        Ok(records)
    }

    /// `None`: there is none, or another version of godwit wrote it: then the image is pulled again.
    fn read(&self, path: &Path) -> Result<Option<NamedImage>, ImageError> {
        let mut text = Vec::new();
        match fs::File::open(path).and_then(|file| file.take(MAX_RECORD).read_to_end(&mut text)) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(self.fault("read the name of an image", error)),
        }
        match serde_json::from_slice(&text) {
            Ok(named) => Ok(Some(named)),
            Err(error) => {
                tracing::warn!(file = %path.display(), %error, "the record of an image cannot be understood");
                Ok(None)
            }
        }
    }
}

impl Collector<'_> {
    /// Takes a name from the store; the image's layers stay. `false`: there is none.
    pub fn unname(&mut self, reference: &str) -> Result<bool, ImageError> {
        self.unlink(&self.store.record(reference))
    }

    /// Removes the names of images that lack a layer, and returns them.
    pub fn unname_torn(&mut self) -> Result<Vec<String>, ImageError> {
        let mut torn = Vec::new();
        for (path, named) in self.store.records()? {
            if !self.store.is_whole(&named.image) && self.unlink(&path)? {
                torn.push(named.image.reference);
            }
        }
        Ok(torn)
    }

    fn unlink(&self, path: &Path) -> Result<bool, ImageError> {
        match fs::remove_file(path) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(self.store.fault("remove the name of an image", error)),
        }
    }
}
