//! What a move takes, in each mode: a pure function of what has to cross, of the link, and of what the service writes.
//!
//! ```text
//!  F(n)  = freeze + max(dump + I/B + restore, (ρ·P·n + I)/B) + commit + 2r       frozen, with n pages to send meanwhile
//!  total = reserve + X/B + rounds + frozen + filling + 2r
//!
//!  mode      frozen              bytes               filling
//!  cold      F(M−K)              X+I+ρP(M−K)         0
//!  precopy   F(D)                X+I+ρP(S+D)         0
//!  postcopy  F(0)+5(r+P/B)       X+I+ρP(M−K)         ρP(M−K)/B
//!  hybrid    F(0)+5(r+P/B)       X+I+ρP(S+D)         ρPD/B
//! ```
//! `M`: pages with content; `K`: those that the destination kept; `P`: a page's bytes; `I`: images; `X`: layers and files;
//! `B`: bandwidth; `ρ`: wire ratio; `r`: round trip; `S`: pages sent while the service runs; `D`: pages left by then.
//! Pages cross beside the dump and the restore, so the longer of the two counts. Whoever runs a move adds them up instead
//! ([`crate::converge::predict`]), to be on the safe side: [`Forecast::held`] is that figure.

use std::time::Duration;

use crate::converge::{Goals, Round};
use crate::curve::Curve;
use crate::fixed::Parts;
use crate::quantity::{Bandwidth, WireRatio, bounded, seconds, whole};
use crate::rounds::{Copied, Copying, End};
use crate::{Mode, PAGE};

/// Pages that a restore touches, each of which has to be fetched where pages follow later.
const TOUCHED: u32 = 5;

/// What has to cross.
#[derive(Debug, Clone, Copy)]
pub struct Cargo<'a> {
    /// Pages with content.
    pub pages: u64,
    /// How many of them the destination kept from an earlier stay.
    pub kept: u64,
    /// Bytes of CRIU's images.
    pub images: u64,
    /// Bytes of layers and files that the destination lacks.
    pub files: u64,
    /// What the service writes.
    pub writes: &'a Curve,
}

/// The way between the nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// What it carries for this move. A move uses half of a link.
    pub bandwidth: Bandwidth,
    /// What is sent for a byte of pages.
    pub ratio: WireRatio,
    /// A round trip.
    pub round_trip: Duration,
}

/// What steps take that no bandwidth shortens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Steps {
    /// The reservation at the destination.
    pub reserve: Duration,
    /// A look for written pages, once in each round.
    pub look: Duration,
    /// The frozen time's fixed parts.
    pub fixed: Parts,
}

/// What a move takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Forecast {
    /// How the memory moves in the end.
    pub mode: Mode,
    /// Rounds of copying.
    pub rounds: u32,
    /// Pages sent while the service runs at the source.
    pub sent: u64,
    /// Pages left by then.
    pub left: u64,
    /// Bytes that cross: pages, images, layers and files.
    pub bytes: u64,
    /// The time of the rounds.
    pub copying: Duration,
    /// Pages written in each round, summed: each is a fault at its first write.
    pub written: u64,
    /// The time that a slowed service does not have.
    pub slowed: Duration,
    /// The frozen time.
    pub frozen: Duration,
    /// The frozen time that whoever runs the move holds against its limit, without a margin.
    pub held: Duration,
    /// The time in which pages follow after the resume.
    pub filling: Duration,
    /// The whole move.
    pub total: Duration,
    /// Why the move would be given up: it might be frozen for so long, more than is allowed.
    pub kept: Option<Duration>,
}

impl Forecast {
    /// The frozen time that nine of ten moves do not exceed, with this margin of [`crate::learn::Belief::margin`].
    #[must_use]
    pub fn most_frozen(&self, margin: Duration) -> Duration {
        self.frozen.max(self.held).max(self.kept.unwrap_or_default()).saturating_add(margin)
    }
}

/// Predicts a move in this mode, `auto` as `precopy`. The goals are those of this mode.
#[must_use]
pub fn predict(mode: Mode, cargo: &Cargo, link: &Link, steps: &Steps, goals: &Goals) -> Forecast {
    think(mode, cargo, link, steps, goals).0
}

/// The same, with the rounds.
pub(crate) fn think(
    mode: Mode,
    cargo: &Cargo,
    link: &Link,
    steps: &Steps,
    goals: &Goals,
) -> (Forecast, Vec<Round>) {
    let way = Way { link, images: cargo.images, parts: &steps.fixed };
    let first = cargo.pages.saturating_sub(cargo.kept);
    let copying = Copying {
        goals: *goals,
        pages: cargo.pages,
        first,
        writes: cargo.writes,
        rate: way.bandwidth() / link.ratio.get(),
        beside: bounded(bounded(steps.look).saturating_add(link.round_trip)),
        fixed: way.frozen(0),
    };
    let none = Copied {
        all: Vec::new(),
        rounds: 0,
        sent: 0,
        left: first,
        took: Duration::ZERO,
        written: 0.0,
        slowed: Duration::ZERO,
        end: if mode == Mode::Postcopy { End::Follow } else { End::Freeze },
    };
    let copied = match mode {
        // No limit keeps these two: they have no rounds that could meet it.
        Mode::Cold | Mode::Postcopy => none,
        Mode::Auto | Mode::Precopy | Mode::Hybrid => copying.think(),
    };
    let Copied { rounds, sent, left, took, .. } = copied;
    let follows = copied.end == End::Follow || (mode == Mode::Hybrid && copied.end == End::Freeze);
    let crossing = copying.crossing(left);
    let (frozen, held, filling) = match follows {
        true => (way.frozen(0) + way.touched(), way.frozen(0), crossing),
        false => (way.frozen(left), way.frozen(0) + crossing, Duration::ZERO),
    };
    let kept = match copied.end {
        End::Keep(frozen) => Some(frozen),
        End::Freeze | End::Follow => None,
    };
    let pages = sent.saturating_add(left);
    let others = cargo.files.saturating_add(cargo.images);
    let forecast = Forecast {
        mode: if follows && mode != Mode::Postcopy { Mode::Hybrid } else { mode },
        rounds,
        sent,
        left,
        bytes: others.saturating_add(whole(pages as f64 * PAGE * link.ratio.get())),
        copying: took,
        written: whole(copied.written),
        slowed: copied.slowed,
        frozen: bounded(frozen),
        held: bounded(held),
        filling,
        total: [steps.reserve, way.at(cargo.files as f64), took, frozen, filling, way.round_trips()]
            .into_iter()
            .fold(Duration::ZERO, |sum, time| bounded(sum + bounded(time))),
        kept,
    };
    (forecast, copied.all)
}

/// What the frozen time is made of.
struct Way<'a> {
    link: &'a Link,
    images: u64,
    parts: &'a Parts,
}

impl Way<'_> {
    fn bandwidth(&self) -> f64 {
        self.link.bandwidth.get()
    }

    /// The time in which so many bytes cross.
    fn at(&self, bytes: f64) -> Duration {
        seconds(bytes / self.bandwidth())
    }

    /// There and back, twice: the images' end, and the commit.
    fn round_trips(&self) -> Duration {
        bounded(self.link.round_trip) * 2
    }

    /// `F(n)`.
    fn frozen(&self, pages: u64) -> Duration {
        let Parts { freeze, dump, restore, commit } = *self.parts;
        let images = self.images as f64;
        let state = bounded(dump) + self.at(images) + bounded(restore);
        let sent = self.at(pages as f64 * PAGE * self.link.ratio.get() + images);
        bounded(bounded(freeze) + state.max(sent) + bounded(commit) + self.round_trips())
    }

    /// What a restore waits for whose pages follow.
    fn touched(&self) -> Duration {
        bounded(bounded(self.link.round_trip) + self.at(PAGE)) * TOUCHED
    }
}
