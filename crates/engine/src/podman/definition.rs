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
//!
//! Podman and runc take `Devices` for `devices`: they read JSON without regard to case. So a `spec` is read into the types of
//! the OCI's specification, which leave out what they do not know, and only what is written from those is looked at and
//! passed on.

use std::io::{self, Read, Write};
use std::net::Ipv4Addr;
use std::path::Path;

use oci_spec::runtime::Spec;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::binds;
use crate::container::{Mount, MountKind, OnMove};
use crate::foreign::file::FileOfVolume;
use crate::foreign::{ARRIVAL_LABEL, MASKED, Port, READ_ONLY, bound, is_target, is_volume};
use crate::resolver;

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
    "timeout",
    "timezone",
    "umask",
    "user",
    "userVolumes",
    "volatile",
];

/// Fields of `config` that godwit cannot take along, and what they are called for the user.
const NOT_YET: &[(&str, &str)] = &[
    ("Dependencies", "it depends on other containers"),
    ("overlayVolumes", "it has overlay volumes, which do not move"),
    ("imageVolumes", "it has image volumes, which do not move yet"),
    ("secrets", "it has secrets of Podman's, which do not move"),
    ("env_secrets", "it has secrets of Podman's in its environment, which do not move"),
    ("pod", "it is in a pod"),
    ("rootfs", "it was made from a directory (--rootfs), and not from an image"),
    ("privileged", "it is privileged, so that nothing holds it in its place"),
    ("systemd", "it runs systemd (--systemd)"),
    ("pause", "it is the pause container of a pod"),
    ("isInfra", "it is the infra container of a pod"),
    ("isService", "it is a service container of `podman kube play`"),
];

/// Annotations of `spec` that are taken: others tell a runtime what to do.
const ANNOTATIONS: &[&str] =
    &["io.container.manager", "io.kubernetes.cri-o.", "io.podman.annotations.", "org.opencontainers.image."];

/// Mounts of the container that Podman makes itself, on whatever node it is.
pub(super) const OWN_MOUNTS: &[&str] =
    &["/dev/shm", "/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"];

/// Filesystems of the kernel that a mount may be, and where; a tmpfs may be anywhere.
const KERNEL_MOUNTS: &[(&str, &str)] = &[
    ("cgroup", "/sys/fs/cgroup"),
    ("devpts", "/dev/pts"),
    ("mqueue", "/dev/mqueue"),
    ("proc", "/proc"),
    ("sysfs", "/sys"),
];

/// Options that such a mount may have.
const MOUNT_OPTIONS: &[&str] = &[
    "dev",
    "exec",
    "newinstance",
    "noatime",
    "nodev",
    "nodiratime",
    "noexec",
    "nosuid",
    "notmpcopyup",
    "private",
    "relatime",
    "ro",
    "rprivate",
    "rslave",
    "rw",
    "slave",
    "strictatime",
    "suid",
    "tmpcopyup",
];

/// The same for options with a value.
const MOUNT_VALUES: &[&str] = &["gid", "mode", "nr_blocks", "nr_inodes", "ptmxmode", "size", "uid"];

/// Labels by which Podman or godwit act on the node, and not on the container.
const LABELS_OF_NODE: &[&str] = &["io.containers.autoupdate", "PODMAN_SYSTEMD_UNIT", ARRIVAL_LABEL];

/// Namespaces that a container has for itself.
const NAMESPACES: &[&str] = &["ipc", "mount", "network", "pid", "uts"];

/// Whether this is an option of a mount that says how its files may be used, and nothing else.
pub(super) fn is_volume_option(option: &str) -> bool {
    const KNOWN: &[&str] = &[
        "rw", "ro", "nosuid", "suid", "nodev", "dev", "noexec", "exec", "bind", "rbind", "private",
        "rprivate", "slave", "rslave", "z", "Z", "copy", "nocopy",
    ];
    KNOWN.contains(&option)
}

/// What a node has for a container.
pub(super) struct Here<'a> {
    /// The network namespace that it is in.
    pub(super) network_namespace: &'a Path,
    /// The DNS server of its network, if there is one.
    pub(super) name_server: Option<Ipv4Addr>,
    /// The cgroup below which its own is, if not where Podman puts it.
    pub(super) cgroup_parent: Option<&'a str>,
    /// What Podman knows its image by.
    pub(super) image: &'a str,
    /// Where Podman has volumes.
    pub(super) volumes: &'a Path,
}

/// A `spec` as the types of the OCI have it.
fn canonical(spec: &Value) -> io::Result<Value> {
    Ok(serde_json::to_value(Spec::deserialize(spec)?)?)
}

/// A mount of a filesystem of the kernel's, with nothing else in it; nothing where it is not one.
pub(super) fn of_kernel(mount: &Value) -> Option<Value> {
    let (kind, target) = (mount["type"].as_str()?, mount["destination"].as_str()?);
    let place = KERNEL_MOUNTS.contains(&(kind, target)) || kind == "tmpfs" && is_target(target);
    let options = mount["options"].as_array().map(Vec::as_slice).unwrap_or_default();
    let options: Vec<_> = options.iter().map(Value::as_str).collect::<Option<_>>()?;
    let known = options.iter().all(|option| {
        MOUNT_OPTIONS.contains(option)
            || option.split_once('=').is_some_and(|(name, value)| {
                MOUNT_VALUES.contains(&name)
                    && value.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'%')
            })
    });
    // What shows the node is not written to.
    let harmless = !matches!(kind, "sysfs" | "cgroup") || options.contains(&"ro") && !options.contains(&"rw");
    (place && known && harmless)
        .then(|| json!({ "type": kind, "source": kind, "destination": target, "options": options }))
}

/// The namespace that a container has on cgroup v2 as a rule, and on v1 not.
const CGROUP_NAMESPACE: &str = "cgroup";

/// What Podman makes a container from.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(crate) struct Definition {
    pub(super) config: Map<String, Value>,
    pub(super) spec: Value,
    /// Files that have come with it: Podman binds each from a volume.
    #[serde(default)]
    pub(super) files: Vec<FileOfVolume>,
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
        Self::of(&config, &spec)
    }

    /// That of these two documents.
    pub(crate) fn of(config: &[u8], spec: &[u8]) -> io::Result<Self> {
        Ok(Self {
            config: serde_json::from_slice(config)?,
            spec: canonical(&serde_json::from_slice(spec)?)?,
            files: Vec::new(),
        })
    }

    /// One that another node has told.
    pub(super) fn told(definition: &Value) -> io::Result<Self> {
        let told = Self::deserialize(definition)?;
        Ok(Self { spec: canonical(&told.spec)?, ..told })
    }

    pub(super) fn value(&self) -> Value {
        let mut value = json!({ "config": self.config, "spec": self.spec });
        if !self.files.is_empty() {
            value["files"] = json!(self.files);
        }
        value
    }

    /// A field of `config` that is text; empty where it is not there.
    pub(crate) fn text(&self, field: &str) -> &str {
        self.config.get(field).and_then(Value::as_str).unwrap_or_default()
    }

    /// Its name in Podman.
    pub(crate) fn name(&self) -> &str {
        self.text("name")
    }

    /// The same with another name.
    pub(super) fn named(mut self, name: &str) -> Self {
        self.config.insert("name".into(), name.into());
        self
    }

    /// Its image: the name that it was started by, and its ID.
    pub(crate) fn image(&self) -> (&str, &str) {
        (self.text("rootfsImageName"), self.text("rootfsImageID"))
    }

    fn namespaces(&self) -> impl Iterator<Item = &Value> {
        self.spec["linux"]["namespaces"].as_array().into_iter().flatten()
    }

    /// Paths that it does not see.
    pub(super) fn masked(&self) -> Vec<&str> {
        self.spec["linux"]["maskedPaths"].as_array().into_iter().flatten().filter_map(Value::as_str).collect()
    }

    /// The OCI document.
    pub(crate) fn spec(&self) -> &Value {
        &self.spec
    }

    /// Takes a network namespace for the container's own that godwit has made for it.
    pub(super) fn in_own_namespace(&mut self, own: &Path) {
        let namespaces = self.spec.pointer_mut("/linux/namespaces").and_then(Value::as_array_mut);
        for namespace in namespaces.into_iter().flatten().filter(|namespace| namespace["type"] == "network") {
            if namespace["path"].as_str().is_some_and(|path| Path::new(path) == own) {
                *namespace = json!({ "type": "network" });
            }
        }
    }

    /// Has it ask the DNS server of its network, wherever it is: no user has named another.
    pub(super) fn ask_network(&mut self) {
        for field in ["dnsServer", "dnsOption"] {
            self.config.remove(field);
        }
    }

    /// What speaks against making it on another node.
    ///
    /// It has that of the node which its service has, and nothing else.
    pub(crate) fn objections(&self, id: &str, of_service: &[Mount]) -> Vec<String> {
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
        if self.config.get("namedVolumes").is_some_and(is_set) && self.volumes().is_none() {
            found.push(
                "it has a volume whose name, place or options are not those of a volume of Podman's".into(),
            );
        }
        found.extend(self.files.iter().filter_map(FileOfVolume::objection));
        let volumes = self.volumes_and_targets();
        let twice = |name: &str| volumes.iter().filter(|(other, _)| *other == name).count() > 1;
        if let Some((name, _)) = volumes.iter().find(|(name, _)| twice(name)) {
            found.push(format!("its volume {name} is mounted twice"));
        }
        self.examine_spec(&mut found);
        let volumes: Vec<_> = self.volumes().unwrap_or_default().into_iter().collect();
        let volumes: Vec<_> =
            volumes.iter().map(|(name, target)| ((*name).to_owned(), (*target).to_owned())).collect();
        let of_files: Vec<_> = self.files.iter().map(|of| of.volume.as_str()).collect();
        found.extend(bound::objections(&self.binds(), (&volumes, &of_files), of_service));
        found
    }

    /// Its volumes, and where each is mounted; nothing where one is not as Podman's are.
    pub(crate) fn volumes(&self) -> Option<Vec<(&str, &str)>> {
        let volumes = self.config.get("namedVolumes").and_then(Value::as_array).into_iter().flatten();
        volumes
            .map(|volume| {
                let (name, target) = (volume["volumeName"].as_str()?, volume["dest"].as_str()?);
                let options = volume["options"].as_array().into_iter().flatten();
                let known = options.map(Value::as_str).all(|option| option.is_some_and(is_volume_option));
                (is_volume(name) && is_target(target) && known).then_some((name, target))
            })
            .collect()
    }

    /// The same as mounts of which nothing has been said.
    pub(super) fn volume_mounts(&self) -> Vec<Mount> {
        let volumes = self.config.get("namedVolumes").and_then(Value::as_array).into_iter().flatten();
        let mounts = volumes.zip(self.volumes().unwrap_or_default()).map(|(volume, (name, target))| Mount {
            kind: MountKind::EngineVolume { name: name.to_owned(), on_move: OnMove::Unsaid },
            target: target.into(),
            read_only: volume["options"].as_array().into_iter().flatten().any(|option| option == "ro"),
        });
        mounts.collect()
    }

    /// The same, of a container without objections.
    pub(super) fn volumes_and_targets(&self) -> Vec<(String, String)> {
        let volumes = self.volumes().unwrap_or_default().into_iter();
        let files = self.files.iter().map(|of| (of.volume.clone(), of.target.clone()));
        volumes.map(|(name, target)| (name.to_owned(), target.to_owned())).chain(files).collect()
    }

    /// Ports of the node that lead into it.
    pub(crate) fn ports(&self) -> Vec<Port> {
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

    /// Its labels, without those of the node that it is on.
    pub(crate) fn labels(&self) -> impl Iterator<Item = (&str, &str)> {
        let labels = self.config.get("labels").and_then(Value::as_object).into_iter().flatten();
        let labels = labels.filter_map(|(name, value)| Some((name.as_str(), value.as_str()?)));
        labels.filter(|(name, _)| !LABELS_OF_NODE.iter().any(|label| name.starts_with(label)))
    }

    /// How often its restart policy starts it again; 0 for no limit.
    pub(crate) fn retries(&self) -> u64 {
        self.config.get("restart_retries").and_then(Value::as_u64).unwrap_or(0)
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
        let is_named = |namespace: &Value| namespace["path"].as_str().is_some_and(|path| !path.is_empty());
        if namespaces.iter().any(|namespace| namespace["type"] == CGROUP_NAMESPACE && is_named(namespace)) {
            found.push("it is in the cgroup namespace of another container".into());
        }
        if namespaces.iter().any(|namespace| namespace["type"] == "user") {
            found.push("it has a user namespace (--userns)".into());
        }
        let devices = list(&spec["linux"]["resources"]["devices"]);
        if !list(&spec["linux"]["devices"]).is_empty() || devices.iter().any(|rule| rule["allow"] == true) {
            found.push("it has devices of the node (--device)".into());
        }
        let volumes = self.volumes().unwrap_or_default();
        for mount in list(&spec["mounts"]) {
            let target = mount["destination"].as_str().unwrap_or_default();
            let is_volume = volumes.iter().any(|(_, of_volume)| *of_volume == target);
            if is_volume || OWN_MOUNTS.contains(&target) || of_kernel(&mount).is_some() {
                continue;
            }
            if binds::of(&mount).is_some() {
                continue;
            }
            found.push(match (mount["type"].as_str(), mount["source"].as_str()) {
                (Some("bind"), Some(source)) => {
                    format!("it has {source} of the node mounted on {target} in a way that does not move")
                }
                _ => format!("it has a mount on {target} that godwit does not know"),
            });
        }
        for (list_of, wanted) in [("maskedPaths", MASKED), ("readonlyPaths", READ_ONLY)] {
            let has = list(&spec["linux"][list_of]);
            if wanted.iter().any(|path| !has.iter().any(|has| has == path)) {
                found.push("it sees or writes what containers do not (--security-opt unmask)".into());
            }
        }
        found.dedup();
    }

    /// The definition with nothing of a node's in it, for a container without objections.
    pub(crate) fn of_no_node(&self) -> Self {
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
        // Podman mounts these anew, from where they are on the node.
        let volumes = self.volumes().unwrap_or_default();
        let own = |mount: &Value| {
            let mut targets = OWN_MOUNTS.iter().copied().chain(volumes.iter().map(|(_, target)| *target));
            targets.any(|target| mount["destination"] == target)
        };
        let others = mounts.iter().filter(|mount| !own(mount));
        let others = others.filter_map(|mount| of_kernel(mount).or_else(|| binds::plain(mount)));
        spec.insert("mounts".into(), others.collect());
        if let Some(process) = spec.get_mut("process").and_then(Value::as_object_mut) {
            process.remove("selinuxLabel");
        }
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
        if let Some(seccomp) = linux.get_mut("seccomp").and_then(Value::as_object_mut) {
            seccomp.remove("listenerPath");
            seccomp.remove("listenerMetadata");
        }
        let has_cgroup = self.namespaces().any(|namespace| namespace["type"] == CGROUP_NAMESPACE);
        let names = NAMESPACES.iter().copied().chain(has_cgroup.then_some(CGROUP_NAMESPACE));
        let namespaces: Vec<_> = names.map(|name| json!({ "type": name })).collect();
        linux.insert("namespaces".into(), namespaces.into());
        spec.insert("linux".into(), linux.into());
        let mut config: Map<_, _> = self.config.iter().filter_map(known).collect();
        let volumes = self.config.get("namedVolumes").and_then(Value::as_array).into_iter().flatten();
        let plain = |volume: &Value| json!({ "volumeName": volume["volumeName"], "dest": volume["dest"], "options": volume["options"] });
        config.insert("namedVolumes".into(), volumes.map(plain).collect());
        if let Some(labels) = config.get_mut("labels").and_then(Value::as_object_mut) {
            labels.retain(|name, _| !LABELS_OF_NODE.iter().any(|label| name.starts_with(label)));
        }
        Self { config, spec: spec.into(), files: self.files.clone() }
    }

    /// Writes the archive from which Podman makes it on this node. What it takes for images is not looked at.
    pub(super) fn write_archive(&self, here: &Here<'_>, to: impl Write) -> io::Result<()> {
        let mut config = self.config.clone();
        config.insert("runtime".into(), super::RUNTIME.into());
        config.insert("idMappingsOptions".into(), json!({ "HostUIDMapping": true, "HostGIDMapping": true }));
        config.insert("rootfsImageName".into(), here.image.into());
        let of_user =
            |field: &str| self.config.get(field).and_then(Value::as_array).is_some_and(|all| !all.is_empty());
        if let Some(server) = here.name_server.filter(|_| !of_user("dnsServer")) {
            config.insert("dnsServer".into(), json!([server]));
            if !of_user("dnsOption") {
                config.insert("dnsOption".into(), json!(resolver::OPTIONS));
            }
        }
        if let Some(parent) = here.cgroup_parent {
            config.insert("cgroupParent".into(), parent.into());
        }
        let mut spec = self.spec.clone();
        if let Some(namespaces) = spec["linux"]["namespaces"].as_array_mut() {
            for namespace in namespaces.iter_mut().filter(|namespace| namespace["type"] == "network") {
                namespace["path"] = here.network_namespace.to_string_lossy().into();
            }
        }
        // Podman adds its own mounts when it restores, but not these.
        let volumes = self.config.get("namedVolumes").and_then(Value::as_array).into_iter().flatten();
        if let Some(mounts) = spec["mounts"].as_array_mut() {
            for of in &self.files {
                let source = of.path(&here.volumes.join(&of.volume).join("_data"));
                let access = if of.read_only { "ro" } else { "rw" };
                mounts.push(json!({
                    "type": "bind", "source": source.to_string_lossy(), "destination": of.target,
                    "options": ["rbind", "rprivate", access],
                }));
            }
            for (volume, (name, target)) in volumes.zip(self.volumes().unwrap_or_default()) {
                let source = here.volumes.join(name).join("_data");
                let options = &volume["options"];
                mounts.push(json!({
                    "type": "bind", "source": source.to_string_lossy(), "destination": target, "options": options,
                }));
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const ID: &str = "c0";

    /// As Podman 4.3.1 describes a container, in short.
    fn definition() -> Value {
        json!({
            "config": {
                "id": ID,
                "name": "web",
                "rootfsImageID": "aa",
                "rootfsImageName": "localhost/web:1",
                "labels": { "tier": "x", "io.containers.autoupdate": "registry", "PODMAN_SYSTEMD_UNIT": "sshd.service" },
                "logPath": "/etc/cron.d/x",
                "staticDir": "/s",
                "lockID": 2,
                "createNetNS": true,
                "networkMode": "bridge",
                "newPortMappings": [
                    { "host_ip": "", "container_port": 80, "host_port": 8080, "range": 2, "protocol": "tcp,udp" },
                    { "host_ip": "127.0.0.1", "container_port": 1, "host_port": 2, "range": 1, "protocol": "tcp" }
                ],
                "namedVolumes": [{ "volumeName": "data", "dest": "/data", "options": ["rw", "rbind"], "isAnonymous": true }]
            },
            "spec": {
                "ociVersion": "1.0.2-dev",
                "process": {
                    "user": { "uid": 0, "gid": 0, "umask": 18 }, "args": ["/bin/sh"], "cwd": "/", "selinuxLabel": "x"
                },
                "root": { "path": "/node/merged" },
                "hostname": "h",
                "mounts": [
                    { "destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"] },
                    { "destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755", "size=65536k"] },
                    { "destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"] },
                    { "destination": "/etc/hosts", "type": "bind", "source": "/node/hosts", "options": ["bind"] },
                    { "destination": "/data", "type": "bind", "source": "/node/data", "options": ["rbind"] }
                ],
                "annotations": { "io.podman.annotations.init": "FALSE", "org.criu.config": "/x" },
                "linux": {
                    "resources": { "devices": [{ "allow": false, "access": "rwm" }], "pids": { "limit": 2048 } },
                    "cgroupsPath": "/elsewhere",
                    "namespaces": [
                        { "type": "pid" }, { "type": "network", "path": "/run/netns/x" }, { "type": "ipc" },
                        { "type": "uts" }, { "type": "mount" }
                    ],
                    "maskedPaths": MASKED,
                    "readonlyPaths": READ_ONLY
                }
            }
        })
    }

    fn objections(change: impl FnOnce(&mut Value)) -> Vec<String> {
        let mut changed = definition();
        change(&mut changed);
        match Definition::told(&changed) {
            Ok(definition) => definition.objections(ID, &[]),
            Err(error) => vec![format!("not understood: {error}")],
        }
    }

    #[test]
    fn a_usual_container_has_no_objections_and_keeps_nothing_of_its_node() {
        assert_eq!(objections(|_| {}), Vec::<String>::new());
        let plain = Definition::told(&definition()).unwrap().of_no_node();
        let text = plain.value().to_string();
        for word in [
            "/node",
            "cron",
            "staticDir",
            "lockID",
            "criu",
            "autoupdate",
            "UNIT",
            "elsewhere",
            "/run/netns",
            "selinux",
        ] {
            assert!(!text.contains(word), "{word}: {text}");
        }
        assert!(
            text.contains("tier") && text.contains("io.podman.annotations.init") && text.contains("umask"),
            "{text}"
        );
        assert_eq!(plain.volumes().unwrap(), [("data", "/data")]);
        assert_eq!((plain.name(), plain.image()), ("web", ("localhost/web:1", "aa")));
        assert_eq!(Definition::told(&plain.value()).unwrap().of_no_node(), plain);
    }

    #[test]
    fn a_namespace_of_godwits_is_its_own_and_another_is_not() {
        let mut changed = definition();
        changed["config"]["createNetNS"] = false.into();
        let mut told = Definition::told(&changed).unwrap();
        told.in_own_namespace(Path::new("/run/netns/y"));
        assert!(told.objections(ID, &[])[0].contains("--network ns:"));
        told.in_own_namespace(Path::new("/run/netns/x"));
        assert_eq!(told.objections(ID, &[]), [""; 0]);
    }

    #[test]
    fn what_reaches_out_of_the_container_is_refused() {
        let mount =
            |mount: Value| move |d: &mut Value| d["spec"]["mounts"].as_array_mut().unwrap().push(mount);
        type Change = Box<dyn FnOnce(&mut Value)>;
        let changes: Vec<(&str, Change)> = vec![
            ("a bind", Box::new(mount(json!({"destination": "/h", "type": "bind", "source": "/"})))),
            (
                "a bind by its options",
                Box::new(mount(
                    json!({"destination": "/h", "type": "tmpfs", "source": "/", "options": ["rbind"]}),
                )),
            ),
            (
                "options of Podman's",
                Box::new(mount(
                    json!({"destination": "/h", "type": "tmpfs", "source": "/", "options": ["U"]}),
                )),
            ),
            (
                "sysfs that is written to",
                Box::new(mount(json!({"destination": "/sys", "type": "sysfs", "source": "sysfs"}))),
            ),
            (
                "proc elsewhere",
                Box::new(mount(json!({"destination": "/p", "type": "proc", "source": "proc"}))),
            ),
            (
                "another filesystem",
                Box::new(mount(json!({"destination": "/d", "type": "ext4", "source": "/dev/sda"}))),
            ),
            (
                "a way out",
                Box::new(mount(json!({"destination": "/a/../../b", "type": "tmpfs", "source": "tmpfs"}))),
            ),
            ("hooks", Box::new(|d| d["spec"]["hooks"] = json!({"prestart": [{"path": "/bin/x"}]}))),
            (
                "devices",
                Box::new(|d| {
                    d["spec"]["linux"]["resources"]["devices"] = json!([{"allow": true, "access": "rwm"}])
                }),
            ),
            ("no masks", Box::new(|d| d["spec"]["linux"]["maskedPaths"] = json!([]))),
            (
                "a writable /proc/sys",
                Box::new(|d| d["spec"]["linux"]["readonlyPaths"] = json!(["/proc/bus"])),
            ),
            (
                "a namespace of the node",
                Box::new(|d| drop(d["spec"]["linux"]["namespaces"].as_array_mut().unwrap().remove(0))),
            ),
            (
                "a namespace of another",
                Box::new(|d| d["spec"]["linux"]["namespaces"][0]["path"] = "/proc/1/ns/pid".into()),
            ),
            (
                "a user namespace",
                Box::new(|d| {
                    d["spec"]["linux"]["namespaces"].as_array_mut().unwrap().push(json!({"type": "user"}))
                }),
            ),
            ("a terminal", Box::new(|d| d["spec"]["process"]["terminal"] = true.into())),
            ("privileged", Box::new(|d| d["config"]["privileged"] = true.into())),
            ("another ID", Box::new(|d| d["config"]["id"] = "c1".into())),
            (
                "a volume elsewhere",
                Box::new(|d| d["config"]["namedVolumes"][0]["volumeName"] = "../../etc".into()),
            ),
            (
                "a volume's option",
                Box::new(|d| d["config"]["namedVolumes"][0]["options"][0] = "upperdir=/".into()),
            ),
            ("the node's network", Box::new(|d| d["config"]["networkMode"] = "host".into())),
        ];
        for (what, change) in changes {
            assert!(!objections(change).is_empty(), "{what}");
        }
    }

    #[test]
    fn a_key_in_another_case_is_no_key() {
        let mut hostile = definition();
        hostile["spec"]["linux"]["resources"]["Devices"] = json!([{ "allow": true, "access": "rwm" }]);
        hostile["spec"]["Hooks"] = json!({ "prestart": [{ "path": "/bin/x" }] });
        hostile["spec"]["mounts"][1]["Options"] = json!(["rbind"]);
        hostile["config"]["LogPath"] = "/etc/cron.d/x".into();
        let text = Definition::told(&hostile).unwrap().of_no_node().value().to_string();
        for word in ["Devices", "Hooks", "Options", "rbind\"]", "LogPath"] {
            assert!(
                !text.contains(word) || word == "rbind\"]" && text.matches(word).count() == 1,
                "{word}: {text}"
            );
        }
    }

    #[test]
    fn ports_are_told_one_by_one() {
        let ports = Definition::told(&definition()).unwrap().ports();
        let shown: Vec<_> =
            ports.iter().map(|p| (p.address.as_str(), p.node, p.container, p.protocol.as_str())).collect();
        let first =
            [("", 8080, 80, "tcp"), ("", 8081, 81, "tcp"), ("", 8080, 80, "udp"), ("", 8081, 81, "udp")];
        assert_eq!(shown, [&first[..], &[("127.0.0.1", 2, 1, "tcp")]].concat());
    }

    #[test]
    fn an_archive_has_what_it_was_written_from() {
        let plain = Definition::told(&definition()).unwrap().of_no_node();
        let here = Here {
            network_namespace: Path::new("/run/godwit/netns/web"),
            name_server: Some(Ipv4Addr::new(10, 88, 0, 1)),
            cgroup_parent: Some("/godwit/podman"),
            image: "aa",
            volumes: Path::new("/here/volumes"),
        };
        let mut archive = Vec::new();
        plain.write_archive(&here, &mut archive).unwrap();
        let read = Definition::in_archive(archive.as_slice()).unwrap();
        assert_eq!((read.name(), read.image()), ("web", ("aa", "aa")));
        assert_eq!(read.text("cgroupParent"), "/godwit/podman");
        assert_eq!(read.config["dnsServer"], json!(["10.88.0.1"]));
        let text = read.spec().to_string();
        assert!(
            text.contains("/here/volumes/data/_data") && text.contains("/run/godwit/netns/web"),
            "{text}"
        );
        assert!(Definition::in_archive(&archive[..1024]).is_err());
    }
}
