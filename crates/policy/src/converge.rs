//! When to stop copying and freeze: a pure function of what the rounds so far measured.
//!
//! After each scan of what was written, the frozen time is predicted as the time that the kernel's
//! state needs, plus the pages left at the measured bandwidth. Copying goes on while a round gains
//! at least a tenth; then it is stopped, slowed down, or finished from the other side (hybrid), as
//! the user allowed. Where pages follow after the resume in any case (hybrid), a round has to leave
//! less than a quarter, so that few pages cross three times.
//!
//! The files and logs that are left for the frozen time are known shortly before it begins; they count too.

use std::time::Duration;

use crate::PAGE;

/// What one round measured. Pages are of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    /// Pages that were written since the round before, found when this one began.
    pub found_pages: u64,
    /// How long they had been collecting.
    pub since: Duration,
    /// Bytes of pages per second that the round moved; nothing when it moved too little to tell.
    pub bandwidth: Option<f64>,
    /// Bytes of files and log that are left to be sent; 0 while that is not known.
    pub files: u64,
}

/// What the user allows, and wants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goals {
    /// Longest frozen time; none: as short as copying gets it.
    pub max_frozen: Option<Duration>,
    /// How much longer than predicted it may be, which is held against that.
    pub margin: Duration,
    /// Most rounds.
    pub max_rounds: u32,
    /// Whether the service's CPU may be slowed.
    pub throttle: bool,
    /// Whether pages may stay behind at the commit.
    pub postcopy: bool,
    /// Whether they do in any case: then only a round that shrinks the rest to a quarter is made.
    pub thrifty: bool,
}

/// What to do with the pages that were just found.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Next {
    /// Send them while the service runs.
    Copy,
    /// As `Copy`, and from now on give the service less CPU.
    Throttle,
    /// Freeze, and send them frozen.
    Freeze,
    /// Freeze, and leave them here for after the commit.
    Hybrid,
    /// Neither helps: the service stays. With the frozen time that is predicted.
    Keep(Duration),
}

/// Least share of its CPU that a slowed service keeps, in thousandths.
pub const SLOWEST: u32 = 125;

/// What may be left for the frozen time when the user gave no limit: less than any start of CRIU takes, so that more
/// rounds would not shorten it noticeably.
const ENOUGH: Duration = Duration::from_millis(15);

/// A round that leaves more than this share of what the one before left does not pay.
const GAIN: f64 = 0.9;

/// The same where the rest follows after the resume. Pages that a round leaves may cross once more than
/// they had to, and each page that is missing at the resume costs a round trip.
const GAIN_THRIFTY: f64 = 0.25;

/// The frozen time if the pages found last were sent frozen.
#[must_use]
pub fn predict(rounds: &[Round], fixed: Duration) -> Option<Duration> {
    let left = rounds.last()?.found_pages;
    Some(fixed + at(left as f64 * PAGE, measured(rounds)?))
}

/// The frozen time if it began now: with the files, without pages where these `follow` after it. The bandwidth is that
/// of the rounds, or else that of files.
#[must_use]
pub fn predict_all(
    rounds: &[Round],
    fixed: Duration,
    follow: bool,
    of_files: Option<f64>,
) -> Option<Duration> {
    let last = rounds.last()?;
    let pages = if follow { 0 } else { last.found_pages };
    let bytes = pages as f64 * PAGE + last.files as f64;
    match measured(rounds).or(of_files) {
        Some(bandwidth) => Some(fixed + at(bytes, bandwidth)),
        None => (bytes == 0.0).then_some(fixed),
    }
}

/// What the rounds showed of the link, bytes per second.
fn measured(rounds: &[Round]) -> Option<f64> {
    rounds.iter().rev().find_map(|round| round.bandwidth)
}

/// The time in which so many bytes cross; nine digits of seconds where nothing does.
pub(crate) fn at(bytes: f64, bandwidth: f64) -> Duration {
    Duration::from_secs_f64((bytes / bandwidth.max(1.0)).min(1e9))
}

/// Decides about the pages that the last of `rounds` found. `fixed` is what the frozen stretch
/// needs beside its pages.
#[must_use]
pub fn decide(rounds: &[Round], fixed: Duration, goals: &Goals) -> Next {
    let surely = fixed + goals.margin;
    if goals.max_frozen.is_some_and(|limit| limit < surely) {
        // No round and no link changes that.
        return Next::Keep(surely);
    }
    // The first scan finds all there is, and nothing has been measured.
    let [.., before, last] = rounds else { return Next::Copy };
    // Nothing had to be sent so far: the service has hardly any memory.
    let Some(predicted) = predict(rounds, fixed) else { return Next::Freeze };
    let limit = goals.limit().unwrap_or(fixed + ENOUGH);
    if predicted <= limit {
        return Next::Freeze;
    }
    let gain = if goals.thrifty { GAIN_THRIFTY } else { GAIN };
    let pays = |from: &Round, to: &Round| (to.found_pages as f64) < from.found_pages as f64 * gain;
    // Two in a row: one round may have met a burst.
    let paid = match rounds {
        _ if goals.thrifty => false,
        [.., earlier, before, _] => pays(earlier, before),
        _ => true,
    };
    if (pays(before, last) || paid) && rounds.len() <= goals.max_rounds as usize {
        return Next::Copy;
    }
    if goals.postcopy {
        return Next::Hybrid;
    }
    if goals.throttle && rounds.len() <= goals.max_rounds as usize {
        return Next::Throttle;
    }
    match goals.max_frozen {
        Some(_) => Next::Keep(predicted + goals.margin),
        None => Next::Freeze,
    }
}

impl Goals {
    /// What is predicted may be no longer, if there is a limit.
    #[must_use]
    pub fn limit(&self) -> Option<Duration> {
        self.max_frozen.map(|limit| limit.saturating_sub(self.margin))
    }
}

/// Why a migration was aborted that copying could not make ready, with what would help.
#[must_use]
pub fn advice(rounds: &[Round], predicted: Duration, fixed: Duration, goals: &Goals) -> String {
    let (limit, surely) = (goals.max_frozen.unwrap_or_default(), fixed + goals.margin);
    let whole = |time: Duration| time.as_micros().div_ceil(1000);
    if surely > limit {
        return format!(
            "dump and restore alone may freeze it for {} ms, more than the {} ms allowed, however little it writes and however fast the link is; allow more (--max-frozen-ms {} at least)",
            whole(surely),
            limit.as_millis(),
            whole(surely + ENOUGH)
        );
    }
    let files = rounds.last().map_or(0, |round| round.files);
    // Files do not follow after the resume.
    let too_many_files = surely + at(files as f64, measured(rounds).unwrap_or(f64::MAX)) > limit;
    let mut help = Vec::new();
    if !goals.throttle && (too_many_files || rate(rounds) >= SLOW) {
        help.push("allow its CPU to be slowed (--allow throttle)");
    }
    if !goals.postcopy && !too_many_files {
        help.push("allow pages to follow after it (--allow postcopy)");
    }
    help.push("give it more frozen time (--max-frozen-ms), or a faster link");
    let among = match files {
        0 => String::new(),
        files => format!(", with {:.1} MB of changed files and log to send meanwhile", files as f64 / 1e6),
    };
    format!(
        "after {} rounds it would still be frozen for {} ms{among}, more than the {} ms allowed: {}; {}",
        rounds.len(),
        predicted.as_millis(),
        limit.as_millis(),
        figures(rounds),
        help.join(", or ")
    )
}

/// Why so much is left for the frozen stretch of a service that was copied in rounds; nothing where they have done
/// what they are for.
#[must_use]
pub fn why_frozen(rounds: &[Round], fixed: Duration, goals: &Goals) -> Option<String> {
    let (first, last) = (rounds.first()?, rounds.last()?);
    let limit = goals.limit().unwrap_or(fixed.mul_f64(1.0 + NOTICED));
    if goals.postcopy || predict(rounds, fixed)? <= limit {
        return None;
    }
    let mut help = vec!["--allow postcopy lets them follow after the resume"];
    if !goals.throttle {
        help.push("--allow throttle slows the service");
    }
    let gain = match last.found_pages as f64 / first.found_pages.max(1) as f64 {
        most if most > 0.5 => ", hardly less than in mode cold",
        _ => "",
    };
    Some(format!(
        "more rounds do not pay: {}, so {:.0} MB cross while it is frozen{gain}; {}",
        figures(rounds),
        last.found_pages as f64 * PAGE / 1e6,
        help.join(", ")
    ))
}

/// Why pages are left for after the commit, of a service that was to be copied in rounds.
#[must_use]
pub fn why_hybrid(rounds: &[Round]) -> String {
    format!("more rounds do not pay: {}, so the rest follows after the resume", figures(rounds))
}

/// Pages that lengthen the frozen time by less than this share are not mentioned.
const NOTICED: f64 = 0.5;

/// Less CPU does not help a service that writes less than this, bytes per second.
const SLOW: f64 = 1e6;

/// Bytes of pages that the service writes per second.
fn rate(rounds: &[Round]) -> f64 {
    rounds.last().map_or(0.0, |round| round.found_pages as f64 * PAGE / round.since.as_secs_f64().max(1e-3))
}

/// What the service writes and the link carries.
fn figures(rounds: &[Round]) -> String {
    let bandwidth = measured(rounds).unwrap_or(0.0) / 1e6;
    format!("it writes {:.0} MB/s and {bandwidth:.0} MB/s can be sent", rate(rounds) / 1e6)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FIXED: Duration = Duration::from_millis(200);

    fn goals() -> Goals {
        Goals {
            max_frozen: None,
            margin: Duration::ZERO,
            max_rounds: 30,
            throttle: false,
            postcopy: false,
            thrifty: false,
        }
    }

    /// Rounds that found these numbers of pages, on a link of 100 MB/s.
    fn rounds(found: &[u64]) -> Vec<Round> {
        found
            .iter()
            .map(|&found_pages| Round {
                found_pages,
                since: Duration::from_secs(1),
                bandwidth: Some(100e6),
                files: 0,
            })
            .collect()
    }

    #[test]
    fn what_was_found_first_is_copied() {
        assert_eq!(decide(&rounds(&[1_000_000]), FIXED, &goals()), Next::Copy);
        assert_eq!(decide(&[], FIXED, &goals()), Next::Copy);
    }

    #[test]
    fn it_freezes_as_soon_as_the_rest_does_not_show() {
        // 100 pages are 4 ms.
        assert_eq!(decide(&rounds(&[1_000_000, 100]), FIXED, &goals()), Next::Freeze);
        assert_eq!(decide(&rounds(&[1_000_000, 10_000]), FIXED, &goals()), Next::Copy);
    }

    #[test]
    fn a_limit_of_the_users_is_enough_also_when_copying_would_gain_more() {
        let wide = Goals { max_frozen: Some(Duration::from_secs(1)), ..goals() };
        assert_eq!(decide(&rounds(&[1_000_000, 10_000]), FIXED, &wide), Next::Freeze);
    }

    #[test]
    fn one_bad_round_is_a_burst_and_two_are_the_truth() {
        assert_eq!(decide(&rounds(&[100_000, 50_000, 49_000]), FIXED, &goals()), Next::Copy);
        assert_eq!(decide(&rounds(&[100_000, 50_000, 49_000, 48_000]), FIXED, &goals()), Next::Freeze);
    }

    #[test]
    fn what_does_not_converge_ends_as_the_user_allowed() {
        let stuck = rounds(&[100_000, 50_000, 49_000, 48_000]);
        let hybrid = Goals { postcopy: true, throttle: true, ..goals() };
        assert_eq!(decide(&stuck, FIXED, &hybrid), Next::Hybrid);
        assert_eq!(
            why_hybrid(&stuck),
            "more rounds do not pay: it writes 197 MB/s and 100 MB/s can be sent, so the rest follows after the resume"
        );
        let slow = Goals { throttle: true, ..goals() };
        assert_eq!(decide(&stuck, FIXED, &slow), Next::Throttle);
        let strict = Goals { max_frozen: Some(Duration::from_millis(300)), ..goals() };
        let Next::Keep(predicted) = decide(&stuck, FIXED, &strict) else { panic!("it must be aborted") };
        assert!(predicted > Duration::from_secs(2), "{predicted:?}");
        let text = advice(&stuck, predicted, FIXED, &strict);
        assert!(
            text.contains("--allow postcopy") && text.contains("300 ms") && text.contains("197 MB/s"),
            "{text}"
        );
    }

    #[test]
    fn what_follows_anyway_is_copied_again_only_where_that_leaves_next_to_nothing() {
        let hybrid = Goals { postcopy: true, thrifty: true, ..goals() };
        assert_eq!(decide(&rounds(&[1_000_000, 70_000]), FIXED, &hybrid), Next::Copy);
        assert_eq!(decide(&rounds(&[1_000_000, 70_000, 5_000]), FIXED, &hybrid), Next::Copy);
        assert_eq!(decide(&rounds(&[1_000_000, 70_000, 5_000, 300]), FIXED, &hybrid), Next::Freeze);
        // A service that writes everywhere: each page crosses once, and once more.
        assert_eq!(decide(&rounds(&[1_000_000, 500_000]), FIXED, &hybrid), Next::Hybrid);
        assert_eq!(decide(&rounds(&[1_000_000, 70_000, 30_000]), FIXED, &hybrid), Next::Hybrid);
    }

    #[test]
    fn rounds_end_at_their_bound_also_when_each_pays() {
        let found: Vec<u64> = (0..10).map(|n| 1_000_000 >> n).collect();
        let few = Goals { max_rounds: 5, ..goals() };
        assert_eq!(decide(&rounds(&found[..5]), FIXED, &few), Next::Copy);
        assert_eq!(decide(&rounds(&found[..6]), FIXED, &few), Next::Freeze);
    }

    #[test]
    fn a_limit_below_what_a_dump_takes_is_said_at_once_and_nothing_else_is_advised() {
        let strict = Goals { max_frozen: Some(Duration::from_millis(1)), ..goals() };
        for goals in [strict, Goals { postcopy: true, ..strict }, Goals { throttle: true, ..strict }] {
            let rounds = rounds(&[1_000]);
            assert_eq!(decide(&rounds, FIXED, &goals), Next::Keep(FIXED));
            let text = advice(&rounds, FIXED, FIXED, &goals);
            assert!(text.contains("--max-frozen-ms 215") && text.contains("1 ms allowed"), "{text}");
            assert!(!text.contains("--allow") && !text.contains("faster link;"), "{text}");
        }
    }

    #[test]
    fn a_limit_is_held_against_what_moves_may_take_and_not_against_what_is_expected() {
        let allows = |limit, margin| Goals {
            max_frozen: Some(Duration::from_millis(limit)),
            margin: Duration::from_millis(margin),
            ..goals()
        };
        let left = rounds(&[1_000_000, 100]);
        assert_eq!(decide(&left, FIXED, &allows(300, 50)), Next::Freeze);
        assert_eq!(decide(&left, FIXED, &allows(300, 99)), Next::Copy);
        let kept = decide(&left, FIXED, &allows(300, 101));
        assert_eq!(kept, Next::Keep(Duration::from_millis(301)));
        // What is advised is enough.
        let fixed = FIXED + Duration::from_micros(400);
        let text = advice(&left, fixed, fixed, &allows(200, 0));
        assert!(
            text.contains("for 201 ms, more than the 200 ms") && text.contains("--max-frozen-ms 216"),
            "{text}"
        );
        assert_eq!(decide(&left, fixed, &allows(216, 0)), Next::Freeze);
    }

    #[test]
    fn a_service_that_hardly_writes_is_not_advised_to_be_slowed() {
        let strict = Goals { max_frozen: Some(Duration::from_millis(201)), ..goals() };
        let mut slow = rounds(&[100_000, 200, 200]);
        slow[2].since = Duration::from_secs(10);
        let text = advice(&slow, Duration::from_millis(208), FIXED, &strict);
        assert!(!text.contains("throttle") && text.contains("--allow postcopy"), "{text}");
    }

    #[test]
    fn what_does_not_shrink_is_frozen_with_the_reason_and_what_would_help() {
        let stuck = rounds(&[50_000, 49_500, 49_000, 48_000]);
        assert_eq!(decide(&stuck, FIXED, &goals()), Next::Freeze);
        let why = why_frozen(&stuck, FIXED, &goals()).unwrap();
        for words in
            ["197 MB/s", "100 MB/s", "197 MB cross", "mode cold", "--allow postcopy", "--allow throttle"]
        {
            assert!(why.contains(words), "{words}: {why}");
        }
        let slowed = Goals { throttle: true, ..goals() };
        assert!(!why_frozen(&stuck, FIXED, &slowed).unwrap().contains("throttle"), "that was allowed");
        // A quarter of it was worth it.
        let why = why_frozen(&rounds(&[200_000, 50_000, 49_000, 48_000]), FIXED, &goals()).unwrap();
        assert!(!why.contains("mode cold"), "{why}");
        assert_eq!(why_frozen(&rounds(&[50_000, 100]), FIXED, &goals()), None);
        // 41 ms beside 200 ms.
        assert_eq!(why_frozen(&rounds(&[50_000, 1_001, 1_000, 1_000]), FIXED, &goals()), None);
    }

    #[test]
    fn files_and_log_that_are_left_count_and_cannot_follow_later() {
        let strict = Goals { max_frozen: Some(Duration::from_secs(1)), ..goals() };
        let mut left = rounds(&[100_000, 100]);
        left[1].files = 100_000_000;
        assert_eq!(decide(&left, FIXED, &strict), Next::Freeze, "as far as its pages go");
        for follow in [false, true] {
            let predicted = predict_all(&left, FIXED, follow, None).unwrap();
            assert!(predicted > Duration::from_millis(1190) && predicted < Duration::from_millis(1210));
            let text = advice(&left, predicted, FIXED, &strict);
            assert!(text.contains("100.0 MB of changed files") && !text.contains("postcopy"), "{text}");
        }
        // A service without memory to speak of has shown the link by its files only.
        let none = [Round { bandwidth: None, ..left[1] }];
        assert_eq!(predict_all(&none, FIXED, true, None), None);
        assert_eq!(predict_all(&none, FIXED, true, Some(100e6)), Some(FIXED + Duration::from_secs(1)));
    }
}
