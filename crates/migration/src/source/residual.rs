//! Residual pages, and the order in which they go: faulted pages, with those around them; those written last; the
//! others; those of shared memory. Pages that CRIU may change while it dumps have to wait, and a few, with those of shared
//! memory, stay until the commit.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use godwit_memory::batch::MAX_PAGES;
use godwit_memory::{PAGE_SIZE, Range, Space};
use rangemap::RangeSet;

use super::pages::{Leaving, Owner, Remaining, pages_of};
use crate::page_hash::EarlierVisit;

/// What lies behind a page that is waited for and follows it, bytes, until it is known how much crosses
/// while the next is asked for.
const BESIDE: u64 = 2 * PAGE_SIZE;

/// Pages that stay until the commit unless they are asked for, however fast the link is: what comes
/// after the commit is then the same for every service. They are the last of those that were not written
/// lately, at the lowest addresses: stacks, which a restore touches, lie high.
const SPARED: u64 = 16;

/// What all streams take pages from.
pub(crate) struct Residual {
    shelf: Mutex<Shelf>,
    /// Something was put on the shelf, or it is closed.
    changed: Condvar,
    /// Those also of pages that are under way: they may be asked for before they arrive.
    owners: BTreeMap<Space, Owner>,
    /// What the destination retained when the service left it.
    pub(super) retained: Option<EarlierVisit>,
    /// Bytes behind a page that is asked for that follow it.
    pub(super) beside: AtomicU64,
    /// Bytes of pages that went.
    pub(super) bytes: AtomicU64,
    /// Bytes of the pages in these, before packing, without pages that went once more.
    pub(super) page_bytes: AtomicU64,
    /// Pages asked for.
    pub(super) faults: AtomicU64,
}

/// Pages that have not been sent.
#[derive(Debug, Default)]
struct Shelf {
    /// Taken first.
    first: Remaining,
    rest: Remaining,
    /// Not to be taken before the commit.
    shared: Remaining,
    /// Not to be taken while CRIU dumps.
    untouched: Remaining,
    /// How many there are in all, and of shared memory.
    pages: u64,
    shared_pages: u64,
    /// The service has been committed to the destination.
    committed: bool,
    /// No more pages are taken.
    closed: bool,
}

fn pages(range: &Range) -> u64 {
    (range.end - range.start) / PAGE_SIZE
}

impl Shelf {
    /// Takes a few pages that lie beside each other.
    fn take(&mut self) -> Option<(Space, Owner, Range)> {
        let most = self.loose().min(MAX_PAGES as u64);
        if most == 0 {
            return None;
        }
        let mut taken = self.first.take(most).or_else(|| self.rest.take(most));
        if self.committed && taken.is_none() {
            taken = self.shared.take(most);
            self.shared_pages -= taken.as_ref().map_or(0, |(_, _, range)| pages(range));
        }
        self.pages -= taken.as_ref().map_or(0, |(_, _, range)| pages(range));
        taken
    }

    /// How many pages may go unasked.
    fn loose(&self) -> u64 {
        match self.committed {
            true => self.pages,
            false => self.pages.saturating_sub(SPARED + self.shared_pages),
        }
    }

    /// Takes those of these pages that are there.
    fn remove(&mut self, space: Space, range: &Range) -> RangeSet<u64> {
        let mut taken = self.shared.remove(space, range);
        self.shared_pages -= pages_of(&taken);
        for remaining in [&mut self.first, &mut self.rest, &mut self.untouched] {
            taken.extend(remaining.remove(space, range));
        }
        self.pages -= pages_of(&taken);
        taken
    }
}

impl Residual {
    /// Of these pages, of a frozen service, none is pushed: they go another way. What is asked for is
    /// answered.
    pub(crate) fn of_others(owners: BTreeMap<Space, Owner>) -> Self {
        Self::with(Shelf::default(), owners, None)
    }

    /// All of these, of a frozen service. Those that CRIU may change for a moment are not pushed before
    /// [`Residual::dumped`].
    pub(crate) fn new(owners: BTreeMap<Space, Owner>, leaving: Leaving) -> Self {
        let Leaving { recent, rest, shared, untouched, retained } = leaving;
        let shared_pages = shared.pages();
        let pages = recent.pages() + rest.pages() + shared_pages + untouched.pages();
        let shelf = Shelf { first: recent, rest, shared, untouched, pages, shared_pages, ..Shelf::default() };
        Self::with(shelf, owners, retained)
    }

    fn with(shelf: Shelf, owners: BTreeMap<Space, Owner>, retained: Option<EarlierVisit>) -> Self {
        Self {
            shelf: Mutex::new(shelf),
            changed: Condvar::new(),
            owners,
            retained,
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

    /// How many pages are left.
    pub(super) fn pages(&self) -> u64 {
        self.lock().pages
    }

    /// CRIU has left the processes: all pages are as they were.
    pub(super) fn dumped(&self) {
        self.change(|shelf| {
            let untouched = std::mem::take(&mut shelf.untouched);
            for (space, (owner, pages)) in untouched.spaces {
                shelf.first.put(space, &owner, pages);
            }
        });
    }

    /// The destination owns the service.
    pub(super) fn committed(&self) {
        self.change(|shelf| shelf.committed = true);
    }

    /// Whether it does.
    pub(super) fn is_committed(&self) -> bool {
        self.lock().committed
    }

    /// Takes a few pages; waits while there are none that may be taken. None when there will be none.
    pub(super) fn take(&self) -> Option<(Space, Owner, Range)> {
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

    /// Takes one page, and those behind it that have not been sent: a process that reads the beginning of something is
    /// likely to read the rest. The page may be on its way already; then it goes once more, ahead of the others. Says
    /// whether it was still here.
    pub(super) fn want(&self, space: Space, page: u64) -> Option<(Owner, bool, RangeSet<u64>)> {
        self.faults.fetch_add(1, Ordering::Relaxed);
        let owner = self.owners.get(&space)?;
        let start = page.checked_mul(PAGE_SIZE)?;
        let wanted = start..start.checked_add(PAGE_SIZE)?;
        let beside = self.beside.load(Ordering::Relaxed);
        let behind = wanted.end..wanted.end.checked_add(beside)?;
        let mut shelf = self.lock();
        let fresh = !shelf.remove(space, &wanted).is_empty();
        let beside = match shelf.loose() * PAGE_SIZE >= beside {
            true => shelf.remove(space, &behind),
            false => RangeSet::new(),
        };
        Some((owner.clone(), fresh, beside))
    }
}

/// Closes the residual pages when it is dropped, so that the threads that take from it end.
pub(super) struct CloseOnDrop(pub(super) Arc<Residual>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.change(|shelf| shelf.closed = true);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use godwit_memory::process::Process;

    use super::*;

    /// Pages of this process, whose contents do not matter.
    fn of(process: &Owner, range: std::ops::Range<u64>) -> Remaining {
        let mut remaining = Remaining::default();
        let mut set = RangeSet::new();
        set.insert(range.start * PAGE_SIZE..range.end * PAGE_SIZE);
        remaining.put(1, process, set);
        remaining
    }

    /// Pages 100 to 110 were written last, CRIU may change 200 to 210, and there are 0 to 10.
    fn residual() -> Residual {
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let process = Owner::Process(Arc::new(process));
        let leaving = Leaving {
            recent: of(&process, 100..110),
            rest: of(&process, 0..10),
            untouched: of(&process, 200..210),
            ..Leaving::default()
        };
        Residual::new(BTreeMap::from([(1, process)]), leaving)
    }

    /// The numbers of the pages that are taken next, until one would have to wait.
    fn taken(residual: &Residual) -> Vec<(u64, u64)> {
        let take = || residual.lock().take();
        std::iter::from_fn(take).map(|(_, _, range)| numbers(&range)).collect()
    }

    fn numbers(range: &Range) -> (u64, u64) {
        (range.start / PAGE_SIZE, range.end / PAGE_SIZE)
    }

    #[test]
    fn what_was_written_last_comes_first_and_a_few_pages_stay_until_the_commit() {
        let residual = &residual();
        assert_eq!(residual.pages(), 30);
        // Ten of those that stay are CRIU's.
        assert_eq!(taken(residual), [(100, 110), (6, 10)]);
        residual.dumped();
        assert_eq!(taken(residual), []);
        residual.committed();
        assert_eq!(taken(residual), [(200, 210), (0, 6)]);
        assert!(residual.take().is_none(), "nobody waits for more when all is sent");
    }

    #[test]
    fn shared_memory_stays_until_the_commit_unless_it_is_asked_for() {
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let process = Owner::Process(Arc::new(process));
        let (rest, shared) = (of(&process, 0..20), of(&process, 100..140));
        let leaving = Leaving { rest, shared, ..Leaving::default() };
        let residual = &Residual::new(BTreeMap::from([(1, process)]), leaving);
        assert_eq!(taken(residual), [(16, 20)]);
        let (_, fresh, _) = residual.want(1, 110).unwrap();
        assert!(fresh && residual.pages() == 55);
        residual.committed();
        assert_eq!(taken(residual), [(0, 16), (111, 140), (100, 110)]);
    }

    #[test]
    fn who_waits_for_pages_is_told_when_the_migration_ends() {
        let open = CloseOnDrop(Arc::new(residual()));
        let residual = Arc::clone(&open.0);
        assert_eq!(taken(&residual).len(), 2);
        let waiting = std::thread::spawn(move || residual.take().is_none());
        drop(open);
        assert!(waiting.join().unwrap());
    }

    #[test]
    fn pages_behind_one_that_is_asked_for_follow_it_once() {
        let residual = residual();
        residual.beside.store(4 * PAGE_SIZE, Ordering::Relaxed);
        let behind = |page| {
            let (_, _, beside) = residual.want(1, page).unwrap();
            beside.iter().map(numbers).collect::<Vec<_>>()
        };
        assert_eq!(behind(4), [(5, 9)]);
        assert_eq!(behind(4), []);
        assert_eq!(behind(107), [(108, 110)]);
        assert_eq!(residual.pages(), 30 - 5 - 3);
        assert_eq!(taken(&residual), [(101, 107)], "the others are spared");
        assert!(residual.want(2, 5).is_none(), "there is no such process");
    }
}
