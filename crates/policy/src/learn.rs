//! How far predicted times were from those that were measured, and what that says of the next one.
//!
//! An error is the logarithm of measured by predicted time, so that twice as long and half as long are equally wrong. What is
//! believed of it has levels, from what holds for all moves to what holds for one service on one way: each begins with what the
//! level above believes, as if that were three moves, and learns from its own past. A move counts half as much a day later.
//!
//! ```text
//!  m = (3·m_above + Σ w·y) / (3 + Σ w)        s² = (3·s²_above + Σ w·(y − m)²) / (3 + Σ w)
//!  expected = predicted · e^(m + s²/2)        upper = predicted · e^(m + 1.28·s·√(1 + 1/(3 + Σ w)))
//! ```
//! Nine of ten measured times are to be below the upper one.

use std::time::Duration;

/// No error counts for more than this: a machine that stood still tells nothing of the next move.
const LARGEST: f64 = 4.0;

/// For how many moves the belief of the level above counts.
const ABOVE: f64 = 3.0;

/// After this time a move counts half.
const HALF: Duration = Duration::from_secs(24 * 3600);

/// What is believed before any move: as predicted, give or take a half.
const DEVIATION: f64 = 0.5;

/// Of a normal distribution nine tenths are below so many deviations.
const NINE_TENTHS: f64 = 1.28;

/// The errors of past moves.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Past {
    /// For how many moves they count.
    pub weight: f64,
    /// Their sum.
    pub sum: f64,
    /// The sum of their squares.
    pub squares: f64,
}

impl Past {
    /// What is left of them after this time.
    #[must_use]
    pub fn faded(self, since: Duration) -> Self {
        let left = (-since.as_secs_f64() / HALF.as_secs_f64()).exp2();
        Self { weight: self.weight * left, sum: self.sum * left, squares: self.squares * left }
    }

    /// With one more move.
    #[must_use]
    pub fn with(self, predicted: Duration, measured: Duration) -> Self {
        // A time that no clock has shown is as good as the shortest that one shows.
        let of = |time: Duration| time.as_secs_f64().max(1e-6);
        let error = (of(measured) / of(predicted)).ln().clamp(-LARGEST.ln(), LARGEST.ln());
        Self { weight: self.weight + 1.0, sum: self.sum + error, squares: self.squares + error * error }
    }

    /// Whether it is the past of moves, and not what a damaged file has in its place.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let most = LARGEST.ln() * (1.0 + 1e-9);
        let all = [self.weight, self.sum, self.squares];
        all.iter().all(|number| number.is_finite())
            && self.weight >= 0.0
            && self.sum.abs() <= self.weight * most
            && (0.0..=self.weight * most * most).contains(&self.squares)
    }
}

/// What is believed of the next error.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Belief {
    mean: f64,
    variance: f64,
    /// For how many moves it counts.
    weight: f64,
}

impl Default for Belief {
    fn default() -> Self {
        Self { mean: 0.0, variance: DEVIATION * DEVIATION, weight: 0.0 }
    }
}

impl Belief {
    /// What is believed on the level below, which has this past.
    #[must_use]
    pub fn given(self, past: Past) -> Self {
        let Past { weight, sum, squares } = past;
        let all = ABOVE + weight;
        let mean = (ABOVE * self.mean + sum) / all;
        let spread = (squares - 2.0 * mean * sum + mean * mean * weight).max(0.0);
        Self { mean, variance: (ABOVE * self.variance + spread) / all, weight }
    }

    /// What a time is expected to be that was predicted so.
    #[must_use]
    pub fn expected(&self, predicted: Duration) -> Duration {
        predicted.mul_f64((self.mean + self.variance / 2.0).exp())
    }

    /// Below which it is in nine of ten moves.
    #[must_use]
    pub fn upper(&self, predicted: Duration) -> Duration {
        let unsure = (1.0 + 1.0 / (ABOVE + self.weight)).sqrt();
        predicted.mul_f64((self.mean + NINE_TENTHS * self.variance.sqrt() * unsure).exp())
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const PREDICTED: Duration = Duration::from_millis(100);

    fn after(measured: &[u64]) -> Belief {
        let with = |past: Past, ms: &u64| past.with(PREDICTED, Duration::from_millis(*ms));
        Belief::default().given(measured.iter().fold(Past::default(), with))
    }

    fn ms(time: Duration) -> f64 {
        time.as_secs_f64() * 1e3
    }

    #[test]
    fn before_any_move_a_time_may_be_twice_as_long() {
        let none = Belief::default();
        assert!((110.0..120.0).contains(&ms(none.expected(PREDICTED))));
        assert!((200.0..220.0).contains(&ms(none.upper(PREDICTED))));
    }

    #[test]
    fn moves_that_take_half_as_long_are_believed_soon_and_single_ones_are_not() {
        let (one, many) = (after(&[50]), after(&[50; 20]));
        assert!(ms(one.expected(PREDICTED)) > 80.0);
        assert!((50.0..60.0).contains(&ms(many.expected(PREDICTED))), "{many:?}");
        assert!((55.0..85.0).contains(&ms(many.upper(PREDICTED))), "{many:?}");
    }

    #[test]
    fn what_holds_for_all_holds_for_a_service_of_which_nothing_is_known() {
        let of_all = after(&[300; 30]);
        let of_one = of_all.given(Past::default());
        assert!(
            (of_one.expected(PREDICTED).as_secs_f64() / of_all.expected(PREDICTED).as_secs_f64() - 1.0).abs()
                < 1e-9
        );
        // It is less sure of its own.
        assert!(of_one.upper(PREDICTED) > of_all.upper(PREDICTED));
    }

    #[test]
    fn a_day_later_a_move_counts_half_and_one_that_stood_still_for_four() {
        let past = Past::default().with(PREDICTED, Duration::from_secs(1000));
        assert!((past.sum - LARGEST.ln()).abs() < 1e-9);
        let faded = past.faded(HALF);
        assert!((faded.weight - 0.5).abs() < 1e-9 && (faded.sum - past.sum / 2.0).abs() < 1e-9);
        assert!(Past::default().with(PREDICTED, Duration::ZERO).sum.is_finite());
        assert!(Past::default().with(Duration::ZERO, PREDICTED).sum.is_finite());
    }

    #[test]
    fn what_a_damaged_file_has_is_told_from_a_past() {
        let sound = Past::default().with(PREDICTED, PREDICTED * 2);
        assert!(sound.is_sound() && sound.faded(HALF * 100).is_sound() && Past::default().is_sound());
        for unsound in [
            Past { weight: f64::NAN, ..sound },
            Past { weight: -1.0, ..sound },
            Past { sum: 9.0, ..sound },
            Past { squares: f64::INFINITY, ..sound },
            Past { squares: -1.0, ..sound },
        ] {
            assert!(!unsound.is_sound(), "{unsound:?}");
        }
    }

    proptest! {
        #[test]
        fn nine_of_ten_are_below_the_upper_once_there_were_some(seed in any::<u64>(), mean in -1.0_f64..1.0) {
            // Errors around another mean, by a sum of uniform numbers.
            let mut state = seed | 1;
            let mut uniform = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f64 / (1_u64 << 24) as f64
            };
            let mut error = || mean + 0.2 * ((0..12).map(|_| uniform()).sum::<f64>() - 6.0);
            let (mut past, mut below) = (Past::default(), 0);
            for n in 0..400 {
                let measured = PREDICTED.mul_f64(error().exp());
                if n >= 100 && measured <= Belief::default().given(past).upper(PREDICTED) {
                    below += 1;
                }
                past = past.with(PREDICTED, measured);
            }
            prop_assert!((230..=299).contains(&below), "{below} of 300");
        }

        #[test]
        fn nothing_that_is_measured_makes_it_endless_or_less_than_nothing(
            measured in vec((any::<u32>(), any::<u32>()), 0..30),
            predicted in 0_u64..10_000_000,
        ) {
            let with = |past: Past, (predicted, measured): &(u32, u32)| {
                past.with(Duration::from_micros((*predicted).into()), Duration::from_micros((*measured).into()))
            };
            let past = measured.iter().fold(Past::default(), with);
            prop_assert!(past.is_sound());
            let (belief, predicted) = (Belief::default().given(past), Duration::from_millis(predicted));
            let (expected, upper) = (belief.expected(predicted), belief.upper(predicted));
            prop_assert!(expected <= predicted * 10 && upper <= predicted * 20, "{expected:?} {upper:?}");
            prop_assert!(expected * 10 >= predicted && upper * 10 >= predicted, "{expected:?} {upper:?}");
        }
    }
}
