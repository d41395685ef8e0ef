//! Whether somebody else has a service's address on the uplink's segment: an ARP probe (RFC 5227,
//! section 2.1.1).
//!
//! A probe names no sender's address, so it spoils nobody's table, and a Linux that answers for an
//! address by proxy, as the node does that has the service now, keeps silent to it. The nodes' own
//! link-layer addresses do not count all the same.
//!
//! The RFC waits for seconds, as it is for hosts that take an address for good, after their link came
//! up. Here a service waits to be moved: a segment's hosts answer within a millisecond, and one that
//! takes longer than [`LISTENS`] is not found.

use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::unix::AsyncFd;
use tokio::time::{Instant, timeout_at};

use super::Overlay;
use crate::packet::{OFFLOAD_HEADER, PacketSocket};
use crate::{Mac, NetworkError, arp};

/// Probes that are sent: any one of them may be lost.
const PROBES: u32 = 3;
/// Between two of them.
const BETWEEN: Duration = Duration::from_millis(20);
/// How long answers are listened for, from the first on.
const LISTENS: Duration = Duration::from_millis(60);

impl Overlay {
    /// This node's own link-layer address on the uplink, with which it answers for its services.
    #[must_use]
    pub fn uplink_mac(&self) -> Mac {
        self.uplink_mac
    }

    /// Asks on the uplink who has `address`; the link-layer address of a host that answers, if any
    /// does that is not this node and not of `known`. Takes 60 ms when nobody does.
    ///
    /// # Errors
    /// When the kernel refuses to send or to listen.
    pub async fn find_foreign(&self, address: Ipv4Addr, known: &[Mac]) -> Result<Option<Mac>, NetworkError> {
        let failed = || format!("probe on {} for the address {address}", self.config.uplink);
        let listen = || {
            let socket = PacketSocket::new()?;
            socket.listen(self.uplink, arp::ETHERTYPE)?;
            socket.awaited()
        };
        let socket = listen().map_err(NetworkError::system(failed()))?;
        let found = self.ask(&socket, address, known).await.map_err(NetworkError::system(failed()));
        // The kernel takes some milliseconds to close it.
        let socket = socket.into_inner();
        tokio::task::spawn_blocking(move || drop(socket));
        found
    }

    async fn ask(
        &self,
        socket: &AsyncFd<PacketSocket>,
        address: Ipv4Addr,
        known: &[Mac],
    ) -> std::io::Result<Option<Mac>> {
        let begun = Instant::now();
        let mut buffer = Vec::new();
        for round in 1..=PROBES {
            arp::probe(&self.shared.sender, self.uplink, address, self.uplink_mac)?;
            let until = if round == PROBES { begun + LISTENS } else { begun + BETWEEN * round };
            while let Ok(ready) = timeout_at(until, socket.readable()).await {
                let mut ready = ready?;
                while let Some(frame) = socket.get_ref().take(&mut buffer)? {
                    let claimed = frame.get(OFFLOAD_HEADER..).and_then(|frame| arp::claims(frame, address));
                    if let Some(mac) = claimed.filter(|mac| *mac != self.uplink_mac && !known.contains(mac)) {
                        return Ok(Some(mac));
                    }
                }
                ready.clear_ready();
            }
        }
        Ok(None)
    }
}
