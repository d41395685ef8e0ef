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
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rcgen::{CertificateParams, DnType, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::files;
use crate::node::{NodeName, NodeNameError};
use crate::removal::Removals;

/// The CA certificate's file.
pub const CA_FILE: &str = "ca.pem";
/// The node certificate's file.
pub const CERTIFICATE_FILE: &str = "node.pem";
/// The node key's file.
pub const KEY_FILE: &str = "node.key";

/// Longest PEM text that is parsed, in bytes. A certificate of ours is below 1 KiB; the rest is
/// room for foreign CAs with RSA keys.
pub const MAX_PEM: usize = 16 * 1024;

/// Why an identity could not be made, installed or loaded.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file could not be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file or directory could not be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The node has no identity yet.
    #[error(
        "this node belongs to no cluster: {path} is missing; found a cluster with `godwit cluster init` or join one with `godwitd join TOKEN`"
    )]
    Missing {
        /// The file that is not there.
        path: PathBuf,
    },
    /// Others than the owner may read a private key.
    #[error(
        "the private key {path} can be read by others (mode {mode:o}); run `chmod 600 {path}`, and make a new identity if somebody may have read it"
    )]
    KeyExposed {
        /// The key's file.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A CA is there already.
    #[error(
        "a cluster was founded here already: {path} exists; use it, or move it away if its cluster is gone"
    )]
    AuthorityExists {
        /// The file that is there.
        path: PathBuf,
    },
    /// This node has a certificate already.
    #[error("this node has an identity already: {path} exists; move it away to join another cluster")]
    IdentityExists {
        /// The file that is there.
        path: PathBuf,
    },
    /// A file or an answer is not the certificate or key it should be.
    #[error("{what} is not a valid PEM {kind}")]
    Invalid {
        /// The file, or what it was received as.
        what: String,
        /// Certificate, private key or request.
        kind: &'static str,
    },
    /// The certificate was not issued by the CA it came with.
    #[error("the certificate of node `{node}` was not issued by the CA that it came with")]
    NotIssued {
        /// The node's name in the certificate.
        node: NodeName,
        /// What the verifier said.
        source: rustls::Error,
    },
    /// The certificate names no node, or more than one.
    #[error(
        "{what} is not a node's certificate: it must carry exactly one name, <node>{}",
        crate::node::NODE_DOMAIN
    )]
    NoNode {
        /// The file, or what it was received as.
        what: String,
    },
    /// The certificate and the key do not belong together.
    #[error("the certificate of node `{node}` does not belong to the private key {path}")]
    KeyMismatch {
        /// The node's name in the certificate.
        node: NodeName,
        /// The key's file.
        path: PathBuf,
    },
    /// The request to be signed is not one, or its signature is wrong.
    #[error("the certificate request for node `{node}` cannot be granted")]
    Request {
        /// The node it is for.
        node: NodeName,
        /// What the parser said.
        source: rcgen::Error,
    },
    /// The cluster's name cannot be used.
    #[error(
        "`{name}` cannot be a cluster's name; use 1 to 64 letters, digits, dots, hyphens and underscores"
    )]
    ClusterName {
        /// The refused name, with its control characters escaped.
        name: String,
    },
    /// A certificate that came as a renewal is another node's.
    #[error("the renewed certificate of node `{own}` is for node `{other}`")]
    OtherNode {
        /// This node.
        own: NodeName,
        /// The node in the certificate.
        other: NodeName,
    },
    /// A certificate that came as a renewal does not last longer.
    #[error("the renewed certificate of node `{node}` does not last longer than the one it has")]
    NoLonger {
        /// This node.
        node: NodeName,
    },
    /// The CA has expired.
    #[error("the cluster's CA has expired; found a new cluster and let its nodes join it")]
    AuthorityExpired,
    /// A key or a certificate could not be made.
    #[error("cannot make a {what}")]
    Make {
        /// Key, request or certificate.
        what: &'static str,
        /// What the library said.
        source: rcgen::Error,
    },
    /// The operating system gave no random bytes.
    #[error("no serial number could be made for the certificate")]
    Random(#[source] io::Error),
    /// The clock is set before 1970.
    #[error("this machine's clock is before 1970; set it")]
    Clock,
    /// The node's name is not one.
    #[error(transparent)]
    NodeName(#[from] NodeNameError),
}

/// SHA-256 of a certificate (DER).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Self {
        Self(Sha256::digest(certificate.as_ref()).into())
    }

    /// The fingerprint of the first certificate in a PEM text.
    pub fn of_pem(pem: &str) -> Result<Self, IdentityError> {
        Ok(Self::of(&parse_certificate(pem.as_bytes(), "the certificate")?))
    }

    /// The digest.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl From<[u8; 32]> for Fingerprint {
    fn from(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

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
        if !dir.join(crate::authority::CA_KEY_FILE).exists() {
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
        crate::tls::verify_issued(&ca, &certificate, &node, from)
            .map_err(|source| IdentityError::NotIssued { node: node.clone(), source })?;
        rustls::sign::CertifiedKey::from_der(
            vec![certificate.clone()],
            key.clone_key(),
            crate::tls::provider(),
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

/// The one node that a certificate names; none if it has any other name beside it.
pub fn node_of(certificate: &CertificateDer<'_>) -> Option<NodeName> {
    let (_, parsed) = X509Certificate::from_der(certificate).ok()?;
    let names = parsed.subject_alternative_name().ok()??;
    match names.value.general_names.as_slice() {
        [GeneralName::DNSName(name)] => NodeName::from_dns_name(name),
        _ => None,
    }
}

/// From when and until when a certificate is valid, in seconds since 1970.
pub(crate) fn validity(certificate: &CertificateDer<'_>, what: &str) -> Result<(u64, u64), IdentityError> {
    let invalid = || IdentityError::Invalid { what: what.to_owned(), kind: "certificate" };
    let (_, parsed) = X509Certificate::from_der(certificate).map_err(|_| invalid())?;
    let seconds = |time: x509_parser::time::ASN1Time| u64::try_from(time.timestamp()).map_err(|_| invalid());
    Ok((seconds(parsed.validity().not_before)?, seconds(parsed.validity().not_after)?))
}

pub(crate) fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    fs::read(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => IdentityError::Missing { path: path.into() },
        _ => IdentityError::Read { path: path.into(), source },
    })
}

pub(crate) fn parse_certificate(pem: &[u8], what: &str) -> Result<CertificateDer<'static>, IdentityError> {
    let invalid = || IdentityError::Invalid { what: what.to_owned(), kind: "certificate" };
    if pem.len() > MAX_PEM {
        return Err(invalid());
    }
    let certificate = CertificateDer::from_pem_slice(pem).map_err(|_| invalid())?;
    X509Certificate::from_der(&certificate).map_err(|_| invalid())?;
    Ok(certificate)
}

/// Reads a private key, unless others may read it too.
pub(crate) fn load_key(path: &Path) -> Result<PrivateKeyDer<'static>, IdentityError> {
    let pem = read(path)?;
    let mode = fs::metadata(path)
        .map_err(|source| IdentityError::Read { path: path.into(), source })?
        .permissions()
        .mode();
    if mode & 0o077 != 0 {
        return Err(IdentityError::KeyExposed { path: path.into(), mode: mode & 0o7777 });
    }
    PrivateKeyDer::from_pem_slice(&pem)
        .map_err(|_| IdentityError::Invalid { what: path.display().to_string(), kind: "private key" })
}

pub(crate) fn key_pair(key: &PrivateKeyDer<'_>, path: &Path) -> Result<KeyPair, IdentityError> {
    KeyPair::try_from(key)
        .map_err(|_| IdentityError::Invalid { what: path.display().to_string(), kind: "private key" })
}
