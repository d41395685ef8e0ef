//! The conversation about pages that stay at the source beyond the commit.
//!
//! The service's processes here stay frozen and keep the pages until the destination says
//! `Received`. A broken connection is made again, for as long as it takes; the destination then names what it still
//! lacks. When this daemon ends meanwhile, its next start continues, as the journal says `serving`.
//!
//! Pages that this node has lost end it: the destination is told, and ends the service, which must not run on
//! without them.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use godwit_memory::process::Process;
use godwit_memory::shared::{self, FIRST_SPACE, space_by_inode};
use godwit_memory::{PAGE_SIZE, Space};
use rangemap::RangeSet;
use tokio::sync::watch;

use super::Progress;
use super::answer::Answering;
use super::pages::{Leaving, Owner, PagesError, Remaining};
use super::residual::{CloseOnDrop, Residual};
use super::streams::Streams;
use crate::backoff::Backoff;
use crate::failpoint;
use crate::link::{Link, LinkError};
use crate::message::{Message, Reason, Resume};
use crate::options::ServeOptions;
use crate::resources::NodeResources;
use crate::service::Service;

/// The pauses between attempts to reach the destination again.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// How long after the end of a stream `Received` may still come: a destination that has all pages says so and closes all
/// connections, each of which takes its own time. TCP sends a lost segment again several times in it.
const LAST_WORD: Duration = Duration::from_secs(1);

/// How many attempts in a row may end at a page that cannot be read, 3 s in all, before that page is lost.
const READS: u32 = 6;

/// Most ranges that a destination may name: one for each page of 64 GiB.
const MAX_RANGES: usize = 1 << 24;

/// The connections of a migration whose pages are served.
pub(crate) struct Conversation {
    pub(crate) link: Link,
    pub(crate) streams: Streams,
    pub(crate) residual: Answering,
}

/// What it took.
#[derive(Debug, Clone, Default)]
pub(crate) struct Served {
    /// Why the service was lost, where it was.
    pub(crate) lost: Option<String>,
    /// Bytes of pages.
    pub(crate) bytes: u64,
    /// Pages asked for.
    pub(crate) faults: u64,
    /// All bytes on the wire, of all connections, and also what they carried before.
    pub(crate) wire_bytes: u64,
    /// Of these, what the connections for pages carried.
    pub(crate) memory_wire_bytes: u64,
    /// Bytes of the pages that were still here and are not zero, each once for each conversation.
    pub(crate) page_bytes: u64,
}

/// Why a conversation about pages ended early.
#[derive(Debug, thiserror::Error)]
pub(super) enum ServeError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Cluster(#[from] crate::resources::ClusterError),
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error("a thread that sends pages failed")]
    Task(#[from] tokio::task::JoinError),
    #[error("node {0} asks for pages that it must have")]
    Invalid(String),
}

impl ServeError {
    /// Whether the kernel has a page and does not give it.
    fn is_unreadable(&self) -> bool {
        matches!(self, Self::Pages(PagesError::Unreadable { .. } | PagesError::Shared { .. }))
    }

    /// Whether it says no more than that the destination has closed a connection.
    fn is_of_closing(&self) -> bool {
        match self {
            Self::Link(LinkError::Broken(error)) => error.is_closed(),
            Self::Link(LinkError::Closed(_)) | Self::Pages(PagesError::Closed) => true,
            _ => false,
        }
    }
}

/// Serves the pages of one migration.
pub(crate) struct Serving<'a> {
    pub(crate) local: &'a Arc<NodeResources>,
    pub(crate) id: &'a str,
    pub(crate) destination: &'a str,
    pub(crate) options: ServeOptions,
    pub(crate) progress: Option<&'a watch::Sender<Progress>>,
}

impl Serving<'_> {
    /// Serves until the destination has everything; nothing when this daemon ends before that.
    /// Without a conversation it is begun anew.
    pub(crate) async fn run(&self, begun: Option<Conversation>, service: &Service) -> Option<Served> {
        tokio::select! {
            served = self.until_received(begun, service) => Some(served),
            () = self.local.ending.cancelled() => None,
        }
    }

    async fn until_received(&self, begun: Option<Conversation>, service: &Service) -> Served {
        let mut total = Served::default();
        let mut pauses = PAUSES;
        let mut next = begun;
        let mut unreadable = 0;
        let mut lost = None;
        loop {
            let served = match next.take() {
                Some(conversation) => {
                    if unreadable == 0 {
                        pauses.reset();
                    }
                    self.converse(conversation, &mut total).await
                }
                None => match self.resume(service, lost.as_deref()).await {
                    Ok(Some(begun)) => {
                        next = Some(begun);
                        continue;
                    }
                    Ok(None) => Ok(()),
                    Err(error) => Err(error),
                },
            };
            let error = match served {
                Ok(()) => return total,
                Err(ServeError::Link(LinkError::Aborted { reason, .. })) => {
                    total.lost = Some(reason);
                    return total;
                }
                Err(error) => error,
            };
            unreadable = if error.is_unreadable() { unreadable + 1 } else { 0 };
            if unreadable == READS {
                lost = Some(crate::error_chain(&error));
            }
            tracing::warn!(
                migration = %self.id,
                service = %service.name,
                destination = %self.destination,
                error = %crate::error_chain(&error),
                "cannot send the pages of the service that are still here to the destination; trying again"
            );
            pauses.wait().await;
        }
    }

    /// Connects again, and learns what the destination lacks; nothing when it lacks nothing. Pages that are lost here
    /// for a reason are not asked about.
    async fn resume(
        &self,
        service: &Service,
        lost: Option<&str>,
    ) -> Result<Option<Conversation>, ServeError> {
        let mut link = Link::new(self.local.cluster.connect(self.destination).await?);
        link.send(Message::Resume(Resume { migration: self.id.into() })).await?;
        if let Some(reason) = lost {
            return self.tell_lost(link, reason.into()).await;
        }
        let pids = match self.local.engine.processes(&self.local.config(service)).await {
            Ok(pids) if pids.is_empty() => {
                let gone = format!(
                    "the processes that held its pages on node {} are gone: they were killed, or the machine was restarted",
                    self.local.node
                );
                return self.tell_lost(link, gone).await;
            }
            Ok(pids) => pids,
            Err(error) => return Err(crate::resources::ClusterError(crate::error_chain(&error)).into()),
        };
        let pids: Vec<i32> = pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect();
        let owners = tokio::task::spawn_blocking(move || owners(&pids)).await??;
        let mut remaining = Remaining::default();
        let mut count = 0;
        loop {
            match link.receive().await? {
                Message::Missing(ranges) => {
                    count += ranges.ranges.len() / 2;
                    let invalid = || ServeError::Invalid(self.destination.to_owned());
                    let set = ranges.decode().filter(|_| count <= MAX_RANGES).ok_or_else(invalid)?;
                    let Some(owner) = owners.get(&ranges.space) else {
                        let gone = format!(
                            "{}, which held pages of it on node {}, is gone: it was killed",
                            title(ranges.space),
                            self.local.node
                        );
                        return self.tell_lost(link, gone).await;
                    };
                    let entry = remaining.spaces.entry(ranges.space);
                    let (_, all) = entry.or_insert_with(|| (owner.clone(), RangeSet::new()));
                    all.extend(set);
                }
                Message::MissingEnd => break,
                Message::Received => return Ok(None),
                other => return Err(link.unexpected(&other, "Missing").into()),
            }
        }
        let count = self.options.streams;
        let mut streams =
            Streams::open(self.local.cluster.as_ref(), self.destination, self.id, count).await?;
        let leaving = Leaving { rest: remaining, ..Leaving::default() };
        let residual = Answering::start(Residual::new(owners, leaving), streams.take_faults());
        Ok(Some(Conversation { link, streams, residual }))
    }

    /// Tells the destination that pages are lost: it must not wait for them. It answers when it is asked again, after
    /// it has ended the service.
    async fn tell_lost(&self, mut link: Link, reason: String) -> Result<Option<Conversation>, ServeError> {
        link.send(Message::Abort(Reason { reason })).await?;
        loop {
            match link.receive().await? {
                Message::Received => return Ok(None),
                Message::Missing(_) | Message::MissingEnd => {}
                other => return Err(link.unexpected(&other, "Received").into()),
            }
        }
    }

    async fn converse(&self, conversation: Conversation, total: &mut Served) -> Result<(), ServeError> {
        let Conversation { mut link, mut streams, residual: mut answering } = conversation;
        failpoint::point("source.serving").await;
        if answering.pushing.is_empty() {
            answering.push(&streams, self.options.compress, self.options.max_bandwidth);
        }
        answering.residual.0.committed();
        let Answering { residual: CloseOnDrop(residual), answering: task, pushing, .. } = &mut answering;
        let pages = residual.pages();
        let pushed = async {
            while let Some(ended) = pushing.join_next().await {
                ended??;
            }
            streams.arrived().await?;
            // Nothing more is to come but the message that all is there.
            std::future::pending::<Result<(), ServeError>>().await
        };
        let received = async {
            match link.receive().await? {
                Message::Received => Ok(()),
                other => Err(ServeError::from(link.unexpected(&other, "Received"))),
            }
        };
        let answering = async {
            match task.join_next().await {
                Some(ended) => ended?,
                None => std::future::pending().await,
            }
        };
        let failing = async {
            tokio::select! {
                failed = pushed => failed,
                failed = answering => failed.map(|()| unreachable!("faults are answered until an error")),
            }
        };
        let shown = self.show(residual, pages);
        let ended = {
            tokio::pin!(received);
            tokio::select! {
                received = &mut received => received,
                failed = failing => match failed {
                    Err(error) if error.is_of_closing() => {
                        tokio::time::timeout(LAST_WORD, received).await.unwrap_or(Err(error))
                    }
                    failed => failed,
                },
                never = shown => match never {},
            }
        };
        total.bytes += residual.bytes.load(Ordering::Relaxed);
        total.faults += residual.faults.load(Ordering::Relaxed);
        total.page_bytes += residual.page_bytes.load(Ordering::Relaxed);
        total.memory_wire_bytes += streams.traffic().sent();
        total.wire_bytes += link.bytes_sent() + streams.traffic().sent();
        ended
    }

    /// Shows how it goes, again and again.
    async fn show(&self, residual: &Residual, pages: u64) -> Infallible {
        let Some(progress) = self.progress else { return std::future::pending().await };
        let mut clock = tokio::time::interval(Duration::from_millis(100));
        loop {
            clock.tick().await;
            let left = residual.pages();
            progress.send_modify(|progress| {
                progress.phase = "serve";
                progress.bytes_total = pages * PAGE_SIZE;
                progress.bytes_done = pages.saturating_sub(left) * PAGE_SIZE;
                progress.faults = residual.faults.load(Ordering::Relaxed);
            });
        }
    }
}

/// What has pages of a frozen service that may stay behind: its processes, and its shared anonymous memory.
fn owners(pids: &[i32]) -> Result<BTreeMap<Space, Owner>, PagesError> {
    let mut owners = BTreeMap::new();
    for &pid in pids {
        let process = Process::open(pid)?;
        owners.insert(process.space(), Owner::Process(Arc::new(process)));
    }
    for (inode, segment) in shared::only_mapped(pids)? {
        if let Some(space) = space_by_inode(inode) {
            owners.insert(space, Owner::Segment(Arc::new(segment)));
        }
    }
    Ok(owners)
}

/// What has, or had, the pages of this space.
fn title(space: Space) -> String {
    match space < FIRST_SPACE {
        true => format!("the process with PID {space} in the service"),
        false => "the last process of the service with some shared memory".to_owned(),
    }
}
