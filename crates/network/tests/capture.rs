//! Captures and connections between real network namespaces.
#![allow(clippy::unwrap_used, missing_docs)]

mod common;

use std::time::Instant;

use godwit_network::capture::{Batch, Capture, Packet, Place, Wanted};
use godwit_network::{Filter, Overlay, ServiceEndpoint, connections};

use common::{Node, SOON, Switch, World, connect, describe, echo_server, echoes, service};

/// From whom the overlay's own frames are by which a switch learns the way (`scout.rs`).
const SCOUT_MAC: [u8; 6] = [0x02, 0x67, 0xfe, 0x00, 0x00, 0x01];

fn wanted(service: &ServiceEndpoint, snaplen: u32, filter: &str) -> Wanted {
    Wanted {
        name: service.name.clone(),
        address: service.address,
        nth: service.nth,
        places: Place::ALL.to_vec(),
        snaplen,
        filter: Filter::parse(filter).unwrap(),
    }
}

fn capture(node: &Node, wanted: Wanted) -> Result<Capture, String> {
    node.with(async move |overlay: &Overlay| overlay.capture(wanted).await.map_err(|error| describe(&error)))
}

/// A capture that looks already.
fn looking(node: &Node, wanted: Wanted) -> Capture {
    let mut capture = capture(node, wanted).unwrap();
    assert_eq!(capture.batches.blocking_recv().unwrap().troubles, [""; 0]);
    capture
}

/// Takes batches until `enough` of all packets so far; these packets, and the last batch.
fn take(capture: &mut Capture, enough: impl Fn(&[Packet]) -> bool) -> (Vec<Packet>, Batch) {
    let begun = Instant::now();
    let mut packets: Vec<Packet> = Vec::new();
    let mut up_to_ns = 0;
    loop {
        let mut batch = capture.batches.blocking_recv().unwrap();
        assert_eq!(batch.troubles, [""; 0]);
        assert!(batch.packets.iter().all(|packet| packet.time_ns >= up_to_ns), "older than was promised");
        up_to_ns = batch.up_to_ns;
        packets.append(&mut batch.packets);
        if enough(&packets) {
            return (packets, batch);
        }
        assert!(begun.elapsed() < SOON, "{} packets, and not those", packets.len());
    }
}

fn carries(packet: &Packet, place: Place, bytes: &[u8]) -> bool {
    packet.place == place && packet.data.windows(bytes.len()).any(|window| window == bytes)
}

common::on_every_switch!(
    a_capture_sees_a_service_from_its_first_frame_at_every_place,
    a_capture_goes_on_where_a_service_is_made_again,
    only_what_passes_the_filter_is_kept_and_no_more_of_it_than_wanted,
    captures_are_limited_in_number_and_make_room_when_they_end,
    connections_are_those_inside_the_service_s_namespace,
);

fn a_capture_sees_a_service_from_its_first_frame_at_every_place(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 40);
    // There is nothing of it yet.
    let mut at_a = looking(&world.a, wanted(&web, 0, ""));
    let mut at_b = looking(&world.b, wanted(&web, 0, ""));
    let names: Vec<_> = at_a.interfaces.iter().map(|(_, name)| name.as_str()).collect();
    assert_eq!((names[0], names[2], names[3]), ("eth0", "gwvx0", common::UPLINK));

    let inside = world.a.create(&web);
    assert_eq!(names[1], world.a.port(&web));
    world.a.open(&web);
    world.b.set_remote(&web, world.a.vtep);
    let at = echo_server(&inside, web.address, 7);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"from the client", SOON));
    let mut connection = connect(&world.b.host, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"from the other node", SOON));

    let (packets, last) = take(&mut at_a, |packets| {
        let seen = |place, bytes: &[u8]| packets.iter().filter(|p| carries(p, place, bytes)).count() >= 2;
        [Place::Service, Place::Port, Place::Uplink].into_iter().all(|place| seen(place, b"from the client"))
            && [Place::Service, Place::Port, Place::Uplink]
                .into_iter()
                .all(|place| seen(place, b"from the other node"))
            // The way back to a node is not through the overlay.
            && packets.iter().any(|packet| carries(packet, Place::Overlay, b"from the other node"))
    });
    assert!(!packets.iter().any(|packet| carries(packet, Place::Overlay, b"from the client")));
    // The node's announcement of the address is the first that passes an open port; Open vSwitch gives no
    // service another's, and so the client's first packet is. The overlay's own frames, by which the switch learns the way,
    // do not count: load decides their order.
    let at_service = packets.iter().filter(|packet| packet.place == Place::Service);
    let first = at_service.filter(|packet| packet.data[6..12] != SCOUT_MAC).min_by_key(|p| p.time_ns);
    let expected = if switch == Switch::Kernel { [0x08, 0x06] } else { [0x08, 0x00] };
    assert_eq!(first.unwrap().data[12..14], expected, "{first:?}");
    // At the service's own interface each way is seen, and as what it is; what TCP repeats under load, again.
    let mut ways: Vec<_> = packets
        .iter()
        .filter(|packet| carries(packet, Place::Service, b"from the client"))
        .map(|packet| packet.outgoing)
        .collect();
    ways.sort_unstable();
    ways.dedup();
    assert_eq!(ways, [false, true]);
    for count in &last.counts {
        let taken = packets.iter().filter(|packet| packet.place == count.place).count();
        assert!(count.received >= taken as u64 && count.dropped == 0, "{count:?}, {taken} taken");
    }
    // The other node sees what it sends, before and after it is wrapped.
    take(&mut at_b, |packets| {
        [Place::Overlay, Place::Uplink]
            .into_iter()
            .all(|place| packets.iter().any(|packet| carries(packet, place, b"from the other node")))
    });
}

fn a_capture_goes_on_where_a_service_is_made_again(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 41);
    let mut capture = looking(&world.a, wanted(&web, 0, ""));
    for word in [&b"the first"[..], b"the second"] {
        let inside = world.a.create(&web);
        world.a.open(&web);
        let at = echo_server(&inside, web.address, 7);
        let mut connection = connect(&world.client, at, SOON).unwrap();
        assert!(echoes(&mut connection, word, SOON));
        take(&mut capture, |packets| packets.iter().any(|packet| carries(packet, Place::Service, word)));
        world.a.remove(&web);
    }
}

fn only_what_passes_the_filter_is_kept_and_no_more_of_it_than_wanted(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 42);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 7);
    let mut capture = looking(&world.a, wanted(&web, 60, "tcp dst port 7"));
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, &[7; 1000], SOON));
    let (packets, _) = take(&mut capture, |packets| packets.iter().any(|packet| packet.length > 1000));
    for packet in packets {
        assert!(packet.data.len() <= 60 && packet.length as usize >= packet.data.len(), "{packet:?}");
        assert_eq!(packet.data[36..38], [0, 7], "{packet:?}");
    }
}

fn captures_are_limited_in_number_and_make_room_when_they_end(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 43);
    let mut captures = Vec::new();
    let refused = loop {
        match capture(&world.a, wanted(&web, 0, "")) {
            Ok(capture) => captures.push(capture),
            Err(refused) => break refused,
        }
    };
    assert!(refused.contains("16 captures run on this node already"), "{refused}");
    assert_eq!(captures.len(), 16);
    captures.pop();
    let begun = Instant::now();
    // Its thread ends when it has something to tell, at the latest after its heartbeat.
    while capture(&world.a, wanted(&web, 0, "")).is_err() {
        assert!(begun.elapsed() < SOON, "no room was made");
        std::thread::yield_now();
    }
}

fn connections_are_those_inside_the_service_s_namespace(switch: Switch) {
    let world = World::new(switch);
    let web = service("web", 44);
    let inside = world.a.create(&web);
    world.a.open(&web);
    let at = echo_server(&inside, web.address, 7);
    let mut connection = connect(&world.client, at, SOON).unwrap();
    assert!(echoes(&mut connection, b"hello", SOON));
    let netns = inside.path.clone();
    let found = world.a.with(async move |_: &Overlay| connections::inside(&netns).await).unwrap();
    let states: Vec<_> = found.states.iter().map(|(state, count)| (*state, *count)).collect();
    assert_eq!(states, [(("tcp", "established"), 1), (("tcp", "listen"), 1)]);
    let ours = found.list.iter().find(|one| one.state == "established").unwrap();
    assert_eq!((ours.local, ours.remote), (at, connection.local_addr().unwrap()));
    assert!(ours.tcp.is_some_and(|tcp| tcp.rtt_us > 0), "{ours:?}");
}
