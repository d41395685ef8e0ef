//! A value for each page of some spaces, of which few or many are there.
//!
//! ```text
//! (space, page / 64) ──▶ leaf: 64 values          256 KiB of a space
//! ```
//! A leaf costs memory for pages that are not there. Heaps are often sparse, with one page here and there: a leaf of
//! 64 pages costs a hash of 16 bytes for each of them, a quarter of one page, where that of a huge page (512) would
//! cost two pages.

use std::collections::HashMap;

use godwit_memory::{PAGE_SIZE, Range, Space};

/// Pages of a leaf.
pub(crate) const LEAF_PAGES: usize = 64;

/// Bytes of a space that a leaf is for.
pub(crate) const LEAF: u64 = LEAF_PAGES as u64 * PAGE_SIZE;

/// The values of a leaf's pages.
pub(crate) type Leaf<T> = [T; LEAF_PAGES];

/// Values by space and address of a page; `NOTHING` where there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PageMap<T> {
    leaves: HashMap<(Space, u64), Box<Leaf<T>>>,
    nothing: T,
}

fn index(address: u64) -> usize {
    usize::try_from(address % LEAF / PAGE_SIZE).unwrap_or(0)
}

impl<T: Copy + PartialEq> PageMap<T> {
    /// An empty map, in which this stands for no value.
    pub(crate) fn new(nothing: T) -> Self {
        Self { leaves: HashMap::new(), nothing }
    }

    /// The value of a page.
    pub(crate) fn get(&self, space: Space, address: u64) -> T {
        self.leaves.get(&(space, address / LEAF)).map_or(self.nothing, |leaf| leaf[index(address)])
    }

    /// Gives a page a value; the value before.
    pub(crate) fn set(&mut self, space: Space, address: u64, value: T) -> T {
        let place = (space, address / LEAF);
        if value == self.nothing && !self.leaves.contains_key(&place) {
            return value;
        }
        let leaf = self.leaves.entry(place).or_insert_with(|| Box::new([self.nothing; LEAF_PAGES]));
        std::mem::replace(&mut leaf[index(address)], value)
    }

    /// Leaves: the space, the leaf's number, and its values.
    pub(crate) fn leaves(&self) -> impl Iterator<Item = (Space, u64, &Leaf<T>)> {
        self.leaves.iter().map(|((space, number), leaf)| (*space, *number, &**leaf))
    }

    /// Puts a whole leaf.
    pub(crate) fn put(&mut self, space: Space, number: u64, leaf: Leaf<T>) {
        self.leaves.insert((space, number), Box::new(leaf));
    }

    /// How many leaves there are.
    pub(crate) fn len(&self) -> usize {
        self.leaves.len()
    }

    /// Changes all values of a space. Leaves in which none is left are given up. What the leaves were for is returned.
    pub(crate) fn change_all(&mut self, space: Space, change: impl Fn(u64, T) -> T) -> Vec<Range> {
        let mut touched = Vec::new();
        let nothing = self.nothing;
        self.leaves.retain(|(other, number), leaf| {
            if *other != space {
                return true;
            }
            let start = number * LEAF;
            touched.push(start..start + LEAF);
            for (address, value) in (start..).step_by(4096).zip(leaf.iter_mut()) {
                *value = change(address, *value);
            }
            leaf.iter().any(|value| *value != nothing)
        });
        touched
    }

    /// Forgets the values of these addresses of a space.
    pub(crate) fn forget(&mut self, space: Space, range: &Range) {
        let (first, last) = (range.start / LEAF, range.end.div_ceil(LEAF));
        let nothing = self.nothing;
        let forget = |number: u64, leaf: &mut Leaf<T>| {
            for (address, value) in (number * LEAF..).step_by(4096).zip(leaf.iter_mut()) {
                if range.contains(&address) {
                    *value = nothing;
                }
            }
            leaf.iter().any(|value| *value != nothing)
        };
        // Whatever is less: the leaves that there could be, or those that there are.
        if usize::try_from(last - first).unwrap_or(usize::MAX) > self.leaves.len() {
            self.leaves.retain(|(other, number), leaf| *other != space || forget(*number, leaf));
            return;
        }
        for number in first..last {
            let place = (space, number);
            if self.leaves.get_mut(&place).is_some_and(|leaf| !forget(number, leaf)) {
                self.leaves.remove(&place);
            }
        }
    }

    /// What the values take, bytes.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        self.leaves.len() * (size_of::<Leaf<T>>() + size_of::<(Space, u64)>() + size_of::<usize>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sparse_heap_costs_less_than_two_fifths_of_its_pages() {
        let (mut hashes, mut slots) = (PageMap::new(0_u128), PageMap::new(u64::MAX));
        let pages = 1000;
        for page in 0..pages {
            // One page of each 2 MiB, as an allocator of huge pages' size leaves them.
            hashes.set(1, page * (2 << 20), 7);
            slots.set(1, page * (2 << 20), page);
        }
        let bytes = u64::try_from(hashes.bytes() + slots.bytes()).unwrap_or(u64::MAX);
        assert!(bytes < pages * PAGE_SIZE * 2 / 5, "{bytes} bytes for {} of pages", pages * PAGE_SIZE);
    }

    #[test]
    fn values_are_found_again_and_others_are_nothing() {
        let mut map = PageMap::new(0_u32);
        assert_eq!(map.set(1, LEAF - PAGE_SIZE, 7), 0);
        assert_eq!(map.set(1, LEAF - PAGE_SIZE, 8), 7);
        assert_eq!(map.set(2, 5 * LEAF, 0), 0);
        assert_eq!(map.len(), 1, "nothing takes no room");
        assert_eq!((map.get(1, LEAF - PAGE_SIZE), map.get(1, LEAF), map.get(2, LEAF - PAGE_SIZE)), (8, 0, 0));
    }

    #[test]
    fn what_has_no_value_left_is_given_up() {
        let mut map = PageMap::new(0_u32);
        for (space, address) in [(1, 0), (1, LEAF), (2, 0)] {
            map.set(space, address, 7);
        }
        let mut touched = map.change_all(1, |address, value| if address == LEAF { value + 1 } else { 0 });
        touched.sort_by_key(|range| range.start);
        assert_eq!(touched, [0..LEAF, LEAF..2 * LEAF]);
        assert_eq!((map.len(), map.get(1, LEAF), map.get(2, 0)), (2, 8, 7));
    }

    #[test]
    fn a_range_is_forgotten_and_nothing_beside_it() {
        // Many leaves that there could be, and few.
        for end in [3 * LEAF, 1 << 50] {
            let mut map = PageMap::new(0_u64);
            let pages = [0, LEAF - 4096, LEAF, 2 * LEAF, 3 * LEAF - 4096];
            for page in pages {
                map.set(1, page, page + 1);
                map.set(2, page, page + 1);
            }
            map.forget(1, &(LEAF - 4096..end));
            let left: Vec<_> = pages.iter().filter(|page| map.get(1, **page) != 0).collect();
            assert_eq!(left, [&0], "{end}");
            assert!(pages.iter().all(|page| map.get(2, *page) == page + 1));
            assert_eq!(map.len(), 4, "leaves without a value are given up");
        }
    }
}
