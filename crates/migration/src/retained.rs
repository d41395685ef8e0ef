//! Pages of services that left this node, or are prepared to come: they send only what differs.
//!
//! They are copied out of the frozen processes before those are killed, or out of the store of a migration that ends with
//! its preparation, into memory of this daemon, within a bound, and
//! dropped when the machine runs short of memory. When the service comes back, this node sends the source a hash of
//! each and the key of the hashes, and the source names the pages that are still the same.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_memory::batch::is_zero;
use godwit_memory::pager::{Client, PagerError, Stored};
use godwit_memory::process::{Piece, ProcessError, Reader};
use godwit_memory::tracker::{Backend, TrackError, Tracker};
use godwit_memory::{PAGE_SIZE, Space};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::machine::available_memory;
use crate::message::RetainedPages;
use crate::page_hash::{Hashes, PageKey, ZERO, no_hashes};
use crate::page_map::{LEAF_PAGES, PageMap};

const PAGE: usize = 4096;

/// What is older differs from what the service has by now, or the service is no more.
const OLDEST: Duration = Duration::from_secs(24 * 3600);

/// What was retained in this time does not give way to a preparation.
const SPARED: Duration = Duration::from_secs(600);

/// How many pages are copied at a time.
const PIECE: usize = 64;

/// Bytes of a hash on the wire.
const HASH: usize = 16;

/// Most leaves that a destination names, and that a source takes: 64 GiB of pages. Others cross.
const MAX_LEAVES: usize = if cfg!(test) { 1 << 8 } else { 1 << 18 };

/// What part of the free memory is used when the operator gave no bound.
const PART: u64 = 4;

/// Why pages could not be retained, or not be read again.
#[derive(Debug, thiserror::Error)]
pub enum RetainedError {
    /// The memory for them.
    #[error("cannot {action} the memory of services that left")]
    Io {
        /// What was tried.
        action: &'static str,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// The processes.
    #[error("the memory of a service that leaves cannot be retained")]
    Track(#[from] TrackError),
    /// A process.
    #[error("the memory of a service that leaves cannot be retained")]
    Process(#[from] ProcessError),
    /// The store of pages that have come.
    #[error("the pages of a service that is prepared to come cannot be retained")]
    Store(#[from] PagerError),
}

/// Where a page is in the file, plus one; 0: nowhere.
type Slots = PageMap<u32>;

/// The pages of one service.
#[derive(Debug)]
pub struct Retained {
    file: File,
    slots: Slots,
    hashes: Hashes,
    key: PageKey,
    bytes: u64,
}

impl Retained {
    /// Copies what these frozen processes hold, at most `most` bytes. Blocks.
    fn copy(pids: &[i32], most: u64) -> Result<Self, RetainedError> {
        let mut retained = Self::empty()?;
        let round = Tracker::new(Backend::None).round(pids, true)?;
        let mut reader = Reader::new();
        for space in round.spaces {
            for range in space.written {
                let mut pieces = reader.pieces(&space.process, range);
                while let Some(piece) = pieces.next() {
                    let Piece::Data { start, bytes } = piece? else { continue };
                    if retained.bytes + bytes.len() as u64 > most {
                        return Ok(retained);
                    }
                    retained.add(space.space, start, bytes)?;
                }
            }
        }
        Ok(retained)
    }

    /// Copies pages that have come here, at most `most` bytes. Blocks.
    fn of_store(index: &[Stored], store: &Client, most: u64) -> Result<Self, RetainedError> {
        let mut retained = Self::empty()?;
        let mut piece = vec![0; PIECE * PAGE];
        for stored in index {
            for first in (0..stored.pages).step_by(PIECE) {
                let pages = usize::try_from(stored.pages - first).map_or(PIECE, |left| left.min(PIECE));
                let bytes = &mut piece[..pages * PAGE];
                if retained.bytes + bytes.len() as u64 > most {
                    return Ok(retained);
                }
                store.read(stored.slot + first, bytes)?;
                retained.add(stored.space, stored.addr + first * PAGE_SIZE, bytes)?;
            }
        }
        Ok(retained)
    }

    fn empty() -> Result<Self, RetainedError> {
        let fd = memfd_create(c"godwit-retained", MFdFlags::MFD_CLOEXEC)
            .map_err(|errno| RetainedError::Io { action: "make", source: errno.into() })?;
        Ok(Self::within(File::from(fd)))
    }

    /// Nothing yet, in an empty file.
    fn within(file: File) -> Self {
        Self { file, slots: Slots::new(0), hashes: no_hashes(), key: PageKey::random(), bytes: 0 }
    }

    fn add(&mut self, space: Space, start: u64, bytes: &[u8]) -> Result<(), RetainedError> {
        let first = self.bytes / PAGE_SIZE;
        self.file
            .write_all_at(bytes, self.bytes)
            .map_err(|source| RetainedError::Io { action: "write", source })?;
        self.bytes += bytes.len() as u64;
        for ((slot, content), address) in
            (first + 1..).zip(bytes.as_chunks::<PAGE>().0).zip((start..).step_by(PAGE))
        {
            let Ok(slot) = u32::try_from(slot) else { return Ok(()) };
            if is_zero(content) {
                continue;
            }
            self.slots.set(space, address, slot);
            self.hashes.set(space, address, self.key.hash(content));
        }
        Ok(())
    }

    /// A page, if it was retained.
    pub fn page(&self, space: Space, address: u64) -> Result<Option<[u8; PAGE]>, RetainedError> {
        let slot = self.slots.get(space, address);
        if slot == 0 {
            return Ok(None);
        }
        let mut page = [0; PAGE];
        self.file
            .read_exact_at(&mut page, u64::from(slot - 1) * PAGE_SIZE)
            .map_err(|source| RetainedError::Io { action: "read", source })?;
        Ok(Some(page))
    }

    /// What the hashes are made with.
    pub(crate) fn key(&self) -> &PageKey {
        &self.key
    }

    /// The hashes for the source, no more than it takes.
    pub(crate) fn messages(&self) -> impl Iterator<Item = RetainedPages> + '_ {
        self.hashes.leaves().take(MAX_LEAVES).map(|(space, leaf, hashes)| RetainedPages {
            space,
            leaf,
            hashes: hashes.iter().flat_map(|hash| hash.to_le_bytes()).collect(),
        })
    }
}

/// Lets other threads and processes go before this one.
fn give_way() {
    const NICE: i32 = 10;
    // Where it is not allowed it goes on as before.
    if let Err(errno) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
        tracing::debug!(%errno, "a thread keeps its priority");
    }
}

/// Adds the hashes that a destination sends; nothing when they are not valid.
pub(crate) fn learn(hashes: &mut Hashes, message: &RetainedPages) -> Option<()> {
    if message.hashes.len() != LEAF_PAGES * HASH || hashes.len() >= MAX_LEAVES {
        return None;
    }
    let mut leaf = [ZERO; LEAF_PAGES];
    for (hash, bytes) in leaf.iter_mut().zip(message.hashes.as_chunks::<HASH>().0) {
        *hash = u128::from_le_bytes(*bytes);
    }
    hashes.put(message.space, message.leaf, leaf);
    Some(())
}

/// What was retained of a service, and when.
#[derive(Debug)]
struct Entry {
    pages: Arc<Retained>,
    since: Instant,
}

/// What was retained of all services that left, by their ids.
#[derive(Debug)]
pub struct Retention {
    retained: Mutex<HashMap<String, Entry>>,
    /// Held by the one that copies: two at a time would both fill the room that there is.
    turn: Mutex<()>,
    /// The operator's bound on all of it, bytes; none: a quarter of the free memory.
    most: Option<u64>,
}

impl Retention {
    /// Keeps at most this many bytes; none: a quarter of the free memory.
    #[must_use]
    pub fn new(most: Option<u64>) -> Self {
        Self { retained: Mutex::default(), turn: Mutex::default(), most }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<String, Entry>> {
        // Nothing can panic while the map is changed.
        self.retained.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Copies what the frozen processes of a service that leaves hold, about so many bytes. Blocks.
    pub(crate) fn copy(&self, service: &str, pids: &[i32], bytes: u64) -> Result<(), RetainedError> {
        self.in_turn(|| {
            let room = self.make_room(service, bytes, Duration::ZERO);
            self.retain(service, Retained::copy(pids, room)?);
            Ok(())
        })
    }

    /// Copies what has come of a service whose move is prepared. Returns how many bytes there was room for. Blocks.
    pub(crate) fn copy_store(
        &self,
        service: &str,
        index: &[Stored],
        store: &Client,
    ) -> Result<u64, RetainedError> {
        let pages = index.iter().map(|stored| stored.pages).fold(0, u64::saturating_add);
        self.in_turn(|| {
            // Services that are prepared again and again must not push each other out.
            let room = self.make_room(service, pages.saturating_mul(PAGE_SIZE), SPARED);
            let retained = Retained::of_store(index, store, room)?;
            let bytes = retained.bytes;
            self.retain(service, retained);
            Ok(bytes)
        })
    }

    /// Does it when nobody else copies, and on a thread of its own: nobody waits for it, and services run here.
    fn in_turn<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let worked = std::thread::scope(|scope| {
            let work = scope.spawn(|| {
                give_way();
                work()
            });
            work.join()
        });
        worked.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Makes room for so many bytes of a service's pages, in place of what is retained of it now: what was retained of
    /// others goes, the oldest first, but not what was retained in the time that is `spared`. Returns how many bytes may be
    /// retained, which may be less.
    fn make_room(&self, service: &str, bytes: u64, spared: Duration) -> u64 {
        let mut retained = self.lock();
        let held: u64 = retained.values().map(|entry| entry.pages.bytes).sum();
        let most = self.most.unwrap_or_else(|| (available_memory() + held) / PART);
        loop {
            let others = retained.iter().filter(|(id, _)| *id != service);
            let room = most.saturating_sub(others.clone().map(|(_, entry)| entry.pages.bytes).sum());
            let old = others.filter(|(_, entry)| entry.since.elapsed() >= spared);
            let oldest = old.min_by_key(|(_, entry)| entry.since).map(|(id, _)| id.clone());
            match oldest {
                Some(oldest) if room < bytes.min(most) => retained.remove(&oldest),
                _ => return room,
            };
        }
    }

    /// Keeps it for when the service comes, in place of what was kept of it.
    fn retain(&self, service: &str, retained: Retained) {
        if retained.bytes > 0 {
            let entry = Entry { pages: Arc::new(retained), since: Instant::now() };
            self.lock().insert(service.into(), entry);
        } else {
            self.forget(service);
        }
    }

    /// What was retained of a service.
    #[must_use]
    pub fn of(&self, service: &str) -> Option<Arc<Retained>> {
        self.lock().get(service).map(|entry| Arc::clone(&entry.pages))
    }

    /// The service is back, or will not come.
    pub fn forget(&self, service: &str) {
        self.lock().remove(service);
    }

    /// Bytes of all of it.
    pub fn bytes(&self) -> u64 {
        self.lock().values().map(|entry| entry.pages.bytes).fold(0, u64::saturating_add)
    }

    /// Whether there is any.
    pub fn has_any(&self) -> bool {
        !self.lock().is_empty()
    }

    /// Gives up all of it; says whether there was any.
    pub fn give_up(&self) -> bool {
        let mut retained = self.lock();
        let any = !retained.is_empty();
        retained.clear();
        any
    }

    /// Gives up what is old, and all of it when the machine has less than a tenth of its memory free.
    pub fn relieve(&self, total_memory: u64) {
        self.lock().retain(|_, entry| entry.since.elapsed() < OLDEST);
        if !self.lock().is_empty() && available_memory() < total_memory / 10 && self.give_up() {
            tracing::info!("low memory: dropping the retained pages of departed services");
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::page_map::LEAF;

    fn retained() -> Retained {
        let fd = memfd_create(c"test", MFdFlags::MFD_CLOEXEC).unwrap();
        let mut retained = Retained::within(File::from(fd));
        let mut pages = vec![0; 3 * PAGE];
        pages[..PAGE].fill(7);
        pages[2 * PAGE..].fill(9);
        retained.add(5, LEAF - PAGE_SIZE, &pages).unwrap();
        retained
    }

    #[test]
    fn pages_are_found_again_and_others_are_not() {
        let retained = retained();
        assert_eq!(retained.page(5, LEAF - PAGE_SIZE).unwrap().unwrap(), [7; PAGE]);
        assert_eq!(retained.page(5, LEAF + PAGE_SIZE).unwrap().unwrap(), [9; PAGE]);
        for (space, address) in [(5, LEAF), (5, 0), (4, LEAF + PAGE_SIZE)] {
            assert_eq!(retained.page(space, address).unwrap(), None, "{space} {address:x}");
        }
    }

    #[test]
    fn the_source_learns_the_same_hashes() {
        let retained = retained();
        let mut learnt = no_hashes();
        for message in retained.messages() {
            learn(&mut learnt, &message).unwrap();
        }
        assert_eq!(learnt, retained.hashes);
        let cut = RetainedPages { space: 1, leaf: 0, hashes: vec![0; 17] };
        assert_eq!(learn(&mut learnt, &cut), None);
    }

    #[test]
    fn more_is_not_named_than_the_source_takes() {
        let mut retained = retained();
        for leaf in 0..u64::try_from(MAX_LEAVES).unwrap() {
            retained.hashes.set(6, leaf * LEAF, 7);
        }
        let mut learnt = no_hashes();
        for message in retained.messages() {
            learn(&mut learnt, &message).expect("the source takes what the destination names");
        }
        assert_eq!(learnt.len(), MAX_LEAVES);
    }

    #[test]
    fn the_oldest_give_way_and_no_more_is_kept_than_there_is_room_for() {
        let (retention, now) = (Retention::new(Some(8 * PAGE_SIZE)), Duration::ZERO);
        retention.retain("a", retained());
        retention.retain("b", retained());
        assert_eq!(retention.make_room("c", 3 * PAGE_SIZE, SPARED), 2 * PAGE_SIZE, "both are new");
        assert_eq!(retention.in_turn(|| 7), 7);
        assert_eq!(retention.make_room("b", 5 * PAGE_SIZE, now), 5 * PAGE_SIZE, "its own pages give way");
        assert_eq!(retention.make_room("c", PAGE_SIZE, now), 2 * PAGE_SIZE);
        assert!(retention.of("a").is_some() && retention.of("b").is_some());
        assert_eq!(retention.make_room("c", 3 * PAGE_SIZE, now), 5 * PAGE_SIZE);
        assert!(retention.of("a").is_none() && retention.of("b").is_some(), "the oldest goes first");
        assert_eq!(retention.make_room("c", 9 * PAGE_SIZE, now), 8 * PAGE_SIZE);
        retention.retain("c", retained());
        assert!(retention.of("b").is_none() && retention.of("c").is_some());
        retention.forget("c");
        assert!(!retention.give_up());
    }
}
