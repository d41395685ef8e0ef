//! Leases: a node shows that it lives by raising a counter in the store, and the others wait for it to stand still.
//!
//! ```text
//!  node            store        another node
//!   │ renew, sent at t ─► 7
//!   │ ◄─────────────── done      │ ◄── 7      first seen
//!   │ runs until t + 4/5 limit   │ ◄── 7
//!   ╳ freezes                    │ ◄── 7      seen for the limit: take over, if the record is still that of 7
//! ```
//! The clock is [`BootTime`]. No clock of one node is compared with that of another: each measures a time of its own, and the store has a number. What
//! is assumed is that clocks do not run at rates that differ by a fifth; those of computers differ by a few parts in ten
//! thousand. A node counts from when it *sent* the renewal. The other sees the number after that, so its wait ends later.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_names::NodeName;

use crate::clock::BootTime;
use crate::record::NodeRecord;
use crate::store::{Compare, Key, Revision};

/// How long a node holds its own lease of this limit: what is left of it is for clocks of different rates.
#[must_use]
pub fn held_for(limit: Duration) -> Duration {
    (limit / 5).saturating_mul(4)
}

/// A time in which this node held its lease without a gap. After a gap another term begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Term(u64);

/// The lease of this node, by its own clock.
#[derive(Debug, Clone, Copy)]
pub struct OwnLease {
    limit: Duration,
    sent: Option<BootTime>,
    term: u64,
}

impl OwnLease {
    /// One that is not held yet.
    #[must_use]
    pub fn new(limit: Duration) -> Self {
        Self { limit, sent: None, term: 0 }
    }

    /// The store has made a renewal that was sent at this time: when the call began, not when it returned at `now`. If the
    /// lease had lapsed before `now`, another term begins, even if nobody looked in the meantime.
    pub fn renewed(&mut self, sent: BootTime, now: BootTime) {
        if !self.holds(now) {
            self.term = self.term.saturating_add(1);
        }
        self.sent = self.sent.max(Some(sent));
    }

    /// When it lapses; none if it was never held.
    #[must_use]
    pub fn lapses(&self) -> Option<BootTime> {
        self.sent.map(|sent| sent.after(held_for(self.limit)))
    }

    /// Whether no other node can have taken over yet what this node was seen to own in the present term.
    #[must_use]
    pub fn holds(&self, now: BootTime) -> bool {
        self.lapses().is_some_and(|lapses| now < lapses)
    }

    /// The present term, if the lease is held. A service whose copy must not outlive the lease runs in the term in which its
    /// record was verified, and in no later one. It is verified for a term if the look at its record began and ended in it.
    #[must_use]
    pub fn term(&self, now: BootTime) -> Option<Term> {
        self.holds(now).then_some(Term(self.term))
    }
}

/// What a look at another node's lease shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sight {
    /// The first one.
    First,
    /// The record has changed: the node lives.
    Moved,
    /// The record has changed, and the counter is lower in the same life, which no node does. The store was restored from a
    /// backup, or something else writes to it. It counts as a sign of life, so the wait begins anew.
    Backwards,
    /// It is the same since the first sight of it.
    Still(Duration),
}

#[derive(Debug, Clone)]
struct Seen {
    record: Option<NodeRecord>,
    revision: Revision,
    since: BootTime,
    until: BootTime,
}

/// Proof that a node's lease has stood still for its limit, and what the swap of a take-over compares. Only
/// [`Observed::stood_still`] makes one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Still {
    node: NodeName,
    revision: Revision,
}

impl Still {
    /// The node.
    #[must_use]
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// What must still hold when the take-over is made.
    #[must_use]
    pub fn compare(&self) -> Compare {
        Compare { key: Key::node(&self.node), revision: self.revision }
    }
}

/// The leases of other nodes, by the clock of the one who looks.
#[derive(Debug, Default)]
pub struct Observed(BTreeMap<NodeName, Seen>);

impl Observed {
    /// Notes what a read that *returned* at `now` has shown; none and [`Revision::NONE`] where the node has no record.
    ///
    /// A node's reads are noted in the order in which they were sent, each after the answer to the one before. An older
    /// answer that is noted later begins the wait anew, which is safe, and shows as [`Sight::Backwards`].
    pub fn see(
        &mut self,
        node: &NodeName,
        record: Option<NodeRecord>,
        revision: Revision,
        now: BootTime,
    ) -> Sight {
        let Some(seen) = self.0.get_mut(node) else {
            self.0.insert(node.clone(), Seen { record, revision, since: now, until: now });
            return Sight::First;
        };
        // A store that was put back from an older copy counts its revisions again.
        if seen.revision == revision && seen.record == record {
            seen.until = seen.until.max(now);
            return Sight::Still(seen.until.since(seen.since));
        }
        let backwards = matches!((&seen.record, &record), (Some(before), Some(after))
            if before.life == after.life && after.counter <= before.counter);
        *seen = Seen { record, revision, since: now, until: now };
        if backwards { Sight::Backwards } else { Sight::Moved }
    }

    /// Proof that the lease has stood still for this long, from the first to the last look that showed it so.
    #[must_use]
    pub fn stood_still(&self, node: &NodeName, limit: Duration) -> Option<Still> {
        let seen = self.0.get(node)?;
        (seen.until.since(seen.since) >= limit).then(|| Still { node: node.clone(), revision: seen.revision })
    }

    /// Forgets nodes that are not in the cluster any more.
    pub fn retain(&mut self, mut keep: impl FnMut(&NodeName) -> bool) {
        self.0.retain(|node, _| keep(node));
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use ulid::Ulid;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> BootTime {
        BootTime::since_boot(Duration::from_secs(seconds))
    }

    fn lease(life: u128, counter: u64) -> Option<NodeRecord> {
        Some(NodeRecord { life: Ulid(life), counter })
    }

    #[test]
    fn a_lease_stands_still_from_the_first_look_at_its_present_counter() {
        let (mut observed, node) = (Observed::default(), "a".parse().unwrap());
        assert_eq!(observed.stood_still(&node, Duration::ZERO), None, "nobody has looked");
        assert_eq!(observed.see(&node, lease(1, 5), Revision(9), at(100)), Sight::First);
        assert_eq!(observed.see(&node, lease(1, 6), Revision(10), at(109)), Sight::Moved);
        assert_eq!(
            observed.see(&node, lease(1, 6), Revision(10), at(118)),
            Sight::Still(Duration::from_secs(9))
        );
        assert_eq!(observed.stood_still(&node, LIMIT), None);
        assert_eq!(observed.see(&node, lease(1, 6), Revision(10), at(119)), Sight::Still(LIMIT));
        let still = observed.stood_still(&node, LIMIT).unwrap();
        assert_eq!(still.compare(), Compare { key: Key::node(&node), revision: Revision(10) });
        observed.retain(|_| false);
        assert_eq!(observed.stood_still(&node, LIMIT), None);
    }

    #[test]
    fn time_without_a_look_proves_nothing_about_the_end() {
        let (mut observed, node) = (Observed::default(), "a".parse().unwrap());
        observed.see(&node, None, Revision::NONE, at(0));
        observed.see(&node, None, Revision::NONE, at(3));
        // The clock goes on, but nobody has looked since.
        assert_eq!(observed.stood_still(&node, Duration::from_secs(4)), None);
        assert_eq!(
            observed.stood_still(&node, Duration::from_secs(3)).unwrap().compare().revision,
            Revision::NONE
        );
    }

    #[test]
    fn a_counter_that_goes_backwards_begins_the_wait_anew_and_is_told() {
        let (mut observed, node) = (Observed::default(), "a".parse().unwrap());
        observed.see(&node, lease(1, 9), Revision(30), at(0));
        assert_eq!(observed.see(&node, lease(1, 4), Revision(12), at(20)), Sight::Backwards);
        assert_eq!(observed.stood_still(&node, LIMIT), None);
        assert_eq!(observed.see(&node, lease(2, 1), Revision(13), at(21)), Sight::Moved, "another life");
        assert_eq!(
            observed.see(&node, lease(2, 5), Revision(13), at(40)),
            Sight::Moved,
            "a revision that came twice"
        );
        assert_eq!(observed.stood_still(&node, LIMIT), None);
    }

    #[test]
    fn an_own_lease_is_held_from_when_its_renewal_was_sent_and_less_long_than_others_wait() {
        let mut own = OwnLease::new(LIMIT);
        assert!(!own.holds(at(0)));
        own.renewed(at(100), at(101));
        own.renewed(at(90), at(102));
        assert!(own.holds(at(107)), "an answer that comes late does not shorten it");
        assert!(!own.holds(at(108)));
        assert!(held_for(LIMIT) < LIMIT);
    }

    #[test]
    fn a_lapse_that_nobody_noticed_begins_another_term() {
        let mut own = OwnLease::new(LIMIT);
        assert_eq!(own.term(at(0)), None);
        own.renewed(at(100), at(101));
        let first = own.term(at(101));
        own.renewed(at(105), at(106));
        assert_eq!(own.term(at(112)), first, "without a gap");
        assert_eq!(own.term(at(113)), None);
        // The node was suspended from 107 to 120: it has not seen that the lease was lapsed.
        own.renewed(at(107), at(120));
        assert_eq!(own.term(at(120)), None, "an answer that comes too late renews nothing");
        own.renewed(at(120), at(121));
        assert!(own.holds(at(121)) && own.term(at(121)) > first);
    }

    #[test]
    fn a_limit_without_bounds_is_held_for_ever() {
        let mut own = OwnLease::new(Duration::MAX);
        own.renewed(at(1), at(2));
        let last = BootTime::since_boot(Duration::MAX);
        own.renewed(last, last);
        assert_eq!(own.lapses(), Some(last));
        assert_eq!(held_for(LIMIT), Duration::from_secs(8));
    }
}
