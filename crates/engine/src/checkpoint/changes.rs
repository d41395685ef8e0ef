//! What a container has changed of its root filesystem, as Podman's archives have it: the files that are new or other than in
//! the image, and the paths that are gone.
//!
//! overlayfs notes both in the upper directory: a name that is gone is a character device 0/0, and a directory that was made
//! anew hides the one of its name below. Podman takes the files over the image's, and then removes the paths: so for a directory
//! that hides another each name of that is listed that it does not have itself.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use serde::de::{Deserialize, Deserializer, Error as _, SeqAccess, Visitor};

use super::{ArchiveError, DELETED, ROOTFS_DIFF, Roomy, Waiter, volume};
use crate::beneath::{self, Links, Root};
use crate::image::capture::{self, Of, Stop, TakenAway};
use crate::image::{RootfsFault, layer};

/// Most paths that are gone. A list of more would not be read again.
const MOST_DELETED: usize = 1 << 20;
/// Most directories that hide others, with those within them.
const MOST_HIDDEN: usize = 1 << 20;

/// Writes what changed in an upper directory over these layers, the lowest first, into a directory: [`ROOTFS_DIFF`] and
/// [`DELETED`]. Nobody changes it meanwhile.
///
/// # Errors
/// It cannot be read, or written there, or nobody waits for it any more.
pub fn write(upper: &Path, lower: &[PathBuf], into: &Path, waiter: &Waiter) -> Result<(), ArchiveError> {
    let of = Of::Upper(TakenAway::default());
    let taken = tar(upper, &into.join(ROOTFS_DIFF), "the changed files", of, waiter)?;
    let deleted = deleted(upper, lower, taken).map_err(|source| ArchiveError::Read {
        what: "the removed files".into(),
        reason: source.to_string(),
    })?;
    let text =
        serde_json::to_vec(&deleted).map_err(|error| ArchiveError::io("write the list")(error.into()))?;
    let path = into.join(DELETED);
    std::fs::write(&path, text).map_err(ArchiveError::io(format!("write {}", path.display())))
}

/// Writes a directory as a tar archive, in which names and attributes mean nothing but themselves.
///
/// # Errors
/// It cannot be read, or written there, or nobody waits for it any more.
pub fn write_volume(directory: &Path, name: &str, to: &Path, waiter: &Waiter) -> Result<(), ArchiveError> {
    tar(directory, to, &format!("volume {name}"), Of::Files, waiter).map(drop)
}

fn tar(directory: &Path, to: &Path, what: &str, of: Of, waiter: &Waiter) -> Result<TakenAway, ArchiveError> {
    let failed = |source| ArchiveError::io(format!("write {}", to.display()))(source);
    let file = Roomy::new(File::create_new(to).map_err(failed)?, waiter.clone());
    let mut out = BufWriter::with_capacity(1 << 20, file);
    let taken = capture::pack(directory, &mut out, of).map_err(|stop| match stop {
        Stop::Fault(fault @ RootfsFault::NotKept { .. }) => {
            ArchiveError::Unkept { what: what.to_owned(), reason: fault.to_string() }
        }
        Stop::Fault(fault) => ArchiveError::Read { what: what.to_owned(), reason: fault.to_string() },
        Stop::Write(error) => failed(error),
    })?;
    out.flush().map_err(failed)?;
    Ok(taken)
}

/// The paths that are gone, as Podman lists them.
fn deleted(upper: &Path, lower: &[PathBuf], taken: TakenAway) -> io::Result<Vec<String>> {
    let open = |path: &Path| Root::open(path, Links::Refused);
    let (upper, lower) = (open(upper)?, lower.iter().map(|path| open(path)).collect::<io::Result<Vec<_>>>()?);
    let names = |root: &Root, path: &[u8]| -> io::Result<BTreeSet<Vec<u8>>> {
        match root.open_at(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW) {
            Ok(directory) => Ok(beneath::names(directory.as_fd())?.into_iter().collect()),
            // There is none, or something else under this name.
            Err(error) if is_no_directory(&error) => Ok(BTreeSet::new()),
            Err(error) => Err(error),
        }
    };
    let mut gone: BTreeSet<Vec<u8>> = taken.removed.into_iter().collect();
    let mut hidden = taken.hidden;
    let mut looked_at = 0;
    while let Some(path) = hidden.pop() {
        looked_at += 1;
        if looked_at > MOST_HIDDEN || gone.len() > MOST_DELETED {
            return Err(io::Error::other("more than a million are gone"));
        }
        let own = names(&upper, &path)?;
        let mut below = BTreeSet::new();
        for layer in &lower {
            below.extend(names(layer, &path)?);
        }
        for name in below {
            let full = if path.is_empty() { name.clone() } else { [&path[..], &name].join(&b'/') };
            match own.contains(&name) {
                // What it has there under a name of its own hides in the same way.
                true => hidden.push(full),
                false => drop(gone.insert(full)),
            }
        }
    }
    let text = |path: Vec<u8>| {
        String::from_utf8(path).map(|path| format!("/{path}")).map_err(|error| {
            io::Error::other(format!(
                "{} is gone, and its name is not UTF-8, as the list has to be",
                beneath::display(error.as_bytes())
            ))
        })
    };
    gone.into_iter().map(text).collect()
}

fn is_no_directory(error: &io::Error) -> bool {
    use rustix::io::Errno;
    matches!(Errno::from_io_error(error), Some(Errno::NOENT | Errno::NOTDIR | Errno::LOOP))
}

/// The paths that are gone, no more than [`MOST_DELETED`].
struct Deleted(Vec<String>);

impl<'de> Deserialize<'de> for Deleted {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Paths;
        impl<'de> Visitor<'de> for Paths {
            type Value = Deleted;

            fn expecting(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
                to.write_str("a list of paths")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Deleted, A::Error> {
                let mut paths = Vec::new();
                while let Some(path) = list.next_element()? {
                    if paths.len() == MOST_DELETED {
                        return Err(A::Error::custom(format!("it has more than {MOST_DELETED} paths")));
                    }
                    paths.push(path);
                }
                Ok(Deleted(paths))
            }
        }
        from.deserialize_seq(Paths)
    }
}

/// Puts what changed into a mounted root filesystem.
///
/// # Errors
/// What was unpacked is not what it should be, or cannot be put there.
pub fn apply(unpacked: &Path, root: &Path) -> Result<(), ArchiveError> {
    apply_tar(&unpacked.join(ROOTFS_DIFF), root, ROOTFS_DIFF)?;
    let path = unpacked.join(DELETED);
    let text = match std::fs::read(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(ArchiveError::io(format!("read {}", path.display()))(error)),
    };
    let damaged = |reason: String| ArchiveError::Damaged(format!("{DELETED}: {reason}"));
    let deleted: Option<Deleted> =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    let root = Root::open(root, Links::InRoot).map_err(ArchiveError::io("open the root filesystem"))?;
    for name in deleted.map(|deleted| deleted.0).unwrap_or_default() {
        let path = name.trim_start_matches('/').as_bytes();
        let plain = !path.is_empty() && !path.split(|byte| *byte == b'/').any(|part| part.is_empty());
        if !plain || beneath::check_path(path).is_err() {
            return Err(ArchiveError::Refused(format!(
                "{DELETED} names {name:?}, which is no path of a file"
            )));
        }
        let (parent, last) = beneath::split(path);
        match root.directory(parent) {
            Ok(parent) => beneath::remove_tree(parent.as_fd(), last)
                .map_err(ArchiveError::io(format!("remove {name} of the service")))?,
            Err(error) if is_no_directory(&error) => {}
            Err(error) => return Err(ArchiveError::io(format!("find the directory of {name}"))(error)),
        }
    }
    Ok(())
}

/// Unpacks a volume into its directory.
///
/// # Errors
/// It is not there or damaged, asks for what it must not, or does not fit.
pub fn apply_volume(unpacked: &Path, name: &str, directory: &Path) -> Result<(), ArchiveError> {
    let archive = unpacked.join(volume(name));
    let file = File::open(&archive).map_err(ArchiveError::io(format!("read {}", archive.display())))?;
    unpack_over(file, directory, &format!("volume {name}"))
}

/// Unpacks a tar archive over a directory; nothing happens where there is none.
fn apply_tar(archive: &Path, directory: &Path, what: &str) -> Result<(), ArchiveError> {
    match File::open(archive) {
        Ok(file) => unpack_over(file, directory, what),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(ArchiveError::io(format!("read {}", archive.display()))(error)),
    }
}

fn unpack_over(archive: File, directory: &Path, what: &str) -> Result<(), ArchiveError> {
    layer::unpack_over(archive, directory)
        .map_err(|source| ArchiveError::Files { what: what.to_owned(), source })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use rustix::fs::{CWD, FileType, Mode, XattrFlags};

    use super::super::Awaited;
    use super::*;

    /// An upper directory over one layer: a new file, a changed one, one that is gone, and a directory made anew.
    fn upper_and_lower() -> (tempfile::TempDir, PathBuf, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let (upper, lower) = (directory.path().join("upper"), directory.path().join("lower"));
        for path in ["lower/etc", "lower/anew/deep", "upper/etc", "upper/anew/deep", "lower/other"] {
            fs::create_dir_all(directory.path().join(path)).unwrap();
        }
        for path in ["etc/changed", "etc/gone", "anew/old", "anew/deep/old", "anew/deep/kept", "other/x"] {
            fs::write(lower.join(path), "old").unwrap();
        }
        fs::set_permissions(lower.join("other"), fs::Permissions::from_mode(0o1777)).unwrap();
        for path in ["etc/changed", "etc/.wh.odd", "anew/deep/kept"] {
            fs::write(upper.join(path), "new").unwrap();
        }
        symlink("changed", upper.join("etc/link")).unwrap();
        rustix::fs::mknodat(CWD, upper.join("etc/gone"), FileType::CharacterDevice, Mode::empty(), 0)
            .unwrap();
        rustix::fs::setxattr(upper.join("anew"), "trusted.overlay.opaque", b"y", XattrFlags::empty())
            .unwrap();
        (directory, upper, lower)
    }

    #[test]
    fn a_copy_of_the_image_becomes_what_the_container_had() {
        let (directory, upper, lower) = upper_and_lower();
        let into = directory.path().join("into");
        fs::create_dir(&into).unwrap();
        let awaited = Awaited::default();
        write(&upper, std::slice::from_ref(&lower), &into, &awaited.by()).unwrap();
        let deleted: Vec<String> = serde_json::from_slice(&fs::read(into.join(DELETED)).unwrap()).unwrap();
        assert_eq!(deleted, ["/anew/deep/old", "/anew/old", "/etc/gone"]);
        apply(&into, &lower).unwrap();
        let text = |path: &str| fs::read_to_string(lower.join(path)).ok();
        assert_eq!(text("etc/changed").as_deref(), Some("new"));
        assert_eq!(text("etc/.wh.odd").as_deref(), Some("new"));
        assert_eq!(text("anew/deep/kept").as_deref(), Some("new"));
        assert_eq!(fs::read_link(lower.join("etc/link")).unwrap(), Path::new("changed"));
        for gone in ["etc/gone", "anew/old", "anew/deep/old"] {
            assert_eq!(text(gone), None, "{gone}");
        }
        assert_eq!(text("other/x").as_deref(), Some("old"));
        assert_eq!(fs::metadata(lower.join("other")).unwrap().mode() & 0o7777, 0o1777);
        let mut name = [0; 64];
        assert_eq!(rustix::fs::listxattr(lower.join("anew"), &mut name[..]).unwrap(), 0);
    }

    #[test]
    fn paths_that_lead_out_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        fs::write(directory.path().join("victim"), "x").unwrap();
        symlink("..", root.join("up")).unwrap();
        let refused = |name: &str| {
            fs::write(directory.path().join(DELETED), serde_json::to_vec(&[name]).unwrap()).unwrap();
            apply(directory.path(), &root)
        };
        for name in ["/../victim", "../victim", "/", "", "/a//b", "/a/./b", "/a/../../victim"] {
            assert!(matches!(refused(name), Err(ArchiveError::Refused(_))), "{name}");
        }
        // A link is followed as the container would.
        refused("/up/victim").unwrap();
        assert!(directory.path().join("victim").exists());
    }

    #[test]
    fn a_device_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let mut archive = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::Char);
        header.set_size(0);
        header.set_device_major(1).unwrap();
        header.set_device_minor(1).unwrap();
        archive.append_data(&mut header, "mem", io::empty()).unwrap();
        fs::write(directory.path().join(ROOTFS_DIFF), archive.into_inner().unwrap()).unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        let error = apply(directory.path(), &root).unwrap_err().to_string();
        assert!(error.contains("it is a device"), "{error}");
    }

    #[test]
    fn a_list_that_fills_the_memory_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join(DELETED), format!("[{}\"\"]", "\"\",".repeat(MOST_DELETED))).unwrap();
        let error = apply(directory.path(), directory.path()).unwrap_err().to_string();
        assert!(error.contains("more than 1048576 paths"), "{error}");
        fs::write(directory.path().join(DELETED), "null").unwrap();
        apply(directory.path(), directory.path()).unwrap();
    }

    #[test]
    fn what_would_not_be_unpacked_is_not_packed() {
        let directory = tempfile::tempdir().unwrap();
        let files = directory.path().join("files");
        fs::create_dir_all(files.join("within")).unwrap();
        let device = |number| {
            let path = files.join("within/device");
            rustix::fs::mknodat(CWD, &path, FileType::CharacterDevice, Mode::empty(), number).unwrap();
            path
        };
        let awaited = Awaited::default();
        let refused = |error: ArchiveError, words: &str| {
            let text = error.to_string();
            assert!(text.contains("within") && text.contains(words), "{text}");
        };
        // In a volume the numbers 0/0 mean nothing else.
        for number in [rustix::fs::makedev(1, 3), 0] {
            let path = device(number);
            let to = directory.path().join(format!("{number}.tar"));
            refused(write_volume(&files, "data", &to, &awaited.by()).unwrap_err(), "device");
            fs::remove_file(path).unwrap();
        }
        let path = device(rustix::fs::makedev(1, 3));
        let into = directory.path().join("into");
        fs::create_dir(&into).unwrap();
        refused(write(&files, &[], &into, &awaited.by()).unwrap_err(), "device");
        fs::remove_file(path).unwrap();
        let name = "trusted.overlay.opaque";
        rustix::fs::setxattr(files.join("within"), name, b"y", XattrFlags::empty()).unwrap();
        let to = directory.path().join("opaque.tar");
        refused(write_volume(&files, "data", &to, &awaited.by()).unwrap_err(), "overlayfs");
    }
}
