//! What is in the overlay's way: found, named, and mended where that can be done.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::UdpSocket;

use common::{SOON, Switch, World, connect, echo_server, echoes, service};
use godwit_network::{Mac, Overlay};

common::on_every_switch!(
    a_service_that_exists_gets_the_overlays_mtu_of_now,
    a_host_that_has_a_services_address_is_found_and_a_node_that_answers_for_it_is_not,
);

#[test]
fn a_vxlan_port_that_is_taken_is_named_with_who_has_it() {
    let world = World::bare(Switch::Kernel);
    let node = &world.a;
    let holder = node.host.run(|| UdpSocket::bind("0.0.0.0:4789").unwrap());
    let message = node.up_with(node.config()).unwrap_err();
    let process = format!("the process {} (", std::process::id());
    for words in ["UDP port 4789", "gwvx0", &process, "--vxlan-port"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    drop(holder);
    // A process that another test starts has all descriptors of this one, until it is another program.
    let begun = std::time::Instant::now();
    while let Err(message) = node.up_with(node.config()) {
        assert!(begun.elapsed() < SOON, "{message}");
    }
    node.down();

    // The same network: the kernel has one device for each.
    node.host.sh("ip link add other0 type vxlan id 88 dstport 4789 local 10.99.0.11");
    let message = node.up_with(node.config()).unwrap_err();
    assert!(message.contains("UDP port 4789") && message.contains("the VXLAN device other0"), "{message}");
    // Another network, but other settings of the shared socket.
    node.host.sh("ip link del other0");
    node.host.sh("ip link add other0 type vxlan id 7 dstport 4789 local 10.99.0.11 gbp");
    node.host.sh("ip link set other0 up");
    let message = node.up_with(node.config()).unwrap_err();
    assert!(message.contains("UDP port 4789") && message.contains("the VXLAN device other0"), "{message}");
    node.host.sh("ip link del other0");
    node.up();
}

#[test]
fn a_bridge_and_a_vxlan_device_that_were_removed_are_made_again() {
    let world = World::new(Switch::Kernel);
    let (web, db) = (service("web", 80), service("db", 81));
    let inside = world.a.create(&web);
    world.a.open(&web);
    let inside_db = world.b.create(&db);
    world.b.open(&db);
    let (at_web, at_db) = (echo_server(&inside, web.address, 80), echo_server(&inside_db, db.address, 5432));
    let mend = || {
        world.a.with(async |overlay: &Overlay| {
            let damage = overlay.damage().await.unwrap();
            assert_eq!(overlay.mend().await.unwrap(), damage);
            assert_eq!(overlay.mend().await.unwrap(), None, "there is nothing left to mend");
            damage
        })
    };
    // What the daemon does when something was mended.
    let plug_in = || {
        world.a.create(&web);
        world.a.open(&web);
        world.a.set_remote(&db, world.b.vtep);
        world.b.set_remote(&web, world.a.vtep);
    };
    plug_in();
    assert_eq!(mend(), None);
    // Without the link-layer address that the kernel gives to ports, and in any order.
    let state = || {
        let state = world.a.state();
        let own = |line: &&str| line.contains("master gw0 permanent") && !line.contains("dev gw0");
        let mut lines: Vec<_> = state.lines().filter(|line| !own(line)).map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let before = state();
    for (damage, words) in [
        ("ip link del gw0", "the bridge gw0 is missing, the VXLAN device gwvx0 is not plugged into gw0"),
        ("ip link del gwvx0", "the VXLAN device gwvx0 is missing"),
        ("ip link set gwvx0 nomaster", "the VXLAN device gwvx0 is not plugged into gw0"),
        ("ip link set gw0 down", "the bridge gw0 is down"),
        ("ip link set gwvx0 down", "the VXLAN device gwvx0 is down"),
    ] {
        world.a.host.sh(damage);
        assert_eq!(mend().as_deref(), Some(words), "{damage}");
        plug_in();
        assert_eq!(state(), before, "{damage}");
        for (from, to) in [(&world.client, at_web), (&inside, at_db), (&inside_db, at_web)] {
            let mut connection = connect(from, to, SOON).unwrap_or_else(|e| panic!("{damage}: {to}: {e}"));
            assert!(echoes(&mut connection, b"whole", SOON), "{damage}");
        }
    }
}

#[test]
fn what_somebody_else_put_in_its_place_is_not_taken_for_the_bridge() {
    let world = World::new(Switch::Kernel);
    let mend =
        || world.a.with(async |overlay: &Overlay| overlay.mend().await.map_err(|e| common::describe(&e)));
    for other in ["type bridge", "type veth peer name other"] {
        world.a.host.sh("ip link del gw0");
        world.a.host.sh(&format!("ip link add name gw0 {other}"));
        let message = mend().unwrap_err();
        assert!(message.contains("gw0") && message.contains("restart godwitd"), "{message}");
        world.a.host.sh("ip link del gw0");
        assert!(mend().unwrap().unwrap().contains("the bridge gw0 is missing"));
    }
}

fn a_service_that_exists_gets_the_overlays_mtu_of_now(switch: Switch) {
    let world = World::new(switch);
    let (web, closed) = (service("web", 84), service("closed", 85));
    let insides = [world.a.create(&web), world.a.create(&closed)];
    world.a.open(&web);
    let at = echo_server(&insides[0], web.address, 80);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    let mtus = |wanted: &str| {
        for (service, inside) in [&web, &closed].into_iter().zip(&insides) {
            let port = world.a.port(service);
            let outside = world.a.host.sh(&format!("ip link show {port}"));
            let inside = common::sh(&format!("nsenter --net={} ip link show eth0", inside.path.display()));
            assert!(outside.contains(wanted) && inside.contains(wanted), "{outside}{inside}");
        }
    };
    mtus("mtu 1450");
    for (uplink, overlay) in [("1400", "mtu 1350"), ("1500", "mtu 1450")] {
        world.a.host.sh(&format!("ip link set dev uplink0 mtu {uplink}"));
        world.a.up();
        world.a.create(&web);
        world.a.create(&closed);
        mtus(overlay);
        assert!(echoes(&mut connection, &[7; 100_000], SOON), "{overlay}");
        assert!(world.a.is_open(&web) && !world.a.is_open(&closed));
    }
}

/// Asks on a's uplink who has the service's address.
fn find_foreign(world: &World, last: u8, known: Vec<Mac>) -> Option<Mac> {
    let address = service("web", last).address;
    world.a.with(async move |overlay: &Overlay| overlay.find_foreign(address, &known).await.unwrap())
}

fn a_host_that_has_a_services_address_is_found_and_a_node_that_answers_for_it_is_not(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 82);
    let inside = world.b.create(&web);
    world.b.open(&web);
    // Node b answers for it on the segment: the client reaches it there.
    let at = echo_server(&inside, web.address, 80);
    assert!(connect(&world.client, at, SOON).is_ok());
    assert_eq!(find_foreign(&world, 82, Vec::new()), None);
    assert_eq!(find_foreign(&world, 83, Vec::new()), None);

    world.client.sh("ip address add 10.88.0.82/32 dev uplink0");
    let link = world.client.sh("cat /sys/class/net/uplink0/address");
    let found = find_foreign(&world, 82, Vec::new()).unwrap();
    assert_eq!(godwit_network::mac_to_string(found), link.trim());
    assert_eq!(find_foreign(&world, 82, vec![found]), None, "one that is known to be a node's");
    assert_eq!(find_foreign(&world, 83, Vec::new()), None);
    world.client.sh("ip address del 10.88.0.82/32 dev uplink0");
    assert_eq!(find_foreign(&world, 82, Vec::new()), None);
}
