//! The databases that a process has open.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use godwit_memory::Space;
use godwit_memory::process::{Process, ProcessError};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::inode_info::{Identity, find, is_at};

/// How a database begins (<https://www.sqlite.org/fileformat.html>, 1.3).
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// The bytes of the header that are looked at.
const HEADER: usize = 20;
/// Where its versions are, of writing and of reading; and what both are with a write-ahead log.
const VERSIONS: std::ops::Range<usize> = 18..20;
const WITH_LOG: u8 = 2;

/// Most databases of a process that are looked for in its memory.
const MOST: usize = 256;

/// Filesystems of whose files none is read: those of the kernel, where that can have effects. Nor are those read of which a
/// program is the server (FUSE): it may not answer.
const OF_KERNEL: [&str; 12] = [
    "proc",
    "sysfs",
    "cgroup",
    "cgroup2",
    "tracefs",
    "debugfs",
    "securityfs",
    "configfs",
    "mqueue",
    "bpf",
    "pstore",
    "efivarfs",
];

/// A database that a process has open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Database {
    /// The process, in the node's PID namespace.
    pub pid: i32,
    /// The same inside the service.
    pub space: Space,
    /// The process's name (`comm`).
    pub program: String,
    /// Its path, as the process has opened it.
    pub path: String,
    /// The descriptors by which it is open.
    pub descriptors: Vec<i32>,
    /// What its file is known by here.
    pub identity: Identity,
    /// Whether the process can write to it.
    pub is_writable: bool,
    /// Whether it has a write-ahead log.
    pub has_log: bool,
    /// Addresses at which the process remembers its file.
    pub places: Vec<u64>,
}

impl Database {
    /// Looks again, when the process does not run any more, which of its descriptors and places are still there: some
    /// microseconds.
    ///
    /// # Errors
    /// The process cannot be looked at.
    pub fn settle(&mut self) -> Result<(), ProcessError> {
        let process = Process::open(self.pid)?;
        self.descriptors.retain(|number| Identity::of_open_file(&process, *number) == Some(self.identity));
        let mut places = Vec::new();
        for &place in &self.places {
            if is_at(&process, place, self.identity)? {
                places.push(place);
            }
        }
        self.places = places;
        Ok(())
    }
}

/// The databases that a process has open. It reads the beginning of each regular file that is open, and all private memory of
/// a process that has a database, while it is `wanted`: not for an asynchronous thread.
///
/// # Errors
/// The process cannot be looked at.
pub fn databases(pid: i32, wanted: &dyn Fn() -> bool) -> Result<Vec<Database>, ProcessError> {
    let process = Process::open(pid)?;
    let directory = process.directory()?;
    let mut found: BTreeMap<Identity, Option<Database>> = BTreeMap::new();
    let mut types = None;
    // What cannot be read has been closed.
    for entry in fs::read_dir(directory.join("fd")).into_iter().flatten().flatten() {
        let Some(number) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if !link.is_absolute() {
            continue;
        }
        let Some(open) = Open::of(&directory, number) else { continue };
        let Some(identity) = of_file(&entry.path()) else { continue };
        if let Some(known) = found.get_mut(&identity) {
            if let Some(database) = known {
                database.descriptors.push(number);
                database.is_writable |= open.is_writable();
            }
            continue;
        }
        let types = types.get_or_insert_with(|| types_of_mounts(&directory));
        let can_be_read = open.is_readable() && types.get(&open.mount).is_some_and(|kind| has_files(kind));
        let header = if can_be_read { header(&process, number) } else { None };
        let database = header.filter(|header| header.starts_with(MAGIC)).map(|header| Database {
            pid,
            space: process.space(),
            program: plain(&fs::read_to_string(directory.join("comm")).unwrap_or_default()),
            path: plain(&link.to_string_lossy()),
            descriptors: vec![number],
            identity,
            is_writable: open.is_writable(),
            has_log: header[VERSIONS].contains(&WITH_LOG),
            places: Vec::new(),
        });
        // Another descriptor of the same file may be one that can be read.
        if database.is_some() || can_be_read {
            found.insert(identity, database);
        }
    }
    let mut found: Vec<Database> = found.into_values().flatten().collect();
    let identities: Vec<_> = found.iter().take(MOST).map(|database| database.identity).collect();
    if !identities.is_empty() {
        let places = find(&process, &identities, wanted)?;
        found.iter_mut().zip(places).for_each(|(database, places)| database.places = places);
    }
    Ok(found)
}

impl Identity {
    /// That of the file which a process has open by this number; none if it is no regular file, or not open any more.
    #[must_use]
    pub fn of_open_file(process: &Process, descriptor: i32) -> Option<Self> {
        of_file(&process.directory().ok()?.join("fd").join(descriptor.to_string()))
    }
}

/// The identity of a regular file, without asking the server of its filesystem, which may be frozen.
fn of_file(path: &Path) -> Option<Identity> {
    let wanted = StatxFlags::TYPE | StatxFlags::INO;
    let found = statx(CWD, path, AtFlags::STATX_DONT_SYNC, wanted).ok()?;
    let device = makedev(found.stx_dev_major, found.stx_dev_minor);
    let is_file = FileType::from_raw_mode(found.stx_mode.into()).is_file();
    is_file.then_some(Identity { device, inode: found.stx_ino })
}

/// What the kernel says of an open file (proc_pid_fdinfo(5)).
struct Open {
    flags: i32,
    mount: u64,
}

impl Open {
    fn of(directory: &Path, descriptor: i32) -> Option<Self> {
        let text = fs::read_to_string(directory.join("fdinfo").join(descriptor.to_string())).ok()?;
        let field = |name: &str| text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        let flags = i32::from_str_radix(field("flags:")?, 8).ok()?;
        Some(Self { flags, mount: field("mnt_id:")?.parse().ok()? })
    }

    fn is_writable(&self) -> bool {
        self.flags & libc::O_ACCMODE == libc::O_RDWR
    }

    fn is_readable(&self) -> bool {
        self.flags & (libc::O_PATH | libc::O_DIRECT) == 0 && self.flags & libc::O_ACCMODE != libc::O_WRONLY
    }
}

/// The types of the filesystems that a process has mounted, by the numbers of mounts (proc_pid_mountinfo(5)).
fn types_of_mounts(directory: &Path) -> BTreeMap<u64, String> {
    let text = fs::read_to_string(directory.join("mountinfo")).unwrap_or_default();
    let of_line = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        Some((mount.split(' ').next()?.parse().ok()?, kind.split(' ').next()?.to_owned()))
    };
    text.lines().filter_map(of_line).collect()
}

fn has_files(kind: &str) -> bool {
    !OF_KERNEL.contains(&kind) && !kind.starts_with("fuse")
}

/// The beginning of a file. It is read by the process's own open file: opening it here could break a lease.
fn header(process: &Process, descriptor: i32) -> Option<[u8; HEADER]> {
    let file = pidfd_getfd(process.pidfd(), descriptor, PidfdGetfdFlags::empty()).ok()?;
    let mut header = [0; HEADER];
    (rustix::io::pread(&file, &mut header, 0).ok()? == HEADER).then_some(header)
}

/// A name that a program chose, for a terminal.
fn plain(name: &str) -> String {
    name.trim_end_matches('\n').chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_of_disks_and_not_of_the_kernel_or_of_programs() {
        for (kind, has) in
            [("ext4", true), ("overlay", true), ("nfs4", true), ("tmpfs", true), ("proc", false)]
        {
            assert_eq!(has_files(kind), has, "{kind}");
        }
        assert!(!has_files("fuse.sshfs") && !has_files("fuse") && !has_files("tracefs"));
        let own = types_of_mounts(Path::new("/proc/self"));
        assert!(own.values().any(|kind| kind == "proc"), "{own:?}");
    }
}
