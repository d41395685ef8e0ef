//! Whether images of another node give a container more than its own definition does.

use std::path::Path;

use godwit_criu::images::{Allowed, archives, excess};
use serde_json::Value;

use super::spec;
use crate::confinement::ALL;
use crate::container::{ContainerConfig, EngineError, RestoreRequest};
use crate::image::devices;
use crate::seccomp;

/// CAP_MKNOD.
const CAN_MAKE_DEVICES: u64 = 1 << 27;

/// Refuses images that give more than the definition of the container.
pub(super) fn check(request: &RestoreRequest) -> Result<(), EngineError> {
    let spec = spec::config_json(&request.config, &[], &[], None);
    check_spec(request, &spec.map_err(|error| request.refused(error))?)
}

/// Refuses images that give more than an OCI description does.
pub(crate) fn check_spec(request: &RestoreRequest, spec: &Value) -> Result<(), EngineError> {
    let refused = |reason: String| request.refused(reason);
    let allowed = allowed(&request.config, spec);
    let mut found = excess(&request.images, &allowed).map_err(|error| refused(error.to_string()))?;
    if allowed.capabilities & CAN_MAKE_DEVICES == 0 {
        for archive in archives(&request.images).map_err(|error| refused(error.to_string()))? {
            let name = archive.file_name().unwrap_or_default().to_string_lossy();
            let foreign = devices::foreign(&archive)
                .map_err(|reason| refused(format!("its image {name} cannot be read: {reason}")))?;
            found.extend(
                foreign
                    .into_iter()
                    .map(|(path, node)| format!("{path} in {name} is {node}, which no container is given")),
            );
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    Err(refused(format!("its images give it more than it was defined with: {}", found.join("; "))))
}

fn allowed(config: &ContainerConfig, json: &Value) -> Allowed {
    let texts = |value: &Value| -> Vec<String> {
        let list = value.as_array().map(Vec::as_slice).unwrap_or_default();
        list.iter().filter_map(|text| text.as_str().map(str::to_owned)).collect()
    };
    let held = texts(&json["process"]["capabilities"]["bounding"]);
    let bits = (0u32..).zip(ALL).filter(|(_, name)| held.iter().any(|held| held == *name));
    // Of the node's: a tmpfs or a volume there shows nothing of what the check is about.
    let brought = |path: &str| {
        config.mounts.iter().any(|mount| mount.bind().is_some() && mount.target == Path::new(path))
    };
    let filter = &json["linux"]["seccomp"];
    Allowed {
        capabilities: bits.fold(0, |set, (bit, _)| set | 1 << bit),
        uid: config.user.uid,
        gid: config.user.gid,
        groups: config.user.groups.clone(),
        no_new_privileges: json["process"]["noNewPrivileges"] == true,
        refused: filter.is_object().then(|| seccomp::refused(filter)),
        // What this kernel does not have cannot be written to.
        read_only: texts(&json["linux"]["readonlyPaths"])
            .into_iter()
            .filter(|path| path.starts_with("/proc/") && Path::new(path).exists())
            .collect(),
        own_proc: brought("/proc") || brought("/sys"),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::confinement::User;
    use crate::container::{Mount, MountKind};

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
            confinement: crate::confinement::Confinement::default(),
            crosses: false,
            kept: None,
            name_server: None,
        }
    }

    #[test]
    fn only_a_directory_of_the_node_takes_the_place_of_proc_or_sys() {
        let own_proc = |kind: MountKind, target: &str| {
            let mounts = vec![Mount { kind, target: target.into(), read_only: false }];
            let config = ContainerConfig { mounts, ..config() };
            let json = spec::config_json(&config, &[], &[], None).unwrap();
            allowed(&config, &json).own_proc
        };
        for target in ["/proc", "/sys"] {
            assert!(!own_proc(MountKind::Tmpfs { size_bytes: 0 }, target), "{target}");
            assert!(
                !own_proc(MountKind::Volume { name: "data".parse().unwrap(), file: None }, target),
                "{target}"
            );
            let bind =
                MountKind::Bind { source: target.into(), on_move: crate::container::OnMove::default() };
            assert!(own_proc(bind, target), "{target}");
        }
    }

    #[test]
    fn the_set_is_the_definitions_own() {
        let config = config();
        let json = spec::config_json(&config, &[], &[], None).unwrap();
        let allowed = allowed(&config, &json);
        // As /proc/PID/status of a service shows it: with CAP_AUDIT_WRITE.
        assert_eq!(allowed.capabilities, 0xa004_05fb);
        assert!(allowed.read_only.contains(&"/proc/sys".to_owned()));
        assert!(!allowed.own_proc && !allowed.no_new_privileges);
        assert_eq!((allowed.uid, allowed.gid, allowed.groups), (0, 0, vec![]));
        assert!(allowed.refused.is_some_and(|refused| !refused.of.is_empty()), "it has godwit's own profile");
    }
}
