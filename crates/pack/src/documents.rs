//! The documents of an image (image-spec v1.1), with their fields in the order of their names, so that who reads one and writes
//! it again writes the same bytes.

use std::collections::BTreeMap;

use godwit_crossing::Set;
use godwit_isa_plan::image::{CROSSING, MARKED, MODULE_KEYS, MODULE_TYPE, MODULES};
use serde::Serialize;

use crate::layer::Blob;
use crate::program::Module;

/// Types of what documents refer to.
pub(crate) const INDEX: &str = "application/vnd.oci.image.index.v1+json";
pub(crate) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(crate) const CONFIGURATION: &str = "application/vnd.oci.image.config.v1+json";
pub(crate) const LAYER: &str = "application/vnd.oci.image.layer.v1.tar";
/// What the manifest of modules is.
const MODULES_TYPE: &str = "application/vnd.godwit.modules.v1";
/// The configuration of what has none (image-spec, manifest.md, "Guidelines for artifact usage").
pub(crate) const EMPTY: &[u8] = b"{}";
const EMPTY_TYPE: &str = "application/vnd.oci.empty.v1+json";
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

    /// Of the manifest that has the modules.
    pub(crate) fn of_modules(manifest: &Blob) -> Self {
        let platform = Some(Platform { architecture: "unknown", os: "unknown" });
        let annotations = BTreeMap::from([(MODULES, MARKED.to_owned())]);
        Self { platform, annotations, ..Self::new(MANIFEST, manifest) }
    }

    fn of_module(module: &Module, blob: &Blob) -> Self {
        let values = [module.path.clone(), hex(&module.layout), hex(&module.toolchain)];
        Self { annotations: MODULE_KEYS.into_iter().zip(values).collect(), ..Self::new(MODULE_TYPE, blob) }
    }

    /// Of the image's index, under the image's name.
    pub(crate) fn of_index(name: &str, index: &Blob) -> Self {
        Self { annotations: BTreeMap::from([(NAME, name.to_owned())]), ..Self::new(INDEX, index) }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Fields in the order of their names.
fn written(document: &impl Serialize) -> serde_json::Result<Vec<u8>> {
    serde_json::to_vec(&serde_json::to_value(document)?)
}

/// What OCI calls a set.
pub(crate) fn architecture(set: Set) -> &'static str {
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
    written(&Configuration {
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
    #[serde(skip_serializing_if = "Option::is_none")]
    artifact_type: Option<&'static str>,
    config: Descriptor,
    layers: Vec<Descriptor>,
}

/// The manifest of the image for a set.
pub(crate) fn manifest(configuration: &Blob, layers: &[&Blob]) -> serde_json::Result<Vec<u8>> {
    written(&Manifest {
        schema_version: 2,
        media_type: MANIFEST,
        artifact_type: None,
        config: Descriptor::new(CONFIGURATION, configuration),
        layers: layers.iter().map(|layer| Descriptor::new(LAYER, layer)).collect(),
    })
}

/// The manifest of modules.
pub(crate) fn modules_manifest(empty: &Blob, modules: &[(&Module, Blob)]) -> serde_json::Result<Vec<u8>> {
    written(&Manifest {
        schema_version: 2,
        media_type: MANIFEST,
        artifact_type: Some(MODULES_TYPE),
        config: Descriptor::new(EMPTY_TYPE, empty),
        layers: modules.iter().map(|(module, blob)| Descriptor::of_module(module, blob)).collect(),
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
    index(manifests, BTreeMap::from([(CROSSING, MARKED)]))
}

/// The index of the layout.
pub(crate) fn layout_index(image: Descriptor) -> serde_json::Result<Vec<u8>> {
    index(vec![image], BTreeMap::new())
}

fn index(
    manifests: Vec<Descriptor>,
    annotations: BTreeMap<&'static str, &'static str>,
) -> serde_json::Result<Vec<u8>> {
    written(&Index { schema_version: 2, media_type: INDEX, manifests, annotations })
}
