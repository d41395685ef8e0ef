//! Connections that somebody asks for in the moment before a service is frozen.
//!
//! A connection in the making is in no process: it is a request at a listening socket, which CRIU cannot take
//! along, and the last word of the client (ACK) would meet a socket that knows nothing of it and be answered
//! with a reset. So shortly before the freeze no more are begun: their first frames (SYN) are kept, and
//! those that were begun before come about while the service still runs.
//!
//! Where an answer of the service (SYN, ACK) was lost, the kernel would say it again while the service is on its way, and
//! the client would take a connection for made that nobody knows. So it does not: the client, which has no answer, sends
//! its SYN again, and that reaches the destination.
//!
//! ```text
//!   collect_newcomers   a copy of each SYN on its way to the service's port is kept
//!   bar_newcomers       none reaches the service's sockets any more, and none is answered again
//!      … until none is in the making …
//!   freeze, steer       what was kept goes to the destination ahead of what comes now
//! ```
//!
//! A service that stays has them handed in by [`Overlay::open`], once [`admit_newcomers`] lets them through.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use godwit_names::ServiceName;

use super::Overlay;
use super::endpoint::ServiceEndpoint;
use crate::packet::PacketSocket;
use crate::port::port_name;
use crate::select::openings_sent;
use crate::{NetworkError, nft};

/// How much memory the kernel may use for them, in bytes: some thousand connections.
const STORE: i32 = 1 << 20;

/// Comes before every other rule, and before connections are tracked. Once no SYN comes in, answers that go out are
/// repeated ones.
const BAR: &str = "\
add table inet godwit-newcomers
add chain inet godwit-newcomers in { type filter hook prerouting priority -400; }
add chain inet godwit-newcomers out { type filter hook output priority -400; }
flush table inet godwit-newcomers
add rule inet godwit-newcomers in iifname != \"lo\" tcp flags & (syn | ack) == syn drop
add rule inet godwit-newcomers out oifname != \"lo\" tcp flags & (syn | ack) == (syn | ack) drop
";
/// Adding it first makes deleting it succeed in any case.
const ADMIT: &str = "add table inet godwit-newcomers\ndelete table inet godwit-newcomers\n";

/// First frames of connections, by the service's name.
#[derive(Debug, Default)]
pub(crate) struct Newcomers(Mutex<HashMap<ServiceName, Collected>>);

#[derive(Debug)]
struct Collected {
    from: PacketSocket,
    /// What was taken from there.
    frames: Vec<Vec<u8>>,
}

impl Newcomers {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceName, Collected>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what is kept of the service from another socket on the interface, and keeps it.
    pub(crate) fn send(&self, name: &ServiceName, sender: &PacketSocket, index: u32) -> io::Result<u64> {
        let mut all = self.lock();
        let Some(Collected { from, frames }) = all.get_mut(name) else { return Ok(0) };
        let mut buffer = Vec::new();
        while let Some(frame) = from.take(&mut buffer)? {
            frames.push(frame.to_vec());
        }
        let mut sent = 0;
        for frame in frames.iter() {
            sender.send(index, frame)?;
            sent += 1;
        }
        Ok(sent)
    }

    pub(crate) fn forget(&self, name: &ServiceName) {
        self.lock().remove(name);
    }
}

impl Overlay {
    /// From now on the first frames of connections to the service are kept, beside that they reach it.
    ///
    /// # Errors
    /// [`NetworkError::NoEndpoint`] when it was not created, or when the kernel refuses.
    pub async fn collect_newcomers(&self, service: &ServiceEndpoint) -> Result<(), NetworkError> {
        let name = port_name(service.address);
        let port = self.netlink.link(&name).await?;
        let port = port.ok_or_else(|| NetworkError::NoEndpoint { name: service.name.clone() })?;
        let start = || {
            let socket = PacketSocket::new()?;
            socket.collect_at(port.index, &mut openings_sent(), STORE)?;
            Ok(socket)
        };
        let from = start()
            .map_err(NetworkError::system(format!("hold new connections to the service {}", service.name)))?;
        let collected = Collected { from, frames: Vec::new() };
        self.newcomers.lock().insert(service.name.clone(), collected);
        Ok(())
    }
}

/// From here on new connections to a service in the namespace are held back.
///
/// # Errors
/// When it cannot be entered, or nft refuses.
pub async fn bar_newcomers(netns: &Path) -> Result<(), NetworkError> {
    nft::run_in(netns, "hold new connections back in", BAR).await
}

/// Connections can be begun again; no error when they could.
///
/// # Errors
/// As for [`bar_newcomers`].
pub async fn admit_newcomers(netns: &Path) -> Result<(), NetworkError> {
    match nft::run_in(netns, "admit new connections in", ADMIT).await {
        // Without nft nobody was held back.
        Err(NetworkError::NoNft(_)) => Ok(()),
        other => other,
    }
}
