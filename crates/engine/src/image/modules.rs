//! The neutral modules of an image's programs, from which executables for a further platform are made, and the documents of the
//! image, of which those of a further platform are made.
//!
//! ```text
//! index (io.godwit.crossing=1) ─┬─> manifest for a platform ──> configuration, layers
//!                               └─> manifest of modules (io.godwit.modules=1) ──> a blob for each program
//! ```
//! A module is bound to its executables by their identity, which is made of its digest and of those of layout and tool chain
//! (`isa/plan/src/binding.rs`). It is a blob like any other, and never unpacked.

use std::io::{Read as _, Write as _};
use std::path::Path;

use godwit_isa_plan::Binding;
use godwit_isa_plan::image::{MODULE_KEYS, MODULE_TYPE, MOST_MODULE};
use oci_spec::image::{Descriptor, ImageManifest};
use serde::{Deserialize, Serialize};

use super::oci::{Found, Layout, MAX_DOCUMENT, check_type, parse, sha256};
use super::{ArchiveFault, Digest, ImageError, Store};
use crate::beneath;

/// Most modules of an image.
pub const MAX_MODULES: usize = 256;
/// Most bytes of all modules of an image.
const MAX_ALL: u64 = 1 << 30;

/// The neutral module of a program.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Module {
    /// Where its program is in the image: absolute, in its shortest form.
    pub path: String,
    /// Of the module.
    pub digest: Digest,
    /// Its length.
    pub bytes: u64,
    /// Of the layout that its executables have.
    pub layout: Digest,
    /// Of what the tool chain has linked to it.
    pub toolchain: Digest,
}

impl Module {
    /// The identity of the executables that were made from it.
    #[must_use]
    pub fn identity(&self) -> [u8; 32] {
        let (module, layout, toolchain) = (self.digest.bytes(), self.layout.bytes(), self.toolchain.bytes());
        Binding { module, layout, toolchain }.identity()
    }
}

/// The documents of an image, for the platform of the node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Documents {
    /// Of all its platforms.
    pub index: Digest,
    /// Of the node's platform.
    pub manifest: Digest,
    /// Of the same.
    pub configuration: Digest,
    /// Manifests and configurations of other platforms and of the modules.
    pub further: Vec<Digest>,
}

/// What executables for a further platform are made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Neutral {
    /// Of each program one.
    pub modules: Vec<Module>,
    /// The image's.
    pub documents: Documents,
}

impl Neutral {
    /// The digests of all blobs that the store keeps for it.
    pub fn blobs(&self) -> impl Iterator<Item = &Digest> {
        let Documents { index, manifest, configuration, further } = &self.documents;
        self.modules
            .iter()
            .map(|module| &module.digest)
            .chain([index, manifest, configuration])
            .chain(further)
    }
}

impl Store {
    /// Takes the modules of an image that has some, with its documents.
    pub(super) fn import_modules(
        &self,
        path: &Path,
        layout: &Layout,
        found: &Found,
        others: &[(&'static str, Found)],
    ) -> Result<Option<Neutral>, ImageError> {
        let fault = |fault| ImageError::Archive { path: path.to_path_buf(), fault };
        let (Some(index), Some(descriptor)) = (&found.index, &found.modules) else { return Ok(None) };
        check_type("manifest of modules", descriptor.media_type(), &MANIFEST_TYPES).map_err(fault)?;
        let bytes = layout.referred("manifest of modules", descriptor).map_err(fault)?;
        let name = format!("manifest {}", descriptor.digest());
        let manifest = parse(&name, ImageManifest::from_reader(&bytes[..])).map_err(fault)?;
        let described = described(manifest.layers()).map_err(fault)?;
        let mut modules = Vec::with_capacity(described.len());
        for (module, blob) in described {
            self.import_blob(path, layout, "module", blob)?;
            modules.push(module);
        }
        let document = |what: &'static str, descriptor: &Descriptor| {
            let bytes = layout.referred(what, descriptor).map_err(fault)?;
            self.keep_document(&bytes)
        };
        let mut further = vec![self.keep_document(&bytes)?, document("configuration", manifest.config())?];
        for (_, other) in others {
            further.push(document("manifest", &other.descriptor)?);
            further.push(document("configuration", other.manifest.config())?);
        }
        let documents = Documents {
            index: document("index", index)?,
            manifest: document("manifest", &found.descriptor)?,
            configuration: document("configuration", found.manifest.config())?,
            further,
        };
        Ok(Some(Neutral { modules, documents }))
    }

    /// Keeps a document of an image as a blob.
    pub fn keep_document(&self, bytes: &[u8]) -> Result<Digest, ImageError> {
        let digest = Digest::of(bytes);
        if !self.has_blob(&digest) {
            let mut writer = self.blob_writer(&digest, bytes.len() as u64)?;
            writer.write_all(bytes).map_err(|error| self.fault("write a document", error))?;
            writer.finish()?;
        }
        Ok(digest)
    }

    /// A document that was kept.
    pub fn document(&self, digest: &Digest) -> Result<Vec<u8>, ImageError> {
        let (file, _) = self.open_blob(digest)?;
        let mut bytes = Vec::new();
        file.take(MAX_DOCUMENT)
            .read_to_end(&mut bytes)
            .map_err(|error| self.fault(&format!("read {digest}"), error))?;
        Ok(bytes)
    }

    /// Whether a layer that is unpacked has the files at some of these paths, and directories on the way to them, and nothing
    /// else. Paths are absolute.
    pub fn has_only(&self, layer: &Digest, paths: &[&str]) -> Result<bool, ImageError> {
        let fault = |error| self.fault(&format!("look into layer {layer}"), error);
        let mut inside = vec![String::new()];
        let mut has_any = false;
        // As deep and as wide as the paths are.
        while let Some(directory) = inside.pop() {
            let opened = std::fs::File::open(self.layer_path(layer).join(directory.trim_start_matches('/')));
            for name in beneath::names(std::os::fd::AsFd::as_fd(&opened.map_err(fault)?)).map_err(fault)? {
                let Ok(name) = String::from_utf8(name) else { return Ok(false) };
                let path = format!("{directory}/{name}");
                let file = self.layer_path(layer).join(path.trim_start_matches('/'));
                let kind = std::fs::symlink_metadata(file).map_err(fault)?.file_type();
                let leads_to =
                    |other: &&str| other.strip_prefix(&path).is_some_and(|rest| rest.starts_with('/'));
                if kind.is_file() && paths.contains(&path.as_str()) {
                    has_any = true;
                } else if kind.is_dir() && paths.iter().any(leads_to) {
                    inside.push(path);
                } else {
                    return Ok(false);
                }
            }
        }
        Ok(has_any)
    }
}

/// Media types of the manifest of modules.
const MANIFEST_TYPES: [&str; 1] = ["application/vnd.oci.image.manifest.v1+json"];

/// What a manifest says of its modules, each with what refers to it.
fn described(blobs: &[Descriptor]) -> Result<Vec<(Module, &Descriptor)>, ArchiveFault> {
    let mut found: Vec<(Module, &Descriptor)> = Vec::new();
    let mut all = 0_u64;
    for blob in blobs {
        let said = MODULE_KEYS
            .map(|key| blob.annotations().as_ref().and_then(|all| all.get(key)).map(String::as_str));
        let path: String = said[0].unwrap_or_default().chars().take(beneath::MAX_PATH).collect();
        let refused = |reason| Err(ArchiveFault::Module { path: path.clone(), reason });
        let below = path.strip_prefix('/').unwrap_or_default().as_bytes();
        let is_shortest = !below.is_empty() && below.split(|byte| *byte == b'/').all(|part| !part.is_empty());
        // Messages name it.
        let is_text = !path.chars().any(|c| {
            c.is_control()
                || matches!(c, '\u{200e}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        });
        if !is_shortest || !is_text || beneath::check_path(below).is_err() {
            return refused("it does not say of which program it is");
        }
        if blob.media_type().to_string() != MODULE_TYPE {
            return refused("it is of a type that is not known");
        }
        if found.iter().any(|(other, _)| other.path == path) {
            return refused("there are two for that program");
        }
        if found.len() == MAX_MODULES {
            return refused("there are more modules than an image may have");
        }
        all = all.saturating_add(blob.size());
        if blob.size() > MOST_MODULE || all > MAX_ALL {
            return refused("it is larger than a module may be, or all of them are");
        }
        let bound = |said: Option<&str>| Digest::from_hex(said.unwrap_or_default()).ok();
        let (Some(layout), Some(toolchain)) = (bound(said[1]), bound(said[2])) else {
            return refused("it does not say by what it is bound to its executables");
        };
        let (digest, bytes) = (sha256(blob.digest())?, blob.size());
        found.push((Module { path, digest, bytes, layout, toolchain }, blob));
    }
    Ok(found)
}
