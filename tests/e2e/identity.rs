//! Who is let in: nodes with a certificate of this cluster, and a new one with a token, once. Needs root.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::Stdio,
    sync::Arc,
    thread,
    time::Duration,
};

use godwit_tests::{Bed, CLIENT, Said, programs, wait_for};
use godwit_transfer::{ClusterAuthority, NodeName};
use tokio_rustls::rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, Error, SignatureScheme, StreamOwned,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
    version::{TLS12, TLS13},
};

/// What an HTTP/2 client says first: its preface, and SETTINGS without settings.
const HELLO: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// Content type of TLS records that are alerts.
const ALERT: u8 = 21;

/// A stranger believes any server: what counts is what the server tells it.
#[derive(Debug)]
struct Credulous;

impl ServerCertVerifier for Credulous {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

fn connect(bed: &Bed, node: &str, port: u16) -> TcpStream {
    let address = SocketAddr::new(bed.lab().address(node).unwrap().into(), port);
    let stream = bed.lab().inside(CLIENT, || TcpStream::connect(address)).unwrap().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// Application data that node `a` sends over TLS to a client with the identity in `identity`, or
/// with none, and how the connection ended.
fn hears(bed: &Bed, identity: Option<&Path>, alpn: &[u8], old: bool) -> (Vec<u8>, io::Result<()>) {
    let versions = if old { &[&TLS12] } else { &[&TLS13] };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Credulous));
    let mut config = match identity {
        None => config.with_no_client_auth(),
        Some(directory) => {
            let certificate = CertificateDer::from_pem_file(directory.join("node.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_file(directory.join("node.key")).unwrap();
            config.with_client_auth_cert(vec![certificate], key).unwrap()
        }
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let name = ServerName::try_from("a.node.godwit").unwrap();
    let connection = ClientConnection::new(Arc::new(config), name).unwrap();
    let mut stream = StreamOwned::new(connection, connect(bed, "a", 7117));
    let mut heard = vec![0; 4096];
    let outcome = stream.write_all(HELLO).and_then(|()| stream.read(&mut heard));
    let length = *outcome.as_ref().unwrap_or(&0);
    heard.truncate(length);
    (heard, outcome.map(|_| ()))
}

#[test]
fn who_has_no_certificate_of_this_cluster_hears_nothing() {
    let bed = Bed::up("id-strangers");
    let own = bed.lab().state("a").unwrap().join("identity");
    // A certificate of another cluster's CA, for a name that this cluster knows.
    let foreign = bed.scratch().join("foreign");
    let node = NodeName::new("a").unwrap();
    ClusterAuthority::create(&foreign, bed.lab().name()).unwrap().issue_own(&foreign, &node).unwrap();
    for alpn in ["h2", "godwit-data/1"] {
        let (heard, _) = hears(&bed, Some(&own), alpn.as_bytes(), false);
        assert!(
            !heard.is_empty(),
            "{alpn}: a node of the cluster must hear something, or this test hears nothing"
        );
        for (who, identity) in [("no certificate", None), ("a foreign certificate", Some(foreign.as_path()))]
        {
            let (heard, outcome) = hears(&bed, identity, alpn.as_bytes(), false);
            assert!(heard.is_empty(), "{who}, {alpn}: {heard:?}");
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("alert") || error.contains("reset"), "{who}, {alpn}: {error}");
        }
    }
    // Nor do an old version of TLS, another protocol, and the protocol for new nodes help.
    for (alpn, old) in [("h2", true), ("http/1.1", false), ("godwit-join/1", false)] {
        let (heard, outcome) = hears(&bed, Some(&own), alpn.as_bytes(), old);
        assert!(heard.is_empty() && outcome.is_err(), "{alpn}: {heard:?} {outcome:?}");
    }
}

#[test]
fn who_does_not_speak_tls_hears_an_alert_at_most() {
    let bed = Bed::up("id-plain");
    for port in [7117, 7118] {
        for words in [HELLO, b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", &[0; 64], &[22, 3, 1, 255, 255]] {
            let mut stream = connect(&bed, "a", port);
            stream.write_all(words).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut heard = Vec::new();
            // A reset is an answer as good as an end.
            let _ = stream.read_to_end(&mut heard);
            assert!(heard.is_empty() || heard[0] == ALERT && heard.len() <= 7, "{port}: {heard:?}");
        }
    }
    wait_for("the node to serve on", || {
        (bed.json::<serde_json::Value>("b", &["nodes"])[0]["state"] == "ready").then_some(())
    });
}

/// `godwitd join` on the client host with a state directory of its own.
fn join(bed: &Bed, state: &Path, node: &str, token: &str) -> Said {
    let mut command = bed.on_client(programs().join("godwitd").to_str().unwrap());
    command.arg("join").arg("--state").arg(state);
    command.args(["--node", node, "--listen", "10.99.0.100:7117", "--", token]);
    let output = command.stdin(Stdio::null()).output().unwrap();
    Said {
        code: output.status.code().unwrap(),
        stdout: String::from_utf8(output.stdout).unwrap(),
        stderr: String::from_utf8(output.stderr).unwrap(),
    }
}

/// A join that was refused: one sentence, and no certificate.
fn refused(said: &Said, state: &Path, words: &[&str]) {
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.starts_with("Error: ") && said.stderr.lines().count() == 1, "{said:?}");
    for word in words {
        assert!(said.stderr.contains(word), "{word:?}: {said:?}");
    }
    assert!(!state.join("identity/node.pem").exists(), "a node that was refused has a certificate");
}

#[test]
fn a_token_is_good_for_one_node_once_and_for_its_time() {
    let bed = Bed::up("id-token");
    let state = |name: &str| bed.scratch().join(name);
    let token = bed.done("a", &["cluster", "token", "c"]);
    let token = token.trim();
    // One letter of the secret is another one.
    let at = token.len() - 3;
    let letter = if token.as_bytes()[at] == b'A' { "B" } else { "A" };
    let wrong = format!("{}{letter}{}", &token[..at], &token[at + 1..]);
    refused(&join(&bed, &state("wrong"), "c", &wrong), &state("wrong"), &["token"]);
    refused(
        &join(&bed, &state("other"), "d", token),
        &state("other"),
        &["the token is for node c", "godwit cluster token d"],
    );
    let said = join(&bed, &state("first"), "c", token);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(state("first").join("identity/node.pem").is_file());
    refused(&join(&bed, &state("second"), "c", token), &state("second"), &["token"]);
    // Nor is there a second token for a name that was let in, unless it is asked for.
    let said = bed.godwit("a", &["cluster", "token", "c"]);
    assert!(said.code == 1 && said.stderr.contains("`godwit cluster token --again c`"), "{said:?}");
    let again = bed.done("a", &["cluster", "token", "--again", "c"]);
    let said = join(&bed, &state("again"), "c", again.trim());
    assert_eq!(said.code, 0, "{said:?}");
    // Nor is there a token for a member's name, or by a node that cannot sign.
    for (node, name, words) in
        [("a", "b", "member of the cluster already"), ("b", "e", "has no key of the cluster's CA")]
    {
        let said = bed.godwit(node, &["cluster", "token", name]);
        assert!(said.code == 1 && said.stderr.contains(words), "{said:?}");
    }
    let short = bed.done("a", &["cluster", "token", "--valid", "1s", "d"]);
    // The time itself is what is tested.
    thread::sleep(Duration::from_millis(1500));
    refused(&join(&bed, &state("late"), "d", short.trim()), &state("late"), &["token"]);
}

#[test]
fn a_cluster_is_founded_once() {
    let bed = Bed::up("id-init");
    for node in ["a", "b"] {
        let state = bed.lab().state(node).unwrap();
        let files = || {
            let names = fs::read_dir(state.join("identity")).unwrap().map(|entry| entry.unwrap().path());
            let mut files: Vec<_> = names.map(|path| (path.clone(), fs::read(path).unwrap())).collect();
            files.sort();
            files
        };
        let before = files();
        let said = bed.godwit(
            node,
            &["cluster", "init", "--state", state.to_str().unwrap(), "--listen", "10.99.0.11:7117"],
        );
        assert_eq!(said.code, 1, "{said:?}");
        assert!(said.stderr.contains("a cluster was founded here already") || node == "b", "{said:?}");
        assert!(said.stderr.starts_with("Error: ") && said.stderr.lines().count() == 1, "{said:?}");
        assert_eq!(files(), before, "the identity of {node} changed");
    }
}

/// The states of the other nodes, as a node sees them.
fn states(bed: &Bed, node: &str) -> Vec<(String, String)> {
    let nodes = bed.json::<Vec<serde_json::Value>>(node, &["nodes"]);
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    nodes.iter().map(|node| (text(&node["name"]), text(&node["state"]))).collect()
}

#[test]
fn a_node_that_is_removed_is_refused_by_all_and_can_be_let_in_again() {
    let bed = Bed::up("id-remove");
    wait_for("both nodes to be ready", || {
        states(&bed, "a").iter().all(|(_, state)| state == "ready").then_some(())
    });
    let said = bed.godwit("b", &["cluster", "remove", "a"]);
    assert!(said.code == 1 && said.stderr.contains("has no key of the cluster's CA"), "{said:?}");
    for (name, words) in
        [("a", "cannot be removed"), ("x", "there is no node x"), ("../x", "cannot be a node")]
    {
        let said = bed.godwit("a", &["cluster", "remove", name]);
        assert!(said.code == 1 && said.stderr.contains(words), "{said:?}");
    }
    assert!(bed.done("a", &["cluster", "remove", "b"]).starts_with("node b is removed"));
    assert_eq!(states(&bed, "a"), [("a".to_owned(), "ready".to_owned())]);
    // Nothing is heard of `a` there any more, and its certificate is refused at every new connection.
    wait_for("node a to be out of reach of b", || {
        states(&bed, "b").iter().any(|(name, state)| name == "a" && state == "unreachable").then_some(())
    });
    let own = bed.lab().state("b").unwrap().join("identity");
    let (heard, outcome) = hears(&bed, Some(&own), b"h2", false);
    assert!(heard.is_empty() && outcome.is_err(), "{heard:?} {outcome:?}");
    // The removal outlives the daemon.
    bed.lab().stop_node("a").unwrap();
    bed.lab().start_node("a").unwrap();
    let (heard, _) = hears(&bed, Some(&own), b"h2", false);
    assert!(heard.is_empty(), "{heard:?}");
    // A new certificate is believed.
    let token = bed.done("a", &["cluster", "token", "b"]);
    let state = bed.scratch().join("again");
    let said = join(&bed, &state, "b", token.trim());
    assert_eq!(said.code, 0, "{said:?}");
    let (heard, _) = hears(&bed, Some(&state.join("identity")), b"h2", false);
    assert!(!heard.is_empty(), "the new certificate is refused");
}

#[test]
fn certificates_are_renewed_by_themselves() {
    let bed = Bed::up_with("id-renew", |config| {
        // Of a time that is over for the most part as soon as it begins: a day of it is before now.
        let short = ["--certificate-validity", "3600"].map(str::to_owned);
        config.programs.serve_arguments.extend(short);
    });
    let certificate =
        |node: &str| fs::read(bed.lab().state(node).unwrap().join("identity/node.pem")).unwrap();
    let first = certificate("b");
    wait_for("node b to have another certificate", || (certificate("b") != first).then_some(()));
    wait_for("the event of it", || bed.done("b", &["events"]).contains("renewed").then_some(()));
    wait_for("the nodes to be ready", || {
        states(&bed, "a").iter().all(|(_, state)| state == "ready").then_some(())
    });
    // A connection that begins now shows the new one.
    let own = bed.lab().state("b").unwrap().join("identity");
    let (heard, _) = hears(&bed, Some(&own), b"h2", false);
    assert!(!heard.is_empty(), "the renewed certificate is refused");
}
