//! Room on the disk of the journal for what must be written when that disk is full: a file that is removed then.
//!
//! It is no promise. Whoever has filled the disk may take what it gives; then the journal says so, as without it.

use std::fs::{self, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

/// Its size, bytes: SQLite's files beside the journal, some pages of 4 KiB each, and the 32 KiB of its shared index.
const BYTES: u64 = 256 << 10;

/// The file.
#[derive(Debug)]
pub(super) struct Room(PathBuf);

impl Room {
    /// That of a journal.
    pub(super) fn beside(journal: &Path) -> Self {
        Self(journal.with_extension("room"))
    }

    /// Takes the room, as far as it is not taken. Where there is none, the journal can be written as long as the disk is not full.
    pub(super) fn take(&self) {
        if let Err(error) = self.try_to_take() {
            tracing::debug!(path = %self.0.display(), %error, "no room is kept for the journal");
            self.give();
        }
    }

    fn try_to_take(&self) -> io::Result<()> {
        // What is there already costs nothing.
        let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&self.0)?;
        Ok(fallocate(file, FallocateFlags::empty(), 0, BYTES)?)
    }

    /// Gives it to the journal.
    pub(super) fn give(&self) {
        match fs::remove_file(&self.0) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                tracing::warn!(path = %self.0.display(), %error, "cannot give the journal the room that is kept for it");
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
        room.give();
        for _ in 0..2 {
            room.take();
            assert!(fs::metadata(&room.0).unwrap().blocks() * 512 >= BYTES);
        }
        room.give();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
