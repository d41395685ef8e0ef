//! What a lab shall look like: names, nodes, links, programs; and where its parts lie.

use std::{
    collections::BTreeMap,
    fmt,
    net::Ipv4Addr,
    path::{Path, PathBuf},
    str::FromStr,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    error::LabError,
    spec::Machine,
    units::{read_delay, read_rate, write_delay, write_rate},
};

/// The host outside the nodes from which clients use the services.
pub const CLIENT: &str = "client";
/// The namespace the link program lives in.
pub(crate) const SWITCH: &str = "sw";
/// The interface of every host.
pub const UPLINK: &str = "uplink0";
/// Prefix length of the underlay 10.99.0.0.
pub(crate) const UNDERLAY_PREFIX: u8 = 24;
/// The subnet of the services, reached by the client on its uplink.
pub const SERVICE_SUBNET: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 88, 0, 0), 16);
/// Where `godwit network create` takes subnets from, which the client reaches on its uplink as well.
pub const MORE_SUBNETS: (Ipv4Addr, u8) = (Ipv4Addr::new(10, 89, 0, 0), 16);
/// Address of the client host.
pub const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 100);
/// TCP port of a daemon's peer API.
pub const PEER_PORT: u16 = 7117;
/// Nodes have .11 to .90 of the underlay.
const MAX_NODES: usize = 80;
const FIRST_NODE: u8 = 11;

/// A shaped access link: every host has one to the lab's switch.
///
/// The rate holds for each direction of each access link, in bits per second on the wire
/// (Ethernet preamble, checksum and gap included). The delay is added once, on the way from the
/// switch to the host, so it is the one-way delay between any two hosts; a ping takes twice as long.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Link {
    /// Bits per second.
    pub rate: u64,
    /// One-way delay between any two hosts.
    pub delay: Duration,
}

impl From<Link> for String {
    fn from(link: Link) -> Self {
        link.to_string()
    }
}

impl TryFrom<String> for Link {
    type Error = LabError;
    fn try_from(text: String) -> Result<Self, LabError> {
        text.parse()
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_rate(f, self.rate)?;
        if self.delay.is_zero() {
            return Ok(());
        }
        f.write_str(",")?;
        write_delay(f, self.delay)
    }
}

impl FromStr for Link {
    type Err = LabError;

    /// Reads `<rate>[,<delay>]`: `1gbit,1ms`, `500mbit`, `11.5mbit,120ms`, `1gbit,250us`.
    fn from_str(text: &str) -> Result<Self, LabError> {
        let bad = |reason| LabError::BadLink { given: text.to_owned(), reason };
        let (rate, delay) = match text.split_once(',') {
            Some((rate, delay)) => (rate, Some(delay)),
            None => (text, None),
        };
        let rate = read_rate(rate.trim()).map_err(bad)?;
        let delay = delay.map_or(Ok(Duration::ZERO), |delay| read_delay(delay.trim())).map_err(bad)?;
        Ok(Self { rate, delay })
    }
}

/// Where the programs are that a lab starts. Of these, machines take only arguments and environment: their programs
/// come from packages.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Programs {
    /// Directory of `godwitd` and `godwit-lab-link`; none: beside the running program.
    pub directory: Option<PathBuf>,
    /// Directory of `godwitd` and the programs that it starts of each node that has others: those of another release.
    #[serde(default)]
    pub of_nodes: BTreeMap<String, PathBuf>,
    /// CRIU for the daemons; none: their own default.
    pub criu: Option<PathBuf>,
    /// runc for the daemons; none: their own default.
    pub runc: Option<PathBuf>,
    /// Further arguments of `godwitd serve`, for tests.
    pub serve_arguments: Vec<String>,
    /// Words of a command that becomes `godwitd serve` (by exec) when it has been given its command line, for tests.
    #[serde(default)]
    pub serve_through: Vec<String>,
    /// Further environment of `godwitd serve`, for tests.
    pub serve_environment: Vec<(String, String)>,
}

/// The switch of the nodes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum NetworkBackend {
    /// The kernel's bridge
    #[default]
    Kernel,
    /// Open vSwitch, one for each node
    #[value(name = "openvswitch")]
    OpenVswitch,
}

impl fmt::Display for NetworkBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::OpenVswitch => "openvswitch",
        })
    }
}

impl FromStr for NetworkBackend {
    type Err = LabError;

    fn from_str(text: &str) -> Result<Self, LabError> {
        <Self as clap::ValueEnum>::from_str(text, false).map_err(|_| LabError::BadBackend(text.to_owned()))
    }
}

/// What [`crate::Lab::up`] shall make.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct LabConfig {
    /// Name of the lab.
    pub name: String,
    /// Names of the nodes; the first founds the cluster.
    pub nodes: Vec<String>,
    /// Those of the nodes that are virtual machines; the others are network namespaces.
    #[serde(default)]
    pub machines: BTreeMap<String, Machine>,
    /// Directory of godwit's packages, which machines have installed; none: they have no godwit.
    #[serde(default)]
    pub packages: Option<PathBuf>,
    /// Shape of the links; none: as fast as the machine, no delay.
    pub link: Option<Link>,
    /// Whether `godwitd` runs on each node.
    pub daemons: bool,
    /// The switch of the nodes.
    #[serde(default)]
    pub network_backend: NetworkBackend,
    /// The programs to start.
    #[serde(default)]
    pub programs: Programs,
}

impl LabConfig {
    /// A lab with daemons and unshaped links.
    pub fn new<N: Into<String>>(name: impl Into<String>, nodes: impl IntoIterator<Item = N>) -> Self {
        Self {
            name: name.into(),
            nodes: nodes.into_iter().map(Into::into).collect(),
            machines: BTreeMap::new(),
            packages: None,
            link: None,
            daemons: true,
            network_backend: NetworkBackend::default(),
            programs: Programs::default(),
        }
    }

    /// Checks the names and the number of nodes.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn validate(&self) -> Result<(), LabError> {
        check_lab_name(&self.name)?;
        if self.nodes.is_empty() || self.nodes.len() > MAX_NODES {
            return Err(LabError::NodeCount(self.nodes.len()));
        }
        for (index, node) in self.nodes.iter().enumerate() {
            check_node_name(node)?;
            if self.nodes.iter().take(index).any(|other| other == node) {
                return Err(LabError::DuplicateNode(node.clone()));
            }
        }
        if let Some(stranger) = self.machines.keys().find(|name| !self.nodes.contains(name)) {
            return Err(LabError::UnknownHost {
                lab: self.name.clone(),
                host: stranger.clone(),
                hosts: self.nodes.join(", "),
            });
        }
        if self.daemons && self.packages.is_none() && !self.machines.is_empty() {
            return Err(LabError::NoPackages);
        }
        Ok(())
    }

    /// The hosts with their underlay addresses: the nodes in order, then the client.
    pub fn hosts(&self) -> Vec<(String, Ipv4Addr)> {
        let nodes = self
            .nodes
            .iter()
            .zip(FIRST_NODE..)
            .map(|(node, last)| (node.clone(), Ipv4Addr::new(10, 99, 0, last)));
        nodes.chain([(CLIENT.to_owned(), CLIENT_ADDRESS)]).collect()
    }

    /// The underlay address of a host.
    pub fn address(&self, host: &str) -> Option<Ipv4Addr> {
        self.hosts().into_iter().find(|(name, _)| name == host).map(|(_, address)| address)
    }
}

/// A lab's name is part of paths and namespace names. It may hold hyphens because node names may
/// not: `gwl-<lab>-<host>` stays unambiguous.
pub(crate) fn check_lab_name(name: &str) -> Result<(), LabError> {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase());
    let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
    if first && rest && name.len() <= 24 && !name.ends_with('-') {
        Ok(())
    } else {
        Err(LabError::BadLabName(name.to_owned()))
    }
}

/// A node's name is part of interface names, so it is short.
fn check_node_name(name: &str) -> Result<(), LabError> {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_lowercase());
    let rest = name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if first && rest && name.len() <= 12 && ![CLIENT, SWITCH, "link", "pids"].contains(&name) {
        Ok(())
    } else {
        Err(LabError::BadNodeName(name.to_owned()))
    }
}

/// Where the parts of one lab lie.
#[derive(Clone, Debug)]
pub(crate) struct Paths {
    name: String,
}

pub(crate) const STATE_ROOT: &str = "/var/lib/godwit/labs";
pub(crate) const RUN_ROOT: &str = "/run/godwit/labs";
pub(crate) const NETNS_ROOT: &str = "/run/netns";
pub(crate) const CGROUP_ROOT: &str = "godwit-lab";

impl Paths {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// Survives a reboot: node state, logs, the registry.
    pub(crate) fn state(&self) -> PathBuf {
        Path::new(STATE_ROOT).join(&self.name)
    }

    /// Gone after a reboot: sockets, pid records, mounts.
    pub(crate) fn run(&self) -> PathBuf {
        Path::new(RUN_ROOT).join(&self.name)
    }

    pub(crate) fn node_state(&self, node: &str) -> PathBuf {
        self.state().join(node)
    }

    pub(crate) fn node_run(&self, node: &str) -> PathBuf {
        self.run().join(node)
    }

    pub(crate) fn socket(&self, node: &str) -> PathBuf {
        self.node_run(node).join("godwitd.sock")
    }

    pub(crate) fn log(&self, node: &str) -> PathBuf {
        self.node_state(node).join("godwitd.log")
    }

    /// The image that a node's machine boots, a link.
    pub(crate) fn machine_image(&self, node: &str) -> PathBuf {
        self.node_state(node).join("image")
    }

    /// By what ssh knows a node's machine.
    pub(crate) fn machine_known_hosts(&self, node: &str) -> PathBuf {
        self.machine_image(node).join("known_hosts")
    }

    pub(crate) fn machine_disk(&self, node: &str) -> PathBuf {
        self.node_state(node).join("disk.qcow2")
    }

    /// Where the server of a machine's volatile disk listens.
    pub(crate) fn machine_disk_socket(&self, node: &str) -> PathBuf {
        self.node_run(node).join("disk.sock")
    }

    pub(crate) fn machine_disk_pid(&self, node: &str) -> PathBuf {
        self.node_run(node).join("disk.pid")
    }

    /// What a node's machine wrote on its serial console.
    pub(crate) fn machine_console(&self, node: &str) -> PathBuf {
        self.node_state(node).join("console.log")
    }

    /// What the emulator of a node's machine, and ssh to it, complained about.
    pub(crate) fn machine_log(&self, node: &str) -> PathBuf {
        self.node_state(node).join("machine.log")
    }

    pub(crate) fn machine_monitor(&self, node: &str) -> PathBuf {
        self.node_run(node).join("monitor.sock")
    }

    /// Of the connection that commands in a node's machine share.
    pub(crate) fn machine_connection(&self, node: &str) -> PathBuf {
        self.node_run(node).join("ssh.sock")
    }

    /// Where the sockets and the database of a node's Open vSwitch are.
    pub(crate) fn openvswitch(&self, node: &str) -> PathBuf {
        self.node_run(node).join("openvswitch")
    }

    pub(crate) fn openvswitch_log(&self, node: &str) -> PathBuf {
        self.node_state(node).join("openvswitch.log")
    }

    pub(crate) fn registry(&self) -> PathBuf {
        self.state().join("lab.json")
    }

    pub(crate) fn link_socket(&self) -> PathBuf {
        self.run().join("link.sock")
    }

    pub(crate) fn link_log(&self) -> PathBuf {
        self.state().join("link.log")
    }

    /// Pid records, one file for each program that the lab started.
    pub(crate) fn pids(&self) -> PathBuf {
        self.run().join("pids")
    }

    /// Path below each cgroup hierarchy's root.
    pub(crate) fn cgroup(&self) -> PathBuf {
        Path::new(CGROUP_ROOT).join(&self.name)
    }

    pub(crate) fn netns_name(&self, host: &str) -> String {
        format!("gwl-{}-{host}", self.name)
    }

    pub(crate) fn netns(&self, host: &str) -> PathBuf {
        Path::new(NETNS_ROOT).join(self.netns_name(host))
    }
}

/// The lab and host that a namespace name belongs to.
pub(crate) fn parse_netns_name(name: &str) -> Option<(&str, &str)> {
    name.strip_prefix("gwl-")?.rsplit_once('-')
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_and_written() {
        let link: Link = "1gbit,1ms".parse().unwrap();
        assert_eq!(link, Link { rate: 1_000_000_000, delay: Duration::from_millis(1) });
        assert_eq!(link.to_string(), "1gbit,1ms");
        let link: Link = "500Mbit".parse().unwrap();
        assert_eq!(link, Link { rate: 500_000_000, delay: Duration::ZERO });
        assert_eq!(link.to_string(), "500mbit");
        let link: Link = "11.5mbit, 120ms".parse().unwrap();
        assert_eq!(link, Link { rate: 11_500_000, delay: Duration::from_millis(120) });
        assert_eq!(link.to_string().parse::<Link>().unwrap(), link);
        assert_eq!("1gbit,250us".parse::<Link>().unwrap().to_string(), "1gbit,250us");
    }

    #[test]
    fn bad_links_are_refused_with_what_to_write() {
        for text in
            ["", "fast", "1gbit,", "1gbit,1", "-1mbit", "1", "0mbit", "1gbit,1ms,2", "nanmbit", "1gbit,11s"]
        {
            let message = text.parse::<Link>().unwrap_err().to_string();
            assert!(message.contains("1gbit,1ms"), "{text}: {message}");
        }
    }

    #[test]
    fn backends_are_read_and_written() {
        for backend in [NetworkBackend::Kernel, NetworkBackend::OpenVswitch] {
            assert_eq!(backend.to_string().parse::<NetworkBackend>().unwrap(), backend);
            assert_eq!(serde_json::to_value(backend).unwrap(), backend.to_string());
        }
        let message = "ovs".parse::<NetworkBackend>().unwrap_err().to_string();
        assert!(message.contains("openvswitch"), "{message}");
    }

    #[test]
    fn names_are_checked() {
        let lab = |name: &str, nodes: &[&str]| {
            LabConfig::new(name, nodes.iter().copied()).validate().map_err(|error| error.to_string())
        };
        assert!(lab("demo", &["a", "b"]).is_ok());
        assert!(lab("e2e-redis-2", &["node1"]).is_ok());
        for name in ["", "Demo", "-x", "x-", "a/b", "..", "a b", "abcdefghijklmnopqrstuvwxyz"] {
            assert!(lab(name, &["a"]).unwrap_err().contains("cannot name a lab:"), "{name}");
        }
        for node in ["", "client", "sw", "pids", "a-b", "A", "../x", "averylongname1"] {
            assert!(lab("demo", &[node]).unwrap_err().contains("cannot name a lab node"), "{node}");
        }
        assert!(lab("demo", &["a", "a"]).unwrap_err().contains("named twice"));
        assert!(lab("demo", &[]).unwrap_err().contains("1 to 80 nodes"));
    }

    #[test]
    fn namespace_names_tell_labs_apart() {
        let name = Paths::new("x").netns_name("y");
        assert_eq!(parse_netns_name(&name), Some(("x", "y")));
        let name = Paths::new("x-y").netns_name("a");
        assert_eq!(parse_netns_name(&name), Some(("x-y", "a")));
        assert_eq!(parse_netns_name("gw-x-y"), None);
    }
}
