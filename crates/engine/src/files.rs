//! Where the files of a container are that move with it: the changes to its root filesystem and, if it has volumes, those, as
//! one tree.
//!
//! ```text
//!  diff            the upper directory of its root filesystem
//!  volumes/NAME    each of its volumes
//! ```
//! A container of godwit's own has its files beside its root filesystem: in `upper` alone without volumes, and with volumes in
//! such a tree, `files`. How those of other engines come into one is in [`crate::foreign`].

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use godwit_names::VolumeName;
use rustix::fs::OFlags;

use crate::beneath::{Links, Root, names};
use crate::tree::{Limits, Receiver, Snapshot, TreeError, send};

/// Where the changes are in a tree.
pub const UPPER: &str = "diff";

/// Where the volumes are in a tree, each in a directory with its name.
pub const VOLUMES: &str = "volumes";

/// The files of a container of godwit's own, in the directory that has its root filesystem.
#[must_use]
pub fn moving(directory: &Path, has_volumes: bool) -> PathBuf {
    directory.join(if has_volumes { "files" } else { "upper" })
}

/// The upper directory of its root filesystem.
#[must_use]
pub fn upper(directory: &Path, has_volumes: bool) -> PathBuf {
    let files = moving(directory, has_volumes);
    if has_volumes { files.join(UPPER) } else { files }
}

/// The directory that has its volumes, each by its name.
#[must_use]
pub fn volumes(directory: &Path) -> PathBuf {
    moving(directory, true).join(VOLUMES)
}

/// Refuses what another node has sent as the files of a container with volumes, unless the parts that are used by their paths
/// are directories, the volumes are these, and the files of them that are mounted are files. Nobody but the receiver of the files may write to them.
///
/// # Errors
/// It is something else.
pub fn check(
    directory: &Path,
    expected: &BTreeSet<&VolumeName>,
    mounted: &[(&VolumeName, &str)],
) -> Result<(), TreeError> {
    if expected.is_empty() {
        return Ok(());
    }
    let files = moving(directory, true);
    let refused = |path: &[u8], reason| {
        Err(TreeError::Refused { root: files.clone(), path: crate::beneath::display(path), reason })
    };
    let open = |path: &[u8]| {
        let root = Root::open(&files, Links::Refused)?;
        root.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW)
    };
    if open(UPPER.as_bytes()).is_err() {
        return refused(UPPER.as_bytes(), "it is no directory");
    }
    let Ok(found) = open(VOLUMES.as_bytes()).and_then(|volumes| names(volumes.as_fd())) else {
        return refused(VOLUMES.as_bytes(), "it is no directory");
    };
    let found: BTreeSet<_> = found.iter().map(Vec::as_slice).collect();
    if found != expected.iter().map(|name| name.as_str().as_bytes()).collect() {
        return refused(VOLUMES.as_bytes(), "it has other volumes than the service");
    }
    for name in found {
        let path = [VOLUMES.as_bytes(), name].join(&b'/');
        if open(&path).is_err() {
            return refused(&path, "it is no directory");
        }
    }
    for (name, file) in mounted {
        let path = [VOLUMES, name.as_str(), file].join("/").into_bytes();
        let root = Root::open(&files, Links::Refused);
        let is_file = root.and_then(|root| root.node(&path)?.statx()).is_ok_and(|found| is_file(&found));
        if !is_file {
            return refused(&path, "it is no file");
        }
    }
    Ok(())
}

fn is_file(found: &rustix::fs::Statx) -> bool {
    rustix::fs::FileType::from_raw_mode(found.stx_mode.into()) == rustix::fs::FileType::RegularFile
}

/// Refuses a volume that another node has sent, unless this is a file in it and no link.
///
/// # Errors
/// It is something else.
pub(crate) fn check_file(volume: &Path, file: &str) -> io::Result<()> {
    match Root::open(volume, Links::Refused)?.node(file.as_bytes())?.statx()? {
        found if is_file(&found) => Ok(()),
        _ => Err(io::Error::other("what has come in the place of a file is none")),
    }
}

/// Whether no other filesystem begins in a volume, whose files are not the volume's.
///
/// # Errors
/// One does.
pub fn is_whole(volume: &Path) -> Result<(), TreeError> {
    Snapshot::scan(volume)?.whole().map(drop)
}

/// Removes a volume that [is whole](is_whole).
///
/// # Errors
/// It is not, and nothing was removed; or something cannot be removed.
pub fn remove_volume(volume: &Path) -> Result<(), TreeError> {
    is_whole(volume)?;
    let fault = |source| TreeError::Io {
        root: volume.to_path_buf(),
        action: "remove".into(),
        path: "/".into(),
        source,
    };
    fs::remove_dir_all(volume).map_err(fault)
}

/// Where a mount is in a root filesystem that is mounted: its target may lead over links of the image. One that is in another
/// mount is where it is said to be.
pub(crate) fn place_of(root: &Path, target: &Path) -> io::Result<PathBuf> {
    match Root::open(root, Links::InRoot).and_then(|root| root.path_of(target.as_os_str().as_bytes())) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(target.to_owned()),
        found => found,
    }
}

/// Gives an empty volume what the image has in the place of the volume: files, owners and modes. A volume with files stays as
/// it is. `scratch` is a path on the volume's filesystem at which nothing is.
///
/// # Errors
/// Something cannot be read or written; the volume is as it was then.
pub fn fill_volume(root: &Path, target: &Path, volume: &Path, scratch: &Path) -> Result<(), TreeError> {
    let fault = |action: &str, path: &Path| {
        let (root, action, path) = (root.to_path_buf(), action.to_owned(), path.display().to_string());
        move |source: io::Error| TreeError::Io { root, action, path, source }
    };
    let mut there = fs::read_dir(volume).map_err(fault("list", volume))?;
    if there.next().is_some() {
        return Ok(());
    }
    // Links are the image's: they lead nowhere but into the image.
    let flags = OFlags::PATH | OFlags::DIRECTORY;
    let opened = Root::open(root, Links::InRoot).and_then(|within| {
        drop(within.open_at(target.as_os_str().as_bytes(), flags)?);
        within.path_of(target.as_os_str().as_bytes())
    });
    let from = match opened {
        Ok(inside) => root.join(inside.strip_prefix("/").unwrap_or(&inside)),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(());
        }
        Err(error) => return Err(fault("open", target)(error)),
    };
    let snapshot = Snapshot::scan_frozen(&from)?;
    let everything = snapshot.everything();
    let limits = Limits { entries: everything.entries(), bytes: u64::MAX, devices: true };
    fs::create_dir(scratch).map_err(fault("create", scratch))?;
    let mut receiver = Receiver::new(scratch, limits)?;
    send(&from, &everything, &mut |item| receiver.apply(item))?;
    receiver.finish()?.sync()?;
    // All of it or nothing. An empty directory may be replaced.
    fs::rename(scratch, volume).map_err(fault("put the image's files into", volume))?;
    [volume, scratch].into_iter().filter_map(Path::parent).try_for_each(|directory| {
        File::open(directory)
            .and_then(|opened| opened.sync_all())
            .map_err(fault("write to the disk", directory))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use super::*;

    #[test]
    fn an_empty_volume_begins_with_what_the_image_has_there() {
        let scratch = tempfile::tempdir().unwrap();
        let at = |name: &str| scratch.path().join(name);
        fs::create_dir_all(at("root/var/lib/data/deep")).unwrap();
        fs::create_dir_all(at("outside")).unwrap();
        fs::write(at("outside/secret"), "secret").unwrap();
        fs::write(at("root/var/lib/data/deep/file"), "content").unwrap();
        fs::set_permissions(at("root/var/lib/data"), fs::Permissions::from_mode(0o700)).unwrap();
        std::os::unix::fs::chown(at("root/var/lib/data"), Some(7), Some(8)).unwrap();
        symlink("/var/lib", at("root/link")).unwrap();
        symlink(at("outside"), at("root/out")).unwrap();
        let volume = |name: &str| {
            fs::create_dir(at(name)).unwrap();
            at(name)
        };

        let filled = volume("filled");
        let fill_volume = |root: &Path, target: &Path, volume: &Path| {
            super::fill_volume(root, target, volume, &at("scratch"))
        };
        fill_volume(&at("root"), Path::new("/link/data"), &filled).unwrap();
        assert_eq!(fs::read_to_string(filled.join("deep/file")).unwrap(), "content");
        let found = fs::metadata(&filled).unwrap();
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (7, 8, 0o700));

        // What the service has written is not written over.
        fs::write(filled.join("deep/file"), "newer").unwrap();
        fill_volume(&at("root"), Path::new("/var/lib/data"), &filled).unwrap();
        assert_eq!(fs::read_to_string(filled.join("deep/file")).unwrap(), "newer");

        // Neither what the image lacks, nor what is no directory there, nor what is outside.
        for target in ["/nowhere", "/var/lib/data/deep/file", "/out", "/../outside"] {
            let empty = volume(&format!("empty-{}", target.replace('/', "-")));
            fill_volume(&at("root"), Path::new(target), &empty).unwrap();
            assert_eq!(fs::read_dir(&empty).unwrap().count(), 0, "{target}");
        }
    }

    #[test]
    fn what_is_used_by_its_path_is_a_directory_of_the_service() {
        let data: VolumeName = "data".parse().unwrap();
        let expected = BTreeSet::from([&data]);
        let tree = || {
            let scratch = tempfile::tempdir().unwrap();
            fs::create_dir_all(scratch.path().join("files/diff")).unwrap();
            fs::create_dir_all(scratch.path().join("files/volumes/data")).unwrap();
            fs::write(scratch.path().join("files/volumes/data/conf"), "").unwrap();
            scratch
        };
        let right = tree();
        let mounted = [(&data, "conf")];
        check(right.path(), &expected, &mounted).unwrap();
        check(right.path(), &BTreeSet::new(), &[]).unwrap();
        check_file(&right.path().join("files/volumes/data"), "conf").unwrap();
        assert!(check_file(&right.path().join("files/volumes"), "data").is_err(), "a directory");
        type Spoil = fn(&Path);
        let spoilt: [(&str, Spoil); 8] = [
            ("a link in the place of a file that is mounted", |files| {
                fs::remove_file(files.join("volumes/data/conf")).unwrap();
                symlink("/etc/passwd", files.join("volumes/data/conf")).unwrap();
                assert!(check_file(&files.join("volumes/data"), "conf").is_err());
            }),
            ("without a file that is mounted", |files| {
                fs::remove_file(files.join("volumes/data/conf")).unwrap();
            }),
            ("a link in the place of the changes", |files| {
                fs::remove_dir(files.join("diff")).unwrap();
                symlink("/etc", files.join("diff")).unwrap();
            }),
            ("a link in the place of a volume", |files| {
                fs::remove_dir_all(files.join("volumes/data")).unwrap();
                symlink("/", files.join("volumes/data")).unwrap();
            }),
            ("a link in the place of all volumes", |files| {
                fs::rename(files.join("volumes"), files.join("elsewhere")).unwrap();
                symlink("elsewhere", files.join("volumes")).unwrap();
            }),
            ("a file in the place of a volume", |files| {
                fs::remove_dir_all(files.join("volumes/data")).unwrap();
                fs::write(files.join("volumes/data"), "").unwrap();
            }),
            ("a volume that it does not have", |files| fs::create_dir(files.join("volumes/other")).unwrap()),
            ("without its volume", |files| fs::remove_dir_all(files.join("volumes/data")).unwrap()),
        ];
        for (what, spoil) in spoilt {
            let scratch = tree();
            spoil(&scratch.path().join("files"));
            let refused = check(scratch.path(), &expected, &mounted).unwrap_err();
            assert!(matches!(refused, TreeError::Refused { .. }), "{what}: {refused}");
        }
    }

    #[test]
    fn files_are_one_tree_where_there_are_volumes() {
        let directory = Path::new("/s");
        assert_eq!(upper(directory, false), moving(directory, false));
        for part in [upper(directory, true), volumes(directory)] {
            assert!(part.starts_with(moving(directory, true)), "{}", part.display());
        }
    }
}
