//! What nodes send each other, encrypted by WireGuard in user space: nothing of it can be read on the wire, nothing
//! goes there that could, and nobody else can put anything in.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};

use common::wire::{Wire, contains};
use common::{A_WHILE, Node, SOON, Switch, UPLINK, World, connect, echo_server, echoes, service};
use godwit_network::{
    Between, Encryption, Guard, NetworkError, Overlay, OverlayConfig, PeerStatus, PublicKey, Tunnel,
    TunnelConfig, open_the_clear,
};

common::on_every_switch!(
    what_nodes_send_each_other_passes_and_cannot_be_read,
    the_same_without_a_tunnel_can_be_read,
    without_the_right_keys_nothing_passes_and_nothing_leaves_in_the_clear,
    what_is_sent_once_more_or_forged_or_by_a_stranger_is_refused,
    where_there_is_a_tunnel_a_frame_in_the_clear_is_dropped_also_from_a_nodes_address,
);

const TUNNEL: u16 = 7119;
const VXLAN: u16 = 4789;

fn config(node: &Node) -> OverlayConfig {
    OverlayConfig { encryption: Encryption::Tunnel, ..node.config() }
}

fn try_tunnel(node: &Node) -> Result<Tunnel, NetworkError> {
    let config = TunnelConfig::new(UPLINK, node.vtep, TUNNEL, VXLAN);
    node.with(async move |_: &Overlay| Tunnel::up(config).await)
}

fn sooner_or_later<T, E: std::fmt::Debug>(mut attempt: impl FnMut() -> Result<T, E>) -> T {
    let begun = std::time::Instant::now();
    loop {
        match attempt() {
            Ok(right) => return right,
            Err(error) => assert!(begun.elapsed() < SOON, "{error:?}"),
        }
    }
}

fn at(address: Ipv4Addr) -> SocketAddrV4 {
    SocketAddrV4::new(address, TUNNEL)
}

/// Two nodes with a tunnel each, which have no keys yet.
fn world(switch: Switch) -> (World, Tunnel, Tunnel) {
    let world = World::bare(switch);
    for node in [&world.a, &world.b] {
        node.up_with(config(node)).unwrap();
    }
    let (a, b) = (try_tunnel(&world.a).unwrap(), try_tunnel(&world.b).unwrap());
    (world, a, b)
}

/// Tells each of the other, and waits until there are keys for packets.
fn introduce(world: &World, a: &Tunnel, b: &Tunnel) {
    a.install(at(world.b.vtep), b.public_key()).unwrap();
    b.install(at(world.a.vtep), a.public_key()).unwrap();
    for (tunnel, other) in [(a, &world.b), (b, &world.a)] {
        sooner_or_later(|| seen(tunnel, other).and_then(|seen| seen.handshake).ok_or("no handshake"));
    }
}

fn seen(tunnel: &Tunnel, node: &Node) -> Option<PeerStatus> {
    tunnel.status().nodes.get(&node.vtep).copied()
}

/// An echo server in a service on `b`, which `a` knows; where it listens.
fn service_on_b(world: &World, last: u8) -> SocketAddr {
    let web = service("web", last);
    let inside = world.b.create(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    echo_server(&inside, web.address, 80)
}

fn what_nodes_send_each_other_passes_and_cannot_be_read(switch: Switch) {
    let (world, a, b) = world(switch);
    introduce(&world, &a, &b);
    let to = service_on_b(&world, 70);
    let client = service("client", 90);
    let from = world.a.create(&client);
    world.a.open(&client);
    world.b.set_remote(&client, world.a.vtep);
    let wires = [Wire::tap(&world.a.host), Wire::tap(&world.b.host)];
    let mut connection = connect(&from, to, SOON).unwrap();
    let secret = b"nobody but the two may read this";
    assert!(echoes(&mut connection, secret, SOON));
    // Also what fills frames, to and fro.
    assert!(echoes(&mut connection, &secret.repeat(10_000), SOON));
    for wire in wires {
        let frames = wire.frames();
        assert!(frames.iter().filter(|(port, _)| *port == Some(TUNNEL)).count() > 4);
        assert!(frames.iter().all(|(port, _)| *port != Some(VXLAN)), "a frame in the clear");
        assert!(!frames.iter().any(|(_, frame)| contains(frame, &secret[..16])), "the secret in the clear");
        let longest = frames.iter().map(|(_, frame)| frame.len()).max().unwrap();
        // The MTU is used up: the overhead is right, and nothing is cut.
        assert_eq!(longest, 1514, "MTU");
    }
    let packets = seen(&a, &world.b).unwrap().packets;
    assert!(packets > 100, "{packets}");
    assert!(world.a.host.sh("ip link show gwvx0").contains("mtu 1390"));
    assert!(world.a.host.sh("ip link show gwtun0").contains("mtu 1440"));
}

fn the_same_without_a_tunnel_can_be_read(switch: Switch) {
    let world = World::new(switch);
    let to = service_on_b(&world, 71);
    let wire = Wire::tap(&world.b.host);
    let mut connection = connect(&world.a.host, to, SOON).unwrap();
    assert!(echoes(&mut connection, b"everybody can read this", SOON));
    let frames = wire.frames();
    assert!(
        frames.iter().any(|(port, frame)| *port == Some(VXLAN) && contains(frame, b"everybody can read"))
    );
}

fn without_the_right_keys_nothing_passes_and_nothing_leaves_in_the_clear(switch: Switch) {
    let (world, a, b) = world(switch);
    let to = service_on_b(&world, 72);
    let wire = Wire::tap(&world.b.host);
    let blocked = |why: &str| {
        assert!(connect(&world.a.host, to, A_WHILE).is_err(), "{why}");
        assert!(wire.frames().iter().all(|(port, _)| *port != Some(VXLAN)), "in the clear, {why}");
    };
    blocked("without keys");
    assert!(a.status().stopped.unsent > 0 && seen(&a, &world.b).is_none());

    a.install(at(world.b.vtep), PublicKey::from_bytes(&[9; 32]).unwrap()).unwrap();
    b.install(at(world.a.vtep), a.public_key()).unwrap();
    blocked("with another key");
    assert!(b.status().stopped.refused > 0);
    assert_eq!(seen(&a, &world.b).unwrap().handshake, None);

    // Its own takes the other one's place.
    introduce(&world, &a, &b);
    let mut connection = connect(&world.a.host, to, SOON).unwrap();
    assert!(echoes(&mut connection, b"now", SOON));
    assert!(!a.install(at(world.b.vtep), b.public_key()).unwrap(), "nothing is new");
    a.keep_only(&[world.b.vtep].into());
    assert!(echoes(&mut connection, b"and still", SOON));

    // The daemon is gone, and with it device and keys.
    drop(a);
    blocked("without a daemon");
    assert!(!world.a.host.sh("ip link show").contains("gwtun0"));
    let a = sooner_or_later(|| try_tunnel(&world.a));
    assert!(a.is_running());
    introduce(&world, &a, &b);
    assert!(echoes(&mut connection, b"after a restart", SOON));

    // A node that is none any more.
    a.keep_only(&[].into());
    blocked("without a peer");
}

fn what_is_sent_once_more_or_forged_or_by_a_stranger_is_refused(switch: Switch) {
    let (world, a, b) = world(switch);
    introduce(&world, &a, &b);
    let to = service_on_b(&world, 74);
    let wire = Wire::tap(&world.b.host);
    let mut connection = connect(&world.a.host, to, SOON).unwrap();
    assert!(echoes(&mut connection, b"once", SOON));
    // Behind the headers of Ethernet, IPv4 and UDP; from a, with a packet in it.
    let of_a = |frame: &[u8]| frame[26..30] == world.a.vtep.octets() && frame[42] == 4;
    let frames = wire.frames().into_iter().filter(|(port, frame)| *port == Some(TUNNEL) && of_a(frame));
    let messages: Vec<_> = frames.map(|(_, frame)| frame[42..].to_vec()).collect();
    assert!(messages.len() > 2, "{}", messages.len());
    // Each once more, each with another last byte, cut ones, and what is nothing at all.
    let forged = messages.iter().map(|message| [&message[..message.len() - 1], b"!"].concat());
    let cut = messages.iter().map(|message| message[..20].to_vec());
    let wrong: Vec<_> =
        messages.iter().cloned().chain(forged).chain(cut).chain([vec![], vec![1; 148]]).collect();
    for host in [&world.a.host, &world.client] {
        let before = b.status().stopped.refused;
        let socket = host.run(|| UdpSocket::bind(("0.0.0.0", 0)).unwrap());
        for message in &wrong {
            socket.send_to(message, at(world.b.vtep)).unwrap();
        }
        let all = u64::try_from(wrong.len()).unwrap();
        sooner_or_later(|| match b.status().stopped.refused - before {
            refused if refused >= all => Ok(()),
            refused => Err(format!("{refused} of {all} refused")),
        });
    }
    assert!(echoes(&mut connection, b"and none of it did harm", SOON));
}

fn where_there_is_a_tunnel_a_frame_in_the_clear_is_dropped_also_from_a_nodes_address(switch: Switch) {
    let (world, a, b) = world(switch);
    let to = service_on_b(&world, 73);
    let guard = |node: &Node, other: Ipv4Addr, tunnel: Option<&str>| {
        let (networks, tunnel) = (vec![Between::of(&node.config())], tunnel.map(str::to_owned));
        let guard = Guard { port: VXLAN, networks, tunnel, nodes: [other].into() };
        node.with(async move |_: &Overlay| guard.apply().await).unwrap();
    };
    guard(&world.b, world.a.vtep, Some("gwtun0"));
    // Node a does not encrypt any more.
    drop(a);
    world.a.with(async |_: &Overlay| open_the_clear().await.unwrap());
    let wire = Wire::tap(&world.b.host);
    assert!(connect(&world.a.host, to, A_WHILE).is_err());
    assert!(wire.frames().iter().any(|(port, _)| *port == Some(VXLAN)), "it has arrived in the clear");
    let found = world.b.with(async |_: &Overlay| Guard::in_force().await.unwrap().unwrap());
    assert!(found.dropped > 0, "{found:?}");
    // As soon as neither encrypts, they speak again.
    drop(b);
    world.b.with(async |_: &Overlay| open_the_clear().await.unwrap());
    guard(&world.b, world.a.vtep, None);
    assert!(connect(&world.a.host, to, SOON).is_ok());
}

#[test]
fn a_tunnel_leaves_nothing_and_its_port_is_named_when_it_is_taken() {
    let world = World::new(Switch::Kernel);
    let before = world.a.state();
    let rules = || world.a.host.sh("ip rule show");
    let no_rules = rules();
    let tunnel = try_tunnel(&world.a).unwrap();
    assert_ne!(rules(), no_rules);
    drop(tunnel);
    // A process that another test starts has all descriptors of this one, until it is another program.
    let again = sooner_or_later(|| try_tunnel(&world.a));
    assert_eq!(rules().lines().count(), no_rules.lines().count() + 1, "{}", rules());
    drop(again);
    let holder = sooner_or_later(|| world.a.host.run(|| UdpSocket::bind(("0.0.0.0", TUNNEL))));
    let message = common::describe(&try_tunnel(&world.a).unwrap_err());
    assert!(message.contains("10.99.0.11:7119") && message.contains("in use"), "{message}");
    drop(holder);
    for _ in 0..2 {
        world.a.with(async |_: &Overlay| open_the_clear().await.unwrap());
        assert_eq!(rules(), no_rules);
    }
    assert_eq!(world.a.state(), before);
}

#[test]
fn an_overlay_that_encrypts_needs_more_of_the_uplink() {
    let world = World::bare(Switch::Kernel);
    world.a.host.sh(&format!("ip link set dev {UPLINK} mtu 640"));
    let refused = world.a.up_with(config(&world.a)).unwrap_err();
    assert!(refused.contains("640") && refused.contains("686"), "{refused}");
    world.a.up();
}
