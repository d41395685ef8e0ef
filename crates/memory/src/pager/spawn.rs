//! Starting a pager, finding out whether one lives, and ending it whatever it does.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use rustix::process::{Signal, pidfd_send_signal};

use super::guard::wait;
use super::{GUARD, LOCK, PagerError};
use crate::process::pidfd;

/// How long a pager may take from its lock to its number in there.
const STARTING: Duration = Duration::from_secs(1);

/// Most that is read of the pager's status line.
const STATUS_LIMIT: u64 = 4096;

/// Starts the program `binary` for `directory`, which must exist, and waits until it can be connected
/// to. It is not a child of the caller, and outlives it. It holds `max_bytes` of pages at most and logs to `log`.
pub fn spawn(binary: &Path, directory: &Path, max_bytes: u64, log: &Path) -> Result<(), PagerError> {
    let failed = |reason: String| PagerError::Start { binary: binary.to_owned(), reason };
    let mut child = Command::new(binary)
        .arg("--dir")
        .arg(directory)
        .arg("--max-bytes")
        .arg(max_bytes.to_string())
        .arg("--log")
        .arg(log)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| failed(error.to_string()))?;
    // It forks: its first process ends at once, the second closes the pipe after the status line.
    let mut status = String::new();
    let read = match child.stdout.take() {
        Some(stdout) => stdout.take(STATUS_LIMIT).read_to_string(&mut status),
        None => Ok(0),
    };
    let ended = child.wait().map_err(|error| failed(error.to_string()))?;
    read.map_err(|error| failed(error.to_string()))?;
    match status.trim() {
        "ready" => Ok(()),
        "" => Err(failed(format!("it ended without a word ({ended})"))),
        reason => Err(failed(reason.trim_start_matches("error: ").to_owned())),
    }
}

/// The PID of the pager that lives in the directory, if one does; 0 while it is starting.
pub fn running(directory: &Path) -> Result<Option<u32>, PagerError> {
    holder(directory, LOCK)
}

/// The PID of the process that holds a lock of the directory, if one does.
fn holder(directory: &Path, lock: &str) -> Result<Option<u32>, PagerError> {
    let path = directory.join(lock);
    let failed = |action| {
        let path = path.clone();
        move |source: io::Error| PagerError::File { action, path, source }
    };
    let mut file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed("open")(error)),
    };
    let mut pid = String::new();
    file.read_to_string(&mut pid).map_err(failed("read"))?;
    match Flock::lock(file, FlockArg::LockSharedNonblock) {
        Ok(_) => Ok(None),
        Err((_, Errno::EWOULDBLOCK)) => Ok(Some(pid.trim().parse().unwrap_or(0))),
        Err((_, errno)) => Err(failed("lock")(errno.into())),
    }
}

/// Kills the pager that lives in the directory and its guard, if they do, and returns when they have
/// ended. Processes that lack pages must be gone.
pub fn end(directory: &Path) -> Result<(), PagerError> {
    end_holder(directory, LOCK)?;
    end_holder(directory, GUARD)
}

fn end_holder(directory: &Path, lock: &str) -> Result<(), PagerError> {
    let failed = |source| PagerError::File { action: "end the pager of", path: directory.into(), source };
    let mut there = holder(directory, lock)?;
    let begun = Instant::now();
    while there == Some(0) && begun.elapsed() < STARTING {
        // It has the lock and is about to say who it is.
        std::thread::sleep(Duration::from_millis(1));
        there = holder(directory, lock)?;
    }
    let Some(there) = there else { return Ok(()) };
    let pidfd = match pidfd(i32::try_from(there).map_err(|_| failed(Errno::EINVAL.into()))?) {
        Ok(pidfd) => pidfd,
        Err(Errno::ESRCH) => return Ok(()),
        Err(errno) => return Err(failed(errno.into())),
    };
    // Still the same: then the number was not given to another process before it was opened.
    if holder(directory, lock)? != Some(there) {
        return Ok(());
    }
    match pidfd_send_signal(&pidfd, Signal::KILL) {
        Ok(()) => wait(&pidfd).map_err(failed),
        Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(errno) => Err(failed(errno.into())),
    }
}
