//! The layers that the destination lacks: the next one crosses while the destination hashes and unpacks those before it.
//!
//! One connection fills the link, so layers follow each other on it. What takes as long is done with them at the destination,
//! which tells how many it has under way at once (`Accepted::layers_at_once`): the one that crosses, and those that it has
//! not confirmed. No more are begun, so that it always reads what comes.

use std::collections::HashSet;
use std::time::Duration;

use godwit_engine::image::Digest;
use tokio::sync::mpsc;

use super::pace::Pacer;
use super::root::{CHUNK, count};
use super::{LackingLayers, Source, SourceError};
use crate::link::{Link, LinkError};
use crate::message::{Accepted, Layer, Message};
use crate::report::Report;
use crate::resources::LocalError;

/// Pieces of an image that wait for the wire.
const PIECES: usize = 8;

/// How long a destination may ask a registry: twice what an honest one takes.
const ASKING: Duration = Duration::from_secs(20 * 60);

/// What a destination lacks of the root filesystem of a service.
#[derive(Debug)]
pub(super) struct Lacking {
    layers: Vec<Layer>,
    /// Those that it has of other images, where it lacks the image of a container that another engine keeps.
    engine_layers: Vec<String>,
    /// How many of them it has under way at once.
    at_once: usize,
    /// Whether it asks the image's registry for them first.
    asks_registry: bool,
}

impl Lacking {
    /// What a destination has asked for, which can only be the service's.
    pub(super) fn of(destination: &str, accepted: &Accepted, offered: &[Layer]) -> Result<Self, LinkError> {
        let unexpected = |got| LinkError::Unexpected {
            node: destination.to_owned(),
            got,
            wanted: "layers of the service, each once",
        };
        let mut asked = HashSet::new();
        let mut layers = Vec::new();
        for digest in &accepted.missing_layers {
            let layer = offered.iter().find(|layer| layer.digest == *digest);
            layers.push(layer.ok_or_else(|| unexpected("a layer of something else"))?.clone());
            if !asked.insert(digest) {
                return Err(unexpected("a layer twice"));
            }
        }
        Ok(Self {
            layers,
            engine_layers: accepted.engine_layers.clone(),
            // An older one takes one after the other.
            asks_registry: accepted.asks_registry,
            at_once: usize::try_from(accepted.layers_at_once).unwrap_or(usize::MAX).max(1),
        })
    }

    /// Keeps those of these names, after the registry was asked.
    fn keep(&mut self, still: &[String], destination: &str) -> Result<(), LinkError> {
        let before = self.layers.len();
        let gone = before.saturating_sub(still.len());
        self.layers.retain(|layer| still.contains(&layer.digest));
        if before - self.layers.len() == gone {
            return Ok(());
        }
        Err(LinkError::Unexpected {
            node: destination.to_owned(),
            got: "a layer that it did not lack",
            wanted: "layers that it still lacks",
        })
    }

    /// Bytes of their blobs.
    pub(super) fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add)
    }
}

impl Source {
    /// Tells the user in advance what the destination lacks.
    pub(super) fn tell_lacking(&self, lacking: &Lacking) {
        let counted = |count| if self.service.kept.is_some() { 0 } else { count };
        let told = LackingLayers {
            layers: counted(lacking.layers.len()),
            of: counted(self.service.blobs().map_or(0, |blobs| blobs.iter().collect::<HashSet<_>>().len())),
            bytes: lacking.bytes(),
            asks_registry: lacking.asks_registry,
        };
        self.progress.send_modify(|progress| progress.lacking = Some(told));
    }

    /// Sends them, and returns when the destination has them all. `total` is what crosses in this phase.
    pub(super) async fn send_layers(
        &self,
        link: &mut Link,
        mut lacking: Lacking,
        total: u64,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let total = total.saturating_sub(lacking.bytes());
        if lacking.asks_registry {
            let bytes = lacking.bytes();
            let asked = tokio::time::timeout(ASKING, link.receive()).await;
            let asked = asked.map_err(|_| SourceError::Refused {
                node: self.destination.clone(),
                reasons: vec![format!(
                    "it has asked the image's registry for {} minutes",
                    ASKING.as_secs() / 60
                )],
            })?;
            match asked? {
                Message::StillLacking(still) => lacking.keep(&still.layers, &self.destination)?,
                other => return Err(link.unexpected(&other, "StillLacking").into()),
            }
            report.layers_from_registry_bytes = bytes - lacking.bytes();
        }
        report.layers_from_source_bytes = lacking.bytes();
        let total = total.saturating_add(lacking.bytes());
        let pacer = Pacer::new(self.options.max_bandwidth);
        let mut crossing = Crossing { to: link.sender(), link, pacer, unconfirmed: 0 };
        for layer in &lacking.layers {
            crossing.confirmed(lacking.at_once - 1).await?;
            match self.service.kept {
                None => self.send_layer(&mut crossing, layer, total, report).await?,
                Some(_) => {
                    self.send_image(&mut crossing, layer, &lacking.engine_layers, (total, report)).await?;
                }
            }
        }
        crossing.confirmed(0).await
    }

    async fn send_layer(
        &self,
        crossing: &mut Crossing<'_>,
        layer: &Layer,
        total: u64,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let digest = &layer.digest;
        let (file, bytes) = self.local.store.open_blob(&digest.parse::<Digest>()?)?;
        crossing.send(Message::LayerBegin(Layer { digest: digest.clone(), bytes })).await?;
        let mut reader = tokio::fs::File::from_std(file);
        loop {
            let mut buffer = bytes::BytesMut::with_capacity(CHUNK);
            let read =
                tokio::io::AsyncReadExt::read_buf(&mut reader, &mut buffer).await.map_err(|source| {
                    LocalError::Io { action: "read the blob of layer", path: digest.into(), source }
                })?;
            if read == 0 {
                break;
            }
            crossing.data(buffer.freeze()).await?;
            count(report, read as u64);
            self.step("layers", report.pre_dump_bytes, total);
        }
        crossing.end().await
    }

    /// Sends the image of a container that another engine keeps, without layers that the destination has.
    async fn send_image(
        &self,
        crossing: &mut Crossing<'_>,
        image: &Layer,
        there: &[String],
        (total, report): (u64, &mut Report),
    ) -> Result<(), SourceError> {
        crossing.send(Message::LayerBegin(image.clone())).await?;
        let config = self.local.config(&self.service);
        let (to, pieces) = mpsc::channel::<bytes::Bytes>(PIECES);
        let passing = async {
            // Dropped with this, so that the engine does not wait for one that reads no more.
            let mut pieces = pieces;
            while let Some(piece) = pieces.recv().await {
                count(report, piece.len() as u64);
                crossing.data(piece).await?;
                self.step("layers", report.pre_dump_bytes, total);
            }
            Ok::<_, SourceError>(())
        };
        let (saved, passed) =
            tokio::join!(self.local.engine.send_image(&config, there.to_vec(), to), passing);
        passed?;
        saved?;
        crossing.end().await
    }
}

/// Layers on their way over a connection.
struct Crossing<'a> {
    link: &'a mut Link,
    to: mpsc::Sender<Message>,
    pacer: Pacer,
    /// Begun, or sent and not yet unpacked.
    unconfirmed: usize,
}

impl Crossing<'_> {
    /// Queues a message when the wire has room; hears meanwhile what the destination says, such as that it gives up.
    async fn send(&mut self, message: Message) -> Result<(), SourceError> {
        let Self { link, to, unconfirmed, .. } = self;
        loop {
            tokio::select! {
                biased;
                heard = link.receive() => stored(link, unconfirmed, &heard?)?,
                room = to.reserve() => {
                    room.map_err(|_| LinkError::Closed(link.node().to_owned()))?.send(message);
                    return Ok(());
                }
            }
        }
    }

    /// Sends a part of a layer, within the bandwidth that the user allows.
    async fn data(&mut self, part: bytes::Bytes) -> Result<(), SourceError> {
        self.pacer.turn(part.len() as u64).await;
        self.send(Message::LayerData(part)).await
    }

    /// A layer is sent.
    async fn end(&mut self) -> Result<(), SourceError> {
        self.send(Message::LayerEnd).await?;
        self.unconfirmed += 1;
        Ok(())
    }

    /// Returns when the destination has so few left to unpack.
    async fn confirmed(&mut self, most: usize) -> Result<(), SourceError> {
        while self.unconfirmed > most {
            let heard = self.link.receive().await?;
            stored(self.link, &mut self.unconfirmed, &heard)?;
        }
        Ok(())
    }
}

/// Notes what the destination can only say here: that it has one of those that were sent.
fn stored(link: &Link, unconfirmed: &mut usize, heard: &Message) -> Result<(), LinkError> {
    match (heard, unconfirmed.checked_sub(1)) {
        (Message::LayerStored, Some(rest)) => {
            *unconfirmed = rest;
            Ok(())
        }
        _ => Err(link.unexpected(heard, "LayerStored of a layer that was sent")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_destination_gets_no_layer_but_the_services_own_and_each_once() {
        let layers = ["sha256:1", "sha256:2"].map(|digest| Layer { digest: digest.into(), bytes: 7 });
        let asked = |digests: &[&str]| {
            let missing_layers = digests.iter().map(|digest| (*digest).to_owned()).collect();
            Lacking::of("b", &Accepted { missing_layers, ..Accepted::default() }, &layers)
        };
        assert_eq!(asked(&[]).unwrap().layers, []);
        assert_eq!(asked(&["sha256:2"]).unwrap().layers, layers[1..]);
        let refused = asked(&["sha256:1", "sha256:3"]).unwrap_err();
        assert!(refused.to_string().contains("a layer of something else"), "{refused}");
        let refused = asked(&["sha256:1", "sha256:1"]).unwrap_err();
        assert!(refused.to_string().contains("a layer twice"), "{refused}");
    }

    #[test]
    fn an_older_destination_takes_one_layer_after_the_other() {
        let at_once = |layers_at_once| {
            Lacking::of("b", &Accepted { layers_at_once, ..Accepted::default() }, &[]).unwrap().at_once
        };
        assert_eq!([0, 1, 3].map(at_once), [1, 1, 3]);
    }
}
