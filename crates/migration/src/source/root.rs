//! Second: what the service's root filesystem is made of, layers and changed files, and its log.

use std::time::Instant;

use godwit_engine::image::Digest;
use tokio::sync::mpsc;

use super::files::{Files, Log, send_round};
use super::plan::Plan;
use super::recorder::Recorder;
use super::reserve::{Agreed, Reserved};
use super::{Source, SourceError};
use crate::link::Link;
use crate::message::{Layer, Message};
use crate::page_hash::EarlierVisit;
use crate::report::{Report, ms_since};
use crate::resources::LocalError;

/// What a layer or log is cut into on the wire.
pub(super) const CHUNK: usize = 256 * 1024;

/// Pieces of an image that wait for the wire.
const PIECES: usize = 8;

/// A service whose files are at the destination, as they were shortly before.
pub(super) struct Prepared {
    pub(super) agreed: Agreed,
    pub(super) plan: Plan,
    pub(super) visit: EarlierVisit,
    pub(super) files: Files,
}

impl Source {
    /// Sends layers, changed files and the log.
    pub(super) async fn send_root(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        reserved: Reserved,
    ) -> Result<Prepared, SourceError> {
        let Reserved { agreed, plan, visit, layers, engine_layers, tree, first, ahead } = reserved;
        let report = &mut recorder.report;
        let sending = Instant::now();
        let total = layers.iter().map(|layer| layer.bytes).sum::<u64>() + first.changes.bytes();
        self.step("layers", 0, total);
        for layer in &layers {
            match self.service.kept {
                None => self.send_layer(link, layer, total, report).await?,
                Some(_) => self.send_image(link, layer, &engine_layers, (total, report)).await?,
            }
        }
        self.step("files", report.pre_dump_bytes, total);
        let (tree, sent) = match ahead {
            Some(lent) => self.send_onto(link, lent, report).await?,
            None => send_round(link, tree, first).await?,
        };
        count(report, sent);
        match link.receive().await? {
            Message::TreeApplied => {}
            other => return Err(link.unexpected(&other, "TreeApplied").into()),
        }
        let mut log = Log::new(self.local.log_files(&self.service));
        if agreed.ahead {
            let sent;
            (log, sent) = log.send(link).await?;
            count(report, sent);
        }
        report.pre_dump_transfer_ms = ms_since(sending);
        Ok(Prepared { agreed, plan, visit, files: Files::new(tree, log, agreed.ahead) })
    }

    /// Sends the image of a container that another engine keeps, without layers that the destination has.
    pub(super) async fn send_image(
        &self,
        link: &mut Link,
        image: &Layer,
        there: &[String],
        (total, report): (u64, &mut Report),
    ) -> Result<(), SourceError> {
        link.send(Message::LayerBegin(image.clone())).await?;
        let config = self.local.config(&self.service);
        let (to, pieces) = mpsc::channel::<bytes::Bytes>(PIECES);
        let passing = async {
            // Dropped with this, so that the engine does not wait for one that reads no more.
            let mut pieces = pieces;
            while let Some(piece) = pieces.recv().await {
                count(report, piece.len() as u64);
                link.send(Message::LayerData(piece)).await?;
                self.step("layers", report.pre_dump_bytes, total);
            }
            Ok::<_, SourceError>(())
        };
        let (saved, passed) =
            tokio::join!(self.local.engine.send_image(&config, there.to_vec(), to), passing);
        passed?;
        saved?;
        link.send(Message::LayerEnd).await?;
        match link.receive().await? {
            Message::LayerStored => Ok(()),
            other => Err(link.unexpected(&other, "LayerStored").into()),
        }
    }

    pub(super) async fn send_layer(
        &self,
        link: &mut Link,
        layer: &Layer,
        total: u64,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let digest = &layer.digest;
        let (file, bytes) = self.local.store.open_blob(&digest.parse::<Digest>()?)?;
        link.send(Message::LayerBegin(Layer { digest: digest.clone(), bytes })).await?;
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
            link.send(Message::LayerData(buffer.freeze())).await?;
            count(report, read as u64);
            self.step("layers", report.pre_dump_bytes, total);
        }
        link.send(Message::LayerEnd).await?;
        match link.receive().await? {
            Message::LayerStored => Ok(()),
            other => Err(link.unexpected(&other, "LayerStored").into()),
        }
    }
}

/// Files and log that were sent while the service ran.
pub(super) fn count(report: &mut Report, bytes: u64) {
    report.pre_dump_bytes += bytes;
    report.file_bytes += bytes;
}
