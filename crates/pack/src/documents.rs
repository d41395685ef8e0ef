//! The documents of an image (image-spec v1.1), with their fields always in the same order.

use std::collections::BTreeMap;

use godwit_crossing::Set;
use serde::Serialize;

use crate::layer::Blob;

/// Types of what documents refer to.
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const CONFIGURATION: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// Annotation of an index whose images have the same programs, and its value: nodes look for it
/// (`crates/engine/src/image/platforms.rs`).
const CROSSING: (&str, &str) = ("io.godwit.crossing", "1");
/// Annotation with the name of what a layout's index refers to.
const NAME: &str = "org.opencontainers.image.ref.name";

/// How an image wants to be run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "PascalCase")]
pub struct Run {
    /// `user[:group]`, names or numbers; empty for root.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub user: String,
    /// `NAME=VALUE` pairs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// First words of the command.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub entrypoint: Vec<String>,
    /// Following words, which a user replaces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cmd: Vec<String>,
    /// Absolute path; empty for `/`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub working_dir: String,
}

#[derive(Serialize)]
struct Platform {
    architecture: &'static str,
    os: &'static str,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Descriptor {
    media_type: &'static str,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, String>,
}

impl Descriptor {
    fn new(media_type: &'static str, blob: &Blob) -> Self {
        let (digest, size) = (blob.digest(), blob.bytes);
        Self { media_type, digest, size, platform: None, annotations: BTreeMap::new() }
    }

    /// Of the manifest for a set.
    pub(crate) fn of_manifest(set: Set, manifest: &Blob) -> Self {
        let platform = Some(Platform { architecture: architecture(set), os: "linux" });
        Self { platform, ..Self::new(MANIFEST, manifest) }
    }

    /// Of the image's index, under the image's name.
    pub(crate) fn of_index(name: &str, index: &Blob) -> Self {
        Self { annotations: BTreeMap::from([(NAME, name.to_owned())]), ..Self::new(INDEX, index) }
    }
}

/// What OCI calls a set.
fn architecture(set: Set) -> &'static str {
    match set {
        Set::X86_64 => "amd64",
        Set::Aarch64 => "arm64",
    }
}

#[derive(Serialize)]
struct RootFs {
    r#type: &'static str,
    diff_ids: Vec<String>,
}

#[derive(Serialize)]
struct Configuration<'a> {
    architecture: &'static str,
    os: &'static str,
    config: &'a Run,
    rootfs: RootFs,
}

/// The configuration of the image for a set. Layers are not compressed: a blob's digest is the layer's.
pub(crate) fn configuration(set: Set, run: &Run, layers: &[&Blob]) -> serde_json::Result<Vec<u8>> {
    let diff_ids = layers.iter().map(|layer| layer.digest()).collect();
    serde_json::to_vec(&Configuration {
        architecture: architecture(set),
        os: "linux",
        config: run,
        rootfs: RootFs { r#type: "layers", diff_ids },
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u8,
    media_type: &'static str,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// The manifest of the image for a set.
pub(crate) fn manifest(configuration: &Blob, layers: &[&Blob]) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&Manifest {
        schema_version: 2,
        media_type: MANIFEST,
        config: Descriptor::new(CONFIGURATION, configuration),
        layers: layers.iter().map(|layer| Descriptor::new(LAYER, layer)).collect(),
    })
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u8,
    media_type: &'static str,
    manifests: Vec<Descriptor>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<&'static str, &'static str>,
}

/// The index of an image's manifests, which have the same programs.
pub(crate) fn marked_index(manifests: Vec<Descriptor>) -> serde_json::Result<Vec<u8>> {
    index(manifests, BTreeMap::from([CROSSING]))
}

/// The index of the layout.
pub(crate) fn layout_index(image: Descriptor) -> serde_json::Result<Vec<u8>> {
    index(vec![image], BTreeMap::new())
}

fn index(
    manifests: Vec<Descriptor>,
    annotations: BTreeMap<&'static str, &'static str>,
) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&Index { schema_version: 2, media_type: INDEX, manifests, annotations })
}
