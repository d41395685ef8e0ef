//! A container is confined after a move as it was before: everything that its main process sees of its
//! confinement, and everything that the node holds it to. Needs root.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    net::{Ipv4Addr, SocketAddrV4},
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
};

use godwit_lab::workload::Workload;
use godwit_tests::{Bed, compile, programs, victim::daemon};
use serde_json::Value;

const NAME: &str = "confined";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 91);
const PORT: u16 = 7004;

/// What a container must not read, write or change.
const PATHS: [&str; 17] = [
    "/",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/timer_list",
    "/proc/bus",
    "/proc/fs",
    "/proc/irq",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/core_pattern",
    "/proc/sysrq-trigger",
    "/sys/firmware",
    "/sys/devices/virtual/powercap",
    "/sys/kernel/uevent_seqnum",
    "/etc/hostname",
    "/etc/resolv.conf",
];

/// Lines of /proc/PID/status that say how a process is confined.
const STATUS: [&str; 13] = [
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "NoNewPrivs",
    "Seccomp",
    "Speculation",
    "Cap",
    "SigBlk",
    "SigIgn",
    "Cpus_allowed_list",
    "Mems_allowed_list",
    "THP_enabled",
];

/// Files of a cgroup that are limits, in version 1 and 2.
const LIMITS: [&str; 20] = [
    "memory/memory.limit_in_bytes",
    "memory/memory.memsw.limit_in_bytes",
    "memory/memory.soft_limit_in_bytes",
    "memory/memory.swappiness",
    "memory/memory.oom_control",
    "pids/pids.max",
    "cpu/cpu.cfs_quota_us",
    "cpu/cpu.cfs_period_us",
    "cpu/cpu.shares",
    "cpuset/cpuset.cpus",
    "cpuset/cpuset.mems",
    "devices/devices.list",
    "blkio/blkio.weight",
    "memory.max",
    "memory.high",
    "memory.swap.max",
    "pids.max",
    "cpu.max",
    "cpu.weight",
    "cpuset.cpus",
];

/// A mount without what is another at each mount or node: numbers, and where the node has its source.
fn mount(line: &str) -> String {
    let fields: Vec<_> = line.split_whitespace().collect();
    let (before, after) = fields.split_at(fields.iter().position(|field| *field == "-").unwrap());
    let [_, _, _, root, point, options, propagation @ ..] = before else { panic!("{line}") };
    let [_, kind, source, rights] = after else { panic!("{line}") };
    let root = Path::new(root).file_name().unwrap_or_default().to_string_lossy();
    let propagation: Vec<_> = propagation.iter().filter_map(|field| field.split(':').next()).collect();
    // The order of options that are the file system's own says nothing; directories of layers are the node's,
    // and so is whether its overlayfs could keep a UUID.
    let of_the_node =
        |right: &&str| right.contains("dir=") || right.contains("dir+=") || right.starts_with("uuid=");
    let rights: BTreeSet<_> = rights.split(',').filter(|right| !of_the_node(right)).collect();
    // A bind mount shows what the file system of the node's directory was mounted from.
    let (kind, source, rights) = match *point {
        "/etc/hostname" | "/etc/hosts" | "/etc/resolv.conf" | "/whole" | "/part" => ("", "", BTreeSet::new()),
        _ => (*kind, *source, rights),
    };
    format!("mount {point}: root {root} {options} {propagation:?} {kind} {source} {rights:?}")
}

/// What the main process says, without what has nothing to do with confinement.
fn seen_inside(bed: &Bed) -> Vec<String> {
    let mut answer = String::new();
    bed.connect(SocketAddrV4::new(ADDRESS, PORT)).read_to_string(&mut answer).unwrap();
    assert!(answer.ends_with("end: of the answer\n"), "{answer}");
    let mut seen: Vec<_> = answer
        .lines()
        .filter_map(|line| {
            if let Some(status) = line.strip_prefix("/proc/self/status: ") {
                return STATUS.iter().any(|name| status.starts_with(name)).then(|| line.to_owned());
            }
            line.strip_prefix("/proc/self/mountinfo: ")
                .map_or_else(|| Some(line.to_owned()), |line| Some(mount(line)))
        })
        .collect();
    seen.sort();
    seen
}

/// What the node tells of the main process: its namespaces and the limits of its cgroups.
fn seen_outside(pid: u64) -> Vec<String> {
    let mut seen = Vec::new();
    let namespace = |pid: &str, kind: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
    // Not the time namespace: a restored container has one, in which its clocks go on (docs/limits.md).
    for kind in ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"] {
        let own = namespace(&pid.to_string(), kind) != namespace("self", kind);
        seen.push(format!("namespace {kind}: {}", if own { "its own" } else { "the node's" }));
    }
    for line in fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap().lines() {
        let [_, controllers, path] = line.splitn(3, ':').collect::<Vec<_>>()[..] else { panic!("{line}") };
        for limit in LIMITS {
            let (controller, file) = limit.split_once('/').unwrap_or(("", limit));
            let holds = controllers.split(',').any(|name| name == controller);
            let file =
                Path::new("/sys/fs/cgroup").join(controller).join(path.trim_start_matches('/')).join(file);
            if let (true, Ok(text)) = (holds, fs::read_to_string(file)) {
                seen.push(format!("limit {limit}: {}", text.trim()));
            }
        }
    }
    assert!(seen.iter().any(|line| line.starts_with("limit memory")), "{seen:?}");
    seen
}

fn seen(bed: &Bed, node: &str) -> Vec<String> {
    [seen_inside(bed), seen_outside(bed.pid(node, NAME))].concat()
}

/// What of the node's /dev/null a container could change.
fn null_of_the_node() -> (u32, u32, u32, i64, i64) {
    let status = fs::metadata("/dev/null").unwrap();
    (status.mode(), status.uid(), status.gid(), status.ctime(), status.ctime_nsec())
}

fn start(bed: &Bed, more: &[&str]) {
    let root = bed.scratch().join("root");
    for directory in ["dev", "etc", "part", "proc", "sys", "tmp", "whole"] {
        fs::create_dir_all(root.join(directory)).unwrap();
    }
    compile("confined.c", &root.join("confined"));
    let address = ADDRESS.to_string();
    let mut arguments = vec!["run", "--name", NAME, "--ip", &address, "--rootfs", root.to_str().unwrap()];
    arguments.extend(more);
    arguments.extend(["--", "/confined"]);
    arguments.extend(PATHS);
    bed.done("a", &arguments);
}

/// Lines of the first that the second lacks.
fn lacking<'a>(these: &'a [String], those: &[String]) -> Vec<&'a String> {
    these.iter().filter(|line| !those.contains(line)).collect()
}

fn holds(seen: &[String], lines: &[&str]) {
    for line in lines {
        assert!(seen.iter().any(|seen| seen == line), "{line:?} is not among {seen:#?}");
    }
}

fn moves_without_a_difference(bed: &Bed, modes: &[&str]) -> Vec<String> {
    let null = null_of_the_node();
    let before = seen(bed, "a");
    for (number, mode) in modes.iter().enumerate() {
        let (from, to) = if number % 2 == 0 { ("a", "b") } else { ("b", "a") };
        bed.migrate_so(NAME, from, to, &["--mode", mode]);
        let after = seen(bed, to);
        let (gone, new) = (lacking(&before, &after), lacking(&after, &before));
        assert!(gone.is_empty() && new.is_empty(), "after {mode}: gone {gone:#?}, new {new:#?}");
    }
    // The container has tried to change what hides the node's files.
    assert_eq!(null_of_the_node(), null, "a container reaches the node's /dev/null");
    before
}

#[test]
fn a_container_is_confined_after_moves_in_every_mode_as_it_was_before() {
    let allow = ["--allow-bind", "/"].map(str::to_owned);
    let bed = Bed::up_with("confined", |config| config.programs.serve_arguments.extend(allow));
    // Two mounts of which one is below the other at their source, which CRIU takes for copies.
    let volume = bed.scratch().join("volume");
    fs::create_dir_all(volume.join("part")).unwrap();
    let whole = format!("{}:/whole:ro,move=skip", volume.display());
    let part = format!("{}:/part:ro,move=shared", volume.join("part").display());
    start(&bed, &["--memory", "256m", "--cpus", "1.5", "-v", &whole, "-v", &part]);
    let seen = moves_without_a_difference(&bed, &["cold", "precopy", "postcopy", "hybrid"]);
    holds(
        &seen,
        &[
            "path /proc/keys: open for reading done",
            "path /proc/keys: read nothing",
            "path /proc/keys: open for writing EROFS",
            "path /proc/keys: chmod EROFS",
            "path /proc/keys: chown EROFS",
            // Those of every container, CAP_AUDIT_WRITE among them.
            "/proc/self/status: CapBnd:\t00000000a00405fb",
            "/proc/self/status: Seccomp:\t2",
            "no_new_privs: 0",
            "call userfaultfd: EPERM",
            "call io_uring_setup: ENOSYS",
            "call landlock_create_ruleset: ENOSYS",
            "call ptrace: EPERM",
            "call bpf: EPERM",
            "call an unknown system call: ENOSYS",
        ],
    );
    assert!(
        seen.iter().any(|line| line.starts_with("limit ") && line.ends_with("pids.max: 2048")),
        "{seen:#?}"
    );
}

#[test]
fn what_was_asked_of_confinement_holds_before_and_after_moves() {
    let bed = Bed::up("confine-ask");
    let profile = bed.scratch().join("profile.json");
    fs::write(
        &profile,
        r#"{"defaultAction":"SCMP_ACT_ALLOW","syscalls":[
            {"names":["syslog","a_call_of_the_future"],"action":"SCMP_ACT_ERRNO","errnoRet":34}]}"#,
    )
    .unwrap();
    let seccomp = format!("seccomp={}", profile.display());
    let held = ["--cap-drop", "ALL", "--cap-add", "KILL,NET_RAW", "--security-opt", "no-new-privileges"];
    let limits = ["--pids-limit", "77", "--ulimit", "nofile=256:512", "--ulimit", "core=0", "--read-only"];
    start(
        &bed,
        &[&held[..], &limits, &["--security-opt", &seccomp, "--mount", "type=tmpfs,dst=/tmp"]].concat(),
    );
    let seen = moves_without_a_difference(&bed, &["precopy", "postcopy"]);
    holds(
        &seen,
        &[
            "/proc/self/status: CapBnd:\t0000000000002020",
            "/proc/self/status: CapEff:\t0000000000002020",
            "/proc/self/status: NoNewPrivs:\t1",
            "call syslog: ERANGE",
            "call chroot: EPERM",
            "/proc/self/limits: Max core file size        0                    0                    bytes     ",
            "/proc/self/limits: Max open files            256                  512                  files     ",
            "path /: chmod EROFS",
        ],
    );
    assert!(
        seen.iter().any(|line| line.starts_with("limit ") && line.ends_with("pids.max: 77")),
        "{seen:#?}"
    );
    let shown: Value = bed.json("a", &["inspect", NAME]);
    assert_eq!(shown["capabilities"], serde_json::json!(["CAP_KILL", "CAP_NET_RAW"]), "{shown}");
    assert_eq!((&shown["seccomp"], &shown["pids_limit"]), (&"profile".into(), &77.into()), "{shown}");
    // A command beside it is held so, too.
    let status = bed.godwit("a", &["exec", NAME, "--", "/confined", "--once"]).stdout;
    assert!(status.contains("no_new_privs: 1") && status.contains("call syslog: ERANGE"), "{status}");

    for (flag, said) in
        [("--cap-add=FLY", "\"FLY\" is not a capability"), ("--ulimit=wings=1", "\"wings\" is not a limit")]
    {
        let refused = bed.godwit("a", &["run", "--name", "x", "--rootfs", "/nowhere", flag, "true"]);
        assert!(refused.code == 125 && refused.stderr.contains(said), "{refused:?}");
    }
}

/// The capabilities that the shipped unit takes from godwitd, as setpriv(1) names them.
fn taken_by_the_unit() -> String {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../packaging/godwitd.service");
    let unit = fs::read_to_string(unit).unwrap();
    let set = unit.lines().find_map(|line| line.strip_prefix("CapabilityBoundingSet=~")).unwrap();
    let taken: Vec<_> = set.split_whitespace().map(|name| name.strip_prefix("CAP_").unwrap()).collect();
    assert!(taken.contains(&"SYS_BOOT"), "{taken:?}");
    taken.iter().map(|name| format!("-{}", name.to_lowercase())).collect::<Vec<_>>().join(",")
}

#[test]
fn services_move_between_machines_of_other_uptimes_under_what_the_shipped_unit_leaves() {
    let taken = taken_by_the_unit();
    // Node b was booted earlier, so that a clock that goes on takes a time namespace with offsets.
    let through = format!(
        "case $GODWIT_NODE in b) exec unshare --time --monotonic 5000 --boottime 5000 setpriv --bounding-set {taken} \"$@\";; esac
         exec setpriv --bounding-set {taken} \"$@\""
    );
    let bed = Bed::up_with("unit", |config| {
        config.programs.serve_through = ["sh", "-c", &through, "sh"].map(str::to_owned).into();
    });
    start(&bed, &[]);
    let shim = |node: &str| {
        // The shim is the daemon's child, and has what that has.
        let status = fs::read_to_string(format!("/proc/{}/status", bed.pid(node, NAME))).unwrap();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).unwrap().trim().to_owned();
        let status = fs::read_to_string(format!("/proc/{parent}/status")).unwrap();
        let bounding =
            status.lines().find_map(|line| line.strip_prefix("CapBnd:")).unwrap().trim().to_owned();
        let clock = fs::read_link(format!("/proc/{parent}/ns/time")).unwrap();
        (u64::from_str_radix(&bounding, 16).unwrap(), clock)
    };
    let (on_a, clock_of_a) = shim("a");
    moves_without_a_difference(&bed, &["precopy"]);
    let (on_b, clock_of_b) = shim("b");
    // CAP_SYS_BOOT is gone on both, and the clocks are others.
    assert_eq!((on_a >> 22 & 1, on_b >> 22 & 1), (0, 0));
    assert_ne!(clock_of_a, clock_of_b);
    bed.migrate_so(NAME, "b", "a", &["--mode", "cold"]);
    let doctor = bed.godwit("a", &["--json", "doctor"]).stdout;
    let checks: Value = serde_json::from_str(doctor.lines().last().unwrap_or_default()).unwrap();
    assert!(!doctor.contains("without CAP_SYS_TIME"), "{checks:#}");
}

#[test]
fn signals_that_godwitd_was_started_without_are_heeded_inside() {
    // As nohup(1) and shells in the background start programs.
    let directory = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(programs()).unwrap() {
        let program = entry.unwrap();
        if program.file_name() != "godwitd" && program.file_type().unwrap().is_file() {
            std::os::unix::fs::symlink(program.path(), directory.path().join(program.file_name())).unwrap();
        }
    }
    let wrapper = directory.path().join("godwitd");
    let real = programs().join("godwitd");
    fs::write(&wrapper, format!("#!/bin/sh\ntrap '' HUP INT QUIT\nexec {} \"$@\"\n", real.display()))
        .unwrap();
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let bed = Bed::up_with("signals", |config| {
        config.programs.of_nodes.insert("a".into(), directory.path().to_owned());
    });
    let ignored = |status: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
        u64::from_str_radix(line.trim(), 16).unwrap()
    };
    let preset = bed.build(Workload::Busybox);
    let rootfs = preset.rootfs.to_str().unwrap();
    bed.done("a", &["run", "--name", NAME, "--rootfs", rootfs, "--", "sleep", "1000"]);
    let daemon = daemon(&bed, "a").unwrap().as_raw_nonzero();
    assert_eq!(
        ignored(&fs::read_to_string(format!("/proc/{daemon}/status")).unwrap()) & 5,
        5,
        "it takes SIGINT itself"
    );
    let main = fs::read_to_string(format!("/proc/{}/status", bed.pid("a", NAME))).unwrap();
    let command = bed.done("a", &["exec", NAME, "--", "cat", "/proc/self/status"]);
    for status in [main, command] {
        assert_eq!(ignored(&status) & 7, 0, "{status}");
    }
}
