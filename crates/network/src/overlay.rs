//! A node's part of an overlay network: the bridge that services are plugged into, and the VXLAN device
//! that joins it to the other nodes' bridges. How the bridge works is in `datapath.rs`. A node can have
//! several ([`crate::Networks`]), each with devices and a subnet of its own.
//!
//! ```text
//!   endpoint    a service's: made, opened, closed, removed, listed
//!   hold        frames for a frozen service: steered, held, handed in
//!   newcomers   connections that begin before a freeze
//!   capture     packets of a service
//!   segment     whether somebody else has an address
//!   mend        what somebody removed is made again
//! ```
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

pub mod capture;
mod endpoint;
mod hold;
mod mend;
mod newcomers;
mod segment;

use std::net::Ipv4Addr;
use std::sync::Arc;

use futures::TryStreamExt;
use rtnetlink::RouteMessageBuilder;
use rtnetlink::packet_route::address::{AddressAttribute, AddressFlags};
use rtnetlink::packet_route::route::{RouteAddress, RouteAttribute, RouteScope, RouteType};

use self::capture::Captures;
use self::hold::Holds;
use self::newcomers::Newcomers;
use crate::config::{LEAST_MTU, VXLAN_OVERHEAD};
use crate::datapath::{self, Datapath};
use crate::netlink::{LinkEvents, Netlink, PATIENCE};
use crate::netns::set_sysctl;
use crate::packet::PacketSocket;
use crate::publish::{self, Ports};
use crate::{Mac, NetworkError, OverlayConfig, ipv6};

pub use endpoint::{Endpoint, ExistingEndpoint, ServiceEndpoint};
pub use hold::Handed;
pub use newcomers::{admit_newcomers, bar_newcomers};

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

/// What the networks of a node have in common.
#[derive(Debug)]
pub(crate) struct Shared {
    /// For frames that this node sends by itself.
    pub(crate) sender: PacketSocket,
    pub(crate) ports: Ports,
    /// Who looks at services' packets here.
    pub(crate) captures: Captures,
    /// Held by who makes or removes an endpoint: whose a port is must not change between look and deed.
    pub(crate) changing: tokio::sync::Mutex<()>,
}

impl Shared {
    fn new() -> Result<Self, NetworkError> {
        let sender = PacketSocket::new().map_err(NetworkError::system("open a packet socket"))?;
        Ok(Self {
            sender,
            ports: Ports::default(),
            captures: Captures::default(),
            changing: tokio::sync::Mutex::default(),
        })
    }
}

/// A node's part of a network, up.
#[derive(Debug)]
pub struct Overlay {
    pub(crate) config: OverlayConfig,
    pub(crate) netlink: Arc<Netlink>,
    pub(crate) datapath: Box<dyn Datapath>,
    pub(crate) shared: Arc<Shared>,
    /// Frames that wait for services.
    pub(crate) holds: Holds,
    pub(crate) newcomers: Newcomers,
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
        Self::bring_up(config, Arc::new(Shared::new()?)).await
    }

    /// Brings another network up, beside this one.
    ///
    /// # Errors
    /// As [`Overlay::up`].
    pub async fn up_beside(&self, config: OverlayConfig) -> Result<Self, NetworkError> {
        Self::bring_up(config, Arc::clone(&self.shared)).await
    }

    /// Whether another network could be brought up beside this one, as far as that can be told beforehand:
    /// no route leads to its addresses.
    ///
    /// # Errors
    /// Why not.
    pub async fn check_beside(&self, config: &OverlayConfig) -> Result<(), NetworkError> {
        refuse_overlap(&self.netlink, config).await
    }

    async fn bring_up(config: OverlayConfig, shared: Arc<Shared>) -> Result<Self, NetworkError> {
        let netlink = Arc::new(Netlink::new()?);
        let uplink = netlink.need_link(&config.uplink).await?;
        let overhead = VXLAN_OVERHEAD + config.encryption.overhead();
        let least = LEAST_MTU + config.encryption.overhead();
        if uplink.mtu < least {
            return Err(NetworkError::SmallMtu { interface: uplink.name, mtu: uplink.mtu, least });
        }
        let mtu = uplink.mtu - overhead;
        refuse_overlap(&netlink, &config).await?;

        let mut events = LinkEvents::new()?;
        let datapath = datapath::up(&netlink, &config, mtu).await?;
        let (bridge, vxlan) = (datapath.bridge(), datapath.vxlan());
        // Only now, with a port, has the bridge a carrier.
        if !events.wait_until(&netlink, &config.bridge, PATIENCE, |link| link.running).await? {
            return Err(NetworkError::NotUp { interface: config.bridge, seconds: PATIENCE.as_secs() });
        }
        address_bridge(&netlink, &config, bridge).await?;
        ipv6::up(&netlink, &config, bridge).await?;
        apply_settings(&config)?;
        if let Err(error) = publish::guard_gateway(&config).await {
            // Nobody but a misconfigured client asks for the gateway on the uplink.
            tracing::warn!(%error, uplink = config.uplink, "the uplink may answer for the gateway's address");
        }
        let uplink_mac = uplink.mac.unwrap_or_default();
        Ok(Self {
            config,
            netlink,
            datapath,
            shared,
            holds: Holds::default(),
            newcomers: Newcomers::default(),
            mtu,
            bridge,
            vxlan,
            uplink: uplink.index,
            uplink_mac,
        })
    }

    /// Removes every endpoint and everything else that [`Overlay::up`] and its other methods made for this
    /// network.
    ///
    /// # Errors
    /// When the kernel refuses; calling it again goes on.
    pub async fn down(&self) -> Result<(), NetworkError> {
        self.unplug_all().await?;
        for (address, _) in self.netlink.neighbours(self.uplink, true).await? {
            if self.config.subnet.contains(address) {
                self.answer_no_more(address).await?;
            }
        }
        self.shared.ports.unpublish_all(self.config.subnet).await?;
        publish::unguard_gateway(&self.config).await?;
        self.datapath.down().await
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

/// Gives the bridge the gateway's address, and routes the subnet to it with this node's underlay
/// address as the source (see the head of this file).
async fn address_bridge(netlink: &Netlink, config: &OverlayConfig, bridge: u32) -> Result<(), NetworkError> {
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
fn apply_settings(config: &OverlayConfig) -> Result<(), NetworkError> {
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
