//! The engine's side of `godwit-shim`: starting it, knowing whether it lives, its exit record.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use rustix::fs::FlockOperation;
use serde::Deserialize;
use tokio::io::AsyncReadExt;
use tokio::process::Command;

use super::process::Handle;

/// Longest status line taken, in bytes.
const STATUS_LIMIT: u64 = 64 << 10;

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

    /// Removes what an earlier life of the container left. The log and the lock stay.
    pub(super) fn clear(&self) -> io::Result<()> {
        for file in [self.exit(), self.pid(), self.runc_log()] {
            match std::fs::remove_file(file) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
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
    pub(super) fn shim(&self) -> io::Result<Option<Handle>> {
        let lock = match File::open(self.lock()) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            result => result?,
        };
        if !is_locked(&lock)? {
            return Ok(None);
        }
        // The PID was written by the holder of the lock; when the lock is still held after the
        // process was opened, it is that process.
        let text = std::fs::read_to_string(self.lock())?;
        let Ok(pid) = text.trim().parse() else { return Ok(None) };
        let handle = Handle::open(pid)?;
        Ok(if is_locked(&lock)? { handle } else { None })
    }
}

fn is_locked(lock: &File) -> io::Result<bool> {
    // A shared lock that is given back at once disturbs nobody but a shim in the instant of its start.
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

/// Starts a shim for an engine command and waits for its word.
pub(super) async fn start(
    shim: &Path,
    files: &Files,
    log: &Path,
    path_variable: &OsString,
    command: &[OsString],
) -> io::Result<Started> {
    let mut child = Command::new(shim)
        .arg("--dir")
        .arg(files.directory())
        .arg("--log")
        .arg(log)
        .arg("--")
        .args(command)
        .env("PATH", path_variable)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut status = String::new();
    if let Some(stdout) = child.stdout.take() {
        stdout.take(STATUS_LIMIT).read_to_string(&mut status).await?;
    }
    // This is the shim's parent half, which has ended long ago.
    child.wait().await?;
    if status.is_empty() {
        return Ok(Started::Error("the shim ended without a word".into()));
    }
    Ok(serde_json::from_str(&status)?)
}
