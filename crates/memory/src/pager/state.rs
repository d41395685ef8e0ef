//! What the pager's two threads share, under one lock: the index, the live processes and what they
//! wait for. Reading a process's messages, changing the index and UFFDIO_COPY all happen under the
//! lock, so that contents that a process has since removed or replaced are never put into it.
//!
//! ```text
//!          Put, Zero, Pending                       messages (fault, fork, remap, remove, unmap)
//! client ───────────────────▶ Index ◀── origin ── Layout of each live process ◀── kernel
//!                               │                     ▲
//!                               └── store slot ──UFFDIO_COPY──▶ page installed, leaves the layout;
//!                                                     lacked by no layout: slot freed
//! ```
//!
//! `install.rs` puts pages into processes, `shared.rs` into memory that they share, and `presence.rs` judges what a process
//! has where it should lack a page. What the client asks for, what the restorer and the kernel say, and the bookkeeping are
//! here.
//!
//! Until the restore is finished no slot is freed by an installation, so that a restore that failed
//! can be tried again.

mod install;
mod presence;
mod shared;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::Arc;

use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use rangemap::RangeSet;

use self::shared::View;
use super::index::{Index, IndexError};
use super::layout::{Layout, clip};
use super::protocol::{Answer, Extent, Nothing, State as Summary, Stored};
use super::segment::Segment;
use super::store::Store;
use super::tables::Tables;
use super::uffd::{Event, Uffd, Unreadable};
use crate::{Range, Space};

/// Reads of one process's messages in one turn, so that one process does not keep the others out.
const READS: usize = 4;

/// Live processes from which on those that have ended are looked for.
const SWEEP_FROM: usize = 256;

/// All addresses.
const EVERYTHING: Range = 0..u64::MAX;

/// Number of a live process, also its token in the epoll set; never used again.
pub(crate) type LiveId = u64;

/// The smallest [`LiveId`]: tokens below it are the control thread's.
pub(crate) const FIRST_LIVE: LiveId = 16;

/// What the push should do next.
#[derive(Debug)]
pub(crate) enum Work {
    /// Something was done: go on.
    Go,
    /// Wait until something changes.
    Wait,
    /// The kernel or the service's cgroup said not now: wait a moment.
    Backoff,
    /// Give these slots back.
    Punch(RangeSet<u64>),
    /// The pager ends.
    End,
}

#[derive(Debug)]
struct Live {
    space: Space,
    uffd: Uffd,
    layout: Layout,
    view: View,
    /// Its page tables, of one that CRIU has restored and that has been looked at since.
    tables: Option<Tables>,
    /// Whether a process that runs has forked it.
    is_forked: bool,
}

/// The shared state.
#[derive(Debug)]
pub(crate) struct State {
    index: Index,
    store: Arc<Store>,
    epoll: Arc<Epoll>,
    lives: BTreeMap<LiveId, Live>,
    next_live: LiveId,
    /// So many of them there may be before those that have ended are looked for.
    sweep_from: usize,
    /// Spaces whose process has come.
    registered: BTreeSet<Space>,
    /// What the process of each other space will lack. It is kept at hand, as it is made of as many
    /// ranges as the memory has holes, and the restore waits when a process registers.
    prepared: BTreeMap<Space, Layout>,
    /// Pages that CRIU restores from its images: they are there when its process comes, or will be.
    in_images: BTreeMap<Space, RangeSet<u64>>,
    /// Areas that children have empty.
    wiped: BTreeMap<Space, RangeSet<u64>>,
    /// Pages that a process does not get from here, whatever comes.
    left_out: BTreeMap<Space, RangeSet<u64>>,
    /// Shared memory, until nothing of it is to come.
    segments: BTreeMap<Space, Segment>,
    /// Faults that wait for that.
    unplaced: BTreeSet<(LiveId, u64)>,
    /// Pages that a process did not lack any more before the restore was finished.
    postponed: Vec<(Space, Range)>,
    /// Pages asked for by a fault, with who waits for them where.
    waiting: BTreeMap<(Space, u64), Vec<(LiveId, u64)>>,
    /// Faults that the kernel did not let us answer yet, and whether they were minor ones.
    retry: BTreeSet<(LiveId, u64, bool)>,
    /// What the client is to hear.
    pub(crate) events: VecDeque<Answer>,
    installed: u64,
    faults: u64,
    restore_finished: bool,
    /// All restored processes have been looked at.
    is_verified: bool,
    push: bool,
    done: bool,
    failed: Option<String>,
    restore_failed: Option<String>,
    ending: bool,
    /// Counts the push's steps, so that the control thread sees that it gets its turns.
    steps: u64,
}

impl State {
    pub(crate) fn new(store: Arc<Store>, epoll: Arc<Epoll>, max_pages: u64) -> Self {
        Self {
            index: Index::new(store.slots(), max_pages),
            store,
            epoll,
            lives: BTreeMap::new(),
            next_live: FIRST_LIVE,
            sweep_from: SWEEP_FROM,
            registered: BTreeSet::new(),
            prepared: BTreeMap::new(),
            in_images: BTreeMap::new(),
            wiped: BTreeMap::new(),
            left_out: BTreeMap::new(),
            segments: BTreeMap::new(),
            unplaced: BTreeSet::new(),
            postponed: Vec::new(),
            waiting: BTreeMap::new(),
            retry: BTreeSet::new(),
            events: VecDeque::new(),
            installed: 0,
            faults: 0,
            restore_finished: false,
            is_verified: false,
            push: false,
            done: false,
            failed: None,
            restore_failed: None,
            ending: false,
            steps: 0,
        }
    }

    // What the client asks for.

    pub(crate) fn summary(&self) -> Summary {
        Summary {
            spaces: self.lives.len() as u64,
            stored: self.index.stored(),
            pending: self.index.pending(),
            installed: self.installed,
            faults: self.faults,
            waiting: self.waiting.len() as u64,
            restore_finished: self.restore_finished,
            push: self.push,
            done: self.done,
            failed: self.failed.clone().unwrap_or_default(),
            restore_failed: self.restore_failed.clone().unwrap_or_default(),
        }
    }

    /// The first slot that was never used.
    pub(crate) fn next_slot(&self) -> u64 {
        self.index.next_slot()
    }

    pub(crate) fn missing(&self) -> Vec<Extent> {
        self.index.all_pending()
    }

    pub(crate) fn stored(&self) -> Vec<Stored> {
        self.index.all_stored()
    }

    /// Pages that were asked for and have not come, as the events that say so.
    pub(crate) fn outstanding(&self) -> Vec<Answer> {
        self.waiting.keys().map(|&(space, addr)| fault(space, addr)).collect()
    }

    pub(crate) fn put(&mut self, entry: &Stored) -> Result<(), IndexError> {
        let before: Vec<_> = self.known(entry.space, entry.addr, entry.pages);
        let range = self.index.put(entry)?;
        match self.is_shared(entry.space) {
            true => self.keep_pending(entry.space, &range, &before),
            false => self.learned(entry.space, &range, &before),
        }
        // Who waits is served before anything else happens.
        let asked: Vec<_> = self
            .waiting
            .range((entry.space, range.start)..(entry.space, range.end))
            .map(|(&(_, addr), _)| addr)
            .collect();
        for addr in asked {
            let is_shared = self.is_shared(entry.space);
            for (id, destination) in self.waiting.remove(&(entry.space, addr)).unwrap_or_default() {
                self.serve(id, destination, is_shared);
            }
        }
        self.drop_left_out(entry.space, &range);
        self.check_shared();
        self.check_done();
        Ok(())
    }

    pub(crate) fn set_pending(&mut self, extent: &Extent) -> Result<(), IndexError> {
        let range = extent.range()?;
        let before = self.known(extent.space, extent.addr, extent.pages);
        let shared = self.segments.get(&extent.space);
        if shared.is_some_and(|segment| self.restore_finished || range.end > segment.size()) {
            return Err(IndexError::Shared { space: extent.space });
        }
        let is_shared = shared.is_some();
        self.index.set_pending(extent.space, &range)?;
        if !is_shared {
            self.learned(extent.space, &range, &before);
        }
        self.drop_left_out(extent.space, &range);
        Ok(())
    }

    /// These pages of a process are not kept, and are zero there where CRIU puts none.
    pub(crate) fn leave_out(&mut self, extent: &Extent) -> Result<(), IndexError> {
        let range = extent.range()?;
        if self.is_shared(extent.space) {
            return Err(IndexError::Shared { space: extent.space });
        }
        self.left_out.entry(extent.space).or_default().insert(range.clone());
        self.forget_range(extent.space, &range);
        Ok(())
    }

    fn drop_left_out(&mut self, space: Space, range: &Range) {
        let Some(left_out) = self.left_out.get(&space) else { return };
        let parts: Vec<_> = left_out.overlapping(range).map(|found| clip(found, range)).collect();
        for part in parts {
            self.forget_range(space, &part);
        }
    }

    pub(crate) fn zero(&mut self, extent: &Extent) -> Result<(), IndexError> {
        let range = extent.range()?;
        if self.is_shared(extent.space) {
            // What it has there is not known to be zero.
            return Err(IndexError::Shared { space: extent.space });
        }
        self.forget_range(extent.space, &range);
        Ok(())
    }

    pub(crate) fn start_push(&mut self) {
        self.push = true;
        self.check_done();
    }

    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// The pager cannot keep what it was given; said once.
    pub(crate) fn fail(&mut self, reason: String) {
        if self.failed.is_none() {
            tracing::error!(%reason, "the pager cannot go on");
            self.failed = Some(reason.clone());
            self.events.push_back(Answer::Failed(reason));
        }
    }

    // What CRIU's restorer says.

    /// A restored process and its userfaultfd.
    pub(crate) fn register(&mut self, space: Space, uffd: Uffd) -> io::Result<()> {
        let mut layout = self.prepared.remove(&space).unwrap_or_else(|| self.layout(space));
        for wiped in self.wiped.get(&space).into_iter().flat_map(RangeSet::iter) {
            layout.is_wiped(wiped.clone());
        }
        self.registered.insert(space);
        let view = View::default();
        self.add_live(Live { space, uffd, layout, view, tables: None, is_forked: false })
    }

    /// A process that is a zombie: it has no memory.
    pub(crate) fn register_zombie(&mut self, space: Space) {
        self.registered.insert(space);
    }

    pub(crate) fn restore_finished(&mut self) {
        self.restore_finished = true;
        self.events.push_back(Answer::RestoreFinished(Nothing {}));
        // Now it is known who can ever want which page.
        for (space, range) in std::mem::take(&mut self.postponed) {
            self.release(space, &range);
        }
        for space in self.index.spaces() {
            if !self.is_shared(space) && !self.lives.values().any(|live| live.space == space) {
                self.release(space, &EVERYTHING);
            }
        }
        self.prepared.clear();
        if !self.lacks_shared() {
            self.segments.clear();
        }
        let all: Vec<_> = self.lives.keys().copied().collect();
        for id in all {
            self.close_if_empty(id);
        }
        self.check_done();
    }

    /// The restore failed: its processes are dead or dying. It can be tried again.
    pub(crate) fn restore_failed(&mut self, reason: String) {
        if self.restore_finished {
            return;
        }
        tracing::warn!(%reason, "the restore failed");
        self.lives.clear();
        self.registered.clear();
        self.waiting.clear();
        self.retry.clear();
        self.postponed.clear();
        let spaces = self.index.spaces().into_iter().filter(|space| !self.is_shared(*space));
        self.prepared = spaces.map(|space| (space, self.layout(space))).collect();
        self.restore_failed = Some(reason.clone());
        self.events.push_back(Answer::RestoreFailed(reason));
    }

    /// Another restore begins.
    pub(crate) fn restore_begins(&mut self) {
        self.restore_failed = None;
    }

    // What the kernel says.

    /// Takes a process's messages and answers its faults.
    pub(crate) fn read(&mut self, id: LiveId) {
        let mut events = Vec::new();
        for _ in 0..READS {
            let Some(live) = self.lives.get(&id) else { return };
            match live.uffd.read(&mut events) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    let space = live.space;
                    // Closing it would let the process go on with zeros: it is only not listened to.
                    let _ = self.epoll.delete(&live.uffd);
                    self.fail(format!("the userfaultfd of space {space} cannot be read: {error}"));
                    break;
                }
            }
        }
        // The kernel gives faults before events, and refuses to answer them while events are unread.
        let (mut faults, mut changed) = (Vec::new(), Vec::<Range>::new());
        for event in events {
            match event {
                Event::Fault { address, minor } => faults.push((address, minor)),
                Event::Fork(child) => self.forked(id, child),
                Event::Remap { from, to, len } => {
                    self.remapped(id, &(from..from + len), to);
                    changed.extend([from..from + len, to..to + len]);
                }
                Event::Remove(range) => self.emptied(id, &range, Layout::remove),
                Event::Unmap(range) => {
                    self.stop_waiting_for_shared(id, &range);
                    if let Some(live) = self.lives.get_mut(&id) {
                        live.view.unmap(&range);
                    }
                    self.emptied(id, &range, Layout::unmap);
                    changed.push(range);
                }
            }
        }
        for (destination, is_minor) in faults {
            // Who waited there was woken, and faults again.
            if !changed.iter().any(|range| range.contains(&destination)) {
                self.serve(id, destination, is_minor);
            }
        }
        self.close_if_empty(id);
        self.check_shared();
    }

    /// Faults that were answered so far.
    pub(crate) fn faults(&self) -> u64 {
        self.faults
    }

    /// The push's turns so far.
    pub(crate) fn steps(&self) -> u64 {
        self.steps
    }

    /// The push's turn.
    pub(crate) fn step(&mut self, punch_from: u64) -> Work {
        self.steps = self.steps.wrapping_add(1);
        if self.ending {
            return Work::End;
        }
        if self.index.garbage() >= punch_from {
            return Work::Punch(self.index.take_garbage());
        }
        if self.push && self.restore_finished && self.failed.is_none() {
            match self.push_chunk() {
                Work::Wait => {}
                other => return other,
            }
        }
        if self.index.garbage() > 0 {
            return Work::Punch(self.index.take_garbage());
        }
        Work::Wait
    }

    fn forked(&mut self, parent: LiveId, uffd: Uffd) {
        if self.lives.len() >= self.sweep_from {
            self.sweep();
            self.sweep_from = (self.lives.len() * 2).max(SWEEP_FROM);
        }
        let Some(live) = self.lives.get(&parent) else { return };
        let child = Live {
            space: live.space,
            uffd,
            layout: live.layout.of_child(),
            view: live.view.clone(),
            tables: None,
            is_forked: true,
        };
        let space = child.space;
        let id = self.next_live;
        match self.add_live(child) {
            // It may lack nothing, and never say anything.
            Ok(()) => self.close_if_empty(id),
            Err(error) => self.fail(format!("a forked process of space {space} cannot be watched: {error}")),
        }
    }

    fn remapped(&mut self, id: LiveId, from: &Range, to: u64) {
        for range in [from.clone(), to..to + (from.end - from.start)] {
            self.stop_waiting_for_shared(id, &range);
        }
        let Some(live) = self.lives.get_mut(&id) else { return };
        live.view.remap(from, to);
        let (moved, lost) = live.layout.remap(from, to);
        self.stop_waiting(id, from, &moved);
        self.stop_waiting(id, &(to..to + (from.end - from.start)), &lost);
        self.release_all(id, &lost);
    }

    /// A process has given pages back, or a mapping.
    fn emptied(&mut self, id: LiveId, range: &Range, take: fn(&mut Layout, &Range) -> Vec<Range>) {
        let Some(live) = self.lives.get_mut(&id) else { return };
        let lost = take(&mut live.layout, range);
        self.stop_waiting(id, range, &lost);
        self.release_all(id, &lost);
    }

    /// Threads that wait at addresses that mean something else now fault again.
    fn stop_waiting(&mut self, id: LiveId, destination: &Range, origins: &[Range]) {
        let Some(live) = self.lives.get(&id) else { return };
        for origin in origins {
            for (_, waiters) in self.waiting.range_mut((live.space, origin.start)..(live.space, origin.end)) {
                waiters.retain(|(waiter, at)| *waiter != id || !destination.contains(at));
            }
        }
        live.uffd.wake(destination);
    }

    // Bookkeeping.

    /// Drops processes that have ended of which the kernel has not said so: nothing is put into one that lacks nothing but
    /// shared memory.
    fn sweep(&mut self) {
        let unreadable = match Unreadable::new() {
            Ok(unreadable) => unreadable,
            Err(error) => return tracing::warn!(%error, "cannot look for processes that have ended"),
        };
        let ended = self.lives.iter().filter(|(_, live)| live.uffd.has_ended(&unreadable));
        for id in ended.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.drop_live(id);
        }
    }

    /// Pages are where they belong in this process.
    fn no_longer_lacking(&mut self, id: LiveId, destination: &Range) {
        let Some(live) = self.lives.get_mut(&id) else { return };
        let origins = live.layout.remove(destination);
        self.release_all(id, &origins);
    }

    fn release_all(&mut self, id: LiveId, origins: &[Range]) {
        let Some(live) = self.lives.get(&id) else { return };
        let space = live.space;
        for origin in origins {
            self.release(space, origin);
        }
    }

    /// Forgets pages that no live process lacks, once it is known who lives.
    fn release(&mut self, space: Space, range: &Range) {
        if !self.restore_finished {
            return self.postponed.push((space, range.clone()));
        }
        let mut unwanted = RangeSet::new();
        unwanted.insert(range.clone());
        for live in self.lives.values().filter(|live| live.space == space) {
            for lacking in live.layout.lacking(range) {
                unwanted.remove(lacking);
            }
        }
        for range in unwanted.iter() {
            self.index.remove(space, range);
            self.drop_waiting(space, range);
        }
    }

    /// Pages that are zero at the source, or not there at all.
    fn forget_range(&mut self, space: Space, range: &Range) {
        self.index.remove(space, range);
        if let Some(layout) = self.prepared.get_mut(&space) {
            layout.remove_origin(range);
        }
        let mut touched = Vec::new();
        for (id, live) in self.lives.iter_mut().filter(|(_, live)| live.space == space) {
            for destination in live.layout.remove_origin(range) {
                live.uffd.wake(&destination);
                touched.push(*id);
            }
        }
        self.drop_waiting(space, range);
        for id in touched {
            self.close_if_empty(id);
        }
        self.check_done();
    }

    fn drop_waiting(&mut self, space: Space, range: &Range) {
        let asked: Vec<_> =
            self.waiting.range((space, range.start)..(space, range.end)).map(|(key, _)| *key).collect();
        for key in asked {
            self.waiting.remove(&key);
        }
    }

    /// What was known of the pages before a message about them.
    fn known(&self, space: Space, addr: u64, pages: u64) -> Vec<Range> {
        match (Extent { space, addr, pages }).range() {
            Ok(range) => self.index.runs(space, &range).map(|(range, _)| range).collect(),
            Err(_) => Vec::new(),
        }
    }

    /// Pages of a process that is being restored became known; or of one that lives, where only
    /// what it lacks is of interest.
    fn learned(&mut self, space: Space, range: &Range, before: &[Range]) {
        if self.restore_finished {
            return self.release(space, range);
        }
        let mut new = RangeSet::new();
        new.insert(range.clone());
        for known in before {
            new.remove(known.clone());
        }
        if !self.registered.contains(&space) {
            let layout = self.prepared.entry(space).or_default();
            return new.iter().for_each(|range| layout.add(range.clone()));
        }
        for live in self.lives.values_mut().filter(|live| live.space == space) {
            for range in new.iter() {
                live.layout.add(range.clone());
            }
        }
    }

    /// What a process of this space lacks of which nothing is in place.
    fn layout(&self, space: Space) -> Layout {
        let mut layout = Layout::default();
        for range in self.index.known(space) {
            layout.add(range);
        }
        layout
    }

    /// A process that cannot be listened to is kept nevertheless: its faults wait for ever instead of
    /// being answered with zeros.
    fn add_live(&mut self, live: Live) -> io::Result<()> {
        let id = self.next_live;
        self.next_live += 1;
        let added = self.epoll.add(&live.uffd, EpollEvent::new(EpollFlags::EPOLLIN, id));
        self.lives.insert(id, live);
        Ok(added?)
    }

    fn close_if_empty(&mut self, id: LiveId) {
        let is_idle = |live: &Live| {
            let may_lack_shared = !self.segments.is_empty() && (!self.is_verified || live.view.is_known);
            live.layout.is_empty() && !may_lack_shared
        };
        if self.restore_finished && self.lives.get(&id).is_some_and(is_idle) {
            self.drop_live(id);
        }
    }

    /// Closes a userfaultfd: what is not there reads as zero from then on.
    fn drop_live(&mut self, id: LiveId) {
        let Some(live) = self.lives.remove(&id) else { return };
        let _ = self.epoll.delete(&live.uffd);
        self.retry.retain(|(waiter, ..)| *waiter != id);
        self.unplaced.retain(|(waiter, _)| *waiter != id);
        let origins: Vec<_> = live.layout.origins().collect();
        for origin in &origins {
            self.release(live.space, origin);
        }
        self.check_done();
    }

    fn check_done(&mut self) {
        if self.restore_finished && self.push && self.lives.is_empty() && !self.done {
            self.done = true;
            self.events.push_back(Answer::Done(Nothing {}));
        }
    }
}

fn fault(space: Space, addr: u64) -> Answer {
    Answer::Fault(Extent { space, addr, pages: 1 })
}
