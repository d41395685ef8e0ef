//! A tree of processes in a freezer of its own: started, frozen, killed, reaped.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

/// What the new process shall be, in its environment.
pub(crate) const ROLE: &str = "GODWIT_LAZY_SUBJECT";

pub(crate) struct Tree {
    pub(crate) pid: u32,
    pub(crate) freezer: PathBuf,
    unified: bool,
}

impl Tree {
    /// Starts this program again in a role, and returns when it has stopped itself and been told to
    /// go on. Its output goes to a file in the directory.
    pub(crate) fn start(role: &str, directory: &Path) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        // A restored process has the PIDs that it had. With the kernel's 32,768 they come round within seconds on a busy
        // machine; this is what systemd sets.
        fs::write("/proc/sys/kernel/pid_max", "4194304").unwrap();
        // SAFETY: a call without pointers. What is orphaned here is reaped here.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) };
        let unified = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
        let base = if unified { "/sys/fs/cgroup" } else { "/sys/fs/cgroup/freezer" };
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let freezer = Path::new(base).join(format!("godwit-lazy-{}-{number}", std::process::id()));
        fs::create_dir(&freezer).unwrap();
        let members = freezer.join("cgroup.procs");
        let output = fs::File::create(directory.join("output")).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "subject", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("RUST_BACKTRACE", "0")
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(output.try_clone().unwrap())
            .stderr(output);
        let signals = crate::subject::signals();
        // SAFETY: the program has a single thread here; only a file is written and descriptors are
        // closed that are not used any more.
        unsafe {
            command.pre_exec(move || {
                libc::setsid();
                libc::sigprocmask(libc::SIG_BLOCK, &raw const signals, std::ptr::null_mut());
                fs::write(&members, "0")?;
                // What the starter of the tests has left open cannot be dumped.
                libc::close_range(3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC.cast_signed());
                Ok(())
            });
        }
        let pid = command.spawn().unwrap().id();
        let mut status = 0;
        // SAFETY: the child of this process; the status lives in this frame.
        unsafe {
            assert_eq!(libc::waitpid(pid.cast_signed(), &raw mut status, libc::WUNTRACED), pid.cast_signed());
            if !libc::WIFSTOPPED(status) {
                panic!("it ended: {}", fs::read_to_string(directory.join("output")).unwrap_or_default());
            }
            libc::kill(pid.cast_signed(), libc::SIGCONT);
        }
        Self { pid, freezer, unified }
    }

    pub(crate) fn members(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.freezer.join("cgroup.procs")).unwrap_or_default();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    pub(crate) fn is_frozen(&self) -> bool {
        match self.unified {
            true => fs::read_to_string(self.freezer.join("cgroup.events")).unwrap().contains("frozen 1"),
            false => fs::read_to_string(self.freezer.join("freezer.state")).unwrap().trim() == "FROZEN",
        }
    }

    pub(crate) fn freeze(&self) {
        self.set(true);
        // The v1 freezer tells nobody when it is done.
        while !self.is_frozen() {
            std::thread::yield_now();
        }
    }

    fn set(&self, frozen: bool) {
        let (file, word) = match (self.unified, frozen) {
            (true, true) => ("cgroup.freeze", "1"),
            (true, false) => ("cgroup.freeze", "0"),
            (false, true) => ("freezer.state", "FROZEN"),
            (false, false) => ("freezer.state", "THAWED"),
        };
        fs::write(self.freezer.join(file), word).unwrap();
    }

    pub(crate) fn thaw(&self) {
        self.set(false);
    }

    /// Kills and reaps all.
    pub(crate) fn kill(&self) {
        let members = self.members();
        for pid in &members {
            // SAFETY: a call without pointers.
            unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) };
        }
        self.thaw();
        for pid in members {
            reap(pid);
        }
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.kill();
        let _ = fs::remove_dir(&self.freezer);
    }
}

/// Waits for a child to end, or for a process that will be one when its parent has ended; its status, if
/// nobody else had it.
pub(crate) fn reap(pid: u32) -> i32 {
    let mut status = -1;
    // SAFETY: the status lives in this frame.
    while unsafe { libc::waitpid(pid.cast_signed(), &raw mut status, 0) } != pid.cast_signed()
        && Path::new(&format!("/proc/{pid}")).exists()
    {
        std::thread::yield_now();
    }
    status
}
