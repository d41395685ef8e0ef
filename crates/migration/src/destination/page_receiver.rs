//! Pages on their way into a service of this node: its pager, and the streams that feed it.
//!
//! ```text
//! streams ── Pages ──▶ [checked, unpacked] ──▶ godwit-pager ──▶ the service's processes
//! fault stream ◀── FaultRequest ── PageReceiver ◀── Fault ──┘
//! ```
//! The pager outlives this daemon; a next one attaches to it again ([`PageReceiver::attach`]). A stream that
//! breaks is the source's affair: it connects again, and is told what is missing.

mod shared;
mod stream;
mod waiting;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use godwit_criu::images::{ImageError, RestoredPages, restored_pages, wiped_areas};
use godwit_memory::pager::{Client, Event, Events, Extent, PagerError, Restored, Stored};
use godwit_memory::process::{Process, ProcessError};
use godwit_memory::{PAGE_SIZE, Range, Space};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_util::task::AbortOnDropHandle;

use crate::arrivals::{Arrival, FurtherConnection};
use crate::link::{Link, LinkError};
use crate::message::{FaultRequest, Message, PageRanges, Purpose};
use crate::resources::{LocalError, NodeResources};
use crate::retained::{Retained, RetainedError};
pub(crate) use shared::Shared;
use shared::is_shared;
use stream::take_faulted;
pub(crate) use stream::{Storing, Target, take};
pub(crate) use waiting::Waiting;

/// Most ranges in one message.
const RANGES: usize = 4096;

/// Why pages could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum PageReceiverError {
    /// The pager.
    #[error("the pages of the service cannot be stored")]
    Pager(#[from] PagerError),
    /// What came is not a batch, or not what was sent.
    #[error("pages from the source cannot be used")]
    Batch(#[from] godwit_memory::batch::BatchError),
    /// What was retained cannot be read.
    #[error(transparent)]
    Retained(#[from] RetainedError),
    /// Shared memory.
    #[error("shared memory of the service cannot be made or filled")]
    Shared(#[source] std::io::Error),
    /// The stream broke.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// They are not as they should be.
    #[error("{0}")]
    Unfit(String),
    /// The restored processes cannot be looked at.
    #[error("cannot check whether the restored processes are as they were")]
    Process(#[from] ProcessError),
    /// The images do not say what CRIU restores itself.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// CRIU reports success, but has not told the pager that the restore is finished.
    #[error("the restore was not finished: {0}")]
    Unrestored(String),
    /// More than was announced and than is allowed.
    #[error("the service has grown to {} MiB of pages, and {} MiB are allowed; let it settle, or allow services on their way more memory (--incoming-memory)", .bytes >> 20, .most >> 20)]
    TooMuch {
        /// Its pages, bytes.
        bytes: u64,
        /// The bound, bytes.
        most: u64,
    },
    /// A pager's directory.
    #[error("cannot make, rename or remove {directory}")]
    Directory {
        /// Its directory.
        directory: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
    /// A thread failed.
    #[error("an internal task failed; see godwitd's log")]
    Task(#[from] tokio::task::JoinError),
    /// The source broke the rules of the conversation.
    #[error("the source sent {0}")]
    Protocol(&'static str),
}

impl PageReceiverError {
    /// Whether the pager lives, but is of a version with which this one cannot speak.
    pub(crate) fn is_of_version(&self) -> bool {
        matches!(self, Self::Pager(PagerError::Version { .. }))
    }

    /// Whether the source can mend it by connecting again.
    fn is_of_link(&self) -> bool {
        matches!(self, Self::Link(_))
    }
}

/// How far the pages are.
#[derive(Debug, Clone, Default)]
pub(crate) struct Status {
    failed: Option<String>,
    restored: bool,
    /// Why the restorer has ended without saying that all is restored.
    unrestored: Option<String>,
    done: bool,
    /// The source is connected for the pages that are still there.
    talks: bool,
    /// How often a stream has brought all it was given.
    arrived: u64,
}

/// Whether the source talks of the pages that it still has.
pub(crate) struct Talk(watch::Receiver<Status>);

impl Talk {
    /// Returns when it does, or does not any more.
    pub(crate) async fn until(&mut self, talks: bool) {
        if self.0.wait_for(|status| status.talks == talks).await.is_err() {
            // The receiver has ended: nothing will change any more.
            std::future::pending().await
        }
    }
}

/// One service's pages.
pub(crate) struct PageReceiver {
    client: Arc<Client>,
    status: watch::Receiver<Status>,
    /// Most bytes of pages that the pager takes, and as many of shared memory.
    most: u64,
    shared: Shared,
    conversation: mpsc::Sender<Link>,
    _task: AbortOnDropHandle<()>,
}

/// The pager of an earlier life of this daemon.
pub(crate) struct Found {
    client: Client,
    events: Events,
    status: Status,
}

/// The directory of a migration's pager.
pub(crate) fn directory(local: &NodeResources, id: &str) -> PathBuf {
    local.layout.run.join("pagers").join(id)
}

/// The directory of a pager whose pages are no longer needed. It belongs to no migration: the next start of this daemon
/// ends the pager, and takes no pages from it.
fn spare_directory(local: &NodeResources, id: &str) -> PathBuf {
    directory(local, &format!("{id}.spare"))
}

impl PageReceiver {
    /// Starts a pager for at most `bytes` of pages.
    pub(crate) async fn start(
        local: &NodeResources,
        id: &str,
        bytes: u64,
        retained: Option<Arc<Retained>>,
        arrival: Arrival,
    ) -> Result<Self, PageReceiverError> {
        let (directory, pagers) = (directory(local, id), Arc::clone(&local.pagers));
        let (client, events) = tokio::task::spawn_blocking(move || {
            std::fs::create_dir_all(&directory)
                .map_err(|source| PageReceiverError::Directory { directory: directory.clone(), source })?;
            pagers.start(&directory, bytes)?;
            Ok::<_, PageReceiverError>(Client::connect(&directory)?)
        })
        .await??;
        Ok(Self::with(client, retained, (events, arrival), Status::default(), (bytes, Shared::default())))
    }

    /// Finds the pager that an earlier life of this daemon started in a directory; none where it needs none.
    pub(crate) async fn find(directory: PathBuf) -> Result<Option<Found>, PageReceiverError> {
        if !directory.exists() {
            return Ok(None);
        }
        let (client, events, state) = tokio::task::spawn_blocking(move || {
            let (client, events) = Client::connect(&directory)?;
            let state = client.state()?;
            Ok::<_, PagerError>((client, events, state))
        })
        .await??;
        let status = Status {
            failed: (!state.failed.is_empty()).then_some(state.failed),
            restored: state.restore_finished,
            unrestored: None,
            done: state.done,
            talks: false,
            arrived: 0,
        };
        let client = if status.restored && !state.push {
            tokio::task::spawn_blocking(move || client.push().map(|()| client)).await??
        } else {
            client
        };
        Ok(Some(Found { client, events, status }))
    }

    /// Goes on with a pager that was found.
    pub(crate) fn attach(Found { client, events, status }: Found, arrival: Arrival) -> Self {
        // Only a daemon that has started the pager asks whether the pages fit.
        Self::with(client, None, (events, arrival), status, (u64::MAX, Shared::left_to_pager()))
    }

    fn with(
        client: Client,
        retained: Option<Arc<Retained>>,
        (events, arrival): (Events, Arrival),
        status: Status,
        (most, shared): (u64, Shared),
    ) -> Self {
        let client = Arc::new(client);
        let (status_tx, status) = watch::channel(status);
        let (conversation, conversations) = mpsc::channel(1);
        let into = Target { client: Arc::clone(&client), retained, shared: shared.clone(), most };
        let work = work(into, events, arrival, status_tx, conversations);
        Self { client, status, most, shared, conversation, _task: AbortOnDropHandle::new(tokio::spawn(work)) }
    }

    /// These pages are still at the source when the service is frozen, and come later.
    pub(crate) async fn pending(&self, ranges: PageRanges) -> Result<(), PageReceiverError> {
        let decoded = ranges.decode().ok_or(PageReceiverError::Protocol("invalid ranges of pages"))?;
        if is_shared(ranges.space) {
            self.leave_to_pager(ranges.space, decoded.clone()).await?;
        }
        let extents = decoded.into_iter().map(|range| Extent {
            space: ranges.space,
            addr: range.start,
            pages: (range.end - range.start) / PAGE_SIZE,
        });
        let extents: Vec<_> = extents.collect();
        self.ask(move |client| client.pending(&extents)).await
    }

    /// Has the pager fill these pages of shared memory when they come.
    async fn leave_to_pager(&self, space: Space, ranges: Vec<Range>) -> Result<(), PageReceiverError> {
        let (shared, most) = (self.shared.clone(), self.most);
        let new = tokio::task::spawn_blocking(move || shared.leave(space, &ranges, most)).await??;
        let Some((path, size)) = new else { return Ok(()) };
        self.ask(move |client| client.share(space, Path::new(&path), size)).await
    }

    /// Bytes of all pages, including those that are still to come. Fails when they are more than the bound.
    pub(crate) async fn fits(&self) -> Result<u64, PageReceiverError> {
        let state = self.ask(Client::state).await?;
        let bytes = state.stored.saturating_add(state.pending).saturating_mul(PAGE_SIZE);
        let bytes = bytes.saturating_add(self.shared.bytes());
        if bytes <= self.most {
            Ok(bytes)
        } else {
            Err(PageReceiverError::TooMuch { bytes, most: self.most })
        }
    }

    /// The service's shared memory.
    pub(crate) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// CRIU restores from these images what they have; the rest of the memory is left to the pager.
    pub(crate) async fn know_images(&self, images: &Path) -> Result<(), PageReceiverError> {
        let images = images.to_path_buf();
        let reading = tokio::task::spawn_blocking(move || {
            Ok::<_, ImageError>((restored_pages(&images)?, wiped_areas(&images)?))
        });
        let (restored, wiped) = reading.await??;
        let (restored, wiped) = (extents(restored), extents(wiped));
        self.ask(move |client| {
            client.in_images(&restored)?;
            client.wiped_on_fork(&wiped)
        })
        .await
    }

    /// These pages of processes are not brought to them.
    pub(crate) async fn leave_out(&self, extents: Vec<Extent>) -> Result<(), PageReceiverError> {
        self.ask(move |client| client.leave_out(&extents)).await
    }

    /// From now on a restorer that works in this directory finds the pager.
    pub(crate) async fn listen(&self, work: &Path) -> Result<(), PageReceiverError> {
        let work = work.to_path_buf();
        self.ask(move |client| client.listen(&work)).await
    }

    /// All pages, when all are here, for a restore without the pager.
    pub(crate) async fn index(&self) -> Result<(Vec<Stored>, Arc<Client>), PageReceiverError> {
        let mut status = self.status.clone();
        loop {
            let arrived = status.borrow_and_update().arrived;
            if self.ask(Client::missing).await?.is_empty() {
                break;
            }
            // An error is the end of the task that takes them, which is told elsewhere.
            let _ = status.wait_for(|status| status.arrived > arrived).await;
        }
        let index = self.ask(Client::index).await?;
        Ok((index, Arc::clone(&self.client)))
    }

    /// All pages have been restored without the pager: whatever becomes of it from now on, none is lost.
    pub(crate) fn is_spare(&self, local: &NodeResources, id: &str) -> Result<(), PageReceiverError> {
        let (from, to) = (directory(local, id), spare_directory(local, id));
        std::fs::rename(&from, to).map_err(|source| PageReceiverError::Directory { directory: from, source })
    }

    /// From now on pages are put into the processes that CRIU has restored: these, in the node's PID
    /// namespace, which do not run yet. One that has a page already that is not its own fails the move.
    pub(crate) async fn push(&mut self, processes: Vec<u32>) -> Result<(), PageReceiverError> {
        // The restorer's message comes on another socket than the engine's.
        until(&mut self.status, |status| status.restored || status.unrestored.is_some()).await;
        if let Some(reason) = self.status.borrow().unrestored.clone() {
            return Err(PageReceiverError::Unrestored(reason));
        }
        let restored = tokio::task::spawn_blocking(move || named_inside(&processes)).await??;
        self.ask(move |client| client.verify(&restored)).await.map_err(|error| match error {
            PageReceiverError::Pager(PagerError::Refused { reason, .. }) => PageReceiverError::Unfit(reason),
            error => error,
        })?;
        self.ask(Client::push).await
    }

    /// The conversation with the source after the commit, for its `Received`.
    pub(crate) async fn converse(&self, link: Link) {
        // Without it the source asks again by itself.
        let _ = self.conversation.send(link).await;
    }

    /// Pends until pages cannot be taken any more; then why.
    pub(crate) fn failure(&self) -> impl Future<Output = String> + Send + use<> {
        let mut status = self.status.clone();
        async move { until(&mut status, |_| false).await.unwrap_or_default() }
    }

    /// Returns when every page is where it belongs, or with the reason why that will not be.
    pub(crate) async fn complete(&mut self) -> Result<(), String> {
        match until(&mut self.status, |status| status.done).await {
            Some(reason) => Err(reason),
            None => Ok(()),
        }
    }

    /// The pager, for those who ask how far it is.
    pub(crate) fn pager(&self) -> Arc<Client> {
        Arc::clone(&self.client)
    }

    /// Whether the source talks.
    pub(crate) fn talk(&self) -> Talk {
        Talk(self.status.clone())
    }

    /// Fails when the pager is gone, which may not have been noticed yet.
    pub(crate) async fn is_alive(&self) -> Result<(), PageReceiverError> {
        self.ask(Client::state).await.map(|_| ())
    }

    /// Why pages cannot be taken any more, if they cannot.
    pub(crate) fn failed(&self) -> Option<String> {
        self.status.borrow().failed.clone()
    }

    /// Ends the pager of a service that is complete; or whose processes here are gone.
    pub(crate) async fn abandon(self, local: &NodeResources, id: &str) -> Result<(), PageReceiverError> {
        if let Err(error) = self.ask(Client::abandon).await {
            tracing::debug!(migration = %id, error = %crate::error_chain(&error), "cannot tell a pager to end");
        }
        discard(local, id).await
    }

    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Client) -> Result<T, PagerError> + Send + 'static,
    ) -> Result<T, PageReceiverError> {
        let client = Arc::clone(&self.client);
        Ok(tokio::task::spawn_blocking(move || question(&client)).await??)
    }
}

fn extents(processes: Vec<RestoredPages>) -> Vec<Extent> {
    let of_process = |process: RestoredPages| {
        let extent = move |range: std::ops::Range<u64>| Extent {
            space: process.pid,
            addr: range.start,
            pages: (range.end - range.start) / PAGE_SIZE,
        };
        process.ranges.into_iter().map(extent)
    };
    processes.into_iter().flat_map(of_process).collect()
}

/// Waits; returns the reason when it failed instead. Pends when the task of the [`PageReceiver`] is gone: this daemon
/// ends, and continues at its next start; the pages are not lost.
async fn until(status: &mut watch::Receiver<Status>, reached: impl Fn(&Status) -> bool) -> Option<String> {
    if let Ok(status) = status.wait_for(|status| reached(status) || status.failed.is_some()).await {
        return status.failed.clone().filter(|_| !reached(&status));
    }
    std::future::pending().await
}

/// Processes with their PIDs inside the service; a zombie has no memory, and is left out.
fn named_inside(processes: &[u32]) -> Result<Vec<Restored>, ProcessError> {
    let mut named = Vec::with_capacity(processes.len());
    for &pid in processes {
        match Process::open(i32::try_from(pid).unwrap_or(i32::MAX)) {
            Ok(process) => named.push(Restored { space: process.space(), pid }),
            Err(ProcessError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(named)
}

/// Brings connections, the pager's events and the conversation together, until it is dropped.
async fn work(
    into: Target,
    events: Events,
    mut arrival: Arrival,
    status_tx: watch::Sender<Status>,
    mut conversations: mpsc::Receiver<Link>,
) {
    let mut events = forward(events);
    let mut streams = JoinSet::new();
    let mut link: Option<mpsc::Sender<Message>> = None;
    let mut conversing = JoinSet::new();
    let mut done = false;
    let mut faults: Option<mpsc::Sender<Message>> = None;
    let waiting = Waiting::default();
    let client = &into.client;
    // The first failure is the reason; what follows are its consequences.
    let fail = |reason: String| {
        status_tx.send_modify(|status| {
            status.failed.get_or_insert(reason);
        });
    };
    loop {
        tokio::select! {
            Some(further) = arrival.connections.recv() => match further {
                FurtherConnection::Stream(Purpose::Faults, stream) => {
                    let sender = stream.sender();
                    for (space, page) in waiting.all() {
                        let request = FaultRequest { space, page };
                        // A stream that is broken again is replaced again.
                        let _ = sender.send(Message::FaultRequest(request)).await;
                    }
                    faults = Some(sender);
                    streams.spawn(take_faulted(stream, Storing::new(&into, &waiting)));
                }
                FurtherConnection::Stream(_, stream) => {
                    streams.spawn(take(stream, Storing::new(&into, &waiting), status_tx.clone()));
                }
                FurtherConnection::Resumed(resumed) => match tell_missing(client, &resumed).await {
                    Ok(missing) => {
                        waiting.retain(&missing);
                        link = Some(resumed.sender());
                        status_tx.send_modify(|status| status.talks = true);
                        conversing.spawn(until_ended(resumed));
                    }
                    Err(error) if error.is_of_link() => {}
                    Err(error) => fail(crate::error_chain(&error)),
                },
            },
            Some(begun) = conversations.recv() => {
                if done {
                    // All came before the commit. A source that does not hear it asks.
                    let _ = begun.sender().send(Message::Received).await;
                } else {
                    link = Some(begun.sender());
                    status_tx.send_modify(|status| status.talks = true);
                }
                conversing.spawn(until_ended(begun));
            }
            event = events.recv() => match event {
                Some(Event::Fault { space, addr }) => {
                    let (space, page) = (space, addr / PAGE_SIZE);
                    waiting.wants(space, page);
                    if let Some(sender) = &faults {
                        let _ = sender.send(Message::FaultRequest(FaultRequest { space, page })).await;
                    }
                }
                Some(Event::RestoreFinished) => status_tx.send_modify(|status| status.restored = true),
                // The engine gives a better reason.
                Some(Event::RestoreFailed { reason }) => status_tx.send_modify(|status| status.unrestored = Some(reason)),
                Some(Event::Failed { reason }) => fail(reason),
                Some(Event::Done) => {
                    done = true;
                    if let Some(link) = link.take() {
                        // A source that does not hear it asks, and is answered from the journal.
                        let _ = link.send(Message::Received).await;
                    }
                    status_tx.send_modify(|status| status.done = true);
                }
                None => {
                    // One that was done had nothing to lose.
                    if !status_tx.borrow().done {
                        fail("the service's pager has ended; see its log".into());
                    }
                    std::future::pending::<()>().await;
                }
            },
            Some(ended) = streams.join_next() => match ended {
                Ok(Err(error)) if !error.is_of_link() => fail(crate::error_chain(&error)),
                Ok(_) => {}
                Err(error) => fail(error.to_string()),
            },
            Some(ended) = conversing.join_next() => {
                if let Ok(Some(reason)) = ended {
                    fail(reason);
                }
                if conversing.is_empty() {
                    link = None;
                    status_tx.send_modify(|status| status.talks = false);
                }
            }
        }
    }
}

/// Reads a conversation in which nothing is due but its end; why, when the source has lost the pages.
async fn until_ended(mut link: Link) -> Option<String> {
    match link.receive().await {
        Ok(message) => {
            tracing::warn!(
                node = link.node(),
                got = message.name(),
                "the source sent a message when none was due"
            );
            None
        }
        Err(error @ LinkError::Aborted { .. }) => Some(error.to_string()),
        // It connects again.
        Err(_) => None,
    }
}

/// The pager's events, from the thread that waits for them.
fn forward(events: Events) -> mpsc::Receiver<Event> {
    let (sender, receiver) = mpsc::channel(64);
    tokio::task::spawn_blocking(move || {
        while let Some(event) = events.next() {
            if sender.blocking_send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

async fn tell_missing(client: &Arc<Client>, link: &Link) -> Result<Vec<Extent>, PageReceiverError> {
    let there = Arc::clone(client);
    let missing = tokio::task::spawn_blocking(move || there.missing()).await??;
    for same in missing.chunk_by(|a, b| a.space == b.space) {
        for some in same.chunks(RANGES) {
            let ranges = some.iter().map(|extent| extent.addr..extent.addr + extent.pages * PAGE_SIZE);
            link.send(Message::Missing(PageRanges::encode(some[0].space, ranges))).await?;
        }
    }
    link.send(Message::MissingEnd).await?;
    Ok(missing)
}

/// Ends pagers whose migrations have ended: this daemon ended between the two.
pub(crate) async fn end_idle(local: &NodeResources) -> Result<(), LocalError> {
    let parent = local.layout.run.join("pagers");
    let entries = match std::fs::read_dir(&parent) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => {
            entries.map_err(|source| LocalError::Io { action: "list", path: parent.clone(), source })?
        }
    };
    for entry in entries.flatten() {
        let id = entry.file_name().to_string_lossy().into_owned();
        if local.journal.get(&id)?.is_none_or(|entry| entry.stage.is_final()) {
            discard(local, &id).await?;
        }
    }
    Ok(())
}

/// Ends a pager, even one that does not answer, and removes what it leaves. Processes that still lack
/// pages must be gone.
pub(crate) async fn discard(local: &NodeResources, id: &str) -> Result<(), PageReceiverError> {
    for directory in [directory(local, id), spare_directory(local, id)] {
        let (there, pagers) = (directory.clone(), Arc::clone(&local.pagers));
        tokio::task::spawn_blocking(move || pagers.end(&there)).await??;
        remove(directory).await?;
    }
    Ok(())
}

/// The same for a pager that is no longer needed, again until it succeeds; its receiver, where there is one, ends too.
pub(crate) async fn end(local: &NodeResources, id: &str, receiver: Option<PageReceiver>) {
    let mut ended = match receiver {
        Some(receiver) => receiver.abandon(local, id).await,
        None => discard(local, id).await,
    };
    let mut again = local.again(id, "cannot end a pager that is no longer needed");
    while let Err(error) = ended {
        if !again.after(&error.into()).await {
            return;
        }
        ended = discard(local, id).await;
    }
}

/// Removes what a pager leaves.
async fn remove(directory: PathBuf) -> Result<(), PageReceiverError> {
    let gone = directory.clone();
    match tokio::task::spawn_blocking(move || std::fs::remove_dir_all(gone)).await? {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(PageReceiverError::Directory { directory, source })
        }
        _ => Ok(()),
    }
}

impl From<PageReceiverError> for LocalError {
    fn from(error: PageReceiverError) -> Self {
        Self::Pages(Box::new(error))
    }
}
