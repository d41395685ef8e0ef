//! What the node does for its networks while it runs: keeps strangers out and knows who is none, keeps
//! packets private, makes again what somebody removed, finds who else has a service's address, and
//! tells how all of it stands.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::{Context, bail};
use godwit_api::v1::{NetworkInfo, NetworkNode, NodeNetwork};
use godwit_migration::terms::OverlayTerms;
use godwit_migration::{Service, error_chain};
use godwit_network::{
    Encryption, Guard, Guarding, Mac, NetworkError, Overlay, OverlayConfig, ServiceEndpoint, Subnet, Tunnel,
    TunnelConfig, WireGuard, mac_to_string, open_the_clear,
};
use tokio::sync::Mutex;
use tonic::Status;
use tracing::{error, warn};

use crate::keys::{Keyed, Keys, Looked, vtep_of};
use crate::networks;
use crate::node::Node;
use crate::services::status;
use crate::state::{State, StateError};

/// What is around a node's overlay.
pub(crate) struct Network {
    keys: Option<Keys>,
    /// Whether it is asked who has a service's address.
    probes: bool,
    /// The guard without its nodes and networks.
    guard: Guard,
    /// The guard is changed by one at a time, and what is lost is said once.
    unguarded: Mutex<Option<String>>,
    mending: Mutex<()>,
}

impl Network {
    /// What must be there before the overlay takes frames: the guard, and the tunnel.
    pub(crate) async fn raise(
        config: &OverlayConfig,
        node: &str,
        tunnel_port: Option<u16>,
        probes: bool,
        state: &State,
    ) -> anyhow::Result<Self> {
        let tunnel = (config.encryption != Encryption::Off)
            .then(|| tunnel_port.context("the port of --listen must be below 65534"))
            .transpose()?
            .map(|port| TunnelConfig::new(&config.uplink, config.vtep, port, config.port))
            .map(|tunnel| match config.encryption {
                Encryption::WireGuard => tunnel.by_wireguard(),
                _ => tunnel,
            });
        let guard = Guard {
            port: config.port,
            networks: Vec::new(),
            tunnel: tunnel.as_ref().map(|tunnel| tunnel.device.clone()),
            nodes: BTreeSet::new(),
        };
        let (nodes, networks) = (others(state, node)?, networks::between(state, config)?);
        let unguarded = match (Guard { nodes: nodes.clone(), networks, ..guard.clone() }).apply().await {
            Ok(()) => None,
            Err(error) if tunnel.is_some() => {
                bail!("packets in the clear cannot be kept out and in: {}", error_chain(&error));
            }
            Err(error) => Some(say_unguarded(config.port, &error)),
        };
        let keys = match tunnel {
            Some(tunnel) => {
                let up = agree_with(node, config.encryption, tunnel).await;
                Some(up.context("what nodes send each other cannot be encrypted here")?)
            }
            None => {
                // An earlier life of the daemon may have encrypted.
                open_the_clear().await?;
                None
            }
        };
        if let Some(keys) = &keys {
            keys.put_right(&nodes).await;
        }
        Ok(Self { keys, probes, guard, unguarded: Mutex::new(unguarded), mending: Mutex::default() })
    }

    /// The keys, where packets are encrypted.
    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
    }
}

/// What encrypts packets, brought up.
async fn agree_with(node: &str, how: Encryption, config: TunnelConfig) -> Result<Keys, NetworkError> {
    match how {
        Encryption::WireGuard => WireGuard::up(config).await.map(Keys::of_wireguard),
        _ => Tunnel::up(config).await.map(|tunnel| Keys::of_tunnel(node, tunnel)),
    }
}

fn say_unguarded(port: u16, error: &NetworkError) -> String {
    let reason = error_chain(error);
    warn!(%reason, "any host that reaches UDP port {port} of this node can send frames to services");
    reason
}

/// The addresses of the other members.
fn others(state: &State, own: &str) -> Result<BTreeSet<Ipv4Addr>, StateError> {
    let members = state.members()?;
    Ok(members.iter().filter(|member| member.name != own).filter_map(vtep_of).collect())
}

/// Lets the members that there are now through the guard, and nobody else, and keeps networks apart.
pub(crate) async fn guard(node: &Node) -> Result<(), StateError> {
    // Those that are to be up, and those that still are: one that was removed may have a service on it.
    let up = node.networks();
    let mut between = networks::between(&node.state, up.first().config())?;
    between.extend(up.between());
    let mut seen = BTreeSet::new();
    between.retain(|network| seen.insert((network.bridge.clone(), network.subnet)));
    let wanted =
        Guard { nodes: others(&node.state, &node.name)?, networks: between, ..node.network.guard.clone() };
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
    let mut mended = false;
    for overlay in node.networks().all() {
        if let Some(damage) = overlay.mend().await.map_err(|error| error_chain(&error))? {
            warn!(%damage, "the overlay was made whole again");
            node.events.tell("node", "mended", &node.name, &damage);
            mended = true;
        }
    }
    if node.networks().first().lost_ports().await.map_err(|error| error_chain(&error))? {
        warn!("published ports had been taken away, and are published again");
        node.events.tell("node", "mended", &node.name, "published ports");
        mended = true;
    }
    plug_in(node, mended).await.map_err(|error| error_chain(&error))?;
    if mended {
        crate::forward::forward_all(node).await.map_err(|error| error_chain(&error))?;
    }
    Ok(())
}

/// Plugs in the services that run here and have lost their port; with `all` those as well of which
/// only an entry may be lost.
async fn plug_in(node: &Arc<Node>, all: bool) -> Result<(), StateError> {
    for owned in node.state.services()?.into_iter().filter(|owned| owned.exit_code.is_none()) {
        let (service, name) = (&owned.service, &owned.service.name);
        // Whoever works on a service says whether its port is open; nobody begins to while this looks at it.
        let Some(_occupied) = node.occupy(name) else { continue };
        for endpoint in service.endpoints() {
            // Without its network there is nothing to plug it into, and that was said.
            let Ok(overlay) = node.networks().of(endpoint.address) else { continue };
            match plug_endpoint_in(&overlay, &endpoint, all).await {
                Ok(true) => node.events.tell("service", "plugged in", name, "it had lost its port"),
                Ok(false) => {}
                Err(error) => {
                    error!(service = %name, error = %error_chain(&error), "it cannot be plugged in again")
                }
            }
        }
    }
    Ok(())
}

/// Whether it had lost its port.
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

/// A link-layer address as [`mac_to_string`] writes it.
pub(crate) fn parse_mac(text: &str) -> Option<Mac> {
    let bytes: Vec<u8> =
        text.split(':').map(|byte| u8::from_str_radix(byte, 16)).collect::<Result<_, _>>().ok()?;
    bytes.try_into().ok()
}

/// What this node tells others of its overlay.
pub(crate) fn own(node: &Node) -> NodeNetwork {
    let overlay = node.networks().first();
    let OverlayTerms { mtu, vxlan_port, encryption, prefix6 } = OverlayTerms::of(overlay);
    NodeNetwork { mtu, vxlan_port, encryption, prefix6, uplink_mac: mac_to_string(overlay.uplink_mac()) }
}

/// Whether strangers are kept out, and how many packets were.
pub(crate) async fn guarding(node: &Node) -> Result<Guarding, String> {
    match Guard::in_force().await {
        Ok(Some(guarding)) => Ok(guarding),
        Ok(None) => {
            let reason = node.network.unguarded.lock().await.clone();
            Err(reason.unwrap_or_else(|| "somebody removed the table godwit_guard of nftables".into()))
        }
        Err(error) => Err(error_chain(&error)),
    }
}

/// A network as this node has it.
pub(crate) async fn inspect(node: &Node, name: &str) -> Result<NetworkInfo, Status> {
    let network = networks::find(node, name)?;
    let internal = |error: StateError| status(Status::internal, &error);
    let subnet: Subnet = network.subnet.parse().map_err(|error| status(Status::internal, &error))?;
    let overlay = node.networks().of(subnet.gateway()).map_err(|_| {
        Status::unavailable(format!(
            "network {} is not up on node {}; the log of godwitd there says why",
            network.name, node.name
        ))
    })?;
    let config = overlay.config();
    let (guarded, guard_reason, dropped, crossing) = match guarding(node).await {
        Ok(guarding) => (true, String::new(), guarding.dropped, guarding.crossing),
        Err(reason) => (false, reason, 0, 0),
    };
    let looked = match node.network.keys() {
        Some(keys) => Some(keys.look().await),
        None => None,
    };
    let stopped = looked.as_ref().map(Looked::stopped).unwrap_or_default();
    let ours = OverlayTerms::of(node.networks().first());
    let members = node.state.members().map_err(internal)?;
    let infos = crate::cluster::nodes(node).map_err(internal)?;
    let heard = |name: &str| infos.iter().find(|info| info.name == name).cloned().unwrap_or_default();
    Ok(NetworkInfo {
        name: network.name,
        crossing,
        node: node.name.clone(),
        backend: config.backend.to_string(),
        subnet: config.subnet.to_string(),
        subnet6: network.subnet6,
        gateway: config.subnet.gateway().to_string(),
        mtu: overlay.mtu(),
        vni: config.vni,
        vxlan_port: config.port.into(),
        uplink: config.uplink.clone(),
        bridge: config.bridge.clone(),
        encryption: config.encryption.name().into(),
        guarded,
        guard_reason,
        dropped,
        refused: stopped.refused,
        unsent: stopped.unsent,
        nodes: members
            .into_iter()
            .map(|member| {
                let info = heard(&member.name);
                let mut shown = NetworkNode {
                    name: member.name.clone(),
                    is_self: info.is_self,
                    vtep: member.vtep.clone(),
                    ..NetworkNode::default()
                };
                if let Some(network) = &info.network {
                    shown.mtu = network.mtu;
                    shown.encryption = network.encryption.clone();
                }
                let theirs = info.network.map(terms);
                let keyed = looked.as_ref().map(|looked| looked.keyed(&member.name, vtep_of(&member)));
                (shown.state, shown.reason) = match (&theirs, info.is_self) {
                    (_, true) => ("self".into(), String::new()),
                    (None, _) => ("unknown".into(), "not heard of since godwitd was started".into()),
                    (Some(theirs), _) => {
                        state_of((&node.name, &ours), (&member.name, theirs), keyed.as_ref())
                    }
                };
                if let Some(Ok(keyed)) = keyed {
                    shown.keys_age_s = keyed.age.as_secs().max(1);
                    shown.packets = keyed.packets;
                    (shown.sent_bytes, shown.received_bytes) = (keyed.sent, keyed.received);
                }
                shown
            })
            .collect(),
    })
}

fn terms(network: NodeNetwork) -> OverlayTerms {
    let NodeNetwork { mtu, vxlan_port, encryption, prefix6, .. } = network;
    OverlayTerms { mtu, vxlan_port, encryption, prefix6 }
}

fn state_of(
    (own, ours): (&str, &OverlayTerms),
    (other, theirs): (&str, &OverlayTerms),
    keyed: Option<&Result<Keyed, String>>,
) -> (String, String) {
    let objections = ours.objections(own, theirs, other);
    if !objections.is_empty() {
        return ("differs".into(), objections.join("; "));
    }
    match keyed {
        None => ("clear".into(), String::new()),
        Some(Ok(_)) => ("encrypted".into(), String::new()),
        Some(Err(reason)) => ("no keys".into(), reason.clone()),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_link_layer_address_is_read_as_it_is_written() {
        let mac = [0x02, 0x67, 0xff, 0, 0, 0x0a];
        assert_eq!(parse_mac(&mac_to_string(mac)), Some(mac));
        for bad in ["", "02:67", "02:67:ff:00:00:0a:01", "zz:67:ff:00:00:0a", "02-67-ff-00-00-0a"] {
            assert_eq!(parse_mac(bad), None, "{bad}");
        }
    }
}
