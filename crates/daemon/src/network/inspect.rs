//! A network as this node has it: its terms, its guard, and how packets to each other node are encrypted.

use godwit_api::v1::{NetworkInfo, NetworkNode, NodeNetwork};
use godwit_migration::terms::OverlayTerms;
use godwit_network::Subnet;
use tonic::Status;

use super::overlay::guarding;
use crate::directory::{find_network, nodes};
use crate::node::Node;
use crate::protection::keys::{Keyed, KeysStatus, vtep_of};
use crate::status::internal;

/// A network as this node has it.
pub(crate) async fn inspect(node: &Node, name: &str) -> Result<NetworkInfo, Status> {
    let network = find_network(node, name)?;
    let subnet: Subnet = network.subnet.parse().map_err(internal)?;
    let overlay = node.networks().of(subnet.gateway()).map_err(|_| {
        Status::unavailable(format!(
            "network {} is not up on node {}; see the log of godwitd there",
            network.name, node.name
        ))
    })?;
    let config = overlay.config();
    let (guarded, guard_reason, dropped, crossing) = match guarding(node).await {
        Ok(guarding) => (true, String::new(), guarding.dropped, guarding.crossing),
        Err(reason) => (false, reason, 0, 0),
    };
    let status = match node.network.keys() {
        Some(keys) => Some(keys.status().await),
        None => None,
    };
    let stopped = status.as_ref().map(KeysStatus::stopped).unwrap_or_default();
    let ours = OverlayTerms::of(node.networks().first());
    let members = node.state.members().map_err(internal)?;
    let infos = nodes(node).map_err(internal)?;
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
        names_reason: node.names.trouble(config.subnet.gateway()).unwrap_or_default(),
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
                let keyed = status.as_ref().map(|status| status.keyed(&member.name, vtep_of(&member)));
                (shown.state, shown.reason) = match (&theirs, info.is_self) {
                    (_, true) => ("self".into(), String::new()),
                    (None, _) => ("unknown".into(), "not heard from since godwitd was started".into()),
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
