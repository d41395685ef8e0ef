//! What a move would be like: a pure function of what the service writes, and of the link.
//!
//! The rounds are those that [`decide`] would make, and what the service writes in the time of each is told by its [`Curve`].

use std::time::Duration;

use crate::converge::{Goals, Next, Round, SLOWEST, advice, decide, predict_all};
use crate::curve::Curve;
use crate::files::{Ahead, Files, Passes};
use crate::{Mode, PAGE};

/// Most rounds that are thought through.
const MOST_ROUNDS: u32 = 1000;

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
    /// Bytes per second that the link carries.
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
    /// The time in which the rest follows.
    pub following: Duration,
    /// Why the migration would be aborted, if it would be frozen longer than is allowed.
    pub kept: Option<String>,
}

/// Thinks a move through.
#[must_use]
pub fn foresee(known: &Known) -> Outlook {
    let Known { mode, goals, populated, ref files, bandwidth, .. } = *known;
    let bandwidth = bandwidth.max(1.0);
    let carried = |bytes: f64| Duration::from_secs_f64((bytes / bandwidth).min(1e9));
    let crossing = |pages: u64| carried(pages as f64 * PAGE);
    // What is frozen is compared once more, beside the dump and the restore.
    let fixed = known.fixed + files.comparing.saturating_sub(known.fixed / 2);
    let first = carried(files.bytes as f64);
    let mut passes = files.after(first);
    let mut outlook = Outlook {
        mode,
        rounds: 0,
        pages: 0,
        file_bytes: files.bytes,
        copying: first,
        frozen: fixed,
        following: Duration::ZERO,
        kept: None,
    };
    // Of these two the limit is none: they have no rounds that could keep it.
    if matches!(mode, Mode::Cold | Mode::Postcopy) {
        let files_left = loop {
            match passes.look() {
                Ahead::Left(bytes) => break bytes,
                Ahead::Sent(bytes) => outlook.sends(bytes, carried(bytes as f64), &mut passes),
            }
        };
        outlook.pages = populated;
        outlook.file_bytes = outlook.file_bytes.saturating_add(files_left);
        let frozen = fixed + carried(files_left as f64);
        return match mode {
            Mode::Cold => Outlook { frozen: frozen + crossing(populated), ..outlook },
            _ => Outlook { frozen, following: crossing(populated), ..outlook },
        };
    }
    let round = |found_pages, since| Round { found_pages, since, bandwidth: None, files: 0 };
    let mut rounds = vec![round(populated, Duration::ZERO)];
    let (mut left, mut share) = (populated, 1000);
    loop {
        let next = decide(&rounds, fixed, &goals);
        let mut since = Duration::ZERO;
        match next {
            Next::Copy => {}
            Next::Throttle => share = (share / 2).max(SLOWEST),
            Next::Keep(frozen) => {
                let kept = Some(advice(&rounds, frozen, fixed, &goals));
                return Outlook { frozen, kept, ..outlook };
            }
            Next::Hybrid | Next::Freeze => {
                let follows = mode == Mode::Hybrid || next == Next::Hybrid;
                match passes.look() {
                    Ahead::Sent(bytes) => {
                        since = carried(bytes as f64);
                        outlook.sends(bytes, since, &mut passes);
                        if follows {
                            // What it writes meanwhile follows, too.
                            left = left.max(known.written(since, share));
                            continue;
                        }
                    }
                    Ahead::Left(bytes) => {
                        if let Some(last) = rounds.last_mut() {
                            last.files = bytes;
                        }
                        outlook.pages = outlook.pages.saturating_add(left);
                        outlook.file_bytes = outlook.file_bytes.saturating_add(bytes);
                        return outlook.frozen(&rounds, (follows, left), (fixed, bandwidth), &goals);
                    }
                }
            }
        }
        let took = crossing(left);
        if let Some(last) = rounds.last_mut() {
            last.bandwidth = Some(bandwidth);
        }
        passes.pass(took);
        outlook.rounds += 1;
        outlook.pages = outlook.pages.saturating_add(left);
        outlook.copying += took;
        left = known.written(since + took, share);
        rounds.push(round(left, since + took));
        if outlook.rounds >= MOST_ROUNDS {
            // No user waits for that.
            return outlook.frozen(&rounds, (false, left), (fixed, bandwidth), &goals);
        }
    }
}

impl Known {
    /// Pages that it writes in this time, with this share of its CPU in thousandths.
    fn written(&self, time: Duration, share: u32) -> u64 {
        whole(self.writes.within(time) * f64::from(share) / 1e3).min(self.populated)
    }
}

impl Outlook {
    /// So many bytes of files cross while the service runs, in this time.
    fn sends(&mut self, bytes: u64, time: Duration, passes: &mut Passes<'_>) {
        passes.pass(time);
        self.file_bytes = self.file_bytes.saturating_add(bytes);
        self.copying += time;
    }

    /// With the freeze after these rounds: whether pages `follow`, and how many are left.
    fn frozen(
        self,
        rounds: &[Round],
        (follow, left): (bool, u64),
        (fixed, bandwidth): (Duration, f64),
        goals: &Goals,
    ) -> Self {
        let frozen = predict_all(rounds, fixed, follow, Some(bandwidth)).unwrap_or(fixed);
        let surely = frozen + goals.margin;
        let too_long = goals.max_frozen.is_some_and(|limit| surely > limit);
        let kept = too_long.then(|| advice(rounds, surely, fixed, goals));
        match follow {
            true => {
                let following = Duration::from_secs_f64((left as f64 * PAGE / bandwidth).min(1e9));
                Self { mode: Mode::Hybrid, frozen, following, kept, ..self }
            }
            false => Self { frozen, kept, ..self },
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
    use crate::curve::Look;

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
                let known = Known { mode, goals: all, bandwidth, files, ..known(u64::MAX, u64::MAX) };
                assert!(foresee(&known).rounds <= MOST_ROUNDS);
            }
        }
    }
}
