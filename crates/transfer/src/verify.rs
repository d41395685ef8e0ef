//! Which certificates are believed, and for what.

use std::sync::Arc;
use std::time::Duration;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, RootCertStore, SignatureScheme,
};

use crate::certificate::{Fingerprint, node_of};
use crate::cryptography::provider;
use crate::node::NodeName;
use crate::removal::Removals;

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
pub(crate) struct AnyNodeOfCluster {
    inner: Arc<dyn ClientCertVerifier>,
    removals: Removals,
}

impl AnyNodeOfCluster {
    pub(crate) fn new(ca: &CertificateDer<'_>, removals: Removals) -> Result<Self, Error> {
        let inner = WebPkiClientVerifier::builder_with_provider(roots(ca)?, provider().clone())
            // The CA's name is nobody's business who has no certificate of it.
            .clear_root_hint_subjects()
            .build()
            .map_err(|error| Error::General(error.to_string()))?;
        Ok(Self { inner, removals })
    }
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
pub(crate) struct OneNode {
    inner: Arc<WebPkiServerVerifier>,
    node: NodeName,
    removals: Removals,
}

impl OneNode {
    pub(crate) fn new(ca: &CertificateDer<'_>, node: NodeName, removals: Removals) -> Result<Self, Error> {
        Ok(Self { inner: server_verifier(ca)?, node, removals })
    }
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
pub(crate) struct PinnedAuthority {
    ca_sha256: Fingerprint,
}

impl PinnedAuthority {
    pub(crate) fn new(ca_sha256: Fingerprint) -> Self {
        Self { ca_sha256 }
    }
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
