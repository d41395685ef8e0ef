//! godwit-shim: the parent of one container. It outlives the daemon.
//!
//! ```text
//! daemon ──starts──▶ godwit-shim ──▶ runc run -d | restore -d      (ends)
//!    ▲  status line      │  ▲              └──▶ container's main process, orphaned by runc,
//!    └───────────────────┘  │                   then a child of the shim (subreaper)
//!                           └─ stdout, stderr pipes ─▶ container.log
//! ```
//!
//! `godwit-shim --dir D --lock-fd N --log FILE [--log-max-bytes N] [--without-huge-pages] -- PROGRAM ARGS…`
//!
//! The program is the engine's command that makes the container and ends; it must be told to write
//! the main process's PID to `D/init.pid`. Before it starts it, the shim writes `D/streams.json`
//! with the names of the container's output pipes, `["pipe:[N]","pipe:[N]"]`. It answers on its
//! standard output with one JSON line, `{"pid":N}` or `{"error":"…"}`, and closes it. It then copies
//! the container's output into the log, reaps what becomes its child, and when the main process has
//! ended writes `D/exit.json` = `{"code":N,"time_ns":N}` and ends.
//!
//! On SIGUSR1 it writes all that it has of the output into the log, the beginning of a line too, and then
//! a byte into the FIFO `D/log.settled`, if somebody has that open. This completes the log of a frozen
//! container before it moves.
//!
//! While it lives it holds a lock (flock) on `D/shim.lock`, which contains its PID: a free lock means
//! that no shim runs. The file is never removed. The daemon takes the lock and hands it over as an open
//! descriptor, so that a shim never runs without the lock.
//!
//! `godwit-shim --cover EMPTY ROOT PATH…` is a hook of the engine: see [`cover`]. So is
//! `godwit-shim --same ROOT DEVICE:INODE:PATH…`: see [`same`].
//!
//! One thread, one poll loop, no runtime: there is one of these per container.

mod cover;
mod log;
mod pump;
mod same;
mod supervise;

use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::process::ExitCode;

use nix::unistd::{ForkResult, fork, setsid};

/// Size at which the log is rotated unless told otherwise: 16 MiB, so 32 MiB with the old one.
const LOG_MAX_BYTES: u64 = 16 << 20;

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    /// Directory of the container: lock, PID file, exit record.
    directory: PathBuf,
    /// The descriptor of the lock file, which is locked.
    lock_fd: RawFd,
    /// The log.
    log: PathBuf,
    /// Size at which the log is rotated, in bytes.
    log_max_bytes: u64,
    /// Whether the command and all that it starts do without transparent huge pages: for a restore whose
    /// memory is filled later.
    without_huge_pages: bool,
    /// The engine's command.
    command: Vec<OsString>,
}

fn main() -> ExitCode {
    let words: Vec<_> = std::env::args_os().skip(1).collect();
    if let [verb, empty, root, paths @ ..] = words.as_slice()
        && verb == "--cover"
    {
        return match cover::cover(empty.as_ref(), root.as_ref(), paths) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("godwit-shim: {reason}");
                ExitCode::FAILURE
            }
        };
    }
    if let [verb, root, wanted @ ..] = words.as_slice()
        && verb == "--same"
    {
        return match same::same(root.as_ref(), wanted) {
            Ok(()) => ExitCode::SUCCESS,
            Err(reason) => {
                eprintln!("godwit-shim: {reason}");
                ExitCode::FAILURE
            }
        };
    }
    let arguments = match parse(words.into_iter()) {
        Ok(arguments) => arguments,
        Err(reason) => {
            eprintln!("godwit-shim: {reason}; it is started by godwitd, not by hand");
            return ExitCode::from(2);
        }
    };
    // SAFETY: the process has one thread.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { .. }) => return ExitCode::SUCCESS,
        Ok(ForkResult::Child) => {}
        Err(errno) => {
            supervise::report_error(&format!("the shim cannot fork: {errno}"));
            return ExitCode::FAILURE;
        }
    }
    // Fails only for a leader of a process group, which a forked child is not.
    let _ = setsid();
    match supervise::supervise(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            supervise::report_error(&reason);
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Arguments, String> {
    let (mut directory, mut lock_fd, mut log, mut log_max_bytes) = (None, None, None, LOG_MAX_BYTES);
    let mut without_huge_pages = false;
    while let Some(word) = words.next() {
        let name = word.to_string_lossy().into_owned();
        if name == "--" {
            let command: Vec<_> = words.collect();
            if command.is_empty() {
                return Err("there is no command after --".into());
            }
            return Ok(Arguments {
                directory: directory.ok_or("--dir is missing")?,
                lock_fd: lock_fd.ok_or("--lock-fd is missing")?,
                log: log.ok_or("--log is missing")?,
                log_max_bytes,
                without_huge_pages,
                command,
            });
        }
        if name == "--without-huge-pages" {
            without_huge_pages = true;
            continue;
        }
        let value = words.next().ok_or(format!("{name} has no value"))?;
        match name.as_str() {
            "--dir" => directory = Some(value.into()),
            "--lock-fd" => {
                // 0 to 2 are the standard streams.
                let number = value.to_str().and_then(|v| v.parse().ok()).filter(|&fd| fd > 2);
                lock_fd = Some(number.ok_or("--lock-fd is not the number of a descriptor")?);
            }
            "--log" => log = Some(value.into()),
            "--log-max-bytes" => {
                log_max_bytes = value
                    .to_str()
                    .and_then(|v| v.parse().ok())
                    .ok_or("--log-max-bytes is not a number of bytes")?;
            }
            _ => return Err(format!("{name} is not an option")),
        }
    }
    Err("-- and a command are missing".into())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse_words(line: &str) -> Result<Arguments, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn everything_after_the_dashes_is_the_command() {
        let arguments =
            parse_words("--dir /d --lock-fd 3 --log /l --log-max-bytes 9 -- runc --log x -- y").unwrap();
        assert_eq!(arguments.directory, PathBuf::from("/d"));
        assert_eq!(arguments.log_max_bytes, 9);
        assert!(!arguments.without_huge_pages);
        assert_eq!(arguments.command, ["runc", "--log", "x", "--", "y"]);
    }

    #[test]
    fn huge_pages_are_left_out_where_that_is_asked_for() {
        let arguments = parse_words("--dir /d --lock-fd 3 --without-huge-pages --log /l -- runc").unwrap();
        assert!(arguments.without_huge_pages);
        assert_eq!(arguments.log, PathBuf::from("/l"));
    }

    #[test]
    fn a_command_line_without_a_part_is_refused() {
        for line in ["", "--dir /d -- runc", "--dir /d --log /l", "--dir /d --log /l --", "--what 1 -- runc"]
        {
            assert!(parse_words(line).is_err(), "{line}");
        }
    }
}
