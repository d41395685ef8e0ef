//! A container's cgroups: members, freezer, figures. cgroup v1 and v2.
//!
//! runc makes the cgroups; godwit uses the freezer directly, because a run of `runc pause` costs
//! tens of milliseconds that clients would feel as part of the pause.

use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::io::Interest;

use crate::confinement::PIDS_LIMIT;
use crate::watch::watch;

/// Where the kernel's cgroup hierarchies are mounted by every distribution.
const MOUNT: &str = "/sys/fs/cgroup";

/// How long freezing may take. A task in uninterruptible sleep (a stalled disk or NFS server)
/// cannot be frozen.
const FREEZE_LIMIT: Duration = Duration::from_secs(10);

/// The v1 freezer tells nobody when it is done: how often to look. It takes some 0.1 ms.
const FREEZE_LOOK: Duration = Duration::from_micros(100);

/// The v1 freezer can miss a task that forks while it works; runc's cure is to thaw and freeze
/// again after this many looks.
const LOOKS_BEFORE_RETRY: u32 = 500;

/// runc's own period of a CPU limit, in microseconds.
const CPU_PERIOD: u64 = 100_000;

/// Whether this machine has cgroups of version 2 alone.
pub(crate) fn is_unified() -> bool {
    Path::new(MOUNT).join("cgroup.controllers").exists()
}

/// Whether this machine has a controller in the hierarchies that runc uses.
pub(crate) fn is_available(controller: &str) -> bool {
    match std::fs::read_to_string(Path::new(MOUNT).join("cgroup.controllers")) {
        Ok(unified) => unified.split_whitespace().any(|name| name == controller),
        Err(_) => Path::new(MOUNT).join(controller).is_dir(),
    }
}

/// The cgroup path with a leading slash, so that runc takes it from the hierarchy's root.
pub(crate) fn absolute(cgroup: &str) -> String {
    format!("/{}", cgroup.trim_matches('/'))
}

/// The path of a process's cgroup below each hierarchy's root.
pub(crate) fn of_process(pid: u32) -> io::Result<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup"))?;
    path_in(&text).ok_or_else(|| io::Error::other("it is in no cgroup that has a freezer"))
}

/// That of the hierarchy with the freezer, in what `/proc/PID/cgroup` says.
fn path_in(text: &str) -> Option<String> {
    let lines = || text.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
    let v1 = lines().find(|(controllers, _)| controllers.split(',').any(|name| name == "freezer"));
    let (_, path) = v1.or_else(|| lines().find(|(controllers, _)| controllers.is_empty()))?;
    Some(path.to_owned())
}

/// One container's cgroups on this node.
#[derive(Debug, Clone)]
pub(crate) struct Cgroup {
    /// Path below each hierarchy's root, without slashes at its ends.
    path: String,
    unified: bool,
}

impl Cgroup {
    /// The cgroups of this path; they may exist or not.
    pub(crate) fn new(path: &str) -> io::Result<Self> {
        let path = path.trim_matches('/').to_owned();
        if path.is_empty() || path.split('/').any(|part| part.is_empty() || part == "." || part == "..") {
            return Err(io::Error::new(
                ErrorKind::InvalidInput,
                format!("cgroup path {path:?} is not a path"),
            ));
        }
        Ok(Self { path, unified: is_unified() })
    }

    /// The directory whose freezer holds the container.
    pub(crate) fn freezer(&self) -> PathBuf {
        self.directory("freezer")
    }

    /// PIDs of the members, those of cgroups below included; none where there is no such cgroup.
    ///
    /// # Errors
    /// The list cannot be read. It must not be taken for empty: a process that is not known neither moves
    /// nor ends with the others.
    pub(crate) fn members(&self) -> io::Result<Vec<u32>> {
        members_below(self.freezer())
    }

    /// Whether the freezer holds all members.
    pub(crate) fn is_frozen(&self) -> bool {
        let directory = self.freezer();
        if self.unified {
            std::fs::read_to_string(directory.join("cgroup.events"))
                .is_ok_and(|text| text.lines().any(|line| line == "frozen 1"))
        } else {
            std::fs::read_to_string(directory.join("freezer.state")).is_ok_and(|text| text.trim() == "FROZEN")
        }
    }

    /// Freezes all members; returns when they are frozen. On failure they run on.
    pub(crate) async fn freeze(&self) -> io::Result<()> {
        let result = tokio::time::timeout(FREEZE_LIMIT, async {
            if self.unified { self.freeze_unified().await } else { self.freeze_v1().await }
        })
        .await
        .unwrap_or_else(|_| Err(io::Error::new(ErrorKind::TimedOut, "a process could not be frozen")));
        if result.is_err() {
            // The first error is the one to tell.
            let _ = self.thaw();
        }
        result
    }

    async fn freeze_unified(&self) -> io::Result<()> {
        let events = std::fs::File::open(self.freezer().join("cgroup.events"))?;
        let events = watch(events, Interest::PRIORITY)?;
        std::fs::write(self.freezer().join("cgroup.freeze"), "1")?;
        while !self.is_frozen() {
            events.ready(Interest::PRIORITY).await?.clear_ready();
        }
        Ok(())
    }

    async fn freeze_v1(&self) -> io::Result<()> {
        let state = self.freezer().join("freezer.state");
        for look in 1_u32.. {
            if look % LOOKS_BEFORE_RETRY == 0 {
                std::fs::write(&state, "THAWED")?;
            }
            std::fs::write(&state, "FROZEN")?;
            if self.is_frozen() {
                break;
            }
            // The service stands still meanwhile, and tokio's timer counts milliseconds.
            tokio::task::spawn_blocking(|| std::thread::sleep(FREEZE_LOOK)).await?;
        }
        Ok(())
    }

    /// Lets frozen members run.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        if self.unified {
            write(&self.freezer().join("cgroup.freeze"), "0")
        } else {
            write(&self.freezer().join("freezer.state"), "THAWED")
        }
    }

    /// Limits the CPU of all members, in thousandths of a CPU; 0 for no limit.
    pub(crate) fn limit_cpu(&self, millis: u32) -> io::Result<()> {
        // The quota is a part of this.
        let period = self.cpu_period().unwrap_or(CPU_PERIOD);
        let quota = u64::from(millis) * period / 1000;
        let (file, text) = match (self.unified, millis) {
            (true, 0) => ("cpu.max", format!("max {period}")),
            (true, _) => ("cpu.max", format!("{quota} {period}")),
            (false, 0) => ("cpu.cfs_quota_us", "-1".to_owned()),
            (false, _) => ("cpu.cfs_quota_us", quota.to_string()),
        };
        let path = self.directory("cpu").join(file);
        let set = std::fs::read_to_string(&path).and_then(|now| match now.trim() == text {
            true => Ok(()),
            false => std::fs::write(path, text),
        });
        match set {
            // No controller, or no container any more.
            Err(error) if is_gone(&error) => Ok(()),
            set => set,
        }
    }

    /// Limits the memory that is charged to the members, in bytes; 0 for no limit.
    pub(crate) fn limit_memory(&self, bytes: u64) -> io::Result<()> {
        let (file, none) = if self.unified { ("memory.max", "max") } else { ("memory.limit_in_bytes", "-1") };
        self.set_limit(
            "memory",
            file,
            if bytes == 0 { none.to_owned() } else { bytes.to_string() },
            bytes == 0,
        )
    }

    /// Limits the number of processes and threads; 0 for no limit.
    pub(crate) fn limit_processes(&self, most: u64) -> io::Result<()> {
        let text = if most == 0 { "max".to_owned() } else { most.to_string() };
        // As at the start: where this machine cannot limit them, the limit that was not asked for is none.
        self.set_limit("pids", "pids.max", text, [0, PIDS_LIMIT].contains(&most))
    }

    /// Writes a limit; a controller that the machine does not have is an error unless there is nothing to limit.
    fn set_limit(&self, controller: &str, file: &str, text: String, may_lack: bool) -> io::Result<()> {
        let path = self.directory(controller).join(file);
        match write(&path, &text) {
            Err(error) if error.kind() == ErrorKind::NotFound && may_lack => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(io::Error::other(format!(
                "there is no {}: the machine lacks the cgroup controller {controller}",
                path.display()
            ))),
            written => written,
        }
    }

    /// The period over which CPU time is limited, in microseconds.
    fn cpu_period(&self) -> Option<u64> {
        let file = if self.unified { "cpu.max" } else { "cpu.cfs_period_us" };
        let text = std::fs::read_to_string(self.directory("cpu").join(file)).ok()?;
        text.split_whitespace().last()?.parse().ok()
    }

    /// Anonymous and shared memory in bytes: what a migration has to carry. None without a memory
    /// controller.
    pub(crate) fn memory(&self) -> Option<u64> {
        let text = std::fs::read_to_string(self.directory("memory").join("memory.stat")).ok()?;
        let field = |name: &str| {
            text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<u64>().ok())
        };
        if self.unified {
            Some(field("anon")? + field("shmem").unwrap_or(0))
        } else {
            Some(field("total_rss")? + field("total_shmem").unwrap_or(0))
        }
    }

    /// Has the memory cgroup, which is there, charged for what this process touches. Nothing happens where the node has no
    /// such controller.
    pub(crate) fn charge(&self, pid: u32) -> io::Result<()> {
        if !is_available("memory") {
            return Ok(());
        }
        std::fs::write(self.directory("memory").join("cgroup.procs"), pid.to_string())
    }

    /// Removes the cgroups that runc left; they must be empty.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let mut roots = vec![PathBuf::from(MOUNT)];
        if !self.unified {
            roots = std::fs::read_dir(MOUNT)?.flatten().map(|entry| entry.path()).collect();
        }
        roots.iter().try_for_each(|root| remove_tree(&root.join(&self.path)))
    }

    /// Whether its hierarchy is that of version 2.
    pub(super) fn is_unified(&self) -> bool {
        self.unified
    }

    /// Its directory in a controller's hierarchy.
    pub(super) fn directory(&self, controller: &str) -> PathBuf {
        if self.unified {
            Path::new(MOUNT).join(&self.path)
        } else {
            Path::new(MOUNT).join(controller).join(&self.path)
        }
    }
}

/// Whether a file of a cgroup is not there: removed, or being removed (ENODEV) while it is read or written.
pub(super) fn is_gone(error: &io::Error) -> bool {
    error.kind() == ErrorKind::NotFound || error.raw_os_error() == Some(libc::ENODEV)
}

/// The members of a cgroup and of those below it.
fn members_below(cgroup: PathBuf) -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    let mut directories = vec![cgroup];
    while let Some(directory) = directories.pop() {
        let text = match std::fs::read_to_string(directory.join("cgroup.procs")) {
            Err(error) if is_gone(&error) => continue,
            text => text?,
        };
        for line in text.lines() {
            pids.push(
                line.parse().map_err(|_| io::Error::other(format!("a cgroup has the member {line:?}")))?,
            );
        }
        let entries = match std::fs::read_dir(&directory) {
            Err(error) if is_gone(&error) => continue,
            entries => entries?,
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                directories.push(entry.path());
            }
        }
    }
    Ok(pids)
}

/// Writes into a file that the kernel has made: of one that it has not, it would say that it may not be made.
fn write(path: &Path, text: &str) -> io::Result<()> {
    std::fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
}

/// Removes a cgroup with those below it.
fn remove_tree(directory: &Path) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries.flatten() {
        if entry.file_type()?.is_dir() {
            remove_tree(&entry.path())?;
        }
    }
    // A member that was killed leaves its cgroup a moment after its end can be seen.
    let begin = Instant::now();
    loop {
        match std::fs::remove_dir(directory) {
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error)
                if error.kind() == ErrorKind::ResourceBusy && begin.elapsed() < Duration::from_secs(1) =>
            {
                std::thread::sleep(Duration::from_millis(1));
            }
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn members_that_cannot_be_read_are_not_taken_for_none() {
        let directory = tempfile::tempdir().unwrap();
        let below = directory.path().join("below");
        assert_eq!(members_below(below.clone()).unwrap(), Vec::<u32>::new());
        std::fs::create_dir(&below).unwrap();
        std::fs::write(directory.path().join("cgroup.procs"), "7\n8\n").unwrap();
        std::fs::write(below.join("cgroup.procs"), "9\n").unwrap();
        assert_eq!(members_below(directory.path().to_owned()).unwrap(), [7, 8, 9]);
        std::fs::remove_file(below.join("cgroup.procs")).unwrap();
        std::fs::create_dir(below.join("cgroup.procs")).unwrap();
        assert!(members_below(directory.path().to_owned()).is_err());
    }

    #[test]
    fn a_cgroup_that_is_gone_is_told_from_one_that_cannot_be_thawed() {
        for (errno, gone) in [(libc::ENOENT, true), (libc::ENODEV, true), (libc::EBUSY, false)] {
            assert_eq!(is_gone(&io::Error::from_raw_os_error(errno)), gone, "{errno}");
        }
        let none = Cgroup::new("/godwit-none/such").unwrap();
        assert!(is_gone(&none.thaw().unwrap_err()));
    }

    /// A directory of cgroups, too, refuses that a file is made in it, and says that it may not be.
    #[test]
    fn a_limit_is_no_file_that_is_made() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("pids.max");
        assert_eq!(write(&file, "5").unwrap_err().kind(), ErrorKind::NotFound);
        std::fs::write(&file, "max\n").unwrap();
        write(&file, "5").unwrap();
        assert_eq!(std::fs::read_to_string(&file).unwrap(), "5ax\n");
    }

    #[test]
    fn the_path_is_that_of_the_freezer() {
        let hybrid = "5:pids:/p\n4:cpu,freezer:/f\n0::/u\n";
        assert_eq!(path_in(hybrid).unwrap(), "/f");
        assert_eq!(path_in("0::/u:x\n").unwrap(), "/u:x");
        assert_eq!(path_in(""), None);
    }

    #[test]
    fn a_path_that_leaves_the_hierarchy_is_refused() {
        for path in ["", "/", "a/../b", "a//b", ".."] {
            assert!(Cgroup::new(path).is_err(), "{path}");
        }
        assert_eq!(Cgroup::new("/a/b/").unwrap().path, "a/b");
    }
}
