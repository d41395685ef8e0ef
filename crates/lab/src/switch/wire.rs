//! One direction of an access link: a queue of bounded length before a wire of a given rate.
//!
//! Time is virtual: a frame's departure is computed when it arrives, from when the wire becomes
//! free. So the rate is exact however late the process wakes up, and lateness never adds up.

use std::{collections::VecDeque, time::Duration};

use crate::config::Link;

/// Nanoseconds of the monotonic clock.
pub(crate) type Nanos = u64;

/// The bound of the queue is at least this many bytes at the link's rate, some forty frames, so that
/// a slow link does not drop the first burst of a connection,
const QUEUE_BYTES: u64 = 64 << 10;
/// and at least twice the delay and this, so that one TCP connection can fill the link.
const QUEUE_TIME: Duration = Duration::from_millis(10);

/// A link in the units of the event loop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Shape {
    /// Bits per second, 0: no limit.
    pub(crate) rate: u64,
    /// One-way delay.
    pub(crate) delay: Nanos,
    /// A frame that would wait longer for the wire is dropped.
    pub(crate) patience: Nanos,
}

impl Shape {
    pub(crate) fn new(link: Option<Link>) -> Self {
        let Some(link) = link else { return Self::default() };
        let delay = nanos(link.delay);
        let mut shape = Self { rate: link.rate, delay, patience: 0 };
        shape.patience = (2 * delay + nanos(QUEUE_TIME)).max(shape.wire_time(QUEUE_BYTES));
        shape
    }

    /// Whether frames pass through without any queue.
    pub(crate) fn is_open(self) -> bool {
        self.rate == 0
    }

    /// How long `bytes` occupy the wire.
    pub(crate) fn wire_time(self, bytes: u64) -> Nanos {
        // At most 2^17 bytes × 8 × 10^9 for a frame: fits.
        bytes.saturating_mul(8_000_000_000).checked_div(self.rate).unwrap_or(0)
    }
}

pub(crate) fn nanos(duration: Duration) -> Nanos {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// The wire's occupation and the frames that are under way, in the order of their times.
#[derive(Debug)]
pub(crate) struct Wire<T> {
    free_at: Nanos,
    last_at: Nanos,
    under_way: VecDeque<(Nanos, T)>,
}

impl<T> Default for Wire<T> {
    fn default() -> Self {
        Self { free_at: 0, last_at: 0, under_way: VecDeque::new() }
    }
}

impl<T> Wire<T> {
    /// Occupies the wire for `wire` from `now` on, or later if it is taken; the beginning is
    /// returned, or none if the queue is full.
    pub(crate) fn admit(&mut self, now: Nanos, wire: Nanos, patience: Nanos) -> Option<Nanos> {
        let start = self.free_at.max(now);
        if start - now > patience {
            return None;
        }
        self.free_at = start + wire;
        Some(start)
    }

    /// Lets `item` come out at `at`, but never before one that went in earlier.
    pub(crate) fn send(&mut self, at: Nanos, item: T) {
        self.last_at = self.last_at.max(at);
        self.under_way.push_back((self.last_at, item));
    }

    /// When the next item comes out.
    pub(crate) fn next(&self) -> Option<Nanos> {
        self.under_way.front().map(|(at, _)| *at)
    }

    /// The next item and its time, if that has come.
    pub(crate) fn take_due(&mut self, now: Nanos) -> Option<(Nanos, T)> {
        self.next().filter(|at| *at <= now)?;
        self.under_way.pop_front()
    }

    /// After a change of the link: the wire is not taken for longer than `patience` from `now` on.
    pub(crate) fn reshape(&mut self, now: Nanos, patience: Nanos) {
        self.free_at = self.free_at.min(now.saturating_add(patience));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_wire_is_taken_for_the_time_of_the_bytes() {
        let shape = Shape::new(Some("1gbit,1ms".parse().unwrap()));
        assert_eq!(shape.wire_time(1250), 10_000);
        assert_eq!(shape.patience, 12_000_000);
        let slow = Shape::new(Some("1mbit,1ms".parse().unwrap()));
        assert_eq!(slow.patience, 64 * 1024 * 8000);
        assert!(Shape::new(None).is_open());
        assert_eq!(Shape::default().wire_time(1 << 17), 0);
    }

    #[test]
    fn frames_follow_each_other_and_a_full_queue_drops() {
        let mut wire = Wire::<()>::default();
        assert_eq!(wire.admit(100, 50, 60), Some(100));
        assert_eq!(wire.admit(100, 50, 60), Some(150));
        assert_eq!(wire.admit(100, 50, 60), None, "it would wait 100 ns");
        assert_eq!(wire.admit(140, 50, 60), Some(200));
        assert_eq!(wire.admit(1000, 50, 60), Some(1000), "an idle wire saves nothing up");
    }

    #[test]
    fn order_is_kept_when_the_delay_shrinks() {
        let mut wire = Wire::default();
        wire.send(500, "first");
        wire.send(300, "second");
        assert_eq!(wire.take_due(499), None);
        assert_eq!(wire.take_due(500), Some((500, "first")));
        assert_eq!(wire.take_due(500), Some((500, "second")));
        assert_eq!(wire.next(), None);
    }
}
