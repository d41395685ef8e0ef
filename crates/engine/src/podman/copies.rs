//! Where Podman copies an image to before it writes the archive: a directory that is locked as long as this process wants it.
//! What a process has left that was killed the next one removes.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, fstat};
use tempfile::TempDir;

const PREFIX: &str = "godwit-save-";

/// A directory for a copy, which is removed in the end.
#[derive(Debug)]
pub(super) struct Copy {
    directory: TempDir,
    /// Before the directory is gone nobody takes it for one that was left.
    lock: OwnedFd,
}

impl Copy {
    /// Makes one, and removes those that nobody wants any more.
    pub(super) fn new(parent: &Path) -> io::Result<Self> {
        sweep(parent)?;
        loop {
            let directory = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            // Another process may have taken it for one that was left, and have removed it.
            match lock(directory.path()) {
                Ok(Some(lock)) if directory.path().exists() => return Ok(Self { directory, lock }),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Removes it, with what is in it.
    pub(super) fn close(self) -> io::Result<()> {
        let Self { directory, lock } = self;
        directory.close()?;
        drop(lock);
        Ok(())
    }
}

/// Locks a directory of this user; none where another process has it locked, or it is another user's.
fn lock(directory: &Path) -> io::Result<Option<OwnedFd>> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty())?;
    if fstat(&directory)?.st_uid != rustix::process::geteuid().as_raw() {
        return Ok(None);
    }
    match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(directory)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// Removes directories that processes have left. Anybody may make others of such a name there.
fn sweep(parent: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(parent)? {
        let entry = entry?;
        if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
            continue;
        }
        let path: PathBuf = entry.path();
        let left = match lock(&path) {
            Ok(Some(left)) => left,
            // It is in use, another user's, no directory, or has just gone.
            Ok(None) | Err(_) => continue,
        };
        if let Err(error) = std::fs::remove_dir_all(&path) {
            tracing::warn!(path = %path.display(), %error, "the copy of an image that was left cannot be removed");
        }
        drop(left);
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn what_was_left_is_removed_and_what_is_in_use_or_somebody_elses_is_not() {
        let parent = tempfile::tempdir().unwrap();
        let left = parent.path().join("godwit-save-left");
        std::fs::create_dir(&left).unwrap();
        std::fs::write(left.join("layer"), "x").unwrap();
        let elsewhere = tempfile::tempdir().unwrap();
        let link = parent.path().join("godwit-save-link");
        std::os::unix::fs::symlink(elsewhere.path(), &link).unwrap();
        let others = parent.path().join("other");
        std::fs::create_dir(&others).unwrap();
        let first = Copy::new(parent.path()).unwrap();
        assert!(!left.exists() && link.exists() && others.exists() && elsewhere.path().exists());
        let second = Copy::new(parent.path()).unwrap();
        assert!(first.path().exists() && first.path() != second.path());
        let path = first.path().to_owned();
        first.close().unwrap();
        assert!(!path.exists() && second.path().exists());
    }
}
