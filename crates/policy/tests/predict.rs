//! What holds of each predicted move, whatever is measured.

#![allow(clippy::unwrap_used)]

use std::time::Duration;

use godwit_policy::Mode;
use godwit_policy::converge::Goals;
use godwit_policy::curve::{Curve, Look};
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
        (images, files) in (0_u64..1 << 30, 0_u64..1 << 34),
    ) {
        let writes = curve(0, pages);
        let cargo = Cargo { pages, kept: 0, images, files, writes: &writes };
        let of = |cargo: &Cargo, link: &Link| predict(mode, cargo, link, &steps(), &goals(mode));
        let here = link(bandwidth * factor, round_trip);
        let base = of(&cargo, &here);
        for worse in [
            of(&Cargo { pages: pages + more, ..cargo }, &here),
            of(&cargo, &link(bandwidth, round_trip)),
            of(&cargo, &link(bandwidth * factor, round_trip + longer)),
            of(&Cargo { images: images + more, ..cargo }, &here),
            of(&Cargo { files: files + more, ..cargo }, &here),
        ] {
            prop_assert!(no_longer(&base, &worse), "{base:?} {worse:?}");
        }
    }

    #[test]
    fn nothing_that_is_measured_makes_a_move_endless(
        mode in modes(),
        (pages, kept, images, files) in (any::<u64>(), any::<u64>(), any::<u64>(), any::<u64>()),
        (bandwidth, ratio, seen) in (any::<f64>(), any::<f64>(), any::<u64>()),
        (round_trip, look, fixed) in (any::<u64>(), any::<u64>(), any::<u64>()),
        (throttle, limit) in (any::<bool>(), proptest::option::of(any::<u32>())),
    ) {
        let writes = curve(seen, pages);
        let cargo = Cargo { pages, kept, images, files, writes: &writes };
        let time = Duration::from_nanos;
        let link = Link {
            bandwidth: Bandwidth::clamped(bandwidth),
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
        prop_assert!(slowed <= copying && frozen <= total && forecast.most_frozen(Duration::MAX) >= frozen);
    }
}
