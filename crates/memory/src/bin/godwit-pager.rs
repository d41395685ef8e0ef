//! godwit-pager: holds the memory of one arriving service, and fills it into the restored processes.
//! It outlives the daemon.
//!
//! `godwit-pager --dir DIR --max-bytes N [--log FILE]`
//!
//! `godwit-pager fill` is something else: the process to which shared memory of an arriving service is charged, which ends
//! with its standard input (`godwit_memory::shared::Filler`).
//!
//! It puts itself into the background and answers on its standard output with one line, `ready` or
//! `error: …`, which it then closes. It listens on `DIR/pager.sock` and, while it lives, holds a
//! lock (flock) on `DIR/pager.lock`, which contains its PID: who finds the lock free knows that
//! there is no pager. See `godwit_memory::pager` for what it does.
//!
//! If it ended by accident, the kernel would let the restored processes go on with zeros in place of
//! the pages that they lack. So it asks to be spared when memory runs out, takes no notice of the
//! signals that end sessions, and after a panic stands still instead of ending: the processes then
//! wait, and the daemon, which gets no answer, can kill them first. When it is killed all the same,
//! its guard makes them wait.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use godwit_memory::causes::error_chain;
use godwit_memory::pager::{Guard, Server};
use godwit_memory::shared::{FILLER, fill};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigHandler, Signal, signal};
use nix::sys::stat::{Mode, umask};
use nix::unistd::{ForkResult, fork, setsid};

/// What the command line asks for.
#[derive(Debug, PartialEq, Eq)]
struct Arguments {
    /// Directory of socket and lock.
    directory: PathBuf,
    /// Most bytes of pages held.
    max_bytes: u64,
    /// Where to log; standard error otherwise.
    log: Option<PathBuf>,
}

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == FILLER) {
        close_inherited();
        return match fill(std::io::stdin().lock(), std::io::stdout()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        };
    }
    let arguments = match parse(std::env::args_os().skip(1)) {
        Ok(arguments) => arguments,
        Err(reason) => {
            eprintln!("godwit-pager: {reason}; it is started by godwitd, not by hand");
            return ExitCode::from(2);
        }
    };
    close_inherited();
    // SAFETY: the process has one thread.
    match unsafe { fork() } {
        Ok(ForkResult::Parent { .. }) => return ExitCode::SUCCESS,
        Ok(ForkResult::Child) => {}
        Err(errno) => {
            report(&format!("error: the pager cannot fork: {errno}"));
            return ExitCode::FAILURE;
        }
    }
    // Fails only for a leader of a process group, which a forked child is not.
    let _ = setsid();
    umask(Mode::from_bits_truncate(0o177));
    for number in [Signal::SIGHUP, Signal::SIGINT, Signal::SIGTERM, Signal::SIGPIPE] {
        // SAFETY: ignoring runs no code. It cannot fail for these signals.
        let _ = unsafe { signal(number, SigHandler::SigIgn) };
    }
    ask_to_be_spared();
    allow_many_files();
    let server = start_log(&arguments).and_then(|()| {
        // First the guard, which must not hold the store's memory when the pager is gone.
        let guard = Guard::start(&arguments.directory).map_err(|error| error_chain(&error))?;
        match Server::bind(&arguments.directory, arguments.max_bytes) {
            Ok(server) => Ok((server, guard)),
            Err(error) => {
                guard.let_go();
                Err(error_chain(&error))
            }
        }
    });
    let (mut server, guard) = match server {
        Ok(server) => server,
        Err(reason) => {
            report(&format!("error: {reason}"));
            return ExitCode::FAILURE;
        }
    };
    stand_still_on_panic();
    report("ready");
    match server.run() {
        Ok(()) => {
            // Before the server's lock is free, which says that the directory can be used again.
            guard.let_go();
            drop(server);
            ExitCode::SUCCESS
        }
        Err(error) => {
            tracing::error!(error = error_chain(&error), "the pager cannot go on");
            stand_still();
        }
    }
}

/// Before anything is opened.
fn close_inherited() {
    // SAFETY: nothing was opened yet; whatever is there was inherited and is nobody's here.
    unsafe {
        libc::close_range(3, libc::c_uint::MAX, 0);
    }
}

fn parse(mut words: impl Iterator<Item = OsString>) -> Result<Arguments, String> {
    let (mut directory, mut max_bytes, mut log) = (None, None, None);
    while let Some(word) = words.next() {
        let name = word.to_string_lossy().into_owned();
        let value = words.next().ok_or(format!("{name} has no value"))?;
        match name.as_str() {
            "--dir" => directory = Some(value.into()),
            "--max-bytes" => {
                let number = value.to_str().and_then(|v| v.parse().ok());
                max_bytes = Some(number.ok_or("--max-bytes is not a number of bytes")?);
            }
            "--log" => log = Some(value.into()),
            _ => return Err(format!("{name} is not an option")),
        }
    }
    Ok(Arguments {
        directory: directory.ok_or("--dir is missing")?,
        max_bytes: max_bytes.ok_or("--max-bytes is missing")?,
        log,
    })
}

/// Writes the status line and closes the standard streams for good, except standard error, which may
/// be the log.
fn report(status: &str) {
    // The daemon may be gone; the pager lives on all the same.
    let _ = writeln!(std::io::stdout(), "{status}");
    if let Ok(null) = File::options().read(true).write(true).open("/dev/null") {
        let _ = nix::unistd::dup2_stdin(&null);
        let _ = nix::unistd::dup2_stdout(&null);
    }
}

fn start_log(arguments: &Arguments) -> Result<(), String> {
    if let Some(path) = &arguments.log {
        let file = File::options()
            .append(true)
            .create(true)
            .open(path)
            .map_err(|error| format!("the log {} cannot be opened: {error}", path.display()))?;
        // A panic's message goes there too.
        nix::unistd::dup2_stderr(&file).map_err(|errno| format!("standard error: {errno}"))?;
    }
    // A line that cannot be written, as on a full disk, is lost; the pages must not be.
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).log_internal_errors(false).init();
    Ok(())
}

/// Asks the kernel to choose others first when memory runs out. Refused without CAP_SYS_RESOURCE.
fn ask_to_be_spared() {
    let _ = std::fs::write("/proc/self/oom_score_adj", "-998");
}

/// Every process that the service forks meanwhile is a descriptor here.
fn allow_many_files() {
    if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
    }
}

fn stand_still_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        stand_still();
    }));
}

fn stand_still() -> ! {
    loop {
        std::thread::park();
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn parse_words(line: &str) -> Result<Arguments, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_command_line_says_where_and_how_much() {
        let arguments = parse_words("--dir /d --max-bytes 4096 --log /l").unwrap();
        assert_eq!(arguments, Arguments { directory: "/d".into(), max_bytes: 4096, log: Some("/l".into()) });
    }

    #[test]
    fn a_command_line_without_a_part_is_refused() {
        for line in ["", "--dir /d", "--max-bytes 1", "--dir", "--dir /d --max-bytes x", "--what 1"] {
            assert!(parse_words(line).is_err(), "{line}");
        }
    }
}
