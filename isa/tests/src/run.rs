//! Runs a program, leaves it at some poll, and goes on with the executable of another set, until it ends.

use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Context as _, Result, bail, ensure};
use godwit_isa_link::Set;

use crate::build::Program;

/// The status of a process that has left a state (`GW_EXIT_CAPTURED`).
const CAPTURED: i32 = 86;

/// Seconds after which a process that does not end is killed: a hundred times what one takes on a busy machine.
const LONGEST_LEG: &str = "60";

/// What a whole run wrote, and how it ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Standard output of all legs together.
    pub output: Vec<u8>,
    /// The exit status of the last.
    pub status: i32,
}

/// A run that changed the set, and how often.
#[derive(Debug)]
pub struct Journey {
    /// As of a run in one piece.
    pub outcome: Outcome,
    /// The processes it took.
    pub legs: u32,
}

/// The command that runs an executable on this machine: the foreign set under qemu-user.
#[must_use]
pub fn command(program: &Program, set: Set) -> Command {
    let mut command = Command::new("timeout");
    command.args(["--signal=KILL", LONGEST_LEG]);
    if Set::native() != Some(set) {
        command.arg(format!("qemu-{}-static", set.name()));
    }
    command.arg(program.executable(set));
    command
}

/// Runs a program in one piece.
///
/// # Errors
/// When it cannot be started or is killed.
pub fn whole(program: &Program, set: Set) -> Result<Outcome> {
    finish(&mut command(program, set))
}

/// Runs a program that captures and resumes in place every `polls` polls, over an overwritten native stack.
///
/// # Errors
/// When it cannot be started or is killed.
pub fn turning(program: &Program, set: Set, polls: u64) -> Result<Outcome> {
    finish(command(program, set).env("GODWIT_STATE_TURN", polls.to_string()))
}

fn finish(command: &mut Command) -> Result<Outcome> {
    let output = start(command)?;
    let status = output.status.code().with_context(|| describe("was killed", &output))?;
    ensure!(status != CAPTURED, "{}", describe("left a state that nobody asked for", &output));
    Ok(Outcome { output: output.stdout, status })
}

/// Runs a program through `sets` in turn, leaving each after as many polls as `polls` says for the leg, until it ends.
///
/// # Errors
/// When a leg fails, with what it said.
pub fn journey(program: &Program, sets: &[Set], mut polls: impl FnMut(u32) -> u64) -> Result<Journey> {
    let state = program.directory.path().join(format!("state-{}", fastrand::u64(..)));
    let mut output = Vec::new();
    for (legs, &set) in (1..).zip(sets.iter().cycle()) {
        let mut command = command(program, set);
        command.env("GODWIT_STATE_SAVE", &state).env("GODWIT_STATE_POLLS", polls(legs).to_string());
        if legs > 1 {
            command.env("GODWIT_STATE_RESUME", &state);
        }
        let leg = start(&mut command)?;
        output.extend_from_slice(&leg.stdout);
        match leg.status.code() {
            Some(CAPTURED) => {
                ensure!(state.exists(), "leg {legs} says that it left a state, but there is none")
            }
            Some(status) => {
                ensure!(leg.stderr.is_empty(), "{}", describe(&format!("complained in leg {legs}"), &leg));
                if legs > 1 {
                    remove(&state)?;
                }
                return Ok(Journey { outcome: Outcome { output, status }, legs });
            }
            None => bail!("{}", describe(&format!("was killed in leg {legs} on {}", set.name()), &leg)),
        }
    }
    bail!("no sets to run on")
}

fn remove(path: &Path) -> Result<()> {
    std::fs::remove_file(path).with_context(|| format!("cannot remove {}", path.display()))
}

fn start(command: &mut Command) -> Result<Output> {
    command.output().with_context(|| format!("cannot run {}", command.get_program().to_string_lossy()))
}

fn describe(what: &str, output: &Output) -> String {
    format!("the program {what} ({}): {}", output.status, String::from_utf8_lossy(&output.stderr))
}
