//! Checkpoints that stay as a file, in the format of `podman container checkpoint --export`.
//!
//! A tar archive, compressed by zstd, by gzip or not at all:
//!
//! | member | what | whose |
//! |---|---|---|
//! | `godwit.json` | the service, and which layers its files lie on; first | godwit's |
//! | `config.dump`, `spec.dump`, `network.status` | what Podman makes the container from ([`documents`]) | both |
//! | `checkpoint/` | CRIU's images | both |
//! | `stats-dump` | CRIU's statistics | both |
//! | `rootfs-diff.tar`, `deleted.files` | what changed of the root filesystem ([`changes`]) | both |
//! | `volumes/NAME.tar` | a volume | both |
//! | `devshm-checkpoint.tar` | `/dev/shm`, where Podman mounts one from outside | Podman's |
//! | `ctr.log`, `dump.log`, `artifacts/` | not read here | Podman's |
//! | `godwit.sha256` | the SHA-256 of every other member, as `sha256sum` writes and checks them; last | godwit's |
//!
//! Podman passes over members that it does not know. An archive with a `godwit.json` and without a whole `godwit.sha256` behind
//! all else was cut off or changed. One of Podman's has no digests: the checksums of its compression are all that there is.
//!
//! [`pack`] writes archives, [`unpack`] reads them, and [`foreign`] makes CRIU's images fit another engine's mounts.

pub mod changes;
pub mod documents;
pub mod foreign;
pub mod pack;
pub mod theirs;
pub mod unpack;

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Arc, Weak};

/// What godwit knows of the service.
pub const OWN: &str = "godwit.json";
/// The digests.
pub const SUMS: &str = "godwit.sha256";
/// Podman's description of the container.
pub const CONFIG: &str = "config.dump";
/// The OCI runtime's.
pub const SPEC: &str = "spec.dump";
/// The directory of CRIU's images.
pub const IMAGES: &str = "checkpoint";
/// The directory of volumes.
pub const VOLUMES: &str = "volumes";
/// Files that changed.
pub const ROOTFS_DIFF: &str = "rootfs-diff.tar";
/// Files that are gone: a JSON list of paths.
pub const DELETED: &str = "deleted.files";
/// What Podman has in `/dev/shm`.
pub const DEV_SHM: &str = "devshm-checkpoint.tar";
/// The addresses that Podman gives the container again.
pub const NETWORK: &str = "network.status";
/// CRIU's statistics.
pub const STATISTICS: &str = "stats-dump";

/// Why an archive cannot be made or used: a sentence.
#[derive(Debug, thiserror::Error)]
pub enum ArchiveError {
    /// It is not one, or not all of one.
    #[error("this is no whole checkpoint archive: {0}")]
    Damaged(String),
    /// It asks for what no checkpoint needs.
    #[error("the archive is refused: {0}")]
    Refused(String),
    /// Its container is one that cannot be restored here.
    #[error("its container cannot be restored by godwit: {0}")]
    Unfit(String),
    /// What changed cannot be put in its place.
    #[error("{what} of the archive cannot be unpacked: {source}")]
    Files {
        /// The member.
        what: String,
        /// What is wrong.
        source: crate::image::LayerFault,
    },
    /// Files of the service cannot be read.
    #[error("cannot read {what} of the service: {reason}")]
    Read {
        /// Which.
        what: String,
        /// What is wrong.
        reason: String,
    },
    /// Files of the service are of a kind that no archive has.
    #[error("{what} of the service cannot go into an archive: {reason}")]
    Unkept {
        /// Which.
        what: String,
        /// What is in the way, and what to do.
        reason: String,
    },
    /// A file of this node.
    #[error("cannot {action}")]
    Io {
        /// What was tried, on what.
        action: String,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
    /// CRIU's images.
    #[error("the images of its processes cannot be used")]
    Images(#[from] godwit_criu::images::ImageError),
}

impl ArchiveError {
    pub(crate) fn io(action: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let action = action.into();
        move |source| Self::Io { action, source }
    }
}

/// Bytes that stay free on the disk while an archive is made or unpacked, for the node's journal and logs: 64 MiB.
pub(crate) const RESERVE: u64 = 64 << 20;

/// Whether so much more fits on the disk of a file, and the reserve stays.
pub(crate) fn fits(file: &File, more: u64) -> io::Result<bool> {
    let stat = rustix::fs::fstatvfs(file)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize) >= RESERVE.saturating_add(more))
}

/// Refuses a directory whose disk has no room for so many bytes of memory beside the reserve.
///
/// # Errors
/// There is no room, or it cannot be seen.
pub fn has_room(directory: &Path, memory: u64) -> io::Result<()> {
    let stat = rustix::fs::statvfs(directory)?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize).saturating_sub(RESERVE);
    if free >= memory {
        return Ok(());
    }
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    Err(io::Error::new(
        io::ErrorKind::StorageFull,
        format!(
            "its memory of {} MiB would lie there for a while, and {} MiB are free beside a reserve of {} MiB; free {} MiB more",
            mib(memory),
            free >> 20,
            RESERVE >> 20,
            mib(memory - free)
        ),
    ))
}

/// Whoever waits for files that are written has this: without it the writing ends.
#[derive(Debug, Default)]
pub struct Awaited(Arc<()>);

impl Awaited {
    /// What the writer has of it.
    #[must_use]
    pub fn by(&self) -> Waiter {
        Waiter(Arc::downgrade(&self.0))
    }
}

/// Whoever waits, as the writer knows them.
#[derive(Debug, Clone)]
pub struct Waiter(Weak<()>);

impl Waiter {
    fn check(&self) -> io::Result<()> {
        match self.0.strong_count() {
            0 => Err(io::Error::other("nobody waits for it any more")),
            _ => Ok(()),
        }
    }
}

/// After so many bytes it is looked again whether there is room.
const LOOK: u64 = 16 << 20;

/// A file that is written as long as there is room and somebody waits for it.
pub(crate) struct Roomy {
    file: File,
    waiter: Waiter,
    /// Bytes that were found to fit.
    left: u64,
}

impl Roomy {
    pub(crate) fn new(file: File, waiter: Waiter) -> Self {
        Self { file, waiter, left: 0 }
    }
}

impl Write for Roomy {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        self.waiter.check()?;
        let wanted = data.len() as u64;
        if self.left < wanted {
            let more = LOOK.max(wanted);
            if !fits(&self.file, more)? {
                return Err(io::Error::new(io::ErrorKind::StorageFull, "the disk of this node is full"));
            }
            self.left = more;
        }
        let written = self.file.write(data)?;
        self.left = self.left.saturating_sub(written as u64);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// The member that a volume is.
#[must_use]
pub fn volume(name: &str) -> String {
    format!("{VOLUMES}/{name}.tar")
}

/// A name that a file in a directory of an archive may have: nothing in it leads anywhere.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b'+');
    !name.is_empty() && name.len() <= 200 && !name.starts_with('.') && name.bytes().all(known)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_nobody_waits_for_is_not_written_further() {
        let awaited = Awaited::default();
        let mut file = Roomy::new(tempfile::tempfile().unwrap(), awaited.by());
        file.write_all(b"wanted").unwrap();
        drop(awaited);
        assert!(file.write_all(b"not").unwrap_err().to_string().contains("nobody waits"));
    }

    #[test]
    fn memory_that_does_not_fit_on_a_disk_is_told() {
        let directory = tempfile::tempdir().unwrap();
        has_room(directory.path(), 0).unwrap();
        let error = has_room(directory.path(), 1 << 60).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert!(error.to_string().starts_with("its memory of 1099511627776 MiB"), "{error}");
    }
}
