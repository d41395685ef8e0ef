//! How far predicted times were from those that were measured, and what that says of the next one.
//!
//! An error is the logarithm of measured by predicted time, so that twice as long and half as long are equally wrong. What is
//! believed of it has levels, from what holds for all moves to what holds for one service on one way: each begins with what the
//! level above believes, as if that were three moves, and learns from its own past. The level above has that of others only, so
//! that no move counts twice. A move counts half as much a week later.
//!
//! ```text
//!  m = (3·m_above + Σ w·y) / (3 + Σ w)        s² = (3·s²_above + Σ w·(y − m)²) / (3 + Σ w)
//!  expected = predicted · e^(m + s²/2)        upper = predicted · e^(m + 1.28·s·√(1 + 1/(3 + Σ w)))
//! ```
//! Nine of ten measured times are to be below the upper one.

use std::time::Duration;

/// No error is taken to be further than this from what was believed: one move in which a machine stood still must not decide of
/// the next ones. One that is always so slow is believed after some.
const FURTHEST: f64 = 4.0;

/// Nor is any time so many times what was predicted.
const LARGEST: f64 = 1e4;

/// For how many moves the belief of the level above counts.
const ABOVE: f64 = 3.0;

/// After this time a move counts half.
const HALF: Duration = Duration::from_secs(7 * 24 * 3600);

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

    /// With one more, as [`Belief::error`] tells it.
    #[must_use]
    pub fn with(self, error: f64) -> Self {
        Self { weight: self.weight + 1.0, sum: self.sum + error, squares: self.squares + error * error }
    }

    /// Those that are not among others.
    #[must_use]
    pub fn without(self, others: Self) -> Self {
        let weight = self.weight - others.weight;
        // What is left of a subtraction is no move.
        if weight < 1e-6 {
            return Self::default();
        }
        let squares = (self.squares - others.squares).max(0.0);
        Self { weight, sum: self.sum - others.sum, squares }
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
    /// For how many moves its own level counts.
    weight: f64,
    /// And all levels.
    moves: f64,
}

impl Default for Belief {
    fn default() -> Self {
        Self { mean: 0.0, variance: DEVIATION * DEVIATION, weight: 0.0, moves: 0.0 }
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
        Self { mean, variance: (ABOVE * self.variance + spread) / all, weight, moves: self.moves + weight }
    }

    /// The error of a move, as far as it is taken for one.
    #[must_use]
    pub fn error(&self, predicted: Duration, measured: Duration) -> f64 {
        // A time that no clock has shown is as good as the shortest that one shows.
        let of = |time: Duration| time.as_secs_f64().max(1e-6);
        let (furthest, largest) = (FURTHEST.ln(), LARGEST.ln());
        let error = (of(measured) / of(predicted)).ln();
        error.clamp(self.mean - furthest, self.mean + furthest).clamp(-largest, largest)
    }

    /// What a time is expected to be that was predicted so.
    #[must_use]
    pub fn expected(&self, predicted: Duration) -> Duration {
        predicted.mul_f64((self.mean + (self.variance / 2.0).min(FURTHEST.ln())).exp())
    }

    /// How much longer than expected it may be: in nine of ten moves it is not. Nothing as long as too few moves are known to
    /// tell.
    #[must_use]
    pub fn margin(&self, predicted: Duration) -> Duration {
        if self.moves < ABOVE {
            return Duration::ZERO;
        }
        self.upper(predicted).saturating_sub(self.expected(predicted))
    }

    fn upper(&self, predicted: Duration) -> Duration {
        let unsure = (1.0 + 1.0 / (ABOVE + self.weight)).sqrt();
        let above = (NINE_TENTHS * self.variance.sqrt() * unsure).min(2.0 * FURTHEST.ln());
        predicted.mul_f64((self.mean + above).exp())
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const PREDICTED: Duration = Duration::from_millis(100);

    fn past(measured: &[u64]) -> Past {
        measured.iter().fold(Past::default(), |past, ms| {
            past.with(Belief::default().given(past).error(PREDICTED, Duration::from_millis(*ms)))
        })
    }

    fn after(measured: &[u64]) -> Belief {
        Belief::default().given(past(measured))
    }

    fn ms(time: Duration) -> f64 {
        time.as_secs_f64() * 1e3
    }

    #[test]
    fn before_some_moves_nothing_is_added() {
        let none = Belief::default();
        assert!((110.0..120.0).contains(&ms(none.expected(PREDICTED))));
        assert_eq!(none.margin(PREDICTED), Duration::ZERO);
        assert_eq!(after(&[100; 2]).margin(PREDICTED), Duration::ZERO);
        assert!((20.0..60.0).contains(&ms(after(&[100; 3]).margin(PREDICTED))));
    }

    #[test]
    fn moves_that_take_half_as_long_are_believed_soon_and_single_ones_are_not() {
        let (one, many) = (after(&[50]), after(&[50; 20]));
        assert!(ms(one.expected(PREDICTED)) > 80.0);
        assert!((50.0..60.0).contains(&ms(many.expected(PREDICTED))), "{many:?}");
        assert!((5.0..30.0).contains(&ms(many.margin(PREDICTED))), "{many:?}");
    }

    #[test]
    fn a_machine_that_is_always_slow_is_believed_and_one_that_stood_still_once_is_not() {
        let slow = after(&[2000; 20]);
        assert!((1000.0..2600.0).contains(&ms(slow.expected(PREDICTED))), "{slow:?}");
        assert!(ms(slow.expected(PREDICTED) + slow.margin(PREDICTED)) > 2000.0, "{slow:?}");
        let mut moves = [100; 20];
        moves[10] = 1_000_000;
        assert!(ms(after(&moves).expected(PREDICTED)) < 150.0);
    }

    #[test]
    fn what_holds_for_all_holds_for_a_service_of_which_nothing_is_known() {
        let of_all = after(&[300; 30]);
        let of_one = of_all.given(Past::default());
        let ratio = ms(of_one.expected(PREDICTED)) / ms(of_all.expected(PREDICTED));
        assert!((ratio - 1.0).abs() < 1e-9, "{ratio}");
        // It is less sure of its own.
        assert!(of_one.margin(PREDICTED) > of_all.margin(PREDICTED));
    }

    #[test]
    fn a_week_later_a_move_counts_half_and_what_is_taken_off_is_gone() {
        let past = past(&[1_000_000, 50]);
        let faded = past.faded(HALF);
        assert!((faded.weight - 1.0).abs() < 1e-9 && (faded.sum - past.sum / 2.0).abs() < 1e-9);
        assert_eq!(past.without(past), Past::default());
        assert_eq!(past.without(Past::default()), past);
        for [predicted, measured] in [[PREDICTED, Duration::ZERO], [Duration::ZERO, PREDICTED]] {
            assert!(Belief::default().error(predicted, measured).is_finite());
        }
    }

    #[test]
    fn what_a_damaged_file_has_is_told_from_a_past() {
        let sound = past(&[200]);
        assert!(sound.is_sound() && sound.faded(HALF * 100).is_sound() && Past::default().is_sound());
        for unsound in [
            Past { weight: f64::NAN, ..sound },
            Past { weight: -1.0, ..sound },
            Past { sum: 99.0, ..sound },
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
                let belief = Belief::default().given(past);
                if n >= 100 && measured <= belief.expected(PREDICTED) + belief.margin(PREDICTED) {
                    below += 1;
                }
                past = past.with(belief.error(PREDICTED, measured));
            }
            prop_assert!((230..=299).contains(&below), "{below} of 300");
        }

        #[test]
        fn nothing_that_is_measured_makes_it_endless_or_less_than_nothing(
            measured in vec((any::<u32>(), any::<u32>()), 0..30),
            predicted in 0_u64..10_000_000,
        ) {
            let with = |past: Past, (predicted, measured): &(u32, u32)| {
                let [predicted, measured] = [predicted, measured].map(|us| Duration::from_micros((*us).into()));
                past.with(Belief::default().given(past).error(predicted, measured))
            };
            let past = measured.iter().fold(Past::default(), with);
            prop_assert!(past.is_sound());
            let (belief, predicted) = (Belief::default().given(past), Duration::from_millis(predicted));
            let most = belief.expected(predicted) + belief.margin(predicted);
            prop_assert!(most <= predicted * 1_000_000 && most * 1_000_000 >= predicted, "{most:?}");
        }
    }
}
