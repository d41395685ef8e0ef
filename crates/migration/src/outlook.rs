//! What a move would be like: a pure function of a sample of what the service writes, and of the link.
//!
//! The rounds are those that [`decide`] would make. How many pages the service writes in the time of a
//! round is told by two samples of different length: where the longer one found hardly more, it writes the same pages
//! again and again; where it found as many more as it is longer, it writes others all the time.

use std::time::Duration;

use crate::converge::{Goals, Next, Round, SLOWEST, advice, decide};
use crate::options::Mode;

/// A page's bytes.
const PAGE: f64 = 4096.0;

/// Most rounds that are thought through.
const MOST_ROUNDS: u32 = 1000;

/// Pages that were found written, and in what time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// How many.
    pub pages: u64,
    /// In what time.
    pub time: Duration,
}

/// Two samples, the second of which took longer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Writes {
    /// The first.
    pub short: Sample,
    /// The second.
    pub long: Sample,
}

impl Writes {
    /// How many pages are written in this time, each counted once: a power of it that fits both samples.
    #[must_use]
    pub fn within(&self, time: Duration) -> f64 {
        let Self { short, long } = self;
        if long.pages == 0 {
            return 0.0;
        }
        let longer = long.time.as_secs_f64().max(1e-3) / short.time.as_secs_f64().max(1e-3);
        let power = match short.pages {
            0 => 1.0,
            few => ((long.pages as f64 / few as f64).ln() / longer.max(1.001).ln()).clamp(0.0, 1.0),
        };
        long.pages as f64 * (time.as_secs_f64() / long.time.as_secs_f64().max(1e-3)).powf(power)
    }

    /// Bytes of pages that are written in a second.
    #[must_use]
    pub fn bytes_per_second(&self) -> f64 {
        self.within(Duration::from_secs(1)) * PAGE
    }
}

/// What is known of a service and of its way.
#[derive(Debug, Clone, Copy)]
pub struct Known {
    /// How the memory moves.
    pub mode: Mode,
    /// What the user allows.
    pub goals: Goals,
    /// Pages of memory.
    pub populated: u64,
    /// What it writes.
    pub writes: Writes,
    /// Bytes per second that the link carries.
    pub bandwidth: f64,
    /// What the frozen time is without pages.
    pub fixed: Duration,
}

/// What a move would be like.
#[derive(Debug, Clone, PartialEq)]
pub struct Outlook {
    /// How the memory would move in the end.
    pub mode: Mode,
    /// Rounds of copying.
    pub rounds: u32,
    /// Pages that would cross.
    pub pages: u64,
    /// The time of the rounds.
    pub copying: Duration,
    /// The frozen time.
    pub frozen: Duration,
    /// The time in which the rest follows.
    pub following: Duration,
    /// Why the migration would be aborted, if it would be frozen longer than is allowed.
    pub kept: Option<String>,
}

/// Thinks a move through.
#[must_use]
pub fn foresee(known: &Known) -> Outlook {
    let Known { mode, goals, populated, bandwidth, fixed, .. } = *known;
    let crossing = |pages: u64| Duration::from_secs_f64((pages as f64 * PAGE / bandwidth.max(1.0)).min(1e9));
    let start = Outlook {
        mode,
        rounds: 0,
        pages: populated,
        copying: Duration::ZERO,
        frozen: fixed,
        following: Duration::ZERO,
        kept: None,
    };
    // Of these two the limit is none: they have no rounds that could keep it.
    match mode {
        Mode::Cold => return Outlook { frozen: fixed + crossing(populated), ..start },
        Mode::Postcopy => return Outlook { following: crossing(populated), ..start },
        Mode::Auto | Mode::Precopy | Mode::Hybrid => {}
    }
    let round = |found_pages, since| Round { found_pages, since, bandwidth: None, files: 0 };
    let mut rounds = vec![round(populated, Duration::ZERO)];
    let mut outlook = Outlook { pages: 0, ..start };
    let (mut left, mut share) = (populated, 1000);
    loop {
        let next = decide(&rounds, fixed, &goals);
        match next {
            Next::Copy | Next::Throttle if outlook.rounds < MOST_ROUNDS => {
                if next == Next::Throttle {
                    share = (share / 2).max(SLOWEST);
                }
                let took = crossing(left);
                if let Some(last) = rounds.last_mut() {
                    last.bandwidth = Some(bandwidth.max(1.0));
                }
                outlook.rounds += 1;
                outlook.pages = outlook.pages.saturating_add(left);
                outlook.copying += took;
                left = whole(known.writes.within(took) * f64::from(share) / 1e3).min(populated);
                rounds.push(round(left, took));
            }
            Next::Keep(frozen) => {
                let kept = Some(advice(&rounds, frozen, fixed, &goals));
                return Outlook { frozen, kept, ..outlook };
            }
            Next::Hybrid | Next::Freeze | Next::Copy | Next::Throttle => {
                let follows = mode == Mode::Hybrid || next == Next::Hybrid;
                outlook.pages = outlook.pages.saturating_add(left);
                return match follows {
                    true => Outlook { mode: Mode::Hybrid, following: crossing(left), ..outlook },
                    false => Outlook { frozen: fixed + crossing(left), ..outlook },
                };
            }
        }
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as many as there can be, at most
fn whole(pages: f64) -> u64 {
    pages as u64
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FIXED: Duration = Duration::from_millis(100);
    const GBIT: f64 = 125e6;

    fn goals() -> Goals {
        Goals { max_frozen: None, max_rounds: 20, throttle: false, postcopy: false, thrifty: false }
    }

    fn sample(pages: u64, ms: u64) -> Sample {
        Sample { pages, time: Duration::from_millis(ms) }
    }

    /// 1 GiB over 1 Gbit/s, with so many pages written in a quarter of a second and in a second.
    fn known(short: u64, long: u64) -> Known {
        Known {
            mode: Mode::Precopy,
            goals: goals(),
            populated: 1 << 18,
            writes: Writes { short: sample(short, 250), long: sample(long, 1000) },
            bandwidth: GBIT,
            fixed: FIXED,
        }
    }

    fn seconds(time: Duration) -> f64 {
        time.as_secs_f64()
    }

    #[test]
    fn pages_that_are_written_again_and_again_are_counted_once() {
        let same = Writes { short: sample(500, 250), long: sample(500, 1000) };
        let others = Writes { short: sample(250, 250), long: sample(1000, 1000) };
        let ten = Duration::from_secs(10);
        assert!((same.within(ten) - 500.0).abs() < 1e-6);
        assert!((others.within(ten) - 10_000.0).abs() < 1e-6);
        assert!((others.bytes_per_second() - 4_096_000.0).abs() < 1e-3);
        let none = Writes { short: sample(9, 250), long: sample(0, 1000) };
        assert!(none.within(ten) < 1e-9);
        // Fewer in the longer time is chance: as many as then, for ever.
        let fewer = Writes { short: sample(9, 250), long: sample(7, 1000) };
        assert!((fewer.within(ten) - 7.0).abs() < 1e-6);
        let rare = Writes { short: sample(0, 250), long: sample(1, 1000) };
        assert!((rare.within(ten) - 10.0).abs() < 1e-6);
    }

    #[test]
    fn an_idle_service_is_copied_once_and_a_cold_one_waits_for_all_of_it() {
        let idle = foresee(&known(0, 0));
        assert_eq!((idle.rounds, idle.frozen, idle.mode), (1, FIXED, Mode::Precopy));
        assert!((seconds(idle.copying) - 8.59).abs() < 0.01, "{idle:?}");
        assert_eq!(idle.pages, 1 << 18);
        let cold = foresee(&Known { mode: Mode::Cold, ..known(9, 9) });
        assert!((seconds(cold.frozen) - 8.69).abs() < 0.01 && cold.copying.is_zero(), "{cold:?}");
        let postcopy = foresee(&Known { mode: Mode::Postcopy, ..known(9, 9) });
        assert_eq!((postcopy.frozen, postcopy.copying), (FIXED, Duration::ZERO));
        assert!((seconds(postcopy.following) - 8.59).abs() < 0.01, "{postcopy:?}");
    }

    #[test]
    fn what_is_written_all_the_time_crosses_in_rounds_that_shrink_until_they_do_not_pay() {
        // A fifth of what the link carries.
        let slow = foresee(&known(1500, 6000));
        assert!(slow.rounds >= 3 && slow.frozen < FIXED + Duration::from_millis(20), "{slow:?}");
        assert!((slow.pages as f64 / f64::from(1 << 18) - 1.25).abs() < 0.02, "{slow:?}");
        // Twice of it: no round leaves less.
        let fast = foresee(&known(15_000, 60_000));
        assert!(seconds(fast.frozen) > 8.0 && fast.kept.is_none(), "{fast:?}");
        let allowed = Goals { postcopy: true, ..goals() };
        let follows = foresee(&Known { goals: allowed, ..known(15_000, 60_000) });
        assert_eq!((follows.mode, follows.frozen), (Mode::Hybrid, FIXED));
        assert!(seconds(follows.following) > 8.0, "{follows:?}");
        let limited = Goals { max_frozen: Some(Duration::from_secs(1)), ..goals() };
        let kept = foresee(&Known { goals: limited, ..known(15_000, 60_000) }).kept.unwrap();
        assert!(kept.contains("more than the 1000 ms allowed"), "{kept}");
        // A cold move keeps no limit.
        let cold = Known { goals: limited, mode: Mode::Cold, ..known(9, 9) };
        assert_eq!(foresee(&cold).kept, None);
        let slow = Goals { throttle: true, ..limited };
        let slowed = foresee(&Known { goals: slow, ..known(15_000, 60_000) });
        assert!(slowed.kept.is_none() && seconds(slowed.frozen) < 1.0, "{slowed:?}");
        // An eighth of its CPU is the least, which is not enough here.
        assert!(
            foresee(&Known { goals: slow, bandwidth: GBIT / 20.0, ..known(15_000, 60_000) }).kept.is_some()
        );
    }

    #[test]
    fn nothing_that_is_measured_makes_it_endless() {
        for bandwidth in [0.0, f64::MIN_POSITIVE, f64::INFINITY] {
            for mode in Mode::ALL {
                let all = Goals { throttle: true, max_rounds: u32::MAX, ..goals() };
                let known = Known { mode, goals: all, bandwidth, ..known(u64::MAX, u64::MAX) };
                assert!(foresee(&known).rounds <= MOST_ROUNDS);
            }
        }
    }
}
