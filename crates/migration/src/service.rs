//! A service as it travels: everything a node has to know to run it, and where its files are there.

use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use godwit_engine::image::{Digest, DigestError, PlatformLayers, bounded_platforms};
use godwit_engine::rootfs::Overlay as RootOverlay;
use godwit_engine::{Confinement, ContainerConfig, Kept, Mount, MountKind, User, files};
use godwit_names::{MAX_ALIASES, ServiceName, VolumeName, is_alias};
use godwit_network::{Protocol, Published, ServiceEndpoint};
use serde::{Deserialize, Serialize};

use crate::follows::Follows;
use crate::restart::Restart;

/// Most mounts of a service: its destination looks at each before it lets the service in, and may have to ask an engine.
const MAX_MOUNTS: usize = 256;

/// One service: the same on whatever node it is, but for paths, which [`Layout`] gives.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Service {
    /// Unique id, made once when the service is created.
    pub id: String,
    /// Name, unique in the cluster.
    pub name: ServiceName,
    /// Address that moves with it, on the first of its networks; `0.0.0.0` in a network namespace that godwit
    /// did not create.
    pub address: Ipv4Addr,
    /// Its addresses on further networks.
    #[serde(default)]
    pub more: Vec<Ipv4Addr>,
    /// What it is plugged into.
    #[serde(default)]
    pub network: Attachment,
    /// What is run when it moves.
    #[serde(default)]
    pub hooks: Hooks,
    /// Counts its moves; the higher epoch is the newer owner.
    pub epoch: u64,
    /// Where its image came from, in the user's words.
    pub image: String,
    /// The digest of what that stood for in its registry when the service was made; none for an image from elsewhere.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_digest: Option<String>,
    /// What other engines know its image by; none where it was not run from an image, or by a release that did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    /// Digests of its layers, lowest first.
    pub layers: Vec<String>,
    /// What its image has for other platforms: layers whose blobs a node keeps to send them to one of such a platform. None of an
    /// image whose service stays on machines of one instruction set. A node that got the service from one that did not send them
    /// may lack them.
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "bounded_platforms")]
    pub platforms: Vec<PlatformLayers>,
    /// Command with arguments.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Mounts beside the root.
    pub mounts: Vec<Mount>,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// Ports of the node that lead into the service.
    pub publish: Vec<Port>,
    /// Host name inside.
    pub hostname: String,
    /// Who runs it.
    pub user: User,
    /// Working directory inside.
    pub workdir: PathBuf,
    /// How its processes are confined.
    #[serde(default = "Confinement::of_older_versions")]
    pub confinement: Confinement,
    /// When it is started again after it has ended.
    #[serde(default)]
    pub restart: Restart,
    /// Whether it is removed once it has ended.
    #[serde(default)]
    pub remove: bool,
    /// The engine of others that keeps its container, if one does: that has its root filesystem, its log and its restart
    /// policy. `layers` has the ID of its image alone then, `mounts` what it has of the node, and `restart` says nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
    /// Names by which services on its networks find it, beside its own, in lower case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub aliases: Vec<String>,
    /// How it follows its clients; none where it moves only when it is told to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<Follows>,
    /// `NAME=VALUE` pairs for people.
    pub labels: Vec<String>,
    /// When it was created, milliseconds since the epoch.
    pub created_ms: i64,
    /// When its main process was started, milliseconds since the epoch.
    pub started_ms: i64,
}

/// What a service is plugged into.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attachment {
    /// Networks of godwit's, on each of which it has an address that moves with it.
    #[default]
    Overlay,
    /// The network namespace that is mounted here, which godwit did not create.
    Namespace(PathBuf),
}

impl Attachment {
    /// The namespace, if godwit did not create it.
    #[must_use]
    pub fn namespace(&self) -> Option<&Path> {
        match self {
            Self::Overlay => None,
            Self::Namespace(path) => Some(path),
        }
    }
}

/// The points of a move at which a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookPoint {
    /// The service runs at the source, and will be frozen next.
    PreFreeze,
    /// It runs at the destination.
    PostResume,
    /// The move was aborted, and it runs at the source.
    Aborted,
}

/// The hooks of a service, by their names in the operator's directory; empty where there is none.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hooks {
    /// For [`HookPoint::PreFreeze`].
    pub pre_freeze: String,
    /// For [`HookPoint::PostResume`].
    pub post_resume: String,
    /// For [`HookPoint::Aborted`].
    // The word of version 0.1, which nodes tell each other.
    #[serde(rename = "kept")]
    pub aborted: String,
}

impl Hooks {
    /// The one for a point.
    #[must_use]
    pub fn of(&self, moment: HookPoint) -> &str {
        match moment {
            HookPoint::PreFreeze => &self.pre_freeze,
            HookPoint::PostResume => &self.post_resume,
            HookPoint::Aborted => &self.aborted,
        }
    }

    /// Those that are there.
    pub fn named(&self) -> impl Iterator<Item = &str> {
        [&self.pre_freeze, &self.post_resume, &self.aborted]
            .into_iter()
            .map(String::as_str)
            .filter(|n| !n.is_empty())
    }
}

impl HookPoint {
    /// Its name, as users write it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::PreFreeze => "pre-freeze",
            Self::PostResume => "post-resume",
            Self::Aborted => "aborted",
        }
    }
}

/// A published port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    /// On the node.
    pub host: u16,
    /// In the container.
    pub container: u16,
    /// UDP instead of TCP.
    pub udp: bool,
}

impl From<Port> for Published {
    fn from(port: Port) -> Self {
        Self {
            host_port: port.host,
            container_port: port.container,
            protocol: if port.udp { Protocol::Udp } else { Protocol::Tcp },
        }
    }
}

impl Service {
    /// Whether it may make devices of its own.
    pub(crate) fn makes_devices(&self) -> bool {
        self.confinement.capabilities.iter().any(|name| name == "CAP_MKNOD")
    }

    /// The digests of all blobs that a node keeps for it: of its layers, and of those of other platforms.
    ///
    /// # Errors
    /// One of its layers has a name that is no digest.
    pub fn blobs(&self) -> Result<Vec<Digest>, DigestError> {
        let own = self.layers.iter().map(|layer| layer.parse());
        let others = self.platforms.iter().flat_map(|platform| &platform.layers).cloned().map(Ok);
        own.chain(others).collect()
    }

    /// What its image has for another machine, as `uname -m` names it.
    #[must_use]
    pub fn platform(&self, machine: &str) -> Option<&PlatformLayers> {
        self.platforms.iter().find(|platform| platform.machine == machine)
    }

    /// Makes the layers that its image has for machine `to` its own, and the present ones those of another platform, `from`.
    /// `false`, and nothing has changed: its image has none for `to`.
    ///
    /// # Errors
    /// One of its layers has a name that is no digest.
    pub fn change_platform(&mut self, from: &str, to: &str) -> Result<bool, DigestError> {
        let Some(at) = self.platforms.iter().position(|platform| platform.machine == to) else {
            return Ok(false);
        };
        let layers = self.layers.iter().map(|layer| layer.parse()).collect::<Result<_, _>>()?;
        // What is no digest was noted of another engine's image.
        let id = self.image_id.as_ref().and_then(|id| id.parse().ok());
        let own = PlatformLayers { machine: from.to_owned(), layers, id };
        let other = std::mem::replace(&mut self.platforms[at], own);
        self.layers = other.layers.iter().map(ToString::to_string).collect();
        self.image_id = other.id.as_ref().map(ToString::to_string);
        Ok(true)
    }

    /// Whether its further names can be such.
    #[must_use]
    pub fn aliases_are_sound(&self) -> bool {
        self.aliases.len() <= MAX_ALIASES && self.aliases.iter().all(|alias| is_alias(alias))
    }

    /// What speaks against its number of mounts.
    #[must_use]
    pub fn mounts_objection(&self) -> Option<String> {
        let count = self.mounts.len();
        (count > MAX_MOUNTS)
            .then(|| format!("it has {count} mounts, and a service can have {MAX_MOUNTS} at most"))
    }

    /// Its volumes.
    pub fn volumes(&self) -> impl Iterator<Item = &VolumeName> {
        self.mounts.iter().filter_map(Mount::volume)
    }

    /// Files of its volumes that are mounted, and not the volume.
    pub fn files_of_volumes(&self) -> impl Iterator<Item = (&VolumeName, &str)> {
        self.mounts.iter().filter_map(|mount| match &mount.kind {
            MountKind::Volume { name, file: Some(file) } => Some((name, file.as_str())),
            _ => None,
        })
    }

    /// Its addresses, one on each of its networks; none in a network namespace that godwit did not create.
    #[must_use]
    pub fn addresses(&self) -> Vec<Ipv4Addr> {
        match self.network {
            Attachment::Overlay => std::iter::once(self.address).chain(self.more.iter().copied()).collect(),
            Attachment::Namespace(_) => Vec::new(),
        }
    }

    /// Converts its times to a clock that is `ahead_ms` ahead of the one by which they were taken.
    pub fn tell_by_clock_ahead(&mut self, ahead_ms: i64) {
        self.created_ms = self.created_ms.saturating_add(ahead_ms);
        self.started_ms = self.started_ms.saturating_add(ahead_ms);
    }

    /// The service's ends of its networks, as many as it has addresses. Published ports lead to the first.
    #[must_use]
    pub fn endpoints(&self) -> Vec<ServiceEndpoint> {
        let published: Vec<_> = self.publish.iter().copied().map(Published::from).collect();
        let endpoint = |(nth, address)| ServiceEndpoint {
            name: self.name.clone(),
            address,
            mac: godwit_network::mac_of(address),
            published: if nth == 0 { published.clone() } else { Vec::new() },
            nth,
        };
        (0..=u8::MAX).zip(self.addresses()).map(endpoint).collect()
    }
}

/// Where a node keeps what belongs to services.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Survives a restart of the machine, e.g. `/var/lib/godwit`.
    pub state: PathBuf,
    /// Does not, e.g. `/run/godwit`.
    pub run: PathBuf,
    /// Where the network namespaces of services are mounted, e.g. `/run/godwit/netns`.
    pub netns: PathBuf,
    /// cgroup path below each hierarchy's root under which services live.
    pub cgroup_parent: String,
}

impl Layout {
    /// Directory of everything a service has on disk.
    #[must_use]
    pub fn service(&self, name: &ServiceName) -> PathBuf {
        self.services().join(name)
    }

    /// Where the directories of services are.
    #[must_use]
    pub fn services(&self) -> PathBuf {
        self.state.join("services")
    }

    /// The directory that takes the changes to the root filesystem.
    #[must_use]
    pub fn upper(&self, service: &Service) -> PathBuf {
        files::upper(&self.service(&service.name), service.volumes().next().is_some())
    }

    /// The engine's directory of a service.
    #[must_use]
    pub fn container(&self, name: &ServiceName) -> PathBuf {
        self.service(name).join("container")
    }

    /// Directory of one migration under way; a tmpfs of its own is mounted there.
    #[must_use]
    pub fn migration(&self, id: &str) -> PathBuf {
        self.run.join("migrations").join(id)
    }

    /// Says that processes may be at rest for a migration, as long as it is there.
    #[must_use]
    pub fn at_rest(&self, id: &str) -> PathBuf {
        self.run.join("at-rest").join(id)
    }

    /// Directory of CRIU's logs of one migration; stays when CRIU failed, so that they can be read.
    #[must_use]
    pub fn criu_logs(&self, id: &str) -> PathBuf {
        self.state.join("criu-logs").join(id)
    }

    /// The root filesystem of a service on this node, given the directories of its layers.
    #[must_use]
    pub fn root(&self, service: &Service, layers: Vec<PathBuf>) -> RootOverlay {
        let directory = self.service(&service.name);
        RootOverlay {
            lower: layers,
            upper: self.upper(service),
            work: directory.join("work"),
            target: directory.join("rootfs"),
        }
    }

    /// The network namespace of a service on this node: its own, or one that godwit did not create.
    #[must_use]
    pub fn namespace(&self, service: &Service) -> PathBuf {
        service.network.namespace().map_or_else(|| self.netns.join(&service.name), Path::to_path_buf)
    }

    /// What the engine is told of a service on this node.
    #[must_use]
    pub fn container_config(&self, service: &Service) -> ContainerConfig {
        ContainerConfig {
            name: service.name.clone(),
            directory: self.container(&service.name),
            rootfs: self.service(&service.name).join("rootfs"),
            network_namespace: self.namespace(service),
            cgroup: format!("{}/{}", self.cgroup_parent.trim_end_matches('/'), service.name),
            command: service.command.clone(),
            env: service.env.clone(),
            mounts: service.mounts.clone(),
            bound: Vec::new(),
            may_have: Vec::new(),
            memory_bytes: service.memory_bytes,
            cpu_millis: service.cpu_millis,
            hostname: service.hostname.clone(),
            user: service.user.clone(),
            workdir: service.workdir.clone(),
            confinement: service.confinement.clone(),
            crosses: !service.platforms.is_empty(),
            kept: service.kept.clone(),
            name_server: None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
pub(crate) mod tests {
    use godwit_engine::MountKind;

    use super::*;

    #[test]
    fn a_service_has_no_more_mounts_than_a_destination_looks_at() {
        let mount = Mount {
            kind: godwit_engine::MountKind::Tmpfs { size_bytes: 0 },
            target: "/data".into(),
            read_only: false,
        };
        let with = |count| Service { mounts: vec![mount.clone(); count], ..service() };
        assert_eq!(with(MAX_MOUNTS).mounts_objection(), None);
        assert!(with(MAX_MOUNTS + 1).mounts_objection().unwrap().contains("it has 257 mounts"));
    }

    pub(crate) fn service() -> Service {
        Service {
            id: "01SERVICE".into(),
            name: "redis".parse().unwrap(),
            address: Ipv4Addr::new(10, 88, 0, 10),
            more: vec![Ipv4Addr::new(10, 89, 0, 10)],
            network: Attachment::Overlay,
            hooks: Hooks::default(),
            epoch: 3,
            image: "/images/redis.tar".into(),
            image_digest: None,
            image_id: None,
            layers: vec!["sha256:00".into()],
            platforms: Vec::new(),
            command: vec!["redis-server".into()],
            env: vec!["A=b".into()],
            mounts: vec![Mount {
                kind: MountKind::Tmpfs { size_bytes: 1 << 20 },
                target: "/scratch".into(),
                read_only: false,
            }],
            memory_bytes: 1 << 28,
            cpu_millis: 1500,
            publish: vec![Port { host: 16379, container: 6379, udp: false }],
            hostname: "redis".parse().unwrap(),
            user: User { uid: 100, gid: 101, groups: vec![4] },
            workdir: "/data".into(),
            confinement: Confinement::default(),
            restart: Restart::OnFailure(3),
            remove: false,
            kept: None,
            aliases: Vec::new(),
            follows: None,
            labels: vec!["tier=cache".into()],
            created_ms: 1,
            started_ms: 2,
        }
    }

    #[test]
    fn a_service_is_the_same_after_its_way_over_the_wire() {
        let text = serde_json::to_string(&service()).unwrap();
        assert_eq!(serde_json::from_str::<Service>(&text).unwrap(), service());
    }

    fn digest(of: &str) -> Digest {
        Digest::of(of.as_bytes())
    }

    /// Of an image for two platforms, on an x86-64 node.
    fn for_two_platforms() -> Service {
        let (layers, id) = (vec![digest("common"), digest("arm64")], Some(digest("configuration of arm64")));
        let arm64 = PlatformLayers { machine: "aarch64".into(), layers, id };
        let own = ["common", "amd64"].map(|layer| digest(layer).to_string());
        let image_id = Some(digest("configuration of amd64").to_string());
        Service { layers: own.into(), image_id, platforms: vec![arm64], ..service() }
    }

    #[test]
    fn a_service_of_one_platform_is_for_older_nodes_what_it_was() {
        let text = serde_json::to_string(&service()).unwrap();
        assert!(!text.contains("platforms"), "{text}");
        assert_eq!(serde_json::from_str::<Service>(&text).unwrap().platforms, []);
        let text = serde_json::to_string(&for_two_platforms()).unwrap();
        assert_eq!(serde_json::from_str::<Service>(&text).unwrap(), for_two_platforms());
    }

    #[test]
    fn a_service_with_platforms_that_cannot_be_is_not_read() {
        let refused = |platforms: serde_json::Value| {
            let mut other = serde_json::to_value(service()).unwrap();
            other["platforms"] = platforms;
            serde_json::from_value::<Service>(other).unwrap_err().to_string()
        };
        let platform = |machine: &str, layers: usize| serde_json::json!({"machine": machine, "layers": vec![digest("x"); layers]});
        for (platforms, why) in [
            (vec![platform("aarch64", 1), platform("aarch64", 1)], "aarch64 is among the platforms twice"),
            (vec![platform("aarch64", 201)], "201 layers for aarch64, and at most 200 can be stacked"),
            (vec![platform("../x", 1)], r#""../x" cannot be the name of a machine"#),
            (vec![platform(&"m".repeat(33), 1)], "cannot be the name of a machine"),
            ((0..5).map(|nth| platform(&format!("m{nth}"), 1)).collect(), "5 further platforms"),
            (
                vec![serde_json::json!({"machine": "aarch64", "layers": ["../x"]})],
                r#""../x" is not a digest"#,
            ),
        ] {
            let said = refused(platforms.into());
            assert!(said.contains(why), "{said}");
        }
    }

    #[test]
    fn a_service_that_changes_its_platform_can_change_back() {
        let mut moved = for_two_platforms();
        assert_eq!(moved.platform("aarch64").unwrap().layers, [digest("common"), digest("arm64")]);
        assert_eq!(moved.blobs().unwrap().len(), 4);
        assert!(moved.change_platform("x86_64", "aarch64").unwrap());
        assert_eq!(moved.layers, ["common", "arm64"].map(|layer| digest(layer).to_string()));
        assert_eq!(moved.image_id, Some(digest("configuration of arm64").to_string()));
        assert_eq!(moved.platform("x86_64").unwrap().layers, [digest("common"), digest("amd64")]);
        assert!(moved.platform("aarch64").is_none() && moved.blobs().unwrap().len() == 4);
        assert!(!moved.clone().change_platform("aarch64", "riscv64").unwrap());
        assert!(moved.change_platform("aarch64", "x86_64").unwrap());
        assert_eq!(moved, for_two_platforms());
    }

    #[test]
    fn a_service_with_a_name_that_is_a_path_is_not_read() {
        let mut other = serde_json::to_value(service()).unwrap();
        other["name"] = "../x".into();
        let error = serde_json::from_value::<Service>(other).unwrap_err().to_string();
        assert!(error.contains(r#""../x" cannot be a service's name"#), "{error}");
    }

    #[test]
    fn a_service_is_as_old_after_a_move_to_another_clock_as_before() {
        let mut moved = service();
        moved.tell_by_clock_ahead(-3_600_000);
        assert_eq!((moved.created_ms, moved.started_ms), (1 - 3_600_000, 2 - 3_600_000));
    }

    #[test]
    fn a_service_of_an_older_node_is_confined_as_it_was_there() {
        let mut older = serde_json::to_value(service()).unwrap();
        older.as_object_mut().unwrap().remove("confinement").unwrap();
        let read: Service = serde_json::from_value(older).unwrap();
        assert_eq!(read.confinement, Confinement::of_older_versions());
    }

    #[test]
    fn a_service_has_an_endpoint_for_each_address_and_its_ports_at_the_first() {
        let endpoints = service().endpoints();
        let shown: Vec<_> = endpoints.iter().map(|e| (e.nth, e.address, e.published.len())).collect();
        assert_eq!(shown, [(0, [10, 88, 0, 10].into(), 1), (1, [10, 89, 0, 10].into(), 0)]);
        let elsewhere = Service { network: Attachment::Namespace("/run/netns/x".into()), ..service() };
        assert!(elsewhere.endpoints().is_empty() && elsewhere.addresses().is_empty());
    }

    #[test]
    fn nodes_that_share_a_machine_share_no_path_and_no_cgroup() {
        let layout = |node: &str| Layout {
            state: format!("/var/lib/lab/{node}").into(),
            run: format!("/run/lab/{node}").into(),
            netns: format!("/run/lab/{node}/netns").into(),
            cgroup_parent: format!("/lab/{node}/"),
        };
        let config = |node: &str| layout(node).container_config(&service());
        let (a, b) = (config("a"), config("b"));
        assert_eq!(a.cgroup, "/lab/a/redis");
        assert_ne!(a.cgroup, b.cgroup);
        assert_ne!(a.directory, b.directory);
        assert_ne!(a.rootfs, b.rootfs);
        assert_ne!(a.network_namespace, b.network_namespace);
        assert_ne!(layout("a").migration("1"), layout("b").migration("1"));
    }
}
