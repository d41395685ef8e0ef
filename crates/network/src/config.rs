//! How a node takes part in an overlay network, as its daemon says it.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;

use crate::{Encryption, Prefix6, Subnet};

/// What VXLAN adds to a frame: outer IPv4, UDP and VXLAN headers, and the inner Ethernet header.
pub(crate) const VXLAN_OVERHEAD: u32 = 20 + 8 + 8 + 14;
/// The least MTU that IPv4 hosts must cope with (RFC 791), for the inner side.
pub(crate) const LEAST_MTU: u32 = 576 + VXLAN_OVERHEAD;

/// Which switch a node has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Backend {
    /// The kernel's bridge.
    #[default]
    Kernel,
    /// Open vSwitch, with its kernel module where that is loaded, else with its userspace datapath.
    OpenVswitch {
        /// Where its daemons have their sockets; `None`: where they are by default, or where the
        /// environment variable `OVS_RUNDIR` says.
        run: Option<PathBuf>,
    },
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::OpenVswitch { .. } => "openvswitch",
        })
    }
}

/// How a node takes part in the overlay.
#[derive(Debug, Clone)]
pub struct OverlayConfig {
    /// The services' subnet, the same on every node.
    pub subnet: Subnet,
    /// The prefix of the IPv6 addresses that services have beside their IPv4 ones, the same on every node;
    /// `None`: they have none.
    pub prefix6: Option<Prefix6>,
    /// The interface that leads to the other nodes and to clients.
    pub uplink: String,
    /// This node's address on the uplink, at which other nodes send it frames.
    pub vtep: Ipv4Addr,
    /// The overlay's VXLAN network identifier, the same on every node.
    pub vni: u32,
    /// VXLAN's UDP port, the same on every node.
    pub port: u16,
    /// The bridge's name.
    pub bridge: String,
    /// The VXLAN device's name.
    pub vxlan: String,
    /// Where the services' network namespaces are mounted; the same for all networks of a node.
    pub netns_dir: PathBuf,
    /// Whether the packets between nodes are encrypted, the same on every node.
    pub encryption: Encryption,
    /// Which switch the bridge is.
    pub backend: Backend,
}

impl OverlayConfig {
    /// The usual names and numbers: `gw0`, `gwvx0`, network 88, UDP port 4789 (RFC 7348),
    /// namespaces in `/run/godwit/netns`; the kernel's bridge.
    #[must_use]
    pub fn new(subnet: Subnet, uplink: impl Into<String>, vtep: Ipv4Addr) -> Self {
        Self {
            subnet,
            prefix6: None,
            uplink: uplink.into(),
            vtep,
            vni: 88,
            port: 4789,
            bridge: "gw0".into(),
            vxlan: "gwvx0".into(),
            netns_dir: "/run/godwit/netns".into(),
            encryption: Encryption::Off,
            backend: Backend::default(),
        }
    }

    /// How the node takes part in another network beside this one, which has these.
    #[must_use]
    pub fn beside(&self, subnet: Subnet, prefix6: Option<Prefix6>, vni: u32) -> Self {
        // Seven and nine bytes at most: the switch adds some, and an interface's name may have fifteen.
        let (bridge, vxlan) = (format!("gw{vni:x}"), format!("gwvx{vni:x}"));
        Self { subnet, prefix6, vni, bridge, vxlan, ..self.clone() }
    }
}
