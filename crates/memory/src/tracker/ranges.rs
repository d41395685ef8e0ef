//! Sets of pages as ascending lists of ranges, which neither overlap nor touch. They are made in
//! order once a round and compared, for which lists are faster than trees.

use crate::{PAGE_SIZE, Range};

/// Adds a range that begins no earlier than the last one.
pub(super) fn push(set: &mut Vec<Range>, range: Range) {
    if range.start >= range.end {
        return;
    }
    debug_assert!(set.last().is_none_or(|last| last.start <= range.start), "{range:x?} comes too late");
    match set.last_mut() {
        Some(last) if last.end >= range.start => last.end = last.end.max(range.end),
        _ => set.push(range),
    }
}

/// What is in the first set and not in the second.
pub(super) fn subtract(set: &[Range], other: &[Range]) -> Vec<Range> {
    let mut left = Vec::new();
    let mut others = other.iter().peekable();
    for range in set {
        let mut start = range.start;
        while let Some(hole) = others.peek() {
            if hole.start >= range.end {
                break;
            }
            if hole.start > start {
                left.push(start..hole.start);
            }
            start = start.max(hole.end);
            if hole.end > range.end {
                break;
            }
            others.next();
        }
        if start < range.end {
            left.push(start..range.end);
        }
    }
    left
}

/// What is in either set.
pub(super) fn union(set: &[Range], other: &[Range]) -> Vec<Range> {
    let mut all = Vec::with_capacity(set.len().max(other.len()));
    let (mut left, mut right) = (set.iter().peekable(), other.iter().peekable());
    loop {
        let next = match (left.peek(), right.peek()) {
            (Some(a), Some(b)) if a.start <= b.start => left.next(),
            (Some(_), None) => left.next(),
            (_, Some(_)) => right.next(),
            (None, None) => return all,
        };
        if let Some(range) = next {
            push(&mut all, range.clone());
        }
    }
}

/// What is in both sets.
pub(super) fn intersect(set: &[Range], other: &[Range]) -> Vec<Range> {
    let mut both = Vec::new();
    let (mut i, mut j) = (0, 0);
    while let (Some(a), Some(b)) = (set.get(i), other.get(j)) {
        push(&mut both, a.start.max(b.start)..a.end.min(b.end));
        if a.end < b.end { i += 1 } else { j += 1 }
    }
    both
}

/// How many pages are in the set.
pub(super) fn pages(set: &[Range]) -> u64 {
    set.iter().map(|range| (range.end - range.start) / PAGE_SIZE).sum()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn set(pages: &BTreeSet<u64>) -> Vec<Range> {
        let mut set = Vec::new();
        pages.iter().for_each(|page| push(&mut set, page * PAGE_SIZE..(page + 1) * PAGE_SIZE));
        set
    }

    proptest! {
        #[test]
        fn lists_of_ranges_behave_as_sets_of_pages(
            a in proptest::collection::btree_set(0_u64..60, 0..40),
            b in proptest::collection::btree_set(0_u64..60, 0..40),
        ) {
            prop_assert_eq!(subtract(&set(&a), &set(&b)), set(&(&a - &b)));
            prop_assert_eq!(union(&set(&a), &set(&b)), set(&(&a | &b)));
            prop_assert_eq!(intersect(&set(&a), &set(&b)), set(&(&a & &b)));
            prop_assert_eq!(pages(&set(&a)), a.len() as u64);
        }
    }
}
