//! Files that an epoll watches, and that its process has closed while another process has them open.
//!
//! An epoll forgets a file when nobody has it open any more. Where a process has closed one, and a child of it, say, has
//! not, the epoll still watches it, by a number that means nothing or another file now. CRIU looks for the file among
//! the descriptors of the first process that has the epoll, and of none else.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use nix::errno::Errno;

use super::Obstacle;
use super::tasks::Task;

const CLOSED: &str = "which it has closed and another process has open, and CRIU cannot dump that; the program has to \
                      remove it (EPOLL_CTL_DEL) before close(2)";

/// Of kcmp(2): whether two files are the same, and whether a file is a target of an epoll (`linux/kcmp.h`).
const KCMP_FILE: libc::c_long = 0;
const KCMP_EPOLL_TFD: libc::c_long = 7;

/// What the link of a descriptor tells of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Open {
    /// Of a socket or a pipe.
    Inode(u64),
    Other,
}

impl Open {
    pub(super) fn of(link: &str) -> Self {
        let inode = link.strip_prefix("socket:[").or_else(|| link.strip_prefix("pipe:["));
        inode.and_then(|inode| inode.strip_suffix(']')?.parse().ok()).map_or(Self::Other, Self::Inode)
    }

    /// Whether it may be the file with this inode.
    fn may_be(self, inode: u64) -> bool {
        self == Self::Inode(inode) || self == Self::Other
    }
}

/// A file that an epoll watches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Target {
    /// The number by which it was added.
    number: i32,
    inode: u64,
    /// Which of those that were added by this number, as kcmp(2) counts them.
    nth: u32,
}

/// A target that cannot be dumped.
#[derive(Debug)]
struct Lost {
    place: usize,
    epoll: i32,
    target: i32,
}

/// The epolls of all processes.
#[derive(Default)]
pub(super) struct Epolls {
    /// Processes, by their places in the order of calls, and the descriptors of epolls that they have.
    all: Vec<(usize, i32)>,
    lost: Vec<Lost>,
}

impl Epolls {
    /// Adds those of a process, whose directory in `/proc` and open files are told.
    pub(super) fn add(&mut self, place: usize, directory: &Path, epolls: &[i32], open: &HashMap<i32, Open>) {
        for epoll in epolls {
            self.all.push((place, *epoll));
            let target = lost(directory, *epoll, open);
            self.lost.extend(target.map(|target| Lost { place, epoll: *epoll, target }));
        }
    }

    pub(super) fn obstacles(&self, tasks: &[Task]) -> Vec<Obstacle> {
        let is_dumped_elsewhere = |lost: &Lost| {
            let mut others = self.all.iter().filter(|(place, _)| !is_within(tasks, *place, lost.place));
            others.any(|other| is_same(tasks, *other, (lost.place, lost.epoll)))
        };
        let counts = self.lost.iter().filter(|lost| !is_dumped_elsewhere(lost));
        counts
            .filter_map(|Lost { place, epoll, target }| {
                let what = format!("watches the file {target} by an epoll (descriptor {epoll})");
                Some(Obstacle::new(tasks.get(*place)?, what, CLOSED))
            })
            .collect()
    }
}

/// Whether one process is the other, or descends from it: CRIU dumps it later then.
fn is_within(tasks: &[Task], place: usize, ancestor: usize) -> bool {
    let (Some(mut at), Some(ancestor)) = (tasks.get(place), tasks.get(ancestor)) else { return false };
    for _ in tasks {
        if at.pid == ancestor.pid {
            return true;
        }
        let Some(parent) = tasks.iter().find(|task| task.pid == at.parent) else { return false };
        at = parent;
    }
    false
}

/// Whether two descriptors are of the same file.
fn is_same(tasks: &[Task], one: (usize, i32), other: (usize, i32)) -> bool {
    let pid = |place: usize| tasks.get(place).map(|task| task.pid);
    let (Some(a), Some(b)) = (pid(one.0), pid(other.0)) else { return false };
    usize::try_from(other.1).is_ok_and(|number| compare((a, b), KCMP_FILE, one.1, number) == Some(true))
}

/// The number of a target that no descriptor of the process is; none if that is not certain.
fn lost(directory: &Path, epoll: i32, open: &HashMap<i32, Open>) -> Option<i32> {
    let pid = directory.file_name()?.to_str()?.parse().ok()?;
    let mut suspects = targets(directory, epoll);
    suspects.retain(|target| !open.get(&target.number).is_some_and(|open| open.may_be(target.inode)));
    if suspects.is_empty() {
        return None;
    }
    // A file that was opened since the descriptors were listed, or closed before it was looked for.
    suspects.retain(|target| {
        let link = fs::read_link(directory.join("fd").join(target.number.to_string()));
        !link.is_ok_and(|link| Open::of(&link.to_string_lossy()).may_be(target.inode))
    });
    let still = targets(directory, epoll);
    suspects.retain(|target| still.contains(target));
    let is_under_another_number = |target: &Target| {
        let mut others = open.iter().filter(|(_, open)| open.may_be(target.inode));
        // What the kernel does not tell is taken to be so.
        others.any(|(number, _)| compare_target(pid, epoll, *target, *number) != Some(false))
    };
    suspects.into_iter().find(|target| !is_under_another_number(target)).map(|target| target.number)
}

/// What an epoll watches.
fn targets(directory: &Path, epoll: i32) -> Vec<Target> {
    let text = fs::read_to_string(directory.join("fdinfo").join(epoll.to_string())).unwrap_or_default();
    let mut seen: HashMap<i32, u32> = HashMap::new();
    let targets = text.lines().filter_map(|line| {
        let mut words = line.strip_prefix("tfd:")?.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let inode = words.find_map(|word| word.strip_prefix("ino:"))?;
        let nth = seen.entry(number).or_default();
        let target = Target { number, inode: u64::from_str_radix(inode, 16).ok()?, nth: *nth };
        *nth += 1;
        Some(target)
    });
    targets.collect()
}

/// Whether a descriptor of a process is this target of its epoll.
fn compare_target(pid: u32, epoll: i32, target: Target, number: i32) -> Option<bool> {
    // `struct kcmp_epoll_slot`
    let slot = [epoll.cast_unsigned(), target.number.cast_unsigned(), target.nth];
    compare((pid, pid), KCMP_EPOLL_TFD, number, (&raw const slot).expose_provenance())
}

/// Asks whether two things are the same; none where the kernel does not tell.
fn compare(pids: (u32, u32), kind: libc::c_long, one: i32, other: usize) -> Option<bool> {
    // SAFETY: the last one is a number, or the address of what lives in the caller's frame.
    match unsafe { libc::syscall(libc::SYS_kcmp, pids.0, pids.1, kind, libc::c_long::from(one), other) } {
        0 => Some(true),
        1.. => Some(false),
        // A descriptor that was closed meanwhile.
        _ if Errno::last() == Errno::EBADF => Some(false),
        _ => None,
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::fd::{AsRawFd, OwnedFd};

    use rustix::event::epoll;

    use super::*;

    /// The open files of this process.
    fn open() -> HashMap<i32, Open> {
        let entries = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let open = entries.filter_map(|entry| {
            let link = fs::read_link(entry.path()).ok()?;
            Some((entry.file_name().to_str()?.parse().ok()?, Open::of(&link.to_string_lossy())))
        });
        open.collect()
    }

    fn lost_here(epoll: &OwnedFd) -> Option<i32> {
        let directory = Path::new("/proc").join(std::process::id().to_string());
        lost(&directory, epoll.as_raw_fd(), &open())
    }

    #[test]
    fn a_target_is_lost_when_the_process_has_it_under_no_number() {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
        let (low, writer) = std::io::pipe().unwrap();
        // A number that no other test gets when it is free again.
        let reader = rustix::io::fcntl_dupfd_cloexec(&low, 500).unwrap();
        drop(low);
        epoll::add(&epoll, &reader, epoll::EventData::new_u64(0), epoll::EventFlags::IN).unwrap();
        assert_eq!(lost_here(&epoll), None);
        let number = reader.as_raw_fd();
        let other = reader.try_clone().unwrap();
        drop(reader);
        assert_eq!(lost_here(&epoll), None, "it has it as {}", other.as_raw_fd());
        // A child that keeps it. The writing end, which this process has, has the same inode.
        let mut child = std::process::Command::new("cat").stdin(other).spawn().unwrap();
        assert_eq!(lost_here(&epoll), Some(number));
        drop(writer);
        assert!(child.wait().unwrap().success());
        assert_eq!(lost_here(&epoll), None, "nobody has it any more");
    }

    #[test]
    fn a_descendant_is_found_by_its_parents() {
        let task = |pid, parent| super::super::tasks::Task::example(pid, parent);
        let tasks = [task(1, 0), task(2, 1), task(3, 2), task(4, 1)];
        assert!(is_within(&tasks, 2, 0) && is_within(&tasks, 2, 1) && is_within(&tasks, 1, 1));
        assert!(!is_within(&tasks, 3, 1) && !is_within(&tasks, 0, 1));
    }
}
