//! How busy the processors of this machine are.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_migration::machine::processor_time;

/// The share is that of at least this time.
const WINDOW: Duration = Duration::from_secs(2);

/// The busy share of all processors, of the time since it was asked for last.
#[derive(Debug)]
pub(crate) enum Load {
    Measured(Mutex<Seen>),
    /// What its operator says.
    Fixed(u32),
}

#[derive(Debug)]
pub(crate) struct Seen {
    at: Instant,
    time: Option<(u64, u64)>,
    permille: Option<u32>,
}

impl Load {
    /// It is known from [`WINDOW`] after this on.
    pub(crate) fn new() -> Self {
        Self::Measured(Mutex::new(Seen { at: Instant::now(), time: processor_time(), permille: None }))
    }

    /// In thousandths.
    pub(crate) fn busy_permille(&self) -> Option<u32> {
        let seen = match self {
            Self::Measured(seen) => seen,
            Self::Fixed(permille) => return Some(*permille),
        };
        // Each change is that of one field after the other, none of which can fail.
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.at.elapsed() >= WINDOW {
            let now = processor_time();
            seen.permille = seen.time.zip(now).and_then(|(before, now)| permille(before, now));
            (seen.at, seen.time) = (Instant::now(), now);
        }
        seen.permille
    }
}

fn permille(before: (u64, u64), now: (u64, u64)) -> Option<u32> {
    let (busy, all) = (now.0.checked_sub(before.0)?, now.1.checked_sub(before.1)?);
    u32::try_from(busy.saturating_mul(1000).checked_div(all)?.min(1000)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_is_that_of_the_time_between() {
        assert_eq!(permille((100, 1000), (150, 1200)), Some(250));
        assert_eq!(permille((100, 1000), (100, 1000)), None, "no time has passed");
        // Counters of processors that were taken off go back.
        assert_eq!(permille((100, 1000), (90, 1200)), None);
        assert_eq!(Load::new().busy_permille(), None, "it is not known yet");
        assert_eq!(Load::Fixed(100).busy_permille(), Some(100));
    }
}
