//! The cluster's networks, the same on every node: learned from others, brought up and taken down here, listed.
//!
//! The first one, `default`, is what the daemons were started with. Others are entries of the state that
//! nodes tell each other; each node brings up what it hears of and takes down what was removed
//! ([`reconcile`]). To make or remove one all nodes are asked ([`network_changes`](crate::network_changes)), and have to
//! be there: a node that is not asked could have services on another network of that name or subnet.

use std::sync::Arc;

use godwit_api::v1::{Network, NetworkEntry};
use godwit_migration::{Service, error_chain};
use godwit_names::is_name;
use godwit_network::{OverlayConfig, Subnet};
use tonic::Status;

use super::{forward, names, overlay};
use crate::convert::{addresses_of, overlay_config};
use crate::directory::{FIRST, known_networks};
use crate::node::Node;
use crate::state::StateError;
use crate::status::{internal, invalid};

/// Brings up what is not up yet, and takes down what was removed; why not, network by network.
pub(crate) async fn reconcile(node: &Arc<Node>) -> Result<Vec<(Network, String)>, StateError> {
    // One at a time: what was wanted at the start of another may be unwanted by now.
    let _alone = node.reconciling_networks.lock().await;
    reconcile_alone(node).await
}

/// The same, for who holds [`Node::reconciling_networks`].
async fn reconcile_alone(node: &Arc<Node>) -> Result<Vec<(Network, String)>, StateError> {
    let networks = node.networks();
    let mut failed = Vec::new();
    let wanted: Vec<_> = known_networks(node)?.into_iter().skip(1).collect();
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
        overlay::guard(node).await?;
        let added = match overlay_config(networks.first().config(), &network) {
            Ok(config) => networks.add(config).await,
            Err(error) => Err(error),
        };
        match added {
            Ok(_) => raised = true,
            Err(error) => failed.push((network, error_chain(&error))),
        }
    }
    overlay::guard(node).await?;
    names::keep(node).await;
    if raised {
        forward::forward_all(node).await?;
    }
    Ok(failed)
}

/// The same, where what fails is for the log: it is tried again.
pub(crate) async fn keep(node: &Arc<Node>) -> Result<(), StateError> {
    log_failed(reconcile(node).await?);
    Ok(())
}

fn log_failed(failed: Vec<(Network, String)>) {
    for (network, reason) in failed {
        tracing::error!(network = network.name, %reason, "the network cannot be brought up");
    }
}

/// Takes over what another node says of a network, and acts on it.
///
/// A node that repeats what is known waits, too, until this node has acted on it: when it has told all others, it says
/// to its user that the network is there, or gone.
pub(crate) async fn learn(node: &Arc<Node>, told: &[Network]) -> Result<(), StateError> {
    let _alone = node.reconciling_networks.lock().await;
    let mut news = false;
    let known = node.state.networks()?;
    for network in told {
        let good = is_name(&network.name)
            && network.name != FIRST
            && overlay_config(node.networks().first().config(), network).is_ok();
        if !good {
            tracing::warn!(network = network.name, "a peer sent an invalid network");
        } else if network.removed && !known.iter().any(|known| known.name == network.name) {
            // There is nothing to remove, and what others still have to hear of would never end.
        } else if node.state.put_network(network)? {
            news = true;
            let action = if network.removed { "removed" } else { "created" };
            node.events.tell("network", action, &network.name, &network.subnet);
        }
    }
    if news {
        log_failed(reconcile_alone(node).await?);
    }
    Ok(())
}

fn is_on(service: &Service, subnet: Subnet) -> bool {
    service.addresses().into_iter().any(|address| subnet.contains(address))
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
    let wanted = overlay_config(node.networks().first().config(), network).map_err(invalid)?;
    let known = known_networks(node).map_err(internal)?;
    if network.removed {
        let services = services_on(node, wanted.subnet, asker).map_err(internal)?;
        let here = node.networks().of(wanted.subnet.gateway());
        let busy = match here {
            Ok(overlay) => overlay.list_endpoints().await.map_err(internal)?,
            Err(_) => Vec::new(),
        };
        let plugged = busy.into_iter().filter(|endpoint| endpoint.address.is_some());
        let mut services: Vec<_> =
            services.into_iter().chain(plugged.map(|found| found.name.into())).collect();
        services.sort_unstable();
        services.dedup();
        return Ok((!services.is_empty()).then(|| {
            format!("services are on it: {}; remove them first, or leave it", services.join(", "))
        }));
    }
    if let Some(other) = known.iter().find(|other| other.name == network.name) {
        return Ok(Some(format!("the network {} exists already, with {}", other.name, other.subnet)));
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

pub(crate) fn overlap(one: Subnet, other: Subnet) -> bool {
    one.overlaps(other.network(), other.prefix())
}

/// All networks, with the services on them.
pub(crate) fn list(node: &Node) -> Result<Vec<NetworkEntry>, Status> {
    let entry = |network: Network| {
        let subnet: Subnet = network.subnet.parse().map_err(internal)?;
        let reason = match node.networks().of(subnet.gateway()) {
            Ok(_) => String::new(),
            Err(_) => format!("it is not up on node {}; see the log of godwitd there", node.name),
        };
        let services = services_on(node, subnet, &node.name).map_err(internal)?;
        Ok(NetworkEntry { network: Some(network), services, reason })
    };
    known_networks(node).map_err(internal)?.into_iter().map(entry).collect()
}
