//! What nodes send each other, encrypted: nothing of it can be read on the wire, and nothing goes
//! there that could.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4, UdpSocket};

use common::wire::{Wire, contains};
use common::{A_WHILE, Node, SOON, Switch, UPLINK, World, connect, echo_server, echoes, service};
use godwit_network::{
    Between, Encryption, Guard, NetworkError, Overlay, OverlayConfig, Secret, Session, Tunnel, TunnelConfig,
    open_the_clear,
};

common::on_every_switch!(
    what_nodes_send_each_other_passes_and_cannot_be_read,
    the_same_without_a_tunnel_can_be_read,
    without_the_right_keys_nothing_passes_and_nothing_leaves_in_the_clear,
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

/// Gives both the session of two secrets.
fn agree(world: &World, (a, secret_a): (&Tunnel, &Secret), (b, secret_b): (&Tunnel, &Secret)) {
    let (at_a, at_b) =
        (Session::agree(("a", secret_a), ("b", secret_b)), Session::agree(("b", secret_b), ("a", secret_a)));
    let ids = (at_a.id(), at_b.id());
    a.install(at(world.b.vtep), at_a);
    a.send_with(ids.0);
    b.install(at(world.a.vtep), at_b);
    b.send_with(ids.1);
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
    agree(&world, (&a, &Secret::new().unwrap()), (&b, &Secret::new().unwrap()));
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
        assert!(longest <= 1514, "{longest} bytes: MTU");
    }
    let sent = a.keyed(world.b.vtep).unwrap().sent;
    assert!(sent > 100, "{sent}");
    assert!(world.a.host.sh("ip link show gwvx0").contains("mtu 1390"));
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
    assert!(a.stopped().unsent > 0 && a.keyed(world.b.vtep).is_none());

    let (secret_a, secret_b, other) =
        (Secret::new().unwrap(), Secret::new().unwrap(), Secret::new().unwrap());
    let session = Session::agree(("a", &secret_a), ("b", &other));
    let id = session.id();
    a.install(at(world.b.vtep), session);
    a.send_with(id);
    b.install(at(world.a.vtep), Session::agree(("b", &secret_b), ("a", &secret_a)));
    blocked("with another key");
    assert!(b.stopped().refused > 0);

    agree(&world, (&a, &secret_a), (&b, &secret_b));
    let mut connection = connect(&world.a.host, to, SOON).unwrap();
    assert!(echoes(&mut connection, b"now", SOON));

    // New keys while it goes on.
    agree(&world, (&a, &Secret::new().unwrap()), (&b, &Secret::new().unwrap()));
    assert!(echoes(&mut connection, b"and with new keys", SOON));

    // The daemon is gone, and with it device and keys.
    drop(a);
    blocked("without a daemon");
    assert!(!world.a.host.sh("ip link show").contains("gwtun0"));
    let a = try_tunnel(&world.a).unwrap();
    assert!(a.is_running());
    agree(&world, (&a, &Secret::new().unwrap()), (&b, &Secret::new().unwrap()));
    assert!(echoes(&mut connection, b"after a restart", SOON));
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
