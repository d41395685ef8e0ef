//! After the commit: pages that have stayed at the source follow, those that a process waits for first.
//!
//! The service's processes here stay frozen and keep the pages until the destination says
//! `Received`. A connection that breaks is made anew, for as long as it takes; the destination then
//! names what it still lacks. When this daemon ends meanwhile, the journal's `serving` makes the
//! next one go on.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use godwit_memory::batch::{Builder, Codec, MAX_PAGES, Pool};
use godwit_memory::process::{Piece, Process, Reader};
use godwit_memory::{PAGE_SIZE, Range, Space};
use rangemap::RangeSet;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::Progress;
use super::lanes::Lanes;
use super::pace::{Compress, Pacer, Packer};
use super::pages::{PagesError, Remaining};
use crate::fault;
use crate::link::{Link, LinkError};
use crate::local::{Local, LocalError};
use crate::message::{FaultRequest, Message, PageRanges, Reason, Resume};
use crate::service::Service;

/// First and last pause between two attempts to reach the destination again.
const RETRY_FIRST: Duration = Duration::from_millis(100);
const RETRY_LAST: Duration = Duration::from_secs(2);

/// Most ranges that a destination may name: one for each page of 64 GiB.
const MAX_RANGES: usize = 1 << 24;

const PAGE: usize = 4096;

/// The connections of a migration whose pages are served.
pub(crate) struct Conversation {
    pub(crate) link: Link,
    pub(crate) lanes: Lanes,
    pub(crate) stock: Answering,
}

/// What it took.
#[derive(Debug, Clone, Default)]
pub(crate) struct Served {
    /// Why the service is no more, where that is how it ended.
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
enum ServeError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Host(#[from] crate::local::HostError),
    #[error(transparent)]
    Pages(#[from] PagesError),
    #[error("a thread that sends pages failed")]
    Task(#[from] tokio::task::JoinError),
    #[error("node {0} names pages that it cannot lack")]
    Nonsense(String),
}

/// Serves the pages of one migration.
pub(crate) struct Serving<'a> {
    pub(crate) local: &'a Arc<Local>,
    pub(crate) id: &'a str,
    pub(crate) destination: &'a str,
    pub(crate) compress: Compress,
    pub(crate) max_bandwidth: Option<u64>,
    pub(crate) progress: Option<&'a watch::Sender<Progress>>,
}

/// What all lanes take pages from.
#[derive(Default)]
pub(crate) struct Stock {
    remaining: Mutex<Remaining>,
    /// The processes also of pages that are under way: they may be asked for before they arrive.
    processes: BTreeMap<Space, Arc<Process>>,
    bytes: AtomicU64,
    /// Bytes of the pages in these, before packing, without pages that went once more.
    page_bytes: AtomicU64,
    faults: AtomicU64,
}

impl Stock {
    /// All of these, in frozen processes.
    pub(crate) fn new(remaining: Remaining) -> Self {
        let processes =
            remaining.spaces.iter().map(|(space, (process, _))| (*space, Arc::clone(process))).collect();
        Self { remaining: Mutex::new(remaining), processes, ..Self::default() }
    }

    /// The pages go another way; what is asked for is still answered.
    pub(crate) fn keep_none(&mut self) {
        self.lock().spaces.clear();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Remaining> {
        // The sets are whole between any two of their calls.
        self.remaining.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a few pages that lie beside each other.
    fn take(&self) -> Option<(Space, Arc<Process>, Range)> {
        let mut remaining = self.lock();
        loop {
            let mut entry = remaining.spaces.first_entry()?;
            let space = *entry.key();
            let (process, set) = entry.get_mut();
            if let Some(range) = set.first() {
                let piece = range.start..range.end.min(range.start + (MAX_PAGES * PAGE) as u64);
                set.remove(piece.clone());
                return Some((space, Arc::clone(process), piece));
            }
            entry.remove();
        }
    }

    /// Takes one page, which may be under way already: then it goes once more, ahead of the others.
    /// Says whether it was still here.
    fn want(&self, space: Space, page: u64) -> Option<(Arc<Process>, bool)> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let start = page.checked_mul(PAGE_SIZE)?;
        let mut first = false;
        if let Some((_, set)) = self.lock().spaces.get_mut(&space) {
            first = set.contains(&start);
            set.remove(start..start.checked_add(PAGE_SIZE)?);
        }
        self.processes.get(&space).map(|process| (Arc::clone(process), first))
    }
}

/// A stock, and the task that answers from it what the destination asks for.
pub(crate) struct Answering {
    stock: Arc<Stock>,
    task: JoinSet<Result<(), ServeError>>,
}

impl Answering {
    /// Answers on this lane from now on.
    pub(crate) fn start(stock: Stock, lane: Option<Link>) -> Self {
        let stock = Arc::new(stock);
        let mut task = JoinSet::new();
        if let Some(lane) = lane {
            task.spawn(answer(lane, Arc::clone(&stock)));
        }
        Self { stock, task }
    }

    /// Pages that have stayed here.
    pub(crate) fn pages(&self) -> u64 {
        self.stock.lock().pages()
    }
}

impl Serving<'_> {
    /// Serves until the destination has everything; nothing when this daemon ends before that.
    /// Without a conversation it is begun anew.
    pub(crate) async fn run(
        &self,
        begun: Option<Conversation>,
        service: &Service,
    ) -> Result<Option<Served>, LocalError> {
        tokio::select! {
            served = self.until_received(begun, service) => Ok(Some(served)),
            () = self.local.ending.cancelled() => Ok(None),
        }
    }

    async fn until_received(&self, begun: Option<Conversation>, service: &Service) -> Served {
        let mut total = Served::default();
        let mut pause = RETRY_FIRST;
        let mut next = begun;
        loop {
            let served = match next.take() {
                Some(conversation) => {
                    pause = RETRY_FIRST;
                    self.converse(conversation, &mut total).await
                }
                None => match self.resume(service).await {
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
            tracing::warn!(
                migration = %self.id,
                service = %service.name,
                destination = %self.destination,
                error = %crate::error_chain(&error),
                "pages of the service are still here, and the destination cannot be given them; trying again"
            );
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_LAST);
        }
    }

    /// Connects again, and learns what the destination lacks; nothing when it lacks nothing.
    async fn resume(&self, service: &Service) -> Result<Option<Conversation>, ServeError> {
        let mut link = Link::new(self.local.host.connect(self.destination).await?);
        link.send(Message::Resume(Resume { migration: self.id.into() })).await?;
        let pids = match self.local.engine.processes(&self.local.config(service)).await {
            Ok(pids) if pids.is_empty() => return self.lost(link).await.map(|()| None),
            Ok(pids) => pids,
            Err(error) => return Err(crate::local::HostError(crate::error_chain(&error)).into()),
        };
        let mut processes = BTreeMap::new();
        for pid in pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()) {
            let process = Arc::new(Process::open(pid).map_err(PagesError::Read)?);
            processes.insert(process.space(), process);
        }
        let mut remaining = Remaining::default();
        let mut count = 0;
        loop {
            match link.receive().await? {
                Message::Missing(ranges) => {
                    count += ranges.ranges.len() / 2;
                    let process = processes.get(&ranges.space).filter(|_| count <= MAX_RANGES);
                    let nonsense = || ServeError::Nonsense(self.destination.to_owned());
                    let set = decode_ranges(&ranges).ok_or_else(nonsense)?;
                    let process = process.ok_or_else(nonsense)?;
                    let entry = remaining.spaces.entry(ranges.space);
                    let (_, all) = entry.or_insert_with(|| (Arc::clone(process), RangeSet::new()));
                    all.extend(set);
                }
                Message::MissingEnd => break,
                Message::Received => return Ok(None),
                other => return Err(link.unexpected(&other, "Missing").into()),
            }
        }
        let mut lanes = Lanes::open(self.local.host.as_ref(), self.destination, self.id, 2).await?;
        let stock = Answering::start(Stock::new(remaining), lanes.faults.take());
        Ok(Some(Conversation { link, lanes, stock }))
    }

    /// Tells the destination that the pages are gone: it must not wait for them. It answers when it is
    /// asked again, after it has ended the service.
    async fn lost(&self, mut link: Link) -> Result<(), ServeError> {
        let reason = format!(
            "the processes that held its pages on node {} are gone: they were killed, or the machine was restarted",
            self.local.node
        );
        link.send(Message::Abort(Reason { reason })).await?;
        loop {
            match link.receive().await? {
                Message::Received => return Ok(()),
                Message::Missing(_) | Message::MissingEnd => {}
                other => return Err(link.unexpected(&other, "Received").into()),
            }
        }
    }

    async fn converse(&self, conversation: Conversation, total: &mut Served) -> Result<(), ServeError> {
        let Conversation { mut link, mut lanes, stock: Answering { stock, mut task } } = conversation;
        fault::point("source.serving").await;
        let pages = stock.lock().pages();
        let pacer = Arc::new(Pacer::new(self.max_bandwidth));
        let mut pushing = JoinSet::new();
        for sender in lanes.senders() {
            let (stock, pacer, compress) = (Arc::clone(&stock), Arc::clone(&pacer), self.compress);
            pushing.spawn_blocking(move || push(&stock, &sender, &pacer, compress));
        }
        let pushed = async {
            while let Some(ended) = pushing.join_next().await {
                ended??;
            }
            lanes.arrived().await?;
            // Nothing more is to come but the word that all is there.
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
        let shown = self.show(&stock, pages);
        let ended = tokio::select! {
            received = received => received,
            failed = pushed => failed,
            failed = answering => failed.map(|()| unreachable!("faults are answered until an error")),
            never = shown => match never {},
        };
        total.bytes += stock.bytes.load(Ordering::Relaxed);
        total.faults += stock.faults.load(Ordering::Relaxed);
        total.page_bytes += stock.page_bytes.load(Ordering::Relaxed);
        total.memory_wire_bytes += lanes.traffic().sent();
        total.wire_bytes += link.bytes_sent() + lanes.traffic().sent();
        ended
    }

    /// Shows how it goes, again and again.
    async fn show(&self, stock: &Stock, pages: u64) -> std::convert::Infallible {
        let Some(progress) = self.progress else { return std::future::pending().await };
        let mut clock = tokio::time::interval(Duration::from_millis(100));
        loop {
            clock.tick().await;
            let left = stock.lock().pages();
            progress.send_modify(|progress| {
                progress.phase = "serve";
                progress.bytes_total = pages * PAGE_SIZE;
                progress.bytes_done = pages.saturating_sub(left) * PAGE_SIZE;
                progress.faults = stock.faults.load(Ordering::Relaxed);
            });
        }
    }
}

/// The ranges of a message, if they are such.
pub(crate) fn decode_ranges(message: &PageRanges) -> Option<Vec<Range>> {
    if !message.ranges.len().is_multiple_of(2) {
        return None;
    }
    let range = |pair: &[u64]| {
        let [page, pages] = *pair else { return None };
        let start = page.checked_mul(PAGE_SIZE)?;
        let end = start.checked_add(pages.checked_mul(PAGE_SIZE)?)?;
        (start < end).then_some(start..end)
    };
    message.ranges.chunks(2).map(range).collect()
}

/// One lane's thread: takes from the stock until it is empty.
fn push(
    stock: &Stock,
    sender: &mpsc::Sender<Message>,
    pacer: &Pacer,
    compress: Compress,
) -> Result<(), PagesError> {
    let mut packer = Packer::new(compress);
    let (mut reader, pool) = (Reader::new(), Pool::default());
    while let Some((space, process, range)) = stock.take() {
        let (batch, raw) = read(&process, space, range, &mut reader, &pool, |batch| packer.pack(batch))?;
        let bytes = batch.len() as u64;
        pacer.wait(bytes);
        let waiting = std::time::Instant::now();
        sender.blocking_send(Message::Pages(batch)).map_err(|_| PagesError::Closed)?;
        packer.waited(waiting.elapsed());
        stock.bytes.fetch_add(bytes, Ordering::Relaxed);
        stock.page_bytes.fetch_add(raw, Ordering::Relaxed);
        fault::blocking_point("source.pushing");
    }
    Ok(())
}

/// Reads pages of a frozen process into a batch, and says how many bytes of pages it carries before
/// packing. What the process does not have reads as zero.
fn read(
    process: &Process,
    space: Space,
    range: Range,
    reader: &mut Reader,
    pool: &Pool,
    pack: impl FnOnce(&mut Builder) -> Bytes,
) -> Result<(Bytes, u64), PagesError> {
    let mut batch = Builder::with(space, pool);
    let mut pieces = reader.pieces(process, range);
    while let Some(piece) = pieces.next() {
        match piece? {
            Piece::Data { start, bytes } => {
                for (page, content) in (start..).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
                    batch.page(page, content);
                }
            }
            Piece::Vanished(range) => batch.zero(&range),
        }
    }
    let raw = batch.data_bytes();
    Ok((pack(&mut batch), raw))
}

/// Answers on the lane for faults until it breaks.
async fn answer(mut lane: Link, stock: Arc<Stock>) -> Result<(), ServeError> {
    let (mut reader, pool) = (Reader::new(), Pool::default());
    loop {
        let FaultRequest { space, page } = match lane.receive().await? {
            Message::FaultRequest(request) => request,
            other => return Err(lane.unexpected(&other, "FaultRequest").into()),
        };
        let Some((process, first)) = stock.want(space, page) else {
            return Err(ServeError::Nonsense(lane.node().to_owned()));
        };
        // One page is read in a microsecond: no thread is worth it.
        let start = page * PAGE_SIZE;
        let range = start..start + PAGE_SIZE;
        let raw = |batch: &mut Builder| batch.finish(Codec::Raw);
        let (batch, raw) = read(&process, space, range, &mut reader, &pool, raw)?;
        stock.bytes.fetch_add(batch.len() as u64, Ordering::Relaxed);
        if first {
            stock.page_bytes.fetch_add(raw, Ordering::Relaxed);
        }
        lane.send(Message::Pages(batch)).await?;
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn ranges_arrive_as_they_were_sent_and_others_are_refused() {
        let message = |ranges: &[u64]| PageRanges { space: 1, ranges: ranges.to_vec() };
        assert_eq!(decode_ranges(&message(&[1, 2, 9, 1])).unwrap(), [0x1000..0x3000, 0x9000..0xa000]);
        for bad in [&[1][..], &[1, 0], &[u64::MAX, 1], &[1, u64::MAX], &[1, 2, 3]] {
            assert_eq!(decode_ranges(&message(bad)), None, "{bad:?}");
        }
    }
}
