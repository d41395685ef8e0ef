//! A service's IPv6 address: it is reached there from everywhere, reaches everything, and it moves along.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::{IpAddr, UdpSocket};

use common::{A_WHILE, Host, SOON, Switch, World, connect, echo_server, echoes, published, service, udp_at};
use godwit_network::{Overlay, ServiceEndpoint};

common::on_every_switch!(
    a_service_is_reached_by_ipv6_from_clients_nodes_and_services_and_reaches_them,
    what_is_sent_by_ipv6_during_a_move_is_held_and_arrives_once_and_in_order,
    nothing_of_ipv6_is_left_of_a_service_that_has_gone,
    a_published_port_leads_to_the_service_by_ipv6_from_both_nodes,
);

fn address6(world: &World, service: &ServiceEndpoint) -> IpAddr {
    let address = service.address;
    let address = world.a.with(async move |overlay: &Overlay| overlay.address6(address));
    address.unwrap().into()
}

fn a_service_is_reached_by_ipv6_from_clients_nodes_and_services_and_reaches_them(switch: Switch) {
    let world = World::with_ipv6(switch);
    let (web, near, far) = (service("web", 50), service("near", 51), service("far", 52));
    let inside_web = world.a.create(&web);
    world.a.open(&web);
    let inside_near = world.a.create(&near);
    world.a.open(&near);
    let inside_far = world.b.create(&far);
    world.b.open(&far);
    world.a.set_remote(&far, world.b.vtep);
    for service in [&web, &near] {
        world.b.set_remote(service, world.a.vtep);
    }
    let at = |inside: &Host, service| echo_server(inside, address6(&world, service), 80);
    let (at_web, at_far) = (at(&inside_web, &web), at(&inside_far, &far));
    let at_client = echo_server(&world.client, "fd99::64".parse::<IpAddr>().unwrap(), 80);
    assert_eq!(at_web.to_string(), "[fd67:6f64::a58:32]:80");
    for (from, to) in [
        (&world.client, at_web),
        (&world.client, at_far),
        (&world.a.host, at_web),
        (&inside_near, at_web),
        (&inside_far, at_web),
        (&inside_web, at_far),
        (&inside_web, at_client),
        (&inside_far, at_client),
    ] {
        let mut connection = connect(from, to, SOON).unwrap_or_else(|e| panic!("{} to {to}: {e}", from.name));
        assert!(echoes(&mut connection, &[7; 100_000], SOON), "{} to {to}", from.name);
    }
}

fn what_is_sent_by_ipv6_during_a_move_is_held_and_arrives_once_and_in_order(switch: Switch) {
    let world = World::with_ipv6(switch);
    let web = service("web", 53);
    let inside_a = world.a.create(&web);
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    let at = (address6(&world, &web), 53);
    let before = udp_at(&inside_a, at);
    let sender = world.client.run(|| UdpSocket::bind("[::]:0").unwrap());
    let mut number = 0_u32;
    let mut send = |count: u32| {
        for _ in 0..count {
            sender.send_to(&number.to_be_bytes(), at).unwrap();
            number += 1;
        }
    };
    send(1);
    before.recv(&mut [0; 64]).unwrap();
    let inside_b = world.b.create(&web);
    world.b.hold(&web);
    world.a.steer(&web, world.b.vtep);
    send(20);
    world.a.close(&web);
    let after = udp_at(&inside_b, at);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    world.a.remove(&web);
    send(20);
    for expected in 1..41_u32 {
        let mut heard = [0; 64];
        assert_eq!(after.recv(&mut heard).unwrap(), 4);
        assert_eq!(heard[..4], expected.to_be_bytes());
    }
    after.set_read_timeout(Some(A_WHILE)).unwrap();
    assert!(after.recv(&mut [0; 64]).is_err(), "something arrived twice");
    // The client has learned the new place from the advertisement.
    let neighbour = world.client.sh("ip -6 neigh show fd67:6f64::a58:35");
    let there = world.b.host.sh("cat /sys/class/net/uplink0/address");
    assert!(neighbour.contains(there.trim()), "{neighbour}");
}

fn nothing_of_ipv6_is_left_of_a_service_that_has_gone(switch: Switch) {
    let world = World::with_ipv6(switch);
    let empty = [world.a.state(), world.b.state()];
    let web = service("web", 54);
    world.a.create(&web);
    world.a.open(&web);
    assert!(world.a.host.sh("ip -6 neigh show proxy").contains("fd67:6f64::a58:36"));
    world.b.set_remote(&web, world.a.vtep);
    world.a.remove(&web);
    world.b.with(async move |overlay: &Overlay| overlay.set_absent(web.address, web.mac).await.unwrap());
    assert_eq!([world.a.state(), world.b.state()], empty);
}

fn a_published_port_leads_to_the_service_by_ipv6_from_both_nodes(switch: Switch) {
    let world = World::with_ipv6(switch);
    let web = published("web", 55, 8080, 80);
    let inside = world.a.create(&web);
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    let (name, address, ports) = (web.name.clone(), web.address, web.published.clone());
    world.b.with(async move |overlay: &Overlay| overlay.publish(&name, address, &ports).await).unwrap();
    echo_server(&inside, address6(&world, &web), 80);
    let at = |node: &str| format!("[fd99::{node}]:8080").parse().unwrap();
    for node in ["b", "c"] {
        let mut connection = connect(&world.client, at(node), SOON).unwrap_or_else(|e| panic!("{node}: {e}"));
        assert!(echoes(&mut connection, &[7; 100_000], SOON), "{node}");
    }
    // Somebody takes them away, and it is found.
    let lost = |node: &common::Node| node.with(async |overlay: &Overlay| overlay.lost_ports().await).unwrap();
    assert!(!lost(&world.a) && !lost(&world.b));
    world.a.host.sh("nft delete table ip6 godwit");
    assert!(lost(&world.a));
    world.a.create(&web);
    assert!(!lost(&world.a));
    assert!(connect(&world.client, at("b"), SOON).is_ok());
    world.a.host.sh("nft flush chain ip6 godwit prerouting");
    assert!(lost(&world.a), "a map without rules leads nowhere");
    world.a.create(&web);
    assert!(connect(&world.client, at("b"), SOON).is_ok());
    let mac = web.mac;
    world.a.remove(&web);
    world.a.with(async move |overlay: &Overlay| overlay.set_absent(address, mac).await).unwrap();
    assert!(!world.a.host.sh("nft list ruleset").contains("published"));
}
