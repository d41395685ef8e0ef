//! Which versions of the conversation the two nodes of a migration speak, and the one that they use.
//!
//! Releases up to 0.2.0 know `Open::protocol` alone and compare it with the one version that they speak. So it is the oldest
//! version of the source, and a field that they pass over has the newest.
//!
//! `Join` and `Resume` belong to a migration whose version `Open` has settled. With 3 alone neither has to name it, and the
//! journal does not: the release that makes 4 journals what was settled, and entries without it are of version 3.

use std::fmt;

use super::PROTOCOL_VERSION;

/// The oldest version that is still spoken: the newest of the release before this one.
pub const OLDEST_PROTOCOL_VERSION: u32 = 3;

/// What a node speaks that tells others no versions: release 0.2.0.
const UNTOLD: u32 = 3;

/// The versions that a node speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Versions {
    oldest: u32,
    newest: u32,
}

impl Versions {
    /// This program's.
    pub const OWN: Self = Self { oldest: OLDEST_PROTOCOL_VERSION, newest: PROTOCOL_VERSION };

    /// What a source has offered; `newest` is 0 from one that speaks `oldest` alone.
    #[must_use]
    pub fn offered(oldest: u32, newest: u32) -> Self {
        Self { oldest, newest: if newest == 0 { oldest } else { newest } }
    }

    /// What a node tells others that it speaks, each second; both 0 from a release that does not tell.
    #[must_use]
    pub fn told(oldest: u32, newest: u32) -> Self {
        if newest == 0 { Self { oldest: UNTOLD, newest: UNTOLD } } else { Self { oldest, newest } }
    }

    /// The oldest of them.
    #[must_use]
    pub fn oldest(self) -> u32 {
        self.oldest
    }

    /// The newest of them.
    #[must_use]
    pub fn newest(self) -> u32 {
        self.newest
    }

    /// The highest version that both speak.
    #[must_use]
    pub fn common(self, other: Self) -> Option<u32> {
        let (oldest, newest) = (self.oldest.max(other.oldest), self.newest.min(other.newest));
        (self.oldest <= self.newest && other.oldest <= other.newest && oldest <= newest).then_some(newest)
    }

    /// The version that a destination has chosen of these; 0 from one that knows the oldest of them alone. None where it
    /// is not one of these.
    #[must_use]
    pub fn chosen(self, version: u32) -> Option<u32> {
        let version = if version == 0 { self.oldest } else { version };
        (self.oldest..=self.newest).contains(&version).then_some(version)
    }

    /// Why node `ours`, which speaks these, refuses node `theirs`, which speaks `other`: both ranges, and what to do.
    #[must_use]
    pub fn objection(self, ours: &str, other: Self, theirs: &str) -> String {
        let older = if self.newest < other.newest { ours } else { theirs };
        format!(
            "it speaks {self} of the migration protocol and node {theirs} {other}; install a newer godwit on node {older}"
        )
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.oldest == self.newest {
            true => write!(f, "version {}", self.newest),
            false => write!(f, "versions {} to {}", self.oldest, self.newest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_common_version_is_used() {
        let range = Versions::offered;
        assert_eq!(range(3, 4).common(range(4, 5)), Some(4));
        assert_eq!(range(3, 5).common(range(3, 5)), Some(5));
        assert_eq!(range(3, 4).common(range(5, 6)), None);
        assert_eq!(range(5, 6).common(range(3, 4)), None);
        // Nonsense from outside has nothing in common with anything.
        assert_eq!(range(3, 5).common(range(5, 3)), None);
    }

    #[test]
    fn a_node_of_release_0_2_0_is_understood() {
        // It offers version 3 without a range, and as a destination names no choice.
        assert_eq!(Versions::OWN.common(Versions::offered(3, 0)), Some(3));
        assert_eq!(Versions::OWN.chosen(0), Some(3));
        assert_eq!(Versions::told(0, 0), Versions::offered(3, 0));
    }

    #[test]
    fn a_choice_that_was_not_offered_is_refused() {
        let offered = Versions::offered(3, 4);
        assert_eq!([2, 3, 4, 5].map(|version| offered.chosen(version)), [None, Some(3), Some(4), None]);
    }

    #[test]
    fn a_refusal_names_both_ranges_and_the_older_node() {
        let (old, new) = (Versions::offered(3, 0), Versions::offered(4, 5));
        let sentence = old.objection("b", new, "a");
        assert!(
            sentence.contains("version 3 of") && sentence.contains("node a versions 4 to 5"),
            "{sentence}"
        );
        assert!(sentence.ends_with("on node b"), "{sentence}");
        assert!(new.objection("b", old, "a").ends_with("on node a"));
    }
}
