//! What Podman makes a container from: the two documents of its checkpoint archives, without what belongs to one node and
//! without what godwit cannot answer for.
//!
//! | document | what |
//! |---|---|
//! | `config` | Podman's own: name, image, labels, restart policy, health check, … (`config.dump`) |
//! | `spec` | the OCI runtime's (`spec.dump`) |
//!
//! They come from another node, and Podman believes what they say: a path in them is written to, a hook in them is run as
//! root. So of `config` only known fields are taken, and a `spec` is refused that reaches out of the container.

use std::io::{self, Read, Write};
use std::path::Path;

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Largest document taken, bytes; they have some tens of thousands.
const LIMIT: u64 = 4 << 20;

/// Fields of `config` that say the same on every node.
const SAME_EVERYWHERE: &[&str] = &[
    "CreateCommand",
    "RawImageName",
    "UseImageHosts",
    "UseImageResolvConf",
    "addCurrentUserPasswdEntry",
    "cgroupsMode",
    "command",
    "createWorkingDir",
    "createdTime",
    "dnsOption",
    "dnsSearch",
    "dnsServer",
    "entrypoint",
    "groups",
    "healthcheck",
    "healthcheck_on_failure_action",
    "hostsAdd",
    "id",
    "labels",
    "logDriver",
    "logSize",
    "logTag",
    "name",
    "passwd",
    "restart_policy",
    "restart_retries",
    "rootfsImageID",
    "rootfsImageName",
    "sdnotifyMode",
    "shmSize",
    "stdin",
    "stopSignal",
    "stopTimeout",
    "systemd",
    "timeout",
    "timezone",
    "umask",
    "user",
    "volatile",
];

/// Fields of `config` that godwit cannot take along, and what they are called for the user.
const NOT_YET: &[(&str, &str)] = &[
    ("Dependencies", "it depends on other containers"),
    ("namedVolumes", "it has volumes, which do not move yet"),
    ("overlayVolumes", "it has overlay volumes, which do not move"),
    ("imageVolumes", "it has image volumes, which do not move yet"),
    ("secrets", "it has secrets of Podman's, which do not move"),
    ("env_secrets", "it has secrets of Podman's in its environment, which do not move"),
    ("pod", "it is in a pod"),
    ("rootfs", "it was made from a directory (--rootfs), and not from an image"),
    ("privileged", "it is privileged, so that nothing holds it in its place"),
    ("pause", "it is the pause container of a pod"),
    ("isInfra", "it is the infra container of a pod"),
    ("isService", "it is a service container of `podman kube play`"),
];

/// Annotations of `spec` that are taken: others tell a runtime what to do.
const ANNOTATIONS: &[&str] =
    &["io.container.manager", "io.kubernetes.cri-o.", "io.podman.annotations.", "org.opencontainers.image."];

/// Mounts of the container that Podman makes itself, on whatever node it is.
const OWN_MOUNTS: &[&str] =
    &["/dev/shm", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"];

/// Filesystems that a mount may be.
const KERNEL_MOUNTS: &[&str] = &["cgroup", "devpts", "mqueue", "proc", "sysfs", "tmpfs"];

/// Namespaces that a container has for itself.
const NAMESPACES: &[&str] = &["ipc", "mount", "network", "pid", "uts"];

/// A port of the node that leads into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The only address of the node that it is on; empty for all.
    pub address: String,
    /// That of the node.
    pub node: u16,
    /// That of the container.
    pub container: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
}

/// What Podman makes a container from.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Definition {
    config: Map<String, Value>,
    spec: Value,
}

impl Definition {
    /// That in a checkpoint archive.
    pub(super) fn in_archive(archive: impl Read) -> io::Result<Self> {
        let (mut config, mut spec) = (None, None);
        for entry in tar::Archive::new(archive).entries()? {
            let entry = entry?;
            let document = match entry.path()?.to_str() {
                Some("config.dump") => &mut config,
                Some("spec.dump") => &mut spec,
                _ => continue,
            };
            let mut text = Vec::new();
            entry.take(LIMIT).read_to_end(&mut text)?;
            *document = Some(text);
        }
        let (Some(config), Some(spec)) = (config, spec) else {
            return Err(io::Error::other("Podman's archive has no config.dump or no spec.dump"));
        };
        Ok(Self { config: serde_json::from_slice(&config)?, spec: serde_json::from_slice(&spec)? })
    }

    /// One that another node has told.
    pub(super) fn told(definition: &Value) -> io::Result<Self> {
        Ok(Self::deserialize(definition)?)
    }

    pub(super) fn value(&self) -> Value {
        json!({ "config": self.config, "spec": self.spec })
    }

    fn text(&self, field: &str) -> &str {
        self.config.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// Its name in Podman.
    pub(super) fn name(&self) -> &str {
        self.text("name")
    }

    /// Its image: the name that it was started by, and its ID.
    pub(super) fn image(&self) -> (&str, &str) {
        (self.text("rootfsImageName"), self.text("rootfsImageID"))
    }

    /// The OCI document.
    pub(super) fn spec(&self) -> &Value {
        &self.spec
    }

    /// What speaks against making it on another node.
    pub(super) fn objections(&self, id: &str) -> Vec<String> {
        let mut found = Vec::new();
        let is_set = |value: &Value| match value {
            Value::Null | Value::Bool(false) => false,
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
            _ => true,
        };
        for (field, reason) in NOT_YET {
            if self.config.get(*field).is_some_and(is_set) {
                found.push((*reason).to_owned());
            }
        }
        if self.text("id") != id {
            found.push("its definition is that of another container".into());
        }
        if !matches!(self.text("cgroupsMode"), "" | "enabled") {
            found.push(format!("its cgroups are {:?} (--cgroups)", self.text("cgroupsMode")));
        }
        match self.text("networkMode") {
            "" | "bridge" | "none" => {}
            other => found.push(format!("its network is {other:?} (--network)")),
        }
        let namespaces = self.spec["linux"]["namespaces"].as_array().into_iter().flatten();
        let mut network = namespaces.filter(|namespace| namespace["type"] == "network");
        let is_named =
            network.any(|namespace| namespace["path"].as_str().is_some_and(|path| !path.is_empty()));
        if is_named && self.config.get("createNetNS") != Some(&Value::Bool(true)) {
            found.push("it is in a network namespace that Podman has not made (--network ns:)".into());
        }
        self.examine_spec(&mut found);
        found
    }

    /// Ports of the node that lead into it.
    pub(super) fn ports(&self) -> Vec<Port> {
        let mappings = self.config.get("newPortMappings").and_then(Value::as_array).into_iter().flatten();
        let number = |value: &Value| u16::try_from(value.as_u64()?).ok();
        let mut found = Vec::new();
        for mapping in mappings {
            let (Some(node), Some(container)) =
                (number(&mapping["host_port"]), number(&mapping["container_port"]))
            else {
                continue;
            };
            let address =
                mapping["host_ip"].as_str().filter(|address| *address != "0.0.0.0").unwrap_or_default();
            for protocol in mapping["protocol"].as_str().unwrap_or("tcp").split(',') {
                for nth in 0..number(&mapping["range"]).unwrap_or(1).max(1) {
                    let (node, container) = (node.saturating_add(nth), container.saturating_add(nth));
                    found.push(Port {
                        address: address.to_owned(),
                        node,
                        container,
                        protocol: protocol.to_owned(),
                    });
                }
            }
        }
        found
    }

    fn examine_spec(&self, found: &mut Vec<String>) {
        let spec = &self.spec;
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        if spec["process"]["terminal"] == true {
            found.push("it has a terminal (-t), whose other end is on this node".into());
        }
        if spec["hooks"].as_object().is_some_and(|hooks| hooks.values().any(|hooks| !list(hooks).is_empty()))
        {
            found.push("it has OCI hooks, which are programs of this node".into());
        }
        let namespaces = list(&spec["linux"]["namespaces"]);
        for name in NAMESPACES {
            let Some(namespace) = namespaces.iter().find(|namespace| namespace["type"] == *name) else {
                found.push(format!("it shares the {name} namespace of the node"));
                continue;
            };
            if *name != "network" && namespace["path"].as_str().is_some_and(|path| !path.is_empty()) {
                found.push(format!("it is in the {name} namespace of another container"));
            }
        }
        if namespaces.iter().any(|namespace| namespace["type"] == "user") {
            found.push("it has a user namespace (--userns)".into());
        }
        let devices = list(&spec["linux"]["resources"]["devices"]);
        if !list(&spec["linux"]["devices"]).is_empty() || devices.iter().any(|rule| rule["allow"] == true) {
            found.push("it has devices of the node (--device)".into());
        }
        for mount in list(&spec["mounts"]) {
            let target = mount["destination"].as_str().unwrap_or_default();
            let kind = mount["type"].as_str().unwrap_or_default();
            if OWN_MOUNTS.contains(&target) || KERNEL_MOUNTS.contains(&kind) {
                continue;
            }
            found.push(match mount["source"].as_str() {
                Some(source) => {
                    format!("it has {source} of the node mounted on {target}, which does not move yet")
                }
                None => format!("it has a mount on {target} that godwit does not know"),
            });
        }
    }

    /// The definition with nothing of a node's in it, for a container without objections.
    pub(super) fn of_no_node(&self) -> Self {
        let known = |(name, value): (&String, &Value)| {
            SAME_EVERYWHERE.contains(&name.as_str()).then(|| (name.clone(), value.clone()))
        };
        let mut spec = Map::new();
        for field in ["ociVersion", "process", "hostname", "domainname", "root"] {
            if let Some(value) = self.spec.get(field) {
                spec.insert(field.into(), value.clone());
            }
        }
        // Podman gives it the place that it has for it.
        spec.insert("root".into(), json!({ "readonly": self.spec["root"]["readonly"] == true, "path": "" }));
        let mounts = self.spec["mounts"].as_array().cloned().unwrap_or_default();
        let own = |mount: &Value| OWN_MOUNTS.iter().any(|target| mount["destination"] == *target);
        spec.insert("mounts".into(), mounts.into_iter().filter(|mount| !own(mount)).collect());
        let annotations = self.spec["annotations"].as_object().cloned().unwrap_or_default();
        let harmless = |name: &String| ANNOTATIONS.iter().any(|prefix| name.starts_with(prefix));
        let annotations: Map<_, _> = annotations.into_iter().filter(|(name, _)| harmless(name)).collect();
        spec.insert("annotations".into(), annotations.into());
        let mut linux = Map::new();
        for field in ["resources", "maskedPaths", "readonlyPaths", "seccomp", "sysctl"] {
            if let Some(value) = self.spec["linux"].get(field) {
                linux.insert(field.into(), value.clone());
            }
        }
        let namespaces: Vec<_> = NAMESPACES.iter().map(|name| json!({ "type": name })).collect();
        linux.insert("namespaces".into(), namespaces.into());
        spec.insert("linux".into(), linux.into());
        Self { config: self.config.iter().filter_map(known).collect(), spec: spec.into() }
    }

    /// Writes the archive from which Podman makes it on this node, in this network namespace and under runc. What it takes
    /// for images is not looked at.
    pub(super) fn write_archive(
        &self,
        network_namespace: &Path,
        cgroup_parent: Option<&str>,
        to: impl Write,
    ) -> io::Result<()> {
        let mut config = self.config.clone();
        config.insert("runtime".into(), super::RUNTIME.into());
        config.insert("idMappingsOptions".into(), json!({ "HostUIDMapping": true, "HostGIDMapping": true }));
        if let Some(parent) = cgroup_parent {
            config.insert("cgroupParent".into(), parent.into());
        }
        let mut spec = self.spec.clone();
        if let Some(namespaces) = spec["linux"]["namespaces"].as_array_mut() {
            for namespace in namespaces.iter_mut().filter(|namespace| namespace["type"] == "network") {
                namespace["path"] = network_namespace.to_string_lossy().into();
            }
        }
        let mut archive = tar::Builder::new(to);
        for (name, content) in [
            ("config.dump", serde_json::to_vec(&config)?),
            ("spec.dump", serde_json::to_vec(&spec)?),
            ("network.status", b"null".to_vec()),
            // Podman looks whether it is there.
            ("checkpoint/inventory.img", b"godwit".to_vec()),
        ] {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o600);
            header.set_entry_type(tar::EntryType::Regular);
            archive.append_data(&mut header, name, content.as_slice())?;
        }
        archive.into_inner()?.flush()
    }
}
