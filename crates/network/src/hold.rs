//! Holding a service's frames while nobody can take them, instead of dropping them.
//!
//! A dropped segment costs its sender a retransmission time-out, 200 ms and doubling, which is
//! more than a move itself may take. So before a port is closed, a packet socket starts to collect
//! every frame that the node carries towards the service's link-layer address, wherever it enters:
//!
//! ```text
//!   uplink ──routed──► gw0 ──┐
//!   other nodes ──► gwvx0 ───┼──► (bridge) ──► closed port: dropped here,
//!   services here ──► gws… ──┘        │         and collected before, once
//!                                     ▼
//!                              queue of the socket
//! ```
//!
//! The socket's own receive queue is the store: bounded, in order, and when it is full the oldest
//! frames are kept and new ones are dropped. [`Overlay::release`] sends the frames from the bridge
//! to wherever the service is by then: its port here, or another node.

use crate::packet::PacketSocket;
use crate::{NetworkError, Overlay, ServiceEndpoint};

/// How much memory the kernel may use for the frames of one service, in bytes (it doubles the
/// figure for its own book-keeping). A client that streams at 1 Gbit/s for a tenth of a second
/// fits; one that waits for answers needs a few frames.
const LARGEST_STORE: i32 = 16 << 20;

/// Frames for a service, collected from the moment this is made. They are dropped with it, unless
/// it is given to [`Overlay::release`].
#[derive(Debug)]
#[must_use = "what is held is lost when this is dropped"]
pub struct Held {
    socket: PacketSocket,
    service: String,
}

impl Overlay {
    /// Starts to collect the frames that this node carries to the service. To be called just
    /// before [`Overlay::close`]: a frame that is delivered in between is delivered once more by
    /// [`Overlay::release`], as any network may do.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hold(&self, service: &ServiceEndpoint) -> Result<Held, NetworkError> {
        let start = || {
            let socket = PacketSocket::new()?;
            socket.collect(service.mac, self.bridge, LARGEST_STORE)?;
            Ok(socket)
        };
        let socket = start()
            .map_err(NetworkError::system(format!("hold the frames of the service {}", service.name)))?;
        Ok(Held { socket, service: service.name.clone() })
    }

    /// Sends what was held to where the service is now, in the order it came, and stops holding.
    /// To be called right after [`Overlay::open`] or [`Overlay::set_remote`]: what comes in
    /// between is both delivered and held. Returns the number of frames.
    ///
    /// # Errors
    /// When the kernel refuses; the frames that are not yet sent are dropped.
    pub fn release(&self, held: Held) -> Result<usize, NetworkError> {
        let send_all = || -> std::io::Result<usize> {
            // It would collect them again.
            held.socket.collect_nothing()?;
            let (mut count, mut buffer) = (0, Vec::new());
            while let Some(frame) = held.socket.take(&mut buffer)? {
                self.sender.send(self.bridge, frame)?;
                count += 1;
            }
            Ok(count)
        };
        let released = send_all()
            .map_err(NetworkError::system(format!("release the frames of the service {}", held.service)))?;
        tracing::debug!(service = held.service, frames = released, "released held frames");
        // The kernel waits some milliseconds before it lets such a socket go.
        tokio::task::spawn_blocking(move || drop(held));
        Ok(released)
    }
}
