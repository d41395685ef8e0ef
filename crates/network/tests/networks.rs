//! Several networks on the same nodes: each works as one alone, a service can be on two of them, and nothing
//! gets from one to another.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr, UdpSocket};

use common::{
    A_WHILE, Host, Node, SOON, Switch, World, connect, describe, echo_server, echoes, published, service,
    udp_at,
};
use godwit_network::{Guard, Networks, Overlay, OverlayConfig, Prefix6, ServiceEndpoint, Subnet, mac_of};

common::on_every_switch!(
    services_reach_those_of_their_own_network_and_no_others,
    a_packet_that_gets_out_is_not_let_in_elsewhere,
    a_service_on_two_networks_is_reached_on_both_and_moves_with_both,
    a_network_that_is_taken_down_leaves_nothing_and_the_others_alone,
    a_network_that_cannot_be_is_refused_and_leaves_nothing,
    a_published_port_is_for_everybody,
);

const BACK: &str = "10.89.0.0/24";
const BACK6: &str = "fd67:6f65::/96";
const PORT: u16 = 80;

/// Brings the second network up on a node, and keeps the two apart.
fn add(node: &Node, prefix6: Option<&str>) {
    let beside = beside(node, BACK, prefix6, 0x9_1000);
    let nodes: BTreeSet<_> = [[10, 99, 0, 11].into(), [10, 99, 0, 12].into()].into();
    node.with_networks(async move |networks: &Networks| {
        networks.add(beside).await.unwrap();
        let guard = Guard { port: 4789, networks: networks.between(), tunnel: None, nodes };
        guard.apply().await.unwrap();
    });
}

fn beside(node: &Node, subnet: &str, prefix6: Option<&str>, vni: u32) -> OverlayConfig {
    let prefix6: Option<Prefix6> = prefix6.map(|prefix| prefix.parse().unwrap());
    node.config().beside(subnet.parse().unwrap(), prefix6, vni)
}

fn world(switch: Switch) -> World {
    let world = World::new(switch);
    add(&world.a, None);
    add(&world.b, None);
    world.client.sh(&format!("ip route add {BACK} dev {}", common::UPLINK));
    world
}

/// A service on the second network.
fn back(name: &str, last: u8) -> ServiceEndpoint {
    let address = [10, 89, 0, last].into();
    ServiceEndpoint { address, mac: mac_of(address), ..service(name, last) }
}

/// A service that runs at one node and answers.
fn serve(world: &World, at: &Node, service: &ServiceEndpoint) -> (Host, SocketAddr) {
    let inside = at.create(service);
    at.open(service);
    for node in [&world.a, &world.b] {
        if node.vtep != at.vtep {
            node.set_remote(service, at.vtep);
        }
    }
    let address = echo_server(&inside, service.address, PORT);
    (inside, address)
}

fn reaches(from: &Host, to: SocketAddr) {
    let mut connection = connect(from, to, SOON).unwrap_or_else(|e| panic!("{} to {to}: {e}", from.name));
    assert!(echoes(&mut connection, &[7; 100_000], SOON), "{} to {to}", from.name);
}

fn does_not_reach(from: &Host, to: SocketAddr) {
    let error = connect(from, to, A_WHILE).expect_err(&format!("{} reaches {to}", from.name));
    assert_eq!(error.kind(), std::io::ErrorKind::TimedOut, "{} to {to}: nothing answers: {error}", from.name);
}

fn crossing(node: &Node) -> u64 {
    node.with(async |_: &Overlay| Guard::in_force().await.unwrap().unwrap().crossing)
}

fn services_reach_those_of_their_own_network_and_no_others(switch: Switch) {
    let world = World::with_ipv6(switch);
    for node in [&world.a, &world.b] {
        add(node, Some(BACK6));
    }
    world.client.sh(&format!("ip route add {BACK} dev {}", common::UPLINK));
    world.client.sh(&format!("ip -6 route add {BACK6} dev {}", common::UPLINK));
    let (front_a, to_front_a) = serve(&world, &world.a, &service("front-a", 10));
    let (front_b, to_front_b) = serve(&world, &world.b, &service("front-b", 11));
    let (back_a, to_back_a) = serve(&world, &world.a, &back("back-a", 10));
    let (back_b, to_back_b) = serve(&world, &world.b, &back("back-b", 11));
    let six = |prefix: &str, inside: &Host, at: SocketAddr| {
        let (prefix, IpAddr::V4(address)) = (prefix.parse::<Prefix6>().unwrap(), at.ip()) else { panic!() };
        echo_server(inside, prefix.of(address), PORT)
    };
    let front6_b = six("fd67:6f64::/96", &front_b, to_front_b);
    let back6_a = six(BACK6, &back_a, to_back_a);
    for (from, to) in [
        (&front_a, to_front_b),
        (&front_b, to_front_a),
        (&back_a, to_back_b),
        (&back_b, to_back_a),
        (&front_a, front6_b),
        (&back_b, back6_a),
        (&world.client, to_front_a),
        (&world.client, to_back_a),
        (&world.client, to_back_b),
        (&world.client, back6_a),
        (&world.a.host, to_back_b),
    ] {
        reaches(from, to);
    }
    assert_eq!((crossing(&world.a), crossing(&world.b)), (0, 0));
    for (from, to) in [
        (&front_a, to_back_a),
        (&front_a, to_back_b),
        (&front_b, to_back_a),
        (&back_a, to_front_a),
        (&back_b, to_front_a),
        (&front_b, back6_a),
        (&back_a, front6_b),
    ] {
        does_not_reach(from, to);
    }
    assert!(crossing(&world.a) > 0 && crossing(&world.b) > 0);
}

fn a_packet_that_gets_out_is_not_let_in_elsewhere(switch: Switch) {
    // Node b does not have the second network yet, so it sends packets to it out on its uplink, where node
    // a answers for its service.
    let world = World::new(switch);
    add(&world.a, None);
    let back = back("back", 20);
    let inside_back = world.a.create(&back);
    world.a.open(&back);
    world.b.host.sh(&format!("ip route add {BACK} dev {}", common::UPLINK));
    let (front, _) = serve(&world, &world.b, &service("front", 20));
    let listening = udp_at(&inside_back, (back.address, PORT));
    listening.set_read_timeout(Some(A_WHILE)).unwrap();
    let client = udp_at(&world.client, (common::CLIENT, 9));
    let own = udp_at(&front, ([10, 88, 0, 20], 9));
    let arrives = |from: &UdpSocket| {
        from.send_to(b"let me in", (back.address, PORT)).unwrap();
        listening.recv(&mut [0; 16]).is_ok()
    };
    assert!(!arrives(&own));
    assert!(crossing(&world.a) > 0);

    // Nor does one from an address that is of no network, where both networks are up.
    world.b.host.sh(&format!("ip route del {BACK} dev {}", common::UPLINK));
    add(&world.b, None);
    world.b.set_remote(&back, world.a.vtep);
    front.sh_inside("ip address add 192.0.2.1/32 dev lo");
    assert!(!arrives(&udp_at(&front, ([192, 0, 2, 1], 9))));
    assert!(crossing(&world.b) > 0);
    world.client.sh(&format!("ip route add {BACK} dev {}", common::UPLINK));
    assert!(arrives(&client));
}

fn a_service_on_two_networks_is_reached_on_both_and_moves_with_both(switch: Switch) {
    let world = world(switch);
    let (front, back_side) = (service("both", 30), ServiceEndpoint { nth: 1, ..back("both", 30) });
    let (front_peer, _) = serve(&world, &world.b, &service("front", 31));
    let (back_peer, to_back_peer) = serve(&world, &world.b, &back("back", 31));
    let (mut from, mut to) = (&world.a, &world.b);
    for endpoint in [&front, &back_side] {
        world.b.set_remote(endpoint, world.a.vtep);
        from.create(endpoint);
        from.open(endpoint);
    }
    for round in 0..3 {
        let inside = from.inside("both");
        assert_eq!(inside.sh_inside("ip -4 -o addr show dev eth1").matches("10.89.0.30/24").count(), 1);
        for at in [front.address, back_side.address] {
            let at = echo_server(&inside, at, PORT);
            reaches(&world.client, at);
            let peer = if at.ip() == IpAddr::from(front.address) { &front_peer } else { &back_peer };
            reaches(peer, at);
        }
        does_not_reach(&front_peer, (back_side.address, PORT).into());
        reaches(&inside, to_back_peer);

        // What is sent meanwhile is held on both.
        let clients = [udp_at(&front_peer, ([10, 88, 0, 31], 99)), udp_at(&back_peer, ([10, 89, 0, 31], 99))];
        for endpoint in [&front, &back_side] {
            to.create(endpoint);
            to.hold(endpoint);
            from.steer(endpoint, to.vtep);
        }
        let inside = to.inside("both");
        let sockets = [front.address, back_side.address].map(|address| udp_at(&inside, (address, 53)));
        for (client, at) in clients.iter().zip([front.address, back_side.address]) {
            client.send_to(format!("held {round}").as_bytes(), (at, 53)).unwrap();
        }
        let mut held = 0;
        for endpoint in [&front, &back_side] {
            from.close(endpoint);
            held += to.open(endpoint).frames;
            from.set_remote(endpoint, to.vtep);
        }
        for socket in &sockets {
            let mut buffer = [0; 16];
            let length = socket.recv(&mut buffer).unwrap();
            assert_eq!(&buffer[..length], format!("held {round}").as_bytes());
        }
        assert!(held >= 2, "{held}");
        // The namespace goes with the last of its endpoints.
        from.remove(&back_side);
        assert!(from.netns_dir.join("both").exists());
        from.remove(&front);
        assert!(!from.netns_dir.join("both").exists());
        (from, to) = (to, from);
    }
}

fn a_network_that_is_taken_down_leaves_nothing_and_the_others_alone(switch: Switch) {
    let world = World::new(switch);
    let (inside, at) = serve(&world, &world.a, &service("stays", 40));
    // The settings of the kernel stay, so the state before the first time is not the measure.
    add(&world.a, None);
    let subnet: Subnet = BACK.parse().unwrap();
    let remove = || {
        world.a.with_networks(async move |networks: &Networks| {
            networks.remove(subnet).await.unwrap();
            // Once more, though all is gone.
            networks.remove(subnet).await.unwrap();
            assert_eq!(networks.all().len(), 1);
        });
    };
    remove();
    let before = world.a.state();
    add(&world.a, None);
    let gone = ServiceEndpoint { published: published("gone", 41, 8081, PORT).published, ..back("gone", 41) };
    world.a.create(&gone);
    world.a.open(&gone);
    world.a.set_remote(&back("far", 42), world.b.vtep);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"before", SOON));
    remove();
    // The guard is the daemon's to change.
    assert_eq!(without_guard(&world.a.state()), without_guard(&before));
    assert!(echoes(&mut connection, b"after", SOON));
    drop(inside);
}

/// The state but for the table of the guard.
fn without_guard(state: &str) -> String {
    let Some(start) = state.find("table inet godwit_guard") else { return state.to_owned() };
    let end = state[start..].find("\n}\n").unwrap() + start + 3;
    [&state[..start], &state[end..]].concat()
}

fn a_network_that_cannot_be_is_refused_and_leaves_nothing(switch: Switch) {
    let world = World::new(switch);
    let before = world.a.state();
    let refused = |config: OverlayConfig| {
        world.a.with_networks(async move |networks: &Networks| {
            describe(&networks.add(config).await.expect_err("it cannot be"))
        })
    };
    let message = refused(beside(&world.a, "10.88.4.0/24", None, 0x9_1001));
    assert!(message.contains("10.88.4.0/24 overlaps the route to 10.88.0.0/16 on gw0"), "{message}");
    // Another VXLAN device has the number.
    world.a.host.sh("ip link add taken type vxlan id 7 dstport 4789 local 10.99.0.11 nolearning");
    let message = refused(beside(&world.a, BACK, None, 7));
    assert!(message.contains("device taken, with the same network number 7"), "{message}");
    world.a.host.sh("ip link del taken");
    assert_eq!(world.a.state(), before);
    let message = world.a.try_create(&back("nowhere", 50)).unwrap_err();
    assert!(message.contains("outside the services' subnet"), "{message}");
}

fn a_published_port_is_for_everybody(switch: Switch) {
    let world = world(switch);
    let (front, _) = serve(&world, &world.a, &service("front", 60));
    let web = ServiceEndpoint { published: published("web", 61, 8080, PORT).published, ..back("web", 61) };
    let (_inside, to_web) = serve(&world, &world.a, &web);
    does_not_reach(&front, to_web);
    reaches(&world.client, (world.a.vtep, 8080).into());
    reaches(&front, (world.a.vtep, 8080).into());
}
