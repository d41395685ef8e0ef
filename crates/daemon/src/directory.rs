//! What this node knows of the cluster: its nodes, where services are, and its networks.

use godwit_api::v1::{Network, NodeInfo, NodeNetwork};
use godwit_migration::message::Versions;
use godwit_migration::terms::OverlayTerms;
use godwit_names::ServiceName;
use godwit_network::mac_to_string;
use godwit_transfer::certificate::CA_KEY_FILE;
use tonic::Status;

use crate::node::Node;
use crate::peers::IDENTITY;
use crate::state::{StateError, now_ms};
use crate::status::internal;

/// The name of the network that every cluster has.
pub(crate) const FIRST: &str = "default";
/// A peer not heard from for this long is shown as unreachable.
pub(crate) const UNREACHABLE_MS: i64 = 5_000;

/// What this node tells of itself.
pub(crate) fn own_info(node: &Node) -> Result<NodeInfo, StateError> {
    let uname = nix::sys::utsname::uname();
    let release = uname.map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default();
    Ok(NodeInfo {
        name: node.name.clone(),
        address: node.member_address(&node.name)?.unwrap_or_default(),
        state: "ready".into(),
        reason: String::new(),
        version: env!("CARGO_PKG_VERSION").into(),
        arch: std::env::consts::ARCH.into(),
        kernel: release,
        memory_bytes: total_memory(),
        memory_available_bytes: godwit_migration::machine::available_memory(),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        services: u32::try_from(node.state.services()?.len()).unwrap_or(u32::MAX),
        last_seen_ms: now_ms(),
        is_self: true,
        network: Some(own_network(node)),
        authority: node.local().layout.state.join(IDENTITY).join(CA_KEY_FILE).exists(),
        clock_ahead_ms: 0,
        criu: node.criu().known_version().map(|version| version.to_string()).unwrap_or_default(),
        oldest_protocol: Versions::OWN.oldest(),
        newest_protocol: Versions::OWN.newest(),
        busy_permille: node.load.busy_permille(),
        cordoned: node.state.is_cordoned()?,
    })
}

/// The release of another node's godwit, where that has told it.
pub(crate) fn release_of(node: &Node, of: &str) -> Option<String> {
    node.last_seen(of).map(|info| info.version).filter(|version| !version.is_empty())
}

/// Why a node does not do what a user wants with its service: its older godwitd `lacks` that.
pub(crate) fn too_old(node: &Node, name: &ServiceName, owner: &str, lacks: &str) -> Status {
    let release = release_of(node, owner).map(|release| format!(" {release}")).unwrap_or_default();
    Status::failed_precondition(format!(
        "service {name} is on node {owner}, whose godwitd{release} is older and {lacks}: install the same release on both nodes"
    ))
}

/// All nodes as this one sees them.
pub(crate) fn nodes(node: &Node) -> Result<Vec<NodeInfo>, StateError> {
    node.state
        .members()?
        .into_iter()
        .map(|member| {
            if member.name == node.name {
                return own_info(node);
            }
            let silent = NodeInfo { name: member.name.clone(), ..NodeInfo::default() };
            let mut info = node.last_seen(&member.name).unwrap_or(silent);
            info.address = member.address;
            if info.last_seen_ms != 0 {
                let speaks = Versions::told(info.oldest_protocol, info.newest_protocol);
                (info.oldest_protocol, info.newest_protocol) = (speaks.oldest(), speaks.newest());
            }
            let age = now_ms() - info.last_seen_ms;
            if info.last_seen_ms == 0 {
                info.state = "unreachable".into();
                info.reason = "never heard from since godwitd was started".into();
            } else if age > UNREACHABLE_MS {
                info.state = "unreachable".into();
                info.reason = format!("last heard from {} s ago", age / 1000);
            }
            Ok(info)
        })
        .collect()
}

/// The memory of this machine, bytes.
pub(crate) fn total_memory() -> u64 {
    nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total())
}

/// What this node tells others of its overlay.
fn own_network(node: &Node) -> NodeNetwork {
    let overlay = node.networks().first();
    let OverlayTerms { mtu, vxlan_port, encryption, prefix6 } = OverlayTerms::of(overlay);
    NodeNetwork { mtu, vxlan_port, encryption, prefix6, uplink_mac: mac_to_string(overlay.uplink_mac()) }
}

/// The node that has the service, when that is another one.
pub(crate) fn elsewhere(node: &Node, name: &ServiceName) -> Result<Option<(String, String)>, Status> {
    if node.state.service(name).map_err(internal)?.is_some() {
        return Ok(None);
    }
    let Some(placement) = node.placement(name).map_err(internal)? else { return Ok(None) };
    let address = node.member_address(&placement.node).map_err(internal)?;
    Ok(address.filter(|_| placement.node != node.name).map(|address| (placement.node, address)))
}

/// The networks there are, the first one first.
pub(crate) fn known_networks(node: &Node) -> Result<Vec<Network>, StateError> {
    let networks = node.state.networks()?.into_iter().filter(|network| !network.removed);
    Ok(std::iter::once(first_network(node)).chain(networks).collect())
}

fn first_network(node: &Node) -> Network {
    let config = node.networks().first().config();
    Network {
        name: FIRST.into(),
        subnet: config.subnet.to_string(),
        subnet6: config.prefix6.map(|prefix| prefix.to_string()).unwrap_or_default(),
        vni: config.vni,
        ..Network::default()
    }
}

/// The network of that name; `default` when none is given.
pub(crate) fn find_network(node: &Node, name: &str) -> Result<Network, Status> {
    let name = if name.is_empty() { FIRST } else { name };
    let known = known_networks(node).map_err(internal)?;
    known.into_iter().find(|network| network.name == name).ok_or_else(|| {
        let instead = match name {
            "host" => "a service moves with an address of its own: leave --network out, and publish its ports with -p",
            "none" => "a service has an address wherever it is: leave --network out, and publish no ports",
            "bridge" | "private" | "slirp4netns" | "pasta" => "leave --network out",
            _ => "`godwit network ls` lists all networks",
        };
        Status::not_found(format!("there is no network {name}; {instead}"))
    })
}
