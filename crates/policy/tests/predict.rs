//! What holds of each predicted move, whatever is measured.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use godwit_policy::Mode;
use godwit_policy::converge::Goals;
use godwit_policy::curve::{Curve, Look};
use godwit_policy::files::Files;
use godwit_policy::fixed::Parts;
use godwit_policy::predict::{Cargo, Forecast, Link, Steps, predict};
use godwit_policy::quantity::{Bandwidth, LONGEST, WireRatio};
use proptest::prelude::*;

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

fn modes() -> impl Strategy<Value = Mode> {
    prop::sample::select(vec![Mode::Cold, Mode::Precopy, Mode::Postcopy, Mode::Hybrid])
}

fn no_longer(a: &Forecast, b: &Forecast) -> bool {
    let of = |forecast: &Forecast| {
        let Forecast { frozen, held, total, filling, copying, .. } = *forecast;
        [frozen, held, total, filling, copying]
    };
    // A time is rounded to nanoseconds.
    let little = Duration::from_nanos(100);
    of(a).iter().zip(of(b)).all(|(a, b)| *a <= b + little) && a.bytes <= b.bytes
}

proptest! {
    #[test]
    fn more_pages_less_bandwidth_and_longer_round_trips_never_make_an_idle_service_move_faster(
        mode in modes(),
        (pages, more) in (0_u64..1 << 22, 0_u64..1 << 22),
        (bandwidth, factor) in (1.0_f64..1e10, 1.0_f64..100.0),
        (round_trip, longer) in (0_u64..1000, 0_u64..1000),
        (images, layers, bytes) in (0_u64..1 << 30, 0_u64..1 << 34, 0_u64..1 << 34),
    ) {
        let writes = curve(0, pages);
        let [files, more_files] = [0, more].map(|more| Files { bytes: bytes + more, ..Files::none() });
        let long = Files { comparing: Duration::from_millis(longer), ..files.clone() };
        let cargo = Cargo { pages, kept: 0, images, layers, files: &files, writes: &writes };
        let of = |cargo: &Cargo, link: &Link| predict(mode, cargo, link, &steps(), &goals(mode));
        let here = link(bandwidth * factor, round_trip);
        let base = of(&cargo, &here);
        for worse in [
            of(&Cargo { pages: pages + more, ..cargo }, &here),
            of(&cargo, &link(bandwidth, round_trip)),
            of(&cargo, &link(bandwidth * factor, round_trip + longer)),
            of(&Cargo { images: images + more, ..cargo }, &here),
            of(&Cargo { layers: layers + more, ..cargo }, &here),
            of(&Cargo { files: &more_files, ..cargo }, &here),
            of(&Cargo { files: &long, ..cargo }, &here),
        ] {
            prop_assert!(no_longer(&base, &worse), "{base:?} {worse:?}");
        }
    }

    #[test]
    fn the_more_its_files_change_the_longer_an_idle_service_is_frozen(
        mode in modes(),
        (pages, bytes) in (0_u64..1 << 22, 0_u64..1 << 34),
        (bandwidth, round_trip) in (1e4_f64..1e10, 0_u64..1000),
        (changed, fewer, factor) in (0_u64..1 << 14, 0_u32..14, 1_u64..32),
        (again, comparing) in (1_u64..=4, 0_u64..1000),
    ) {
        let writes = curve(0, pages);
        let of = |changed| {
            // The same of them again and again, or others all the time.
            let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
            let looks = [look(changed * again, 250), look(changed * 4, 1000)];
            let comparing = Duration::from_millis(comparing);
            let files = Files { bytes, writes: Curve::fit(&looks, 1 << 22), comparing };
            let cargo = Cargo { pages, kept: 0, images: 1 << 20, layers: 0, files: &files, writes: &writes };
            predict(mode, &cargo, &link(bandwidth, round_trip), &steps(), &goals(mode))
        };
        let [none, some, more] = [0, changed >> fewer, (changed >> fewer) * factor].map(of);
        prop_assert!(none.frozen <= more.frozen && none.held <= more.held, "{none:?} {more:?}");
        // More of them may make a pass pay that does not pay for fewer. It leaves less by so much at most:
        let little = (some.files_left as f64 * 0.2).max(65_536.0) / bandwidth;
        let no_longer = |some: Duration, more: Duration| some.as_secs_f64() <= more.as_secs_f64() + little + 1e-6;
        prop_assert!(no_longer(some.frozen, more.frozen), "{some:?} {more:?}");
        prop_assert!(no_longer(some.held, more.held), "{some:?} {more:?}");
    }

    #[test]
    fn nothing_that_is_measured_makes_a_move_endless(
        mode in modes(),
        (pages, kept, images, layers) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
        (bytes, changed, most, comparing) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
        (bandwidth, ratio, seen) in (any::<f64>(), any::<f64>(), any::<u64>()),
        (round_trip, look, fixed) in (any::<u64>(), any::<u64>(), any::<u64>()),
        (throttle, limit) in (any::<bool>(), proptest::option::of(any::<u32>())),
    ) {
        let writes = curve(seen, pages);
        let time = Duration::from_nanos;
        let comparing = time(comparing).saturating_mul(u32::MAX);
        let files = Files { bytes, writes: curve(changed, most), comparing };
        let cargo = Cargo { pages, kept, images, layers, files: &files, writes: &writes };
        let link = Link {
            bandwidth: Bandwidth::clamped(bandwidth),
            of_pages: Bandwidth::clamped(bandwidth),
            ratio: WireRatio::clamped(ratio),
            round_trip: time(round_trip).saturating_mul(u32::MAX),
        };
        let fixed = Parts::of(images, 7).corrected(time(fixed).saturating_mul(1000));
        let steps = Steps { reserve: Duration::MAX, look: time(look), fixed };
        let max_frozen = limit.map(|ms| Duration::from_millis(ms.into()));
        let forecast = predict(mode, &cargo, &link, &steps, &Goals { throttle, max_frozen, ..goals(mode) });
        let Forecast { copying, slowed, frozen, held, filling, total, .. } = forecast;
        for time in [copying, slowed, frozen, held, filling, total] {
            prop_assert!(time <= LONGEST, "{forecast:?}");
        }
        prop_assert!(forecast.files_left <= forecast.file_bytes && forecast.file_bytes <= forecast.bytes);
        prop_assert!(slowed <= copying && frozen <= total && forecast.most_frozen(Duration::MAX) >= frozen);
    }
}
