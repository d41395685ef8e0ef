//! A journey: one process that changes its set again and again. When a leg has written its state, the process becomes
//! `godwit-state next` (`GODWIT_STATE_NEXT`, `isa/ABI.md`), which reads here where to go and becomes the next leg. All
//! that the kernel keeps for a process stays: its number, descriptors, locks, signals that wait.
//!
//! The plan lies beside the state, since nothing else passes from one leg to the next.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result};
use godwit_isa_state::Set;
use serde::{Deserialize, Serialize};

use crate::leg::Request;
use crate::values;

/// The plan's name, in the state's directory.
const PLAN: &str = "journey";

/// How long a leg is, at most or exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Length {
    Polls(u64),
    Microseconds(u64),
}

/// Where a journey goes, and how far it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Journey {
    /// With its directory: the program may change its own.
    pub(crate) program: PathBuf,
    /// The names of the sets, in turn.
    sets: Vec<String>,
    length: Length,
    /// With it, a leg is of any length up to `length`.
    seed: Option<u64>,
    /// How often it has changed the set.
    pub(crate) changes: u64,
}

impl Journey {
    pub(crate) fn new(program: PathBuf, sets: &[Set], length: Length, seed: Option<u64>) -> Self {
        let sets = sets.iter().map(|set| set.name().to_owned()).collect();
        Self { program, sets, length, seed, changes: 0 }
    }

    /// Reads the plan beside a state.
    pub(crate) fn read(state: &Path) -> Result<Self> {
        let path = state.with_file_name(PLAN);
        let text =
            fs::read(&path).with_context(|| format!("cannot read the journey's plan {}", path.display()))?;
        serde_json::from_slice(&text)
            .with_context(|| format!("the journey's plan {} is damaged", path.display()))
    }

    /// Writes it, so that a reader finds the old one or the new one.
    pub(crate) fn write(&self, state: &Path) -> Result<()> {
        let path = state.with_file_name(PLAN);
        let part = path.with_extension("part");
        fs::write(&part, serde_json::to_vec(self)?)
            .and_then(|()| fs::rename(&part, &path))
            .with_context(|| format!("cannot write the journey's plan {}", path.display()))
    }

    /// The set of the leg that comes now.
    pub(crate) fn set(&self) -> Result<Set> {
        let count = u64::try_from(self.sets.len())?;
        let turn =
            self.changes.checked_rem(count).context("the journey's plan does not name an instruction set")?;
        values::set(&self.sets[usize::try_from(turn)?]).map_err(anyhow::Error::msg)
    }

    /// When the leg that comes now is to end.
    pub(crate) fn request(&self) -> Request {
        let drawn = |most: u64| match self.seed {
            // Each leg has its own number, so that a leg is the same however it was come to.
            Some(seed) => fastrand::Rng::with_seed(seed ^ self.changes.rotate_left(32)).u64(1..=most.max(1)),
            None => most,
        };
        match self.length {
            Length::Polls(most) => Request::Polls(drawn(most)),
            Length::Microseconds(most) => Request::Time(Duration::from_micros(drawn(most))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_read_as_it_was_written_and_goes_through_the_sets_in_turn() {
        let directory = tempfile::tempdir().expect("a directory");
        let state = directory.path().join("state");
        let mut journey =
            Journey::new("/a/program".into(), &[Set::Aarch64, Set::X86_64], Length::Polls(10), Some(7));
        let mut lengths = Vec::new();
        for leg in 0..20 {
            journey.changes = leg;
            journey.write(&state).expect("there is room");
            let read = Journey::read(&state).expect("it was written");
            assert_eq!(read, journey);
            let expected = if leg % 2 == 0 { Set::Aarch64 } else { Set::X86_64 };
            assert_eq!(read.set().expect("a set"), expected);
            let Request::Polls(polls) = read.request() else { panic!("polls were asked for") };
            assert!((1..=10).contains(&polls), "{polls}");
            lengths.push(polls);
        }
        lengths.dedup();
        assert!(lengths.len() > 5, "{lengths:?} should differ");
    }
}
