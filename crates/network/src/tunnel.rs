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
//! The way to the device is that of [`crate::privacy`].
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

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::netlink::Netlink;
use crate::{Encryption, NetworkError, TunnelConfig, privacy};
pub use session::{Secret, Session};

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
/// [`crate::open_the_clear`].
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_overhead_is_that_of_the_packets() {
        let wire = session::HEADER + session::TAG;
        assert_eq!(Encryption::Tunnel.overhead(), 28 + u32::try_from(wire).unwrap_or(0));
    }
}
