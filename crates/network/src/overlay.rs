//! A node's part of the overlay: the bridge that services are plugged into, and the VXLAN device
//! that joins it to the other nodes' bridges.
//!
//! **The gateway.** Every node's bridge has the same address and the same link-layer address, so
//! that a service finds the gateway it knows wherever it wakes up. Nothing of it may leave the
//! node: the VXLAN device answers ARP requests itself or drops them (`proxy`), the bridge has its
//! own address in its table as local, and the uplink does not answer for it. Frames that the
//! bridge itself sends to a service elsewhere (routed from the uplink) do carry its link-layer
//! address; no bridge learns from them, as learning is off.
//!
//! **The node's own packets** to a service elsewhere must not have the gateway as their source, or
//! the answer would end at that other node. The route to the subnet therefore names the node's
//! underlay address as the source.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::TryStreamExt;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::link::{BridgeStpState, InfoData, InfoKind, InfoVxlan, LinkInfo};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteScope, RouteType};
use rtnetlink::{LinkBridge, LinkMessageBuilder, LinkUnspec, LinkVxlan, RouteMessageBuilder};

use crate::capture::Captures;
use crate::hold::Holds;
use crate::netlink::{Link, LinkEvents, Netlink};
use crate::netns::set_sysctl;
use crate::packet::PacketSocket;
use crate::publish::{self, Ports};
use crate::{Encryption, Mac, NetworkError, Subnet, obstacle};

/// Every node's gateway: `02:67` as the services, then an address that is none of theirs.
pub(crate) const GATEWAY_MAC: Mac = [0x02, 0x67, 0xff, 0x00, 0x00, 0x01];
/// What VXLAN adds to a frame: outer IPv4, UDP and VXLAN headers, and the inner Ethernet header.
pub(crate) const VXLAN_OVERHEAD: u32 = 20 + 8 + 8 + 14;
/// The least MTU that IPv4 hosts must cope with (RFC 791), for the inner side.
pub(crate) const LEAST_MTU: u32 = 576 + VXLAN_OVERHEAD;

/// How long a new interface may take to come up. It takes about a millisecond.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// How a node takes part in the overlay.
#[derive(Debug, Clone)]
pub struct OverlayConfig {
    /// The services' subnet, the same on every node.
    pub subnet: Subnet,
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
    /// Where the services' network namespaces are mounted.
    pub netns_dir: PathBuf,
    /// Whether the packets between nodes are encrypted, the same on every node.
    pub encryption: Encryption,
}

impl OverlayConfig {
    /// The usual names and numbers: `gw0`, `gwvx0`, network 88, UDP port 4789 (RFC 7348),
    /// namespaces in `/run/godwit/netns`.
    #[must_use]
    pub fn new(subnet: Subnet, uplink: impl Into<String>, vtep: Ipv4Addr) -> Self {
        Self {
            subnet,
            uplink: uplink.into(),
            vtep,
            vni: 88,
            port: 4789,
            bridge: "gw0".into(),
            vxlan: "gwvx0".into(),
            netns_dir: "/run/godwit/netns".into(),
            encryption: Encryption::Off,
        }
    }
}

/// The first IPv4 address of an interface: this node's, for [`OverlayConfig::vtep`].
///
/// # Errors
/// [`NetworkError::NoInterface`] or [`NetworkError::NoUplinkAddress`].
pub async fn underlay_address(uplink: &str) -> Result<Ipv4Addr, NetworkError> {
    let netlink = Netlink::new()?;
    let link = netlink.need_link(uplink).await?;
    let mut addresses = netlink.handle.address().get().set_link_index_filter(link.index).execute();
    let failed = || NetworkError::kernel(format!("list the addresses of {uplink}"));
    while let Some(message) = addresses.try_next().await.map_err(|error| failed()(error))? {
        for attribute in message.attributes {
            if let AddressAttribute::Local(std::net::IpAddr::V4(address)) = attribute {
                return Ok(address);
            }
        }
    }
    Err(NetworkError::NoUplinkAddress { interface: uplink.to_owned() })
}

/// A node's overlay, up.
#[derive(Debug)]
pub struct Overlay {
    pub(crate) config: OverlayConfig,
    pub(crate) netlink: Netlink,
    /// For frames that this node sends by itself.
    pub(crate) sender: Arc<PacketSocket>,
    /// Frames that wait for services.
    pub(crate) holds: Holds,
    pub(crate) ports: Ports,
    /// Who looks at services' packets here.
    pub(crate) captures: Captures,
    /// The MTU of everything that carries the services' frames.
    pub(crate) mtu: u32,
    pub(crate) bridge: u32,
    pub(crate) vxlan: u32,
    pub(crate) uplink: u32,
    pub(crate) uplink_mac: Mac,
}

impl Overlay {
    /// Brings the overlay up, in the network namespace of the calling thread: makes what is
    /// missing and corrects what differs. Endpoints and entries that exist are left alone.
    ///
    /// Settings of the kernel that it changes (forwarding, reverse path filters, redirects) are
    /// not put back by [`Overlay::down`].
    ///
    /// # Errors
    /// When the uplink is missing or too small, something else has a name it needs, a route
    /// overlaps the subnet, or the kernel refuses.
    pub async fn up(config: OverlayConfig) -> Result<Self, NetworkError> {
        let netlink = Netlink::new()?;
        let sender = PacketSocket::new().map_err(NetworkError::system("open a packet socket"))?;
        let (sender, holds, ports) = (Arc::new(sender), Holds::default(), Ports::default());
        let uplink = netlink.need_link(&config.uplink).await?;
        let overhead = VXLAN_OVERHEAD + config.encryption.overhead();
        let least = LEAST_MTU + config.encryption.overhead();
        if uplink.mtu < least {
            return Err(NetworkError::SmallMtu { interface: uplink.name, mtu: uplink.mtu, least });
        }
        let mtu = uplink.mtu - overhead;
        refuse_overlap(&netlink, &config).await?;

        let mut events = LinkEvents::new()?;
        let bridge = bring_bridge_up(&netlink, &config, mtu, 0).await?;
        let vxlan = bring_vxlan_up(&netlink, &config, mtu, bridge, 0).await?;
        // Only now, with a port, has the bridge a carrier.
        if !events.wait_until(&netlink, &config.bridge, PATIENCE, |link| link.running).await? {
            return Err(NetworkError::NotUp { interface: config.bridge, seconds: PATIENCE.as_secs() });
        }
        address_bridge(&netlink, &config, bridge).await?;
        apply_settings(&config)?;
        if let Err(error) = publish::guard_gateway(&config.uplink, config.subnet.gateway()).await {
            // Nobody but a misconfigured client asks for the gateway on the uplink.
            tracing::warn!(%error, uplink = config.uplink, "the uplink may answer for the gateway's address");
        }
        let uplink_mac = uplink.mac.unwrap_or_default();
        Ok(Self {
            config,
            netlink,
            sender,
            holds,
            ports,
            captures: Captures::default(),
            mtu,
            bridge,
            vxlan,
            uplink: uplink.index,
            uplink_mac,
        })
    }

    /// Removes every endpoint and everything else that [`Overlay::up`] and its other methods made.
    ///
    /// # Errors
    /// When the kernel refuses; calling it again goes on.
    pub async fn down(self) -> Result<(), NetworkError> {
        for endpoint in self.list_endpoints().await? {
            self.unplug(&endpoint.name).await?;
        }
        for (address, _) in self.netlink.neighbours(self.uplink, true).await? {
            if self.config.subnet.contains(address) {
                self.netlink.delete_proxy(self.uplink, &self.config.uplink, address).await?;
            }
        }
        publish::remove_tables().await?;
        self.netlink.delete_link(&self.config.vxlan).await?;
        self.netlink.delete_link(&self.config.bridge).await
    }

    /// How it was configured.
    #[must_use]
    pub fn config(&self) -> &OverlayConfig {
        &self.config
    }

    /// The MTU of services' interfaces, in bytes.
    #[must_use]
    pub fn mtu(&self) -> u32 {
        self.mtu
    }
}

/// Refuses a subnet that a route on another interface covers or is covered by. Default routes
/// cover everything and do not count.
async fn refuse_overlap(netlink: &Netlink, config: &OverlayConfig) -> Result<(), NetworkError> {
    let bridge = netlink.link(&config.bridge).await?.map(|link| link.index);
    let request = RouteMessageBuilder::<Ipv4Addr>::new().build();
    let mut routes = netlink.handle.route().get(request).execute();
    while let Some(route) = routes.try_next().await.map_err(NetworkError::kernel("list the routes"))? {
        let prefix = route.header.destination_prefix_length;
        let (mut destination, mut interface) = (None, None);
        for attribute in route.attributes {
            match attribute {
                RouteAttribute::Destination(RouteAddress::Inet(address)) => destination = Some(address),
                RouteAttribute::Oif(index) => interface = Some(index),
                _ => {}
            }
        }
        let (Some(destination), Some(interface)) = (destination, interface) else { continue };
        let counts = route.header.kind == RouteType::Unicast && prefix > 0 && Some(interface) != bridge;
        if counts && config.subnet.overlaps(destination, prefix) {
            let links = netlink.links().await?;
            let name = links.into_iter().find(|link| link.index == interface).map(|link| link.name);
            return Err(NetworkError::Overlap {
                subnet: config.subnet,
                route: format!("{destination}/{prefix}"),
                interface: name.unwrap_or_else(|| format!("interface {interface}")),
            });
        }
    }
    Ok(())
}

/// Makes the bridge, where it is missing with this number (0: any), and sets it up; its number.
pub(crate) async fn bring_bridge_up(
    netlink: &Netlink,
    config: &OverlayConfig,
    mtu: u32,
    index: u32,
) -> Result<u32, NetworkError> {
    let name = &config.bridge;
    match netlink.link(name).await? {
        Some(link) => need_kind(&link, InfoKind::Bridge)?,
        None => {
            let message =
                LinkMessageBuilder::<LinkBridge>::new(name).index(index).address(GATEWAY_MAC.to_vec());
            let message = message.build();
            let added = netlink.handle.link().add(message).execute().await;
            added.map_err(NetworkError::kernel(format!("make the bridge {name}")))?;
        }
    }
    set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    // A forward delay of zero: a port opens at once, and a closed one stays closed (netlink.rs).
    let message = LinkMessageBuilder::<LinkBridge>::new(name)
        .stp_state(BridgeStpState::Disabled)
        .forward_delay(0)
        .mcast_snooping(false)
        .address(GATEWAY_MAC.to_vec())
        .mtu(mtu)
        .up()
        .build();
    let changed = netlink.handle.link().change(message).execute().await;
    changed.map_err(NetworkError::kernel(format!("set up the bridge {name}")))?;
    Ok(netlink.need_link(name).await?.index)
}

/// As [`bring_bridge_up`], for the VXLAN device.
pub(crate) async fn bring_vxlan_up(
    netlink: &Netlink,
    config: &OverlayConfig,
    mtu: u32,
    bridge: u32,
    index: u32,
) -> Result<u32, NetworkError> {
    let name = &config.vxlan;
    if let Some(link) = netlink.link(name).await? {
        need_kind(&link, InfoKind::Vxlan)?;
        if !is_as_configured(&link, config) {
            // Most of a VXLAN device's settings cannot be changed while it exists.
            netlink.delete_link(name).await?;
        }
    }
    if netlink.link(name).await?.is_none() {
        let message = LinkVxlan::new(name, config.vni)
            .local(config.vtep)
            .port(config.port)
            .learning(false)
            .proxy(true)
            .index(index)
            .build();
        if let Err(error) = netlink.handle.link().add(message).execute().await {
            let action = format!(
                "make the VXLAN device {name} (network {}, UDP port {}, from {})",
                config.vni, config.port, config.vtep
            );
            return Err(obstacle::explain(netlink, config, action, error).await);
        }
    }
    set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
    let index = netlink.need_link(name).await?.index;
    let message = LinkUnspec::new_with_index(index).mtu(mtu).controller(bridge).up().build();
    if let Err(error) = netlink.handle.link().change(message).execute().await {
        let action = format!("plug {name} into the bridge {}", config.bridge);
        return Err(obstacle::explain(netlink, config, action, error).await);
    }
    netlink.set_static_port(index, name).await?;
    Ok(index)
}

fn need_kind(link: &Link, wanted: InfoKind) -> Result<(), NetworkError> {
    if link.kind.as_ref() == Some(&wanted) {
        return Ok(());
    }
    Err(NetworkError::InterfaceInTheWay {
        interface: link.name.clone(),
        found: link
            .kind
            .as_ref()
            .map_or_else(|| "a plain interface".into(), |kind| format!("of the kind {kind}")),
        wanted: format!("of the kind {wanted}"),
    })
}

/// Whether an existing VXLAN device has the settings that cannot be changed.
fn is_as_configured(link: &Link, config: &OverlayConfig) -> bool {
    let data = link.info.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Vxlan(data)) => Some(data.as_slice()),
        _ => None,
    });
    let wanted = [
        InfoVxlan::Id(config.vni),
        InfoVxlan::Local(config.vtep),
        InfoVxlan::Port(config.port),
        InfoVxlan::Learning(false),
        InfoVxlan::Proxy(true),
    ];
    data.is_some_and(|data| wanted.iter().all(|setting| data.contains(setting)))
}

/// Gives the bridge the gateway's address, and routes the subnet to it with this node's underlay
/// address as the source (see the head of this file).
pub(crate) async fn address_bridge(
    netlink: &Netlink,
    config: &OverlayConfig,
    bridge: u32,
) -> Result<(), NetworkError> {
    let (subnet, gateway, name) = (config.subnet, config.subnet.gateway(), &config.bridge);
    let mut request = netlink.handle.address().add(bridge, gateway.into(), subnet.prefix()).replace();
    request.message_mut().attributes.push(AddressAttribute::Flags(AddressFlags::Noprefixroute));
    let added = request.execute().await;
    added.map_err(NetworkError::kernel(format!("give the bridge {name} the address {gateway}")))?;

    let route = RouteMessageBuilder::<Ipv4Addr>::new()
        .destination_prefix(subnet.network(), subnet.prefix())
        .output_interface(bridge)
        .scope(RouteScope::Link)
        .pref_source(config.vtep)
        .build();
    let routed = netlink.handle.route().add(route).replace().execute().await;
    routed.map_err(NetworkError::kernel(format!("route {subnet} to the bridge {name} from {}", config.vtep)))
}

/// Kernel settings without which services are not reached.
pub(crate) fn apply_settings(config: &OverlayConfig) -> Result<(), NetworkError> {
    let (uplink, bridge) = (&config.uplink, &config.bridge);
    set_sysctl("ipv4/ip_forward", "1")?;
    // Redirects would send clients past the node that holds the service. The kernel sends them if
    // either the interface or `all` allows it.
    set_sysctl("ipv4/conf/all/send_redirects", "0")?;
    for interface in [uplink, bridge] {
        set_sysctl(&format!("ipv4/conf/{interface}/forwarding"), "1")?;
        set_sysctl(&format!("ipv4/conf/{interface}/send_redirects"), "0")?;
        // 2, loose: a service on another node answers this node through its own uplink, where a
        // strict filter expects no service. The larger of this and `all` counts, and 2 is largest.
        set_sysctl(&format!("ipv4/conf/{interface}/rp_filter"), "2")?;
    }
    // ARP requests to services are answered at once, not after up to 0.8 s.
    set_sysctl(&format!("ipv4/neigh/{uplink}/proxy_delay"), "0")?;
    // The bridge asks with its own address, never with the uplink's.
    set_sysctl(&format!("ipv4/conf/{bridge}/arp_announce"), "2")
}
