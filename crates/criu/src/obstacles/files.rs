//! What processes have open or mapped that CRIU cannot dump.
//!
//! The link of a descriptor in `/proc/PID/fd` tells most. Of sockets the kernel tells the protocol as an extended
//! attribute; whether a UDP socket is corked only the socket itself tells, so that is opened here for a moment
//! (pidfd_getfd(2)).

use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::Obstacle;
use super::tasks::{self, Task};
use crate::GHOST_LIMIT_BYTES;

const IO_URING: &str = "which CRIU cannot dump; switch io_uring off in the service's configuration";
const PERF: &str = "which CRIU cannot dump; end what measures the service (perf)";
const BPF: &str = "which CRIU cannot dump; let a program outside the service hold it";
const FAULTS: &str =
    "which CRIU cannot dump; switch off what the program uses it for, a garbage collector or a snapshot";
const OBJECT: &str = "which CRIU cannot dump; the service can move when it has closed it";
const QUEUE: &str =
    "which CRIU cannot dump; the service can move when it has closed and removed it (mq_unlink(3))";
const SOCKET: &str = "and CRIU cannot dump sockets of that kind; the service can move when it has closed it";
const MPTCP: &str = "and CRIU cannot dump sockets of that kind; switch multipath TCP off (for programs in Go by \
                     GODEBUG=multipathtcp=0 in their environment)";
const OUTSIDE: &str =
    "and CRIU can dump only those of processes of the service; the service can move when it has closed it";
const THREAD: &str =
    "and CRIU can dump only those of whole processes; the service can move when it has closed it";
const CORKED: &str = "and CRIU cannot dump a socket that holds back data; try again when UDP_CORK is off";
const DEVICE: &str = "which CRIU cannot dump; the service can move when it has closed it";
const GPU: &str = "and what a GPU holds cannot be dumped; the service can move when it has closed it, or be stopped \
                   and started anew elsewhere";
const GHOST: &str = "and one that large does not move along; the service can move when it has closed it";

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

/// Protocols, as the kernel names them, that CRIU cannot dump.
const BAD_PROTOCOLS: [&str; 12] =
    ["MPTCP", "MPTCPv6", "SCTP", "SCTPv6", "DCCP", "DCCPv6", "SMC", "SMC6", "ALG", "AF_VSOCK", "XDP", "KCM"];

/// Majors of character devices that CRIU can dump: memory, and serial lines of two kinds.
const GOOD_MAJORS: [u32; 3] = [1, 188, 204];
/// Majors of pseudo terminals and of their masters.
const PSEUDO_TERMINALS: std::ops::RangeInclusive<u32> = 128..=143;

/// Majors of devices of which CRIU can dump those below this minor: virtual terminals; `tty`, `console` and `ptmx`.
const GOOD_BELOW: [(u32, u32); 2] = [(4, 64), (5, 3)];

/// autofs, which CRIU can dump among miscellaneous devices.
const AUTOFS: (u32, u32) = (10, 235);

/// TUN, which CRIU can restore where it has no interface.
const TUN: (u32, u32) = (10, 200);

/// Majors of GPUs: NVIDIA's own driver, and the kernel's (DRM).
const GPU_MAJORS: [u32; 2] = [195, 226];

/// Where devices of GPUs are whose majors differ from boot to boot.
const GPU_PATHS: [&str; 3] = ["/dev/nvidia", "/dev/kfd", "/dev/dri/"];

/// Type of the file system of message queues (`linux/magic.h`).
const MQUEUE_MAGIC: i64 = 0x1980_0202;

/// Bit of a pidfd that is of a thread (`PIDFD_THREAD`).
const PIDFD_THREAD: i64 = libc::O_EXCL as i64;

/// What stands in the way among the open files and mappings of one of these processes. The unix sockets among
/// them are put to `sockets`, with the place of their process in the order of calls.
pub(super) fn obstacles(
    proc: &Path,
    task: &Task,
    processes: &[u32],
    place: usize,
    sockets: &mut HashMap<u64, usize>,
) -> Vec<Obstacle> {
    let directory = proc.join(task.pid.to_string());
    let mut found: Vec<Obstacle> = Vec::new();
    let mut files = Files { proc, directory: &directory, pid: task.pid, pidfd: None };
    // What cannot be read is gone.
    for entry in fs::read_dir(directory.join("fd")).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let (Some(number), Ok(link)) =
            (name.to_str().and_then(|name| name.parse().ok()), fs::read_link(&path))
        else {
            continue;
        };
        let link = link.as_os_str().to_string_lossy().into_owned();
        let obstacle = if let Some(kind) = link.strip_prefix("anon_inode:") {
            if kind == "[pidfd]" { files.bad_pidfd(number, processes) } else { object(kind) }
        } else if let Some(inode) = link.strip_prefix("socket:[") {
            match protocol(&path).as_deref() {
                Some("UNIX" | "UNIX-STREAM") => {
                    if let Ok(inode) = inode.trim_end_matches(']').parse() {
                        sockets.entry(inode).or_insert(place);
                    }
                    None
                }
                Some("UDP" | "UDPv6" | "UDP-Lite" | "UDPLITEv6") => {
                    files.is_corked(number).then(|| ("a corked UDP socket".to_owned(), CORKED))
                }
                Some(bad) if BAD_PROTOCOLS.contains(&bad) => {
                    let why = if bad.starts_with("MPTCP") { MPTCP } else { SOCKET };
                    Some((format!("a socket of the protocol {bad}"), why))
                }
                _ => None,
            }
        } else if link.starts_with('/') && (link.rfind('/') == Some(0) || link.starts_with("/dev/mqueue/")) {
            is_message_queue(&path).then(|| (format!("the POSIX message queue {}", shown(&link)), QUEUE))
        } else {
            None
        };
        let obstacle = obstacle.or_else(|| on_disk(&path, &link));
        found.extend(
            obstacle.map(|(what, why)| {
                Obstacle::new(task, format!("has {what} open (descriptor {number})"), why)
            }),
        );
    }
    // A ring can be in use without a descriptor.
    for kind in mapped_kinds(&directory) {
        if let Some((what, why)) = object(&kind)
            && !found.iter().any(|obstacle| obstacle.why == why)
        {
            found.push(Obstacle::new(task, format!("has {what} mapped"), why));
        }
    }
    if let Some((what, why)) = mapped_device(&directory)
        && !found.iter().any(|obstacle| obstacle.why == why)
    {
        found.push(Obstacle::new(task, format!("has {what} mapped"), why));
    }
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
        if !is_message_queue(&inside) {
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
fn shown(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { '?' } else { c }).collect()
}

/// What an anonymous inode of a kind is, unless it can be dumped.
fn object(kind: &str) -> Option<(String, &'static str)> {
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

/// The kinds of anonymous inodes that a process has mapped.
fn mapped_kinds(directory: &Path) -> Vec<String> {
    let maps = fs::read(directory.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    // The name is the sixth field, and the only one with such a word.
    let kinds = maps.lines().filter_map(|line| Some(line.split_once(" anon_inode:")?.1.trim()));
    let mut kinds: Vec<String> = kinds.map(|kind| kind.trim_end_matches(" (deleted)").to_owned()).collect();
    kinds.sort_unstable();
    kinds.dedup();
    kinds
}

/// A device, or a deleted file that is larger than CRIU is told to take along.
fn on_disk(path: &Path, link: &str) -> Option<(String, &'static str)> {
    if !link.starts_with('/') || link.starts_with("/memfd:") {
        return None;
    }
    let (found, name) = (stat(path)?, shown(link.trim_end_matches(" (deleted)")));
    if let Some(number) = found.device {
        if number == TUN && !found.is_block {
            return interface(path)
                .map(|interface| (format!("the network interface {interface} ({name})"), DEVICE));
        }
        return device(&name, number, found.is_block);
    }
    let bytes = found.blocks * 512;
    if !found.is_file || found.links != 0 || bytes <= GHOST_LIMIT_BYTES.into() {
        return None;
    }
    Some((format!("the deleted file {name} of {} MiB", bytes >> 20), GHOST))
}

/// What counts of an open file.
struct Found {
    is_file: bool,
    is_block: bool,
    device: Option<(u32, u32)>,
    links: u32,
    blocks: u64,
}

/// Looks at a file without asking the server of its filesystem, which may be frozen.
fn stat(path: &Path) -> Option<Found> {
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let fields = rustix::fs::StatxFlags::BASIC_STATS;
    let found = rustix::fs::statx(rustix::fs::CWD, path, flags, fields).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(found.stx_mode.into());
    Some(Found {
        is_file: kind.is_file(),
        is_block: kind.is_block_device(),
        device: (kind.is_block_device() || kind.is_char_device())
            .then_some((found.stx_rdev_major, found.stx_rdev_minor)),
        links: found.stx_nlink,
        blocks: found.stx_blocks,
    })
}

/// The interface of an open TUN device, by its path in `/proc/PID/fd`.
fn interface(path: &Path) -> Option<String> {
    let information = path.parent()?.with_file_name("fdinfo").join(path.file_name()?);
    let text = fs::read_to_string(information).ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("iff:"))?.trim();
    (!name.is_empty()).then(|| shown(name))
}

/// A device that a process has mapped and CRIU cannot dump.
fn mapped_device(directory: &Path) -> Option<(String, &'static str)> {
    let maps = fs::read(directory.join("maps")).unwrap_or_default();
    let maps = String::from_utf8_lossy(&maps);
    maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let name = &rest[rest.find("/dev/")?..];
        // Most of what is there is no device.
        let is_none = ["/dev/zero", "/dev/shm/"].iter().any(|other| name.starts_with(other));
        let found = if is_none { None } else { stat(&directory.join("map_files").join(range)) }?;
        let (major, minor) = found.device?;
        let is_gpu = is_gpu(name, major);
        Some((format!("the device {} ({major}:{minor})", shown(name)), if is_gpu { GPU } else { DEVICE }))
    })
}

fn is_gpu(name: &str, major: u32) -> bool {
    GPU_MAJORS.contains(&major) || GPU_PATHS.iter().any(|path| name.starts_with(path))
}

/// A device, unless CRIU can dump it.
fn device(name: &str, (major, minor): (u32, u32), is_block: bool) -> Option<(String, &'static str)> {
    if is_block {
        return Some((format!("the block device {name} ({major}:{minor})"), DEVICE));
    }
    let can_be_dumped = GOOD_MAJORS.contains(&major)
        || PSEUDO_TERMINALS.contains(&major)
        || GOOD_BELOW.iter().any(|(good, below)| major == *good && minor < *below)
        || (major, minor) == AUTOFS;
    if can_be_dumped {
        return None;
    }
    let why = if is_gpu(name, major) { GPU } else { DEVICE };
    Some((format!("the device {name} ({major}:{minor})"), why))
}

/// The protocol of a socket as the kernel names it.
fn protocol(path: &Path) -> Option<String> {
    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut name = [0_u8; 64];
    let attribute: &CStr = c"system.sockprotoname";
    // SAFETY: two strings that end with a zero, and a buffer of the length told.
    let length =
        unsafe { libc::getxattr(path.as_ptr(), attribute.as_ptr(), name.as_mut_ptr().cast(), name.len()) };
    let name = name.get(..usize::try_from(length).ok()?)?;
    Some(String::from_utf8_lossy(name).trim_end_matches('\0').to_owned())
}

fn is_message_queue(path: &Path) -> bool {
    nix::sys::statfs::statfs(path).is_ok_and(|found| {
        // The type has another width on each machine.
        #[allow(clippy::unnecessary_cast)]
        let kind = found.filesystem_type().0 as i64;
        kind == MQUEUE_MAGIC
    })
}

/// The open files of one process.
struct Files<'a> {
    proc: &'a Path,
    /// The process's in there.
    directory: &'a Path,
    pid: u32,
    /// Opened when it is needed.
    pidfd: Option<OwnedFd>,
}

impl Files<'_> {
    /// What is wrong with a pidfd, if something is.
    fn bad_pidfd(&self, number: i32, processes: &[u32]) -> Option<(String, &'static str)> {
        let path = self.directory.join("fdinfo").join(number.to_string());
        let text = fs::read_to_string(path).ok()?;
        let field = |name: &str| text.lines().find_map(|line| Some(line.strip_prefix(name)?.trim()));
        if i64::from_str_radix(field("flags:")?, 8).ok()? & PIDFD_THREAD != 0 {
            return Some(("a pidfd of a thread".into(), THREAD));
        }
        // Of one that has ended it is -1.
        let pid: u32 = field("Pid:")?.parse().ok()?;
        // A zombie is a member of no cgroup any more.
        let is_of_service = processes.contains(&pid) || tasks::read(self.proc, pid)?.state == 'Z';
        (!is_of_service).then(|| (format!("a pidfd of process {pid}"), OUTSIDE))
    }

    /// Whether a UDP socket is corked. What cannot be asked is taken not to be.
    fn is_corked(&mut self, number: i32) -> bool {
        self.ask_cork(number).unwrap_or(false)
    }

    fn ask_cork(&mut self, number: i32) -> io::Result<bool> {
        let pidfd = match &self.pidfd {
            Some(pidfd) => pidfd,
            None => {
                let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).ok_or(Errno::INVAL)?;
                self.pidfd.insert(pidfd_open(pid, PidfdFlags::empty())?)
            }
        };
        let socket = pidfd_getfd(pidfd, number, PidfdGetfdFlags::empty())?;
        let mut corked = 0_i32;
        let mut length = libc::socklen_t::try_from(size_of::<i32>()).map_err(io::Error::other)?;
        // SAFETY: a number and its length, which live in this frame. UDP_CORK is 1; libc does not have it.
        let asked = unsafe {
            libc::getsockopt(socket.as_raw_fd(), libc::SOL_UDP, 1, (&raw mut corked).cast(), &raw mut length)
        };
        match asked {
            0 => Ok(corked != 0),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn devices_that_can_be_dumped_are_passed_over() {
        for good in [(1, 3), (4, 63), (5, 0), (5, 2), (10, 235), (136, 7), (188, 0)] {
            assert_eq!(device("/dev/x", good, false), None, "{good:?}");
        }
        for bad in [(4, 64), (5, 3), (10, 229)] {
            assert_eq!(device("/dev/x", bad, false).unwrap().1, DEVICE, "{bad:?}");
        }
        assert_eq!(device("/dev/x", (1, 3), true).unwrap().1, DEVICE);
        for (name, number) in [("/dev/dri/card0", (226, 0)), ("/dev/nvidia-uvm", (511, 0)), ("/x", (195, 0))]
        {
            assert_eq!(device(name, number, false).unwrap().1, GPU, "{name}");
        }
    }

    #[test]
    fn a_tun_device_is_an_obstacle_with_an_interface() {
        let directory = tempfile::tempdir().unwrap();
        let at = |path: &str| directory.path().join(path);
        fs::create_dir(at("fd")).unwrap();
        fs::create_dir(at("fdinfo")).unwrap();
        for (number, text, expected) in
            [("3", "pos:\t0\niff:\ttun0\n", Some("tun0".to_owned())), ("4", "pos:\t0\niff:\t\n", None)]
        {
            fs::write(at("fdinfo").join(number), text).unwrap();
            assert_eq!(interface(&at("fd").join(number)), expected);
        }
        assert_eq!(interface(&at("fd/5")), None);
    }

    #[test]
    fn a_mapped_device_is_found_where_no_descriptor_tells() {
        let directory = tempfile::tempdir().unwrap();
        let maps = "1000-2000 rw-s 00000000 00:05 7 /dev/zero (deleted)\n\
                    2000-3000 rw-s 00000000 00:19 8 /dev/shm/segment\n\
                    3000-4000 r--p 00000000 00:20 9 /opt/dev/file\n";
        let found = |more: &str| {
            fs::write(directory.path().join("maps"), format!("{maps}{more}")).unwrap();
            mapped_device(directory.path()).map(|(what, _)| what)
        };
        fs::create_dir(directory.path().join("map_files")).unwrap();
        symlink("/dev/null", directory.path().join("map_files/2000-3000")).unwrap();
        symlink(directory.path().join("maps"), directory.path().join("map_files/3000-4000")).unwrap();
        symlink("/dev/full", directory.path().join("map_files/4000-5000")).unwrap();
        assert_eq!(found(""), None);
        let more = "4000-5000 rw-s 00000000 00:05 10 /dev/full\n";
        assert_eq!(found(more).as_deref(), Some("the device /dev/full (1:7)"));
    }
}
