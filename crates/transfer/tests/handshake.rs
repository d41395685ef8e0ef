//! Who gets in, and what those get who do not: nothing but a TLS alert.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use godwit_transfer::connection::OpenError;
use godwit_transfer::{
    Accepted, Alpn, ConnectError, ConnectOptions, Connection, ConnectionOptions, Fingerprint, FrameError,
    Identity, ListenOptions, Listener, connect,
};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{AlertDescription, ClientConfig, RootCertStore, SupportedProtocolVersion};
use support::{Cluster, Issued, Odd, in_time, listen, localhost, node, self_signed};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio_rustls::TlsConnector;

/// Node `a`'s listener, accepting; everything it lets in comes out of the channel.
struct Gate {
    address: SocketAddr,
    let_in: mpsc::UnboundedReceiver<Accepted>,
}

async fn gate_with(identity: &Identity, options: ListenOptions) -> Gate {
    let mut listener = Listener::bind(localhost(), identity, options).await.unwrap();
    let address = listener.local_addr();
    let (sender, let_in) = mpsc::unbounded_channel();
    tokio::spawn(async move { while sender.send(listener.accept().await).is_ok() {} });
    Gate { address, let_in }
}

async fn gate(identity: &Identity) -> Gate {
    gate_with(identity, ListenOptions::default()).await
}

/// A client made by hand: believes node `a`, shows what it is told to show.
struct Stranger {
    certificate: Option<(CertificateDer<'static>, PrivateKeyDer<'static>)>,
    alpn: Vec<Vec<u8>>,
    version: &'static SupportedProtocolVersion,
}

impl Stranger {
    fn with(certificate: Option<&Issued>) -> Self {
        let alpn = vec![b"godwit-data/1".to_vec()];
        Self { certificate: certificate.map(Issued::der), alpn, version: &rustls::version::TLS13 }
    }

    /// Connects, says something, and returns what came back: the bytes, and how it ended.
    async fn try_on(self, cluster: &Cluster, address: SocketAddr) -> (Vec<u8>, Option<rustls::Error>) {
        let mut roots = RootCertStore::empty();
        roots.add(cluster.a.ca().clone()).unwrap();
        let builder = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[self.version])
            .unwrap()
            .with_root_certificates(roots);
        let mut config = match self.certificate {
            Some((certificate, key)) => builder.with_client_auth_cert(vec![certificate], key).unwrap(),
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = self.alpn;
        let name = ServerName::try_from(cluster.a.node().dns_name()).unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let tls_error =
            |error: std::io::Error| error.into_inner().and_then(|e| e.downcast::<rustls::Error>().ok());
        let mut stream = match TlsConnector::from(Arc::new(config)).connect(name, tcp).await {
            Ok(stream) => stream,
            Err(error) => return (Vec::new(), tls_error(error).map(|error| *error)),
        };
        // In TLS 1.3 the client may speak before the server has judged its certificate.
        let _ = stream.write_all(b"GWDF\0\x01\0\0").await;
        let mut received = Vec::new();
        let ended = stream.read_to_end(&mut received).await;
        (received, ended.err().and_then(tls_error).map(|error| *error))
    }
}

/// The stranger gets an alert and nothing else, and the listener lets in nobody but the node that
/// comes after.
async fn is_kept_out(cluster: &Cluster, stranger: Stranger, alert: AlertDescription) {
    let mut gate = gate(&cluster.a).await;
    let (received, error) = stranger.try_on(cluster, gate.address).await;
    assert_eq!(received, b"", "a stranger received application data");
    assert_eq!(error, Some(rustls::Error::AlertReceived(alert)));

    let dir = cluster.dir("right");
    let right = if dir.exists() { Identity::load(&dir).unwrap() } else { cluster.node("right") };
    let options = ConnectOptions::default();
    connect(&right, &gate.address.to_string(), cluster.a.node(), Alpn::Peer, options).await.unwrap();
    let first = gate.let_in.recv().await.unwrap();
    assert_eq!((first.peer, first.alpn), (node("right"), Alpn::Peer));
    assert!(gate.let_in.try_recv().is_err());
}

#[tokio::test]
async fn a_client_without_a_certificate_gets_an_alert_and_no_byte() {
    let cluster = Cluster::found();
    is_kept_out(&cluster, Stranger::with(None), AlertDescription::CertificateRequired).await;
}

/// Notes which CAs the server asks for, and shows nothing.
#[derive(Debug, Default)]
struct Curious(std::sync::Mutex<Option<usize>>);

impl rustls::client::ResolvesClientCert for Curious {
    fn resolve(
        &self,
        cas: &[&[u8]],
        _: &[rustls::SignatureScheme],
    ) -> Option<Arc<rustls::sign::CertifiedKey>> {
        *self.0.lock().unwrap() = Some(cas.len());
        None
    }

    fn has_certs(&self) -> bool {
        true
    }
}

#[tokio::test]
async fn a_client_without_a_certificate_does_not_learn_the_name_of_the_ca() {
    let cluster = Cluster::found();
    let gate = gate(&cluster.a).await;
    let mut roots = RootCertStore::empty();
    roots.add(cluster.a.ca().clone()).unwrap();
    let curious = Arc::new(Curious::default());
    let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_cert_resolver(curious.clone());
    let name = ServerName::try_from(cluster.a.node().dns_name()).unwrap();
    let tcp = TcpStream::connect(gate.address).await.unwrap();
    TlsConnector::from(Arc::new(config)).connect(name, tcp).await.unwrap();
    assert_eq!(*curious.0.lock().unwrap(), Some(0));
}

#[tokio::test]
async fn a_client_of_another_cluster_is_kept_out() {
    let cluster = Cluster::found();
    let foreign = Cluster::named("other").issue_odd(&Odd::proper("b"));
    is_kept_out(&cluster, Stranger::with(Some(&foreign)), AlertDescription::UnknownCA).await;
    // A CA of the same name: only the signature tells.
    let namesake = Cluster::found().issue_odd(&Odd::proper("b"));
    is_kept_out(&cluster, Stranger::with(Some(&namesake)), AlertDescription::DecryptError).await;
    let own = self_signed(&Odd::proper("b"));
    is_kept_out(&cluster, Stranger::with(Some(&own)), AlertDescription::UnknownCA).await;
}

#[tokio::test]
async fn a_client_with_an_expired_certificate_is_kept_out() {
    let cluster = Cluster::found();
    let expired = cluster.issue_odd(&Odd { from_days: -20, until_days: -1, ..Odd::proper("b") });
    is_kept_out(&cluster, Stranger::with(Some(&expired)), AlertDescription::CertificateExpired).await;
    let early = cluster.issue_odd(&Odd { from_days: 2, ..Odd::proper("b") });
    is_kept_out(&cluster, Stranger::with(Some(&early)), AlertDescription::CertificateExpired).await;
}

#[tokio::test]
async fn a_client_whose_certificate_names_no_single_node_is_kept_out() {
    let cluster = Cluster::found();
    let (a, b) = (node("a").dns_name(), node("b").dns_name());
    for names in [vec![], vec!["b.example".to_owned()], vec![a, b], vec!["*.node.godwit".to_owned()]] {
        let odd = cluster.issue_odd(&Odd { names, ..Odd::proper("b") });
        is_kept_out(&cluster, Stranger::with(Some(&odd)), AlertDescription::AccessDenied).await;
    }
}

#[tokio::test]
async fn a_certificate_for_servers_only_does_not_make_a_client() {
    let cluster = Cluster::found();
    let purposes = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let odd = cluster.issue_odd(&Odd { purposes, ..Odd::proper("b") });
    is_kept_out(&cluster, Stranger::with(Some(&odd)), AlertDescription::UnsupportedCertificate).await;
}

#[tokio::test]
async fn another_protocol_or_an_old_tls_is_refused() {
    let cluster = Cluster::found();
    let b = cluster.issue_odd(&Odd::proper("b"));
    let http = Stranger { alpn: vec![b"http/1.1".to_vec()], ..Stranger::with(Some(&b)) };
    is_kept_out(&cluster, http, AlertDescription::NoApplicationProtocol).await;
    let join = Stranger { alpn: vec![b"godwit-join/1".to_vec()], ..Stranger::with(Some(&b)) };
    is_kept_out(&cluster, join, AlertDescription::NoApplicationProtocol).await;
    let old = Stranger { version: &rustls::version::TLS12, ..Stranger::with(Some(&b)) };
    is_kept_out(&cluster, old, AlertDescription::ProtocolVersion).await;
}

#[tokio::test]
async fn a_node_that_names_no_protocol_gets_no_byte() {
    let cluster = Cluster::found();
    let mut gate = gate(&cluster.a).await;
    let b = cluster.issue_odd(&Odd::proper("b"));
    let silent = Stranger { alpn: Vec::new(), ..Stranger::with(Some(&b)) };
    let (received, _) = silent.try_on(&cluster, gate.address).await;
    assert_eq!(received, b"");
    assert!(gate.let_in.try_recv().is_err());
}

#[tokio::test]
async fn plain_text_is_answered_by_at_most_an_alert() {
    let cluster = Cluster::found();
    let gate = gate(&cluster.a).await;
    let mut tcp = TcpStream::connect(gate.address).await.unwrap();
    tcp.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut received = Vec::new();
    let _ = tcp.read_to_end(&mut received).await; // a reset is as good an end as another
    // One record: type 21 (alert), version, length 2, level, description.
    assert!(received.is_empty() || (received.len() == 7 && received[0] == 21), "{received:?}");
}

#[tokio::test]
async fn the_right_node_gets_in_and_both_know_each_other() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    let mut gate = gate(&cluster.a).await;
    let address = gate.address.to_string();
    let options = ConnectOptions::default();
    for alpn in [Alpn::Peer, Alpn::Data] {
        let stream = connect(&b, &address, cluster.a.node(), alpn, options).await.unwrap();
        let accepted = gate.let_in.recv().await.unwrap();
        assert_eq!((accepted.peer, accepted.alpn), (node("b"), alpn));
        assert_eq!(stream.get_ref().1.protocol_version(), Some(rustls::ProtocolVersion::TLSv1_3));
        let tcp = accepted.stream.get_ref().0.tcp();
        assert!(tcp.nodelay().unwrap());
        assert!(rustix::net::sockopt::socket_keepalive(tcp).unwrap());
        assert_eq!(rustix::net::sockopt::tcp_user_timeout(tcp).unwrap(), 10_000);
    }
}

/// What connecting as `b` to `server`, believed to be `expected`, ends with.
async fn connect_error(cluster: &Cluster, server: &Identity, expected: &str) -> ConnectError {
    let dir = cluster.dir("b");
    let b = if dir.exists() { Identity::load(&dir).unwrap() } else { cluster.node("b") };
    let mut gate = gate(server).await;
    let options = ConnectOptions::default();
    let error =
        connect(&b, &gate.address.to_string(), &node(expected), Alpn::Data, options).await.unwrap_err();
    assert!(error.to_string().contains(&gate.address.to_string()), "{error}");
    assert!(gate.let_in.try_recv().is_err());
    error
}

#[tokio::test]
async fn a_server_that_is_another_node_is_refused() {
    let cluster = Cluster::found();
    let c = cluster.node("c");
    let error = connect_error(&cluster, &c, "a").await;
    assert!(matches!(error, ConnectError::WrongNode { .. }), "{error:?}");
    assert!(error.to_string().contains("`a`"), "{error}");
}

#[tokio::test]
async fn a_server_of_another_cluster_is_refused() {
    let cluster = Cluster::found();
    for other in [Cluster::named("other"), Cluster::found()] {
        let error = connect_error(&cluster, &other.a, "a").await;
        assert!(matches!(error, ConnectError::ForeignCertificate { .. }), "{error:?}");
    }
}

/// A certificate of the cluster that is good for two nodes is good for none: who has it could pass
/// for either.
#[tokio::test]
async fn a_server_whose_certificate_names_two_nodes_is_refused() {
    let cluster = Cluster::found();
    let names = vec![node("a").dns_name(), node("c").dns_name()];
    let (certificate, key) = cluster.issue_odd(&Odd { names, ..Odd::proper("a") }).der();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    config.alpn_protocols = vec![b"godwit-data/1".to_vec()];
    let tcp = tokio::net::TcpListener::bind(localhost()).await.unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    let serve = async {
        let (stream, _) = tcp.accept().await.unwrap();
        tokio_rustls::TlsAcceptor::from(Arc::new(config)).accept(stream).await.map(|_| ())
    };
    let options = ConnectOptions::default();
    let (connected, served) =
        tokio::join!(connect(&cluster.a, &address, cluster.a.node(), Alpn::Data, options), serve);
    assert!(matches!(connected, Err(ConnectError::WrongNode { .. })), "{connected:?}");
    assert!(served.is_err());
}

#[tokio::test]
async fn a_server_with_an_expired_certificate_is_refused() {
    let cluster = Cluster::found();
    let expired = cluster.issue_odd(&Odd { from_days: -20, until_days: -1, ..Odd::proper("c") });
    expired.install(&cluster.dir("c"), cluster.authority.pem());
    let c = Identity::load(&cluster.dir("c")).unwrap();
    assert!(c.expires() < std::time::SystemTime::now());
    let error = connect_error(&cluster, &c, "c").await;
    assert!(matches!(error, ConnectError::NotValidNow { .. }), "{error:?}");
}

#[tokio::test]
async fn a_node_whose_certificate_is_refused_is_told_so() {
    let cluster = Cluster::found();
    let expired = cluster.issue_odd(&Odd { from_days: -20, until_days: -1, ..Odd::proper("b") });
    expired.install(&cluster.dir("b"), cluster.authority.pem());
    let b = Identity::load(&cluster.dir("b")).unwrap();
    let gate = gate(&cluster.a).await;
    let options = ConnectionOptions::default();
    let opened = Connection::open(&b, &gate.address.to_string(), cluster.a.node(), &options).await;
    match opened.unwrap_err() {
        OpenError::Frame(error @ FrameError::Refused { alert: AlertDescription::CertificateExpired, .. }) => {
            assert!(error.to_string().contains("node `a` refused this node"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_silent_client_holds_up_nobody_and_is_closed_in_time() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    // It is that of the others as well.
    let handshake_timeout = Duration::from_secs(10);
    let mut gate = gate_with(&cluster.a, ListenOptions { handshake_timeout, ..Default::default() }).await;
    let mut silent = TcpStream::connect(gate.address).await.unwrap();
    let options = ConnectOptions::default();
    connect(&b, &gate.address.to_string(), cluster.a.node(), Alpn::Data, options).await.unwrap();
    assert_eq!(gate.let_in.recv().await.unwrap().peer, node("b"));
    assert_eq!(silent.read(&mut [0; 8]).await.unwrap(), 0);
}

#[tokio::test]
async fn one_address_cannot_fill_the_room_for_handshakes() {
    let cluster = Cluster::found();
    let never = Duration::from_secs(3600);
    let options =
        ListenOptions { max_pending_per_address: 2, handshake_timeout: never, ..Default::default() };
    let mut gate = gate_with(&cluster.a, options).await;
    let mut silent = Vec::new();
    for _ in 0..2 {
        silent.push(TcpStream::connect(gate.address).await.unwrap());
    }
    let mut third = TcpStream::connect(gate.address).await.unwrap();
    let closed = in_time(third.read(&mut [0; 8])).await;
    assert_eq!(closed.unwrap(), 0);
    // The room of a client that goes away is free again.
    drop(silent);
    let b = cluster.node("b");
    let address = gate.address.to_string();
    let entered = async {
        while connect(&b, &address, cluster.a.node(), Alpn::Data, ConnectOptions::default()).await.is_err() {}
        gate.let_in.recv().await.unwrap()
    };
    let entered = in_time(entered).await;
    assert_eq!(entered.peer, node("b"));
}

#[tokio::test]
async fn a_host_that_accepts_and_says_nothing_is_given_up() {
    let cluster = Cluster::found();
    let mute = tokio::net::TcpListener::bind(localhost()).await.unwrap();
    let address = mute.local_addr().unwrap().to_string();
    let options = ConnectOptions { timeout: Duration::from_millis(100), ..Default::default() };
    let error = connect(&cluster.a, &address, &node("b"), Alpn::Data, options).await.unwrap_err();
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error:?}");
}

#[tokio::test]
async fn a_listener_uses_a_renewed_certificate_for_later_connections() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    let mut listener = listen(&cluster.a).await;
    let address = listener.local_addr().to_string();
    cluster
        .issue_odd(&Odd { until_days: 30, ..Odd::proper("a") })
        .install(&cluster.dir("a2"), cluster.authority.pem());
    let renewed = Identity::load(&cluster.dir("a2")).unwrap();
    listener.set_identity(&renewed).unwrap();
    let connecting = connect(&b, &address, cluster.a.node(), Alpn::Data, ConnectOptions::default());
    let (stream, _accepted) = tokio::join!(connecting, listener.accept());
    let stream = stream.unwrap();
    let shown = Fingerprint::of(&stream.get_ref().1.peer_certificates().unwrap()[0]);
    let pem = std::fs::read_to_string(cluster.dir("a2").join("node.pem")).unwrap();
    assert_eq!(shown, Fingerprint::of_pem(&pem).unwrap());
}
