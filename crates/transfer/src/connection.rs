//! A data connection between two nodes: TLS underneath, frames on top, and whose it is.

use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf};

use crate::frame::{FrameError, FrameReader, FrameWriter};
use crate::gauge::Gauge;
use crate::identity::Identity;
use crate::listen::{Accepted, ConnectError, connect};
use crate::node::NodeName;
use crate::options::ConnectOptions;
use crate::socket::{SecureStream, Socket, Traffic};
use crate::tls::Alpn;

/// What frames may travel over.
pub trait Carrier: AsyncRead + AsyncWrite + Unpin + Send + Sync + 'static {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + Sync + 'static> Carrier for S {}

/// The receiving half of a data connection.
pub type DataReader<S = SecureStream> = FrameReader<ReadHalf<S>>;
/// The sending half of a data connection.
pub type DataWriter<S = SecureStream> = FrameWriter<WriteHalf<S>>;

/// Limits of a data connection.
#[derive(Debug, Clone, Copy)]
pub struct ConnectionOptions {
    /// How to reach the peer.
    pub connect: ConnectOptions,
    /// How long the peer may be silent while a frame is awaited. `None` waits for ever: the kernel's
    /// probes still notice a dead link, but not a peer that hangs.
    pub idle_timeout: Option<Duration>,
    /// How long a write may make no progress.
    pub stall_timeout: Option<Duration>,
}

impl Default for ConnectionOptions {
    /// 30 s of silence: well above the longest step that a peer takes without saying anything.
    fn default() -> Self {
        let patience = Some(Duration::from_secs(30));
        Self { connect: ConnectOptions::default(), idle_timeout: patience, stall_timeout: patience }
    }
}

/// Why there is no data connection.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The node was not reached.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The node was reached, but the conversation did not start.
    #[error(transparent)]
    Frame(#[from] FrameError),
}

/// A data connection whose two ends have greeted each other.
///
/// Between nodes it is TLS; one over a bare [`Socket`] is of another type, which nothing in a daemon
/// takes: it is there to measure what TLS costs.
#[derive(Debug)]
pub struct Connection<S = SecureStream> {
    /// Frames from the peer.
    pub reader: DataReader<S>,
    /// Frames to the peer.
    pub writer: DataWriter<S>,
    peer: NodeName,
    remote: Option<SocketAddr>,
    traffic: Arc<Traffic>,
    gauge: Weak<Gauge>,
}

impl Connection {
    /// Connects to `node` at `address` (`host:port`). When this returns, the peer has accepted this
    /// node's certificate and has greeted it.
    pub async fn open(
        identity: &Identity,
        address: &str,
        node: &NodeName,
        options: &ConnectionOptions,
    ) -> Result<Self, OpenError> {
        let stream = connect(identity, address, node, Alpn::Data, options.connect).await?;
        let facts = facts(stream.get_ref().0);
        Ok(Self::start(stream, facts, node.clone(), options).await?)
    }

    /// Greets a node that has connected with [`Alpn::Data`].
    pub async fn accept(accepted: Accepted, options: &ConnectionOptions) -> Result<Self, FrameError> {
        let facts = facts(accepted.stream.get_ref().0);
        Self::start(accepted.stream, facts, accepted.peer, options).await
    }
}

impl Connection<Socket> {
    /// Greets whoever is at the other end of a TCP connection, under a name of the caller's choice:
    /// nothing is checked and nothing encrypted. For benchmarks.
    pub async fn unprotected(
        socket: Socket,
        peer: NodeName,
        options: &ConnectionOptions,
    ) -> Result<Self, FrameError> {
        let facts = facts(&socket);
        Self::start(socket, facts, peer, options).await
    }
}

/// What a connection tells of its socket.
type Facts = (Arc<Traffic>, Weak<Gauge>, Option<SocketAddr>);

fn facts(socket: &Socket) -> Facts {
    (socket.traffic(), socket.gauge(), socket.tcp().peer_addr().ok())
}

impl<S: Carrier> Connection<S> {
    async fn start(
        stream: S,
        (traffic, gauge, remote): Facts,
        peer: NodeName,
        options: &ConnectionOptions,
    ) -> Result<Self, FrameError> {
        let (read, write) = tokio::io::split(stream);
        let mut reader = FrameReader::new(read, peer.as_str());
        let mut writer = FrameWriter::new(write, peer.as_str());
        writer.set_stall_timeout(options.stall_timeout);
        reader.set_idle_timeout(Some(options.connect.timeout));
        // A peer that refuses us closes the connection, which may fail our greeting before its reason
        // is read: the reason comes first.
        let greeted = writer.flush().await;
        reader.start().await?;
        greeted?;
        reader.set_idle_timeout(options.idle_timeout);
        Ok(Self { reader, writer, peer, remote, traffic, gauge })
    }

    /// The node at the other end, by its certificate.
    pub fn peer(&self) -> &NodeName {
        &self.peer
    }

    /// Its address.
    pub fn remote(&self) -> Option<SocketAddr> {
        self.remote
    }

    /// Bytes on the network so far, TLS included. The counters outlive the connection.
    pub fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    /// The kernel's figures; there are none after the connection.
    pub fn gauge(&self) -> Weak<Gauge> {
        self.gauge.clone()
    }

    /// The two halves, for two tasks.
    pub fn into_split(self) -> (DataReader<S>, DataWriter<S>) {
        (self.reader, self.writer)
    }
}
