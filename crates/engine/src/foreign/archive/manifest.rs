//! The manifest of an image on its way, made anew for the image of its ID.
//!
//! The ID is the digest of the image's configuration, which names the layers by their content. Podman (4.3.1) takes the layers
//! that the manifest names, and does not compare the two; newer ones take layers by what annotations say of them, or from the
//! places that it names. So under an ID that its users trust, any layers could come. Here the layers are compared with the
//! configuration, and nothing of the manifest is passed on but these and annotations that say what the image is.

use std::collections::{BTreeMap, HashMap};
use std::io;

use serde::{Deserialize, Serialize};

use crate::image::Digest;

/// Annotations that say what an image is.
const ANNOTATIONS: &str = "org.opencontainers.image.";

/// Bytes of all documents that are kept of an archive. An image has two.
const MOST: usize = 16 << 20;

/// A format of manifests: their type, that of the configuration, and that of layers as they are unpacked.
struct Format {
    manifest: &'static str,
    config: &'static str,
    layer: &'static str,
}

const OCI: Format = Format {
    manifest: "application/vnd.oci.image.manifest.v1+json",
    config: "application/vnd.oci.image.config.v1+json",
    layer: "application/vnd.oci.image.layer.v1.tar",
};

const DOCKER: Format = Format {
    manifest: "application/vnd.docker.distribution.manifest.v2+json",
    config: "application/vnd.docker.container.image.v1+json",
    layer: "application/vnd.docker.image.rootfs.diff.tar",
};

/// Types of what containerd may know an image by: manifests, and lists of them with one for each platform.
const BY_DIGEST: [&str; 4] = [
    OCI.manifest,
    DOCKER.manifest,
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
];

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
    fn new(media_type: &str, (hex, size): (&str, u64)) -> Self {
        Self { media_type: media_type.to_owned(), digest: format!("sha256:{hex}"), size, platform: None }
    }

    /// The digits of its digest.
    pub(super) fn hex(&self) -> &str {
        self.digest.strip_prefix("sha256:").unwrap_or(&self.digest)
    }
}

/// A manifest. An engine reads keys without regard to case, and takes the last of two: nothing is passed on that is not read
/// here.
#[derive(Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    schema_version: u32,
    #[serde(skip_deserializing)]
    media_type: &'static str,
    config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    annotations: BTreeMap<String, String>,
}

impl Manifest {
    /// One with these annotations, of a configuration and layers, each with its size.
    fn of(
        format: &Format,
        config: (&str, u64),
        layers: &[(&str, u64)],
        annotations: BTreeMap<String, String>,
    ) -> Self {
        let layers = layers.iter().map(|layer| Descriptor::new(format.layer, *layer)).collect();
        let config = Descriptor::new(format.config, config);
        Self { schema_version: 2, media_type: format.manifest, config, layers, annotations }
    }

    /// Its text, and what names it.
    fn written(&self) -> io::Result<(Vec<u8>, Descriptor)> {
        let text = serde_json::to_vec(self)?;
        let digest = Digest::of(&text);
        let named = Descriptor::new(self.media_type, (digest.hex(), text.len() as u64));
        Ok((text, named))
    }
}

/// The configuration of an image.
#[derive(Deserialize)]
struct Config {
    rootfs: RootFs,
}

#[derive(Deserialize)]
struct RootFs {
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
        if content.trim_ascii_start().first() == Some(&b'{') {
            self.bytes += content.len();
            if self.bytes > MOST {
                return Err(io::Error::other("an archive with more documents than an image has"));
            }
            self.found.insert(digest.to_owned(), content);
        }
        Ok(())
    }

    /// Whether there is this document under this digest.
    pub(super) fn has(&self, digest: &str, content: &[u8]) -> bool {
        self.found.get(digest).is_some_and(|found| found == content)
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

    /// What names the document with this digest, which is the ID of the image where containerd has it: a manifest, or a list of
    /// them. containerd names all that it stores by its own digest, and compares the layers with the configuration.
    pub(super) fn by_digest(&self, named: &Descriptor, id: &str) -> io::Result<Descriptor> {
        let wrong = |what: String| Err(io::Error::other(what));
        if named.hex() != id {
            return wrong(format!("an archive of the image {}, not of {id}", named.digest));
        }
        if !BY_DIGEST.contains(&named.media_type.as_str()) {
            return wrong(format!("an archive with a manifest of the type {:?}", named.media_type));
        }
        let text = self.document(&named.digest)?;
        Ok(Descriptor::new(&named.media_type, (id, text.len() as u64)))
    }

    /// The manifest with which the image with this ID is to be read, in place of the one that is named so; and what names it.
    pub(super) fn manifest(&self, named: &Descriptor, id: &str) -> io::Result<(Vec<u8>, Descriptor)> {
        let wrong = |what: String| Err(io::Error::other(what));
        let Some(format) = [OCI, DOCKER].into_iter().find(|format| format.manifest == named.media_type)
        else {
            return wrong(format!("an archive with a manifest of the type {:?}", named.media_type));
        };
        let Manifest { config, layers, annotations, .. } = read(self.document(&named.digest)?, "manifest")?;
        if config.digest.strip_prefix("sha256:") != Some(id) {
            return wrong(format!("an archive of the image {}, not of {id}", config.digest));
        }
        let text = self.document(&config.digest)?;
        if !layers.iter().map(|layer| &layer.digest).eq(&layers_of(text)?) {
            return wrong("an archive with other layers than its image has".to_owned());
        }
        let layers: Vec<_> = layers.iter().map(|layer| (layer.hex(), layer.size)).collect();
        // Podman gives them to containers, and others tell a runtime what to do.
        let is_passed = |(key, _): &(String, String)| key.starts_with(ANNOTATIONS);
        let annotations = annotations.into_iter().filter(is_passed).collect();
        Manifest::of(&format, (id, text.len() as u64), &layers, annotations).written()
    }
}

/// The digests of the layers of a configuration as they are unpacked, from the lowest to the uppermost.
pub(super) fn layers_of(configuration: &[u8]) -> io::Result<Vec<String>> {
    let Config { rootfs } = read(configuration, "configuration")?;
    Ok(rootfs.diff_ids)
}

fn read<'a, T: Deserialize<'a>>(text: &'a [u8], what: &str) -> io::Result<T> {
    let unclear = |error| io::Error::other(format!("a {what} that is not understood: {error}"));
    serde_json::from_slice(text).map_err(unclear)
}

/// A manifest of Docker's for an image of this configuration and these layers, each with its size; and what names it.
pub(super) fn of_docker(config: (&str, u64), layers: &[(&str, u64)]) -> io::Result<(Vec<u8>, Descriptor)> {
    Manifest::of(&DOCKER, config, layers, BTreeMap::new()).written()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn digest(text: &str) -> String {
        Digest::of(text.as_bytes()).to_string()
    }

    /// The manifest that comes of an image with two layers, whose manifest is changed.
    fn made(change: impl FnOnce(&mut Value, &mut Value)) -> Result<Value, String> {
        let layers = ["lower", "upper"].map(digest);
        let config = json!({ "rootfs": { "type": "layers", "diff_ids": layers } }).to_string();
        let part = |digest: &str| json!({ "mediaType": "x", "digest": digest, "size": 1 });
        let mut manifest = json!({
            "schemaVersion": 2, "config": part(&digest(&config)), "layers": [part(&layers[0]), part(&layers[1])],
            "annotations": { "org.opencontainers.image.title": "b", "org.criu.config": "c" },
        });
        let mut named = json!({ "mediaType": OCI.manifest, "digest": "", "size": 1 });
        change(&mut manifest, &mut named);
        let manifest = format!(" {manifest}");
        if named["digest"] == "" {
            named["digest"] = digest(&manifest).into();
        }
        let named: Descriptor = serde_json::from_value(named).unwrap();
        let mut documents = Documents::default();
        documents.keep(named.hex(), manifest.into_bytes()).unwrap();
        let id = digest(&config);
        let id = id.strip_prefix("sha256:").unwrap();
        documents.keep(id, config.into_bytes()).unwrap();
        let (text, named) = documents.manifest(&named, id).map_err(|error| error.to_string())?;
        assert_eq!(named.digest, Digest::of(&text).to_string());
        Ok(serde_json::from_slice(&text).unwrap())
    }

    #[test]
    fn an_image_has_the_layers_of_its_id() {
        let manifest = made(|_, _| {}).unwrap();
        assert_eq!(
            manifest["layers"][1],
            json!({ "mediaType": OCI.layer, "digest": digest("upper"), "size": 1 })
        );
        assert_eq!(manifest["annotations"], json!({ "org.opencontainers.image.title": "b" }));
        let of_docker = made(|_, named| named["mediaType"] = DOCKER.manifest.into()).unwrap();
        assert_eq!(
            (&of_docker["mediaType"], &of_docker["config"]["mediaType"]),
            (&json!(DOCKER.manifest), &json!(DOCKER.config))
        );
        let refused = |change: fn(&mut Value, &mut Value), said: &str| {
            let told = made(change).unwrap_err();
            assert!(told.contains(said), "{told}");
        };
        let layers = "other layers than its image has";
        refused(|manifest, _| manifest["layers"][1]["digest"] = digest("evil").into(), layers);
        refused(|manifest, _| manifest["layers"].as_array_mut().unwrap().truncate(1), layers);
        refused(|manifest, _| manifest["layers"].as_array_mut().unwrap().reverse(), layers);
        refused(|manifest, _| manifest["config"]["digest"] = digest("other").into(), "not of ");
        refused(
            |_, named| named["mediaType"] = "application/vnd.oci.image.index.v1+json".into(),
            "of the type",
        );
        // A document under a digest that is not its own.
        refused(|_, named| named["digest"] = digest("another").into(), "is another");
        refused(|manifest, _| manifest["config"] = json!(7), "a manifest that is not understood");
    }

    #[test]
    fn nothing_else_of_a_manifest_is_passed_on() {
        let plain = made(|_, _| {}).unwrap();
        // What an engine would take in place of what was looked at, where it would take a layer from, or by what.
        let changes: [fn(&mut Value, &mut Value); 6] = [
            |manifest, _| manifest["Layers"] = json!([]),
            |manifest, _| manifest["config"]["Digest"] = "x".into(),
            |manifest, _| manifest["subject"] = json!({}),
            |manifest, _| manifest["layers"][0]["urls"] = json!(["http://localhost/"]),
            |manifest, _| {
                manifest["layers"][0]["annotations"] =
                    json!({ "containerd.io/snapshot/stargz/toc.digest": "x" })
            },
            |manifest, _| {
                manifest["layers"][0]["mediaType"] = "application/vnd.oci.image.layer.v1.tar+zstd".into()
            },
        ];
        for (number, change) in changes.into_iter().enumerate() {
            assert_eq!(made(change).unwrap(), plain, "{number}");
        }
    }

    #[test]
    fn a_key_that_comes_twice_is_refused() {
        let part = r#"{"mediaType":"m","digest":"a","size":1}"#;
        let twice = format!(r#"{{"schemaVersion":2,"config":{part},"config":{part},"layers":[]}}"#);
        assert!(serde_json::from_str::<Manifest>(&twice).is_err());
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
    fn a_manifest_that_is_made_here_is_one_that_is_taken_as_it_is() {
        let layer = digest("layer");
        let config = json!({ "rootfs": { "diff_ids": [layer] } }).to_string();
        let id = digest(&config);
        let id = id.strip_prefix("sha256:").unwrap();
        let layer = layer.strip_prefix("sha256:").unwrap();
        let (manifest, named) = of_docker((id, config.len() as u64), &[(layer, 5)]).unwrap();
        let mut documents = Documents::default();
        documents.keep(named.hex(), manifest.clone()).unwrap();
        documents.keep(id, config.into_bytes()).unwrap();
        assert_eq!(documents.manifest(&named, id).unwrap().0, manifest);
    }
}
