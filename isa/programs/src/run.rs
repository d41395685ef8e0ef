//! Running an executable with a time limit, to its end and that of the processes that it left.

use std::io::Read;
use std::os::unix::process::ExitStatusExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

/// An executable and what stands before it.
#[derive(Debug, Clone)]
pub struct Executable {
    /// The file.
    pub path: PathBuf,
    /// An emulator, `env NAME=VALUE`, or nothing.
    pub runner: Vec<String>,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It ended by itself.
    Ended {
        /// Exit status, or 128 and the number of the signal that killed it.
        status: i32,
        /// All of its standard output.
        output: Vec<u8>,
        /// All of its standard error.
        errors: Vec<u8>,
    },
    /// It was killed at the limit.
    TimedOut,
}

impl Outcome {
    /// Whether both ended, with the same status and the same output.
    #[must_use]
    pub fn same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Ended { status: a, output: x, .. }, Self::Ended { status: b, output: y, .. }) => {
                a == b && x == y
            }
            _ => false,
        }
    }

    /// One line for a report: the status, what it complained of, and the first line in which `other` differs.
    #[must_use]
    pub fn difference(&self, other: &Self) -> String {
        let (Self::Ended { status, output, errors }, Self::Ended { output: expected, status: right, .. }) =
            (self, other)
        else {
            return "ran into the time limit".to_owned();
        };
        let mut found = output.split(|&byte| byte == b'\n');
        let mut wanted = expected.split(|&byte| byte == b'\n');
        let line = loop {
            match (found.next(), wanted.next()) {
                (None, None) => break "no line differs".to_owned(),
                (a, b) if a == b => {}
                (a, b) => {
                    let show = |line: Option<&[u8]>| {
                        line.map_or_else(
                            || "the end".to_owned(),
                            |line| String::from_utf8_lossy(line).into_owned(),
                        )
                    };
                    break format!("\"{}\" instead of \"{}\"", show(a), show(b));
                }
            }
        };
        format!("status {status} instead of {right}, {line}; {}", String::from_utf8_lossy(errors).trim())
    }
}

impl Executable {
    /// Runs it with `arguments`; after `limit` it is killed.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn run(&self, arguments: &[&str], limit: Duration) -> Result<Outcome> {
        self.timed(arguments, limit).map(|(outcome, _)| outcome)
    }

    /// As [`Self::run`], with the time of the whole process.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn timed(&self, arguments: &[&str], limit: Duration) -> Result<(Outcome, Duration)> {
        // A program may hang in its own signal handlers: KILL, by a process that watches only this one.
        let mut command = Command::new("timeout");
        command.args(["--signal=KILL", &limit.as_secs_f64().to_string()]);
        command.args(&self.runner).arg(&self.path).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let start = Instant::now();
        let ended = output_of_group(&mut command);
        let (status, output, errors) =
            ended.with_context(|| format!("cannot run {}", self.path.display()))?;
        let time = start.elapsed();
        let status = status.code().or_else(|| status.signal().map(|signal| 128 + signal)).unwrap_or(-1);
        if status == 128 + 9 && time >= limit {
            return Ok((Outcome::TimedOut, time));
        }
        Ok((Outcome::Ended { status, output, errors }, time))
    }
}

/// How timeout(1), which leads a process group of its own, and so its program ended, with all output. A program that
/// was captured leaves its children alone, and they hold the pipes: they end with it.
fn output_of_group(command: &mut Command) -> Result<(ExitStatus, Vec<u8>, Vec<u8>)> {
    let mut child = command.spawn()?;
    let output = reader(child.stdout.take().context("it has no output")?);
    let errors = reader(child.stderr.take().context("it has no errors")?);
    let leader = Pid::from_child(&child);
    // It is not reaped yet, so the number is still that of its group.
    waitid(WaitId::Pid(leader), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT)?;
    kill_process_group(leader, Signal::KILL)?;
    let status = child.wait()?;
    let text = |reader: JoinHandle<std::io::Result<Vec<u8>>>| {
        reader.join().map_err(|_| anyhow!("its output could not be read"))?.map_err(anyhow::Error::from)
    };
    Ok((status, text(output)?, text(errors)?))
}

fn reader(mut from: impl Read + Send + 'static) -> JoinHandle<std::io::Result<Vec<u8>>> {
    thread::spawn(move || {
        let mut text = Vec::new();
        from.read_to_end(&mut text).map(|_| text)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell() -> Executable {
        Executable { path: "/bin/sh".into(), runner: Vec::new() }
    }

    #[test]
    fn status_and_output_are_those_of_the_program() {
        let outcome = shell().run(&["-c", "echo here; exit 3"], Duration::from_secs(60)).expect("it runs");
        assert_eq!(outcome, Outcome::Ended { status: 3, output: b"here\n".to_vec(), errors: Vec::new() });
    }

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let outcome =
            shell().run(&["-c", "while :; do :; done"], Duration::from_millis(100)).expect("it runs");
        assert_eq!(outcome, Outcome::TimedOut);
        assert!(!outcome.same(&outcome), "two runs that did not end say nothing");
    }

    #[test]
    fn children_that_a_program_leaves_end_with_it() {
        // It holds the pipes, so this lasts as long as the child.
        let outcome =
            shell().run(&["-c", "sleep 10000 & echo here"], Duration::from_secs(60)).expect("it runs");
        assert_eq!(outcome, Outcome::Ended { status: 0, output: b"here\n".to_vec(), errors: Vec::new() });
    }

    #[test]
    fn the_first_line_that_differs_is_named() {
        let ended = |output: &str| Outcome::Ended { status: 0, output: output.into(), errors: Vec::new() };
        assert!(ended("a\nb\n").same(&ended("a\nb\n")));
        let text = ended("a\nb\nc").difference(&ended("a\nx\nc"));
        assert!(text.contains("\"b\" instead of \"x\""), "{text}");
        let text = ended("a").difference(&ended("a\nmore"));
        assert!(text.contains("\"the end\" instead of \"more\""), "{text}");
    }
}
