//! The names of files that a service watches with inotify or fanotify.
//!
//! The kernel tells the inode of a watched file and no name, and on overlayfs CRIU cannot open the handle
//! that comes with it. It looks for the inode where it is told to (its option irmap-scan-path), and
//! puts the name that it finds into the image; a restore watches that name. So the files are looked for
//! here, and CRIU is told of these alone. A file without a name is not found: then the dump fails.

use std::collections::HashSet;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The names, as seen from the root directory of the service, of what these processes watch in the file
/// system of that directory.
pub(crate) fn names(pids: &[u32], root: &Path) -> Vec<String> {
    let Ok(device) = fs::metadata(root).map(|found| found.dev()) else { return Vec::new() };
    // As the kernel writes it: 12 bits and 20 bits.
    let kernel_device = (u64::from(libc::major(device)) << 20) | u64::from(libc::minor(device));
    let mut wanted: HashSet<u64> = pids.iter().flat_map(|pid| watched(*pid, kernel_device)).collect();
    let mut names = Vec::new();
    let mut directories = vec![root.to_owned()];
    if wanted.remove(&fs::metadata(root).map_or(0, |found| found.ino())) {
        names.push("/.".to_owned());
    }
    while !wanted.is_empty()
        && let Some(directory) = directories.pop()
    {
        // What cannot be read has vanished, or is nothing that can be watched.
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            if found.dev() != device && !found.is_file() {
                continue;
            }
            if wanted.remove(&found.ino()) {
                names.extend(inside(&entry.path(), root));
            }
            if found.is_dir() {
                directories.push(entry.path());
            }
        }
    }
    names
}

/// CRIU's option takes text.
fn inside(path: &Path, root: &Path) -> Option<String> {
    let inside = path.strip_prefix(root).ok()?;
    let name = String::from_utf8(inside.as_os_str().as_bytes().to_vec()).ok()?;
    Some(format!("/{name}"))
}

/// The inodes that a process watches on a device.
fn watched(pid: u32, device: u64) -> Vec<u64> {
    let mut inodes = Vec::new();
    let directory = PathBuf::from(format!("/proc/{pid}/fd"));
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let kind = fs::read_link(entry.path()).unwrap_or_default();
        if kind != Path::new("anon_inode:inotify") && kind != Path::new("anon_inode:[fanotify]") {
            continue;
        }
        let info = Path::new("/proc").join(pid.to_string()).join("fdinfo").join(entry.file_name());
        let text = fs::read_to_string(info).unwrap_or_default();
        inodes.extend(text.lines().filter_map(watch).filter(|w| w.1 == device).map(|w| w.0));
    }
    inodes
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
            let path = std::ffi::CString::new(at(name).as_os_str().as_bytes()).unwrap();
            // SAFETY: the path lives during the call.
            let watch =
                unsafe { libc::inotify_add_watch(inotify.as_raw_fd(), path.as_ptr(), libc::IN_MODIFY) };
            assert!(watch > 0);
        }
        fs::rename(at("deep/before"), at("after")).unwrap();
        fs::remove_file(at("deep/below/gone")).unwrap();
        let mut names = names(&[std::process::id()], root.path());
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
