//! The cluster's networks are made and removed: on all nodes at once, when none of them has something against it.

use std::net::Ipv4Addr;
use std::sync::Arc;

use godwit_api::v1::{Network, NetworkCreateRequest};
use godwit_network::Subnet;
use tonic::Status;

use crate::convert::{MOST_VNI, overlay_config};
use crate::directory::{FIRST, find_network, known_networks};
use crate::network::cluster_networks::{conflict, keep, overlap, reconcile};
use crate::node::Node;
use crate::status::{internal, invalid};
use crate::{cluster, convert};

/// The third byte of the subnets that networks get, 10.89.N.0/24.
const SUBNETS: std::ops::RangeInclusive<u8> = 0..=255;

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
    let others = known_networks(node).map_err(internal)?;
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

/// Removes a network from all nodes.
pub(crate) async fn remove(node: &Arc<Node>, name: &str) -> Result<(), Status> {
    let _alone = node.changing_networks.lock().await;
    if name == FIRST {
        return Err(Status::invalid_argument(
            "the network default is the cluster's own, and cannot be removed",
        ));
    }
    let network = find_network(node, name)?;
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
                "network {} is not {doing}: node {} does not answer ({}); networks are made and removed on all nodes at once: start godwitd there, and try again",
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
        let config = overlay_config(first.config(), &wanted).map_err(invalid)?;
        if !taken && first.check_beside(&config).await.is_ok() {
            return Ok(wanted.subnet);
        }
    }
    Err(Status::resource_exhausted("all of 10.89.0.0/16 is taken; give the network a --subnet"))
}

#[cfg(test)]
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
}
