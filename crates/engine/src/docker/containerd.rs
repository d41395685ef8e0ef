//! containerd as Docker's image store: it has the images, and the root filesystems of containers. A Docker that is installed
//! anew has it from release 29 on, and one since 24 by its settings (`containerd-snapshotter`).
//!
//! What Docker's API does not tell, containerd does: where the root filesystems are, and which files of images are here. Nothing
//! is changed in containerd.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use containerd_client::Client;
use containerd_client::services::v1::snapshots::StatSnapshotRequest;
use containerd_client::services::v1::{InfoRequest, PluginsRequest, ReadContentRequest};
use serde::Deserialize;
use tonic::{Code, Request, Status};

use super::api::ApiError;
use crate::foreign::SHORT;
use crate::image::machine_architecture;

/// What `docker info` calls a storage driver of containerd's.
const SNAPSHOTTERS: &str = "io.containerd.snapshotter.v1";

/// The only one that godwit moves root filesystems of.
pub(super) const SNAPSHOTTER: &str = "overlayfs";

/// Where containerd is, if `docker info` does not say so: a Docker before release 27 does not.
const SOCKETS: &[&str] = &["/run/containerd/containerd.sock", "/run/docker/containerd/containerd.sock"];

/// Whose things are Docker's, if it does not say so.
const NAMESPACE: &str = "moby";

/// Most files of an image, those of all its platforms, and largest document of them, bytes.
pub(super) const MOST_FILES: usize = 1024;
const DOCUMENT: usize = 4 << 20;

/// The containerd that Docker uses, as Docker tells of it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Containerd {
    address: PathBuf,
    namespaces: Namespaces,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Namespaces {
    containers: String,
}

/// Whether a storage driver is one of containerd's, by what `docker info` says of it.
pub(super) fn is_snapshotter(status: &[(String, String)]) -> bool {
    status.iter().any(|(name, value)| name == "driver-type" && value == SNAPSHOTTERS)
}

/// Where Docker mounts the root filesystem of a container.
pub(super) fn root_of(storage: &Path, id: &str) -> PathBuf {
    storage.join("rootfs").join(SNAPSHOTTER).join(id)
}

impl Containerd {
    fn socket(&self) -> PathBuf {
        if !self.address.as_os_str().is_empty() {
            return self.address.clone();
        }
        let mut known = SOCKETS.iter().map(PathBuf::from);
        known.find(|socket| socket.exists()).unwrap_or_else(|| SOCKETS[0].into())
    }

    /// Asks it something.
    async fn ask<T>(&self, asking: impl AsyncFnOnce(Client) -> Result<T, Status>) -> Result<T, ApiError> {
        let failed = |reason: String| ApiError::Containerd { socket: self.socket(), reason };
        let asked = async {
            let client = Client::from_path(self.socket()).await.map_err(|error| {
                let cause = std::error::Error::source(&error);
                let cause = cause.map_or_else(|| error.to_string(), ToString::to_string);
                failed(format!("{cause}; start containerd on this node"))
            })?;
            asking(client).await.map_err(|status| failed(status.message().to_owned()))
        };
        let silent = || failed(ApiError::Silent(SHORT).to_string());
        tokio::time::timeout(SHORT, asked).await.unwrap_or_else(|_| Err(silent()))
    }

    /// A request about what is Docker's.
    fn about<T>(&self, message: T) -> Result<Request<T>, Status> {
        let namespace = match self.namespaces.containers.as_str() {
            "" => NAMESPACE,
            told => told,
        };
        let namespace =
            namespace.parse().map_err(|_| Status::invalid_argument("its namespace is no name"))?;
        let mut request = Request::new(message);
        request.metadata_mut().insert("containerd-namespace", namespace);
        Ok(request)
    }

    /// The directory in which it has root filesystems.
    pub(super) async fn root(&self) -> Result<PathBuf, ApiError> {
        let filters = vec![format!("type=={SNAPSHOTTERS},id=={SNAPSHOTTER}")];
        let told =
            self.ask(async |client| client.introspection().plugins(PluginsRequest { filters }).await).await?;
        let root = told.into_inner().plugins.into_iter().find_map(|mut plugin| plugin.exports.remove("root"));
        root.map(PathBuf::from).ok_or_else(|| ApiError::Containerd {
            socket: self.socket(),
            reason: format!("it does not tell where {SNAPSHOTTER} has its directories"),
        })
    }

    /// Whether there is a root filesystem of layers with this chain ID.
    pub(super) async fn has_layers(&self, chain: &str) -> Result<bool, ApiError> {
        let wanted = StatSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key: chain.to_owned() };
        let found =
            self.ask(async |client| found(client.snapshots().stat(self.about(wanted)?).await)).await?;
        Ok(found.is_some())
    }

    /// Of these files those that are here, by their digests, with their sizes in bytes.
    pub(super) async fn of(&self, files: &[String]) -> Result<HashMap<String, u64>, ApiError> {
        let looked = self.ask(async |client| {
            let mut here = HashMap::new();
            for digest in files {
                if let Some(bytes) = self.size(&client, digest).await? {
                    here.insert(digest.clone(), bytes);
                }
            }
            Ok(here)
        });
        looked.await
    }

    /// Bytes of a file; nothing where it is not here.
    async fn size(&self, client: &Client, digest: &str) -> Result<Option<u64>, Status> {
        let wanted = InfoRequest { digest: digest.to_owned() };
        let told = found(client.content().info(self.about(wanted)?).await)?;
        let size = told.and_then(|told| told.into_inner().info).map(|info| info.size);
        Ok(size.map(|size| u64::try_from(size).unwrap_or(0)))
    }

    /// A document of an image; nothing where it is not here.
    async fn document(&self, client: &Client, digest: &str) -> Result<Option<Document>, Status> {
        let wanted = ReadContentRequest { digest: digest.to_owned(), offset: 0, size: 0 };
        let Some(answer) = found(client.content().read(self.about(wanted)?).await)? else { return Ok(None) };
        let (mut parts, mut text) = (answer.into_inner(), Vec::new());
        loop {
            match found(parts.message().await)? {
                Some(Some(part)) => text.extend(part.data),
                Some(None) => break,
                None => return Ok(None),
            }
            if text.len() > DOCUMENT {
                return Err(Status::resource_exhausted(format!("{digest} is no document of an image")));
            }
        }
        let unclear = |error| Status::data_loss(format!("{digest} is not understood: {error}"));
        serde_json::from_slice(&text).map(Some).map_err(unclear)
    }

    /// The files of an image with this ID: a manifest, or a list of manifests for several platforms.
    pub(super) async fn image(&self, id: &str) -> Result<ImageFiles, ApiError> {
        let looked = self.ask(async |client| {
            let (mut files, mut seen) = (ImageFiles::default(), HashSet::new());
            let mut documents = vec![(id.to_owned(), For::This)];
            // What has more is no image that somebody would miss a file of.
            while let Some((digest, platform)) = documents.pop()
                && seen.len() < MOST_FILES
            {
                if !seen.insert(digest.clone()) {
                    continue;
                }
                let Some(bytes) = self.size(&client, &digest).await? else {
                    files.note(platform, Some(digest));
                    continue;
                };
                files.add(&digest, bytes);
                let document = self.document(&client, &digest).await?.unwrap_or_default();
                if let Some(list) = document.manifests {
                    documents.extend(list.into_iter().map(|of| (of.digest, For::of(of.platform.as_ref()))));
                    continue;
                }
                let mut lacks = document.config.is_none().then_some(digest);
                if let (For::This, Some(config)) = (platform, &document.config) {
                    // The first of the list is looked at last.
                    files.configuration = Some(config.digest.clone());
                }
                for blob in document.config.into_iter().chain(document.layers.unwrap_or_default()) {
                    if seen.len() >= MOST_FILES {
                        break;
                    }
                    match self.size(&client, &blob.digest).await? {
                        Some(bytes) if seen.insert(blob.digest.clone()) => files.add(&blob.digest, bytes),
                        Some(_) => {}
                        None => lacks = lacks.or(Some(blob.digest)),
                    }
                }
                files.note(platform, lacks);
            }
            Ok(files)
        });
        looked.await
    }
}

/// For which machine a manifest is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum For {
    This,
    Another,
    /// It says something of another one, as who has made it.
    None,
}

impl For {
    fn of(platform: Option<&Platform>) -> Self {
        match platform {
            None => Self::This,
            Some(Platform { os, .. }) if os == "unknown" => Self::None,
            Some(Platform { os, architecture }) => {
                match os == "linux" && architecture == machine_architecture() {
                    true => Self::This,
                    false => Self::Another,
                }
            }
        }
    }
}

/// What there is to know of the files of an image.
#[derive(Debug, Clone, Default)]
pub(super) struct ImageFiles {
    /// The digests of those that are here, whatever the platform.
    pub(super) here: Vec<String>,
    /// Bytes of those.
    pub(super) bytes: u64,
    /// Whether all are here that a machine needs, and that this one does.
    pub(super) is_whole: bool,
    pub(super) is_whole_for_this: bool,
    /// One that is not.
    pub(super) lacks: Option<String>,
    /// The digest of its configuration for this machine.
    pub(super) configuration: Option<String>,
}

impl ImageFiles {
    fn add(&mut self, digest: &str, bytes: u64) {
        self.bytes = self.bytes.saturating_add(bytes);
        self.here.push(digest.to_owned());
    }

    /// Notes of a manifest what is not here.
    fn note(&mut self, platform: For, lacks: Option<String>) {
        match lacks {
            None => {
                self.is_whole |= platform != For::None;
                self.is_whole_for_this |= platform == For::This;
            }
            Some(lacks) if platform == For::This => self.lacks = Some(lacks),
            Some(_) => {}
        }
    }
}

/// A list of manifests, or a manifest.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Document {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

#[derive(Debug, Deserialize)]
struct Descriptor {
    digest: String,
    #[serde(default)]
    platform: Option<Platform>,
}

#[derive(Debug, Deserialize)]
struct Platform {
    architecture: String,
    os: String,
}

/// Nothing where there is none of that name.
fn found<T>(told: Result<T, Status>) -> Result<Option<T>, Status> {
    match told {
        Err(status) if status.code() == Code::NotFound => Ok(None),
        told => told.map(Some),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_store_of_containerds_is_told_by_the_type_of_its_driver() {
        let status = |text: &str| serde_json::from_str::<Vec<(String, String)>>(text).unwrap();
        assert!(is_snapshotter(&status(r#"[["driver-type", "io.containerd.snapshotter.v1"]]"#)));
        // Docker's own.
        assert!(!is_snapshotter(&status(r#"[["Backing Filesystem", "extfs"], ["driver-type", "x"]]"#)));
    }

    #[test]
    fn an_image_is_whole_by_a_manifest_that_lacks_nothing() {
        let noted = |notes: &[(For, Option<&str>)]| {
            let mut files = ImageFiles::default();
            for (platform, lacks) in notes {
                files.note(*platform, lacks.map(str::to_owned));
            }
            (files.is_whole, files.is_whole_for_this, files.lacks.is_some())
        };
        assert_eq!(noted(&[(For::This, None), (For::Another, Some("x"))]), (true, true, false));
        // One of two for this machine; one for another machine; what somebody says of it.
        assert_eq!(noted(&[(For::This, Some("x")), (For::This, None)]), (true, true, true));
        assert_eq!(noted(&[(For::This, Some("x")), (For::Another, None)]), (true, false, true));
        assert_eq!(noted(&[(For::This, Some("x")), (For::None, None)]), (false, false, true));
        let platform = |architecture: &str, os: &str| {
            For::of(Some(&Platform { architecture: architecture.into(), os: os.into() }))
        };
        assert_eq!(platform(machine_architecture(), "linux"), For::This);
        assert_eq!(platform("riscv64", "linux"), For::Another);
        assert_eq!(platform("unknown", "unknown"), For::None);
    }

    #[tokio::test]
    async fn a_containerd_that_is_not_there_is_named_by_its_socket() {
        let none: Containerd =
            serde_json::from_str(r#"{"Address": "/nowhere/sock", "Namespaces": {}}"#).unwrap();
        let told = none.root().await.unwrap_err().to_string();
        assert!(told.contains("/nowhere/sock") && told.contains("No such file"), "{told}");
        assert_eq!(none.image("x").await.unwrap_err().to_string(), told);
    }
}
