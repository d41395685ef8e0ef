//! The cluster's certificate authority, kept on the founding node: it says who is a node.
//!
//! Certificates carry one name (`<node>.node.godwit`) and serve as server and client alike. From a
//! request the CA takes the public key and nothing else: name, purposes and validity are its own
//! decision.

use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SerialNumber, SigningKey,
};
use rustls::pki_types::CertificateDer;

use crate::certificate::{
    self, CA_FILE, CA_KEY_FILE, CLOCK_SKEW, Fingerprint, MAX_PEM, key_pair, load_key, parse_certificate,
};
use crate::cryptography::fill_random;
use crate::error::IdentityError;
use crate::files;
use crate::identity::Identity;
use crate::node::NodeName;
use crate::removal::Removal;

/// How long a node's certificate is valid: two years. It is renewed when two thirds of them are over
/// ([`Identity::renew_at`]), which leaves an edge node that is out of reach eight months to come back.
pub const NODE_VALIDITY: Duration = Duration::from_secs(2 * 365 * 24 * 3600);

/// How long the CA is valid: ten years. No certificate outlives the CA that issued it.
pub const CA_VALIDITY: Duration = Duration::from_secs(10 * 365 * 24 * 3600);

/// The cluster's certificate authority.
pub struct ClusterAuthority {
    certificate: CertificateDer<'static>,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
    valid: (u64, u64),
    node_validity: Duration,
}

impl fmt::Debug for ClusterAuthority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterAuthority").field("ca_sha256", &self.fingerprint()).finish_non_exhaustive()
    }
}

impl ClusterAuthority {
    /// Founds a cluster: makes the CA and writes `ca.pem` and `ca.key` (0600) in `dir`.
    ///
    /// Fails if either is there already; a CA is never overwritten.
    pub fn create(dir: &Path, cluster: &str) -> Result<Self, IdentityError> {
        check_cluster_name(cluster)?;
        files::make_private_dir(dir).map_err(|source| IdentityError::Write { path: dir.into(), source })?;
        let (path, key_path) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        if let Some(path) = [&path, &key_path].into_iter().find(|path| path.exists()) {
            return Err(IdentityError::AuthorityExists { path: path.clone() });
        }
        let made = |source| IdentityError::Make { what: "CA", source };
        let key = KeyPair::generate().map_err(made)?;
        let now = now()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, format!("godwit cluster {cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.serial_number = Some(serial_number()?);
        let from = now.saturating_sub(CLOCK_SKEW.as_secs());
        set_validity(&mut params, from, now + CA_VALIDITY.as_secs());
        let pem = params.self_signed(&key).map_err(made)?.pem();

        let exists_or = |path: &Path, source: std::io::Error| match source.kind() {
            std::io::ErrorKind::AlreadyExists => IdentityError::AuthorityExists { path: path.into() },
            _ => IdentityError::Write { path: path.into(), source },
        };
        files::write_new(&key_path, key.serialize_pem().as_bytes(), files::PRIVATE)
            .map_err(|source| exists_or(&key_path, source))?;
        if let Err(source) = files::write_new(&path, pem.as_bytes(), files::PUBLIC) {
            // The key was made by this call and has signed nothing: half a CA must not stay.
            let _ = std::fs::remove_file(&key_path);
            return Err(exists_or(&path, source));
        }
        Self::load(dir)
    }

    /// Loads the CA of `dir`.
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let (path, key_path) = (dir.join(CA_FILE), dir.join(CA_KEY_FILE));
        let invalid = || IdentityError::Invalid { what: path.display().to_string(), kind: "certificate" };
        let bytes = certificate::read(&path)?;
        let certificate = parse_certificate(&bytes, &path.display().to_string())?;
        let pem = String::from_utf8(bytes).map_err(|_| invalid())?;
        let key = key_pair(&load_key(&key_path)?, &key_path)?;
        if !is_of(&certificate, &key) {
            return Err(IdentityError::Invalid {
                what: key_path.display().to_string(),
                kind: "key of the CA beside it",
            });
        }
        let valid = certificate::validity(&certificate, &path.display().to_string())?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key).map_err(|_| invalid())?;
        Ok(Self { certificate, pem, issuer, valid, node_validity: NODE_VALIDITY })
    }

    /// Grants a node its certificate (PEM) for the public key in its request.
    ///
    /// Whether `node` may have one is the caller's decision.
    pub fn issue(&self, node: &NodeName, request_pem: &str) -> Result<String, IdentityError> {
        self.issue_after(node, request_pem, 0)
    }

    /// The same with a certificate that counts as issued after a time, in seconds since 1970: after a
    /// removal of the node that had the name.
    pub fn issue_after(
        &self,
        node: &NodeName,
        request_pem: &str,
        after: u64,
    ) -> Result<String, IdentityError> {
        let refuse = |source| IdentityError::Request { node: node.clone(), source };
        let now = now()?;
        if now >= self.valid.1 {
            return Err(IdentityError::AuthorityExpired);
        }
        if request_pem.len() > MAX_PEM {
            return Err(refuse(rcgen::Error::CouldNotParseCertificationRequest));
        }
        // Parsing checks the request's signature: the asker holds the private key.
        let request = CertificateSigningRequestParams::from_pem(request_pem).map_err(refuse)?;
        let mut params = CertificateParams::new(vec![node.dns_name()]).map_err(refuse)?;
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, node.as_str());
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial_number()?);
        let issued = now.max(after.saturating_add(1));
        let from = issued.saturating_sub(CLOCK_SKEW.as_secs()).max(self.valid.0);
        set_validity(&mut params, from, (now + self.node_validity.as_secs()).min(self.valid.1));
        let certificate = params
            .signed_by(&request.public_key, &self.issuer)
            .map_err(|source| IdentityError::Make { what: "certificate", source })?;
        Ok(certificate.pem())
    }

    /// Gives the founding node its own certificate in `dir`, where [`ClusterAuthority::create`] put
    /// the CA.
    pub fn issue_own(&self, dir: &Path, node: &NodeName) -> Result<Identity, IdentityError> {
        let request = Identity::create_request(dir, node)?;
        Identity::install(dir, &self.pem, &self.issue(node, &request)?)
    }

    /// The same CA, whose certificates for nodes last so long.
    #[must_use]
    pub fn with_node_validity(self, node_validity: Duration) -> Self {
        Self { node_validity, ..self }
    }

    /// Takes back all certificates that a node was given until now.
    pub fn remove(&self, node: &NodeName) -> Result<Removal, IdentityError> {
        let until = now()?;
        let words = Removal::words(&self.certificate, node, until);
        let signature = self
            .issuer
            .key()
            .sign(&words)
            .map_err(|source| IdentityError::Make { what: "signature of a removal", source })?;
        Ok(Removal { node: node.clone(), until, signature })
    }

    /// The CA's certificate, PEM.
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// The CA's fingerprint, for a join token.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(&self.certificate)
    }
}

fn check_cluster_name(name: &str) -> Result<(), IdentityError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b".-_".contains(&byte);
    if (1..=64).contains(&name.len()) && name.bytes().all(allowed) {
        Ok(())
    } else {
        let name = name.chars().take(64).collect::<String>().escape_debug().to_string();
        Err(IdentityError::ClusterName { name })
    }
}

/// Whether `certificate` carries the public half of `key`.
fn is_of(certificate: &CertificateDer<'_>, key: &KeyPair) -> bool {
    use rcgen::PublicKeyData;
    use x509_parser::prelude::{FromDer, X509Certificate};
    X509Certificate::from_der(certificate)
        .is_ok_and(|(_, parsed)| parsed.public_key().raw == key.subject_public_key_info())
}

/// Seconds since 1970.
fn now() -> Result<u64, IdentityError> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(|_| IdentityError::Clock)?;
    Ok(since.as_secs())
}

/// A random serial number, positive as RFC 5280 (section 4.1.2.2) asks.
fn serial_number() -> Result<SerialNumber, IdentityError> {
    let mut bytes = [0; 16];
    fill_random(&mut bytes).map_err(IdentityError::Random)?;
    bytes[0] = bytes[0] & 0x7f | 0x40;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Sets from when and until when a certificate is valid, in seconds since 1970.
fn set_validity(params: &mut CertificateParams, from: u64, until: u64) {
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    params.not_before = epoch + Duration::from_secs(from);
    params.not_after = epoch + Duration::from_secs(until);
}
