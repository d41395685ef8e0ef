//! Processes to look at.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Held by tests that take all of the machine, and by those that measure time.
pub(crate) fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: std::sync::Mutex<()> = std::sync::Mutex::new(());
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A forked child that is killed with the test.
pub(crate) struct Child {
    pub(crate) pid: i32,
    reaped: bool,
}

impl Child {
    /// Forks a child that runs this, which must not allocate, and ends with what it returns.
    pub(crate) fn fork(run: impl FnOnce() -> i32) -> Self {
        // SAFETY: the child only makes system calls and uses memory it has, as the callers promise.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            // SAFETY: plain system calls.
            unsafe {
                libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                libc::_exit(run())
            }
        }
        assert!(pid > 0, "fork: {}", io::Error::last_os_error());
        Self { pid, reaped: false }
    }

    /// How it ended.
    pub(crate) fn wait(&mut self) -> WaitStatus {
        let status = waitpid(Pid::from_raw(self.pid), None).expect("it is our child");
        self.reaped = true;
        status
    }

    /// Asserts that it ended with 0: a child says what failed by its exit code.
    pub(crate) fn succeeds(&mut self) {
        assert_eq!(self.wait(), WaitStatus::Exited(Pid::from_raw(self.pid), 0));
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid), signal).expect("it lives");
    }

    /// Waits until it sleeps in this system call.
    pub(crate) fn sleeps_in(&self, number: i64) {
        eventually("the child sleeps in the call", || {
            let text = std::fs::read_to_string(format!("/proc/{}/syscall", self.pid)).unwrap_or_default();
            text.split_whitespace().next() == Some(&number.to_string()) && state(self.pid) == Some('S')
        });
    }

    /// Stops it and waits until it is.
    pub(crate) fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let status = waitpid(Pid::from_raw(self.pid), Some(WaitPidFlag::WUNTRACED));
        assert!(matches!(status, Ok(WaitStatus::Stopped(..))), "{status:?}");
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        if !self.reaped {
            let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
            let _ = waitpid(Pid::from_raw(self.pid), None);
        }
    }
}

pub(crate) fn state(pid: i32) -> Option<char> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Waits for what the kernel has no event for.
pub(crate) fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < Duration::from_secs(20), "not so after 20 s: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A pipe: its reading and its writing end.
pub(crate) fn pipe() -> (OwnedFd, OwnedFd) {
    nix::unistd::pipe().expect("a pipe")
}

/// Writes one byte.
pub(crate) fn poke(fd: &OwnedFd) {
    // SAFETY: the buffer has one byte.
    assert_eq!(unsafe { libc::write(fd.as_raw_fd(), [7_u8].as_ptr().cast(), 1) }, 1);
}

/// Reads one byte; whether there was one.
pub(crate) fn read_byte(fd: &OwnedFd) -> bool {
    let mut byte = 0_u8;
    // SAFETY: the buffer has one byte.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut byte).cast(), 1) == 1 }
}
