//! Shared memory of which pages come after the restore. All its processes map one file, in which each page that is to come
//! has a placeholder; a fault is told apart by the file.
//!
//! | a process touches | the kernel says | then |
//! |---|---|---|
//! | a placeholder, or a page that is filled | minor fault | it is filled in place, and mapped (UFFDIO_CONTINUE) |
//! | what has been given back (MADV_REMOVE) | missing fault | what was to come is forgotten, and a page of zeros made |
//! | either, at an address of which the kernel has not told what is there | the same | it waits until all is filled |
//!
//! The last happens after mremap(2) of no bytes, which makes a second mapping of a length that nobody tells; where that moves
//! pages and leaves the mapping; and where a mapping has grown. That the
//! kernel tells of pages that were given back (UFFD_EVENT_REMOVE) is of no use: it says the same where only
//! the mapping has lost them (`MADV_DONTNEED`).
//!
//! What is decided by the addresses that are known is done only once the kernel has done the process's part: it refuses that
//! (EAGAIN) as long as it has not told of a change of addresses.

use std::collections::BTreeMap;

use rangemap::RangeMap;

use super::super::index::Place;
use super::super::layout::{clip, shift};
use super::super::protocol::Share;
use super::super::segment::Segment;
use super::super::tables::Tables;
use super::super::uffd::{HOLE, Outcome};
use super::install::Progress;
use super::{EVERYTHING, Live, LiveId, State};
use crate::process::ProcessError;
use crate::process::nameless::mappings_of;
use crate::shared::FIRST_SPACE;
use crate::{PAGE_SIZE, Range, Space};

/// What a process shows at an address: shared memory, from where its offset is so much less.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Shown {
    space: Space,
    distance: u64,
}

/// The shared memory that a process shows, by address.
#[derive(Debug, Clone, Default)]
pub(super) struct View {
    shown: RangeMap<u64, Shown>,
    /// Whether it ever showed any: there may be some at addresses that are not known.
    pub(super) is_known: bool,
}

impl View {
    fn show(&mut self, range: Range, space: Space, offset: u64) {
        let distance = range.start.wrapping_sub(offset);
        self.shown.insert(range, Shown { space, distance });
        self.is_known = true;
    }

    /// Whether it is known that some is there.
    pub(super) fn shows(&self, address: u64) -> bool {
        self.shown.contains_key(&address)
    }

    fn shows_any_of(&self, space: Space) -> bool {
        self.shown.iter().any(|(_, shown)| shown.space == space)
    }

    /// What of it is in this range: the space, and the offsets.
    pub(super) fn within<'a>(&'a self, range: &'a Range) -> impl Iterator<Item = (Space, Range)> + 'a {
        self.shown.overlapping(range).map(move |(found, shown)| {
            (shown.space, shift(&clip(found, range), shown.distance.wrapping_neg()))
        })
    }

    fn at(&self, address: u64) -> Option<(Space, u64)> {
        self.shown.get(&address).map(|shown| (shown.space, address.wrapping_sub(shown.distance)))
    }

    /// mremap(2): what was at `from` is at `to`.
    pub(super) fn remap(&mut self, from: &Range, to: u64) {
        if from.is_empty() {
            return;
        }
        let by = to.wrapping_sub(from.start);
        let moved: Vec<_> =
            self.shown.overlapping(from).map(|(range, shown)| (clip(range, from), *shown)).collect();
        self.shown.remove(from.clone());
        self.unmap(&shift(from, by));
        for (range, Shown { space, distance }) in moved {
            self.shown.insert(shift(&range, by), Shown { space, distance: distance.wrapping_add(by) });
        }
    }

    pub(super) fn unmap(&mut self, range: &Range) {
        if !range.is_empty() {
            self.shown.remove(range.clone());
        }
    }
}

/// Which of these a process shows, where, and from which offset on.
fn shown(
    segments: &BTreeMap<Space, Segment>,
    tables: &Tables,
) -> Result<Vec<(Space, Range, u64)>, ProcessError> {
    let maps = tables.maps()?;
    let of = |(space, segment): (&Space, &Segment)| {
        let space = *space;
        mappings_of(&maps, segment.file()).into_iter().map(move |(range, offset)| (space, range, offset))
    };
    Ok(segments.iter().flat_map(of).collect())
}

/// Why a process cannot be let run.
fn unwatched(space: Space, why: &dyn std::fmt::Display) -> String {
    format!("process {space} cannot wait for pages of its shared memory that are still to come: {why}")
}

impl State {
    /// The processes map this.
    pub(crate) fn share(&mut self, share: &Share) -> Result<(), String> {
        use std::os::unix::ffi::OsStrExt;
        let Share { space, path, size } = share;
        let path = std::path::Path::new(std::ffi::OsStr::from_bytes(path));
        let failed = |error: &dyn std::fmt::Display| {
            format!("shared memory {} cannot be filled here: {error}", path.display())
        };
        if self.restore_finished || *space < FIRST_SPACE || self.is_shared(*space) || self.index.has(*space) {
            return Err(failed(&"it is told too late, twice, or as memory of a process"));
        }
        self.segments.insert(*space, Segment::open(path, *size).map_err(|error| failed(&error))?);
        Ok(())
    }

    /// Whether it fills any, as far as it knows.
    pub(crate) fn shares(&self) -> bool {
        !self.segments.is_empty()
    }

    /// Whether pages of it are still to be filled.
    pub(super) fn lacks_shared(&self) -> bool {
        self.segments.keys().any(|space| self.index.has(*space))
    }

    /// Whether these pages are its.
    pub(super) fn is_shared(&self, space: Space) -> bool {
        self.segments.contains_key(&space)
    }

    /// From now on the kernel tells when this process, which is not running, touches shared memory that is to be filled.
    pub(super) fn watch_shared(&mut self, space: Space, id: LiveId) -> Result<(), String> {
        let Some(Live { uffd, tables: Some(tables), view, .. }) = self.lives.get_mut(&id) else {
            return Ok(());
        };
        for (shown, range, offset) in
            shown(&self.segments, tables).map_err(|error| unwatched(space, &error))?
        {
            uffd.register_shared(&range).map_err(|error| unwatched(space, &error))?;
            // Memory that is locked, for example: the kernel says nothing of a page that is mapped.
            let mapped = tables.populated(&range).and_then(|all| tables.first_page(all.into_iter()));
            if let Some(page) = mapped.map_err(|error| unwatched(space, &error))? {
                return Err(unwatched(space, &format!("it has a page at {page:#x} already; move it again")));
            }
            view.show(range, shown, offset);
        }
        Ok(())
    }

    /// Fails where this process, which has no userfaultfd, shows some of it.
    pub(super) fn shows_none(&self, space: Space, tables: &Tables) -> Result<(), String> {
        match shown(&self.segments, tables).map_err(|error| unwatched(space, &error))?.is_empty() {
            true => Ok(()),
            false => Err(unwatched(
                space,
                &"CRIU has not left it to be filled; start this node's godwitd with --userfaultfd off, and report it with CRIU's log",
            )),
        }
    }

    /// Forgets pages of memory that no process shows: nobody can ever need them.
    pub(super) fn forget_unshown(&mut self) {
        for space in self.segments.keys().copied().collect::<Vec<_>>() {
            if !self.lives.values().any(|live| live.view.shows_any_of(space)) {
                self.index.remove(space, &EVERYTHING);
            }
        }
    }

    /// Takes pages that were pending; those that were not have been filled, or given back.
    pub(super) fn keep_pending(&mut self, space: Space, range: &Range, before: &[Range]) {
        let mut others = rangemap::RangeSet::new();
        others.insert(range.clone());
        for known in before {
            others.remove(known.clone());
        }
        for range in others.iter() {
            self.index.remove(space, range);
        }
    }

    /// Answers a fault at an address of which it is known what is there; nothing if it is still to come.
    pub(super) fn serve_shown(&mut self, id: LiveId, destination: u64, is_minor: bool) -> Option<Progress> {
        let (space, offset) = self.lives.get(&id)?.view.at(destination)?;
        let page = offset..offset + PAGE_SIZE;
        match self.index.get(space, offset) {
            Some(Place::Pending) if is_minor => {
                self.await_page(space, offset, (id, destination));
                None
            }
            Some(Place::Stored(slot)) if is_minor => Some(if self.fill(space, &page, slot) {
                self.show(id, destination)
            } else {
                Progress::Failed
            }),
            None => Some(self.show(id, destination)),
            Some(_) => {
                let zeroed = self.lives.get(&id)?.uffd.zero(destination);
                if matches!(zeroed, Outcome::Filled(_)) {
                    self.is_given_back(space, &page);
                }
                Some(self.answered(id, destination, "UFFDIO_ZEROPAGE", zeroed))
            }
        }
    }

    /// Answers a fault at an address of which it is not known whether shared memory is there; nothing if it has to wait.
    pub(super) fn serve_unknown(&mut self, id: LiveId, destination: u64, is_minor: bool) -> Option<Progress> {
        let live = self.lives.get(&id)?;
        let may_lack = self.lacks_shared();
        if is_minor && may_lack {
            self.unplaced.insert((id, destination));
            return None;
        }
        match live.uffd.go_on(destination, PAGE_SIZE) {
            HOLE if may_lack => {
                self.unplaced.insert((id, destination));
                None
            }
            Outcome::Again | Outcome::NoMemory => Some(Progress::Later),
            Outcome::Filled(_) => Some(Progress::Complete),
            // No shared memory, or none that has a page there; or it has changed.
            _ => Some(self.install_zero(id, destination)),
        }
    }

    /// Threads that wait there fault again: something else is there now.
    pub(super) fn stop_waiting_for_shared(&mut self, id: LiveId, range: &Range) {
        let Some(live) = self.lives.get(&id).filter(|live| live.view.is_known && !range.is_empty()) else {
            return;
        };
        for (space, offsets) in live.view.within(range) {
            for (_, waiters) in self.waiting.range_mut((space, offsets.start)..(space, offsets.end)) {
                waiters.retain(|(waiter, at)| *waiter != id || !range.contains(at));
            }
        }
        self.unplaced.retain(|(waiter, at)| *waiter != id || !range.contains(at));
        self.retry.retain(|(waiter, at, _)| *waiter != id || !range.contains(at));
        live.uffd.wake(range);
    }

    /// Fills pages in place; whether that succeeds.
    pub(super) fn fill(&mut self, space: Space, range: &Range, slot: u64) -> bool {
        let Some(segment) = self.segments.get(&space) else { return false };
        if let Err(error) = segment.fill(range, slot, &self.store) {
            self.fail(format!("shared memory cannot be filled at {range:x?} from slot {slot}: {error}"));
            return false;
        }
        self.installed += (range.end - range.start) / PAGE_SIZE;
        self.index.remove(space, range);
        true
    }

    /// Maps a page that is there for good.
    fn show(&mut self, id: LiveId, destination: u64) -> Progress {
        let Some(live) = self.lives.get(&id) else { return Progress::Ended };
        match live.uffd.go_on(destination, PAGE_SIZE) {
            HOLE => self.install_zero(id, destination),
            outcome => self.answered(id, destination, "UFFDIO_CONTINUE", outcome),
        }
    }

    /// The file has lost a page that was to come. Who waits for it touches it again, and is told.
    fn is_given_back(&mut self, space: Space, page: &Range) {
        self.index.remove(space, page);
        for (id, destination) in self.waiting.remove(&(space, page.start)).unwrap_or_default() {
            if let Some(live) = self.lives.get(&id) {
                live.uffd.wake(&(destination..destination + PAGE_SIZE));
            }
        }
    }

    /// Once nothing of it is to come, faults that waited for that are answered, and processes that lack nothing else are
    /// let go.
    pub(super) fn check_shared(&mut self) {
        if self.segments.is_empty() || !self.is_verified || self.lacks_shared() {
            return;
        }
        self.segments.clear();
        for (id, destination) in std::mem::take(&mut self.unplaced) {
            self.serve(id, destination, true);
        }
        let all: Vec<_> = self.lives.keys().copied().collect();
        for id in all {
            self.close_if_empty(id);
        }
        self.check_done();
    }
}
