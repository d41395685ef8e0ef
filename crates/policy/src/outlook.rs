//! What a move would be like: a pure function of what the service writes, and of the link.
//!
//! The rounds are those that [`crate::converge::decide`] would make. What the service writes in the time of each is
//! told by its [`Curve`], and what changes of its files by theirs.

use std::time::Duration;

use crate::Mode;
use crate::converge::{Goals, advice, at};
use crate::curve::Curve;
use crate::files::Files;
use crate::fixed::Parts;
use crate::predict::{Cargo, Forecast, Link, Steps, think};
use crate::quantity::{Bandwidth, WireRatio};
use crate::rounds::End;

/// What is known of a service and of its way.
#[derive(Debug, Clone)]
pub struct Known {
    /// How the memory moves.
    pub mode: Mode,
    /// What the user allows.
    pub goals: Goals,
    /// Pages of memory.
    pub populated: u64,
    /// What it writes.
    pub writes: Curve,
    /// Its files.
    pub files: Files,
    /// Bytes of files per second that the link carries.
    pub file_bandwidth: f64,
    /// Bytes of pages per second that it carries, or that are sent at most.
    pub bandwidth: f64,
    /// What the frozen time is without pages and files.
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
    /// Bytes of files that would, with those that are sent more than once.
    pub file_bytes: u64,
    /// The time until the freeze.
    pub copying: Duration,
    /// The frozen time.
    pub frozen: Duration,
    /// Bytes of files that cross in it.
    pub frozen_file_bytes: u64,
    /// How long these take of it.
    pub frozen_by_files: Duration,
    /// The time in which the rest follows.
    pub following: Duration,
    /// Why the migration would be aborted, if it would be frozen longer than is allowed.
    pub kept: Option<String>,
}

/// Thinks a move through: as [`crate::predict`] does, on a way without round trips, images, layers and kept pages.
#[must_use]
pub fn foresee(known: &Known) -> Outlook {
    let Known { mode, goals, populated, ref writes, ref files, file_bandwidth, bandwidth, fixed } = *known;
    let cargo = Cargo { pages: populated, kept: 0, images: 0, layers: 0, files, writes };
    let link = Link {
        bandwidth: Bandwidth::clamped(file_bandwidth),
        of_pages: Bandwidth::clamped(bandwidth),
        ratio: WireRatio::clamped(1.0),
        round_trip: Duration::ZERO,
    };
    let steps = Steps { fixed: Parts { freeze: fixed, ..Parts::default() }, ..Steps::default() };
    let (forecast, copied) = think(mode, &cargo, &link, &steps, &goals);
    let Forecast { mode, rounds, sent, left, file_bytes, files_left, copying, held, filling, kept, .. } =
        forecast;
    let fixed = fixed.saturating_add(files.lengthen(fixed));
    let (pages, frozen) = match copied.end {
        // It is given up before the rest of it crosses.
        End::Keep(frozen) => (sent, frozen),
        End::Freeze | End::Follow => (sent.saturating_add(left), held),
    };
    Outlook {
        mode,
        rounds,
        pages,
        file_bytes,
        copying,
        frozen,
        frozen_file_bytes: files_left,
        frozen_by_files: at(files_left as f64, file_bandwidth),
        following: filling,
        kept: kept.map(|frozen| advice(&copied.all, frozen, fixed, &goals)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::curve::Look;
    use crate::rounds::MOST_ROUNDS;

    const FIXED: Duration = Duration::from_millis(100);
    const GBIT: f64 = 125e6;

    fn goals() -> Goals {
        Goals {
            max_frozen: None,
            margin: Duration::ZERO,
            max_rounds: 20,
            throttle: false,
            postcopy: false,
            thrifty: false,
        }
    }

    /// A service of so many pages that writes so many of them in a quarter of a second and in a second.
    fn writes(populated: u64, short: u64, long: u64) -> Curve {
        let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
        Curve::fit(&[look(short, 250), look(long, 1000)], populated)
    }

    /// 1 GiB over 1 Gbit/s, with so many pages written in a quarter of a second and in a second.
    fn known(short: u64, long: u64) -> Known {
        Known {
            mode: Mode::Precopy,
            goals: goals(),
            populated: 1 << 18,
            writes: writes(1 << 18, short, long),
            files: Files::none(),
            file_bandwidth: GBIT,
            bandwidth: GBIT,
            fixed: FIXED,
        }
    }

    fn seconds(time: Duration) -> f64 {
        time.as_secs_f64()
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
    fn files_that_change_are_sent_again_and_the_last_of_them_while_it_is_frozen() {
        // 1 GiB of files, of which so many MB other bytes a second are written.
        let files = |rate: u64, comparing| Files {
            bytes: 1 << 30,
            writes: writes(1 << 18, rate * 61, rate * 244),
            comparing: Duration::from_millis(comparing),
        };
        let with = |rate, comparing| Known { files: files(rate, comparing), ..known(0, 0) };
        let slow = foresee(&with(12, 0));
        assert!(slow.frozen < FIXED + Duration::from_millis(2) && slow.rounds > 1, "{slow:?}");
        // While 2 GiB cross, a tenth of that is written, and so on.
        let more = slow.file_bytes as f64 / f64::from(1 << 30);
        assert!((1.15..1.25).contains(&more), "{slow:?}");
        assert!((seconds(slow.copying) - 19.0).abs() < 0.5, "{slow:?}");
        // As fast as the link: no pass leaves less, and all that the first one leaves crosses frozen.
        let fast = foresee(&with(250, 0));
        assert!(seconds(fast.frozen) > 8.0, "{fast:?}");
        for (outlook, frozen) in [(&slow, &slow.frozen), (&fast, &fast.frozen)] {
            assert_eq!(outlook.frozen_by_files, *frozen - FIXED, "{outlook:?}");
        }
        assert!(
            (seconds(fast.frozen_by_files) * GBIT - fast.frozen_file_bytes as f64).abs() < 1.0,
            "{fast:?}"
        );
        for mode in [Mode::Postcopy, Mode::Hybrid] {
            let follows = foresee(&Known { mode, ..with(250, 0) });
            assert!(seconds(follows.frozen) > 8.0, "files do not follow: {follows:?}");
        }
        let limited = Goals { max_frozen: Some(Duration::from_secs(1)), postcopy: true, ..goals() };
        let kept = foresee(&Known { goals: limited, ..with(250, 0) }).kept.unwrap();
        assert!(kept.contains("MB of changed files") && !kept.contains("--allow postcopy"), "{kept}");
        assert_eq!(foresee(&Known { goals: limited, ..with(12, 0) }).kept, None);
        // What takes long to compare is compared once more while it is frozen.
        let many = foresee(&with(0, 450));
        assert_eq!(many.frozen, FIXED + Duration::from_millis(400));
    }

    #[test]
    fn nothing_that_is_measured_makes_it_endless() {
        for bandwidth in [0.0, f64::MIN_POSITIVE, f64::INFINITY] {
            for mode in Mode::ALL {
                let all = Goals { throttle: true, max_rounds: u32::MAX, ..goals() };
                let all_files = writes(u64::MAX, u64::MAX, u64::MAX);
                let files = Files { bytes: u64::MAX, writes: all_files, comparing: Duration::from_secs(9) };
                let limited = Known { mode, goals: all, bandwidth, files, ..known(u64::MAX, u64::MAX) };
                let known = Known { file_bandwidth: bandwidth, ..limited };
                assert!(foresee(&known).rounds <= MOST_ROUNDS);
            }
        }
    }
}
