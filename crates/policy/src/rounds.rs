//! The rounds of a move, thought through: each sends what was written during the one before, until
//! [`decide`](crate::converge::decide) ends them. Files that change cross in passes of their own: the first one before the
//! rounds, and others each time the rounds would end.

use std::time::Duration;

use crate::PAGE;
use crate::converge::{Goals, Next, Round, SLOWEST, decide};
use crate::curve::Curve;
use crate::files::{Ahead, Files, Passes};
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
    /// Its files.
    pub(crate) files: &'a Files,
    /// Bytes of pages that are sent in a second.
    pub(crate) rate: f64,
    /// Bytes of files that are.
    pub(crate) file_rate: f64,
    /// What each round takes beside sending.
    pub(crate) beside: Duration,
    /// The frozen time without pages and files.
    pub(crate) fixed: Duration,
    /// Whether the pages that are left follow after the resume in any case.
    pub(crate) follows: bool,
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
    /// Bytes of files that were sent.
    pub(crate) files_sent: u64,
    /// Bytes of files that are left; 0 where the service stays before they were looked at.
    pub(crate) files_left: u64,
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

    /// The time in which so many bytes of files do.
    pub(crate) fn carrying(&self, bytes: u64) -> Duration {
        seconds(bytes as f64 / self.file_rate)
    }

    /// Passes over files without any round, for a move that ends like this.
    pub(crate) fn without_rounds(&self, end: End) -> Copied {
        let (mut copied, mut passes) = self.begin();
        loop {
            match passes.look() {
                Ahead::Left(bytes) => return Copied { files_left: bytes, end, ..copied },
                Ahead::Sent(bytes) => copied.sends(bytes, self.carrying(bytes), &mut passes),
            }
        }
    }

    /// Thinks the rounds through.
    pub(crate) fn think(&self) -> Copied {
        let round = |found_pages, since| Round { found_pages, since, bandwidth: None, files: 0 };
        let (mut copied, mut passes) = self.begin();
        copied.all.push(round(self.first, Duration::ZERO));
        // In thousandths, as the share of its CPU is halved.
        let mut share = 1000;
        // Since the last round.
        let mut waited = Duration::ZERO;
        loop {
            let next = decide(&copied.all, self.fixed, &self.goals);
            // No user waits for more.
            let most = copied.rounds >= MOST_ROUNDS;
            let end = match next {
                Next::Keep(frozen) => return Copied { end: End::Keep(frozen), ..copied },
                Next::Copy | Next::Throttle if !most => None,
                Next::Hybrid => Some(End::Follow),
                Next::Freeze | Next::Copy | Next::Throttle if self.follows => Some(End::Follow),
                Next::Freeze | Next::Copy | Next::Throttle => Some(End::Freeze),
            };
            if next == Next::Throttle {
                share = (share / 2).max(SLOWEST);
            }
            let running = f64::from(share) / 1e3;
            let slowed = |time: Duration| time.mul_f64(1.0 - running);
            let written = |time| (self.writes.within(time) * running).min(self.pages as f64);
            let mut since = Duration::ZERO;
            if let Some(end) = end {
                match passes.look() {
                    Ahead::Left(bytes) => {
                        if let Some(last) = copied.all.last_mut() {
                            last.files = bytes;
                        }
                        return Copied { files_left: bytes, end, ..copied };
                    }
                    Ahead::Sent(bytes) => {
                        since = self.carrying(bytes);
                        copied.sends(bytes, since, &mut passes);
                        copied.slowed = bounded(copied.slowed + slowed(since));
                        if most || end == End::Follow {
                            // What it writes meanwhile is left, too.
                            waited = bounded(waited + since);
                            let round = copied.all.last().map_or(Duration::ZERO, |last| last.since);
                            copied.written += written(since);
                            copied.left = copied.left.max(whole(written(bounded(round + waited))));
                            continue;
                        }
                    }
                }
            }
            let took = bounded(self.beside.saturating_add(self.crossing(copied.left)));
            if let Some(last) = copied.all.last_mut() {
                last.bandwidth = Some(self.rate);
            }
            passes.pass(took);
            // What it has written while files were sent is found, too.
            let since = bounded(since + took);
            let found = written(since);
            copied.rounds += 1;
            copied.sent = copied.sent.saturating_add(copied.left);
            copied.took = bounded(copied.took + took);
            copied.written += found;
            copied.slowed = bounded(copied.slowed + slowed(took));
            copied.left = whole(found);
            copied.all.push(round(copied.left, since));
            waited = Duration::ZERO;
        }
    }

    /// With nothing sent but the first pass of files.
    fn begin(&self) -> (Copied, Passes<'_>) {
        let first = self.carrying(self.files.bytes);
        let copied = Copied {
            all: Vec::new(),
            rounds: 0,
            sent: 0,
            left: self.first,
            files_sent: self.files.bytes,
            files_left: 0,
            took: first,
            written: 0.0,
            slowed: Duration::ZERO,
            end: End::Freeze,
        };
        (copied, self.files.after(first))
    }
}

impl Copied {
    /// So many bytes of files cross while the service runs, in this time.
    fn sends(&mut self, bytes: u64, time: Duration, passes: &mut Passes<'_>) {
        passes.pass(time);
        self.files_sent = self.files_sent.saturating_add(bytes);
        self.took = bounded(self.took + time);
    }
}
