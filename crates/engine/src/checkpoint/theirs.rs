//! A container of Podman's as its archive describes it, in godwit's terms.
//!
//! What godwit cannot answer for is refused as [`crate::podman`] refuses it: bind mounts, devices, hooks, namespaces of others.
//! How its processes are held is taken over as it was there, and compared with the images before they are restored.

use std::path::{Path, PathBuf};

use godwit_names::VolumeName;
use serde_json::Value;

use super::unpack::Unpacked;
use super::{ArchiveError, CONFIG, SPEC};
use crate::confinement::User;
use crate::confinement::{Confinement, Ulimit};
use crate::container::{Mount, MountKind};
use crate::foreign::Port;
use crate::podman::definition::Definition;
use crate::seccomp::Seccomp;

/// Places at which every container of godwit's has a mount anyway.
const STANDARD: &[&str] = &["/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup"];

/// A container.
#[derive(Debug, Clone)]
pub struct Theirs {
    /// Its name there.
    pub name: String,
    /// The name of its image.
    pub image: String,
    /// What engines know that by.
    pub image_id: String,
    /// Command with arguments.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Host name inside.
    pub hostname: String,
    /// Who runs it.
    pub user: User,
    /// Working directory inside.
    pub workdir: PathBuf,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// Volumes, and each tmpfs.
    pub mounts: Vec<Mount>,
    /// How its processes are held.
    pub confinement: Confinement,
    /// Ports of the node that led into it.
    pub ports: Vec<Port>,
    /// `NAME=VALUE` pairs.
    pub labels: Vec<String>,
    /// Its restart policy, as `godwit run --restart` takes it.
    pub restart: String,
}

/// Reads what an archive of Podman's says.
///
/// # Errors
/// It is damaged, or its container is one that godwit cannot restore: all that speaks against it.
pub fn read(unpacked: &Unpacked) -> Result<Theirs, ArchiveError> {
    described(&unpacked.document(CONFIG)?, &unpacked.document(SPEC)?)
}

/// The same of the two documents.
///
/// # Errors
/// As above.
pub fn described(config: &[u8], spec: &[u8]) -> Result<Theirs, ArchiveError> {
    let definition = Definition::of(config, spec)
        .map_err(|error| ArchiveError::Damaged(format!("{CONFIG} or {SPEC}: {error}")))?;
    let objections = definition.objections(definition.text("id"), &[]);
    if !objections.is_empty() {
        return Err(ArchiveError::Unfit(objections.join("; ")));
    }
    let spec = definition.spec();
    let process = &spec["process"];
    let command = texts(&process["args"]);
    if command.is_empty() {
        return Err(ArchiveError::Damaged(format!("{SPEC} has no command")));
    }
    let resources = &spec["linux"]["resources"];
    let (quota, period) = (resources["cpu"]["quota"].as_u64(), resources["cpu"]["period"].as_u64());
    let millis = quota.unwrap_or(0).saturating_mul(1000) / period.unwrap_or(100_000).max(1);
    let restart = match (definition.text("restart_policy"), definition.retries()) {
        ("on-failure", retries) if retries > 0 => format!("on-failure:{retries}"),
        (policy, _) => policy.to_owned(),
    };
    let workdir = PathBuf::from(process["cwd"].as_str().unwrap_or("/"));
    if !workdir.is_absolute() {
        return Err(ArchiveError::Damaged(format!("{SPEC} has a working directory that is not absolute")));
    }
    Ok(Theirs {
        name: definition.name().to_owned(),
        image: definition.image().0.to_owned(),
        image_id: format!("sha256:{}", definition.image().1),
        command,
        env: texts(&process["env"]),
        hostname: spec["hostname"].as_str().unwrap_or_default().to_owned(),
        user: User {
            uid: number(&process["user"]["uid"])?,
            gid: number(&process["user"]["gid"])?,
            groups: list(&process["user"]["additionalGids"]).iter().map(number).collect::<Result<_, _>>()?,
        },
        workdir,
        memory_bytes: resources["memory"]["limit"].as_u64().unwrap_or(0),
        cpu_millis: u32::try_from(millis).unwrap_or(0),
        mounts: mounts(&definition)?,
        confinement: confinement(spec)?,
        ports: definition.ports(),
        labels: definition.labels().map(|(name, value)| format!("{name}={value}")).collect(),
        restart,
    })
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn texts(value: &Value) -> Vec<String> {
    list(value).iter().filter_map(|text| text.as_str().map(str::to_owned)).collect()
}

fn number(value: &Value) -> Result<u32, ArchiveError> {
    let number = u32::try_from(value.as_u64().unwrap_or(0)).ok().filter(|id| *id != u32::MAX);
    number.ok_or_else(|| ArchiveError::Damaged(format!("{SPEC} has a user or group out of range")))
}

fn mounts(definition: &Definition) -> Result<Vec<Mount>, ArchiveError> {
    let mut found = Vec::new();
    let is_read_only = |target: &str| {
        let mount = list(&definition.spec()["mounts"]).iter().find(|mount| mount["destination"] == target);
        mount.is_some_and(|mount| list(&mount["options"]).iter().any(|option| option == "ro"))
    };
    for (name, target) in definition.volumes().unwrap_or_default() {
        let name: VolumeName = name.parse().map_err(|error| {
            ArchiveError::Unfit(format!(
                "its volume {name} has a name that no volume of godwit's has: {error}"
            ))
        })?;
        let read_only = is_read_only(target);
        found.push(Mount { kind: MountKind::Volume { name, file: None }, target: target.into(), read_only });
    }
    for mount in list(&definition.spec()["mounts"]) {
        let target = mount["destination"].as_str().unwrap_or_default();
        if mount["type"] == "tmpfs" && !STANDARD.contains(&target) {
            let options = list(&mount["options"]);
            let size = options.iter().filter_map(|option| option.as_str()?.strip_prefix("size="));
            let kind = MountKind::Tmpfs { size_bytes: size.filter_map(bytes).next_back().unwrap_or(0) };
            found.push(Mount { kind, target: target.into(), read_only: is_read_only(target) });
        }
    }
    let twice = |mount: &Mount| found.iter().filter(|other| other.target == mount.target).count() > 1;
    if let Some(mount) = found.iter().find(|mount| twice(mount)) {
        return Err(ArchiveError::Unfit(format!("it has two mounts on {}", mount.target.display())));
    }
    if let Some(mount) =
        found.iter().find(|mount| STANDARD.iter().any(|path| mount.target == Path::new(path)))
    {
        return Err(ArchiveError::Unfit(format!("it has a volume on {}", mount.target.display())));
    }
    Ok(found)
}

/// A size of mount(8): `64m`.
fn bytes(text: &str) -> Option<u64> {
    let (digits, unit) = match text.strip_suffix(['k', 'm', 'g', 'K', 'M', 'G']) {
        Some(digits) => (digits, text.as_bytes()[digits.len()].to_ascii_lowercase()),
        None => (text, b'b'),
    };
    let factor = match unit {
        b'k' => 1 << 10,
        b'm' => 1 << 20,
        b'g' => 1 << 30,
        _ => 1,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

fn confinement(spec: &Value) -> Result<Confinement, ArchiveError> {
    let process = &spec["process"];
    let seccomp = match &spec["linux"]["seccomp"] {
        Value::Null => Seccomp::Unconfined,
        profile => Seccomp::Profile(profile.to_string()),
    };
    let limit = |limit: &Value| {
        let name = limit["type"].as_str()?.strip_prefix("RLIMIT_")?.to_ascii_lowercase();
        Some(Ulimit { name, soft: limit["soft"].as_u64()?, hard: limit["hard"].as_u64()? })
    };
    let mut capabilities = texts(&process["capabilities"]["bounding"]);
    capabilities.sort_unstable();
    let confinement = Confinement {
        capabilities,
        seccomp,
        no_new_privileges: process["noNewPrivileges"] == true,
        pids_limit: spec["linux"]["resources"]["pids"]["limit"].as_u64().unwrap_or(0),
        read_only: spec["root"]["readonly"] == true,
        ulimits: list(&process["rlimits"]).iter().filter_map(limit).collect(),
    };
    confinement.check().map_err(|error| ArchiveError::Unfit(format!("its confinement: {error}")))?;
    Ok(confinement)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::foreign::{MASKED, READ_ONLY};

    fn spec() -> Value {
        json!({
            "ociVersion": "1.0.2-dev",
            "process": {
                "user": { "uid": 7, "gid": 8, "additionalGids": [9] }, "args": ["/bin/sh"], "env": ["A=b"], "cwd": "/w",
                "capabilities": { "bounding": ["CAP_KILL", "CAP_CHOWN"] },
                "rlimits": [{ "type": "RLIMIT_NOFILE", "soft": 1, "hard": 2 }]
            },
            "root": { "path": "/node/merged", "readonly": true },
            "hostname": "h",
            "mounts": [
                { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["size=65536k"] },
                { "destination": "/scratch", "type": "tmpfs", "source": "tmpfs", "options": ["rw", "size=2m"] },
                { "destination": "/data", "type": "bind", "source": "/node/data", "options": ["ro", "rbind"] }
            ],
            "linux": {
                "resources": { "pids": { "limit": 5 }, "memory": { "limit": 8388608 }, "cpu": { "quota": 50000, "period": 100000 } },
                "namespaces": [
                    { "type": "pid" }, { "type": "network" }, { "type": "ipc" }, { "type": "uts" }, { "type": "mount" }
                ],
                "maskedPaths": MASKED, "readonlyPaths": READ_ONLY
            }
        })
    }

    fn config() -> Value {
        json!({
            "id": "c0", "name": "web", "rootfsImageName": "localhost/web:1", "createNetNS": true,
            "labels": { "tier": "x", "io.containers.autoupdate": "registry" },
            "restart_policy": "on-failure", "restart_retries": 3,
            "namedVolumes": [{ "volumeName": "data", "dest": "/data", "options": ["ro", "rbind"] }]
        })
    }

    fn described(change: impl FnOnce(&mut Value, &mut Value)) -> Result<Theirs, ArchiveError> {
        let (mut config, mut spec) = (config(), spec());
        change(&mut config, &mut spec);
        super::described(config.to_string().as_bytes(), spec.to_string().as_bytes())
    }

    #[test]
    fn all_that_a_service_has_is_taken_over() {
        let theirs = described(|_, _| ()).unwrap();
        assert_eq!((theirs.name.as_str(), theirs.image.as_str()), ("web", "localhost/web:1"));
        assert_eq!(theirs.user, User { uid: 7, gid: 8, groups: vec![9] });
        assert_eq!((theirs.memory_bytes, theirs.cpu_millis), (8 << 20, 500));
        assert_eq!(
            (theirs.restart.as_str(), &theirs.labels[..]),
            ("on-failure:3", &["tier=x".to_owned()][..])
        );
        assert_eq!(theirs.confinement.capabilities, ["CAP_CHOWN", "CAP_KILL"]);
        assert!(theirs.confinement.read_only && theirs.confinement.pids_limit == 5);
        let mounts: Vec<_> =
            theirs.mounts.iter().map(|mount| (mount.target.to_str().unwrap(), mount.read_only)).collect();
        assert_eq!(mounts, [("/data", true), ("/scratch", false)]);
        assert_eq!(theirs.mounts[1].kind, MountKind::Tmpfs { size_bytes: 2 << 20 });
    }

    #[test]
    fn what_reaches_out_of_the_container_is_refused() {
        for (field, value) in [
            ("/mounts/0", json!({ "destination": "/x", "type": "bind", "source": "/etc" })),
            ("/hooks", json!({ "prestart": [{ "path": "/bin/x" }] })),
            ("/process/capabilities/bounding", json!(["CAP_EVERYTHING"])),
            ("/process/user/uid", json!(u32::MAX)),
            ("/linux/namespaces", json!([{ "type": "pid" }])),
            ("/linux/maskedPaths", json!([])),
        ] {
            let refused = described(|_, spec| match spec.pointer_mut(field) {
                Some(place) => *place = value,
                None => spec["hooks"] = value,
            });
            assert!(refused.is_err(), "{field}");
        }
        assert!(described(|config, _| config["pod"] = "p".into()).is_err());
        assert!(described(|config, _| config["namedVolumes"][0]["dest"] = "/dev/shm".into()).is_err());
    }
}
