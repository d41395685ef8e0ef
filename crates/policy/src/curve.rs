//! How many pages a service writes in a time, each counted once: the dirty-page curve.
//!
//! A service writes some pages again and again, and others once in a while. So the curve is a sum of sets of pages, each of
//! which is written as a whole within about a time of its own:
//!
//! ```text
//!  U(t) = min(M, Σ aⱼ · (1 − e^(−t/τⱼ)))     τⱼ = 10 ms · 4ʲ, j = 0 … 8;  aⱼ ≥ 0;  M: the pages of the service
//! ```
//! It grows, and ever more slowly. The sets are those that fit what looks at the service have found: non-negative least squares
//! of the relative errors. Beyond the longest time that was looked at the curve goes on as steeply as it was there. That is no
//! less than the sum says, which knows nothing of sets that are written more rarely.

use std::time::Duration;

use crate::PAGE;

/// Sets of pages.
const SETS: usize = 9;

/// The time of the first set, seconds, and how much longer that of each next one is.
const FIRST: f64 = 0.01;
const LONGER: f64 = 4.0;

/// How much a large set counts as an error: of sets that fit alike well smaller ones are taken.
const RIDGE: f64 = 1e-6;

/// Most steps of the fit. It ends when a step changes nothing to speak of.
const STEPS: usize = 4000;
const SETTLED: f64 = 1e-9;

/// What a look at a service has found: pages that were written since the look before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Look {
    /// How many.
    pub pages: u64,
    /// In what time.
    pub time: Duration,
}

/// The curve of a service.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// Pages of each set.
    sets: [f64; SETS],
    /// Pages that the service has.
    most: f64,
    /// The longest time that was looked at, seconds.
    longest: f64,
}

/// Of a set, which part is written in this many seconds.
fn part(set: usize, seconds: f64) -> f64 {
    -(-seconds / time_of(set)).exp_m1()
}

/// The time of a set, seconds.
fn time_of(set: usize) -> f64 {
    FIRST * LONGER.powi(i32::try_from(set).unwrap_or(i32::MAX))
}

impl Curve {
    /// The curve that fits these looks at a service with so many pages. A look that took no time says nothing, and one that
    /// found less than others have in a shorter time, or than its part of what they have in a longer one, has met a pause.
    #[must_use]
    pub fn fit(looks: &[Look], most: u64) -> Self {
        let most = most as f64;
        let told = looks.iter().filter(|look| !look.time.is_zero());
        let found: Vec<_> =
            told.map(|look| (look.time.as_secs_f64(), (look.pages as f64).min(most))).collect();
        let points: Vec<_> = found
            .iter()
            .map(|(time, _)| {
                let by_then = found.iter().map(|(other, pages)| pages * (time / other).min(1.0));
                (*time, by_then.fold(0.0, f64::max))
            })
            .collect();
        let longest = points.iter().map(|(time, _)| *time).fold(0.0, f64::max);
        Self { sets: fitted(&points), most, longest }
    }

    /// How many pages are written in this time.
    #[must_use]
    pub fn within(&self, time: Duration) -> f64 {
        let time = time.as_secs_f64();
        let seen = time.min(self.longest);
        let sum = |of: &dyn Fn(usize) -> f64| -> f64 {
            self.sets.iter().enumerate().map(|(set, pages)| pages * of(set)).sum()
        };
        let steepness = sum(&|set| (-self.longest / time_of(set)).exp() / time_of(set));
        (sum(&|set| part(set, seen)) + steepness * (time - seen)).min(self.most)
    }

    /// Bytes of pages that are written in a second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.within(Duration::from_secs(1)) * PAGE
    }
}

/// The sets that fit the points best, by descent along one set after the other.
fn fitted(points: &[(f64, f64)]) -> [f64; SETS] {
    let largest = points.iter().map(|(_, pages)| *pages).fold(0.0, f64::max);
    let mut fitted = [0.0; SETS];
    if largest == 0.0 {
        return fitted;
    }
    // In units of the largest number of pages, so that the ridge and the end mean the same for each service.
    let rows: Vec<_> = points
        .iter()
        .map(|(time, pages)| {
            let weight = largest / pages.max(1.0);
            (std::array::from_fn::<f64, SETS, _>(|set| part(set, *time) * weight), pages / largest * weight)
        })
        .collect();
    let mut left: Vec<_> = rows.iter().map(|(_, wanted)| *wanted).collect();
    for _ in 0..STEPS {
        let mut moved = 0.0_f64;
        for (set, pages) in fitted.iter_mut().enumerate() {
            let (mut along, mut length) = (-RIDGE * *pages, RIDGE);
            for ((row, _), left) in rows.iter().zip(&left) {
                along += row[set] * left;
                length += row[set] * row[set];
            }
            let step = (*pages + along / length).max(0.0) - *pages;
            if step != 0.0 {
                *pages += step;
                for ((row, _), left) in rows.iter().zip(&mut left) {
                    *left -= row[set] * step;
                }
                moved = moved.max(step.abs());
            }
        }
        if moved < SETTLED {
            break;
        }
    }
    fitted.map(|pages| pages * largest)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const PAGES: u64 = 1 << 18;

    fn look(pages: u64, ms: u64) -> Look {
        Look { pages, time: Duration::from_millis(ms) }
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn is_about(found: f64, wanted: f64) -> bool {
        (found - wanted).abs() <= wanted * 0.02 + 0.5
    }

    #[test]
    fn pages_that_are_written_again_and_again_are_counted_once() {
        let same = Curve::fit(&[look(500, 250), look(500, 1000)], PAGES);
        for time in [0.25, 1.0, 10.0, 1000.0] {
            assert!(is_about(same.within(seconds(time)), 500.0), "{time} s: {}", same.within(seconds(time)));
        }
    }

    #[test]
    fn others_all_the_time_are_as_many_more_as_the_time_is_longer() {
        let others = Curve::fit(&[look(250, 250), look(1000, 1000)], PAGES);
        for time in [0.1, 0.25, 1.0, 10.0, 100.0] {
            let found = others.within(seconds(time));
            assert!((found - 1000.0 * time).abs() < 1000.0 * time * 0.1, "{time} s: {found}");
        }
        assert!((others.bytes_per_second() / 4_096_000.0 - 1.0).abs() < 0.02);
        // No more than there are.
        assert!(is_about(others.within(seconds(1e6)), PAGES as f64));
    }

    #[test]
    fn a_service_that_is_not_seen_to_write_writes_nothing() {
        for looks in [&[][..], &[look(0, 250), look(0, 1000)], &[look(7, 0)]] {
            assert_eq!(
                Curve::fit(looks, PAGES).within(seconds(1e9)).to_bits(),
                0.0_f64.to_bits(),
                "{looks:?}"
            );
        }
    }

    #[test]
    fn a_look_that_met_a_pause_makes_nobody_hope() {
        let burst = Curve::fit(&[look(0, 250), look(1000, 1000)], PAGES);
        assert!(is_about(burst.within(seconds(1.0)), 1000.0), "{}", burst.within(seconds(1.0)));
        let fewer = Curve::fit(&[look(900, 250), look(700, 1000)], PAGES);
        assert!(is_about(fewer.within(seconds(10.0)), 900.0), "{}", fewer.within(seconds(10.0)));
    }

    #[test]
    fn what_a_service_writes_of_all_of_its_pages_is_fitted_too() {
        for part in [2, 4] {
            let all = Curve::fit(&[look(PAGES / part, 250), look(PAGES, 1000)], PAGES);
            let (short, long) = (all.within(seconds(0.25)), all.within(seconds(1.0)));
            assert!(is_about(short, (PAGES / part) as f64) && is_about(long, PAGES as f64), "{short} {long}");
        }
    }

    #[test]
    fn a_small_set_and_a_steady_writer_are_told_apart() {
        // 2,000 pages again and again, and 100 others each second.
        let looks = [look(2025, 250), look(2100, 1000), look(2400, 4000)];
        let curve = Curve::fit(&looks, PAGES);
        for Look { pages, time } in looks {
            assert!(is_about(curve.within(time), pages as f64), "{time:?}: {}", curve.within(time));
        }
        let later = curve.within(seconds(20.0));
        assert!((3500.0..4500.0).contains(&later), "{later}");
    }

    proptest! {
        #[test]
        fn a_curve_grows_ever_more_slowly_and_never_beyond_its_service(
            looks in vec((any::<u64>(), 0_u64..1_000_000), 0..12),
            most in any::<u64>(),
            times in vec(0.0_f64..1e6, 3),
        ) {
            let looks: Vec<_> = looks.iter().map(|(pages, ms)| look(*pages, *ms)).collect();
            let curve = Curve::fit(&looks, most);
            let mut times = times;
            times.sort_by(f64::total_cmp);
            let at: Vec<_> = times.iter().map(|time| curve.within(seconds(*time))).collect();
            prop_assert!(at.iter().all(|pages| (0.0..=most as f64).contains(pages)), "{at:?}");
            let little = most as f64 * 1e-9 + 1e-6;
            prop_assert!(at.windows(2).all(|pair| pair[0] <= pair[1] + little), "{at:?}");
            let slope = |from: usize| (at[from + 1] - at[from]) / (times[from + 1] - times[from]).max(1e-9);
            prop_assert!(slope(1) <= slope(0) * (1.0 + 1e-6) + little * 1e3, "{times:?}: {at:?}");
        }

        #[test]
        fn what_such_sets_have_written_is_fitted(sets in vec(0_u32..100_000, SETS)) {
            let most: u64 = sets.iter().map(|pages| u64::from(*pages)).sum();
            let written = |time: f64| -> f64 {
                sets.iter().enumerate().map(|(set, pages)| f64::from(*pages) * part(set, time)).sum()
            };
            let times: Vec<f64> = (0..8).map(|n| 0.05 * 2.5_f64.powi(n)).collect();
            let looks: Vec<_> = times.iter().map(|time| Look { pages: whole(written(*time)), time: seconds(*time) }).collect();
            let curve = Curve::fit(&looks, most);
            for time in times {
                let (found, wanted) = (curve.within(seconds(time)), written(time));
                prop_assert!((found - wanted).abs() <= wanted * 0.03 + 2.0, "{time} s: {found} of {wanted}");
            }
        }
    }

    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a test's own numbers
    fn whole(pages: f64) -> u64 {
        pages as u64
    }
}
