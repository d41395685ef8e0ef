//! The rounds of a move, thought through: each sends what was written during the one before, until
//! [`decide`](crate::converge::decide) ends them.

use std::time::Duration;

use crate::PAGE;
use crate::converge::{Goals, Next, Round, SLOWEST, decide};
use crate::curve::Curve;
use crate::quantity::{bounded, seconds, whole};

/// Most rounds that are thought through.
pub(crate) const MOST_ROUNDS: u32 = 1000;

/// What decides about the rounds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copying<'a> {
    pub(crate) goals: Goals,
    /// Pages of the service.
    pub(crate) pages: u64,
    /// Pages that the first round sends.
    pub(crate) first: u64,
    /// What the service writes.
    pub(crate) writes: &'a Curve,
    /// Bytes of pages that are sent in a second.
    pub(crate) rate: f64,
    /// What each round takes beside sending.
    pub(crate) beside: Duration,
    /// The frozen time without pages.
    pub(crate) fixed: Duration,
}

/// How the rounds end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// The rest crosses while the service is frozen.
    Freeze,
    /// The rest follows after the resume.
    Follow,
    /// The service stays: it may be frozen for so long.
    Keep(Duration),
}

/// What the rounds did.
#[derive(Debug, Clone)]
pub(crate) struct Copied {
    pub(crate) all: Vec<Round>,
    pub(crate) rounds: u32,
    /// Pages that were sent.
    pub(crate) sent: u64,
    /// Pages that are left.
    pub(crate) left: u64,
    pub(crate) took: Duration,
    /// Pages that the service wrote in each round, summed.
    pub(crate) written: f64,
    /// The time that a slowed service did not have.
    pub(crate) slowed: Duration,
    pub(crate) end: End,
}

impl Copying<'_> {
    /// The time in which so many pages cross.
    pub(crate) fn crossing(&self, pages: u64) -> Duration {
        seconds(pages as f64 * PAGE / self.rate)
    }

    /// Thinks the rounds through.
    pub(crate) fn think(&self) -> Copied {
        let round = |found_pages, since| Round { found_pages, since, bandwidth: None, files: 0 };
        let mut copied = Copied {
            all: vec![round(self.first, Duration::ZERO)],
            rounds: 0,
            sent: 0,
            left: self.first,
            took: Duration::ZERO,
            written: 0.0,
            slowed: Duration::ZERO,
            end: End::Freeze,
        };
        // In thousandths, as the share of its CPU is halved.
        let mut share = 1000;
        loop {
            let next = decide(&copied.all, self.fixed, &self.goals);
            match next {
                Next::Copy | Next::Throttle if copied.rounds < MOST_ROUNDS => {
                    if next == Next::Throttle {
                        share = (share / 2).max(SLOWEST);
                    }
                    let took = bounded(self.beside.saturating_add(self.crossing(copied.left)));
                    if let Some(last) = copied.all.last_mut() {
                        last.bandwidth = Some(self.rate);
                    }
                    let running = f64::from(share) / 1e3;
                    let written = (self.writes.within(took) * running).min(self.pages as f64);
                    copied.rounds += 1;
                    copied.sent = copied.sent.saturating_add(copied.left);
                    copied.took = bounded(copied.took + took);
                    copied.written += written;
                    copied.slowed = bounded(copied.slowed + took.mul_f64(1.0 - running));
                    copied.left = whole(written);
                    copied.all.push(round(copied.left, took));
                }
                Next::Keep(frozen) => return Copied { end: End::Keep(frozen), ..copied },
                Next::Hybrid => return Copied { end: End::Follow, ..copied },
                Next::Freeze | Next::Copy | Next::Throttle => return copied,
            }
        }
    }
}
