//! Where this node's overlay leads: the address of each service that is elsewhere, to the node that has it.
//!
//! An address belongs to one service ([`Node::conflict`]). But services that were started while their nodes did not
//! reach each other can have the same one. Then a node leads to its own service, and a node without one to the service
//! that was created first, so that the later one takes no clients from it.

use std::net::Ipv4Addr;

use godwit_api::v1::Placement;
use godwit_migration::{Service, error_chain};
use godwit_network::{NetworkError, Overlay, Published};

use crate::convert::{self, addresses_of, service_name};
use crate::node::Node;
use crate::state::StateError;

/// Takes over what another node says of a placement.
pub(crate) async fn learn(node: &Node, placement: &Placement) -> Result<(), StateError> {
    if !node.state.put_placement(placement)? || placement.node == node.name {
        return Ok(());
    }
    for owned in node.state.services()? {
        let shared = shared(&owned.service, placement).filter(|_| !placement.removed);
        if let Some(sentence) = shared {
            node.events.tell("service", "conflict", &owned.service.name, &sentence);
        }
    }
    forward(node, placement).await
}

/// Points the overlay at every service that is elsewhere.
pub(crate) async fn forward_all(node: &Node) -> Result<(), StateError> {
    for placement in node.state.placements()?.iter().filter(|p| p.node != node.name) {
        forward(node, placement).await?;
    }
    Ok(())
}

/// Points the overlay at the node that has a service.
pub(crate) async fn forward(node: &Node, placement: &Placement) -> Result<(), StateError> {
    if node.is_arriving(&placement.service) {
        // What is known of it is about to be out of date: its address is about to be this node's.
        return Ok(());
    }
    // None where its network is somebody else's.
    lead(node, &addresses_of(placement)).await
}

/// Points the overlay at the node that has each of these addresses, if one has.
pub(crate) async fn lead(node: &Node, addresses: &[Ipv4Addr]) -> Result<(), StateError> {
    for address in addresses {
        let own = node.state.services()?;
        if own.iter().any(|owned| owned.service.addresses().contains(address)) {
            // Perhaps being released; the network is changed when that is done.
            continue;
        }
        let holders = node.state.placements_at(*address)?;
        let first = holders.iter().find(|placement| placement.node != node.name);
        if first.is_some_and(|placement| node.is_arriving(&placement.service)) {
            continue;
        }
        let members = node.state.members()?;
        let there = first.and_then(|placement| {
            let member = members.iter().find(|member| member.name == placement.node)?;
            Some((placement, member.vtep.parse::<Ipv4Addr>().ok()?))
        });
        if let Err(error) = lead_to(node, *address, there).await {
            let error = error_chain(&error);
            tracing::warn!(%address, %error, "cannot point the overlay at the service that has the address");
        }
    }
    Ok(())
}

async fn lead_to(
    node: &Node,
    address: Ipv4Addr,
    there: Option<(&Placement, Ipv4Addr)>,
) -> Result<(), NetworkError> {
    // A network that is not up here yet, or no more, leads nowhere.
    let Ok(overlay) = node.networks().of(address) else { return Ok(()) };
    let mac = godwit_network::mac_of(address);
    let Some((placement, vtep)) = there else { return overlay.set_absent(address, mac).await };
    overlay.set_remote(address, mac, vtep).await?;
    // Published ports lead to the first of its addresses.
    if addresses_of(placement).first() == Some(&address) {
        publish(placement, address, &overlay).await?;
    }
    Ok(())
}

/// Ports of this node lead to a service that is elsewhere, as they do on every other.
async fn publish(placement: &Placement, address: Ipv4Addr, overlay: &Overlay) -> Result<(), NetworkError> {
    let name = service_name(&placement.service);
    let (name, ports) = match name.and_then(|name| Ok((name, convert::ports(&placement.publish)?))) {
        Ok(told) => told,
        Err(status) => {
            tracing::warn!(service = %placement.service, reason = status.message(), "its ports cannot be published");
            return Ok(());
        }
    };
    let published: Vec<_> = ports.into_iter().map(Published::from).collect();
    overlay.publish(&name, address, &published).await
}

/// Which other service has an address of a service of this node, which should not be, in a sentence.
pub(crate) fn shared_by(node: &Node, service: &Service) -> Result<Option<String>, StateError> {
    for address in service.addresses() {
        let holders = node.state.placements_at(address)?;
        if let Some(sentence) = holders.iter().find_map(|placement| shared(service, placement)) {
            return Ok(Some(sentence));
        }
    }
    Ok(None)
}

fn shared(service: &Service, placement: &Placement) -> Option<String> {
    let theirs = addresses_of(placement);
    let address = service.addresses().into_iter().find(|address| theirs.contains(address))?;
    (placement.id != service.id).then(|| {
        format!(
            "the address {address} is also that of service {} on node {}, so that clients reach one or the \
             other; remove one of them",
            placement.service, placement.node
        )
    })
}
