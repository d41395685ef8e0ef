//! A program's ways to run: in one piece, captured and resumed in place, moving in one process, or left in a file in the
//! middle and gone on with by another process.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};

use crate::tools::program;

/// Exit status of a process that has left a state.
const CAPTURED: i32 = 86;

/// The set of this machine and the other one, which runs under qemu-user.
pub const SETS: [&str; 2] = ["x86_64", "aarch64"];

/// Between two changes of the set: at most so many polls, or so much time (such as 20ms).
#[derive(Debug, Clone, Copy)]
pub enum Every {
    /// Polls.
    Polls(u64),
    /// Time.
    Time(&'static str),
}

/// The executable of a program for a set, without a capture.
///
/// # Errors
/// None; the same form as the others.
pub fn whole(path: &Path, set: &str) -> Result<Command> {
    let mut executable = path.as_os_str().to_owned();
    executable.push(".");
    executable.push(set);
    if set == std::env::consts::ARCH {
        return Ok(Command::new(executable));
    }
    let mut command = Command::new(format!("qemu-{set}-static"));
    command.arg("-0").arg(path).arg(executable);
    Ok(command)
}

/// A program that is captured and resumed in place every so many polls, over an overwritten native stack.
///
/// # Errors
/// None; the same form as the others.
pub fn turning(path: &Path, set: &str, polls: u64) -> Result<Command> {
    let mut command = whole(path, set)?;
    command.env("GODWIT_STATE_TURN", polls.to_string());
    Ok(command)
}

/// A program that changes its set again and again, in one process. Its arguments follow.
///
/// # Errors
/// When godwit-state cannot be built.
pub fn hopping(path: &Path, every: Every, seed: u64) -> Result<Command> {
    let mut command = Command::new(program("godwit-state")?);
    command.args(["--json", "hop", "--seed", &seed.to_string()]);
    match every {
        Every::Polls(polls) => command.args(["--every-polls", &polls.to_string()]),
        Every::Time(time) => command.args(["--every", time]),
    };
    command.arg(path).arg("--");
    Ok(command)
}

/// How often the set was changed, from what [`hopping`] said last on standard error, which is cut off.
///
/// # Errors
/// When it did not say it.
pub fn changes(output: &mut Output) -> Result<u64> {
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let line = said.lines().last().unwrap_or_default();
    let number = line
        .split_once("\"changes\":")
        .map(|(_, rest)| rest.chars().take_while(char::is_ascii_digit).collect::<String>());
    let number = number.with_context(|| format!("godwit-state did not say how it went: {said}"))?;
    output.stderr.truncate(output.stderr.len() - line.len() - 1);
    number.parse().with_context(|| format!("no number of changes in {line}"))
}

/// A program that leaves its state in a file after so many polls and goes on in a new process on the next set, until it
/// ends. What it has open must be files. The output is that of all processes together.
///
/// # Errors
/// When a leg cannot be started, or a state cannot be gone on with.
pub fn through_files(
    path: &Path,
    arguments: &[&OsStr],
    directory: &Path,
    mut polls: impl FnMut() -> u64,
) -> Result<(Output, u64)> {
    let scratch = tempfile::tempdir()?;
    let state: PathBuf = scratch.path().join("state");
    let mut said = Vec::new();
    for (legs, set) in (0..).zip(SETS.iter().cycle()) {
        let mut command = Command::new(program("godwit-state")?);
        let (polls, set) = (polls().to_string(), ["--set", *set]);
        if legs == 0 {
            command.arg("run").arg(path).args(["--after-polls", &polls]).args(set).arg("--state").arg(&state);
            command.arg("--").args(arguments).current_dir(directory);
        } else {
            // From another place: the state brings its own.
            command.arg("resume").arg(&state).arg("--program").arg(path).args(["--after-polls", &polls]);
            command.args(set).current_dir(scratch.path());
        }
        let mut output = command.output().with_context(|| format!("cannot run {command:?}"))?;
        said.extend_from_slice(&output.stdout);
        let left = output.status.code() == Some(CAPTURED);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code().is_some_and(|code| code < 125)
                && (!left || errors.contains("was captured on")),
            "leg {legs} failed with {}: {errors}",
            output.status
        );
        if !left {
            output.stdout = said;
            return Ok((output, legs));
        }
    }
    anyhow::bail!("there are no sets")
}
