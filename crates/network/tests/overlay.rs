//! The overlay between real network namespaces: what a client and a service see.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::net::UdpSocket;
use std::os::fd::AsRawFd;

use godwit_network::Overlay;

use common::{A_WHILE, SOON, Switch, World, comes_back, connect, echo_server, echoes, published, service};

common::on_every_switch!(
    a_client_reaches_a_service_only_while_it_is_open,
    services_on_two_nodes_reach_each_other_and_nodes_reach_both,
    a_published_port_of_the_node_leads_to_the_service,
    a_service_is_reached_again_after_the_uplink_was_down,
    the_largest_frame_passes_and_a_larger_one_is_refused_where_it_is_sent,
);

fn a_client_reaches_a_service_only_while_it_is_open(switch: Switch) {
    let world = World::new(switch);
    let redis = service("redis", 10);
    let inside = world.a.create(&redis);
    let at = echo_server(&inside, redis.address, 7);
    assert!(!world.a.is_open(&redis));
    assert!(connect(&world.client, at, A_WHILE).is_err());

    world.a.open(&redis);
    assert!(world.a.is_open(&redis));
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"before", SOON));

    let carrier = carrier_changes(&inside);
    world.a.close(&redis);
    assert!(!echoes(&mut connection, b"during", A_WHILE));
    assert!(connect(&world.client, at, A_WHILE).is_err());
    world.a.open(&redis);
    assert!(comes_back(&mut connection, b"during", SOON));
    assert_eq!(carrier_changes(&inside), carrier);
}

fn services_on_two_nodes_reach_each_other_and_nodes_reach_both(switch: Switch) {
    let world = World::new(switch);
    let (web, db) = (service("web", 20), service("db", 21));
    let inside_web = world.a.create(&web);
    let inside_db = world.b.create(&db);
    world.a.open(&web);
    world.b.open(&db);
    world.b.set_remote(&web, world.a.vtep);
    world.a.set_remote(&db, world.b.vtep);
    let (at_web, at_db) =
        (echo_server(&inside_web, web.address, 80), echo_server(&inside_db, db.address, 5432));

    for (from, to) in [
        (&inside_web, at_db),
        (&inside_db, at_web),
        (&world.a.host, at_db),
        (&world.b.host, at_web),
        (&world.a.host, at_web),
    ] {
        let mut connection = connect(from, to, SOON).unwrap_or_else(|e| panic!("{} to {to}: {e}", from.name));
        assert!(echoes(&mut connection, &[7; 100_000], SOON), "{} to {to}", from.name);
    }
}

fn a_published_port_of_the_node_leads_to_the_service(switch: Switch) {
    let world = World::new(switch);
    let web = published("web", 30, 8080, 80);
    let inside = world.a.create(&web);
    echo_server(&inside, web.address, 80);
    world.a.open(&web);
    let at = (world.a.vtep, 8080).into();
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"published", SOON));
    assert!(connect(&world.a.host, at, SOON).is_ok(), "from the node itself");
    let neighbour = service("neighbour", 32);
    let inside_neighbour = world.a.create(&neighbour);
    world.a.open(&neighbour);
    assert!(connect(&inside_neighbour, at, SOON).is_ok(), "from a service beside it");

    let other = published("other", 31, 8080, 81);
    let refused = world.a.try_create(&other).unwrap_err();
    assert!(refused.contains("8080/tcp") && refused.contains("web"), "{refused}");

    // It leads there from every node that knows of it, and a connection through it goes on.
    let (name, address, ports) = (web.name.clone(), web.address, web.published.clone());
    world.b.set_remote(&web, world.a.vtep);
    world.b.with(async move |overlay: &Overlay| overlay.publish(&name, address, &ports).await.unwrap());
    let mut through_b = connect(&world.client, (world.b.vtep, 8080).into(), SOON).unwrap();
    assert!(echoes(&mut through_b, b"by the other node", SOON));

    world.a.remove(&web);
    let error = connect(&world.client, at, SOON).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(!world.a.host.sh("nft list ruleset").contains("published"));
}

fn a_service_is_reached_again_after_the_uplink_was_down(switch: Switch) {
    let world = World::new(switch);
    let (web, closed) = (service("web", 33), service("closed", 34));
    let inside = world.a.create(&web);
    world.a.create(&closed);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    assert!(connect(&world.client, at, SOON).is_ok());

    let flapped = world.a.host.name.clone();
    world.a.with(async move |overlay: &Overlay| {
        let answered = async {
            let flap =
                format!("ip -n {flapped} link set uplink0 down && ip -n {flapped} link set uplink0 up");
            common::sh(&flap);
            while !common::sh(&format!("ip -n {flapped} neigh show proxy")).contains("10.88.0.33") {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            stopped = overlay.follow_uplink() => panic!("{stopped:?}"),
            within = tokio::time::timeout(SOON, answered) => within.unwrap(),
        }
    });
    world.client.sh("ip neigh flush dev uplink0");
    assert!(connect(&world.client, at, SOON).is_ok());
    assert!(!world.a.host.sh("ip neigh show proxy").contains("10.88.0.34"), "a closed service has no say");
}

fn the_largest_frame_passes_and_a_larger_one_is_refused_where_it_is_sent(switch: Switch) {
    let world = World::new(switch);
    let (web, near, far) = (service("web", 35), service("near", 36), service("far", 37));
    let inside = world.a.create(&web);
    let (inside_near, inside_far) = (world.a.create(&near), world.b.create(&far));
    for (node, service) in [(&world.a, &web), (&world.a, &near), (&world.b, &far)] {
        node.open(service);
    }
    world.a.set_remote(&far, world.b.vtep);
    world.b.set_remote(&web, world.a.vtep);
    let at = (web.address, 53);
    let there = inside.run(|| UdpSocket::bind(at).unwrap());
    there.set_read_timeout(Some(SOON)).unwrap();
    // An uplink of 1500, less what VXLAN adds, less the headers of IPv4 and UDP.
    let most = 1500 - 50 - 28;
    for from in [&inside_near, &inside_far] {
        let socket = from.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        never_break_up(&socket);
        socket.send_to(&vec![1; most], at).unwrap();
        assert_eq!(there.recv(&mut [0; 2000]).unwrap(), most, "{}", from.name);
        let refused = socket.send_to(&vec![1; most + 1], at).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EMSGSIZE), "{}", from.name);
    }
}

/// Datagrams of this socket are refused where they do not fit into one frame.
fn never_break_up(socket: &UdpSocket) {
    let value = libc::IP_PMTUDISC_DO;
    // SAFETY: `value` is readable for the length given during the call.
    let set = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_IP,
            libc::IP_MTU_DISCOVER,
            (&raw const value).cast(),
            size_of_val(&value).try_into().unwrap(),
        )
    };
    assert_eq!(set, 0, "{}", std::io::Error::last_os_error());
}

/// How often the link of the service's interface went up or down since it exists.
fn carrier_changes(namespace: &common::Host) -> u32 {
    use futures::TryStreamExt;
    use rtnetlink::packet_route::link::LinkAttribute;
    namespace.run(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (connection, handle, _) = rtnetlink::new_connection().unwrap();
            tokio::spawn(connection);
            let mut links = handle.link().get().match_name("eth0".into()).execute();
            let link = links.try_next().await.unwrap().unwrap();
            let changes = link.attributes.iter().find_map(|attribute| match attribute {
                LinkAttribute::CarrierChanges(changes) => Some(*changes),
                _ => None,
            });
            changes.unwrap()
        })
    })
}
