//! A service as a file: frozen, dumped by CRIU, and streamed to the user as an archive that Podman can restore.
//!
//! ```text
//! freeze ─ dump ─ changed files, volumes ─▶ staging ─┬─ runs on: thaw ─ archive ─▶ user
//!                                                    └─ else: archive ─▶ user: "kept" ─ killed, without a word to its peers
//! ```
//! Until the user has the whole archive on the disk the service can go on, and does after every failure. One that is to end is
//! frozen until then: what it did meanwhile would be lost.
//!
//! The images are those of a CRIU without patches, with all of the memory.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use futures::{Stream, StreamExt};
use godwit_api::v1::{
    CheckpointEnded, CheckpointInput, CheckpointKept, CheckpointOutput, CheckpointStart, CheckpointWhole,
    checkpoint_input as input, checkpoint_output as output,
};
use godwit_criu::{CriuError, DumpOptions, Prepared, images, repair};
use godwit_engine::checkpoint::documents::{self, Known};
use godwit_engine::checkpoint::pack::{Compression, Packer};
use godwit_engine::checkpoint::{
    ArchiveError, Awaited, DELETED, IMAGES, OWN, ROOTFS_DIFF, STATISTICS, VOLUMES, changes, foreign, has_room,
};
use godwit_engine::image::Digest;
use godwit_engine::{DumpTarget, EngineError, Keeper, Mount, files};
use godwit_migration::databases::{self, Found, Look, Remembered};
use godwit_migration::{Restart, Service, error_chain, failpoint};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::convert;
use crate::node::Node;
use crate::pieces::{Outgoing, PATIENCE, PIECE, PIECES};
use crate::services::{self, occupied, owned};
use crate::staging::Staging;
use crate::state::Owned;
use crate::status::{internal, status};

/// Longest dump: what CRIU needs for some 100 GiB on a slow disk. One that hangs must not freeze the service for good.
const DUMP_LIMIT: Duration = Duration::from_secs(600);

/// How long the user may take to get the archive to the disk, once all of it has been sent.
const KEEPING_LIMIT: Duration = Duration::from_secs(600);

/// How long the user may take for the archive. Until then the service is frozen, or cannot be stopped or moved.
const SENDING_LIMIT: Duration = Duration::from_secs(3600);

/// The version of [`Own`] that is written.
pub(crate) const VERSION: u32 = 1;

/// What godwit's archives say beside what Podman's do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Own {
    pub(crate) version: u32,
    pub(crate) service: Service,
    /// What its processes remember of files of databases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) remembered: Vec<Remembered>,
}

type Output = Pin<Box<dyn Stream<Item = Result<CheckpointOutput, Status>> + Send>>;
type Outputs = mpsc::Sender<Result<CheckpointOutput, Status>>;

/// Begins a checkpoint; the archive comes as the answer.
pub(crate) async fn checkpoint(
    node: &Arc<Node>,
    mut input: Streaming<CheckpointInput>,
) -> Result<Output, Status> {
    let Some(CheckpointInput { kind: Some(input::Kind::Start(start)) }) = input.message().await? else {
        return Err(Status::invalid_argument("the first message of a checkpoint must say of which service"));
    };
    let compression = Compression::named(&start.compress).ok_or_else(|| {
        Status::invalid_argument(format!(
            "{:?} is no way to compress an archive; write zstd, gzip or none",
            start.compress
        ))
    })?;
    let name = convert::service_name(&start.name)?;
    owned(node, &name)?;
    let taken = node.reserve_alone(&name).await.ok_or_else(|| occupied(&name))?;
    let Owned { service, exit_code, .. } = owned(node, &name)?;
    check(&service, exit_code.is_some())?;
    let staging = Arc::new(staging(node, &service).await?);
    let (outputs, outgoing) = mpsc::channel(PIECES);
    let making = Making { node: Arc::clone(node), service, start, compression, staging };
    // In a task of its own, to its end: the service must not stay frozen.
    node.checks.spawn(async move {
        let ended = making.make(&outputs, input).await;
        making.node.counters.checkpointed(ended.is_ok());
        // A user who reads no more keeps neither the name nor the disk.
        let removing = tokio::task::spawn_blocking(move || drop(making));
        if let Err(error) = removing.await {
            tracing::error!(%error, "a checkpoint's files may not be removed");
        }
        drop(taken);
        let last = match ended {
            Ok(None) => return,
            Ok(Some(ended)) => Ok(ended),
            Err(status) => Err(status),
        };
        // The user may have gone.
        let _ = tokio::time::timeout(PATIENCE, outputs.send(last)).await;
    });
    Ok(ReceiverStream::new(outgoing).boxed())
}

/// Where the archive's parts lie, on a disk that has room for the memory. Files are written as long as there is room.
async fn staging(node: &Node, service: &Service) -> Result<Staging, Status> {
    let local = node.local();
    let memory = local.engine.memory_unshared(&local.config(service)).await.map_err(internal)?;
    let made = has_room(&local.layout.state, memory).and_then(|()| {
        let staging = Staging::new(&local.layout)?;
        staging.note(&service.id)?;
        Ok(staging)
    });
    made.map_err(|error| {
        let kind = match error.kind() {
            io::ErrorKind::StorageFull => Status::resource_exhausted,
            _ => Status::internal,
        };
        let (name, state) = (&service.name, local.layout.state.display());
        kind(format!("a checkpoint of service {name} cannot be made in {state}: {error}"))
    })
}

/// Refuses services of which an archive would not have all.
fn check(service: &Service, has_ended: bool) -> Result<(), Status> {
    let name = &service.name;
    let refused = |reason: String| Err(Status::failed_precondition(format!("service {name} {reason}")));
    if has_ended {
        return refused("does not run: there is no memory to write".into());
    }
    if let Some(kept) = &service.kept {
        return refused(match kept.keeper {
            Keeper::Podman => "is a container of Podman's: `podman container checkpoint --export FILE` does this".into(),
            Keeper::Docker => "is a container of Docker's, which has no such archives: what `docker checkpoint create` makes is experimental, and stays on this node; run the service by `godwit run` without --engine".into(),
        });
    }
    if service.network.namespace().is_some() {
        return refused("is in a network namespace of yours, which an archive cannot have".into());
    }
    if let Some((source, _)) = service.mounts.iter().find_map(Mount::bind) {
        return refused(format!(
            "has {} of this node mounted, which an archive does not have; run it with a volume (`-v NAME:TARGET`)",
            source.display()
        ));
    }
    if let Some((volume, file)) = service.files_of_volumes().next() {
        return refused(format!(
            "has the file {file} of volume {volume} mounted, and an archive has whole volumes only; run it with the volume (`-v {volume}:TARGET`)"
        ));
    }
    Ok(())
}

/// A checkpoint under way.
struct Making {
    node: Arc<Node>,
    service: Service,
    start: CheckpointStart,
    compression: Compression,
    /// A thread that still writes files there has it, too.
    staging: Arc<Staging>,
}

impl Making {
    /// Makes it, and sees the service to its end, or on; the last message for the user, if there is one.
    async fn make(
        &self,
        outputs: &Outputs,
        mut input: Streaming<CheckpointInput>,
    ) -> Result<Option<CheckpointOutput>, Status> {
        let local = self.node.local();
        let config = local.config(&self.service);
        // A dump is refused while commands run in it: found out before it is frozen, and again after.
        local.engine.dump_target(&config).await.map_err(internal)?;
        // A terminal is its user's, and whoever restores the archive has none.
        match local.engine.sessions(&config).await.map_err(internal)? {
            0 => {}
            commands => return Err(internal(EngineError::Occupied { name: config.name.clone(), commands })),
        }
        self.node.criu().version().await.map_err(|error| status(Status::failed_precondition, &error))?;
        let prepared = self.node.criu().clone().as_stock().prepare().map_err(internal)?;
        let pids = local.engine.processes(&config).await.map_err(internal)?;
        let pids: Vec<_> = pids.into_iter().filter_map(|pid| pid.try_into().ok()).collect();
        // It ends when nobody waits for it any more.
        let awaited = Arc::new(());
        let waiter = Arc::downgrade(&awaited);
        let looking =
            tokio::task::spawn_blocking(move || databases::look(&pids, &|| waiter.strong_count() > 0));
        let look = looking.await.map_err(internal)?;
        drop(awaited);
        let dumped = tokio::select! {
            dumped = self.dump(prepared, look) => dumped,
            () = outputs.closed() => Err(Status::cancelled("the user has gone")),
            () = local.ending.cancelled() => Err(Status::unavailable("godwitd ends: the service goes on")),
        };
        let (frozen, remembered) = match dumped {
            Ok(dumped) => dumped,
            Err(status) => {
                self.go_on().await?;
                return Err(status);
            }
        };
        if self.start.leave_running {
            self.go_on().await?;
        }
        failpoint::point("checkpoint.dumped").await;
        let ending = self.node.local().ending.clone();
        let taken = async {
            self.send(outputs.clone(), remembered).await?;
            let image = documents::image_name(&self.service.image);
            let frozen_us = u64::try_from(frozen.as_micros()).unwrap_or(u64::MAX);
            let whole = CheckpointWhole { image, frozen_us };
            let gone = |_| Status::cancelled("the archive was not taken to its end");
            let message = CheckpointOutput { kind: Some(output::Kind::Whole(whole)) };
            outputs.send(Ok(message)).await.map_err(gone)?;
            if self.start.leave_running {
                return Ok(());
            }
            match tokio::time::timeout(KEEPING_LIMIT, input.message()).await {
                Ok(Ok(Some(CheckpointInput { kind: Some(input::Kind::Kept(CheckpointKept {})) }))) => Ok(()),
                _ => Err(Status::cancelled("nobody said that the archive is kept: the service goes on")),
            }
        };
        let taken = tokio::select! {
            taken = taken => taken,
            () = ending.cancelled() => Err(Status::unavailable("godwitd ends: the service goes on")),
        };
        if self.start.leave_running {
            self.staging.went_well();
            self.node.events.tell("service", "checkpointed", &self.service.name, "it runs on");
            return taken.map(|()| None);
        }
        let ended = match taken {
            Ok(()) => self.end().await,
            Err(status) => Err(status),
        };
        if let Err(status) = ended {
            self.go_on().await?;
            return Err(status);
        }
        self.staging.went_well();
        Ok(Some(CheckpointOutput { kind: Some(output::Kind::Ended(CheckpointEnded {})) }))
    }

    /// Freezes the service and writes all that an archive has into the staging directory; how long it took.
    async fn dump(&self, prepared: Prepared, look: Look) -> Result<(Duration, Vec<Remembered>), Status> {
        let (local, service) = (self.node.local(), &self.service);
        let config = local.config(service);
        let images = self.staging.path().join(IMAGES);
        std::fs::create_dir(&images).map_err(internal)?;
        let begun = Instant::now();
        local.engine.freeze(&config).await.map_err(internal)?;
        let settling = tokio::task::spawn_blocking(move || look.settled().found(true));
        let Found { remembered, warnings } = settling.await.map_err(internal)?;
        for warning in warnings {
            self.node.events.tell("service", "told", &service.name, &warning);
        }
        let target = local.engine.dump_target(&config).await.map_err(internal)?;
        for (name, content) in &target.extra_files {
            std::fs::write(images.join(name), content).map_err(internal)?;
        }
        if self.is_silent() {
            // What its peers send from here on is not acknowledged: they send it again after the restore.
            local.network.close(service).await.map_err(internal)?;
        }
        failpoint::point("checkpoint.frozen").await;
        let options = self.options(&target);
        let dumping = async {
            match tokio::time::timeout(DUMP_LIMIT, prepared.dump(options)).await {
                Ok(dumped) => dumped.map(drop).map_err(|error| self.explained(&error)),
                Err(_) => Err(Status::aborted(format!("CRIU has not dumped the service in {DUMP_LIMIT:?}"))),
            }
        };
        let (dumped, settled) = tokio::join!(dumping, local.engine.settle_log(&config));
        dumped?;
        if let Err(error) = settled {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "its last output may not be in its log");
        }
        let (upper, directory) = (local.layout.upper(service), local.layout.service(&service.name));
        let digests: Result<Vec<Digest>, _> = service.layers.iter().map(|layer| layer.parse()).collect();
        let lower: Vec<_> =
            digests.map_err(internal)?.iter().map(|digest| local.store.layer_path(digest)).collect();
        let volumes: Vec<_> = match self.start.ignore_volumes {
            true => Vec::new(),
            false => service
                .volumes()
                .map(|name| (name.to_string(), files::volumes(&directory).join(name)))
                .collect(),
        };
        // A user who goes ends it, and the directory goes once it has ended.
        let awaited = Awaited::default();
        let waiter = awaited.by();
        let staging = Arc::clone(&self.staging);
        let written = tokio::task::spawn_blocking(move || {
            finish_images(&images)?;
            changes::write(&upper, &lower, staging.path(), &waiter)?;
            let into = staging.path().join(VOLUMES);
            std::fs::create_dir(&into)
                .map_err(|source| ArchiveError::Io { action: "make a directory".into(), source })?;
            volumes.iter().try_for_each(|(name, path)| {
                changes::write_volume(path, name, &into.join(format!("{name}.tar")), &waiter)
            })
        });
        written.await.map_err(internal)?.map_err(unwritten)?;
        Ok((begun.elapsed(), remembered))
    }

    /// Whether the peers of its connections are not to hear that it ends.
    fn is_silent(&self) -> bool {
        self.start.tcp_established && !self.start.leave_running
    }

    fn options(&self, target: &DumpTarget) -> DumpOptions {
        DumpOptions {
            external_mounts: target.external_mounts.clone(),
            volumes: target.volumes.clone(),
            external_network: Some(target.network_namespace.1.clone()),
            freezer: Some(target.freezer.clone()),
            tcp_established: self.start.tcp_established,
            ..DumpOptions::new(
                target.pid,
                &target.root,
                self.staging.path().join(IMAGES),
                self.staging.logs(),
            )
        }
    }

    fn explained(&self, error: &CriuError) -> Status {
        let text = error_chain(error);
        if text.contains("--tcp-established") || text.contains("Connected TCP socket") {
            return Status::failed_precondition(format!(
                "service {} has established TCP connections, which an archive can restore once, and at the same address alone; write them into it with --tcp-established, or close them first",
                self.service.name
            ));
        }
        Status::internal(text)
    }

    /// Streams the archive.
    async fn send(&self, outputs: Outputs, remembered: Vec<Remembered>) -> Result<(), Status> {
        let service = Service { hooks: godwit_migration::service::Hooks::default(), ..self.service.clone() };
        let own = Own { version: VERSION, service, remembered };
        let own = serde_json::to_vec_pretty(&own).map_err(internal)?;
        let config = self.node.local().config(&self.service);
        let documents = documents::documents(&config, &known(&self.service)).map_err(internal)?;
        let as_message = |data| CheckpointOutput { kind: Some(output::Kind::Data(data)) };
        let to = Outgoing::new(outputs, as_message).within(SENDING_LIMIT);
        let (staging, logs) = (self.staging.path().to_owned(), self.staging.logs().to_owned());
        let compression = self.compression;
        let packed = tokio::task::spawn_blocking(move || {
            let to = io::BufWriter::with_capacity(PIECE, to);
            let mut packer = Packer::new(to, compression)?;
            packer.content(OWN, &own)?;
            for (name, content) in documents {
                packer.content(name, &content)?;
            }
            packer.file(STATISTICS, &logs.join(STATISTICS))?;
            packer.directory(IMAGES, &staging.join(IMAGES))?;
            for name in [ROOTFS_DIFF, DELETED] {
                packer.file(name, &staging.join(name))?;
            }
            packer.directory(VOLUMES, &staging.join(VOLUMES))?;
            // Not by dropping it, which passes over an error.
            packer.finish()?.into_inner().map_err(io::IntoInnerError::into_error)?;
            Ok::<_, io::Error>(())
        });
        packed.await.map_err(internal)?.map_err(|error| {
            Status::aborted(format!(
                "the archive of service {} cannot be written: {error}",
                self.service.name
            ))
        })
    }

    /// The service goes on where it was; an error where it cannot.
    async fn go_on(&self) -> Result<(), Status> {
        let local = self.node.local();
        let config = local.config(&self.service);
        // Before anything reaches its sockets. It is not kept frozen for that.
        if let Err(error) = local.engine.recover(&config).await {
            tracing::error!(service = %self.service.name, error = %error_chain(&error), "connections of the service may be broken");
        }
        if self.is_silent()
            && let Err(error) = local.network.open(&self.service).await
        {
            tracing::error!(service = %self.service.name, error = %error_chain(&error), "it cannot be reached after a checkpoint; a restart of godwitd opens its port");
        }
        self.node.state.set_running(&self.service).map_err(internal)?;
        local.engine.thaw(&config).await.map_err(|error| {
            let (name, why) = (&self.service.name, error_chain(&error));
            tracing::error!(service = %name, error = %why, "it is frozen after a checkpoint, and cannot go on");
            Status::internal(format!(
                "service {name} is frozen and cannot go on: {why}; a restart of godwitd tries again"
            ))
        })
    }

    /// The service ends: its archive is kept.
    async fn end(&self) -> Result<(), Status> {
        failpoint::point("checkpoint.kept").await;
        // Before it ends: it stays stopped, whatever happens to this daemon.
        self.node.state.set_stopped(&self.service).map_err(internal)?;
        self.node.end_plan(&self.service.id);
        services::kill_frozen(&self.node, &self.service).await
    }
}

/// Why there is no archive.
fn unwritten(error: ArchiveError) -> Status {
    match &error {
        ArchiveError::Unkept { .. } => status(Status::failed_precondition, &error),
        ArchiveError::Io { source, .. } if source.kind() == io::ErrorKind::StorageFull => {
            status(Status::resource_exhausted, &error)
        }
        _ => internal(error),
    }
}

/// Has images say the same to whoever restores them.
fn finish_images(directory: &std::path::Path) -> Result<(), ArchiveError> {
    repair::repair(directory)?;
    foreign::make_portable(directory)?;
    scale_windows(directory)
}

/// Puts right what CRIU leaves out of connections without window scaling.
pub(crate) fn scale_windows(directory: &std::path::Path) -> Result<(), ArchiveError> {
    let failed = |source| ArchiveError::Io { action: format!("list {}", directory.display()), source };
    for entry in std::fs::read_dir(directory).map_err(failed)? {
        let path: PathBuf = entry.map_err(failed)?.path();
        if path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("tcp-stream-")) {
            images::scale_windows(&path)?;
        }
    }
    Ok(())
}

/// What Podman is told beside what the engine is.
fn known(service: &Service) -> Known {
    let labels = service.labels.iter().filter_map(|label| label.split_once('='));
    Known {
        id: Digest::of(service.id.as_bytes()).hex().to_owned(),
        image: documents::image_name(&service.image),
        // It may come from another node.
        image_id: service.image_id.clone().filter(|id| id.parse::<Digest>().is_ok()),
        created: UNIX_EPOCH + Duration::from_millis(u64::try_from(service.created_ms).unwrap_or(0)),
        ports: service.publish.iter().map(|port| (port.host, port.container, port.udp)).collect(),
        labels: labels.map(|(name, value)| (name.to_owned(), value.to_owned())).collect::<BTreeMap<_, _>>(),
        restart: match service.restart {
            Restart::No => ("no".into(), 0),
            Restart::OnFailure(most) => ("on-failure".into(), most),
            Restart::Always => ("unless-stopped".into(), 0),
        },
    }
}
