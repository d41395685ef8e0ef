//! The engine's side of `godwit-shim`: starting it, knowing whether it lives, its exit record.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use rustix::fs::{CWD, FileType, FlockOperation, Mode};
use rustix::process::Signal;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe;
use tokio::process::{Child, Command};

use crate::container::OutputPipes;
use crate::processes::process::Handle;
use crate::processes::stop;

/// How often to look at a locked file that names no process; a matter of microseconds.
const LOCK_LOOK: Duration = Duration::from_millis(1);

/// How long the shim may take to write what it has into the log.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);

/// The number of the lock's descriptor in the shim.
const LOCK_FD: i32 = 3;

/// Longest status line taken, in bytes.
const STATUS_LIMIT: usize = 64 << 10;

/// Files of a container in its directory.
#[derive(Debug, Clone)]
pub(super) struct Files {
    directory: PathBuf,
}

impl Files {
    pub(super) fn new(directory: &Path) -> Self {
        Self { directory: directory.to_owned() }
    }

    pub(super) fn directory(&self) -> &Path {
        &self.directory
    }

    pub(super) fn bundle(&self) -> PathBuf {
        self.directory.join("bundle")
    }

    pub(super) fn criu_config(&self) -> PathBuf {
        self.directory.join("criu-restore.conf")
    }

    pub(super) fn runc_log(&self) -> PathBuf {
        self.directory.join("runc.log")
    }

    pub(super) fn pid(&self) -> PathBuf {
        self.directory.join("init.pid")
    }

    fn lock(&self) -> PathBuf {
        self.directory.join("shim.lock")
    }

    fn exit(&self) -> PathBuf {
        self.directory.join("exit.json")
    }

    fn streams(&self) -> PathBuf {
        self.directory.join("streams.json")
    }

    /// The pipes that are the container's standard output and standard error.
    pub(super) fn output_pipes(&self) -> io::Result<OutputPipes> {
        let names: [String; 2] = serde_json::from_slice(&std::fs::read(self.streams())?)?;
        let number = |name: &String| name.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok();
        match names.each_ref().map(number) {
            [Some(stdout), Some(stderr)] => Ok([stdout, stderr]),
            _ => Err(io::Error::new(ErrorKind::InvalidData, format!("{names:?} are not pipes"))),
        }
    }

    /// The FIFO in which a CRIU that was started before its images looks for their inventory.
    pub(super) fn inventory(&self) -> PathBuf {
        self.directory.join("inventory")
    }

    /// Lets a CRIU that waits for an inventory find that there is none: it ends with an error. Nothing happens where
    /// none waits.
    pub(super) fn end_waiting(&self) -> io::Result<()> {
        let mut options = File::options();
        match options.write(true).custom_flags(libc::O_NONBLOCK | libc::O_NOFOLLOW).open(self.inventory()) {
            Ok(_) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            // Nobody has it open for reading.
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn settled(&self) -> PathBuf {
        self.directory.join("log.settled")
    }

    fn work_note(&self) -> PathBuf {
        self.directory.join("restore.work")
    }

    /// Notes where CRIU works at a restore.
    pub(super) fn note_restore_work(&self, work: &Path) -> io::Result<()> {
        std::fs::write(self.work_note(), work.as_os_str().as_bytes())
    }

    /// Where CRIU worked at the last restore, if the container was restored.
    pub(super) fn restore_work(&self) -> io::Result<Option<PathBuf>> {
        match std::fs::read(self.work_note()) {
            Ok(path) => Ok(Some(OsString::from_vec(path).into())),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Removes what an earlier life of the container left. The log and the lock stay.
    pub(super) fn clear(&self) -> io::Result<()> {
        let stopped = self.directory.join("stopped.json");
        let signals = self.directory.join(stop::FILE);
        let [exit, pid, runc_log, streams] = [self.exit(), self.pid(), self.runc_log(), self.streams()];
        let [inventory, settled] = [self.inventory(), self.settled()];
        for file in [exit, pid, runc_log, streams, self.work_note(), inventory, settled, stopped, signals] {
            remove(&file)?;
        }
        Ok(())
    }

    /// Has the shim write all that it has of the container's output into the log. Without a shim nobody
    /// writes it any more.
    pub(super) async fn settle_log(&self) -> io::Result<()> {
        let Some(shim) = self.shim().await? else { return Ok(()) };
        let path = self.settled();
        remove(&path)?;
        rustix::fs::mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
        // Open for both, it has no end before the shim has opened it.
        let mut answer = pipe::OpenOptions::new().read_write(true).open_receiver(&path)?;
        shim.send(Signal::USR1)?;
        let asked = async {
            let mut byte = [0];
            tokio::select! {
                answered = answer.read_exact(&mut byte) => answered.map(drop),
                ended = shim.ended() => ended,
            }
        };
        let settled = tokio::time::timeout(SETTLE_LIMIT, asked).await;
        remove(&path)?;
        settled?
    }

    /// The exit code of the main process, once the shim has recorded it.
    pub(super) fn exit_code(&self) -> io::Result<Option<i32>> {
        let text = match std::fs::read(self.exit()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            result => result?,
        };
        let record: ExitRecord = serde_json::from_slice(&text)?;
        Ok(Some(record.code))
    }

    /// The shim, when it lives.
    pub(super) async fn shim(&self) -> io::Result<Option<Handle>> {
        let lock = match File::open(self.lock()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            result => result?,
        };
        while is_locked(&lock)? {
            // The PID was written by the holder of the lock; when the lock is still held after the
            // process was opened, it is that process.
            let text = std::fs::read_to_string(self.lock())?;
            let handle = match text.trim().parse() {
                Ok(pid) if text.ends_with('\n') => Handle::open(pid)?,
                _ => None,
            };
            if handle.is_some() && is_locked(&lock)? {
                return Ok(handle);
            }
            // Its very first instructions, or its very last.
            tokio::time::sleep(LOCK_LOOK).await;
        }
        Ok(None)
    }

    /// Takes the lock for a new shim.
    fn take_lock(&self) -> io::Result<File> {
        let lock = File::options().read(true).write(true).create(true).truncate(false).open(self.lock())?;
        rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockExclusive)?;
        lock.set_len(0)?;
        Ok(lock)
    }
}

pub(super) fn remove(file: &Path) -> io::Result<()> {
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn is_locked(lock: &File) -> io::Result<bool> {
    // A shared lock that is given back at once disturbs nobody but a start in the same instant.
    match rustix::fs::flock(lock.as_fd(), FlockOperation::NonBlockingLockShared) {
        Ok(()) => {
            rustix::fs::flock(lock.as_fd(), FlockOperation::Unlock)?;
            Ok(false)
        }
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(true),
        Err(errno) => Err(errno.into()),
    }
}

#[derive(Debug, Deserialize)]
struct ExitRecord {
    code: i32,
}

/// What the shim says when the engine's command has ended.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Started {
    /// The main process, in the node's PID namespace.
    Pid(u32),
    /// Why there is none.
    Error(String),
}

/// A shim that was started, and has not said yet what became of its command.
pub(super) struct Starting {
    child: Child,
    /// Of the status line.
    word: Vec<u8>,
}

/// Starts a shim for an engine command.
pub(super) fn spawn(
    shim: &Path,
    files: &Files,
    log: &Path,
    path_variable: &OsString,
    without_huge_pages: bool,
    command: &[OsString],
) -> io::Result<Starting> {
    let lock = files.take_lock()?;
    let raw_lock = lock.as_raw_fd();
    let mut shim = Command::new(shim);
    shim.arg("--dir")
        .arg(files.directory())
        .arg("--lock-fd")
        .arg(LOCK_FD.to_string())
        .arg("--log")
        .arg(log)
        .args(without_huge_pages.then_some("--without-huge-pages"))
        .arg("--")
        .args(command)
        .env("PATH", path_variable)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // SAFETY: between fork and exec only system calls are made, on a descriptor that is open until
    // after the spawn.
    unsafe {
        shim.pre_exec(move || {
            // dup2 onto itself would leave close-on-exec set.
            let result = match raw_lock {
                LOCK_FD => libc::fcntl(raw_lock, libc::F_SETFD, 0),
                _ => libc::dup2(raw_lock, LOCK_FD),
            };
            if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
        });
    }
    let child = shim.spawn()?;
    // The shim has the lock now.
    Ok(Starting { child, word: Vec::new() })
}

impl Starting {
    /// Its word. What has been read of it is not lost when this is dropped before its end.
    pub(super) async fn word(&mut self) -> io::Result<Started> {
        if let Some(stdout) = &mut self.child.stdout {
            while self.word.len() < STATUS_LIMIT && stdout.read_buf(&mut self.word).await? > 0 {}
        }
        // This is the shim's parent half, which has ended long ago.
        self.child.wait().await?;
        if self.word.is_empty() {
            return Ok(Started::Error("the shim ended without a word".into()));
        }
        Ok(serde_json::from_slice(&self.word)?)
    }
}
