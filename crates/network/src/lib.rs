//! A node's overlay networks, and the addresses that move with a service.
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
//! - [`Overlay::steer`] forwards a service's frames to its destination; there [`Overlay::hold`] holds them until
//!   [`Overlay::open`] delivers them. Before the freeze [`Overlay::collect_newcomers`] and [`bar_newcomers`] keep new
//!   connections from beginning, so that no TCP handshake is frozen half done. Together this is the cut-over.
//! - [`Standing`] holds the packets of a frozen service's sockets, on the loopback too. [`Resend`] sends again what the peer
//!   may not have, so that no peer waits for a retransmission timer that ran on during the frozen time.
//! - [`Networks`] are those of a node, and tell which one an address is of.
//! - [`Guard`] accepts frames from known nodes only and isolates networks. [`WireGuard`] or [`Tunnel`] encrypts the traffic
//!   between nodes. Both are made before the overlay. [`Overlay::mend`] makes again what another program removed.
//! - [`Overlay::find_foreign`] asks whether another host has a service's address.
//! - [`Overlay::set_remote`] says that a service lives on another node, [`Overlay::set_absent`]
//!   that it lives nowhere.
//! - [`HostNetwork`] lists the machine's interfaces, addresses and routes.
//! - [`Overlay::capture`] shows the packets of a service, [`connections::inside`] its connections, [`round_trip`] how far a
//!   client is.
//!
//! Nothing is learned and nothing is flooded between nodes: godwit writes each forwarding entry.
//! All state is in the kernel ([`Overlay::list_endpoints`] reads it back), so a restarted daemon
//! continues where the last one stopped. Everything acts on the network namespace of the calling
//! thread. Nothing here knows of migrations.

mod arp;
mod config;
pub mod connections;
mod datapath;
mod distance;
mod echoes;
mod error;
mod filter;
mod foreign;
mod guard;
mod host_network;
mod inside;
mod ipv6;
mod netlink;
mod netns;
mod networks;
mod nft;
mod obstacle;
mod overlay;
mod packet;
mod port;
mod prefix6;
mod privacy;
mod probe;
mod publish;
mod raw;
mod redirect;
mod resend;
mod scout;
mod select;
mod standing;
mod subnet;
mod tracked;
mod tunnel;
mod wireguard;

pub use config::{Backend, OverlayConfig};
#[doc(hidden)]
pub use datapath::read_anything as read_any_openflow;
pub use distance::round_trip;
pub use error::NetworkError;
pub use filter::Filter;
pub use foreign::{check_namespace, forget_connections, silence, unsilence};
pub use guard::{Between, Guard, Guarding};
pub use host_network::{HostAddress, HostNetwork, HostRoute};
pub use netns::{enter, enter_blocking, join as join_namespace};
pub use networks::Networks;
pub use overlay::{
    Endpoint, ExistingEndpoint, Handed, Overlay, ServiceEndpoint, admit_newcomers, bar_newcomers, capture,
    underlay_address,
};
pub use prefix6::Prefix6;
pub use privacy::{Encryption, TunnelConfig, open_the_clear};
pub use probe::{Fact, probe};
pub use publish::{Protocol, Published};
pub use redirect::redirect_names;
pub use resend::{InDoubt, Resend, Resent};
pub use standing::{Standing, forget_standing};
pub use subnet::{Subnet, mac_of};
pub use tunnel::Tunnel;
pub use wireguard::{PeerStatus, PublicKey, Stopped, WireGuard, WireGuardStatus};

/// A link-layer (Ethernet) address.
pub type Mac = [u8; 6];

/// Writes a link-layer address the usual way, `02:67:0a:58:00:0a`.
#[must_use]
pub fn mac_to_string(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}
