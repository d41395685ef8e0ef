//! A new node joins with a token; it believes the right cluster only.
#![allow(clippy::unwrap_used)]

mod support;

use std::collections::BTreeMap;

use godwit_transfer::join::{JoinAnswer, JoinError, answer, join, read_request};
use godwit_transfer::listen::JoinListener;
use godwit_transfer::{ConnectError, ConnectOptions, Fingerprint, Identity, JoinToken, ListenOptions};
use support::{Cluster, in_time, localhost, node};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

async fn doorman(cluster: &Cluster) -> (JoinListener, String) {
    let listener = JoinListener::bind(localhost(), &cluster.a, ListenOptions::default()).await.unwrap();
    let address = listener.local_addr().to_string();
    (listener, address)
}

#[tokio::test]
async fn a_node_joins_with_its_token() {
    let cluster = Cluster::found();
    let (mut listener, address) = doorman(&cluster).await;
    let token = JoinToken::new(&address, cluster.authority.fingerprint(), node("b")).unwrap();
    let token = JoinToken::decode(&token.encode().unwrap()).unwrap();
    let stored = token.secret.sha256();
    let invite = async {
        let (mut stream, remote) = listener.accept().await;
        let from = remote.to_string();
        let request = read_request(&mut stream, &from).await.unwrap();
        assert_eq!(request.node, node("b"));
        assert!(request.secret.secret().matches_sha256(&stored));
        assert!(format!("{request:?}").contains("SecretField(..)"));
        let granted = JoinAnswer::Granted {
            ca_pem: cluster.authority.pem().to_owned(),
            certificate_pem: cluster.authority.issue(&request.node, &request.request_pem).unwrap(),
            inviter: node("a"),
            inviter_address: "10.99.0.11:7117".to_owned(),
            settings: [("encrypt".to_owned(), "auto".to_owned())].into(),
        };
        answer(&mut stream, &from, &granted).await.unwrap();
    };
    let dir = cluster.dir("b");
    let (joined, ()) =
        in_time(async { tokio::join!(join(&token, &dir, ConnectOptions::default()), invite) }).await;
    let joined = joined.unwrap();
    assert_eq!((joined.identity.node(), joined.inviter), (&node("b"), node("a")));
    assert_eq!(joined.inviter_address, "10.99.0.11:7117");
    assert_eq!(joined.settings["encrypt"], "auto");
    assert_eq!(Identity::load(&dir).unwrap().ca_fingerprint(), cluster.authority.fingerprint());
}

#[tokio::test]
async fn a_server_of_another_cluster_does_not_learn_the_secret() {
    let (cluster, other) = (Cluster::found(), Cluster::found());
    let (mut listener, address) = doorman(&other).await;
    let token = JoinToken::new(&address, cluster.authority.fingerprint(), node("b")).unwrap();
    let dir = cluster.dir("b");
    let error = tokio::select! {
        joined = join(&token, &dir, ConnectOptions::default()) => joined.unwrap_err(),
        _ = listener.accept() => panic!("the handshake succeeded"),
    };
    assert!(matches!(error, JoinError::Connect(ConnectError::ForeignCertificate { .. })), "{error:?}");
    assert!(!dir.join("node.pem").exists());
}

/// The CA's certificate in the chain is not enough: the server's own must be issued by it.
#[tokio::test]
async fn a_server_that_only_shows_the_right_ca_is_not_believed() {
    let (cluster, other) = (Cluster::found(), Cluster::found());
    let (certificate, key) = other.issue_odd(&support::Odd::proper("a")).der();
    let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
    let mut config = rustls::ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![certificate, cluster.a.ca().clone()], key)
        .unwrap();
    config.alpn_protocols = vec![b"godwit-join/1".to_vec()];
    let tcp = tokio::net::TcpListener::bind(localhost()).await.unwrap();
    let address = tcp.local_addr().unwrap().to_string();
    let impostor = async {
        let (stream, _) = tcp.accept().await.unwrap();
        tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config)).accept(stream).await.map(|_| ())
    };
    let token = JoinToken::new(&address, cluster.authority.fingerprint(), node("b")).unwrap();
    let dir = cluster.dir("b");
    let (joined, impostor) =
        in_time(async { tokio::join!(join(&token, &dir, ConnectOptions::default()), impostor) }).await;
    let error = joined.unwrap_err();
    assert!(matches!(error, JoinError::Connect(ConnectError::ForeignCertificate { .. })), "{error:?}");
    assert!(impostor.is_err());
}

#[tokio::test]
async fn a_wrong_fingerprint_is_refused() {
    let cluster = Cluster::found();
    let (mut listener, address) = doorman(&cluster).await;
    let mut bytes = *cluster.authority.fingerprint().as_bytes();
    bytes[31] ^= 1;
    let token = JoinToken::new(&address, Fingerprint::from(bytes), node("b")).unwrap();
    let dir = cluster.dir("b");
    let error = tokio::select! {
        joined = join(&token, &dir, ConnectOptions::default()) => joined.unwrap_err(),
        _ = listener.accept() => panic!("the handshake succeeded"),
    };
    assert!(matches!(error, JoinError::Connect(ConnectError::ForeignCertificate { .. })), "{error:?}");
}

async fn joined_with(cluster: &Cluster, given: JoinAnswer) -> JoinError {
    let (mut listener, address) = doorman(cluster).await;
    let token = JoinToken::new(&address, cluster.authority.fingerprint(), node("b")).unwrap();
    let reply = async {
        let (mut stream, _) = listener.accept().await;
        read_request(&mut stream, "b").await.unwrap();
        answer(&mut stream, "b", &given).await.unwrap();
    };
    let dir = cluster.dir("b");
    let (joined, ()) =
        in_time(async { tokio::join!(join(&token, &dir, ConnectOptions::default()), reply) }).await;
    assert!(!dir.join("node.pem").exists() && !dir.join("ca.pem").exists());
    joined.unwrap_err()
}

#[tokio::test]
async fn a_refusal_is_passed_on_in_words() {
    let reason = "the token has expired".to_owned();
    let error = joined_with(&Cluster::found(), JoinAnswer::Refused { reason }).await;
    assert_eq!(error.to_string(), "the cluster refused node `b`: the token has expired");
}

fn granted(cluster: &Cluster, name: &str, inviter: &str) -> JoinAnswer {
    JoinAnswer::Granted {
        ca_pem: cluster.authority.pem().to_owned(),
        certificate_pem: cluster.issue_odd(&support::Odd::proper(name)).certificate,
        inviter: node(inviter),
        inviter_address: "10.99.0.11:7117".to_owned(),
        settings: BTreeMap::new(),
    }
}

#[tokio::test]
async fn an_answer_that_the_token_does_not_promise_is_not_installed() {
    let cluster = Cluster::found();
    let for_another = joined_with(&cluster, granted(&cluster, "c", "a")).await;
    assert!(matches!(for_another, JoinError::WrongAnswer { .. }), "{for_another:?}");
    let by_another = joined_with(&cluster, granted(&cluster, "b", "c")).await;
    assert!(matches!(by_another, JoinError::WrongAnswer { .. }), "{by_another:?}");
    let other = Cluster::found();
    let of_another = joined_with(&cluster, granted(&other, "b", "a")).await;
    assert!(matches!(of_another, JoinError::WrongAnswer { .. }), "{of_another:?}");
    // Right in all but the key: nothing the token could tell.
    let of_another_key = joined_with(&cluster, granted(&cluster, "b", "a")).await;
    assert!(matches!(of_another_key, JoinError::Identity(_)), "{of_another_key:?}");
}

#[tokio::test]
async fn a_request_that_is_too_long_or_no_json_is_refused() {
    let read =
        |bytes: Vec<u8>| async move { read_request(&mut bytes.as_slice(), "10.0.0.9:1").await.unwrap_err() };
    let too_long = read(u32::MAX.to_be_bytes().to_vec()).await;
    assert!(matches!(too_long, JoinError::Message { .. }));
    assert!(too_long.to_string().contains("10.0.0.9:1"));
    assert!(matches!(read([&[0, 0, 0, 4][..], b"{}{}"].concat()).await, JoinError::Message { .. }));
    assert!(matches!(read(vec![0, 0, 0, 9, b'{']).await, JoinError::Io { .. }));
}

#[tokio::test]
async fn plain_text_learns_nothing_from_the_join_port() {
    let cluster = Cluster::found();
    let (mut listener, address) = doorman(&cluster).await;
    let ask = async {
        let mut tcp = TcpStream::connect(&address).await.unwrap();
        tcp.write_all(b"hello, which version are you?\r\n").await.unwrap();
        let mut received = Vec::new();
        let _ = tcp.read_to_end(&mut received).await;
        received
    };
    tokio::select! {
        received = ask => assert!(received.is_empty() || (received.len() == 7 && received[0] == 21)),
        _ = listener.accept() => panic!("a handshake without TLS"),
    }
}
