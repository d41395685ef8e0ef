//! The networks of a node, each an [`Overlay`]: they share the node's ports and its uplink, and nothing
//! that a service sends to one of them reaches another ([`crate::Guard`]).
//!
//! Their subnets do not overlap, so an address tells its network.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::net::Ipv4Addr;
use std::sync::{Arc, PoisonError, RwLock};

use tokio::sync::{Mutex, mpsc};
use tokio_util::task::AbortOnDropHandle;

use crate::guard::Between;
use crate::{NetworkError, Overlay, OverlayConfig, Subnet, datapath};

/// The networks that are up on a node.
#[derive(Debug)]
pub struct Networks {
    first: Arc<Overlay>,
    others: RwLock<Vec<Other>>,
    /// The gateways that services ask for names.
    name_servers: RwLock<BTreeSet<Ipv4Addr>>,
    /// One is brought up or taken down at a time.
    changing: Mutex<()>,
    failed: mpsc::UnboundedSender<NetworkError>,
    failures: Mutex<mpsc::UnboundedReceiver<NetworkError>>,
    _following: AbortOnDropHandle<()>,
}

#[derive(Debug)]
struct Other {
    overlay: Arc<Overlay>,
    following: AbortOnDropHandle<()>,
}

impl Networks {
    /// A node whose first network is up. Needs a tokio runtime.
    #[must_use]
    pub fn new(first: Overlay) -> Self {
        let first = Arc::new(first);
        let (failed, failures) = mpsc::unbounded_channel();
        let _following = follow(&first, &failed);
        Self {
            first,
            others: RwLock::default(),
            name_servers: RwLock::default(),
            changing: Mutex::default(),
            failed,
            failures: Mutex::new(failures),
            _following,
        }
    }

    /// The network that every cluster has.
    #[must_use]
    pub fn first(&self) -> &Arc<Overlay> {
        &self.first
    }

    /// All of them, the first one first.
    #[must_use]
    pub fn all(&self) -> Vec<Arc<Overlay>> {
        let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
        std::iter::once(&self.first).chain(others.iter().map(|other| &other.overlay)).cloned().collect()
    }

    /// The network of an address.
    ///
    /// # Errors
    /// [`NetworkError::NoNetwork`].
    pub fn of(&self, address: Ipv4Addr) -> Result<Arc<Overlay>, NetworkError> {
        let found = self.all().into_iter().find(|overlay| overlay.config().subnet.contains(address));
        found.ok_or(NetworkError::NoNetwork { address })
    }

    /// Notes whether services are to ask a gateway for names.
    pub fn set_name_server(&self, gateway: Ipv4Addr, asked: bool) {
        let mut all = self.name_servers.write().unwrap_or_else(PoisonError::into_inner);
        if asked {
            all.insert(gateway)
        } else {
            all.remove(&gateway)
        };
    }

    /// The gateway that a service with this address is to ask for names; none where the node's own name servers are.
    #[must_use]
    pub fn name_server(&self, address: Ipv4Addr) -> Option<Ipv4Addr> {
        let gateway = self.of(address).ok()?.config().subnet.gateway();
        self.name_servers.read().unwrap_or_else(PoisonError::into_inner).get(&gateway).copied()
    }

    /// Brings a network up; nothing when it is up already.
    ///
    /// # Errors
    /// As [`Overlay::up`]. What was made of it is removed.
    pub async fn add(&self, config: OverlayConfig) -> Result<Arc<Overlay>, NetworkError> {
        let _alone = self.changing.lock().await;
        let is_up = |overlay: &Arc<Overlay>| {
            (overlay.config().subnet, overlay.config().vni) == (config.subnet, config.vni)
        };
        if let Some(up) = self.all().into_iter().find(is_up) {
            return Ok(up);
        }
        // What is there may carry services, whatever is wrong with it.
        let existed = self.first.netlink.link(&config.bridge).await?.is_some();
        let overlay = match self.first.up_beside(config.clone()).await {
            Ok(overlay) => Arc::new(overlay),
            Err(error) => {
                if !existed && let Err(second) = datapath::clear(&self.first.netlink, &config).await {
                    tracing::warn!(bridge = config.bridge, error = %second, "a half-made network is left");
                }
                return Err(error);
            }
        };
        let following = follow(&overlay, &self.failed);
        let mut others = self.others.write().unwrap_or_else(PoisonError::into_inner);
        others.push(Other { overlay: Arc::clone(&overlay), following });
        Ok(overlay)
    }

    /// Takes a network down, with all endpoints in it; nothing when it is not up. The first one stays.
    ///
    /// # Errors
    /// When the kernel refuses; calling it again goes on.
    pub async fn remove(&self, subnet: Subnet) -> Result<(), NetworkError> {
        let _alone = self.changing.lock().await;
        let found = {
            let others = self.others.read().unwrap_or_else(PoisonError::into_inner);
            let found = others.iter().find(|other| other.overlay.config().subnet == subnet);
            found.map(|other| {
                // Its end is no failure.
                other.following.abort();
                Arc::clone(&other.overlay)
            })
        };
        let Some(overlay) = found else { return Ok(()) };
        overlay.down().await?;
        let mut others = self.others.write().unwrap_or_else(PoisonError::into_inner);
        others.retain(|other| other.overlay.config().subnet != subnet);
        Ok(())
    }

    /// What must not reach each other, for the guard.
    #[must_use]
    pub fn between(&self) -> Vec<Between> {
        self.all().iter().map(|overlay| Between::of(overlay.config())).collect()
    }

    /// Waits until one of them can no longer be kept right by [`Overlay::follow_uplink`], which runs for
    /// each; why.
    pub async fn failed(&self) -> NetworkError {
        match self.failures.lock().await.recv().await {
            Some(failure) => failure,
            // A sender is kept here: it does not come to that.
            None => std::future::pending().await,
        }
    }
}

fn follow(overlay: &Arc<Overlay>, failed: &mpsc::UnboundedSender<NetworkError>) -> AbortOnDropHandle<()> {
    let (overlay, failed) = (Arc::clone(overlay), failed.clone());
    AbortOnDropHandle::new(tokio::spawn(async move {
        let Err(error) = overlay.follow_uplink().await as Result<Infallible, _>;
        // Nobody listens any more when the node ends.
        let _ = failed.send(error);
    }))
}
