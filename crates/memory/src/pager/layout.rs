//! Which addresses of one live process wait for which pages of the source. It begins as the
//! identity over all pages of the space and shrinks to nothing; `mremap` moves parts of it.
//!
//! Addresses at the source are *origins*, those in the live process are *destinations*. Both ways
//! are kept as ranges with the same distance: destination = origin + distance, wrapping.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use rangemap::{RangeMap, RangeSet};

use crate::Range;

/// The pages that one live process lacks.
#[derive(Debug, Clone, Default)]
pub(crate) struct Layout {
    by_destination: RangeMap<u64, u64>,
    by_origin: RangeMap<u64, u64>,
    /// Where pages have moved away from, of which the kernel is still to say that nothing is mapped there, and since when.
    left: VecDeque<(Range, Instant)>,
    /// Addresses that a child of fork(2) has empty (`MADV_WIPEONFORK`).
    wiped: RangeSet<u64>,
}

/// Most places of that kind that are kept: one for each thread that may be in mremap(2).
const MOST_LEFT: usize = 1024;

/// So long they are. Of a move that leaves the mapping there (`MREMAP_DONTUNMAP`) the kernel says nothing more.
const LEFT_FOR: Duration = Duration::from_secs(10);

/// The part of `range` that is inside `bounds`.
pub(crate) fn clip(range: &Range, bounds: &Range) -> Range {
    range.start.max(bounds.start)..range.end.min(bounds.end)
}

pub(crate) fn shift(range: &Range, by: u64) -> Range {
    range.start.wrapping_add(by)..range.end.wrapping_add(by)
}

impl Layout {
    /// The process lacks these pages of its space, where they are at the source. A page that is
    /// already elsewhere in the process must not be added.
    pub(crate) fn add(&mut self, origin: Range) {
        self.by_destination.insert(origin.clone(), 0);
        self.by_origin.insert(origin, 0);
    }

    /// A child of fork(2) has these addresses empty.
    pub(crate) fn is_wiped(&mut self, destination: Range) {
        self.wiped.insert(destination);
    }

    /// What a child of fork(2) lacks.
    pub(crate) fn of_child(&self) -> Self {
        // Nobody moves anything in it yet.
        let mut child = Self { left: VecDeque::new(), ..self.clone() };
        for wiped in self.wiped.iter() {
            child.take(wiped);
        }
        child
    }

    /// Nothing is lacking.
    pub(crate) fn is_empty(&self) -> bool {
        self.by_destination.is_empty()
    }

    /// The page of the source that belongs at this address.
    pub(crate) fn origin(&self, destination: u64) -> Option<u64> {
        self.by_destination.get(&destination).map(|distance| destination.wrapping_sub(*distance))
    }

    /// The addresses around this one that lack pages which lie beside each other at the source, too.
    pub(crate) fn run(&self, destination: u64) -> Option<Range> {
        self.by_destination.get_key_value(&destination).map(|(range, _)| range.clone())
    }

    /// All addresses that lack pages lie in this.
    pub(crate) fn span(&self) -> Option<Range> {
        let (first, last) =
            (self.by_destination.first_range_value()?, self.by_destination.last_range_value()?);
        Some(first.0.start..last.0.end)
    }

    /// Every origin that is lacking, in order.
    pub(crate) fn origins(&self) -> impl Iterator<Item = Range> + '_ {
        self.by_origin.iter().map(|(range, _)| range.clone())
    }

    /// Every address in this range that lacks a page, in order, but these.
    pub(crate) fn destinations_but(&self, within: &Range, others: &RangeSet<u64>) -> Vec<Range> {
        let mut left = Vec::new();
        for (range, _) in self.by_destination.overlapping(within) {
            let range = clip(range, within);
            let mut start = range.start;
            for other in others.overlapping(&range) {
                left.push(start..other.start);
                start = other.end;
            }
            left.push(start..range.end);
        }
        left.retain(|range| !range.is_empty());
        left
    }

    /// Which of these origins are lacking, in order.
    pub(crate) fn lacking<'a>(&'a self, origin: &'a Range) -> impl Iterator<Item = Range> + 'a {
        self.by_origin.overlapping(origin).map(|(range, _)| clip(range, origin))
    }

    /// The first of these origins that is lacking: it and its destination.
    pub(crate) fn first_lacking(&self, origin: &Range) -> Option<(Range, u64)> {
        let (range, distance) = self.by_origin.overlapping(origin).next()?;
        let range = clip(range, origin);
        let destination = range.start.wrapping_add(*distance);
        Some((range, destination))
    }

    /// These addresses lack nothing any more; which origins that was.
    pub(crate) fn remove(&mut self, destination: &Range) -> Vec<Range> {
        self.take(destination).into_iter().map(|(origin, _)| origin).collect()
    }

    /// Nothing is mapped at these addresses any more, as the kernel says; which origins were lacking there.
    ///
    /// The kernel tells of a move first, and then that its old place is unmapped, when the thread that moves has run again.
    /// Another thread may have moved something there meanwhile, of which the kernel has told before: that stays.
    pub(crate) fn unmap(&mut self, destination: &Range) -> Vec<Range> {
        self.left.retain(|(_, since)| since.elapsed() < LEFT_FOR);
        if let Some(at) = self.left.iter().position(|(left, _)| left == destination) {
            self.left.remove(at);
            return Vec::new();
        }
        // A move that leaves a part of its place behind: Linux before 6.15 tells of all of it.
        let is_end = |left: &Range| left.end == destination.end && left.contains(&destination.start);
        if let Some((left, _)) = self.left.iter_mut().find(|(left, _)| is_end(left)) {
            left.end = destination.start;
        }
        if !destination.is_empty() {
            self.wiped.remove(destination.clone());
        }
        self.remove(destination)
    }

    /// These origins are no longer wanted; which addresses that was.
    pub(crate) fn remove_origin(&mut self, origin: &Range) -> Vec<Range> {
        let found: Vec<_> =
            self.by_origin.overlapping(origin).map(|(range, &by)| shift(&clip(range, origin), by)).collect();
        for destination in &found {
            self.take(destination);
        }
        found
    }

    /// `mremap`: what was at `from` is at `to`. Answers the origins that moved, and those that were
    /// lacking at `to` before.
    pub(crate) fn remap(&mut self, from: &Range, to: u64) -> (Vec<Range>, Vec<Range>) {
        if from.is_empty() {
            return (Vec::new(), Vec::new());
        }
        let moved = self.take(from);
        let by = to.wrapping_sub(from.start);
        let lost = self.remove(&shift(from, by));
        if self.left.len() == MOST_LEFT {
            self.left.pop_front();
        }
        self.left.push_back((from.clone(), Instant::now()));
        let wiped: Vec<_> = self.wiped.overlapping(from).map(|range| shift(&clip(range, from), by)).collect();
        for gone in [from.clone(), shift(from, by)] {
            self.wiped.remove(gone);
        }
        self.wiped.extend(wiped);
        let mut origins = Vec::with_capacity(moved.len());
        for (origin, distance) in moved {
            let distance = distance.wrapping_add(by);
            self.by_destination.insert(shift(&origin, distance), distance);
            self.by_origin.insert(origin.clone(), distance);
            origins.push(origin);
        }
        (origins, lost)
    }

    /// Removes addresses; the origins they lacked, with the distances.
    fn take(&mut self, destination: &Range) -> Vec<(Range, u64)> {
        if destination.is_empty() {
            return Vec::new();
        }
        let found: Vec<_> = self
            .by_destination
            .overlapping(destination)
            .map(|(range, &by)| (shift(&clip(range, destination), by.wrapping_neg()), by))
            .collect();
        self.by_destination.remove(destination.clone());
        for (origin, _) in &found {
            self.by_origin.remove(origin.clone());
        }
        found
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    const P: u64 = 4096;

    #[test]
    fn what_was_moved_to_where_another_has_moved_away_from_is_not_unmapped_with_that() {
        let mut layout = Layout::default();
        layout.add(P..2 * P);
        layout.add(4 * P..5 * P);
        // One thread moves a page away, and another one moves its own there, before the first has run again.
        layout.remap(&(P..2 * P), 8 * P);
        layout.remap(&(4 * P..5 * P), P);
        assert_eq!(layout.unmap(&(P..2 * P)), [] as [Range; 0]);
        assert_eq!(layout.unmap(&(4 * P..5 * P)), [] as [Range; 0]);
        assert_eq!((layout.origin(P), layout.origin(8 * P)), (Some(4 * P), Some(P)));
        // What is unmapped now is.
        assert_eq!(layout.unmap(&(P..2 * P)).first(), Some(&(4 * P..5 * P)));
        assert_eq!(layout.origin(P), None);
    }

    #[test]
    fn a_child_lacks_nothing_of_what_it_has_empty_wherever_that_has_moved() {
        let mut layout = Layout::default();
        layout.add(P..6 * P);
        layout.is_wiped(2 * P..4 * P);
        layout.remap(&(3 * P..5 * P), 8 * P);
        let child = layout.of_child();
        let lacking =
            |layout: &Layout| (0..12).filter(|page| layout.origin(page * P).is_some()).collect::<Vec<_>>();
        assert_eq!(lacking(&layout), [1, 2, 5, 8, 9]);
        assert_eq!(lacking(&child), [1, 5, 9]);
        // What comes to where something was empty for children is not, whether that was unmapped before or not.
        layout.remap(&(P..2 * P), 2 * P);
        layout.unmap(&(8 * P..9 * P));
        layout.add(20 * P..21 * P);
        layout.remap(&(20 * P..21 * P), 8 * P);
        assert_eq!(lacking(&layout.of_child()), [2, 5, 8, 9]);
    }

    #[test]
    fn a_move_that_leaves_a_part_behind_has_left_the_rest() {
        let mut layout = Layout::default();
        layout.add(P..5 * P);
        layout.remap(&(P..5 * P), 8 * P);
        layout.unmap(&(3 * P..5 * P));
        layout.add(20 * P..21 * P);
        layout.remap(&(20 * P..21 * P), P);
        assert_eq!(layout.unmap(&(P..3 * P)), [] as [Range; 0]);
        assert_eq!(layout.origin(P), Some(20 * P));
    }

    #[test]
    fn a_place_that_is_never_unmapped_is_forgotten_in_the_end() {
        let mut layout = Layout::default();
        for page in 0..=MOST_LEFT as u64 {
            layout.remap(&(page * P..(page + 1) * P), (page + 10_000) * P);
        }
        assert_eq!(layout.left.len(), MOST_LEFT);
        assert_eq!(layout.left.front().unwrap().0, P..2 * P);
    }

    #[test]
    fn pages_that_moved_there_and_back_are_one_range_again() {
        let mut layout = Layout::default();
        layout.add(P..9 * P);
        layout.remap(&(3 * P..5 * P), 100 * P);
        assert_eq!(layout.origin(100 * P), Some(3 * P));
        assert_eq!(layout.origin(3 * P), None);
        assert_eq!(layout.first_lacking(&(4 * P..6 * P)), Some((4 * P..5 * P, 101 * P)));
        layout.remap(&(100 * P..102 * P), 3 * P);
        assert_eq!(layout.by_destination.len(), 1);
        assert_eq!(layout.by_origin.len(), 1);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Remove(Range),
        RemoveOrigin(Range),
        Remap(Range, u64),
    }

    fn range() -> impl Strategy<Value = Range> {
        (0_u64..40, 1_u64..12).prop_map(|(start, pages)| start * P..(start + pages) * P)
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            range().prop_map(Step::Remove),
            range().prop_map(Step::RemoveOrigin),
            (range(), 0_u64..40)
                .prop_map(|(from, to)| (from, to * P))
                .prop_filter("mremap refuses overlaps", |(from, to)| {
                    *to >= from.end || to + (from.end - from.start) <= from.start
                })
                .prop_map(|(from, to)| Step::Remap(from, to)),
        ]
    }

    fn pages(range: &Range) -> impl Iterator<Item = u64> + use<> {
        range.clone().step_by(4096)
    }

    proptest! {
        #[test]
        fn it_says_what_a_map_of_single_pages_says(
            steps in proptest::collection::vec(step(), 1..30),
            others in proptest::collection::vec(range(), 0..4),
        ) {
            let mut layout = Layout::default();
            layout.add(2 * P..36 * P);
            let mut model: BTreeMap<u64, u64> = pages(&(2 * P..36 * P)).map(|p| (p, p)).collect();
            for step in steps {
                match step {
                    Step::Remove(range) => {
                        layout.remove(&range);
                        model.retain(|at, _| !range.contains(at));
                    }
                    Step::RemoveOrigin(range) => {
                        layout.remove_origin(&range);
                        model.retain(|_, origin| !range.contains(origin));
                    }
                    Step::Remap(from, to) => {
                        layout.remap(&from, to);
                        let moved: Vec<_> =
                            pages(&from).filter_map(|p| model.remove(&p).map(|o| (p - from.start + to, o))).collect();
                        let there = to..to + (from.end - from.start);
                        model.retain(|at, _| !there.contains(at));
                        model.extend(moved);
                    }
                }
                for page in pages(&(0..80 * P)) {
                    prop_assert_eq!(layout.origin(page), model.get(&page).copied());
                    let wanted = model.iter().find(|(_, o)| **o == page).map(|(at, _)| *at);
                    let found = layout.first_lacking(&(page..page + P)).map(|(_, at)| at);
                    prop_assert_eq!(found, wanted);
                }
                prop_assert_eq!(layout.is_empty(), model.is_empty());
                let others: RangeSet<u64> = others.iter().cloned().collect();
                let within = 5 * P..30 * P;
                let left: Vec<_> = layout.destinations_but(&within, &others).iter().flat_map(pages).collect();
                let wanted = model.keys().copied().filter(|at| within.contains(at) && !others.contains(at));
                prop_assert_eq!(left, wanted.collect::<Vec<_>>());
                let span = model.first_key_value().zip(model.last_key_value());
                prop_assert_eq!(layout.span(), span.map(|((first, _), (last, _))| *first..last + P));
                for (at, origin) in &model {
                    let run = layout.run(*at).unwrap();
                    prop_assert!(run.contains(at));
                    let moves_along = |page: u64| model.get(&page) == Some(&(page - at).wrapping_add(*origin));
                    prop_assert!(pages(&(*at..run.end)).all(moves_along));
                }
            }
        }
    }
}
