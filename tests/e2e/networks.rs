//! Several networks: made and removed on all nodes, kept apart, and a service on two of them moves with both.
//! Needs root.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream},
};

use godwit_lab::{
    NetworkBackend,
    workload::{Preset, Workload},
};
use godwit_tests::{Bed, CLIENT, wait_for};
use serde_json::Value;

const PORT: u16 = 6379;
const FRONT: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
const BACK: Ipv4Addr = Ipv4Addr::new(10, 89, 0, 10);

/// A service that waits until it is ended, on one network.
fn wait_on(bed: &Bed, preset: &Preset, node: &str, name: &str, network: &str) {
    let rootfs = preset.rootfs.to_str().unwrap();
    let run = ["run", "--name", name, "--network", network, "--rootfs", rootfs, "--", "/bin/sleep", "100000"];
    bed.done(node, &run);
}

/// Whether a service gets a connection to an address.
fn reaches(bed: &Bed, node: &str, from: &str, to: Ipv4Addr) -> bool {
    let line = format!("nc -w 1 {to} {PORT} </dev/null");
    let said = bed.godwit(node, &["exec", from, "--", "sh", "-c", &line]);
    assert!(said.code == 0 || said.code == 1, "{said:?}");
    said.code == 0
}

/// Counts at one of the addresses of the service.
struct Counter(TcpStream);

impl Counter {
    fn next(&mut self) -> u64 {
        self.0.write_all(b"INCR counter\r\n").unwrap();
        let mut answer = String::new();
        BufReader::new(&mut self.0).read_line(&mut answer).unwrap();
        answer.trim().strip_prefix(':').unwrap_or_else(|| panic!("{answer}")).parse().unwrap()
    }
}

#[test]
fn a_service_on_two_networks_moves_with_both_and_others_stay_apart() {
    let bed = Bed::up("networks");
    assert_eq!(bed.done("a", &["network", "create", "back"]), "back\n");
    for node in ["a", "b"] {
        let networks: Value = bed.json(node, &["network", "ls"]);
        let (name, subnet) = (&networks[1]["network"]["name"], &networks[1]["network"]["subnet"]);
        assert_eq!((name, subnet), (&"back".into(), &"10.89.0.0/24".into()), "{node}: {networks}");
        assert_eq!(networks[1]["reason"], "", "{node}: {networks}");
    }
    let redis = bed.build(Workload::Redis);
    let back = format!("back:ip={BACK}");
    let front = format!("default:ip={FRONT}");
    let mut both = vec!["run", "--name", "both", "--network", &front, "--network", &back];
    both.extend(["--rootfs", redis.rootfs.to_str().unwrap()]);
    both.extend(redis.env.iter().flat_map(|entry| ["--env", entry]));
    both.push("--");
    both.extend(redis.command.iter().map(String::as_str));
    bed.done("a", &both);
    bed.knows("b", "both");
    let service: Value = bed.json("b", &["inspect", "both"]);
    let names: Vec<_> = service["networks"].as_array().unwrap().iter().map(|n| &n["network"]).collect();
    assert_eq!(names, ["default", "back"], "{service}");
    assert_eq!(
        (&service["networks"][1]["address"], &service["address"]),
        (&BACK.to_string().into(), &FRONT.to_string().into())
    );

    let busybox = bed.build(Workload::Busybox);
    wait_on(&bed, &busybox, "b", "infront", "default");
    wait_on(&bed, &busybox, "b", "behind", "back");
    let mut counters = [FRONT, BACK].map(|at| Counter(bed.connect(SocketAddrV4::new(at, PORT))));
    let mut expected = 0;
    let mut check = |when: &str| {
        for counter in &mut counters {
            expected += 1;
            assert_eq!(counter.next(), expected, "{when}");
        }
        for (from, to, so) in [
            ("infront", FRONT, true),
            ("infront", BACK, false),
            ("behind", BACK, true),
            ("behind", FRONT, false),
        ] {
            match so {
                // A SYN that comes late on a busy machine is repeated after a second.
                true => wait_for(&format!("{from} to reach {to} {when}"), || {
                    reaches(&bed, "b", from, to).then_some(())
                }),
                false => assert!(!reaches(&bed, "b", from, to), "{when}: {from} to {to}"),
            }
        }
    };
    check("before");
    bed.move_to_and_fro("both", |number, _| check(&format!("move {number}")));
    for node in ["a", "b"] {
        let info: Value = bed.json(node, &["network", "inspect", "back"]);
        assert_eq!((&info["subnet"], &info["guarded"]), (&"10.89.0.0/24".into(), &true.into()), "{info}");
        assert!(node == "a" || info["crossing"].as_u64().unwrap() > 0, "{info}");
    }
    capture(&bed, &mut counters[1]);

    // A network that services are on stays.
    for node in ["a", "b"] {
        let refused = bed.godwit(node, &["network", "rm", "back"]);
        assert_eq!(refused.code, 1);
        assert!(refused.stderr.contains("services are on it: behind, both"), "{}", refused.stderr);
    }
    bed.done("a", &["rm", "--force", "both"]);
    bed.done("b", &["rm", "--force", "infront", "behind"]);
    wait_for("b to hear that both is gone", || {
        (bed.godwit("b", &["inspect", "both"]).code != 0).then_some(())
    });
    assert_eq!(bed.done("b", &["network", "rm", "back"]), "back\n");
    assert_networks(&bed, 1);
    // Nodes hear of it in several ways at once. Whoever said it, it holds on all of them when the command ends.
    for round in 0..10 {
        let node = ["a", "b"][round % 2];
        bed.done(node, &["network", "create", "back"]);
        assert_networks(&bed, 2);
        bed.done(node, &["network", "rm", "back"]);
        assert_networks(&bed, 1);
    }
}

/// Every node knows so many networks, and has the interfaces of each: a bridge and a VXLAN.
fn assert_networks(bed: &Bed, number: usize) {
    for node in ["a", "b"] {
        let networks: Value = bed.json(node, &["network", "ls"]);
        assert_eq!(networks.as_array().unwrap().len(), number, "{node}: {networks}");
        let links = bed.lab().inside(node, interfaces).unwrap();
        let own = links.iter().filter(|name| name.starts_with("gw")).count();
        assert_eq!(own, 2 * number, "{node}: {links:?}");
    }
}

/// The names of the interfaces where it is called.
fn interfaces() -> Vec<String> {
    let table = fs::read_to_string("/proc/thread-self/net/dev").unwrap();
    table.lines().filter_map(|line| Some(line.split_once(':')?.0.trim().to_owned())).collect()
}

/// Of a service on two networks one is looked at, by its own interface.
fn capture(bed: &Bed, counter: &mut Counter) {
    let file = bed.scratch().join("back.pcap");
    let file = file.to_str().unwrap();
    let arguments = ["capture", "both", "--network", "back", "--count", "2", "--output", file, "--json"];
    let mut capture = bed.command("a", &arguments).stdout(std::process::Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(capture.stdout.take().unwrap()).lines().map_while(Result::ok);
    let looking = lines.next().unwrap();
    assert!(looking.contains("capturing"), "{looking}");
    counter.next();
    let summary = lines.last().unwrap();
    assert!(summary.contains("\"a:eth1\""), "{summary}");
    assert!(capture.wait().unwrap().success());
    let written = fs::read(file).unwrap();
    assert!(written.windows(4).any(|bytes| bytes == b"INCR"));
}

#[test]
fn networks_outlive_daemons_and_what_cannot_be_is_said() {
    // With what is between nodes encrypted, all networks are.
    let bed = Bed::up_with("netsagain", |config| {
        config.programs.serve_arguments.extend(["--encrypt", "auto"].map(str::to_owned));
    });
    let busybox = bed.build(Workload::Busybox);
    let refused = |node: &str, arguments: &[&str], words: &str| {
        let said = bed.godwit(node, arguments);
        assert_ne!(said.code, 0, "{arguments:?}");
        assert!(said.stderr.contains(words), "{arguments:?}: {}", said.stderr);
    };
    refused("a", &["network", "create", "default"], "the network default exists already, with 10.88.0.0/16");
    refused("a", &["network", "create", "ns"], "cannot be a network's name");
    refused(
        "a",
        &["network", "create", "x", "--subnet", "10.88.7.0/24"],
        "overlaps 10.88.0.0/16 of the network default",
    );
    refused(
        "a",
        &["network", "create", "x", "--subnet", "10.99.0.0/24"],
        "overlaps the route to 10.99.0.0/24",
    );
    refused("a", &["network", "create", "x", "--vni", "88"], "network default has the number 88 already");
    refused("a", &["network", "rm", "default"], "cannot be removed");
    refused("a", &["network", "rm", "x"], "there is no network x");
    refused("a", &["network", "inspect", "x"], "there is no network x");

    bed.done("a", &["network", "create", "back", "--subnet", "10.89.5.0/24", "--subnet6", "fd67:6f65::/96"]);
    refused("b", &["network", "create", "back"], "the network back exists already");
    let rootfs = busybox.rootfs.to_str().unwrap();
    let run = |networks: &[&str]| {
        let flags = networks.iter().flat_map(|network| ["--network", network]);
        let mut arguments = vec!["run", "--name", "svc", "--rootfs", rootfs];
        arguments.extend(flags);
        arguments.extend(["--", "/bin/sh", "-c", "echo here > /index.html && httpd -f -p 6379 -h /"]);
        arguments.into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    for (networks, words) in [
        (vec!["nowhere"], "there is no network nowhere"),
        (vec!["back", "back"], "network back is given twice"),
        (vec!["back:ip=10.88.0.9"], "outside the services' subnet 10.89.5.0/24"),
        (vec!["back:ip=10.89.5.1"], "gateway"),
        (vec!["ns:/run/netns/x", "back"], "is not a network"),
    ] {
        let arguments = run(&networks);
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        refused("a", &arguments, words);
    }
    let arguments = run(&["back"]);
    bed.done("a", &arguments.iter().map(String::as_str).collect::<Vec<_>>());
    bed.knows("b", "svc");
    let service: Value = bed.json("b", &["inspect", "svc"]);
    assert_eq!(service["networks"][0]["address6"], "fd67:6f65::a59:502", "{service}");
    wait_on(&bed, &busybox, "b", "peer", "back");
    let at = Ipv4Addr::new(10, 89, 5, 2);
    wait_for("the service", || reaches(&bed, "b", "peer", at).then_some(()));
    for node in ["a", "b"] {
        bed.lab().restart_node(node).unwrap();
        // Nodes agree on keys first.
        wait_for(&format!("the service after a restart of {node}"), || {
            reaches(&bed, "b", "peer", at).then_some(())
        });
    }
    bed.migrate("svc", "a", "b");
    wait_for("the service", || reaches(&bed, "b", "peer", at).then_some(()));
    // Who is not there cannot be asked.
    bed.lab().stop_node("b").unwrap();
    refused("a", &["network", "create", "more"], "node b does not answer");
    refused("a", &["network", "rm", "back"], "services are on it: peer, svc");
    bed.lab().start_node("b").unwrap();
    // A node on which the network cannot be says so, lets no service in that needs it, and gets it in the end.
    let on_a = |line: &str| {
        let mut words = line.split(' ');
        let mut command = bed.lab().command("a", words.next().unwrap()).unwrap();
        assert!(command.args(words).status().unwrap().success(), "{line}");
    };
    let route = |verb: &str| on_a(&format!("ip route {verb} 10.89.5.128/25 dev uplink0"));
    let vni = vni(&bed);
    bed.lab().stop_node("a").unwrap();
    match bed.lab().config().network_backend {
        NetworkBackend::Kernel => on_a(&format!("ip link delete gw{vni:x}")),
        NetworkBackend::OpenVswitch => on_a(&format!("ovs-vsctl del-br gw{vni:x}")),
    }
    on_a(&format!("ip link delete gwvx{vni:x}"));
    route("add");
    bed.lab().start_node("a").unwrap();
    let networks = bed.done("a", &["network", "ls"]);
    assert!(networks.contains("down (it is not up on node a"), "{networks}");
    let kept = bed.godwit("b", &["migrate", "svc", "--to", "a"]);
    assert_eq!(kept.code, 1);
    let why = "node a: the address 10.89.5.2 is of none of this node's networks";
    assert!(kept.stdout.contains(why) || kept.stderr.contains(why), "{kept:?}");
    route("delete");
    wait_for("the network", || (!bed.done("a", &["network", "ls"]).contains("down")).then_some(()));
    bed.migrate("svc", "b", "a");
    wait_for("the service", || reaches(&bed, "b", "peer", at).then_some(()));
    let client = bed.lab().inside(CLIENT, || TcpStream::connect((at, PORT)).is_ok()).unwrap();
    assert!(client, "clients reach services on every network");
}

/// The number of the second network.
fn vni(bed: &Bed) -> u64 {
    let networks: Value = bed.json("b", &["network", "ls"]);
    networks[1]["network"]["vni"].as_u64().unwrap()
}
