//! The processes of a lab: finding them by what they use, and ending them.

use std::{
    collections::{HashMap, HashSet},
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{Pid, PidfdFlags, Signal, WaitOptions, pidfd_open, pidfd_send_signal, waitpid},
};

use crate::{error::LabError, netns};

/// One process; the start time tells it from a later one with the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Process {
    pub(crate) pid: i32,
    /// Clock ticks since boot, field 22 of proc_pid_stat(5).
    pub(crate) start_time: u64,
}

impl Process {
    /// The process that has this pid now.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        stat(pid).map(|stat| Self { pid, start_time: stat.start_time })
    }

    /// Whether it is there and has not ended (a zombie has).
    pub(crate) fn is_running(self) -> bool {
        stat(self.pid).is_some_and(|stat| stat.start_time == self.start_time && !stat.ended)
    }

    /// Takes it off the process table if it has ended and is a child of ours.
    pub(crate) fn reap(self) {
        let ended = stat(self.pid).is_some_and(|stat| stat.start_time == self.start_time && stat.ended);
        if let Some(pid) = Pid::from_raw(self.pid).filter(|_| ended) {
            // Nobody's child but its parent's: an error says that it is not ours.
            let _ = waitpid(Some(pid), WaitOptions::NOHANG);
        }
    }

    pub(crate) fn command(self) -> String {
        fs::read_to_string(format!("/proc/{}/comm", self.pid)).unwrap_or_default().trim().to_owned()
    }
}

struct Stat {
    ended: bool,
    parent: i32,
    start_time: u64,
}

fn stat(pid: i32) -> Option<Stat> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name may hold blanks and parentheses: the fields begin after the last one.
    let mut fields = text.get(text.rfind(')')? + 2..)?.split(' ');
    let ended = matches!(fields.next()?, "Z" | "X");
    let parent = fields.next()?.parse().ok()?;
    let start_time = fields.nth(17)?.parse().ok()?;
    Some(Stat { ended, parent, start_time })
}

/// All pids there are.
fn all() -> Vec<i32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// This process and those it descends from: a lab never ends the shell that takes it down.
fn own_line() -> HashSet<i32> {
    let mut line = HashSet::new();
    let mut pid = i32::try_from(std::process::id()).unwrap_or(0);
    while pid > 0 && line.insert(pid) {
        pid = stat(pid).map_or(0, |stat| stat.parent);
    }
    line
}

/// What makes a process one of a lab's.
#[derive(Debug, Default)]
pub(crate) struct Belonging {
    /// Device and inode of network namespaces.
    pub(crate) namespaces: HashSet<(u64, u64)>,
    /// Path below a cgroup hierarchy's root.
    pub(crate) cgroup: PathBuf,
    /// Programs that the lab started.
    pub(crate) recorded: Vec<Process>,
}

impl Belonging {
    /// The running processes that belong, but for this one and its ancestors.
    pub(crate) fn find(&self) -> Vec<Process> {
        let spared = own_line();
        all()
            .into_iter()
            .filter(|pid| !spared.contains(pid))
            .filter_map(Process::of)
            .filter(|process| process.is_running() && self.holds(*process))
            .collect()
    }

    fn holds(&self, process: Process) -> bool {
        self.recorded.contains(&process)
            || netns::identity(Path::new(&format!("/proc/{}/ns/net", process.pid)))
                .is_some_and(|identity| self.namespaces.contains(&identity))
            || (!self.cgroup.as_os_str().is_empty()
                && cgroups(process.pid).any(|path| path.starts_with(&self.cgroup)))
    }
}

/// Paths of a process's cgroups, one for each hierarchy, without the leading slash.
fn cgroups(pid: i32) -> impl Iterator<Item = PathBuf> {
    let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap_or_default();
    let paths: HashSet<PathBuf> = text
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2))
        .map(|path| PathBuf::from(path.trim_start_matches('/')))
        .collect();
    paths.into_iter()
}

/// Kills processes and waits until all have ended; returns those that had not after `patience`.
///
/// `before_waiting` runs once all have been signalled: frozen tasks die only when thawed.
pub(crate) fn kill_all(
    processes: &[Process],
    patience: Duration,
    before_waiting: impl FnOnce(),
) -> Vec<Process> {
    let deadline = Instant::now() + patience;
    let mut open = HashMap::new();
    for process in processes {
        let Some(pid) = Pid::from_raw(process.pid) else { continue };
        let Ok(pidfd) = pidfd_open(pid, PidfdFlags::empty()) else { continue };
        // The pid may have gone to another between the search and the opening.
        if process.is_running() && pidfd_send_signal(&pidfd, Signal::KILL).is_ok() {
            open.insert(*process, pidfd);
        }
    }
    before_waiting();
    let mut left = Vec::new();
    for (process, pidfd) in open {
        let remaining = deadline.saturating_duration_since(Instant::now());
        let timeout = Timespec {
            tv_sec: i64::try_from(remaining.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(remaining.subsec_nanos()),
        };
        // A pidfd becomes readable when the process has ended. An interrupted poll counts as one look.
        let ready = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&timeout));
        if !matches!(ready, Ok(n) if n > 0) && process.is_running() {
            left.push(process);
        } else {
            process.reap();
        }
    }
    left
}

/// [`kill_all`] for one process, where surviving is an error.
pub(crate) fn kill(lab: &str, process: Process, patience: Duration) -> Result<(), LabError> {
    match kill_all(&[process], patience, || {}).first() {
        None => Ok(()),
        Some(left) => Err(unkillable(lab, *left, patience)),
    }
}

pub(crate) fn unkillable(lab: &str, process: Process, patience: Duration) -> LabError {
    LabError::Unkillable {
        lab: lab.to_owned(),
        pid: process.pid,
        command: process.command(),
        seconds: patience.as_secs(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::zombie_processes)] // one child is reaped by what is tested
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_killed_child_is_gone_and_reaped() {
        let child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = Process::of(i32::try_from(child.id()).unwrap()).unwrap();
        assert!(process.is_running());
        assert!(kill_all(&[process], Duration::from_secs(5), || {}).is_empty());
        assert!(!Path::new(&format!("/proc/{}", process.pid)).exists());
    }

    #[test]
    fn a_reused_pid_is_not_killed() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut process = Process::of(i32::try_from(child.id()).unwrap()).unwrap();
        process.start_time -= 1;
        assert!(kill_all(&[process], Duration::from_secs(5), || {}).is_empty());
        assert!(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn own_ancestors_are_spared() {
        let own = i32::try_from(std::process::id()).unwrap();
        let parent = i32::try_from(std::os::unix::process::parent_id()).unwrap();
        assert!(own_line().contains(&own) && own_line().contains(&parent));
        let everything = Belonging {
            namespaces: netns::identity(Path::new("/proc/self/ns/net")).into_iter().collect(),
            ..Belonging::default()
        };
        assert!(everything.find().iter().all(|process| process.pid != own && process.pid != parent));
    }
}
