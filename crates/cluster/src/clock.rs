//! The clock by which a node counts leases: one that goes on while the machine is suspended.
//!
//! `std::time::Instant` is `CLOCK_MONOTONIC`, which stops in a suspend. A node that woke up would hold a lease by it that
//! another node has seen to stand still for hours. So leases take times of [`BootTime`] alone.

use std::time::Duration;

use nix::errno::Errno;
use nix::time::{ClockId, clock_gettime};

/// A time by `CLOCK_BOOTTIME`. A timer that waits for one must be of this clock, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

impl BootTime {
    /// Now.
    ///
    /// # Errors
    /// The system has no such clock.
    pub fn now() -> Result<Self, Errno> {
        clock_gettime(ClockId::CLOCK_BOOTTIME).map(|time| Self(time.into()))
    }

    /// So long after the boot, by `CLOCK_BOOTTIME` or one that a test simulates.
    #[must_use]
    pub const fn since_boot(time: Duration) -> Self {
        Self(time)
    }

    /// So much later, at most as late as the clock can show.
    #[must_use]
    pub const fn after(self, time: Duration) -> Self {
        Self(self.0.saturating_add(time))
    }

    /// What has passed since then; nothing if that is later.
    #[must_use]
    pub const fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn it_is_the_clock_that_goes_on_in_a_suspend() {
        let by_boot = || BootTime::since_boot(clock_gettime(ClockId::CLOCK_BOOTTIME).unwrap().into());
        let (before, now, after) = (by_boot(), BootTime::now().unwrap(), by_boot());
        assert!(before <= now && now <= after);
    }

    #[test]
    fn no_sum_and_no_difference_wraps() {
        let (first, last) = (BootTime::since_boot(Duration::ZERO), BootTime::since_boot(Duration::MAX));
        assert_eq!(last.after(Duration::from_secs(1)), last);
        assert_eq!(first.since(last), Duration::ZERO);
        assert_eq!(last.since(first), Duration::MAX);
    }
}
