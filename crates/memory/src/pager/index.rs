//! What is known of every page of the source: in the store at a slot, still at the source
//! (pending), or nothing, which means zero. Nothing here touches memory or processes.
//!
//! Slots that are no longer named by anything are garbage until somebody takes them away
//! ([`Index::take_garbage`]) to punch them out of the store.

use std::collections::BTreeMap;

use rangemap::{RangeMap, RangeSet};

use super::layout::clip;
use super::protocol::{Extent, Stored};
use crate::{PAGE_SIZE, Range, Space};

/// The end of what can be an address: 56 bits, which no user space exceeds.
const ADDRESS_END: u64 = 1 << 56;

/// Fewest ranges that are allowed whatever the bound on pages is.
const RANGES_FLOOR: u64 = 1 << 16;

/// Where a page is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// In the store, at this slot.
    Stored(u64),
    /// At the source only.
    Pending,
}

/// [`Place`] for ranges: for stored pages slot × page size − address, wrapping, which is the same
/// for pages that follow each other at both places.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Run {
    Stored(u64),
    Pending,
}

impl Run {
    fn stored(addr: u64, slot: u64) -> Self {
        Self::Stored((slot * PAGE_SIZE).wrapping_sub(addr))
    }

    fn at(self, addr: u64) -> Place {
        match self {
            Self::Stored(distance) => Place::Stored(addr.wrapping_add(distance) / PAGE_SIZE),
            Self::Pending => Place::Pending,
        }
    }
}

/// Whose page a slot holds: the space, and address − slot × page size, wrapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Home {
    space: Space,
    distance: u64,
}

/// Why a message is not taken.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum IndexError {
    /// Addresses or slots that cannot be.
    #[error("space {space}: {pages} pages at {addr:#x} are not whole pages of an address space")]
    Extent { space: Space, addr: u64, pages: u64 },
    /// A slot that is past the end, or was used before.
    #[error("slots {slot} to {slot} + {pages} are not free; every slot is used once")]
    Slot { slot: u64, pages: u64 },
    /// Of shared memory, what cannot be told of it, or cannot be told any more.
    #[error("space {space} is shared memory, of which that cannot be said")]
    Shared { space: Space },
    /// The bound on memory.
    #[error(
        "the page store would hold {wanted} pages, but {allowed} are allowed; \
         allow the service more memory at the destination"
    )]
    Full { wanted: u64, allowed: u64 },
    /// The bound on the index.
    #[error("the page index would hold {wanted} ranges, but {allowed} are allowed")]
    Scattered { wanted: u64, allowed: u64 },
}

/// The index.
#[derive(Debug)]
pub(crate) struct Index {
    spaces: BTreeMap<Space, RangeMap<u64, Run>>,
    /// Every stored page by its slot, so that the last written are found first.
    homes: RangeMap<u64, Home>,
    /// Slots that were ever used.
    used: RangeSet<u64>,
    garbage: RangeSet<u64>,
    garbage_pages: u64,
    stored: u64,
    pending: u64,
    slots: u64,
    max_pages: u64,
}

fn pages(range: &Range) -> u64 {
    (range.end - range.start) / PAGE_SIZE
}

impl Extent {
    /// Its addresses.
    pub(crate) fn range(&self) -> Result<Range, IndexError> {
        extent(self.space, self.addr, self.pages)
    }
}

fn extent(space: Space, addr: u64, pages: u64) -> Result<Range, IndexError> {
    let end = pages.checked_mul(PAGE_SIZE).and_then(|bytes| addr.checked_add(bytes));
    match end {
        Some(end) if pages > 0 && end <= ADDRESS_END && addr.is_multiple_of(PAGE_SIZE) => Ok(addr..end),
        _ => Err(IndexError::Extent { space, addr, pages }),
    }
}

impl Index {
    /// An empty index of a store with so many slots, of which `max_pages` may be in use at a time.
    pub(crate) fn new(slots: u64, max_pages: u64) -> Self {
        Self {
            spaces: BTreeMap::new(),
            homes: RangeMap::new(),
            used: RangeSet::new(),
            garbage: RangeSet::new(),
            garbage_pages: 0,
            stored: 0,
            pending: 0,
            slots,
            max_pages,
        }
    }

    /// Pages in the store.
    pub(crate) fn stored(&self) -> u64 {
        self.stored
    }

    /// Pages that are at the source only.
    pub(crate) fn pending(&self) -> u64 {
        self.pending
    }

    /// Slots that wait to be punched out.
    pub(crate) fn garbage(&self) -> u64 {
        self.garbage_pages
    }

    /// The first slot after all that were used.
    pub(crate) fn next_slot(&self) -> u64 {
        self.used.last().map_or(0, |range| range.end)
    }

    /// The pages are in the store from now on; their addresses.
    pub(crate) fn put(&mut self, entry: &Stored) -> Result<Range, IndexError> {
        let Stored { space, addr, pages: count, slot } = *entry;
        let range = extent(space, addr, count)?;
        let slots = match slot.checked_add(count) {
            Some(end) if end <= self.slots && !self.used.overlaps(&(slot..end)) => slot..end,
            _ => return Err(IndexError::Slot { slot, pages: count }),
        };
        let replaced: u64 = self
            .runs(space, &range)
            .filter(|(_, place)| matches!(place, Place::Stored(_)))
            .map(|(range, _)| pages(&range))
            .sum();
        let wanted = self.stored - replaced + count;
        if wanted > self.max_pages {
            return Err(IndexError::Full { wanted, allowed: self.max_pages });
        }
        self.remove(space, &range);
        self.used.insert(slots.clone());
        self.homes.insert(slots, Home { space, distance: addr.wrapping_sub(slot * PAGE_SIZE) });
        self.spaces.entry(space).or_default().insert(range.clone(), Run::stored(addr, slot));
        self.stored += count;
        self.check_ranges(space)?;
        Ok(range)
    }

    /// The pages are at the source only.
    pub(crate) fn set_pending(&mut self, space: Space, range: &Range) -> Result<(), IndexError> {
        self.remove(space, range);
        self.spaces.entry(space).or_default().insert(range.clone(), Run::Pending);
        self.pending += pages(range);
        self.check_ranges(space)
    }

    /// Nothing is known of the pages any more.
    pub(crate) fn remove(&mut self, space: Space, range: &Range) {
        let found: Vec<_> = self.runs(space, range).collect();
        for (range, place) in &found {
            match *place {
                Place::Stored(slot) => {
                    let slots = slot..slot + pages(range);
                    self.homes.remove(slots.clone());
                    self.discard(slots);
                    self.stored -= pages(range);
                }
                Place::Pending => self.pending -= pages(range),
            }
        }
        if let Some(map) = self.spaces.get_mut(&space) {
            map.remove(range.clone());
            if map.is_empty() {
                self.spaces.remove(&space);
            }
        }
    }

    /// These slots hold nothing of use, although nobody put them.
    pub(crate) fn discard(&mut self, slots: std::ops::Range<u64>) {
        self.garbage_pages += slots.end - slots.start;
        self.garbage.insert(slots);
    }

    /// The garbage, which is the caller's from now on.
    pub(crate) fn take_garbage(&mut self) -> RangeSet<u64> {
        self.garbage_pages = 0;
        std::mem::take(&mut self.garbage)
    }

    /// Where the page is.
    pub(crate) fn get(&self, space: Space, addr: u64) -> Option<Place> {
        self.spaces.get(&space)?.get(&addr).map(|run| run.at(addr))
    }

    /// The pages around this one that lie beside it in the store, too.
    pub(crate) fn run(&self, space: Space, addr: u64) -> Option<Range> {
        self.spaces.get(&space)?.get_key_value(&addr).map(|(range, _)| range.clone())
    }

    /// What is known of these pages, in order; the place is the first page's, others follow it.
    pub(crate) fn runs<'a>(
        &'a self,
        space: Space,
        range: &'a Range,
    ) -> impl Iterator<Item = (Range, Place)> + 'a {
        self.spaces.get(&space).into_iter().flat_map(move |map| {
            map.overlapping(range).map(move |(found, run)| {
                let part = clip(found, range);
                let place = run.at(part.start);
                (part, place)
            })
        })
    }

    /// All pages of which something is known. What was written a page at a time is in as many runs, but
    /// lies side by side.
    pub(crate) fn known(&self, space: Space) -> Vec<Range> {
        let mut known: Vec<Range> = Vec::new();
        for (range, _) in self.spaces.get(&space).into_iter().flat_map(RangeMap::iter) {
            match known.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => known.push(range.clone()),
            }
        }
        known
    }

    /// Whether something is known of this space.
    pub(crate) fn has(&self, space: Space) -> bool {
        self.spaces.contains_key(&space)
    }

    /// The spaces of which something is known.
    pub(crate) fn spaces(&self) -> Vec<Space> {
        self.spaces.keys().copied().collect()
    }

    /// The pages put last: a run of at most `limit`, and its first slot.
    pub(crate) fn last_put(&self, limit: u64) -> Option<(Space, Range, u64)> {
        let (slots, home) = self.homes.last_range_value()?;
        let addr = (slots.start * PAGE_SIZE).wrapping_add(home.distance);
        let count = limit.min(slots.end - slots.start);
        Some((home.space, addr..addr + count * PAGE_SIZE, slots.start))
    }

    /// All stored pages.
    pub(crate) fn all_stored(&self) -> Vec<Stored> {
        self.all(|space, range, place| match place {
            Place::Stored(slot) => Some(Stored { space, addr: range.start, pages: pages(range), slot }),
            Place::Pending => None,
        })
    }

    /// All pending pages.
    pub(crate) fn all_pending(&self) -> Vec<Extent> {
        self.all(|space, range, place| match place {
            Place::Stored(_) => None,
            Place::Pending => Some(Extent { space, addr: range.start, pages: pages(range) }),
        })
    }

    fn all<T>(&self, pick: impl Fn(Space, &Range, Place) -> Option<T>) -> Vec<T> {
        let ranges =
            self.spaces.iter().flat_map(|(space, map)| map.iter().map(move |(r, run)| (*space, r, run)));
        ranges.filter_map(|(space, range, run)| pick(space, range, run.at(range.start))).collect()
    }

    /// Ranges cost memory too. A stored page costs at most one, so that only pending pages can
    /// exceed the bound by much.
    fn check_ranges(&self, space: Space) -> Result<(), IndexError> {
        let wanted = self.spaces.get(&space).map_or(0, RangeMap::len) + self.spaces.len();
        let wanted = u64::try_from(wanted).unwrap_or(u64::MAX);
        let allowed = self.max_pages.saturating_mul(2).max(RANGES_FLOOR);
        if wanted > allowed { Err(IndexError::Scattered { wanted, allowed }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    const P: u64 = 4096;

    fn stored(space: Space, page: u64, pages: u64, slot: u64) -> Stored {
        Stored { space, addr: page * P, pages, slot }
    }

    #[test]
    fn a_page_put_again_is_at_its_new_slot_and_the_old_one_is_garbage() {
        let mut index = Index::new(1000, 100);
        index.put(&stored(1, 10, 4, 0)).unwrap();
        index.put(&stored(1, 11, 1, 4)).unwrap();
        assert_eq!(index.get(1, 10 * P), Some(Place::Stored(0)));
        assert_eq!(index.get(1, 11 * P), Some(Place::Stored(4)));
        assert_eq!(index.get(1, 12 * P), Some(Place::Stored(2)));
        assert_eq!(index.stored(), 4);
        assert_eq!(index.garbage(), 1);
        assert!(index.take_garbage().contains(&1));
    }

    #[test]
    fn what_lies_side_by_side_is_known_as_one() {
        let mut index = Index::new(1000, 100);
        index.put(&stored(1, 10, 4, 0)).unwrap();
        index.put(&stored(1, 11, 1, 4)).unwrap();
        index.set_pending(1, &(14 * P..16 * P)).unwrap();
        index.put(&stored(1, 20, 1, 5)).unwrap();
        index.put(&stored(2, 16, 4, 6)).unwrap();
        assert_eq!(index.known(1), [10 * P..16 * P, 20 * P..21 * P]);
        assert_eq!(index.known(3), []);
    }

    #[test]
    fn the_last_put_comes_first() {
        let mut index = Index::new(1000, 100);
        index.put(&stored(1, 10, 4, 0)).unwrap();
        index.put(&stored(2, 50, 8, 4)).unwrap();
        assert_eq!(index.last_put(3), Some((2, 50 * P..53 * P, 4)));
        index.remove(2, &(50 * P..53 * P));
        assert_eq!(index.last_put(64), Some((2, 53 * P..58 * P, 7)));
        index.remove(2, &(0..ADDRESS_END));
        assert_eq!(index.last_put(64), Some((1, 10 * P..14 * P, 0)));
    }

    #[test]
    fn a_slot_is_used_once_and_the_bound_holds() {
        let mut index = Index::new(1000, 4);
        index.put(&stored(1, 10, 4, 0)).unwrap();
        assert_eq!(index.put(&stored(1, 20, 1, 3)), Err(IndexError::Slot { slot: 3, pages: 1 }));
        assert_eq!(index.put(&stored(1, 20, 1, 4)), Err(IndexError::Full { wanted: 5, allowed: 4 }));
        assert_eq!(index.put(&stored(1, 20, 1, 1000)), Err(IndexError::Slot { slot: 1000, pages: 1 }));
        // What replaces is not more.
        index.put(&stored(1, 10, 4, 5)).unwrap();
        assert_eq!(index.next_slot(), 9);
    }

    #[test]
    fn what_is_no_range_of_pages_is_refused() {
        let mut index = Index::new(1000, 100);
        for (addr, pages) in [(1, 1), (0, 0), (P, u64::MAX), (u64::MAX - P + 1, 2), (ADDRESS_END, 1)] {
            let entry = Stored { space: 1, addr, pages, slot: 0 };
            assert!(matches!(index.put(&entry), Err(IndexError::Extent { .. })), "{addr:#x} {pages}");
        }
    }

    proptest! {
        #[test]
        fn it_says_what_a_map_of_single_pages_says(
            steps in proptest::collection::vec((0_u8..3, 1_u32..3, 0_u64..30, 1_u64..9), 1..40)
        ) {
            let mut index = Index::new(10_000, 10_000);
            let mut model = BTreeMap::new();
            let (mut slot, mut named) = (0, 0);
            for (kind, space, page, count) in steps {
                let range = page * P..(page + count) * P;
                match kind {
                    0 => {
                        index.put(&stored(space, page, count, slot)).unwrap();
                        for i in 0..count {
                            model.insert((space, page + i), Place::Stored(slot + i));
                        }
                        slot += count;
                    }
                    1 => {
                        index.set_pending(space, &range).unwrap();
                        for i in 0..count {
                            model.insert((space, page + i), Place::Pending);
                        }
                    }
                    _ => {
                        index.remove(space, &range);
                        model.retain(|(s, p), _| *s != space || !range.contains(&(p * P)));
                    }
                }
                for space in 1..3 {
                    for page in 0..40 {
                        prop_assert_eq!(index.get(space, page * P), model.get(&(space, page)).copied());
                    }
                }
                let stored = model.values().filter(|p| **p != Place::Pending).count() as u64;
                prop_assert_eq!(index.stored(), stored);
                prop_assert_eq!(index.pending(), model.len() as u64 - stored);
                prop_assert_eq!(index.all_stored().iter().map(|s| s.pages).sum::<u64>(), stored);
                named = index.stored();
                let last = model.values().filter_map(|p| match p {
                    Place::Stored(slot) => Some(*slot),
                    Place::Pending => None,
                }).max();
                if let Some((space, range, slot)) = index.last_put(1000) {
                    prop_assert_eq!(index.get(space, range.start), Some(Place::Stored(slot)));
                    prop_assert_eq!(Some(slot + pages(&range) - 1), last);
                } else {
                    prop_assert_eq!(last, None);
                }
            }
            // Every slot is named by the index or garbage, none is both.
            prop_assert_eq!(index.garbage() + named, slot);
        }
    }
}
