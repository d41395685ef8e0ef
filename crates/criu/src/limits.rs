//! Room for CRIU in a process that has reached its limit of open files, or of address space.
//!
//! CRIU's code in a process opens some descriptors and maps some memory for as long as it dumps it. One whose limit is
//! reached, as programs in a sandbox have it, could not be dumped. So the limit is raised before the dump:
//!
//! ```text
//! source: prlimit up, noted beside the images ─▶ dump ─▶ prlimit back
//! destination: what was noted is put into the images of the processes ─▶ restore
//! ```
//!
//! The processes are frozen meanwhile and cannot see it. To raise the hard limit, or that of another
//! user's process, takes CAP_SYS_RESOURCE: without, the limit is left as it is, and CRIU says whether it
//! could do without.

use std::io;
use std::path::{Path, PathBuf};

use crate::images::wire::Fields;
use crate::images::{ImageError, ImageKind, rewrite};
use crate::status;

/// Most descriptors that CRIU's code has open at a time in a process; it is less than half of that.
const NEEDED: u64 = 16;

/// Most bytes that CRIU's code maps in a process: it takes 32 for each of its mappings, of which there are 65,530 by
/// default, and some pages. This is for a thousand times a thousand.
const NEEDED_BYTES: u64 = 64 << 20;

/// A limit that may be in CRIU's way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Limit {
    Files,
    AddressSpace,
}

/// Most bytes that a note may have: a line for each of a hundred thousand processes.
const NOTE_LIMIT: u64 = 8 << 20;

impl Limit {
    const ALL: [Self; 2] = [Self::Files, Self::AddressSpace];

    /// The note beside the images: lines `PID SOFT HARD`, the PID as inside the PID namespace.
    fn note(self) -> &'static str {
        match self {
            Self::Files => "descriptor-limits.img",
            Self::AddressSpace => "address-limits.img",
        }
    }

    fn resource(self) -> libc::__rlimit_resource_t {
        match self {
            Self::Files => libc::RLIMIT_NOFILE,
            Self::AddressSpace => libc::RLIMIT_AS,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Files => "open files",
            Self::AddressSpace => "address space",
        }
    }

    /// The smallest value with which CRIU has room in the process.
    fn needed(self, pid: u32) -> io::Result<u64> {
        if self == Self::Files {
            let mut open: Vec<u64> = std::fs::read_dir(format!("/proc/{pid}/fd"))?
                .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
                .collect();
            open.sort_unstable();
            return Ok(needed(&open));
        }
        let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        // A process that is ending has none.
        let kibibytes =
            status::field(&text, "VmSize").and_then(|size| size.strip_suffix(" kB")?.parse::<u64>().ok());
        Ok(kibibytes.map_or(0, |size| size.saturating_mul(1024).saturating_add(NEEDED_BYTES)))
    }
}

/// Limits that were raised. Dropped, they are as they were.
#[derive(Debug, Default)]
pub(crate) struct Raised(Vec<Process>);

#[derive(Debug)]
struct Process {
    pid: u32,
    limit: Limit,
    /// When it was started: another process with its number is left alone.
    started: String,
    limits: libc::rlimit,
}

/// Raises the limits of those in the cgroup that have not enough room, and notes the limits that they had
/// in the directory of the images.
pub(crate) fn raise(cgroup: &Path, images: &Path) -> Raised {
    let (mut raised, members) = (Raised::default(), members(cgroup));
    for limit in Limit::ALL {
        raised.0.append(&mut raise_all(limit, &members, images).0);
    }
    raised
}

fn raise_all(limit: Limit, members: &[u32], images: &Path) -> Raised {
    let (mut raised, mut note) = (Raised::default(), String::new());
    for pid in members.iter().copied() {
        match raise_one(pid, limit) {
            Ok(None) => {}
            Ok(Some((inside, process))) => {
                let libc::rlimit { rlim_cur, rlim_max } = process.limits;
                note.push_str(&format!("{inside} {rlim_cur} {rlim_max}\n"));
                raised.0.push(process);
            }
            Err(error) => tracing::warn!(
                pid,
                %error,
                "the process is close to its limit of {}, which cannot be raised for CRIU", limit.name()
            ),
        }
    }
    // Without the note the limits would stay raised at the destination.
    if !note.is_empty()
        && let Err(error) = std::fs::write(images.join(limit.note()), note)
    {
        tracing::warn!(
            %error,
            "limits of {} cannot be raised for CRIU: the present ones cannot be recorded", limit.name()
        );
        return Raised::default();
    }
    raised
}

/// The processes of a cgroup and those below it. What cannot be read has ended.
pub(crate) fn members(cgroup: &Path) -> Vec<u32> {
    let text = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
    let mut members: Vec<u32> = text.lines().filter_map(|line| line.parse().ok()).collect();
    for entry in std::fs::read_dir(cgroup).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            members.extend(self::members(&entry.path()));
        }
    }
    members
}

/// The limits that the process had, and its PID inside; none if it has enough room.
fn raise_one(pid: u32, limit: Limit) -> io::Result<Option<(u32, Process)>> {
    let limits = limits(pid, limit, None)?;
    if limits.rlim_cur == libc::RLIM_INFINITY {
        return Ok(None);
    }
    let enough = limit.needed(pid)?;
    if limits.rlim_cur >= enough {
        return Ok(None);
    }
    let text = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let inside =
        status::innermost(&text, "NSpid").ok_or_else(|| io::Error::other("its status has no NSpid"))?;
    let process = Process { pid, limit, started: started(pid)?, limits };
    let raised = libc::rlimit { rlim_cur: enough, rlim_max: enough.max(limits.rlim_max) };
    self::limits(pid, limit, Some(raised))?;
    Ok(Some((inside, process)))
}

/// The smallest limit with enough numbers below it that are not in use.
fn needed(open: &[u64]) -> u64 {
    // Of the sorted numbers those in use below the limit count.
    open.iter().fold(NEEDED, |limit, fd| if *fd < limit { limit + 1 } else { limit })
}

/// The limits that a process has, or had before it gets new ones.
fn limits(pid: u32, limit: Limit, new: Option<libc::rlimit>) -> io::Result<libc::rlimit> {
    let mut old = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let new = new.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: both live in this frame.
    match unsafe { libc::prlimit(pid.cast_signed(), limit.resource(), new, &raw mut old) } {
        0 => Ok(old),
        _ => Err(io::Error::last_os_error()),
    }
}

/// When a process was started, in clock ticks since the boot.
fn started(pid: u32) -> io::Result<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The name, which comes second, may have anything in it.
    let after_name = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    after_name
        .split_whitespace()
        .nth(19)
        .map(str::to_owned)
        .ok_or_else(|| io::Error::other("its stat is short"))
}

impl Drop for Raised {
    fn drop(&mut self) {
        for Process { pid, limit, started, limits } in &self.0 {
            // One that has ended needs nothing.
            if self::started(*pid).is_ok_and(|now| now == *started)
                && let Err(error) = self::limits(*pid, *limit, Some(*limits))
            {
                tracing::error!(pid, %error, "the process keeps a raised limit of {}", limit.name());
            }
        }
    }
}

/// Puts the limits that were noted into the images of the processes; how many.
pub(crate) fn repair(images: &Path) -> Result<usize, ImageError> {
    Limit::ALL.into_iter().map(|limit| repair_all(limit, images)).sum()
}

fn repair_all(limit: Limit, images: &Path) -> Result<usize, ImageError> {
    let note = images.join(limit.note());
    let read = |source| ImageError::Read { path: note.clone(), source };
    let damaged = |reason: &str| ImageError::Damaged { path: note.clone(), reason: reason.into() };
    match std::fs::metadata(&note) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(0),
        Err(error) => return Err(read(error)),
        Ok(found) if found.len() > NOTE_LIMIT => return Err(damaged("it is too long")),
        Ok(_) => {}
    }
    let text = std::fs::read_to_string(&note).map_err(read)?;
    let mut count = 0;
    for line in text.lines() {
        let words: Vec<u64> = line.split(' ').map_while(|word| word.parse().ok()).collect();
        let [pid, soft, hard] = words[..] else { return Err(damaged("a line is not three numbers")) };
        let path: PathBuf = images.join(format!("core-{pid}.img"));
        rewrite(&path, ImageKind::Core, |records| {
            let [record] = records[..] else { return Err("it does not have exactly one record".into()) };
            Ok(Some(vec![with_limit(record, limit, soft, hard)?.into()]))
        })?;
        count += 1;
    }
    Ok(count)
}

/// The record of a process with another limit: `core_entry { task_core_entry tc = 3 { task_rlimits_entry
/// rlimits = 8 { repeated rlimit_entry rlimits = 1 } } }`. All else stays byte by byte.
fn with_limit(record: &[u8], limit: Limit, soft: u64, hard: u64) -> Result<Vec<u8>, String> {
    let mut entry = Fields::default();
    entry.set_number(1, soft);
    entry.set_number(2, hard);
    // They stand there in the order of their numbers.
    let place = limit.resource() as usize;
    let missing = |tag: u32| format!("it has no field {tag} where the limits are");
    let here = |tag, there: bool| there.then_some(()).ok_or_else(|| missing(tag));
    let mut core = Fields::decode(record)?;
    let task = core.change(3, |task| {
        let limits = task.change(8, |limits| {
            let mut all: Vec<_> = limits.all(1)?.into_iter().map(<[u8]>::to_vec).collect();
            *all.get_mut(place).ok_or_else(|| missing(1))? = entry.encode();
            limits.set_all(1, all);
            Ok(())
        })?;
        here(8, limits)
    })?;
    here(3, task)?;
    Ok(core.encode())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn room_is_counted_among_the_numbers_below_the_limit() {
        assert_eq!(needed(&[]), NEEDED);
        assert_eq!(needed(&[0, 1, 2]), NEEDED + 3);
        // One above does not take room.
        assert_eq!(needed(&[0, 1, 2, 500]), NEEDED + 3);
        assert_eq!(needed(&(0..1024).collect::<Vec<_>>()), 1024 + NEEDED);
        // This one does only since the limit has grown beyond it.
        assert_eq!(needed(&[0, NEEDED]), NEEDED + 2);
    }

    #[test]
    fn only_the_limit_of_open_files_is_changed() {
        // Field 3 with fields 1 and 8, the latter with eight limits; then field 4.
        let limit = |soft: u8, hard: u8| vec![0x0a, 4, 0x08, soft, 0x10, hard];
        let core = |seventh: Vec<u8>| {
            let limits = [(0..7).flat_map(|_| limit(1, 2)).collect(), seventh, limit(5, 6)].concat();
            let task = [&[0x08, 9, 0x42, u8::try_from(limits.len()).unwrap()][..], &limits].concat();
            let record =
                [&[0x08, 1, 0x1a, u8::try_from(task.len()).unwrap()][..], &task, &[0x20, 3]].concat();
            let head = [0x5456_4319_u32, 0x5505_3847, u32::try_from(record.len()).unwrap()];
            [head.map(u32::to_le_bytes).concat(), record].concat()
        };
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("core-9.img");
        std::fs::write(directory.path().join(Limit::Files.note()), "9 7 8\n").unwrap();
        let repaired = |image: &[u8]| {
            std::fs::write(&path, image).unwrap();
            repair(directory.path()).map(|_| std::fs::read(&path).unwrap())
        };
        assert_eq!(repaired(&core(limit(3, 4))).unwrap(), core(limit(7, 8)));
        let without = [0x5456_4319_u32, 0x5505_3847, 0].map(u32::to_le_bytes).concat();
        assert!(repaired(&without).unwrap_err().to_string().contains("no field 3"));
        for length in 12..core(limit(3, 4)).len() {
            assert!(repaired(&core(limit(3, 4))[..length]).is_err(), "{length}");
        }
    }
}
