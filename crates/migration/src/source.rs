//! The source's side of a migration.
//!
//! Everything up to the destination's `Restored` can be cancelled and undone: [`Source::undo`]
//! opens the port, thaws, and the service goes on with its connections. Then the journal's
//! `committed` is written, and from there on there is only forward.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_criu::DumpOptions;
use godwit_engine::image::Digest;
use godwit_engine::tree;
use godwit_engine::{ContainerStatus, EngineError};
use godwit_network::Held;
use godwit_transfer::Connection;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::fault;
use crate::images::{self, KERNEL_STATE_BYTES, Room};
use crate::journal::{Role, Stage};
use crate::link::{Link, LinkError};
use crate::local::{Local, LocalError, cpu_flags, from_local_causes, machine};
use crate::message::{ImagesEnd, Layer, Message, Open, PROTOCOL_VERSION, Reason};
use crate::report::{Outcome, PhaseClock, Report, ms_since};
use crate::service::Service;

/// What a layer or log is cut into on the wire.
const CHUNK: usize = 256 * 1024;

/// Longest dump: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
const DUMP_LIMIT: Duration = Duration::from_secs(120);

/// How far a migration has come, for people who wait.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Progress {
    /// `reserve`, `layers`, `files`, `freeze`, `dump`, `transfer`, `restore`, `commit`, `release`.
    pub phase: &'static str,
    /// Bytes sent.
    pub bytes_done: u64,
    /// Bytes expected; 0 while unknown.
    pub bytes_total: u64,
}

/// Why a service stayed at the source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Nothing was touched.
    #[error("{}", .0.join("; "))]
    NotEligible(Vec<String>),
    /// The destination said no.
    #[error("node {node} refuses: {}", .reasons.join("; "))]
    Refused {
        /// The destination.
        node: String,
        /// All its reasons.
        reasons: Vec<String>,
    },
    /// The conversation broke.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// This node could not do its part.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// CRIU could not dump.
    #[error(transparent)]
    Criu(#[from] godwit_criu::CriuError),
    /// CRIU hangs.
    #[error("the dump took longer than {} s", DUMP_LIMIT.as_secs())]
    Slow,
    /// Changed files could not be read.
    #[error("the changed files of the service cannot be sent")]
    Tree(#[from] tree::TreeError),
    /// The user or the daemon's shutdown.
    #[error("it was cancelled")]
    Cancelled,
}

impl SourceError {
    /// Whether it says no more than that the connection takes nothing; what is read next tells why.
    fn is_of_sending(&self) -> bool {
        matches!(
            self,
            Self::Link(LinkError::Closed(_))
                | Self::Local(LocalError::Images(images::ImagesError::Closed))
                | Self::Tree(_)
        )
    }
}

from_local_causes!(
    SourceError:
    godwit_engine::image::DigestError,
    EngineError,
    godwit_network::NetworkError,
    godwit_engine::image::ImageError,
    images::ImagesError,
    crate::journal::JournalError,
    tokio::task::JoinError
);

/// One migration away from this node.
pub struct Source {
    local: Arc<Local>,
    service: Service,
    id: String,
    destination: String,
    progress: watch::Sender<Progress>,
    cancel: CancellationToken,
    /// Frames for the service that came since the freeze; they go where it runs next.
    held: Mutex<Option<Held>>,
}

/// What the frozen stretch needs to know of what came before it.
struct Prepared {
    tree: tree::Source,
    room: Room,
}

impl Source {
    /// A migration of `service` to `destination`, under the given id.
    #[must_use]
    pub fn new(
        local: Arc<Local>,
        service: Service,
        id: String,
        destination: String,
        progress: watch::Sender<Progress>,
        cancel: CancellationToken,
    ) -> Self {
        Self { local, service, id, destination, progress, cancel, held: Mutex::new(None) }
    }

    /// Moves the service over `connect`ed data connection. The report says how it ended; an error
    /// is returned only when the service could neither be moved nor put back.
    pub async fn run<C, E>(self, connect: C) -> Result<Report, LocalError>
    where
        C: Future<Output = Result<Connection, E>>,
        E: std::error::Error + Send + Sync + 'static,
    {
        let start = Instant::now();
        let mut report = Report::begin(&self.id, &self.service.name, &self.local.node, &self.destination);
        self.local.journal.begin(&self.id, Role::Source, &self.destination, &self.service)?;
        let mut link = None;
        let mut clock = None;
        let attempt = async {
            self.check_eligible().await?;
            report.criu = self.local.criu.version().await?.to_string();
            self.step("reserve", 0, 0);
            let connection = connect.await.map_err(|e| {
                SourceError::NotEligible(vec![format!(
                    "node {} cannot be reached: {}",
                    self.destination,
                    crate::error_chain(&e)
                )])
            })?;
            let link = link.insert(Link::new(connection));
            self.until_restored(link, &mut report, &mut clock).await
        };
        let ended = tokio::select! {
            ended = attempt => ended,
            () = self.cancel.cancelled() => Err(SourceError::Cancelled),
        };
        let outcome = match ended {
            Ok(()) => {
                // The commit point. An error here leaves the service at the source.
                match self.local.journal.set(&self.id, Stage::Committed, "") {
                    Ok(()) => Ok(()),
                    Err(error) => Err(SourceError::Local(error.into())),
                }
            }
            Err(error) => Err(error),
        };
        match (outcome, link) {
            (Ok(()), Some(link)) => {
                if let Err(error) = self.release(link, &mut report, &mut clock).await {
                    // Committed is committed: what is left here is let go at the next start.
                    let why = crate::error_chain(&error);
                    tracing::error!(migration = %self.id, error = %why, "the source cannot let go");
                    report.reason = format!(
                        "it moved, but node {} could not let go of all it held: {why}",
                        self.local.node
                    );
                }
            }
            (Ok(()), None) => unreachable!("only an attempt with a link succeeds"),
            (Err(error), mut link) => {
                let mut reason = crate::error_chain(&error);
                if let Some(link) = &mut link
                    && error.is_of_sending()
                    && let Some(why) = link.why_closed().await
                {
                    reason = crate::error_chain(&why);
                }
                tracing::warn!(migration = %self.id, service = %self.service.name, %reason, "the service is kept");
                self.undo(&reason).await?;
                if let Some(clock) = &mut clock {
                    clock.end("undo");
                }
                if let Some(link) = link {
                    report.wire_bytes = link.bytes_sent();
                    let abort = Message::Abort(Reason { reason: reason.clone() });
                    // The other side also sees the connection close; the word only makes it sooner.
                    let _ = link.sender().try_send(abort);
                    link.close().await;
                }
                report.reason = reason;
            }
        }
        if let Some(clock) = clock {
            report.frozen_ms = clock.total_ms();
            report.phases = clock.phases();
        }
        report.total_ms = ms_since(start);
        Ok(report)
    }

    fn step(&self, phase: &'static str, bytes_done: u64, bytes_total: u64) {
        self.progress.send_replace(Progress { phase, bytes_done, bytes_total });
    }

    /// Every reason why the service cannot be moved as it is now, before anything is touched.
    async fn check_eligible(&self) -> Result<(), SourceError> {
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
        if reasons.is_empty() { Ok(()) } else { Err(SourceError::NotEligible(reasons)) }
    }

    async fn until_restored(
        &self,
        link: &mut Link,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
    ) -> Result<(), SourceError> {
        let mut prepared = self.prepare(link, report).await?;
        let frozen = self.frozen(link, report, clock, &mut prepared).await;
        prepared.room.close(frozen.is_ok())?;
        frozen
    }

    /// The part during which the service runs: reservation, layers, files.
    async fn prepare(&self, link: &mut Link, report: &mut Report) -> Result<Prepared, SourceError> {
        let config = self.local.config(&self.service);
        let memory = self.local.engine.memory_current(&config).await?;
        let room_bytes = memory + KERNEL_STATE_BYTES;
        if crate::local::available_memory() < room_bytes / 2 {
            return Err(SourceError::NotEligible(vec![format!(
                "node {} has too little free memory to hold the images of {} MiB while they are sent",
                self.local.node,
                memory >> 20
            )]));
        }
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
        let service =
            serde_json::to_string(&Service { epoch: self.service.epoch + 1, ..self.service.clone() })
                .map_err(|e| {
                    SourceError::NotEligible(vec![format!("the service cannot be described: {e}")])
                })?;
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
        }))
        .await?;
        let missing = match link.receive().await? {
            Message::Accepted(accepted) => accepted.missing_layers,
            Message::Refused(refused) => {
                return Err(SourceError::Refused {
                    node: self.destination.clone(),
                    reasons: refused.reasons,
                });
            }
            other => return Err(link.unexpected(&other, "Accepted or Refused").into()),
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
        match link.receive().await? {
            Message::TreeApplied => {}
            other => return Err(link.unexpected(&other, "TreeApplied").into()),
        }
        report.pre_dump_transfer_ms = ms_since(sending);
        report.memory_bytes = memory;
        let room = Room::open(
            &self.local.layout.migration(&self.id),
            &self.local.layout.criu_logs(&self.id),
            room_bytes,
        )?;
        Ok(Prepared { tree, room })
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
            self.step("layers", report.pre_dump_bytes, total);
        }
        link.send(Message::LayerEnd).await?;
        match link.receive().await? {
            Message::LayerStored => Ok(()),
            other => Err(link.unexpected(&other, "LayerStored").into()),
        }
    }

    /// The part during which the service does not run.
    async fn frozen(
        &self,
        link: &mut Link,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
        prepared: &mut Prepared,
    ) -> Result<(), SourceError> {
        let config = self.local.config(&self.service);
        self.step("freeze", 0, report.memory_bytes);
        self.local.journal.set(&self.id, Stage::Frozen, "")?;
        let clock = clock.insert(PhaseClock::start());
        self.local.engine.freeze(&config).await?;
        // From here nothing is acknowledged to clients that the dump would not hold; what they send
        // is kept for the service, so that they need not wait out a retransmission.
        let held = self.local.overlay.hold(&self.service.endpoint())?;
        self.local.overlay.close(&self.service.endpoint()).await?;
        *self.held.lock().unwrap_or_else(PoisonError::into_inner) = Some(held);
        let keep_stopped = self.local.engine.stopped_processes(&config).await?;
        let target = self.local.engine.dump_target(&config).await?;
        for (name, content) in &target.extra_files {
            let path = prepared.room.images().join(name);
            std::fs::write(&path, content).map_err(|source| LocalError::Io {
                action: "write",
                path,
                source,
            })?;
        }
        clock.end("freeze");
        fault::point("source.frozen").await;

        self.step("dump", 0, report.memory_bytes);
        let criu = self.local.criu.clone();
        let options = DumpOptions {
            external_mounts: target.external_mounts,
            external_network: Some(target.network_namespace.1),
            freezer: Some(target.freezer),
            ..DumpOptions::new(target.pid, target.root, prepared.room.images(), prepared.room.work())
        };
        // Dropping the handle does not end CRIU, which must put the processes back itself:
        // `Engine::thaw` waits for that.
        let mut dump = AbortOnDropHandle::new(tokio::spawn(async move {
            let started = Instant::now();
            criu.dump(options).await.map(|_| ms_since(started))
        }));

        let tree = std::mem::replace(&mut prepared.tree, tree::Source::new(Path::new("/")));
        let (tree, last) = next_round(tree, true).await?;
        let (_, sent) = send_round(link, tree, last).await?;
        report.dump_bytes += sent;

        let memory = report.memory_bytes;
        let dumping = AtomicBool::new(true);
        let heard = |sent| {
            let phase = if dumping.load(Ordering::Relaxed) { "dump" } else { "transfer" };
            self.step(phase, sent, memory.max(sent));
        };
        let mut images = images::Sender::new(&prepared.room.images(), link.sender(), &heard);
        let dumped = {
            let following = images.follow();
            tokio::pin!(following);
            tokio::select! {
                dumped = &mut dump => dumped,
                () = tokio::time::sleep(DUMP_LIMIT) => return Err(SourceError::Slow),
                // A page being sent when the dump ends is sent again from its start by `finish`,
                // which is why `follow` advances its offset only after a piece is queued.
                failed = &mut following => match failed { Ok(never) => match never {}, Err(e) => return Err(e.into()) },
            }
        };
        report.dump_ms = dumped??;
        clock.end("dump");

        dumping.store(false, Ordering::Relaxed);
        heard(images.bytes());
        // By now the shim has long emptied the pipes of the frozen processes.
        report.dump_bytes += self.send_log(link).await?;
        let files = images.finish().await?;
        report.dump_bytes += images.bytes();
        drop(images);
        link.send(Message::ImagesEnd(ImagesEnd { files, keep_stopped })).await?;
        match link.receive().await? {
            Message::ImagesReceived => {}
            other => return Err(link.unexpected(&other, "ImagesReceived").into()),
        }
        report.dump_transfer_ms = clock.end("transfer");
        self.step("restore", report.dump_bytes, report.dump_bytes);
        match link.receive().await? {
            Message::Restored => {}
            other => return Err(link.unexpected(&other, "Restored").into()),
        }
        report.resume_ms = clock.end("restore");
        Ok(())
    }

    async fn send_log(&self, link: &Link) -> Result<u64, SourceError> {
        let mut sent = 0;
        let [older, log] = self.local.log_files(&self.service);
        for (old, path) in [(true, older), (false, log)] {
            let data = match std::fs::read(&path) {
                Ok(data) => data,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(source) => return Err(LocalError::Io { action: "read", path, source }.into()),
            };
            for piece in data.chunks(CHUNK) {
                let piece = bytes::Bytes::copy_from_slice(piece);
                link.send(if old { Message::OldLogData(piece) } else { Message::LogData(piece) }).await?;
            }
            sent += data.len() as u64;
        }
        Ok(sent)
    }

    /// After the commit: tells the destination, then lets go of everything here.
    async fn release(
        &self,
        mut link: Link,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
    ) -> Result<(), LocalError> {
        fault::point("source.committed").await;
        self.step("commit", 0, 0);
        let told = link.send(Message::Commit).await;
        self.local.host.release(&self.service, &self.destination).await?;
        let running = match told {
            Ok(()) => link.receive().await,
            Err(error) => Err(error),
        };
        if let Some(clock) = clock {
            report.resume_ms += clock.end("commit");
        }
        report.outcome = Outcome::Moved;
        if let Some(held) = self.take_held() {
            self.local.overlay.release(held)?;
        }
        match running {
            Ok(Message::Running) => {}
            Ok(other) => {
                tracing::warn!(migration = %self.id, got = other.name(), "no word that the service runs")
            }
            Err(error) => {
                // The destination owns it and asks until it hears so; this node answers from its journal.
                report.reason = format!(
                    "it is committed, but node {} has not confirmed that it runs ({}); it asks for the decision by itself as soon as it reaches this node",
                    self.destination,
                    crate::error_chain(&error)
                );
            }
        }
        report.wire_bytes = link.bytes_sent();
        link.close().await;
        self.step("release", 0, 0);
        self.local.clear(&self.service).await?;
        self.local.journal.set(&self.id, Stage::Done, &report.reason)?;
        Ok(())
    }

    /// Before the commit: the service goes on here as if nothing had been.
    async fn undo(&self, reason: &str) -> Result<(), LocalError> {
        put_back(&self.local, &self.service, &self.id, self.take_held(), reason).await
    }

    fn take_held(&self) -> Option<Held> {
        // A panic while the lock was held leaves an option that is whole either way.
        self.held.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Undoes a migration that did not commit: in the same life of the daemon, or after a crash.
pub(crate) async fn put_back(
    local: &Local,
    service: &Service,
    id: &str,
    held: Option<Held>,
    reason: &str,
) -> Result<(), LocalError> {
    let entry = local.journal.get(id)?;
    if entry.is_some_and(|e| e.stage == Stage::Frozen) && lives(local, service).await? {
        // The port first: what comes in while the processes thaw waits in their sockets.
        local.overlay.open(&service.endpoint()).await?;
        if let Some(held) = held {
            local.overlay.release(held)?;
        }
        match local.engine.thaw(&local.config(service)).await {
            Err(EngineError::NotFound(_)) => {}
            done => done?,
        }
    }
    images::remove(&local.layout.migration(id))?;
    local.journal.set(id, Stage::Kept, reason)?;
    Ok(())
}

/// Whether there is anything to thaw: the service may have been killed, or the machine restarted,
/// which its watcher, or the daemon's start, tells.
async fn lives(local: &Local, service: &Service) -> Result<bool, LocalError> {
    match local.engine.state(&local.config(service)).await {
        Ok(state) => Ok(state.status != ContainerStatus::Stopped),
        Err(EngineError::NotFound(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

async fn next_round(tree: tree::Source, frozen: bool) -> Result<(tree::Source, tree::Round), SourceError> {
    Ok(tokio::task::spawn_blocking(move || tree.next_round(frozen).map(|round| (tree, round))).await??)
}

async fn send_round(
    link: &Link,
    mut tree: tree::Source,
    round: tree::Round,
) -> Result<(tree::Source, u64), SourceError> {
    link.send(Message::TreeBegin).await?;
    let sender = link.sender();
    let node = link.node().to_string();
    let sent = tokio::task::spawn_blocking(move || {
        let mut bytes = 0u64;
        let sent = tree.send(round, &mut |item: tree::Item| {
            let encoded = bytes::Bytes::from(item.encode());
            bytes += encoded.len() as u64;
            sender.blocking_send(Message::TreeItem(encoded)).map_err(|_| LinkError::Closed(node.clone()))
        });
        sent.map(|_| (tree, bytes))
    })
    .await??;
    link.send(Message::TreeEnd).await?;
    Ok(sent)
}
