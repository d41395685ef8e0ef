//! An image goes from one Docker to another, whole: of what `docker save` writes the layers have no names of their own until
//! its end.

use std::time::Duration;

use bytes::Bytes;
use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::sync::mpsc;

use super::api::ApiError;
use super::{Docker, encoded};
use crate::container::{ContainerConfig, EngineError};
use crate::foreign::archive::without_names;
use crate::foreign::making::PULL;

/// How long dockerd may prepare an archive: it writes all of it to its disk first.
const PREPARED: Duration = Duration::from_secs(1800);

/// An image as dockerd tells it.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    id: String,
    size: u64,
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
        let found = self.image(&config.name, &definition.image.1).await?;
        let size = found.ok_or_else(|| EngineError::NotFound(config.name.clone()))?.size;
        Ok(size.saturating_add(size / 4))
    }

    /// No layers, where the image is not here.
    pub(super) async fn layers_here(
        &self,
        config: &ContainerConfig,
    ) -> Result<Option<Vec<String>>, EngineError> {
        let (_, definition) = self.kept(config)?;
        let found = self.image(&config.name, &definition.image.1).await?;
        Ok(found.is_none().then(Vec::new))
    }

    /// By which name a container of the image is made here: its own, if that is this image's here, or else its ID. An image
    /// that comes from another node is given no name, under which others would take it for what they know by that.
    pub(super) async fn image_name(&self, config: &ContainerConfig) -> Result<String, EngineError> {
        let (_, definition) = self.kept(config)?;
        let (name, id) = definition.image;
        let is_its =
            !name.is_empty() && self.image(&config.name, &name).await?.is_some_and(|found| found.id == id);
        Ok(if is_its { name } else { id })
    }

    /// Sends the image in pieces.
    pub(super) async fn save_image(
        &self,
        config: &ContainerConfig,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let failed = self.failed(&config.name, "save the image of");
        let path = format!("/images/{}/get", encoded(&definition.image.1));
        let mut archive = self.api.stream(&path, PREPARED).await.map_err(&failed)?;
        while let Some(piece) = archive.next().await.map_err(&failed)? {
            if to.send(piece).await.is_err() {
                return Err(failed(ApiError::Broken("nobody takes it any more".into())));
            }
        }
        Ok(())
    }

    /// Takes the image in pieces.
    pub(super) async fn load_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let failed = self.failed(&config.name, "load the image of");
        let (pieces, passing) = without_names(from, definition.image.1.clone());
        let said = self.api.send("/images/load?quiet=1", pieces, PULL).await;
        if let Some(error) = passing.objection().await {
            return Err(failed(ApiError::Broken(error.to_string())));
        }
        let said = said.map_err(&failed)?;
        if self.image(&config.name, &definition.image.1).await?.is_none() {
            let (id, said) = (&definition.image.1, String::from_utf8_lossy(&said));
            let reason = format!("what has come is not the image {id}; it says {:?}", said.trim());
            return Err(failed(ApiError::Broken(reason)));
        }
        Ok(())
    }
}
