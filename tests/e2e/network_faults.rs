//! What is in the way of the overlay: said before anything is frozen, and mended where that can be
//! done. Needs root.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddrV4, TcpStream, UdpSocket},
    process::{Child, Command, Output},
    time::Duration,
};

use godwit_lab::{
    Lab,
    workload::{Preset, Workload},
};
use godwit_tests::{
    Bed, CLIENT, PATIENCE, Said, TRIES,
    victim::{self, Victim},
    wait_for,
};
use serde_json::Value;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 70);
const OTHER: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 71);
const COMMAND: &str = "mkdir -p /www && echo served inside > /www/index.html && exec httpd -f -p 80 -h /www";

/// A lab with a web server on node `a`, and what it runs.
fn bed(test: &str, serve_arguments: &[&str]) -> (Bed, Preset) {
    let bed = Bed::up_with(test, |config| {
        config.programs.serve_arguments.extend(serve_arguments.iter().copied().map(str::to_owned));
    });
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["/bin/sh", "-c", COMMAND].map(str::to_owned).to_vec();
    serve(&bed, &preset, "a", "web", ADDRESS);
    (bed, preset)
}

fn serve(bed: &Bed, preset: &Preset, node: &str, name: &str, address: Ipv4Addr) {
    bed.run(node, name, address, preset, &[]);
    is_served(bed, CLIENT, address);
}

/// Waits until a host is served by the service at the address.
fn is_served(bed: &Bed, host: &str, address: Ipv4Addr) {
    wait_for(&format!("an answer of {address} to {host}"), || {
        let to = SocketAddrV4::new(address, 80).into();
        let once = || TcpStream::connect_timeout(&to, Duration::from_secs(1)).ok();
        let mut stream = bed.lab().inside(host, once).unwrap()?;
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.write_all(b"GET /index.html HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        answer.ends_with("served inside\n").then_some(())
    });
}

/// Runs a command on a host of the lab that must succeed.
fn on(bed: &Bed, host: &str, command: &str) -> String {
    let words: Vec<_> = command.split(' ').collect();
    let output = bed.lab().command(host, words[0]).unwrap().args(&words[1..]).output().unwrap();
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Moves the service from `a` to `b`, which must keep it; why. It must not have been frozen.
fn kept(bed: &Bed) -> String {
    let said: Said = bed.godwit("a", &["--json", "migrate", "web", "--to", "b"]);
    let report = said.report();
    assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{said:?}");
    assert!(report.frozen_ms == 0.0, "it was frozen: {report:?}");
    is_served(bed, CLIENT, ADDRESS);
    report.reason
}

fn moves_in_the_end(bed: &Bed) {
    bed.migrate("web", "a", "b");
    is_served(bed, CLIENT, ADDRESS);
    is_served(bed, "a", ADDRESS);
    bed.migrate("web", "b", "a");
    is_served(bed, CLIENT, ADDRESS);
    is_served(bed, "b", ADDRESS);
}

#[test]
fn a_vxlan_port_that_somebody_has_is_named_at_the_start() {
    let (bed, _) = bed("port", &[]);
    bed.lab().stop_node("b").unwrap();
    on(&bed, "b", "ip link del gwvx0");
    let holder = bed.lab().inside("b", || UdpSocket::bind("0.0.0.0:4789").unwrap()).unwrap();
    let message = bed.lab().start_node("b").unwrap_err().to_string();
    let process = format!("in use by the process {} (", std::process::id());
    for words in ["UDP port 4789", &process, "--vxlan-port"] {
        assert!(message.contains(words), "{words}: {message}");
    }
    drop(holder);
    bed.lab().start_node("b").unwrap();
    moves_in_the_end(&bed);
}

#[test]
fn an_overlay_with_another_mtu_is_no_destination() {
    let (bed, _) = bed("mtu", &[]);
    let restart_with = |mtu: &str| {
        bed.lab().stop_node("b").unwrap();
        on(&bed, "b", &format!("ip link set dev uplink0 mtu {mtu}"));
        bed.lab().start_node("b").unwrap();
    };
    let mtu: Value = bed.json("b", &["network", "inspect"]);
    assert_eq!(mtu["mtu"], 1450, "{mtu}");
    restart_with("1400");
    let reason = kept(&bed);
    assert_eq!(
        reason,
        "node b refuses: services have an MTU of 1350 on node b and of 1450 on node a; give the uplinks of \
         all nodes the same MTU and restart godwitd there"
    );
    let state = wait_for("what a has heard of b", || {
        let info: Value = bed.json("a", &["network", "inspect"]);
        let state = node(&info, "b");
        (state["mtu"] == 1350).then_some(state)
    });
    assert_eq!(state["state"], "differs", "{state}");

    bed.lab().stop_node("b").unwrap();
    on(&bed, "b", "ip link set dev uplink0 mtu 600");
    let message = bed.lab().start_node("b").unwrap_err().to_string();
    assert!(message.contains("uplink0 has an MTU of 600"), "{message}");
    on(&bed, "b", "ip link set dev uplink0 mtu 1500");
    bed.lab().start_node("b").unwrap();
    moves_in_the_end(&bed);
}

/// A node as `godwit network inspect` shows it.
fn node(info: &Value, name: &str) -> Value {
    let nodes = info["nodes"].as_array().unwrap();
    nodes.iter().find(|node| node["name"] == name).unwrap_or_else(|| panic!("{name}: {info}")).clone()
}

#[test]
fn a_bridge_that_is_missing_at_the_destination_is_made_again_or_the_service_stays() {
    let (bed, _) = bed("bridge", &[]);
    // Something else has its name: nothing that godwit would remove.
    on(&bed, "b", "ip link add name other type veth peer name third");
    let at_once = bed.scratch().join("at-once");
    // Between two commands it would be made again now and then.
    std::fs::write(&at_once, "link del gw0\nlink set other name gw0\n").unwrap();
    on(&bed, "b", &format!("ip -batch {}", at_once.display()));
    let reason = kept(&bed);
    assert!(
        reason.starts_with("node b refuses: the overlay of node b is broken: ") && reason.contains("gw0"),
        "{reason}"
    );
    on(&bed, "b", "ip link del gw0");
    bed.migrate("web", "a", "b");
    is_served(&bed, CLIENT, ADDRESS);
    let events = bed.done("b", &["events"]);
    assert!(events.contains("mended") && events.contains("the bridge gw0 is missing"), "{events}");
    // Where it runs, it is made again and the service plugged in, without anybody asking.
    on(&bed, "b", "ip link del gw0");
    is_served(&bed, CLIENT, ADDRESS);
    is_served(&bed, "a", ADDRESS);
    on(&bed, "b", "ip link del gwvx0");
    is_served(&bed, "a", ADDRESS);
    bed.migrate("web", "b", "a");
    is_served(&bed, CLIENT, ADDRESS);
    is_served(&bed, "b", ADDRESS);
}

#[test]
fn an_address_that_a_foreign_host_has_on_the_destinations_segment() {
    let (bed, _) = bed("address", &[]);
    on(&bed, CLIENT, "ip address add 10.88.0.70/32 dev uplink0");
    let mac = on(&bed, CLIENT, "ip -o link show uplink0");
    let mac = mac.split("link/ether ").nth(1).unwrap().split(' ').next().unwrap();
    // A host has 60 ms to answer: now and then too little, where it is a busy machine that answers.
    let asked = (0..TRIES).find_map(|_| {
        let said = bed.godwit("a", &["--json", "migrate", "web", "--to", "b"]);
        let found = said.code != 0;
        if !found {
            bed.migrate("web", "b", "a");
        }
        found.then_some(said)
    });
    let said = asked.expect("the host is found");
    let report = said.report();
    assert_eq!((said.code, report.outcome.as_str()), (1, "aborted"), "{said:?}");
    let expected = format!(
        "node b refuses: the address 10.88.0.70 is in use on the network of node b: a host with the \
         link-layer address {mac} answers for it on uplink0; "
    );
    assert!(report.reason.starts_with(&expected), "{}", report.reason);
    assert!(report.frozen_ms == 0.0, "{report:?}");
    on(&bed, CLIENT, "ip address del 10.88.0.70/32 dev uplink0");
    moves_in_the_end(&bed);
}

#[test]
fn a_stranger_is_kept_out_by_the_nodes_own_filter() {
    let (bed, preset) = bed("stranger", &[]);
    serve(&bed, &preset, "b", "other", OTHER);
    let info: Value = bed.json("a", &["network", "inspect"]);
    assert_eq!((&info["guarded"], &info["encryption"]), (&Value::from(true), &Value::from("off")), "{info}");
    assert_eq!(node(&info, "b")["state"], "clear", "{info}");
    // Between the nodes services go through; the client's frames do not.
    is_served(&bed, "a", OTHER);
    is_served(&bed, "b", ADDRESS);
    let vtep = bed.lab().address("a").unwrap();
    let own = bed.lab().address(CLIENT).unwrap();
    let remote = format!("local {own} remote {vtep} nolearning");
    on(&bed, CLIENT, &format!("ip link add rogue type vxlan id 88 dstport 4789 {remote}"));
    on(&bed, CLIENT, "ip address add 10.88.0.99/32 dev rogue");
    on(&bed, CLIENT, "ip link set rogue up");
    let stranger = bed.lab().inside(CLIENT, || UdpSocket::bind("10.88.0.99:0").unwrap()).unwrap();
    on(&bed, CLIENT, "ip route add 10.88.0.70/32 dev rogue src 10.88.0.99");
    on(&bed, CLIENT, "ip neigh add 10.88.0.70 lladdr 02:67:0a:58:00:46 dev rogue");
    let dropped = |info: &Value| info["dropped"].as_u64().unwrap();
    let before = dropped(&info);
    for number in 1..=3 {
        stranger.send_to(b"frame", (ADDRESS, 80)).unwrap();
        wait_for("a dropped frame", || {
            let info: Value = bed.json("a", &["network", "inspect"]);
            (dropped(&info) >= before + number).then_some(())
        });
    }
    on(&bed, CLIENT, "ip link del rogue");
    // Whoever removes the filter finds it again soon.
    on(&bed, "a", "nft delete table inet godwit_guard");
    wait_for("the filter", || {
        let info: Value = bed.json("a", &["network", "inspect"]);
        info["guarded"].as_bool().unwrap().then_some(())
    });
    moves_in_the_end(&bed);
}

/// The other node as `at` sees it, as soon as there are keys for it.
fn encrypted(bed: &Bed, at: &str, of: &str) -> Value {
    wait_for("keys", || {
        let info: Value = bed.json(at, &["network", "inspect"]);
        let node = node(&info, of);
        (node["state"] == "encrypted").then(|| node.clone())
    })
}

/// A lab that encrypts so, with a service on each node.
fn encrypting_bed(test: &str, how: &str) -> Bed {
    let (bed, preset) = bed(test, &["--encrypt", how]);
    serve(&bed, &preset, "b", "other", OTHER);
    let info: Value = bed.json("a", &["network", "inspect"]);
    assert_eq!((&info["encryption"], &info["mtu"]), (&Value::from(how), &Value::from(1390)), "{info}");
    bed
}

fn reached_between_nodes_and_moves(bed: &Bed) {
    is_served(bed, "a", OTHER);
    is_served(bed, "b", ADDRESS);
    moves_in_the_end(bed);
}

#[test]
fn encrypted_services_move_and_are_reached_between_nodes_also_after_a_restart() {
    let bed = encrypting_bed("private", "tunnel");
    let packets = |at: &str, of: &str| encrypted(&bed, at, of)["packets"].as_u64().unwrap();
    let before = packets("a", "b");
    is_served(&bed, "a", OTHER);
    assert!(packets("a", "b") > before);
    let table = bed.done("a", &["network", "inspect"]);
    assert!(table.contains("tunnel") && table.contains("encrypted"), "{table}");
    reached_between_nodes_and_moves(&bed);
    bed.lab().restart_node("b").unwrap();
    packets("b", "a");
    reached_between_nodes_and_moves(&bed);
    let log = std::fs::read_to_string(bed.lab().log("b").unwrap()).unwrap();
    assert!(!log.to_lowercase().contains("secret"), "{log}");
}

/// The kernel goes on while a daemon does not run: what nodes send each other is not interrupted.
#[test]
#[ignore = "needs a kernel with WireGuard: make test-machines"]
fn services_encrypted_by_wireguard_move_and_a_restart_of_a_daemon_loses_nothing() {
    let bed = encrypting_bed("wireguard", "wireguard");
    let bytes = |at: &str, of: &str| encrypted(&bed, at, of)["sent_bytes"].as_u64().unwrap();
    let before = bytes("a", "b");
    is_served(&bed, "a", OTHER);
    assert!(bytes("a", "b") > before);
    let table = bed.done("a", &["network", "inspect"]);
    assert!(table.contains("wireguard") && table.contains("encrypted"), "{table}");
    reached_between_nodes_and_moves(&bed);

    // Without a daemon, and with one that has just begun.
    bed.lab().stop_node("b").unwrap();
    for _ in 0..3 {
        is_served(&bed, "a", OTHER);
    }
    bed.lab().start_node("b").unwrap();
    is_served(&bed, "a", OTHER);
    assert!(bytes("b", "a") > 0);
    // A session of the device, not one that was made anew with it.
    assert!(bytes("a", "b") > before, "the counts went on");
    reached_between_nodes_and_moves(&bed);

    // Somebody removes the device: it is made again, with a new key that the other node is told.
    on(&bed, "b", "ip link del gwwg0");
    wait_for("the device", || on(&bed, "b", "ip -o link show").contains("gwwg0").then_some(()));
    is_served(&bed, "a", OTHER);
    reached_between_nodes_and_moves(&bed);
    assert_eq!(check(&bed, "a", "encryption")["status"], "ok");
    assert_eq!(check(&bed, "a", "wireguard")["status"], "ok");
}

/// What the doctor of a node says of something.
fn check(bed: &Bed, at: &str, name: &str) -> Value {
    let doctor: Value = serde_json::from_str(&bed.godwit(at, &["--json", "doctor"]).stdout).unwrap();
    let checks = doctor["checks"].as_array().unwrap();
    checks.iter().find(|check| check["name"] == name).unwrap().clone()
}

#[test]
fn a_busy_client_notices_nothing_of_moves_between_nodes_that_encrypt() {
    let victim = Victim::up_with(
        "privbusy",
        |config, _| config.programs.serve_arguments.extend(["--encrypt", "tunnel"].map(str::to_owned)),
        |_| Vec::new(),
    );
    for (from, to) in [("a", "b"), ("b", "a")] {
        victim.bed.migrate(victim::NAME, from, to);
        victim.runs_at(to);
    }
    victim.moves_in_the_end();
}

#[test]
fn encryption_that_this_node_does_not_have_is_refused_at_the_start() {
    let (bed, _) = bed("refused", &[]);
    bed.lab().stop_node("b").unwrap();
    let mut refused =
        vec![("ipsec", "Error: this godwit does not encrypt by IPsec; start godwitd on all nodes with")];
    if !has_wireguard() {
        refused.push(("wireguard", "Error: the kernel of this node has no WireGuard"));
    }
    for (how, sentence) in refused {
        let mut godwitd = bed.lab().command("b", godwit_tests::programs().join("godwitd")).unwrap();
        let (state, run) = (bed.lab().state("b").unwrap(), bed.lab().socket("b").unwrap());
        godwitd.args(["serve", "--node", "b", "--encrypt", how, "--uplink", "uplink0"]);
        godwitd.args(["--listen", &format!("{}:7117", bed.lab().address("b").unwrap())]);
        godwitd.arg("--state").arg(state).arg("--run").arg(run.parent().unwrap());
        let output = godwitd.output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{message}");
        assert!(message.contains(sentence), "{message}");
    }
    bed.lab().start_node("b").unwrap();
    moves_in_the_end(&bed);
}

/// Whether this machine's kernel has WireGuard.
fn has_wireguard() -> bool {
    Command::new("modprobe").args(["--quiet", "wireguard"]).status().is_ok_and(|status| status.success())
}

#[test]
fn of_two_nodes_only_one_encrypts_and_both_say_so() {
    let (bed, _) = bed("differs", &[]);
    bed.lab().stop_node("b").unwrap();
    let record = bed.lab().state("b").unwrap().with_file_name("lab.json");
    let clear = std::fs::read_to_string(&record).unwrap();
    let mut changed: Value = serde_json::from_str(&clear).unwrap();
    changed["config"]["programs"]["serve_arguments"] = serde_json::json!(["--encrypt", "tunnel"]);
    std::fs::write(&record, changed.to_string()).unwrap();
    Lab::open(bed.lab().name()).unwrap().start_node("b").unwrap();
    let reason = kept(&bed);
    assert_eq!(
        reason,
        "node b refuses: node b encrypts packets by WireGuard in user space and node a sends packets in the clear; start godwitd on \
         all nodes with the same --encrypt"
    );
    for (at, of, words) in [("a", "b", "node a sends packets in the clear"), ("b", "a", "node b encrypts")] {
        let info: Value = wait_for("what the nodes have heard of each other", || {
            let info: Value = bed.json(at, &["network", "inspect"]);
            (node(&info, of)["mtu"] != 0 && node(&info, of)["state"] != "clear").then_some(info)
        });
        let node = node(&info, of);
        assert_eq!(node["state"], "differs", "{node}");
        assert!(node["reason"].as_str().unwrap().contains(words), "{node}");
    }
    bed.lab().stop_node("b").unwrap();
    std::fs::write(&record, clear).unwrap();
    bed.lab().start_node("b").unwrap();
    moves_in_the_end(&bed);
}

/// A daemon that the test started by itself; it ends with the test.
struct Daemon(Child);

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `godwitd VERB` for a node of a lab without daemons. It is not told where other nodes reach it.
fn godwitd(bed: &Bed, node: &str, verb: &str) -> Command {
    let mut command = bed.lab().command(node, godwit_tests::programs().join("godwitd")).unwrap();
    command.arg(verb).arg("--state").arg(bed.lab().state(node).unwrap());
    command
}

fn start(bed: &Bed, node: &str) -> Daemon {
    let run = bed.lab().socket(node).unwrap().parent().unwrap().to_owned();
    std::fs::create_dir_all(&run).unwrap();
    let log = std::fs::File::create(bed.lab().log(node).unwrap()).unwrap();
    let mut command = godwitd(bed, node, "serve");
    command.arg("--run").arg(run).stderr(log);
    let daemon = Daemon(command.spawn().unwrap());
    wait_for("the daemon", || (bed.godwit(node, &["nodes"]).code == 0).then_some(()));
    daemon
}

/// What `godwitd init` or `join` prints of its node's address, and what is to be done where systemd does not do it.
fn tells_its_place(bed: &Bed, node: &str, output: &Output) {
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stdout);
    let place = format!("at {}:7117, by the interface uplink0\n", bed.lab().address(node).unwrap());
    assert!(said.starts_with(&format!("node {node} has ")) && said.contains(&place), "{said}");
    assert!(said.contains("start its daemon with `godwitd serve --state /"), "{said}");
}

#[test]
fn who_joins_a_cluster_that_encrypts_encrypts_without_being_told() {
    let bed = Bed::up_with("founded", |config| config.daemons = false);
    for node in ["a", "b"] {
        std::fs::create_dir_all(bed.lab().state(node).unwrap()).unwrap();
    }
    let output = godwitd(&bed, "a", "init").args(["--name", "a", "--encrypt", "ipsec"]).output().unwrap();
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && message.contains("does not encrypt by IPsec"), "{message}");
    let output = godwitd(&bed, "a", "init").args(["--name", "a", "--encrypt", "auto"]).output().unwrap();
    tells_its_place(&bed, "a", &output);
    let _a = start(&bed, "a");
    let token = bed.done("a", &["cluster", "token", "b"]);
    let output = godwitd(&bed, "b", "join").args(["--", token.trim()]).output().unwrap();
    tells_its_place(&bed, "b", &output);
    let _b = start(&bed, "b");
    for (at, of) in [("a", "b"), ("b", "a")] {
        wait_for("keys", || {
            let info: Value = bed.json(at, &["network", "inspect"]);
            assert_eq!(info["encryption"], if has_wireguard() { "wireguard" } else { "tunnel" }, "{info}");
            let nodes = info["nodes"].as_array().unwrap();
            nodes.iter().any(|node| node["name"] == of && node["state"] == "encrypted").then_some(())
        });
    }
}
