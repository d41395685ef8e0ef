//! Connections made and accepted: TCP, TLS, and who is at the other end.
//!
//! Handshakes run beside each other, so that a slow or silent client holds up nobody. They are
//! bounded in time and in number, and some are reserved for members (`admission`).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::{CertificateError, ServerConfig};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::admission::{Admission, KnownAddresses, Verdict};
use crate::certificate::node_of;
use crate::identity::Identity;
use crate::node::NodeName;
use crate::options::{ConnectOptions, ListenOptions};
use crate::removal::{Membership, Removals};
use crate::socket::{SecureStream, Socket};
use crate::tls::{self, Alpn, TlsError};
use crate::verify;

/// How long to wait after the kernel refused to accept (usually: no file descriptor left), in the
/// hope that a connection ends meanwhile.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Why a node cannot listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    /// The address cannot be had.
    #[error("cannot listen on {address}; is another godwitd running, and is the address this machine's?")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The identity cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A connection from another node of the cluster.
#[derive(Debug)]
pub struct Accepted {
    /// The node, by its certificate.
    pub peer: NodeName,
    /// The protocol it wants to speak.
    pub alpn: Alpn,
    /// Where it called from.
    pub remote: SocketAddr,
    /// The connection.
    pub stream: SecureStream,
}

/// Accepts connections of other nodes. Dropping it closes the port and ends pending handshakes.
#[derive(Debug)]
pub struct Listener {
    handshakes: Handshakes,
    removals: Removals,
}

impl Listener {
    /// Listens on `address` as the node that `identity` is.
    pub async fn bind(
        address: SocketAddr,
        identity: &Identity,
        options: ListenOptions,
    ) -> Result<Self, ListenError> {
        let handshakes = Handshakes::bind(address, tls::server_config(identity)?, options).await?;
        Ok(Self { handshakes, removals: identity.removals().clone() })
    }

    /// Where it listens (the port, if 0 was asked for).
    pub fn local_addr(&self) -> SocketAddr {
        self.handshakes.local
    }

    /// Uses another identity for the connections to come: a renewed certificate.
    pub fn set_identity(&mut self, identity: &Identity) -> Result<(), TlsError> {
        self.handshakes.acceptor = TlsAcceptor::from(tls::server_config(identity)?);
        self.removals = identity.removals().clone();
        Ok(())
    }

    /// The addresses for whose handshakes some are reserved.
    pub fn known(&self) -> &KnownAddresses {
        self.handshakes.admission.known()
    }

    /// The next connection whose handshake succeeded. Failed ones are logged and passed over.
    /// Handshakes make progress, and new ones start, while this is being awaited or dropped and
    /// called again: it may be used in `select!`.
    pub async fn accept(&mut self) -> Accepted {
        loop {
            let (mut stream, remote) = self.handshakes.next().await;
            keep_to_members(&mut stream, &self.removals);
            let connection = stream.get_ref().1;
            let peer = connection.peer_certificates().and_then(|chain| node_of(chain.first()?));
            let alpn = connection.alpn_protocol().and_then(Alpn::from_bytes);
            match (peer, alpn) {
                (Some(peer), Some(alpn @ (Alpn::Peer | Alpn::Data))) => {
                    return Accepted { peer, alpn, remote, stream };
                }
                (..) => self.handshakes.refusals.log(remote, &"it is a node and names no protocol"),
            }
        }
    }
}

/// Accepts connections of hosts that want to become nodes: they have no certificate, but know the
/// cluster's.
#[derive(Debug)]
pub struct JoinListener {
    handshakes: Handshakes,
}

impl JoinListener {
    /// Listens on `address`.
    pub async fn bind(
        address: SocketAddr,
        identity: &Identity,
        options: ListenOptions,
    ) -> Result<Self, ListenError> {
        Ok(Self { handshakes: Handshakes::bind(address, tls::join_server_config(identity)?, options).await? })
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.handshakes.local
    }

    /// Uses another identity for the connections to come: a renewed certificate.
    pub fn set_identity(&mut self, identity: &Identity) -> Result<(), TlsError> {
        self.handshakes.acceptor = TlsAcceptor::from(tls::join_server_config(identity)?);
        Ok(())
    }

    /// The next connection that speaks the join protocol, as [`Listener::accept`].
    pub async fn accept(&mut self) -> (SecureStream, SocketAddr) {
        loop {
            let (stream, remote) = self.handshakes.next().await;
            if stream.get_ref().1.alpn_protocol() == Some(Alpn::Join.as_bytes()) {
                return (stream, remote);
            }
            self.handshakes.refusals.log(remote, &"it names no protocol");
        }
    }
}

/// Whether one more refusal is logged: whoever reaches the port can cause as many as it likes.
#[derive(Debug)]
struct Refusals {
    /// When the first of this period came.
    begun: Instant,
    /// How many came in it.
    count: u64,
}

impl Refusals {
    /// How long a period is.
    const PERIOD: Duration = Duration::from_secs(10);
    /// How many refusals are logged in one.
    const LOGGED: u64 = 10;

    fn new(now: Instant) -> Self {
        Self { begun: now, count: 0 }
    }

    /// Counts a refusal: whether it is logged, and how many of the period before were not.
    fn count(&mut self, now: Instant) -> (bool, u64) {
        let mut silent = 0;
        if now.duration_since(self.begun) >= Self::PERIOD {
            silent = self.count.saturating_sub(Self::LOGGED);
            *self = Self::new(now);
        }
        self.count += 1;
        (self.count <= Self::LOGGED, silent)
    }

    /// Logs a refusal, or only counts it.
    fn log(&mut self, remote: SocketAddr, reason: &dyn std::fmt::Display) {
        let (logged, silent) = self.count(Instant::now());
        if silent > 0 {
            tracing::warn!(silent, "further connections were refused that are not listed");
        }
        if logged {
            tracing::warn!(%remote, %reason, "connection refused");
        }
    }
}

/// A listening socket and the handshakes that are under way.
struct Handshakes {
    tcp: TcpListener,
    local: SocketAddr,
    acceptor: TlsAcceptor,
    options: ListenOptions,
    pending: JoinSet<(SocketAddr, io::Result<SecureStream>)>,
    admission: Admission,
    refusals: Refusals,
}

impl std::fmt::Debug for Handshakes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handshakes")
            .field("local", &self.local)
            .field("pending", &self.admission.len())
            .finish_non_exhaustive()
    }
}

impl Handshakes {
    async fn bind(
        address: SocketAddr,
        config: Arc<ServerConfig>,
        options: ListenOptions,
    ) -> Result<Self, ListenError> {
        let bound = |source| ListenError::Bind { address, source };
        let tcp = TcpListener::bind(address).await.map_err(bound)?;
        let local = tcp.local_addr().map_err(bound)?;
        let (pending, admission) = (JoinSet::new(), Admission::default());
        let refusals = Refusals::new(Instant::now());
        Ok(Self { tcp, local, acceptor: TlsAcceptor::from(config), options, pending, admission, refusals })
    }

    /// The next finished handshake. Both branches lose nothing when they are not taken.
    async fn next(&mut self) -> (SecureStream, SocketAddr) {
        loop {
            tokio::select! {
                Some(finished) = self.pending.join_next_with_id() => {
                    let (id, (remote, result)) = match finished {
                        Ok(finished) => finished,
                        // It has made place for another one, which was said then.
                        Err(ended) => {
                            self.admission.leave(ended.id());
                            continue;
                        }
                    };
                    self.admission.leave(id);
                    match result {
                        Ok(stream) => return (stream, remote),
                        Err(error) => self.refusals.log(remote, &error),
                    }
                }
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, remote)) => self.start(stream, remote),
                    Err(error) if is_of_one_connection(&error) => {}
                    Err(error) => {
                        tracing::error!(local = %self.local, %error, "cannot accept connections");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        }
    }

    fn start(&mut self, stream: TcpStream, remote: SocketAddr) {
        match self.admission.judge(remote.ip(), &self.options, Instant::now()) {
            Verdict::Enter => {}
            Verdict::InPlaceOf(oldest) => self.admission.end(oldest),
            Verdict::Refuse(reason) => {
                self.refusals.log(remote, &reason);
                return;
            }
        }
        let (acceptor, options) = (self.acceptor.clone(), self.options);
        let abort = self.pending.spawn(async move {
            let handshake = async {
                let socket = Socket::new(stream, &options.link)?;
                acceptor.accept(socket).await.map(SecureStream::from)
            };
            let result = match tokio::time::timeout(options.handshake_timeout, handshake).await {
                Ok(result) => result,
                Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the TLS handshake took too long")),
            };
            (remote, result)
        });
        self.admission.enter(abort.id(), remote.ip(), abort);
    }
}

/// The connection fails once its peer is removed from the cluster.
fn keep_to_members(stream: &mut SecureStream, removals: &Removals) {
    let chain = stream.get_ref().1.peer_certificates();
    let membership = chain.and_then(|chain| Membership::of(removals, chain.first()?));
    stream.get_mut().0.only_for(membership);
}

/// Whether accepting failed because the one connection was gone already (accept(2), Linux notes).
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{
        ConnectionAborted, ConnectionRefused, ConnectionReset, HostUnreachable, NetworkUnreachable,
    };
    matches!(
        error.kind(),
        ConnectionAborted | ConnectionRefused | ConnectionReset | HostUnreachable | NetworkUnreachable
    )
}

/// Why a node could not be reached.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// No TCP connection.
    #[error(
        "cannot connect to node `{node}` at {address}; is its godwitd running, and does a firewall let this port through?"
    )]
    Unreachable {
        /// The node.
        node: String,
        /// Its address.
        address: String,
        /// What the system said.
        source: io::Error,
    },
    /// No answer in time.
    #[error("node `{node}` at {address} did not answer within {:.1} s", after.as_secs_f64())]
    TimedOut {
        /// The node.
        node: String,
        /// Its address.
        address: String,
        /// How long was waited.
        after: Duration,
    },
    /// The host is a node, but another one.
    #[error(
        "{address} is not node `{node}`: its certificate is for another name; check the address of `{node}`"
    )]
    WrongNode {
        /// The expected node.
        node: String,
        /// The address.
        address: String,
    },
    /// The host's certificate was issued by another CA, or says it is no node.
    #[error("{address} is not a node of this cluster: its certificate was issued by another CA")]
    ForeignCertificate {
        /// The address.
        address: String,
    },
    /// The host's certificate is of a node that was removed.
    #[error(
        "node `{node}` at {address} was removed from the cluster; if it is to come back, let it join again"
    )]
    Removed {
        /// The node.
        node: String,
        /// The address.
        address: String,
    },
    /// The host's certificate is not valid now.
    #[error(
        "the certificate of node `{node}` at {address} is not valid now: it has expired, or one of the two clocks is wrong"
    )]
    NotValidNow {
        /// The node.
        node: String,
        /// The address.
        address: String,
    },
    /// The handshake failed otherwise.
    #[error("the TLS handshake with node `{node}` at {address} failed")]
    Handshake {
        /// The node.
        node: String,
        /// Its address.
        address: String,
        /// What rustls or the system said.
        source: io::Error,
    },
    /// The identity cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// Connects to `node` at `address` (`host:port`) to speak `alpn`.
///
/// The server's certificate has been checked when this returns. Whether the server accepts ours is
/// known only when it answers (TLS 1.3): a refusal shows as an error of the first read.
pub async fn connect(
    identity: &Identity,
    address: &str,
    node: &NodeName,
    alpn: Alpn,
    options: ConnectOptions,
) -> Result<SecureStream, ConnectError> {
    let config = tls::client_config(identity, alpn, node)?;
    let mut stream = handshake(config, address, node, node.as_str(), options).await?;
    keep_to_members(&mut stream, identity.removals());
    Ok(stream)
}

/// Connects with `config`; `label` is how errors call the other side.
pub(crate) async fn handshake(
    config: Arc<rustls::ClientConfig>,
    address: &str,
    node: &NodeName,
    label: &str,
    options: ConnectOptions,
) -> Result<SecureStream, ConnectError> {
    let (label, at) = (label.to_owned(), address.to_owned());
    let name =
        verify::server_name(node).map_err(|source| TlsError::Identity { node: node.clone(), source })?;
    let attempt = async {
        let opened = match TcpStream::connect(address).await {
            Ok(stream) => Socket::new(stream, &options.link),
            Err(error) => Err(error),
        };
        let socket = opened.map_err(|source| ConnectError::Unreachable {
            node: label.clone(),
            address: at.clone(),
            source,
        })?;
        let connected = TlsConnector::from(config).connect(name, socket).await;
        connected.map(SecureStream::from).map_err(|error| explain(error, &label, &at))
    };
    match tokio::time::timeout(options.timeout, attempt).await {
        Ok(result) => result,
        Err(_) => {
            Err(ConnectError::TimedOut { node: label.clone(), address: at.clone(), after: options.timeout })
        }
    }
}

/// The sentence for a failed handshake.
fn explain(source: io::Error, node: &str, address: &str) -> ConnectError {
    use CertificateError as C;
    let (node, address) = (node.to_owned(), address.to_owned());
    match source.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>()) {
        Some(rustls::Error::InvalidCertificate(error)) => match error {
            C::NotValidForName | C::NotValidForNameContext { .. } => {
                ConnectError::WrongNode { node, address }
            }
            C::Expired | C::ExpiredContext { .. } | C::NotValidYet | C::NotValidYetContext { .. } => {
                ConnectError::NotValidNow { node, address }
            }
            C::Revoked => ConnectError::Removed { node, address },
            C::UnknownIssuer | C::BadSignature | C::ApplicationVerificationFailure => {
                ConnectError::ForeignCertificate { address }
            }
            _ => ConnectError::Handshake { node, address, source },
        },
        _ => ConnectError::Handshake { node, address, source },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_are_logged_at_a_bounded_rate_and_the_others_counted() {
        let begun = Instant::now();
        let mut refusals = Refusals::new(begun);
        let logged = (0..1000).filter(|_| refusals.count(begun).0).count();
        assert_eq!(logged, 10);
        assert_eq!(refusals.count(begun + Refusals::PERIOD), (true, 990));
        assert_eq!(refusals.count(begun + Refusals::PERIOD), (true, 0));
    }
}
