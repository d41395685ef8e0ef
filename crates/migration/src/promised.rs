//! Memory that is promised to services on their way to this node: all of it in one sum, below the operator's limit
//! and what the machine has.
//!
//! A service gets a reservation of what it has announced when it is admitted. Pages and CRIU's images, which lie in a
//! tmpfs, are counted against it. More, for a service that grows or has a large file without a name, is reserved when
//! it comes, or refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How much a reservation grows by at least, bytes.
const STEP: u64 = 16 << 20;

/// The sum of what is promised.
#[derive(Debug, Clone)]
pub struct Promised {
    total: Arc<AtomicU64>,
    /// The operator's limit, bytes; 0 for what the machine has.
    limit: u64,
}

/// Memory promised to one migration; given back on drop.
#[derive(Debug)]
pub struct Reservation {
    promised: Promised,
    bytes: AtomicU64,
}

impl Promised {
    /// Nothing yet, and at most so many bytes; 0 for what the machine has.
    #[must_use]
    pub fn up_to(limit: u64) -> Self {
        Self { total: Arc::default(), limit }
    }

    /// Whether nothing is promised now.
    #[cfg(test)]
    pub(crate) fn is_nothing(&self) -> bool {
        self.total.load(Ordering::SeqCst) == 0
    }

    /// The most that one service on its way here may need, bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        if self.limit == 0 { u64::MAX } else { self.limit }
    }

    /// Promises memory, of so much that is free.
    ///
    /// # Errors
    /// What is left, where that is less.
    pub(crate) fn reserve(&self, bytes: u64, free: u64) -> Result<Reservation, u64> {
        let before = self.total.fetch_add(bytes, Ordering::SeqCst);
        let reservation = Reservation { promised: self.clone(), bytes: AtomicU64::new(bytes) };
        let left = self.limit().min(free).saturating_sub(before);
        if bytes > left { Err(left) } else { Ok(reservation) }
    }
}

impl Reservation {
    /// Raises the reservation to so many bytes at least, where so much is free now; what has come already is not free.
    ///
    /// # Errors
    /// How many bytes there could be, where that is less.
    pub(crate) fn hold(&self, bytes: u64, free: impl FnOnce() -> u64) -> Result<(), u64> {
        let held = self.bytes.load(Ordering::SeqCst);
        let Some(more) = bytes.checked_sub(held).filter(|more| *more != 0) else { return Ok(()) };
        let room = |before: u64, free: u64| self.promised.limit().saturating_sub(before).min(free);
        let free = free();
        // In steps, where there is room for them.
        for more in [more.max(STEP), more] {
            let before = self.promised.total.fetch_add(more, Ordering::SeqCst);
            if more <= room(before, free) {
                self.bytes.fetch_add(more, Ordering::SeqCst);
                return Ok(());
            }
            self.promised.total.fetch_sub(more, Ordering::SeqCst);
        }
        Err(held.saturating_add(room(self.promised.total.load(Ordering::SeqCst), free)))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.promised.total.fetch_sub(*self.bytes.get_mut(), Ordering::SeqCst);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn no_more_is_promised_than_there_is_and_it_is_given_back() {
        let promised = Promised::up_to(0);
        let first = promised.reserve(60 * MIB, 100 * MIB).unwrap();
        assert_eq!(promised.reserve(50 * MIB, 100 * MIB).unwrap_err(), 40 * MIB);
        assert_eq!(Promised::up_to(30 * MIB).reserve(31 * MIB, 100 * MIB).unwrap_err(), 30 * MIB);
        drop(first);
        promised.reserve(100 * MIB, 100 * MIB).unwrap();
    }

    #[test]
    fn what_comes_beyond_is_reserved_or_not_taken() {
        let promised = Promised::up_to(100 * MIB);
        let one = promised.reserve(60 * MIB, 100 * MIB).unwrap();
        one.hold(60 * MIB, || panic!("it has that")).unwrap();
        one.hold(61 * MIB, || 1 << 40).unwrap();
        assert_eq!(promised.total.load(Ordering::SeqCst), 76 * MIB, "in steps");
        let other = promised.reserve(20 * MIB, 1 << 40).unwrap();
        one.hold(80 * MIB, || 1 << 40).unwrap();
        assert_eq!(
            promised.total.load(Ordering::SeqCst),
            100 * MIB,
            "in small ones where there is little left"
        );
        assert_eq!(one.hold(81 * MIB, || 1 << 40), Err(80 * MIB));
        assert_eq!(other.hold(21 * MIB, || 0), Err(20 * MIB));
        drop(one);
        assert_eq!(other.hold(81 * MIB, || 1 << 40), Ok(()));
        // What is free counts, beside the limit.
        assert_eq!(other.hold(100 * MIB, || MIB), Err(82 * MIB));
        drop(other);
        assert_eq!(promised.total.load(Ordering::SeqCst), 0);
    }
}
