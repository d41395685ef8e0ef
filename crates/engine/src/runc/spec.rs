//! The OCI `config.json` of a container.
//!
//! What is chosen, and why where it differs from Podman's defaults:
//!
//! - devices: Podman's list; capabilities, system calls and limits: see [`crate::confinement`];
//! - masked and read-only paths: those of Podman's that show or change the node. Kernels differ in what they have of
//!   them (`godwit_criu::repair::fit_kernel`);
//! - no `maskedPaths`. runc covers such a file with the container's `/dev/null` when it starts it, and with
//!   the node's own when it restores it, which the container's root could change. And a masked directory is
//!   a tmpfs whose dump runs `tar`: 3 to 5 ms of frozen time. An empty file and an empty directory of the
//!   container's own are bound there, read-only, before and after a move (see [`super::provided`]);
//! - no `/sys/fs/cgroup` inside: cgroup v1 would show it as a tree of bind mounts of the node, which
//!   a restore on another node would have to bring one by one;
//! - no terminal, and `/dev/null` as standard input: a terminal's other end would be outside;
//! - open files limited to what this process may give without CAP_SYS_RESOURCE, 1048576 at most, unless the
//!   container says how many;
//! - a cgroup namespace is not made: nothing inside shows cgroups.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::confinement::{ConfinementError, Ulimit};
use crate::container::{ContainerConfig, DEV_BYTES, DEV_MODE, Mount, MountKind};
use crate::exec::{ExecRequest, TerminalSize};
use crate::rootfs::{self, RootfsError};

/// Files that show the node; hidden inside.
pub(crate) const MASKED_FILES: &[&str] =
    &["/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/timer_list"];

/// Directories that show the node, covered by an empty one where they exist.
pub(crate) const COVERED_DIRECTORIES: &[&str] = &["/sys/devices/virtual/powercap", "/sys/firmware"];

/// Paths that may be read but not written inside.
pub(super) const READ_ONLY_PATHS: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// Search path of a container whose image names none.
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Most open files of a process, as Podman has it.
const OPEN_FILES: u64 = 1_048_576;

/// The period over which CPU time is limited, in microseconds; the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;

/// The `config.json` of a container. `criu_config` is a file with options for CRIU at a restore;
/// `provided` are the mounts that the engine itself adds, and `hooks` are commands for a new container,
/// as that which covers [`MASKED_FILES`]. A restore has no limit of processes: CRIU is in the container's cgroup, which may
/// have reached its limit; see [`super::restore`].
pub(crate) fn config_json(
    config: &ContainerConfig,
    provided: &[Mount],
    hooks: &[Vec<OsString>],
    criu_config: Option<&Path>,
) -> Result<Value, ConfinementError> {
    config.confinement.check()?;
    let mut annotations = serde_json::Map::new();
    if let Some(path) = criu_config {
        annotations.insert("org.criu.config".into(), json!(path));
    }
    let mut json = json!({
        "ociVersion": "1.0.2",
        "process": process(config),
        "root": { "path": config.rootfs, "readonly": config.confinement.read_only },
        "hostname": config.hostname,
        "mounts": mounts(config, provided),
        "annotations": annotations,
        "linux": {
            "cgroupsPath": crate::processes::cgroup::absolute(&config.cgroup),
            "namespaces": [
                { "type": "pid" },
                { "type": "ipc" },
                { "type": "uts" },
                { "type": "mount" },
                { "type": "network", "path": config.network_namespace },
            ],
            "resources": resources(config, criu_config.is_none()),
            "readonlyPaths": READ_ONLY_PATHS,
        },
    });
    if let Some(filter) =
        config.confinement.seccomp.filter(&config.confinement.capabilities, config.crosses)?
    {
        json["linux"]["seccomp"] = filter;
    }
    // Run in the container's mount namespace before its root is its root; not run at a restore.
    let hook = |words: &Vec<OsString>| {
        let args: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
        args.first().map(|program| json!({ "path": program, "args": args }))
    };
    let hooks: Vec<_> = hooks.iter().filter_map(hook).collect();
    if !hooks.is_empty() {
        json["hooks"] = json!({ "createContainer": hooks });
    }
    Ok(json)
}

fn process(config: &ContainerConfig) -> Value {
    // Only root holds capabilities from the start; others may gain them by files that have them.
    let confinement = &config.confinement;
    let held = if config.user.uid == 0 { confinement.capabilities.as_slice() } else { &[] };
    let mut env = config.env.clone();
    if !env.iter().any(|pair| pair.starts_with("PATH=")) {
        env.push(DEFAULT_PATH.into());
    }
    json!({
        "terminal": false,
        "user": {
            "uid": config.user.uid,
            "gid": config.user.gid,
            "additionalGids": config.user.groups,
        },
        "args": config.command,
        "env": env,
        "cwd": config.workdir,
        "capabilities": { "bounding": confinement.capabilities, "effective": held, "permitted": held },
        "noNewPrivileges": confinement.no_new_privileges,
        "rlimits": limits(&confinement.ulimits),
    })
}

/// A further process of a container, as `runc exec --process` takes it; as the main one where nothing else is asked for.
pub(crate) fn command(config: &ContainerConfig, request: &ExecRequest) -> Result<Value, RootfsError> {
    let user = request.user.as_deref().map(|user| rootfs::resolve_user(&config.rootfs, user)).transpose()?;
    let own = ContainerConfig {
        command: request.command.clone(),
        env: config.env.iter().chain(&request.env).cloned().collect(),
        user: user.unwrap_or_else(|| config.user.clone()),
        workdir: request.workdir.as_ref().map_or_else(|| config.workdir.clone(), PathBuf::from),
        ..config.clone()
    };
    let mut process = process(&own);
    if let Some(TerminalSize { rows, columns }) = request.terminal {
        process["terminal"] = json!(true);
        // The terminal's size from the start: what runc passes on of its own terminal comes once the process runs.
        process["consoleSize"] = json!({ "height": rows, "width": columns });
    }
    Ok(process)
}

/// Its own limits, and that of open files where it has none for them.
fn limits(own: &[Ulimit]) -> Vec<Value> {
    let open_files = open_files_limit();
    let standard = Ulimit { name: "nofile".into(), soft: open_files, hard: open_files };
    let standard =
        std::iter::once(&standard).filter(|standard| own.iter().all(|own| own.name != standard.name));
    let limit = |limit: &Ulimit| {
        let name = format!("RLIMIT_{}", limit.name.to_ascii_uppercase());
        json!({ "type": name, "hard": limit.hard, "soft": limit.soft })
    };
    own.iter().chain(standard).map(limit).collect()
}

fn mounts(config: &ContainerConfig, provided: &[Mount]) -> Vec<Value> {
    let mount = |target: &str, kind: &str, source: &str, options: &[&str]| json!({ "destination": target, "type": kind, "source": source, "options": options });
    let size = format!("size={DEV_BYTES}");
    let mut mounts = vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "noexec", "strictatime", DEV_MODE, &size]),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/shm", "tmpfs", "shm", &["nosuid", "noexec", "nodev", "mode=1777", &size]),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", "ro"]),
    ];
    // A mount of the user's at a standard place takes its place; parents come before what is in them.
    mounts.retain(|standard| {
        !config
            .mounts
            .iter()
            .any(|own| Some(own.target.as_path()) == standard["destination"].as_str().map(Path::new))
    });
    let mut own: Vec<_> = config.mounts.iter().chain(provided).collect();
    own.sort_by_key(|mount| mount.target.components().count());
    mounts.extend(own.into_iter().filter_map(|own| {
        let access = if own.read_only { "ro" } else { "rw" };
        let bind = |source: &Path| {
            json!({
                "destination": own.target,
                "type": "bind",
                "source": source,
                "options": ["bind", "rprivate", access],
            })
        };
        Some(match &own.kind {
            MountKind::Bind { source, .. } => bind(source),
            MountKind::Volume { name, file } => bind(&config.volume_or_file(name, file.as_deref())),
            // Of a container that this runtime does not have.
            MountKind::EngineVolume { .. } => return None,
            MountKind::Tmpfs { size_bytes } => {
                let mut options =
                    vec!["nosuid".to_owned(), "nodev".into(), "mode=1777".into(), access.into()];
                if *size_bytes != 0 {
                    options.push(format!("size={size_bytes}"));
                }
                json!({ "destination": own.target, "type": "tmpfs", "source": "tmpfs", "options": options })
            }
        })
    }));
    mounts
}

fn resources(config: &ContainerConfig, limits_processes: bool) -> Value {
    let mut resources = json!({ "devices": [{ "allow": false, "access": "rwm" }] });
    // Where this machine cannot limit processes, a service that asked for no certain limit runs all the same.
    let limit = config.confinement.pids_limit;
    if limit != 0
        && limits_processes
        && (limit != crate::confinement::PIDS_LIMIT || crate::processes::cgroup::is_available("pids"))
    {
        resources["pids"] = json!({ "limit": config.confinement.pids_limit });
    }
    if config.memory_bytes != 0 {
        resources["memory"] = json!({ "limit": config.memory_bytes });
    }
    if config.cpu_millis != 0 {
        let quota = u64::from(config.cpu_millis) * CPU_PERIOD_US / 1000;
        resources["cpu"] = json!({ "quota": quota, "period": CPU_PERIOD_US });
    }
    resources
}

/// The limit of open files that can be given without a raise.
fn open_files_limit() -> u64 {
    nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE)
        .map_or(1024, |(_, hard)| hard.min(OPEN_FILES))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::confinement::Confinement;
    use crate::confinement::User;
    use crate::seccomp::Seccomp;

    fn config() -> ContainerConfig {
        ContainerConfig {
            name: "web".parse().unwrap(),
            directory: "/d".into(),
            rootfs: "/r".into(),
            network_namespace: "/run/netns/n".into(),
            cgroup: "godwit/web".into(),
            command: vec!["true".into()],
            env: vec![],
            mounts: vec![],
            bound: Vec::new(),
            may_have: Vec::new(),
            memory_bytes: 0,
            cpu_millis: 0,
            hostname: "web".into(),
            user: User::default(),
            workdir: "/".into(),
            confinement: Confinement::default(),
            crosses: false,
            kept: None,
            name_server: None,
        }
    }

    fn config_json(config: &ContainerConfig) -> Value {
        super::config_json(config, &[], &[], None).unwrap()
    }

    #[test]
    fn no_limits_means_no_limits() {
        let json = config_json(&config());
        assert!(json["linux"]["resources"].get("memory").is_none());
        assert!(json["linux"]["resources"].get("cpu").is_none());
        assert_eq!(json["linux"]["cgroupsPath"], "/godwit/web");
    }

    #[test]
    fn a_cpu_and_a_half_is_a_quota_of_150_ms_in_100() {
        let json = config_json(&ContainerConfig { cpu_millis: 1500, ..config() });
        assert_eq!(json["linux"]["resources"]["cpu"]["quota"], 150_000);
    }

    #[test]
    fn only_root_starts_with_capabilities() {
        let user = User { uid: 1000, gid: 1000, groups: vec![4] };
        let json = config_json(&ContainerConfig { user, ..config() });
        assert_eq!(json["process"]["capabilities"]["effective"], json!([]));
        assert!(!json["process"]["capabilities"]["bounding"].as_array().unwrap().is_empty());
    }

    #[test]
    fn an_own_mount_takes_the_place_of_a_standard_one() {
        let own =
            Mount { kind: MountKind::Tmpfs { size_bytes: 7 }, target: "/dev/shm".into(), read_only: false };
        let json = config_json(&ContainerConfig { mounts: vec![own], ..config() });
        let mounts = json["mounts"].as_array().unwrap();
        let shm: Vec<_> = mounts.iter().filter(|m| m["destination"] == "/dev/shm").collect();
        assert_eq!(shm.len(), 1);
        assert!(shm[0]["options"].as_array().unwrap().contains(&json!("size=7")));
    }

    #[test]
    fn the_command_search_path_has_a_default() {
        let json = config_json(&config());
        assert_eq!(json["process"]["env"], json!([DEFAULT_PATH]));
        let json = config_json(&ContainerConfig { env: vec!["PATH=/x".into()], ..config() });
        assert_eq!(json["process"]["env"], json!(["PATH=/x"]));
    }

    #[test]
    fn a_further_process_is_as_the_main_one_but_for_what_is_asked() {
        let scratch = tempfile::tempdir().unwrap();
        std::fs::create_dir(scratch.path().join("etc")).unwrap();
        std::fs::write(scratch.path().join("etc/passwd"), "redis:x:101:102::/:/bin/sh\n").unwrap();
        let user = User { uid: 0, gid: 0, groups: vec![4] };
        let env = vec!["PATH=/x".into(), "A=1".into()];
        let config = ContainerConfig { rootfs: scratch.path().into(), user, env, ..config() };
        let plain = ExecRequest {
            command: vec!["id".into()],
            env: vec![],
            user: None,
            workdir: None,
            terminal: None,
        };
        let main = super::config_json(&config, &[], &[], None).unwrap()["process"].take();
        let mut same = command(&config, &plain).unwrap();
        assert_eq!(same["args"].take(), json!(["id"]));
        assert_eq!((&same["user"], &same["env"]), (&main["user"], &main["env"]));
        assert_eq!((&same["capabilities"], &same["rlimits"]), (&main["capabilities"], &main["rlimits"]));
        assert_eq!((&same["terminal"], same.get("consoleSize")), (&json!(false), None));
        let other = ExecRequest {
            env: vec!["A=2".into()],
            user: Some("redis".into()),
            workdir: Some("/tmp".into()),
            terminal: Some(TerminalSize { rows: 7, columns: 33 }),
            ..plain.clone()
        };
        let other = command(&config, &other).unwrap();
        assert_eq!(other["user"], json!({ "uid": 101, "gid": 102, "additionalGids": [] }));
        assert_eq!(other["capabilities"]["effective"], json!([]), "only root has them from the start");
        assert_eq!((&other["env"], &other["cwd"]), (&json!(["PATH=/x", "A=1", "A=2"]), &json!("/tmp")));
        assert_eq!(other["terminal"], true);
        assert_eq!(other["consoleSize"], json!({ "height": 7, "width": 33 }));
        let nobody = ExecRequest { user: Some("nobody".into()), ..plain };
        assert!(command(&config, &nobody).unwrap_err().to_string().contains("no user \"nobody\""));
    }

    #[test]
    fn what_was_asked_of_its_confinement_is_what_it_gets() {
        let confinement = Confinement {
            capabilities: vec!["CAP_KILL".into()],
            seccomp: Seccomp::Unconfined,
            no_new_privileges: true,
            pids_limit: 7,
            read_only: true,
            ulimits: vec![Ulimit { name: "core".into(), soft: 0, hard: u64::MAX }],
        };
        let config_of_it = ContainerConfig { confinement, ..config() };
        let json = config_json(&config_of_it);
        assert_eq!(json["process"]["capabilities"]["bounding"], json!(["CAP_KILL"]));
        assert_eq!(json["process"]["noNewPrivileges"], true);
        assert_eq!(json["linux"]["resources"]["pids"]["limit"], 7);
        let restored = super::config_json(&config_of_it, &[], &[], Some(Path::new("/c"))).unwrap();
        assert_eq!(restored["linux"]["resources"]["pids"], Value::Null);
        assert_eq!(json["root"]["readonly"], true);
        let limits = json["process"]["rlimits"].as_array().unwrap();
        assert_eq!(limits[0], json!({ "type": "RLIMIT_CORE", "soft": 0, "hard": u64::MAX }));
        assert_eq!((limits.len(), &limits[1]["type"]), (2, &json!("RLIMIT_NOFILE")));
        assert!(json["linux"].get("seccomp").is_none());
        let json = config_json(&config());
        assert_eq!(json["linux"]["resources"]["pids"]["limit"], 2048);
        assert_eq!(json["linux"]["seccomp"]["defaultAction"], "SCMP_ACT_ERRNO");
        assert!(
            json["linux"].get("maskedPaths").is_none(),
            "runc would bind the node's /dev/null at a restore"
        );
    }
}
