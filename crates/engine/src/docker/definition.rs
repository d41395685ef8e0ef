//! What Docker makes a container from, without what belongs to one node and without what godwit cannot answer for.
//!
//! It comes from another node, and dockerd does what it says as root. dockerd takes `binds` for `Binds`: it reads JSON without
//! regard to case. So what comes is read into these types, which leave out what they do not know, and only what is written
//! from them is passed on.

use std::collections::BTreeMap;
use std::io;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::containerd::MOST_FILES;
use crate::container::{Copied, Mount, MountKind, OnMove};
use crate::foreign::file::FileOfVolume;
use crate::foreign::limits::{self, Changes};
use crate::foreign::making::{WantedRestart, limit};
use crate::foreign::renewed::cpu_millis;
use crate::foreign::{ARRIVAL_LABEL, MASKED, READ_ONLY, bound, is_id, is_target, is_volume};
use crate::resolver;

type Texts = Option<Vec<String>>;
type Table = Option<BTreeMap<String, String>>;

/// What a container is, of `docker inspect`'s `Config`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Config {
    hostname: String,
    domainname: String,
    user: String,
    exposed_ports: Option<BTreeMap<String, Nothing>>,
    env: Texts,
    cmd: Texts,
    healthcheck: Option<Healthcheck>,
    working_dir: String,
    entrypoint: Texts,
    labels: Table,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_signal: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    stop_timeout: Option<i64>,
    shell: Texts,
}

/// Settings of `HostConfig` that are looked at otherwise, or say nothing on another node.
pub(super) const OTHERWISE: &[&str] = &[
    "Binds",
    "ConsoleSize",
    "ContainerIDFile",
    "Isolation",
    "Mounts",
    "NetworkMode",
    "PortBindings",
    "PublishAllPorts",
    "Runtime",
];

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Nothing {}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Healthcheck {
    test: Texts,
    interval: i64,
    timeout: i64,
    start_period: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    start_interval: Option<i64>,
    retries: i64,
}

/// How a container is held, of `docker inspect`'s `HostConfig`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct HostConfig {
    log_config: LogConfig,
    restart_policy: RestartPolicy,
    cap_add: Texts,
    cap_drop: Texts,
    cgroupns_mode: String,
    dns: Texts,
    dns_options: Texts,
    dns_search: Texts,
    extra_hosts: Texts,
    group_add: Texts,
    ipc_mode: String,
    oom_score_adj: i64,
    readonly_rootfs: bool,
    security_opt: Texts,
    shm_size: i64,
    sysctls: Table,
    cpu_shares: i64,
    memory: i64,
    nano_cpus: i64,
    cpu_period: i64,
    cpu_quota: i64,
    cpuset_cpus: String,
    cpuset_mems: String,
    memory_reservation: i64,
    memory_swap: i64,
    memory_swappiness: Option<i64>,
    oom_kill_disable: Option<bool>,
    pids_limit: Option<i64>,
    ulimits: Option<Vec<Ulimit>>,
    tmpfs: Table,
    masked_paths: Texts,
    readonly_paths: Texts,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct LogConfig {
    r#type: String,
    config: Table,
}

impl LogConfig {
    /// The same with an older file, in which Docker is given what the container has written elsewhere.
    fn with_older_file(mut self) -> Self {
        let told = self.config.iter().flatten().find(|(name, _)| *name == "max-file");
        let files = match (told, self.r#type.as_str()) {
            (Some((_, files)), "json-file" | "local") => files.parse().unwrap_or(0),
            (None, "json-file") => 1,
            // More, or no files.
            _ => return self,
        };
        if files == 1 {
            self.config.get_or_insert_default().insert("max-file".into(), "2".into());
        }
        self
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct RestartPolicy {
    name: String,
    maximum_retry_count: i64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Ulimit {
    name: String,
    hard: i64,
    soft: i64,
}

/// Where a Docker has its images. What it knows an image by differs: its own knows the digest of the configuration, containerd's
/// that of the manifest, or of the list of manifests where there is one for each platform.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ImageStore {
    #[default]
    Docker,
    Containerd,
}

impl ImageStore {
    // serde has it called with a reference.
    #[allow(clippy::trivially_copy_pass_by_ref)]
    fn is_dockers(&self) -> bool {
        *self == Self::Docker
    }
}

impl std::fmt::Display for ImageStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Self::Docker => "its own store",
            Self::Containerd => "containerd's image store",
        })
    }
}

/// A volume in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MountedVolume {
    pub(super) name: String,
    pub(super) target: String,
    pub(super) read_only: bool,
}

/// A file or directory of a node in a container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Bound {
    pub(super) source: PathBuf,
    pub(super) target: String,
    pub(super) read_only: bool,
}

impl Bound {
    fn mount(&self) -> Mount {
        let kind = MountKind::Bind { source: self.source.clone(), on_move: OnMove::Unsaid };
        Mount { kind, target: self.target.clone().into(), read_only: self.read_only }
    }
}

/// What Docker makes a container from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Definition {
    pub(super) name: String,
    /// By which name it was started, and the ID, `sha256:…`.
    pub(super) image: (String, String),
    /// Where that Docker has its images.
    #[serde(default, skip_serializing_if = "ImageStore::is_dockers")]
    pub(super) store: ImageStore,
    /// The files of the image by their digests where containerd has it; else its layers by those of what is in them, from the
    /// lowest to the uppermost.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) files_of_image: Vec<String>,
    /// The digest of the image's configuration, which is the same in each store. A release before 0.3.0 does not tell it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) configuration: Option<String>,
    pub(super) config: Config,
    pub(super) host: HostConfig,
    pub(super) volumes: Vec<MountedVolume>,
    /// What it has of the node that it is on.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) binds: Vec<Bound>,
    /// Files that have come with it: Docker binds each from a volume.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) files: Vec<FileOfVolume>,
}

/// Drivers that keep a log on the node, and tell nobody else.
const LOG_DRIVERS: &[&str] = &["", "json-file", "local", "journald", "none"];

/// Their options.
const LOG_OPTIONS: &[&str] =
    &["max-size", "max-file", "compress", "mode", "max-buffer-size", "labels", "env", "tag"];

/// Kernel parameters that belong to a namespace of the container.
const SYSCTLS: &[&str] = &["fs.mqueue.", "kernel.msg", "kernel.sem", "kernel.shm", "net."];

/// Options of a tmpfs, those with a value by their names.
const TMPFS_OPTIONS: &[&str] = &[
    "defaults",
    "rw",
    "ro",
    "suid",
    "nosuid",
    "dev",
    "nodev",
    "exec",
    "noexec",
    "noatime",
    "relatime",
    "mode",
    "size",
    "uid",
    "gid",
    "nr_inodes",
    "nr_blocks",
];

/// A policy in Docker's words.
pub(super) fn restart_policy(restart: WantedRestart) -> (&'static str, u32) {
    match restart {
        WantedRestart::No => ("no", 0),
        WantedRestart::OnFailure(most) => ("on-failure", most),
        // Not one that a user has stopped.
        WantedRestart::Always => ("unless-stopped", 0),
    }
}

/// Where the files of a volume are, where dockerd has those of its own driver there.
pub(super) fn place_of(volumes: &Path, volume: &str) -> PathBuf {
    volumes.join(volume).join("_data")
}

/// Whether this names a file of an image by its content.
pub(super) fn is_digest(name: &str) -> bool {
    name.strip_prefix("sha256:").is_some_and(is_id)
}

impl Definition {
    /// One that another node has told.
    pub(super) fn told(definition: &Value) -> io::Result<Self> {
        Ok(Self::deserialize(definition)?)
    }

    pub(super) fn value(&self) -> Value {
        json!(self)
    }

    /// Its volumes, and where each is mounted.
    pub(super) fn volumes_and_targets(&self) -> Vec<(String, String)> {
        let files = self.files.iter().map(|of| (of.volume.clone(), of.target.clone()));
        let volumes = self.volumes.iter().map(|volume| (volume.name.clone(), volume.target.clone()));
        volumes.chain(files).collect()
    }

    /// Paths that it does not see.
    pub(super) fn masked(&self) -> Vec<String> {
        self.host.masked_paths.clone().unwrap_or_default()
    }

    /// The same with volumes of Docker's in the place of what it has of a node at these targets.
    pub(super) fn with_volumes(mut self, volumes: &[Copied]) -> Self {
        for Copied { name, target, file } in volumes {
            let Some(at) = self.binds.iter().position(|bound| Path::new(&bound.target) == target) else {
                continue;
            };
            let Bound { target, read_only, .. } = self.binds.remove(at);
            let name = name.as_str().to_owned();
            match file.clone() {
                Some(file) => self.files.push(FileOfVolume { volume: name, file, target, read_only }),
                None => self.volumes.push(MountedVolume { name, target, read_only }),
            }
        }
        self
    }

    /// What it has of the node that it is on.
    pub(super) fn mounts(&self) -> Vec<Mount> {
        self.binds.iter().map(Bound::mount).collect()
    }

    /// Its volumes, as mounts of which nothing has been said.
    pub(super) fn volume_mounts(&self) -> Vec<Mount> {
        let mount = |volume: &MountedVolume| Mount {
            kind: MountKind::EngineVolume { name: volume.name.clone(), on_move: OnMove::Unsaid },
            target: volume.target.clone().into(),
            read_only: volume.read_only,
        };
        self.volumes.iter().map(mount).collect()
    }

    /// What speaks against making it on another node. It has that of it which its service has, and nothing else.
    pub(super) fn objections(&self, of_service: &[Mount]) -> Vec<String> {
        let host = &self.host;
        let mut found = Vec::new();
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
        if self.name.is_empty() || !self.name.bytes().all(allowed) {
            found.push(format!("its name is {:?}", self.name));
        }
        if !self.image.1.strip_prefix("sha256:").is_some_and(is_id) {
            found.push(format!("the ID of its image is {:?}", self.image.1));
        }
        if self.files_of_image.len() > MOST_FILES || !self.files_of_image.iter().all(|file| is_digest(file)) {
            found.push("its image has other files than an image has".to_owned());
        }
        if let Some(digest) = self.configuration.as_ref().filter(|digest| !is_digest(digest)) {
            found.push(format!("the configuration of its image is {digest:?}"));
        }
        for (number, volume) in self.volumes.iter().enumerate() {
            if !is_volume(&volume.name) || !is_target(&volume.target) {
                found.push(format!("it has a volume {:?} on {:?}", volume.name, volume.target));
            }
            let of_files = self.files.iter().map(|of| &of.volume);
            let others = self.volumes[..number].iter().map(|other| &other.name).chain(of_files);
            if others.into_iter().any(|other| *other == volume.name) {
                found.push(format!("its volume {} is mounted twice", volume.name));
            }
        }
        for (number, of) in self.files.iter().enumerate() {
            found.extend(of.objection());
            if self.files[..number].iter().any(|other| other.volume == of.volume) {
                found.push(format!("its volume {} is mounted twice", of.volume));
            }
        }
        let volumes = self.volumes.iter().map(|volume| (volume.name.clone(), volume.target.clone()));
        let of_files: Vec<_> = self.files.iter().map(|of| of.volume.as_str()).collect();
        found.extend(bound::objections(
            &self.mounts(),
            (&volumes.collect::<Vec<_>>(), &of_files),
            of_service,
        ));
        if let Some(Bound { target, .. }) = self.binds.iter().find(|bound| !is_target(&bound.target)) {
            found.push(format!("it has a mount on {target:?}"));
        }
        if !matches!(host.ipc_mode.as_str(), "" | "private" | "none") {
            found.push(format!("its IPC namespace is {:?} (--ipc)", host.ipc_mode));
        }
        if !matches!(host.cgroupns_mode.as_str(), "" | "private" | "host") {
            found.push(format!("its cgroup namespace is {:?} (--cgroupns)", host.cgroupns_mode));
        }
        let log = &host.log_config;
        if !LOG_DRIVERS.contains(&log.r#type.as_str()) {
            found.push(format!("its log goes to {:?} (--log-driver)", log.r#type));
        }
        let options = log.config.iter().flatten().map(|(name, _)| name.as_str());
        if let Some(option) = options.into_iter().find(|name| !LOG_OPTIONS.contains(name)) {
            found.push(format!("its log has the option {option} (--log-opt)"));
        }
        for option in host.security_opt.iter().flatten() {
            let name = option.split([':', '=']).next().unwrap_or_default();
            if !matches!(name, "no-new-privileges" | "seccomp") {
                found.push(format!("it has the security option {name} (--security-opt)"));
            }
        }
        for name in host.sysctls.iter().flatten().map(|(name, _)| name) {
            if !SYSCTLS.iter().any(|prefix| name.starts_with(prefix)) {
                found.push(format!("it sets {name}, which is the node's (--sysctl)"));
            }
        }
        for (target, options) in host.tmpfs.iter().flatten() {
            let names = options.split(',').filter_map(|option| option.split('=').next());
            let unknown = names.filter(|name| !name.is_empty()).find(|name| !TMPFS_OPTIONS.contains(name));
            if let Some(unknown) = unknown {
                found.push(format!("its tmpfs on {target} has the option {unknown}"));
            } else if !is_target(target) {
                found.push(format!("it has a tmpfs on {target:?}"));
            }
        }
        for (paths, wanted) in [(&host.masked_paths, MASKED), (&host.readonly_paths, READ_ONLY)] {
            // None are the paths that dockerd has for all.
            let lacks = |path: &&&str| paths.as_ref().is_some_and(|has| !has.iter().any(|has| has == **path));
            if wanted.iter().find(lacks).is_some() {
                found.push("it sees or writes what containers do not (--security-opt systempaths)".into());
            }
        }
        found
    }

    /// How Docker restarts it, once it is here for good.
    pub(super) fn restart_policy(&self) -> Value {
        json!(self.host.restart_policy)
    }

    /// The definition with other limits and policy, and what dockerd is told of them; or what it cannot change.
    pub(super) fn changed(mut self, changes: &Changes) -> Result<(Self, Value), String> {
        let host = &mut self.host;
        let mut told = serde_json::Map::new();
        if let Some(bytes) = changes.memory_bytes
            && let Some(limits) = limits::memory((host.memory, host.memory_swap), bytes, "Docker")?
        {
            (host.memory, host.memory_swap) = limits;
            told.insert("Memory".into(), host.memory.into());
            told.insert("MemorySwap".into(), host.memory_swap.into());
        }
        if let Some(millis) = changes.cpu_millis {
            match (millis, host.nano_cpus) {
                (0, 0) if host.cpu_quota <= 0 => {}
                (0, _) => return Err(limits::lifted("Docker", "CPU limit (--cpus)")),
                _ => {
                    host.nano_cpus = i64::from(millis) * 1_000_000;
                    told.insert("NanoCpus".into(), host.nano_cpus.into());
                }
            }
        }
        if let Some(most) = changes.pids_limit {
            let most = if most == 0 { -1 } else { limit(most) };
            host.pids_limit = Some(most);
            told.insert("PidsLimit".into(), most.into());
        }
        if let Some(restart) = changes.restart {
            let (name, most) = restart_policy(restart);
            host.restart_policy = RestartPolicy { name: name.into(), maximum_retry_count: most.into() };
            told.insert("RestartPolicy".into(), json!(host.restart_policy));
        }
        Ok((self, told.into()))
    }

    /// Whether all that a destination is to know of the image is in it, as the Docker that is asked `now` has the image.
    pub(super) fn knows_image(&self, now: &Self) -> bool {
        self.configuration.is_some() && (&self.image.1, self.store) == (&now.image.1, now.store)
    }

    /// The definition with what `docker rename` and `docker update` change, as Docker has it `now`; with the policy of before
    /// where Docker has not been told that yet. The image is the same, which that Docker may know by another ID.
    pub(super) fn renewed(mut self, now: Self, without_policy: bool) -> Self {
        if !self.knows_image(&now) {
            (self.image.1, self.store) = (now.image.1, now.store);
            (self.files_of_image, self.configuration) = (now.files_of_image, now.configuration);
        }
        let (before, now_host) = (self.host, now.host);
        self.name = now.name;
        self.host = HostConfig {
            restart_policy: match without_policy {
                true => before.restart_policy,
                false => now_host.restart_policy,
            },
            cpu_shares: now_host.cpu_shares,
            memory: now_host.memory,
            nano_cpus: now_host.nano_cpus,
            cpu_period: now_host.cpu_period,
            cpu_quota: now_host.cpu_quota,
            cpuset_cpus: now_host.cpuset_cpus,
            cpuset_mems: now_host.cpuset_mems,
            memory_reservation: now_host.memory_reservation,
            memory_swap: now_host.memory_swap,
            pids_limit: now_host.pids_limit,
            ..before
        };
        self
    }

    /// Its limits of memory, in bytes, and of CPU, in thousandths; 0 for none.
    pub(super) fn memory_and_cpu(&self) -> (u64, u32) {
        let host = &self.host;
        let millis = match host.nano_cpus {
            0 => cpu_millis(host.cpu_quota, host.cpu_period),
            nano_cpus => u32::try_from(nano_cpus / 1_000_000).unwrap_or(0),
        };
        (u64::try_from(host.memory).unwrap_or(0), millis)
    }

    /// Its limits, in words of `docker update`, for which 0 changes nothing; and its policy, unless it is told that by itself.
    pub(super) fn limits_and_policy(&self, without_policy: bool) -> Value {
        let host = &self.host;
        let mut told = json!({
            "Memory": host.memory,
            "MemorySwap": host.memory_swap,
            "PidsLimit": host.pids_limit.unwrap_or(-1),
        });
        // The one excludes the other.
        match host.nano_cpus {
            0 => (told["CpuQuota"], told["CpuPeriod"]) = (host.cpu_quota.into(), host.cpu_period.into()),
            nano_cpus => told["NanoCpus"] = nano_cpus.into(),
        }
        if !without_policy {
            told["RestartPolicy"] = json!(host.restart_policy);
        }
        told
    }

    /// What dockerd of this node is given: it is in no network of Docker's, its runtime steps in for runc, and Docker does not
    /// start it by itself. It has its volumes below that directory.
    pub(super) fn to_create(
        &self,
        (image, name_server): (&str, Option<Ipv4Addr>),
        (runtime, token): (&str, &str),
        volumes: &Path,
    ) -> Value {
        let mut config = self.config.clone();
        config.labels.get_or_insert_default().insert(ARRIVAL_LABEL.into(), token.into());
        // None would be the image's.
        config.entrypoint.get_or_insert_with(|| vec![String::new()]);
        let mounts = self.volumes.iter().map(|volume| {
            json!({
                "Type": "volume",
                "Source": volume.name,
                "Target": volume.target,
                "ReadOnly": volume.read_only,
                "VolumeOptions": { "NoCopy": true },
            })
        });
        let mut host = self.host.clone();
        host.log_config = host.log_config.with_older_file();
        if let Some(server) = name_server.filter(|_| host.dns.as_ref().is_none_or(Vec::is_empty)) {
            host.dns = Some(vec![server.to_string()]);
            let options = host.dns_options.get_or_insert_default();
            // The last of a kind counts: a user's own do.
            options.splice(..0, resolver::OPTIONS.map(str::to_owned));
        }
        let mut host = json!(host);
        let binds = self.binds.iter().map(|bound| {
            json!({
                "Type": "bind",
                "Source": bound.source,
                "Target": bound.target,
                "ReadOnly": bound.read_only,
            })
        });
        let files = self.files.iter().map(|of| {
            json!({
                "Type": "bind",
                "Source": of.path(&place_of(volumes, &of.volume)),
                "Target": of.target,
                "ReadOnly": of.read_only,
            })
        });
        host["Mounts"] = mounts.chain(binds).chain(files).collect();
        host["RestartPolicy"] = json!(RestartPolicy { name: "no".into(), maximum_retry_count: 0 });
        host["NetworkMode"] = "none".into();
        host["Runtime"] = runtime.into();
        let mut whole = json!(config);
        whole["Image"] = image.into();
        whole["HostConfig"] = host;
        whole
    }

    /// Has it ask the DNS server of its network, wherever it is: no user has named another.
    pub(super) fn ask_network(&mut self) {
        (self.host.dns, self.host.dns_options) = (None, None);
    }

    /// The definition without what says where it has been.
    pub(super) fn of_no_node(mut self) -> Self {
        if let Some(labels) = &mut self.config.labels {
            labels.remove(ARRIVAL_LABEL);
        }
        self
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn definition() -> Value {
        json!({
            "name": "web",
            "image": ["web:1", format!("sha256:{}", "0a".repeat(32))],
            "configuration": format!("sha256:{}", "0a".repeat(32)),
            "config": {
                "Hostname": "h", "Env": ["A=b"], "Cmd": ["sleep", "1"], "Labels": { "tier": "x", ARRIVAL_LABEL: "old" },
                "ExposedPorts": { "80/tcp": {} }, "Volumes": { "/x": {} }, "Entrypoint": null, "MacAddress": "x",
            },
            "host": {
                "binds": ["/:/host"], "Binds": ["/:/host"], "Privileged": true, "PidMode": "host",
                "Devices": [{ "PathOnHost": "/dev/sda" }],
                "RestartPolicy": { "Name": "always", "MaximumRetryCount": 0, "x": 1 },
                "Memory": 1 << 20, "IpcMode": "private", "MaskedPaths": null,
                "LogConfig": { "Type": "json-file", "Config": {} },
            },
            "volumes": [{ "name": "data", "target": "/data", "read_only": false }],
            "binds": [],
        })
    }

    #[test]
    fn a_log_in_files_has_an_older_one() {
        let created = |kind: &str, options: Value| {
            let mut definition = definition();
            definition["host"]["LogConfig"] = json!({ "Type": kind, "Config": options });
            let told = Definition::told(&definition).unwrap();
            let created = told.to_create(("web:1", None), ("godwit", "new"), Path::new("/v"));
            created["HostConfig"]["LogConfig"]["Config"].clone()
        };
        let two = json!({ "max-file": "2" });
        assert_eq!((created("json-file", json!({})), created("json-file", Value::Null)), (two.clone(), two));
        for kind in ["json-file", "local"] {
            let sized = created(kind, json!({ "max-size": "1m", "max-file": "1" }));
            assert_eq!(sized, json!({ "max-size": "1m", "max-file": "2" }));
            assert_eq!(created(kind, json!({ "max-file": "5" })), json!({ "max-file": "5" }));
        }
        // It has five by itself, and others have none.
        for kind in ["local", "journald", "none", ""] {
            assert_eq!(created(kind, json!({ "tag": "x" })), json!({ "tag": "x" }), "{kind}");
        }
    }

    #[test]
    fn only_what_is_known_is_passed_on() {
        let told = Definition::told(&definition()).unwrap();
        assert_eq!(told.objections(&[]), [""; 0]);
        assert_eq!(told.restart_policy(), json!({ "Name": "always", "MaximumRetryCount": 0 }));
        let created = told.of_no_node().to_create(("web:1", None), ("godwit", "new"), Path::new("/v"));
        let host = created["HostConfig"].as_object().unwrap();
        for name in ["Binds", "binds", "Privileged", "PidMode", "Devices"] {
            assert!(!host.contains_key(name), "{name}");
        }
        assert!(created.get("Volumes").is_none() && created.get("MacAddress").is_none());
        assert_eq!(host["RestartPolicy"], json!({ "Name": "no", "MaximumRetryCount": 0 }));
        assert_eq!(created["Entrypoint"], json!([""]));
        assert_eq!((&host["NetworkMode"], &host["Runtime"]), (&json!("none"), &json!("godwit")));
        assert_eq!(host["Memory"], 1 << 20);
        assert_eq!(host["Mounts"][0]["Source"], "data");
        assert_eq!(created["Labels"], json!({ "tier": "x", ARRIVAL_LABEL: "new" }));
        assert_eq!((&created["Image"], &created["Env"]), (&json!("web:1"), &json!(["A=b"])));
    }

    #[test]
    fn limits_change_and_are_not_lifted() {
        let plain = Definition::told(&definition()).unwrap();
        let changes = Changes { memory_bytes: Some(4 << 20), ..Changes::default() };
        let (changed, told) = plain.clone().changed(&changes).unwrap();
        assert_eq!(told, json!({ "Memory": 4 << 20, "MemorySwap": 8 << 20 }));
        assert_eq!(
            changed.to_create(("i", None), ("r", "t"), Path::new("/v"))["HostConfig"]["Memory"],
            4 << 20
        );
        let changes = Changes {
            cpu_millis: Some(500),
            pids_limit: Some(0),
            restart: Some(WantedRestart::OnFailure(2)),
            ..Changes::default()
        };
        let (changed, told) = plain.clone().changed(&changes).unwrap();
        let policy = json!({ "Name": "on-failure", "MaximumRetryCount": 2 });
        assert_eq!(told, json!({ "NanoCpus": 500_000_000, "PidsLimit": -1, "RestartPolicy": policy }));
        assert_eq!(changed.restart_policy(), policy);
        let told = changed.limits_and_policy(false);
        assert_eq!((&told["NanoCpus"], &told["PidsLimit"]), (&json!(500_000_000), &json!(-1)));
        assert_eq!((&told["RestartPolicy"], &told["CpuQuota"]), (&policy, &Value::Null));
        assert_eq!(changed.limits_and_policy(true)["RestartPolicy"], Value::Null);
        let lift = Changes { memory_bytes: Some(0), ..Changes::default() };
        assert!(plain.clone().changed(&lift).unwrap_err().contains("--memory"));
        let lift = Changes { cpu_millis: Some(0), ..Changes::default() };
        assert_eq!(plain.clone().changed(&lift).unwrap().1, json!({}), "there is none");
        assert!(changed.changed(&lift).unwrap_err().contains("--cpus"));
    }

    #[test]
    fn what_docker_has_changed_since_is_taken_over_and_nothing_else() {
        let recorded = Definition::told(&definition()).unwrap();
        let mut value = definition();
        value["name"] = "renamed".into();
        value["config"]["Env"] = json!(["A=other"]);
        value["host"]["IpcMode"] = "host".into();
        value["host"]["Memory"] = (8 << 20).into();
        value["host"]["CpuQuota"] = 50_000.into();
        value["host"]["RestartPolicy"] = json!({ "Name": "no" });
        let now = Definition::told(&value).unwrap();
        let renewed = recorded.clone().renewed(now.clone(), false);
        assert_eq!((renewed.name.as_str(), renewed.memory_and_cpu()), ("renamed", (8 << 20, 500)));
        assert_eq!(renewed.restart_policy()["Name"], "no");
        assert_eq!((&renewed.config, renewed.host.ipc_mode.as_str()), (&recorded.config, "private"));
        // The image is here by another ID than where the container has been.
        let mut here = recorded.clone();
        here.image.1 = format!("sha256:{}", "0b".repeat(32));
        here.store = ImageStore::Containerd;
        assert!(!recorded.knows_image(&here) && here.knows_image(&here));
        here.configuration = Some("asked anew".into());
        here.image.0 = "other:1".into();
        let renewed = recorded.clone().renewed(here.clone(), false);
        assert_eq!((&renewed.image.0, &renewed.image.1), (&recorded.image.0, &here.image.1));
        assert_eq!((renewed.store, &renewed.configuration), (here.store, &here.configuration));
        // One that has just come has another policy than it is to have.
        assert_eq!(recorded.renewed(now, true).restart_policy()["Name"], "always");
    }

    #[test]
    fn what_reaches_out_of_a_container_is_refused() {
        let cases = [
            ("/name", json!("../x"), "its name"),
            ("/image/1", json!("sha256:../x"), "ID of its image"),
            ("/configuration", json!("sha256:../x"), "configuration of its image"),
            ("/volumes/0/name", json!("../x"), "volume \"../x\""),
            ("/volumes/0/target", json!("/a/../b"), "volume \"data\" on"),
            ("/binds", json!([{ "source": "/etc", "target": "/x", "read_only": true }]), "/etc of the node"),
            ("/host/IpcMode", json!("host"), "--ipc"),
            ("/host/LogConfig/Type", json!("syslog"), "--log-driver"),
            ("/host/LogConfig/Config", json!({ "syslog-address": "x" }), "--log-opt"),
            ("/host/MaskedPaths", json!([]), "systempaths"),
        ];
        for (path, value, reason) in cases {
            let mut changed = definition();
            *changed.pointer_mut(path).unwrap() = value;
            let found = Definition::told(&changed).unwrap().objections(&[]);
            assert!(found.len() == 1 && found[0].contains(reason), "{path}: {found:?}");
        }
        let more = [
            ("SecurityOpt", json!(["apparmor=unconfined"]), "apparmor"),
            ("Sysctls", json!({ "kernel.core_pattern": "|/x" }), "kernel.core_pattern"),
            ("Tmpfs", json!({ "/x": "rw,bind" }), "option bind"),
            ("Tmpfs", json!({ "/x/../y": "" }), "tmpfs on"),
        ];
        for (name, value, reason) in more {
            let mut changed = definition();
            changed["host"][name] = value;
            let found = Definition::told(&changed).unwrap().objections(&[]);
            assert!(found.len() == 1 && found[0].contains(reason), "{name}: {found:?}");
        }
    }

    #[test]
    fn what_is_bound_is_what_the_service_has_or_becomes_a_volume() {
        let mut bound = definition();
        bound["binds"] = json!([{ "source": "/srv", "target": "/srv", "read_only": true }]);
        let told = Definition::told(&bound).unwrap();
        let allowed = told.binds[0].mount();
        assert_eq!(told.objections(std::slice::from_ref(&allowed)), [""; 0]);
        let other = Mount { read_only: false, ..allowed };
        assert_eq!(told.objections(&[other]).len(), 2);
        let mounts =
            told.to_create(("web:1", None), ("godwit", "new"), Path::new("/v"))["HostConfig"]["Mounts"]
                .clone();
        assert_eq!(
            mounts[1],
            json!({ "Type": "bind", "Source": "/srv", "Target": "/srv", "ReadOnly": true })
        );
        let copy = |file: Option<&str>| Copied {
            name: "web-srv".parse().unwrap(),
            target: "/srv".into(),
            file: file.map(str::to_owned),
        };
        // A file is bound from a volume of its own.
        let of_file = told.clone().with_volumes(&[copy(Some("srv"))]);
        assert_eq!(of_file.objections(&[]), [""; 0]);
        let mounts =
            of_file.to_create(("i", None), ("r", "t"), Path::new("/v"))["HostConfig"]["Mounts"].clone();
        let wanted =
            json!({ "Type": "bind", "Source": "/v/web-srv/_data/srv", "Target": "/srv", "ReadOnly": true });
        assert_eq!(mounts[1], wanted);
        let mut twice = of_file.clone();
        twice.volumes.push(MountedVolume { name: "web-srv".into(), target: "/x".into(), read_only: false });
        assert!(twice.objections(&[])[0].contains("web-srv is mounted twice"));
        let copied = told.with_volumes(&[copy(None)]);
        assert!(copied.binds.is_empty() && copied.volumes[1].read_only);
        assert_eq!(copied.volumes_and_targets()[1], ("web-srv".to_owned(), "/srv".to_owned()));
    }
}
