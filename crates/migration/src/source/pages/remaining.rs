//! Pages that have not gone yet, by space: sets of ranges, which are taken from, looked into and named.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;

use godwit_memory::process::Process;
use godwit_memory::shared::Segment;
use godwit_memory::{PAGE_SIZE, Range, Space};
use rangemap::RangeSet;

use super::PagesError;
use crate::message::PageRanges;
use crate::page_hash::EarlierVisit;

/// Most ranges in one message: 64 KiB of varints at most.
const RANGES: usize = 4096;

/// What has the pages of a space, of a service that is frozen.
#[derive(Debug, Clone)]
pub(crate) enum Owner {
    /// A process, by address.
    Process(Arc<Process>),
    /// Shared memory, by offset.
    Segment(Arc<Segment>),
}

/// Pages of a frozen service that the destination does not have yet.
#[derive(Debug, Clone, Default)]
pub(crate) struct Remaining {
    /// By space.
    pub(crate) spaces: BTreeMap<Space, (Owner, RangeSet<u64>)>,
}

/// Pages that stay behind the service, by what is known of them.
#[derive(Debug, Default)]
pub(crate) struct Leaving {
    /// Written between the last two scans: what the service does all the time is among them.
    pub(crate) recent: Remaining,
    /// The others.
    pub(crate) rest: Remaining,
    /// Those of shared memory. They are many, and nothing waits for them before the commit: what it takes to send them
    /// would lengthen the dump and the restore.
    pub(crate) shared: Remaining,
    /// Those that must not be read while CRIU dumps.
    pub(crate) untouched: Remaining,
    /// What the destination retained when the service left it.
    pub(crate) retained: Option<EarlierVisit>,
}

impl Owner {
    /// The kernel does not give this page of it.
    pub(crate) fn unreadable(&self, page: u64) -> PagesError {
        match self {
            Self::Process(process) => PagesError::Unreadable { pid: process.pid(), page },
            Self::Segment(_) => {
                let source = std::io::Error::other(format!("the page at offset {page:#x} cannot be read"));
                PagesError::Shared { action: "read", source }
            }
        }
    }
}

impl Remaining {
    /// Adds pages.
    pub(crate) fn put(&mut self, space: Space, owner: &Owner, pages: RangeSet<u64>) {
        if !pages.is_empty() {
            match self.spaces.entry(space) {
                Entry::Vacant(entry) => drop(entry.insert((owner.clone(), pages))),
                Entry::Occupied(mut entry) => entry.get_mut().1.extend(pages),
            }
        }
    }

    /// Takes the last pages, at most so many, that lie beside each other.
    pub(crate) fn take(&mut self, most: u64) -> Option<(Space, Owner, Range)> {
        loop {
            let mut entry = self.spaces.last_entry()?;
            let space = *entry.key();
            let (owner, set) = entry.get_mut();
            if let Some(range) = set.last() {
                let piece = range.start.max(range.end.saturating_sub(most * PAGE_SIZE))..range.end;
                set.remove(piece.clone());
                return Some((space, owner.clone(), piece));
            }
            entry.remove();
        }
    }

    /// Takes those of these pages that are there.
    pub(crate) fn remove(&mut self, space: Space, range: &Range) -> RangeSet<u64> {
        let Some((_, set)) = self.spaces.get_mut(&space) else { return RangeSet::new() };
        let taken = within(set, range).collect();
        set.remove(range.clone());
        taken
    }

    /// How many.
    pub(crate) fn pages(&self) -> u64 {
        self.spaces.values().map(|(_, set)| pages_of(set)).sum()
    }

    /// Their names, in messages of a bounded size.
    pub(crate) fn messages(&self) -> Vec<PageRanges> {
        let mut messages = Vec::new();
        for (space, (_, set)) in &self.spaces {
            let all: Vec<&Range> = set.iter().collect();
            for some in all.chunks(RANGES) {
                messages.push(PageRanges::encode(*space, some.iter().map(|&range| range.clone())));
            }
        }
        messages
    }
}

/// The parts of a set that lie in a range. A set of all that gigabytes hold has hundreds of thousands of
/// ranges, which [`RangeSet::intersection`] would walk over.
pub(super) fn within(set: &RangeSet<u64>, range: &Range) -> impl Iterator<Item = Range> {
    set.overlapping(range).map(move |found| found.start.max(range.start)..found.end.min(range.end))
}

pub(crate) fn pages_of(set: &RangeSet<u64>) -> u64 {
    set.iter().map(|range| (range.end - range.start) / PAGE_SIZE).sum()
}
