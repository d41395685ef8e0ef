//! A container that Docker has started is to come into godwit's care: what it is, and what speaks against that.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use godwit_names::ServiceName;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::definition::{Bound, Config, Definition, HostConfig, ImageStore, MountedVolume, OTHERWISE};
use super::{Docker, RUNTIME, containerd, encoded, filtered, shim_of};
use crate::confinement::User;
use crate::container::{EngineError, Keeper, Kept, io_error};
use crate::foreign::record::Volume;
use crate::foreign::{Beside, Found, Keeps as _, Look, Port, bound, is_short_id, landing, on_networks};
use crate::image::digest_at_registry;
use crate::processes::mounts::MountNamespace;

/// A container as `docker inspect` tells it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    pub(super) id: String,
    name: String,
    image: String,
    state: State,
    config: Map<String, Value>,
    host_config: Map<String, Value>,
    #[serde(default)]
    image_manifest_descriptor: Option<Descriptor>,
    #[serde(default)]
    graph_driver: GraphDriver,
    #[serde(default)]
    storage: Storage,
    #[serde(default)]
    mounts: Vec<Mount>,
    network_settings: NetworkSettings,
    #[serde(default)]
    resolv_conf_path: PathBuf,
}

/// The manifest that it was made of, where containerd has the image; Docker tells it from release 28 on.
#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    digest: String,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct State {
    running: bool,
    paused: bool,
    restarting: bool,
    pid: u32,
    exit_code: i32,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct GraphDriver {
    name: String,
    data: Option<GraphData>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct GraphData {
    upper_dir: PathBuf,
    merged_dir: PathBuf,
}

/// Where its root filesystem is, if containerd has it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Storage {
    #[serde(rename = "RootFS")]
    root_fs: Option<StoredRoot>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct StoredRoot {
    snapshot: Option<Snapshot>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Snapshot {
    name: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Mount {
    r#type: String,
    name: String,
    source: PathBuf,
    destination: String,
    driver: String,
    #[serde(rename = "RW")]
    rw: bool,
    propagation: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct NetworkSettings {
    networks: Option<BTreeMap<String, Map<String, Value>>>,
    ports: Option<BTreeMap<String, Option<Vec<Binding>>>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
struct Binding {
    host_ip: String,
    host_port: String,
}

/// Settings of `HostConfig` that godwit cannot take along, and what they are called for the user.
const NOT_YET: &[(&str, &str)] = &[
    ("AutoRemove", "it is removed when it ends (--rm), as it does for Docker when it moves"),
    ("Cgroup", "it is in the cgroup of another container"),
    ("DeviceCgroupRules", "it has devices of the node (--device-cgroup-rule)"),
    ("DeviceRequests", "it has devices of the node (--gpus)"),
    ("Devices", "it has devices of the node (--device)"),
    ("Init", "it has an init process of the node (--init)"),
    ("Links", "it has links to other containers (--link)"),
    ("PidMode", "it shares a PID namespace (--pid)"),
    ("Privileged", "it is privileged, so that nothing holds it in its place"),
    ("UTSMode", "it shares a UTS namespace (--uts)"),
    ("UsernsMode", "it has a user namespace of its own choice (--userns)"),
    ("VolumesFrom", "it has the volumes of another container (--volumes-from)"),
];

/// The same for `Config`.
const NOT_OPEN: &[(&str, &str)] = &[
    ("OpenStdin", "its standard input is open (-i), whose other end is on this node"),
    ("Tty", "it has a terminal (-t), whose other end is on this node"),
];

/// Runtimes whose containers runc can restore.
const RUNTIMES: &[&str] = &["", "runc", RUNTIME, "io.containerd.runc.v2"];

fn is_set(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::Number(number) => number.as_f64() != Some(0.0),
        Value::Bool(true) => true,
    }
}

impl Inspected {
    /// The ID of its image, or of what of it is for this machine.
    pub(super) fn manifest(&self) -> &str {
        self.image_manifest_descriptor.as_ref().map_or(&self.image, |of| &of.digest)
    }

    pub(super) fn is_running(&self) -> bool {
        self.state.running && !self.state.restarting
    }

    /// The storage driver that has its root filesystem.
    fn driver(&self) -> &str {
        let snapshot = self.storage.root_fs.as_ref().and_then(|root| root.snapshot.as_ref());
        // Before release 29 Docker calls both alike.
        snapshot.map_or(&self.graph_driver.name, |snapshot| &snapshot.name)
    }

    /// The same where Docker has its storage there.
    fn look(&self, storage: &Path, mountinfo: &str) -> Look {
        let data = match self.driver() {
            containerd::SNAPSHOTTER => {
                let merged_dir = containerd::root_of(storage, &self.id);
                // It is mounted while it runs.
                let upper_dir = landing::upper_of(mountinfo, &merged_dir).unwrap_or_default();
                GraphData { upper_dir, merged_dir }
            }
            _ => self.graph_driver.data.clone().unwrap_or_default(),
        };
        Look {
            id: self.id.clone(),
            running: self.is_running(),
            restarting: self.state.restarting,
            exit_code: self.state.exit_code,
            pid: self.state.pid,
            reader: shim_of(self.state.pid),
            upper: data.upper_dir,
            merged: data.merged_dir,
            networks: self.networks(),
            resolver: self.resolver(),
        }
    }

    /// See [`Look::resolver`]. Docker names what its user has mounted there instead, be it the node's own file.
    fn resolver(&self) -> Option<PathBuf> {
        let of_user =
            self.host_config.get("Dns").and_then(Value::as_array).is_some_and(|all| !all.is_empty());
        let path = &self.resolv_conf_path;
        let is_own = path.is_absolute() && path.ends_with(format!("containers/{}/resolv.conf", self.id));
        (!of_user && is_own).then(|| path.clone())
    }

    /// The names that it has on its networks, but for its ID, which Docker gives it as one.
    fn aliases(&self) -> Vec<String> {
        let networks = self.network_settings.networks.iter().flatten();
        let lists = networks.flat_map(|(_, network)| ["Aliases", "DNSNames"].map(|kind| network.get(kind)));
        let texts = lists.flatten().filter_map(Value::as_array).flatten().filter_map(Value::as_str);
        let hostname = self.config.get("Hostname").and_then(Value::as_str);
        let names = texts.chain(hostname).filter(|name| !name.is_empty() && !is_short_id(name, &self.id));
        names.map(str::to_owned).collect()
    }

    /// The networks that it is on, and what its user has said of each.
    fn networks(&self) -> Vec<(String, String)> {
        let networks = self.network_settings.networks.iter().flatten();
        let networks = networks.filter(|(name, _)| name.as_str() != "none");
        let of_user = |network: &Map<String, Value>| {
            let said = ["IPAMConfig", "Aliases", "Links", "DriverOpts"].into_iter();
            let said = said.filter_map(|name| Some((name.to_owned(), network.get(name)?.clone())));
            Value::from(said.collect::<Map<_, _>>()).to_string()
        };
        networks.map(|(name, network)| (name.clone(), of_user(network))).collect()
    }

    pub(super) fn volumes(&self) -> Vec<Volume> {
        let volumes = self.mounts.iter().filter(|mount| mount.r#type == "volume");
        // `docker rm` keeps those without a name of their user's choice, too.
        let of = |mount: &Mount| Volume {
            name: mount.name.clone(),
            files: mount.source.clone(),
            anonymous: false,
        };
        volumes.map(of).collect()
    }

    /// Ports of the node that lead into it.
    fn ports(&self) -> Vec<Port> {
        let mut found: Vec<Port> = Vec::new();
        for (inside, bindings) in self.network_settings.ports.iter().flatten() {
            let (container, protocol) = inside.split_once('/').unwrap_or((inside, "tcp"));
            for binding in bindings.iter().flatten() {
                let (Ok(container), Ok(node)) = (container.parse(), binding.host_port.parse()) else {
                    continue;
                };
                let everywhere = matches!(binding.host_ip.as_str(), "" | "0.0.0.0" | "::");
                let address = if everywhere { String::new() } else { binding.host_ip.clone() };
                let port = Port { address, node, container, protocol: protocol.to_owned() };
                // Docker tells those of IPv4 and of IPv6.
                if !found.contains(&port) {
                    found.push(port);
                }
            }
        }
        found
    }

    fn text(&self, setting: &str) -> &str {
        self.host_config.get(setting).and_then(Value::as_str).unwrap_or_default()
    }

    /// What speaks against moving it, beside its definition.
    fn objections(&self, beside: Beside<'_>) -> Vec<String> {
        let of = |settings: &Map<String, Value>, list: &[(&str, &str)]| -> Vec<String> {
            let found = list.iter().filter(|(name, _)| settings.get(*name).is_some_and(is_set));
            found.map(|(_, reason)| (*reason).to_owned()).collect()
        };
        let mut found = of(&self.host_config, NOT_YET);
        found.extend(self.unknown_settings());
        found.extend(of(&self.config, NOT_OPEN));
        let network = self.text("NetworkMode");
        if network == "host" || network.starts_with("container:") {
            found.push(format!("its network is {network:?} (--network)"));
        }
        if !RUNTIMES.contains(&self.text("Runtime")) {
            found.push(format!("its runtime is {}; godwit moves those of runc", self.text("Runtime")));
        }
        if !["overlay2", containerd::SNAPSHOTTER].contains(&self.driver()) {
            found.push(format!(
                "its storage driver is {:?}; godwit moves overlay2 and overlayfs",
                self.driver()
            ));
        }
        for mount in &self.mounts {
            match mount.r#type.as_str() {
                "volume" if matches!(mount.driver.as_str(), "" | "local") => {}
                // What its engine has there, whatever that is, does not move.
                "volume" if beside.stays(&mount.destination) => {}
                "volume" => found.push(format!("its volume {} is one of {}", mount.name, mount.driver)),
                "bind" if matches!(mount.propagation.as_str(), "" | "rprivate" | "private") => {}
                "bind" => found.push(format!(
                    "it has {} of the node mounted on {} as {}, which does not move",
                    mount.source.display(),
                    mount.destination,
                    mount.propagation
                )),
                other => found.push(format!(
                    "it has a mount of type {other} on {}, which does not move yet",
                    mount.destination
                )),
            }
        }
        found
    }

    /// Settings that godwit does not know, as sentences.
    pub(super) fn unknown_settings(&self) -> Vec<String> {
        let known = json!(HostConfig::default());
        let is_known = |name: &str| {
            known.get(name).is_some()
                || OTHERWISE.contains(&name)
                || NOT_YET.iter().any(|(other, _)| *other == name)
        };
        let unknown = self.host_config.iter().filter(|(name, value)| is_set(value) && !is_known(name));
        unknown.map(|(name, _)| format!("it has the setting {name}, which does not move yet")).collect()
    }

    /// What Docker makes it from.
    pub(super) fn definition(&self) -> Result<Definition, serde_json::Error> {
        let volumes = self.mounts.iter().filter(|mount| mount.r#type == "volume");
        let of = |mount: &Mount| MountedVolume {
            name: mount.name.clone(),
            target: mount.destination.clone(),
            read_only: !mount.rw,
        };
        let binds = self.mounts.iter().filter(|mount| mount.r#type == "bind");
        let bound = |mount: &Mount| Bound {
            source: mount.source.clone(),
            target: mount.destination.clone(),
            read_only: !mount.rw,
        };
        let image = self.config.get("Image").and_then(Value::as_str).unwrap_or_default();
        Ok(Definition {
            name: self.name.trim_start_matches('/').to_owned(),
            image: (image.to_owned(), self.image.clone()),
            files_of_image: Vec::new(),
            configuration: None,
            store: match self.driver() {
                containerd::SNAPSHOTTER => ImageStore::Containerd,
                _ => ImageStore::Docker,
            },
            config: Config::deserialize(Value::Object(self.config.clone()))?,
            host: HostConfig::deserialize(Value::Object(self.host_config.clone()))?,
            volumes: volumes.map(of).collect(),
            binds: binds.map(bound).collect(),
            files: Vec::new(),
        })
    }
}

fn mountinfo(name: &ServiceName) -> Result<String, EngineError> {
    fs::read_to_string("/proc/self/mountinfo")
        .map_err(|source| io_error(name, "read /proc/self/mountinfo".into(), source))
}

impl Docker {
    /// What Docker knows of a container, by its ID or name; nothing where there is none.
    pub(super) async fn inspect(
        &self,
        name: &ServiceName,
        container: &str,
    ) -> Result<Option<Inspected>, EngineError> {
        let path = format!("/containers/{}/json", encoded(container));
        self.api.find(&path).await.map_err(self.failed(name, "inspect"))
    }

    /// What there is to know of a container that Docker tells so.
    pub(super) async fn look_at(
        &self,
        name: &ServiceName,
        inspected: &Inspected,
    ) -> Result<Look, EngineError> {
        if inspected.driver() != containerd::SNAPSHOTTER {
            return Ok(inspected.look(Path::new(""), ""));
        }
        let storage = match self.care.storage.get() {
            Some(storage) => storage.clone(),
            None => self.storage_of(name).await?,
        };
        Ok(inspected.look(&storage, &mountinfo(name)?))
    }

    pub(super) async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        beside: Beside<'_>,
    ) -> Result<Found, EngineError> {
        let refused = |reason: String| self.care.failed(name, "give godwit", reason);
        let Some(inspected) = self.inspect(name, container).await? else {
            return Err(refused(format!("it has no container {container}; `docker ps` lists them")));
        };
        let state = &inspected.state;
        if !state.running || state.paused || state.restarting {
            return Err(refused(format!("{container} does not run; start it first")));
        }
        let mut definition = inspected
            .definition()
            .map_err(|error| refused(format!("what Docker tells of it is not understood: {error}")))?;
        if beside.namespace.is_some() {
            definition.ask_network();
        }
        let mut objections = inspected.objections(beside);
        let of_node = definition.mounts();
        objections.extend(definition.objections(&of_node));
        let info = self.info(name).await?;
        match info.objection() {
            Some(objection) => objections.push(objection),
            None => objections.extend(self.apart(name, &info, false).await?),
        }
        let volumes = definition.volumes_and_targets().into_iter();
        let volumes: Vec<_> =
            volumes.filter(|(_, target)| !beside.stays(target)).map(|(name, _)| name).collect();
        objections.extend(self.volume_objections(name, &volumes, 1).await?);
        let mounts = mountinfo(name)?;
        let look = inspected.look(&info.docker_root_dir, &mounts);
        objections.extend(landing::overlay_objection(&mounts, &look.merged));
        if !look.networks.is_empty() && !leaves_networks {
            objections.push(on_networks(Keeper::Docker, &look.networks));
        }
        if !objections.is_empty() {
            return Err(self.care.unfit(name, objections));
        }
        definition = self.with_image(name, definition, &inspected).await?;
        let spec = self.spec_of(name, look.reader)?;
        let mounts = spec["mounts"].as_array().map(Vec::as_slice).unwrap_or_default();
        if mounts.iter().any(|mount| mount["destination"] == "/sbin/docker-init") {
            let reason = "it has an init process of the node (\"init\" in Docker's settings)".to_owned();
            return Err(self.care.unfit(name, vec![reason]));
        }
        let inside = MountNamespace::of(look.pid)
            .map_err(|source| io_error(name, "look at its mounts".into(), source))?;
        let places = mounts.iter().filter_map(|mount| Some(mount["destination"].as_str()?.to_owned()));
        if let Some(objection) = bound::mounted_below(inside.mountinfo(), &of_node, &places.collect()) {
            return Err(self.care.unfit(name, vec![objection]));
        }
        let process = &spec["process"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let texts =
            |value: &Value| -> Vec<String> { value.as_array().into_iter().flatten().map(text).collect() };
        let number = |value: &Value| u32::try_from(value.as_u64().unwrap_or(0)).unwrap_or(0);
        let groups = process["user"]["additionalGids"].as_array().into_iter().flatten();
        let resources = &spec["linux"]["resources"];
        let (quota, period) = (resources["cpu"]["quota"].as_u64(), resources["cpu"]["period"].as_u64());
        let millis = quota.unwrap_or(0).saturating_mul(1000) / period.unwrap_or(100_000).max(1);
        let (name_of_image, id) = &definition.image;
        let known = self.image(name, id).await?.and_then(|image| image.repo_digests).unwrap_or_default();
        Ok(Found {
            // Without it, the image comes from its node.
            image_digest: digest_at_registry(name_of_image, &known),
            name: definition.name.clone(),
            image: definition.image.0.clone(),
            image_id: definition.image.1.clone(),
            pid: look.pid,
            command: texts(&process["args"]),
            env: texts(&process["env"]),
            hostname: text(&spec["hostname"]),
            user: User {
                uid: number(&process["user"]["uid"]),
                gid: number(&process["user"]["gid"]),
                groups: groups.map(number).collect(),
            },
            workdir: text(&process["cwd"]).into(),
            memory_bytes: resources["memory"]["limit"].as_u64().unwrap_or(0),
            cpu_millis: u32::try_from(millis).unwrap_or(0),
            mounts: of_node,
            networks: look.networks,
            aliases: inspected.aliases(),
            ports: inspected.ports(),
            kept: Kept { keeper: Keeper::Docker, id: inspected.id.clone(), definition: definition.value() },
        })
    }

    /// What a container's runtime was given: containerd's shim works in the directory with it.
    fn spec_of(&self, name: &ServiceName, shim: u32) -> Result<Value, EngineError> {
        let path = PathBuf::from(format!("/proc/{shim}/cwd/config.json"));
        let spec = fs::read(&path).and_then(|text| Ok(serde_json::from_slice(&text)?));
        spec.map_err(|source| io_error(name, format!("read {}", path.display()), source))
    }

    /// What speaks against moving the volumes of a container, those that are here, of which each may have so many users.
    pub(super) async fn volume_objections(
        &self,
        name: &ServiceName,
        volumes: &[String],
        most_users: usize,
    ) -> Result<Vec<String>, EngineError> {
        let device = |path: &Path| fs::metadata(path).map(|found| found.dev()).ok();
        let storage = self.info(name).await?.docker_root_dir.clone();
        let mut found = Vec::new();
        for volume in volumes {
            let Some(told) = self.volume(name, volume).await? else { continue };
            if told.driver != "local" || told.options.is_some_and(|options| !options.is_empty()) {
                found.push(format!("its volume {volume} is not one of Docker's own driver without options"));
            }
            if device(&told.mountpoint) != device(&storage) || !told.mountpoint.starts_with(&storage) {
                found.push(format!("its volume {volume} is on another filesystem than Docker's storage"));
            }
            let users = filtered("/containers/json?all=1&", "volume", volume);
            let users: Vec<Value> =
                self.api.get(&users).await.map_err(self.failed(name, "list who shares a volume with"))?;
            if users.len() > most_users {
                found.push(format!("another container uses its volume {volume}"));
            }
        }
        Ok(found)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn names_are_all_but_the_id_and_the_file_of_name_servers_is_dockers_own() {
        let id = format!("db{}", "0".repeat(62));
        let inspected = |path: String, dns: Value| -> Inspected {
            let state =
                json!({ "Running": true, "Paused": false, "Restarting": false, "Pid": 1, "ExitCode": 0 });
            let networks = json!({ "app": {
                "Aliases": ["db", &id[..12], ""], "DNSNames": ["shop-db-1", "db", &id[..12]],
            } });
            let all = json!({
                "Id": id, "Name": "/n", "Image": "x", "State": state, "Config": { "Hostname": "broker" },
                "HostConfig": { "Dns": dns }, "NetworkSettings": { "Networks": networks }, "ResolvConfPath": path,
            });
            serde_json::from_value(all).unwrap()
        };
        let own = format!("/var/lib/docker/containers/{id}/resolv.conf");
        let found = inspected(own.clone(), Value::Null);
        assert_eq!(found.aliases(), ["db", "shop-db-1", "db", "broker"]);
        assert_eq!(found.resolver(), Some(own.clone().into()));
        // Docker names here what a user has mounted there, be it the node's own.
        assert_eq!(inspected("/etc/resolv.conf".into(), Value::Null).resolver(), None);
        assert_eq!(inspected(own, json!(["192.0.2.1"])).resolver(), None);
    }

    #[test]
    fn a_setting_that_is_not_known_is_named_and_one_that_is_not_set_is_not() {
        let inspected = |host: Value| -> Inspected {
            let state =
                json!({ "Running": true, "Paused": false, "Restarting": false, "Pid": 1, "ExitCode": 0 });
            let all = json!({
                "Id": "i", "Name": "/n", "Image": "x", "State": state, "Config": {}, "HostConfig": host, "NetworkSettings": {},
            });
            serde_json::from_value(all).unwrap()
        };
        let known = json!({ "Memory": 5, "CpuShares": 2, "BlkioWeight": 0, "CpuRealtimePeriod": null, "Runtime": "runc" });
        assert_eq!(inspected(known).unknown_settings(), [""; 0]);
        let unknown = inspected(json!({ "BlkioWeight": 300, "Memory": 5 })).unknown_settings();
        assert!(unknown.len() == 1 && unknown[0].contains("BlkioWeight"), "{unknown:?}");
    }
}
