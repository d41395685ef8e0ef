//! A program of godwit-cc under stress: captured and resumed in place, and sent from one instruction set to the other
//! and back, at random polls and at random times. What it prints must not tell.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use crate::run::{Executable, Outcome};

/// The status of a process that has left a state (`GW_EXIT_CAPTURED`).
const CAPTURED: i32 = 86;
/// About how often a program is captured in a run: each leg of a journey is a process, under emulation every other.
const CAPTURES: u64 = 12;
/// Up to so many polls a program is captured at each of them.
const EVERY_POLL: u64 = 100_000;
/// After so many changes at random times a program is left alone, so that it ends.
const MOST_TIMED_LEGS: u32 = 30;
/// A journey of more legs than this makes no headway.
const MOST_LEGS: u32 = 400;

/// The instruction sets, beginning with this machine's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    X86_64,
    Aarch64,
}

impl Set {
    const THERE_AND_BACK: [Self; 2] = [Self::X86_64, Self::Aarch64];

    fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }
}

/// A program, built for both sets.
#[derive(Debug, Clone)]
pub struct Traveller {
    /// The program without the name of a set: `PROG` of `PROG.x86_64`.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<String>,
    /// How long each of its processes may take.
    pub limit: Duration,
    /// It has something open in the kernel which no state file takes along: it is captured in place only.
    pub stays: bool,
}

/// What was tried.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tried {
    /// How many polls a run meets, to the next power of four.
    pub polls: u64,
    /// How often it went from one process to another in all journeys.
    pub changes: u32,
    /// What came out wrong, a line each.
    pub wrong: Vec<String>,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "some {} polls, {} changes, {} wrong", self.polls, self.changes, self.wrong.len())
    }
}

/// When a leg of a journey ends.
#[derive(Debug, Clone, Copy)]
enum When {
    Polls(u64),
    Microseconds(u64),
    AtTheEnd,
}

impl Traveller {
    /// Runs it in each way there is and holds what it prints against what is `expected`.
    ///
    /// # Errors
    /// When it cannot be started at all.
    pub fn stress(&self, expected: &Outcome, random: &mut fastrand::Rng) -> Result<Tried> {
        let mut tried = Tried::default();
        for set in Set::THERE_AND_BACK {
            tried.note(format!("whole on {}", set.name()), &self.whole(set)?, expected);
        }
        // What is wrong without any move needs no moves to be found.
        if !tried.wrong.is_empty() {
            return Ok(tried);
        }
        tried.polls = self.polls()?;
        let mut turns = vec![(Set::X86_64, between(random, tried.polls / 50))];
        if tried.polls <= EVERY_POLL {
            turns.push((Set::X86_64, 1));
        }
        turns.push((Set::Aarch64, between(random, tried.polls / CAPTURES)));
        for (set, polls) in turns {
            let variable = format!("GODWIT_STATE_TURN={polls}");
            let outcome = self.process(set, &[variable])?;
            tried.note(
                format!("captured in place every {polls} polls on {}", set.name()),
                &outcome,
                expected,
            );
        }

        if self.stays {
            return Ok(tried);
        }
        self.travel(&mut tried, CAPTURES, expected, random)?;

        let (_, time) = self.executable(Set::X86_64, &[]).timed(&self.words(), self.limit)?;
        let most = u64::try_from(time.as_micros()).unwrap_or(u64::MAX) / 2;
        let (outcome, changes) = self.journey(|leg| match leg {
            ..MOST_TIMED_LEGS => When::Microseconds(between(random, most)),
            _ => When::AtTheEnd,
        })?;
        tried.changes += changes;
        tried.note(format!("on a journey of {changes} changes at random times"), &outcome, expected);
        Ok(tried)
    }

    /// Sends it from set to set about `times` times, at random polls.
    ///
    /// # Errors
    /// When it cannot be started at all, or was never captured.
    pub fn travel(
        &self,
        tried: &mut Tried,
        times: u64,
        expected: &Outcome,
        random: &mut fastrand::Rng,
    ) -> Result<()> {
        if tried.polls == 0 {
            tried.polls = self.polls()?;
        }
        // A run meets a quarter of them at least, so that it is captured once at least.
        let most = tried.polls / times.max(4);
        let (outcome, changes) = self.journey(|_| When::Polls(between(random, most)))?;
        tried.changes += changes;
        tried.note(format!("on a journey of {changes} changes at random polls"), &outcome, expected);
        ensure!(
            changes > 0 || tried.polls < 64,
            "{} meets {} polls, but was never captured at one",
            self.program.display(),
            tried.polls
        );
        Ok(())
    }

    fn words(&self) -> Vec<&str> {
        self.arguments.iter().map(String::as_str).collect()
    }

    fn executable(&self, set: Set, variables: &[String]) -> Executable {
        let mut path = self.program.as_os_str().to_owned();
        path.push(format!(".{}", set.name()));
        let mut runner = vec!["env".to_owned()];
        runner.extend_from_slice(variables);
        if set.name() != std::env::consts::ARCH {
            runner.push(format!("qemu-{}-static", set.name()));
        }
        Executable { path: path.into(), runner }
    }

    fn process(&self, set: Set, variables: &[String]) -> Result<Outcome> {
        self.executable(set, variables).run(&self.words(), self.limit)
    }

    fn whole(&self, set: Set) -> Result<Outcome> {
        self.process(set, &[])
    }

    /// How many polls a run meets, by trying how far it gets.
    fn polls(&self) -> Result<u64> {
        let directory = tempfile::tempdir().context("cannot make a directory for a state")?;
        let save = setting("SAVE", directory.path().join("state").display());
        let mut polls = 16;
        while polls < 1 << 40 {
            let outcome = self.process(Set::X86_64, &[save.clone(), setting("POLLS", polls)])?;
            if !is_captured(&outcome) {
                break;
            }
            polls *= 4;
        }
        Ok(polls)
    }

    /// Runs it through the sets in turn; each leg ends as `when` says of it. How it ended, and after how many changes.
    fn journey(&self, mut when: impl FnMut(u32) -> When) -> Result<(Outcome, u32)> {
        let directory = tempfile::tempdir().context("cannot make a directory for a state")?;
        let state = directory.path().join("state");
        let (mut all, mut complaints) = (Vec::new(), Vec::new());
        for (changes, set) in (0..MOST_LEGS).zip(Set::THERE_AND_BACK.into_iter().cycle()) {
            let outcome = self.process(set, &leg(&state, changes, when(changes)))?;
            let captured = is_captured(&outcome);
            let Outcome::Ended { status, output, errors } = outcome else {
                return Ok((Outcome::TimedOut, changes));
            };
            all.extend(output);
            complaints.extend(errors);
            if !captured {
                return Ok((Outcome::Ended { status, output: all, errors: complaints }, changes));
            }
        }
        Ok((Outcome::TimedOut, MOST_LEGS))
    }
}

/// The settings of a leg.
fn leg(state: &Path, changes: u32, when: When) -> Vec<String> {
    let mut variables = Vec::new();
    if changes > 0 {
        variables.push(setting("RESUME", state.display()));
    }
    let request = match when {
        When::Polls(polls) => setting("POLLS", polls),
        When::Microseconds(time) => setting("TIMER", time),
        When::AtTheEnd => return variables,
    };
    variables.extend([setting("SAVE", state.display()), request]);
    variables
}

fn setting(name: &str, value: impl fmt::Display) -> String {
    format!("GODWIT_STATE_{name}={value}")
}

fn is_captured(outcome: &Outcome) -> bool {
    matches!(outcome, Outcome::Ended { status: CAPTURED, .. })
}

fn between(random: &mut fastrand::Rng, most: u64) -> u64 {
    random.u64(1..=most.max(2))
}

impl Tried {
    fn note(&mut self, how: String, found: &Outcome, expected: &Outcome) {
        if !found.same(expected) {
            self.wrong.push(format!("{how}: {}", found.difference(expected)));
        }
    }
}

/// The seed of a test's random choices: `GODWIT_ISA_SEED`, which repeats a run, or a new one.
#[must_use]
pub fn seed() -> u64 {
    let given = std::env::var("GODWIT_ISA_SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or_else(|| fastrand::u64(..))
}
