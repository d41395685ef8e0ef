//! A service's sockets while it stands still: they do not reach each other, nothing that they say is lost, and
//! nothing is left of what held them. Needs root and nft.
#![allow(clippy::unwrap_used)]

use std::{
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::PathBuf,
    process::Command,
    time::Duration,
};

use godwit_network::{Standing, enter, forget_standing};

/// A network namespace of the test's own, with a loopback interface.
struct Namespace(String);

impl Namespace {
    fn new(name: &str) -> Self {
        let namespace = Self(format!("gwt-{name}-{}", std::process::id()));
        namespace.ip(&["netns", "add", &namespace.0]);
        namespace.ip(&["-n", &namespace.0, "link", "set", "lo", "up"]);
        namespace
    }

    fn ip(&self, words: &[&str]) -> String {
        let output = Command::new("ip").args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn path(&self) -> PathBuf {
        format!("/run/netns/{}", self.0).into()
    }

    async fn connect(&self, address: IpAddr) -> (TcpStream, TcpStream) {
        let connect = move || {
            let listener = TcpListener::bind(SocketAddr::new(address, 0)).unwrap();
            let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            (near, listener.accept().unwrap().0)
        };
        enter(&self.path(), connect).await.unwrap()
    }

    /// What is left of a standstill: the tables, and the group of the interface.
    fn left(&self) -> (String, bool) {
        let tables = self.ip(&["netns", "exec", &self.0, "nft", "list", "tables"]);
        let link = self.ip(&["-n", &self.0, "-d", "link", "show", "lo"]);
        (tables, !link.contains("group default"))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).status();
    }
}

fn comes(stream: &mut TcpStream, bytes: &[u8], within: Duration) -> bool {
    stream.set_read_timeout(Some(within)).unwrap();
    let mut got = vec![0; bytes.len()];
    match stream.read_exact(&mut got) {
        Ok(()) => {
            assert_eq!(got, bytes);
            true
        }
        Err(error) if error.kind() == ErrorKind::WouldBlock => false,
        Err(error) => panic!("{error}"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_sockets_say_to_each_other_is_held_and_then_said() {
    const SHORT: Duration = Duration::from_millis(50);
    const LONG: Duration = Duration::from_secs(60);
    let namespace = Namespace::new("held");
    for address in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
        let (mut near, mut far) = namespace.connect(address).await;
        near.set_nodelay(true).unwrap();
        let standing = Standing::prepare(&namespace.path(), 0).await.unwrap();
        near.write_all(b"before").unwrap();
        assert!(comes(&mut far, b"before", LONG), "a table that is only there holds nothing");
        standing.hold().unwrap();
        near.write_all(b"meanwhile").unwrap();
        assert!(!comes(&mut far, b"meanwhile", SHORT), "{address}: it has come");
        standing.let_go().unwrap();
        assert!(standing.send_kept().unwrap() > 0);
        assert!(comes(&mut far, b"meanwhile", LONG));
        far.write_all(b"after").unwrap();
        assert!(comes(&mut near, b"after", LONG));
        forget_standing(&namespace.path()).await.unwrap();
        assert_eq!(namespace.left(), (String::new(), false));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standstill_of_an_earlier_life_leaves_nothing() {
    let namespace = Namespace::new("life");
    let standing = Standing::prepare(&namespace.path(), 0).await.unwrap();
    standing.hold_loopback().unwrap();
    assert!(namespace.left().0.contains("godwit-loopback") && namespace.left().1);
    drop(standing);
    for _ in 0..2 {
        forget_standing(&namespace.path()).await.unwrap();
        assert_eq!(namespace.left(), (String::new(), false));
    }
}
