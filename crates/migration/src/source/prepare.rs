//! Before the freeze, and while the service runs: whether it can move, the destination's word that it
//! may come, layers and files; then [`copy`](super::copy) copies its memory.

use std::net::Ipv4Addr;
use std::time::Instant;

use godwit_engine::image::Digest;
use godwit_engine::{ContainerStatus, tree};

use super::copy::Copied;
use super::files::{Files, next_round, send_round};
use super::logs::Logs;
use super::{Source, SourceError};
use crate::cpu::cpu_flags;
use crate::images::{KERNEL_STATE_BYTES, Room};
use crate::journal::now_ms;
use crate::link::{Link, LinkError};
use crate::local::LocalError;
use crate::machine::machine;
use crate::message::{Layer, Message, Open, PROTOCOL_VERSION};
use crate::page_hash::{EarlierVisit, PageKey, no_hashes};
use crate::report::{Report, ms_since};
use crate::retained;
use crate::service::Attachment;
use crate::service::Service;

/// What a layer or log is cut into on the wire.
pub(super) const CHUNK: usize = 256 * 1024;

/// What the frozen stretch needs to know of what came before it.
pub(super) struct Prepared {
    pub(super) room: Room,
    pub(super) copied: Copied,
    /// Where the destination takes frames for the service.
    pub(super) vtep: Ipv4Addr,
    /// Whether connections go into the image of the files: both nodes' CRIU know how.
    pub(super) tcp_inline: bool,
}

impl Source {
    /// Every reason why the service cannot be moved as it is now, before anything is touched.
    pub(super) async fn check_eligible(&self) -> Result<(), SourceError> {
        // Pages of its last move may still be on their way into its processes.
        tokio::select! {
            settled = self.local.arrivals.settled(&self.service.name) => settled.map_err(|why| {
                SourceError::NotEligible(vec![format!("service {} cannot leave yet: {why}", self.service.name)])
            })?,
            why = self.local.waits.unreachable(&self.service.name) => {
                return Err(SourceError::NotEligible(vec![format!("service {} {why}", self.service.name)]));
            }
        }
        let config = self.local.config(&self.service);
        let mut reasons = Vec::new();
        let state = self.local.engine.state(&config).await?;
        if state.status != ContainerStatus::Running {
            reasons.push(format!("service {} is not running", self.service.name));
        }
        let sessions = self.local.engine.exec_sessions(&config).await?;
        if sessions > 0 {
            reasons.push(format!(
                "{sessions} command(s) started by `godwit exec` still run in service {}; end them first",
                self.service.name
            ));
        }
        if reasons.is_empty() {
            reasons = self.obstacles(&config, state.pid).await?;
        }
        if reasons.is_empty() { Ok(()) } else { Err(SourceError::NotEligible(reasons)) }
    }

    /// The part during which the service runs: reservation, layers, files, rounds of memory.
    pub(super) async fn prepare(
        &self,
        link: &mut Link,
        report: &mut Report,
    ) -> Result<Prepared, SourceError> {
        let config = self.local.config(&self.service);
        let memory = self.local.engine.memory_unshared(&config).await?;
        let room_bytes = memory + KERNEL_STATE_BYTES;
        let plan = self.plan(memory)?;
        let started = Instant::now();
        let tree = tree::Source::new(&self.local.layout.upper(&self.service.name));
        let (tree, first) = next_round(tree, false).await?;
        let tree_bytes = first.changes.bytes();
        report.pre_dump_ms = ms_since(started);

        let mut layers = Vec::new();
        for digest in &self.service.layers {
            let bytes = self.local.store.open_blob(&digest.parse::<Digest>()?).map_or(0, |(_, bytes)| bytes);
            layers.push(Layer { digest: digest.clone(), bytes });
        }
        let network = match (&self.options.network, &self.service.network) {
            (Some(path), Attachment::Namespace(_)) => Attachment::Namespace(path.clone()),
            (Some(_), Attachment::Overlay) => {
                return Err(SourceError::NotEligible(vec![format!(
                    "service {} is in the overlay, and moves with its address; --network is for one in a namespace of yours",
                    self.service.name
                )]));
            }
            (None, network) => network.clone(),
        };
        if let Some(path) = network.namespace() {
            report.network_namespace = path.to_string_lossy().into_owned();
        }
        let service = serde_json::to_string(&Service {
            epoch: self.service.epoch + 1,
            network,
            ..self.service.clone()
        })
        .map_err(|e| SourceError::NotEligible(vec![format!("the service cannot be described: {e}")]))?;
        let (chosen, retained, tcp_inline, ahead, lazy);
        link.send(Message::Open(Open {
            protocol: PROTOCOL_VERSION,
            migration: self.id.clone(),
            service,
            memory_bytes: memory,
            images_bytes: room_bytes,
            tree_bytes,
            layers: layers.clone(),
            machine: machine(),
            cpu_flags: cpu_flags(),
            streams: u32::try_from(self.options.streams).unwrap_or(1),
            overlay: Some(self.local.network.terms()),
            journal: self.local.journal.identity().to_owned(),
            criu: Some(self.local.criu.version().await?.into()),
            now_ms: now_ms(),
            steps: true,
        }))
        .await?;
        let missing = match link.receive().await? {
            Message::Accepted(accepted) => {
                self.look_at_reservations(&config, &accepted).await?;
                let plan = plan.with(accepted.userfaultfd, &self.destination)?;
                plan.tell(report);
                chosen = plan;
                retained = accepted.retained.then_some(accepted.key);
                (ahead, lazy) = (accepted.ahead, accepted.userfaultfd);
                tcp_inline = accepted.tcp_inline && self.local.criu.tcp_inline().await?;
                accepted.missing_layers
            }
            Message::Refused(refused) => {
                return Err(SourceError::Refused {
                    node: self.destination.clone(),
                    reasons: refused.reasons,
                });
            }
            other => return Err(link.unexpected(&other, "Accepted or Refused").into()),
        };

        let visit = match retained {
            Some(key) => self.learn_kept(link, &key).await?,
            None => EarlierVisit::none(),
        };
        let sending = Instant::now();
        let total: u64 =
            layers.iter().filter(|l| missing.contains(&l.digest)).map(|l| l.bytes).sum::<u64>() + tree_bytes;
        self.step("layers", 0, total);
        for digest in &missing {
            self.send_layer(link, digest, total, report).await?;
        }
        self.step("files", report.pre_dump_bytes, total);
        let (tree, sent) = send_round(link, tree, first).await?;
        report.pre_dump_bytes += sent;
        report.file_bytes += sent;
        match link.receive().await? {
            Message::TreeApplied => {}
            other => return Err(link.unexpected(&other, "TreeApplied").into()),
        }
        let mut files = Files::new(tree, Logs::new(self.local.log_files(&self.service)), ahead);
        if ahead {
            let sent = files.send_log(link).await?;
            report.pre_dump_bytes += sent;
            report.file_bytes += sent;
        }
        report.pre_dump_transfer_ms = ms_since(sending);
        report.memory_bytes = memory;
        let vtep = self.local.host.vtep(&self.destination)?;
        let copied = self.copy(link, chosen, (visit, files), report).await?;
        let copied = Copied { waits: !lazy, ..copied };
        let room = Room::open(
            &self.local.mounts,
            &self.local.layout.migration(&self.id),
            &self.local.layout.criu_logs(&self.id),
            room_bytes,
        )?;
        Ok(Prepared { room, copied, vtep, tcp_inline })
    }

    /// Which pages the destination has retained of an earlier visit.
    async fn learn_kept(&self, link: &mut Link, key: &[u8]) -> Result<EarlierVisit, SourceError> {
        let key = PageKey::told(key).ok_or_else(|| LinkError::Unexpected {
            node: self.destination.clone(),
            got: "something else",
            wanted: "the key of the retained pages' hashes",
        })?;
        let mut hashes = no_hashes();
        loop {
            match link.receive().await? {
                Message::RetainedPages(pages) if retained::learn(&mut hashes, &pages).is_some() => {}
                Message::RetainedEnd => return Ok(EarlierVisit { hashes, key }),
                other => return Err(link.unexpected(&other, "RetainedPages").into()),
            }
        }
    }

    async fn send_layer(
        &self,
        link: &mut Link,
        digest: &str,
        total: u64,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let parsed = digest.parse::<Digest>()?;
        let (file, bytes) = self.local.store.open_blob(&parsed)?;
        link.send(Message::LayerBegin(Layer { digest: digest.to_string(), bytes })).await?;
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
            report.pre_dump_bytes += read as u64;
            report.file_bytes += read as u64;
            self.step("layers", report.pre_dump_bytes, total);
        }
        link.send(Message::LayerEnd).await?;
        match link.receive().await? {
            Message::LayerStored => Ok(()),
            other => Err(link.unexpected(&other, "LayerStored").into()),
        }
    }
}
