//! When files have been sent for long enough while their service runs: a pure function of what each look at them has found.

use std::time::Duration;

use crate::PAGE;
use crate::curve::Curve;

/// What may be left for the frozen time without another pass, bytes: half a millisecond of a link of 1 Gbit/s.
const LITTLE: u64 = 64 << 10;

/// A pass that finds more than this share of what the one before found does not pay.
const GAIN: f64 = 0.9;

/// Most passes: each reads all changed files.
const MOST_PASSES: u32 = 16;

/// Whether what a look has found is to be sent while the service runs, after so many passes, the last of which found so much.
#[must_use]
pub fn pays(found: u64, before: Option<u64>, passes: u32) -> bool {
    let less = before.is_none_or(|before| (found as f64) < before as f64 * GAIN);
    found > LITTLE && less && passes < MOST_PASSES
}

/// The files of a service on their way.
#[derive(Debug, Clone)]
pub struct Files {
    /// What has to be sent first, bytes.
    pub bytes: u64,
    /// What of them changes, in pages.
    pub writes: Curve,
    /// How long a look at them takes.
    pub comparing: Duration,
}

/// Files as a move that is thought through sends them.
#[derive(Debug)]
pub(crate) struct Passes<'a> {
    files: &'a Files,
    found: Option<u64>,
    passes: u32,
    /// Since they were sent last.
    since: Duration,
}

/// What becomes of what a look has found, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ahead {
    /// It is sent while the service runs.
    Sent(u64),
    /// It is left for the frozen time.
    Left(u64),
}

impl Files {
    /// None, and none come.
    #[must_use]
    pub fn none() -> Self {
        Self { bytes: 0, writes: Curve::fit(&[], 0), comparing: Duration::ZERO }
    }

    /// How much longer than this a service is frozen that would be for so long without files. They are compared once more
    /// meanwhile, beside the dump and the restore.
    pub(crate) fn lengthen(&self, fixed: Duration) -> Duration {
        self.comparing.saturating_sub(fixed / 2)
    }

    /// Nothing but the first pass has been sent, which took so long.
    pub(crate) fn after(&self, first: Duration) -> Passes<'_> {
        Passes { files: self, found: None, passes: 0, since: first }
    }
}

impl Passes<'_> {
    /// Something else takes so long.
    pub(crate) fn pass(&mut self, time: Duration) {
        self.since = self.since.saturating_add(time);
    }

    /// A look at them, and a pass where that pays.
    pub(crate) fn look(&mut self) -> Ahead {
        let found = whole(self.files.writes.within(self.since.saturating_add(self.files.comparing)) * PAGE);
        if !pays(found, self.found, self.passes) {
            return Ahead::Left(found);
        }
        (self.found, self.passes, self.since) = (Some(found), self.passes + 1, self.files.comparing);
        Ahead::Sent(found)
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // as many as there can be, at most
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::curve::Look;

    #[test]
    fn files_are_sent_until_little_is_left_or_nothing_is_gained() {
        assert!(pays(1 << 20, None, 0) && pays(1 << 20, Some(2 << 20), 3));
        assert!(!pays(LITTLE, None, 0), "that takes no time");
        assert!(!pays(950_000, Some(1_000_000), 1), "it writes as fast as they are sent");
        assert!(!pays(1 << 20, Some(u64::MAX), MOST_PASSES));
    }

    #[test]
    fn each_look_finds_what_changed_since_the_last_one_was_sent() {
        // 1,000 other pages each second.
        let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
        let writes = Curve::fit(&[look(250, 250), look(1000, 1000)], 1 << 18);
        let files = Files { bytes: 1 << 30, writes, comparing: Duration::ZERO };
        let mut passes = files.after(Duration::from_secs(8));
        let about = |ahead: Ahead, seconds: f64| {
            let (Ahead::Sent(bytes) | Ahead::Left(bytes)) = ahead;
            assert!((bytes as f64 / (seconds * 4_096_000.0) - 1.0).abs() < 0.1, "{ahead:?}, {seconds} s");
            ahead
        };
        assert!(matches!(about(passes.look(), 8.0), Ahead::Sent(_)));
        passes.pass(Duration::from_millis(300));
        assert!(matches!(about(passes.look(), 0.3), Ahead::Sent(_)));
        passes.pass(Duration::from_millis(290));
        assert!(matches!(about(passes.look(), 0.29), Ahead::Left(_)), "that is no tenth less");
        assert_eq!(Files::none().after(Duration::MAX).look(), Ahead::Left(0));
    }
}
