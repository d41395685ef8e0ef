//! Who this node is: its certificate, its private key, and the CA of its cluster.
//!
//! ```text
//!   <dir>/ca.pem    the cluster's CA certificate                     0644
//!   <dir>/node.pem  this node's certificate, SAN <node>.node.godwit  0644
//!   <dir>/node.key  this node's private key, never leaves the node   0600
//!   <dir>/ca.key    the CA's key, on the founding node alone         0600
//! ```
//!
//! A new node makes its key and a request ([`Identity::create_request`]), the cluster answers the
//! request ([`crate::ClusterAuthority::issue`]), the node installs the answer
//! ([`Identity::install`]). Keys are not part of any `Debug` output, error or log.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::certificate::{
    CA_FILE, CA_KEY_FILE, CERTIFICATE_FILE, Fingerprint, KEY_FILE, key_pair, load_key, node_of,
    parse_certificate, read, validity,
};
use crate::error::IdentityError;
use crate::node::NodeName;
use crate::removal::Removals;
use crate::{cryptography, files, verify};

/// A node's certificate, its key and its cluster's CA: all that TLS needs.
pub struct Identity {
    node: NodeName,
    ca: CertificateDer<'static>,
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
    begins: SystemTime,
    expires: SystemTime,
    removals: Removals,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("node", &self.node)
            .field("ca_sha256", &self.ca_fingerprint())
            .field("expires", &self.expires)
            .finish_non_exhaustive()
    }
}

impl Clone for Identity {
    fn clone(&self) -> Self {
        Self {
            node: self.node.clone(),
            ca: self.ca.clone(),
            certificate: self.certificate.clone(),
            key: self.key.clone_key(),
            begins: self.begins,
            expires: self.expires,
            removals: self.removals.clone(),
        }
    }
}

impl Identity {
    /// Loads the identity in `dir`, and checks that its parts belong together. A certificate that
    /// has expired is loaded all the same (see [`Identity::expires`]); no peer will accept it.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let (ca_path, path) = (dir.join(CA_FILE), dir.join(CERTIFICATE_FILE));
        let ca = parse_certificate(&read(&ca_path)?, &ca_path.display().to_string())?;
        let certificate = parse_certificate(&read(&path)?, &path.display().to_string())?;
        let key = load_key(&dir.join(KEY_FILE))?;
        Self::assemble(ca, certificate, key, &path.display().to_string(), &dir.join(KEY_FILE))
    }

    /// Makes this node's private key in `dir` (0600), or takes the one that an earlier attempt
    /// left there, and returns a request (PEM) for its certificate.
    ///
    /// Fails if the node has a certificate already.
    pub fn create_request(dir: &Path, node: &NodeName) -> Result<String, IdentityError> {
        files::make_private_dir(dir).map_err(|source| IdentityError::Write { path: dir.into(), source })?;
        let certificate = dir.join(CERTIFICATE_FILE);
        if certificate.exists() {
            return Err(IdentityError::IdentityExists { path: certificate });
        }
        let path = dir.join(KEY_FILE);
        let key = if path.exists() {
            key_pair(&load_key(&path)?, &path)?
        } else {
            let key =
                KeyPair::generate().map_err(|source| IdentityError::Make { what: "private key", source })?;
            files::write_new(&path, key.serialize_pem().as_bytes(), files::PRIVATE)
                .map_err(|source| IdentityError::Write { path, source })?;
            key
        };
        request_for(&key, node)
    }

    /// Installs the cluster's answer to the request made in `dir`, and loads it.
    ///
    /// Nothing is written unless the CA, the certificate and the key in `dir` belong together. A
    /// node that has a certificate keeps it: the error is [`IdentityError::IdentityExists`].
    pub fn install(dir: &Path, ca_pem: &str, certificate_pem: &str) -> Result<Self, IdentityError> {
        let ca = parse_certificate(ca_pem.as_bytes(), "the cluster's CA")?;
        let certificate = parse_certificate(certificate_pem.as_bytes(), "the node's certificate")?;
        let key_path = dir.join(KEY_FILE);
        let key = load_key(&key_path)?;
        let identity = Self::assemble(ca, certificate, key, "the node's certificate", &key_path)?;
        let path = dir.join(CERTIFICATE_FILE);
        if path.exists() {
            return Err(IdentityError::IdentityExists { path });
        }
        let ca_path = dir.join(CA_FILE);
        if !dir.join(CA_KEY_FILE).exists() {
            files::replace(&ca_path, ca_pem.as_bytes(), files::PUBLIC)
                .map_err(|source| IdentityError::Write { path: ca_path, source })?;
        } else if parse_certificate(&read(&ca_path)?, &ca_path.display().to_string())? != identity.ca {
            // The founding node's own CA is not replaced by anybody's.
            return Err(IdentityError::AuthorityExists { path: ca_path });
        }
        // Last: the node's certificate is what says that the identity is whole.
        files::write_new(&path, certificate_pem.as_bytes(), files::PUBLIC)
            .map_err(|source| IdentityError::Write { path, source })?;
        Ok(identity)
    }

    /// A request (PEM) for another certificate for the key in `dir`.
    ///
    /// # Errors
    /// The node has no key.
    pub fn renewal_request(dir: &Path, node: &NodeName) -> Result<String, IdentityError> {
        let path = dir.join(KEY_FILE);
        request_for(&key_pair(&load_key(&path)?, &path)?, node)
    }

    /// Puts another certificate of this node in the place of its own. Nothing is written unless it was
    /// issued by the same CA, for the same node and key, and lasts longer.
    ///
    /// # Errors
    /// It was not, or cannot be written.
    pub fn renew(&self, dir: &Path, certificate_pem: &str) -> Result<Self, IdentityError> {
        let what = "the renewed certificate";
        let certificate = parse_certificate(certificate_pem.as_bytes(), what)?;
        let mut renewed =
            Self::assemble(self.ca.clone(), certificate, self.key(), what, &dir.join(KEY_FILE))?;
        if renewed.node != self.node {
            return Err(IdentityError::OtherNode { own: self.node.clone(), other: renewed.node });
        }
        if renewed.expires <= self.expires {
            return Err(IdentityError::NoLonger { node: self.node.clone() });
        }
        let path = dir.join(CERTIFICATE_FILE);
        files::replace(&path, certificate_pem.as_bytes(), files::PUBLIC)
            .map_err(|source| IdentityError::Write { path, source })?;
        renewed.removals = self.removals.clone();
        Ok(renewed)
    }

    fn assemble(
        ca: CertificateDer<'static>,
        certificate: CertificateDer<'static>,
        key: PrivateKeyDer<'static>,
        what: &str,
        key_path: &Path,
    ) -> Result<Self, IdentityError> {
        let node = node_of(&certificate).ok_or_else(|| IdentityError::NoNode { what: what.to_owned() })?;
        let (from, until) = validity(&certificate, what)?;
        verify::verify_issued(&ca, &certificate, &node, from)
            .map_err(|source| IdentityError::NotIssued { node: node.clone(), source })?;
        rustls::sign::CertifiedKey::from_der(
            vec![certificate.clone()],
            key.clone_key(),
            cryptography::provider(),
        )
        .map_err(|_| IdentityError::KeyMismatch { node: node.clone(), path: key_path.into() })?;
        let at = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        let (begins, expires) = (at(from), at(until));
        Ok(Self { node, ca, certificate, key, begins, expires, removals: Removals::default() })
    }

    /// This node's name, from its certificate.
    pub fn node(&self) -> &NodeName {
        &self.node
    }

    /// The cluster's CA certificate.
    pub fn ca(&self) -> &CertificateDer<'static> {
        &self.ca
    }

    /// The fingerprint of the cluster's CA.
    pub fn ca_fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.ca)
    }

    /// When this node's certificate expires.
    pub fn expires(&self) -> SystemTime {
        self.expires
    }

    /// When two thirds of its certificate's time are over, and another one is to be asked for.
    pub fn renew_at(&self) -> SystemTime {
        let whole = self.expires.duration_since(self.begins).unwrap_or_default();
        self.begins + whole / 3 * 2
    }

    /// The members that were removed, whom connections of this identity do not believe. Clones share them.
    pub fn removals(&self) -> &Removals {
        &self.removals
    }

    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    pub(crate) fn key(&self) -> PrivateKeyDer<'static> {
        self.key.clone_key()
    }
}

/// A request for a certificate. It names the node for whoever looks at it; the CA takes nothing from it but
/// the public key.
fn request_for(key: &KeyPair, node: &NodeName) -> Result<String, IdentityError> {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, node.as_str());
    params
        .serialize_request(key)
        .and_then(|request| request.pem())
        .map_err(|source| IdentityError::Make { what: "certificate request", source })
}
