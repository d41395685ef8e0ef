//! What a service is frozen for beside the pages and files that cross meanwhile, before anything is known of its
//! machines: somewhat longer than `make bench` found on one that was otherwise idle (`docs/frozen-time.md`). What
//! past moves say of it is in [`crate::learn`].
//!
//! [`fixed`] is the sum of four parts. Pages and images cross beside the dump and the restore, but not beside the
//! freeze and the commit. So [`Parts`] tells them apart.

use std::time::Duration;

use crate::quantity::bounded;

/// Freeze, dump, restore and commit of a service that hardly has memory.
const ALWAYS: Parts = Parts {
    freeze: Duration::from_millis(3),
    dump: Duration::from_millis(42),
    restore: Duration::from_millis(43),
    commit: Duration::from_millis(6),
};

/// For each GiB of its memory, which the kernel walks over twice: for the last scan and in the dump.
const GIB: Parts = Parts {
    freeze: Duration::from_millis(3),
    dump: Duration::from_millis(10),
    restore: Duration::ZERO,
    commit: Duration::ZERO,
};

/// For each TCP connection, in dump and restore.
const CONNECTION: Parts = Parts {
    freeze: Duration::ZERO,
    dump: Duration::from_micros(35),
    restore: Duration::from_micros(25),
    commit: Duration::ZERO,
};

/// The parts of the fixed time, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Parts {
    /// From the freeze to the start of the dump.
    pub freeze: Duration,
    /// CRIU's dump.
    pub dump: Duration,
    /// CRIU's restore.
    pub restore: Duration,
    /// The commit, with the resume.
    pub commit: Duration,
}

impl Parts {
    /// The parts for so many bytes of memory and so many connections.
    #[must_use]
    pub fn of(memory: u64, connections: u32) -> Self {
        let gib = memory as f64 / f64::from(1 << 30);
        let part =
            |of: fn(&Self) -> Duration| of(&ALWAYS) + of(&GIB).mul_f64(gib) + of(&CONNECTION) * connections;
        Self {
            freeze: part(|parts| parts.freeze),
            dump: part(|parts| parts.dump),
            restore: part(|parts| parts.restore),
            commit: part(|parts| parts.commit),
        }
    }

    /// All parts together.
    #[must_use]
    pub fn whole(&self) -> Duration {
        [self.freeze, self.dump, self.restore, self.commit].into_iter().map(bounded).sum()
    }

    /// The same parts of a whole that past moves have corrected, as [`crate::learn::Belief::expected`] does. Moves teach the
    /// whole only, so all parts are scaled alike.
    #[must_use]
    pub fn corrected(&self, whole: Duration) -> Self {
        let (before, after) = (self.whole().as_secs_f64(), bounded(whole).as_secs_f64());
        if before == 0.0 {
            return Self { freeze: bounded(whole), ..Self::default() };
        }
        let part = |time: Duration| crate::quantity::seconds(bounded(time).as_secs_f64() * (after / before));
        Self {
            freeze: part(self.freeze),
            dump: part(self.dump),
            restore: part(self.restore),
            commit: part(self.commit),
        }
    }
}

/// What a service with so many bytes of memory and so many connections is frozen for.
#[must_use]
pub fn fixed(memory: u64, connections: u32) -> Duration {
    Parts::of(memory, connections).whole()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn memory_and_connections_lengthen_it() {
        assert_eq!(fixed(0, 0), 94 * MS);
        assert_eq!(fixed(4 << 30, 0), 94 * MS + 52 * MS);
        assert_eq!(fixed(0, 1000), 94 * MS + 60 * MS);
        assert!(fixed(u64::MAX, u32::MAX) < crate::quantity::LONGEST);
    }

    #[test]
    fn corrected_parts_keep_their_proportions_and_have_the_whole_that_was_learned() {
        let parts = Parts::of(1 << 30, 100);
        let twice = parts.corrected(parts.whole() * 2);
        assert_eq!(twice.dump, parts.dump * 2);
        assert!(twice.whole().abs_diff(parts.whole() * 2) < Duration::from_micros(1));
        assert_eq!(Parts::default().corrected(MS).whole(), MS);
        assert!(parts.corrected(Duration::MAX).whole() > Duration::from_secs(999_000_000));
    }
}
