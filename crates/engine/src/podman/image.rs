//! An image goes from one Podman to another: `podman save` here, `podman load` there, without the layers that are there.
//!
//! An OCI archive names each layer by its digest, and Podman reads none of them that its storage has. So these are left out
//! on the way. It checks the others against their digests as it loads them, and the image has the same ID afterwards or is
//! not the one that was asked for. An image of Docker's format is saved as an archive of Docker's, and written anew as one
//! of the OCI on the way.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Output, Stdio};

use bytes::Bytes;
use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

use super::Podman;
use super::command::{Call, failed, said};
use super::copies::Copy;
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::SHORT;
use crate::foreign::archive::{
    BLOBS, KnownBy, PREPARED, Pieces, SILENT, Timely, oci_layout, without, without_names,
};
use crate::foreign::making::PULL;
use crate::image::digest_at_registry;
use crate::processes::process::KilledOnDrop;

/// Where there is room for the copy of an image, as Podman has it by itself.
const COPIES: &str = "/var/tmp";

/// Most layers that a node is believed to have.
const MOST_LAYERS: usize = 4096;

/// An image as `podman image inspect` tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Inspected {
    #[serde(default)]
    manifest_type: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    repo_digests: Option<Vec<String>>,
    #[serde(rename = "RootFS")]
    rootfs: RootFs,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RootFs {
    #[serde(default)]
    layers: Vec<String>,
}

impl Podman {
    /// What Podman knows of images.
    async fn images(&self, name: &ServiceName, ids: &[&str]) -> Result<Vec<Inspected>, EngineError> {
        let words = ["image", "inspect", "--"].iter().chain(ids).map(OsStr::new).collect();
        let call = Call { name, action: "inspect the image of", words, settings: None };
        let output = self.call(&call, SHORT).await?;
        let unclear =
            |error: serde_json::Error| failed(&call, format!("its answer is not understood: {error}"));
        serde_json::from_slice(&output.stdout).map_err(unclear)
    }

    async fn own_image(&self, config: &ContainerConfig) -> Result<(String, Inspected), EngineError> {
        let (_, definition) = self.kept(config)?;
        let id = definition.image().1.to_owned();
        let found = self.images(&config.name, &[&id]).await?.pop();
        found.map(|image| (id, image)).ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    /// The digest by which the registry of its name has the image with this ID. Without it, the image comes from its node.
    pub(super) async fn digest_of_image(
        &self,
        service: &ServiceName,
        (name, id): (&str, &str),
    ) -> Option<String> {
        let images = self.images(service, &[id]).await;
        let images = images.inspect_err(
            |error| tracing::warn!(container = %service, image = id, %error, "no registry is known of an image"),
        );
        digest_at_registry(name, &images.ok()?.pop()?.repo_digests?)
    }

    /// Bytes of its layers.
    pub(super) async fn bytes_of_image(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        Ok(self.own_image(config).await?.1.size)
    }

    /// The layers that are here, of whatever image, where this one is not.
    pub(super) async fn layers_here(
        &self,
        config: &ContainerConfig,
    ) -> Result<Option<Vec<String>>, EngineError> {
        let (_, definition) = self.kept(config)?;
        if self.has_image(&config.name, definition.image().1).await? {
            return Ok(None);
        }
        let words = ["images", "--all", "--quiet", "--no-trunc"].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "list images for", words, settings: None };
        let listed = self.call(&call, SHORT).await?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        let ids: Vec<_> = listed.lines().map(str::trim).filter(|id| !id.is_empty()).collect();
        if ids.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let images = self.images(&config.name, &ids).await?;
        let mut layers: Vec<_> = images.into_iter().flat_map(|image| image.rootfs.layers).collect();
        layers.sort_unstable();
        layers.dedup();
        layers.truncate(MOST_LAYERS);
        Ok(Some(layers))
    }

    /// Sends the image in pieces, without these layers.
    pub(super) async fn save_image(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        let (id, image) = self.own_image(config).await?;
        let is_oci = image.manifest_type.contains("oci");
        let format: &[&str] = if is_oci { &["oci-archive", "--uncompressed"] } else { &["docker-archive"] };
        let mut words = vec!["save", "--quiet", "--format"];
        words.extend(format);
        words.extend(["--", &id]);
        let words = words.into_iter().map(OsStr::new).collect();
        let call = Call { name: &config.name, action: "save the image of", words, settings: None };
        // Podman copies the whole image there first, and leaves that when it is killed.
        let copy = tokio::task::spawn_blocking(|| Copy::new(Path::new(COPIES))).await;
        let copy = copy.map_err(io::Error::other).and_then(|copy| copy);
        let copy = copy.map_err(|error| failed(&call, format!("making a directory in {COPIES}: {error}")))?;
        let mut command = self.command(&call).into_std();
        command.env("TMPDIR", copy.path());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| self.not_started(&call, &error))?;
        // Until it writes the first of the archive, the thread that reads it does not learn that the move has ended.
        let _unless_wanted =
            KilledOnDrop::new(&mut child).map_err(|error| failed(&call, error.to_string()))?;
        let saving = tokio::task::spawn_blocking(move || {
            let mut pieces = Pieces::new(to);
            let sent = match child.stdout.take().map(|archive| Timely::new(archive, (PREPARED, SILENT))) {
                Some(mut archive) => {
                    let sent = match is_oci {
                        true => filter(&mut archive, &without, &mut pieces),
                        false => oci_layout(&mut archive, &without, &mut pieces),
                    };
                    // What pads it is read, too: a Podman whose output is closed before its end has failed.
                    sent.and_then(|()| io::copy(&mut archive, &mut io::sink()).map(drop))
                }
                None => Ok(()),
            };
            let sent = sent.and_then(|()| pieces.flush());
            if sent.is_err() {
                // It writes to nobody.
                child.kill()?;
            }
            let output = child.wait_with_output()?;
            copy.close()?;
            Ok::<_, io::Error>((sent, output))
        });
        let ended = saving.await.map_err(io::Error::other).and_then(|ended| ended);
        let (sent, output) = ended.map_err(|error| failed(&call, error.to_string()))?;
        sent.map_err(|error| failed(&call, error.to_string()))?;
        match output.status.success() {
            true => Ok(()),
            false => Err(failed(&call, said(&output.stderr))),
        }
    }

    /// By which name a container of the image is made here: its own, if that is this image's here, or else its ID. An image
    /// that comes from another node is given no name, under which others would take it for what they know by that, and Podman
    /// would fetch one that it does not have from a registry.
    pub(super) async fn image_name(&self, config: &ContainerConfig) -> Result<String, EngineError> {
        let (_, definition) = self.kept(config)?;
        let (name, id) = definition.image();
        let words = ["image", "inspect", "--format", "{{.Id}}", "--", name].map(OsStr::new).to_vec();
        let call =
            Call { name: &config.name, action: "find the name of the image of", words, settings: None };
        let is_its = match self.call(&call, SHORT).await {
            Ok(output) => String::from_utf8_lossy(&output.stdout).trim() == id,
            Err(_) => false,
        };
        Ok(if is_its { name } else { id }.to_owned())
    }

    /// Makes a call that reads these pieces, all within the time of a pull; whether it was given all of them, and what came of it.
    pub(super) async fn feed(
        &self,
        call: &Call<'_>,
        pieces: &mut mpsc::Receiver<Bytes>,
    ) -> Result<(io::Result<()>, io::Result<Output>), EngineError> {
        let mut command = self.command(call);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn().map_err(|error| self.not_started(call, &error))?;
        let stdin = child.stdin.take();
        let feeding = async {
            if let Some(mut stdin) = stdin {
                while let Some(piece) = pieces.recv().await {
                    stdin.write_all(&piece).await?;
                }
            }
            Ok(())
        };
        // One that is late ends with the child, which is dropped.
        let fed = tokio::time::timeout(PULL, async { tokio::join!(feeding, child.wait_with_output()) }).await;
        fed.map_err(|_| failed(call, format!("it has not taken all for {} s", PULL.as_secs())))
    }

    /// Takes the image in pieces.
    pub(super) async fn load_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let (_, id) = definition.image();
        let (mut pieces, passing) = without_names(from, id.to_owned(), KnownBy::Configuration);
        let words = ["load", "--quiet"].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "load the image of", words, settings: None };
        let (fed, output) = self.feed(&call, &mut pieces).await?;
        drop(pieces);
        passing.outcome().await.map_err(|error| failed(&call, error.to_string()))?;
        let output = output.map_err(|error| failed(&call, error.to_string()))?;
        if !output.status.success() {
            return Err(self.has_failed(&call, &output));
        }
        fed.map_err(|error| failed(&call, error.to_string()))?;
        if !self.has_image(&config.name, id).await? {
            return Err(failed(&call, format!("what has come is not the image {id}")));
        }
        Ok(())
    }
}

/// Copies an archive without the blobs of these digests.
fn filter(archive: impl Read, digests: &[String], to: impl Write) -> io::Result<()> {
    let digests: HashSet<_> = digests.iter().filter_map(|digest| digest.strip_prefix("sha256:")).collect();
    let is_left_out = |path: &Path| {
        let digest = path.to_str().and_then(|path| path.strip_prefix(BLOBS));
        digest.is_some_and(|digest| digests.contains(digest))
    };
    without(archive, is_left_out, to)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn archive(names: &[&str]) -> Vec<u8> {
        let mut archive = tar::Builder::new(Vec::new());
        for name in names {
            let mut header = tar::Header::new_gnu();
            header.set_size(name.len() as u64);
            archive.append_data(&mut header, name, name.as_bytes()).unwrap();
        }
        archive.into_inner().unwrap()
    }

    #[test]
    fn layers_that_are_there_are_left_out_and_nothing_else() {
        let whole = archive(&["oci-layout", "blobs/sha256/aa", "blobs/sha256/bb", "index.json", "aa"]);
        let mut rest = Vec::new();
        filter(whole.as_slice(), &["sha256:aa".into(), "sha256:cc".into(), "bb".into()], &mut rest).unwrap();
        let mut rest = tar::Archive::new(rest.as_slice());
        let names: Vec<_> =
            rest.entries().unwrap().map(|entry| entry.unwrap().path().unwrap().into_owned()).collect();
        assert_eq!(
            names,
            ["oci-layout", "blobs/sha256/bb", "index.json", "aa"].map(std::path::PathBuf::from)
        );
    }
}
