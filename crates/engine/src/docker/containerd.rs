//! containerd as Docker's image store: it has the images, and the root filesystems of containers. A Docker that is installed
//! anew has it from release 29 on, and one since 24 by its settings (`containerd-snapshotter`).
//!
//! What Docker's API does not tell, containerd does: where the root filesystems are, and which files of images are here. Nothing
//! is changed in containerd.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use containerd_client::Client;
use containerd_client::services::v1::{ListContentRequest, PluginsRequest};
use serde::Deserialize;
use tonic::Request;

use super::api::ApiError;
use crate::foreign::{SHORT, is_id};

/// What `docker info` calls a storage driver of containerd's.
const SNAPSHOTTERS: &str = "io.containerd.snapshotter.v1";

/// The only one that godwit moves root filesystems of.
pub(super) const SNAPSHOTTER: &str = "overlayfs";

/// Where containerd is, if `docker info` does not say so: a Docker before release 27 does not.
const SOCKETS: &[&str] = &["/run/containerd/containerd.sock", "/run/docker/containerd/containerd.sock"];

/// Whose things are Docker's, if it does not say so.
const NAMESPACE: &str = "moby";

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
    async fn ask<T>(
        &self,
        asking: impl AsyncFnOnce(Client) -> Result<T, tonic::Status>,
    ) -> Result<T, ApiError> {
        let socket = self.socket();
        let asked = async {
            let client = Client::from_path(&socket).await.map_err(|error| {
                let error =
                    std::error::Error::source(&error).map_or_else(|| error.to_string(), ToString::to_string);
                ApiError::Containerd { socket: socket.clone(), reason: error }
            })?;
            let told = asking(client).await;
            told.map_err(|error| ApiError::Containerd {
                socket: socket.clone(),
                reason: error.message().to_owned(),
            })
        };
        tokio::time::timeout(SHORT, asked).await.unwrap_or_else(|_| {
            let reason = ApiError::Silent(SHORT).to_string();
            Err(ApiError::Containerd { socket: socket.clone(), reason })
        })
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

    /// The digests of the files of images that are here, the largest of them, so many.
    pub(super) async fn files(&self, most: usize) -> Result<Vec<String>, ApiError> {
        let namespace = match self.namespaces.containers.as_str() {
            "" => NAMESPACE,
            told => told,
        };
        let listed = self.ask(async |client| {
            let mut request = Request::new(ListContentRequest::default());
            let of =
                namespace.parse().map_err(|_| tonic::Status::invalid_argument("its namespace is no name"))?;
            request.metadata_mut().insert("containerd-namespace", of);
            let mut listed = client.content().list(request).await?.into_inner();
            // Sizes first, so that the largest are the last.
            let mut largest = BTreeSet::new();
            while let Some(part) = listed.message().await? {
                for file in part
                    .info
                    .into_iter()
                    .filter(|file| file.digest.strip_prefix("sha256:").is_some_and(is_id))
                {
                    largest.insert((file.size, file.digest));
                    if largest.len() > most {
                        largest.pop_first();
                    }
                }
            }
            Ok(largest)
        });
        Ok(listed.await?.into_iter().map(|(_, digest)| digest).collect())
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

    #[tokio::test]
    async fn a_containerd_that_is_not_there_is_named_by_its_socket() {
        let none: Containerd =
            serde_json::from_str(r#"{"Address": "/nowhere/sock", "Namespaces": {}}"#).unwrap();
        let told = none.root().await.unwrap_err().to_string();
        assert!(told.contains("/nowhere/sock") && told.contains("No such file"), "{told}");
        assert_eq!(none.files(1).await.unwrap_err().to_string(), told);
    }
}
