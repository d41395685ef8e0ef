//! What works on this node, what is missing, and what to do about it.

use std::path::Path;

use godwit_api::v1::{Check, NodeInfo};
use godwit_criu::{Criu, CriuError, own_series};
use godwit_engine::foreign::Fitness;
use godwit_memory::tracker::{Backend, Detected};
use godwit_migration::error_chain;
use godwit_migration::message::Versions;
use godwit_network::Encryption;

use crate::directory;
use crate::network::overlay;
use crate::node::Node;

/// Below this much free disk, images and changed files may not fit.
const DISK_LOW: u64 = 1 << 30;

/// `CAP_*` numbers godwitd and CRIU use (linux/capability.h), and for what.
const CAPABILITIES: [(u32, &str, &str); 23] = [
    (0, "CAP_CHOWN", "files of services"),
    (1, "CAP_DAC_OVERRIDE", "files of services"),
    (2, "CAP_DAC_READ_SEARCH", "files by their handles"),
    (3, "CAP_FOWNER", "files of services"),
    (4, "CAP_FSETID", "files of services"),
    (5, "CAP_KILL", "stopping services"),
    (6, "CAP_SETGID", "users of services"),
    (7, "CAP_SETUID", "users of services"),
    (8, "CAP_SETPCAP", "capabilities of services"),
    (10, "CAP_NET_BIND_SERVICE", "what services may"),
    (12, "CAP_NET_ADMIN", "bridges, VXLAN, TCP repair"),
    (13, "CAP_NET_RAW", "gratuitous ARP, and echoes to clients"),
    (14, "CAP_IPC_LOCK", "restoring locked memory"),
    (15, "CAP_IPC_OWNER", "restoring System V memory and semaphores"),
    (18, "CAP_SYS_CHROOT", "what services may, and joining mount namespaces"),
    (19, "CAP_SYS_PTRACE", "dumping processes"),
    (21, "CAP_SYS_ADMIN", "namespaces and mounts"),
    (23, "CAP_SYS_NICE", "restoring priorities"),
    (24, "CAP_SYS_RESOURCE", "restoring limits above this process's own"),
    (25, "CAP_SYS_TIME", "restoring the offsets of services' clocks"),
    (27, "CAP_MKNOD", "device nodes of images"),
    (29, "CAP_AUDIT_WRITE", "what services may"),
    (31, "CAP_SETFCAP", "capabilities of files"),
];

/// Clocks that differ by less, in milliseconds, look the same on a busy network.
pub(crate) const CLOCKS_DIFFER_MS: u64 = 3_000;

/// From Linux 6.16 on SO_PASSCRED and SO_PASSSEC are refused for TCP sockets, which older CRIUs take
/// for an error.
const FIRST_FOR_NEW_KERNELS: godwit_criu::Version = godwit_criu::Version::release(4, 2, 0);

fn ok(name: &str, found: impl Into<String>) -> Check {
    Check { name: name.into(), status: "ok".into(), found: found.into(), advice: String::new() }
}

fn degraded(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name: name.into(), status: "degraded".into(), found: found.into(), advice: advice.into() }
}

fn missing(name: &str, found: impl Into<String>, advice: impl Into<String>) -> Check {
    Check { name: name.into(), status: "missing".into(), found: found.into(), advice: advice.into() }
}

/// Checks everything that godwit needs.
pub(crate) async fn examine(node: &Node) -> Vec<Check> {
    let local = node.local();
    let mut checks = criu(node.criu()).await;
    checks.push(tracker(&local.tracker));
    if local.tracker.backend == Backend::Uffd {
        checks.push(shared_memory(godwit_memory::tracker::shared_writes()));
    }
    checks.push(lazy_restore(local.userfaultfd));
    if local.userfaultfd {
        checks.push(late_shared_memory(godwit_memory::pager::fills_shared()));
    }
    checks.push(userfaultfd());
    checks.push(pagemap_scan());
    checks.push(soft_dirty());
    checks.push(huge_pages(Path::new("/sys/kernel/mm/transparent_hugepage")));
    checks.push(cgroups());
    checks.push(process_limit(godwit_engine::runc::limits_processes()));
    checks.push(capabilities());
    for fact in godwit_network::probe(node.networks().first().config()).await {
        checks.push(match (fact.ok, fact.optional) {
            (true, _) => ok(fact.name, fact.detail),
            (false, true) => degraded(fact.name, "not ideal", fact.detail),
            (false, false) => missing(fact.name, "not sufficient", fact.detail),
        });
    }
    checks.push(guard(node).await);
    checks.push(encryption(node).await);
    checks.push(names(node));
    checks.push(clock());
    match directory::nodes(node) {
        Ok(nodes) => checks.extend([clocks(&nodes), criu_of(&nodes), releases(&nodes)]),
        Err(error) => {
            checks.push(missing("clocks", error_chain(&error), "check the disk of the state directory"))
        }
    }
    checks.push(disk(&local.layout.state));
    checks.push(retained(local.retention.bytes(), local.kept_files.taken()));
    checks.extend(local.registries.probe().await.map(registries));
    let engines = node.engines();
    let (podman, docker) = tokio::join!(engines.podman.fitness(), engines.docker.fitness());
    checks.extend([("podman", podman), ("docker", docker)].into_iter().filter_map(engine));
    checks
}

/// Whether services find each other by name.
fn names(node: &Node) -> Check {
    if node.names.port.is_none() {
        return ok("names of services", "off by --dns off: services have the name servers of this node");
    }
    let gateways = node.networks().all().into_iter().map(|network| network.config().subnet.gateway());
    let trouble: Vec<_> = gateways.filter_map(|gateway| node.names.trouble(gateway)).collect();
    match trouble.is_empty() {
        true => ok("names of services", "services ask the gateways of their networks"),
        false => degraded(
            "names of services",
            "services do not find each other by name, and have the name servers of this node",
            trouble.join("; "),
        ),
    }
}

/// Whether layers can come from the registries that are allowed.
fn registries(probed: std::io::Result<String>) -> Check {
    let name = "layers from registries";
    match probed {
        Ok(version) => ok(name, version),
        Err(error) => degraded(
            name,
            format!("skopeo cannot be run: {error}; layers come from the nodes that services leave"),
            "install the packages skopeo and util-linux, or take --pull-layers away",
        ),
    }
}

/// Whether an engine of others is such that its containers can move, where the node has one.
fn engine((name, fitness): (&str, Fitness)) -> Option<Check> {
    match fitness {
        Fitness::Absent => None,
        Fitness::Fit(version) => {
            Some(ok(name, format!("version {version}: its containers can move, and come here")))
        }
        Fitness::Unfit { found, advice } => Some(degraded(name, found, advice)),
    }
}

/// Whether strangers are kept out of the overlay.
async fn guard(node: &Node) -> Check {
    let name = "overlay guard";
    match overlay::guarding(node).await {
        Ok(guarding) => ok(
            name,
            format!(
                "known nodes: {}; packets of others that were dropped: {}",
                guarding.nodes.len(),
                guarding.dropped
            ),
        ),
        Err(reason) => degraded(
            name,
            format!(
                "any host that reaches UDP port {} can send frames to services",
                node.networks().first().config().port
            ),
            reason,
        ),
    }
}

/// Whether packets between nodes are encrypted.
async fn encryption(node: &Node) -> Check {
    let name = "encryption";
    let Some(keys) = node.network.keys() else {
        return ok(name, "off: services' packets between nodes are not encrypted");
    };
    match (keys.status().await.broken(), keys.how()) {
        (Some(reason), _) => missing(name, "nothing passes between this node and others", reason),
        (None, Encryption::WireGuard) => ok(name, "wireguard: the kernel's WireGuard"),
        (None, _) => ok(name, "tunnel: WireGuard in user space"),
    }
}

async fn criu(criu: &Criu) -> Vec<Check> {
    let advice = "run scripts/setup, which installs a CRIU that works on this kernel";
    let version = match criu.version().await {
        Ok(version) if version < FIRST_FOR_NEW_KERNELS && kernel_version() >= (6, 16) => missing(
            "criu",
            format!("version {version}, which cannot dump TCP sockets on Linux 6.16 and newer"),
            advice,
        ),
        Ok(version) => ok("criu", format!("version {version}, {}", criu.path().display())),
        Err(CriuError::Old { version, .. }) => {
            let found = format!("version {version}, older than {}", godwit_criu::OLDEST_VERSION);
            return vec![missing("criu", found, advice)];
        }
        Err(CriuError::Filtered { .. }) => {
            return vec![missing(
                "criu",
                "godwitd is under a filter of system calls (Seccomp in /proc/PID/status): the kernel lets CRIU lift none of a service's",
                "start godwitd without: no profile of a container, no SystemCallFilter= or MemoryDenyWriteExecute= in its systemd unit",
            )];
        }
        Err(error) => return vec![missing("criu", error_chain(&error), advice)],
    };
    let check = match criu.check().await {
        Ok(()) => ok("criu check", "looks good"),
        Err(error) => missing("criu check", error_chain(&error), advice),
    };
    let lazy = match criu.lazy_external().await {
        Ok(true) => ok("lazy dump", "skips the memory that godwit moves"),
        Ok(false) => degraded(
            "lazy dump",
            "an unpatched CRIU, which visits each page (0.1 s for each GiB)",
            "build CRIU from source with scripts/setup-criu --build-series",
        ),
        Err(error) => missing("lazy dump", error_chain(&error), advice),
    };
    let patches = match criu.version().await.map(|version| version.series) {
        Ok(0) => degraded(
            "criu patches",
            "none: a CRIU as its authors made it; some services do not move, others more slowly",
            "build CRIU from source with scripts/setup-criu --build-series",
        ),
        Ok(series) if series < own_series() => degraded(
            "criu patches",
            format!("those of series {series}: what later ones mend is not mended"),
            format!(
                "install the godwit-criu of this godwit (series {}), or build it with scripts/setup-criu --build-series",
                own_series()
            ),
        ),
        Ok(series) => ok("criu patches", format!("all, series {series}")),
        Err(error) => missing("criu patches", error_chain(&error), advice),
    };
    vec![version, check, patches, lazy]
}

/// What finds the pages that a service writes while it is copied.
fn tracker(tracker: &Detected) -> Check {
    let name = "tracker";
    match tracker.backend {
        Backend::Uffd => ok(name, "uffd: writes are followed without stopping the service"),
        Backend::SoftDirty => {
            degraded(name, "soft-dirty: each scan stops the service briefly", tracker.reasons.join("; "))
        }
        Backend::None => degraded(
            name,
            "none: only modes cold and postcopy",
            format!("{}; Linux 6.7 or newer has what is missing", tracker.reasons.join("; ")),
        ),
    }
}

/// What it takes to find the pages of shared memory that a service wrote last.
fn shared_memory(writes: std::io::Result<()>) -> Check {
    let name = "shared memory";
    match writes {
        Ok(()) => ok(name, "page tables tell what was written: the freeze compares little of it"),
        Err(error) => degraded(
            name,
            format!("all of it is compared during the freeze, 0.2 s to 0.4 s for each GiB: {error}"),
            "mount tracefs (mount -t tracefs tracefs /sys/kernel/tracing); the kernel needs CONFIG_FTRACE_SYSCALLS, godwitd CAP_SYS_ADMIN or CAP_PERFMON",
        ),
    }
}

/// Whether services can resume here before their pages are in place.
fn lazy_restore(works: bool) -> Check {
    match works {
        true => ok("lazy restore", "services resume before all of their pages are in place"),
        false => degraded(
            "lazy restore",
            "services that arrive are restored from images, with all their pages",
            "CRIU needs userfaultfd as root (and godwitd not --userfaultfd off); modes postcopy and hybrid need it",
        ),
    }
}

/// Whether shared memory can follow a service that comes here.
fn late_shared_memory(fills: std::io::Result<()>) -> Check {
    let name = "shared memory that follows";
    match fills {
        Ok(()) => ok(name, "in postcopy, services resume before their shared anonymous memory is in place"),
        Err(error) => degraded(
            name,
            format!("in postcopy, shared memory is sent to this node before the freeze: {error}"),
            "it takes Linux 5.19 (6.10 on arm64), and `echo never >/sys/kernel/mm/transparent_hugepage/shmem_enabled`",
        ),
    }
}

/// Major and minor version of the running kernel; zeros when it does not tell.
fn kernel_version() -> (u32, u32) {
    let release =
        nix::sys::utsname::uname().map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default();
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn userfaultfd() -> Check {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: userfaultfd(2) takes flags only and returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if fd < 0 {
        return degraded(
            "userfaultfd",
            std::io::Error::last_os_error().to_string(),
            "modes postcopy and hybrid need it, and so does pre-copy without stops of the service: enable CONFIG_USERFAULTFD; cold migration works without it",
        );
    }
    if let Ok(fd) = i32::try_from(fd) {
        // SAFETY: the descriptor was made above and is closed once.
        unsafe { libc::close(fd) };
    }
    ok("userfaultfd", "available")
}

fn pagemap_scan() -> Check {
    match godwit_memory::tracker::pagemap_scan() {
        Ok(()) => ok("PAGEMAP_SCAN", "available"),
        Err(error) => degraded(
            "PAGEMAP_SCAN",
            error.to_string(),
            "pre-copy without stops of the service needs Linux 6.7 or newer; with soft-dirty it stops the service briefly; modes cold and postcopy need neither",
        ),
    }
}

fn soft_dirty() -> Check {
    let name = "soft-dirty";
    let advice = "pre-copy uses it where PAGEMAP_SCAN is missing (CONFIG_MEM_SOFT_DIRTY, x86-64); nothing needs it where that is there";
    match soft_dirty_bit() {
        Ok(true) => ok(name, "available"),
        Ok(false) => degraded(name, "the kernel does not track it", advice),
        Err(error) => degraded(name, error.to_string(), advice),
    }
}

/// Whether a page that was just written carries bit 55 in pagemap (Documentation/admin-guide/mm/soft-dirty.rst).
fn soft_dirty_bit() -> std::io::Result<bool> {
    use std::os::unix::fs::FileExt;
    let page = vec![1u8; 8192];
    let address = std::hint::black_box(&page).as_ptr() as u64;
    let mut entry = [0u8; 8];
    std::fs::File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, address / 4096 * 8)?;
    Ok(u64::from_ne_bytes(entry) & (1 << 55) != 0)
}

/// How transparent huge pages are set. Any setting will do: a restore turns them off for itself.
fn huge_pages(directory: &Path) -> Check {
    let setting = |name: &str| {
        let text = std::fs::read_to_string(directory.join(name)).ok()?;
        let chosen = text.split_once('[')?.1.split_once(']')?.0;
        Some(chosen.to_owned())
    };
    let found = match (setting("enabled"), setting("shmem_enabled")) {
        (None, _) => "this kernel has none".to_owned(),
        (Some(private), None) => format!("{private}: moves do not depend on it"),
        (Some(private), Some(shared)) => {
            format!("{private}, for shared memory {shared}: moves do not depend on it")
        }
    };
    ok("huge pages", found)
}

fn cgroups() -> Check {
    let root = Path::new("/sys/fs/cgroup");
    if root.join("cgroup.controllers").exists() {
        return ok("cgroup", "version 2");
    }
    let wanted = ["freezer", "memory", "cpu"];
    let lacking: Vec<_> = wanted.into_iter().filter(|c| !root.join(c).exists()).collect();
    if lacking.is_empty() {
        return ok("cgroup", "version 1, with freezer, memory and cpu");
    }
    missing(
        "cgroup",
        format!("version 1 without {}", lacking.join(", ")),
        "mount these controllers below /sys/fs/cgroup",
    )
}

/// Whether the number of a service's processes can be limited here.
fn process_limit(works: bool) -> Check {
    let name = "process limit";
    match works {
        true => ok(name, "services have 2048 processes and threads at most, or as --pids-limit says"),
        false => degraded(
            name,
            "none: this machine lacks the cgroup controller pids, so one service can use up all process ids",
            "enable CONFIG_CGROUP_PIDS, or mount the controller pids below /sys/fs/cgroup; `godwit run --pids-limit` is refused without it",
        ),
    }
}

fn capabilities() -> Check {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
        .unwrap_or(0);
    lacking(effective)
}

/// What a godwitd with these effective capabilities lacks.
fn lacking(effective: u64) -> Check {
    let lacking: Vec<_> = CAPABILITIES.iter().filter(|(bit, ..)| effective >> bit & 1 == 0).collect();
    let names: Vec<_> = lacking.iter().map(|(_, name, what)| format!("{name} ({what})")).collect();
    match lacking.as_slice() {
        [] => ok("capabilities", "all that are needed"),
        [(24, ..)] => degraded(
            "capabilities",
            format!("without {}", names.join(", ")),
            "services that raised limits above godwitd's own cannot be restored; up to 20,000 open files work",
        ),
        _ => missing(
            "capabilities",
            format!("without {}", names.join(", ")),
            "run godwitd as root with these capabilities: check CapabilityBoundingSet= of its systemd unit (`systemctl cat godwitd`)",
        ),
    }
}

fn clock() -> Check {
    // SAFETY: an all-zero timex is a valid request that only reads.
    let mut timex: libc::timex = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is to a timex that lives through the call.
    let state = unsafe { libc::adjtimex(&raw mut timex) };
    if state >= 0 && state != libc::TIME_ERROR {
        return ok("clock", "synchronised");
    }
    degraded(
        "clock",
        "not synchronised",
        "run an NTP client: a service sees the time of day jump when it moves between nodes whose clocks differ, and a node whose clock is late refuses certificates as not yet valid",
    )
}

/// Whether the nodes' clocks agree, as far as they are known.
fn clocks(nodes: &[NodeInfo]) -> Check {
    let name = "clocks";
    let others = nodes.iter().filter(|node| !node.is_self && node.last_seen_ms != 0);
    let shown =
        |node: &NodeInfo| format!("node {} by {:+.1} s", node.name, node.clock_ahead_ms as f64 / 1000.0);
    let differ: Vec<_> = others
        .clone()
        .filter(|node| node.clock_ahead_ms.unsigned_abs() > CLOCKS_DIFFER_MS)
        .map(shown)
        .collect();
    if differ.is_empty() {
        return ok(name, format!("as this node's on {} other nodes", others.count()));
    }
    degraded(
        name,
        format!("differ from this node's: {}", differ.join(", ")),
        "run an NTP client on all nodes: a service sees the time of day jump by this when it moves",
    )
}

/// Whether every node can restore what every other dumps, and as well.
fn criu_of(nodes: &[NodeInfo]) -> Check {
    let name = "criu of nodes";
    let mut versions: Vec<_> = nodes.iter().filter(|node| !node.criu.is_empty()).collect();
    versions.sort_by(|a, b| (&a.criu, &a.name).cmp(&(&b.criu, &b.name)));
    if versions.windows(2).all(|two| two[0].criu == two[1].criu) {
        return ok(
            name,
            versions.first().map_or("not known yet".to_owned(), |node| format!("all have {}", node.criu)),
        );
    }
    let shown: Vec<_> = versions.iter().map(|node| format!("{} on node {}", node.criu, node.name)).collect();
    let release = |node: &NodeInfo| node.criu.split('+').next().map(str::to_owned);
    let advice = if versions.windows(2).all(|two| release(two[0]) == release(two[1])) {
        "services move between them, with the limits of the one without godwit's patches or with older ones; run \
         scripts/setup-criu --build-series there"
    } else {
        "run scripts/setup on the nodes with the older version: no service can move there from one with a newer version"
    };
    degraded(name, shown.join(", "), advice)
}

/// Whether all nodes have the same release, and if not, whether services move between them.
fn releases(nodes: &[NodeInfo]) -> Check {
    let name = "releases";
    let mut known: Vec<_> = nodes.iter().filter(|node| !node.version.is_empty()).collect();
    known.sort_by(|a, b| (&a.version, &a.name).cmp(&(&b.version, &b.name)));
    let speaks = |node: &NodeInfo| Versions::told(node.oldest_protocol, node.newest_protocol);
    // Where each two ranges have a common version, all have one.
    let behind = known.iter().min_by_key(|node| speaks(node).newest());
    let ahead = known.iter().max_by_key(|node| speaks(node).oldest());
    if let (Some(behind), Some(ahead)) = (behind, ahead)
        && speaks(behind).common(speaks(ahead)).is_none()
    {
        return degraded(
            name,
            format!(
                "node {} (release {}) speaks {} of the migration protocol, node {} (release {}) {}: no service moves between them",
                behind.name,
                behind.version,
                speaks(behind),
                ahead.name,
                ahead.version,
                speaks(ahead)
            ),
            format!("install a newer godwit on node {}", behind.name),
        );
    }
    if known.windows(2).all(|two| two[0].version == two[1].version) {
        return ok(
            name,
            known.first().map_or("not known yet".to_owned(), |node| format!("all have {}", node.version)),
        );
    }
    let shown: Vec<_> = known.iter().map(|node| format!("{} on node {}", node.version, node.name)).collect();
    degraded(
        name,
        shown.join(", "),
        "services move between these nodes; end the upgrade by installing the newest release on all",
    )
}

/// What this node has of services that may come, in bytes.
fn retained(pages: u64, (services, files): (usize, u64)) -> Check {
    let found = format!(
        "{} MiB of memory (--retained-memory), and {} MiB of disk for files of {services} (--retained-files)",
        pages >> 20,
        files >> 20
    );
    ok("services that may come", found)
}

fn disk(state: &Path) -> Check {
    let free = match nix::sys::statvfs::statvfs(state) {
        Ok(stat) => stat.blocks_available().saturating_mul(stat.fragment_size()),
        Err(error) => {
            return missing(
                "disk",
                format!("{}: {error}", state.display()),
                "make the state directory readable",
            );
        }
    };
    let found = format!("{} MiB free in {}", free >> 20, state.display());
    if free >= DISK_LOW {
        ok("disk", found)
    } else {
        degraded("disk", found, "free some space: layers and changed files of arriving services need it")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn node(name: &str, clock_ahead_ms: i64, criu: &str) -> NodeInfo {
        NodeInfo {
            name: name.into(),
            clock_ahead_ms,
            criu: criu.into(),
            last_seen_ms: 1,
            ..NodeInfo::default()
        }
    }

    #[test]
    fn without_tracefs_shared_memory_is_compared_and_doctor_says_what_is_missing() {
        assert_eq!(shared_memory(Ok(())).status, "ok");
        let error = std::io::Error::other("/sys/kernel/tracing/events/task/task_newtask/id: No such file");
        let degraded = shared_memory(Err(error));
        assert_eq!(degraded.status, "degraded");
        assert!(degraded.found.contains("task_newtask/id: No such file"), "{degraded:?}");
        assert!(degraded.advice.contains("mount -t tracefs"), "{degraded:?}");
    }

    #[test]
    fn clocks_that_differ_are_named_with_the_difference() {
        let alike = clocks(&[node("a", 0, ""), node("b", -900, "")]);
        assert_eq!(alike.status, "ok", "{alike:?}");
        let apart = clocks(&[node("a", 0, ""), node("b", -3_605_000, ""), node("c", 4_000, "")]);
        assert_eq!(apart.status, "degraded");
        assert!(apart.found.contains("node b by -3605.0 s, node c by +4.0 s"), "{apart:?}");
    }

    #[test]
    fn nodes_with_other_versions_of_criu_are_named() {
        assert_eq!(criu_of(&[node("a", 0, "4.2"), node("b", 0, "4.2"), node("c", 0, "")]).status, "ok");
        let differ = criu_of(&[node("a", 0, "4.2.1"), node("b", 0, "4.1.1")]);
        assert_eq!(differ.status, "degraded");
        assert!(differ.found.contains("4.1.1 on node b, 4.2.1 on node a"), "{differ:?}");
        assert!(differ.advice.contains("no service can move there"), "{differ:?}");
        let patches = criu_of(&[node("a", 0, "4.2.1+godwit.4"), node("b", 0, "4.2.1")]);
        assert_eq!(patches.status, "degraded");
        assert!(patches.advice.starts_with("services move between them"), "{patches:?}");
    }

    #[test]
    fn a_cluster_of_several_releases_is_announced_with_what_does_not_move() {
        let node = |name: &str, version: &str, oldest_protocol, newest_protocol| NodeInfo {
            version: version.into(),
            oldest_protocol,
            newest_protocol,
            ..node(name, 0, "")
        };
        let silent = node("d", "", 0, 0);
        let alike = [node("a", "0.3.0", 3, 4), node("b", "0.3.0", 3, 4), silent.clone()];
        assert_eq!(
            (releases(&alike).status.as_str(), releases(&alike).found.as_str()),
            ("ok", "all have 0.3.0")
        );
        let mixed = releases(&[node("a", "0.3.0", 3, 4), node("b", "0.2.0", 0, 0), silent]);
        assert_eq!(
            (mixed.status.as_str(), mixed.found.as_str()),
            ("degraded", "0.2.0 on node b, 0.3.0 on node a")
        );
        assert!(mixed.advice.contains("services move"), "{mixed:?}");
        let apart = releases(&[node("a", "0.3.0", 3, 4), node("b", "0.2.0", 0, 0), node("c", "0.5.0", 4, 5)]);
        assert_eq!(apart.status, "degraded");
        assert!(
            apart.found.contains("node b (release 0.2.0) speaks version 3 of")
                && apart.found.contains("node c (release 0.5.0) versions 4 to 5"),
            "{apart:?}"
        );
        assert_eq!(apart.advice, "install a newer godwit on node b");
    }

    #[test]
    fn a_capability_that_is_not_there_is_named_with_its_use() {
        assert_eq!(lacking(u64::MAX).status, "ok");
        let clocks = lacking(!(1 << 25));
        assert_eq!(clocks.status, "missing");
        assert_eq!(clocks.found, "without CAP_SYS_TIME (restoring the offsets of services' clocks)");
        assert_eq!(lacking(!(1 << 24)).status, "degraded", "most services do without");
    }

    #[test]
    fn a_machine_that_cannot_limit_processes_is_told_of() {
        assert_eq!(process_limit(true).status, "ok");
        let lacking = process_limit(false);
        assert!(lacking.status == "degraded" && lacking.found.contains("pids"), "{lacking:?}");
    }

    #[test]
    fn the_setting_of_huge_pages_is_told() {
        let directory = tempfile::tempdir().unwrap();
        let found = || huge_pages(directory.path()).found;
        assert_eq!(found(), "this kernel has none");
        std::fs::write(directory.path().join("enabled"), "[always] madvise never\n").unwrap();
        assert_eq!(found(), "always: moves do not depend on it");
        let shared = "always within_size advise [never] deny force\n";
        std::fs::write(directory.path().join("shmem_enabled"), shared).unwrap();
        assert_eq!(found(), "always, for shared memory never: moves do not depend on it");
    }
}
