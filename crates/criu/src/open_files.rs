//! Open files that a dump has to tell CRIU more about, and the look for names of files.
//!
//! The names are looked for by walking through the service's files while it is frozen: only if something is
//! looked for.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::ops::ControlFlow;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// An open file of a kind that is looked into: one that watches others, or one whose name was deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OpenFile {
    pub(crate) pid: u32,
    /// The number of its descriptor.
    pub(crate) number: OsString,
    /// What `/proc/PID/fd` shows of it.
    pub(crate) link: PathBuf,
}

impl OpenFile {
    /// Its entry in a directory of `/proc/PID`: `fd` or `fdinfo`.
    pub(crate) fn entry(&self, directory: &str) -> PathBuf {
        Path::new("/proc").join(self.pid.to_string()).join(directory).join(&self.number)
    }

    pub(crate) fn watches(&self) -> bool {
        self.link == Path::new("anon_inode:inotify") || self.link == Path::new("anon_inode:[fanotify]")
    }

    /// The name under which it was opened, if that was deleted.
    pub(crate) fn deleted(&self) -> Option<&[u8]> {
        let link = self.link.as_os_str().as_bytes();
        link.strip_suffix(b" (deleted)").filter(|name| name.starts_with(b"/"))
    }
}

/// Those of these processes. What cannot be read is gone.
pub(crate) fn of(pids: &[u32]) -> Vec<OpenFile> {
    let mut found = Vec::new();
    for &pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let link = fs::read_link(entry.path()).unwrap_or_default();
            let file = OpenFile { pid, number: entry.file_name(), link };
            if file.watches() || file.deleted().is_some() {
                found.push(file);
            }
        }
    }
    found
}

/// Those of these devices that CRIU cannot leave to others, since one of these processes has a regular file of it
/// - open or mapped under a name that was deleted, while the file has another one: CRIU makes a third one for it,
///   `link_remap.N`;
/// - mapped to be shared and executed: CRIU writes its system calls into memory that is executed.
///
/// What cannot be read is gone.
#[must_use]
pub fn not_external(pids: &[u32], devices: &BTreeSet<u64>) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    let mut look = |path: &Path, least_names: u64| {
        if let Ok(status) = fs::metadata(path)
            && status.is_file()
            && status.nlink() >= least_names
            && devices.contains(&status.dev())
        {
            found.insert(status.dev());
        }
    };
    for file in of(pids).iter().filter(|file| file.deleted().is_some()) {
        look(&file.entry("fd"), 1);
    }
    for pid in pids {
        let maps = fs::read(format!("/proc/{pid}/maps")).unwrap_or_default();
        for line in maps.split(|byte| *byte == b'\n') {
            let mut words = line.splitn(3, |byte| *byte == b' ');
            let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
            let least_names = match rights {
                [_, _, b'x', b's'] => 0,
                _ if line.ends_with(b" (deleted)") => 1,
                _ => continue,
            };
            let range = String::from_utf8_lossy(range);
            let address = |text: &str| u64::from_str_radix(text, 16).ok();
            if let Some((start, end)) = range.split_once('-')
                && let (Some(start), Some(end)) = (address(start), address(end))
            {
                look(Path::new(&format!("/proc/{pid}/map_files/{start:x}-{end:x}")), least_names);
            }
        }
    }
    found
}

/// Shows all files of the file system of a directory, by their paths inside of it, until there is enough.
pub(crate) fn walk(root: &Path, mut show: impl FnMut(&Path, &Metadata) -> ControlFlow<()>) {
    let Ok(top) = fs::metadata(root) else { return };
    let mut directories = vec![root.to_owned()];
    if show(Path::new("."), &top).is_break() {
        return;
    }
    while let Some(directory) = directories.pop() {
        // What cannot be read has vanished, or is nothing that is looked for.
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let Ok(found) = entry.metadata() else { continue };
            // On overlayfs files may have other devices than directories.
            if found.dev() != top.dev() && !found.is_file() {
                continue;
            }
            let path = entry.path();
            if path.strip_prefix(root).is_ok_and(|inside| show(inside, &found).is_break()) {
                return;
            }
            if found.is_dir() {
                directories.push(path);
            }
        }
    }
}
