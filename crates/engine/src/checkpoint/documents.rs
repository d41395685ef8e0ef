//! What Podman makes a container of godwit's from: `config.dump` and `spec.dump`, as Podman 4 and later write and read them.
//!
//! They say what `podman run` would have been told: the image by a name, volumes by theirs, one network. What belongs to this
//! node is not in them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

use super::{ArchiveError, CONFIG, NETWORK, SPEC};
use crate::container::{ContainerConfig, MountKind};
use crate::runc::spec;

/// Where Podman of root has volumes, unless its settings say something else: a restore takes the path as it is.
const VOLUMES: &str = "/var/lib/containers/storage/volumes";

/// The network that Podman has without being told.
const PODMANS_NETWORK: &str = "podman";

/// What is known of a container beside what its engine is told.
#[derive(Debug, Clone)]
pub struct Known {
    /// 64 hexadecimal digits.
    pub id: String,
    /// The name by which Podman shall know its image.
    pub image: String,
    /// The digest by which it does. Podman 4 takes the name where there is none, and later ones do not.
    pub image_id: Option<String>,
    /// When it was created.
    pub created: SystemTime,
    /// Ports of the node, those of the container that they lead to, and whether they are UDP's.
    pub ports: Vec<(u16, u16, bool)>,
    /// For people.
    pub labels: BTreeMap<String, String>,
    /// As Podman writes it, and how often it is tried.
    pub restart: (String, u32),
}

/// The name by which Podman shall know an image that came from here: its own where it has one, else one that is made of the
/// file's name, as `podman tag` takes it.
#[must_use]
pub fn image_name(origin: &str) -> String {
    let is_path = origin.starts_with('/');
    if !is_path && origin.contains(['/', ':']) {
        return origin.to_owned();
    }
    let file = origin.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    let stem = file.split_once('.').map_or(file, |(stem, _)| stem);
    let known = |byte: char| if byte.is_ascii_alphanumeric() { byte.to_ascii_lowercase() } else { '-' };
    let name: String = stem.chars().map(known).collect();
    let name = name.trim_matches('-');
    format!("localhost/{}:latest", if name.is_empty() { "image" } else { name })
}

/// The documents, by the names of their members.
///
/// # Errors
/// It is confined in a way that there is not.
pub fn documents(
    config: &ContainerConfig,
    known: &Known,
) -> Result<Vec<(&'static str, Vec<u8>)>, ArchiveError> {
    let spec = spec_dump(config)?;
    let text = |value: &Value| {
        serde_json::to_vec(value).map_err(|error| ArchiveError::io("write JSON")(error.into()))
    };
    Ok(vec![
        (CONFIG, text(&config_dump(config, known))?),
        (SPEC, text(&spec)?),
        // No address of a network of Podman's.
        (NETWORK, b"{}".to_vec()),
    ])
}

/// The volumes: the name, the place, and the options.
fn volumes(config: &ContainerConfig) -> impl Iterator<Item = (&str, Value, Vec<&'static str>)> {
    config.mounts.iter().filter_map(|mount| {
        let name = mount.volume()?.as_str();
        let access = if mount.read_only { "ro" } else { "rw" };
        Some((name, json!(mount.target), vec![access, "rprivate", "rbind"]))
    })
}

fn config_dump(config: &ContainerConfig, known: &Known) -> Value {
    let volumes: Vec<_> = volumes(config)
        .map(|(name, target, options)| json!({ "volumeName": name, "dest": target, "options": options }))
        .collect();
    let port = |(host, container, udp): &(u16, u16, bool)| {
        json!({
            "host_ip": "", "host_port": host, "container_port": container, "range": 1,
            "protocol": if *udp { "udp" } else { "tcp" },
        })
    };
    let image_id = known.image_id.as_ref().map(|id| id.strip_prefix("sha256:").unwrap_or(id));
    let image_id = image_id.unwrap_or(&known.image);
    let mut json = json!({
        "id": known.id,
        "name": config.name.as_str(),
        "rootfsImageID": image_id,
        "rootfsImageName": known.image,
        "RawImageName": known.image,
        "idMappingsOptions": { "HostUIDMapping": true, "HostGIDMapping": true },
        "shmSize": crate::container::DEV_BYTES,
        "noShm": true,
        "createNetNS": true,
        "networkMode": "bridge",
        "newNetworks": { PODMANS_NETWORK: { "interface_name": "eth0" } },
        "newPortMappings": known.ports.iter().map(port).collect::<Vec<_>>(),
        "namedVolumes": volumes,
        "command": config.command,
        "labels": known.labels,
        "stopSignal": 15,
        "stopTimeout": 10,
        "createdTime": rfc3339(known.created),
        "checkpointedTime": rfc3339(SystemTime::now()),
        "cgroupsMode": "enabled",
        "logDriver": "k8s-file",
        "runtime": "runc",
        "user": format!("{}:{}", config.user.uid, config.user.gid),
        "restart_policy": known.restart.0,
    });
    if known.restart.1 > 0 {
        json["restart_retries"] = known.restart.1.into();
    }
    json
}

fn spec_dump(config: &ContainerConfig) -> Result<Value, ArchiveError> {
    let made = spec::config_json(config, &[], &[], None);
    let mut json = made.map_err(|error| ArchiveError::Unfit(error.to_string()))?;
    json["root"]["path"] = "rootfs".into();
    let mut annotations = Map::new();
    annotations.insert("io.container.manager".into(), "libpod".into());
    annotations.insert("org.opencontainers.image.stopSignal".into(), "15".into());
    json["annotations"] = annotations.into();
    let masked: Vec<_> = spec::MASKED_FILES.iter().chain(spec::COVERED_DIRECTORIES).collect();
    let linux = &mut json["linux"];
    linux["maskedPaths"] = json!(masked);
    linux["namespaces"] =
        ["pid", "network", "ipc", "uts", "mount"].map(|kind| json!({ "type": kind })).into();
    if let Some(linux) = linux.as_object_mut() {
        linux.remove("cgroupsPath");
    }
    let bound = |kind: &MountKind| matches!(kind, MountKind::Bind { .. } | MountKind::Volume { .. });
    let places: Vec<_> =
        config.mounts.iter().filter(|mount| bound(&mount.kind)).map(|mount| json!(mount.target)).collect();
    if let Some(mounts) = json["mounts"].as_array_mut() {
        mounts.retain(|mount| !places.contains(&mount["destination"]));
        mounts.extend(volumes(config).map(|(name, target, options)| {
            let source = format!("{VOLUMES}/{name}/_data");
            json!({ "type": "bind", "source": source, "destination": target, "options": options })
        }));
    }
    Ok(json)
}

/// A time as RFC 3339 has it, in UTC and whole seconds; the calendar is that of Howard Hinnant's `civil_from_days`.
fn rfc3339(time: SystemTime) -> String {
    let seconds = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs();
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::confinement::Confinement;
    use crate::confinement::User;
    use crate::container::Mount;

    #[test]
    fn a_time_is_that_of_date() {
        let at = |seconds| rfc3339(UNIX_EPOCH + Duration::from_secs(seconds));
        assert_eq!(at(0), "1970-01-01T00:00:00Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(at(1_795_704_586), "2026-11-26T14:49:46Z");
    }

    #[test]
    fn an_image_from_a_file_has_a_name_that_podman_takes() {
        for (origin, name) in [
            ("/images/redis.tar", "localhost/redis:latest"),
            ("/x/My Image.1.tar", "localhost/my-image:latest"),
            ("/x/---/", "localhost/image:latest"),
            ("docker.io/library/redis:7", "docker.io/library/redis:7"),
        ] {
            assert_eq!(image_name(origin), name, "{origin}");
        }
    }

    #[test]
    fn nothing_in_them_is_this_nodes() {
        let mount = |name: &str, target: &str| Mount {
            kind: MountKind::Volume { name: name.parse().unwrap(), file: None },
            target: target.into(),
            read_only: false,
        };
        let config = ContainerConfig {
            name: "web".parse().unwrap(),
            directory: "/node/d".into(),
            rootfs: "/node/r".into(),
            network_namespace: "/node/netns".into(),
            cgroup: "node/web".into(),
            command: vec!["true".into()],
            env: vec![],
            mounts: vec![mount("data", "/data")],
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
        };
        let known = Known {
            id: "c".repeat(64),
            image: "localhost/web:latest".into(),
            image_id: Some(format!("sha256:{}", "d".repeat(64))),
            created: UNIX_EPOCH,
            ports: vec![(8080, 80, false)],
            labels: BTreeMap::new(),
            restart: ("no".into(), 0),
        };
        let all = documents(&config, &known).unwrap();
        for (name, text) in &all {
            let text = std::str::from_utf8(text).unwrap();
            assert!(!text.contains("/node") && !text.contains("node/"), "{name}: {text}");
        }
        let made: Value = serde_json::from_slice(&all[0].1).unwrap();
        assert_eq!(made["rootfsImageID"], "d".repeat(64));
        let nameless = documents(&config, &Known { image_id: None, ..known }).unwrap();
        let made: Value = serde_json::from_slice(&nameless[0].1).unwrap();
        assert_eq!(made["rootfsImageID"], "localhost/web:latest");
        let spec: Value = serde_json::from_slice(&all[1].1).unwrap();
        let data = spec["mounts"].as_array().unwrap().iter().find(|mount| mount["destination"] == "/data");
        assert_eq!(data.unwrap()["source"], "/var/lib/containers/storage/volumes/data/_data");
        assert!(spec["linux"]["maskedPaths"].as_array().unwrap().contains(&json!("/sys/firmware")));
    }
}
