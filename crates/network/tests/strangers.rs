//! Who may send to the overlay: frames of known nodes arrive, those of anybody else do not.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};

use common::{A_WHILE, CLIENT, Host, Node, SOON, Switch, World, service, sh};
use godwit_network::{Between, Guard, Overlay, ServiceEndpoint, mac_to_string};

common::on_every_switch!(
    a_stranger_that_sends_vxlan_frames_reaches_no_service_and_a_known_node_does,
    a_strangers_packet_in_fragments_is_dropped_as_well,
    a_service_cannot_play_a_node,
    known_nodes_lose_nothing_while_the_guard_changes,
    a_guard_that_is_taken_away_is_missed_and_leaves_nothing,
);

const PORT: u16 = 5000;

fn guard(node: &Node, nodes: &[Ipv4Addr]) {
    let nodes = nodes.iter().copied().collect();
    let networks = vec![Between::of(&node.config())];
    let guard = Guard { port: 4789, networks, tunnel: None, nodes };
    node.with(async move |_: &Overlay| guard.apply().await).unwrap();
}

/// A socket of the service at [`PORT`].
fn listen(inside: &Host, service: &ServiceEndpoint) -> UdpSocket {
    inside.run(|| UdpSocket::bind((service.address, PORT)).unwrap())
}

/// Whether so many bytes that `from` sends to the service reach it.
fn reaches_whole(
    from: &UdpSocket,
    at: &UdpSocket,
    service: &ServiceEndpoint,
    size: usize,
    patience: std::time::Duration,
) -> bool {
    from.send_to(&vec![7; size], (service.address, PORT)).unwrap();
    at.set_read_timeout(Some(patience)).unwrap();
    at.recv(&mut [0; 2048]).is_ok_and(|length| length == size)
}

/// Whether what `from` sends to the service reaches it.
fn reaches(
    from: &UdpSocket,
    at: &UdpSocket,
    service: &ServiceEndpoint,
    patience: std::time::Duration,
) -> bool {
    reaches_whole(from, at, service, 8, patience)
}

/// A VXLAN device that sends to the service by the node at `to`, as a node would that nobody asked
/// in; a socket that uses it.
fn play_a_node(
    netns: &std::path::Path,
    own: Ipv4Addr,
    to: Ipv4Addr,
    as_if: Ipv4Addr,
    service: &ServiceEndpoint,
) -> UdpSocket {
    let (address, mac) = (service.address, mac_to_string(service.mac));
    let inside = format!("nsenter --net={}", netns.display());
    for command in [
        format!("ip link add rogue type vxlan id 88 dstport 4789 local {own} remote {to} nolearning"),
        format!("ip address add {as_if}/32 dev rogue"),
        "ip link set rogue up".to_owned(),
        format!("ip route add {address}/32 dev rogue src {as_if}"),
        format!("ip neigh add {address} lladdr {mac} dev rogue"),
    ] {
        sh(&format!("{inside} {command}"));
    }
    godwit_network::enter_blocking(netns, || UdpSocket::bind((as_if, 0)).unwrap()).unwrap()
}

fn a_stranger_that_sends_vxlan_frames_reaches_no_service_and_a_known_node_does(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 60);
    let inside = world.a.create(&web);
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    let at = listen(&inside, &web);
    let stranger = play_a_node(&world.client.path, CLIENT, world.a.vtep, Ipv4Addr::new(10, 88, 0, 99), &web);
    let known = world.b.host.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    assert!(reaches(&stranger, &at, &web, SOON), "without a guard it does, or this test shows nothing");

    guard(&world.a, &[world.b.vtep]);
    assert!(!reaches(&stranger, &at, &web, A_WHILE));
    assert!(reaches(&known, &at, &web, SOON));
    let found = world.a.with(async |_: &Overlay| Guard::in_force().await.unwrap().unwrap());
    assert_eq!(found.nodes, [world.b.vtep].into());
    assert!(found.dropped >= 1, "{found:?}");

    // The stranger becomes a node, and the node leaves.
    guard(&world.a, &[CLIENT]);
    assert!(reaches(&stranger, &at, &web, SOON));
    assert!(!reaches(&known, &at, &web, A_WHILE));
}

fn a_strangers_packet_in_fragments_is_dropped_as_well(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 64);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = listen(&inside, &web);
    let stranger = play_a_node(&world.client.path, CLIENT, world.a.vtep, Ipv4Addr::new(10, 88, 0, 97), &web);
    // VXLAN's own packet is cut then; the later pieces of it name no port.
    world.client.sh("ip link set uplink0 mtu 600");
    assert!(reaches_whole(&stranger, &at, &web, 1000, SOON), "without a guard, or this test shows nothing");
    guard(&world.a, &[world.b.vtep]);
    // It has learned to cut what is inside.
    world.client.sh("ip route flush cache");
    assert!(!reaches_whole(&stranger, &at, &web, 1000, A_WHILE));
}

fn a_service_cannot_play_a_node(switch: Switch) {
    let world = World::new(switch);
    let (web, bad) = (service("web", 61), service("bad", 62));
    let (inside, inside_bad) = (world.a.create(&web), world.a.create(&bad));
    world.a.open(&web);
    world.a.open(&bad);
    let at = listen(&inside, &web);
    let gateway = Ipv4Addr::new(10, 88, 0, 1);
    let as_if = Ipv4Addr::new(10, 88, 0, 98);
    let stranger = play_a_node(&inside_bad.path, bad.address, gateway, as_if, &web);
    assert!(reaches(&stranger, &at, &web, SOON), "without a guard it does, or this test shows nothing");
    // Even one that sends with an address that is a node's.
    guard(&world.a, &[world.b.vtep, bad.address]);
    assert!(!reaches(&stranger, &at, &web, A_WHILE));
}

fn known_nodes_lose_nothing_while_the_guard_changes(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 63);
    let inside = world.a.create(&web);
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    guard(&world.a, &[world.b.vtep]);
    let at = listen(&inside, &web);
    let known = world.b.host.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sender = scope.spawn(|| {
            let mut sent = 0;
            while !done.load(Ordering::Relaxed) || sent == 0 {
                assert!(reaches(&known, &at, &web, SOON), "number {sent} was lost");
                sent += 1;
            }
            sent
        });
        for last in 0..20 {
            guard(&world.a, &[world.b.vtep, Ipv4Addr::new(10, 99, 0, 200 + last)]);
        }
        done.store(true, Ordering::Relaxed);
        assert!(sender.join().unwrap() > 20, "too few for twenty changes");
    });
}

fn a_guard_that_is_taken_away_is_missed_and_leaves_nothing(switch: Switch) {
    let world = World::new(switch);
    let before = world.a.state();
    let look = || world.a.with(async |_: &Overlay| Guard::in_force().await.unwrap());
    assert_eq!(look(), None);
    guard(&world.a, &[]);
    assert_eq!(look().unwrap().nodes, [].into());
    world.a.host.sh("nft flush table inet godwit_guard");
    assert_eq!(look(), None, "its rules are gone, though the table is there");
    guard(&world.a, &[world.b.vtep]);
    assert_eq!(look().unwrap().nodes, [world.b.vtep].into());
    world.a.with(async |_: &Overlay| Guard::remove().await.unwrap());
    assert_eq!(look(), None);
    world.a.with(async |_: &Overlay| Guard::remove().await.unwrap());
    assert_eq!(world.a.state(), before);
}
