//! What nodes send each other, encrypted by the kernel's WireGuard: nothing of it can be read on the wire,
//! nothing goes there that could, and a daemon that is restarted loses none of it.
//!
//! Most of these need a kernel that has WireGuard: `make test-machines` runs them in a virtual machine with one.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use common::wire::{Wire, contains};
use common::{
    A_WHILE, Host, Node, SOON, Switch, UPLINK, World, connect, echo_server, echoes, service, udp_at,
};
use godwit_network::{
    Between, Encryption, Guard, NetworkError, Overlay, OverlayConfig, PeerStatus, PublicKey, Tunnel,
    TunnelConfig, WireGuard, open_the_clear,
};

/// As `common::on_every_switch`, for tests that need a kernel with WireGuard.
macro_rules! with_wireguard_on_every_switch {
    ($($name:ident),+ $(,)?) => {
        mod kernel {
            $(#[test] #[ignore = "needs a kernel with WireGuard: make test-machines"]
            fn $name() { super::$name(super::common::Switch::Kernel); })+
        }
        mod openvswitch {
            $(#[test] #[ignore = "needs a kernel with WireGuard: make test-machines"]
            fn $name() { super::$name(super::common::Switch::OpenVswitch); })+
        }
    };
}

with_wireguard_on_every_switch!(
    what_nodes_send_each_other_passes_and_cannot_be_read,
    without_the_right_keys_nothing_passes_and_nothing_leaves_in_the_clear,
    a_daemon_that_is_restarted_loses_no_packet_and_keeps_its_keys,
    what_is_not_vxlan_of_the_node_itself_does_not_come_out_of_it,
);

const PORT: u16 = 7119;
const VXLAN: u16 = 4789;
const DEVICE: &str = "gwwg0";
/// How long the first packet may take after two nodes have been told of each other. Here they are at the same
/// moment, and both begin a handshake: where these cross, WireGuard tries again 5 s later.
const FIRST: Duration = Duration::from_secs(60);

fn tunnel_config(node: &Node) -> TunnelConfig {
    TunnelConfig::new(UPLINK, node.vtep, PORT, VXLAN)
}

fn try_wireguard(node: &Node) -> Result<WireGuard, NetworkError> {
    let config = tunnel_config(node).by_wireguard();
    node.with(async move |_: &Overlay| WireGuard::up(config).await)
}

fn at(address: Ipv4Addr) -> SocketAddrV4 {
    SocketAddrV4::new(address, PORT)
}

/// Runs a future that is done at once, for what needs no runtime of a node.
fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

fn key(wireguard: &WireGuard) -> PublicKey {
    wait(wireguard.public_key())
}

/// Tells each of the other.
fn introduce(world: &World, a: &WireGuard, b: &WireGuard) {
    wait(a.install(at(world.b.vtep), key(b))).unwrap();
    wait(b.install(at(world.a.vtep), key(a))).unwrap();
}

/// What a node with this sees of another one.
fn seen(node: &Node, of: Ipv4Addr) -> PeerStatus {
    let config = tunnel_config(node).by_wireguard();
    node.with(async move |_: &Overlay| {
        WireGuard::up(config).await.unwrap().status().await.unwrap().nodes[&of]
    })
}

fn guard(node: &Node, other: Ipv4Addr) {
    let (networks, tunnel) = (vec![Between::of(&node.config())], Some(DEVICE.to_owned()));
    let guard = Guard { port: VXLAN, networks, tunnel, nodes: [other].into() };
    node.with(async move |_: &Overlay| guard.apply().await).unwrap();
}

fn dropped(node: &Node) -> u64 {
    node.with(async |_: &Overlay| Guard::in_force().await.unwrap().unwrap()).dropped
}

/// Two nodes with WireGuard and their guards, which do not know each other's keys yet.
fn world(switch: Switch) -> (World, WireGuard, WireGuard) {
    let world = World::bare(switch);
    for node in [&world.a, &world.b] {
        node.up_with(OverlayConfig { encryption: Encryption::WireGuard, ..node.config() }).unwrap();
    }
    let (a, b) = (try_wireguard(&world.a).unwrap(), try_wireguard(&world.b).unwrap());
    guard(&world.a, world.b.vtep);
    guard(&world.b, world.a.vtep);
    (world, a, b)
}

/// A service on `b`, which `a` knows.
fn service_on_b(world: &World, last: u8) -> (Host, Ipv4Addr) {
    let web = service("web", last);
    let inside = world.b.create(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    (inside, web.address)
}

fn echo_on_b(world: &World, last: u8) -> SocketAddr {
    let (inside, address) = service_on_b(world, last);
    echo_server(&inside, address, 80)
}

#[test]
fn where_the_kernel_has_no_wireguard_that_is_said_with_what_to_do() {
    let world = World::new(Switch::Kernel);
    match (WireGuard::is_there().unwrap(), try_wireguard(&world.a)) {
        (true, result) => assert_eq!(result.unwrap().config().device, DEVICE),
        (false, result) => {
            let message = common::describe(&result.unwrap_err());
            assert!(message.contains("modprobe wireguard"), "{message}");
            assert!(message.contains("--encrypt tunnel"), "{message}");
            // Closed all the same: it was to be private.
            assert!(world.a.host.sh("ip rule show").contains("dport 4789"), "the clear way is open");
        }
    }
}

fn what_nodes_send_each_other_passes_and_cannot_be_read(switch: Switch) {
    let (world, a, b) = world(switch);
    introduce(&world, &a, &b);
    let to = echo_on_b(&world, 70);
    let client = service("client", 90);
    let from = world.a.create(&client);
    world.a.open(&client);
    world.b.set_remote(&client, world.a.vtep);
    let wires = [Wire::tap(&world.a.host), Wire::tap(&world.b.host)];
    let mut connection = connect(&from, to, FIRST).unwrap();
    let secret = b"nobody but the two may read this";
    assert!(echoes(&mut connection, secret, SOON));
    // Also what fills frames, to and fro.
    assert!(echoes(&mut connection, &secret.repeat(10_000), SOON));
    for wire in wires {
        let frames = wire.frames();
        assert!(frames.iter().filter(|(port, _)| *port == Some(PORT)).count() > 4);
        assert!(frames.iter().all(|(port, _)| *port != Some(VXLAN)), "a frame in the clear");
        assert!(!frames.iter().any(|(_, frame)| contains(frame, &secret[..16])), "the secret in the clear");
        let of_wireguard = frames.iter().filter(|(port, _)| *port == Some(PORT));
        let longest = of_wireguard.map(|(_, frame)| frame.len()).max().unwrap();
        // The MTU is used up to the last 16 bytes: the overhead is right, and nothing is cut.
        assert!((1499..=1514).contains(&longest), "{longest} bytes: MTU");
        let is_fragment = |frame: &[u8]| frame[12..14] == [8, 0] && frame[20] & 0x3f != 0 || frame[21] != 0;
        assert!(!frames.iter().any(|(port, frame)| *port == Some(PORT) && is_fragment(frame)));
    }
    let seen = seen(&world.a, world.b.vtep);
    assert!(seen.handshake.is_some() && seen.sent > 300_000 && seen.received > 300_000, "{seen:?}");
    assert!(world.a.host.sh("ip link show gwvx0").contains("mtu 1390"));
    assert!(world.a.host.sh("ip link show gwwg0").contains("mtu 1440"));
}

fn without_the_right_keys_nothing_passes_and_nothing_leaves_in_the_clear(switch: Switch) {
    let (world, a, b) = world(switch);
    let to = echo_on_b(&world, 72);
    let wire = Wire::tap(&world.b.host);
    let blocked = |why: &str| {
        assert!(connect(&world.a.host, to, A_WHILE).is_err(), "{why}");
        assert!(wire.frames().iter().all(|(port, _)| *port != Some(VXLAN)), "in the clear, {why}");
    };
    blocked("without keys");
    wait(a.install(at(world.b.vtep), PublicKey::from_bytes(&[9; 32]).unwrap())).unwrap();
    wait(b.install(at(world.a.vtep), key(&a))).unwrap();
    blocked("with another key");
    // Its own takes the other one's place.
    introduce(&world, &a, &b);
    let mut connection = connect(&world.a.host, to, FIRST).unwrap();
    assert!(echoes(&mut connection, b"now", SOON));
    wait(a.keep_only(&[world.b.vtep].into())).unwrap();
    assert!(echoes(&mut connection, b"and still", SOON));

    // Somebody removes the device.
    world.b.host.sh("ip link del gwwg0");
    assert!(!echoes(&mut connection, b"lost at first", A_WHILE));
    let before = key(&b);
    let (mended, again, b) =
        world.b.with(async move |_: &Overlay| (b.mend().await.unwrap(), b.mend().await.unwrap(), b));
    assert_eq!((mended, again), (true, false));
    assert_ne!(key(&b), before);
    introduce(&world, &a, &b);
    assert!(common::comes_back(&mut connection, b"lost at first", FIRST));

    // A node that is none any more.
    wait(a.keep_only(&[].into())).unwrap();
    assert!(!echoes(&mut connection, b"not for it", A_WHILE));
    let (status, a) = world.a.with(async move |_: &Overlay| (a.status().await.unwrap(), a));
    assert!(status.nodes.is_empty() && status.stopped.unsent > 0, "{status:?}");
    blocked("without a peer");
    drop(a);
}

/// Sends one numbered packet after the other and takes the answers, until told to end; how many were sent
/// and which are missing.
fn numbered(socket: &UdpSocket, to: SocketAddr, ending: &AtomicBool) -> (u32, Vec<u32>) {
    let (mut number, mut missing, mut buffer) = (0_u32, Vec::new(), [0; 4]);
    socket.set_read_timeout(Some(SOON)).unwrap();
    while !ending.load(Ordering::Relaxed) {
        socket.send_to(&number.to_be_bytes(), to).unwrap();
        match socket.recv(&mut buffer) {
            Ok(4) if u32::from_be_bytes(buffer) == number => {}
            _ => missing.push(number),
        }
        number += 1;
    }
    (number, missing)
}

fn a_daemon_that_is_restarted_loses_no_packet_and_keeps_its_keys(switch: Switch) {
    let (world, a, b) = world(switch);
    introduce(&world, &a, &b);
    let (inside, address) = service_on_b(&world, 74);
    let server = udp_at(&inside, (address, 53));
    thread::spawn(move || {
        let mut buffer = [0; 64];
        // Ends with the test, whose service's sockets are gone then.
        while let Ok((length, from)) = server.recv_from(&mut buffer) {
            let _ = server.send_to(&buffer[..length], from);
        }
    });
    let client = udp_at(&world.a.host, (world.a.vtep, 0));
    let to = SocketAddr::new(address.into(), 53);
    client.set_read_timeout(Some(FIRST)).unwrap();
    client.send_to(&[0; 4], to).unwrap();
    client.recv(&mut [0; 4]).unwrap();

    let keys = (key(&a), key(&b));
    let before = seen(&world.a, world.b.vtep);
    let ending = AtomicBool::new(false);
    let (sent, missing) = thread::scope(|scope| {
        let packets = scope.spawn(|| numbered(&client, to, &ending));
        let (mut a, mut b) = (a, b);
        for _ in 0..5 {
            // The daemon's part is gone, the next one finds what is there, and is told what is known.
            drop(a);
            guard(&world.a, world.b.vtep);
            a = try_wireguard(&world.a).unwrap();
            drop(b);
            guard(&world.b, world.a.vtep);
            b = try_wireguard(&world.b).unwrap();
            wait(a.keep_only(&[world.b.vtep].into())).unwrap();
            assert!(!wait(a.install(at(world.b.vtep), key(&b))).unwrap(), "nothing is new");
            assert!(!wait(b.install(at(world.a.vtep), key(&a))).unwrap(), "nothing is new");
            assert_eq!((key(&a), key(&b)), keys);
        }
        ending.store(true, Ordering::Relaxed);
        packets.join().unwrap()
    });
    assert!(sent > 10, "{sent} packets");
    assert!(missing.is_empty(), "{missing:?} of {sent} packets");
    let after = seen(&world.a, world.b.vtep);
    assert_eq!(after.handshake, before.handshake, "the session went on");
    assert!(after.sent > before.sent);
}

fn what_is_not_vxlan_of_the_node_itself_does_not_come_out_of_it(switch: Switch) {
    let (world, a, b) = world(switch);
    introduce(&world, &a, &b);
    let to = echo_on_b(&world, 75);
    assert!(connect(&world.a.host, to, FIRST).is_ok());
    let server = udp_at(&world.b.host, (world.b.vtep, 9999));
    let client = udp_at(&world.a.host, (world.a.vtep, 0));
    client.send_to(b"by the uplink", (world.b.vtep, 9999)).unwrap();
    assert_eq!(server.recv(&mut [0; 64]).unwrap(), 13);
    let before = dropped(&world.b);
    // Into the device instead, as a node that was broken into could.
    world.a.host.sh("ip rule add ipproto udp dport 9999 table 4788 priority 100");
    client.send_to(b"by the tunnel", (world.b.vtep, 9999)).unwrap();
    server.set_read_timeout(Some(A_WHILE)).unwrap();
    assert_eq!(server.recv(&mut [0; 64]).unwrap_err().kind(), ErrorKind::WouldBlock);
    assert!(dropped(&world.b) > before);
}

#[test]
#[ignore = "needs a kernel with WireGuard: make test-machines"]
fn it_leaves_nothing_and_what_is_in_its_way_is_named() {
    let world = World::new(Switch::Kernel);
    let before = world.a.state();
    let wireguard = try_wireguard(&world.a).unwrap();
    let first = key(&wireguard);
    drop(wireguard);
    assert_eq!(key(&try_wireguard(&world.a).unwrap()), first, "the device stays");
    let rules = world.a.host.sh("ip rule show");
    assert_eq!(rules.lines().filter(|rule| rule.contains("dport 4789")).count(), 1, "{rules}");
    for _ in 0..2 {
        world.a.with(async |_: &Overlay| open_the_clear().await.unwrap());
        assert_eq!(world.a.state(), before);
    }

    let holder = world.a.host.run(|| UdpSocket::bind(("0.0.0.0", PORT)).unwrap());
    let message = common::describe(&try_wireguard(&world.a).unwrap_err());
    assert!(message.contains("UDP port 7119") && message.contains("in use"), "{message}");
    drop(holder);
    assert_ne!(key(&try_wireguard(&world.a).unwrap()), first, "another device, another key");

    // From one way of encrypting to the other and back.
    let config = tunnel_config(&world.a);
    let tunnel = world.a.with(async move |_: &Overlay| Tunnel::up(config).await.unwrap());
    assert!(!world.a.host.sh("ip link show").contains(DEVICE));
    drop(tunnel);
    drop(try_wireguard(&world.a).unwrap());
    assert!(!world.a.host.sh("ip link show").contains("gwtun0"));
    world.a.with(async |_: &Overlay| open_the_clear().await.unwrap());

    world.a.host.sh("ip link add gwwg0 type dummy");
    let message = common::describe(&try_wireguard(&world.a).unwrap_err());
    assert!(message.contains("gwwg0 exists and is") && message.contains("a WireGuard device"), "{message}");
    world.a.with(async |_: &Overlay| open_the_clear().await.unwrap());
    assert!(world.a.host.sh("ip link show").contains(DEVICE), "it is somebody else's");
}

#[test]
#[ignore = "needs a kernel with WireGuard: make test-machines"]
fn keys_are_fresh_before_anything_is_sent() {
    let (world, a, b) = world(Switch::Kernel);
    introduce(&world, &a, &b);
    let end = std::time::Instant::now() + FIRST;
    while seen(&world.a, world.b.vtep).handshake.is_none() {
        assert!(std::time::Instant::now() < end, "no handshake");
        thread::sleep(Duration::from_millis(200));
    }
}
