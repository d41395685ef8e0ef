//! A service's address moves from one node to the other, with connections and neighbours.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};

use common::repair::{restore, resume, save};
use common::{A_WHILE, Host, SOON, Switch, World, comes_back, connect, echo_server, echoes, service, udp_at};
use godwit_network::{Overlay, ServiceEndpoint};

common::on_every_switch!(
    an_established_connection_goes_on_at_the_other_node_and_back,
    a_node_that_was_moved_to_and_from_has_nothing_left_of_it,
    frames_that_still_come_to_the_old_node_are_passed_on,
    a_prepared_copy_takes_nothing_from_the_original,
    a_service_beside_the_old_place_follows_to_the_new_one,
    an_absent_service_is_reached_from_nowhere,
    the_gateway_answers_each_service_at_its_own_node_only,
    what_is_sent_during_a_move_is_held_and_arrives_once_and_in_order,
    what_was_sent_during_a_move_that_is_called_off_is_handed_in_at_the_old_place,
    what_a_frozen_service_still_sends_leaves_the_old_node_until_it_is_closed,
    more_than_can_be_held_is_dropped_and_counted_and_the_oldest_is_kept,
    a_stream_that_was_held_goes_on_where_it_stopped,
    a_service_that_comes_back_at_once_is_sent_each_frame_once,
);

fn an_established_connection_goes_on_at_the_other_node_and_back(switch: Switch) {
    let world = World::new(switch);
    let redis = service("redis", 10);
    // What the saved connection does not carry over.
    for option in ["tcp_timestamps", "tcp_sack", "tcp_window_scaling"] {
        world.client.sh(&format!("sysctl -qw net.ipv4.{option}=0"));
    }
    let inside_a = world.a.create(&redis);
    world.b.set_remote(&redis, world.a.vtep);
    world.a.open(&redis);

    let listener = inside_a.run(|| TcpListener::bind((redis.address, 6379)).unwrap());
    let mut client = connect(&world.client, (redis.address, 6379).into(), SOON).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    drop(listener);
    client.set_nodelay(true).unwrap();
    ask(&mut client, &mut server, b"at a");

    let (mut from, mut to) = (&world.a, &world.b);
    for round in 0..4 {
        let inside = to.create(&redis);
        ask(&mut client, &mut server, b"while the copy is being prepared");
        from.close(&redis);
        let saved = save(server);
        // Sent while nobody has the address.
        client.write_all(b"in between").unwrap();
        server = inside.run(|| restore(saved));
        to.open(&redis);
        resume(&server);
        from.set_remote(&redis, to.vtep);
        let answers = |node: &common::Node| node.host.sh("ip neigh show proxy").contains("10.88.0.10");
        assert!(!answers(from) && answers(to), "only the new place answers ARP requests");
        from.remove(&redis);

        server.set_read_timeout(Some(SOON)).unwrap();
        let mut heard = [0; 10];
        server.read_exact(&mut heard).unwrap_or_else(|error| panic!("round {round}: {error}"));
        assert_eq!(&heard, b"in between");
        server.write_all(b"in between").unwrap();
        assert!(comes_back(&mut client, b"in between", SOON), "round {round}");
        assert_eq!(neighbour(&world, redis.address), uplink_mac(to), "round {round}");
        (from, to) = (to, from);
    }
}

fn a_node_that_was_moved_to_and_from_has_nothing_left_of_it(switch: Switch) {
    let world = World::new(switch);
    let empty = [world.a.state(), world.b.state()];
    let web = service("web", 23);
    world.a.create(&web);
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    world.b.create(&web);
    world.a.close(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    world.a.remove(&web);
    world.b.remove(&web);
    world.a.with(async move |overlay: &Overlay| overlay.set_absent(web.address, web.mac).await.unwrap());
    assert_eq!([world.a.state(), world.b.state()], empty);
}

fn frames_that_still_come_to_the_old_node_are_passed_on(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 11);
    world.a.create(&web);
    world.a.open(&web);
    let inside = world.b.create(&web);
    world.a.close(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    world.a.remove(&web);
    let at = echo_server(&inside, web.address, 80);

    // A client that never learns: it believes for good that node a has the address.
    let mac = uplink_mac(&world.a);
    world.client.sh(&format!("ip neigh replace {} lladdr {mac} dev uplink0 nud permanent", web.address));
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, &[3; 200_000], SOON));
}

fn a_prepared_copy_takes_nothing_from_the_original(switch: Switch) {
    let world = World::new(switch);
    let (web, user) = (service("web", 12), service("user", 13));
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    world.b.set_remote(&web, world.a.vtep);
    let inside_user = world.b.create(&user);
    world.b.open(&user);
    world.a.set_remote(&user, world.b.vtep);
    assert!(connect(&inside_user, at, SOON).is_ok());

    world.b.create(&web);
    for from in [&inside_user, &world.b.host, &world.client] {
        let mut connection = connect(from, at, SOON).unwrap();
        assert!(echoes(&mut connection, b"original", SOON), "{}", from.name);
    }
    // The move was called off: the copy goes, and the original is still reached from there.
    world.b.remove(&web);
    assert!(world.b.host.sh("ip neigh show dev gw0 nud permanent").contains("10.88.0.12"));
    for from in [&inside_user, &world.b.host] {
        assert!(connect(from, at, SOON).is_ok(), "{}", from.name);
    }
}

fn a_service_beside_the_old_place_follows_to_the_new_one(switch: Switch) {
    let world = World::new(switch);
    let (web, user) = (service("web", 14), service("user", 15));
    let inside_a = world.a.create(&web);
    world.a.open(&web);
    let inside_user = world.a.create(&user);
    world.a.open(&user);
    let at = echo_server(&inside_a, web.address, 80);
    assert!(connect(&inside_user, at, SOON).is_ok());

    let inside_b = world.b.create(&web);
    world.b.set_remote(&user, world.a.vtep);
    echo_server(&inside_b, web.address, 80);
    world.a.close(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    world.a.remove(&web);
    let mut connection = connect(&inside_user, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"followed", SOON));
}

fn an_absent_service_is_reached_from_nowhere(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 16);
    let inside = world.b.create(&web);
    world.b.open(&web);
    world.a.set_remote(&web, world.b.vtep);
    let at = echo_server(&inside, web.address, 80);
    assert!(connect(&world.a.host, at, SOON).is_ok());
    let before = world.a.state();

    world.a.with(async move |overlay: &Overlay| {
        overlay.set_absent(web.address, web.mac).await.unwrap();
        overlay.set_absent(web.address, web.mac).await.unwrap();
    });
    assert!(connect(&world.a.host, at, A_WHILE).is_err());
    assert!(before.contains("02:67:0a:58:00:10"), "{before}");
    assert!(!world.a.state().contains("02:67:0a:58:00:10"));
}

fn the_gateway_answers_each_service_at_its_own_node_only(switch: Switch) {
    let world = World::new(switch);
    let (web, user) = (service("web", 17), service("user", 18));
    let inside = world.a.create(&web);
    world.a.open(&web);
    world.b.create(&user);
    world.b.open(&user);
    let gateway = "10.88.0.1";
    // The service forgets what it was told, and asks.
    let netns = inside.path.display();
    common::sh(&format!("nsenter --net={netns} ip neigh del {gateway} dev eth0"));
    let sent = received(&world.b, "gwvx0");
    let refused = connect(&inside, (world.a.vtep, 9).into(), SOON).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    let learned = common::sh(&format!("nsenter --net={netns} ip neigh show {gateway}"));
    assert!(learned.contains("02:67:ff:00:00:01"), "{learned}");
    assert_eq!(received(&world.b, "gwvx0"), sent, "something went to the other node");

    // A client has no business with the gateway: no node claims it.
    assert!(connect(&world.client, (std::net::Ipv4Addr::new(10, 88, 0, 1), 9).into(), A_WHILE).is_err());
    let asked = world.client.sh(&format!("ip neigh show {gateway}"));
    assert!(!asked.contains("lladdr"), "{asked}");
}

fn ask(client: &mut TcpStream, server: &mut TcpStream, bytes: &[u8]) {
    client.write_all(bytes).unwrap();
    server.set_read_timeout(Some(SOON)).unwrap();
    let mut heard = vec![0; bytes.len()];
    server.read_exact(&mut heard).unwrap();
    server.write_all(&heard).unwrap();
    assert!(comes_back(client, bytes, SOON));
}

/// Where the client believes the address to be.
fn neighbour(world: &World, address: std::net::Ipv4Addr) -> String {
    let entry = world.client.sh(&format!("ip neigh show {address}"));
    let mut words = entry.split_whitespace().skip_while(|word| *word != "lladdr");
    words.nth(1).unwrap_or_default().to_owned()
}

fn uplink_mac(node: &common::Node) -> String {
    node.host.sh("cat /sys/class/net/uplink0/address").trim().to_owned()
}

fn received(node: &common::Node, interface: &str) -> String {
    node.host.sh(&format!("cat /sys/class/net/{interface}/statistics/rx_packets"))
}

fn what_is_sent_during_a_move_is_held_and_arrives_once_and_in_order(switch: Switch) {
    let mut cut = Cut::new(switch);
    for number in 0..20 {
        cut.send(number);
    }
    // The old place has gone silent, as its sockets must, and the new one speaks.
    cut.world.a.close(&cut.web);
    let after = udp_at(&cut.inside_b, (cut.web.address, 53));
    let handed = cut.world.b.open(&cut.web);
    // Those of the service on the new node come by the old one, and may still be under way.
    assert!((40..=60).contains(&handed.frames) && handed.dropped == 0, "{handed:?}");
    for number in 20..25 {
        // Some still come to the old node, which passes them on.
        cut.send(number);
    }
    cut.world.a.set_remote(&cut.web, cut.world.b.vtep);
    cut.world.a.remove(&cut.web);
    for number in 25..30 {
        cut.send(number);
    }
    cut.arrives(&after, 30);
    assert!(
        cut.before.set_nonblocking(true).is_ok() && cut.before.recv(&mut [0; 64]).is_err(),
        "the old place heard it"
    );
}

fn what_was_sent_during_a_move_that_is_called_off_is_handed_in_at_the_old_place(switch: Switch) {
    let mut cut = Cut::new(switch);
    for number in 0..20 {
        cut.send(number);
    }
    let handed = cut.world.a.open(&cut.web);
    // Those that b's service has sent may still be under way.
    assert!((40..=60).contains(&handed.frames) && handed.dropped == 0, "{handed:?}");
    cut.world.b.remove(&cut.web);
    for number in 20..25 {
        cut.send(number);
    }
    let before = cut.before.try_clone().unwrap();
    cut.arrives(&before, 25);
}

fn what_a_frozen_service_still_sends_leaves_the_old_node_until_it_is_closed(switch: Switch) {
    let cut = Cut::new(switch);
    let client = cut.senders[0].local_addr().unwrap().port();
    let to = (common::CLIENT, client);
    cut.before.send_to(b"acknowledged", to).unwrap();
    cut.senders[0].set_read_timeout(Some(SOON)).unwrap();
    assert_eq!(cut.senders[0].recv(&mut [0; 64]).unwrap(), 12);
    cut.world.a.close(&cut.web);
    cut.before.send_to(b"too late", to).unwrap();
    cut.senders[0].set_read_timeout(Some(A_WHILE)).unwrap();
    assert!(cut.senders[0].recv(&mut [0; 64]).is_err());
}

fn a_service_that_comes_back_at_once_is_sent_each_frame_once(switch: Switch) {
    let mut cut = Cut::new(switch);
    cut.world.a.close(&cut.web);
    cut.world.b.open(&cut.web);
    cut.world.a.set_remote(&cut.web, cut.world.b.vtep);
    cut.world.a.remove(&cut.web);
    // Node a still passes on what comes to it, when it is node b's turn.
    let inside_a = cut.world.a.create(&cut.web);
    cut.world.a.hold(&cut.web);
    cut.world.b.steer(&cut.web, cut.world.a.vtep);
    for number in 0..20 {
        cut.send(number);
    }
    cut.world.b.close(&cut.web);
    let back = udp_at(&inside_a, (cut.web.address, 53));
    cut.world.a.open(&cut.web);
    cut.arrives(&back, 20);
}

fn more_than_can_be_held_is_dropped_and_counted_and_the_oldest_is_kept(switch: Switch) {
    // The kernel's bridge loses nothing on the way.
    let mut cut = Cut::between(Switch::Kernel, switch);
    // Twice the bound, in datagrams of 1300 bytes.
    let count = 2 * (32 << 20) / 1300;
    let at = (cut.web.address, 53);
    for number in 0..count {
        cut.senders[0].send_to(&u32::to_be_bytes(number).repeat(325), at).unwrap();
    }
    cut.world.a.close(&cut.web);
    let after = udp_at(&cut.inside_b, (cut.web.address, 53));
    let handed = cut.world.b.open(&cut.web);
    assert!(handed.frames > 1000 && handed.dropped > 1000, "{handed:?}");
    let mut first = [0; 2000];
    assert_eq!(after.recv(&mut first).unwrap(), 1300);
    assert_eq!(first[..4], [0; 4], "the oldest is kept");
    cut.next.clear();
}

/// A service on node a that is frozen and about to move to node b, and three that send to it: a client, a
/// service beside it, and one at the other node. UDP, which nobody sends again: what is lost stays lost,
/// what is doubled is seen.
struct Cut {
    switch: Switch,
    world: World,
    web: ServiceEndpoint,
    inside_b: Host,
    /// The service's socket where it was.
    before: UdpSocket,
    senders: [UdpSocket; 3],
    next: HashMap<SocketAddr, u32>,
}

impl Cut {
    fn new(switch: Switch) -> Self {
        Self::between(switch, switch)
    }

    fn between(at_a: Switch, switch: Switch) -> Self {
        let world = World::new_with(at_a, switch);
        let (web, near, far) = (service("web", 19), service("near", 20), service("far", 21));
        let inside_a = world.a.create(&web);
        world.a.open(&web);
        let inside_near = world.a.create(&near);
        world.a.open(&near);
        let inside_far = world.b.create(&far);
        world.b.open(&far);
        world.a.set_remote(&far, world.b.vtep);
        world.b.set_remote(&near, world.a.vtep);
        world.b.set_remote(&web, world.a.vtep);

        let datagrams = |host: &Host| host.run(|| UdpSocket::bind("0.0.0.0:0").unwrap());
        let senders = [datagrams(&world.client), datagrams(&inside_near), datagrams(&inside_far)];
        let before = udp_at(&inside_a, (web.address, 53));
        for sender in &senders {
            sender.send_to(b"before", (web.address, 53)).unwrap();
            before.recv(&mut [0; 64]).unwrap();
        }
        let inside_b = world.b.create(&web);
        world.b.hold(&web);
        world.a.steer(&web, world.b.vtep);
        Self { switch, world, web, inside_b, before, senders, next: HashMap::new() }
    }

    fn send(&self, number: u32) {
        for sender in &self.senders {
            let data = number.to_be_bytes().repeat(self.words(number));
            sender.send_to(&data, (self.web.address, 53)).unwrap();
        }
    }

    /// The length of a datagram, in words. The last ones have to be broken up, but for Open vSwitch: its
    /// userspace datapath lets such a one overtake others.
    fn words(&self, number: u32) -> usize {
        let number = if self.switch == Switch::Kernel { number } else { number % 20 };
        1 + number as usize * 16
    }

    /// Datagrams 0 to `count` of each sender come in there, once and in order, and nothing else.
    fn arrives(&mut self, there: &UdpSocket, count: u32) {
        let mut buffer = vec![0; 70_000];
        for _ in 0..3 * count {
            let (length, from) = there.recv_from(&mut buffer).unwrap();
            let expected = self.next.get(&from).copied().unwrap_or(0);
            assert_eq!(buffer[..4], expected.to_be_bytes(), "from {from}");
            assert_eq!(length, 4 * self.words(expected), "from {from}");
            self.next.insert(from, expected + 1);
        }
        assert_eq!(self.next.len(), 3);
        there.set_read_timeout(Some(A_WHILE)).unwrap();
        assert!(there.recv_from(&mut buffer).is_err(), "something arrived twice");
    }
}

fn a_stream_that_was_held_goes_on_where_it_stopped(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 22);
    // A client that sends nothing again for longer than this test waits.
    world.client.sh("ip route change 10.88.0.0/16 dev uplink0 rto_min 60s");
    world.client.sh("sysctl -qw net.ipv4.tcp_early_retrans=0");
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 80);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"before", SOON));

    // The move is called off. A big write leaves the client in few large frames whose check sums
    // and segments are still to be made.
    world.a.steer(&web, world.b.vtep);
    connection.write_all(&[5; 14_000]).unwrap();
    assert!(!comes_back(&mut connection, &[5; 1], A_WHILE), "it was frozen");
    let handed = world.a.open(&web);
    assert!(handed.frames > 0);
    assert!(comes_back(&mut connection, &[5; 14_000], SOON));
}
