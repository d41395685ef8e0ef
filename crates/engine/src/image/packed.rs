//! The image for this machine of an OCI archive or layout directory, packed as one archive that Podman and Docker load: with
//! the lists of both, and without a name, which they would take from an image that has it.
//!
//! ```text
//! oci-layout, index.json ──> manifest ──> config, layers      what Podman reads: it leaves out layers that it has
//! manifest.json          ───────────────> config, layers      what Docker reads
//! ```
//! Every blob is checked against the digest of what refers to it as it is copied.

use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use oci_spec::image::Descriptor;
use serde_json::json;

use super::digest::Hashing;
use super::oci::{Found, Layout, choose, sha256, split_reference};
use super::{ArchiveFault, Digest, ImageError};

/// An image that can be packed.
pub(crate) struct Packed {
    path: PathBuf,
    layout: Layout,
    found: Found,
    id: Digest,
}

/// Why an image is not packed to its end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PackError {
    /// It is not whole.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// It cannot be read, or whoever takes it does not any more.
    #[error("it is not passed on: {0}")]
    Broken(#[from] io::Error),
}

impl Packed {
    /// The one of an archive or directory; when there are several, `PATH:NAME` names one.
    pub(crate) fn open(path: &Path) -> Result<Self, ImageError> {
        let fault = |fault| ImageError::Archive { path: path.to_path_buf(), fault };
        let (location, wanted) = split_reference(path);
        let layout = Layout::open(&location).map_err(fault)?;
        let found = choose(&layout, wanted.as_deref()).map_err(fault)?;
        found.check_layers().map_err(fault)?;
        let id = sha256(found.manifest.config().digest()).map_err(fault)?;
        let packed = Self { path: path.to_path_buf(), layout, found, id };
        for (what, blob) in packed.blobs() {
            // An engine would get it from there, whatever is here.
            if blob.urls().as_ref().is_some_and(|urls| !urls.is_empty()) {
                return Err(fault(ArchiveFault::Elsewhere { what }));
            }
        }
        Ok(packed)
    }

    /// Refuses an image that the disk of an engine's storage cannot hold.
    pub(crate) fn fits(&self, storage: &Path) -> Result<(), PackError> {
        let stat = rustix::fs::statvfs(storage).map_err(|error| {
            let said = format!("the free space of {} is not told: {error}", storage.display());
            io::Error::new(io::Error::from(error).kind(), said)
        })?;
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        let needed = self.blobs().fold(0_u64, |sum, (_, blob)| sum.saturating_add(blob.size()));
        match needed > free {
            true => Err(self.fault(ArchiveFault::Large { needed, free, storage: storage.to_owned() }).into()),
            false => Ok(()),
        }
    }

    /// All that it is made of.
    fn blobs(&self) -> impl Iterator<Item = (&'static str, &Descriptor)> {
        let Found { descriptor, manifest, .. } = &self.found;
        let blobs = [("manifest", descriptor), ("configuration", manifest.config())].into_iter();
        blobs.chain(manifest.layers().iter().map(|layer| ("layer", layer)))
    }

    /// Its ID in an engine: the digest of its configuration.
    pub(crate) fn id(&self) -> &Digest {
        &self.id
    }

    /// Its ID where containerd has the images of an engine: the digest of its manifest.
    pub(crate) fn digest(&self) -> &oci_spec::image::Digest {
        self.found.descriptor.digest()
    }

    /// Writes the archive.
    pub(crate) fn write(&self, to: impl Write) -> Result<(), PackError> {
        let Found { descriptor, manifest, .. } = &self.found;
        let mut archive = tar::Builder::new(to);
        let layers: Result<Vec<_>, _> = manifest.layers().iter().map(|layer| self.place(layer)).collect();
        let index = json!({ "schemaVersion": 2, "manifests": [{
            "mediaType": descriptor.media_type().to_string(),
            "digest": descriptor.digest().to_string(),
            "size": descriptor.size(),
        }]});
        let list = json!([{ "Config": self.place(manifest.config())?, "RepoTags": null, "Layers": layers? }]);
        for (name, text) in [
            ("oci-layout", json!({ "imageLayoutVersion": "1.0.0" })),
            ("index.json", index),
            ("manifest.json", list),
        ] {
            let text = text.to_string();
            archive.append_data(&mut header(text.len() as u64), name, text.as_bytes())?;
        }
        let mut written = Vec::new();
        for (what, blob) in self.blobs() {
            if !written.contains(&blob.digest()) {
                self.copy(&mut archive, what, blob)?;
                written.push(blob.digest());
            }
        }
        Ok(archive.into_inner()?.flush()?)
    }

    fn fault(&self, fault: ArchiveFault) -> ImageError {
        ImageError::Archive { path: self.path.clone(), fault }
    }

    /// Where a blob is in the archive.
    fn place(&self, blob: &Descriptor) -> Result<String, ImageError> {
        let digest = sha256(blob.digest()).map_err(|fault| self.fault(fault))?;
        Ok(format!("blobs/sha256/{}", digest.hex()))
    }

    fn copy(
        &self,
        archive: &mut tar::Builder<impl Write>,
        what: &'static str,
        blob: &Descriptor,
    ) -> Result<(), PackError> {
        let expected = sha256(blob.digest()).map_err(|fault| self.fault(fault))?;
        let reader = self.layout.blob(what, blob).map_err(|fault| self.fault(fault))?;
        let mut reader = Hashing::new(reader.take(blob.size()));
        archive.append_data(&mut header(blob.size()), self.place(blob)?, &mut reader)?;
        let (_, found, _) = reader.into_parts();
        match found == expected {
            true => Ok(()),
            false => Err(self.fault(ArchiveFault::BlobDigest { what, expected, found }).into()),
        }
    }
}

fn header(size: u64) -> tar::Header {
    let mut header = tar::Header::new_gnu();
    header.set_entry_type(tar::EntryType::Regular);
    header.set_mode(0o644);
    header.set_size(size);
    header
}
