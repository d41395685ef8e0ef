//! A service in a network namespace that somebody else made, whose addresses somebody else moves, with
//! hooks that tell them when. Needs root.

use std::fs;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::process::Command;

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::hooks::{EVERY_MOMENT, Hooks};
use godwit_tests::{Bed, CLIENT, PATIENCE};
use serde_json::Value;

const PORT: u16 = 6379;

/// What somebody else has: a namespace for each node, with the same address, and programs for hooks.
struct Others {
    hooks: Hooks,
}

impl Others {
    /// Before the nodes' daemons start, so that they see the mounts.
    fn new() -> Self {
        let others = Self { hooks: Hooks::default() };
        for node in ["a", "b"] {
            fs::write(others.namespace(node), "").unwrap();
            sh(&format!("unshare --net={} ip link set lo up", others.namespace(node)));
        }
        others
    }

    fn namespace(&self, node: &str) -> String {
        self.hooks.scratch().join(node).to_str().unwrap().to_owned()
    }

    /// Joins each namespace to its node. The address is answered for by none of them yet.
    fn join(&self, bed: &Bed, address: Ipv4Addr) {
        for node in ["a", "b"] {
            let (inside, host) = (self.namespace(node), bed.lab().namespace(node).unwrap());
            let (host, gateway) = (host.display(), bed.lab().address(node).unwrap());
            sh(&format!(
                "nsenter --net={host} ip link add name others type veth peer name eth0
                 nsenter --net={host} sh -c 'ip link set eth0 netns /proc/self/fd/9' 9<{inside}
                 nsenter --net={host} ip link set others up
                 nsenter --net={host} ip route add {address}/32 dev others
                 nsenter --net={inside} ip address add {address}/32 dev eth0
                 nsenter --net={inside} ip link set eth0 up
                 nsenter --net={inside} ip route add {gateway}/32 dev eth0
                 nsenter --net={inside} ip route add default via {gateway} dev eth0"
            ));
        }
    }

    /// From now on this node answers for the address, and no other.
    fn take(&self, bed: &Bed, node: &str, address: Ipv4Addr) {
        for each in ["a", "b"] {
            let host = bed.lab().namespace(each).unwrap();
            let what = if each == node { "add" } else { "del" };
            let done =
                format!("nsenter --net={} ip neigh {what} proxy {address} dev uplink0", host.display());
            let _ = Command::new("sh").args(["-c", &done]).output().unwrap();
        }
        let client = bed.lab().namespace(CLIENT).unwrap();
        sh(&format!("nsenter --net={} ip neigh flush all", client.display()));
    }

    /// Neither namespace keeps what held connections over its loopback interface in a move.
    fn have_nothing_of_the_standstill(&self) {
        for node in ["a", "b"] {
            godwit_tests::wait_for(&format!("a namespace at {node} as it was"), || {
                let look = "nft list tables; ip -d link show lo";
                let inside = format!("--net={}", self.namespace(node));
                let output = Command::new("nsenter").args([&inside, "sh", "-ec", look]).output().unwrap();
                let seen = String::from_utf8(output.stdout).unwrap();
                (!seen.contains("godwit-loopback") && seen.contains("group default")).then_some(())
            });
        }
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for node in ["a", "b"] {
            let _ = Command::new("umount").args(["-l", &self.namespace(node)]).output();
        }
    }
}

fn sh(script: &str) {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    assert!(output.status.success(), "{script}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_service_in_a_namespace_of_somebody_elses_moves_with_its_connections() {
    let others = Others::new();
    let at = others.hooks.scratch();
    let bed = Bed::up_with("namespaces", |config| {
        config.programs.serve_arguments.extend(["--namespaces", at.to_str().unwrap()].map(str::to_owned));
        config.programs.serve_arguments.extend(others.hooks.arguments());
    });
    let [first, second, third, _] = bed.lab().address("a").unwrap().octets();
    let address = Ipv4Addr::new(first, second, third, 200);
    others.join(&bed, address);
    others.take(&bed, "a", address);

    let preset = bed.build(Workload::Redis);
    let namespace = |node: &str| format!("ns:{}", others.namespace(node));
    let mut run = vec!["run", "--name", "redis", "--rootfs", preset.rootfs.to_str().unwrap()];
    let (inside, elsewhere) = (namespace("a"), "ns:/proc/1/ns/net".to_owned());
    let command: Vec<&str> = preset.command.iter().map(String::as_str).collect();
    // The node's own namespace is nobody's to run in.
    run.extend(["--network", &elsewhere, "--"]);
    let refused = bed.godwit("a", &[run.as_slice(), &command].concat());
    assert!(refused.code != 0 && refused.stderr.contains("is not directly in"), "{}", refused.stderr);
    run.truncate(5);
    run.extend(["--network", &inside]);
    run.extend(EVERY_MOMENT);
    run.push("--");
    bed.done("a", &[run.as_slice(), &command].concat());

    let connect =
        || RedisClient::connect(bed.lab(), CLIENT, SocketAddrV4::new(address, PORT), PATIENCE).unwrap();
    let mut client = connect();
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(1));
    let service: Value = bed.json("a", &["inspect", "redis"]);
    assert_eq!((&service["network"], &service["address"]), (&inside.as_str().into(), &"".into()));
    let established = &service["connections"]["states"]["tcp"]["established"];
    assert!(established.as_u64().is_some_and(|count| count >= 1), "{service}");
    let file = bed.scratch().join("none.pcapng");
    let refused = bed.godwit("a", &["capture", "redis", "-o", file.to_str().unwrap()]);
    assert!(refused.code == 1 && refused.stderr.contains("nsenter"), "{}", refused.stderr);

    // Nobody has made the other one known: it is refused before anything happens.
    let unknown = bed.godwit("a", &["migrate", "redis", "--to", "b", "--network", &format!("{inside}-not")]);
    assert!(unknown.code == 1 && unknown.stderr.contains("nothing is there"), "{}", unknown.stderr);

    let there = namespace("b");
    let moved = bed.godwit("a", &["migrate", "redis", "--to", "b", "--network", &there]);
    assert_eq!(moved.code, 0, "{}", moved.stderr);
    assert!(moved.stderr.contains("Its addresses are yours to move"), "{}", moved.stderr);
    others.take(&bed, "b", address);
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(2), "over the same connection");

    others.have_nothing_of_the_standstill();

    let told = godwit_tests::wait_for("the hook of the destination", || {
        Some(others.hooks.states()).filter(|s| s.len() == 2)
    });
    let of = |state: &Value, what: &str| state["annotations"][format!("godwit.{what}")].clone();
    for (state, hook, namespace) in [(&told[0], "pre-freeze", "a"), (&told[1], "post-resume", "b")] {
        assert_eq!((&state["id"], &state["status"]), (&"redis".into(), &"running".into()), "{state}");
        assert_eq!(
            [of(state, "hook"), of(state, "source"), of(state, "destination")],
            [hook, "a", "b"],
            "{state}"
        );
        assert_eq!(of(state, "network-namespace"), others.namespace(namespace).as_str(), "{state}");
        assert!(state["pid"].as_u64().unwrap() > 0, "{state}");
    }

    // A hook that fails before the freeze keeps the service, and the one for that is told.
    others.hooks.then(
        "case $state in *pre-freeze*) [ -e $at/fine ] || { echo the switch is not ready >&2; exit 1; };; esac",
    );
    let kept = bed.godwit("b", &["migrate", "redis", "--to", "a", "--network", &inside]);
    assert!(kept.code == 1 && kept.stderr.contains("the switch is not ready"), "{}", kept.stderr);
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(3), "where it was");
    others.have_nothing_of_the_standstill();
    assert_eq!(of(others.hooks.states().last().unwrap(), "hook"), "aborted");
    fs::write(at.join("fine"), "").unwrap();
    bed.migrate_so("redis", "b", "a", &["--network", &inside]);
    others.take(&bed, "a", address);
    assert_eq!(client.call(&["INCR", "counter"]).unwrap(), Reply::Integer(4), "at its first place");
    others.have_nothing_of_the_standstill();
}
