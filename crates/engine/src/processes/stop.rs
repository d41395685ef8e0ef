//! By which signal a process is stopped, and stopping it again by that one.
//!
//! A shell, or whoever waits with WUNTRACED, sees whether its child was stopped by SIGSTOP or by SIGTSTP (the
//! terminal's ^Z), SIGTTIN or SIGTTOU. A restore stops all processes by SIGSTOP, and a freezer of version 1 takes
//! them out of their stop for the dump. So before the freeze the signals are asked for, by ptrace(2), which a
//! stopped process and its parent do not notice, and noted in a file that goes along with the images:
//!
//! ```text
//! source: ask, note ─▶ freeze … dump ─▶ destination: restore ─▶ freeze, SIGCONT, the signal, thaw
//! ```
//!
//! A stop signal takes back a SIGCONT that nobody has seen. So no instruction of the process runs in
//! between, and no handler.

use std::collections::HashMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::process::ProcessStatus;
use crate::container::ContainerConfig;

/// The file, beside the container and beside the images: a list of pairs of PID (in the container's PID namespace)
/// and number of the signal. Those that are not in it are stopped by SIGSTOP.
pub(crate) const FILE: &str = "stop-signals.json";

/// Most bytes that such a file may have: a hundred thousand processes.
const FILE_LIMIT: u64 = 2 << 20;

/// How long a process that was stopped may take to show it, when it has gone on meanwhile: it needs a processor for that.
const ASK_LIMIT: Duration = Duration::from_secs(1);

/// Between two looks; the wait for one thread of another process has no event.
const ASK_LOOK: Duration = Duration::from_micros(200);

/// The signals by which processes of a container are stopped, as far as it is not SIGSTOP.
#[derive(Debug)]
pub(crate) struct StopSignals {
    path: PathBuf,
}

impl StopSignals {
    pub(crate) fn of(config: &ContainerConfig) -> Self {
        Self { path: config.directory.join(FILE) }
    }

    /// Those that were noted beside images.
    pub(crate) fn beside(images: &Path) -> Self {
        Self { path: images.join(FILE) }
    }

    pub(crate) fn note(&self, signals: &HashMap<u32, Signal>) -> io::Result<()> {
        if signals.is_empty() {
            return self.forget();
        }
        let pairs: Vec<(u32, i32)> = signals.iter().map(|(pid, signal)| (*pid, *signal as i32)).collect();
        std::fs::write(&self.path, serde_json::to_vec(&pairs)?)
    }

    pub(crate) fn forget(&self) -> io::Result<()> {
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// By PID in the container's PID namespace. What is no signal of a terminal is passed over.
    pub(crate) fn noted(&self) -> io::Result<HashMap<u32, Signal>> {
        match std::fs::metadata(&self.path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(HashMap::new()),
            Err(error) => return Err(error),
            Ok(found) if found.len() > FILE_LIMIT => return Err(io::Error::other("it is too long")),
            Ok(_) => {}
        }
        let pairs: Vec<(u32, i32)> = serde_json::from_slice(&std::fs::read(&self.path)?)?;
        let known = |(pid, number): (u32, i32)| Some((pid, Signal::try_from(number).ok()?));
        Ok(pairs.into_iter().filter_map(known).filter(|(_, signal)| is_of_terminal(*signal)).collect())
    }
}

fn is_of_terminal(signal: Signal) -> bool {
    matches!(signal, Signal::SIGTSTP | Signal::SIGTTIN | Signal::SIGTTOU)
}

/// Asks by which signals of a terminal these processes are stopped. Their cgroup must not be frozen.
pub(crate) fn ask(stopped: Vec<ProcessStatus>) -> HashMap<u32, Signal> {
    if stopped.is_empty() {
        return HashMap::new();
    }
    // The kernel knows a tracer by its thread. When this one ends, it lets go of whatever it still holds.
    let asking = thread::Builder::new().name("godwit-stopped".into()).spawn(move || {
        let one = |status: &ProcessStatus| Some((status.inner_pid, signal_of(status.pid)?));
        stopped.iter().filter_map(one).filter(|(_, signal)| is_of_terminal(*signal)).collect()
    });
    asking.ok().and_then(|asking| asking.join().ok()).unwrap_or_default()
}

/// The signal by which a process is stopped; none if it is not, or cannot be asked.
fn signal_of(pid: u32) -> Option<Signal> {
    let pid = Pid::from_raw(i32::try_from(pid).ok()?);
    ptrace::seize(pid, ptrace::Options::empty()).ok()?;
    let begun = Instant::now();
    let mut was_interrupted = false;
    while begun.elapsed() < ASK_LIMIT {
        match waitpid(pid, Some(WaitPidFlag::__WALL | WaitPidFlag::WNOHANG)).ok()? {
            // It is in a stop, by this signal; SIGTRAP tells of the interruption below.
            WaitStatus::PtraceEvent(_, signal, _) => {
                ptrace::detach(pid, None).ok()?;
                return (signal != Signal::SIGTRAP).then_some(signal);
            }
            // It has gone on, and this is for it.
            WaitStatus::Stopped(_, signal) => {
                ptrace::detach(pid, signal).ok()?;
                return None;
            }
            WaitStatus::StillAlive => {
                if !was_interrupted {
                    ptrace::interrupt(pid).ok()?;
                    was_interrupted = true;
                }
                thread::sleep(ASK_LOOK);
            }
            _ => return None,
        }
    }
    None
}

/// Whether this signal, sent now, stops the process: its default action does, unless the process group is
/// orphaned (setpgid(2)), which the kernel spares.
pub(crate) fn stops(signal: Signal, status: &ProcessStatus, all: &[ProcessStatus]) -> bool {
    let has_default = status.not_default & (1 << (signal as i32 - 1)) == 0;
    let is_watched = |member: &ProcessStatus| {
        let parent = all.iter().find(|other| other.pid == member.parent);
        parent.is_some_and(|parent| parent.group != member.group && parent.session == member.session)
    };
    has_default
        && all.iter().any(|member| member.group == status.group && member.state != 'Z' && is_watched(member))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command};

    use nix::sys::signal::kill;

    use super::super::process;
    use super::*;

    fn state(pid: u32) -> char {
        process::statuses([pid]).unwrap().first().map_or('-', |status| status.state)
    }

    fn wait_until(pid: u32, wanted: char) {
        while state(pid) != wanted {
            thread::yield_now();
        }
    }

    /// A child in a process group of its own, stopped.
    fn stopped(signal: Signal) -> Child {
        let child = Command::new("sleep").arg("1000").process_group(0).spawn().unwrap();
        wait_until(child.id(), 'S');
        kill(Pid::from_raw(child.id().cast_signed()), signal).unwrap();
        wait_until(child.id(), 'T');
        child
    }

    #[test]
    fn the_signal_is_told_and_nobody_notices() {
        let mut children = [Signal::SIGTSTP, Signal::SIGTTIN, Signal::SIGSTOP].map(stopped);
        let pid = |child: &Child| Pid::from_raw(child.id().cast_signed());
        let look = Some(WaitPidFlag::WUNTRACED | WaitPidFlag::WNOHANG);
        // The first one's parent has taken note of its stop, the others' have not.
        assert_eq!(
            waitpid(pid(&children[0]), look).unwrap(),
            WaitStatus::Stopped(pid(&children[0]), Signal::SIGTSTP)
        );
        let asked = ask(process::statuses(children.iter().map(Child::id)).unwrap());
        let [tstp, ttin, _] = [0, 1, 2].map(|at: usize| children[at].id());
        assert_eq!(asked, HashMap::from([(tstp, Signal::SIGTSTP), (ttin, Signal::SIGTTIN)]));
        children.iter().for_each(|child| wait_until(child.id(), 'T'));
        assert_eq!(waitpid(pid(&children[0]), look).unwrap(), WaitStatus::StillAlive);
        assert_eq!(
            waitpid(pid(&children[1]), look).unwrap(),
            WaitStatus::Stopped(pid(&children[1]), Signal::SIGTTIN)
        );
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    #[test]
    fn a_process_that_runs_goes_on() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        wait_until(child.id(), 'S');
        assert_eq!(ask(process::statuses([child.id()]).unwrap()), HashMap::new());
        wait_until(child.id(), 'S');
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_signal_stops_who_has_its_default_action_and_a_parent_that_watches() {
        let process = |pid, parent, group, session, not_default| ProcessStatus {
            pid,
            parent,
            inner_pid: pid,
            tracer: 0,
            state: 'T',
            anonymous_bytes: 0,
            shared_bytes: 0,
            group,
            session,
            not_default,
        };
        // A shell, its job of two processes, one with a handler for SIGTSTP, and a daemon.
        let all = [
            process(1, 0, 1, 1, 0),
            process(2, 1, 2, 1, 0),
            process(3, 2, 2, 1, 0),
            process(4, 1, 4, 1, 1 << 19),
            process(5, 1, 5, 5, 0),
        ];
        let stopping: Vec<_> = all.iter().map(|status| stops(Signal::SIGTSTP, status, &all)).collect();
        assert_eq!(stopping, [false, true, true, false, false]);
        assert!(stops(Signal::SIGTTIN, &all[3], &all));
    }

    #[test]
    fn a_note_is_read_as_it_was_written_and_a_strange_one_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let note = StopSignals::beside(directory.path());
        assert_eq!(note.noted().unwrap(), HashMap::new());
        let signals = HashMap::from([(7, Signal::SIGTSTP), (9, Signal::SIGTTOU)]);
        note.note(&signals).unwrap();
        assert_eq!(note.noted().unwrap(), signals);
        note.note(&HashMap::new()).unwrap();
        assert_eq!(note.noted().unwrap(), HashMap::new());
        std::fs::write(&note.path, "[[1,9],[2,20],[3,1000],[4,-1]]").unwrap();
        assert_eq!(note.noted().unwrap(), HashMap::from([(2, Signal::SIGTSTP)]));
        std::fs::write(&note.path, "[[1]]").unwrap();
        assert!(note.noted().is_err());
    }
}
