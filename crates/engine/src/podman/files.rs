//! The files of a container as one tree: its changed files and its volumes, which Podman has in different places.
//!
//! ```text
//!  diff            the upper directory of its root filesystem
//!  volumes/NAME    each of its volumes
//! ```
//! On a node where it runs they are bound into such a tree; on one that it is coming to they wait in one.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::arrival::{UPPER, VOLUMES};
use super::record::Record;
use crate::runc::lifecycle::detach_all;

/// The parts of the tree, and what is bound there.
fn parts(record: &Record) -> impl Iterator<Item = (PathBuf, &Path)> {
    let volumes = record.volumes.iter();
    let volumes = volumes.map(|volume| (Path::new(VOLUMES).join(&volume.name), volume.files.as_path()));
    std::iter::once((UPPER.into(), record.upper.as_path())).chain(volumes)
}

/// Makes the tree of a container that runs here, or has run.
pub(super) fn bind(record: &Record, tree: &Path) -> io::Result<()> {
    for (part, files) in parts(record) {
        let place = tree.join(part);
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&place)?;
        if identity(&place)? != identity(files)? {
            detach_all(&place)?;
            mount(Some(files), &place, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
        }
    }
    Ok(())
}

/// By which a directory is known.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Removes the tree, and none of the files.
pub(super) fn unbind(record: &Record, tree: &Path) -> io::Result<()> {
    for (part, _) in parts(record) {
        detach_all(&tree.join(part))?;
    }
    // Only empty directories: what is still bound is not.
    let volumes = record.volumes.iter().map(|volume| Path::new(VOLUMES).join(&volume.name));
    for directory in volumes.chain([VOLUMES.into(), UPPER.into(), PathBuf::new()]) {
        match fs::remove_dir(tree.join(directory)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
