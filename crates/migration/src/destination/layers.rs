//! Layers that come from the source: one crosses while those before it are hashed, unpacked and written out.
//!
//! ```text
//! connection   │ layer 1 │ layer 2 │ layer 3 │ waits │ layer 4 …
//! threads                │ 1: verify, unpack, sync │
//!                                  │ 2: verify, unpack, sync │
//!                                            │ 3: verify …
//! ```
//! A layer is in the store whole and verified, or not at all. Where one fails, the move ends at once; those that are being
//! unpacked then come to their end on their threads, and stay if they are good.

use std::io::Write;
use std::sync::Arc;
use std::time::Duration;

use godwit_database::blocking::off_worker;
use godwit_engine::image::{Digest, Pinned};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::DestinationError;
use super::receive::given_up;
use crate::failpoint;
use crate::link::Link;
use crate::message::{Layer, Message, StillLacking};
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;

/// How many layers are under way at once: Docker's number. A processor for each is busy, which services here would use, too.
pub(super) const AT_ONCE: u8 = 3;

/// Pieces of an image that wait for its engine.
const PIECES: usize = 8;

/// What an archive has beside the layers of an image, bytes.
const ARCHIVE_OVERHEAD: u64 = 64 << 20;

/// How long an engine that takes no more of an image may need to say why.
const REASON: Duration = Duration::from_secs(30);

/// Takes the layers that are missing here, or the image for another engine.
pub(super) async fn receive_layers(
    local: &Arc<NodeResources>,
    link: &mut Link,
    service: &Service,
    missing: &[Layer],
    registry: Option<&Pinned>,
) -> Result<(), DestinationError> {
    if service.kept.is_some() {
        let still = match registry {
            Some(image) => image_still_lacking(local, link, (service, image), missing).await?,
            None => missing.to_vec(),
        };
        for image in &still {
            receive_image(local, link, service, image).await?;
            link.send(Message::LayerStored).await?;
        }
        return Ok(());
    }
    let mut storing = Storing(JoinSet::new());
    let still = match registry {
        Some(image) => still_lacking(local, link, (service, image), missing).await?,
        None => missing.to_vec(),
    };
    for layer in &still {
        // A source that heeds the number is not held up here.
        storing.down_to(link, usize::from(AT_ONCE) - 1).await?;
        let unpacks = service.layers.contains(&layer.digest);
        receive_layer(local, link, (layer, unpacks), &mut storing).await?;
    }
    storing.down_to(link, 0).await
}

/// Has the engine of a container ask the image's registry, and tells the source whether the image has to come from there.
async fn image_still_lacking(
    local: &Arc<NodeResources>,
    link: &mut Link,
    (service, image): (&Service, &Pinned),
    missing: &[Layer],
) -> Result<Vec<Layer>, DestinationError> {
    // A container has one: its image.
    let [Layer { digest, .. }] = missing else {
        return Err(DestinationError::Protocol("a container with several images"));
    };
    let id = digest.parse::<Digest>()?;
    let fetching = {
        let (local, config, image) = (Arc::clone(local), local.config(service), image.clone());
        async move { local.engine.fetch_image(&config, &image).await }
    };
    let fetched = tokio::select! {
        fetched = local.registries.by_engine(image, &id, fetching) => fetched,
        error = given_up(link) => return Err(error),
    };
    let still = match fetched {
        Ok(()) => {
            tracing::info!(service = %service.name, %image, "the image of a container came from its registry");
            Vec::new()
        }
        Err(error) => {
            tracing::warn!(service = %service.name, %image, error = %crate::error_chain(&error), "a registry did not give the image of a container; it comes from the source");
            missing.to_vec()
        }
    };
    let layers = still.iter().map(|layer| layer.digest.clone()).collect();
    link.send(Message::StillLacking(StillLacking { layers })).await?;
    Ok(still)
}

/// Asks the image's registry, and tells the source what has to come from there.
async fn still_lacking(
    local: &Arc<NodeResources>,
    link: &mut Link,
    (service, image): (&Service, &Pinned),
    missing: &[Layer],
) -> Result<Vec<Layer>, DestinationError> {
    let mut lacking = Vec::new();
    for layer in missing {
        lacking.push((layer.digest.parse::<Digest>()?, layer.bytes));
    }
    let mut here = Vec::new();
    for digest in &service.layers {
        let digest = digest.parse::<Digest>()?;
        if lacking.iter().all(|(missing, _)| *missing != digest) {
            here.push(digest);
        }
    }
    let fetched = tokio::select! {
        fetched = local.registries.fetch(&local.store, image, &lacking, &here) => fetched,
        error = given_up(link) => return Err(error),
    };
    let came: Vec<_> = fetched.layers.iter().map(ToString::to_string).collect();
    let still: Vec<_> = missing.iter().filter(|layer| !came.contains(&layer.digest)).cloned().collect();
    let (from_registry, from_source) = (came.len(), still.len());
    if let Some(error) = &fetched.failed {
        tracing::warn!(service = %service.name, %image, from_registry, from_source, error = %crate::error_chain(error), "a registry did not give all layers; the others come from the source");
    } else {
        tracing::info!(service = %service.name, %image, from_registry, from_source, "layers of a service came from their registry");
    }
    let layers = still.iter().map(|layer| layer.digest.clone()).collect();
    link.send(Message::StillLacking(StillLacking { layers })).await?;
    Ok(still)
}

/// Layers that are hashed and unpacked, each on a thread.
struct Storing(JoinSet<Result<(), LocalError>>);

impl Storing {
    /// The next message; until it comes the source is told of each layer that is stored.
    async fn receive(&mut self, link: &mut Link) -> Result<Message, DestinationError> {
        loop {
            tokio::select! {
                biased;
                Some(stored) = self.0.join_next() => {
                    stored??;
                    link.send(Message::LayerStored).await?;
                }
                message = link.receive() => return Ok(message?),
            }
        }
    }

    /// Returns when so few are left.
    async fn down_to(&mut self, link: &mut Link, most: usize) -> Result<(), DestinationError> {
        while self.0.len() > most {
            tokio::select! {
                biased;
                Some(stored) = self.0.join_next() => {
                    stored??;
                    link.send(Message::LayerStored).await?;
                }
                error = given_up(link), if most == 0 => return Err(error),
            }
        }
        Ok(())
    }
}

async fn receive_layer(
    local: &Arc<NodeResources>,
    link: &mut Link,
    (layer, unpacks): (&Layer, bool),
    storing: &mut Storing,
) -> Result<(), DestinationError> {
    match storing.receive(link).await? {
        Message::LayerBegin(begun) if begun == *layer => {}
        other => return Err(link.unexpected(&other, "LayerBegin").into()),
    }
    let digest = layer.digest.parse::<Digest>()?;
    let mut writer = local.store.blob_writer(&digest, layer.bytes)?;
    loop {
        match storing.receive(link).await? {
            Message::LayerData(data) => {
                off_worker(|| writer.write_all(&data)).map_err(|source| LocalError::Io {
                    action: "write the blob of layer",
                    path: layer.digest.clone().into(),
                    source,
                })?
            }
            Message::LayerEnd => break,
            other => return Err(link.unexpected(&other, "LayerData").into()),
        }
    }
    let store = Arc::clone(&local.store);
    storing.0.spawn_blocking(move || {
        // A move that ends meanwhile must not have it removed halfway.
        let _hold = store.hold();
        failpoint::blocking_point("destination.unpacking");
        writer.finish()?;
        // Others are only sent on, to nodes of their platform.
        if unpacks {
            store.unpack(&digest)?;
        }
        Ok(())
    });
    Ok(())
}

/// Takes an image for the engine that is to keep the container.
async fn receive_image(
    local: &NodeResources,
    link: &mut Link,
    service: &Service,
    image: &Layer,
) -> Result<(), DestinationError> {
    match link.receive().await? {
        Message::LayerBegin(begun) if begun == *image => {}
        other => return Err(link.unexpected(&other, "LayerBegin").into()),
    }
    let config = local.config(service);
    let (pieces, coming) = mpsc::channel(PIECES);
    let passing = async {
        let mut left = image.bytes.saturating_add(ARCHIVE_OVERHEAD);
        loop {
            match link.receive().await? {
                Message::LayerData(data) => {
                    left = left
                        .checked_sub(data.len() as u64)
                        .ok_or(DestinationError::Protocol("a larger image than was announced"))?;
                    if pieces.send(data).await.is_err() {
                        // The engine has given up, and says why.
                        return Ok::<_, DestinationError>(false);
                    }
                }
                Message::LayerEnd => {
                    drop(pieces);
                    return Ok(true);
                }
                other => return Err(link.unexpected(&other, "LayerData").into()),
            }
        }
    };
    let taking = local.engine.take_image(&config, coming);
    tokio::pin!(taking);
    let whole = tokio::select! {
        passed = passing => passed?,
        // Before it has all of it, it can only have failed.
        taken = &mut taking => return Err(taken.err().map_or_else(
            || DestinationError::Protocol("more of an image than its engine takes"),
            DestinationError::from,
        )),
    };
    if whole {
        tokio::select! {
            taken = &mut taking => taken?,
            error = given_up(link) => return Err(error),
        }
        return Ok(());
    }
    // It takes no more of it, and knows why.
    let taken = tokio::time::timeout(REASON, taking).await;
    if let Ok(Err(error)) = taken {
        return Err(error.into());
    }
    Err(DestinationError::Protocol("more of an image than its engine takes"))
}
