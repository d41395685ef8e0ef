//! The destination's side of a migration.
//!
//! Until the source has committed, nothing that arrives here runs: the restored processes are
//! stopped and the port is closed. When the connection ends between `Restored` and the decision,
//! the migration is in doubt and this node asks the source until it is told ([`resolve`]).
//!
//! The service's pages come over connections of their own into its [`intake`]. After the commit they
//! are put in place while the service runs, and those that have stayed at the source follow.

pub(crate) mod intake;
mod plain;

use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use godwit_engine::image::Digest;
use godwit_engine::tree;
use godwit_engine::{ContainerStatus, EngineError, MountKind, RestoreRequest};

use crate::arrivals::{Arrival, Further};
use crate::fault;
use crate::images::{self, Room};
use crate::journal::{Role, Stage};
use crate::kept::Kept;
use crate::link::{Link, LinkError};
use crate::local::{Decision, Local, LocalError, Place, cpu_flags, from_local_causes, machine};
use crate::message::{Accepted, ImagesEnd, Layer, Message, Open, PROTOCOL_VERSION, Purpose, Reason, Refused};
use crate::service::Service;
use intake::{Intake, IntakeError};

/// Most bytes of log that are taken over, for each of its two files: the shim rotates far below.
const MAX_LOG_BYTES: u64 = 64 << 20;

/// Largest upper directory taken over: larger ones want a volume.
const MAX_TREE_BYTES: u64 = 1 << 40;

/// Most names in it.
const MAX_TREE_ENTRIES: u64 = 50_000_000;

/// First and last pause between two questions to a source that does not answer.
const ASK_FIRST: Duration = Duration::from_millis(100);
const ASK_LAST: Duration = Duration::from_secs(2);

/// Longest restore: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
const RESTORE_LIMIT: Duration = Duration::from_secs(120);

/// How long CRIU may take to tell its version: it does so in milliseconds.
const CRIU_ANSWER: Duration = Duration::from_secs(5);

/// Room for the restore beside the service's own memory, bytes.
const RESTORE_OVERHEAD: u64 = 32 << 20;

/// Why the copy here was given up.
#[derive(Debug, thiserror::Error)]
pub enum DestinationError {
    /// This node said no, for these reasons.
    #[error("refused: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// The conversation broke.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// This node could not do its part.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// Pages could not be taken.
    #[error(transparent)]
    Intake(#[from] IntakeError),
    /// They could not be any more, after a while.
    #[error("{0}")]
    Pages(String),
    /// Files could not be written.
    #[error("the service's changed files cannot be written on this node")]
    Tree(#[from] tree::TreeError),
    /// CRIU hangs.
    #[error("the restore took longer than {} s", RESTORE_LIMIT.as_secs())]
    Slow,
    /// The source broke the rules of the conversation.
    #[error("the source sent {0}")]
    Protocol(&'static str),
}

from_local_causes!(
    DestinationError:
    godwit_engine::image::DigestError,
    godwit_engine::EngineError,
    godwit_network::NetworkError,
    godwit_engine::image::ImageError,
    images::ImagesError,
    crate::journal::JournalError,
    crate::local::HostError,
    tokio::task::JoinError
);

/// What an accepted offer holds until it is committed or dropped.
struct Admitted {
    service: Service,
    id: String,
    images_bytes: u64,
    memory_bytes: u64,
    missing: Vec<Layer>,
    arrival: Option<Arrival>,
    userfaultfd: bool,
    kept: Option<Arc<Kept>>,
    _memory: crate::local::Reservation,
    /// Keeps others from using the name on this node.
    _place: Place,
}

/// The memory of a service that has been restored here.
pub(crate) enum Memory {
    /// In place.
    Whole,
    /// On its way into place.
    Filling(Intake),
    /// What was in its pager only is gone, for this reason.
    Lost(String),
}

impl Memory {
    /// Pends until pages are lost; then why.
    fn loss(&self) -> impl Future<Output = String> + Send + use<> {
        let loss = match self {
            Self::Filling(intake) => Some(intake.failure()),
            Self::Whole | Self::Lost(_) => None,
        };
        async move {
            match loss {
                Some(loss) => loss.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Why pages are lost, if they are, as far as is known now.
    fn lost(&mut self) -> Option<String> {
        if let Self::Filling(intake) = self
            && let Some(reason) = intake.failed()
        {
            *self = Self::Lost(reason);
        }
        match self {
            Self::Lost(reason) => Some(reason.clone()),
            Self::Whole | Self::Filling(_) => None,
        }
    }
}

/// Serves one incoming data connection to its end. Errors are told to the source, and logged here.
pub async fn serve(local: Arc<Local>, mut link: Link) {
    let source = link.node().to_string();
    let further = match link.receive().await {
        Ok(Message::Open(open)) => return migrate(&local, link, open).await,
        Ok(Message::Join(join)) => {
            let purpose = Purpose::try_from(join.purpose).unwrap_or(Purpose::Unknown);
            local.arrivals.give(&join.migration, &source, Further::Lane(purpose, link))
        }
        Ok(Message::Resume(resume)) => {
            match local.arrivals.give(&resume.migration, &source, Further::Resumed(link)) {
                Some(Further::Resumed(link)) => {
                    answer_resume(&local, link, &resume.migration).await;
                    return;
                }
                other => other,
            }
        }
        Ok(other) => {
            tracing::warn!(%source, got = other.name(), "a data connection did not begin as it must");
            return;
        }
        Err(error) => {
            tracing::warn!(%source, error = %crate::error_chain(&error), "a data connection did not begin");
            return;
        }
    };
    if further.is_some() {
        tracing::warn!(%source, "a connection came for a migration that is not under way");
    }
}

/// The source still has pages of a migration that no task here waits for.
async fn answer_resume(local: &Local, link: Link, id: &str) {
    let entry = local.journal.get(id).ok().flatten();
    let own = entry.filter(|entry| entry.role == Role::Destination && entry.peer == link.node());
    if let Some(entry) = own.filter(|entry| entry.stage.is_final()) {
        // Its own attempt to say so had failed, or the service is lost. A lost answer is asked for again.
        let answer = match entry.reason {
            reason if reason.is_empty() => Message::Received,
            reason => Message::Abort(Reason { reason }),
        };
        let _ = link.send(answer).await;
    }
    // Else this daemon has just started, and the source tries again in a moment.
    link.close().await;
}

/// One migration to this node, from its request to its end.
async fn migrate(local: &Arc<Local>, mut link: Link, open: Open) {
    let source = link.node().to_string();
    let mut intake: Option<Intake> = None;
    let mut admitted = match admit(local, &mut link, open).await {
        Ok(admitted) => admitted,
        Err(error) => {
            if let DestinationError::Refused(reasons) = &error {
                // The connection's end tells the source the same, less well.
                let _ = link.send(Message::Refused(Refused { reasons: reasons.clone() })).await;
            }
            tracing::info!(%source, reason = %crate::error_chain(&error), "a migration was not accepted");
            link.close().await;
            return;
        }
    };
    let (service, id) = (admitted.service.clone(), admitted.id.clone());
    tracing::info!(migration = %id, service = %service.name, %source, "a service is on its way here");
    let restored = async {
        // What an earlier attempt may have left must not mix with what comes now.
        local.clear(&service).await?;
        let Some(arrival) = admitted.arrival.take() else {
            return Err(DestinationError::Protocol("a migration that was taken already"));
        };
        // Pages may be sent again and again while the service runs, but each is held once.
        let most = admitted.memory_bytes.saturating_mul(2).saturating_add(images::KERNEL_STATE_BYTES);
        let most = most.min(local.incoming_limit());
        let intake = intake.insert(Intake::start(local, &id, most, admitted.kept.take(), arrival).await?);
        let failure = intake.failure();
        tokio::select! {
            restored = until_restored(local, &mut link, &admitted, intake) => restored,
            reason = failure => Err(DestinationError::Pages(reason)),
        }
    }
    .await;
    let keep_stopped = match restored {
        Ok(keep_stopped) => keep_stopped,
        Err(error) => {
            let reason = crate::error_chain(&error);
            tracing::warn!(migration = %id, service = %service.name, %reason, "the copy is dropped");
            let memory = intake.map_or(Memory::Whole, Memory::Filling);
            let dropped = drop_copy(local, &service, &id, &reason, memory).await;
            // From here on the name is free for another attempt.
            drop(admitted);
            // The source also sees the connection close; the reason is for its user.
            let _ = link.send(Message::Abort(Reason { reason })).await;
            link.close().await;
            return log_end(&id, dropped);
        }
    };
    let mut memory = match intake {
        Some(intake) if admitted.userfaultfd => Memory::Filling(intake),
        Some(intake) => {
            if let Err(error) = intake.abandon(local, &id).await {
                tracing::warn!(migration = %id, error = %crate::error_chain(&error), "a pager that nobody needs does not end");
            }
            Memory::Whole
        }
        None => Memory::Whole,
    };
    let decided = tokio::select! {
        decided = decision(&mut link) => decided,
        reason = memory.loss() => {
            // Perhaps in time; if not, the source tells that it has committed.
            let _ = link.send(Message::Abort(Reason { reason: reason.clone() })).await;
            memory = Memory::Lost(reason);
            None
        }
    };
    match decided {
        Some(Decision::Committed) => {
            let started = start(local, &service, &id, &keep_stopped, &mut memory).await;
            if started.is_ok() {
                let word = match memory.lost() {
                    None => Message::Running,
                    Some(reason) => Message::Abort(Reason { reason }),
                };
                // The source learns it from the closed connection too, only later or less well.
                let _ = link.send(word).await;
            }
            adopt(local, &service, &id, &keep_stopped, &mut memory, started).await;
            // The name and the memory are the service's own from here on.
            drop(admitted);
            fill(local, &service, &id, memory, Some(link)).await;
        }
        Some(Decision::Kept(reason)) => {
            link.close().await;
            log_end(&id, drop_copy(local, &service, &id, &reason, memory).await);
        }
        Some(Decision::Pending) | None => {
            tracing::warn!(migration = %id, %source, "the conversation ended before the decision; asking for it");
            link.close().await;
            local.host.in_doubt(&service, &source, true).await;
            resolve(local, &service, &id, &source, &keep_stopped, memory).await;
        }
    }
}

fn log_end(id: &str, ended: Result<(), LocalError>) {
    if let Err(error) = ended {
        tracing::error!(migration = %id, error = %crate::error_chain(&error), "the end of a migration failed here");
    }
}

/// After the commit: waits until the service has all of its pages, and closes the books.
async fn fill(local: &Local, service: &Service, id: &str, memory: Memory, link: Option<Link>) {
    let mut reason = String::new();
    let mut pager = None;
    match memory {
        Memory::Whole => {}
        Memory::Lost(why) => {
            reason = kill_incomplete(local, service, id, &why).await;
            log_end(id, intake::discard(local, id).await.map_err(LocalError::from));
        }
        Memory::Filling(mut intake) => {
            if let Some(link) = link {
                intake.converse(link).await;
            }
            let filled = async {
                fault::point("destination.filling").await;
                intake.complete().await
            };
            tokio::select! {
                filled = filled => if let Err(why) = filled {
                    reason = kill_incomplete(local, service, id, &why).await;
                },
                () = ended(local, service) => {
                    tracing::info!(migration = %id, service = %service.name, "it has ended, and needs no more pages");
                }
            }
            pager = Some(intake);
        }
    }
    // First the books: as long as the pager is there, a next life of this daemon finds it complete.
    log_end(id, local.journal.set(id, Stage::Done, &reason).map_err(LocalError::from));
    if let Some(intake) = pager
        && let Err(error) = intake.abandon(local, id).await
    {
        tracing::warn!(migration = %id, error = %crate::error_chain(&error), "the service needs its pager no more, but that does not end");
    }
}

/// Returns when the service has ended, whoever ended it.
async fn ended(local: &Local, service: &Service) {
    let config = local.config(service);
    if local.engine.wait(&config).await.is_err()
        && let Ok(state) = local.engine.state(&config).await
        && state.status != ContainerStatus::Stopped
    {
        // It cannot be watched; then it is taken to live.
        std::future::pending().await
    }
}

/// A service whose memory has holes that would read as zero must not run on with them; what is said
/// of its end.
async fn kill_incomplete(local: &Local, service: &Service, id: &str, why: &str) -> String {
    let reason = format!("it was killed, as its memory is not complete: {why}");
    tracing::error!(migration = %id, service = %service.name, %reason, "the service is lost");
    local.host.lost(service, &reason).await;
    if let Err(error) = local.engine.signal(&local.config(service), libc::SIGKILL).await {
        tracing::error!(migration = %id, error = %crate::error_chain(&error), "it cannot be killed");
    }
    // Until its processes are gone the pager's guard must not be.
    ended(local, service).await;
    reason
}

async fn admit(local: &Arc<Local>, link: &mut Link, open: Open) -> Result<Admitted, DestinationError> {
    if open.protocol != PROTOCOL_VERSION {
        return Err(DestinationError::Refused(vec![format!(
            "it speaks version {PROTOCOL_VERSION} of the migration protocol and node {} version {}; install the same godwit on both",
            link.node(),
            open.protocol
        )]));
    }
    let service: Service = serde_json::from_str(&open.service)
        .map_err(|_| DestinationError::Protocol("a service description that cannot be read"))?;
    check_names(&service, &open)?;
    let (place, mut reasons) = match local.host.admit(&service).await {
        Ok(place) => (Some(place), Vec::new()),
        Err(objections) => (None, objections),
    };
    reasons.extend(machine_objections(local, &open));
    match tokio::time::timeout(CRIU_ANSWER, local.criu.version()).await {
        Ok(Ok(_)) => {}
        Ok(Err(error)) => reasons.push(crate::error_chain(&error)),
        Err(_) => reasons.push(format!(
            "CRIU at {} does not answer; run `godwit doctor` on node {}",
            local.criu.path().display(),
            local.node
        )),
    }
    for mount in &service.mounts {
        if let MountKind::Bind { source } = &mount.kind
            && !source.exists()
        {
            reasons.push(format!(
                "{}, which is mounted into the service, does not exist there",
                source.display()
            ));
        }
    }
    let missing = missing_layers(local, &open, &mut reasons)?;
    let disk = missing.iter().map(|l| l.bytes.saturating_mul(3)).sum::<u64>().saturating_add(open.tree_bytes);
    let free = local.store.available_bytes()?;
    if disk > free {
        reasons.push(format!(
            "its disk has {} MiB free and {} MiB are needed",
            free >> 20,
            disk.div_ceil(1 << 20)
        ));
    }
    let memory = match local.reserve(open.memory_bytes.saturating_add(RESTORE_OVERHEAD)) {
        Ok(memory) => Some(memory),
        Err(reason) => {
            reasons.push(reason);
            None
        }
    };
    let (Some(memory), Some(place), []) = (memory, place, reasons.as_slice()) else {
        return Err(DestinationError::Refused(reasons));
    };
    local.journal.begin(&open.migration, Role::Destination, link.node(), &service)?;
    let missing_layers = missing.iter().map(|l| l.digest.clone()).collect();
    let (userfaultfd, kept) = (local.userfaultfd, local.keeper.of(&service.id));
    let arrival = local.arrivals.expect(&open.migration, link.node(), &service.name);
    let admitted = Admitted {
        service,
        id: open.migration,
        memory_bytes: open.memory_bytes,
        arrival: Some(arrival),
        userfaultfd,
        kept,
        images_bytes: open.images_bytes,
        missing,
        _memory: memory,
        _place: place,
    };
    fault::point("destination.reserved").await;
    let kept = admitted.kept.is_some();
    link.send(Message::Accepted(Accepted { missing_layers, userfaultfd, kept })).await?;
    if let Some(kept) = &admitted.kept {
        for pages in kept.messages() {
            link.send(Message::KeptPages(pages)).await?;
        }
        link.send(Message::KeptEnd).await?;
    }
    Ok(admitted)
}

/// Names become paths here: only plain ones are let in.
fn check_names(service: &Service, open: &Open) -> Result<(), DestinationError> {
    let plain = |name: &str| {
        (1..=63).contains(&name.len())
            && name.as_bytes()[0].is_ascii_alphanumeric()
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
    };
    if !plain(&service.name) || !plain(&open.migration) || !plain(&service.id) {
        return Err(DestinationError::Protocol("a name that cannot be a file name"));
    }
    Ok(())
}

fn machine_objections(local: &Local, open: &Open) -> Vec<String> {
    let here = machine();
    if here != open.machine {
        return vec![format!(
            "its instruction set is {here} and the service runs on {}; only programs built for both can move",
            open.machine
        )];
    }
    let flags = cpu_flags();
    let lacking: Vec<_> = open.cpu_flags.iter().filter(|flag| !flags.contains(flag)).cloned().collect();
    if lacking.is_empty() {
        return Vec::new();
    }
    vec![format!("the CPU of node {} lacks {} that the service may use", local.node, lacking.join(", "))]
}

fn missing_layers(
    local: &Local,
    open: &Open,
    reasons: &mut Vec<String>,
) -> Result<Vec<Layer>, DestinationError> {
    let mut missing = Vec::new();
    for layer in &open.layers {
        if !local.store.has_layer(&layer.digest.parse::<Digest>()?) && !missing.contains(layer) {
            if layer.bytes == 0 {
                reasons
                    .push(format!("layer {} is missing there and the source cannot send it", layer.digest));
            }
            missing.push(layer.clone());
        }
    }
    Ok(missing)
}

/// Everything up to `Restored`; returns the processes that stay stopped.
async fn until_restored(
    local: &Arc<Local>,
    link: &mut Link,
    admitted: &Admitted,
    intake: &mut Intake,
) -> Result<Vec<u32>, DestinationError> {
    let service = &admitted.service;
    for layer in &admitted.missing {
        receive_layer(local, link, layer).await?;
        link.send(Message::LayerStored).await?;
    }
    local.make_directories(service, true)?;
    local.overlay.create_endpoint(&service.endpoint()).await?;
    let upper = local.layout.upper(&service.name);
    receive_tree(link, &upper).await?;
    sync(upper).await?;
    fault::point("destination.prepared").await;
    link.send(Message::TreeApplied).await?;

    let room = Room::open(
        &local.layout.migration(&admitted.id),
        &local.layout.criu_logs(&admitted.id),
        admitted.images_bytes,
    )?;
    let restored = receive_and_restore(local, link, admitted, intake, &room).await;
    room.close(restored.is_ok())?;
    let keep_stopped = restored?;
    local.journal.set_keep_stopped(&admitted.id, &keep_stopped)?;
    local.journal.set(&admitted.id, Stage::Restored, "")?;
    fault::point("destination.restored").await;
    if admitted.userfaultfd {
        // What is lost from here on is lost for good.
        intake.is_alive().await?;
    }
    link.send(Message::Restored).await?;
    Ok(keep_stopped)
}

async fn receive_layer(local: &Local, link: &mut Link, layer: &Layer) -> Result<(), DestinationError> {
    match link.receive().await? {
        Message::LayerBegin(begun) if begun == *layer => {}
        other => return Err(link.unexpected(&other, "LayerBegin").into()),
    }
    let digest = layer.digest.parse::<Digest>()?;
    let mut writer = local.store.blob_writer(&digest, layer.bytes)?;
    loop {
        match link.receive().await? {
            Message::LayerData(data) => writer.write_all(&data).map_err(|source| LocalError::Io {
                action: "write the blob of layer",
                path: layer.digest.clone().into(),
                source,
            })?,
            Message::LayerEnd => break,
            other => return Err(link.unexpected(&other, "LayerData").into()),
        }
    }
    // Hashing, unpacking and waiting for the disk would hold up other tasks of this thread.
    tokio::task::block_in_place(|| {
        writer.finish()?;
        local.store.unpack(&digest)
    })?;
    Ok(())
}

async fn receive_tree(link: &mut Link, upper: &std::path::Path) -> Result<(), DestinationError> {
    match link.receive().await? {
        Message::TreeBegin => {}
        other => return Err(link.unexpected(&other, "TreeBegin").into()),
    }
    receive_tree_items(link, upper).await
}

async fn receive_tree_items(link: &mut Link, upper: &std::path::Path) -> Result<(), DestinationError> {
    let limits = tree::Limits { entries: MAX_TREE_ENTRIES, bytes: MAX_TREE_BYTES };
    let mut receiver = tree::Receiver::new(upper, limits)?;
    loop {
        match link.receive().await? {
            Message::TreeItem(item) => {
                receiver.apply(
                    tree::Item::decode(&item).map_err(|_| DestinationError::Protocol("a damaged file"))?,
                )?;
            }
            Message::TreeEnd => return Ok(receiver.finish()?),
            other => return Err(link.unexpected(&other, "TreeItem").into()),
        }
    }
}

/// Waits until files are on the disk: what the service had synced at the source must not be lost
/// by a crash of this machine after the commit.
async fn sync(upper: PathBuf) -> Result<(), DestinationError> {
    Ok(tokio::task::spawn_blocking(move || tree::sync(&upper)).await??)
}

async fn receive_and_restore(
    local: &Local,
    link: &mut Link,
    admitted: &Admitted,
    intake: &mut Intake,
    room: &Room,
) -> Result<Vec<u32>, DestinationError> {
    let service = &admitted.service;
    let upper = local.layout.upper(&service.name);
    receive_pending(link, intake).await?;
    receive_tree_items(link, &upper).await?;
    // On the disk before the commit, beside the images' way here.
    let synced = tokio::spawn(sync(upper));
    local.mount_root(service)?;
    let mut images = images::Receiver::new(&room.images(), admitted.images_bytes);
    let mut log = LogWriter::new(local, service);
    let ImagesEnd { files, keep_stopped } = loop {
        fault::point("destination.receiving").await;
        match link.receive().await? {
            Message::LogData(data) => log.write(false, &data)?,
            Message::OldLogData(data) => log.write(true, &data)?,
            Message::ImageData(piece) => images.apply(&piece)?,
            Message::ImagesEnd(end) => break end,
            other => return Err(link.unexpected(&other, "ImageData").into()),
        }
    };
    images.finish(&files)?;
    link.send(Message::ImagesReceived).await?;
    fault::point("destination.received").await;
    let restoring = async {
        if admitted.userfaultfd {
            intake.listen(&room.work()).await?;
        } else {
            plain::complete(intake, &room.images()).await?;
        }
        let request = RestoreRequest {
            config: local.config(service),
            images: room.images(),
            work: room.work(),
            lazy_pages: admitted.userfaultfd,
        };
        let restoring = tokio::time::timeout(RESTORE_LIMIT, local.engine.restore_stopped(&request));
        restoring.await.map_err(|_| DestinationError::Slow)??;
        if admitted.userfaultfd {
            intake.push().await?;
        }
        Ok::<_, DestinationError>(())
    };
    tokio::select! {
        restored = restoring => restored?,
        // The source has given up or cannot be heard: what CRIU has made so far goes with the copy.
        word = link.receive() => return Err(match word {
            Ok(other) => link.unexpected(&other, "nothing").into(),
            Err(error) => error.into(),
        }),
    };
    synced.await??;
    fault::point("destination.restoring").await;
    Ok(keep_stopped)
}

/// Which pages are still to come; ends with the first message of what follows.
async fn receive_pending(link: &mut Link, intake: &Intake) -> Result<(), DestinationError> {
    loop {
        match link.receive().await? {
            Message::Pending(ranges) => intake.pending(ranges).await?,
            Message::PendingEnd => {
                // Now all its pages are known. After the commit it would be too late to have no room.
                intake.fits().await?;
                link.send(Message::PendingEnd).await?;
            }
            Message::TreeBegin => return Ok(()),
            other => return Err(link.unexpected(&other, "TreeBegin").into()),
        }
    }
}

/// Takes over the service's log.
struct LogWriter {
    paths: [PathBuf; 2],
    written: [u64; 2],
}

impl LogWriter {
    fn new(local: &Local, service: &Service) -> Self {
        Self { paths: local.log_files(service), written: [0; 2] }
    }

    fn write(&mut self, old: bool, data: &[u8]) -> Result<(), DestinationError> {
        let which = usize::from(!old);
        let (path, written) = (&self.paths[which], &mut self.written[which]);
        *written += data.len() as u64;
        if *written > MAX_LOG_BYTES {
            return Err(DestinationError::Protocol("a log that is too long"));
        }
        let mut options = OpenOptions::new();
        let opened = options.create(true).append(true).mode(0o600).open(path);
        opened
            .and_then(|mut file| file.write_all(data))
            .map_err(|source| LocalError::Io { action: "write", path: path.clone(), source }.into())
    }
}

/// The source's decision, or nothing when the connection ended without one.
async fn decision(link: &mut Link) -> Option<Decision> {
    match link.receive().await {
        Ok(Message::Commit) => Some(Decision::Committed),
        Err(LinkError::Aborted { reason, .. }) => Some(Decision::Kept(reason)),
        Ok(other) => {
            tracing::warn!(got = other.name(), "the source sent something else than its decision");
            None
        }
        Err(error) => {
            tracing::debug!(error = %crate::error_chain(&error), "no decision on the connection");
            None
        }
    }
}

/// The service is this node's: opens the port and lets it run. Safe to do again after a crash.
async fn start(
    local: &Local,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: &mut Memory,
) -> Result<(), LocalError> {
    fault::point("destination.committing").await;
    local.journal.set(id, Stage::Committed, "")?;
    fault::point("destination.committed").await;
    if memory.lost().is_some() {
        // It is this node's to end.
        return Ok(());
    }
    // Whoever goes on from here has all of it.
    local.keeper.forget(&service.id);
    local.overlay.open(&service.endpoint()).await?;
    match local.engine.cont(&local.config(service), keep_stopped).await {
        // The machine was restarted since: the service is this node's, and has ended.
        Err(EngineError::NotFound(_)) => Ok(()),
        done => Ok(done?),
    }
}

/// Makes the service this node's in every book. It is, whatever fails: what failed is tried again
/// until it is done, and said meanwhile.
async fn adopt(
    local: &Local,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: &mut Memory,
    started: Result<(), LocalError>,
) {
    let mut started = started;
    let mut pause = ASK_FIRST;
    loop {
        let adopted = match started {
            Ok(()) => local.host.adopt(service).await.map_err(LocalError::from),
            Err(error) => Err(error),
        };
        let Err(error) = adopted else { return };
        tracing::error!(
            migration = %id,
            service = %service.name,
            error = %crate::error_chain(&error),
            "the service is committed to this node, which cannot start it; trying again"
        );
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(ASK_LAST);
        started = start(local, service, id, keep_stopped, memory).await;
    }
}

/// All of it, for a migration whose source has said that it committed.
pub(crate) async fn take_over(
    local: &Local,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let memory = own(local, service, id, keep_stopped, memory).await;
    fill(local, service, id, memory, None).await;
}

async fn own(local: &Local, service: &Service, id: &str, keep_stopped: &[u32], memory: Memory) -> Memory {
    let mut memory = memory;
    let started = start(local, service, id, keep_stopped, &mut memory).await;
    adopt(local, service, id, keep_stopped, &mut memory, started).await;
    memory
}

/// The memory of a service that arrived in an earlier life of this daemon.
pub(crate) async fn reattach(local: &Local, id: &str, arrival: Arrival) -> Memory {
    match Intake::attach(local, id, arrival).await {
        Ok(Some(intake)) => Memory::Filling(intake),
        Ok(None) => Memory::Whole,
        Err(error) => Memory::Lost(crate::error_chain(&error)),
    }
}

/// Removes everything that came here of a service that stays where it was.
pub(crate) async fn drop_copy(
    local: &Local,
    service: &Service,
    id: &str,
    reason: &str,
    memory: Memory,
) -> Result<(), LocalError> {
    fault::point("destination.dropping").await;
    local.clear(service).await?;
    images::remove(&local.layout.migration(id))?;
    match memory {
        Memory::Whole => {}
        Memory::Filling(intake) => intake.abandon(local, id).await?,
        Memory::Lost(_) => intake::discard(local, id).await?,
    }
    local.journal.set(id, Stage::Dropped, reason)?;
    Ok(())
}

/// Asks the source of a migration that is said to be in doubt until it answers, and does what it says.
pub(crate) async fn resolve(
    local: &Arc<Local>,
    service: &Service,
    id: &str,
    source: &str,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let mut pause = ASK_FIRST;
    let ended = loop {
        match local.host.decision(source, id).await {
            Ok(Decision::Committed) => {
                let memory = own(local, service, id, keep_stopped, memory).await;
                // Not before it is this node's own in the books: somebody might point the network at
                // its source meanwhile.
                local.host.in_doubt(service, source, false).await;
                fill(local, service, id, memory, None).await;
                return;
            }
            Ok(Decision::Kept(reason)) => break drop_copy(local, service, id, &reason, memory).await,
            Ok(Decision::Pending) => {}
            Err(error) => tracing::debug!(migration = %id, %source, %error, "the source does not answer"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(ASK_LAST);
    };
    local.host.in_doubt(service, source, false).await;
    log_end(id, ended);
}
