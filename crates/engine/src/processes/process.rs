//! Processes as `/proc` shows them, and their ends as events.

use std::io;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::watch::watch;

/// What `/proc/PID/status` says of a process. `godwit-criu` has a parser of its own, which leaves a process out that lacks a
/// field; here the field is empty then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessStatus {
    /// In the node's PID namespace.
    pub(crate) pid: u32,
    /// Parent, in the node's PID namespace.
    pub(crate) parent: u32,
    /// PID in the innermost PID namespace it is in.
    pub(crate) inner_pid: u32,
    /// Who traces it; 0 for nobody.
    pub(crate) tracer: u32,
    /// State letter: R, S, D, T (stopped), t (traced), Z.
    pub(crate) state: char,
    /// Anonymous memory in bytes, also what is swapped out and what it shares with its parent since a fork.
    pub(crate) anonymous_bytes: u64,
    /// Shared resident memory in bytes.
    pub(crate) shared_bytes: u64,
    /// Process group, in the innermost PID namespace.
    pub(crate) group: u32,
    /// Session, in the innermost PID namespace.
    pub(crate) session: u32,
    /// The signals that its main thread blocks or ignores, or that it has handlers for: bit 0 is signal 1.
    pub(crate) not_default: u64,
}

/// Reads the status of those of these processes that are there.
///
/// # Errors
/// It cannot be read of one that is there.
pub(crate) fn statuses(pids: impl IntoIterator<Item = u32>) -> io::Result<Vec<ProcessStatus>> {
    let mut statuses = Vec::new();
    for pid in pids {
        match std::fs::read_to_string(format!("/proc/{pid}/status")) {
            Ok(text) => statuses.push(parse_status(pid, &text)),
            Err(error)
                if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(statuses)
}

fn parse_status(pid: u32, text: &str) -> ProcessStatus {
    let field = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::trim)).unwrap_or("")
    };
    let number = |text: &str| text.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    let id = |text: &str| u32::try_from(number(text)).unwrap_or(0);
    let innermost = |name: &str| field(name).split_whitespace().last().map_or(0, id);
    let signals = |name: &str| u64::from_str_radix(field(name), 16).unwrap_or(0);
    ProcessStatus {
        pid,
        parent: id(field("PPid")),
        inner_pid: field("NSpid").split_whitespace().last().map_or(pid, id),
        tracer: id(field("TracerPid")),
        state: field("State").chars().next().unwrap_or('?'),
        anonymous_bytes: (number(field("RssAnon")).saturating_add(number(field("VmSwap"))))
            .saturating_mul(1024),
        shared_bytes: number(field("RssShmem")).saturating_mul(1024),
        group: innermost("NSpgid"),
        session: innermost("NSsid"),
        not_default: signals("SigBlk") | signals("SigIgn") | signals("SigCgt"),
    }
}

/// Bytes that processes need where nothing is shared since a fork, as after a move; `charged` is what their cgroup
/// has for memory that they share with each other, and for all else.
pub(crate) fn unshared_bytes(statuses: &[ProcessStatus], charged: u64) -> u64 {
    let sum = |bytes: fn(&ProcessStatus) -> u64| statuses.iter().map(bytes).fold(0, u64::saturating_add);
    let (anonymous, shared) = (sum(|status| status.anonymous_bytes), sum(|status| status.shared_bytes));
    anonymous.saturating_add(shared.min(charged)).max(charged)
}

/// Where threads of a frozen process sleep in the kernel, as far as that matters to CRIU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Sleeping {
    /// One waits in vfork(2) for its child.
    pub(crate) in_vfork: bool,
    /// The process is stopped by a signal. Inside of a frozen v1 cgroup its state letter does not tell.
    pub(crate) stopped: bool,
}

impl Sleeping {
    pub(crate) fn of(pid: u32) -> Self {
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let place = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("wchan"));
        threads.filter_map(|thread| place(thread).ok()).fold(Self::default(), |found, function| Self {
            // Nothing else sleeps there. The compiler may have put the second into the first.
            in_vfork: found.in_vfork || function == "kernel_clone" || function == "wait_for_vfork_done",
            stopped: found.stopped || function == "do_signal_stop",
        })
    }
}

/// Whether a tracer waits for a process that cannot come, because its cgroup is frozen while it is
/// stopped; see `Processes::freeze`.
pub(crate) fn waits_to_attach(tracer: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{tracer}/wchan")).is_ok_and(|function| function == "ptrace_attach")
}

/// Whether the process that began at this time (clock ticks since boot) lives.
pub(crate) fn lives(pid: u32, start: u64) -> bool {
    let Ok(text) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    parse_stat(&text).is_some_and(|(state, began)| began == start && !"ZX".contains(state))
}

/// When a process began, in clock ticks since boot; none when it is gone.
pub(crate) fn start_time(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_stat(&text).map(|(_, start)| start)
}

/// The parent of a process; none when it is gone.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    Some(statuses([pid]).ok()?.first()?.parent)
}

/// State letter and start time of `/proc/PID/stat`: the fields 3 and 22. The name before them may
/// contain anything.
fn parse_stat(text: &str) -> Option<(char, u64)> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?.chars().next()?;
    Some((state, fields.nth(18)?.parse().ok()?))
}

/// The name of a process's program, at most 15 bytes; none when it is gone.
pub(crate) fn command_name(pid: u32) -> Option<String> {
    Some(std::fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim_end().to_owned())
}

/// A handle of a process that stays its own when the PID is used again.
#[derive(Debug)]
pub(crate) struct Handle {
    pid: Pid,
    fd: AsyncFd<OwnedFd>,
}

impl Handle {
    /// Opens the process; none when it is gone.
    pub(crate) fn open(pid: u32) -> io::Result<Option<Self>> {
        let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
        match rustix::process::pidfd_open(pid, PidfdFlags::NONBLOCK) {
            Ok(fd) => Ok(Some(Self { pid, fd: watch(fd, Interest::READABLE)? })),
            Err(rustix::io::Errno::SRCH) => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Resolves when the process has ended, reaped or not.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        self.fd.readable().await.map(|_| ())
    }

    /// Sends SIGKILL; no error when the process has ended.
    pub(crate) fn kill(&self) -> io::Result<()> {
        self.send(Signal::KILL)
    }

    /// Sends a signal; no error when the process has ended.
    pub(crate) fn send(&self, signal: Signal) -> io::Result<()> {
        match rustix::process::pidfd_send_signal(self.fd.get_ref(), signal) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

impl Handle {
    /// Sends SIGKILL to the process, which must lead a process group, and to its group.
    pub(crate) fn kill_group(&self) -> io::Result<()> {
        match rustix::process::kill_process_group(self.pid, Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }
}

/// Kills a child when it is dropped: nobody waits any more for what it does.
pub(crate) struct KilledOnDrop(Option<Handle>);

impl KilledOnDrop {
    /// For a child that its owner has not waited for; where that cannot be, the child has ended.
    pub(crate) fn new(child: &mut std::process::Child) -> io::Result<Self> {
        match Handle::open(child.id()) {
            Ok(handle) => Ok(Self(handle)),
            Err(error) => {
                child.kill()?;
                child.wait()?;
                Err(error)
            }
        }
    }
}

impl Drop for KilledOnDrop {
    fn drop(&mut self) {
        if let Some(Err(error)) = self.0.as_ref().map(Handle::kill) {
            tracing::warn!(%error, "a program that is not wanted any more cannot be ended");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[tokio::test]
    async fn a_child_that_nobody_wants_any_more_ends() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        drop(KilledOnDrop::new(&mut child).unwrap());
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_status_is_read_field_by_field() {
        let text = "Name:\tx\nState:\tT (stopped)\nPid:\t70\nPPid:\t60\nTracerPid:\t5\nNSpid:\t70\t7\n\
                    NSpgid:\t69\t6\nNSsid:\t65\t1\nSigBlk:\t01\nSigIgn:\t10\nSigCgt:\t8000000000000000\n\
                    VmSwap:\t 2 kB\nRssAnon:\t      12 kB\nRssFile:\t 900 kB\nRssShmem:\t       4 kB\n";
        let status = parse_status(70, text);
        let expected = ProcessStatus {
            pid: 70,
            parent: 60,
            inner_pid: 7,
            tracer: 5,
            state: 'T',
            anonymous_bytes: 14 * 1024,
            shared_bytes: 4 * 1024,
            group: 6,
            session: 1,
            not_default: 0x8000_0000_0000_0011,
        };
        assert_eq!(status, expected);
    }

    #[test]
    fn memory_shared_since_a_fork_is_needed_by_each_and_shared_memory_once() {
        let of = |anonymous_bytes, shared_bytes| ProcessStatus {
            anonymous_bytes,
            shared_bytes,
            ..parse_status(1, "State:\tS (sleeping)\n")
        };
        // A parent and two children with its 100 bytes, which are charged once.
        assert_eq!(unshared_bytes(&[of(100, 0), of(100, 0), of(100, 0)], 130), 300);
        // Three that have the same 80 bytes of shared memory.
        assert_eq!(unshared_bytes(&[of(10, 80), of(10, 80), of(10, 80)], 110), 140);
        // What is charged is needed, whatever it is.
        assert_eq!(unshared_bytes(&[of(10, 0)], 500), 500);
    }

    #[test]
    fn processes_that_are_gone_have_no_status_and_others_do() {
        let own = std::process::id();
        let statuses = statuses([own, u32::MAX]).unwrap();
        assert_eq!(statuses.iter().map(|status| status.pid).collect::<Vec<_>>(), [own]);
    }

    #[test]
    fn a_process_is_told_from_a_later_one_with_its_pid() {
        let text = std::fs::read_to_string("/proc/self/stat").unwrap();
        let (_, start) = parse_stat(&text).unwrap();
        assert!(lives(std::process::id(), start));
        assert!(!lives(std::process::id(), start + 1));
        let odd = format!("7 (a) b ) Z 1{} 99 0", " 0".repeat(17));
        assert_eq!(parse_stat(&odd), Some(('Z', 99)));
    }

    #[tokio::test]
    async fn a_killed_process_is_seen_to_end() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let handle = Handle::open(child.id()).unwrap().unwrap();
        handle.kill().unwrap();
        handle.ended().await.unwrap();
        child.wait().unwrap();
        assert!(Handle::open(child.id()).unwrap().is_none());
    }
}
