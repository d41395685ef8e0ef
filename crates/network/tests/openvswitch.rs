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
    assert!(message.contains("the bridge gw0") && message.contains("start godwitd again"), "{message}");
    assert!(!world.a.netns_dir.join("other").exists(), "something was made");
}

#[test]
fn a_restarted_switch_ends_the_watch_and_is_set_up_anew() {
    let mut world = World::new(Switch::OpenVswitch);
    let (web, far) = (service("web", 62), service("far", 63));
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"before", SOON));

    world.a.openvswitch.as_mut().unwrap().end_switch();
    world.a.openvswitch.as_mut().unwrap().start_switch();
    world.a.with(async |overlay: &Overlay| {
        let ended = tokio::time::timeout(SOON, overlay.follow_uplink()).await.unwrap();
        assert!(matches!(ended, Err(NetworkError::SwitchGone { .. })), "{ended:?}");
        let facts = probe(overlay.config()).await;
        let fact = facts.into_iter().find(|fact| fact.name == "openvswitch").unwrap();
        assert!(!fact.ok && fact.detail.contains("start godwitd again"), "{}", fact.detail);
    });

    // As a daemon that is started again does.
    world.a.up();
    assert!(!world.a.is_open(&web), "nobody opened it");
    assert_eq!(world.a.create(&web).path, inside.path);
    world.a.open(&web);
    assert!(echoes(&mut connection, b"after", SOON));
    let inside_far = world.b.create(&far);
    world.b.open(&far);
    world.a.set_remote(&far, world.b.vtep);
    world.b.set_remote(&web, world.a.vtep);
    assert!(connect(&inside_far, at, SOON).is_ok());
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
