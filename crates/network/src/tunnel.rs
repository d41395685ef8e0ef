//! Privacy between nodes: VXLAN's packets go through a device of godwit's own, which encrypts them
//! for the node they are for.
//!
//! ```text
//!   gwvx0 (VXLAN) ── UDP 4789 to node b ──► rule: to table 4788 ──► gwtun0 (TUN)
//!                                                  │ no gwtun0?        │
//!                                                  └► unreachable      ▼  godwitd: ChaCha20-Poly1305
//!                                                              UDP to node b's port for it, by the uplink
//! ```
//!
//! The nodes' addresses stay what they are: a packet that comes out at the other end is the packet
//! that went in (as with IPsec's transport mode), so neither the VXLAN device nor its entries know of
//! it. Nothing of the overlay leaves in the clear: the route behind the rule leads to the device or
//! nowhere, and [`crate::Guard`] drops what would take another way, in both directions.
//!
//! It works on every kernel that has TUN devices, at the cost of two system calls and two copies for
//! each packet, and only while godwitd runs: a daemon that is gone has taken its keys with it.
//!
//! Who the other nodes are, and which secrets they gave, the caller knows: [`Tunnel::install`].

mod device;
mod pump;
mod session;
mod window;

use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::{self, JoinHandle};
use std::time::Instant;

use futures::TryStreamExt;
use nix::sys::eventfd::{EfdFlags, EventFd};
use rtnetlink::packet_route::IpProtocol;
use rtnetlink::packet_route::address::AddressScope;
use rtnetlink::packet_route::route::{RouteMessage, RouteScope, RouteType};
use rtnetlink::packet_route::rule::{RuleAction, RuleAttribute, RulePortRange};
use rtnetlink::{IpVersion, LinkUnspec, RouteMessageBuilder};

use crate::NetworkError;
use crate::netlink::{Netlink, has_errno};
use crate::netns::set_sysctl;
pub use session::{Secret, Session};

/// The routing table, and the place of the rule that leads to it among all rules: after the
/// machine's own addresses (0), before the main table (32766).
const TABLE: u32 = 4788;
/// Worse than any route that somebody would add.
const LAST_RESORT: u32 = u32::MAX - 1;
/// An interface without any address takes no packets; this one is for nobody to use (RFC 3927).
const DEVICE_ADDRESS: Ipv4Addr = Ipv4Addr::new(169, 254, 88, 1);

/// Whether, and how, packets between nodes are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Encryption {
    /// They are not.
    #[default]
    Off,
    /// By a [`Tunnel`].
    Tunnel,
}

impl Encryption {
    /// What it adds to each of VXLAN's packets: IPv4 and UDP headers, session and number, tag.
    #[must_use]
    pub fn overhead(self) -> u32 {
        match self {
            Self::Off => 0,
            Self::Tunnel => 20 + 8 + 16 + 16,
        }
    }

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Tunnel => "tunnel",
        }
    }
}

/// How a node takes part in the tunnel.
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
    /// The usual name of the device, `gwtun0`.
    #[must_use]
    pub fn new(uplink: impl Into<String>, vtep: Ipv4Addr, port: u16, vxlan_port: u16) -> Self {
        Self { uplink: uplink.into(), vtep, port, vxlan_port, device: "gwtun0".into() }
    }
}

/// What packets to a node are encrypted with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keyed {
    /// The session's name.
    pub session: u64,
    /// Since when there are these keys.
    pub since: Instant,
    /// Packets encrypted with them.
    pub sent: u64,
}

/// Packets that did not pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stopped {
    /// From the wire: not genuine, or sent once more.
    pub refused: u64,
    /// From here: for nodes with which there are no keys.
    pub unsent: u64,
}

/// A node's tunnel, up. Its device is gone with it; the way around stays closed until
/// [`Tunnel::open_the_clear`].
#[derive(Debug)]
pub struct Tunnel {
    config: TunnelConfig,
    shared: Arc<pump::Shared>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if let Err(errno) = self.stop.write(1) {
            tracing::error!(%errno, "the tunnel's threads cannot be told to end");
            return;
        }
        for thread in self.threads.drain(..) {
            // One that panicked has ended as well.
            let _ = thread.join();
        }
    }
}

impl Tunnel {
    /// Closes the clear way for VXLAN's packets, and brings the tunnel up, in the network namespace
    /// of the calling thread.
    ///
    /// # Errors
    /// When the kernel has no TUN devices, the port is taken, or the kernel refuses. The clear way
    /// stays closed then.
    pub async fn up(config: TunnelConfig) -> Result<Self, NetworkError> {
        let netlink = Netlink::new()?;
        let uplink = netlink.need_link(&config.uplink).await?;
        close_the_clear(&netlink, config.vxlan_port).await?;

        let name = config.device.as_str();
        let device = device::open_tun(name).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => NetworkError::NoTun(error),
            _ => NetworkError::system(format!("make the tunnel's device {name}"))(error),
        })?;
        set_sysctl(&format!("ipv6/conf/{name}/disable_ipv6"), "1")?;
        // Loose: the nodes' packets come in here, though the routes to them lead to the uplink.
        set_sysctl(&format!("ipv4/conf/{name}/rp_filter"), "2")?;
        let index = netlink.need_link(name).await?.index;
        let mtu = uplink.mtu.saturating_sub(Encryption::Tunnel.overhead());
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
        netlink.handle.route().add(route).replace().execute().await.map_err(refused("route by way"))?;

        let at = SocketAddrV4::new(config.vtep, config.port);
        let socket = device::bind_udp(at)
            .map_err(NetworkError::system(format!("take encrypted packets of other nodes at UDP {at}")))?;
        let shared = Arc::new(pump::Shared::new(config.vtep, config.vxlan_port));
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| NetworkError::system("make an event")(errno.into()))?;
        let mut tunnel = Self { config, shared, stop: Arc::new(stop), threads: Vec::new() };
        let (device, socket) = (Arc::new(device), Arc::new(socket));
        tunnel.start("gw-tunnel-out", pump::outward, (&device, &socket))?;
        tunnel.start("gw-tunnel-in", pump::inward, (&device, &socket))?;
        Ok(tunnel)
    }

    fn start(
        &mut self,
        name: &'static str,
        work: fn(&pump::Shared, &File, &UdpSocket, &EventFd) -> io::Result<()>,
        (device, socket): (&Arc<File>, &Arc<UdpSocket>),
    ) -> Result<(), NetworkError> {
        let (shared, stop) = (Arc::clone(&self.shared), Arc::clone(&self.stop));
        let (device, socket) = (Arc::clone(device), Arc::clone(socket));
        let thread = thread::Builder::new().name(name.into()).spawn(move || {
            if let Err(error) = work(&shared, &device, &socket, &stop) {
                tracing::error!(%error, thread = name, "the tunnel has broken; nothing passes it until godwitd is restarted");
            }
        });
        self.threads.push(thread.map_err(NetworkError::system("start a thread of the tunnel"))?);
        Ok(())
    }

    /// How it was configured.
    #[must_use]
    pub fn config(&self) -> &TunnelConfig {
        &self.config
    }

    /// Takes packets of this session from the node that takes ours at `at`.
    pub fn install(&self, at: SocketAddrV4, session: Session) {
        self.shared.write().install(at, session);
    }

    /// Whether packets of this session are taken.
    #[must_use]
    pub fn knows(&self, session: u64) -> bool {
        self.shared.read().sessions.contains_key(&session)
    }

    /// Encrypts packets to the node of this session with it, from now on. Does nothing when the
    /// session is not known.
    pub fn send_with(&self, session: u64) {
        self.shared.write().send_with(session);
    }

    /// What packets to the node at this address are encrypted with; nothing when none are sent to
    /// it, for want of keys.
    #[must_use]
    pub fn keyed(&self, node: Ipv4Addr) -> Option<Keyed> {
        let tables = self.shared.read();
        let session = tables.peers.get(&node)?.sending.as_ref()?;
        Some(Keyed { session: session.id(), since: session.made(), sent: session.sent() })
    }

    /// What did not pass.
    #[must_use]
    pub fn stopped(&self) -> Stopped {
        Stopped {
            refused: self.shared.refused.load(Ordering::Relaxed),
            unsent: self.shared.unsent.load(Ordering::Relaxed),
        }
    }

    /// Whether it works; it does not when somebody removed its device.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }

    /// Lets VXLAN's packets out in the clear, as without a tunnel. No error when they may already.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub async fn open_the_clear() -> Result<(), NetworkError> {
        let netlink = Netlink::new()?;
        remove_rules(&netlink).await?;
        match netlink.handle.route().del(dead_end()).execute().await {
            Err(error) if !has_errno(&error, libc::ESRCH) => {
                Err(NetworkError::kernel("remove the last route of the tunnel's table")(error))
            }
            _ => Ok(()),
        }
    }
}

/// Makes the kernel ask the tunnel's table, which leads nowhere yet, about VXLAN's packets.
async fn close_the_clear(netlink: &Netlink, vxlan_port: u16) -> Result<(), NetworkError> {
    let action = || format!("route packets to UDP port {vxlan_port} by the tunnel only");
    let added = netlink.handle.route().add(dead_end()).replace().execute().await;
    added.map_err(NetworkError::kernel(action()))?;
    remove_rules(netlink).await?;
    let request = netlink.handle.rule().add().v4().table_id(TABLE).priority(TABLE);
    // Only what this node sends itself: a service may use the port for what it likes.
    let mut request = request.action(RuleAction::ToTable).input_interface("lo".into());
    let port = RulePortRange { start: vxlan_port, end: vxlan_port };
    request
        .message_mut()
        .attributes
        .extend([RuleAttribute::IpProtocol(IpProtocol::Udp), RuleAttribute::DestinationPortRange(port)]);
    request.execute().await.map_err(NetworkError::kernel(action()))
}

fn dead_end() -> RouteMessage {
    RouteMessageBuilder::<Ipv4Addr>::new()
        .table_id(TABLE)
        .kind(RouteType::Unreachable)
        .priority(LAST_RESORT)
        .build()
}

async fn remove_rules(netlink: &Netlink) -> Result<(), NetworkError> {
    let failed = || NetworkError::kernel("change the routing rules");
    let rules: Vec<_> =
        netlink.handle.rule().get(IpVersion::V4).execute().try_collect().await.map_err(failed())?;
    let ours = RuleAttribute::Priority(TABLE);
    for rule in rules.into_iter().filter(|rule| rule.attributes.contains(&ours)) {
        netlink.handle.rule().del(rule).execute().await.map_err(failed())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overhead_is_that_of_the_packets() {
        let wire = session::HEADER + session::TAG;
        assert_eq!(Encryption::Tunnel.overhead(), 28 + u32::try_from(wire).unwrap_or(0));
        assert_eq!(Encryption::Off.overhead(), 0);
    }
}
