//! The manifest of an image on its way, and whether that is the image of its ID.
//!
//! The ID is the digest of the image's configuration, which names the layers by their content. Podman (4.3.1) takes the layers
//! that the manifest names, and does not compare the two: under an ID that its users trust, any layers could come. So they are
//! compared here, before the archive has the list without which no engine reads it.

use std::collections::HashMap;
use std::io;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::image::Digest;

/// The type of the OCI's manifests.
const OCI: &str = "application/vnd.oci.image.manifest.v1+json";

/// The types of a manifest of Docker's, of its configuration, and of its layers as they are unpacked.
const DOCKER: &str = "application/vnd.docker.distribution.manifest.v2+json";
const DOCKER_CONFIG: &str = "application/vnd.docker.container.image.v1+json";
const DOCKER_LAYER: &str = "application/vnd.docker.image.rootfs.diff.tar";

/// Bytes of all documents that are kept of an archive. An image has two.
const MOST: usize = 16 << 20;

/// What names a document: in the list of images, its manifest.
#[derive(Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Descriptor {
    media_type: String,
    digest: String,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize, Serialize)]
struct Platform {
    architecture: String,
    os: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    variant: Option<String>,
}

impl Descriptor {
    fn new(media_type: &str, digest: String, size: u64) -> Self {
        Self { media_type: media_type.to_owned(), digest, size, platform: None }
    }
}

/// What a manifest says of a document or a layer. An engine reads keys without regard to case, and takes the last of two: so
/// one that is not known here, or comes twice, is refused.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Part {
    digest: String,
    #[serde(rename = "mediaType")]
    _media_type: IgnoredAny,
    #[serde(rename = "size")]
    _size: IgnoredAny,
    #[serde(default, rename = "urls")]
    _urls: IgnoredAny,
    #[serde(default, rename = "annotations")]
    _annotations: IgnoredAny,
    #[serde(default, rename = "platform")]
    _platform: IgnoredAny,
    #[serde(default, rename = "artifactType")]
    _artifact_type: IgnoredAny,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Manifest {
    config: Part,
    layers: Vec<Part>,
    #[serde(rename = "schemaVersion")]
    _schema_version: IgnoredAny,
    #[serde(default, rename = "mediaType")]
    _media_type: IgnoredAny,
    #[serde(default, rename = "artifactType")]
    _artifact_type: IgnoredAny,
    #[serde(default, rename = "subject")]
    _subject: IgnoredAny,
    #[serde(default, rename = "annotations")]
    _annotations: IgnoredAny,
}

/// The configuration of an image.
#[derive(Deserialize)]
struct Config {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
    /// Digests of the layers as they are unpacked, from the lowest to the uppermost.
    diff_ids: Vec<String>,
}

/// The documents in an archive of an image.
#[derive(Default)]
pub(super) struct Documents {
    /// By the digests that the archive has them under.
    found: HashMap<String, Vec<u8>>,
    bytes: usize,
}

impl Documents {
    /// Keeps a file if it may be a document: JSON, of an object. A layer begins with the name of a file.
    pub(super) fn keep(&mut self, digest: &str, content: Vec<u8>) -> io::Result<()> {
        if content.first() == Some(&b'{') {
            self.bytes += content.len();
            if self.bytes > MOST {
                return Err(io::Error::other("an archive with more documents than an image has"));
            }
            self.found.insert(digest.to_owned(), content);
        }
        Ok(())
    }

    /// One that is what its digest says.
    fn document(&self, digest: &str) -> io::Result<&[u8]> {
        let found = digest.strip_prefix("sha256:").and_then(|hex| self.found.get(hex));
        let found =
            found.ok_or_else(|| io::Error::other(format!("an archive without the document {digest}")))?;
        match Digest::of(found).to_string() == digest {
            true => Ok(found),
            false => Err(io::Error::other(format!("an archive whose document {digest} is another"))),
        }
    }

    /// Looks whether an image with this manifest has this ID and the layers that it should.
    pub(super) fn are_of(&self, manifest: &Descriptor, id: &str) -> io::Result<()> {
        let wrong = |what: String| Err(io::Error::other(what));
        if ![OCI, DOCKER].contains(&manifest.media_type.as_str()) {
            return wrong(format!("an archive with a manifest of the type {:?}", manifest.media_type));
        }
        let manifest: Manifest = serde_json::from_slice(self.document(&manifest.digest)?)
            .map_err(|error| io::Error::other(format!("a manifest that is not understood: {error}")))?;
        let config = &manifest.config.digest;
        if config.strip_prefix("sha256:") != Some(id) {
            return wrong(format!("an archive of the image {config}, not of {id}"));
        }
        let config: Config = serde_json::from_slice(self.document(config)?)?;
        match manifest.layers.iter().map(|layer| &layer.digest).eq(&config.rootfs.diff_ids) {
            true => Ok(()),
            false => wrong("an archive with other layers than its image has".to_owned()),
        }
    }
}

/// A manifest of Docker's for an image of this configuration and these layers, each with its size; and what names it.
pub(super) fn of_docker(config: (&str, u64), layers: &[(&str, u64)]) -> io::Result<(Vec<u8>, Descriptor)> {
    #[derive(Serialize)]
    #[serde(rename_all = "camelCase")]
    struct Manifest {
        schema_version: u32,
        media_type: &'static str,
        config: Descriptor,
        layers: Vec<Descriptor>,
    }
    let part = |kind, (hex, size): (&str, u64)| Descriptor::new(kind, format!("sha256:{hex}"), size);
    let manifest = serde_json::to_vec(&Manifest {
        schema_version: 2,
        media_type: DOCKER,
        config: part(DOCKER_CONFIG, config),
        layers: layers.iter().map(|layer| part(DOCKER_LAYER, *layer)).collect(),
    })?;
    let named = Descriptor::new(DOCKER, Digest::of(&manifest).to_string(), manifest.len() as u64);
    Ok((manifest, named))
}

impl Descriptor {
    /// The digits of its digest.
    pub(super) fn hex(&self) -> &str {
        self.digest.strip_prefix("sha256:").unwrap_or(&self.digest)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn digest(text: &str) -> String {
        Digest::of(text.as_bytes()).to_string()
    }

    /// What comes of an image with two layers, whose manifest is changed.
    fn looked_at(change: impl FnOnce(&mut Value, &mut Value)) -> Result<(), String> {
        let layers = ["lower", "upper"].map(digest);
        let config = json!({ "architecture": "amd64", "rootfs": { "type": "layers", "diff_ids": layers } })
            .to_string();
        let part = |kind: &str, digest: &str| json!({ "mediaType": kind, "digest": digest, "size": 1 });
        let mut manifest = json!({
            "schemaVersion": 2, "mediaType": OCI, "config": part("c", &digest(&config)),
            "layers": [part("l", &layers[0]), part("l", &layers[1])], "annotations": { "a": "b" },
        });
        let mut named = json!({ "mediaType": OCI, "digest": "", "size": 1 });
        change(&mut manifest, &mut named);
        let manifest = manifest.to_string();
        if named["digest"] == "" {
            named["digest"] = digest(&manifest).into();
        }
        let named: Descriptor = serde_json::from_value(named).unwrap();
        let mut documents = Documents::default();
        documents.keep(named.hex(), manifest.into_bytes()).unwrap();
        let id = digest(&config);
        let id = id.strip_prefix("sha256:").unwrap();
        documents.keep(id, config.into_bytes()).unwrap();
        documents.are_of(&named, id).map_err(|error| error.to_string())
    }

    #[test]
    fn an_image_has_the_layers_of_its_id() {
        assert_eq!(looked_at(|_, _| {}), Ok(()));
        assert_eq!(looked_at(|_, named| named["mediaType"] = DOCKER.into()), Ok(()));
        let refused = |change: fn(&mut Value, &mut Value), said: &str| {
            let told = looked_at(change).unwrap_err();
            assert!(told.contains(said), "{told}");
        };
        let layers = "other layers than its image has";
        refused(|manifest, _| manifest["layers"][1]["digest"] = digest("evil").into(), layers);
        refused(|manifest, _| manifest["layers"].as_array_mut().unwrap().truncate(1), layers);
        refused(|manifest, _| manifest["layers"].as_array_mut().unwrap().reverse(), layers);
        refused(|manifest, _| manifest["config"]["digest"] = digest("other").into(), "not of ");
        // What an engine would take in place of what was looked at.
        refused(|manifest, _| manifest["Layers"] = json!([]), "unknown field `Layers`");
        refused(|manifest, _| manifest["config"]["Digest"] = "x".into(), "unknown field `Digest`");
        refused(
            |_, named| named["mediaType"] = "application/vnd.oci.image.index.v1+json".into(),
            "of the type",
        );
        // A document under a digest that is not its own.
        refused(|_, named| named["digest"] = digest("another").into(), "is another");
    }

    #[test]
    fn a_key_that_comes_twice_is_refused() {
        let twice = r#"{"schemaVersion":2,"config":{"digest":"a"},"config":{"digest":"b"},"layers":[]}"#;
        assert!(serde_json::from_str::<Manifest>(twice).is_err());
    }

    #[test]
    fn documents_are_kept_and_layers_are_not() {
        let mut documents = Documents::default();
        documents.keep("a", b"etc/".to_vec()).unwrap();
        assert!(documents.found.is_empty());
        let mut large = vec![b' '; MOST / 2];
        large[0] = b'{';
        documents.keep("b", large.clone()).unwrap();
        documents.keep("c", large.clone()).unwrap();
        assert!(documents.keep("d", large).is_err());
    }

    #[test]
    fn a_manifest_that_is_made_here_is_one_that_is_taken() {
        let layer = digest("layer");
        let config = json!({ "rootfs": { "diff_ids": [layer] } }).to_string();
        let id = digest(&config);
        let id = id.strip_prefix("sha256:").unwrap();
        let layer = layer.strip_prefix("sha256:").unwrap();
        let (manifest, named) = of_docker((id, config.len() as u64), &[(layer, 5)]).unwrap();
        let mut documents = Documents::default();
        documents.keep(named.hex(), manifest).unwrap();
        documents.keep(id, config.into_bytes()).unwrap();
        documents.are_of(&named, id).unwrap();
    }
}
