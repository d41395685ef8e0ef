//! The cut-over: frames for a service while it is frozen go on to the node that it goes to, and are held
//! there, in order, instead of being dropped.
//!
//! A dropped segment costs its sender a retransmission time-out, 200 ms and doubling, which is more than
//! a move itself may take.
//!
//! ```text
//!                       source                                   destination
//!                                                      [`Overlay::hold`]: what comes is kept
//!   uplink ──► gw0 ──►┬► gws… ─► service (frozen)             │
//!   services here ───►│ [`Overlay::steer`] moves this arrow   ▼
//!                     └► gwvx0 ─────────────────────► gwvx0 ─► queue
//!   other nodes ──► gwvx0 ─► passed on ─────────────► gwvx0 ─► queue
//!                                                             │ [`Overlay::open`]
//!                                                             ▼
//!                                                      gws… ─► service
//! ```
//!
//! One entry in the bridge's table moves, so no frame is in two places, and nothing has to be held
//! between: what the frozen service's sockets still send (what they had acknowledged, what was waiting to
//! go) leaves the source as before, until [`Overlay::close`]. A bridge does not send a frame back out of
//! the port it came in by, so frames of other nodes, which learn of the move later, are passed on by a
//! task of this process.
//!
//! The source holds a copy of what comes until the move is decided. If the service stays, [`Overlay::open`] delivers the
//! copy there, whatever has become of the destination.
//!
//! The sockets' receive queues are the stores: bounded, in order, and when one is full the oldest frames
//! are kept and new ones are dropped and counted.

use std::collections::HashMap;
use std::io;
use std::net::Ipv4Addr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use godwit_names::ServiceName;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::endpoint::ServiceEndpoint;
use super::{Overlay, Shared};
use crate::NetworkError;
use crate::datapath::Behind;
use crate::echoes::forget_time;
use crate::packet::{MOST_AT_ONCE, PacketSocket, Which};
use crate::port::port_name;

/// How much memory the kernel may use for the frames of one service, in bytes (it doubles the
/// figure for its own book-keeping). A client that streams at 1 Gbit/s for a tenth of a second
/// fits; one that waits for answers needs a few frames.
const LARGEST_STORE: i32 = 16 << 20;

/// For how long frames are passed on that still come to a node which a service has left: other nodes
/// learn its new place within a few round trips.
const GRACE: Duration = Duration::from_secs(5);

/// What was delivered to a service, by [`Overlay::open`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Handed {
    /// Frames that had waited for it.
    pub frames: u64,
    /// Frames for which there was no room.
    pub dropped: u64,
}

/// Frames that are held and passed on, by the service's name.
#[derive(Debug, Default)]
pub(crate) struct Holds(Mutex<HashMap<ServiceName, Hold>>);

#[derive(Debug)]
struct Hold {
    /// None once the service has left.
    store: Option<Arc<PacketSocket>>,
    /// At the source, passes on what other nodes send. It ends before the service can come back: two nodes
    /// that pass on to each other never stop.
    passing: Option<Passing>,
}

#[derive(Debug)]
struct Passing {
    task: AbortOnDropHandle<()>,
    /// Told when the service has left.
    left: CancellationToken,
}

impl Holds {
    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceName, Hold>> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, name: &ServiceName, store: Arc<PacketSocket>, passing: Option<Passing>) {
        let mut all = self.lock();
        all.retain(|_, hold| hold.passing.as_ref().is_none_or(|passing| !passing.task.is_finished()));
        all.insert(name.clone(), Hold { store: Some(store), passing });
    }
}

impl Overlay {
    /// From now on the frames are kept that other nodes send here for the service, for the next
    /// [`Overlay::open`]. To be called before any node may send some: while the service still runs
    /// elsewhere.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn hold(&self, service: &ServiceEndpoint) -> Result<(), NetworkError> {
        let store = self.store(service, Which::CameBy(self.vxlan))?;
        self.holds.put(&service.name, store, None);
        Ok(())
    }

    fn store(&self, service: &ServiceEndpoint, which: Which<'_>) -> Result<Arc<PacketSocket>, NetworkError> {
        let start = || {
            let socket = PacketSocket::new()?;
            socket.collect(service.mac, which, LARGEST_STORE)?;
            Ok(Arc::new(socket))
        };
        start().map_err(NetworkError::system(format!("hold the frames of the service {}", service.name)))
    }

    /// From now on frames for the service, which is frozen here, go to the node at `vtep`, which holds
    /// them. This node still answers for the address, and what the service's sockets send still leaves
    /// it. [`Overlay::open`] takes it back; [`Overlay::set_remote`] makes it final.
    ///
    /// # Errors
    /// When the kernel refuses, or `vtep` is this node.
    pub async fn steer(&self, service: &ServiceEndpoint, vtep: Ipv4Addr) -> Result<(), NetworkError> {
        let ServiceEndpoint { name, address, mac, .. } = service;
        if vtep == self.config.vtep {
            return Err(NetworkError::RemoteIsSelf { address: *address, vtep });
        }
        let (netlink, vxlan) = (&self.netlink, &self.config.vxlan);
        netlink.set_vxlan_entry(self.vxlan, vxlan, *mac, vtep).await?;
        // What comes between these and the moment is both delivered and held.
        let passing = self.store(service, Which::CameBy(self.vxlan))?;
        let passages = self.datapath.passages(&port_name(*address)).await?;
        let store = self.store(service, Which::CameOrSentBy(self.bridge, &passages))?;
        // The moment: before it frames reach the service's sockets.
        self.datapath.set_entry(*address, *mac, Behind::Tunnel).await?;
        let failed = NetworkError::system(format!("pass on new connections to the service {name}"));
        self.newcomers.send(name, &self.shared.sender, self.vxlan).map_err(failed)?;
        let (left, service) = (CancellationToken::new(), name.clone());
        let passing = pass_on(passing, Arc::clone(&self.shared), self.vxlan, left.clone());
        let task = tokio::spawn(async move {
            if let Err(error) = passing.await {
                tracing::warn!(%service, %error, "frames that still come here for the service are not passed on");
            }
        });
        let task = AbortOnDropHandle::new(task);
        self.holds.put(name, store, Some(Passing { task, left }));
        Ok(())
    }

    /// Hands in what waits for the service. Its port is open by now, so that its answers pass, but frames
    /// still go elsewhere; `take_over` changes that.
    pub(crate) async fn hand_in(
        &self,
        name: &ServiceName,
        port: u32,
        take_over: impl Future<Output = Result<(), NetworkError>>,
    ) -> Result<Handed, NetworkError> {
        let refused = || NetworkError::system(format!("hand in the held frames of the service {name}"));
        let mut handed = Handed::default();
        let store = self.holds.lock().get(name).and_then(|hold| hold.store.clone());
        let Some(store) = store else {
            take_over.await?;
            handed.frames += self.newcomers.send(name, &self.shared.sender, port).map_err(refused())?;
            self.newcomers.forget(name);
            self.holds.lock().remove(name);
            return Ok(handed);
        };
        handed.frames += self.newcomers.send(name, &self.shared.sender, port).map_err(refused())?;
        self.newcomers.forget(name);
        // In order: these have come before those that come by themselves.
        let hand = || store.send_all_changed(&self.shared.sender, port, forget_time);
        handed.frames += hand().map_err(refused())?;
        take_over.await?;
        store.collect_nothing().map_err(refused())?;
        handed.frames += hand().map_err(refused())?;
        handed.dropped = store.dropped().map_err(refused())?;
        if handed.dropped > 0 {
            tracing::warn!(
                service = %name,
                ?handed,
                "more frames came for the frozen service than could be held"
            );
        }
        self.holds.lock().remove(name);
        Ok(handed)
    }

    /// The service is not here any more: what was held of it is elsewhere too, and what still comes is
    /// passed on for a while.
    pub(crate) fn let_go(&self, name: &ServiceName) {
        self.newcomers.forget(name);
        let mut holds = self.holds.lock();
        match holds.get_mut(name) {
            Some(Hold { store, passing: Some(passing) }) => {
                *store = None;
                passing.left.cancel();
            }
            _ => drop(holds.remove(name)),
        }
    }
}

/// Sends on what other nodes send here for a service that is at another one, and for a while after it has
/// been told that it left.
async fn pass_on(
    from: Arc<PacketSocket>,
    shared: Arc<Shared>,
    vxlan: u32,
    left: CancellationToken,
) -> io::Result<()> {
    // SAFETY: the socket stays open, and the same descriptor, for as long as the AsyncFd holds it.
    let from = unsafe { AsyncFd::register_with_interest(from, Interest::READABLE) };
    let from = from.map_err(|error| error.into_parts().1)?;
    let passing = async {
        loop {
            let mut ready = from.readable().await?;
            if from.get_ref().send_all(&shared.sender, vxlan)? < MOST_AT_ONCE {
                ready.clear_ready();
            }
        }
    };
    let over = async {
        left.cancelled().await;
        tokio::time::sleep(GRACE).await;
    };
    tokio::select! {
        failed = passing => failed,
        () = over => Ok(()),
    }
}
