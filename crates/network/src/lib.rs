//! A node's overlay network, and the address that moves with a service.
//!
//! ```text
//!   service namespace            node                                   other nodes, clients
//!  ┌────────────────┐   ┌──────────────────────────────────┐
//!  │ eth0 10.88.0.10├───┤gws… ┐                            │
//!  │ 02:67:0a:58:…  │   │     ├ gw0 (10.88.0.1, routed) ───┤ uplink  ── clients (ARP answered here)
//!  └────────────────┘   │     └ gwvx0 (VXLAN) ─────────────┤ uplink  ── nodes (UDP 4789)
//!                       └──────────────────────────────────┘
//! ```
//!
//! - [`Overlay::up`] makes the bridge and the VXLAN device, or corrects what it finds.
//! - [`Overlay::create_endpoint`] makes a service's network namespace and its veth, closed: not a
//!   frame passes. [`Overlay::open`] lets frames through, takes the address over and announces it;
//!   [`Overlay::close`] stops them again without the service seeing its link go down.
//! - [`Overlay::steer`] sends what comes for a service on to the node that it goes to, and
//!   [`Overlay::hold`] keeps it there until [`Overlay::open`] hands it in.
//! - [`Overlay::set_remote`] says that a service lives on another node, [`Overlay::set_absent`]
//!   that it lives nowhere.
//!
//! Nothing is learned and nothing is flooded between nodes: godwit writes each forwarding entry.
//! All state is in the kernel ([`Overlay::list_endpoints`] reads it back), so a restarted daemon
//! continues where the last one stopped. Everything acts on the network namespace of the calling
//! thread. Nothing here knows of migrations.

mod arp;
mod datapath;
mod endpoint;
mod error;
mod foreign;
mod hold;
mod netlink;
mod netns;
mod offload;
mod overlay;
mod packet;
mod probe;
mod publish;
mod subnet;

pub use datapath::Backend;
pub use endpoint::{Endpoint, ExistingEndpoint, Protocol, Published, ServiceEndpoint};
pub use error::NetworkError;
pub use foreign::{check_namespace, forget_connections, silence, unsilence};
pub use hold::Handed;
pub use netns::{enter, enter_blocking};
pub use overlay::{Overlay, OverlayConfig, underlay_address};
pub use probe::{Fact, probe};
pub use subnet::{Subnet, mac_of};

/// A link-layer (Ethernet) address.
pub type Mac = [u8; 6];

/// Writes a link-layer address the usual way, `02:67:0a:58:00:0a`.
#[must_use]
pub fn mac_to_string(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
