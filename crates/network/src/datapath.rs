//! The switch of a node: what differs between the kernel's bridge and Open vSwitch.
//!
//! Both do the same. Services' veths are its ports, the gateway's interface is one of its ends, the tunnel
//! to the other nodes is another; what comes in by an open port goes to where an entry says that its
//! destination is, or nowhere. Namespaces, addresses, neighbours, published ports and the tunnel's own
//! entries are common, and no business of a [`Datapath`].

mod kernel;
mod openvswitch;

use std::collections::HashSet;
use std::fmt;
use std::net::Ipv4Addr;
use std::sync::Arc;

use async_trait::async_trait;

use crate::netlink::{Link, Netlink, PortState};
use crate::{Backend, Mac, NetworkError, OverlayConfig};

pub(crate) use openvswitch::examine;
pub use openvswitch::read_anything;

/// Where a service's link-layer address is.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Behind<'a> {
    /// Here.
    Port(&'a Link),
    /// At another node; which one is the tunnel's business.
    Tunnel,
}

/// A switch that is up.
#[async_trait]
pub(crate) trait Datapath: fmt::Debug + Send + Sync {
    /// The interface that has the gateway's address.
    fn bridge(&self) -> u32;

    /// The VXLAN device.
    fn vxlan(&self) -> u32;

    /// Interfaces that frames to this port, or to the tunnel, pass inside the switch: what comes in by them
    /// came in by another before.
    async fn passages(&self, port: &str) -> Result<Vec<u32>, NetworkError>;

    /// Interfaces by which frames to all services come into a switch that has to learn their way first
    /// (`scout.rs`).
    fn entrances(&self) -> Vec<u32>;

    /// Makes an interface a port, closed, and brings it up.
    async fn plug(&self, port: &Link) -> Result<(), NetworkError>;

    /// Forgets a port, which may be gone or never have been one. To be called before its interface is
    /// removed.
    async fn unplug(&self, port: &str) -> Result<(), NetworkError>;

    /// Whether the interface is a port, as of the last [`Datapath::open_ports`] where that has to be asked.
    async fn is_plugged(&self, port: &Link) -> Result<bool, NetworkError>;

    /// The names of those among these interfaces that are open ports.
    async fn open_ports(&self, among: &[Link]) -> Result<HashSet<String>, NetworkError>;

    /// Opens or closes a port for frames in both directions; its link stays up. It holds when this
    /// returns.
    async fn set_port(&self, port: &Link, state: PortState) -> Result<(), NetworkError>;

    /// Enters where the service with this address is, in place of what was entered before: one change.
    async fn set_entry(&self, address: Ipv4Addr, mac: Mac, behind: Behind<'_>) -> Result<(), NetworkError>;

    /// Removes the entry that the service is behind the tunnel, if that is what is entered.
    async fn delete_tunnel_entry(&self, address: Ipv4Addr, mac: Mac) -> Result<(), NetworkError>;

    /// Looks whether the switch is still the one that was brought up, where others can take it away.
    ///
    /// # Errors
    /// [`NetworkError::SwitchGone`], or when it does not answer.
    async fn check_unchanged(&self) -> Result<(), NetworkError>;

    /// What somebody removed of the switch and the VXLAN device, if anything, and can be made again here.
    ///
    /// # Errors
    /// When only a restart of the daemon makes it whole, or the kernel refuses.
    async fn damage(&self) -> Result<Option<String>, NetworkError>;

    /// Makes again what [`Datapath::damage`] found, with the same indices. Endpoints are not plugged in.
    async fn mend(&self, config: &OverlayConfig, mtu: u32) -> Result<(), NetworkError>;

    /// Removes all that [`up`] made.
    async fn down(&self) -> Result<(), NetworkError>;
}

/// Removes what [`up`] has made of a switch that it could not bring up.
pub(crate) async fn clear(netlink: &Netlink, config: &OverlayConfig) -> Result<(), NetworkError> {
    match &config.backend {
        Backend::Kernel => {
            netlink.delete_link(&config.vxlan).await?;
            netlink.delete_link(&config.bridge).await
        }
        Backend::OpenVswitch { run } => openvswitch::clear(netlink, config, run.clone()).await,
    }
}

/// Makes what is missing of the configured switch and its tunnel, and corrects what differs.
pub(crate) async fn up(
    netlink: &Arc<Netlink>,
    config: &OverlayConfig,
    mtu: u32,
) -> Result<Box<dyn Datapath>, NetworkError> {
    let netlink = Arc::clone(netlink);
    Ok(match &config.backend {
        Backend::Kernel => Box::new(kernel::Kernel::up(netlink, config, mtu).await?),
        Backend::OpenVswitch { run } => {
            Box::new(openvswitch::OpenVswitch::up(netlink, config, mtu, run.clone()).await?)
        }
    })
}
