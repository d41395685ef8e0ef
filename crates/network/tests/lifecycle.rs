//! Making, repairing, listing and removing: what exists afterwards, and what is refused.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use common::{A_WHILE, SOON, Switch, World, connect, echo_server, echoes, published, service};
use godwit_network::{Overlay, OverlayConfig, probe};

common::on_every_switch!(
    nothing_is_left_after_removing_services_and_taking_the_overlay_down,
    doing_it_again_changes_nothing,
    a_closed_port_stays_closed_whatever_is_done_to_its_device,
    what_was_half_made_is_completed,
    a_restarted_daemon_finds_what_exists,
    what_another_service_has_at_an_address_is_not_removed,
    what_cannot_be_is_refused_with_a_sentence_and_leaves_nothing,
    an_overlay_that_cannot_be_is_refused_with_a_sentence,
    changed_settings_are_corrected,
    doctor_sees_the_uplink_and_a_filter_that_swallows_services_frames,
);

fn what_another_service_has_at_an_address_is_not_removed(switch: Switch) {
    let world = World::new(switch);
    let first = published("first", 40, 8080, 80);
    let inside = world.a.create(&first);
    world.a.open(&first);
    let address = echo_server(&inside, first.address, 80);
    let before = world.a.state();
    // Of one that could not be made, as its address was taken meanwhile.
    let second = service("second", 40);
    let refused = world.a.try_create(&second).unwrap_err();
    assert!(refused.contains("first"), "{refused}");
    world.a.remove(&second);
    assert_eq!(world.a.state(), before);
    assert!(echoes(&mut connect(&world.client, address, SOON).unwrap(), b"still there", SOON));
    world.a.remove(&first);
}

fn nothing_is_left_after_removing_services_and_taking_the_overlay_down(switch: Switch) {
    let world = World::bare(switch);
    world.a.up();
    world.a.down();
    // The kernel keeps its settings, so the state before the first time is not the measure.
    let before = world.a.state();
    world.a.up();
    let empty = world.a.state();
    assert_ne!(empty, before);

    let (web, db) = (published("web", 40, 8080, 80), service("db", 41));
    for service in [&web, &db] {
        world.a.create(service);
        world.a.open(service);
    }
    world.a.remove(&db);
    world.a.close(&web);
    world.a.set_remote(&web, world.b.vtep);
    world.a.remove(&web);
    world.a.with(async move |overlay: &Overlay| overlay.set_absent(web.address, web.mac).await.unwrap());
    assert_eq!(world.a.state(), empty);
    // Once more, though all is gone.
    world.a.remove(&db);
    assert_eq!(world.a.state(), empty);

    let (web, db) = (published("web", 40, 8080, 80), service("db", 41));
    world.a.create(&web);
    world.a.open(&web);
    world.a.set_remote(&db, world.b.vtep);
    world.a.down();
    assert_eq!(world.a.state(), before);
}

fn doing_it_again_changes_nothing(switch: Switch) {
    let world = World::new(switch);
    let web = published("web", 42, 8080, 80);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    let before = world.a.state();

    // As a daemon that was killed and started again.
    world.a.up();
    assert_eq!(world.a.create(&web).path, inside.path);
    assert!(world.a.is_open(&web), "creating again must not close");
    world.a.open(&web);
    assert_eq!(world.a.state(), before);
    assert!(common::echoes(&mut connection, b"still", SOON));

    world.a.close(&web);
    world.a.create(&web);
    assert!(!world.a.is_open(&web), "creating again must not open");
}

fn a_closed_port_stays_closed_whatever_is_done_to_its_device(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 43);
    world.a.create(&web);
    let port = world.a.port(&web);
    for change in ["txqueuelen 500", "mtu 1400", "group 7", "type bridge_slave learning off", "promisc on"] {
        if switch != Switch::Kernel && change.contains("bridge_slave") {
            continue;
        }
        world.a.host.sh(&format!("ip link set dev {port} {change}"));
        assert!(!world.a.is_open(&web), "{change}");
    }
    world.a.host.sh("ip link set dev gw0 mtu 1400");
    if switch == Switch::Kernel {
        world.a.host.sh("ip link set dev gwvx0 type bridge_slave learning off");
    }
    assert!(!world.a.is_open(&web));
    world.a.open(&web);
    world.a.close(&web);
    world.a.host.sh(&format!("ip link set dev {port} txqueuelen 600"));
    assert!(!world.a.is_open(&web));
}

fn what_was_half_made_is_completed(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 44);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let mut port = 1000;
    let mut works = |what: &str| {
        port += 1;
        world.a.create(&web);
        world.a.open(&web);
        let at = echo_server(&inside, web.address, port);
        let mut connection =
            connect(&world.client, at, SOON).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(common::echoes(&mut connection, b"whole", SOON), "{what}");
        connection
    };
    let netns = inside.path.to_str().unwrap();
    let mut running = works("whole");
    // What runs in the namespace goes on as long as the namespace is there.
    world.a.host.sh(&format!("ip link del {}", world.a.port(&web)));
    works("without its veth");
    assert!(common::echoes(&mut running, b"survived", SOON));
    common::sh(&format!("nsenter --net={netns} ip address flush dev eth0"));
    works("without its address");
    world.a.break_switch();
    world.a.up();
    works("without its bridge");
    world.a.host.sh("ip link del gwvx0");
    world.a.up();
    works("without the VXLAN device");
    assert!(common::echoes(&mut running, b"survived", SOON));
    common::sh(&format!("umount -l {netns}"));
    works("without its mount");
    common::sh(&format!("umount -l {netns} && rm {netns}"));
    works("without its file");
}

fn a_restarted_daemon_finds_what_exists(switch: Switch) {
    let world = World::new(switch);
    let (web, db) = (service("web", 45), service("db-with-a-name-longer-than-an-interface", 46));
    world.a.create(&web);
    world.a.create(&db);
    world.a.open(&db);
    std::fs::write(world.a.netns_dir.join("half"), "").unwrap();
    std::fs::write(world.a.netns_dir.join("notes"), "not ours").unwrap();
    world.a.up();
    let found = world.a.with(async |overlay: &Overlay| overlay.list_endpoints().await.unwrap());
    let found: Vec<_> = found.iter().map(|e| (e.name.as_str(), e.address, e.open)).collect();
    let expected = [
        (db.name.as_str(), Some(db.address), true),
        ("half", None, false),
        ("web", Some(web.address), false),
    ];
    assert_eq!(found, expected);
}

fn what_cannot_be_is_refused_with_a_sentence_and_leaves_nothing(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 47);
    world.a.create(&web);
    std::fs::write(world.a.netns_dir.join("notes"), "not ours").unwrap();
    let before = world.a.state();

    let refused = |service: &godwit_network::ServiceEndpoint, words: &[&str]| {
        let message = world.a.try_create(service).unwrap_err();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
        assert_eq!(world.a.state(), before, "{message}");
    };
    refused(&service("other", 47), &["10.88.0.47", "belongs to the service web"]);
    refused(&service("web", 48), &["web", "10.88.0.47", "10.88.0.48", "remove"]);
    refused(&service("gateway", 1), &["10.88.0.1", "gateway"]);
    refused(&service("notes", 48), &["notes", "in the way"]);
    let outside = godwit_network::ServiceEndpoint { address: [10, 89, 0, 1].into(), ..service("out", 1) };
    refused(&outside, &["10.89.0.1", "outside", "10.88.0.0/16"]);

    let none = service("none", 49);
    let message =
        world.a.with(async move |overlay: &Overlay| overlay.open(&none).await.unwrap_err().to_string());
    assert!(message.contains("none") && message.contains("create it first"), "{message}");
    let own = world.a.vtep;
    let message = world.a.with(async move |overlay: &Overlay| {
        overlay.set_remote(web.address, web.mac, own).await.unwrap_err().to_string()
    });
    assert!(message.contains("10.99.0.11") && message.contains("itself"), "{message}");
}

fn an_overlay_that_cannot_be_is_refused_with_a_sentence(switch: Switch) {
    let world = World::bare(switch);
    let node = &world.a;
    let refused = |config: OverlayConfig, words: &[&str]| {
        let message = node.up_with(config).unwrap_err();
        assert!(words.iter().all(|word| message.contains(word)), "{message}");
    };
    refused(
        OverlayConfig { uplink: "nowhere0".into(), ..node.config() },
        &["nowhere0", "no network interface"],
    );
    refused(
        OverlayConfig { subnet: "10.99.0.0/16".parse().unwrap(), ..node.config() },
        &["10.99.0.0/16", "10.99.0.0/24", "uplink0", "overlaps"],
    );
    node.host.sh("ip link add name gw0 type veth peer name other");
    refused(node.config(), &["gw0", "veth", "bridge"]);
    node.host.sh("ip link del gw0");
    node.host.sh("ip link set dev uplink0 mtu 600");
    refused(node.config(), &["uplink0", "600"]);
    node.host.sh("ip link set dev uplink0 mtu 1500");
    node.up();
}

fn changed_settings_are_corrected(switch: Switch) {
    let world = World::new(switch);
    let node = &world.a;
    node.up_with(OverlayConfig { vni: 99, port: 4790, ..node.config() }).unwrap();
    let link = node.host.sh("ip -d link show gwvx0");
    assert!(link.contains("vxlan id 99") && link.contains("dstport 4790"), "{link}");

    node.host.sh("ip link set dev gw0 address 02:00:00:00:00:01 mtu 1000");
    match &node.openvswitch {
        None => node.host.sh("ip link set dev gw0 type bridge forward_delay 1500"),
        Some(openvswitch) => {
            openvswitch.sh("ovs-vsctl set Bridge gw0 fail_mode=standalone -- del-port gw0 gwvx0-t");
            openvswitch.sh("ovs-ofctl -O OpenFlow14 del-flows gw0")
        }
    };
    if switch == Switch::Kernel {
        node.host.sh("ip link set dev gwvx0 nomaster");
    } else {
        node.host.sh("nft delete table netdev gwvx0-t");
    }
    let settings = [
        ("ip_forward", "0", "1"),
        ("conf.uplink0.forwarding", "0", "1"),
        ("conf.gw0.forwarding", "0", "1"),
        ("conf.uplink0.rp_filter", "1", "2"),
        ("conf.gw0.rp_filter", "1", "2"),
        ("conf.all.send_redirects", "1", "0"),
        ("neigh.uplink0.proxy_delay", "80", "0"),
    ];
    for (name, wrong, _) in settings {
        node.host.sh(&format!("sysctl -qw net.ipv4.{name}={wrong}"));
    }
    node.host.sh("ip address flush dev gw0");
    node.up();
    for (name, _, right) in settings {
        assert_eq!(node.host.sh(&format!("sysctl -n net.ipv4.{name}")).trim(), right, "{name}");
    }
    let bridge = node.host.sh("ip -d link show gw0");
    let kernels = if switch == Switch::Kernel { "forward_delay 0" } else { "" };
    for setting in ["02:67:ff:00:00:01", "mtu 1450", kernels] {
        assert!(bridge.contains(setting), "{setting}: {bridge}");
    }
    let link = node.host.sh("ip -d link show gwvx0");
    let master = if switch == Switch::Kernel { "master gw0 " } else { "" };
    for setting in ["vxlan id 88", master, "mtu 1450", "nolearning", "proxy", "local 10.99.0.11"] {
        assert!(link.contains(setting), "{setting}: {link}");
    }
    let (web, db) = (service("web", 50), service("db", 51));
    let inside = node.create(&web);
    let port = node.port(&web);
    match &node.openvswitch {
        None => {
            for port in ["gwvx0", &port] {
                let flags = node.host.sh(&format!("bridge -d link show dev {port}"));
                assert!(flags.contains("learning off flood off"), "{flags}");
            }
        }
        Some(openvswitch) => {
            assert_eq!(openvswitch.sh("ovs-vsctl get Bridge gw0 fail_mode").trim(), "secure");
            assert!(openvswitch.sh("ovs-vsctl list-ports gw0").contains("gwvx0-t"));
        }
    }
    node.open(&web);
    world.b.create(&db);
    let at = echo_server(&inside, web.address, 80);
    world.b.set_remote(&web, node.vtep);
    assert!(connect(&world.b.host, at, SOON).is_ok());
    assert!(connect(&world.client, at, SOON).is_ok());
}

fn doctor_sees_the_uplink_and_a_filter_that_swallows_services_frames(switch: Switch) {
    let world = World::new(switch);
    let look = || {
        world.a.with(async |overlay: &Overlay| {
            let facts = probe(overlay.config()).await;
            facts
                .into_iter()
                .map(|fact| (fact.name, (fact.ok, fact.detail)))
                .collect::<std::collections::HashMap<_, _>>()
        })
    };
    let facts = look();
    for name in ["uplink", "mtu", "bridge", "veth", "vxlan", "nftables", "packet filter"] {
        assert!(facts[name].0, "{name}: {}", facts[name].1);
    }
    assert!(facts["uplink"].1.contains("10.99.0.11") && facts["mtu"].1.contains("1450"));
    assert!(facts.contains_key("netem") && facts.contains_key("openvswitch"));

    let web = service("web", 52);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    world.a.host.sh("iptables -P FORWARD DROP");
    assert!(connect(&world.client, at, A_WHILE).is_err());
    let (ok, advice) = look().remove("packet filter").unwrap();
    assert!(!ok && advice.contains("FORWARD") && advice.contains("-i gw0 -j ACCEPT"), "{advice}");
    // What it advises works, and satisfies it.
    let (_, command) = advice.split_once("accept it: ").unwrap();
    world.a.host.sh(&format!("sh -c '{command}'"));
    assert!(connect(&world.client, at, SOON).is_ok());
    assert!(look()["packet filter"].0);
}
