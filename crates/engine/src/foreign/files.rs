//! The [files](crate::files) of a container as one tree, where an engine has them in different places.
//!
//! On a node that it is coming to they wait in such a tree. On one where it runs they are bound into one. A tree ends where
//! another filesystem begins, so its own directories are of the engine's storage, too: empty ones, themselves bound where the tree
//! is, so that nobody who looks into the storage meets the files twice.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};

use super::landing::in_storage;
use super::record::Record;
use crate::files::{UPPER, VOLUMES};
use crate::runc::lifecycle::detach_all;

/// The parts of the tree, and what is bound there.
fn parts(record: &Record) -> impl Iterator<Item = (PathBuf, &Path)> {
    let volumes = record.volumes.iter();
    let volumes = volumes.map(|volume| (Path::new(VOLUMES).join(&volume.name), volume.files.as_path()));
    std::iter::once((UPPER.into(), record.upper.as_path())).chain(volumes)
}

/// The empty directories of the tree, in the storage of the engine.
fn empty(record: &Record, tree: &Path) -> io::Result<PathBuf> {
    let storage = record.storage.as_deref().or_else(|| record.upper.ancestors().nth(3)).zip(tree.file_name());
    let (storage, name) = storage.ok_or_else(|| io::Error::other("its upper directory is in no storage"))?;
    // No service has such a name.
    Ok(in_storage(storage).join(format!(".{}", name.display())))
}

/// Makes the tree of a container that runs here, or has run, without the volumes that stay where they are when it moves.
pub(super) fn bind(record: &Record, tree: &Path, stays: &dyn Fn(&str) -> bool) -> io::Result<()> {
    let empty = empty(record, tree)?;
    let create = |path: &Path| fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    create(tree)?;
    create(&empty)?;
    bind_at(&empty, tree)?;
    // What is bound in it is not to be bound in the storage, too.
    mount(None::<&str>, tree, None::<&str>, MsFlags::MS_PRIVATE, None::<&str>)?;
    let (device, _) = identity(&empty)?;
    let is_out = |part: &Path| {
        part.starts_with(VOLUMES) && part.file_name().and_then(OsStr::to_str).is_some_and(stays)
    };
    for (part, files) in parts(record) {
        if is_out(&part) {
            // It may have been a part of an earlier move.
            detach_all(&tree.join(&part))?;
            match fs::remove_dir(empty.join(&part)) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => continue,
            }
        }
        create(&empty.join(&part))?;
        if identity(files)?.0 != device {
            let reason = format!("{} is on another filesystem than its engine's storage", files.display());
            return Err(io::Error::other(reason));
        }
        bind_at(files, &tree.join(part))?;
    }
    Ok(())
}

fn bind_at(what: &Path, place: &Path) -> io::Result<()> {
    if identity(place)? != identity(what)? {
        detach_all(place)?;
        mount(Some(what), place, None::<&str>, MsFlags::MS_BIND, None::<&str>)?;
    }
    Ok(())
}

/// By which a directory is known.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::metadata(path).map(|found| (found.dev(), found.ino()))
}

/// Removes the tree, and none of the files.
pub(super) fn unbind(record: &Record, tree: &Path) -> io::Result<()> {
    for place in [Some(tree.to_owned()), empty(record, tree).ok()].into_iter().flatten() {
        for (part, _) in parts(record) {
            detach_all(&place.join(part))?;
        }
    }
    detach_all(tree)?;
    let mut directories: Vec<_> = parts(record).map(|(part, _)| tree.join(part)).collect();
    directories.extend([tree.join(VOLUMES), tree.to_owned()]);
    if let Ok(empty) = empty(record, tree) {
        directories.extend(
            parts(record).map(|(part, _)| empty.join(part)).chain([empty.join(VOLUMES), empty.clone()]),
        );
    }
    // Empty ones only.
    for directory in directories {
        match fs::remove_dir(&directory) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
