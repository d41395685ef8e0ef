//! What a move takes, in each mode: a pure function of what has to cross, of the link, and of what the service writes.
//!
//! ```text
//!  F(n)  = freeze + max(dump + I/B + restore, (ρ·P·n + W + I)/B) + compare + commit + 2r      frozen, n pages are left
//!  total = reserve + X/B + copying + frozen + filling + 2r
//!
//!  mode      frozen              bytes                 filling
//!  cold      F(M−K)              X+Y+W+I+ρP(M−K)       0
//!  precopy   F(D)                X+Y+W+I+ρP(S+D)       0
//!  postcopy  F(0)+5(r+P/B)       X+Y+W+I+ρP(M−K)       ρP(M−K)/B
//!  hybrid    F(0)+5(r+P/B)       X+Y+W+I+ρP(S+D)       ρPD/B
//! ```
//! `M`: pages with content; `K`: those that the destination kept; `P`: a page's bytes; `I`: images; `X`: layers;
//! `Y`: files sent while the service runs; `W`: files left by then; `B`: bandwidth; `ρ`: wire ratio; `r`: round trip;
//! `S`: pages sent while the service runs; `D`: pages left by then; `compare`: how much longer than half of the fixed parts
//! a look at the files takes. `copying` is the first pass of files, the rounds, and the passes over what changed meanwhile.
//! Pages and files cross beside the dump and the restore, so the longer of the two counts. The mover adds them up instead
//! ([`crate::converge::predict_all`]), to be on the safe side: [`Forecast::held`] is that figure.

use std::time::Duration;

use crate::converge::Goals;
use crate::curve::Curve;
use crate::files::Files;
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
    /// Bytes of layers that the destination lacks. They are sent once, before all else.
    pub layers: u64,
    /// Files, of which some change while the service runs.
    pub files: &'a Files,
    /// What the service writes.
    pub writes: &'a Curve,
}

/// The way between the nodes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Link {
    /// What it carries for this move. A move uses half of a link.
    pub bandwidth: Bandwidth,
    /// What of it pages may use.
    pub of_pages: Bandwidth,
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
    /// Bytes of files that cross, with those that are sent more than once.
    pub file_bytes: u64,
    /// Those of them that are left for the frozen time. They are not known where the move is given up before: 0.
    pub files_left: u64,
    /// Bytes that cross: pages, images, layers and files.
    pub bytes: u64,
    /// The time from the first pass of files until the freeze.
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
) -> (Forecast, Copied) {
    let Cargo { images, layers, files, .. } = *cargo;
    let parts = &steps.fixed;
    let way = Way { link, images, parts, comparing: bounded(files.lengthen(parts.whole())) };
    let copying = Copying {
        goals: *goals,
        pages: cargo.pages,
        first: cargo.pages.saturating_sub(cargo.kept),
        writes: cargo.writes,
        files,
        rate: link.of_pages.get().min(way.bandwidth()) / link.ratio.get(),
        file_rate: way.bandwidth(),
        beside: bounded(bounded(steps.look).saturating_add(link.round_trip)),
        fixed: way.frozen(0, 0),
        follows: mode == Mode::Hybrid,
    };
    let (copied, limit) = match mode {
        // No limit keeps these two: they have no rounds that could meet it.
        Mode::Cold => (copying.without_rounds(End::Freeze), None),
        Mode::Postcopy => (copying.without_rounds(End::Follow), None),
        Mode::Auto | Mode::Precopy | Mode::Hybrid => (copying.think(), goals.max_frozen),
    };
    let Copied { rounds, sent, left, files_sent, files_left, took, .. } = copied;
    let follows = copied.end == End::Follow;
    let (crossing, beside) = (copying.crossing(left), copying.fixed + copying.carrying(files_left));
    let (frozen, held, filling) = match follows {
        true => (way.frozen(0, files_left) + way.touched(), beside, crossing),
        false => (way.frozen(left, files_left), beside + crossing, Duration::ZERO),
    };
    let held = bounded(held);
    let surely = held.saturating_add(goals.margin);
    let kept = match copied.end {
        End::Keep(frozen) => Some(frozen),
        End::Freeze | End::Follow => limit.is_some_and(|limit| surely > limit).then_some(surely),
    };
    let pages = sent.saturating_add(left);
    let file_bytes = files_sent.saturating_add(files_left);
    let others = layers.saturating_add(file_bytes).saturating_add(images);
    let forecast = Forecast {
        mode: if follows && mode != Mode::Postcopy { Mode::Hybrid } else { mode },
        rounds,
        sent,
        left,
        file_bytes,
        files_left,
        bytes: others.saturating_add(whole(pages as f64 * PAGE * link.ratio.get())),
        copying: took,
        written: whole(copied.written),
        slowed: copied.slowed,
        frozen: bounded(frozen),
        held,
        filling,
        total: [steps.reserve, way.at(layers as f64), took, frozen, filling, way.round_trips()]
            .into_iter()
            .fold(Duration::ZERO, |sum, time| bounded(sum + bounded(time))),
        kept,
    };
    (forecast, copied)
}

/// What the frozen time is made of.
struct Way<'a> {
    link: &'a Link,
    images: u64,
    parts: &'a Parts,
    /// What comparing files adds to the parts.
    comparing: Duration,
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

    /// `F(n)`, with so many bytes of files.
    fn frozen(&self, pages: u64, files: u64) -> Duration {
        let Parts { freeze, dump, restore, commit } = *self.parts;
        let images = self.images as f64;
        let state = bounded(dump) + self.at(images) + bounded(restore);
        let of_pages = self.link.of_pages.get().min(self.bandwidth());
        let pages = seconds(pages as f64 * PAGE * self.link.ratio.get() / of_pages);
        let sent = bounded(pages + self.at(files as f64 + images));
        let fixed = bounded(freeze) + self.comparing + bounded(commit);
        bounded(fixed + state.max(sent) + self.round_trips())
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
    use crate::converge::Round;
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

    fn cargo<'a>(pages: u64, files: &'a Files, writes: &'a Curve) -> Cargo<'a> {
        Cargo { pages, kept: 0, images: 0, layers: 0, files, writes }
    }

    fn link(bandwidth: f64, ms: u64) -> Link {
        Link {
            bandwidth: Bandwidth::new(bandwidth).unwrap(),
            of_pages: Bandwidth::new(bandwidth).unwrap(),
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
        let files = Files { bytes: 20_000_000, ..Files::none() };
        let of_files = Cargo { files: &files, layers: 30_000_000, ..cargo(1 << 18, &files, &writes) };
        let cargo = Cargo { kept: 1 << 16, images: 1_000_000, ..of_files };
        let of = |mode| predict(mode, &cargo, &link(100e6, 10), &steps(), &goals(mode));
        let bytes = 50_000_000 + 1_000_000 + 402_653_184;
        // freeze 6, dump 52.35, image 10, restore 43.25, commit 6, two round trips 20.
        let (least, crossing) = (0.1376, 4.02653);
        let cold = of(Mode::Cold);
        assert!(about(cold.frozen, 0.006 + crossing + 0.010 + 0.006 + 0.020), "{cold:?}");
        assert!(
            about(cold.copying, 0.2) && about(cold.total, 0.05 + 0.5 + cold.frozen.as_secs_f64() + 0.02),
            "{cold:?}"
        );
        let precopy = of(Mode::Precopy);
        assert!(
            about(precopy.frozen, least) && about(precopy.copying, 0.2 + crossing + 0.014),
            "{precopy:?}"
        );
        assert_eq!((precopy.rounds, precopy.sent, precopy.left), (1, 3 << 16, 0));
        let postcopy = of(Mode::Postcopy);
        assert!(
            about(postcopy.frozen, least + 0.05 + 0.0002) && about(postcopy.filling, crossing),
            "{postcopy:?}"
        );
        let hybrid = of(Mode::Hybrid);
        assert_eq!((hybrid.frozen, hybrid.filling), (postcopy.frozen, Duration::ZERO));
        for forecast in [cold, precopy, postcopy, hybrid] {
            assert_eq!((forecast.bytes, forecast.file_bytes), (bytes, 20_000_000), "{forecast:?}");
            assert!(forecast.held + Duration::from_millis(60) > forecast.frozen);
        }
    }

    #[test]
    fn pages_cross_beside_the_dump_and_few_of_them_cost_no_time() {
        let (writes, files) = (curve(0, 1 << 18), Files::none());
        let of = |pages| {
            let cargo = cargo(pages, &files, &writes);
            predict(Mode::Cold, &cargo, &link(100e6, 0), &steps(), &GOALS)
        };
        assert_eq!(of(1000).frozen, of(0).frozen, "20 ms beside 95 ms");
        assert!(of(10_000).frozen > of(0).frozen);
        assert!(about(of(1000).held - of(0).held, 0.02048), "but a limit is held against the sum");
    }

    #[test]
    fn what_a_service_rewrites_crosses_again_and_what_it_keeps_there_does_not() {
        let (writes, files) = (curve(3000, 1 << 18), Files::none());
        let of = |kept| {
            let cargo = Cargo { kept, ..cargo(1 << 18, &files, &writes) };
            predict(Mode::Precopy, &cargo, &link(100e6, 1), &steps(), &GOALS)
        };
        let (none, most) = (of(0), of((1 << 18) - 100));
        assert!(none.sent > 1 << 18 && none.written > 3000 * 5, "{none:?}");
        assert!(most.sent < 1000 && most.copying < Duration::from_millis(500), "{most:?}");
        assert_eq!(of(u64::MAX).sent, of(1 << 18).sent, "more than there is is all of it");
    }

    /// 100 MB of files, of which so many others are written in a second, of 1 GiB.
    fn changing(pages: u64, comparing: u64) -> Files {
        let comparing = Duration::from_millis(comparing);
        Files { bytes: 100_000_000, writes: curve(pages, 1 << 18), comparing }
    }

    #[test]
    fn files_that_change_cross_in_passes_and_the_last_of_them_beside_the_dump() {
        // 400 MB in 2 s at 100 MB/s, after the files' first pass of 1 s. They change by 1 MB/s.
        let (writes, files) = (curve(0, 1 << 18), changing(244, 0));
        let cargo = cargo(97_656, &files, &writes);
        let of = |mode| predict(mode, &cargo, &link(100e6, 0), &steps(), &goals(mode));
        let [cold, precopy, postcopy, hybrid] =
            [Mode::Cold, Mode::Precopy, Mode::Postcopy, Mode::Hybrid].map(of);
        // The time of the first pass and of what is sent again.
        let files_take = |forecast: &Forecast| (forecast.file_bytes - forecast.files_left) as f64 / 100e6;
        for alone in [cold, postcopy] {
            // A second pass of 10 ms, which leaves 10 kB.
            assert!(about(alone.copying, files_take(&alone)) && alone.rounds == 0, "{alone:?}");
            assert!((1..20_000).contains(&alone.files_left), "{alone:?}");
        }
        // A second pass of 30 ms. A round of memory comes after it, unless what is left follows.
        assert_eq!((precopy.rounds, hybrid.rounds), (2, 1));
        assert!(about(precopy.copying, files_take(&precopy) + 2.004 + 0.004), "{precopy:?}");
        assert!(about(hybrid.copying, files_take(&hybrid) + 2.004), "{hybrid:?}");
        for forecast in [cold, precopy, postcopy, hybrid] {
            let Forecast { file_bytes, files_left, sent, left, bytes, .. } = forecast;
            assert!(file_bytes > 100_900_000 && file_bytes < 104_000_000, "{forecast:?}");
            assert_eq!(bytes, file_bytes + (sent + left) * 2048, "{forecast:?}");
            assert!(files_left > 0 && files_left < 64 << 10, "{forecast:?}");
        }
        let none = Files::none();
        let without =
            predict(Mode::Precopy, &Cargo { files: &none, ..cargo }, &link(100e6, 0), &steps(), &GOALS);
        assert_eq!(precopy.frozen, without.frozen, "0.3 ms beside 95 ms");
        let left = precopy.files_left as f64 / 100e6;
        assert!(about(precopy.held - without.held, left), "but a limit is held against the sum");
    }

    #[test]
    fn files_that_change_as_fast_as_they_are_sent_are_left_in_each_mode_and_count_for_the_limit() {
        let (writes, files) = (curve(0, 1 << 18), changing(50_000, 0));
        let cargo = cargo(1000, &files, &writes);
        let limited = |mode| {
            let most = Some(Duration::from_millis(500));
            let goals = Goals { max_frozen: most, margin: Duration::from_millis(30), ..goals(mode) };
            predict(mode, &cargo, &link(100e6, 0), &steps(), &goals)
        };
        for mode in [Mode::Cold, Mode::Precopy, Mode::Postcopy, Mode::Hybrid] {
            let forecast = limited(mode);
            let left = forecast.files_left as f64 / 100e6;
            assert!(left > 1.0, "{forecast:?}");
            assert!(forecast.frozen.as_secs_f64() > left, "{forecast:?}");
            let rounds = matches!(mode, Mode::Precopy | Mode::Hybrid);
            let surely = forecast.held + Duration::from_millis(30);
            assert_eq!(forecast.kept, rounds.then_some(surely), "{forecast:?}");
        }
        assert_eq!(limited(Mode::Hybrid).mode, Mode::Hybrid);
    }

    #[test]
    fn what_is_written_while_files_are_sent_crosses_in_a_round_or_follows() {
        // 2 s of memory, and all the time others: 40 MB of pages and 20 MB of files in a second.
        let (writes, files) = (curve(10_000, 1 << 20), changing(5000, 0));
        let cargo = cargo(97_656, &files, &writes);
        let of = |mode| think(mode, &cargo, &link(100e6, 0), &steps(), &goals(mode));
        let (precopy, rounds) = of(Mode::Precopy);
        // A page takes 20.48 us, and a round 4 ms beside. What is found has been written since the round before began or,
        // with a pass between both, since that began.
        let of_round = |pages: u64| pages as f64 * 2048.0 / 100e6 + 0.004;
        let longer = |pair: &[Round]| pair[1].since.as_secs_f64() - of_round(pair[0].found_pages);
        let between: f64 = rounds.all.windows(2).map(longer).sum();
        let files_take = (precopy.file_bytes - precopy.files_left) as f64 / 100e6;
        assert!(between > 0.1 && (between + 1.0 - files_take).abs() < 1e-4, "{between} {precopy:?}");
        assert!(precopy.files_left < 1_000_000 && precopy.filling.is_zero(), "{precopy:?}");
        let (hybrid, rounds) = of(Mode::Hybrid);
        let found = rounds.all.last().unwrap().found_pages;
        assert!(hybrid.left > found, "{found}: {hybrid:?}");
        assert!(hybrid.written > hybrid.left, "{hybrid:?}");
    }

    #[test]
    fn what_takes_long_to_compare_is_compared_once_more_while_it_is_frozen() {
        let writes = curve(0, 1 << 18);
        let of = |comparing| {
            let files = changing(0, comparing);
            predict(Mode::Precopy, &cargo(1000, &files, &writes), &link(100e6, 0), &steps(), &GOALS)
        };
        let half = steps().fixed.whole() / 2;
        assert_eq!(of(50).frozen, of(0).frozen, "beside the dump and the restore");
        assert_eq!(of(450).frozen, of(0).frozen + Duration::from_millis(450) - half);
        assert_eq!(of(450).held, of(0).held + Duration::from_millis(450) - half);
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
            let (writes, files) = (curve(writes, pages), Files::none());
            let cargo = cargo(pages, &files, &writes);
            let of = |link: &Link| think(Mode::Precopy, &cargo, link, &steps(), &GOALS);
            let better = of(&link(bandwidth * factor, round_trip));
            let worse = of(&link(bandwidth, round_trip + longer));
            // When rounds end depends on what they gain, so their number may differ either way.
            for (better, worse) in better.1.all.iter().zip(&worse.1.all) {
                prop_assert!(better.found_pages <= worse.found_pages + 1 && better.since <= worse.since);
            }
        }
    }
}
