//! The names of files that a service watches with inotify or fanotify.
//!
//! The kernel tells the inode of a watched file and no name, and on overlayfs CRIU cannot open the handle
//! that comes with it. It looks for the inode where it is told to (its option irmap-scan-path), and
//! puts the name that it finds into the image; a restore watches that name. So the files are looked for
//! here, and CRIU is told of these alone. A file without a name is not found: then the dump fails.

use std::collections::HashSet;
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

/// Those in a directory, which has this name inside.
fn names_in(open: &[OpenFile], root: &Path, inside: &Path) -> Vec<String> {
    let Ok(device) = fs::metadata(root).map(|found| found.dev()) else { return Vec::new() };
    // As the kernel writes it: 12 bits and 20 bits.
    let kernel_device = (u64::from(libc::major(device)) << 20) | u64::from(libc::minor(device));
    let watching = open.iter().filter(|file| file.watches());
    let mut wanted: HashSet<u64> = watching.flat_map(|file| watched(file, kernel_device)).collect();
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
    }

    #[test]
    fn lines_of_other_kinds_are_passed_over() {
        assert_eq!(watch("inotify wd:3 ino:9f607f sdev:27 mask:fce"), Some((0x9f607f, 0x27)));
        assert_eq!(watch("fanotify ino:1 sdev:800001 mflags:0"), Some((1, 0x80_0001)));
        assert_eq!(watch("fanotify flags:0 event-flags:0"), None);
        assert_eq!(watch("pos:\t0"), None);
    }
}
