//! Which networks a service is on, and the address that it has on each.

use std::collections::HashSet;
use std::net::Ipv4Addr;

use godwit_api::v1::{self as api, Network, RunRequest, ServiceNetwork};
use godwit_migration::Attachment;
use godwit_network::{Prefix6, Subnet, mac_of, mac_to_string};
use tonic::Status;

use crate::convert::{self, addresses_of};
use crate::directory::{FIRST, find_network, known_networks};
use crate::node::Node;
use crate::state::StateError;
use crate::status::{internal, invalid};

/// Of so many free addresses one is taken when another node was about to take the first.
const SPREAD: usize = 64;
/// Interfaces of a service.
const MOST_NETWORKS: usize = 16;

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
                "{text:?} is not a network; give NAME, NAME:ip=ADDRESS, or alone ns: and the absolute path of a network namespace"
            )));
        }
        let subnet: Subnet = find_network(node, name)?.subnet.parse().map_err(internal)?;
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
    let known = known_networks(node)?;
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
    let subnet: Subnet = find_network(node, name)?.subnet.parse().map_err(internal)?;
    let found = addresses.find(|(_, address)| subnet.contains(*address));
    found.map(|(nth, address)| Some((address, nth))).ok_or_else(|| {
        Status::failed_precondition(format!(
            "service {} is not on the network {name}; `godwit inspect {}` shows its networks",
            placement.service, placement.service
        ))
    })
}
