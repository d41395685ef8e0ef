//! Makes the names under which images find files that are open and have lost the name they were opened by: see
//! [`linked`](crate::linked).

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::fstatat;
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};
use prost::Message;

use crate::images::{FileEntry, ImageError, ImageKind, decode};
use crate::linked::{NOTE, is_name_of_criu, open_beneath, open_root, parse};
use crate::places::Places;

/// `LINKED` of CRIU's `remap_type`.
const LINKED: u32 = 0;

/// Most bytes that an image read here may have: a hundred thousand files with long names.
const LIMIT: u64 = 64 << 20;

/// `remap_file_path_entry`.
#[derive(Clone, PartialEq, Eq, Message)]
struct Remap {
    #[prost(uint32, required, tag = "1")]
    file: u32,
    #[prost(uint32, required, tag = "2")]
    name: u32,
    #[prost(uint32, optional, tag = "3")]
    kind: Option<u32>,
}

/// Names that are there for a restore. They are removed when this is dropped, unless the restore has done so.
#[derive(Debug, Default)]
pub struct Links(Vec<(OwnedFd, PathBuf)>);

impl Drop for Links {
    fn drop(&mut self) {
        for (directory, name) in &self.0 {
            match unlinkat(directory, name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(nix::Error::ENOENT) => {}
                Err(error) => {
                    tracing::error!(%error, name = %name.display(), "a link for a restore is not removed")
                }
            }
        }
    }
}

/// Makes them in the places of the service. Images without such files need none.
///
/// # Errors
/// An image is damaged, or a file that they tell of is not there.
pub fn links(images: &Path, places: &Places) -> Result<Links, ImageError> {
    let note = images.join(NOTE);
    let Some(bytes) = read(&note)? else { return Ok(Links::default()) };
    let damaged = |reason: String| ImageError::Damaged { path: note.clone(), reason };
    let others = parse(&bytes).map_err(|reason| damaged(reason.into()))?;
    let remaps: Vec<Remap> = messages(&images.join("remap-fpath.img"), ImageKind::RemapPaths)?;
    let files: Vec<FileEntry> = messages(&images.join("files.img"), ImageKind::Files)?;
    let name_of = |id: u32| {
        let file = files.iter().find(|file| file.id == id && file.regular.is_some())?;
        let name = &file.regular.as_ref()?.name;
        Some(Path::new(std::ffi::OsStr::from_bytes(name.strip_prefix(b"/").unwrap_or(name))))
    };
    let mut made = Links::default();
    for remap in remaps.iter().filter(|remap| remap.kind.unwrap_or(LINKED) == LINKED) {
        let (Some(gone), Some(new)) = (name_of(remap.file), name_of(remap.name)) else {
            return Err(damaged(format!("the files {} and {} have no names", remap.file, remap.name)));
        };
        // One in a tmpfs: it is in the images.
        let Some(other) = others.get(gone) else { continue };
        let made_one = make(places, other, new).map_err(|error| {
            damaged(format!("{} cannot be linked to {}: {error}", new.display(), other.display()))
        })?;
        made.0.push(made_one);
    }
    Ok(made)
}

fn make(places: &Places, other: &Path, new: &Path) -> io::Result<(OwnedFd, PathBuf)> {
    let name = |path: &Path| path.file_name().map(PathBuf::from).ok_or(io::ErrorKind::InvalidInput);
    let parent = |path: &Path| {
        let (place, path) = places.of(path);
        let parent = path.parent().unwrap_or(Path::new(""));
        open_beneath(open_root(place)?, parent, OFlag::O_PATH | OFlag::O_DIRECTORY)
    };
    let (from, to) = (name(other)?, name(new)?);
    if !is_name_of_criu(to.as_os_str().as_bytes()) {
        return Err(io::Error::other("CRIU gives no such names"));
    }
    let (source, target) = (parent(other)?, parent(new)?);
    match linkat(&source, &from, &target, &to, AtFlags::empty()) {
        Ok(()) => {}
        // Made by an attempt that was interrupted.
        Err(nix::Error::EEXIST) if is_same((&source, &from), (&target, &to))? => {}
        Err(error) => return Err(error.into()),
    }
    Ok((target, to))
}

fn is_same(one: (&OwnedFd, &Path), other: (&OwnedFd, &Path)) -> io::Result<bool> {
    let [one, other] = [one, other].map(|(at, name)| fstatat(at, name, AtFlags::AT_SYMLINK_NOFOLLOW));
    let (one, other) = (one?, other?);
    Ok((one.st_dev, one.st_ino) == (other.st_dev, other.st_ino))
}

/// The bytes of an image; none where there is no such image.
fn read(path: &Path) -> Result<Option<Vec<u8>>, ImageError> {
    let failed = |source| ImageError::Read { path: path.to_owned(), source };
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(failed(error)),
        Ok(found) if found.len() > LIMIT => Err(ImageError::Damaged {
            path: path.to_owned(),
            reason: format!("it is longer than {LIMIT} bytes"),
        }),
        Ok(_) => fs::read(path).map(Some).map_err(failed),
    }
}

fn messages<M: Message + Default>(path: &Path, kind: ImageKind) -> Result<Vec<M>, ImageError> {
    let bytes = read(path)?.unwrap_or_default();
    if bytes.is_empty() {
        return Ok(Vec::new());
    }
    decode(&bytes, kind).map_err(|reason| ImageError::Damaged { path: path.to_owned(), reason })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::images::RegularFile;

    fn image<M: Message>(kind: ImageKind, messages: &[M]) -> Vec<u8> {
        let mut bytes = [0x5456_4319_u32, kind as u32].map(u32::to_le_bytes).concat();
        for message in messages {
            let message = message.encode_to_vec();
            bytes.extend(u32::try_from(message.len()).unwrap().to_le_bytes());
            bytes.extend(message);
        }
        bytes
    }

    /// Images of one file, opened as `/data/gone`, that CRIU knows by another name; and its root directory, in which it
    /// is `/data/other`.
    fn service(name: &str, note: &[u8]) -> (tempfile::TempDir, PathBuf, PathBuf) {
        let directory = tempfile::tempdir().unwrap();
        let (images, root) = (directory.path().join("images"), directory.path().join("root"));
        fs::create_dir(&images).unwrap();
        fs::create_dir_all(root.join("data")).unwrap();
        fs::write(root.join("data/other"), "content").unwrap();
        let file = |id, name: &str| {
            let regular = Some(RegularFile { name: name.as_bytes().to_vec(), mode: None });
            FileEntry { kind: 1, id, regular }
        };
        let files = [file(5, "/data/gone"), file(6, name)];
        // The kind of the file stands before its id.
        let files = image(ImageKind::Files, &files);
        fs::write(images.join("files.img"), files).unwrap();
        let remaps =
            [Remap { file: 5, name: 6, kind: Some(LINKED) }, Remap { file: 9, name: 1, kind: Some(1) }];
        fs::write(images.join("remap-fpath.img"), image(ImageKind::RemapPaths, &remaps)).unwrap();
        fs::write(images.join(NOTE), note).unwrap();
        (directory, images, root)
    }

    #[test]
    fn the_name_is_there_for_the_restore_and_gone_afterwards() {
        let (_directory, images, root) = service("/data/link_remap.6", b"data/gone\0data/other\0");
        let made = links(&images, &Places::new(&root, &[])).unwrap();
        assert_eq!(fs::read_to_string(root.join("data/link_remap.6")).unwrap(), "content");
        // Once more, as after a crash.
        drop(links(&images, &Places::new(&root, &[])).unwrap());
        assert!(!root.join("data/link_remap.6").exists());
        drop(made);
        fs::remove_file(images.join(NOTE)).unwrap();
        assert!(links(&images, &Places::new(&root, &[])).unwrap().0.is_empty());
    }

    #[test]
    fn what_the_source_names_must_be_below_the_root_and_no_other_file() {
        for (name, note) in [
            ("/data/passwd", &b"data/gone\0data/other\0"[..]),
            ("/../link_remap.1", b"data/gone\0data/other\0"),
            ("/link/link_remap.1", b"data/gone\0data/other\0"),
            ("/data/link_remap.1", b"data/gone\0../secret\0"),
            ("/data/link_remap.1", b"data/gone\0data/missing\0"),
            ("/data/link_remap.1", b"data/gone\0"),
            ("/data/taken/link_remap.1", b"data/gone\0data/other\0"),
        ] {
            let (directory, images, root) = service(name, note);
            fs::write(directory.path().join("secret"), "").unwrap();
            fs::create_dir(root.join("data/taken")).unwrap();
            fs::write(root.join("data/taken/link_remap.1"), "the service's own").unwrap();
            std::os::unix::fs::symlink(directory.path(), root.join("link")).unwrap();
            assert!(links(&images, &Places::new(&root, &[])).is_err(), "{name}");
            assert!(!directory.path().join("link_remap.1").exists());
            assert!(root.join("data/taken/link_remap.1").exists());
        }
    }
}
