//! What the policy remembers of a service from one decision to the next. The caller stores it.
//!
//! A stored state may be damaged, and a clock may be set back: [`State::settle`] makes the best of both.

use std::time::Duration;

use crate::quantity::{LONGEST, Moment, bounded};
use crate::rules::Thresholds;

/// A node, by a number that its caller gives it. It means the same node for as long as a state is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u32);

/// Budgets are those of this time.
pub const HOUR: Duration = Duration::from_secs(3600);

/// How long a destination waits after its first move was given up.
const FIRST_WAIT: Duration = Duration::from_secs(60);

/// Between two decisions no more time than this is taken to have passed: what was lost later was not measured.
const STEP: Duration = Duration::from_secs(5);

/// Most entries of each list, so that no state grows without end.
const MOST: usize = 64;

/// A service's debt for one node: what it lost by not being there.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Debt {
    /// The node.
    pub node: NodeId,
    /// Lost client-seconds.
    pub amount: f64,
}

/// A move that was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Made {
    /// When it ended.
    pub at: Moment,
    /// The frozen time.
    pub frozen: Duration,
    /// How long the whole move took.
    pub took: Duration,
}

/// A destination to which a move was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// The node.
    pub node: NodeId,
    /// Since when it waits.
    pub since: Moment,
    /// For how long.
    pub length: Duration,
}

/// What is remembered of a service.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct State {
    /// When the last decision was made.
    pub decided: Option<Moment>,
    /// Since when clients have lost more than the upper threshold.
    pub over: Option<Moment>,
    /// Whether it may move: they did for long enough, and have not lost less than the lower threshold since.
    pub armed: bool,
    /// Debts since the last move. A node that is not among them has none.
    pub debts: Vec<Debt>,
    /// Moves of the last hour, and the last one.
    pub moves: Vec<Made>,
    /// Destinations that wait, or waited last.
    pub waits: Vec<Wait>,
}

impl State {
    /// Notes a move that was made to this node.
    pub fn moved(&mut self, to: NodeId, made: Made) {
        self.debts.clear();
        (self.armed, self.over) = (false, None);
        self.waits.retain(|wait| wait.node != to);
        self.moves.push(made);
        // What was lost during the move is part of its cost.
        self.decided = Some(made.at);
    }

    /// Notes a move to this node that was given up. Each one in a row waits twice as long, up to an hour. The attempt
    /// has cost something, too: the next one, wherever to, has to be paid for again.
    pub fn kept(&mut self, node: NodeId, now: Moment) {
        self.debts.clear();
        self.decided = Some(now);
        let before = self.waits.iter().find(|wait| wait.node == node).map(|wait| wait.length);
        let length = before.map_or(FIRST_WAIT, |before| before.saturating_mul(2)).clamp(FIRST_WAIT, HOUR);
        self.waits.retain(|wait| wait.node != node);
        self.waits.push(Wait { node, since: now, length });
    }

    /// The debt for this node.
    #[must_use]
    pub fn debt(&self, node: NodeId) -> f64 {
        self.debts.iter().find(|debt| debt.node == node).map_or(0.0, |debt| debt.amount)
    }

    /// How long this destination still waits.
    #[must_use]
    pub fn waits(&self, node: NodeId, now: Moment) -> Option<Duration> {
        let wait = self.waits.iter().find(|wait| wait.node == node)?;
        wait.length.checked_sub(now.since(wait.since)).filter(|left| !left.is_zero())
    }

    /// The moves of the last hour.
    pub fn recent(&self, now: Moment) -> impl Iterator<Item = &Made> {
        self.moves.iter().filter(move |made| now.since(made.at) < HOUR)
    }

    /// The last move.
    #[must_use]
    pub fn last(&self) -> Option<&Made> {
        self.moves.last()
    }

    /// Prepares the state for a decision at this moment; the time since the one before, as far as it counts.
    pub fn settle(&mut self, now: Moment) -> Duration {
        // What lies in the future was noted by a clock that has been set back since.
        let past = |moment: Moment| moment.min(now);
        self.over = self.over.map(past);
        for made in &mut self.moves {
            *made = Made { at: past(made.at), frozen: bounded(made.frozen), took: bounded(made.took) };
        }
        for wait in &mut self.waits {
            *wait = Wait { since: past(wait.since), length: wait.length.min(HOUR), ..*wait };
        }
        self.debts.retain(|debt| debt.amount > 0.0 && debt.amount <= LONGEST.as_secs_f64() * 1e9);
        let last = self.last().copied();
        self.moves.retain(|made| now.since(made.at) < HOUR || last == Some(*made));
        // A wait is remembered for as long again, so that the next one doubles.
        self.waits.retain(|wait| now.since(wait.since) < wait.length * 2);
        let passed = self.decided.map_or(Duration::ZERO, |decided| now.since(decided));
        if passed > STEP {
            // What was lost meanwhile was not measured.
            self.over = None;
        }
        let passed = passed.min(STEP);
        self.decided = Some(now);
        self.moves.drain(..self.moves.len().saturating_sub(MOST));
        self.waits.drain(..self.waits.len().saturating_sub(MOST));
        self.debts.truncate(MOST);
        passed
    }

    /// Notes what clients lose, as a part of their weight: whether the service may move.
    pub fn arm(&mut self, part: f64, now: Moment, thresholds: &Thresholds) -> bool {
        if part > thresholds.arm.get() {
            let since = *self.over.get_or_insert(now);
            self.armed |= now.since(since) >= thresholds.time;
        } else {
            self.over = None;
            self.armed &= part >= thresholds.disarm.get();
        }
        self.armed
    }

    /// Adds to debts what was lost since the last decision, for these nodes. Others have none from now on.
    pub fn charge(&mut self, rates: impl Iterator<Item = (NodeId, f64)>, passed: Duration) {
        let passed = passed.as_secs_f64();
        let mut debts: Vec<_> = rates
            .map(|(node, rate)| Debt { node, amount: (self.debt(node) + rate * passed).max(0.0) })
            .filter(|debt| debt.amount > 0.0)
            .collect();
        debts.sort_by(|a, b| b.amount.total_cmp(&a.amount));
        debts.truncate(MOST);
        self.debts = debts;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment(Duration::from_secs(seconds))
    }

    #[test]
    fn a_service_is_armed_after_a_time_above_and_disarmed_only_well_below() {
        let thresholds = Thresholds { time: Duration::from_secs(3), ..Thresholds::default() };
        let part = |part, second, state: &mut State| state.arm(part, at(second), &thresholds);
        let mut state = State::default();
        assert!(!part(0.06, 0, &mut state) && !part(0.06, 2, &mut state) && part(0.06, 3, &mut state));
        assert!(part(0.03, 4, &mut state), "between both");
        assert!(!part(0.01, 5, &mut state));
        assert!(!part(0.06, 6, &mut state) && !part(0.04, 8, &mut state));
        assert!(!part(0.06, 9, &mut state) && !part(0.06, 11, &mut state), "it began anew");
        assert!(!part(f64::NAN, 14, &mut state));
    }

    #[test]
    fn a_debt_grows_by_what_was_lost_and_never_falls_below_nothing() {
        let (mut state, node) = (State::default(), NodeId(1));
        let charge = |state: &mut State, rate, seconds| {
            state.charge([(node, rate)].into_iter(), Duration::from_secs(seconds));
        };
        charge(&mut state, 2.0, 3);
        assert!((state.debt(node) - 6.0).abs() < 1e-9);
        charge(&mut state, -1.0, 2);
        assert!((state.debt(node) - 4.0).abs() < 1e-9);
        charge(&mut state, -5.0, 2);
        assert!(state.debts.is_empty());
        charge(&mut state, 1.0, 1);
        state.charge([(NodeId(2), 1.0)].into_iter(), Duration::from_secs(1));
        assert_eq!(
            state.debts,
            [Debt { node: NodeId(2), amount: 1.0 }],
            "a node that is no candidate is forgotten"
        );
        state.kept(NodeId(9), at(0));
        assert!(state.debts.is_empty(), "an attempt uses it up");
    }

    #[test]
    fn a_move_that_was_made_begins_anew_and_is_remembered_for_an_hour() {
        let mut state = State { armed: true, over: Some(at(1)), ..State::default() };
        state.debts = vec![Debt { node: NodeId(1), amount: 5.0 }, Debt { node: NodeId(2), amount: 9.0 }];
        let made = |second| Made { at: at(second), frozen: Duration::ZERO, took: Duration::ZERO };
        state.moved(NodeId(1), made(10));
        assert_eq!((state.debts.len(), state.armed, state.over), (0, false, None));
        assert_eq!(
            state.settle(at(12)),
            Duration::from_secs(2),
            "what was lost in the move is part of its cost"
        );
        state.moved(NodeId(2), made(20));
        state.settle(at(3615));
        assert_eq!((state.recent(at(3615)).count(), state.moves.len()), (1, 1));
        state.settle(at(9000));
        assert_eq!(
            (state.recent(at(9000)).count(), state.last()),
            (0, Some(&made(20))),
            "but the last one for ever"
        );
    }

    #[test]
    fn a_destination_waits_twice_as_long_after_each_move_that_was_given_up() {
        let (mut state, node) = (State::default(), NodeId(1));
        let mut now = 0;
        for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
            state.kept(node, at(now));
            state.settle(at(now + 1));
            let length = Duration::from_secs(60 * minutes);
            assert_eq!(state.waits(node, at(now + 1)), Some(length.saturating_sub(Duration::from_secs(1))));
            now += 60 * minutes;
            state.settle(at(now));
            assert_eq!(state.waits(node, at(now)), None);
        }
        let made = Made { at: at(now), frozen: Duration::ZERO, took: Duration::ZERO };
        state.moved(node, made);
        state.kept(node, at(now));
        assert_eq!(state.waits(node, at(now)), Some(FIRST_WAIT), "a move that was made ends the row");
        state.settle(at(now + 1000));
        assert!(state.waits.is_empty(), "and so does time");
    }

    #[test]
    fn a_damaged_state_and_a_clock_that_was_set_back_are_settled() {
        let late = Moment(Duration::MAX);
        let mut state = State {
            decided: Some(late),
            over: Some(late),
            armed: true,
            debts: [f64::NAN, f64::INFINITY, -1.0, 2.0]
                .map(|amount| Debt { node: NodeId(1), amount })
                .to_vec(),
            moves: vec![Made { at: late, frozen: Duration::MAX, took: Duration::MAX }; 1000],
            waits: vec![Wait { node: NodeId(2), since: late, length: Duration::MAX }; 1000],
        };
        assert_eq!(state.settle(at(10)), Duration::ZERO);
        assert_eq!(state.debts, [Debt { node: NodeId(1), amount: 2.0 }]);
        assert_eq!((state.over, state.moves.len(), state.waits.len()), (Some(at(10)), MOST, MOST));
        assert_eq!(state.waits(NodeId(2), at(10)), Some(HOUR));
        assert_eq!(state.settle(at(11)), Duration::from_secs(1));
        assert_eq!(state.settle(at(1000)), STEP, "what was lost later was not measured");
    }
}
