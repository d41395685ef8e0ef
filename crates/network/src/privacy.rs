//! The way of VXLAN's packets where they are encrypted: into a device that encrypts each for the node
//! it is for, and nowhere else.
//!
//! ```text
//!   gwvx0 (VXLAN) ── UDP 4789 to node b ──► rule: to table 4788 ──► gwwg0 (the kernel's WireGuard)
//!                                                  │                or gwtun0 (the Tunnel: in user space)
//!                                                  │ no device?        │
//!                                                  └► unreachable      ▼
//!                                                              UDP to node b's port for it, by the uplink
//! ```
//!
//! The nodes' addresses stay what they are: a packet that comes out at the other end is the packet
//! that went in (as with IPsec's transport mode), so neither the VXLAN device nor its entries know of
//! it. Nothing of the overlay leaves in the clear: the route behind the rule leads to the device or
//! nowhere, and [`crate::Guard`] drops what would take another way, in both directions.

use std::net::Ipv4Addr;

use futures::TryStreamExt;
use rtnetlink::packet_route::IpProtocol;
use rtnetlink::packet_route::address::AddressScope;
use rtnetlink::packet_route::link::InfoKind;
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RuleMessage, RulePortRange};
use rtnetlink::{IpVersion, LinkUnspec, RouteMessageBuilder};

use crate::NetworkError;
use crate::netlink::{Netlink, has_errno};
use crate::netns::set_sysctl;

/// The routing table, and the place of the rule that leads to it among all rules: after the
/// machine's own addresses (0), before the main table (32766).
const TABLE: u32 = 4788;
/// Worse than any route that somebody would add.
const LAST_RESORT: u32 = u32::MAX - 1;
/// An interface without any address takes no packets; this one is for nobody to use (RFC 3927).
const DEVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 88, 1);
/// The tunnel's device.
const TUN: &str = "gwtun0";
/// WireGuard's device.
const WIREGUARD: &str = "gwwg0";

/// Whether, and how, packets between nodes are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// They are not.
    #[default]
    Off,
    /// By WireGuard in user space: [`crate::Tunnel`].
    Tunnel,
    /// By the kernel: [`crate::WireGuard`].
    WireGuard,
}

impl Encryption {
    /// What it adds to each of VXLAN's packets: IPv4 and UDP headers, and of WireGuard type, receiver and
    /// counter, tag.
    #[must_use]
    pub fn overhead(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Tunnel | Self::WireGuard => 20 + 8 + 16 + 16,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Tunnel => "tunnel",
            Self::WireGuard => "wireguard",
        }
    }
}

/// How a node takes part in the encryption.
#[derive(Debug, Clone)]
pub struct TunnelConfig {
    /// The interface that leads to the other nodes.
    pub uplink: String,
    /// This node's address on it.
    pub vtep: Ipv4Addr,
    /// The UDP port at which it takes encrypted packets.
    pub port: u16,
    /// VXLAN's UDP port.
    pub vxlan_port: u16,
    /// The device's name.
    pub device: String,
}

impl TunnelConfig {
    /// For a [`crate::Tunnel`]: the usual name of the device, `gwtun0`.
    #[must_use]
    pub fn new(uplink: impl Into<String>, vtep: Ipv4Addr, port: u16, vxlan_port: u16) -> Self {
        Self { uplink: uplink.into(), vtep, port, vxlan_port, device: TUN.into() }
    }

    /// The same for [`crate::WireGuard`]: the device is `gwwg0`.
    #[must_use]
    pub fn by_wireguard(self) -> Self {
        Self { device: WIREGUARD.into(), ..self }
    }
}

/// Lets VXLAN's packets out in the clear, as without encryption. No error when they may already.
///
/// # Errors
/// When the kernel refuses.
pub async fn open_the_clear() -> Result<(), NetworkError> {
    let netlink = Netlink::new()?;
    for rule in our_rules(&netlink).await? {
        remove_rule(&netlink, rule).await?;
    }
    remove_wireguard(&netlink).await?;
    match netlink.handle.route().del(dead_end()).execute().await {
        Err(error) if !has_errno(&error, libc::ESRCH) => {
            Err(NetworkError::kernel("remove the last route of the tunnel's table")(error))
        }
        _ => Ok(()),
    }
}

/// Makes the kernel ask the tunnel's table, which leads nowhere at first, about VXLAN's packets. What leads
/// there already is left as it is, so that nothing is lost when the daemon is restarted.
pub(crate) async fn close_the_clear(netlink: &Netlink, vxlan_port: u16) -> Result<(), NetworkError> {
    let action = || format!("route packets to UDP port {vxlan_port} by the tunnel only");
    let added = netlink.handle.route().add(dead_end()).replace().execute().await;
    added.map_err(NetworkError::kernel(action()))?;
    let port = RulePortRange { start: vxlan_port, end: vxlan_port };
    let what = [RuleAttribute::IpProtocol(IpProtocol::Udp), RuleAttribute::DestinationPortRange(port)];
    let found = our_rules(netlink).await?;
    let (wanted, others): (Vec<_>, Vec<_>) =
        found.into_iter().partition(|rule| what.iter().all(|wanted| rule.attributes.contains(wanted)));
    if wanted.is_empty() {
        let request = netlink.handle.rule().add().v4().table_id(TABLE).priority(TABLE);
        // Only what this node sends itself: a service may use the port for what it likes.
        let mut request = request.action(RuleAction::ToTable).input_interface("lo".into());
        request.message_mut().attributes.extend(what);
        request.execute().await.map_err(NetworkError::kernel(action()))?;
    }
    for rule in others.into_iter().chain(wanted.into_iter().skip(1)) {
        remove_rule(netlink, rule).await?;
    }
    Ok(())
}

/// Prepares the device, which must be there, and leads VXLAN's packets through it.
pub(crate) async fn lead_through(
    netlink: &Netlink,
    config: &TunnelConfig,
    encryption: Encryption,
) -> Result<(), NetworkError> {
    let name = config.device.as_str();
    set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    // Loose: the nodes' packets come in here, though the routes to them lead to the uplink.
    set_sysctl(&format!("ipv4/conf/{name}/rp_filter"), "2")?;
    let uplink = netlink.need_link(&config.uplink).await?;
    let index = netlink.need_link(name).await?.index;
    let mtu = uplink.mtu.saturating_sub(encryption.overhead());
    let refused = |what: &str| NetworkError::kernel(format!("{what} of the tunnel's device {name}"));
    let message = LinkUnspec::new_with_index(index).mtu(mtu).up().build();
    netlink.handle.link().change(message).execute().await.map_err(refused("set the MTU"))?;
    let mut request = netlink.handle.address().add(index, DEVICE_ADDRESS.into(), 32).replace();
    request.message_mut().header.scope = AddressScope::Host;
    request.execute().await.map_err(refused("set the address"))?;
    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .table_id(TABLE)
        .output_interface(index)
        .scope(RouteScope::Link)
        .build();
    netlink.handle.route().add(route).replace().execute().await.map_err(refused("route by way"))
}

/// Removes WireGuard's device; no error when there is none.
pub(crate) async fn remove_wireguard(netlink: &Netlink) -> Result<(), NetworkError> {
    match netlink.link(WIREGUARD).await? {
        Some(link) if link.kind == Some(InfoKind::Wireguard) => netlink.delete_link(WIREGUARD).await,
        _ => Ok(()),
    }
}

fn dead_end() -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .table_id(TABLE)
        .kind(RouteType::Unreachable)
        .priority(LAST_RESORT)
        .build()
}

async fn our_rules(netlink: &Netlink) -> Result<Vec<RuleMessage>, NetworkError> {
    let rules = netlink.handle.rule().get(IpVersion::V4).execute();
    let rules: Vec<_> = rules.try_collect().await.map_err(NetworkError::kernel("list the routing rules"))?;
    let ours = RuleAttribute::Priority(TABLE);
    Ok(rules.into_iter().filter(|rule| rule.attributes.contains(&ours)).collect())
}

async fn remove_rule(netlink: &Netlink, rule: RuleMessage) -> Result<(), NetworkError> {
    let removed = netlink.handle.rule().del(rule).execute().await;
    removed.map_err(NetworkError::kernel("remove a routing rule"))
}
