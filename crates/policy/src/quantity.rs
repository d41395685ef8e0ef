//! Measured numbers that are known to be sane.
//!
//! A measurement can be NaN, negative, infinite or absurdly large. Each type here refuses such a number when it is
//! made. All bounds are so small that no sum or product of them in this crate overflows an `f64`.

use std::time::Duration;

/// Times are clipped to this, about 30 years, so that sums of them do not overflow.
pub const LONGEST: Duration = Duration::from_secs(1_000_000_000);

/// A number of this many seconds, at least 0 and at most [`LONGEST`]; NaN counts as the longest.
pub(crate) fn seconds(seconds: f64) -> Duration {
    match seconds <= LONGEST.as_secs_f64() {
        true => Duration::from_secs_f64(seconds.max(0.0)),
        false => LONGEST,
    }
}

/// This time, at most [`LONGEST`].
pub(crate) fn bounded(time: Duration) -> Duration {
    time.min(LONGEST)
}

/// As many whole things, at least 0.
#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as many as there can be, at most
pub(crate) fn whole(number: f64) -> u64 {
    number as u64
}

macro_rules! quantities {
    ($($(#[$doc:meta])* $name:ident: $least:expr, $most:expr;)*) => {$(
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
        pub struct $name(f64);

        impl $name {
            /// The least there is.
            pub const LEAST: Self = Self($least);

            /// The most there is.
            pub const MOST: Self = Self($most);

            /// This number, unless it is outside the bounds or is no number.
            #[must_use]
            pub fn new(number: f64) -> Option<Self> {
                (Self::LEAST.0..=Self::MOST.0).contains(&number).then_some(Self(number))
            }

            /// The number, or the bound that it is beyond. For what is no number, the least.
            #[must_use]
            pub fn clamped(number: f64) -> Self {
                Self(number.max(Self::LEAST.0).min(Self::MOST.0))
            }

            /// The number.
            #[must_use]
            pub fn get(self) -> f64 {
                self.0
            }
        }
    )*};
}

quantities! {
    /// Bytes per second that the link carries for a move.
    Bandwidth: 1.0, 1e15;
    /// Bytes sent for each byte of pages. It is above 1 where pages do not compress, because frames have headers.
    WireRatio: 1e-4, 4.0;
    /// A part of a whole.
    Share: 0.0, 1.0;
    /// Requests per second.
    RequestRate: 0.0, 1e9;
    /// Missing pages that a request meets.
    PagesMet: 0.0, 1e6;
    /// What clients count for. One client that is active counts 1.
    Weight: 0.0, 1e9;
    /// How fast a core is; 1 is the speed of a core of the reference machine.
    Speed: 1e-3, 1e3;
    /// CPU, in cores.
    Cores: 0.0, 1e6;
    /// Lost client-seconds for one unit of a resource.
    Price: 0.0, 1e6;
}

impl Share {
    /// What is left of the whole.
    #[must_use]
    pub fn rest(self) -> Self {
        Self(1.0 - self.0)
    }
}

impl Speed {
    /// The speed of a core of the reference machine.
    pub const REFERENCE: Self = Self(1.0);
}

/// A point in time: how long ago the caller's epoch is. No clock is read here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Moment(pub Duration);

impl Moment {
    /// The time from an earlier moment to this one; nothing if that one is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// The middle one, of two the longer.
pub(crate) fn median(mut times: Vec<Duration>) -> Option<Duration> {
    times.sort_unstable();
    times.get(times.len() / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_that_cannot_be_measured_is_refused() {
        for absurd in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e300] {
            assert_eq!(Bandwidth::new(absurd), None, "{absurd}");
            assert_eq!(Share::new(absurd), None, "{absurd}");
            assert_eq!(Weight::new(absurd), None, "{absurd}");
            assert!(Bandwidth::clamped(absurd).get() >= 1.0, "{absurd}");
            assert!((0.0..=1.0).contains(&Share::clamped(absurd).get()), "{absurd}");
        }
        assert_eq!(Share::new(0.25).map(Share::get), Some(0.25));
        assert_eq!(Share::new(0.25).map(|share| share.rest().get()), Some(0.75));
    }

    #[test]
    fn a_time_that_cannot_be_is_bounded() {
        assert_eq!(seconds(f64::NAN), LONGEST);
        assert_eq!(seconds(f64::INFINITY), LONGEST);
        assert_eq!(seconds(-3.0), Duration::ZERO);
        assert_eq!(seconds(1.5), Duration::from_millis(1500));
        assert_eq!(bounded(Duration::MAX), LONGEST);
        let moment = |seconds| Moment(Duration::from_secs(seconds));
        assert_eq!(moment(5).since(moment(3)), Duration::from_secs(2));
        assert_eq!(moment(3).since(moment(5)), Duration::ZERO, "a moment of tomorrow");
    }
}
