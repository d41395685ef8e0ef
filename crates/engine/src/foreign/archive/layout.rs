//! An archive of Docker's as one of the OCI's layout.
//!
//! Podman saves an image of Docker's format with its ID only as an archive of Docker's, of which it loads every layer. It loads
//! the same image from an OCI layout too, and there asks for no layer that its storage has. In Podman's archives of Docker's a
//! file is named after its content, so that the archive can be written anew as it comes.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};

use super::manifest::of_docker;
use super::{BLOBS, INDEX, Index, LIST, Manifest, add, is_digest, not_one};

/// What says that a directory is such a layout.
pub(super) const LAYOUT: (&str, &[u8]) = ("oci-layout", br#"{"imageLayoutVersion":"1.0.0"}"#);

/// Writes Docker's archive of one image as an OCI layout, without the layers of these digests.
pub(crate) fn oci_layout(archive: impl Read, there: &[String], to: impl Write) -> io::Result<()> {
    let there: HashSet<_> = there.iter().filter_map(|digest| digest.strip_prefix("sha256:")).collect();
    let (mut archive, mut copy) = (tar::Archive::new(archive), tar::Builder::new(to));
    let (mut sizes, mut list) = (HashMap::new(), None);
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?.to_str().unwrap_or_default().to_owned();
        if entry.header().entry_type() != tar::EntryType::Regular {
            continue;
        }
        if path == "manifest.json" {
            let images: Vec<Manifest> = serde_json::from_reader(entry.take(LIST))?;
            let [image] = <[_; 1]>::try_from(images).map_err(|_| not_one())?;
            list = Some(image);
        } else if let Some(hex) = hex(&path) {
            let size = entry.size();
            if !there.contains(hex) {
                add(&mut copy, &format!("{BLOBS}{hex}"), size, &mut entry)?;
            }
            sizes.insert(hex.to_owned(), size);
        }
    }
    let image = list.ok_or_else(not_one)?;
    let part = |path: &String| {
        let found = hex(path).and_then(|hex| sizes.get_key_value(hex));
        let unnamed = || io::Error::other(format!("an archive whose {path} is not named after its content"));
        found.map(|(hex, size)| (hex.as_str(), *size)).ok_or_else(unnamed)
    };
    let layers = image.layers.iter().map(part).collect::<io::Result<Vec<_>>>()?;
    add_lists(&mut copy, part(&image.config)?, &layers)?;
    copy.into_inner()?.flush()
}

/// Adds what makes an OCI layout of an archive with this configuration and these layers, each with its size; the digits of the
/// digest of its manifest.
pub(super) fn add_lists(
    to: &mut tar::Builder<impl Write>,
    config: (&str, u64),
    layers: &[(&str, u64)],
) -> io::Result<String> {
    let (manifest, named) = of_docker(config, layers)?;
    let hex = named.hex().to_owned();
    add(to, &format!("{BLOBS}{hex}"), manifest.len() as u64, manifest.as_slice())?;
    let index = serde_json::to_vec(&Index::of(named))?;
    for (path, content) in [LAYOUT, (INDEX, &index)] {
        add(to, path, content.len() as u64, content)?;
    }
    Ok(hex)
}

/// The digest in the name of a configuration or a layer.
fn hex(path: &str) -> Option<&str> {
    path.strip_suffix(".json").or_else(|| path.strip_suffix(".tar")).filter(|hex| is_digest(hex))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::super::tests::{archive, names};
    use super::super::{KnownBy, nameless};
    use super::*;
    use crate::image::Digest;

    #[test]
    fn an_archive_of_docker_becomes_one_of_the_oci_that_is_taken_as_its_image() {
        let [lower, upper] = ["lower", "upper"].map(|layer| Digest::of(layer.as_bytes()));
        let config = json!({ "rootfs": { "diff_ids": [lower.to_string(), upper.to_string()] } }).to_string();
        let id = Digest::of(config.as_bytes());
        let file = |digest: &Digest, end: &str| format!("{}.{end}", digest.hex());
        let list = |layers: &[String]| {
            json!([{ "Config": file(&id, "json"), "RepoTags": ["x:1"], "Layers": layers }]).to_string()
        };
        let layers = [file(&lower, "tar"), file(&upper, "tar")];
        let (whole, link) = (list(&layers), format!("-> ../{}", layers[0]));
        let docker = archive(&[
            (&layers[0], "lower"),
            ("x/layer.tar", &link),
            (&layers[1], "upper"),
            (&file(&id, "json"), &config),
            ("repositories", "{}"),
            ("manifest.json", &whole),
        ]);
        let mut oci = Vec::new();
        oci_layout(docker.as_slice(), &[lower.to_string()], &mut oci).unwrap();
        let blob = |digest: &Digest| format!("{BLOBS}{}", digest.hex());
        let found = names(&oci);
        assert_eq!((found.len(), &found[0], &found[1]), (5, &blob(&upper), &blob(&id)), "{found:?}");
        let mut taken = Vec::new();
        nameless(oci.as_slice(), &mut taken, &id.to_string(), KnownBy::Configuration).unwrap();
        assert_eq!(names(&taken).len(), found.len());

        // A layer that is named otherwise, or is not there.
        for layer in ["x/layer.tar".to_owned(), file(&Digest::of(b"y"), "tar")] {
            let docker = archive(&[(&file(&id, "json"), &config), ("manifest.json", &list(&[layer]))]);
            let told = oci_layout(docker.as_slice(), &[], io::sink()).unwrap_err().to_string();
            assert!(told.contains("is not named after its content"), "{told}");
        }
        assert!(oci_layout(archive(&[]).as_slice(), &[], io::sink()).is_err());
    }
}
