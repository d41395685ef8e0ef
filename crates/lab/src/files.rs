//! Removing trees without ever leaving their file system.

use std::{
    ffi::CStr,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::Path,
};

use rustix::{
    fs::{self, AtFlags, CWD, Dir, FileType, Mode, OFlags},
    io::Errno,
};

use crate::error::{Context, LabError};

/// Removes `path` and all below it; nothing is done if it is missing.
///
/// A directory on another file system than `path` itself, or a mount point that was overlooked, ends
/// the removal with an error instead of emptying what is mounted there.
pub(crate) fn remove_tree(path: &Path) -> Result<(), LabError> {
    remove(path).context("removing", path.display())
}

fn remove(path: &Path) -> io::Result<()> {
    let stat = match fs::lstat(path) {
        Err(Errno::NOENT) => return Ok(()),
        other => other?,
    };
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
        return Ok(fs::unlink(path)?);
    }
    let directory = open(CWD, path)?;
    empty(directory.as_fd(), stat.st_dev)?;
    Ok(fs::rmdir(path)?)
}

fn open<P: rustix::path::Arg>(parent: BorrowedFd<'_>, name: P) -> rustix::io::Result<std::os::fd::OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    fs::openat(parent, name, flags, Mode::empty())
}

fn empty(directory: BorrowedFd<'_>, device: u64) -> io::Result<()> {
    // Names first: removing while reading may skip entries.
    let mut names = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        if ![c".", c".."].contains(&entry.file_name()) {
            names.push(entry.file_name().to_owned());
        }
    }
    for name in &names {
        remove_entry(directory, name, device)?;
    }
    Ok(())
}

fn remove_entry(parent: BorrowedFd<'_>, name: &CStr, device: u64) -> io::Result<()> {
    match fs::unlinkat(parent, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(error) => return Err(error.into()),
    }
    let directory = open(parent, name)?;
    if fs::fstat(&directory)?.st_dev != device {
        return Err(io::Error::new(
            io::ErrorKind::CrossesDevices,
            format!("{} is a mount of another file system", name.to_string_lossy()),
        ));
    }
    empty(directory.as_fd(), device)?;
    Ok(fs::unlinkat(parent, name, AtFlags::REMOVEDIR)?)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs as std_fs;

    use super::*;

    #[test]
    fn trees_go_and_link_targets_stay() {
        let scratch = tempfile::tempdir().unwrap();
        let kept = scratch.path().join("kept");
        std_fs::create_dir(&kept).unwrap();
        std_fs::write(kept.join("file"), "x").unwrap();
        let tree = scratch.path().join("tree");
        std_fs::create_dir_all(tree.join("a/b/c")).unwrap();
        std_fs::write(tree.join("a/b/file"), "x").unwrap();
        std::os::unix::fs::symlink(&kept, tree.join("a/link")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        assert!(kept.join("file").exists());
        remove_tree(&tree).unwrap();
    }

    #[test]
    fn another_file_system_is_not_entered() {
        let outside = tempfile::tempdir_in("/dev/shm").unwrap();
        std_fs::write(outside.path().join("file"), "x").unwrap();
        let device = fs::stat("/proc").unwrap().st_dev;
        let parent = open(CWD, "/dev/shm").unwrap();
        let name = std::ffi::CString::new(outside.path().file_name().unwrap().to_str().unwrap()).unwrap();
        let error = remove_entry(parent.as_fd(), &name, device).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::CrossesDevices);
        assert!(outside.path().join("file").exists());
    }
}
