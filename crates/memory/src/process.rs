//! One process's address space from outside.
//!
//! - [`Process`]: a process that stays the same one for ever, whatever becomes of its PID.
//! - [`Area`]: one mapping, and whether the page mover carries its pages ([`AreaKind`]).
//! - [`Reader`]: reads much memory in pieces, and tells what vanished meanwhile.

mod maps;
pub(crate) mod nameless;
mod read;
mod signal;

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, open, openat};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::stat::Mode;
use rustix::fs::readlinkat;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use thiserror::Error;

pub use maps::{Area, AreaKind};
pub use read::{PIECE, Piece, Pieces, Reader};

use crate::Space;

/// Why a process could not be examined.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// It has ended, or is only a zombie any more.
    #[error("process {pid} has ended")]
    Gone {
        /// In the node's PID namespace.
        pid: i32,
    },
    /// The kernel refused something.
    #[error("process {pid}: cannot {action}: {source}; godwit needs root and a /proc without hidepid")]
    Io {
        /// In the node's PID namespace.
        pid: i32,
        /// What was tried.
        action: String,
        /// What the kernel said.
        source: io::Error,
    },
    /// A file in `/proc` is not what it is on the kernels godwit knows.
    #[error("process {pid}: {file} has an invalid line: {line:?}; please report it")]
    Parse {
        /// In the node's PID namespace.
        pid: i32,
        /// Which file.
        file: &'static str,
        /// The line.
        line: String,
    },
}

/// So many threads of a process may end just before each is looked at.
const TRIES: usize = 100;

/// One process, held by handles that do not follow its PID to another process.
#[derive(Debug)]
pub struct Process {
    pid: i32,
    start_time: u64,
    space: Space,
    pidfd: OwnedFd,
    /// Its directory in `/proc`: files opened through it are this process's or fail.
    directory: OwnedFd,
    /// A thread that lives. The first one may have ended before the others.
    task: AtomicI32,
}

impl Process {
    /// Opens the process with this PID (in the node's namespace, not a thread's).
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when there is none, or a zombie.
    pub fn open(pid: i32) -> Result<Self, ProcessError> {
        let failed = |action: &str, errno: Errno| match errno {
            Errno::ESRCH | Errno::ENOENT => ProcessError::Gone { pid },
            errno => ProcessError::Io { pid, action: action.into(), source: errno.into() },
        };
        let pidfd = pidfd(pid).map_err(|errno| failed("open a handle of it", errno))?;
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let directory = open(format!("/proc/{pid}").as_str(), flags, Mode::empty())
            .map_err(|errno| failed("open its directory in /proc", errno))?;
        let mut process = Self { pid, start_time: 0, space: 0, pidfd, directory, task: AtomicI32::new(pid) };
        let stat = process.text("stat")?;
        process.start_time = maps::start_time(&stat).ok_or_else(|| process.unparsed("stat", &stat))?;
        let status = process.status()?;
        process.space = status.space.ok_or_else(|| process.unparsed("status", "NSpid"))?;
        // The directory may have been opened after the PID went to another process; the handle of
        // the process tells, as long as it lives its PID is its own.
        process.check_alive()?;
        Ok(process)
    }

    /// Its PID in the node's namespace.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// When it began, in clock ticks since boot: with the PID it names one process for ever.
    pub fn start_time(&self) -> u64 {
        self.start_time
    }

    /// Its PID in the innermost namespace it is in.
    pub fn space(&self) -> Space {
        self.space
    }

    /// Handle of the process.
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Its mappings, in ascending order and without overlaps.
    ///
    /// While the process runs they may change as they are read; the answer is exact for a process
    /// that does not run.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when it has no address space any more.
    pub fn areas(&self) -> Result<Vec<Area>, ProcessError> {
        self.find_task()?;
        // CRIU does not call locked areas lazy. Only smaps tells them, and it walks all pages.
        let file = if self.status()?.locked_kib == 0 { "maps" } else { "smaps" };
        self.areas_in(file)
    }

    /// The same, but areas that are locked, or of huge pages, may not be told from others.
    ///
    /// # Errors
    /// As [`Process::areas`].
    pub fn areas_now(&self) -> Result<Vec<Area>, ProcessError> {
        self.find_task()?;
        self.areas_in("maps")
    }

    /// The same in a fraction of the time, but areas that are locked cannot be told from others.
    ///
    /// # Errors
    /// As [`Process::areas`].
    pub(crate) fn areas_at_once(&self) -> Result<Vec<Area>, ProcessError> {
        self.areas_in("maps")
    }

    fn areas_in(&self, file: &str) -> Result<Vec<Area>, ProcessError> {
        let text = self.text(file)?;
        let areas = maps::parse(&text).map_err(|line| ProcessError::Parse {
            pid: self.pid,
            file: "maps",
            line: line.to_owned(),
        })?;
        if areas.is_empty() {
            return Err(ProcessError::Gone { pid: self.pid });
        }
        Ok(areas)
    }

    /// Reads memory as far as it can be read from this address on; the number of bytes may be less
    /// than asked for, and 0 when there is nothing at the address. Pages that the process itself may
    /// not read (`PROT_NONE`) are read all the same; guard pages have no content.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended.
    pub fn read(&self, address: u64, buffer: &mut [u8]) -> Result<usize, ProcessError> {
        read::read(self, address, buffer)
    }

    /// The first page of a range with content, even content that cannot be read. A process that changes the range
    /// meanwhile may have changed it again.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended.
    pub fn first_with_content(&self, range: &crate::Range) -> Result<Option<u64>, ProcessError> {
        read::first_with_content(self, range)
    }

    /// Writes memory, where it may be written or not. A page that has yet to come is waited for by reading it: the kernel
    /// lets no write by this way wait.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended, and where there is no memory.
    pub fn write(&self, address: u64, bytes: &[u8]) -> Result<(), ProcessError> {
        self.read(address, &mut [0])?;
        let memory = self.of_task(|task| self.open_path(&format!("task/{task}/mem"), OFlag::O_WRONLY))?;
        memory.write_all_at(bytes, address).map_err(|source| self.failed("write its memory", source))
    }

    /// The directory in `/proc` of a thread of it that lives. What is opened below it is this process's, or fails, as long as
    /// this handle is there.
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended.
    pub fn directory(&self) -> Result<PathBuf, ProcessError> {
        self.find_task()?;
        Ok(format!("/proc/self/fd/{}/task/{}", self.directory.as_raw_fd(), self.task()).into())
    }

    /// The path of its executable, as the kernel tells it (proc_pid_exe(5)).
    ///
    /// # Errors
    /// [`ProcessError::Gone`] when the process has ended, or ends.
    pub fn executable(&self) -> Result<PathBuf, ProcessError> {
        self.of_task(|task| {
            let path = format!("task/{task}/exe");
            let read = readlinkat(&self.directory, path.as_str(), Vec::new());
            let read = read.map_err(|errno| self.failed("find its executable", errno.into()))?;
            Ok(OsString::from_vec(read.into_bytes()).into())
        })
    }

    /// Whether the process has ended, reaped or not.
    pub fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(ready) if ready > 0)
    }

    pub(crate) fn check_alive(&self) -> Result<(), ProcessError> {
        if self.has_ended() { Err(ProcessError::Gone { pid: self.pid }) } else { Ok(()) }
    }

    /// Looks for a thread that has the address space, and remembers it.
    pub(crate) fn find_task(&self) -> Result<(), ProcessError> {
        let lives = |task| self.state_of(task).is_some();
        if lives(self.task()) {
            return Ok(());
        }
        self.check_alive()?;
        let task = self
            .tasks()?
            .into_iter()
            .find(|&task| lives(task))
            .ok_or(ProcessError::Gone { pid: self.pid })?;
        self.task.store(task, Ordering::Relaxed);
        Ok(())
    }

    /// Does something with the thread that is looked at; with another one if that has ended meanwhile.
    fn of_task<T>(&self, mut attempt: impl FnMut(i32) -> Result<T, ProcessError>) -> Result<T, ProcessError> {
        let mut tries = 1..TRIES;
        loop {
            let task = self.task();
            let is_absent = |error: &ProcessError| match error {
                ProcessError::Gone { .. } => true,
                ProcessError::Io { source, .. } => source.kind() == io::ErrorKind::NotFound,
                ProcessError::Parse { .. } => false,
            };
            match attempt(task) {
                Err(error)
                    if is_absent(&error) && self.state_of(task).is_none() && tries.next().is_some() =>
                {
                    self.find_task()?;
                }
                done => return done,
            }
        }
    }

    /// A thread that had the address space when [`Process::areas`] last looked.
    pub(crate) fn task(&self) -> i32 {
        self.task.load(Ordering::Relaxed)
    }

    /// All threads, the first one first.
    pub(crate) fn tasks(&self) -> Result<Vec<i32>, ProcessError> {
        // The directory's descriptor names this process; a path through it cannot lead to another.
        let path = format!("/proc/self/fd/{}/task", self.directory.as_raw_fd());
        let entries = std::fs::read_dir(path).map_err(|source| self.failed("list its threads", source))?;
        let mut tasks: Vec<i32> =
            entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        tasks.sort_unstable_by_key(|&task| (task != self.pid, task));
        Ok(tasks)
    }

    /// `/proc/PID/status` of the thread that is looked at.
    pub(crate) fn status(&self) -> Result<maps::Status, ProcessError> {
        self.of_task(|task| self.status_of(task))
    }

    /// The same of this thread.
    pub(crate) fn status_of(&self, task: i32) -> Result<maps::Status, ProcessError> {
        Ok(maps::parse_status(&self.text(&format!("task/{task}/status"))?))
    }

    /// The state letter of this thread; none when it has ended.
    pub(crate) fn state_of(&self, task: i32) -> Option<char> {
        let stat = self.text(&format!("task/{task}/stat")).ok()?;
        maps::state(&stat).filter(|&state| !"ZXx".contains(state))
    }

    /// Opens a file of the thread that is looked at.
    pub(crate) fn open_file(&self, name: &str) -> Result<File, ProcessError> {
        self.of_task(|task| self.open_path(&format!("task/{task}/{name}"), OFlag::O_RDONLY))
    }

    /// Whether it has a file open whose reads a device writes into memory by itself, or may have one: a file that cannot
    /// be examined counts.
    pub(crate) fn uses_direct_io(&self) -> bool {
        let directory = |name: &str| format!("/proc/self/fd/{}/{name}", self.directory.as_raw_fd());
        let found = std::fs::read_dir(directory("fdinfo")).and_then(|entries| {
            for entry in entries {
                let entry = entry?;
                let text = match std::fs::read_to_string(entry.path()) {
                    // Closed meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    text => text?,
                };
                let flags = text
                    .lines()
                    .find_map(|line| i32::from_str_radix(line.strip_prefix("flags:")?.trim(), 8).ok());
                if flags.is_some_and(|flags| flags & libc::O_DIRECT == 0) {
                    continue;
                }
                // Pipes have the flag for another reason.
                let path = format!("{}/{}", directory("fd"), entry.file_name().to_string_lossy());
                match std::fs::read_link(path) {
                    Ok(path) if path.is_absolute() => return Ok(true),
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            Ok(false)
        });
        found.unwrap_or(true)
    }

    /// The file that it has mapped in exactly this range, for reading.
    pub(crate) fn open_mapped(&self, start: u64, end: u64) -> io::Result<File> {
        let path = format!("map_files/{start:x}-{end:x}");
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        Ok(File::from(openat(self.directory.as_fd(), path.as_str(), flags, Mode::empty())?))
    }

    /// Its IPC namespace.
    pub(crate) fn ipc_namespace(&self) -> io::Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_CLOEXEC;
        Ok(File::from(openat(self.directory.as_fd(), "ns/ipc", flags, Mode::empty())?))
    }

    /// What the kernel says of each open file whose path begins like this.
    pub(crate) fn each_open_file(
        &self,
        begins: &str,
        mut each: impl FnMut(&Path, &Path, Metadata),
    ) -> Result<(), ProcessError> {
        let directory = format!("/proc/self/fd/{}/fd", self.directory.as_raw_fd());
        let entries = match std::fs::read_dir(directory) {
            // It has none any more.
            Err(_) if self.has_ended() => return Ok(()),
            entries => entries.map_err(|source| self.failed("list its open files", source))?,
        };
        for path in entries.flatten().map(|entry| entry.path()) {
            // Closed meanwhile.
            let Ok(target) = std::fs::read_link(&path) else { continue };
            if target.as_os_str().as_encoded_bytes().starts_with(begins.as_bytes())
                && let Ok(metadata) = std::fs::metadata(&path)
            {
                each(&path, &target, metadata);
            }
        }
        Ok(())
    }

    /// Clears the soft-dirty bits of all its pages (Documentation/admin-guide/mm/soft-dirty.rst).
    pub(crate) fn clear_soft_dirty(&self) -> Result<(), ProcessError> {
        self.of_task(|task| self.open_path(&format!("task/{task}/clear_refs"), OFlag::O_WRONLY))
            .or_else(|_| self.open_path("clear_refs", OFlag::O_WRONLY))?
            .write_all(b"4")
            .map_err(|source| self.failed("clear its soft-dirty bits", source))
    }

    fn open_path(&self, path: &str, flags: OFlag) -> Result<File, ProcessError> {
        openat(self.directory.as_fd(), path, flags | OFlag::O_CLOEXEC, Mode::empty())
            .map(File::from)
            .map_err(|errno| self.failed(&format!("open /proc/{}/{path}", self.pid), errno.into()))
    }

    /// The whole of one of its files.
    pub(crate) fn text(&self, path: &str) -> Result<String, ProcessError> {
        let opened = match path {
            "maps" | "smaps" => self.open_file(path),
            path => self.open_path(path, OFlag::O_RDONLY),
        };
        let mut bytes = Vec::with_capacity(16 * 1024);
        opened?
            .read_to_end(&mut bytes)
            .map_err(|source| self.failed(&format!("read /proc/{}/{path}", self.pid), source))?;
        // Names of files may be no UTF-8; nothing here depends on them.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The error of something that failed; [`ProcessError::Gone`] when that is why.
    pub(crate) fn failed(&self, action: &str, source: io::Error) -> ProcessError {
        let absent = matches!(source.raw_os_error(), Some(libc::ESRCH | libc::ENOENT));
        if absent && (self.has_ended() || source.raw_os_error() == Some(libc::ESRCH)) {
            return ProcessError::Gone { pid: self.pid };
        }
        ProcessError::Io { pid: self.pid, action: action.to_owned(), source }
    }

    fn unparsed(&self, file: &'static str, line: &str) -> ProcessError {
        ProcessError::Parse { pid: self.pid, file, line: line.to_owned() }
    }
}

/// A handle of the process with this PID, which becomes readable when the process ends.
pub(crate) fn pidfd(pid: i32) -> Result<OwnedFd, Errno> {
    // The kernel refuses those below 1 too.
    let pid = Some(pid).filter(|pid| *pid > 0).and_then(Pid::from_raw).ok_or(Errno::EINVAL)?;
    pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| Errno::from_raw(errno.raw_os_error()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    /// The number of a thread that has been, and is no more.
    fn ended_thread() -> i32 {
        let number = || std::fs::read_link("/proc/thread-self").unwrap().file_name().unwrap().to_owned();
        let number = std::thread::spawn(number).join().unwrap();
        let number = number.to_str().unwrap().parse().unwrap();
        // It is joined a moment before the kernel has let go of it; there is no event for that.
        while Path::new(&format!("/proc/self/task/{number}")).exists() {
            std::thread::yield_now();
        }
        number
    }

    #[test]
    fn a_process_is_looked_at_although_the_thread_that_was_looked_at_has_ended() {
        let process = Process::open(i32::try_from(std::process::id()).unwrap()).unwrap();
        let looked_at_ended_one = || process.task.store(ended_thread(), Ordering::Relaxed);
        looked_at_ended_one();
        assert!(!process.areas_at_once().unwrap().is_empty());
        looked_at_ended_one();
        process.status().unwrap();
        looked_at_ended_one();
        process.open_file("pagemap").unwrap();
        looked_at_ended_one();
        process.text("maps").unwrap();
        // What is not there at all is not looked for in all threads.
        let missing = process.open_file("nothing").unwrap_err();
        assert!(matches!(missing, ProcessError::Io { .. }), "{missing}");
    }
}
