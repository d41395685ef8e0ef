//! The task and the threads that give the destination what has stayed here: one answers what a process
//! waits for, the others push the rest beside it, over all lanes, as fast as answers stay quick.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use godwit_memory::batch::{Builder, Codec, Pool};
use godwit_memory::process::{Piece, Process, Reader};
use godwit_memory::{PAGE_SIZE, Range, Space};
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use super::lanes::Lanes;
use super::pace::{Compress, Pacer, Packer};
use super::pages::{PagesError, is_empty};
use super::queue::keep_short;
use super::serve::ServeError;
use super::stock::{Open, Stock};
use crate::fault;
use crate::link::Link;
use crate::message::{FaultRequest, Message};
use crate::page_hash::EarlierVisit;

const PAGE: usize = 4096;

/// How much of what follows a page that is waited for goes in one piece, bytes: a seventh of a millisecond
/// of a link of 1 Gbit/s.
const FEW: usize = 4 * PAGE;

/// A stock, and what works on it: a task that answers what the destination asks for, and threads that
/// push the rest.
pub(crate) struct Answering {
    pub(super) stock: Open,
    pub(super) answering: JoinSet<Result<(), ServeError>>,
    pub(super) pushing: JoinSet<Result<(), PagesError>>,
    pacing: JoinSet<Infallible>,
    leaves: bool,
}

impl Answering {
    /// Answers on this lane from now on.
    pub(crate) fn start(stock: Stock, lane: Option<Link>) -> Self {
        let leaves = stock.pages() > 0;
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
        self.stock.0.dumped();
    }

    /// Counts the pages asked for, at most so many.
    pub(crate) fn asked(&self, most: u64) -> impl Fn() -> u64 + Send + use<> {
        let stock = Arc::clone(&self.stock.0);
        move || stock.faults.load(Ordering::Relaxed).min(most)
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
        if stock.is_committed() {
            fault::blocking_point("source.pushing");
            if fault::fails("source.reading") {
                return Err(PagesError::Unreadable { pid: process.pid(), page: range.start });
            }
        }
        let mut batch = Builder::with(space, &pool);
        let kept = read(&process, space, range, &mut reader, stock.kept.as_ref(), &mut batch)?;
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
    kept: Option<&EarlierVisit>,
    batch: &mut Builder,
) -> Result<u64, PagesError> {
    let mut named = 0;
    let mut pieces = reader.pieces(process, range);
    while let Some(piece) = pieces.next() {
        match piece? {
            Piece::Data { start, bytes } => {
                for (page, content) in (start..).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
                    if kept.is_some_and(|kept| kept.has(space, page, content)) {
                        batch.kept(page);
                        named += PAGE_SIZE;
                    } else {
                        batch.page(page, content);
                    }
                }
            }
            Piece::Vanished(range) => {
                is_empty(process, &range)?;
                batch.zero(&range);
            }
        }
    }
    Ok(named)
}

/// A range in pieces of at most [`FEW`] bytes.
fn few(range: &Range) -> impl Iterator<Item = Range> + use<> {
    let (start, end) = (range.start, range.end);
    (start..end).step_by(FEW).map(move |from| from..end.min(from + FEW as u64))
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
        // The page alone first: it is not to wait for the others. Nor are those to wait for each other that
        // the process asks for next.
        let wanted = std::iter::once((start..start + PAGE_SIZE, fresh));
        for (range, fresh) in wanted.chain(beside.iter().flat_map(few).map(|range| (range, true))) {
            // A few pages are read in microseconds: no thread is worth it.
            let mut batch = Builder::with(space, &pool);
            let kept = read(&process, space, range, &mut reader, stock.kept.as_ref(), &mut batch)?;
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

    #[test]
    fn pages_that_the_destination_has_kept_are_named_and_others_are_sent() {
        // Two whole pages somewhere in it.
        let memory: Vec<u8> = (0..3 * PAGE).map(|at| at.to_le_bytes()[0]).collect();
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(PAGE_SIZE);
        let offset = usize::try_from(first).unwrap() - memory.as_ptr().addr();
        let mut kept = EarlierVisit::none();
        for (number, differs) in [(0, false), (1, true)] {
            let at = offset + number * PAGE;
            let address = first + number as u64 * PAGE_SIZE;
            let page = memory[at..at + PAGE].try_into().unwrap();
            kept.hashes.set(1, address, kept.key.hash(page) + u128::from(differs));
        }
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let mut batch = Builder::new(1);
        let range = first..first + 2 * PAGE_SIZE;
        read(&process, 1, range.clone(), &mut Reader::new(), Some(&kept), &mut batch).unwrap();
        let Batch { runs, .. } = Batch::decode(batch.finish(Codec::Raw)).unwrap();
        let kinds: Vec<_> = runs.iter().map(|run| (run.range.clone(), run.kind)).collect();
        let middle = first + PAGE_SIZE;
        assert_eq!(kinds, [(first..middle, Kind::Kept), (middle..range.end, Kind::Data)]);
    }
}
