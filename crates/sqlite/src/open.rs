//! The databases that processes have open.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use godwit_memory::Space;
use godwit_memory::process::{Process, ProcessError};
use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, makedev, statx};
use rustix::process::{PidfdGetfdFlags, pidfd_getfd};

use crate::inode_info::{Identity, find};

/// How a database begins (<https://www.sqlite.org/fileformat.html>, 1.3).
const MAGIC: &[u8; 16] = b"SQLite format 3\0";
/// The bytes of the header that are looked at.
const HEADER: usize = 20;
/// Where its versions are, of writing and of reading; and what both are with a write-ahead log.
const VERSIONS: std::ops::Range<usize> = 18..20;
const WITH_LOG: u8 = 2;

/// A database that a process has open for writing.
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
    /// One of the descriptors by which it is open.
    pub descriptor: i32,
    /// What its file is known by here.
    pub identity: Identity,
    /// Whether it has a write-ahead log.
    pub has_log: bool,
    /// Addresses at which the process remembers that.
    pub places: Vec<u64>,
}

/// The databases that these processes have open for writing, once for each process. Processes that have ended are passed over.
///
/// It reads the beginning of each regular file that is open for reading and writing, and the memory of the processes that have
/// a database: not for an asynchronous thread.
///
/// # Errors
/// A process cannot be looked at.
pub fn databases(pids: &[i32]) -> Result<Vec<Database>, ProcessError> {
    let mut found = Vec::new();
    for &pid in pids {
        match of_process(pid) {
            Ok(databases) => found.extend(databases),
            Err(ProcessError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn of_process(pid: i32) -> Result<Vec<Database>, ProcessError> {
    let process = Process::open(pid)?;
    let directory = process.directory()?;
    let mut found = Vec::new();
    let mut known = BTreeSet::new();
    // What cannot be read has been closed.
    for entry in fs::read_dir(directory.join("fd")).into_iter().flatten().flatten() {
        let Some(descriptor) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let Ok(link) = fs::read_link(entry.path()) else { continue };
        if !link.is_absolute() || !is_read_and_written(&directory, descriptor) {
            continue;
        }
        let Some(identity) = of_file(&entry.path()).filter(|identity| known.insert(*identity)) else {
            continue;
        };
        let Some(header) = header(&process, descriptor).filter(|header| header.starts_with(MAGIC)) else {
            continue;
        };
        found.push(Database {
            pid,
            space: process.space(),
            program: plain(&fs::read_to_string(directory.join("comm")).unwrap_or_default()),
            path: plain(&link.to_string_lossy()),
            descriptor,
            identity,
            has_log: header[VERSIONS].contains(&WITH_LOG),
            places: Vec::new(),
        });
    }
    if !found.is_empty() {
        let identities: Vec<_> = found.iter().map(|database| database.identity).collect();
        let places = find(&process, &identities)?;
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

/// Whether a file is open for reading and writing, as SQLite opens those to which it may write.
fn is_read_and_written(directory: &Path, descriptor: i32) -> bool {
    let text = fs::read_to_string(directory.join("fdinfo").join(descriptor.to_string())).unwrap_or_default();
    let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE == libc::O_RDWR && flags & libc::O_PATH == 0)
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
