//! Directories on this node's disk in which a checkpoint lies unpacked while it is made or restored: all of a service's memory,
//! for root alone. What an earlier life of this daemon has left goes at its start.

use std::collections::BTreeSet;
use std::fs::DirBuilder;
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use godwit_migration::Layout;

/// One of them; removed when this is dropped.
pub(crate) struct Staging {
    path: PathBuf,
    /// Where CRIU writes its log, which stays if it failed.
    logs: PathBuf,
}

/// The file that says which service a checkpoint is of.
const NOTE: &str = "service-id";

/// The services, by id, whose checkpoints an earlier life of this daemon has not ended.
pub(crate) fn cut_off(layout: &Layout) -> io::Result<BTreeSet<String>> {
    let entries = match std::fs::read_dir(parent(layout)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries?,
    };
    let mut services = BTreeSet::new();
    for entry in entries {
        // A restore has no such note.
        services.extend(std::fs::read_to_string(entry?.path().join(NOTE)));
    }
    Ok(services)
}

fn parent(layout: &Layout) -> PathBuf {
    layout.state.join("checkpoints")
}

impl Staging {
    pub(crate) fn new(layout: &Layout) -> io::Result<Self> {
        let id = ulid::Ulid::new().to_string();
        let path = parent(layout).join(&id);
        DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
        let staging = Self { path, logs: layout.criu_logs(&id) };
        std::fs::create_dir_all(&staging.logs)?;
        Ok(staging)
    }

    /// Notes that this service may be frozen until the directory is gone.
    pub(crate) fn note(&self, service: &str) -> io::Result<()> {
        std::fs::write(self.path.join(NOTE), service)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn logs(&self) -> &Path {
        &self.logs
    }

    /// CRIU's log has nothing that anybody will want to read.
    pub(crate) fn went_well(&self) {
        if let Err(error) = std::fs::remove_dir_all(&self.logs) {
            tracing::warn!(path = %self.logs.display(), %error, "a log of CRIU's is not removed");
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.path) {
            tracing::error!(path = %self.path.display(), %error, "a checkpoint's files are not removed");
        }
        // Only where it is empty.
        let _ = std::fs::remove_dir(&self.logs);
    }
}

/// Removes what is left.
pub(crate) fn clear(layout: &Layout) -> io::Result<()> {
    match std::fs::remove_dir_all(parent(layout)) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
