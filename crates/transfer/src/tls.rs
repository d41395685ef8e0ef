//! The protocols between nodes, and TLS for each side of each of them.
//!
//! TLS 1.3 only, ring as the provider (given explicitly, so that no process-wide default is needed).
//! Between nodes both sides show a certificate of the cluster's CA that names exactly one node.
//! Sessions are never resumed: every connection checks its peer's certificate anew (`verify`).
//!
//! A joining node has no certificate yet. It believes the server whose chain ends in the CA that
//! its token names by fingerprint; therefore a join server sends the CA's certificate along.

use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::server::NoServerSessionStorage;
use rustls::version::TLS13;
use rustls::{ClientConfig, Error, ServerConfig};

use crate::certificate::Fingerprint;
use crate::cryptography::provider;
use crate::identity::Identity;
use crate::node::NodeName;
use crate::verify::{AnyNodeOfCluster, OneNode, PinnedAuthority};

/// The protocols spoken between nodes, told apart by ALPN (RFC 7301).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Alpn {
    /// gRPC between daemons: `h2`.
    Peer,
    /// Frames of the data plane: `godwit-data/1`.
    Data,
    /// A node that joins: `godwit-join/1`.
    Join,
}

impl Alpn {
    /// The protocol's name on the wire.
    pub fn as_bytes(self) -> &'static [u8] {
        match self {
            Self::Peer => b"h2",
            Self::Data => b"godwit-data/1",
            Self::Join => b"godwit-join/1",
        }
    }

    /// The protocol with this name on the wire.
    pub fn from_bytes(name: &[u8]) -> Option<Self> {
        [Self::Peer, Self::Data, Self::Join].into_iter().find(|alpn| alpn.as_bytes() == name)
    }
}

/// Why no TLS configuration could be made of an identity.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The CA's certificate cannot be a trust anchor, or the key cannot be used.
    #[error("the identity of node `{node}` cannot be used for TLS")]
    Identity {
        /// The identity's node.
        node: NodeName,
        /// What rustls said.
        source: Error,
    },
}

/// The server's side between nodes: `h2` and `godwit-data/1`, client certificates required.
pub fn server_config(identity: &Identity) -> Result<Arc<ServerConfig>, TlsError> {
    let wrap = |source| TlsError::Identity { node: identity.node().clone(), source };
    let verifier = AnyNodeOfCluster::new(identity.ca(), identity.removals().clone()).map_err(wrap)?;
    let mut config = ServerConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(wrap)?
        .with_client_cert_verifier(Arc::new(verifier))
        .with_single_cert(vec![identity.certificate().clone()], identity.key())
        .map_err(wrap)?;
    config.alpn_protocols = vec![Alpn::Peer.as_bytes().to_vec(), Alpn::Data.as_bytes().to_vec()];
    forbid_resumption(&mut config);
    Ok(Arc::new(config))
}

/// The client's side between nodes, for one protocol and one expected node. The server name that
/// is given when connecting does not matter: the certificate must name `expected`, and nothing else.
pub fn client_config(
    identity: &Identity,
    alpn: Alpn,
    expected: &NodeName,
) -> Result<Arc<ClientConfig>, TlsError> {
    let wrap = |source| TlsError::Identity { node: identity.node().clone(), source };
    let removals = identity.removals().clone();
    let verifier = OneNode::new(identity.ca(), expected.clone(), removals).map_err(wrap)?;
    let mut config = client_builder(Arc::new(verifier))
        .map_err(wrap)?
        .with_client_auth_cert(vec![identity.certificate().clone()], identity.key())
        .map_err(wrap)?;
    config.alpn_protocols = vec![alpn.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// The server's side for nodes that join: `godwit-join/1`, no client certificate, the CA in the
/// chain.
pub fn join_server_config(identity: &Identity) -> Result<Arc<ServerConfig>, TlsError> {
    let wrap = |source| TlsError::Identity { node: identity.node().clone(), source };
    let chain = vec![identity.certificate().clone(), identity.ca().clone()];
    let mut config = ServerConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(wrap)?
        .with_no_client_auth()
        .with_single_cert(chain, identity.key())
        .map_err(wrap)?;
    config.alpn_protocols = vec![Alpn::Join.as_bytes().to_vec()];
    forbid_resumption(&mut config);
    Ok(Arc::new(config))
}

/// The joining node's side: believes any node of the cluster whose CA has this fingerprint.
pub fn join_client_config(ca_sha256: Fingerprint) -> Result<Arc<ClientConfig>, Error> {
    let mut config = client_builder(Arc::new(PinnedAuthority::new(ca_sha256)))?.with_no_client_auth();
    config.alpn_protocols = vec![Alpn::Join.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

fn client_builder(
    verifier: Arc<dyn ServerCertVerifier>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, Error> {
    Ok(ClientConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&TLS13])?
        .dangerous() // the verifiers of `verify` only ever add conditions to rustls's own
        .with_custom_certificate_verifier(verifier))
}

fn forbid_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}
