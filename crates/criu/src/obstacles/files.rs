//! What processes have open that CRIU cannot dump.
//!
//! The link of a descriptor in `/proc/PID/fd` tells most, and `/proc/PID/fdinfo` some of the rest.

use std::collections::HashMap;
use std::fs;
use std::path::Path;

use super::Obstacle;
use super::devices::{self, Named};
use super::epoll::{Epolls, Open};
use super::mappings;
use super::nameless::Files;
use super::sockets::{Socket, Sockets};
use super::tasks::{self, Task};
use super::terminals::Terminals;
use crate::status::field;

/// An object, after "has", and why it is an obstacle.
pub(super) type What = (String, &'static str);

const IO_URING: &str = "which CRIU cannot dump; switch io_uring off in the service's configuration";
const PERF: &str = "which CRIU cannot dump; end what measures the service (perf)";
const BPF: &str = "which CRIU cannot dump; let a program outside the service hold it";
const FAULTS: &str =
    "which CRIU cannot dump; switch off what the program uses it for, a garbage collector or a snapshot";
const OBJECT: &str = "which CRIU cannot dump; the service can move when it has closed it";
const QUEUE: &str =
    "which CRIU cannot dump; the service can move when it has closed and removed it (mq_unlink(3))";
const OUTSIDE: &str =
    "and CRIU can dump only those of processes of the service; the service can move when it has closed it";
const PACKETS: &str = "which CRIU cannot dump; the service can move when it has closed it";
const SECRET: &str = "which CRIU cannot dump; the service can move when it has closed and unmapped it";
const THREAD: &str =
    "and CRIU can dump only those of whole processes; the service can move when it has closed it";

/// Kinds of anonymous inodes that CRIU can dump, or can with what it may be built with; or of which it must be
/// seen whether it can.
const GOOD_KINDS: [&str; 9] = [
    "[eventfd]",
    "[eventpoll]",
    "inotify",
    "[inotify]",
    "[fanotify]",
    "[signalfd]",
    "[timerfd]",
    "[pidfd]",
    "bpf-map",
];

/// Type of the file system of message queues (`linux/magic.h`).
const MQUEUE_MAGIC: i64 = 0x1980_0202;
/// The same of secret memory.
const SECRETMEM_MAGIC: i64 = 0x5345_434d;

/// Bit of a pidfd that is of a thread (`PIDFD_THREAD`).
const PIDFD_THREAD: i64 = libc::O_EXCL as i64;

/// What the open files of all processes tell together.
#[derive(Default)]
pub(super) struct Seen {
    /// The unix sockets by their inodes: the place of a process that has it, in the order of calls.
    pub(super) unix: HashMap<u64, usize>,
    pub(super) epolls: Epolls,
    pub(super) terminals: Terminals,
    pub(super) files: Files,
}

/// What stands in the way among the open files and mappings of one of these processes. What concerns others, too, is put
/// to `seen`, with the place of this process in the order of calls.
pub(super) fn obstacles(
    proc: &Path,
    task: &Task,
    processes: &[u32],
    place: usize,
    seen: &mut Seen,
) -> Vec<Obstacle> {
    let directory = proc.join(task.pid.to_string());
    let mut found: Vec<Obstacle> = Vec::new();
    let mut sockets = Sockets::of(task.pid);
    let (mut open, mut epolls) = (HashMap::new(), Vec::new());
    // What cannot be read is gone.
    for entry in fs::read_dir(directory.join("fd")).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let (Some(number), Ok(link)) =
            (name.to_str().and_then(|name| name.parse().ok()), fs::read_link(&path))
        else {
            continue;
        };
        let link = link.as_os_str().to_string_lossy();
        let file = Open::of(&link);
        open.insert(number, file);
        let bad = if let Some(kind) = link.strip_prefix("anon_inode:") {
            match kind {
                "[pidfd]" => bad_pidfd(proc, &path, processes),
                "[eventpoll]" => {
                    epolls.push(number);
                    None
                }
                _ => object(kind),
            }
        } else if link.starts_with("socket:") {
            match (sockets.examine(number, &path), file) {
                (Socket::Unix, Open::Inode(inode)) => {
                    seen.unix.entry(inode).or_insert(place);
                    None
                }
                (Socket::Bad(what), _) => Some(what),
                _ => None,
            }
        } else if link.starts_with("pipe:") {
            let packets = flags(&path).is_some_and(|flags| flags & i64::from(libc::O_DIRECT) != 0);
            packets.then(|| ("a pipe in packet mode (O_DIRECT)".to_owned(), PACKETS))
        } else if link.starts_with('/') && !link.starts_with("/memfd:") {
            match devices::named(&path, &link) {
                Named::Bad(what) => Some(what),
                Named::AnyTerminal => {
                    seen.terminals.any(place, number);
                    None
                }
                Named::Terminal => {
                    seen.terminals.named(task.session);
                    None
                }
                Named::Other(found) => {
                    let bad = of_kernel(&path, &link);
                    if bad.is_none() {
                        seen.files.open(place, number, &link, found);
                    }
                    bad
                }
            }
        } else {
            None
        };
        found.extend(
            bad.map(|(what, why)| Obstacle::new(task, format!("has {what} open (descriptor {number})"), why)),
        );
    }
    seen.epolls.add(place, &directory, &epolls, &open);
    mappings::obstacles(&directory, task, &mut found);
    seen.files.mapped(place, &directory);
    found
}

/// A message queue that exists in the service, though nobody has it open: if none was found among the files.
pub(super) fn message_queue(proc: &Path, main: &Task, found: &[Obstacle]) -> Option<Obstacle> {
    if found.iter().any(|obstacle| obstacle.why == QUEUE) {
        return None;
    }
    let directory = proc.join(main.pid.to_string());
    let mounts = fs::read_to_string(directory.join("mountinfo")).unwrap_or_default();
    let points = mounts.lines().filter_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("mqueue ").then(|| mount.split(' ').nth(4))?
    });
    for point in points {
        let inside = directory.join("root").join(point.trim_start_matches('/'));
        if filesystem(&inside) != Some(MQUEUE_MAGIC) {
            continue;
        }
        if let Some(queue) = fs::read_dir(inside).into_iter().flatten().flatten().next() {
            let name = shown(&queue.file_name().to_string_lossy());
            return Some(Obstacle::new(main, format!("has the POSIX message queue /{name}"), QUEUE));
        }
    }
    None
}

/// A name that a program chose, for a terminal.
pub(super) fn shown(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What an anonymous inode of a kind is, unless it can be dumped.
pub(super) fn object(kind: &str) -> Option<What> {
    if GOOD_KINDS.contains(&kind) {
        return None;
    }
    let kind = kind.trim_start_matches('[').trim_end_matches(']');
    Some(match kind {
        "io_uring" => ("an io_uring".into(), IO_URING),
        "perf_event" => ("a perf event".into(), PERF),
        "userfaultfd" => ("a userfaultfd".into(), FAULTS),
        _ if kind.starts_with("bpf") || kind == "btf" => (format!("a BPF object ({})", shown(kind)), BPF),
        _ => (format!("a kernel object of the kind {}", shown(kind)), OBJECT),
    })
}

/// What is wrong with a pidfd, if something is.
fn bad_pidfd(proc: &Path, path: &Path, processes: &[u32]) -> Option<What> {
    let text = information(path)?;
    if flags_in(&text)? & PIDFD_THREAD != 0 {
        return Some(("a pidfd of a thread".into(), THREAD));
    }
    // Of one that has ended it is -1.
    let pid: u32 = field(&text, "Pid")?.parse().ok()?;
    // A zombie is a member of no cgroup any more.
    let is_of_service = processes.contains(&pid) || tasks::read(proc, pid)?.state == 'Z';
    (!is_of_service).then(|| (format!("a pidfd of process {pid}"), OUTSIDE))
}

/// A file that looks as one at the root of the tree, or as a message queue, and is of a file system of the kernel's own.
fn of_kernel(path: &Path, link: &str) -> Option<What> {
    if link.rfind('/') != Some(0) && !link.starts_with("/dev/mqueue/") {
        return None;
    }
    match filesystem(path)? {
        MQUEUE_MAGIC => Some((format!("the POSIX message queue {}", shown(link)), QUEUE)),
        SECRETMEM_MAGIC => Some(secret_memory()),
        _ => None,
    }
}

pub(super) fn secret_memory() -> What {
    ("secret memory (memfd_secret(2))".into(), SECRET)
}

/// Whether a path in `/proc` leads to secret memory.
pub(super) fn is_secret_memory(path: &Path) -> bool {
    filesystem(path) == Some(SECRETMEM_MAGIC)
}

/// The type of the file system that a file is on.
pub(super) fn filesystem(path: &Path) -> Option<i64> {
    let found = nix::sys::statfs::statfs(path).ok()?;
    // The type has another width on each machine.
    #[allow(clippy::unnecessary_cast)]
    Some(found.filesystem_type().0 as i64)
}

/// The flags of an open file (open(2)), by its path in `/proc/PID/fd`.
pub(super) fn flags(path: &Path) -> Option<i64> {
    flags_in(&information(path)?)
}

fn flags_in(information: &str) -> Option<i64> {
    i64::from_str_radix(field(information, "flags")?, 8).ok()
}

/// What the kernel tells of an open file, by its path in `/proc/PID/fd`.
pub(super) fn information(path: &Path) -> Option<String> {
    fs::read_to_string(path.parent()?.with_file_name("fdinfo").join(path.file_name()?)).ok()
}
