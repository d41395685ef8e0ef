//! The names of files that a service watches with inotify or fanotify.
//!
//! The kernel tells the inode of a watched file and no name, and on overlayfs CRIU cannot open the handle
//! that comes with it. It looks for the inode where it is told to (its option irmap-scan-path), and
//! puts the name that it finds into the image; a restore watches that name. So the files are looked for
//! here, and CRIU is told of these alone. A file without a name is not found: then the dump fails.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::open_files::{OpenFile, walk};
use crate::places::Places;

/// The names, as seen from the root directory of the service, of what these open files watch in the file
/// systems of its places.
pub(crate) fn names(open: &[OpenFile], places: &Places) -> Vec<String> {
    places.all().flat_map(|(inside, directory)| names_in(open, directory, inside)).collect()
}

/// The places among these open files of those that watch, in the file systems of these directories, what has no name there.
pub(crate) fn nameless<'a>(open: &[OpenFile], directories: impl Iterator<Item = &'a Path>) -> Vec<usize> {
    let watching: Vec<_> = open.iter().enumerate().filter(|(_, file)| file.watches()).collect();
    if watching.is_empty() {
        return Vec::new();
    }
    // What is of one device may be in any of its directories.
    let mut of_devices: BTreeMap<u64, Vec<&Path>> = BTreeMap::new();
    for directory in directories {
        if let Some(device) = device_of(directory) {
            of_devices.entry(device).or_default().push(directory);
        }
    }
    let mut nameless = BTreeSet::new();
    for (device, roots) in of_devices {
        let of_each = watching.iter().map(|(at, file)| (*at, watched(file, device)));
        let of_each: Vec<_> = of_each.filter(|(_, inodes)| !inodes.is_empty()).collect();
        let mut wanted: HashSet<u64> = of_each.iter().flat_map(|(_, inodes)| inodes).copied().collect();
        for root in roots.into_iter().take_while(|_| !of_each.is_empty()) {
            walk(root, |path, found| {
                // CRIU's option takes text.
                if path.to_str().is_some() {
                    wanted.remove(&found.ino());
                }
                if wanted.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
        }
        let lacks = |inodes: &[u64]| inodes.iter().any(|inode| wanted.contains(inode));
        nameless.extend(of_each.into_iter().filter(|(_, inodes)| lacks(inodes)).map(|(at, _)| at));
    }
    nameless.into_iter().collect()
}

/// A device as the kernel writes it: 12 bits and 20 bits.
pub(crate) fn device(major: u32, minor: u32) -> u64 {
    (u64::from(major) << 20) | u64::from(minor)
}

fn device_of(directory: &Path) -> Option<u64> {
    let number = fs::metadata(directory).ok()?.dev();
    Some(device(libc::major(number), libc::minor(number)))
}

/// The devices on which an open file watches others.
pub(crate) fn devices(file: &OpenFile) -> BTreeSet<u64> {
    let text = fs::read_to_string(file.entry("fdinfo")).unwrap_or_default();
    text.lines().filter_map(watch).map(|(_, device)| device).collect()
}

/// Those in a directory, which has this name inside.
fn names_in(open: &[OpenFile], root: &Path, inside: &Path) -> Vec<String> {
    let Some(device) = device_of(root) else { return Vec::new() };
    let watching = open.iter().filter(|file| file.watches());
    let mut wanted: HashSet<u64> = watching.flat_map(|file| watched(file, device)).collect();
    let mut names = Vec::new();
    if wanted.is_empty() {
        return names;
    }
    walk(root, |path, found| {
        if wanted.remove(&found.ino()) {
            // CRIU's option takes text.
            let name = inside.join(path).into_os_string().into_vec();
            names.extend(String::from_utf8(name).map(|name| format!("/{name}")));
        }
        if wanted.is_empty() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    names
}

/// The inodes that an open file watches on a device.
fn watched(file: &OpenFile, device: u64) -> Vec<u64> {
    let text = fs::read_to_string(file.entry("fdinfo")).unwrap_or_default();
    text.lines().filter_map(watch).filter(|watch| watch.1 == device).map(|watch| watch.0).collect()
}

/// Inode and device of a line like `inotify wd:3 ino:9f607f sdev:27 mask:…`.
fn watch(line: &str) -> Option<(u64, u64)> {
    let mut words = line.split(' ');
    words.next().filter(|word| ["inotify", "fanotify"].contains(word))?;
    let mut number = |name: &str| {
        let word = words.find_map(|word| word.strip_prefix(name))?;
        u64::from_str_radix(word, 16).ok()
    };
    Some((number("ino:")?, number("sdev:")?))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::open_files;
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

    #[test]
    fn what_is_watched_is_found_by_its_present_name() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        fs::create_dir_all(at("deep/below")).unwrap();
        for name in ["deep/before", "deep/below/gone", "other"] {
            fs::write(at(name), "").unwrap();
        }
        // SAFETY: a new descriptor, which nobody else has.
        let inotify = unsafe { OwnedFd::from_raw_fd(libc::inotify_init1(libc::IN_CLOEXEC)) };
        for name in ["deep/below", "deep/before", "deep/below/gone"] {
            let path = std::ffi::CString::new(at(name).into_os_string().into_vec()).unwrap();
            // SAFETY: the path lives during the call.
            let watch =
                unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), libc::IN_MODIFY) };
            assert!(watch > 0);
        }
        fs::rename(at("deep/before"), at("after")).unwrap();
        fs::remove_file(at("deep/below/gone")).unwrap();
        let mut names = names(&open_files::of(&[std::process::id()]), &Places::new(root.path(), &[]));
        names.sort();
        assert_eq!(names, ["/after", "/deep/below"]);
        let open = open_files::of(&[std::process::id()]);
        assert_eq!(nameless(&open, [root.path()].into_iter()), []);
        let both = [at("other-directory"), root.path().to_owned()];
        fs::create_dir(&both[0]).unwrap();
        assert_eq!(nameless(&open, both.iter().map(std::path::PathBuf::as_path)), []);
        // What is open is watched on when it has lost its name.
        let kept = fs::File::open(at("after")).unwrap();
        fs::remove_file(at("after")).unwrap();
        let number = inotify.as_raw_fd().to_string();
        let place = open.iter().position(|file| file.number == *number).unwrap();
        assert_eq!(nameless(&open, [root.path()].into_iter()), [place]);
        drop(kept);
    }

    #[test]
    fn lines_of_other_kinds_are_passed_over() {
        assert_eq!(watch("inotify wd:3 ino:9f607f sdev:27 mask:fce"), Some((0x9f607f, 0x27)));
        assert_eq!(watch("fanotify ino:1 sdev:800001 mflags:0"), Some((1, 0x80_0001)));
        assert_eq!(watch("fanotify flags:0 event-flags:0"), None);
        assert_eq!(watch("pos:\t0"), None);
    }
}
