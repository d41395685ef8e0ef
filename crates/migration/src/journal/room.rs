//! Room on the disk of the journal for what must be written when that disk is full: a file that is removed then.
//!
//! It is no promise. Whoever has filled the disk may take what it gives; then the journal says so, as without it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FallocateFlags, fallocate};

/// Its size, bytes: SQLite's files beside the journal, some pages of 4 KiB each, and the 32 KiB of its shared index.
const BYTES: u64 = 256 << 10;

/// The file.
#[derive(Debug)]
pub(super) struct Room {
    path: PathBuf,
    /// It was given, and nothing has been written since: another's beginning must not take it back.
    is_given: AtomicBool,
}

impl Room {
    /// That of a journal.
    pub(super) fn beside(journal: &Path) -> Self {
        Self { path: journal.with_extension("room"), is_given: AtomicBool::new(false) }
    }

    /// Takes the room, as far as it is not taken. Where there is none, the journal can be written as long as the disk is not full.
    pub(super) fn take(&self) {
        if self.is_given.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = self.try_to_take() {
            tracing::debug!(path = %self.path.display(), %error, "no room is kept for the journal");
            self.remove();
        }
    }

    fn try_to_take(&self) -> io::Result<()> {
        // What is there already costs nothing.
        let file =
            OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.path)?;
        Ok(fallocate(file, FallocateFlags::empty(), 0, BYTES)?)
    }

    /// Gives it to the journal.
    pub(super) fn give(&self) {
        self.is_given.store(true, Ordering::Release);
        self.remove();
    }

    /// The journal has been written.
    pub(super) fn is_used(&self) {
        self.is_given.store(false, Ordering::Release);
    }

    fn remove(&self) {
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(path = %self.path.display(), %error, "cannot give the journal the room that is kept for it");
            }
            _ => {}
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn room_is_taken_once_and_given_back() {
        let directory = tempfile::tempdir().unwrap();
        let room = Room::beside(&directory.path().join("journal.db"));
        room.remove();
        for _ in 0..2 {
            room.take();
            assert!(fs::metadata(&room.path).unwrap().blocks() * 512 >= BYTES);
        }
        room.give();
        room.take();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        room.is_used();
        room.take();
        assert!(room.path.exists());
    }
}
