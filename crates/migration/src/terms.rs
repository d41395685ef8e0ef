//! What the overlays of two nodes must have in common, for a service to move from one to the other.
//!
//! A service's interface has the overlay's MTU. With another one at its destination it would either
//! send frames that other nodes cannot carry, or be sent frames that do not reach it: connections would
//! hang at their first full packet, without an error. So nodes whose overlays differ do not move
//! services to each other, and say so before anything is frozen.

use godwit_network::{Encryption, Overlay};

/// A node's overlay, as far as it concerns others. Part of `Open`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct OverlayTerms {
    /// The MTU of services' interfaces, bytes.
    #[prost(uint32, tag = "1")]
    pub mtu: u32,
    /// VXLAN's UDP port.
    #[prost(uint32, tag = "2")]
    pub vxlan_port: u32,
    /// How packets between nodes are encrypted: [`Encryption::name`].
    #[prost(string, tag = "3")]
    pub encryption: String,
    /// The prefix of services' IPv6 addresses; empty where they have none.
    #[prost(string, tag = "4")]
    pub prefix6: String,
}

impl OverlayTerms {
    /// This node's.
    #[must_use]
    pub fn of(overlay: &Overlay) -> Self {
        Self {
            mtu: overlay.mtu(),
            vxlan_port: overlay.config().port.into(),
            encryption: overlay.config().encryption.name().to_owned(),
            prefix6: overlay.config().prefix6.map(|prefix| prefix.to_string()).unwrap_or_default(),
        }
    }

    /// Every reason why frames of node `theirs` and of node `ours` do not fit each other.
    #[must_use]
    pub fn objections(&self, ours: &str, other: &Self, theirs: &str) -> Vec<String> {
        let mut reasons = Vec::new();
        if self.encryption != other.encryption {
            let word = |terms: &Self| match terms.encryption.as_str() {
                "" | "off" => "sends packets in the clear",
                name if name == Encryption::Tunnel.name() => "encrypts packets by WireGuard in user space",
                name if name == Encryption::WireGuard.name() => "encrypts packets by the kernel's WireGuard",
                _ => "encrypts packets in another way",
            };
            reasons.push(format!(
                "node {ours} {} and node {theirs} {}; start godwitd on all nodes with the same --encrypt",
                word(self),
                word(other)
            ));
        } else if self.mtu != other.mtu {
            reasons.push(format!(
                "services have an MTU of {} on node {ours} and of {} on node {theirs}; give the uplinks of \
                 all nodes the same MTU and restart godwitd there",
                self.mtu, other.mtu
            ));
        }
        if self.vxlan_port != other.vxlan_port {
            reasons.push(format!(
                "node {ours} takes frames at UDP port {} and node {theirs} at {}; start godwitd on all nodes \
                 with the same --vxlan-port",
                self.vxlan_port, other.vxlan_port
            ));
        }
        if self.prefix6 != other.prefix6 {
            let word = |terms: &Self| match terms.prefix6.as_str() {
                "" => "no IPv6 addresses".to_owned(),
                prefix => format!("IPv6 addresses of {prefix}"),
            };
            reasons.push(format!(
                "services have {} on node {ours} and {} on node {theirs}; start godwitd on all nodes with the \
                 same --subnet6",
                word(self),
                word(other)
            ));
        }
        reasons
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn terms(mtu: u32, vxlan_port: u32, encryption: &str) -> OverlayTerms {
        OverlayTerms { mtu, vxlan_port, encryption: encryption.into(), prefix6: String::new() }
    }

    #[test]
    fn what_differs_is_said_with_both_values_and_what_to_do() {
        let here = terms(1450, 4789, "off");
        assert_eq!(here.objections("b", &here.clone(), "a"), Vec::<String>::new());
        let mtu = here.objections("b", &terms(1350, 4789, "off"), "a");
        assert_eq!(mtu.len(), 1);
        assert!(mtu[0].contains("1450 on node b and of 1350 on node a"), "{mtu:?}");
        let all = here.objections("b", &terms(1390, 4790, "tunnel"), "a");
        // That encryption makes the MTU smaller is no reason of its own.
        assert_eq!(all.len(), 2, "{all:?}");
        assert!(all[0].contains("b sends packets in the clear and node a encrypts packets by"), "{all:?}");
        assert!(all[1].contains("4789") && all[1].contains("4790"), "{all:?}");
        let addressed = OverlayTerms { prefix6: "fd67::/96".into(), ..here.clone() };
        let prefix = here.objections("b", &addressed, "a");
        assert!(
            prefix[0].contains("no IPv6 addresses on node b and IPv6 addresses of fd67::/96 on"),
            "{prefix:?}"
        );
        let other = terms(1390, 4789, "tunnel").objections("b", &terms(1390, 4789, "wireguard"), "a");
        let both = "b encrypts packets by WireGuard in user space and node a encrypts packets by the kernel's WireGuard";
        assert!(other[0].contains(both), "{other:?}");
        let other = terms(1390, 4789, "tunnel").objections("b", &terms(1390, 4789, "later"), "a");
        assert!(other[0].contains("node a encrypts packets in another way"), "{other:?}");
    }
}
