//! Processes to look at.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

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

    /// Forks a child that has a child of its own, which runs this; it ends as its own child ends, or with
    /// 100 and the signal that ended that. A tracer that is the parent of what it traces sees what no other
    /// does, so this keeps them apart. Gives the PID of the child's child too.
    pub(crate) fn with_child(run: impl FnOnce() -> i32) -> (Self, i32) {
        Self::watching(run, |_| ())
    }

    /// The same, and each change of state of the child's child is told: its stops, that it goes on, its end.
    pub(crate) fn watching(run: impl FnOnce() -> i32, tell: impl Fn(i32)) -> (Self, i32) {
        let (read, write) = pipe();
        let child = Self::fork(|| {
            // SAFETY: plain system calls, with variables of ours. A group whose parents are all outside of
            // its session could not be stopped by SIGTSTP.
            unsafe {
                libc::setsid();
                let pid = libc::fork();
                if pid == 0 {
                    libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
                    libc::setpgid(0, 0);
                    libc::_exit(run());
                }
                libc::setpgid(pid, pid);
                libc::write(write.as_raw_fd(), (&raw const pid).cast(), 4);
                let mut status = 0;
                loop {
                    if libc::waitpid(pid, &raw mut status, libc::WUNTRACED | libc::WCONTINUED) != pid {
                        return 99;
                    }
                    tell(status);
                    if libc::WIFEXITED(status) {
                        return libc::WEXITSTATUS(status);
                    }
                    if libc::WIFSIGNALED(status) {
                        return 100 + libc::WTERMSIG(status);
                    }
                }
            }
        });
        let mut pid = [0; 4];
        nix::unistd::read(&read, &mut pid).expect("the PID of the child's child");
        (child, i32::from_ne_bytes(pid))
    }

    /// How it ended.
    pub(crate) fn wait(&mut self) -> WaitStatus {
        let status = waitpid(Pid::from_raw(self.pid), None).expect("it is our child");
        self.reaped = true;
        status
    }

    /// Its exit code, if it has ended; that of a signal is its number and 100.
    pub(crate) fn try_wait(&mut self) -> Option<i32> {
        let status = waitpid(Pid::from_raw(self.pid), Some(WaitPidFlag::WNOHANG)).expect("it is our child");
        self.reaped = status != WaitStatus::StillAlive;
        match status {
            WaitStatus::Exited(_, code) => Some(code),
            WaitStatus::Signaled(_, signal, _) => Some(100 + signal as i32),
            _ => None,
        }
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
        sleeps_in(self.pid, number);
    }

    /// Waits until it sleeps there again after a stop, or has ended. Some calls are restart_syscall(2) then.
    pub(crate) fn sleeps_again_in(&self, number: i64) {
        eventually("it sleeps in the call again", || match state(self.pid) {
            Some('S') => [number, libc::SYS_restart_syscall].map(Some).contains(&call_of(self.pid)),
            state => state == Some('Z'),
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

/// Waits until this process or thread sleeps in this system call.
pub(crate) fn sleeps_in(pid: i32, number: i64) {
    eventually("it sleeps in the call", || call_of(pid) == Some(number) && state(pid) == Some('S'));
}

/// The number of the system call that it is in, if it does not run.
fn call_of(pid: i32) -> Option<i64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/syscall")).ok()?;
    text.split_whitespace().next()?.parse().ok()
}

/// Starts a thread of a child. It runs this function on a stack of its own, and shares everything else with
/// the child, also what libc keeps for each thread: it must make nothing but system calls.
pub(crate) fn start_thread<T>(stack: &mut [u128], run: extern "C" fn(*mut T) -> i32, with: *mut T) -> i32 {
    extern "C" fn begin<T>(with: *mut libc::c_void) -> i32 {
        // SAFETY: made below.
        let (run, with) = unsafe { *with.cast::<(extern "C" fn(*mut T) -> i32, *mut T)>() };
        run(with)
    }
    let flags = libc::CLONE_VM
        | libc::CLONE_THREAD
        | libc::CLONE_SIGHAND
        | libc::CLONE_FILES
        | libc::CLONE_FS
        | libc::CLONE_SYSVSEM;
    let range = stack.as_mut_ptr_range();
    // SAFETY: the stack is the thread's from here on; what it begins with lies at its lower end.
    unsafe {
        range.start.cast::<(extern "C" fn(*mut T) -> i32, *mut T)>().write((run, with));
        libc::clone(begin::<T>, range.end.cast(), flags, range.start.cast())
    }
}

/// A page that this process and those it forks share.
pub(crate) struct Shared {
    start: *mut u8,
}

impl Shared {
    /// Within the first 2 GiB, where 32-bit code can be, and executable.
    pub(crate) fn new() -> Self {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        #[cfg(target_arch = "x86_64")]
        let flags = flags | libc::MAP_32BIT;
        let access = libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC;
        // SAFETY: a new mapping, which no reference points to.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, -1, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Self { start: start.cast() }
    }

    pub(crate) fn address(&self) -> *mut u8 {
        self.start
    }

    pub(crate) fn get(&self, at: usize) -> u8 {
        assert!(at < 4096);
        // SAFETY: within the mapping, to which there are no references.
        unsafe { self.start.add(at).read_volatile() }
    }

    pub(crate) fn set(&self, at: usize, value: u8) {
        assert!(at < 4096);
        // SAFETY: as above.
        unsafe { self.start.add(at).write_volatile(value) };
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's and nothing points to it any more.
        unsafe { libc::munmap(self.start.cast(), 4096) };
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
