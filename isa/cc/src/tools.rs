//! Running other programs: LLVM's tools, mostly.

use std::ffi::{OsStr, OsString};
use std::process::{Command, ExitCode, ExitStatus, Stdio};

/// A tool that could not be used.
#[derive(Debug, thiserror::Error)]
pub enum ToolError {
    /// The program is not there or does not start.
    #[error("cannot run {program}: {source}; scripts/setup --isa installs the compiler")]
    Start {
        /// The program's name.
        program: String,
        /// Why.
        source: std::io::Error,
    },
    /// It ran and failed, and has said why on standard error.
    #[error("{program} failed ({status}) while {doing}; its own words are above")]
    Failed {
        /// The program's name.
        program: String,
        /// How it ended.
        status: ExitStatus,
        /// What it was to do.
        doing: String,
    },
}

/// Runs a program in the place of this one: its output is ours, and its exit code too.
///
/// # Errors
/// When it does not start.
pub fn pass_on(program: &str, arguments: &[OsString]) -> Result<ExitCode, ToolError> {
    let status = Command::new(program)
        .args(arguments)
        .status()
        .map_err(|source| ToolError::Start { program: program.to_owned(), source })?;
    Ok(exit_code(status))
}

/// The exit code of a child as one's own; 1 for one that a signal ended.
#[must_use]
pub fn exit_code(status: ExitStatus) -> ExitCode {
    status.code().and_then(|code| u8::try_from(code).ok()).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// Runs a command whose failure ends what we do.
///
/// # Errors
/// When it does not start, or fails.
pub fn check(command: &mut Command, doing: &str) -> Result<(), ToolError> {
    let program = name_of(command.get_program());
    let status = command.status().map_err(|source| ToolError::Start { program: program.clone(), source })?;
    if status.success() {
        return Ok(());
    }
    Err(ToolError::Failed { program, status, doing: doing.to_owned() })
}

/// The same, for a command that writes lines on standard error that nobody wants to see.
///
/// # Errors
/// When it does not start, or fails.
pub fn check_quietly(
    command: &mut Command,
    doing: &str,
    left_out: impl Fn(&str) -> bool,
) -> Result<(), ToolError> {
    let program = name_of(command.get_program());
    let output = command
        .stdout(Stdio::inherit())
        .output()
        .map_err(|source| ToolError::Start { program: program.clone(), source })?;
    for line in String::from_utf8_lossy(&output.stderr).lines().filter(|line| !left_out(line)) {
        eprintln!("{line}");
    }
    if output.status.success() {
        return Ok(());
    }
    Err(ToolError::Failed { program, status: output.status, doing: doing.to_owned() })
}

/// The same, and gives what it wrote to standard output.
///
/// # Errors
/// When it does not start, or fails.
pub fn output(command: &mut Command, doing: &str) -> Result<Vec<u8>, ToolError> {
    let program = name_of(command.get_program());
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| ToolError::Start { program: program.clone(), source })?;
    if output.status.success() {
        return Ok(output.stdout);
    }
    Err(ToolError::Failed { program, status: output.status, doing: doing.to_owned() })
}

fn name_of(program: &OsStr) -> String {
    program.to_string_lossy().into_owned()
}
