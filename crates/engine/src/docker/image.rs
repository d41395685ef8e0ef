//! An image goes from one Docker to another, without the layers that are there.
//!
//! In its own store Docker keeps a layer for those beneath it: its *chain ID* is the digest of its own content and theirs. So the
//! other node tells the chain IDs of its layers, and of the image the lowest layers are left out, as many as are there: dockerd
//! asks for the file of a layer only where it does not have the chain. In an archive the layers have no names of their own: which
//! file is which stands in a list at its end. So where layers are to be left out, dockerd writes the archive twice.
//!
//! containerd keeps the files of an image by their digests, as they came from a registry, and the archive has them by these. The
//! other node tells which of the files it has. It may have a part of an image: such a one counts as not there.
//!
//! Between two kinds of stores an image has two IDs, and one configuration, by whose digest it is found. The node that takes
//! the archive makes of it what its Docker reads ([`by_configuration`](crate::foreign::archive::by_configuration)).

use std::collections::{BTreeSet, HashSet};
use std::io::{self, Write as _};
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::adoption;
use super::api::ApiError;
use super::containerd::MOST_FILES;
use super::definition::{Definition, ImageStore, is_digest};
use super::{Docker, Info, encoded};
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::SHORT;
use crate::foreign::archive::{
    BLOBS, Incoming, KnownBy, LayerFiles, PIECES, PREPARED, Passing, Pieces, SILENT, Store, between_stores,
    without, without_names,
};
use crate::foreign::making::PULL;
use crate::image::Digest;

/// An image as dockerd tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    id: String,
    size: u64,
    #[serde(default)]
    repo_tags: Option<Vec<String>>,
    #[serde(default)]
    pub(super) repo_digests: Option<Vec<String>>,
    #[serde(default, rename = "RootFS")]
    rootfs: RootFs,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct RootFs {
    /// Digests of their contents, from the lowest layer to the uppermost.
    #[serde(default)]
    layers: Vec<String>,
}

/// One of a list of images.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Listed {
    id: String,
}

/// How long containerd may be asked for an image among all that there are: each is asked about by itself.
const LOOKING: Duration = Duration::from_secs(60);

/// Most layers that a node tells of.
const MOST_LAYERS: usize = 4096;

/// The chain IDs of layers, as the specification of OCI images defines them.
fn chains(layers: &[String]) -> Vec<String> {
    let mut chains: Vec<String> = Vec::with_capacity(layers.len());
    for layer in layers {
        chains.push(match chains.last() {
            None => layer.clone(),
            Some(beneath) => Digest::of(format!("{beneath} {layer}").as_bytes()).to_string(),
        });
    }
    chains
}

impl Docker {
    /// An image by a name of its or its ID; nothing where Docker does not have it.
    pub(super) async fn image(
        &self,
        name: &ServiceName,
        image: &str,
    ) -> Result<Option<Inspected>, EngineError> {
        let path = format!("/images/{}/json", encoded(image));
        self.api.find(&path).await.map_err(self.failed(name, "inspect the image of"))
    }

    /// Bytes of its archive at most. Docker counts what is in files, and each has a header there.
    pub(super) async fn bytes_of_image(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        let (_, definition) = self.kept(config)?;
        let id = &definition.image.1;
        let image = self.image(&config.name, id).await?.ok_or_else(|| self.no_image(config, id))?;
        let info = self.info(&config.name).await?;
        let size = match info.image_store() {
            ImageStore::Docker => image.size,
            ImageStore::Containerd => {
                let files = info.containerd().image(id).await;
                files.map_err(self.failed(&config.name, "look at the image of"))?.bytes
            }
        };
        Ok(size.saturating_add(size / 4))
    }

    /// Docker has lost the image of a container.
    fn no_image(&self, config: &ContainerConfig, id: &str) -> EngineError {
        self.care.failed(
            &config.name,
            "find the image of",
            format!("it does not have the image {id} any more"),
        )
    }

    /// Refuses an image of which containerd lacks a file: Docker does not fetch a layer from a registry whose content it has by
    /// another image, and writes less than an image then.
    async fn is_whole(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let failed = self.failed(&config.name, "write the image of");
        let files = self.info(&config.name).await?.containerd().image(id).await.map_err(&failed)?;
        let Some(lacks) = files.lacks.filter(|_| !files.is_whole) else { return Ok(()) };
        Err(failed(ApiError::Broken(format!(
            "it does not have the file {lacks} of the image {id}; have the image at the destination before, by `docker pull`"
        ))))
    }

    /// Whether a container can be made of an image here.
    async fn has_image(&self, config: &ContainerConfig, info: &Info, id: &str) -> Result<bool, EngineError> {
        let Some(image) = self.image(&config.name, id).await? else { return Ok(false) };
        if info.image_store() == ImageStore::Docker {
            return Ok(true);
        }
        // Docker tells of one, too, of which it has no more than a name for it.
        let failed = self.failed(&config.name, "look at the image of");
        let containerd = info.containerd();
        if let Some(chain) = chains(&image.rootfs.layers).pop()
            && containerd.has_layers(&chain).await.map_err(&failed)?
        {
            return Ok(true);
        }
        Ok(containerd.image(id).await.map_err(&failed)?.is_whole_for_this)
    }

    /// The ID by which a container can be made here of an image that another node knows by the definition; nothing where it is
    /// not here.
    async fn image_here(
        &self,
        config: &ContainerConfig,
        info: &Info,
        definition: &Definition,
    ) -> Result<Option<String>, EngineError> {
        let (own, (image, id)) = (info.image_store(), &definition.image);
        if own == definition.store && self.has_image(config, info, id).await? {
            return Ok(Some(id.clone()));
        }
        let Some(configuration) = &definition.configuration else { return Ok(None) };
        if own == ImageStore::Docker {
            return Ok(self.has_image(config, info, configuration).await?.then(|| configuration.clone()));
        }
        let failed = self.failed(&config.name, "look for the image of");
        let listed: Vec<Listed> = self.api.get("/images/json?all=1").await.map_err(&failed)?;
        // Several may have this configuration. One that has been here before had that name.
        let named = if image.is_empty() { None } else { self.image(&config.name, image).await? };
        let named = named.map(|image| image.id);
        let looking = async {
            for id in named.into_iter().chain(listed.into_iter().map(|listed| listed.id)) {
                let files = match info.containerd().image(&id).await {
                    Ok(files) => files,
                    // One that is not understood is no reason to refuse others.
                    Err(error) => {
                        tracing::debug!(container = %config.name, image = id, %error, "an image is passed over");
                        continue;
                    }
                };
                if files.configuration.as_ref() == Some(configuration)
                    && self.has_image(config, info, &id).await?
                {
                    return Ok(Some(id));
                }
            }
            Ok(None)
        };
        let looked = tokio::time::timeout(LOOKING, looking).await;
        looked.unwrap_or_else(|_| Err(failed(ApiError::Silent(LOOKING))))
    }

    /// A definition with what other nodes find the image of a container by.
    pub(super) async fn with_image(
        &self,
        name: &ServiceName,
        mut definition: Definition,
        inspected: &adoption::Inspected,
    ) -> Result<Definition, EngineError> {
        let id = &definition.image.1;
        let files = match definition.store {
            ImageStore::Docker => {
                definition.configuration = Some(id.clone());
                self.image(name, id).await?.map(|image| image.rootfs.layers).unwrap_or_default()
            }
            ImageStore::Containerd => {
                let failed = self.failed(name, "look at the image of");
                let containerd = self.info(name).await?.containerd();
                let (whole, own) = (containerd.image(id).await, containerd.image(inspected.manifest()).await);
                definition.configuration = own.map_err(&failed)?.configuration.filter(|of| is_digest(of));
                whole.map_err(&failed)?.here
            }
        };
        definition.files_of_image =
            files.into_iter().filter(|file| is_digest(file)).take(MOST_FILES).collect();
        Ok(definition)
    }

    /// The chain IDs of the layers that are here, of whatever image, where this one is not; the digests of its own files that
    /// are here where containerd has them.
    pub(super) async fn layers_here(
        &self,
        config: &ContainerConfig,
    ) -> Result<Option<Vec<String>>, EngineError> {
        let (_, definition) = self.kept(config)?;
        let info = self.info(&config.name).await?;
        if self.image_here(config, &info, &definition).await?.is_some() {
            return Ok(None);
        }
        let failed = self.failed(&config.name, "list images for");
        if info.image_store() == ImageStore::Containerd {
            // Those alone that the other node has named: it is not to learn of others.
            let files = definition.files_of_image;
            let here = info.containerd().of(&files).await.map_err(failed)?;
            return Ok(Some(match definition.store {
                ImageStore::Containerd => here.into_keys().collect(),
                // Where it has them unpacked, under their own digests.
                ImageStore::Docker => {
                    let known = files.iter().take_while(|layer| here.contains_key(*layer)).count();
                    chains(&files[..known])
                }
            }));
        }
        if definition.store == ImageStore::Containerd {
            // It has files, which no layer here tells.
            return Ok(Some(Vec::new()));
        }
        let listed: Vec<Listed> = self.api.get("/images/json").await.map_err(failed)?;
        let mut here = BTreeSet::new();
        for Listed { id } in listed {
            // One that is removed meanwhile has none.
            let layers = self.image(&config.name, &id).await?.map(|image| image.rootfs.layers);
            here.extend(chains(&layers.unwrap_or_default()));
            if here.len() >= MOST_LAYERS {
                break;
            }
        }
        Ok(Some(here.into_iter().take(MOST_LAYERS).collect()))
    }

    /// By which name a container of the image is made here: its own, if that is this image's here, or else its ID. An image
    /// that comes from another node is given no name, under which others would take it for what they know by that.
    pub(super) async fn image_name(&self, config: &ContainerConfig) -> Result<String, EngineError> {
        let (_, definition) = self.kept(config)?;
        let info = self.info(&config.name).await?;
        let id = self.image_here(config, &info, &definition).await?;
        let id = id.ok_or_else(|| self.no_image(config, &definition.image.1))?;
        let name = definition.image.0;
        let is_its =
            !name.is_empty() && self.image(&config.name, &name).await?.is_some_and(|found| found.id == id);
        Ok(if is_its { name } else { id })
    }

    /// Sends the image in pieces, without [what is there](Self::layers_here).
    pub(super) async fn save_image(
        &self,
        config: &ContainerConfig,
        there: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let (id, failed) = (&definition.image.1, self.failed(&config.name, "save the image of"));
        let image = self.image(&config.name, id).await?;
        let layers = image.ok_or_else(|| self.no_image(config, id))?.rootfs.layers;
        let there: HashSet<_> = there.into_iter().collect();
        if definition.store == ImageStore::Containerd {
            self.is_whole(config, id).await?;
            let own = id.clone();
            let is_left_out = move |path: &Path| {
                let hex = path.strip_prefix(BLOBS).ok().and_then(Path::to_str);
                let digest = hex.map(|hex| format!("sha256:{hex}"));
                digest.is_some_and(|digest| digest != own && there.contains(&digest))
            };
            return self.send_without(id, is_left_out, to).await.map_err(&failed);
        }
        let known = chains(&layers).iter().take_while(|chain| there.contains(*chain)).count();
        if known == 0 {
            return match self.archive(id, to).await.map_err(&failed)? {
                true => Ok(()),
                false => Err(failed(ApiError::Broken("nobody takes it any more".into()))),
            };
        }
        let files = self.read_archive(id, |archive| LayerFiles::of(archive)).await.map_err(&failed)?;
        let left_out = files.lowest(known);
        let is_left_out = move |path: &Path| path.to_str().is_some_and(|path| left_out.contains(path));
        self.send_without(id, is_left_out, to).await.map_err(&failed)
    }

    /// Sends the archive of an image in pieces, without some of its files.
    async fn send_without(
        &self,
        id: &str,
        is_left_out: impl Fn(&Path) -> bool + Send + 'static,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), ApiError> {
        let copy = move |archive: &mut Incoming| {
            let mut pieces = Pieces::new(to);
            without(archive, is_left_out, &mut pieces)?;
            pieces.flush()
        };
        self.read_archive(id, copy).await
    }

    /// Sends the archive of an image in pieces; whether all were taken.
    async fn archive(&self, id: &str, to: mpsc::Sender<Bytes>) -> Result<bool, ApiError> {
        let mut archive = self.api.stream(&format!("/images/{}/get", encoded(id)), PREPARED).await?;
        while let Some(piece) = archive.next_within(SILENT).await? {
            if to.send(piece).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Does something with the archive of an image, on a thread that may block.
    async fn read_archive<T: Send + 'static>(
        &self,
        id: &str,
        read: impl FnOnce(&mut Incoming) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ApiError> {
        let (to, from) = mpsc::channel(PIECES);
        let reading = tokio::task::spawn_blocking(move || {
            let mut archive = Incoming::new(from);
            let done = read(&mut archive)?;
            // The archive's end may be filled up.
            io::copy(&mut archive, &mut io::sink())?;
            Ok(done)
        });
        let sent = self.archive(id, to).await;
        let done = reading.await.map_err(io::Error::other).and_then(|done: io::Result<T>| done);
        // An archive that dockerd has cut off is no good one.
        sent?;
        done.map_err(|error| ApiError::Broken(error.to_string()))
    }

    /// Takes the image in pieces.
    pub(super) async fn load_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let failed = self.failed(&config.name, "load the image of");
        let (info, theirs) = (self.info(&config.name).await?, definition.image.1.clone());
        let before: Vec<Listed> = self.api.get("/images/json?all=1").await.map_err(&failed)?;
        let (pieces, passing) = self.passing(config, &info, &definition, from).await?;
        let said = self.api.send("/images/load?quiet=1", pieces, PULL).await;
        let passed = passing.outcome().await;
        let known = match &definition.configuration {
            Some(own)
                if info.image_store() == ImageStore::Docker && definition.store != ImageStore::Docker =>
            {
                own.clone()
            }
            _ => theirs,
        };
        let id = &passed.as_ref().ok().cloned().flatten().unwrap_or(known);
        let is_new = before.iter().all(|image| image.id != *id);
        let loaded = async {
            passed.map_err(|error| failed(ApiError::Broken(error.to_string())))?;
            let said = said.map_err(&failed)?;
            if let Some(error) = told_error(&said) {
                return Err(failed(error));
            }
            if !self.has_image(config, &info, id).await? {
                let said = String::from_utf8_lossy(&said);
                let reason = format!("what has come is not the image {id}; it says {:?}", said.trim());
                return Err(failed(ApiError::Broken(reason)));
            }
            Ok(())
        };
        let loaded = loaded.await;
        // A part of it would be taken for all of it by whoever has Docker make a container.
        if loaded.is_err()
            && is_new
            && let Err(error) = self.remove_part(config, &info, id).await
        {
            tracing::warn!(container = %config.name, image = id, %error, "a part of an image is left here");
        }
        loaded
    }
}

impl Docker {
    /// What comes of the archive of an image for the Docker here.
    async fn passing(
        &self,
        config: &ContainerConfig,
        info: &Info,
        definition: &Definition,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(mpsc::Receiver<Bytes>, Passing), EngineError> {
        let failed = self.failed(&config.name, "load the image of");
        let (own, id) = (info.image_store(), definition.image.1.clone());
        if own == definition.store {
            let known_by = match own {
                ImageStore::Docker => KnownBy::Configuration,
                ImageStore::Containerd => KnownBy::Manifest,
            };
            return Ok(without_names(from, id, known_by));
        }
        let broken = |reason: String| failed(ApiError::Broken(reason));
        let untold = || broken(format!("nothing is told by which {own} knows the image {id}"));
        let configuration = definition.configuration.clone().ok_or_else(untold)?;
        let store = match own {
            ImageStore::Docker => Store::Docker,
            ImageStore::Containerd => {
                let here = info.containerd().of(&definition.files_of_image).await;
                Store::Containerd(here.map_err(&failed)?)
            }
        };
        let room = info.room().map_err(|error| broken(format!("the room for it is not told: {error}")))?;
        Ok(between_stores(from, configuration, (store, room)))
    }

    /// Removes an image of which a part has come, and to which nobody has given a name or the rest meanwhile.
    async fn remove_part(&self, config: &ContainerConfig, info: &Info, id: &str) -> Result<(), EngineError> {
        let Some(image) = self.image(&config.name, id).await? else { return Ok(()) };
        if image.repo_tags.is_some_and(|tags| !tags.is_empty()) || self.has_image(config, info, id).await? {
            return Ok(());
        }
        let removed = self.api.delete(&format!("/images/{}", encoded(id)), SHORT).await;
        removed.map_err(self.failed(&config.name, "remove a part of the image of"))
    }
}

/// What dockerd says of an image of which containerd has the files, and has not made the root filesystem. Its reason may have
/// the digest of a layer's content, which is for those who have the layer.
const NOT_UNPACKED: &str = "Error unpacking image";

/// The error that dockerd tells at the end of its answer, which it has begun as one that is good: a line of JSON.
pub(super) fn told_error(answer: &[u8]) -> Option<ApiError> {
    #[derive(Deserialize)]
    struct Line {
        #[serde(default)]
        error: Option<String>,
        #[serde(default)]
        stream: Option<String>,
    }
    let mut lines = serde_json::Deserializer::from_slice(answer).into_iter::<serde_json::Value>();
    let told = lines.find_map(|line| {
        let Line { error, stream } = Line::deserialize(line.ok()?).ok()?;
        let is_not_unpacked = stream.is_some_and(|said| said.starts_with(NOT_UNPACKED));
        error.or_else(|| {
            is_not_unpacked.then(|| "its layers cannot be unpacked; dockerd's log says why".into())
        })
    })?;
    Some(ApiError::Refused { status: 500, message: told })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_chain_of_a_layer_names_all_that_is_beneath_it() {
        let layers = ["aa", "bb", "cc"].map(|digits| format!("sha256:{}", digits.repeat(32)));
        let found = chains(&layers);
        // Of the lowest it is its own digest. The others: printf '%s' "sha256:… sha256:…" | sha256sum
        assert_eq!(found[0], layers[0]);
        assert_eq!(found[1], "sha256:ccd722928bd92476ba1745586fed6e45a102504185ad88cd89e01ff116fd146c");
        assert_eq!(found[2], "sha256:c1377126441fb2f5ec2c21ae2a60255331d639e830f0ee1b40a36e52d4c40588");
        assert_eq!(chains(&[]), [""; 0]);
    }

    #[test]
    fn an_error_at_the_end_of_an_answer_is_told_in_its_words() {
        let told = |answer: &str| told_error(answer.as_bytes()).map(|error| error.to_string());
        let answer =
            "{\"stream\":\"x\"}\r\n{\"errorDetail\":{\"message\":\"no room\"},\"error\":\"no room\"}\r\n";
        assert_eq!(told(answer).as_deref(), Some("no room"));
        let answer = "{\"stream\":\"Error unpacking image sha256:1: no content\\n\"}\r\n{\"stream\":\"x\"}";
        let said = told(answer).unwrap();
        assert!(said.contains("cannot be unpacked") && !said.contains("no content"), "{said}");
        for good in ["{\"stream\":\"Loaded image\"}", "", "x"] {
            assert_eq!(told(good), None, "{good}");
        }
    }
}
