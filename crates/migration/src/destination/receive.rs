//! What comes before the commit: layers, files, images and the log, and the restore from them, up to
//! stopped processes that only wait for the commit.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_database::blocking::off_worker;
use godwit_engine::{BegunRestore, ContainerConfig, RestoreRequest, files, tree};
use tokio::sync::mpsc;

use super::admit::Admitted;
use super::layers::receive_layers;
use super::log::LogWriter;
use super::page_receiver::{PageReceiver, PageReceiverError, Shared};
use super::{DestinationError, cross, plain};
use crate::ahead::{Held, MOST_NAMES, MOST_PATH_BYTES};
use crate::databases::{self, Remembered};
use crate::failpoint;
use crate::images::{self, ImageTmpfs};
use crate::link::{Link, LinkError};
use crate::message::{FilesHere, ImagesEnd, MOST_TMPFS_NAMES, Message, Reached, Step, TmpfsBegin};
use crate::page_hash::PageKey;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;
use crate::standstill::read_doubts;

/// Longest restore: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
pub(super) const RESTORE_LIMIT: Duration = Duration::from_secs(120);

/// Everything up to `Restored`; returns the processes that stay stopped, and where their images are: unmounting them may
/// wait for the kernel for milliseconds, so that it comes after the service runs.
pub(super) async fn until_restored(
    local: &Arc<NodeResources>,
    link: &mut Link,
    admitted: &Admitted,
    receiver: &mut PageReceiver,
    files: Option<Held>,
) -> Result<(Vec<u32>, ImageTmpfs), DestinationError> {
    let service = &admitted.service;
    receive_layers(local, link, service, &admitted.missing, admitted.registry.as_ref()).await?;
    if let Some(crossing) = &admitted.crossing {
        // Only now all of them are here.
        refused(crossing.objections(local, service, None)?)?;
    }
    local.make_directories(service, Some(&admitted.may_have)).await?;
    local.network.plug(service).await?;
    // The source sends what comes for the service as soon as that is frozen.
    local.network.hold_for(service).await?;
    local.standstills.stand_ready(service).await?;
    local.standstills.stand_apart(service)?;
    let upper = local.changed_files(service)?;
    receive_tree(link, &upper, admitted.tree, files).await?;
    if let Some(crossing) = &admitted.crossing {
        refused(crossing.objections(local, service, Some(&upper))?)?;
    }
    sync(upper).await?;
    check_files(local, service)?;
    if admitted.userfaultfd
        && let Err(error) = local.criu.stay_warm().await
    {
        // What may go wrong without is found before the commit.
        tracing::warn!(error = %crate::error_chain(&error), "CRIU has no cache of the kernel's features, and probes for them at this restore");
    }
    let tmpfs = ImageTmpfs::open(
        &local.mounts,
        &local.layout.migration(&admitted.id),
        &local.layout.criu_logs(&admitted.id),
        admitted.images_bytes,
    )?;
    match restore_and_tell(local, link, admitted, receiver, &tmpfs).await {
        Ok(keep_stopped) => Ok((keep_stopped, tmpfs)),
        Err(error) => {
            tmpfs.close(false)?;
            Err(error)
        }
    }
}

fn refused(reasons: Vec<String>) -> Result<(), DestinationError> {
    if reasons.is_empty() { Ok(()) } else { Err(DestinationError::Refused(reasons)) }
}

async fn restore_and_tell(
    local: &NodeResources,
    link: &mut Link,
    admitted: &Admitted,
    receiver: &mut PageReceiver,
    tmpfs: &ImageTmpfs,
) -> Result<Vec<u32>, DestinationError> {
    let keep_stopped = receive_and_restore(local, link, admitted, receiver, tmpfs).await?;
    if !admitted.userfaultfd {
        receiver.is_spare(local, &admitted.id)?;
    }
    Steps::of(link, admitted).reached(Step::Noting).await?;
    let begun = Instant::now();
    local.journal.set_restored(&admitted.id, &keep_stopped)?;
    admitted.timeline.note("journal", begun);
    failpoint::point("destination.restored").await;
    if admitted.userfaultfd {
        // What is lost from here on is lost for good.
        receiver.is_alive().await?;
    }
    admitted.timeline.tells();
    link.send(Message::Restored).await?;
    Ok(keep_stopped)
}

/// What the source sends before the first round, if not that: where it asks for them, it is told which files are here.
pub(super) async fn first_of_tree(
    link: &mut Link,
    files: Option<&mut Held>,
) -> Result<Message, DestinationError> {
    let first = link.receive().await?;
    let Some(files) = files.filter(|_| matches!(first, Message::TellFiles)) else { return Ok(first) };
    let Some(asked) = files.path().map(Path::to_owned) else { return Ok(first) };
    let (sender, node) = (link.sender(), link.node().to_owned());
    let telling = tokio::task::spawn_blocking(move || {
        let key = PageKey::random();
        let send = |message| sender.blocking_send(message).map_err(|_| LinkError::Closed(node.clone()));
        send(Message::FilesHere(FilesHere { key: key.bytes().to_vec().into() }))?;
        let hash = tree::BlockHash::new(move |block| key.hash_block(block));
        let (most, reader) = ((MOST_NAMES, MOST_PATH_BYTES), sender.clone());
        let wanted = tree::Wanted::new(move || !reader.is_closed());
        tree::list(&asked, (&hash, &wanted), most, &mut |listed: tree::Listed| {
            send(Message::FileHere(listed.encode().into()))
        })?;
        Ok::<_, DestinationError>(send(Message::FilesHereEnd)?)
    });
    if let Err(error) = telling.await? {
        // What cannot be read now is not in the way of the next try.
        files.drop_it();
        return Err(error);
    }
    Ok(link.receive().await?)
}

/// The first round: into an empty directory, or onto files that are here, which are of no further use without it.
async fn receive_tree(
    link: &mut Link,
    upper: &Path,
    limits: tree::Limits,
    mut files: Option<Held>,
) -> Result<(), DestinationError> {
    match (first_of_tree(link, files.as_mut()).await?, files) {
        (Message::TreeBegin, files) => {
            if let Some(mut files) = files {
                files.drop_it();
            }
        }
        (Message::TreeOnto, Some(files)) if files.path().is_some() => off_worker(|| files.put_in(upper))?,
        (other, _) => return Err(link.unexpected(&other, "TreeBegin").into()),
    }
    receive_tree_items(link, upper, limits).await.map(drop)
}

pub(super) async fn receive_tree_items(
    link: &mut Link,
    upper: &Path,
    limits: tree::Limits,
) -> Result<tree::Written, DestinationError> {
    receive_items(link, tree::Receiver::new(upper, limits)?, |_| Ok(())).await
}

/// Each item is applied if its encoded bytes may come.
async fn receive_items(
    link: &mut Link,
    mut receiver: tree::Receiver,
    mut may_come: impl FnMut(u64) -> Result<(), DestinationError>,
) -> Result<tree::Written, DestinationError> {
    loop {
        match link.receive().await? {
            Message::TreeItem(item) => {
                may_come(item.len() as u64)?;
                let item =
                    tree::Item::decode(&item).map_err(|_| DestinationError::Protocol("a damaged file"))?;
                off_worker(|| receiver.apply(item))?;
            }
            Message::TreeEnd => return Ok(off_worker(|| receiver.finish())?),
            other => return Err(link.unexpected(&other, "TreeItem").into()),
        }
    }
}

/// What has come is used by paths in it.
fn check_files(local: &NodeResources, service: &Service) -> Result<(), DestinationError> {
    let mounted: Vec<_> = service.files_of_volumes().collect();
    Ok(files::check(&local.layout.service(&service.name), &service.volumes().collect(), &mounted)?)
}

/// Waits until files are on the disk: what the service had synced at the source must not be lost
/// by a crash of this machine after the commit.
async fn sync(upper: PathBuf) -> Result<(), DestinationError> {
    Ok(tokio::task::spawn_blocking(move || tree::sync(&upper)).await??)
}

async fn receive_and_restore(
    local: &NodeResources,
    link: &mut Link,
    admitted: &Admitted,
    receiver: &mut PageReceiver,
    images: &ImageTmpfs,
) -> Result<Vec<u32>, DestinationError> {
    let (service, timeline) = (&admitted.service, &admitted.timeline);
    let request = RestoreRequest {
        config: local.config(service),
        images: images.images(),
        work: images.work(),
        lazy_pages: admitted.userfaultfd,
    };
    let tmpfs = mount_tmpfs(local, &request)?;
    let mut begun = tokio::select! {
        begun = begin(local, admitted, &request) => begun?,
        error = given_up(link) => return Err(error),
    };
    try_storage(local, admitted)?;
    failpoint::point("destination.prepared").await;
    link.send(Message::TreeApplied).await?;
    let upper = local.changed_files(service)?;
    let mut log = LogWriter::new(local.log_files(service));
    let filling = EndsFiller(receiver.shared().clone());
    let pages = receive_while_running(
        local,
        link,
        (admitted, receiver),
        (&mut begun, &request),
        (&mut log, &upper, &tmpfs),
    )
    .await?;
    let written = receive_tree_items(link, &upper, admitted.tree).await?;
    // On the disk before the commit, beside the images' way here.
    let synced = tokio::task::spawn_blocking(move || written.sync());
    let mounting = Instant::now();
    check_files(local, service)?;
    local.mount_root(service)?;
    timeline.note("mount root", mounting);
    let mut images = images::Receiver::new(&request.images, admitted.images_bytes);
    let mut names = Names { places: &tmpfs, named: BTreeSet::new(), bytes: 0 };
    let ImagesEnd { files, keep_stopped, at_rest, remembered } = loop {
        failpoint::point("destination.receiving").await;
        match link.receive().await? {
            piece @ (Message::LogData(_) | Message::OldLogData(_) | Message::LogRotated) => {
                log.take(&piece)?
            }
            Message::ImageData(piece) => {
                // They lie in memory, as the pages do.
                let bytes = pages.saturating_add(images.bytes()).saturating_add(piece.data.len() as u64);
                let bytes = bytes.saturating_add(names.bytes);
                local.hold(&admitted.memory, bytes).map_err(DestinationError::Memory)?;
                images.apply(&piece)?;
            }
            Message::TmpfsBegin(TmpfsBegin { number }) => {
                let before = pages.saturating_add(images.bytes());
                names.receive(local, link, (admitted, receiver), number, before).await?;
            }
            Message::ImagesEnd(end) => break end,
            other => return Err(link.unexpected(&other, "ImageData").into()),
        }
    };
    images.finish(&files)?;
    receiver.shared().link_in(&request.shared())?;
    // It must not be taken for a process of the service.
    let filling = tokio::task::spawn_blocking(move || filling.0.end_filler());
    timeline.tells();
    link.send(Message::ImagesReceived).await?;
    let (images, name) = (request.images.clone(), service.name.clone());
    let mut reading = tokio::task::spawn_blocking(move || read_doubts(&images, &name));
    let mut doubts = None;
    failpoint::point("destination.received").await;
    let steps = Steps::of(link, admitted);
    let restoring = async {
        let since = Instant::now();
        plain::bring_copied(receiver, &request.images).await?;
        if let Some(crossing) = &admitted.crossing {
            steps.reached(Step::Rewriting).await?;
            failpoint::point("destination.rewriting").await;
            // That reads an image which is written now.
            doubts = Some((&mut reading).await?);
            let rewritten = crossing.rewrite((local, service, timeline), &request.images, at_rest).await?;
            receiver.leave_out(cross::left_out(&rewritten)).await?;
        }
        if admitted.userfaultfd {
            steps.reached(Step::Preparing).await?;
            receiver.know_images(&request.images).await?;
            receiver.listen(&request.work).await?;
        } else {
            steps.reached(Step::Collecting).await?;
            plain::complete(receiver, &request.images).await?;
        }
        timeline.note("prepare", since);
        steps.reached(Step::Restoring).await?;
        let since = Instant::now();
        let restoring = async {
            match begun {
                Some(begun) => begun.finish().await,
                None => local.engine.restore_stopped(&request).await,
            }
        };
        tokio::time::timeout(RESTORE_LIMIT, restoring).await.map_err(|_| DestinationError::Slow)??;
        timeline.note("restore", since);
        let since = Instant::now();
        filling.await??;
        if admitted.userfaultfd {
            steps.reached(Step::Checking).await?;
            let processes = local.engine.processes(&request.config).await?;
            receiver.push(processes).await?;
        }
        correct(local, service, &request.config, remembered).await?;
        timeline.note("check", since);
        Ok::<_, DestinationError>(())
    };
    tokio::select! {
        restored = restoring => restored?,
        // What CRIU has made so far goes with the copy.
        error = given_up(link) => return Err(error),
    };
    has_what_was_checked(local, admitted).await?;
    let doubts = match doubts {
        Some(doubts) => doubts,
        None => reading.await?,
    };
    local.standstills.look_at_doubts(service, doubts);
    steps.reached(Step::Syncing).await?;
    let begun = Instant::now();
    synced.await??;
    timeline.note("sync", begun);
    failpoint::point("destination.restoring").await;
    Ok(keep_stopped)
}

/// Corrects what its processes remember of files of databases. What cannot be corrected is told to the user.
async fn correct(
    local: &NodeResources,
    service: &Service,
    config: &ContainerConfig,
    remembered: Vec<Remembered>,
) -> Result<(), DestinationError> {
    if remembered.is_empty() {
        return Ok(());
    }
    let processes = local.engine.processes(config).await?;
    let correcting = tokio::task::spawn_blocking(move || databases::correct(&processes, &remembered));
    let corrected = tokio::time::timeout(RESTORE_LIMIT, correcting);
    if let Some(failed) = corrected.await.map_err(|_| DestinationError::Slow)?? {
        local.cluster.told(service, &failed).await;
    }
    Ok(())
}

/// Mounts each tmpfs that the service is defined with, so that its contents can come while the service runs. They lie
/// below the directory of the images, and go with it; a restore binds those that it needs.
fn mount_tmpfs(local: &NodeResources, request: &RestoreRequest) -> Result<Vec<PathBuf>, DestinationError> {
    let places = request.tmpfs();
    for (place, defined) in places.iter().zip(request.config.tmpfs()) {
        let failed = |action| {
            let path = place.clone();
            move |source| LocalError::Io { action, path, source }
        };
        std::fs::create_dir_all(place).map_err(failed("create"))?;
        local.mounts.mount_tmpfs(place, &defined).map_err(failed("mount a tmpfs on"))?;
    }
    Ok(places)
}

/// Bytes that come before memory for them is asked for again: what one file takes is little, and there may be many.
const HOLD_EVERY: u64 = 1 << 20;

/// The names of each tmpfs.
struct Names<'a> {
    places: &'a [PathBuf],
    /// Whose names have come.
    named: BTreeSet<u32>,
    /// What has come, bytes.
    bytes: u64,
}

impl Names<'_> {
    /// Takes the names in a tmpfs, and the content of small files. They lie in memory, beside what came `before`.
    async fn receive(
        &mut self,
        local: &NodeResources,
        link: &mut Link,
        (admitted, receiver): (&Admitted, &PageReceiver),
        number: u32,
        before: u64,
    ) -> Result<(), DestinationError> {
        let place = usize::try_from(number).ok().and_then(|number| self.places.get(number));
        let (Some(place), true) = (place, self.named.insert(number)) else {
            return Err(DestinationError::Protocol("a tmpfs that the service does not have, or has twice"));
        };
        // Of content; all else of a name counts as what its item takes.
        let limits =
            tree::Limits { entries: MOST_TMPFS_NAMES, bytes: admitted.images_bytes, ..admitted.tree };
        let names = tree::Receiver::new(place, limits)?.with(receiver.shared().files_of(number));
        let (bytes, mut asked) = (&mut self.bytes, 0);
        let may_come = |more: u64| {
            *bytes = bytes.saturating_add(more);
            if *bytes > admitted.images_bytes {
                return Err(DestinationError::Protocol("more in its tmpfs than was announced"));
            }
            if *bytes >= asked {
                asked = *bytes + HOLD_EVERY;
                local
                    .hold(&admitted.memory, before.saturating_add(asked))
                    .map_err(DestinationError::Memory)?;
            }
            Ok(())
        };
        receive_items(link, names, may_come).await.map(drop)
    }
}

/// Pends while the source waits; then how it has given up, or that it is silent.
pub(super) async fn given_up(link: &mut Link) -> DestinationError {
    match link.receive().await {
        Ok(other) => link.unexpected(&other, "nothing").into(),
        Err(error) => error.into(),
    }
}

/// Begins the restore while the service still runs at its source, if that has told enough for it.
async fn begin(
    local: &NodeResources,
    admitted: &Admitted,
    request: &RestoreRequest,
) -> Result<Option<Box<dyn BegunRestore>>, DestinationError> {
    let Some(pipes) = admitted.output_pipes else { return Ok(None) };
    let beginning = local.engine.begin_restore(request.clone(), pipes);
    let begun =
        tokio::time::timeout(RESTORE_LIMIT, beginning).await.map_err(|_| DestinationError::Slow)??;
    Ok(Some(begun))
}

/// Whoever restored the service has followed paths of this node: it is to have what those led to when it was admitted.
async fn has_what_was_checked(local: &NodeResources, admitted: &Admitted) -> Result<(), DestinationError> {
    if admitted.checked.is_empty() {
        return Ok(());
    }
    let has = local.mount_namespace(&admitted.service).await?;
    let reasons: Vec<_> =
        off_worker(|| admitted.checked.iter().filter_map(|checked| checked.objection(&has)).collect());
    if reasons.is_empty() { Ok(()) } else { Err(DestinationError::Refused(reasons)) }
}

/// Tries storage that an engine has mounted for the container: the source has put its files into it.
fn try_storage(local: &NodeResources, admitted: &Admitted) -> Result<(), DestinationError> {
    let tried = admitted.to_try.iter().filter_map(|volume| volume.objection(&admitted.id, &local.node));
    let reasons: Vec<_> = tried.collect();
    if reasons.is_empty() { Ok(()) } else { Err(DestinationError::Refused(reasons)) }
}

/// What comes before the last round of files: which pages are still to come, the log so far, and rounds of files while
/// the service runs. Ends with the first message of the last round, and tells how many bytes all pages have.
async fn receive_while_running(
    local: &NodeResources,
    link: &mut Link,
    (admitted, receiver): (&Admitted, &PageReceiver),
    (begun, request): (&mut Option<Box<dyn BegunRestore>>, &RestoreRequest),
    (log, upper, tmpfs): (&mut LogWriter, &Path, &[PathBuf]),
) -> Result<u64, DestinationError> {
    let mut pages = 0;
    let mut again = Again::of(begun.as_deref());
    loop {
        let message = tokio::select! {
            message = link.receive() => message?,
            // What is charged to it stays with it.
            () = again.due(), if !receiver.shared().is_charged() => {
                drop(begun.take());
                *begun = begin(local, admitted, request).await?;
                again = Again::of(begun.as_deref());
                continue;
            }
        };
        match message {
            Message::Pending(ranges) => receiver.pending(ranges).await?,
            Message::PendingEnd => {
                // Now all its pages are known. After the commit it would be too late to refuse them.
                pages = receiver.fits().await?;
                local.hold(&admitted.memory, pages).map_err(DestinationError::Memory)?;
                link.send(Message::PendingEnd).await?;
            }
            Message::Segments(segments) => {
                let is_charged = segments.all.iter().any(|segment| segment.process.is_none());
                if is_charged && admitted.service.memory_bytes != 0 {
                    charge(local, receiver, begun.as_deref()).await?;
                }
                // Giving up a large one takes the kernel a while.
                off_worker(|| receiver.shared().make(segments, tmpfs))?;
                link.send(Message::SegmentsMade).await?;
            }
            piece @ (Message::LogData(_) | Message::OldLogData(_) | Message::LogRotated) => {
                log.take(&piece)?
            }
            Message::TreeAgain => {
                let written = receive_tree_items(link, upper, admitted.tree).await?;
                tokio::task::spawn_blocking(move || written.sync()).await??;
                link.send(Message::TreeApplied).await?;
            }
            Message::TreeBegin => return Ok(pages),
            other => return Err(link.unexpected(&other, "TreeBegin").into()),
        }
    }
}

/// When a restore that has begun is to be begun again.
struct Again(Option<tokio::time::Instant>);

impl Again {
    fn of(begun: Option<&dyn BegunRestore>) -> Self {
        Self(begun.and_then(BegunRestore::patience).map(|patience| tokio::time::Instant::now() + patience))
    }

    async fn due(&self) {
        match self.0 {
            Some(due) => tokio::time::sleep_until(due).await,
            None => std::future::pending().await,
        }
    }
}

/// Has a process in the service's memory cgroup charged for the shared memory that comes.
async fn charge(
    local: &NodeResources,
    receiver: &PageReceiver,
    begun: Option<&dyn BegunRestore>,
) -> Result<(), DestinationError> {
    if receiver.shared().is_charged() {
        return Ok(());
    }
    let begun =
        begun.ok_or(DestinationError::Protocol("shared memory that cannot be charged to the service"))?;
    let pagers = Arc::clone(&local.pagers);
    let filler = tokio::task::spawn_blocking(move || pagers.filler()).await?;
    let filler = filler.map_err(PageReceiverError::Shared)?;
    begun.charge(filler.pid())?;
    receiver.shared().charge_to(filler);
    Ok(())
}

/// Whatever fails meanwhile, no filler stays in the cgroup of the service.
struct EndsFiller(Shared);

impl Drop for EndsFiller {
    fn drop(&mut self) {
        // Nothing is to be restored any more, where this does anything.
        let _ = self.0.end_filler();
    }
}

/// Tells the source, if it asked for that, what this node has begun to do.
struct Steps(Option<(mpsc::Sender<Message>, String)>);

impl Steps {
    fn of(link: &Link, admitted: &Admitted) -> Self {
        Self(admitted.steps.then(|| (link.sender(), link.node().to_owned())))
    }

    async fn reached(&self, step: Step) -> Result<(), LinkError> {
        let Some((sender, node)) = &self.0 else { return Ok(()) };
        let reached = Message::Step(Reached { step: step.into() });
        sender.send(reached).await.map_err(|_| LinkError::Closed(node.clone()))
    }
}
