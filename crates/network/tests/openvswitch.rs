//! What is Open vSwitch's own: its daemons that do not run or were restarted, whole frames, and a node
//! beside one with the kernel's bridge.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::UdpSocket;

use common::{A_WHILE, Host, SOON, Switch, World, connect, echo_server, echoes, service};
use godwit_network::{NetworkError, Overlay, probe};

#[test]
fn daemons_that_do_not_run_are_named_and_what_to_do() {
    let mut world = World::bare(Switch::OpenVswitch);
    let refused = |world: &World, words: &[&str]| {
        let message = world.a.up_with(world.a.config()).unwrap_err();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    world.a.openvswitch.as_mut().unwrap().end_switch();
    refused(&world, &["ovs-vswitchd", "does not answer", "systemctl start openvswitch-switch"]);
    world.a.openvswitch.as_mut().unwrap().end_server();
    refused(&world, &["ovsdb-server", "does not answer", "db.sock", "OVS_RUNDIR"]);
    assert_eq!(world.a.host.sh("ip -o link").lines().count(), 2, "something was made: lo and the uplink");
}

#[test]
fn a_bridge_that_is_gone_is_named_when_something_is_asked_of_it() {
    let world = World::new(Switch::OpenVswitch);
    let web = service("web", 60);
    world.a.create(&web);
    world.a.break_switch();
    let opened =
        world.a.with(async move |overlay: &Overlay| overlay.open(&web).await.unwrap_err().to_string());
    assert!(opened.contains("web") && opened.contains("create it first"), "{opened}");
    let message = world.a.try_create(&service("other", 61)).unwrap_err();
    assert!(message.contains("the bridge gw0") && message.contains("restart godwitd"), "{message}");
    assert!(!world.a.netns_dir.join("other").exists(), "something was made");
}

/// What the daemon asks every ten seconds, and before it takes a service in: what was found and mended.
fn mend(world: &World) -> Option<String> {
    world.a.with(async |overlay: &Overlay| {
        let damage = overlay.damage().await.unwrap();
        assert_eq!(overlay.mend().await.unwrap(), damage);
        assert_eq!(overlay.mend().await.unwrap(), None, "there is nothing left to mend");
        damage
    })
}

/// The flows, in an order of their own.
fn flows(world: &World) -> Vec<String> {
    let dump = "ovs-ofctl -O OpenFlow14 --no-stats --no-names dump-flows gw0";
    let dump = world.a.openvswitch.as_ref().unwrap().sh(dump);
    let mut flows: Vec<_> = dump.lines().map(str::to_owned).collect();
    flows.sort();
    flows
}

#[test]
fn a_restarted_switch_gets_its_flows_again_without_being_asked() {
    let mut world = World::new(Switch::OpenVswitch);
    let (web, shut, far) = (service("web", 62), service("shut", 61), service("far", 63));
    let inside = world.a.create(&web);
    world.a.open(&web);
    world.a.create(&shut);
    let inside_far = world.b.create(&far);
    world.b.open(&far);
    world.a.set_remote(&far, world.b.vtep);
    world.b.set_remote(&web, world.a.vtep);
    let at = echo_server(&inside, web.address, 80);
    let mut connections =
        [connect(&world.client, at, SOON).unwrap(), connect(&inside_far, at, SOON).unwrap()];
    for connection in &mut connections {
        assert!(echoes(connection, b"before", SOON));
    }
    assert_eq!(mend(&world), None);
    let before = flows(&world);

    for _ in 0..2 {
        world.a.openvswitch.as_mut().unwrap().end_switch();
        world.a.openvswitch.as_mut().unwrap().start_switch();
        for connection in &mut connections {
            assert!(echoes(connection, b"after", SOON), "the connection did not outlive it");
        }
        assert_eq!(flows(&world), before);
        let told = mend(&world).unwrap();
        assert!(told.contains("10 flows are lost") && told.contains("Open vSwitch was restarted"), "{told}");
        assert!(world.a.is_open(&web) && !world.a.is_open(&shut));
    }
    // It is no reason for the daemon to end.
    let ended = world.a.with(async |overlay: &Overlay| {
        tokio::time::timeout(A_WHILE, overlay.follow_uplink()).await.map_err(|_| ())
    });
    assert!(ended.is_err(), "{ended:?}");
}

#[test]
fn while_the_switch_does_not_run_that_is_said_and_then_it_goes_on() {
    let mut world = World::new(Switch::OpenVswitch);
    let web = service("web", 69);
    world.a.create(&web);
    world.a.openvswitch.as_mut().unwrap().end_switch();
    let service = web.clone();
    let [damage, open] = world.a.with(async move |overlay: &Overlay| {
        [overlay.damage().await.unwrap_err(), overlay.open(&service).await.unwrap_err()]
    });
    for error in [damage, open] {
        let message = error.to_string();
        assert!(message.contains("ovs-vswitchd") && message.contains("systemctl start"), "{message}");
    }
    assert!(matches!(mend_error(&world), NetworkError::OpenVswitchStopped { .. }));
    world.a.openvswitch.as_mut().unwrap().start_switch();
    world.a.open(&web);
    assert!(mend(&world).unwrap().contains("Open vSwitch was restarted"));
    assert!(world.a.is_open(&web));
}

fn mend_error(world: &World) -> NetworkError {
    world.a.with(async |overlay: &Overlay| overlay.mend().await.unwrap_err())
}

#[test]
fn a_daemon_that_starts_after_the_switch_sets_it_up_anew() {
    let mut world = World::new(Switch::OpenVswitch);
    let web = service("web", 59);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"before", SOON));
    let config = world.a.config();
    world.a.forget();
    world.a.openvswitch.as_mut().unwrap().end_switch();
    world.a.openvswitch.as_mut().unwrap().start_switch();
    let facts = world.a.host.run(|| {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(probe(&config))
    });
    let fact = facts.into_iter().find(|fact| fact.name == "openvswitch").unwrap();
    assert!(!fact.ok && fact.detail.contains("restart godwitd"), "{}", fact.detail);

    world.a.up();
    assert!(!world.a.is_open(&web), "nobody opened it");
    assert_eq!(world.a.create(&web).path, inside.path);
    world.a.open(&web);
    assert!(echoes(&mut connection, b"after", SOON));
    // Another start with its flows there.
    world.a.forget();
    world.a.up();
    assert!(world.a.is_open(&web));
    assert!(echoes(&mut connection, b"again", SOON));
    // What is lost of flows that an earlier daemon wrote is written again, too.
    world.a.openvswitch.as_ref().unwrap().sh("ovs-ofctl -O OpenFlow14 del-flows gw0");
    assert!(mend(&world).unwrap().contains("8 flows are lost"));
    assert!(echoes(&mut connection, b"mended", SOON));
}

/// What is removed, how, and the words by which it is told.
type Case<'a> = (&'a str, &'a dyn Fn(), &'a [&'a str]);

#[test]
fn what_somebody_removes_of_the_switch_is_found_and_made_again() {
    let world = World::new(Switch::OpenVswitch);
    let (web, db) = (service("web", 57), service("db", 58));
    let inside = world.a.create(&web);
    world.a.open(&web);
    let inside_db = world.b.create(&db);
    world.b.open(&db);
    world.a.set_remote(&db, world.b.vtep);
    world.b.set_remote(&web, world.a.vtep);
    let (at_web, at_db) = (echo_server(&inside, web.address, 80), echo_server(&inside_db, db.address, 5432));
    assert_eq!(mend(&world), None);
    let before = flows(&world);
    let port = world.a.port(&web);
    let end = port.replacen("gws", "gwt", 1);
    let switch = world.a.openvswitch.as_ref().unwrap();
    let at_switch = |line: &str| drop(switch.sh(line));
    let at_host = |line: &str| drop(world.a.host.sh(line));
    let numbered = |number: usize| format!("{number} flows are lost");
    let not_joined = format!("{end} and {port}");
    let cases: [Case<'_>; 9] = [
        ("all flows", &|| at_switch("ovs-ofctl -O OpenFlow14 del-flows gw0"), &[&numbered(before.len())]),
        ("one flow", &|| at_switch("ovs-ofctl -O OpenFlow14 del-flows gw0 table=2"), &[&numbered(1)]),
        (
            "a flow that is too much",
            &|| at_switch("ovs-ofctl -O OpenFlow14 add-flow gw0 priority=100,in_port=77,actions=drop"),
            &["1 flows are there that should not be"],
        ),
        (
            "all rules",
            &|| at_host("nft flush ruleset"),
            &["not joined are", "gwvx0-t and gwvx0", &not_joined],
        ),
        ("one table", &|| at_host(&format!("nft delete table netdev {end}")), &["not joined", &not_joined]),
        ("one rule", &|| at_host(&format!("nft flush chain netdev {end} in")), &["not joined", &not_joined]),
        ("the bridge is down", &|| at_host("ip link set gw0 down"), &["the bridge gw0 is down"]),
        ("the VXLAN device", &|| at_host("ip link del gwvx0"), &["the VXLAN device gwvx0 is missing"]),
        ("the tunnel's port", &|| at_switch("ovs-vsctl del-port gw0 gwvx0-t"), &["gwvx0-t is missing"]),
    ];
    let of_bridge: [Case<'_>; 2] = [
        ("the bridge's interface", &|| at_host("ip link del gw0"), &["the bridge gw0 is missing"]),
        ("the bridge", &|| at_switch("ovs-vsctl del-br gw0"), &["the bridge gw0 is missing"]),
    ];
    // With the kernel's datapath nobody can remove the interface alone, and a bridge that was removed is the daemon's
    // reason to end: another test looks at that.
    let has_module = switch.sh("ovs-vsctl get Bridge gw0 datapath_type").contains("system");
    let of_bridge = of_bridge.into_iter().filter(|_| !has_module);
    for (what, damage, words) in cases.into_iter().chain(of_bridge) {
        damage();
        let told = mend(&world).unwrap_or_else(|| panic!("{what}: nothing was found"));
        assert!(words.iter().all(|word| told.contains(word)), "{what}: {told}");
        if what.starts_with("the ") {
            // As the daemon does when something was mended.
            world.a.create(&web);
            world.a.open(&web);
            world.a.set_remote(&db, world.b.vtep);
        } else {
            assert_eq!(flows(&world), before, "{what}");
        }
        for (from, to) in [(&world.client, at_web), (&inside, at_db), (&inside_db, at_web)] {
            let mut connection = connect(from, to, SOON).unwrap_or_else(|e| panic!("{what}: {to}: {e}"));
            assert!(echoes(&mut connection, b"whole", SOON), "{what}");
        }
    }
}

#[test]
fn large_frames_cross_between_open_vswitch_and_the_kernels_bridge() {
    for (at_a, at_b) in [(Switch::Kernel, Switch::OpenVswitch), (Switch::OpenVswitch, Switch::OpenVswitch)] {
        let world = World::new_with(at_a, at_b);
        let (web, db) = (service("web", 64), service("db", 65));
        let (inside_web, inside_db) = (world.a.create(&web), world.b.create(&db));
        world.a.open(&web);
        world.b.open(&db);
        world.a.set_remote(&db, world.b.vtep);
        world.b.set_remote(&web, world.a.vtep);
        let at_web = echo_server(&inside_web, web.address, 80);
        let at_db = echo_server(&inside_db, db.address, 80);
        for (from, to) in [(&inside_web, at_db), (&inside_db, at_web), (&world.client, at_db)] {
            let mut connection = connect(from, to, SOON).unwrap();
            for number in 0..20 {
                let what = format!("{at_a:?} to {at_b:?}, {} to {to}, {number}", from.name);
                assert!(echoes(&mut connection, &[number; 200_000], SOON), "{what}");
            }
        }
        for inside in [&inside_web, &inside_db] {
            assert_eq!(counter(inside, "TcpInCsumErrors"), 0, "a check sum was not made");
        }
    }
}

/// A counter of a service's network stack.
fn counter(inside: &Host, name: &str) -> u64 {
    let line = common::sh(&format!("nsenter --net={} nstat -asz {name}", inside.path.display()));
    let value = line.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next());
    value.unwrap().parse().unwrap()
}

#[test]
fn nobody_is_asked_but_who_is_meant() {
    let world = World::new(Switch::OpenVswitch);
    let (web, db, far) = (service("web", 66), service("db", 67), service("far", 68));
    let (inside_web, inside_db) = (world.a.create(&web), world.a.create(&db));
    world.a.open(&web);
    world.a.open(&db);
    let inside_far = world.b.create(&far);
    world.b.open(&far);
    world.a.set_remote(&far, world.b.vtep);
    let received = |inside: &Host| {
        common::sh(&format!("nsenter --net={} cat /proc/net/dev", inside.path.display()))
            .lines()
            .find_map(|line| line.trim().strip_prefix("eth0:")?.split_whitespace().nth(1)?.parse().ok())
            .unwrap_or(0_u64)
    };
    let before = [received(&inside_db), received(&inside_far)];
    // Nobody has this address: the request reaches nobody, and nobody answers.
    let nobody = (std::net::Ipv4Addr::new(10, 88, 0, 99), 80).into();
    assert!(connect(&inside_web, nobody, A_WHILE).is_err());
    let broadcast = inside_web.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
    broadcast.set_broadcast(true).unwrap();
    broadcast.send_to(b"anybody?", "10.88.255.255:9").unwrap();
    // What is sent after it has come, and so would it have.
    let at_db = echo_server(&inside_db, db.address, 80);
    drop(connect(&inside_web, at_db, SOON).unwrap());
    let neighbour = common::sh(&format!("nsenter --net={} ip neigh show", inside_web.path.display()));
    assert!(neighbour.contains("10.88.0.67") && neighbour.contains("02:67:0a:58:00:43"), "{neighbour}");
    assert_eq!(received(&inside_far), before[1], "the other node was asked");
    // The handshake and the end of one connection, and who is at its other end.
    assert!(received(&inside_db) - before[0] <= 8, "{} {}", received(&inside_db), before[0]);
}
