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

/// How the watches of a descriptor name a device (Documentation/filesystems/proc.rst).
fn watch_on(device: u64) -> String {
    format!(" sdev:{:x} ", u64::from(libc::major(device)) << 20 | u64::from(libc::minor(device)))
}

/// Those of these devices that CRIU cannot leave to others, since one of these processes has a regular file of it
/// - open or mapped under a name that was deleted, while the file has another one: CRIU makes a third one for it,
///   `link_remap.N`;
/// - under a lease: a restore takes it anew, which the kernel refuses for a file that others still write;
/// - mapped to be shared and executed: CRIU writes its system calls into memory that is executed;
///
/// or since one watches it: what comes after the restore has begun would be told to it.
///
/// What cannot be read is gone.
#[must_use]
pub fn not_external(pids: &[u32], devices: &BTreeSet<u64>) -> BTreeSet<u64> {
    let mut found = BTreeSet::new();
    // The device of a file with a path that has at least so many names, if it is one of these.
    let look = |path: &Path, least_names: u64| {
        let status = fs::metadata(path).ok()?;
        let is_one = status.is_file() && status.nlink() >= least_names && devices.contains(&status.dev());
        is_one.then(|| status.dev())
    };
    for &pid in pids {
        for entry in fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten() {
            let link = fs::read_link(entry.path()).unwrap_or_default();
            let file = OpenFile { pid, number: entry.file_name(), link };
            if file.watches() {
                let told = fs::read_to_string(file.entry("fdinfo")).unwrap_or_default();
                found.extend(devices.iter().filter(|device| told.contains(&watch_on(**device))));
            }
            // Sockets and pipes have no path, and there may be thousands.
            if !file.link.is_absolute() {
                continue;
            }
            let Some(device) = look(&file.entry("fd"), 0) else { continue };
            let is_renamed = || file.deleted().is_some() && look(&file.entry("fd"), 1).is_some();
            // Of its locks, leases are told there, too (not in /proc/locks, for which the kernel waits for all processors).
            let is_leased =
                || fs::read_to_string(file.entry("fdinfo")).is_ok_and(|told| told.contains("LEASE"));
            if is_renamed() || is_leased() {
                found.insert(device);
            }
        }
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
                let path = format!("/proc/{pid}/map_files/{start:x}-{end:x}");
                found.extend(look(Path::new(&path), least_names));
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn files_that_a_restore_would_not_find_or_could_not_lease_are_told() {
        let shm = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = |name: &str| shm.path().join(name);
        let device = fs::metadata(shm.path()).unwrap().dev();
        let pids = [std::process::id()];
        let told = |devices: &[u64]| not_external(&pids, &devices.iter().copied().collect());
        let file = File::create(path("file")).unwrap();
        assert!(told(&[device]).is_empty());
        fs::hard_link(path("file"), path("other")).unwrap();
        fs::remove_file(path("file")).unwrap();
        assert_eq!(told(&[device]), [device].into());
        assert!(told(&[device + 1]).is_empty(), "it is on another");
        fs::remove_file(path("other")).unwrap();
        assert!(told(&[device]).is_empty(), "it has no name any more");
        drop(file);
        let of = std::ffi::CString::new(shm.path().as_os_str().as_bytes()).unwrap();
        // SAFETY: it takes no pointer, and makes a new descriptor.
        let watch = unsafe { libc::inotify_init1(libc::IN_CLOEXEC) };
        // SAFETY: the path lives as long as the call.
        assert!(unsafe { libc::inotify_add_watch(watch, of.as_ptr(), libc::IN_CLOSE_WRITE) } > 0);
        assert_eq!(told(&[device]), [device].into());
        // SAFETY: it was made above, and is used no more.
        unsafe { libc::close(watch) };
        assert!(told(&[device]).is_empty());
        fs::write(path("leased"), b"x").unwrap();
        let leased = File::open(path("leased")).unwrap();
        // SAFETY: it takes no pointer.
        assert_eq!(unsafe { libc::fcntl(leased.as_raw_fd(), libc::F_SETLEASE, libc::F_RDLCK) }, 0);
        assert_eq!(told(&[device]), [device].into());
    }
}
