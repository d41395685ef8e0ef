//! Identities on disk: modes, nothing overwritten, nothing mixed up, nothing given away.
#![allow(clippy::unwrap_used)]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use godwit_transfer::certificate::node_of;
use godwit_transfer::{ClusterAuthority, Fingerprint, Identity, IdentityError};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use support::{Cluster, Odd, node};

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn keys_are_for_the_owner_alone_and_no_temporary_file_stays() {
    let cluster = Cluster::found();
    let dir = cluster.dir("a");
    assert_eq!(mode(&dir), 0o700);
    assert_eq!((mode(&dir.join("ca.key")), mode(&dir.join("node.key"))), (0o600, 0o600));
    assert_eq!((mode(&dir.join("ca.pem")), mode(&dir.join("node.pem"))), (0o644, 0o644));
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 4);
    cluster.node("b");
    assert_eq!(mode(&cluster.dir("b").join("node.key")), 0o600);
    assert_eq!(fs::read_dir(cluster.dir("b")).unwrap().count(), 3);
}

#[test]
fn a_ca_is_never_overwritten() {
    let cluster = Cluster::found();
    let dir = cluster.dir("a");
    let before = fs::read(dir.join("ca.key")).unwrap();
    let error = ClusterAuthority::create(&dir, "other").unwrap_err();
    assert!(matches!(error, IdentityError::AuthorityExists { .. }));
    assert!(error.to_string().contains("ca.pem"), "{error}");
    fs::remove_file(dir.join("ca.pem")).unwrap();
    assert!(matches!(ClusterAuthority::create(&dir, "other"), Err(IdentityError::AuthorityExists { .. })));
    assert_eq!(fs::read(dir.join("ca.key")).unwrap(), before);
}

#[test]
fn a_cluster_needs_a_name() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["", "a b", "a\n", "ä", &"x".repeat(65)] {
        let error = ClusterAuthority::create(&dir.path().join("i"), name).unwrap_err();
        assert!(matches!(error, IdentityError::ClusterName { .. }), "{name:?}");
    }
    assert!(!dir.path().join("i").exists());
}

#[test]
fn a_loaded_ca_issues_for_the_same_cluster() {
    let cluster = Cluster::found();
    let loaded = ClusterAuthority::load(&cluster.dir("a")).unwrap();
    assert_eq!(loaded.fingerprint(), cluster.a.ca_fingerprint());
    assert_eq!(Fingerprint::of_pem(loaded.pem()).unwrap(), loaded.fingerprint());
    let dir = cluster.dir("b");
    let request = Identity::create_request(&dir, &node("b")).unwrap();
    let b = Identity::install(&dir, loaded.pem(), &loaded.issue(&node("b"), &request).unwrap()).unwrap();
    assert_eq!(b.node(), &node("b"));
    assert_eq!(Identity::load(&dir).unwrap().node(), &node("b"));
}

#[test]
fn a_ca_whose_key_was_swapped_does_not_load() {
    let (cluster, other) = (Cluster::found(), Cluster::found());
    fs::copy(other.dir("a").join("ca.key"), cluster.dir("a").join("ca.key")).unwrap();
    let error = ClusterAuthority::load(&cluster.dir("a")).unwrap_err();
    assert!(error.to_string().contains("ca.key"), "{error}");
}

#[test]
fn a_node_without_identity_is_told_how_to_get_one() {
    let dir = tempfile::tempdir().unwrap();
    let error = Identity::load(dir.path()).unwrap_err();
    assert!(matches!(error, IdentityError::Missing { .. }));
    assert!(error.to_string().contains("godwitd join"), "{error}");
}

#[test]
fn a_key_that_others_can_read_is_refused() {
    let cluster = Cluster::found();
    let key = cluster.dir("a").join("node.key");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let error = Identity::load(&cluster.dir("a")).unwrap_err();
    assert!(matches!(error, IdentityError::KeyExposed { mode: 0o100640 | 0o640, .. }), "{error:?}");
    assert!(error.to_string().contains("chmod 600"), "{error}");
}

#[test]
fn an_interrupted_join_goes_on_with_the_same_key() {
    let cluster = Cluster::found();
    let dir = cluster.dir("b");
    Identity::create_request(&dir, &node("b")).unwrap();
    let key = fs::read(dir.join("node.key")).unwrap();
    let request = Identity::create_request(&dir, &node("b")).unwrap();
    assert_eq!(fs::read(dir.join("node.key")).unwrap(), key);
    let certificate = cluster.authority.issue(&node("b"), &request).unwrap();
    Identity::install(&dir, cluster.authority.pem(), &certificate).unwrap();
    let twice = Identity::install(&dir, cluster.authority.pem(), &certificate).unwrap_err();
    assert!(matches!(twice, IdentityError::IdentityExists { .. }), "{twice:?}");
    let again = Identity::create_request(&dir, &node("b")).unwrap_err();
    assert!(matches!(again, IdentityError::IdentityExists { .. }));
}

#[test]
fn parts_that_do_not_belong_together_are_not_installed() {
    let (cluster, other) = (Cluster::found(), Cluster::found());
    let dir = cluster.dir("b");
    let request = Identity::create_request(&dir, &node("b")).unwrap();
    let own = cluster.authority.issue(&node("b"), &request).unwrap();
    let foreign = other.authority.issue(&node("b"), &request).unwrap();
    let c_request = Identity::create_request(&cluster.dir("c"), &node("c")).unwrap();
    let for_c = cluster.authority.issue(&node("c"), &c_request).unwrap();
    let install = |ca: &str, certificate: &str| Identity::install(&dir, ca, certificate).unwrap_err();
    assert!(matches!(install(cluster.authority.pem(), &foreign), IdentityError::NotIssued { .. }));
    assert!(matches!(install(other.authority.pem(), &own), IdentityError::NotIssued { .. }));
    assert!(matches!(install(cluster.authority.pem(), &for_c), IdentityError::KeyMismatch { .. }));
    assert!(matches!(install(cluster.authority.pem(), "nonsense"), IdentityError::Invalid { .. }));
    let huge = format!("{}{own}", "#\n".repeat(10_000));
    assert!(matches!(install(cluster.authority.pem(), &huge), IdentityError::Invalid { .. }));
    let two = cluster.issue_odd(&Odd { names: vec![], ..Odd::proper("b") });
    assert!(matches!(install(cluster.authority.pem(), &two.certificate), IdentityError::NoNode { .. }));
    assert!(!dir.join("node.pem").exists() && !dir.join("ca.pem").exists());
    Identity::install(&dir, cluster.authority.pem(), &own).unwrap();
}

#[test]
fn a_founding_node_keeps_its_own_ca() {
    let (cluster, other) = (Cluster::found(), Cluster::found());
    let dir = cluster.dir("a");
    fs::remove_file(dir.join("node.pem")).unwrap();
    let request = Identity::create_request(&dir, &node("a")).unwrap();
    let foreign = other.authority.issue(&node("a"), &request).unwrap();
    let error = Identity::install(&dir, other.authority.pem(), &foreign).unwrap_err();
    assert!(matches!(error, IdentityError::AuthorityExists { .. }), "{error:?}");
    assert_eq!(fs::read_to_string(dir.join("ca.pem")).unwrap(), cluster.authority.pem());
}

#[test]
fn the_ca_takes_nothing_from_a_request_but_its_key() {
    let cluster = Cluster::found();
    let key = rcgen::KeyPair::generate().unwrap();
    let mut params =
        rcgen::CertificateParams::new(vec![node("a").dns_name(), "x.example".to_owned()]).unwrap();
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let request = params.serialize_request(&key).unwrap().pem().unwrap();
    let issued = cluster.authority.issue(&node("b"), &request).unwrap();
    let der = CertificateDer::from_pem_slice(issued.as_bytes()).unwrap();
    assert_eq!(node_of(&der), Some(node("b")));
    let (_, parsed) = x509_parser::parse_x509_certificate(&der).unwrap();
    assert!(!parsed.is_ca());
    assert!(!parsed.key_usage().unwrap().unwrap().value.key_cert_sign());
    let days =
        (parsed.validity().not_after.timestamp() - parsed.validity().not_before.timestamp()) / (24 * 3600);
    assert_eq!(days, 2 * 365 + 1, "two years, and a day for clocks that are behind");
}

#[test]
fn a_request_with_a_wrong_signature_is_refused() {
    let cluster = Cluster::found();
    let request = Identity::create_request(&cluster.dir("b"), &node("b")).unwrap();
    let der = rustls::pki_types::CertificateSigningRequestDer::from_pem_slice(request.as_bytes()).unwrap();
    let mut bytes = der.to_vec();
    *bytes.last_mut().unwrap() ^= 1;
    use base64::Engine as _;
    let base64 = base64::engine::general_purpose::STANDARD.encode(bytes);
    let forged =
        format!("-----BEGIN CERTIFICATE REQUEST-----\n{base64}\n-----END CERTIFICATE REQUEST-----\n");
    for bad in [forged.as_str(), "", "nonsense", &"x".repeat(100_000)] {
        let error = cluster.authority.issue(&node("b"), bad).unwrap_err();
        assert!(matches!(error, IdentityError::Request { .. }), "{error:?}");
    }
}

#[test]
fn no_key_appears_in_debug_output() {
    let cluster = Cluster::found();
    let shown = format!("{:?} {:#?} {:?}", cluster.a, cluster.a, cluster.authority);
    for file in ["node.key", "ca.key"] {
        let pem = fs::read_to_string(cluster.dir("a").join(file)).unwrap();
        let body: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
        use base64::Engine as _;
        let der = base64::engine::general_purpose::STANDARD.decode(&body).unwrap();
        for window in der.windows(8) {
            let hex: String = window.iter().map(|byte| format!("{byte:02x}")).collect();
            assert!(!shown.contains(&hex));
            let list = format!("{window:?}");
            assert!(!shown.contains(list.trim_matches(['[', ']'])));
        }
        assert!(!shown.contains(&body[..16]) && !shown.contains(&body[body.len() - 16..]));
    }
    assert!(shown.contains("\"a\""), "{shown}");
}
