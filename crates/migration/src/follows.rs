//! How a service follows its clients, and what goes with it of that from node to node.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Most moves that are remembered: more than a service may make in an hour.
const MOST: usize = 64;

/// Moves are remembered for this time.
const HOUR_MS: i64 = 3_600_000;

/// How a service follows its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Follows {
    /// The longest latency with which a client is content, microseconds.
    pub latency_us: u64,
    /// The longest frozen time of a move, milliseconds; 0 for no limit.
    #[serde(default)]
    pub max_frozen_ms: u32,
    /// Whether pages may follow after the commit.
    #[serde(default)]
    pub postcopy: bool,
    /// The moves that it has made by itself in the last hour, and the last one.
    #[serde(default)]
    pub moves: Vec<Made>,
    /// For how long its best node was watched, seconds, and how often another one became the best.
    #[serde(default)]
    pub watched_s: u64,
    /// See `watched_s`.
    #[serde(default)]
    pub changes: u64,
}

/// A move that a service has made by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// When it was begun, milliseconds since the epoch.
    pub at_ms: i64,
    /// The frozen time that was expected, milliseconds.
    pub frozen_ms: u64,
    /// How long the whole move was expected to take, milliseconds.
    pub took_ms: u64,
}

impl Follows {
    /// A service that begins to.
    #[must_use]
    pub fn new(latency: Duration, max_frozen_ms: u32, postcopy: bool) -> Self {
        let latency_us = u64::try_from(latency.as_micros()).unwrap_or(u64::MAX);
        Self { latency_us, max_frozen_ms, postcopy, moves: Vec::new(), watched_s: 0, changes: 0 }
    }

    /// The same service with other limits: what it has done is remembered.
    #[must_use]
    pub fn changed(&self, to: Self) -> Self {
        Self { moves: self.moves.clone(), watched_s: self.watched_s, changes: self.changes, ..to }
    }

    /// Whether it is the same policy, whatever the service has done by it.
    #[must_use]
    pub fn is_like(&self, other: &Self) -> bool {
        let policy = |of: &Self| (of.latency_us, of.max_frozen_ms, of.postcopy);
        policy(self) == policy(other)
    }

    /// Whether more is remembered than any node remembers.
    pub(crate) fn is_too_long(&self) -> bool {
        self.moves.len() > MOST
    }

    /// Notes a move that is about to be made.
    pub fn moving(&mut self, made: Made) {
        let last = self.moves.pop();
        self.moves.retain(|before| made.at_ms.saturating_sub(before.at_ms) < HOUR_MS);
        self.moves.extend(last);
        self.moves.push(made);
        self.moves.drain(..self.moves.len().saturating_sub(MOST));
    }

    /// Forgets a move that was not made.
    pub fn stays(&mut self, made: &Made) {
        self.moves.retain(|before| before != made);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(at_ms: i64) -> Made {
        Made { at_ms, frozen_ms: 40, took_ms: 900 }
    }

    #[test]
    fn moves_are_remembered_for_an_hour_and_the_last_one_until_the_next() {
        let mut follows = Follows::new(Duration::from_millis(20), 0, false);
        for at in [0, 1000, 2000] {
            follows.moving(made(at));
        }
        follows.moving(made(HOUR_MS + 1500));
        assert_eq!(follows.moves, [made(2000), made(HOUR_MS + 1500)]);
        follows.moving(made(3 * HOUR_MS));
        assert_eq!(follows.moves, [made(HOUR_MS + 1500), made(3 * HOUR_MS)]);
        follows.stays(&made(3 * HOUR_MS));
        assert_eq!(follows.moves, [made(HOUR_MS + 1500)]);
        for at in 0..1000 {
            follows.moving(made(4 * HOUR_MS + at));
        }
        assert!(follows.moves.len() == MOST && !follows.is_too_long());
        follows.moves.push(made(0));
        assert!(follows.is_too_long());
    }

    #[test]
    fn other_limits_are_no_reason_to_forget() {
        let mut follows = Follows::new(Duration::from_millis(20), 0, false);
        follows.moving(made(7));
        follows.watched_s = 60;
        let other = follows.changed(Follows::new(Duration::from_millis(5), 150, true));
        assert_eq!((other.latency_us, other.max_frozen_ms, other.postcopy), (5000, 150, true));
        assert!(!other.is_like(&follows) && follows.changed(follows.clone()).is_like(&follows));
        assert_eq!((other.moves, other.watched_s), (vec![made(7)], 60));
    }
}
