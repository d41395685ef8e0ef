//! Connections of other nodes: each is a member's, and goes to the peer API or to the migrations.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use godwit_migration::link::{self, Link};
use godwit_migration::resources::NodeResources;
use godwit_migration::{destination, error_chain};
use godwit_transfer::{Accepted, Alpn, Connection, Listener, NodeName, SecureStream};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::mpsc;
use tonic::transport::server::Connected;

use crate::node::Node;
use crate::peer_api::Caller;

/// Accepts connections for as long as it is awaited. Those for the peer API go to `peers`.
pub(super) async fn accept_peers(
    node: Arc<Node>,
    mut listener: Listener,
    peers: mpsc::Sender<std::io::Result<PeerStream>>,
) {
    let mut identities = node.peers.identities();
    let mut clock = tokio::time::interval(Duration::from_secs(1));
    let data = DataSessions::default();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            _ = clock.tick() => {
                let members = node.state.members().unwrap_or_default();
                let addresses = members.iter().filter_map(|m| m.address.parse::<SocketAddr>().ok());
                listener.known().set(addresses.map(|address| address.ip()));
                continue;
            }
            Ok(()) = identities.changed() => {
                let identity = Arc::clone(&identities.borrow_and_update());
                if let Err(error) = listener.set_identity(&identity) {
                    tracing::error!(error = %error_chain(&error), "cannot use the renewed certificate; other nodes see the old one");
                }
                continue;
            }
        };
        match accepted.alpn {
            Alpn::Data => {
                let Some(session) = data.enter(&accepted.peer) else {
                    tracing::warn!(node = %accepted.peer, "has too many data connections; connection closed");
                    continue;
                };
                let local = Arc::clone(node.local());
                tokio::spawn(async move {
                    receive(local, accepted).await;
                    drop(session);
                });
            }
            _ => {
                let membership = accepted.stream.get_ref().0.membership();
                let caller = Caller { node: accepted.peer, membership };
                let stream = PeerStream { caller, stream: accepted.stream };
                if !hand_on(&peers, Ok(stream)) {
                    return;
                }
            }
        }
    }
}

/// Hands a connection on, or closes it where too many wait: data connections do not wait behind it. No when none is
/// taken any more.
fn hand_on<T>(peers: &mpsc::Sender<T>, stream: T) -> bool {
    match peers.try_send(stream) {
        Ok(()) => true,
        Err(mpsc::error::TrySendError::Full(_)) => {
            tracing::warn!("too many connections of other nodes wait to be served; one is closed");
            true
        }
        Err(mpsc::error::TrySendError::Closed(_)) => false,
    }
}

/// Data connections of one member at the same time: all streams of a dozen migrations.
const MAX_DATA_SESSIONS: usize = 256;

/// How many data connections each member has.
#[derive(Clone, Default)]
struct DataSessions(Arc<Mutex<HashMap<NodeName, Arc<()>>>>);

impl DataSessions {
    /// One more, which ends when what is returned is dropped; none where there are too many.
    fn enter(&self, peer: &NodeName) -> Option<Arc<()>> {
        let mut sessions = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let session = sessions.entry(peer.clone()).or_default();
        (Arc::strong_count(session) <= MAX_DATA_SESSIONS).then(|| Arc::clone(session))
    }
}

async fn receive(local: Arc<NodeResources>, accepted: Accepted) {
    let remote = accepted.remote;
    match Connection::accept(accepted, &link::options()).await {
        Ok(connection) => destination::serve(local, Link::new(connection)).await,
        Err(error) => tracing::warn!(%remote, %error, "a data connection violated the protocol"),
    }
}

/// A peer's connection that knows whose it is.
pub(super) struct PeerStream {
    caller: Caller,
    stream: SecureStream,
}

impl Connected for PeerStream {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

impl AsyncRead for PeerStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for PeerStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[u8],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, data)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_for_which_there_is_no_room_is_closed_and_nothing_waits_for_it() {
        let (peers, mut taken) = mpsc::channel(1);
        let connections: [_; 3] = std::array::from_fn(|_| Arc::new(()));
        let open = |number: usize| Arc::strong_count(&connections[number]) > 1;
        assert!(hand_on(&peers, Arc::clone(&connections[0])));
        assert!(hand_on(&peers, Arc::clone(&connections[1])));
        assert!(open(0) && !open(1));
        assert!(taken.try_recv().is_ok());
        assert!(hand_on(&peers, Arc::clone(&connections[2])) && open(2));
        drop(taken);
        assert!(!hand_on(&peers, Arc::clone(&connections[1])) && !open(1));
    }

    #[test]
    fn one_members_data_connections_are_bounded_and_take_no_room_from_others() {
        let sessions = DataSessions::default();
        let (b, c) = (NodeName::new("b").unwrap(), NodeName::new("c").unwrap());
        let mut held: Vec<_> = (0..MAX_DATA_SESSIONS).map(|_| sessions.enter(&b).unwrap()).collect();
        assert!(sessions.enter(&b).is_none());
        assert!(sessions.enter(&c).is_some());
        held.pop();
        assert!(sessions.enter(&b).is_some());
    }
}
