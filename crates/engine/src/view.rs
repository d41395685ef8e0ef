//! Directories of one filesystem that are reached by different mounts.
//!
//! No rename crosses mounts, even of the same filesystem, and Podman and Docker bind a part of their storage on itself. So both
//! names are looked up in a view of a directory above them that has no mount in it. No link is followed in that view: what has
//! come from another node may have some that lead out of it.

use std::ffi::OsString;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, ResolveFlags, fstat, openat2, renameat_with, statat,
};
use rustix::io::Errno;
use rustix::mount::{OpenTreeFlags, open_tree};

/// A directory and what is below it on its filesystem.
struct View {
    tree: OwnedFd,
    above: PathBuf,
}

impl View {
    fn of(above: &Path) -> io::Result<Self> {
        let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
        Ok(Self { tree: open_tree(CWD, above, flags)?, above: above.to_owned() })
    }

    fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        let not_below = |_| io::Error::other(format!("it is not in {}", self.above.display()));
        let below = path.strip_prefix(&self.above).map_err(not_below)?;
        let below = if below.as_os_str().is_empty() { Path::new(".") } else { below };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        Ok(openat2(&self.tree, below, flags, Mode::empty(), resolve)?)
    }

    /// The directory that has a name, and the name.
    fn parent(&self, path: &Path) -> io::Result<(OwnedFd, OsString)> {
        let parts = path.parent().zip(path.file_name());
        let (parent, name) = parts.ok_or_else(|| io::Error::from(ErrorKind::InvalidInput))?;
        Ok((self.directory(parent)?, name.to_owned()))
    }

    /// Whether a directory is in it, and not another that a mount covers.
    fn shows(&self, path: &Path) -> io::Result<bool> {
        let found = match self.directory(path) {
            Ok(found) => fstat(&found)?,
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        let itself = fs::metadata(path)?;
        Ok((found.st_dev, found.st_ino) == (itself.dev(), itself.ino()))
    }

    fn rename(&self, from: &Path, to: &Path, flags: RenameFlags) -> io::Result<()> {
        let ((from, name), (to, new_name)) = (self.parent(from)?, self.parent(to)?);
        let renamed = statat(&from, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        if FileType::from_raw_mode(renamed.st_mode) != FileType::Directory {
            return Err(io::Error::other("what has come for it is no directory"));
        }
        Ok(renameat_with(&from, &name, &to, &new_name, flags)?)
    }
}

/// The lowest directory above both.
fn above(one: &Path, other: &Path) -> PathBuf {
    let same = one.components().zip(other.components()).take_while(|(one, other)| one == other);
    same.map(|(part, _)| part).collect()
}

/// Whether what is in one directory can get a name in another without being copied.
pub(crate) fn are_joined(one: &Path, other: &Path) -> io::Result<bool> {
    let (one, other) = (one.canonicalize()?, other.canonicalize()?);
    // A subvolume is no mount, and takes no name from outside either.
    if fs::metadata(&one)?.dev() != fs::metadata(&other)?.dev() {
        return Ok(false);
    }
    let view = View::of(&above(&one, &other))?;
    Ok(view.shows(&one)? && view.shows(&other)?)
}

/// Has what has come, which is in the storage of an engine, change places with a directory of the engine's. To that links may
/// lead.
pub(crate) fn exchange(storage: &Path, come: &Path, engines: &Path) -> io::Result<()> {
    let parts = engines.parent().zip(engines.file_name());
    let (parent, name) = parts.ok_or_else(|| io::Error::from(ErrorKind::InvalidInput))?;
    let (plain, parent) = (storage.canonicalize()?, parent.canonicalize()?);
    let come = plain.join(come.strip_prefix(storage).map_err(io::Error::other)?);
    let view = View::of(&above(&plain, &parent))?;
    if !view.shows(&parent)? {
        return Err(Errno::XDEV.into());
    }
    view.rename(&come, &parent.join(name), RenameFlags::EXCHANGE)
}

/// Gives a directory a new name, which nothing has.
///
/// # Errors
/// Something has the name, it is on another filesystem, or a directory above one of them cannot be looked into.
pub fn rename_directory(from: &Path, to: &Path) -> io::Result<()> {
    match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
        Err(Errno::XDEV) => {}
        renamed => return Ok(renamed?),
    }
    let plain = |path: &Path| {
        let parts = path.parent().zip(path.file_name());
        let (parent, name) = parts.ok_or_else(|| io::Error::from(ErrorKind::InvalidInput))?;
        Ok::<_, io::Error>(parent.canonicalize()?.join(name))
    };
    let (from, to) = (plain(from)?, plain(to)?);
    let view = View::of(&above(&from, &to))?;
    for parent in [from.parent(), to.parent()].into_iter().flatten() {
        if !view.shows(parent)? {
            return Err(Errno::XDEV.into());
        }
    }
    view.rename(&from, &to, RenameFlags::NOREPLACE)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    use super::*;

    /// A mount, until this is dropped.
    struct Mounted(PathBuf);

    impl Mounted {
        fn at(what: &Path, place: &Path, kind: Option<&str>, flags: MsFlags) -> Self {
            mount(Some(what), place, kind, flags, None::<&str>).unwrap();
            Self(place.to_owned())
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            umount2(&self.0, MntFlags::MNT_DETACH).unwrap();
        }
    }

    #[test]
    fn a_directory_gets_a_name_on_another_mount_of_its_filesystem() {
        let scratch = tempfile::tempdir().unwrap();
        let [from, to, other] = ["from", "to", "other"].map(|name| scratch.path().join(name));
        for directory in [&from, &to, &other] {
            fs::create_dir_all(directory.join("deep")).unwrap();
        }
        let _bound = Mounted::at(&to, &to, None, MsFlags::MS_BIND);
        let _apart = Mounted::at(Path::new("none"), &other, Some("tmpfs"), MsFlags::empty());
        fs::write(from.join("deep/file"), "1").unwrap();
        let plain = fs::rename(from.join("deep"), to.join("new"));
        assert_eq!(plain.unwrap_err().kind(), ErrorKind::CrossesDevices);
        assert!(are_joined(&from, &to).unwrap() && are_joined(&from, &from).unwrap());
        assert!(!are_joined(&from, &other).unwrap());

        let names = |to: &Path| rename_directory(&from.join("deep"), to).map_err(|error| error.kind());
        assert_eq!(names(&to.join("deep")), Err(ErrorKind::AlreadyExists));
        assert_eq!(names(&other.join("new")), Err(ErrorKind::CrossesDevices));
        assert_eq!(names(&to.join("new")), Ok(()));
        assert_eq!(fs::read_to_string(to.join("new/file")).unwrap(), "1");
        // And back, by a link to where it is.
        std::os::unix::fs::symlink(&to, scratch.path().join("link")).unwrap();
        rename_directory(&scratch.path().join("link/new"), &from.join("again")).unwrap();
        assert!(from.join("again/file").exists() && !to.join("new").exists());

        // What has come changes places with what an engine has elsewhere, by a link of the engine's and by none in what has come.
        let (come, link) = (from.join("again"), scratch.path().join("link"));
        exchange(&from, &come, &link.join("deep")).unwrap();
        assert!(to.join("deep/file").exists() && come.exists() && !come.join("file").exists());
        std::os::unix::fs::symlink(&other, from.join("out")).unwrap();
        assert!(exchange(&from, &from.join("out/deep"), &to.join("deep")).is_err());
        assert!(exchange(&from, &to.join("deep"), &come).is_err(), "it is not in the storage");
        let apart = exchange(&from, &come, &other.join("deep")).map_err(|error| error.kind());
        assert_eq!(apart, Err(ErrorKind::CrossesDevices), "another filesystem covers it");
    }
}
