//! An image gets a platform: the documents and the layer that it has with the executables of a further set.
//!
//! All is taken from the image for the set that is there: the layers but those that have nothing but its executables, and how it
//! is run. Documents come from elsewhere; what is not understood in them stays as it is.

use std::collections::BTreeMap;
use std::path::Path;

use godwit_crossing::Set;
use serde_json::{Value, json};

use crate::PackError;
use crate::documents::{CONFIGURATION, LAYER, MANIFEST, architecture};
use crate::layer::{self, Blob};

/// The documents of an image, for a set that it has.
#[derive(Debug, Clone, Copy)]
pub struct Documents<'a> {
    /// Of all its platforms.
    pub index: &'a [u8],
    /// Of the platform that is there.
    pub manifest: &'a [u8],
    /// Of the same.
    pub configuration: &'a [u8],
    /// Digest of that manifest.
    pub digest: &'a str,
}

/// What an image has with a further platform.
#[derive(Debug)]
pub struct Grown {
    /// The layer of its executables.
    pub layer: Blob,
    /// Digests of the layers for the platform, lowest first: those that it has in common with the other one, and that.
    pub layers: Vec<String>,
    /// How it is run there.
    pub configuration: Blob,
    /// Of the platform.
    pub manifest: Blob,
    /// Of all platforms: its digest is the image's now.
    pub index: Blob,
}

/// Why an image gets no platform.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum GrowthError {
    #[error("the image's {0} is not understood: {1}")]
    Document(&'static str, String),
    #[error("the image is for linux/{0} already")]
    There(&'static str),
    #[error(transparent)]
    Pack(#[from] PackError),
}

/// The image with the executables of a set, by the programs' paths in it. Of the layers of the platform that is there those
/// `stay` of which that is said, lowest first. What is made is spooled in a directory.
///
/// # Errors
/// The documents are not those of such an image, or it has the platform, or nothing can be written.
pub fn add_platform(
    documents: Documents<'_>,
    set: Set,
    executables: &BTreeMap<String, Vec<u8>>,
    stay: &[bool],
    directory: &Path,
) -> Result<Grown, GrowthError> {
    let spool = directory.join("spooled");
    let executables = executables.iter();
    let executables = executables.map(|(path, bytes)| (path.trim_start_matches('/'), &bytes[..]));
    let layer = layer::programs(&executables.collect(), &spool)?;
    let document = |value: &Value| {
        let bytes = value.to_string().into_bytes();
        Blob::new(&spool, |into| {
            into.write_all(&bytes).map_err(|error| PackError::Write(spool.clone(), error))
        })
    };

    let mut configuration = parse("configuration", documents.configuration)?;
    configuration["architecture"] = architecture(set).into();
    configuration["os"] = "linux".into();
    for other in ["variant", "history"] {
        if let Some(all) = configuration.as_object_mut() {
            all.remove(other);
        }
    }
    let diff_ids = list("configuration", &mut configuration["rootfs"]["diff_ids"])?;
    keep("configuration", diff_ids, stay)?;
    diff_ids.push(layer.digest().into());
    let configuration = document(&configuration)?;

    let mut manifest = parse("manifest", documents.manifest)?;
    let kind = manifest["config"]["mediaType"].as_str().unwrap_or(CONFIGURATION).to_owned();
    manifest["config"] =
        json!({"mediaType": kind, "digest": configuration.digest(), "size": configuration.bytes()});
    let layers = list("manifest", &mut manifest["layers"])?;
    keep("manifest", layers, stay)?;
    layers.push(json!({"mediaType": LAYER, "digest": layer.digest(), "size": layer.bytes()}));
    let digests = layers.iter().map(|layer| layer["digest"].as_str().unwrap_or_default().to_owned());
    let digests: Vec<_> = digests.collect();
    let manifest = document(&manifest)?;

    let mut index = parse("index", documents.index)?;
    let images = list("index", &mut index["manifests"])?;
    let place = place(images, set)?;
    let own = images.iter().find(|image| image["digest"] == documents.digest);
    let own = own.ok_or_else(|| not_understood("index", "it does not have the manifest for this machine"))?;
    let mut entry = own.clone();
    entry["mediaType"] = own.get("mediaType").cloned().unwrap_or_else(|| MANIFEST.into());
    entry["digest"] = manifest.digest().into();
    entry["size"] = manifest.bytes().into();
    entry["platform"] = json!({"architecture": architecture(set), "os": "linux"});
    images.insert(place, entry);
    let index = document(&index)?;
    Ok(Grown { layer, layers: digests, configuration, manifest, index })
}

/// Where the manifest for a set comes: behind those for sets before it, and before what is for none.
fn place(images: &[Value], set: Set) -> Result<usize, GrowthError> {
    let of = |image: &Value| {
        let is_linux = image["platform"]["os"] == "linux";
        Set::ALL
            .into_iter()
            .find(|known| is_linux && image["platform"]["architecture"] == architecture(*known))
    };
    if images.iter().any(|image| of(image) == Some(set)) {
        return Err(GrowthError::There(architecture(set)));
    }
    let is_behind = |image: &Value| of(image).is_none_or(|other| other > set);
    Ok(images.iter().position(is_behind).unwrap_or(images.len()))
}

fn not_understood(what: &'static str, why: &str) -> GrowthError {
    GrowthError::Document(what, why.to_owned())
}

fn parse(what: &'static str, document: &[u8]) -> Result<Value, GrowthError> {
    let value: Value =
        serde_json::from_slice(document).map_err(|error| not_understood(what, &error.to_string()))?;
    if value.is_object() { Ok(value) } else { Err(not_understood(what, "it is no object")) }
}

fn list<'a>(what: &'static str, value: &'a mut Value) -> Result<&'a mut Vec<Value>, GrowthError> {
    value.as_array_mut().ok_or_else(|| not_understood(what, "a list is missing"))
}

/// Takes the layers away that do not stay.
fn keep(what: &'static str, layers: &mut Vec<Value>, stay: &[bool]) -> Result<(), GrowthError> {
    if layers.len() != stay.len() {
        return Err(not_understood(what, "it has another number of layers"));
    }
    let mut stay = stay.iter();
    layers.retain(|_| stay.next().is_some_and(|stays| *stays));
    Ok(())
}
