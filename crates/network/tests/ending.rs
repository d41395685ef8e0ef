//! Connections of a container that leaves its networks end, and no others. Needs root.

#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;

use godwit_network::connections;
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{getpid, gettid};

fn ip(words: &str) {
    let status = Command::new("ip").args(words.split(' ')).status().unwrap();
    assert!(status.success(), "ip {words}");
}

/// Both ends of a connection, and who listens for others.
fn connection(from: Ipv4Addr, to: Ipv4Addr) -> (TcpStream, TcpStream, TcpListener) {
    let listener = TcpListener::bind((to, 0)).unwrap();
    let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    assert_eq!(client.local_addr().unwrap().ip(), from);
    let (server, _) = listener.accept().unwrap();
    (client, server, listener)
}

fn read(stream: &mut TcpStream) -> Result<usize, ErrorKind> {
    stream.read(&mut [0; 8]).map_err(|error| error.kind())
}

#[test]
fn connections_by_addresses_that_go_end_and_others_go_on() {
    let own_thread = thread::spawn(|| {
        unshare(CloneFlags::CLONE_NEWNET).unwrap();
        let netns = PathBuf::from(format!("/proc/{}/task/{}/ns/net", getpid(), gettid()));
        ip("link set lo up");
        ip("link add own0 type bridge");
        ip("link set own0 up");
        // The other has a link of its own, so that it can go alone.
        ip("link add gone1 type bridge");
        ip("link set gone1 up");
        ip("address add 10.77.1.1/32 dev own0");
        ip("address add 10.77.2.1/32 dev gone1");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let end = |all| runtime.block_on(connections::end(&netns, all)).unwrap();
        let (stays, goes) = (Ipv4Addr::new(10, 77, 1, 1), Ipv4Addr::new(10, 77, 2, 1));
        let (mut inner, mut other, _own) = connection(Ipv4Addr::LOCALHOST, Ipv4Addr::LOCALHOST);
        let (mut first, mut second, listener) = connection(stays, stays);
        let (mut lost, _peer, _lost_listener) = connection(goes, goes);
        assert_eq!(end(false), 0, "all have their addresses");

        ip("link delete gone1");
        assert_eq!(end(false), 2, "both ends of one have lost theirs");
        assert_eq!(read(&mut lost), Err(ErrorKind::ConnectionAborted));
        first.write_all(b"on").unwrap();
        assert_eq!(read(&mut second), Ok(2));

        // Its other end is told, or has ended as well.
        assert!((1..=2).contains(&end(true)));
        assert!(read(&mut first).is_err() && read(&mut second).is_err());
        inner.write_all(b"on").unwrap();
        assert_eq!(read(&mut other), Ok(2), "the loopback's are its own");
        // Who listens stays.
        TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    });
    if let Err(panic) = own_thread.join() {
        std::panic::resume_unwind(panic);
    }
}
