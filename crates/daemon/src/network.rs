//! What the node does for its overlay while it runs: keeps strangers out and knows who is none, keeps
//! packets private, makes again what somebody removed, finds who else has a service's address, and
//! tells how all of it stands.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::sync::Arc;

use anyhow::{Context, bail};
use clap::ValueEnum;
use godwit_api::v1::{NetworkInfo, NetworkNode, NodeNetwork};
use godwit_migration::terms::OverlayTerms;
use godwit_migration::{Service, error_chain};
use godwit_network::{
    Encryption, Guard, Guarding, Mac, NetworkError, OverlayConfig, Tunnel, TunnelConfig, mac_to_string,
};
use tokio::sync::Mutex;
use tracing::{error, warn};

use crate::keys::{Keys, vtep_of};
use crate::node::Node;
use crate::state::{State, StateError};

/// What `--encrypt` can say.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Encrypt {
    /// Packets between nodes are in the clear
    Off,
    /// The best there is on this node
    Auto,
    /// godwit's own tunnel in user space (ChaCha20-Poly1305), on every kernel that has TUN devices
    Tunnel,
    /// The kernel's WireGuard
    #[value(hide = true)]
    Wireguard,
    /// The kernel's IPsec
    #[value(hide = true)]
    Ipsec,
}

/// The name of the cluster's setting.
const SETTING: &str = "encrypt";

impl Encrypt {
    /// As a setting of the cluster.
    pub(crate) fn setting(self) -> (String, String) {
        let value = self.to_possible_value().map(|value| value.get_name().to_owned());
        (SETTING.into(), value.unwrap_or_default())
    }

    /// What the cluster was founded with.
    pub(crate) fn of_cluster(state: &State) -> anyhow::Result<Self> {
        let settings = state.settings()?;
        let Some(value) = settings.get(SETTING) else { return Ok(Self::Off) };
        Self::from_str(value, false).map_err(|_| {
            anyhow::anyhow!(
                "the cluster encrypts by {value:?}, which this godwit does not know; install the same godwit on all nodes"
            )
        })
    }

    /// What it comes to.
    pub(crate) fn resolve(self) -> anyhow::Result<Encryption> {
        let unknown = |name: &str| {
            anyhow::anyhow!(
                "this godwit does not encrypt by {name}; start godwitd on all nodes with `--encrypt auto`, \
                 which is its own tunnel"
            )
        };
        match self {
            Self::Off => Ok(Encryption::Off),
            Self::Auto | Self::Tunnel => Ok(Encryption::Tunnel),
            Self::Wireguard => Err(unknown("WireGuard")),
            Self::Ipsec => Err(unknown("IPsec")),
        }
    }
}

/// What is around a node's overlay.
pub(crate) struct Network {
    keys: Option<Keys>,
    /// Whether it is asked who has a service's address.
    probes: bool,
    /// The guard without its nodes.
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
        let tunnel = (config.encryption == Encryption::Tunnel)
            .then(|| tunnel_port.context("the port of --listen must be below 65534"))
            .transpose()?
            .map(|port| TunnelConfig::new(&config.uplink, config.vtep, port, config.port));
        let guard = Guard {
            port: config.port,
            bridge: config.bridge.clone(),
            tunnel: tunnel.as_ref().map(|tunnel| tunnel.device.clone()),
            nodes: BTreeSet::new(),
        };
        let nodes = others(state, node)?;
        let unguarded = match (Guard { nodes, ..guard.clone() }).apply().await {
            Ok(()) => None,
            Err(error) if tunnel.is_some() => {
                bail!("packets in the clear cannot be kept out and in: {}", error_chain(&error));
            }
            Err(error) => Some(say_unguarded(config.port, &error)),
        };
        let keys = match tunnel {
            Some(tunnel) => {
                let port = tunnel.port;
                let up = Tunnel::up(tunnel).await;
                Some(Keys::new(
                    node,
                    port,
                    up.context("what nodes send each other cannot be encrypted here")?,
                ))
            }
            None => {
                // An earlier life of the daemon may have encrypted.
                Tunnel::open_the_clear().await?;
                None
            }
        };
        Ok(Self { keys, probes, guard, unguarded: Mutex::new(unguarded), mending: Mutex::default() })
    }

    /// The keys, where packets are encrypted.
    pub(crate) fn keys(&self) -> Option<&Keys> {
        self.keys.as_ref()
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

/// Lets the members that there are now through the guard, and nobody else.
pub(crate) async fn guard(node: &Node) -> Result<(), StateError> {
    let wanted = Guard { nodes: others(&node.state, &node.name)?, ..node.network.guard.clone() };
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
    Guard::in_force().await.is_ok_and(|found| found.is_some_and(|found| found.nodes == wanted.nodes))
}

/// Makes bridge and VXLAN device again, where somebody removed them, and plugs in the services that
/// run here. What cannot be made again is an error, in a sentence.
pub(crate) async fn mend(node: &Arc<Node>) -> Result<(), String> {
    let _alone = node.network.mending.lock().await;
    let mended = node.local().overlay.mend().await.map_err(|error| error_chain(&error))?;
    if let Some(damage) = &mended {
        warn!(%damage, "the overlay was made whole again");
        node.events.tell("node", "mended", &node.name, damage);
    }
    plug_in(node, mended.is_some()).await.map_err(|error| error_chain(&error))?;
    if mended.is_some() {
        crate::cluster::forward_all(node).await.map_err(|error| error_chain(&error))?;
    }
    Ok(())
}

/// Plugs in the services that run here and have lost their port; with `all` those as well of which
/// only an entry may be lost.
async fn plug_in(node: &Arc<Node>, all: bool) -> Result<(), StateError> {
    let overlay = &node.local().overlay;
    for owned in node.state.services()?.into_iter().filter(|owned| owned.exit_code.is_none()) {
        let (service, name) = (&owned.service, &owned.service.name);
        let elsewhere = service.network.namespace().is_some();
        // Whoever works on a service says whether its port is open.
        if elsewhere || node.migration(name).is_some() || node.is_busy(name) {
            continue;
        }
        let lost = matches!(overlay.is_open(name).await, Err(NetworkError::NoEndpoint { .. }));
        if !lost && !all {
            continue;
        }
        let endpoint = service.endpoint();
        let plugged = async {
            overlay.create_endpoint(&endpoint).await?;
            overlay.open(&endpoint).await?;
            Ok::<_, NetworkError>(())
        };
        match plugged.await {
            Ok(()) if lost => node.events.tell("service", "plugged in", name, "it had lost its port"),
            Ok(()) => {}
            Err(error) => {
                error!(service = %name, error = %error_chain(&error), "it cannot be plugged in again")
            }
        }
    }
    Ok(())
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
    let overlay = &node.local().overlay;
    let uplink = &overlay.config().uplink;
    match overlay.find_foreign(service.address, &node.known_macs()).await {
        Ok(None) => Vec::new(),
        Ok(Some(mac)) => vec![format!(
            "the address {} is in use on the network of node {}: a host with the link-layer address {} \
             answers for it on {uplink}; take the address from that host, or give the service another one; if it is a router that answers \
             for others, start godwitd on this node with `--address-probe off`",
            service.address,
            node.name,
            mac_to_string(mac)
        )],
        Err(error) => vec![format!("node {}: {}", node.name, error_chain(&error))],
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
    let overlay = &node.local().overlay;
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

/// The overlay as this node has it.
pub(crate) async fn inspect(node: &Node) -> Result<NetworkInfo, StateError> {
    let overlay = &node.local().overlay;
    let config = overlay.config();
    let (guarded, guard_reason, dropped) = match guarding(node).await {
        Ok(guarding) => (true, String::new(), guarding.dropped),
        Err(reason) => (false, reason, 0),
    };
    let stopped = node.network.keys().map(|keys| keys.tunnel.stopped()).unwrap_or_default();
    let ours = OverlayTerms::of(overlay);
    let members = node.state.members()?;
    let infos = crate::cluster::nodes(node)?;
    let heard = |name: &str| infos.iter().find(|info| info.name == name).cloned().unwrap_or_default();
    Ok(NetworkInfo {
        node: node.name.clone(),
        backend: config.backend.to_string(),
        subnet: config.subnet.to_string(),
        subnet6: ours.prefix6.clone(),
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
                (shown.state, shown.reason) = match (&theirs, info.is_self) {
                    (_, true) => ("self".into(), String::new()),
                    (None, _) => ("unknown".into(), "not heard of since godwitd was started".into()),
                    (Some(theirs), _) => state_of(node, &ours, theirs, &member.name, vtep_of(&member)),
                };
                let keyed = keyed(node, vtep_of(&member));
                shown.keys_age_s = keyed.map_or(0, |keyed| keyed.since.elapsed().as_secs().max(1));
                shown.packets = keyed.map_or(0, |keyed| keyed.sent);
                shown
            })
            .collect(),
    })
}

fn terms(network: NodeNetwork) -> OverlayTerms {
    let NodeNetwork { mtu, vxlan_port, encryption, prefix6, .. } = network;
    OverlayTerms { mtu, vxlan_port, encryption, prefix6 }
}

fn keyed(node: &Node, vtep: Option<Ipv4Addr>) -> Option<godwit_network::Keyed> {
    node.network.keys()?.tunnel.keyed(vtep?)
}

fn state_of(
    node: &Node,
    ours: &OverlayTerms,
    theirs: &OverlayTerms,
    name: &str,
    vtep: Option<Ipv4Addr>,
) -> (String, String) {
    let objections = ours.objections(&node.name, theirs, name);
    if !objections.is_empty() {
        return ("differs".into(), objections.join("; "));
    }
    match (node.network.keys(), keyed(node, vtep)) {
        (None, _) => ("clear".into(), String::new()),
        (Some(keys), _) if !keys.tunnel.is_running() => {
            ("no keys".into(), "the tunnel's device is gone; restart godwitd on this node".into())
        }
        (Some(_), Some(_)) => ("encrypted".into(), String::new()),
        (Some(keys), None) => ("no keys".into(), keys.trouble(name)),
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

    #[test]
    fn the_clusters_setting_is_read_as_it_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let state = State::open(&dir.path().join("node.db")).unwrap();
        assert_eq!(Encrypt::of_cluster(&state).unwrap(), Encrypt::Off);
        for encrypt in [Encrypt::Auto, Encrypt::Tunnel, Encrypt::Off] {
            state.put_settings(&[encrypt.setting()].into()).unwrap();
            assert_eq!(Encrypt::of_cluster(&state).unwrap(), encrypt);
        }
        state.put_settings(&[(SETTING.to_owned(), "magic".to_owned())].into()).unwrap();
        let message = Encrypt::of_cluster(&state).unwrap_err().to_string();
        assert!(message.contains("\"magic\"") && message.contains("the same godwit"), "{message}");
    }

    #[test]
    fn what_cannot_be_encrypted_with_is_refused_with_what_can() {
        assert_eq!(Encrypt::Auto.resolve().unwrap(), Encryption::Tunnel);
        assert_eq!(Encrypt::Off.resolve().unwrap(), Encryption::Off);
        for (asked, name) in [(Encrypt::Wireguard, "WireGuard"), (Encrypt::Ipsec, "IPsec")] {
            let message = asked.resolve().unwrap_err().to_string();
            assert!(message.contains(name) && message.contains("--encrypt auto"), "{message}");
        }
    }
}
