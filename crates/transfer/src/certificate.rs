//! Certificates and keys: their files, their names, and what a certificate says.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use rcgen::KeyPair;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use sha2::{Digest, Sha256};
use x509_parser::prelude::{FromDer, GeneralName, X509Certificate};

use crate::error::IdentityError;
use crate::node::NodeName;

/// The CA certificate's file.
pub const CA_FILE: &str = "ca.pem";
/// The node certificate's file.
pub const CERTIFICATE_FILE: &str = "node.pem";
/// The node key's file.
pub const KEY_FILE: &str = "node.key";
/// The CA key's file.
pub const CA_KEY_FILE: &str = "ca.key";

/// Longest PEM text that is parsed, in bytes. A certificate of ours is below 1 KiB; the rest is
/// room for foreign CAs with RSA keys.
pub const MAX_PEM: usize = 16 * 1024;

/// How far before the CA's clock a certificate starts to be valid: edge nodes without a battery
/// clock wake up behind, and a join must not fail for it.
pub const CLOCK_SKEW: Duration = Duration::from_secs(24 * 3600);

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
