//! Clients of the other nodes' peer API, over the cluster's mutual TLS.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use godwit_api::v1::peer_client::PeerClient;
use godwit_transfer::{Alpn, ConnectOptions, Identity, NodeName};
use hyper_util::rt::TokioIo;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint, Uri};

/// Where identities are, below the state directory.
pub(crate) const IDENTITY: &str = "identity";

/// Largest message of a peer: 16 MiB hold the placements of some 100,000 services.
pub(crate) const MAX_SYNC: usize = 16 << 20;

/// How long a peer may take to accept a connection.
pub(crate) const CONNECT: Duration = Duration::from_secs(3);

/// How long a peer may take to answer a question.
const ANSWER: Duration = Duration::from_secs(5);

/// How much of a lasting stream may be on its way: a stream of packets must fill a fast link even where the round trip
/// is long.
const WINDOW: u32 = 4 << 20;

/// One client per peer; connections are made when first needed and again after they broke.
pub(crate) struct Peers {
    identity: watch::Sender<Arc<Identity>>,
    clients: Mutex<HashMap<(String, String), PeerClient<Channel>>>,
}

impl Peers {
    /// Clients that show this identity.
    pub(crate) fn new(identity: Arc<Identity>) -> Self {
        Self { identity: watch::channel(identity).0, clients: Mutex::new(HashMap::new()) }
    }

    /// What this node shows its peers.
    pub(crate) fn identity(&self) -> Arc<Identity> {
        Arc::clone(&self.identity.borrow())
    }

    /// Uses a renewed certificate from now on.
    pub(crate) fn set_identity(&self, identity: Identity) {
        self.identity.send_replace(Arc::new(identity));
    }

    /// Is told of renewed certificates.
    pub(crate) fn identities(&self) -> watch::Receiver<Arc<Identity>> {
        self.identity.subscribe()
    }

    /// Forgets the clients of a node.
    pub(crate) fn forget(&self, node: &str) {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        clients.retain(|(name, _), _| name != node);
    }

    /// The client of a node at an address.
    pub(crate) fn get(&self, node: &str, address: &str) -> PeerClient<Channel> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (node.to_string(), address.to_string());
        clients
            .entry(key)
            .or_insert_with(|| {
                PeerClient::new(self.channel(node, address, Some(ANSWER))).max_decoding_message_size(MAX_SYNC)
            })
            .clone()
    }

    /// A client without a time limit on answers, for streams that last.
    pub(crate) fn get_patient(&self, node: &str, address: &str) -> PeerClient<Channel> {
        PeerClient::new(self.channel(node, address, None))
    }

    fn channel(&self, node: &str, address: &str, answer: Option<Duration>) -> Channel {
        let identities = self.identity.subscribe();
        let (node, address) = (node.to_string(), address.to_string());
        // The URI only fills HTTP/2's :authority; the connector knows where to go.
        let mut endpoint = Endpoint::from_static("http://peer.godwit").connect_timeout(CONNECT);
        endpoint = match answer {
            Some(answer) => endpoint.timeout(answer),
            None => endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW),
        };
        endpoint.connect_with_connector_lazy(tower::service_fn(move |_: Uri| {
            let identity = Arc::clone(&identities.borrow());
            let (node, address) = (node.clone(), address.clone());
            async move {
                let node = NodeName::new(&node).map_err(std::io::Error::other)?;
                let options = ConnectOptions { timeout: CONNECT, ..ConnectOptions::default() };
                let stream = godwit_transfer::connect(&identity, &address, &node, Alpn::Peer, options).await;
                stream.map(TokioIo::new).map_err(std::io::Error::other)
            }
        }))
    }
}
