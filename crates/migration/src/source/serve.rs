//! Pages that stay at the source beyond the commit: those that a process waits for first, the others
//! beside them.
//!
//! The push begins while CRIU dumps, as the link has little else to do then, with what was written
//! last; nothing waits for it.
//!
//! The service's processes here stay frozen and keep the pages until the destination says
//! `Received`. A connection that breaks is made anew, for as long as it takes; the destination then
//! names what it still lacks. When this daemon ends meanwhile, the journal's `serving` makes the
//! next one go on.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_memory::batch::{Builder, Codec, MAX_PAGES, Pool, is_zero};
use godwit_memory::process::{Piece, Process, Reader};
use godwit_memory::{PAGE_SIZE, Range, Space};
use rangemap::RangeSet;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use xxhash_rust::xxh3::xxh3_128;

use super::Progress;
use super::lanes::Lanes;
use super::pace::{Compress, Pacer, Packer};
use super::pages::{Hashes, Leaving, PagesError, REGION, Remaining, ZERO, index_in_region, pages_of};
use super::queue::keep_short;
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

/// What lies around a page that is waited for and follows it, bytes, until it is known how much crosses
/// while the next is asked for. A power of two.
const BESIDE: u64 = 4 * PAGE_SIZE;

/// Pages that stay until the commit unless they are asked for, however fast the link is: what comes
/// after the commit is then the same for every service. They are the last of those that were not written
/// lately, at the lowest addresses: stacks, which a restore touches, lie high.
const SPARED: u64 = 16;

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
pub(crate) struct Stock {
    shelf: Mutex<Shelf>,
    /// Something was put on the shelf, or it is closed.
    changed: Condvar,
    /// The processes also of pages that are under way: they may be asked for before they arrive.
    processes: BTreeMap<Space, Arc<Process>>,
    /// What the destination kept when the service left it.
    kept: Hashes,
    /// Bytes around a page that is asked for that follow it, a power of two.
    beside: AtomicU64,
    bytes: AtomicU64,
    /// Bytes of the pages in these, before packing, without pages that went once more.
    page_bytes: AtomicU64,
    faults: AtomicU64,
}

/// Pages that have not been sent.
#[derive(Debug, Default)]
struct Shelf {
    /// Taken first.
    first: Remaining,
    rest: Remaining,
    /// Not to be taken while CRIU dumps.
    untouched: Remaining,
    /// How many there are in all.
    pages: u64,
    /// The service has been committed to the destination.
    committed: bool,
    /// Nobody takes any more.
    closed: bool,
}

impl Shelf {
    /// Takes a few pages that lie beside each other.
    fn take(&mut self) -> Option<(Space, Arc<Process>, Range)> {
        let most = self.loose().min(MAX_PAGES as u64);
        if most == 0 {
            return None;
        }
        let taken = self.first.take(most).or_else(|| self.rest.take(most));
        if let Some((_, _, range)) = &taken {
            self.pages -= (range.end - range.start) / PAGE_SIZE;
        }
        taken
    }

    /// How many pages may go unasked.
    fn loose(&self) -> u64 {
        self.pages.saturating_sub(if self.committed { 0 } else { SPARED })
    }

    /// Takes those of these pages that are there.
    fn remove(&mut self, space: Space, range: &Range) -> RangeSet<u64> {
        let mut taken = RangeSet::new();
        for remaining in [&mut self.first, &mut self.rest, &mut self.untouched] {
            taken.extend(remaining.remove(space, range));
        }
        self.pages -= pages_of(&taken);
        taken
    }
}

impl Stock {
    /// Of these pages, in frozen processes, none is pushed: they go another way. What is asked for is
    /// answered.
    pub(crate) fn of_others(noted: &Remaining) -> Self {
        Self::with(Shelf::default(), noted, Hashes::new())
    }

    /// All of these, in frozen processes. Those that CRIU may change for a moment are not pushed before
    /// [`Answering::dumped`].
    pub(crate) fn new(noted: &Remaining, leaving: Leaving) -> Self {
        let Leaving { recent, rest, untouched, kept } = leaving;
        let pages = recent.pages() + rest.pages() + untouched.pages();
        let shelf = Shelf { first: recent, rest, untouched, pages, ..Shelf::default() };
        Self::with(shelf, noted, kept)
    }

    fn with(shelf: Shelf, noted: &Remaining, kept: Hashes) -> Self {
        Self {
            shelf: Mutex::new(shelf),
            changed: Condvar::new(),
            processes: noted.processes(),
            kept,
            beside: AtomicU64::new(BESIDE),
            bytes: AtomicU64::new(0),
            page_bytes: AtomicU64::new(0),
            faults: AtomicU64::new(0),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        // The sets are whole between any two of their calls.
        self.shelf.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Shelf)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Takes a few pages; waits while there are none that may be taken. None when there will be none.
    fn take(&self) -> Option<(Space, Arc<Process>, Range)> {
        let mut shelf = self.lock();
        loop {
            if shelf.closed {
                return None;
            }
            if let Some(taken) = shelf.take() {
                return Some(taken);
            }
            if shelf.committed && shelf.pages == 0 {
                return None;
            }
            shelf = self.changed.wait(shelf).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes one page, which may be under way already: then it goes once more, ahead of the others. And
    /// those around it that have not been sent: who wants the one is likely to want them.
    /// Says whether it was still here.
    fn want(&self, space: Space, page: u64) -> Option<(Arc<Process>, bool, RangeSet<u64>)> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let process = self.processes.get(&space)?;
        let start = page.checked_mul(PAGE_SIZE)?;
        let wanted = start..start.checked_add(PAGE_SIZE)?;
        let beside = self.beside.load(Ordering::Relaxed);
        let first = start - start % beside;
        let around = first..first.checked_add(beside)?;
        let mut shelf = self.lock();
        let fresh = !shelf.remove(space, &wanted).is_empty();
        let beside = match shelf.loose() * PAGE_SIZE >= beside {
            true => shelf.remove(space, &around),
            false => RangeSet::new(),
        };
        Some((Arc::clone(process), fresh, beside))
    }
}

/// Closes a stock when it is dropped, so that the threads that take from it end.
struct Open(Arc<Stock>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.change(|shelf| shelf.closed = true);
    }
}

/// A stock, and what works on it: a task that answers what the destination asks for, and threads that
/// push the rest.
pub(crate) struct Answering {
    stock: Open,
    answering: JoinSet<Result<(), ServeError>>,
    pushing: JoinSet<Result<(), PagesError>>,
    pacing: JoinSet<Infallible>,
    leaves: bool,
}

impl Answering {
    /// Answers on this lane from now on.
    pub(crate) fn start(stock: Stock, lane: Option<Link>) -> Self {
        let leaves = stock.lock().pages > 0;
        let stock = Arc::new(stock);
        let mut answering = JoinSet::new();
        if let Some(lane) = lane {
            answering.spawn(answer(lane, Arc::clone(&stock)));
        }
        let (pushing, pacing) = (JoinSet::new(), JoinSet::new());
        Self { stock: Open(stock), answering, pushing, pacing, leaves }
    }

    /// Pushes over these lanes from now on.
    pub(crate) fn push(&mut self, lanes: &Lanes, compress: Compress, max_bandwidth: Option<u64>) {
        let pacer = Arc::new(Pacer::new(max_bandwidth));
        for sender in lanes.senders() {
            let (stock, pacer) = (Arc::clone(&self.stock.0), Arc::clone(&pacer));
            self.pushing.spawn_blocking(move || push(&stock, &sender, &pacer, compress));
        }
        let stock = Arc::clone(&self.stock.0);
        let may_follow = move |bytes| stock.beside.store(bytes, Ordering::Relaxed);
        self.pacing.spawn(keep_short(lanes.gauges(), may_follow));
    }

    /// Whether pages have stayed here for after the commit.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves
    }

    /// CRIU has left the processes: all pages are as they were.
    pub(crate) fn dumped(&self) {
        self.stock.0.change(|shelf| {
            let untouched = std::mem::take(&mut shelf.untouched);
            for (space, (process, pages)) in untouched.spaces {
                shelf.first.put(space, &process, pages);
            }
        });
    }

    /// The destination owns the service.
    fn committed(&self) {
        self.stock.0.change(|shelf| shelf.committed = true);
    }

    /// Bytes of pages that went so far, and are not counted again.
    pub(crate) fn count(&self) -> u64 {
        self.stock.0.bytes.swap(0, Ordering::Relaxed)
    }

    /// Pends unless pages cannot be pushed; then why.
    pub(crate) async fn failed<E: From<PagesError> + From<JoinError>>(&mut self) -> E {
        loop {
            match self.pushing.join_next().await {
                Some(Ok(Ok(()))) => {}
                Some(Ok(Err(error))) => return error.into(),
                Some(Err(error)) => return error.into(),
                None => return std::future::pending().await,
            }
        }
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
        let leaving = Leaving { rest: remaining.clone(), ..Leaving::default() };
        let stock = Answering::start(Stock::new(&remaining, leaving), lanes.take_faults());
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
        let Conversation { mut link, mut lanes, stock: mut answering } = conversation;
        fault::point("source.serving").await;
        if answering.pushing.is_empty() {
            answering.push(&lanes, self.compress, self.max_bandwidth);
        }
        answering.committed();
        let Answering { stock: Open(stock), answering: task, pushing, .. } = &mut answering;
        let pages = stock.lock().pages;
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
        let shown = self.show(stock, pages);
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
            let left = stock.lock().pages;
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
        if stock.lock().committed {
            fault::blocking_point("source.pushing");
        }
        let mut batch = Builder::with(space, &pool);
        let kept = read(&process, space, range, &mut reader, &stock.kept, &mut batch)?;
        let raw = batch.data_bytes() + kept;
        let batch = packer.pack(&mut batch);
        let bytes = batch.len() as u64;
        pacer.wait(bytes);
        let waiting = std::time::Instant::now();
        sender.blocking_send(Message::Pages(batch)).map_err(|_| PagesError::Closed)?;
        packer.waited(waiting.elapsed());
        stock.bytes.fetch_add(bytes, Ordering::Relaxed);
        stock.page_bytes.fetch_add(raw, Ordering::Relaxed);
    }
    Ok(())
}

/// Reads pages of a frozen process into a batch. What the process does not have reads as zero; what the
/// destination has kept is named: so many bytes of pages are returned.
fn read(
    process: &Process,
    space: Space,
    range: Range,
    reader: &mut Reader,
    kept: &Hashes,
    batch: &mut Builder,
) -> Result<u64, PagesError> {
    let mut named = 0;
    let mut pieces = reader.pieces(process, range);
    while let Some(piece) = pieces.next() {
        match piece? {
            Piece::Data { start, bytes } => {
                for (page, content) in (start..).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
                    if is_kept(kept, space, page, content) {
                        batch.kept(page);
                        named += PAGE_SIZE;
                    } else {
                        batch.page(page, content);
                    }
                }
            }
            Piece::Vanished(range) => batch.zero(&range),
        }
    }
    Ok(named)
}

/// Whether the destination has kept a page with this content.
fn is_kept(kept: &Hashes, space: Space, page: u64, content: &[u8; PAGE]) -> bool {
    let Some(hashes) = kept.get(&(space, page / REGION)) else { return false };
    let hash = hashes[index_in_region(page)];
    hash != ZERO && !is_zero(content) && hash == xxh3_128(content)
}

/// Answers on the lane for faults until it breaks.
async fn answer(mut lane: Link, stock: Arc<Stock>) -> Result<(), ServeError> {
    let (mut reader, pool) = (Reader::new(), Pool::default());
    loop {
        let FaultRequest { space, page } = match lane.receive().await? {
            Message::FaultRequest(request) => request,
            other => return Err(lane.unexpected(&other, "FaultRequest").into()),
        };
        let Some((process, fresh, beside)) = stock.want(space, page) else {
            return Err(ServeError::Nonsense(lane.node().to_owned()));
        };
        let start = page * PAGE_SIZE;
        let mut wanted = RangeSet::new();
        wanted.insert(start..start + PAGE_SIZE);
        // The page alone first: it is not to wait for the others.
        for (ranges, fresh) in [(wanted, fresh), (beside, true)] {
            // A few pages are read in microseconds: no thread is worth it.
            let (mut batch, mut kept) = (Builder::with(space, &pool), 0);
            for range in ranges.iter() {
                kept += read(&process, space, range.clone(), &mut reader, &stock.kept, &mut batch)?;
            }
            if !batch.is_empty() {
                if fresh {
                    stock.page_bytes.fetch_add(batch.data_bytes() + kept, Ordering::Relaxed);
                }
                let batch = batch.finish(Codec::Raw);
                stock.bytes.fetch_add(batch.len() as u64, Ordering::Relaxed);
                lane.send(Message::Pages(batch)).await?;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_memory::batch::{Batch, Kind};

    use super::*;

    /// Pages of this process, whose contents nobody looks at.
    fn pages(process: &Arc<Process>, range: std::ops::Range<u64>) -> Remaining {
        let mut remaining = Remaining::default();
        let mut set = RangeSet::new();
        set.insert(range.start * PAGE_SIZE..range.end * PAGE_SIZE);
        remaining.put(1, process, set);
        remaining
    }

    /// Pages 100 to 110 were written last, CRIU may change 200 to 210, and there are 0 to 10.
    fn stock() -> Stock {
        let process = Arc::new(Process::open(i32::try_from(std::process::id()).unwrap()).unwrap());
        let leaving = Leaving {
            recent: pages(&process, 100..110),
            rest: pages(&process, 0..10),
            untouched: pages(&process, 200..210),
            kept: Hashes::new(),
        };
        let mut noted = pages(&process, 0..10);
        for more in [100..110, 200..210] {
            noted.put(1, &process, pages(&process, more).spaces.remove(&1).unwrap().1);
        }
        Stock::new(&noted, leaving)
    }

    /// The numbers of the pages that are taken next, until one would have to wait.
    fn taken(stock: &Stock) -> Vec<(u64, u64)> {
        let take = || stock.lock().take();
        std::iter::from_fn(take).map(|(_, _, range)| numbers(&range)).collect()
    }

    fn numbers(range: &Range) -> (u64, u64) {
        (range.start / PAGE_SIZE, range.end / PAGE_SIZE)
    }

    #[tokio::test]
    async fn what_was_written_last_comes_first_and_a_few_pages_stay_until_the_commit() {
        let answering = Answering::start(stock(), None);
        let stock = &answering.stock.0;
        assert!(answering.leaves());
        // Ten of those that stay are CRIU's.
        assert_eq!(taken(stock), [(100, 110), (6, 10)]);
        answering.dumped();
        assert_eq!(taken(stock), []);
        answering.committed();
        assert_eq!(taken(stock), [(200, 210), (0, 6)]);
        assert!(stock.take().is_none(), "nobody waits for more when all is sent");
    }

    #[tokio::test]
    async fn who_waits_for_pages_is_told_when_the_migration_ends() {
        let answering = Answering::start(stock(), None);
        let stock = Arc::clone(&answering.stock.0);
        assert_eq!(taken(&stock).len(), 2);
        let waiting = std::thread::spawn(move || stock.take().is_none());
        drop(answering);
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn pages_around_one_that_is_asked_for_follow_it_once() {
        let stock = stock();
        stock.beside.store(4 * PAGE_SIZE, Ordering::Relaxed);
        let around = |page| {
            let (_, _, beside) = stock.want(1, page).unwrap();
            beside.iter().map(numbers).collect::<Vec<_>>()
        };
        assert_eq!(around(5), [(4, 5), (6, 8)]);
        assert_eq!(around(5), []);
        assert_eq!(around(109), [(108, 109)]);
        assert_eq!(stock.lock().pages, 30 - 4 - 2);
        assert_eq!(taken(&stock), [(100, 108)]);
        assert!(stock.want(2, 5).is_none(), "there is no such process");
    }

    #[test]
    fn pages_that_the_destination_has_kept_are_named_and_others_are_sent() {
        // Two whole pages somewhere in it.
        let memory: Vec<u8> = (0..3 * PAGE).map(|at| at.to_le_bytes()[0]).collect();
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(PAGE_SIZE);
        let offset = usize::try_from(first).unwrap() - memory.as_ptr().addr();
        let mut kept = Hashes::new();
        for (number, differs) in [(0, false), (1, true)] {
            let at = offset + number * PAGE;
            let address = first + number as u64 * PAGE_SIZE;
            let hash = xxh3_128(&memory[at..at + PAGE]) + u128::from(differs);
            let region = kept.entry((1, address / REGION));
            region.or_insert_with(|| Box::new([ZERO; 512]))[index_in_region(address)] = hash;
        }
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut batch = Builder::new(1);
        let range = first..first + 2 * PAGE_SIZE;
        read(&process, 1, range.clone(), &mut Reader::new(), &kept, &mut batch).unwrap();
        let Batch { runs, .. } = Batch::decode(batch.finish(Codec::Raw)).unwrap();
        let kinds: Vec<_> = runs.iter().map(|run| (run.range.clone(), run.kind)).collect();
        let middle = first + PAGE_SIZE;
        assert_eq!(kinds, [(first..middle, Kind::Kept), (middle..range.end, Kind::Data)]);
    }

    #[test]
    fn ranges_arrive_as_they_were_sent_and_others_are_refused() {
        let message = |ranges: &[u64]| PageRanges { space: 1, ranges: ranges.to_vec() };
        assert_eq!(decode_ranges(&message(&[1, 2, 9, 1])).unwrap(), [0x1000..0x3000, 0x9000..0xa000]);
        for bad in [&[1][..], &[1, 0], &[u64::MAX, 1], &[1, u64::MAX], &[1, 2, 3]] {
            assert_eq!(decode_ranges(&message(bad)), None, "{bad:?}");
        }
    }
}
