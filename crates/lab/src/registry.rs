//! What a lab writes down about itself: its configuration, and the pid of each program it started.
//!
//! ```text
//!   /var/lib/godwit/labs/<lab>/lab.json        the configuration, and whether `up` came to its end
//!   /run/godwit/labs/<lab>/pids/<role>         "<pid> <start time>" of one program
//! ```
//!
//! Nothing depends on these files alone: taking down also looks for what is not written here.

use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};

use crate::{
    config::{LabConfig, Paths},
    error::{Context, LabError},
    process::Process,
};

/// The content of `lab.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    /// 1; a reader refuses others.
    pub(crate) version: u32,
    pub(crate) config: LabConfig,
    /// False until `up` has done everything.
    pub(crate) complete: bool,
}

const VERSION: u32 = 1;

impl Record {
    pub(crate) fn new(config: &LabConfig) -> Self {
        Self { version: VERSION, config: config.clone(), complete: false }
    }

    pub(crate) fn write(&self, paths: &Paths) -> Result<(), LabError> {
        let path = paths.registry();
        let text =
            serde_json::to_vec_pretty(self).map_err(io::Error::other).context("writing", path.display())?;
        write_whole(&path, &text).context("writing", path.display())
    }

    /// None when there is no readable record.
    pub(crate) fn read(paths: &Paths) -> Option<Self> {
        let record: Self = serde_json::from_slice(&fs::read(paths.registry()).ok()?).ok()?;
        (record.version == VERSION).then_some(record)
    }
}

/// Replaces a file in one step.
fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let mut file = File::create(&temporary)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&temporary, path)
}

/// Remembers a program that the lab started.
pub(crate) fn record_process(paths: &Paths, role: &str, process: &Process) -> Result<(), LabError> {
    let directory = paths.pids();
    fs::create_dir_all(&directory).context("creating", directory.display())?;
    let path = directory.join(role);
    write_whole(&path, format!("{} {}\n", process.pid, process.start_time).as_bytes())
        .context("writing", path.display())
}

/// The program of a role, if it still runs.
pub(crate) fn process(paths: &Paths, role: &str) -> Option<Process> {
    recorded(&paths.pids().join(role)).filter(|process| process.is_running())
}

/// All recorded programs that still run.
pub(crate) fn processes(paths: &Paths) -> Vec<Process> {
    all_recorded(paths).into_iter().filter(|process| process.is_running()).collect()
}

/// Takes those among our own children that have ended off the process table.
pub(crate) fn reap(paths: &Paths) {
    all_recorded(paths).into_iter().for_each(Process::reap);
}

fn all_recorded(paths: &Paths) -> Vec<Process> {
    let entries = fs::read_dir(paths.pids()).into_iter().flatten().flatten();
    entries.filter_map(|entry| recorded(&entry.path())).collect()
}

fn recorded(path: &Path) -> Option<Process> {
    let text = fs::read_to_string(path).ok()?;
    let (pid, start_time) = text.trim().split_once(' ')?;
    Some(Process { pid: pid.parse().ok()?, start_time: start_time.parse().ok()? })
}

/// Held while a lab is being changed; goes with the process that holds it.
#[derive(Debug)]
pub(crate) struct Lock {
    directory: File,
}

impl Drop for Lock {
    /// And not by closing it: a program that another thread is just starting has a copy of the descriptor for a moment,
    /// which would hold the lock as long.
    fn drop(&mut self) {
        let _ = rustix::fs::flock(&self.directory, FlockOperation::Unlock);
    }
}

impl Lock {
    /// Locks a lab's state directory; none if the directory is not there.
    pub(crate) fn take(paths: &Paths, name: &str) -> Result<Option<Self>, LabError> {
        let state = paths.state();
        let directory = match File::open(&state) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.context("opening", state.display())?,
        };
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(LabError::Busy(name.to_owned())),
            other => other.context("locking", state.display())?,
        }
        // Somebody may have removed it, or made it anew, between the opening and the locking.
        let held = directory.metadata().context("reading", state.display())?;
        match fs::metadata(&state) {
            Ok(now) if (now.dev(), now.ino()) == (held.dev(), held.ino()) => Ok(Some(Self { directory })),
            Ok(_) => Err(LabError::Busy(name.to_owned())),
            Err(_) => Ok(None),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_ends_with_its_holder_though_a_program_that_is_being_started_has_its_descriptor() {
        let state = tempfile::tempdir().unwrap();
        let open = || File::open(state.path()).unwrap();
        let lock = Lock { directory: open() };
        let is_free = || rustix::fs::flock(open(), FlockOperation::NonBlockingLockExclusive).is_ok();
        rustix::fs::flock(&lock.directory, FlockOperation::NonBlockingLockExclusive).unwrap();
        let copy = lock.directory.try_clone().unwrap();
        assert!(!is_free());
        drop(lock);
        assert!(is_free());
        drop(copy);
    }
}
