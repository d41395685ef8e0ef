//! Files that are open under a name that was deleted, while they have another one.
//!
//! CRIU gives such a file a third name, `link_remap.N`, in the directory of the deleted one, and its images tell that
//! name. It takes it back at the end of the dump, before the files are sent anywhere. So the other name is looked
//! for here and noted beside the images:
//!
//! ```text
//! source: other name found and noted ─▶ dump, CRIU's name comes and goes
//! destination: CRIU's name is made, a link to the other one ─▶ restore ─▶ it is removed
//! ```
//!
//! A CRIU that is killed takes nothing back: then it is done here. In a tmpfs of the service nothing is to be
//! done, since CRIU's images hold its files, with that name.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat2};
use nix::sys::stat::Mode;
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use nix::unistd::{UnlinkatFlags, unlinkat};

use crate::open_files::{OpenFile, walk};
use crate::places::Places;

/// The note beside the images: the deleted name and the other name of each file, each with a zero at its end.
pub(crate) const NOTE: &str = "linked-files.img";

/// What CRIU's names begin with; a number follows.
const PREFIX: &str = "link_remap.";

/// Device and inode.
pub(crate) type Identity = (u64, u64);

/// The files of a service that are open under deleted names and have others.
#[derive(Debug, Default)]
pub(crate) struct Linked {
    places: Places,
    /// Deleted name and other name, relative to the root.
    files: Vec<(Vec<u8>, Vec<u8>, Identity)>,
    /// Whether CRIU may make its names.
    pub(crate) can_be_dumped: bool,
    /// The places among the open files of those that have no other name which goes along.
    pub(crate) nameless: Vec<usize>,
}

impl Linked {
    /// Looks for them. If one has no other name that goes along, CRIU is to make none of its names, and says so.
    pub(crate) fn find(open: &[OpenFile], places: &Places) -> Self {
        let mut found = Self { places: places.clone(), ..Self::default() };
        let mut gone: HashMap<&[u8], (Identity, Vec<usize>)> = HashMap::new();
        let mut is_in_tmpfs = false;
        for (at, file) in open.iter().enumerate() {
            let (Some(name), Ok(status)) = (file.deleted(), fs::metadata(file.entry("fd"))) else { continue };
            if !status.is_file() || status.nlink() == 0 {
                continue;
            }
            let name = name.strip_prefix(b"/").unwrap_or(name);
            let of_place = statfs(places.of(Path::new(OsStr::from_bytes(name))).0);
            match (statfs(&file.entry("fd")), of_place) {
                (Ok(system), Ok(of_place)) if system.filesystem_id() == of_place.filesystem_id() => {
                    let identity = (status.dev(), status.ino());
                    let (first, all) = gone.entry(name).or_insert_with(|| (identity, Vec::new()));
                    // Two files of one name: images tell names only.
                    if *first == identity { all.push(at) } else { found.nameless.push(at) }
                }
                (Ok(system), Ok(_)) if system.filesystem_type() == TMPFS_MAGIC => is_in_tmpfs = true,
                // A directory of the node: what is linked there is there for all.
                _ => found.nameless.push(at),
            }
        }
        if !gone.is_empty() {
            let mut others: HashMap<Identity, Option<Vec<u8>>> =
                gone.values().map(|(identity, _)| (*identity, None)).collect();
            let mut missing = others.len();
            for (inside, directory) in places.all() {
                walk(directory, |path, status| {
                    if let Some(other @ None) = others.get_mut(&(status.dev(), status.ino())) {
                        *other = Some(inside.join(path).as_os_str().as_bytes().to_vec());
                        missing -= 1;
                    }
                    if missing == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                });
            }
            for (name, (identity, all)) in gone {
                match others.get(&identity) {
                    Some(Some(other)) => found.files.push((name.to_vec(), other.clone(), identity)),
                    _ => found.nameless.extend(all),
                }
            }
        }
        // Else CRIU would give them names that nobody makes at the destination.
        found.can_be_dumped = found.nameless.is_empty() && (is_in_tmpfs || !found.files.is_empty());
        found
    }

    /// Whether it has another name.
    pub(crate) fn has(&self, identity: Identity) -> bool {
        self.files.iter().any(|(.., of)| *of == identity)
    }

    /// Writes the note.
    pub(crate) fn note(&self, images: &Path) -> io::Result<()> {
        if self.files.is_empty() || !self.can_be_dumped {
            return Ok(());
        }
        let names = self.files.iter().flat_map(|(gone, other, _)| [gone, other]);
        let text: Vec<u8> = names.flat_map(|name| name.iter().copied().chain([0])).collect();
        fs::write(images.join(NOTE), text)
    }

    /// Removes names of these files that a CRIU which was killed has left.
    pub(crate) fn clean(&self) {
        for (gone, other, identity) in &self.files {
            if let Err(error) = clean_one(&self.places, gone, other, *identity) {
                let name = String::from_utf8_lossy(gone);
                tracing::warn!(%error, %name, "cannot check whether CRIU has left a link to the file");
            }
        }
    }
}

fn clean_one(places: &Places, gone: &[u8], other: &[u8], identity: Identity) -> io::Result<()> {
    let path = |name| places.of(Path::new(OsStr::from_bytes(name)));
    let ((place, gone), (_, other)) = (path(gone), path(other));
    let root = open_root(place)?;
    let mut directory = gone.parent();
    // Where that is deleted too, CRIU takes the one above.
    while let Some(path) = directory {
        match open_beneath(&root, path, OFlag::O_DIRECTORY | OFlag::O_RDONLY) {
            Ok(opened) => {
                for entry in fs::read_dir(format!("/proc/self/fd/{}", opened.as_raw_fd()))?.flatten() {
                    let name = entry.file_name();
                    let is_other = path.join(&name) == other;
                    let is_it = || entry.metadata().is_ok_and(|found| (found.dev(), found.ino()) == identity);
                    if is_name_of_criu(name.as_bytes()) && !is_other && is_it() {
                        unlinkat(&opened, name.as_os_str(), UnlinkatFlags::NoRemoveDir)?;
                    }
                }
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => directory = path.parent(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether CRIU would choose such a name.
pub(crate) fn is_name_of_criu(name: &[u8]) -> bool {
    name.strip_prefix(PREFIX.as_bytes())
        .is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

/// The pairs of a note: deleted name and other name, relative to the root.
pub(crate) fn parse(note: &[u8]) -> Result<HashMap<PathBuf, PathBuf>, &'static str> {
    let Some(note) = note.strip_suffix(&[0]) else { return Err("it does not end with a zero") };
    let names: Vec<&[u8]> = note.split(|byte| *byte == 0).collect();
    let pairs = names.chunks_exact(2);
    if !pairs.remainder().is_empty() {
        return Err("its number of names is odd");
    }
    let path = |name: &&[u8]| PathBuf::from(std::ffi::OsString::from_vec(name.to_vec()));
    Ok(pairs.filter_map(|pair| Some((path(pair.first()?), path(pair.last()?)))).collect())
}

pub(crate) fn open_root(root: &Path) -> io::Result<OwnedFd> {
    Ok(open(root, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?)
}

/// Opens what is at a path below a directory, without following any link.
pub(crate) fn open_beneath(root: impl AsFd, path: &Path, flags: OFlag) -> io::Result<OwnedFd> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
    Ok(openat2(root, path, how)?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use std::fs::File;

    use super::*;
    use crate::open_files;

    /// The files of this process below a directory, as seen from there.
    fn open_below(root: &Path) -> Vec<OpenFile> {
        let mut open = open_files::of(&[std::process::id()]);
        open.retain_mut(|file| match file.link.strip_prefix(root) {
            Ok(inside) => {
                file.link = Path::new("/").join(inside);
                true
            }
            Err(_) => false,
        });
        open
    }

    #[test]
    fn the_other_name_is_found_and_noted_and_what_a_killed_criu_left_is_removed() {
        let (root, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("deep/below")).unwrap();
        fs::create_dir(at("elsewhere")).unwrap();
        let files: Vec<File> =
            ["deep/below/gone", "deep/kept", "deep/ghost"].map(|name| File::create(at(name)).unwrap()).into();
        fs::hard_link(at("deep/below/gone"), at("elsewhere/other")).unwrap();
        fs::remove_dir_all(at("deep/below")).unwrap();
        fs::remove_file(at("deep/ghost")).unwrap();
        let linked = Linked::find(&open_below(root.path()), &Places::new(root.path(), &[]));
        assert!(linked.can_be_dumped);
        linked.note(images.path()).unwrap();
        let note = fs::read(images.path().join(NOTE)).unwrap();
        let expected = HashMap::from([("deep/below/gone".into(), "elsewhere/other".into())]);
        assert_eq!(parse(&note).unwrap(), expected);

        // The directory is gone, so CRIU takes the one above. The second is another file, the third no name of its.
        fs::hard_link(at("elsewhere/other"), at("deep/link_remap.7")).unwrap();
        fs::hard_link(at("deep/kept"), at("deep/link_remap.8")).unwrap();
        fs::hard_link(at("elsewhere/other"), at("deep/link_remap.x")).unwrap();
        linked.clean();
        let mut left: Vec<_> =
            fs::read_dir(at("deep")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["kept", "link_remap.8", "link_remap.x"]);
        drop(files);
    }

    #[test]
    fn a_file_whose_other_name_is_out_of_reach_is_left_to_criu() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("root");
        fs::create_dir(&root).unwrap();
        let file = File::create(root.join("gone")).unwrap();
        fs::hard_link(root.join("gone"), directory.path().join("outside")).unwrap();
        fs::remove_file(root.join("gone")).unwrap();
        let linked = Linked::find(&open_below(&root), &Places::new(&root, &[]));
        assert!(!linked.can_be_dumped && linked.files.is_empty());
        assert_eq!(linked.nameless, [0]);
        drop(file);
        // And nothing is to be done without any.
        assert!(!Linked::find(&[], &Places::new(&root, &[])).can_be_dumped);
    }

    #[test]
    fn a_note_that_is_cut_off_is_refused() {
        assert!(parse(b"").is_err() && parse(b"a").is_err() && parse(b"a\0").is_err());
        assert!(parse(b"a\0b\0c\0").is_err());
        assert_eq!(parse(b"a\0b\0").unwrap(), HashMap::from([("a".into(), "b".into())]));
    }
}
