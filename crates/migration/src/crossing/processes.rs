//! Processes of a service that may come to rest: what is seen of them while they run.

use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use godwit_crossing::{Area, Name, Process, areas_of_maps};
use godwit_memory::process::{Process as Handle, ProcessError};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::requests::record_of;

/// In /proc/PID/status, of a thread with a filter of seccomp(2).
const FILTERED: &str = "2";

/// The process with this PID; none where it has ended.
pub(crate) fn open(pid: u32) -> Result<Option<Handle>, ProcessError> {
    present(Handle::open(i32::try_from(pid).unwrap_or(i32::MAX)))
}

/// None where the process has ended.
pub(crate) fn present<T>(found: Result<T, ProcessError>) -> Result<Option<T>, ProcessError> {
    match found {
        Err(ProcessError::Gone { .. }) => Ok(None),
        found => found.map(Some),
    }
}

/// How often processes of a service are looked at again that may execute a program just now, and how long that may take.
const LOOKS: u32 = 20;
const EXECUTING: Duration = Duration::from_millis(1);

/// What is seen of all of these, in the node's PID namespace, with what each says about rest; without those that have ended.
/// Not for an asynchronous thread.
pub(crate) fn see_all(pids: &[u32]) -> Result<Vec<(Process, Vec<u8>)>, ProcessError> {
    let mut all = Vec::with_capacity(pids.len());
    let mut looks = LOOKS;
    for &pid in pids {
        let Some(process) = open(pid)? else { continue };
        all.extend(present(see_whole(&process, &mut looks))?);
    }
    Ok(all)
}

/// What is seen of a process that executes no program meanwhile: its executable and what it says would be those of two
/// programs, or it would say nothing yet.
fn see_whole(process: &Handle, looks: &mut u32) -> Result<(Process, Vec<u8>), ProcessError> {
    loop {
        let executable = executable(process)?;
        let (seen, bytes) = see(process, executable.clone())?;
        let is_whole = seen.record.is_ok() && self::executable(process)? == executable;
        if is_whole || *looks == 0 {
            return Ok((seen, bytes));
        }
        *looks -= 1;
        // There is no event for the end of execve(2).
        std::thread::sleep(EXECUTING);
    }
}

fn see(process: &Handle, executable: PathBuf) -> Result<(Process, Vec<u8>), ProcessError> {
    let (record, bytes) = record_of(process)?;
    let directory = process.directory()?;
    let name = name(process, &executable);
    let executable = executable.into_os_string().into_vec();
    if record.is_err() {
        // Nothing more is needed to refuse it.
        let facts = Process {
            name,
            executable,
            is_on_mount: false,
            record,
            areas: Vec::new(),
            has_filter: false,
            has_rings: false,
        };
        return Ok((facts, bytes));
    }
    let tried = |action: &'static str| move |source| failed(process, action, source);
    let is_filtered = |line: &str| line.strip_prefix("Seccomp:").is_some_and(|mode| mode.trim() == FILTERED);
    let facts = Process {
        name,
        executable,
        is_on_mount: is_on_mount(&directory).map_err(tried("find the mount of its executable"))?,
        record,
        areas: areas(&directory).map_err(tried("read its mappings"))?,
        has_filter: status(process)?.lines().any(is_filtered),
        has_rings: has_rings(&directory).map_err(tried("look at its open files"))?,
    };
    Ok((facts, bytes))
}

/// Its executable, which a process that ends has no more before it has ended.
fn executable(process: &Handle) -> Result<PathBuf, ProcessError> {
    process.executable().map_err(|error| match error {
        ProcessError::Io { source, .. } => failed(process, "find its executable", source),
        error => error,
    })
}

/// `/proc/PID/status` of a thread that lives.
pub(crate) fn status(process: &Handle) -> Result<String, ProcessError> {
    let read = fs::read_to_string(process.directory()?.join("status"));
    read.map_err(|source| failed(process, "read its status", source))
}

fn failed(process: &Handle, action: &str, source: io::Error) -> ProcessError {
    // /proc tells nothing of what has ended, and of its executable and memory already while it ends.
    if process.has_ended() || matches!(source.raw_os_error(), Some(libc::ENOENT | libc::ESRCH)) {
        return ProcessError::Gone { pid: process.pid() };
    }
    ProcessError::Io { pid: process.pid(), action: action.to_owned(), source }
}

/// What users call it.
pub(crate) fn named(process: &Handle) -> Name {
    let executable = process.executable().unwrap_or_default();
    name(process, &executable)
}

fn name(process: &Handle, executable: &Path) -> Name {
    Name { pid: process.space(), name: executable.to_string_lossy().into_owned() }
}

/// Whether its executable is on another mount than its root directory. A kernel that does not tell leaves that to the images.
fn is_on_mount(directory: &Path) -> io::Result<bool> {
    let mount = |name: &str| {
        let found = statx(CWD, directory.join(name), AtFlags::empty(), StatxFlags::MNT_ID)?;
        let is_told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID);
        Ok::<_, io::Error>(is_told.then_some(found.stx_mnt_id))
    };
    Ok(mount("exe")? != mount("root")?)
}

fn areas(directory: &Path) -> io::Result<Vec<Area>> {
    let text = fs::read(directory.join("maps"))?;
    areas_of_maps(&text).ok_or_else(|| io::Error::other("the kernel tells them in another way"))
}

/// Whether it has a ring of io_uring open, or one of io_setup(2) mapped.
fn has_rings(directory: &Path) -> io::Result<bool> {
    let maps = fs::read(directory.join("maps"))?;
    let is_ring = |line: &[u8]| line.ends_with(b" /[aio] (deleted)") || line.ends_with(b" /[aio]");
    if maps.split(|byte| *byte == b'\n').any(is_ring) {
        return Ok(true);
    }
    let open = fs::read_dir(directory.join("fd"))?;
    // What is closed meanwhile is no ring any more.
    let target = |entry: fs::DirEntry| fs::read_link(entry.path()).ok();
    Ok(open.flatten().filter_map(target).any(|target| target == Path::new("anon_inode:[io_uring]")))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::process::Command;

    use godwit_crossing::RecordError;

    use super::*;

    #[test]
    fn a_program_of_another_kind_has_no_record_and_is_named_by_its_path() {
        // spawn(2) returns when it has begun.
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let process = open(child.id()).unwrap().unwrap();
        let (seen, bytes) = see(&process, process.executable().unwrap()).unwrap();
        assert_eq!((&seen.record, bytes.len()), (&Err(RecordError::Foreign), 0));
        assert!(seen.name.name.ends_with("sleep") || seen.name.name.ends_with("coreutils"), "{seen:?}");
        assert!(!seen.has_filter && !seen.has_rings && seen.areas.is_empty());
        let name = named(&process);
        assert_eq!(name, seen.name);
        child.kill().unwrap();
        child.wait().unwrap();
        let seen = process.executable().and_then(|executable| see(&process, executable));
        assert_eq!(present(seen).unwrap(), None);
        assert_eq!(see_all(&[child.id()]).unwrap(), []);
    }

    #[test]
    fn this_process_has_areas_and_is_on_a_mount_with_its_root_or_not() {
        let process = open(std::process::id()).unwrap().unwrap();
        let directory = process.directory().unwrap();
        assert!(!areas(&directory).unwrap().is_empty());
        assert!(!has_rings(&directory).unwrap());
        is_on_mount(&directory).unwrap();
    }
}
