//! The guard: a process beside the pager that keeps what must not close when the pager is killed.
//!
//! ```text
//! pager ──┬── one table of open files ──┬── guard, asleep
//!         └── userfaultfds, lock, … ────┘
//! ```
//! When the last descriptor of a userfaultfd closes, the kernel gives the process behind it zeros in place of the pages
//! that it lacks. The guard shares the pager's table of files (clone(2), `CLONE_FILES`), so a pager that is killed closes
//! nothing. The guard then closes all but the userfaultfds, so that the pager's peers see that it is gone, and holds
//! these: processes that touch a page that they lack wait, until the daemon has killed them and ends the guard
//! ([`end`](super::end())). If the daemon does not, the guard ends when the processes are gone.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{Pid, getpid};

use super::uffd::{Uffd, Unreadable};
use super::{GUARD, PagerError};
use crate::process::pidfd;

/// Between two checks whether the processes live: the kernel has no event for the end of an address space, and nothing
/// waits for the guard's end.
const INTERVAL: Duration = Duration::from_secs(1);

/// A guard that sleeps as long as this process lives. Unless it is [let go](Self::let_go), it holds the
/// userfaultfds when this process ends.
#[derive(Debug)]
pub struct Guard {
    pid: Pid,
    /// In the table of files that both have. Its destructor would unlock it: keep the guard, or let it go.
    lock: Flock<File>,
}

impl Guard {
    /// Starts a guard for this process, which must have a single thread. It holds a lock (flock) on
    /// `directory/guard.lock`, which contains its PID, as the pager does on its own.
    pub fn start(directory: &Path) -> Result<Self, PagerError> {
        let system = |action| move |source| PagerError::System { action, source };
        let mut lock = super::server::take_lock(directory, GUARD)?;
        let guarded =
            pidfd(getpid().as_raw()).map_err(|errno| system("open a handle of itself")(errno.into()))?;
        let flags = libc::c_long::from(libc::CLONE_FILES | libc::SIGCHLD);
        // SAFETY: without CLONE_VM this is fork(2), in a process with one thread; the child shares
        // nothing but the table of files.
        match Errno::result(unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) }) {
            Ok(0) => stand_by(&guarded, &lock),
            Ok(pid) => {
                // Before anybody can look for it.
                let path = directory.join(GUARD);
                lock.set_len(0)
                    .and_then(|()| writeln!(lock, "{pid}"))
                    .map_err(|source| PagerError::File { action: "write", path, source })?;
                // The guard's from here on, in the table that both have.
                std::mem::forget(guarded);
                let pid = i32::try_from(pid).map_err(|_| system("start its guard")(Errno::ERANGE.into()))?;
                Ok(Self { pid: Pid::from_raw(pid), lock })
            }
            Err(errno) => Err(system("start its guard")(errno.into())),
        }
    }

    /// Ends the guard and frees its lock: what this process has open closes with it.
    pub fn let_go(self) {
        // A guard that has ended already is as good.
        let _ = kill(self.pid, Signal::SIGKILL);
        let _ = waitpid(self.pid, None);
        drop(self.lock);
    }
}

/// Returns when the process behind the descriptor has ended.
pub(super) fn wait(pidfd: &OwnedFd) -> io::Result<()> {
    let mut ended = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
    loop {
        match poll(&mut ended, PollTimeout::NONE) {
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// The guard's life.
fn stand_by(guarded: &OwnedFd, lock: &File) -> ! {
    // SAFETY: the name is a string that lives; only this thread's name changes.
    let _ = unsafe { libc::prctl(libc::PR_SET_NAME, c"godwit-guard".as_ptr()) };
    if wait(guarded).is_err() {
        // A guard that does not know its time is none.
        std::process::exit(1);
    }
    // Whoever fails from here on holds what there is.
    let gone = close_others(lock.as_raw_fd()).and_then(until_gone);
    if gone.is_ok() {
        std::process::exit(0);
    }
    loop {
        std::thread::park();
    }
}

/// Returns when there is no process left behind any of these.
fn until_gone(mut held: Vec<Uffd>) -> io::Result<()> {
    let unreadable = Unreadable::new()?;
    loop {
        held.retain(|uffd| !uffd.has_ended(&unreadable));
        if held.is_empty() {
            return Ok(());
        }
        std::thread::sleep(INTERVAL);
    }
}

/// Closes all but the userfaultfds, which are returned, and one other.
fn close_others(keep: RawFd) -> io::Result<Vec<Uffd>> {
    let entries = std::fs::read_dir("/proc/self/fd")?;
    let mut held = Vec::new();
    // The list is complete before any is closed: that of the directory is among them.
    let all: Vec<(RawFd, bool)> = entries
        .flatten()
        .filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            let target = std::fs::read_link(entry.path()).ok()?;
            Some((number, target.to_string_lossy().contains("[userfaultfd]")))
        })
        .collect();
    for (number, is_userfaultfd) in all {
        if is_userfaultfd {
            // SAFETY: the pager, whose it was, is gone, and the table is this process's own now.
            held.push(Uffd::held(unsafe { OwnedFd::from_raw_fd(number) }));
        } else if number != keep {
            // SAFETY: this process does nothing with them any more, and its table is its own now.
            let _ = unsafe { libc::close(number) };
        }
    }
    Ok(held)
}
