//! Which pages the processes of an arriving service wait for.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use godwit_memory::pager::Extent;
use godwit_memory::{PAGE_SIZE, Space};

/// Pages that processes wait for and that have not come: a stream for faults that replaces another asks for them again.
#[derive(Debug, Clone, Default)]
pub(crate) struct Waiting(Arc<Mutex<BTreeSet<(Space, u64)>>>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, BTreeSet<(Space, u64)>> {
        // Nothing can panic while the set is changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A process wants this page, by number.
    pub(super) fn wants(&self, space: Space, page: u64) {
        self.lock().insert((space, page));
    }

    /// So many pages from this one on are in the store.
    pub(super) fn came(&self, space: Space, page: u64, pages: u64) {
        let mut waiting = self.lock();
        let those: Vec<_> =
            waiting.range((space, page)..(space, page.saturating_add(pages))).copied().collect();
        for one in those {
            waiting.remove(&one);
        }
    }

    /// None but those of these pages.
    pub(super) fn retain(&self, missing: &[Extent]) {
        self.lock().retain(|wanted| missing.iter().any(|extent| holds(extent, *wanted)));
    }

    pub(super) fn all(&self) -> Vec<(Space, u64)> {
        self.lock().iter().copied().collect()
    }
}

fn holds(extent: &Extent, (space, page): (Space, u64)) -> bool {
    let first = extent.addr / PAGE_SIZE;
    extent.space == space && (first..first + extent.pages).contains(&page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_that_has_come_is_not_asked_for_again() {
        let waiting = Waiting::default();
        for (space, page) in [(1, 5), (1, 9), (1, 10), (2, 5)] {
            waiting.wants(space, page);
        }
        waiting.came(1, 4, 2);
        waiting.came(1, 10, 1);
        assert_eq!(waiting.all(), [(1, 9), (2, 5)]);
        waiting.retain(&[Extent { space: 2, addr: 5 * PAGE_SIZE, pages: 1 }]);
        assert_eq!(waiting.all(), [(2, 5)]);
        waiting.came(2, 0, u64::MAX);
        assert!(waiting.all().is_empty());
    }
}
