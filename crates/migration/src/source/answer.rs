//! The task and the threads that send the residual pages: the task answers page faults, the threads push the rest
//! over all streams, only so fast that the answers stay quick.

use std::convert::Infallible;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use godwit_memory::batch::{Builder, Codec, Pool};
use godwit_memory::process::{Piece, Reader};
use godwit_memory::{PAGE_SIZE, Range, Space};
use godwit_transfer::Gauge;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};

use super::governor::keep_short;
use super::pace::{Pacer, Packer};
use super::pages::{Owner, PagesError, is_empty};
use super::residual::{CloseOnDrop, Residual};
use super::serve::ServeError;
use super::streams::Streams;
use crate::failpoint;
use crate::link::Link;
use crate::message::{FaultRequest, Message};
use crate::options::Compress;
use crate::page_hash::EarlierVisit;

const PAGE: usize = 4096;

/// How much of what follows a page that is waited for goes in one piece, bytes: a seventh of a millisecond
/// of a link of 1 Gbit/s.
const FEW: usize = 4 * PAGE;

/// The residual pages, and what works on them: a task that answers what the destination asks for, and threads that
/// push the rest.
pub(crate) struct Answering {
    pub(super) residual: CloseOnDrop,
    pub(super) answering: JoinSet<Result<(), ServeError>>,
    pub(super) pushing: JoinSet<Result<(), PagesError>>,
    pacing: JoinSet<Infallible>,
    /// What the kernel knows of the stream for answers.
    gauge: Option<Weak<Gauge>>,
    leaves: bool,
}

impl Answering {
    /// Answers on this stream from now on.
    pub(crate) fn start(residual: Residual, stream: Option<Link>) -> Self {
        let leaves = residual.pages() > 0;
        let residual = Arc::new(residual);
        let mut answering = JoinSet::new();
        let gauge = stream.as_ref().map(Link::gauge);
        if let Some(stream) = stream {
            answering.spawn(answer(stream, Arc::clone(&residual)));
        }
        let (pushing, pacing) = (JoinSet::new(), JoinSet::new());
        Self { residual: CloseOnDrop(residual), answering, pushing, pacing, gauge, leaves }
    }

    /// Pushes over these streams from now on.
    pub(crate) fn push(&mut self, streams: &Streams, compress: Compress, max_bandwidth: Option<u64>) {
        let pacer = Arc::new(Pacer::new(max_bandwidth));
        for sender in streams.senders() {
            let (residual, pacer) = (Arc::clone(&self.residual.0), Arc::clone(&pacer));
            self.pushing.spawn_blocking(move || push(&residual, &sender, &pacer, compress));
        }
        let residual = Arc::clone(&self.residual.0);
        let may_follow = move |bytes| residual.beside.store(bytes, Ordering::Relaxed);
        self.pacing.spawn(keep_short(streams.gauges(), self.gauge.clone(), may_follow));
    }

    /// Whether pages have stayed here for after the commit.
    pub(crate) fn leaves(&self) -> bool {
        self.leaves
    }

    /// CRIU has left the processes: all pages are as they were.
    pub(crate) fn dumped(&self) {
        self.residual.0.dumped();
    }

    /// Counts the pages asked for, at most so many.
    pub(crate) fn asked(&self, most: u64) -> impl Fn() -> u64 + Send + use<> {
        let residual = Arc::clone(&self.residual.0);
        move || residual.faults.load(Ordering::Relaxed).min(most)
    }

    /// Bytes of pages that went so far, and are not counted again.
    pub(crate) fn count(&self) -> u64 {
        self.residual.0.bytes.swap(0, Ordering::Relaxed)
    }

    /// Pends until pages cannot be pushed; then why.
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

/// One stream's thread: takes residual pages until there are none.
fn push(
    residual: &Residual,
    sender: &mpsc::Sender<Message>,
    pacer: &Pacer,
    compress: Compress,
) -> Result<(), PagesError> {
    let mut packer = Packer::new(compress);
    let (mut reader, pool) = (Reader::new(), Pool::default());
    while let Some((space, owner, range)) = residual.take() {
        if residual.is_committed() {
            failpoint::blocking_point("source.pushing");
            if failpoint::fails("source.reading") {
                return Err(owner.unreadable(range.start));
            }
        }
        let mut batch = Builder::with(space, &pool);
        let retained = read(&owner, space, range, &mut reader, residual.retained.as_ref(), &mut batch)?;
        let raw = batch.data_bytes() + retained;
        let batch = packer.pack(&mut batch);
        let bytes = batch.len() as u64;
        pacer.wait(bytes);
        let waiting = std::time::Instant::now();
        sender.blocking_send(Message::Pages(batch)).map_err(|_| PagesError::Closed)?;
        packer.waited(waiting.elapsed());
        residual.bytes.fetch_add(bytes, Ordering::Relaxed);
        residual.page_bytes.fetch_add(raw, Ordering::Relaxed);
    }
    Ok(())
}

/// Reads pages of a frozen service into a batch. What it does not have reads as zero; what the
/// destination has retained is named: so many bytes of pages are returned.
fn read(
    owner: &Owner,
    space: Space,
    range: Range,
    reader: &mut Reader,
    retained: Option<&EarlierVisit>,
    batch: &mut Builder,
) -> Result<u64, PagesError> {
    let process = match owner {
        Owner::Process(process) => process,
        Owner::Segment(segment) => {
            let mut content = vec![0; usize::try_from(range.end - range.start).unwrap_or(usize::MAX)];
            let read = segment.read(range.start, &mut content);
            read.map_err(|source| PagesError::Shared { action: "read", source })?;
            for (page, content) in (range.start..).step_by(PAGE).zip(content.as_chunks::<PAGE>().0) {
                batch.page(page, content);
            }
            return Ok(0);
        }
    };
    let mut named = 0;
    let mut pieces = reader.pieces(process, range);
    while let Some(piece) = pieces.next() {
        match piece? {
            Piece::Data { start, bytes } => {
                for (page, content) in (start..).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
                    if retained.is_some_and(|retained| retained.has(space, page, content)) {
                        batch.retained(page);
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

/// Answers on the stream for faults until it breaks.
async fn answer(mut stream: Link, residual: Arc<Residual>) -> Result<(), ServeError> {
    let (mut reader, pool) = (Reader::new(), Pool::default());
    loop {
        let FaultRequest { space, page } = match stream.receive().await? {
            Message::FaultRequest(request) => request,
            other => return Err(stream.unexpected(&other, "FaultRequest").into()),
        };
        let Some((owner, fresh, beside)) = residual.want(space, page) else {
            return Err(ServeError::Invalid(stream.node().to_owned()));
        };
        let start = page * PAGE_SIZE;
        // The page alone first, so that it does not wait for the others. Then the others in small pieces, so that the
        // next faults do not wait long.
        let wanted = std::iter::once((start..start + PAGE_SIZE, fresh));
        for (range, fresh) in wanted.chain(beside.iter().flat_map(few).map(|range| (range, true))) {
            // A few pages are read in microseconds: no thread is worth it.
            let mut batch = Builder::with(space, &pool);
            let retained = read(&owner, space, range, &mut reader, residual.retained.as_ref(), &mut batch)?;
            if !batch.is_empty() {
                if fresh {
                    residual.page_bytes.fetch_add(batch.data_bytes() + retained, Ordering::Relaxed);
                }
                let batch = batch.finish(Codec::Raw);
                residual.bytes.fetch_add(batch.len() as u64, Ordering::Relaxed);
                stream.send(Message::Pages(batch)).await?;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_memory::batch::{Batch, Kind};
    use godwit_memory::process::Process;

    use super::*;

    #[test]
    fn pages_that_the_destination_has_kept_are_named_and_others_are_sent() {
        // Two whole pages somewhere in it.
        let memory: Vec<u8> = (0..3 * PAGE).map(|at| at.to_le_bytes()[0]).collect();
        let first = (memory.as_ptr().addr() as u64).next_multiple_of(PAGE_SIZE);
        let offset = usize::try_from(first).unwrap() - memory.as_ptr().addr();
        let mut retained = EarlierVisit::none();
        for (number, differs) in [(0, false), (1, true)] {
            let at = offset + number * PAGE;
            let address = first + number as u64 * PAGE_SIZE;
            let page = memory[at..at + PAGE].try_into().unwrap();
            retained.hashes.set(1, address, retained.key.hash(page) + u128::from(differs));
        }
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let owner = Owner::Process(Arc::new(process));
        let mut batch = Builder::new(1);
        let range = first..first + 2 * PAGE_SIZE;
        read(&owner, 1, range.clone(), &mut Reader::new(), Some(&retained), &mut batch).unwrap();
        let Batch { runs, .. } = Batch::decode(batch.finish(Codec::Raw)).unwrap();
        let kinds: Vec<_> = runs.iter().map(|run| (run.range.clone(), run.kind)).collect();
        let middle = first + PAGE_SIZE;
        assert_eq!(kinds, [(first..middle, Kind::Retained), (middle..range.end, Kind::Data)]);
    }
}
