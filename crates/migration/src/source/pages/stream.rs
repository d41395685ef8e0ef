//! One stream: it takes its share of the noted pages, packs them and hands them to its connection. A page goes whole, as
//! a delta to what was sent before, or by its name only.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::time::Instant;

use godwit_memory::batch::{Builder, Pool};
use godwit_memory::process::{Piece, Process, ProcessError, Reader};
use godwit_memory::{PAGE_SIZE, Range, Space};
use lru::LruCache;
use rangemap::RangeSet;
use tokio::sync::mpsc;

use super::shared::{Part, Shared};
use super::{Ended, OnProgress, PAGE, PagesError, Sent, Todo, is_empty};
use crate::failpoint;
use crate::message::Message;
use crate::options::Compress;
use crate::page_hash::{Hashes, PageKey, ZERO, no_hashes};
use crate::source::pace::{Pacer, Packer};

/// What decides about a page's stream: pages that lie beside each other stay together.
const REGION: u64 = 2 << 20;

/// Stands for a page of which the destination has something else here: that of a process that has ended, or a part. In
/// practice no content has this hash.
const ANOTHERS: u128 = u128::MAX;

/// What a page in a stream's memory takes, with its place.
const CACHED_BYTES: usize = PAGE + 64;

/// One stream's memory of what it sent, and its compressor.
pub(super) struct Stream {
    known: Hashes,
    /// The delta cache: the latest contents of pages that were sent more than once.
    cache: LruCache<(Space, u64), Box<[u8; PAGE]>>,
    packer: Packer,
    pool: Pool,
}

impl Stream {
    /// It has sent nothing. `delta_cache` bytes of pages are kept for deltas.
    pub(super) fn new(compress: Compress, delta_cache: usize) -> Self {
        let most = NonZeroUsize::new(delta_cache / CACHED_BYTES).unwrap_or(NonZeroUsize::MIN);
        Self {
            known: no_hashes(),
            cache: LruCache::new(most),
            packer: Packer::new(compress),
            pool: Pool::default(),
        }
    }

    /// The destination has nothing of these addresses any more.
    pub(super) fn forget(&mut self, space: Space, range: Range) {
        if !range.is_empty() {
            self.known.forget(space, &range);
        }
    }

    /// A file has another size at the destination, which has nothing of it behind the smaller of the two.
    pub(super) fn resized(&mut self, space: Space, before: u64, now: u64) {
        let smaller = before.min(now);
        self.forget(space, smaller.next_multiple_of(PAGE_SIZE)..before);
        // Of this page the destination has a part.
        if !smaller.is_multiple_of(PAGE_SIZE) {
            self.known.set(space, smaller / PAGE_SIZE * PAGE_SIZE, ANOTHERS);
        }
    }

    /// The hash of what it sent last of a page.
    pub(super) fn sent(&self, space: Space, address: u64) -> u128 {
        self.known.get(space, address)
    }
}

/// The parts of a range that belong to one of so many streams.
pub(super) fn shares(range: &Range, index: usize, count: usize) -> impl Iterator<Item = Range> + use<> {
    let (index, count, range) = (index as u64, count as u64, range.clone());
    (range.start / REGION..=(range.end - 1) / REGION).filter(move |region| region % count == index).map(
        move |region| range.start.max(region * REGION)..range.end.min((region + 1).saturating_mul(REGION)),
    )
}

/// A stream at work.
pub(super) struct Sending<'a> {
    pub(super) stream: &'a mut Stream,
    pub(super) index: usize,
    pub(super) count: usize,
    pub(super) sender: &'a mpsc::Sender<Message>,
    pub(super) retained: &'a Hashes,
    pub(super) key: &'a PageKey,
    pub(super) pacer: &'a Pacer,
    pub(super) on_progress: &'a OnProgress<'a>,
    /// Also pages that the destination has as they are.
    pub(super) all: bool,
    pub(super) sent: Sent,
}

impl Sending<'_> {
    /// Sends what is this stream's.
    pub(super) fn work(
        &mut self,
        todo: &BTreeMap<Space, Todo>,
        ended: &[Ended],
        (shared, part): (&Shared, Part),
    ) -> Result<(), PagesError> {
        for ended in ended {
            self.end(ended)?;
        }
        let mut reader = Reader::new();
        for (space, todo) in todo {
            let mut batch = Builder::with(*space, &self.stream.pool);
            for range in todo.zero.iter() {
                for piece in self.mine(range) {
                    self.forget(*space, &piece);
                    batch.zero(&piece);
                    if batch.is_full() {
                        self.ship(&mut batch)?;
                    }
                }
            }
            for range in todo.data.iter() {
                for piece in self.mine(range) {
                    self.pages(*space, &todo.process, piece, &mut reader, &mut batch)?;
                }
            }
            if !batch.is_empty() {
                self.ship(&mut batch)?;
            }
        }
        for (space, followed) in shared.segments_of(part) {
            self.shared(space, followed)?;
        }
        Ok(())
    }

    /// The parts of a range that are this stream's.
    pub(super) fn mine(&self, range: &Range) -> impl Iterator<Item = Range> + use<> {
        shares(range, self.index, self.count)
    }

    /// Where the buffers of its batches come from.
    pub(super) fn pool(&self) -> &Pool {
        &self.stream.pool
    }

    /// Notes the hash of a page that goes.
    pub(super) fn note(&mut self, space: Space, address: u64, hash: u128) {
        self.stream.known.set(space, address, hash);
    }

    /// A process has ended: the next one with its number starts from nothing. Pages that already exist
    /// again are still to come: a process that waits for one of them must not be given an empty one.
    fn end(&mut self, ended: &Ended) -> Result<(), PagesError> {
        let Ended { space, owed, lives } = ended;
        let mut gone: RangeSet<u64> = owed.iter().flat_map(|range| self.mine(range)).collect();
        let known = self.stream.known.change_all(*space, |page, known| {
            if known != ZERO && lives.contains(&page) { ANOTHERS } else { ZERO }
        });
        for range in known {
            for page in (range.start..range.end).step_by(PAGE) {
                self.stream.cache.pop(&(*space, page / PAGE_SIZE));
            }
            gone.insert(range);
        }
        let mut batch = Builder::with(*space, &self.stream.pool);
        for range in gone.iter().flat_map(|range| lives.gaps(range)) {
            batch.zero(&range);
            if batch.is_full() {
                self.ship(&mut batch)?;
            }
        }
        if batch.is_empty() { Ok(()) } else { self.ship(&mut batch) }
    }

    pub(super) fn forget(&mut self, space: Space, piece: &Range) {
        for page in (piece.start..piece.end).step_by(PAGE) {
            self.stream.known.set(space, page, ZERO);
        }
    }

    fn pages(
        &mut self,
        space: Space,
        process: &Process,
        range: Range,
        reader: &mut Reader,
        batch: &mut Builder,
    ) -> Result<(), PagesError> {
        let mut pieces = reader.pieces(process, range);
        while let Some(piece) = pieces.next() {
            match piece {
                Ok(Piece::Data { start, bytes }) => {
                    for (address, content) in (start..).step_by(PAGE).zip(bytes.as_chunks::<PAGE>().0) {
                        self.page(space, address, content, batch)?;
                    }
                }
                // No scan follows, and the destination may have been told to wait for it.
                Ok(Piece::Vanished(gone)) if self.all => {
                    is_empty(process, &gone)?;
                    self.forget(space, &gone);
                    batch.zero(&gone);
                    if batch.is_full() {
                        self.ship(batch)?;
                    }
                }
                // The next scan finds it gone, or the whole process ended.
                Ok(Piece::Vanished(_)) => {}
                Err(ProcessError::Gone { .. }) if !self.all => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn page(
        &mut self,
        space: Space,
        address: u64,
        content: &[u8; PAGE],
        batch: &mut Builder,
    ) -> Result<(), PagesError> {
        let hash = match godwit_memory::batch::is_zero(content) {
            true => ZERO,
            false => self.key.hash(content),
        };
        self.sent.found += u64::from(hash != ZERO);
        let known = self.stream.known.set(space, address, hash);
        if known == hash && !self.all {
            self.sent.same += 1;
            return Ok(());
        }
        let again = known != ZERO;
        self.sent.pages += 1;
        let place = (space, address / PAGE_SIZE);
        let retained = hash != ZERO && self.retained.get(space, address) == hash;
        if retained {
            batch.retained(address);
            self.stream.cache.pop(&place);
        } else if hash == ZERO || self.all {
            // What is announced is forgotten there: nothing is left for a delta to apply to.
            batch.page(address, content);
        } else if again {
            let before = self.stream.cache.get(&place);
            if !before.is_some_and(|before| batch.delta(address, before, content)) {
                batch.page(address, content);
            }
            self.stream.cache.put(place, Box::new(*content));
        } else {
            batch.page(address, content);
            // What it held before it was zero, or another process's, cannot be the base of a delta.
            self.stream.cache.pop(&place);
        }
        if batch.is_full() {
            self.ship(batch)?;
        }
        Ok(())
    }

    pub(super) fn ship(&mut self, batch: &mut Builder) -> Result<(), PagesError> {
        let bytes = self.stream.packer.pack(batch);
        let length = bytes.len() as u64;
        self.pacer.wait(length);
        let waiting = Instant::now();
        self.sender.blocking_send(Message::Pages(bytes)).map_err(|_| PagesError::Closed)?;
        self.stream.packer.waited(waiting.elapsed());
        self.sent.bytes += length;
        if (self.on_progress)(length).is_break() {
            return Err(PagesError::Stopped);
        }
        let point = if self.all { "source.sending" } else { "source.copying" };
        failpoint::blocking_point_until(point, || (self.on_progress)(0).is_break());
        Ok(())
    }
}

#[cfg(test)]
mod differences;
