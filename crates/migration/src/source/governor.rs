//! Keeps the queue short through which faulted pages go.
//!
//! The pages that are pushed and those that are waited for share the way between the nodes. What the
//! push has under way beyond what the way itself holds stands in a queue somewhere, and every page
//! that is waited for stands behind it: with BBR on several connections some four round trips. So the
//! push is paced a little below what the way was seen to carry whenever the round trip says that a
//! queue has grown, and a little faster each time when there is none:
//!
//! ```text
//! round trip ── shortest round trip ──▶ queue ─┬─ longer than the target ─▶ below what arrives
//! bytes acknowledged ─▶ what arrives ──────────┴─ shorter ────────────────▶ a bit more than before
//! ```
//!
//! What arrives counts the answers to page faults, too: they take their share of the way, a larger one the sooner each
//! answer comes, and only the rest is the push's.
//!
//! A queue that does not go away is not the push's: then only the congestion control sets the rate for some time.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use godwit_memory::PAGE_SIZE;
use godwit_memory::batch::MAX_PAGES;
use godwit_transfer::{Gauge, Reading};
use tokio::time::MissedTickBehavior;

/// Between two samples: a few round trips of a fast link, and long enough that the bytes of one give
/// a rate.
const INTERVAL: Duration = Duration::from_millis(10);

/// What the queue may take beyond a part of the round trip: scheduling alone delays machines by more than less.
const SLACK: Duration = Duration::from_micros(300);

/// That part of the shortest round trip: a page that is waited for may be late by this.
const PART: u32 = 4;

/// Samples that are averaged to a rate: what is acknowledged comes in bursts.
const SMOOTH: usize = 5;

/// Averages of which the highest counts as what the way carries.
const REMEMBERED: usize = 16;

/// How much of what arrives is sent while the queue is too long, and while it is far too long.
const EASE: f64 = 0.95;
const DRAIN: f64 = 0.8;

/// A queue so many times the target is far too long.
const FAR: u32 = 3;

/// The least that is left to the push of what arrives: more answers than that wait for each other.
const LEAST: f64 = 0.1;

/// How much more is sent after each sample without a queue.
const GROWTH: f64 = 1.01;

/// A rate is raised only when so much of it is used.
const USED: f64 = 0.85;

/// Samples in a row after which a queue counts as caused by other traffic: ten times what draining ours takes.
const FOREIGN: u32 = 30;

/// Samples for which nothing is paced then.
const TRUCE: u32 = 100;

/// Most bytes that follow a page that is waited for.
const MOST_BESIDE: u64 = (MAX_PAGES as u64) * PAGE_SIZE;

/// What was measured at one time.
#[derive(Debug, Clone, Copy)]
struct Sample {
    /// How much longer than the shortest the round trip is.
    queue: Duration,
    /// The shortest.
    shortest: Duration,
    /// Bytes of the push that arrived per second.
    pushed: f64,
    /// Of the answers to page faults.
    answered: f64,
}

/// The rule: from what was seen to a bound on the rate of all connections together.
#[derive(Debug, Default)]
struct Governor {
    pushed: VecDeque<f64>,
    answered: VecDeque<f64>,
    averages: VecDeque<f64>,
    /// Bytes per second; none: as fast as the congestion control wants.
    limit: Option<f64>,
    /// Samples in a row with a queue that is too long.
    long: u32,
    truce: u32,
}

impl Governor {
    /// What the way was seen to carry lately, bytes per second.
    fn carried(&self) -> f64 {
        self.averages.iter().copied().fold(0.0, f64::max)
    }

    /// The bound from now on.
    fn adjust(&mut self, sample: Sample) -> Option<f64> {
        let pushed = average(&mut self.pushed, sample.pushed);
        let answered = average(&mut self.answered, sample.answered);
        remember(&mut self.averages, pushed + answered, REMEMBERED);
        if self.truce > 0 {
            self.truce -= 1;
            return self.limit;
        }
        let target = sample.shortest / PART + SLACK;
        if sample.queue <= target {
            self.long = 0;
            // A push that has less to send than it may says nothing about the way.
            self.limit = self.limit.map(|limit| if pushed > limit * USED { limit * GROWTH } else { limit });
            return self.limit;
        }
        self.long += 1;
        if self.long > FOREIGN {
            (self.long, self.truce, self.limit) = (0, TRUCE, None);
            return None;
        }
        let share = if sample.queue > target * FAR { DRAIN } else { EASE };
        let carried = self.carried();
        self.limit = Some((carried * share - answered).max(carried * LEAST).max(1.0));
        self.limit
    }
}

/// What may follow a page that is waited for without holding the next one up: what crosses while that
/// is being asked for, and goes with the page into the window of the connection. That is small at first: what does not
/// fit waits for a round trip, and the next page behind it. A power of two, at least a page.
fn beside(carried: f64, shortest: Duration, window: Option<u64>) -> u64 {
    // The bound makes a small number of it.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    let bytes = (carried * shortest.as_secs_f64() / 2.0).min(MOST_BESIDE as f64) as u64;
    // A page more is for headers, and for segments that are not full.
    let fits = window.map_or(u64::MAX, |window| window.saturating_sub(2 * PAGE_SIZE));
    1 << bytes.min(fits).max(PAGE_SIZE).ilog2()
}

/// The average of the last values and this.
fn average(of: &mut VecDeque<f64>, value: f64) -> f64 {
    remember(of, value, SMOOTH);
    of.iter().sum::<f64>() / of.len() as f64
}

fn remember(of: &mut VecDeque<f64>, value: f64, most: usize) {
    if of.len() == most {
        of.pop_front();
    }
    of.push_back(value);
}

/// Paces the connections that push beside those that answer, until it is dropped, and says how much may follow a page
/// that is waited for, bytes. What a kernel does not tell or allow leaves them as fast as they are.
pub(super) async fn keep_short(
    pushing: Vec<Weak<Gauge>>,
    answering: Option<Weak<Gauge>>,
    may_follow: impl Fn(u64),
) -> Infallible {
    let mut governor = Governor::default();
    let mut pushing: Vec<Watched> = pushing.into_iter().map(Watched::new).collect();
    let mut answering = answering.map(Watched::new);
    let mut clock = tokio::time::interval(INTERVAL);
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut last = Instant::now();
    loop {
        clock.tick().await;
        let elapsed = std::mem::replace(&mut last, Instant::now()).elapsed();
        match step(&mut governor, &mut pushing, answering.as_mut(), elapsed) {
            Ok(Some((shortest, window))) => may_follow(beside(governor.carried(), shortest, window)),
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "the push is not paced");
                return std::future::pending().await;
            }
        }
    }
}

/// A connection, and what it had brought over at the last sample.
struct Watched {
    gauge: Weak<Gauge>,
    acknowledged: Option<u64>,
}

impl Watched {
    fn new(gauge: Weak<Gauge>) -> Self {
        Self { gauge, acknowledged: None }
    }

    /// What the kernel says, and the bytes that came over since the last time; none: it is closed.
    fn read(&mut self) -> io::Result<Option<(Arc<Gauge>, Reading, u64)>> {
        let Some(gauge) = self.gauge.upgrade() else { return Ok(None) };
        let reading = gauge.read()?;
        let came = reading.acknowledged - self.acknowledged.unwrap_or(reading.acknowledged);
        self.acknowledged = Some(reading.acknowledged);
        Ok(Some((gauge, reading, came)))
    }
}

/// The shortest round trip, and the window of the connection that answers; none if nothing came.
fn step(
    governor: &mut Governor,
    pushing: &mut Vec<Watched>,
    answering: Option<&mut Watched>,
    elapsed: Duration,
) -> io::Result<Option<(Duration, Option<u64>)>> {
    pushing.retain(|one| one.gauge.strong_count() > 0);
    let mut open: Vec<Arc<Gauge>> = Vec::new();
    let (mut pushed, mut round_trip, mut shortest) = (0, None::<Duration>, None::<Duration>);
    for one in pushing {
        let Some((gauge, reading, came)) = one.read()? else { continue };
        open.push(gauge);
        if !reading.shortest.is_zero() {
            shortest = Some(shortest.map_or(reading.shortest, |least| least.min(reading.shortest)));
        }
        // The round trip of one on which nothing came is as old as the last that did.
        if came > 0 {
            pushed += came;
            round_trip = Some(round_trip.map_or(reading.round_trip, |least| least.min(reading.round_trip)));
        }
    }
    let answers = answering.map(Watched::read).transpose()?.flatten();
    let (answered, window) = answers.map_or((0, None), |(_, reading, came)| (came, Some(reading.window)));
    let (Some(round_trip), Some(shortest)) = (round_trip, shortest) else { return Ok(None) };
    let rate = |bytes: u64| bytes as f64 / elapsed.as_secs_f64().max(1e-6);
    let queue = round_trip.saturating_sub(shortest);
    let sample = Sample { queue, shortest, pushed: rate(pushed), answered: rate(answered) };
    let before = governor.limit;
    let limit = governor.adjust(sample);
    if limit != before {
        // A share of a rate that fits into a number of bytes fits too.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let each = limit.map(|limit| (limit / open.len() as f64) as u64);
        for gauge in &open {
            gauge.limit(each)?;
        }
    }
    Ok(Some((shortest, window)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORTEST: Duration = Duration::from_millis(2);

    /// A way of this many bytes per second, and a queue before it. The senders would keep eight
    /// milliseconds of it full. So many bytes answer each page fault of one thread, which waits for them.
    struct Way {
        carries: f64,
        queued: f64,
        answer: f64,
    }

    impl Way {
        /// What a sample finds after the next interval at this limit.
        fn pass(&mut self, limit: Option<f64>) -> Sample {
            let seconds = INTERVAL.as_secs_f64();
            let waits = SHORTEST.as_secs_f64() + (self.queued + self.answer) / self.carries;
            let answered = self.answer * seconds / waits;
            let sent = limit.unwrap_or(f64::INFINITY).min(self.carries * 1.25) * seconds;
            let came = (self.queued + sent + answered).min(self.carries * seconds);
            self.queued = (self.queued + sent + answered - came).min(self.carries * 0.008);
            let queue = Duration::from_secs_f64(self.queued / self.carries);
            let answered = answered / seconds;
            Sample { queue, shortest: SHORTEST, pushed: came / seconds - answered, answered }
        }

        /// Mean queue and mean share of the way that was used, over some samples.
        fn run(&mut self, governor: &mut Governor, samples: u32) -> (Duration, f64) {
            let (mut queue, mut rate) = (Duration::ZERO, 0.0);
            for _ in 0..samples {
                let sample = self.pass(governor.limit);
                governor.adjust(sample);
                queue += sample.queue;
                rate += sample.pushed + sample.answered;
            }
            (queue / samples, rate / f64::from(samples) / self.carries)
        }
    }

    #[test]
    fn the_queue_is_short_and_the_way_is_used() {
        for answer in [0.0, 70e3] {
            let (mut way, mut governor) = (Way { carries: 125e6, queued: 0.0, answer }, Governor::default());
            way.run(&mut governor, 50);
            let (queue, used) = way.run(&mut governor, 1000);
            assert!(queue < SHORTEST / 2 + SLACK && used > 0.95, "{answer}: {queue:?} {used}");
        }
    }

    #[test]
    fn a_way_that_carries_more_or_less_than_before_is_used_as_well() {
        let (mut way, mut governor) = (Way { carries: 125e6, queued: 0.0, answer: 0.0 }, Governor::default());
        way.run(&mut governor, 100);
        for carries in [250e6, 50e6] {
            way.carries = carries;
            way.run(&mut governor, 100);
            let (queue, used) = way.run(&mut governor, 500);
            assert!(queue < SHORTEST / 2 + SLACK && used > 0.95, "{carries} {queue:?} {used}");
        }
    }

    #[test]
    fn a_queue_of_others_does_not_keep_the_push_down_for_good() {
        let mut governor = Governor::default();
        let mut passed = 0.0;
        for _ in 0..2000 {
            let pushed = governor.limit.unwrap_or(f64::INFINITY).min(50e6);
            let queue = Duration::from_millis(20);
            governor.adjust(Sample { queue, shortest: SHORTEST, pushed, answered: 0.0 });
            passed += pushed;
        }
        assert!(passed / 2000.0 > 45e6, "{passed}");
    }

    #[test]
    fn as_much_follows_a_page_as_crosses_while_the_next_is_asked_for() {
        for (carried, round_trip, pages) in
            [(115e6, 2, 16), (11e6, 2, 2), (1e6, 2, 1), (11e6, 40, 32), (1e9, 9, 64)]
        {
            let bytes = beside(carried, Duration::from_millis(round_trip), None);
            assert_eq!(bytes, pages * PAGE_SIZE, "{carried}");
        }
    }

    #[test]
    fn what_follows_a_page_fits_into_the_window_with_it() {
        // Ten segments at first, then more; one that has shrunk to a segment.
        for (window, pages) in
            [(14_480, 1), (36_864, 4), (40_960, 8), (73_728, 16), (1_000_000, 16), (1448, 1)]
        {
            assert_eq!(beside(115e6, Duration::from_millis(2), Some(window)), pages * PAGE_SIZE, "{window}");
        }
    }

    #[test]
    fn a_push_that_is_slower_than_the_way_is_left_alone() {
        let mut governor = Governor::default();
        for _ in 0..100 {
            let queue = Duration::ZERO;
            governor.adjust(Sample { queue, shortest: SHORTEST, pushed: 10e6, answered: 0.0 });
        }
        assert_eq!(governor.limit, None);
    }
}
