//! Tests of what a node is called and where it is reached.

use super::*;

fn at(text: &str) -> Ipv4Addr {
    text.parse().unwrap()
}

/// `INTERFACE ADDRESS/PREFIX`
fn address(text: &str) -> HostAddress {
    let (interface, address) = text.split_once(' ').unwrap();
    let (address, prefix) = address.split_once('/').unwrap();
    HostAddress { interface: interface.into(), address: at(address), prefix: prefix.parse().unwrap() }
}

/// As `ip route` shows it: `DESTINATION/PREFIX or default`, then of `via`, `dev`, `src` and `metric` what there is.
fn route(text: &str) -> HostRoute {
    let words: Vec<_> = text.split(' ').collect();
    let after = |name| words.windows(2).find(|two| two[0] == name).map(|two| two[1]);
    let (destination, prefix) = words[0].split_once('/').unwrap_or(("0.0.0.0", "0"));
    HostRoute {
        destination: at(destination),
        prefix: prefix.parse().unwrap(),
        interface: after("dev").unwrap().into(),
        gateway: after("via").map(at),
        source: after("src").map(at),
        metric: after("metric").map_or(0, |metric| metric.parse().unwrap()),
    }
}

fn network(addresses: &[&str], routes: &[&str]) -> HostNetwork {
    let addresses: Vec<_> = addresses.iter().copied().map(address).collect();
    let names: BTreeSet<_> = addresses.iter().map(|address| address.interface.clone()).collect();
    HostNetwork {
        addresses,
        interfaces: names.into_iter().collect(),
        routes: routes.iter().copied().map(route).collect(),
    }
}

/// A machine with a network for clients, one for storage, and a bridge of containers.
fn usual() -> HostNetwork {
    network(
        &["ens3 192.0.2.7/24", "ens4 198.51.100.7/24", "docker0 172.17.0.1/16"],
        &[
            "default via 192.0.2.254 dev ens3 metric 100",
            "192.0.2.0/24 dev ens3 src 192.0.2.7 metric 100",
            "198.51.100.0/24 dev ens4 src 198.51.100.7",
            "172.17.0.0/16 dev docker0 src 172.17.0.1",
        ],
    )
}

fn founder(address: &str) -> Toward {
    Toward::Founder(at(address))
}

fn place(listen: &str, uplink: &str) -> Place {
    Place { listen: listen.parse().unwrap(), uplink: Some(uplink.into()) }
}

fn asked(listen: Option<&str>, uplink: Option<&str>) -> Asked {
    Asked {
        name: None,
        listen: listen.map(|listen| listen.parse().unwrap()),
        uplink: uplink.map(str::to_owned),
    }
}

/// The error, which names a flag to give.
fn refused(network: &HostNetwork, toward: Toward, flag: &str) -> String {
    let error = asked(None, None).place_in(network, toward).unwrap_err().to_string();
    assert!(error.contains(flag), "{error}");
    error
}

#[test]
fn a_founder_is_reached_where_its_default_route_leads() {
    let none = asked(None, None);
    assert_eq!(none.place_in(&usual(), Toward::Outside).unwrap(), place("192.0.2.7:7117", "ens3"));
    // As DHCP clients write it: what the route says counts.
    let mut said = usual();
    said.addresses.push(address("ens3 192.0.2.8/24"));
    said.routes.push(route("default via 192.0.2.254 dev ens3 src 192.0.2.8 metric 50"));
    assert_eq!(none.place_in(&said, Toward::Outside).unwrap(), place("192.0.2.8:7117", "ens3"));
    // An address of another subnet, as one that moves between two machines, is not the one that the gateway reaches.
    let mut virtual_too = usual();
    virtual_too.addresses.push(address("ens3 203.0.113.1/32"));
    assert_eq!(none.place_in(&virtual_too, Toward::Outside).unwrap(), place("192.0.2.7:7117", "ens3"));
    // The metric decides between cable and radio.
    let mut radio = usual();
    radio.addresses.push(address("wlan0 203.0.113.7/24"));
    radio.routes.insert(0, route("default via 203.0.113.254 dev wlan0 metric 600"));
    assert_eq!(none.place_in(&radio, Toward::Outside).unwrap(), place("192.0.2.7:7117", "ens3"));
}

#[test]
fn a_node_that_joins_is_reached_where_its_route_to_the_founder_leads() {
    let none = asked(None, None);
    for (toward, expected) in [
        ("198.51.100.1", place("198.51.100.7:7117", "ens4")),
        ("192.0.2.1", place("192.0.2.7:7117", "ens3")),
        ("203.0.113.1", place("192.0.2.7:7117", "ens3")),
    ] {
        assert_eq!(none.place_in(&usual(), founder(toward)).unwrap(), expected, "{toward}");
    }
    assert_eq!(Toward::founder("192.0.2.1:7118").unwrap(), founder("192.0.2.1"));
    let error = Toward::founder("[fd00::1]:7118").unwrap_err().to_string();
    assert!(error.contains("[fd00::1]:7118") && error.contains("--listen ADDRESS:7117"), "{error}");
}

#[test]
fn a_machine_without_a_default_route_is_reached_at_its_only_address() {
    let routes = ["192.0.2.0/24 dev uplink0 src 192.0.2.7"];
    let one = network(&["uplink0 192.0.2.7/24"], &routes);
    let none = asked(None, None);
    assert_eq!(none.place_in(&one, Toward::Outside).unwrap(), place("192.0.2.7:7117", "uplink0"));
    let two = network(&["uplink0 192.0.2.7/24", "gw0 10.88.0.1/16"], &routes);
    let error = refused(&two, Toward::Outside, "--listen ADDRESS:7117");
    assert!(error.contains("192.0.2.7 and 10.88.0.1"), "{error}");
    refused(&network(&[], &[]), Toward::Outside, "--listen ADDRESS:7117");
    // Whoever joins must reach the founder.
    let error = refused(&one, founder("203.0.113.1"), "--listen ADDRESS:7117");
    assert!(error.contains("the founding node at 203.0.113.1"), "{error}");
}

#[test]
fn what_the_network_leaves_open_is_an_error_that_names_the_flag() {
    let mut equal = usual();
    equal.routes.push(route("default via 198.51.100.254 dev ens4 metric 100"));
    let error = refused(&equal, Toward::Outside, "--uplink");
    assert!(error.contains("ens3 and ens4"), "{error}");
    let chosen = asked(None, Some("ens4")).place_in(&equal, Toward::Outside).unwrap();
    assert_eq!(chosen, place("198.51.100.7:7117", "ens4"));

    let mut two = usual();
    two.addresses.push(address("ens3 192.0.2.8/24"));
    let error = refused(&two, Toward::Outside, "--listen ADDRESS:7117");
    assert!(error.contains("ens3") && error.contains("192.0.2.7 and 192.0.2.8"), "{error}");
    let chosen = asked(Some("192.0.2.8:7117"), None).place_in(&two, Toward::Outside).unwrap();
    assert_eq!(chosen, place("192.0.2.8:7117", "ens3"));

    let mut bare = usual();
    bare.addresses.remove(0);
    refused(&bare, Toward::Outside, "--uplink");

    let mut shared = usual();
    shared.addresses.push(address("ens5 192.0.2.7/24"));
    let error = refused(&shared, Toward::Outside, "--uplink");
    assert!(error.contains("ens3 and ens5"), "{error}");

    let error = asked(None, Some("eth9")).place_in(&usual(), Toward::Outside).unwrap_err().to_string();
    assert!(error.contains("eth9") && error.contains("--uplink"), "{error}");
}

#[test]
fn flags_win_over_the_record_and_the_record_over_the_network() {
    let name = NodeName::new("a").unwrap();
    let own = |asked: Asked, recorded| asked.own_in(&usual(), &name, recorded, None);
    let recorded = Some(place("192.0.2.7:7117", "ens4"));
    let of = |listen: &str, uplink: &str| Own {
        name: "a".into(),
        listen: listen.parse().unwrap(),
        uplink: uplink.into(),
    };
    assert_eq!(own(asked(None, None), recorded.clone()).unwrap(), of("192.0.2.7:7117", "ens4"));
    assert_eq!(own(asked(None, Some("ens3")), recorded.clone()).unwrap(), of("192.0.2.7:7117", "ens3"));
    let other = asked(Some("198.51.100.7:1"), None);
    assert_eq!(own(other, recorded).unwrap(), of("198.51.100.7:1", "ens4"));
    // Founded with an address that the machine did not have yet.
    let later = Some(Place { listen: "198.51.100.7:7117".parse().unwrap(), uplink: None });
    assert_eq!(own(asked(None, None), later).unwrap(), of("198.51.100.7:7117", "ens4"));
    let never = Some(Place { listen: "203.0.113.9:7117".parse().unwrap(), uplink: None });
    let error = own(asked(None, None), never).unwrap_err().to_string();
    assert!(error.contains("203.0.113.9") && error.contains("--uplink"), "{error}");
}

#[test]
fn a_node_of_a_godwit_without_records_is_reached_as_before() {
    let name = NodeName::new("a").unwrap();
    let mut machine = usual();
    let last = Some("192.0.2.7:7117".parse().unwrap());
    let uplink = |machine: &HostNetwork| asked(None, None).own_in(machine, &name, None, last).unwrap().uplink;
    assert_eq!(uplink(&machine), "ens3");
    // What it had without --uplink, whatever the address.
    machine.interfaces.push("eth0".into());
    assert_eq!(uplink(&machine), "eth0");
    let own = asked(Some("198.51.100.7:7117"), None).own_in(&machine, &name, None, None).unwrap();
    assert_eq!(own.uplink, "eth0");
    let error = asked(None, None).own_in(&machine, &name, None, None).unwrap_err().to_string();
    assert!(error.contains("node a") && error.contains("--listen"), "{error}");
}

#[test]
fn a_record_is_read_as_it_was_written() {
    let directory = tempfile::tempdir().unwrap();
    assert_eq!(Place::recorded(directory.path()).unwrap(), None);
    let first = Place { listen: "192.0.2.7:7117".parse().unwrap(), uplink: None };
    for written in [first, place("192.0.2.8:7117", "ens3")] {
        written.record(directory.path()).unwrap();
        assert_eq!(Place::recorded(directory.path()).unwrap(), Some(written));
    }
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    fs::write(directory.path().join(RECORD), "{").unwrap();
    let error = Place::recorded(directory.path()).unwrap_err().to_string();
    assert!(error.contains("own.json") && error.contains("--listen and --uplink"), "{error}");
}

#[test]
fn a_founders_name_is_a_valid_one_or_the_flag_is_named() {
    let named = |name: &str| Asked { name: Some(name.into()), ..Asked::default() }.name_of_founder();
    assert_eq!(named("a").unwrap().as_str(), "a");
    assert!(named("A.example").is_err());
    assert_eq!(name_from_host("node-1").unwrap().as_str(), "node-1");
    for host in ["node.example", "Node", ""] {
        let error = name_from_host(host).unwrap_err().to_string();
        assert!(error.contains("--name"), "{host:?}: {error}");
    }
}
