//! The overlay of this node, while it runs: strangers are kept out, what somebody removed of it is made again, and a host
//! that has a service's address is found.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use godwit_migration::{Service, error_chain};
use godwit_network::{Guard, Guarding, Mac, NetworkError, Overlay, ServiceEndpoint, mac_to_string};
use tracing::{error, warn};

use super::{forward, names};
use crate::node::Node;
use crate::protection::{between, others, say_unguarded};
use crate::state::StateError;

/// Lets the members that there are now through the guard, and nobody else, and keeps networks apart.
pub(crate) async fn guard(node: &Node) -> Result<(), StateError> {
    // Those that are to be up, and those that still are: one that was removed may have a service on it.
    let up = node.networks();
    let mut networks = between(&node.state, up.first().config())?;
    networks.extend(up.between());
    let mut seen = BTreeSet::new();
    networks.retain(|network| seen.insert((network.bridge.clone(), network.subnet)));
    let wanted = Guard { nodes: others(&node.state, &node.name)?, networks, ..node.network.guard.clone() };
    if let Some(keys) = node.network.keys() {
        keys.put_right(&wanted.nodes).await;
    }
    let mut unguarded = node.network.unguarded.lock().await;
    if unguarded.is_none() && in_force(&wanted).await {
        return Ok(());
    }
    match wanted.apply().await {
        Ok(()) => *unguarded = None,
        Err(error) if unguarded.is_none() => *unguarded = Some(say_unguarded(wanted.port, &error)),
        // It was said when it began.
        Err(_) => {}
    }
    Ok(())
}

async fn in_force(wanted: &Guard) -> bool {
    let apart = match wanted.networks.as_slice() {
        [_] => BTreeSet::new(),
        several => several.iter().map(|network| network.subnet).collect(),
    };
    let Ok(Some(found)) = Guard::in_force().await else { return false };
    found.nodes == wanted.nodes && found.apart == apart
}

/// Makes bridge and VXLAN device again, where somebody removed them, and plugs in the services that
/// run here. What cannot be made again is an error, in a sentence.
pub(crate) async fn mend(node: &Arc<Node>) -> Result<(), String> {
    let _alone = node.network.mending.lock().await;
    // Whatever cannot be mended of the rest.
    names::keep(node).await;
    let mut mended = false;
    for overlay in node.networks().all() {
        if let Some(damage) = overlay.mend().await.map_err(|error| error_chain(&error))? {
            warn!(%damage, "the overlay was repaired");
            node.events.tell("node", "mended", &node.name, &damage);
            mended = true;
        }
    }
    if node.networks().first().lost_ports().await.map_err(|error| error_chain(&error))? {
        warn!("published ports had been removed, and are published again");
        node.events.tell("node", "mended", &node.name, "published ports");
        mended = true;
    }
    plug_in(node, mended).await.map_err(|error| error_chain(&error))?;
    if mended {
        forward::forward_all(node).await.map_err(|error| error_chain(&error))?;
    }
    Ok(())
}

/// Plugs in the services that run here and have lost their port; with `all` those as well of which
/// only an entry may be lost.
async fn plug_in(node: &Arc<Node>, all: bool) -> Result<(), StateError> {
    for owned in node.state.services()?.into_iter().filter(|owned| owned.exit_code.is_none()) {
        let (service, name) = (&owned.service, &owned.service.name);
        // The task that works on a service decides whether its port is open; none begins while this one checks it.
        let Some(_occupied) = node.occupy_for_a_look(name) else { continue };
        for endpoint in service.endpoints() {
            // Without its network there is nothing to plug it into, and that was said.
            let Ok(overlay) = node.networks().of(endpoint.address) else { continue };
            match plug_endpoint_in(&overlay, &endpoint, all).await {
                Ok(true) => node.events.tell("service", "plugged in", name, "the service had lost its port"),
                Ok(false) => {}
                Err(error) => {
                    error!(service = %name, error = %error_chain(&error), "cannot plug the service in again")
                }
            }
        }
    }
    Ok(())
}

/// Whether the service had lost its port.
async fn plug_endpoint_in(
    overlay: &Overlay,
    endpoint: &ServiceEndpoint,
    all: bool,
) -> Result<bool, NetworkError> {
    let lost = matches!(overlay.is_open(endpoint).await, Err(NetworkError::NoEndpoint { .. }));
    if lost || all {
        overlay.create_endpoint(endpoint).await?;
        overlay.open(endpoint).await?;
    }
    Ok(lost)
}

/// Why the network of this node cannot take a service: every reason.
pub(crate) async fn objections(node: &Arc<Node>, service: &Service) -> Vec<String> {
    if service.network.namespace().is_some() {
        // Its network is somebody else's.
        return Vec::new();
    }
    if let Err(reason) = mend(node).await {
        return vec![format!("the overlay of node {} is broken: {reason}", node.name)];
    }
    if !node.network.probes {
        return Vec::new();
    }
    let known = node.known_macs();
    let asked = service.addresses().into_iter().map(|address| foreign(node, address, &known));
    futures::future::join_all(asked).await.into_iter().flatten().collect()
}

/// Who else has the address, in a sentence.
async fn foreign(node: &Node, address: Ipv4Addr, known: &[Mac]) -> Option<String> {
    let overlay = node.networks().first();
    let uplink = &overlay.config().uplink;
    match overlay.find_foreign(address, known).await {
        Ok(None) => None,
        Ok(Some(mac)) => Some(format!(
            "the address {address} is in use on the network of node {}: a host with the link-layer address {} \
             answers for it on {uplink}; take the address from that host, or give the service another one; if it is a router that answers \
             for others, start godwitd on this node with `--address-probe off`",
            node.name,
            mac_to_string(mac)
        )),
        Err(error) => Some(format!("node {}: {}", node.name, error_chain(&error))),
    }
}

/// Whether strangers are kept out, and how many packets were.
pub(crate) async fn guarding(node: &Node) -> Result<Guarding, String> {
    match Guard::in_force().await {
        Ok(Some(guarding)) => Ok(guarding),
        Ok(None) => {
            let reason = node.network.unguarded.lock().await.clone();
            Err(reason.unwrap_or_else(|| "another program removed the nftables table godwit_guard".into()))
        }
        Err(error) => Err(error_chain(&error)),
    }
}
