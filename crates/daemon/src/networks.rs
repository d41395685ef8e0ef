//! The cluster's networks: made, listed and removed by users, and the same on every node.
//!
//! The first one, `default`, is what the daemons were started with. Others are entries of the state that
//! nodes tell each other; each node brings up what it hears of and takes down what was removed
//! ([`reconcile`]). To make or remove one all nodes are asked, and have to be there: a node that is not asked
//! could have services on another network of that name or subnet.

use std::collections::HashSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use godwit_api::v1::{
    self as api, Network, NetworkCreateRequest, NetworkEntry, Placement, RunRequest, ServiceNetwork,
};
use godwit_migration::{Attachment, Service, error_chain};
use godwit_network::{Between, NetworkError, OverlayConfig, Prefix6, Subnet, mac_of, mac_to_string};
use tonic::Status;

use crate::node::Node;
use crate::services::status;
use crate::state::{State, StateError};
use crate::{cluster, convert, forward, network};

/// The name of the network that every cluster has.
pub(crate) const FIRST: &str = "default";
/// The third byte of the subnets that networks get, 10.89.N.0/24.
const SUBNETS: std::ops::RangeInclusive<u8> = 0..=255;
/// VXLAN network identifiers have 24 bits (RFC 7348).
const MOST_VNI: u32 = (1 << 24) - 1;
/// Of so many free addresses one is taken when another node was about to take the first.
const SPREAD: usize = 64;
/// Interfaces of a service.
const MOST_NETWORKS: usize = 16;

fn internal(error: impl std::error::Error + 'static) -> Status {
    status(Status::internal, &error)
}

fn invalid(error: impl std::error::Error + 'static) -> Status {
    status(Status::invalid_argument, &error)
}

/// A network as it is to be brought up beside the first.
fn config(first: &OverlayConfig, network: &Network) -> Result<OverlayConfig, NetworkError> {
    let prefix6 = Some(&network.subnet6).filter(|text| !text.is_empty());
    let prefix6 = prefix6.map(|text| text.parse::<Prefix6>()).transpose()?;
    if !(1..=MOST_VNI).contains(&network.vni) {
        return Err(NetworkError::BadVni { vni: network.vni, most: MOST_VNI });
    }
    Ok(first.beside(network.subnet.parse()?, prefix6, network.vni))
}

/// The networks there are, the first one first.
fn known(node: &Node) -> Result<Vec<Network>, StateError> {
    let networks = node.state.networks()?.into_iter().filter(|network| !network.removed);
    Ok(std::iter::once(first(node)).chain(networks).collect())
}

fn first(node: &Node) -> Network {
    let config = node.networks().first().config();
    Network {
        name: FIRST.into(),
        subnet: config.subnet.to_string(),
        subnet6: config.prefix6.map(|prefix| prefix.to_string()).unwrap_or_default(),
        vni: config.vni,
        ..Network::default()
    }
}

/// What must not reach each other, before anything is up: the networks that are to be.
pub(crate) fn between(state: &State, first: &OverlayConfig) -> Result<Vec<Between>, StateError> {
    let networks = state.networks()?.into_iter().filter(|network| !network.removed);
    let others = networks.filter_map(|network| config(first, &network).ok());
    Ok(std::iter::once(Between::of(first)).chain(others.map(|config| Between::of(&config))).collect())
}

/// Brings up what is not up yet, and takes down what was removed; why not, network by network.
pub(crate) async fn reconcile(node: &Arc<Node>) -> Result<Vec<(Network, String)>, StateError> {
    let networks = node.networks();
    let mut failed = Vec::new();
    let wanted: Vec<_> = known(node)?.into_iter().skip(1).collect();
    let is = |up: &OverlayConfig, network: &Network| {
        up.vni == network.vni && network.subnet.parse().is_ok_and(|subnet: Subnet| subnet == up.subnet)
    };
    for up in networks.all().into_iter().skip(1) {
        let subnet = up.config().subnet;
        let used = node.state.services()?.into_iter().any(|owned| is_on(&owned.service, subnet));
        // A service that is on it all the same, as nodes did not hear of each other, keeps its network.
        if !wanted.iter().any(|network| is(up.config(), network))
            && !used
            && let Err(error) = networks.remove(subnet).await
        {
            tracing::error!(%subnet, error = %error_chain(&error), "a network that was removed cannot be taken down");
        }
    }
    let missing = wanted.into_iter().filter(|network| {
        let all = networks.all();
        !all.iter().any(|up| is(up.config(), network))
    });
    let mut raised = false;
    for network in missing {
        // Before a frame can pass.
        network::guard(node).await?;
        let added = match config(networks.first().config(), &network) {
            Ok(config) => networks.add(config).await,
            Err(error) => Err(error),
        };
        match added {
            Ok(_) => raised = true,
            Err(error) => failed.push((network, error_chain(&error))),
        }
    }
    network::guard(node).await?;
    if raised {
        forward::forward_all(node).await?;
    }
    Ok(failed)
}

/// The same, where what fails is for the log: it is tried again.
pub(crate) async fn keep(node: &Arc<Node>) -> Result<(), StateError> {
    for (network, reason) in reconcile(node).await? {
        tracing::error!(network = network.name, %reason, "the network cannot be brought up");
    }
    Ok(())
}

/// Takes over what another node says of a network.
pub(crate) async fn learn(node: &Arc<Node>, told: &[Network]) -> Result<(), StateError> {
    let mut news = false;
    let known = node.state.networks()?;
    for network in told {
        let good = convert::check_name(&network.name).is_ok()
            && network.name != FIRST
            && config(node.networks().first().config(), network).is_ok();
        if !good {
            tracing::warn!(network = network.name, "a peer told of a network that cannot be");
        } else if network.removed && !known.iter().any(|known| known.name == network.name) {
            // There is nothing to remove, and what others still have to hear of would never end.
        } else if node.state.put_network(network)? {
            news = true;
            let action = if network.removed { "removed" } else { "created" };
            node.events.tell("network", action, &network.name, &network.subnet);
        }
    }
    if news { keep(node).await } else { Ok(()) }
}

fn is_on(service: &Service, subnet: Subnet) -> bool {
    service.addresses().into_iter().any(|address| subnet.contains(address))
}

/// The addresses of a placement, in the order of its networks; none in a namespace of somebody else's.
pub(crate) fn addresses_of(placement: &Placement) -> Vec<Ipv4Addr> {
    let texts = std::iter::once(&placement.address).chain(&placement.more);
    texts
        .filter_map(|text| text.parse().ok())
        .filter(|address: &Ipv4Addr| !address.is_unspecified())
        .collect()
}

/// The services with an address in a subnet, wherever they are; without those of another node that asks.
fn services_on(node: &Node, subnet: Subnet, asker: &str) -> Result<Vec<String>, StateError> {
    let placements = node
        .state
        .placements()?
        .into_iter()
        .filter(|placement| !placement.removed && (placement.node != asker || asker == node.name));
    let on = placements.filter(|p| addresses_of(p).into_iter().any(|address| subnet.contains(address)));
    Ok(on.map(|placement| placement.service).collect())
}

/// Why a network cannot be made, or not be removed, as far as this node knows; nothing if it can. Of what
/// node `asker` has, that knows more.
pub(crate) async fn conflict(node: &Node, network: &Network, asker: &str) -> Result<Option<String>, Status> {
    let wanted = config(node.networks().first().config(), network).map_err(invalid)?;
    let known = known(node).map_err(internal)?;
    if network.removed {
        let services = services_on(node, wanted.subnet, asker).map_err(internal)?;
        let here = node.networks().of(wanted.subnet.gateway());
        let busy = match here {
            Ok(overlay) => overlay.list_endpoints().await.map_err(internal)?,
            Err(_) => Vec::new(),
        };
        let plugged = busy.into_iter().filter(|endpoint| endpoint.address.is_some());
        let mut services: Vec<_> = services.into_iter().chain(plugged.map(|found| found.name)).collect();
        services.sort_unstable();
        services.dedup();
        return Ok((!services.is_empty()).then(|| {
            format!("services are on it: {}; remove them first, or leave it", services.join(", "))
        }));
    }
    if let Some(other) = known.iter().find(|other| other.name == network.name) {
        return Ok(Some(format!("there is a network {} already, {}", other.name, other.subnet)));
    }
    for other in &known {
        if other.vni == network.vni {
            return Ok(Some(format!("network {} has the number {} already", other.name, other.vni)));
        }
        if other.subnet.parse().is_ok_and(|other: Subnet| overlap(other, wanted.subnet)) {
            return Ok(Some(format!(
                "{} overlaps {} of the network {}; choose another --subnet",
                network.subnet, other.subnet, other.name
            )));
        }
        if !network.subnet6.is_empty() && other.subnet6 == network.subnet6 {
            return Ok(Some(format!(
                "the network {} has the IPv6 prefix {} already; choose another --subnet6",
                other.name, other.subnet6
            )));
        }
    }
    match node.networks().first().check_beside(&wanted).await {
        Ok(()) => Ok(None),
        Err(error) => Ok(Some(error_chain(&error))),
    }
}

fn overlap(one: Subnet, other: Subnet) -> bool {
    one.overlaps(other.network(), other.prefix())
}

/// Asks all other nodes, each of which has to answer.
async fn ask_all(node: &Arc<Node>, network: &Network) -> Result<(), Status> {
    let doing = if network.removed { "removed" } else { "made" };
    for member in node.state.members().map_err(internal)? {
        if member.name == node.name {
            continue;
        }
        let asked = node.peers.get(&member.name, &member.address).check_network(network.clone()).await;
        let answer = asked.map_err(|error| {
            Status::unavailable(format!(
                "network {} is not {doing}: node {} cannot be asked whether it can be ({}); networks are made and removed on all nodes at once: start godwitd there, and try again",
                network.name, member.name, error.message()
            ))
        })?;
        let conflict = answer.into_inner().conflict;
        if !conflict.is_empty() {
            return Err(Status::failed_precondition(format!(
                "network {} is not {doing}, as node {} says: {conflict}",
                network.name, member.name
            )));
        }
    }
    Ok(())
}

/// Makes a network on all nodes.
pub(crate) async fn create(node: &Arc<Node>, request: NetworkCreateRequest) -> Result<Network, Status> {
    convert::check_network_name(&request.name)?;
    let _alone = node.changing_networks.lock().await;
    let mut network = Network {
        name: request.name,
        id: ulid::Ulid::new().to_string(),
        subnet: request.subnet,
        subnet6: request.subnet6,
        vni: request.vni,
        removed: false,
    };
    let others = known(node).map_err(internal)?;
    if network.vni == 0 {
        network.vni = free_vni(&network.id, &others);
    }
    if network.subnet.is_empty() {
        network.subnet = free_subnet(node, &network, &others).await?;
    }
    if let Some(conflict) = conflict(node, &network, &node.name).await? {
        return Err(Status::already_exists(format!("network {} is not made: {conflict}", network.name)));
    }
    ask_all(node, &network).await?;
    node.state.put_network(&network).map_err(internal)?;
    let failed = reconcile(node).await.map_err(internal)?;
    if let Some((_, reason)) = failed.into_iter().find(|(failed, _)| failed.id == network.id) {
        // Nobody but this node has heard of it for long, and those have no service on it.
        node.state.put_network(&Network { removed: true, ..network.clone() }).map_err(internal)?;
        node.news.notify_one();
        return Err(Status::internal(format!("network {} is not made: {reason}", network.name)));
    }
    // So that who is told that it is there finds it on every node.
    cluster::exchange(node).await.map_err(internal)?;
    node.events.tell("network", "created", &network.name, &network.subnet);
    Ok(network)
}

/// A number that no other network has.
fn free_vni(id: &str, others: &[Network]) -> u32 {
    // FNV-1a, folded to 24 bits.
    let hash =
        id.bytes().fold(0x811c_9dc5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let start = (hash >> 24 ^ hash) & MOST_VNI;
    let mut candidates = (start.max(1)..=MOST_VNI).chain(1..start.max(1));
    candidates.find(|vni| others.iter().all(|other| other.vni != *vni)).unwrap_or(start)
}

async fn free_subnet(node: &Node, network: &Network, others: &[Network]) -> Result<String, Status> {
    for third in SUBNETS {
        let subnet = Subnet::new(Ipv4Addr::new(10, 89, third, 0), 24).map_err(internal)?;
        let taken = others.iter().any(|other| other.subnet.parse().is_ok_and(|other| overlap(other, subnet)));
        let wanted = Network { subnet: subnet.to_string(), ..network.clone() };
        let first = node.networks().first();
        let config = config(first.config(), &wanted).map_err(invalid)?;
        if !taken && first.check_beside(&config).await.is_ok() {
            return Ok(wanted.subnet);
        }
    }
    Err(Status::resource_exhausted("all of 10.89.0.0/16 is taken; give the network a --subnet"))
}

/// Removes a network from all nodes.
pub(crate) async fn remove(node: &Arc<Node>, name: &str) -> Result<(), Status> {
    let _alone = node.changing_networks.lock().await;
    if name == FIRST {
        return Err(Status::invalid_argument(
            "the network default is the cluster's own, and cannot be removed",
        ));
    }
    let network = find(node, name)?;
    let gone = Network { removed: true, ..network };
    if let Some(conflict) = conflict(node, &gone, &node.name).await? {
        return Err(Status::failed_precondition(format!("network {name} is not removed: {conflict}")));
    }
    ask_all(node, &gone).await?;
    node.state.put_network(&gone).map_err(internal)?;
    keep(node).await.map_err(internal)?;
    cluster::exchange(node).await.map_err(internal)?;
    node.events.tell("network", "removed", name, &gone.subnet);
    Ok(())
}

/// The network of that name; `default` when none is given.
pub(crate) fn find(node: &Node, name: &str) -> Result<Network, Status> {
    let name = if name.is_empty() { FIRST } else { name };
    known(node).map_err(internal)?.into_iter().find(|network| network.name == name).ok_or_else(|| {
        Status::not_found(format!("there is no network {name}; `godwit network ls` lists those there are"))
    })
}

/// All networks, with the services on them.
pub(crate) fn list(node: &Node) -> Result<Vec<NetworkEntry>, Status> {
    let entry = |network: Network| {
        let subnet: Subnet = network.subnet.parse().map_err(internal)?;
        let reason = match node.networks().of(subnet.gateway()) {
            Ok(_) => String::new(),
            Err(_) => format!("it is not up on node {}; the log of godwitd there says why", node.name),
        };
        let services = services_on(node, subnet, &node.name).map_err(internal)?;
        Ok(NetworkEntry { network: Some(network), services, reason })
    };
    known(node).map_err(internal)?.into_iter().map(entry).collect()
}

/// What a new service is to be plugged into, with an address on each network; none of those that other nodes have
/// `refused`.
pub(crate) fn attach(
    node: &Node,
    request: &RunRequest,
    refused: &HashSet<Ipv4Addr>,
) -> Result<(Attachment, Vec<Ipv4Addr>), Status> {
    if let [one] = request.networks.as_slice()
        && one.starts_with("ns:")
    {
        if !request.address.is_empty() || !request.publish.is_empty() {
            return Err(Status::invalid_argument(
                "a service in a network namespace of yours has the addresses that you give that; leave out --ip and --publish",
            ));
        }
        return Ok((convert::network(one)?, Vec::new()));
    }
    let named = if request.networks.is_empty() { vec![FIRST.to_owned()] } else { request.networks.clone() };
    if named.len() > MOST_NETWORKS {
        return Err(Status::invalid_argument(format!(
            "a service can be on {MOST_NETWORKS} networks at most"
        )));
    }
    if !request.address.is_empty() && named.len() > 1 {
        return Err(Status::invalid_argument(
            "--ip is for a service on one network; with several give each its address, --network NAME:ip=ADDRESS",
        ));
    }
    let mut addresses: Vec<Ipv4Addr> = Vec::new();
    for text in &named {
        let (name, ip) = match text.split_once(":ip=") {
            Some((name, ip)) => (name, Some(ip)),
            None => (text.as_str(), Some(request.address.as_str()).filter(|address| !address.is_empty())),
        };
        if name.starts_with("ns:") || name.contains(':') {
            return Err(Status::invalid_argument(format!(
                "{text:?} is no network; give NAME, NAME:ip=ADDRESS, or alone ns: and the absolute path of a network namespace"
            )));
        }
        let subnet: Subnet = find(node, name)?.subnet.parse().map_err(internal)?;
        if addresses.iter().any(|address| subnet.contains(*address)) {
            return Err(Status::invalid_argument(format!("network {name} is given twice")));
        }
        addresses.push(choose(node, subnet, ip, refused)?);
    }
    Ok((Attachment::Overlay, addresses))
}

fn choose(
    node: &Node,
    subnet: Subnet,
    given: Option<&str>,
    refused: &HashSet<Ipv4Addr>,
) -> Result<Ipv4Addr, Status> {
    if let Some(text) = given {
        let address = text.parse().map_err(|_| {
            Status::invalid_argument(format!("{text:?} is not a valid IPv4 address; give one of {subnet}"))
        })?;
        subnet.check(address).map_err(invalid)?;
        return Ok(address);
    }
    let placements = node.state.placements().map_err(internal)?;
    let mut taken: HashSet<_> = placements.iter().filter(|p| !p.removed).flat_map(addresses_of).collect();
    taken.extend(node.claimed_addresses());
    taken.extend(refused);
    let mut free = subnet.hosts().filter(|address| !taken.contains(address));
    // Two nodes that choose at the same time must not choose the same again and again.
    let spread = if refused.is_empty() { 1 } else { SPREAD };
    let some: Vec<_> = free.by_ref().take(spread).collect();
    let random = usize::try_from(ulid::Ulid::new().random() % SPREAD as u128).unwrap_or(0);
    some.get(random % some.len().max(1))
        .copied()
        .ok_or_else(|| Status::resource_exhausted(format!("all addresses of {subnet} are taken")))
}

/// A service's networks as the API shows them.
pub(crate) fn shown(node: &Node, addresses: &[Ipv4Addr]) -> Result<Vec<ServiceNetwork>, StateError> {
    let known = known(node)?;
    let shown = |address: &Ipv4Addr| {
        let of = |network: &&Network| network.subnet.parse().is_ok_and(|s: Subnet| s.contains(*address));
        let network = known.iter().find(of);
        let prefix6 = network.and_then(|network| network.subnet6.parse::<Prefix6>().ok());
        ServiceNetwork {
            network: network.map(|network| network.name.clone()).unwrap_or_default(),
            address: address.to_string(),
            address6: prefix6.map(|prefix| prefix.of(*address).to_string()).unwrap_or_default(),
            mac: mac_to_string(mac_of(*address)),
        }
    };
    Ok(addresses.iter().map(shown).collect())
}

/// The address that a service has on a network, and which of its networks that is; the first when none
/// is named.
pub(crate) fn address_on(
    node: &Node,
    placement: &api::Placement,
    name: &str,
) -> Result<Option<(Ipv4Addr, u32)>, Status> {
    let mut addresses = (0..).zip(addresses_of(placement));
    if name.is_empty() {
        return Ok(addresses.next().map(|(nth, address)| (address, nth)));
    }
    let subnet: Subnet = find(node, name)?.subnet.parse().map_err(internal)?;
    let found = addresses.find(|(_, address)| subnet.contains(*address));
    found.map(|(nth, address)| Some((address, nth))).ok_or_else(|| {
        Status::failed_precondition(format!(
            "service {} is not on the network {name}; `godwit inspect {}` tells its networks",
            placement.service, placement.service
        ))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn network(vni: u32) -> Network {
        Network { name: "back".into(), subnet: "10.89.0.0/24".into(), vni, ..Network::default() }
    }

    #[test]
    fn a_free_number_is_one_that_no_network_has_and_vxlan_can() {
        let others: Vec<_> = [88, 1, MOST_VNI].map(network).into();
        for id in 0..2000 {
            let vni = free_vni(&format!("01ID{id}"), &others);
            assert!((1..=MOST_VNI).contains(&vni) && others.iter().all(|other| other.vni != vni));
        }
        let taken = free_vni("01ID", &[]);
        let next = free_vni("01ID", &[network(taken)]);
        assert_ne!(next, taken);
    }

    #[test]
    fn what_no_network_can_be_is_refused() {
        let first = OverlayConfig::new("10.88.0.0/16".parse().unwrap(), "eth0", [10, 99, 0, 1].into());
        let good = config(&first, &network(0x00ab_cdef)).unwrap();
        assert_eq!((good.bridge.as_str(), good.vxlan.as_str()), ("gwabcdef", "gwvxabcdef"));
        for bad in [
            network(0),
            network(MOST_VNI + 1),
            Network { subnet: "10.89.0.1/24".into(), ..network(1) },
            Network { subnet6: "fd00::/64".into(), ..network(1) },
        ] {
            assert!(config(&first, &bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_placement_has_an_address_for_each_network() {
        let placement = |address: &str, more: &[&str]| Placement {
            address: address.into(),
            more: more.iter().map(ToString::to_string).collect(),
            ..Placement::default()
        };
        let addresses = addresses_of(&placement("10.88.0.2", &["10.89.0.2", "nonsense"]));
        assert_eq!(addresses, [Ipv4Addr::new(10, 88, 0, 2), Ipv4Addr::new(10, 89, 0, 2)]);
        assert!(addresses_of(&placement("0.0.0.0", &[])).is_empty());
    }
}
