//! Images and their layers, kept once per node, by digest.
//!
//! ```text
//! <store>/blobs/sha256/<hex>        layers as they were received: verified, never changed
//!         layers/sha256/<hex>/      the same layers unpacked, for overlayfs; <hex> is the blob's
//!         diff_ids/sha256/<hex>     digest of the layer's tar stream and its bytes, a line each; the file's time
//!                                   of change is that of the layer's last use, where it is not unpacked the blob's
//!         names/<hex>               images by name: `named.rs`
//!         tmp/                      what is being made; emptied when a store is opened
//!         lock                      held shared by every user, alone while tmp is emptied
//! ```
//!
//! An unpacked layer has the name of its **blob's** digest, not of its diff id: manifests list
//! blobs, nodes ask each other for blobs, and a blob can be checked while it is received, before
//! anything is unpacked. The same content compressed in two ways is unpacked twice; that is rare.
//! Of other platforms' layers there is the blob alone (`platforms.rs`), and of the neutral modules of programs (`modules.rs`).
//!
//! A blob or layer is made below `tmp`, written to disk, and renamed to its place, so what has
//! its final name is whole, also after a crash.

pub(crate) mod archive;
mod builder;
pub(crate) mod capture;
mod collect;
pub(crate) mod devices;
mod digest;
mod error;
pub(crate) mod layer;
mod modules;
mod named;
mod oci;
mod packed;
mod platforms;
mod registry;
mod store;

#[cfg(test)]
mod tests;

pub use builder::{BuildError, Builder, LONGEST_BUILD};
pub use collect::{Collector, Hold, StoredLayer};
pub(crate) use digest::Hashing;
pub use digest::{Digest, DigestError};
pub use error::{ArchiveFault, ImageError, LayerFault, RootfsFault};
pub use layer::{MAX_LAYER_BYTES, MAX_LAYER_ENTRIES};
pub use modules::{Documents, MAX_MODULES, Module, Neutral};
pub use named::{NamedImage, whole_reference};
pub use oci::Imported;
pub(crate) use packed::{PackError, Packed};
pub use platforms::{
    MAX_PLATFORMS, PlatformLayers, architecture_of, bounded as bounded_platforms, machine_of,
};
pub(crate) use registry::digest_at_registry;
pub use registry::{FetchError, Fetched, NotARegistry, Pinned, Registries};
pub use store::{BlobWriter, Store};

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// An image whose layers are in the [`Store`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Digests of the layers' blobs, lowest first.
    pub layers: Vec<Digest>,
    /// How the image wants to be run.
    pub config: ImageConfig,
    /// Instruction set in OCI's words, e.g. `amd64`.
    pub architecture: String,
    /// Name the image has where it came from; the path it was imported from when it has none.
    pub reference: String,
    /// What other engines know it by: the digest of its configuration; none for a directory.
    #[serde(default)]
    pub id: Option<Digest>,
    /// Its other platforms, of which the store has the blobs alone; none of an image whose service stays on machines of one
    /// instruction set.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "bounded_platforms")]
    pub platforms: Vec<PlatformLayers>,
    /// What executables for a further platform are made from; none of an image that does not have it, or whose name is not
    /// known here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub neutral: Option<Neutral>,
}

impl Image {
    /// The digests of all blobs that the store keeps for it, those of its other platforms behind its own, and its modules and
    /// documents last.
    pub fn blobs(&self) -> impl Iterator<Item = &Digest> {
        let others = self.platforms.iter().flat_map(|platform| &platform.layers);
        self.layers.iter().chain(others).chain(self.neutral.iter().flat_map(Neutral::blobs))
    }
}

/// The part of an OCI image's configuration that says how to run it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ImageConfig {
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// First words of the command, kept when the user gives arguments.
    pub entrypoint: Vec<String>,
    /// Following words of the command, replaced by what the user gives.
    pub cmd: Vec<String>,
    /// `user[:group]`, names or numbers; empty for root.
    pub user: String,
    /// Absolute path; empty for `/`.
    pub working_dir: String,
    /// E.g. `6379/tcp`.
    pub exposed_ports: Vec<String>,
    /// Free text by name.
    pub labels: BTreeMap<String, String>,
    /// Signal that asks the main process to end, e.g. `SIGQUIT`; empty for SIGTERM.
    pub stop_signal: String,
}

/// This machine's instruction set in OCI's words.
#[must_use]
pub fn machine_architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        "x86" => "386",
        "powerpc64" => "ppc64le",
        other => other,
    }
}
