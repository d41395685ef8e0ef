//! One direction of the way between two hosts that has conditions of its own: what lies between the up
//! wire of the one and the down wire of the other.

use std::collections::VecDeque;

use super::{
    frame::WireSize,
    wire::{Nanos, Shape, Wire, nanos},
};
use crate::{
    conditions::{Conditions, Step},
    config::Link,
};

/// What became of a frame that went in.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Admitted {
    /// It comes out at this time.
    At(Nanos),
    /// The queue was full.
    Full,
    /// It is lost, as some are.
    Lost,
}

/// The conditions and the frames under way.
#[derive(Debug)]
pub(crate) struct Way<T> {
    conditions: Conditions,
    shape: Shape,
    /// When its trace began, and what is still to come of it.
    begun: Nanos,
    steps: VecDeque<Step>,
    random: fastrand::Rng,
    wire: Wire<T>,
}

impl<T> Way<T> {
    /// A way whose losses and delays follow from `seed`.
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            conditions: Conditions::default(),
            shape: Shape::default(),
            begun: 0,
            steps: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            wire: Wire::default(),
        }
    }

    /// Begins a trace; what is under way stays so.
    pub(crate) fn begin(&mut self, now: Nanos, steps: &[Step]) {
        self.begun = now;
        self.steps.clear();
        self.extend(steps);
        // Until the trace says otherwise it is as its first line says.
        if let Some(first) = steps.first() {
            self.change(now, first.conditions);
        }
    }

    /// More of the trace.
    pub(crate) fn extend(&mut self, steps: &[Step]) {
        self.steps.extend(steps);
    }

    /// What it is like now.
    pub(crate) fn conditions(&self) -> Conditions {
        self.conditions
    }

    /// Whether frames are treated one by one, now or later.
    pub(crate) fn is_by_frame(&self) -> bool {
        self.conditions.is_by_frame() || self.steps.iter().any(|step| step.conditions.is_by_frame())
    }

    /// When the next frame comes out.
    pub(crate) fn next_frame(&self) -> Option<Nanos> {
        self.wire.next()
    }

    /// When something is to be done.
    pub(crate) fn next(&self) -> Option<Nanos> {
        [self.next_frame(), self.next_step()].into_iter().flatten().min()
    }

    fn next_step(&self) -> Option<Nanos> {
        self.steps.front().map(|step| self.begun.saturating_add(nanos(step.at)))
    }

    /// Changes what the trace says by now.
    pub(crate) fn follow(&mut self, now: Nanos) {
        while self.next_step().is_some_and(|at| at <= now) {
            if let Some(step) = self.steps.pop_front() {
                self.change(now, step.conditions);
            }
        }
    }

    fn change(&mut self, now: Nanos, conditions: Conditions) {
        self.conditions = conditions;
        self.shape = match conditions.rate {
            Some(rate) => Shape::new(Some(Link { rate, delay: conditions.delay })),
            None => Shape { rate: 0, delay: nanos(conditions.delay), patience: Nanos::MAX },
        };
        self.wire.reshape(now, self.shape.patience);
    }

    /// Takes a frame in at `at`.
    pub(crate) fn admit(&mut self, at: Nanos, size: WireSize, item: T) -> Admitted {
        if self.random.f64() < self.conditions.loss {
            return Admitted::Lost;
        }
        let wire = self.shape.wire_time(size.total as u64);
        let Some(start) = self.wire.admit(at, wire, self.shape.patience) else { return Admitted::Full };
        let jitter = nanos(self.conditions.jitter);
        let most = self.shape.delay.saturating_add(jitter);
        let delay = self.random.u64(self.shape.delay.saturating_sub(jitter)..=most);
        let out = start + wire + delay;
        self.wire.send(out, item);
        Admitted::At(out)
    }

    /// The next frame and its time, if that has come.
    pub(crate) fn take_due(&mut self, now: Nanos) -> Option<(Nanos, T)> {
        self.wire.take_due(now)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MS: Nanos = 1_000_000;
    const FRAME: WireSize = WireSize { total: 1250, first: 1250 };

    fn way(conditions: Conditions) -> Way<u32> {
        let mut way = Way::new(7);
        way.begin(0, &[Step { at: Duration::ZERO, conditions }]);
        way.follow(0);
        way
    }

    #[test]
    fn frames_take_the_wire_one_after_the_other_and_then_the_delay() {
        let mut way = way(Conditions {
            rate: Some(1_000_000),
            delay: Duration::from_millis(25),
            ..Conditions::default()
        });
        assert_eq!(way.admit(0, FRAME, 1), Admitted::At(35 * MS));
        assert_eq!(way.admit(0, FRAME, 2), Admitted::At(45 * MS));
        assert_eq!((way.take_due(34 * MS), way.take_due(35 * MS)), (None, Some((35 * MS, 1))));
        assert_eq!(way.next(), Some(45 * MS));
        // 64 KiB take half a second: a frame that would wait longer is dropped.
        let full = (0..100).filter(|_| way.admit(0, FRAME, 3) == Admitted::Full).count();
        assert_eq!(full, 100 - 51);
    }

    #[test]
    fn of_many_frames_the_share_is_lost_and_no_delay_leaves_its_bounds() {
        let (delay, jitter) = (Duration::from_millis(25), Duration::from_millis(3));
        let mut way = way(Conditions { rate: None, delay, jitter, loss: 0.1 });
        let (mut lost, mut times) = (0, Vec::new());
        for number in 0..10_000 {
            // Far enough apart that none has to wait for the one before.
            let at = u64::from(number) * 10 * MS;
            match way.admit(at, FRAME, number) {
                Admitted::At(out) => times.push(out - at),
                Admitted::Lost => lost += 1,
                Admitted::Full => panic!("there is no limit"),
            }
        }
        assert!((900..1100).contains(&lost), "{lost}");
        assert!(times.iter().all(|time| (22 * MS..=28 * MS).contains(time)));
        let mean = times.iter().sum::<u64>() / times.len() as u64;
        assert!(mean.abs_diff(25 * MS) < MS / 5, "{mean}");
        assert!(times.iter().min().unwrap() < &(23 * MS) && times.iter().max().unwrap() > &(27 * MS));
    }

    #[test]
    fn frames_do_not_overtake_each_other() {
        let jitter = Duration::from_millis(5);
        let mut way = way(Conditions { rate: None, delay: jitter, jitter, loss: 0.0 });
        for number in 0..1000 {
            way.admit(u64::from(number) * 1000, FRAME, number);
        }
        let order: Vec<u32> = std::iter::from_fn(|| way.take_due(Nanos::MAX)).map(|(_, item)| item).collect();
        assert!(order.is_sorted() && order.len() == 1000);
    }

    #[test]
    fn a_trace_is_followed_in_its_time() {
        let conditions = |ms| Conditions { delay: Duration::from_millis(ms), ..Conditions::default() };
        let mut way = Way::<u32>::new(1);
        let step = |at, ms| Step { at: Duration::from_millis(at), conditions: conditions(ms) };
        way.begin(100 * MS, &[step(0, 10), step(50, 20)]);
        way.extend(&[step(70, 30)]);
        way.follow(100 * MS);
        assert_eq!((way.conditions(), way.next()), (conditions(10), Some(150 * MS)));
        way.follow(149 * MS);
        assert_eq!(way.conditions(), conditions(10));
        way.follow(150 * MS);
        assert_eq!((way.conditions(), way.next()), (conditions(20), Some(170 * MS)));
        way.follow(1000 * MS);
        assert_eq!((way.conditions(), way.next()), (conditions(30), None));
    }
}
