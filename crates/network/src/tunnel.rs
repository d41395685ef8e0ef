//! Privacy between nodes by WireGuard in user space: VXLAN's packets go through a TUN device, and godwitd encrypts
//! them for the node they are for. The protocol is the library boringtun's.
//!
//! ```text
//!   gwvx0 (VXLAN) ── UDP 4789 to node b ──► rule: to table 4788 ──► gwtun0 (TUN)
//!                                                  │ no gwtun0?        │
//!                                                  └► unreachable      ▼  godwitd: WireGuard
//!                                                              UDP to node b's port for it, by the uplink
//! ```
//!
//! The way to the device is that of [`crate::privacy`].
//!
//! It works on every kernel that has TUN devices, at the cost of two system calls and two copies for
//! each packet, and only while godwitd runs: a daemon that is gone has taken its keys with it.
//!
//! Who the other nodes are, and which public keys they have, the caller knows: [`Tunnel::install`]. A node is taken
//! for what it is by its address and its key: what comes from another address is refused unread.

mod device;
mod peer;
mod pump;

use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};
use std::time::SystemTime;

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::netlink::Netlink;
use crate::{
    Encryption, NetworkError, PeerStatus, PublicKey, Stopped, TunnelConfig, WireGuardStatus, privacy,
};
use peer::{Identity, Peer};

/// A node's tunnel, up. Its device is gone with it; the way around stays closed until
/// [`crate::open_the_clear`].
#[derive(Debug)]
pub struct Tunnel {
    config: TunnelConfig,
    own: Identity,
    /// How many nodes there have been.
    number: AtomicU32,
    socket: Arc<UdpSocket>,
    shared: Arc<pump::Shared>,
    stop: Arc<EventFd>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Tunnel {
    fn drop(&mut self) {
        if let Err(errno) = self.stop.write(1) {
            tracing::error!(%errno, "cannot tell the tunnel's threads to end");
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
        privacy::close_the_clear(&netlink, config.vxlan_port).await?;
        // It may still be there from when the node encrypted in the other way, and have the port.
        privacy::remove_wireguard(&netlink).await?;
        let name = config.device.as_str();
        let device = device::open_tun(name).map_err(|error| match error.raw_os_error() {
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => NetworkError::NoTun(error),
            _ => NetworkError::system(format!("make the tunnel's device {name}"))(error),
        })?;
        privacy::lead_through(&netlink, &config, Encryption::Tunnel).await?;

        let at = SocketAddrV4::new(config.vtep, config.port);
        let socket = device::bind_udp(at)
            .map_err(NetworkError::system(format!("take encrypted packets of other nodes at UDP {at}")))?;
        let shared = Arc::new(pump::Shared::new(config.vtep, config.vxlan_port));
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|errno| NetworkError::system("make an event")(errno.into()))?;
        let own = Identity::new().map_err(NetworkError::system("make a key"))?;
        let (number, socket, stop) = (AtomicU32::new(0), Arc::new(socket), Arc::new(stop));
        let mut tunnel = Self { config, own, number, socket, shared, stop, threads: Vec::new() };
        let device = Arc::new(device);
        tunnel.start("gw-tunnel-out", pump::outward, &device)?;
        tunnel.start("gw-tunnel-in", pump::inward, &device)?;
        tunnel.start("gw-tunnel-due", pump::due, &device)?;
        Ok(tunnel)
    }

    fn start(
        &mut self,
        name: &'static str,
        work: fn(&pump::Shared, &File, &UdpSocket, &EventFd) -> io::Result<()>,
        device: &Arc<File>,
    ) -> Result<(), NetworkError> {
        let (shared, stop) = (Arc::clone(&self.shared), Arc::clone(&self.stop));
        let (device, socket) = (Arc::clone(device), Arc::clone(&self.socket));
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

    /// What the other nodes must know.
    #[must_use]
    pub fn public_key(&self) -> PublicKey {
        self.own.public
    }

    /// Sends packets to the node that takes them at `at` and has this key, and takes its own; says whether
    /// that is new. A key that the node had before is forgotten. A handshake begins at once.
    ///
    /// # Errors
    /// When another node has this key.
    pub fn install(&self, at: SocketAddrV4, key: PublicKey) -> Result<bool, NetworkError> {
        let mut peers = self.shared.write();
        if !is_new(&peers, self.own.public, at, key)? {
            return Ok(false);
        }
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        let peer = Arc::new(Peer::new(&self.own, at, key, number));
        peers.insert(*at.ip(), Arc::clone(&peer));
        drop(peers);
        pump::do_due(&self.socket, &peer);
        Ok(true)
    }

    /// Forgets the nodes that are none of these.
    pub fn keep_only(&self, nodes: &BTreeSet<Ipv4Addr>) {
        self.shared.write().retain(|node, _| nodes.contains(node));
    }

    /// What is known of the other nodes now, and what did not pass.
    #[must_use]
    pub fn status(&self) -> WireGuardStatus {
        let seen = |peer: &Peer| PeerStatus {
            handshake: peer.age().and_then(|age| SystemTime::now().checked_sub(age)),
            packets: peer.sent(),
            ..PeerStatus::default()
        };
        let stopped = Stopped {
            refused: self.shared.refused.load(Ordering::Relaxed),
            unsent: self.shared.unsent.load(Ordering::Relaxed),
        };
        WireGuardStatus {
            nodes: self.shared.read().iter().map(|(node, peer)| (*node, seen(peer))).collect(),
            stopped,
        }
    }

    /// Whether it works; it does not when somebody removed its device.
    #[must_use]
    pub fn is_running(&self) -> bool {
        self.threads.iter().all(|thread| !thread.is_finished())
    }
}

/// Whether the node that takes packets at `at` is to have another key than it has.
fn is_new(
    peers: &HashMap<Ipv4Addr, Arc<Peer>>,
    own: PublicKey,
    at: SocketAddrV4,
    key: PublicKey,
) -> Result<bool, NetworkError> {
    let taken = |holder: String| NetworkError::KeyTaken { vtep: *at.ip(), holder };
    if key == own {
        return Err(taken("this node".into()));
    }
    match peers.values().find(|peer| peer.key == key) {
        Some(peer) if peer.at.ip() != at.ip() => Err(taken(format!("the node at {}", peer.at.ip()))),
        known => Ok(known.is_none_or(|peer| peer.at != at)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::peer::tests::{A, B, at};
    use super::*;

    #[test]
    fn the_overhead_is_that_of_the_packets() {
        assert_eq!(Encryption::Tunnel.overhead(), 28 + u32::try_from(peer::ADDED).unwrap_or(0));
    }

    #[test]
    fn no_node_takes_anothers_place_by_showing_its_key() {
        let (own, key, other) = (PublicKey([1; 32]), PublicKey([2; 32]), PublicKey([3; 32]));
        let identity = Identity::new().unwrap();
        let peers = [(B, Arc::new(Peer::new(&identity, at(B), key, 0)))].into();
        assert!(!is_new(&peers, own, at(B), key).unwrap(), "it is known as it is");
        assert!(is_new(&peers, own, at(B), other).unwrap(), "it was restarted");
        assert!(is_new(&peers, own, SocketAddrV4::new(B, 7219), key).unwrap());
        assert!(is_new(&peers, own, at(A), other).unwrap());
        for (key, holder) in [(key, "the node at 10.99.0.12"), (own, "this node")] {
            let message = is_new(&peers, own, at(A), key).unwrap_err().to_string();
            assert!(message.contains("10.99.0.11") && message.contains(holder), "{message}");
        }
    }
}
