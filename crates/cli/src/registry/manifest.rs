//! What a registry has under a reference: an image's manifest, or an index of images for several platforms
//! (image-spec v1.1, manifest.md and image-index.md; Docker's documents have the same form).

use std::collections::BTreeMap;

use godwit_pack::image::{CROSSING, MARKED, MODULES};
use oci_spec::image::Arch;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::skopeo::{PullError, plain};

/// Most platforms that an error names.
const MOST_SHOWN: usize = 20;

/// Instruction sets to which services cross, as OCI calls them.
const SETS: [&str; 2] = ["amd64", "arm64"];
/// Most images in an index that is pulled as a whole: one for each set, and what signs and describes them.
const MOST_WHOLE: usize = 16;

/// A manifest or an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Manifest {
    /// Of the document.
    pub(super) digest: String,
    /// Of an image; none of an index, and none of a manifest of Docker's first form.
    pub(super) layers: Vec<Descriptor>,
    /// The digest of an image's configuration; none where there are no layers.
    pub(super) configuration: Option<String>,
    instances: Vec<Descriptor>,
    annotations: BTreeMap<String, String>,
}

/// What belongs to an image and is not for this machine.
#[derive(Debug, Default)]
pub(super) struct Beside<'a> {
    /// Images for other instruction sets.
    pub(super) others: Vec<&'a Descriptor>,
    /// The manifest of the programs' neutral modules.
    pub(super) modules: Option<&'a Descriptor>,
}

/// What a document refers to.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Descriptor {
    pub(super) digest: String,
    /// Bytes.
    pub(super) size: u64,
    platform: Option<Platform>,
    annotations: Option<BTreeMap<String, String>>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Platform {
    architecture: String,
    os: String,
}

/// The descriptor of a configuration; documents that are no images may have another thing of this name.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Configuration {
    digest: String,
}

#[derive(Deserialize)]
struct Document {
    config: Option<Configuration>,
    layers: Option<Vec<Descriptor>>,
    manifests: Option<Vec<Descriptor>>,
    annotations: Option<BTreeMap<String, String>>,
}

/// The digest of a document.
pub(super) fn digest_of(document: &[u8]) -> String {
    let hex: String = Sha256::digest(document).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{hex}")
}

impl Manifest {
    /// Reads the document that a registry has for `reference`.
    pub(super) fn read(reference: &str, document: &[u8]) -> Result<Self, PullError> {
        let Document { config, layers, manifests, annotations } = serde_json::from_slice(document)
            .map_err(|cause| PullError::Manifest { reference: reference.to_owned(), cause })?;
        let configuration = config.map(|config| config.digest).filter(|digest| !digest.is_empty());
        let (layers, instances) = (layers.unwrap_or_default(), manifests.unwrap_or_default());
        let annotations = annotations.unwrap_or_default();
        Ok(Self { digest: digest_of(document), layers, configuration, instances, annotations })
    }

    /// The images beside `own` for the other instruction sets, where the index says that services cross between them: then it
    /// is pulled as a whole. A node takes one for each set, and the neutral modules, if there are some.
    pub(super) fn crossing(&self, reference: &str, own: &str) -> Result<Beside<'_>, PullError> {
        let is_marked = |annotations: &BTreeMap<String, String>, key| {
            annotations.get(key).is_some_and(|value| value == MARKED)
        };
        let has = |image: &Descriptor, key| image.annotations.as_ref().is_some_and(|all| is_marked(all, key));
        let of = |image: &Descriptor| has(image, CROSSING);
        let all = is_marked(&self.annotations, CROSSING);
        if !all && !self.instances.iter().any(|image| image.digest == own && of(image)) {
            return Ok(Beside::default());
        }
        let modules = self.instances.iter().find(|image| has(image, MODULES));
        let here = Arch::default().to_string();
        let set = |image: &Descriptor| {
            let platform = image.platform.as_ref().filter(|platform| platform.os == "linux")?;
            SETS.into_iter().find(|set| *set == platform.architecture && *set != here)
        };
        let mut others: BTreeMap<&str, &Descriptor> = BTreeMap::new();
        let beside = self.instances.iter().filter(|image| all || of(image));
        for (set, image) in beside.filter_map(|image| Some((set(image)?, image))) {
            others.entry(set).or_insert(image);
        }
        if (!others.is_empty() || modules.is_some()) && self.instances.len() > MOST_WHOLE {
            let (reference, images) = (reference.to_owned(), self.instances.len());
            return Err(PullError::Images { reference, images, most: MOST_WHOLE });
        }
        Ok(Beside { others: others.into_values().collect(), modules })
    }

    /// The digest of the image for this machine's platform; `None`: this is an image's manifest itself.
    pub(super) fn of_this_machine(&self, reference: &str) -> Result<Option<String>, PullError> {
        if self.instances.is_empty() {
            return Ok(None);
        }
        let wanted = Arch::default().to_string();
        let is_here = |platform: &Platform| platform.os == "linux" && platform.architecture == wanted;
        let here = self.instances.iter().find(|image| image.platform.as_ref().is_some_and(is_here));
        if let Some(here) = here {
            return Ok(Some(here.digest.clone()));
        }
        let mut others: Vec<_> = self
            .instances
            .iter()
            .filter_map(|image| image.platform.as_ref())
            // Attestations are listed as images for no platform.
            .filter(|platform| platform.os != "unknown")
            .map(|platform| format!("{}/{}", platform.os, platform.architecture))
            .collect();
        others.sort();
        others.dedup();
        others.truncate(MOST_SHOWN);
        Err(PullError::Platform {
            reference: reference.to_owned(),
            wanted: format!("linux/{wanted}"),
            found: if others.is_empty() { "no platform at all".into() } else { plain(&others.join(", ")) },
        })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn index(platforms: &[(&str, &str)]) -> Manifest {
        let manifests: Vec<_> = platforms
            .iter()
            .map(|(os, architecture)| {
                serde_json::json!({
                    "digest": format!("sha256:{os}-{architecture}"), "size": 7,
                    "platform": {"os": os, "architecture": architecture},
                })
            })
            .collect();
        let document = serde_json::json!({"schemaVersion": 2, "manifests": manifests});
        Manifest::read("x", document.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn an_index_has_the_image_of_this_machine_or_says_which_it_has() {
        let here = Arch::default().to_string();
        let both = index(&[("windows", &here), ("linux", "s390x"), ("linux", &here), ("unknown", "unknown")]);
        assert_eq!(both.of_this_machine("x").unwrap(), Some(format!("sha256:linux-{here}")));
        let others = index(&[("linux", "s390x"), ("unknown", "unknown"), ("linux", "riscv64")]);
        let said = others.of_this_machine("x").unwrap_err().to_string();
        assert!(said.contains(&format!("linux/{here}")), "{said}");
        assert!(said.contains("linux/riscv64, linux/s390x") && !said.contains("unknown"), "{said}");
    }

    #[test]
    fn an_index_of_images_between_which_services_cross_is_pulled_as_a_whole() {
        let (own, other) = match Arch::default().to_string().as_str() {
            "arm64" => ("arm64", "amd64"),
            _ => ("amd64", "arm64"),
        };
        let image = |architecture: &str, annotations: serde_json::Value| {
            serde_json::json!({
                "digest": format!("sha256:{architecture}"), "size": 7, "annotations": annotations,
                "platform": {"os": "linux", "architecture": architecture},
            })
        };
        let (mark, none) = (serde_json::json!({CROSSING: MARKED}), serde_json::Value::Null);
        let others = |annotations: &serde_json::Value, manifests: Vec<serde_json::Value>| {
            let document = serde_json::json!({"annotations": annotations, "manifests": manifests});
            let index = Manifest::read("x", document.to_string().as_bytes()).unwrap();
            let here = index.of_this_machine("x").unwrap().unwrap();
            let others = index.crossing("x", &here);
            others.map(|beside| beside.others.iter().map(|other| other.digest.clone()).collect::<Vec<_>>())
        };
        let (a, b) = (image(own, none.clone()), image(other, none.clone()));
        let both = || vec![a.clone(), image("s390x", none.clone()), b.clone(), b.clone()];
        assert_eq!(others(&mark, both()).unwrap(), [format!("sha256:{other}")]);
        assert_eq!(others(&none, both()).unwrap(), [""; 0]);
        assert_eq!(others(&serde_json::json!({CROSSING: "2"}), both()).unwrap(), [""; 0]);
        let (marked_a, marked_b) = (image(own, mark.clone()), image(other, mark.clone()));
        assert_eq!(others(&none, vec![marked_b.clone(), marked_a]).unwrap(), [format!("sha256:{other}")]);
        assert_eq!(others(&none, vec![a.clone(), marked_b]).unwrap(), [""; 0], "the own one is not marked");
        // What programs were made from comes along, also where it is for no other set.
        let modules = serde_json::json!({
            "digest": "sha256:modules", "size": 7, "annotations": {MODULES: MARKED},
            "platform": {"os": "unknown", "architecture": "unknown"},
        });
        let has_modules = |annotations: &serde_json::Value| {
            let document = serde_json::json!({"annotations": annotations, "manifests": [a, modules]});
            let index = Manifest::read("x", document.to_string().as_bytes()).unwrap();
            let beside = index.crossing("x", &format!("sha256:{own}")).unwrap();
            assert!(beside.others.is_empty());
            beside.modules.is_some_and(|modules| modules.digest == "sha256:modules")
        };
        assert!(has_modules(&mark) && !has_modules(&none));
        // One that would fill the disk.
        let many: Vec<_> =
            both().into_iter().chain(vec![image("riscv64", none.clone()); MOST_WHOLE]).collect();
        let refused = others(&mark, many.clone()).unwrap_err();
        assert!(refused.to_string().contains("20 images"), "{refused}");
        assert!(others(&none, many).unwrap().is_empty(), "of that one alone comes");
    }

    #[test]
    fn a_manifest_is_known_by_the_digest_of_its_bytes() {
        let document = br#"{"schemaVersion":2,"config":{},"layers":[{"digest":"sha256:1","size":3}]}"#;
        let read = Manifest::read("x", document).unwrap();
        assert_eq!(read.of_this_machine("x").unwrap(), None);
        assert_eq!((read.layers.len(), read.layers[0].size, &read.configuration), (1, 3, &None));
        let whole = br#"{"config":{"digest":"sha256:2"},"layers":[]}"#;
        assert_eq!(Manifest::read("x", whole).unwrap().configuration.as_deref(), Some("sha256:2"));
        assert_eq!(read.digest, "sha256:fba33207a7329f60320bb578d02b734768a570ec1afdf9df1e14311109dfdeb2");
        for broken in
            [&b"{"[..], br#"{"layers":[{"digest":7}]}"#, br#"{"layers":[{"digest":"x","size":-1}]}"#]
        {
            assert!(matches!(Manifest::read("x", broken), Err(PullError::Manifest { .. })));
        }
    }
}
