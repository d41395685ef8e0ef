//! Services find each other by name: on each of their networks, wherever they are, and as long as they are there. Needs root.

use std::io::Read as _;
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use godwit_lab::NetworkBackend;
use godwit_lab::workload::{Preset, Workload};
use godwit_tests::{Bed, CLIENT, wait_for};
use serde_json::Value;

use crate::engine_nodes::{IMAGE, Nodes};

const DB: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);

/// A service that waits until it is ended.
fn wait(bed: &Bed, preset: &Preset, node: &str, name: &str, more: &[&str]) {
    run(bed, preset, node, name, more, &["sleep", "100000"]);
}

fn run(bed: &Bed, preset: &Preset, node: &str, name: &str, more: &[&str], command: &[&str]) {
    let begin = ["run", "--name", name, "--rootfs", preset.rootfs.to_str().unwrap()];
    bed.done(node, &[&begin[..], more, &["--"], command].concat());
}

/// What a service is told of a name; nothing where it is told that there is none.
fn looked_up(bed: &Bed, node: &str, service: &str, name: &str) -> Option<String> {
    let said = bed.godwit(node, &["exec", service, "--", "nslookup", name]);
    let told = said.stdout.clone();
    assert!(
        told.contains("10.88.0.1") || told.contains("10.89.0.1"),
        "its network's server is asked: {said:?}"
    );
    let (_, answer) = told.split_once("\n\n")?;
    (said.code == 0).then(|| answer.to_owned())
}

fn finds(bed: &Bed, node: &str, service: &str, name: &str, address: &str) {
    let told = looked_up(bed, node, service, name);
    let told = told.unwrap_or_else(|| panic!("{service} on {node} does not find {name}"));
    let line = |line: &str| {
        line.strip_prefix("Address").is_some_and(|rest| match address.strip_suffix('*') {
            Some(beginning) => rest.contains(beginning),
            None => rest.trim_end().ends_with(address),
        })
    };
    assert!(told.lines().any(line), "{service} on {node} asks for {name}: {told}");
}

fn does_not_find(bed: &Bed, node: &str, service: &str, name: &str) {
    assert_eq!(looked_up(bed, node, service, name), None, "{service} on {node} asks for {name}");
}

#[test]
fn services_find_each_other_by_name_wherever_they_are() {
    let mut bed = Bed::up("names");
    bed.done("a", &["network", "create", "back"]);
    let preset = bed.build(Workload::Busybox);
    let server = ["sh", "-c", "while true; do nc -l -p 7000 -e echo found; done"];
    run(&bed, &preset, "a", "db", &["--ip", "10.88.0.10", "--network-alias", "Store"], &server);
    wait(&bed, &preset, "b", "api", &["--network", "default", "--network", "back:ip=10.89.0.7"]);
    wait(&bed, &preset, "b", "apart", &["--network", "back"]);
    bed.knows("b", "db");
    bed.knows("a", "api");
    let shown: Value = bed.json("a", &["inspect", "db"]);
    assert_eq!(shown["aliases"], serde_json::json!(["store"]));

    // By the C library of a program, too, which connects to what it has found.
    let python = bed.build(Workload::Python);
    run(&bed, &python, "b", "program", &[], &["python3", "-c", "import time; time.sleep(100000)"]);
    let line = "import socket; s = socket.create_connection(('db', 7000)); print(s.recv(9), socket.gethostbyaddr('10.88.0.10')[0])";
    let found = wait_for("the server to listen", || {
        let said = bed.godwit("b", &["exec", "program", "--", "python3", "-c", line]);
        (said.code == 0).then_some(said.stdout)
    });
    assert_eq!(found, "b'found\\n' db\n");

    // Only questions to the gateway are led elsewhere: others see the port that they have asked.
    let mut command = bed.lab().command(CLIENT, "python3").unwrap();
    let answers = "import socket
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind(('', 7120))
print()
while True: s.sendto(b'x', s.recvfrom(9)[1])";
    command.args(["-u", "-c", answers]).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut other = command.spawn().unwrap();
    other.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    let asks = "import socket; s = socket.socket(type=socket.SOCK_DGRAM); s.settimeout(9); s.sendto(b'x', ('10.99.0.100', 7120)); print(s.recvfrom(9)[1][1])";
    assert_eq!(bed.done("b", &["exec", "program", "--", "python3", "-c", asks]), "7120\n");
    other.kill().unwrap();
    other.wait().unwrap();
    let rootfs = preset.rootfs.to_str().unwrap();
    let said = bed.godwit("a", &["run", "--rootfs", rootfs, "-p", "7120:80", "--", "sleep", "1"]);
    assert!(said.code != 0 && said.stderr.contains("where godwitd serves names"), "{said:?}");

    for name in ["db", "store", "DB"] {
        finds(&bed, "b", "api", name, &DB.to_string());
    }
    // Each is told of the address on a network that both are on.
    finds(&bed, "b", "apart", "api", "10.89.0.7");
    let shown: Value = bed.json("b", &["inspect", "api"]);
    finds(&bed, "a", "db", "api", shown["networks"][0]["address"].as_str().unwrap());
    does_not_find(&bed, "b", "apart", "db");
    does_not_find(&bed, "a", "db", "apart");

    // Either moves, and the other one's node has changed.
    bed.migrate("db", "a", "b");
    finds(&bed, "b", "api", "db", &DB.to_string());
    finds(&bed, "b", "db", "api", "10.88.0.*");
    bed.migrate("api", "b", "a");
    finds(&bed, "a", "api", "store", &DB.to_string());
    finds(&bed, "a", "api", "apart", "10.89.0.*");

    // A published port 53 is a name server for others.
    wait(&bed, &preset, "a", "dns", &["--publish", "53:53/udp", "--publish", "53:53"]);
    finds(&bed, "a", "api", "dns", "10.88.0.*");

    bed.done("b", &["rm", "--force", "db"]);
    wait_for("node a to hear that db is gone", || looked_up(&bed, "a", "api", "db").is_none().then_some(()));
    bed.install("a", None);
    finds(&bed, "a", "api", "apart", "10.89.0.*");
}

#[test]
fn names_lead_to_ipv6_addresses_too_and_over_open_vswitch() {
    let bed = Bed::up_with("names-six", |config| {
        config.network_backend = NetworkBackend::OpenVswitch;
        config.programs.serve_arguments.extend(["--subnet6", "fd67:6f64::/96"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Busybox);
    wait(&bed, &preset, "a", "db", &["--ip", "10.88.0.10"]);
    wait(&bed, &preset, "b", "api", &[]);
    bed.knows("b", "db");
    for address in ["10.88.0.10", "fd67:6f64::a58:a"] {
        finds(&bed, "b", "api", "db", address);
    }
    let line = ["exec", "api", "--", "nslookup", "fd67:6f64::a58:a"];
    let reversed = bed.done("b", &line);
    assert!(reversed.contains("name = db"), "{reversed}");
    bed.migrate("api", "b", "a");
    finds(&bed, "a", "api", "db", "fd67:6f64::a58:a");
}

#[test]
fn a_firewall_that_drops_questions_leaves_services_the_name_servers_of_their_node() {
    let bed = Bed::up("names-dropped");
    let preset = bed.build(Workload::Busybox);
    let rules = "add table inet strict
        add chain inet strict input { type filter hook input priority 10; }
        add rule inet strict input iifname \"gw*\" udp dport 7120 drop";
    let mut command = bed.lab().command("a", "nft").unwrap();
    assert!(command.arg(rules).status().unwrap().success());
    wait(&bed, &preset, "a", "first", &[]);
    let servers = bed.done("a", &["exec", "first", "--", "cat", "/etc/resolv.conf"]);
    assert!(!servers.contains("10.88.0.1"), "{servers}");
    let said = bed.done("a", &["events"]);
    assert!(said.contains("no names") && said.contains("accept port 7120"), "{said}");
    // The other node's firewall has no such rule.
    wait(&bed, &preset, "b", "second", &[]);
    finds(&bed, "b", "second", "second", "10.88.0.*");
}

/// A program of node a that listens at a port of all addresses, as many name servers do.
fn listens(bed: &Bed, port: u16) -> Child {
    let program = "import socket, sys
kinds = [socket.socket(type=kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_STREAM)]
kinds[1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
[one.bind(('', int(sys.argv[1]))) for one in kinds]
kinds[1].listen()
print()
sys.stdin.read()";
    let mut command = bed.lab().command("a", "python3").unwrap();
    command.args(["-u", "-c", program, &port.to_string()]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
    child
}

#[test]
fn names_are_served_beside_a_name_server_of_the_node() {
    let bed = Bed::up("names-beside");
    let preset = bed.build(Workload::Busybox);
    let mut other = listens(&bed, 53);
    wait(&bed, &preset, "a", "early", &[]);
    finds(&bed, "a", "early", "early", "10.88.0.*");

    // What leads there is made again.
    let mut command = bed.lab().command("a", "nft").unwrap();
    assert!(command.args(["delete", "table", "inet", "godwit_names"]).status().unwrap().success());
    wait_for("godwitd to lead questions to itself again", || {
        let said = bed.godwit("a", &["exec", "early", "--", "nslookup", "early"]);
        (said.code == 0).then_some(())
    });
    bed.lab().stop_node("a").unwrap();
    let mut in_the_way = listens(&bed, 7120);
    bed.lab().start_node("a").unwrap();
    // Nothing is led to whoever has godwitd's port.
    let reason =
        || bed.json::<Value>("a", &["network", "inspect"])["names_reason"].as_str().unwrap().to_owned();
    assert!(
        reason().contains("port 7120 of 10.88.0.1 on") && reason().contains("cannot be taken"),
        "{}",
        reason()
    );
    let mut command = bed.lab().command("a", "nft").unwrap();
    let listed = command.args(["list", "table", "inet", "godwit_names"]).output().unwrap();
    assert!(!listed.status.success(), "{listed:?}");
    in_the_way.kill().unwrap();
    in_the_way.wait().unwrap();
    wait_for("godwitd to have its port", || reason().is_empty().then_some(()));
    wait(&bed, &preset, "a", "late", &[]);
    finds(&bed, "a", "late", "early", "10.88.0.*");
    let shown: Value = bed.json("a", &["network", "inspect"]);
    assert_eq!(shown["names_reason"], "");
    other.kill().unwrap();
    other.wait().unwrap();
}

#[test]
fn without_names_services_have_the_name_servers_of_their_node() {
    let bed = Bed::up_with("names-off", |config| {
        config.programs.serve_arguments.extend(["--dns", "off"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Busybox);
    wait(&bed, &preset, "a", "plain", &[]);
    let servers = bed.done("a", &["exec", "plain", "--", "cat", "/etc/resolv.conf"]);
    assert!(!servers.contains("10.88.0.1"), "{servers}");
    let doctor = bed.godwit("a", &["doctor"]).stdout;
    assert!(doctor.contains("off by --dns off"), "{doctor}");
}

#[test]
fn a_stack_of_podmans_keeps_its_names() {
    a_stack_keeps_its_names("podman");
}

#[test]
fn a_stack_of_dockers_keeps_its_names() {
    a_stack_keeps_its_names("docker");
}

const NETWORK: &str = "godwit-test-names";

/// A network of an engine's on node a. Podman's networks are the machine's, whatever its storage is.
struct OfEngine<'a>(&'a Nodes);

impl<'a> OfEngine<'a> {
    fn new(nodes: &'a Nodes) -> Self {
        // One of a test that was killed.
        nodes.call("a", &["network", "rm", NETWORK]);
        nodes.own("a", &["network", "create", "--subnet", "10.78.0.0/24", NETWORK]);
        Self(nodes)
    }
}

impl Drop for OfEngine<'_> {
    fn drop(&mut self) {
        self.0.call("a", &["network", "rm", "--force", NETWORK]);
    }
}

/// Containers that find each other by the names of their engine's network do so as services.
fn a_stack_keeps_its_names(engine: &str) {
    let nodes = Nodes::up(engine, "names", Workload::Busybox, &[]);
    let bed = &nodes.bed;
    let network = OfEngine::new(&nodes);
    for (name, alias) in [("app-db-1", "db"), ("app-api-1", "api")] {
        let words = ["run", "-d", "--name", name, "--network", NETWORK, "--network-alias", alias, IMAGE];
        nodes.own("a", &[&words[..], &["sleep", "100000"]].concat());
        bed.done("a", &["adopt", &format!("{engine}:{name}"), "--leave-networks"]);
    }
    let address = |of: &str| {
        let shown: Value = bed.json("a", &["inspect", of]);
        assert_eq!(shown["aliases"], serde_json::json!([of.split('-').nth(1).unwrap()]));
        shown["address"].as_str().unwrap().to_owned()
    };
    let (db, api) = (address("app-db-1"), address("app-api-1"));
    let both = |at_db: &str, at_api: &str| {
        for name in ["db", "app-db-1"] {
            finds(bed, at_api, "app-api-1", name, &db);
        }
        finds(bed, at_db, "app-db-1", "api", &api);
    };
    let restart = |node: &str, name: &str| {
        let restarts =
            || -> u64 { bed.json::<Value>(node, &["inspect", name])["restarts"].as_u64().unwrap() };
        let before = restarts();
        nodes.own(node, &["restart", "--time", "0", name]);
        wait_for("godwit to follow the start", || (restarts() > before).then_some(()));
    };
    both("a", "a");
    // The engine writes its own file at each start.
    restart("a", "app-api-1");
    both("a", "a");
    bed.migrate("app-db-1", "a", "b");
    both("b", "a");
    bed.migrate("app-api-1", "a", "b");
    both("b", "b");
    restart("b", "app-db-1");
    both("b", "b");
    // One that the engine makes for godwit, too.
    let run = ["run", "--engine", engine, "--name", "made", "--image", IMAGE, "--", "sleep", "100000"];
    bed.done("a", &run);
    finds(bed, "a", "made", "db", &db);
    bed.migrate("made", "a", "b");
    finds(bed, "b", "made", "api", &api);
    drop(network);
}
