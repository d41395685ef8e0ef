//! A cluster of throw-away nodes for tests.
#![allow(dead_code, clippy::unwrap_used)] // each test file uses its own part

use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use godwit_transfer::{ClusterAuthority, Identity, ListenOptions, Listener, NodeName};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::TempDir;

pub(crate) fn node(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

/// A cluster whose founding node is `a`.
pub(crate) struct Cluster {
    pub(crate) dir: TempDir,
    pub(crate) authority: ClusterAuthority,
    pub(crate) a: Identity,
}

impl Cluster {
    pub(crate) fn found() -> Self {
        Self::named("test")
    }

    pub(crate) fn named(cluster: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let identity = dir.path().join("a");
        let authority = ClusterAuthority::create(&identity, cluster).unwrap();
        let a = authority.issue_own(&identity, &node("a")).unwrap();
        Self { dir, authority, a }
    }

    pub(crate) fn dir(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn node(&self, name: &str) -> Identity {
        let dir = self.dir(name);
        let request = Identity::create_request(&dir, &node(name)).unwrap();
        let certificate = self.authority.issue(&node(name), &request).unwrap();
        Identity::install(&dir, self.authority.pem(), &certificate).unwrap()
    }
}

pub(crate) fn localhost() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 0))
}

pub(crate) async fn listen(identity: &Identity) -> Listener {
    Listener::bind(localhost(), identity, ListenOptions::default()).await.unwrap()
}

/// What a certificate of the cluster's CA can be made to say, to see whether it is believed.
pub(crate) struct Odd {
    pub(crate) names: Vec<String>,
    pub(crate) from_days: i64,
    pub(crate) until_days: i64,
    pub(crate) purposes: Vec<rcgen::ExtendedKeyUsagePurpose>,
}

impl Odd {
    /// As the CA itself would issue it.
    pub(crate) fn proper(name: &str) -> Self {
        use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
        let names = vec![node(name).dns_name()];
        Self { names, from_days: -1, until_days: 700, purposes: vec![ServerAuth, ClientAuth] }
    }
}

/// A certificate and key, PEM.
pub(crate) struct Issued {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Issued {
    pub(crate) fn der(&self) -> (CertificateDer<'static>, PrivateKeyDer<'static>) {
        let certificate = CertificateDer::from_pem_slice(self.certificate.as_bytes()).unwrap();
        (certificate, PrivateKeyDer::from_pem_slice(self.key.as_bytes()).unwrap())
    }

    /// Puts them where an identity is loaded from.
    pub(crate) fn install(&self, dir: &Path, ca_pem: &str) {
        std::fs::create_dir_all(dir).unwrap();
        std::fs::write(dir.join("ca.pem"), ca_pem).unwrap();
        std::fs::write(dir.join("node.pem"), &self.certificate).unwrap();
        std::fs::write(dir.join("node.key"), &self.key).unwrap();
        std::fs::set_permissions(dir.join("node.key"), std::fs::Permissions::from_mode(0o600)).unwrap();
    }
}

fn odd_params(odd: &Odd) -> rcgen::CertificateParams {
    let day = |days: i64| {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs();
        let at = now.checked_add_signed(days * 24 * 3600).unwrap();
        rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(at)
    };
    let mut params = rcgen::CertificateParams::new(odd.names.clone()).unwrap();
    (params.not_before, params.not_after) = (day(odd.from_days), day(odd.until_days));
    params.extended_key_usages = odd.purposes.clone();
    params
}

impl Cluster {
    /// A certificate that the CA's own code would not issue, signed by the CA.
    pub(crate) fn issue_odd(&self, odd: &Odd) -> Issued {
        let read = |name: &str| std::fs::read_to_string(self.dir("a").join(name)).unwrap();
        let ca_key = rcgen::KeyPair::from_pem(&read("ca.key")).unwrap();
        let issuer = rcgen::Issuer::from_ca_cert_pem(&read("ca.pem"), ca_key).unwrap();
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate = odd_params(odd).signed_by(&key, &issuer).unwrap();
        Issued { certificate: certificate.pem(), key: key.serialize_pem() }
    }
}

/// A certificate signed by nobody but itself.
pub(crate) fn self_signed(odd: &Odd) -> Issued {
    let key = rcgen::KeyPair::generate().unwrap();
    let certificate = odd_params(odd).self_signed(&key).unwrap();
    Issued { certificate: certificate.pem(), key: key.serialize_pem() }
}

/// A conversation of two sides: if one fails, the other must not be waited for without end.
pub(crate) async fn in_time<T>(conversation: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(20), conversation).await.expect("the other side hangs")
}
