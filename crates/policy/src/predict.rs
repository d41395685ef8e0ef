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
//! Pages cross beside the dump and the restore, so the longer of the two counts. The mover adds them up instead
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
    /// The frozen time that the mover holds against its limit, without a margin.
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
        // The margin is in `kept` already.
        self.frozen.max(self.held).saturating_add(margin).max(self.kept.unwrap_or_default())
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::curve::Look;

    const GOALS: Goals = Goals {
        max_frozen: None,
        margin: Duration::ZERO,
        max_rounds: 20,
        throttle: false,
        postcopy: false,
        thrifty: false,
    };
    const THRIFTY: Goals = Goals { postcopy: true, thrifty: true, ..GOALS };

    fn goals(mode: Mode) -> Goals {
        if matches!(mode, Mode::Hybrid | Mode::Postcopy) { THRIFTY } else { GOALS }
    }

    fn curve(pages: u64, most: u64) -> Curve {
        let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
        Curve::fit(&[look(pages / 4, 250), look(pages, 1000)], most)
    }

    fn link(bandwidth: f64, ms: u64) -> Link {
        Link {
            bandwidth: Bandwidth::new(bandwidth).unwrap(),
            ratio: WireRatio::new(0.5).unwrap(),
            round_trip: Duration::from_millis(ms),
        }
    }

    fn steps() -> Steps {
        Steps {
            reserve: Duration::from_millis(50),
            look: Duration::from_millis(4),
            fixed: Parts::of(1 << 30, 10),
        }
    }

    fn about(time: Duration, seconds: f64) -> bool {
        (time.as_secs_f64() - seconds).abs() < 1e-4
    }

    #[test]
    fn each_mode_is_predicted_by_its_row_of_the_table() {
        // 1 GiB, a quarter of it kept: ρP(M−K) = 403 MB, 4.027 s at 100 MB/s. The service writes nothing.
        let writes = curve(0, 1 << 18);
        let cargo =
            Cargo { pages: 1 << 18, kept: 1 << 16, images: 1_000_000, files: 50_000_000, writes: &writes };
        let of = |mode| predict(mode, &cargo, &link(100e6, 10), &steps(), &goals(mode));
        let bytes = 50_000_000 + 1_000_000 + 402_653_184;
        // freeze 6, dump 52.35, image 10, restore 43.25, commit 6, two round trips 20.
        let (least, crossing) = (0.1376, 4.02653);
        let cold = of(Mode::Cold);
        assert!(about(cold.frozen, 0.006 + crossing + 0.010 + 0.006 + 0.020), "{cold:?}");
        assert!(about(cold.total, 0.05 + 0.5 + cold.frozen.as_secs_f64() + 0.02), "{cold:?}");
        let precopy = of(Mode::Precopy);
        assert!(about(precopy.frozen, least) && about(precopy.copying, crossing + 0.014), "{precopy:?}");
        assert_eq!((precopy.rounds, precopy.sent, precopy.left), (1, 3 << 16, 0));
        let postcopy = of(Mode::Postcopy);
        assert!(
            about(postcopy.frozen, least + 0.05 + 0.0002) && about(postcopy.filling, crossing),
            "{postcopy:?}"
        );
        let hybrid = of(Mode::Hybrid);
        assert_eq!((hybrid.frozen, hybrid.filling), (postcopy.frozen, Duration::ZERO));
        for forecast in [cold, precopy, postcopy, hybrid] {
            assert_eq!(forecast.bytes, bytes, "{forecast:?}");
            assert!(forecast.held + Duration::from_millis(60) > forecast.frozen);
        }
    }

    #[test]
    fn pages_cross_beside_the_dump_and_few_of_them_cost_no_time() {
        let writes = curve(0, 1 << 18);
        let of = |pages| {
            let cargo = Cargo { pages, kept: 0, images: 0, files: 0, writes: &writes };
            predict(Mode::Cold, &cargo, &link(100e6, 0), &steps(), &GOALS)
        };
        assert_eq!(of(1000).frozen, of(0).frozen, "20 ms beside 95 ms");
        assert!(of(10_000).frozen > of(0).frozen);
        assert!(about(of(1000).held - of(0).held, 0.02048), "but a limit is held against the sum");
    }

    #[test]
    fn what_a_service_rewrites_crosses_again_and_what_it_keeps_there_does_not() {
        let writes = curve(3000, 1 << 18);
        let of = |kept| {
            let cargo = Cargo { pages: 1 << 18, kept, images: 0, files: 0, writes: &writes };
            predict(Mode::Precopy, &cargo, &link(100e6, 1), &steps(), &GOALS)
        };
        let (none, most) = (of(0), of((1 << 18) - 100));
        assert!(none.sent > 1 << 18 && none.written > 3000 * 5, "{none:?}");
        assert!(most.sent < 1000 && most.copying < Duration::from_millis(500), "{most:?}");
        assert_eq!(of(u64::MAX).sent, of(1 << 18).sent, "more than there is is all of it");
    }

    proptest! {
        // Each case fits a curve, which takes its time without optimisation.
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn each_round_of_a_writer_finds_no_fewer_pages_on_a_worse_way(
            (pages, writes) in (1_u64..1 << 20, 0_u64..1 << 20),
            (bandwidth, factor) in (1e5_f64..1e9, 1.0_f64..10.0),
            (round_trip, longer) in (0_u64..200, 0_u64..200),
        ) {
            let writes = curve(writes, pages);
            let cargo = Cargo { pages, kept: 0, images: 0, files: 0, writes: &writes };
            let of = |link: &Link| think(Mode::Precopy, &cargo, link, &steps(), &GOALS);
            let better = of(&link(bandwidth * factor, round_trip));
            let worse = of(&link(bandwidth, round_trip + longer));
            // When rounds end depends on what they gain, so their number may differ either way.
            for (better, worse) in better.1.iter().zip(&worse.1) {
                prop_assert!(better.found_pages <= worse.found_pages + 1 && better.since <= worse.since);
            }
        }
    }
}
