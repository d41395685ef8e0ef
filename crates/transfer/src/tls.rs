//! Which certificates are believed, and for what.
//!
//! TLS 1.3 only, ring as the provider (given explicitly, so that no process-wide default is needed).
//! Between nodes both sides show a certificate of the cluster's CA that names exactly one node.
//! Sessions are never resumed: every connection checks its peer's certificate anew.
//!
//! A joining node has no certificate yet. It believes the server whose chain ends in the CA that
//! its token names by fingerprint; therefore a join server sends the CA's certificate along.

use std::sync::{Arc, LazyLock};
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, RootCertStore,
    ServerConfig, SignatureScheme,
};

use crate::identity::{Fingerprint, Identity, node_of};
use crate::node::NodeName;
use crate::removal::Removals;

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

/// ring, with the cipher that this processor is fast at in front. Edge boards without AES
/// instructions are several times faster with ChaCha20.
static PROVIDER: LazyLock<Arc<CryptoProvider>> = LazyLock::new(|| {
    use rustls::crypto::ring::cipher_suite::{
        TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256,
    };
    let cipher_suites = if has_aes_instructions() {
        vec![TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384, TLS13_CHACHA20_POLY1305_SHA256]
    } else {
        vec![TLS13_CHACHA20_POLY1305_SHA256, TLS13_AES_128_GCM_SHA256, TLS13_AES_256_GCM_SHA384]
    };
    Arc::new(CryptoProvider { cipher_suites, ..rustls::crypto::ring::default_provider() })
});

#[cfg(target_arch = "x86_64")]
fn has_aes_instructions() -> bool {
    std::arch::is_x86_feature_detected!("aes") && std::arch::is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes_instructions() -> bool {
    std::arch::is_aarch64_feature_detected!("aes") && std::arch::is_aarch64_feature_detected!("pmull")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes_instructions() -> bool {
    false
}

/// The cryptography behind every connection.
pub(crate) fn provider() -> &'static Arc<CryptoProvider> {
    &PROVIDER
}

/// The server's side between nodes: `h2` and `godwit-data/1`, client certificates required.
pub fn server_config(identity: &Identity) -> Result<Arc<ServerConfig>, TlsError> {
    let wrap = |source| TlsError::Identity { node: identity.node().clone(), source };
    let inner =
        WebPkiClientVerifier::builder_with_provider(roots(identity.ca()).map_err(wrap)?, provider().clone())
            // The CA's name is nobody's business who has no certificate of it.
            .clear_root_hint_subjects()
            .build()
            .map_err(|error| wrap(Error::General(error.to_string())))?;
    let mut config = ServerConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&TLS13])
        .map_err(wrap)?
        .with_client_cert_verifier(Arc::new(AnyNodeOfCluster {
            inner,
            removals: identity.removals().clone(),
        }))
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
    let (node, removals) = (expected.clone(), identity.removals().clone());
    let verifier = OneNode { inner: server_verifier(identity.ca()).map_err(wrap)?, node, removals };
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
    let mut config = client_builder(Arc::new(PinnedAuthority { ca_sha256 }))?.with_no_client_auth();
    config.alpn_protocols = vec![Alpn::Join.as_bytes().to_vec()];
    config.resumption = rustls::client::Resumption::disabled();
    Ok(Arc::new(config))
}

/// Checks that `certificate` is a server's, was issued by `ca` for `node`, and is valid at `at`
/// (seconds since 1970).
pub(crate) fn verify_issued(
    ca: &CertificateDer<'_>,
    certificate: &CertificateDer<'_>,
    node: &NodeName,
    at: u64,
) -> Result<(), Error> {
    let at = UnixTime::since_unix_epoch(Duration::from_secs(at));
    server_verifier(ca)?.verify_server_cert(certificate, &[], &server_name(node)?, &[], at)?;
    Ok(())
}

/// The name by which a node is addressed in TLS.
pub(crate) fn server_name(node: &NodeName) -> Result<ServerName<'static>, Error> {
    ServerName::try_from(node.dns_name()).map_err(|_| Error::General("a node's name is a DNS name".into()))
}

fn roots(ca: &CertificateDer<'_>) -> Result<Arc<RootCertStore>, Error> {
    let mut roots = RootCertStore::empty();
    roots.add(ca.clone().into_owned())?;
    Ok(Arc::new(roots))
}

fn server_verifier(ca: &CertificateDer<'_>) -> Result<Arc<WebPkiServerVerifier>, Error> {
    WebPkiServerVerifier::builder_with_provider(roots(ca)?, provider().clone())
        .build()
        .map_err(|error| Error::General(error.to_string()))
}

fn client_builder(
    verifier: Arc<dyn ServerCertVerifier>,
) -> Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>, Error> {
    Ok(ClientConfig::builder_with_provider(provider().clone())
        .with_protocol_versions(&[&TLS13])?
        .dangerous() // the verifiers below only ever add conditions to rustls's own
        .with_custom_certificate_verifier(verifier))
}

fn forbid_resumption(config: &mut ServerConfig) {
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
}

/// Signatures of the handshake are rustls's business in each verifier alike.
macro_rules! handshake_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _certificate: &CertificateDer<'_>,
            _signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::PeerIncompatible(rustls::PeerIncompatible::Tls12NotOffered))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            certificate: &CertificateDer<'_>,
            signature: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &provider().signature_verification_algorithms;
            rustls::crypto::verify_tls13_signature(message, certificate, signature, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            provider().signature_verification_algorithms.supported_schemes()
        }
    };
}

/// A client that has a certificate of the CA which names exactly one node, which was not removed.
#[derive(Debug)]
struct AnyNodeOfCluster {
    inner: Arc<dyn ClientCertVerifier>,
    removals: Removals,
}

impl ClientCertVerifier for AnyNodeOfCluster {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(certificate, intermediates, now)?;
        match node_of(certificate) {
            Some(_) if self.removals.refuses(certificate) => Err(CertificateError::Revoked.into()),
            Some(_) => Ok(verified),
            None => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    handshake_signatures!();
}

/// The server that has a certificate of the CA for this node, and for nothing else.
#[derive(Debug)]
struct OneNode {
    inner: Arc<WebPkiServerVerifier>,
    node: NodeName,
    removals: Removals,
}

impl ServerCertVerifier for OneNode {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let expected = server_name(&self.node)?;
        let verified =
            self.inner.verify_server_cert(certificate, intermediates, &expected, ocsp_response, now)?;
        if self.removals.refuses(certificate) {
            Err(CertificateError::Revoked.into())
        } else if node_of(certificate).as_ref() == Some(&self.node) {
            Ok(verified)
        } else {
            Err(CertificateError::NotValidForName.into())
        }
    }

    handshake_signatures!();
}

/// Any node of the cluster whose CA has this fingerprint, for a client that knows nothing else.
#[derive(Debug)]
struct PinnedAuthority {
    ca_sha256: Fingerprint,
}

impl ServerCertVerifier for PinnedAuthority {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let ca = intermediates
            .iter()
            .find(|candidate| Fingerprint::of(candidate) == self.ca_sha256)
            .ok_or(CertificateError::UnknownIssuer)?;
        let node = node_of(certificate).ok_or(CertificateError::ApplicationVerificationFailure)?;
        server_verifier(ca)?.verify_server_cert(certificate, &[], &server_name(&node)?, ocsp_response, now)
    }

    handshake_signatures!();
}
