//! What becomes of a node that was removed, of certificates that end, and of members while strangers
//! begin handshakes and do not end them.
#![allow(clippy::unwrap_used)]

mod support;

use std::net::SocketAddr;
use std::time::Duration;

use godwit_transfer::{
    Alpn, ConnectError, ConnectOptions, Identity, ListenOptions, Listener, Removal, connect,
};
use support::{Cluster, in_time, listen, localhost, node};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};

async fn try_connect(
    who: &Identity,
    address: &str,
    to: &Identity,
) -> Result<godwit_transfer::SecureStream, ConnectError> {
    connect(who, address, to.node(), Alpn::Peer, ConnectOptions::default()).await
}

#[tokio::test]
async fn a_removed_node_is_refused_as_client_and_as_server_and_its_connections_end() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    let mut listener = listen(&cluster.a).await;
    let address = listener.local_addr().to_string();
    let (stream, accepted) = in_time(async {
        let (stream, accepted) = tokio::join!(try_connect(&b, &address, &cluster.a), listener.accept());
        (stream.unwrap(), accepted)
    })
    .await;
    let (mut theirs, mut ours) = (stream, accepted.stream);
    theirs.write_all(b"before").await.unwrap();
    theirs.flush().await.unwrap();
    let mut heard = [0; 6];
    in_time(ours.read_exact(&mut heard)).await.unwrap();

    let removal = cluster.authority.remove(&node("b")).unwrap();
    removal.check(cluster.a.ca()).unwrap();
    assert!(cluster.a.removals().add(&removal));
    assert!(!cluster.a.removals().add(&removal), "it is known");
    // The connection that is up.
    let _ = theirs.write_all(b"after").await;
    let _ = theirs.flush().await;
    let error = in_time(ours.read_exact(&mut heard)).await.unwrap_err();
    assert!(error.to_string().contains("node b was removed from the cluster"), "{error}");
    assert!(ours.write_all(b"x").await.is_err());
    // A new one, from it: an alert, and nothing comes out of the listener.
    let mut stream = in_time(async {
        tokio::select! {
            stream = try_connect(&b, &address, &cluster.a) => stream.unwrap(),
            accepted = listener.accept() => panic!("{} was let in", accepted.peer),
        }
    })
    .await;
    let refused = in_time(async {
        tokio::select! {
            read = stream.read(&mut heard) => read,
            accepted = listener.accept() => panic!("{} was let in", accepted.peer),
        }
    })
    .await;
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("CertificateRevoked"), "{error}");
    // And one to it.
    let mut at_b = listen(&b).await;
    let address_b = at_b.local_addr().to_string();
    tokio::spawn(async move { at_b.accept().await });
    let error = in_time(try_connect(&cluster.a, &address_b, &b)).await.unwrap_err();
    assert!(matches!(error, ConnectError::Removed { .. }), "{error:?}");
}

#[tokio::test]
async fn who_is_let_in_again_after_a_removal_is_believed() {
    let cluster = Cluster::found();
    let removal = cluster.authority.remove(&node("b")).unwrap();
    cluster.a.removals().add(&removal);
    let dir = cluster.dir("b-again");
    let request = Identity::create_request(&dir, &node("b")).unwrap();
    let certificate = cluster.authority.issue_after(&node("b"), &request, removal.until).unwrap();
    let b = Identity::install(&dir, cluster.authority.pem(), &certificate).unwrap();
    let mut listener = listen(&cluster.a).await;
    let address = listener.local_addr().to_string();
    let (stream, accepted) =
        in_time(async { tokio::join!(try_connect(&b, &address, &cluster.a), listener.accept()) }).await;
    stream.unwrap();
    assert_eq!(accepted.peer, node("b"));
}

#[test]
fn a_removal_is_the_cas_own_word() {
    let cluster = Cluster::found();
    let removal = cluster.authority.remove(&node("b")).unwrap();
    removal.check(cluster.a.ca()).unwrap();
    for forged in [
        Removal { node: node("c"), ..removal.clone() },
        Removal { until: removal.until + 1, ..removal.clone() },
        Removal { signature: Vec::new(), ..removal.clone() },
        Cluster::found().authority.remove(&node("b")).unwrap(),
    ] {
        assert!(forged.check(cluster.a.ca()).is_err(), "{forged:?}");
    }
}

#[tokio::test]
async fn a_certificate_is_renewed_in_time_for_the_same_key_and_node_only() {
    let Cluster { dir, authority, a: _ } = Cluster::found();
    // From a day before until so long from now.
    let short = authority.with_node_validity(Duration::from_secs(600));
    let at = dir.path().join("b");
    let request = Identity::create_request(&at, &node("b")).unwrap();
    let b = Identity::install(&at, short.pem(), &short.issue(&node("b"), &request).unwrap()).unwrap();
    assert!(b.renew_at() <= std::time::SystemTime::now(), "two thirds of its time are over");
    let request = Identity::renewal_request(&at, &node("b")).unwrap();
    let other = short.issue(&node("c"), &request).unwrap();
    assert!(b.renew(&at, &other).is_err(), "another node's");
    let same = short.issue(&node("b"), &request).unwrap();
    let long = short.with_node_validity(Duration::from_secs(1_000_000));
    let renewed = long.issue(&node("b"), &request).unwrap();
    let foreign = Cluster::found().authority.issue(&node("b"), &request).unwrap();
    assert!(b.renew(&at, &foreign).is_err(), "another CA's");
    let now = b.renew(&at, &renewed).unwrap();
    assert!(now.expires() > b.expires() && now.renew_at() > std::time::SystemTime::now());
    assert!(now.renew(&at, &same).is_err(), "one that ends sooner");
    assert_eq!(Identity::load(&at).unwrap().expires(), now.expires());
}

/// A connection from an address of the loopback network that says nothing.
async fn silent(from: [u8; 4], to: SocketAddr) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(SocketAddr::from((from, 0))).unwrap();
    socket.connect(to).await.unwrap()
}

#[tokio::test]
async fn a_member_gets_in_while_strangers_hold_all_the_room() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    let never = Duration::from_secs(3600);
    let options = ListenOptions { handshake_timeout: never, patience: never, ..Default::default() };
    let mut listener = Listener::bind(localhost(), &cluster.a, options).await.unwrap();
    let address = listener.local_addr();
    listener.known().set([[127, 0, 0, 1].into()]);
    let (accepted, mut gate) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move { while accepted.send(listener.accept().await).is_ok() {} });
    let mut held = Vec::new();
    for net in 1..=10 {
        for _ in 0..16 {
            held.push(silent([127, 0, net, 9], address).await);
        }
    }
    // A stranger is closed at once: there is no room, and nothing is old enough to make place.
    let mut late = silent([127, 0, 99, 9], address).await;
    assert_eq!(in_time(late.read(&mut [0; 8])).await.unwrap(), 0);
    in_time(try_connect(&b, &address.to_string(), &cluster.a)).await.unwrap();
    assert_eq!(in_time(gate.recv()).await.unwrap().peer, node("b"));
}

#[tokio::test]
async fn the_oldest_unfinished_handshake_makes_place_for_an_honest_stranger() {
    let cluster = Cluster::found();
    let b = cluster.node("b");
    let never = Duration::from_secs(3600);
    let options = ListenOptions { handshake_timeout: never, patience: Duration::ZERO, ..Default::default() };
    let mut listener = Listener::bind(localhost(), &cluster.a, options).await.unwrap();
    let address = listener.local_addr();
    let (accepted, mut gate) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move { while accepted.send(listener.accept().await).is_ok() {} });
    let mut held = Vec::new();
    for host in 1..=5 {
        for _ in 0..16 {
            held.push(silent([127, 0, 7, host], address).await);
        }
    }
    in_time(try_connect(&b, &address.to_string(), &cluster.a)).await.unwrap();
    assert_eq!(in_time(gate.recv()).await.unwrap().peer, node("b"));
    assert_eq!(in_time(held[0].read(&mut [0; 8])).await.unwrap(), 0, "the oldest is closed");
}
