//! What users change of a container in godwit's care by `docker rename` and `docker update`, or those of Podman: it moves along.
//! Needs root, Podman and Docker.

use godwit_lab::workload::Workload;
use godwit_tests::wait_for;
use serde_json::{Value, json};

use crate::engine_nodes::{ADDRESS, Engine, IMAGE, Nodes};

/// Limits, in the engines' words and in bytes.
const FIRST: &str = "64m";
const SECOND: (&str, &str, u64) = ("96m", "160m", 96 << 20);
const THIRD: (&str, &str, u64) = ("128m", "256m", 128 << 20);

#[test]
fn what_was_changed_of_a_container_by_docker_itself_moves_along() {
    move_along("docker");
}

#[test]
fn what_was_changed_of_a_container_by_podman_itself_moves_along() {
    move_along("podman");
}

/// A container by its name.
fn inspect(nodes: &Nodes, node: &str, name: &str) -> Value {
    let all: Value = serde_json::from_str(&nodes.own(node, &["container", "inspect", name])).unwrap();
    all[0].clone()
}

/// The memory limit that the kernel has for a container's processes.
fn limit_of(inspected: &Value) -> u64 {
    let pid = inspected["State"]["Pid"].as_u64().unwrap();
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let path = |controller: &str| {
        text.lines().find_map(|line| {
            let (of, path) = line.split_once(':')?.1.split_once(':')?;
            of.split(',').any(|name| name == controller).then(|| path.to_owned())
        })
    };
    let file = match path("memory") {
        Some(path) => format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"),
        None => format!("/sys/fs/cgroup{}/memory.max", path("").unwrap()),
    };
    std::fs::read_to_string(file).unwrap().trim().parse().unwrap()
}

fn move_along(engine: &str) {
    let nodes = Nodes::up(engine, "changed", Workload::Redis, &[]);
    let preset = &nodes.preset;
    let mut words = vec!["run", "--detach", "--name", "cache", "--network", "none", "--memory", FIRST];
    words.extend(preset.env.iter().flat_map(|entry| ["--env", entry]));
    words.extend(preset.user.iter().flat_map(|user| ["--user", user]));
    words.push(IMAGE);
    words.extend(preset.command.iter().map(String::as_str));
    nodes.own("a", &words);
    let (container, address) = (format!("{engine}:cache"), ADDRESS.to_string());
    nodes.bed.done("a", &["adopt", &container, "--ip", &address]);
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();

    let is_docker = matches!(nodes.engine, Engine::Docker(_));
    let change =
        |node: &str, (old, new): (&str, &str), (memory, swap, bytes): (&str, &str, u64), cpus: &str| {
            nodes.own(node, &["rename", old, new]);
            let mut words = vec!["update", "--memory", memory, "--memory-swap", swap, "--cpus", cpus];
            words.extend(["--cpu-shares", "512", "--cpuset-cpus", "0", "--memory-reservation", "32m"]);
            if is_docker {
                words.extend(["--pids-limit", "100", "--restart", "on-failure:3"]);
            }
            nodes.own(node, &[&words[..], &[new]].concat());
            assert_eq!(limit_of(&inspect(&nodes, node, new)), bytes, "{engine} has changed it");
        };
    let has = |node: &str, name: &str, (_, _, bytes): (&str, &str, u64), swap: u64, quota: u64| {
        let (own, other) = (nodes.listed(node), nodes.listed(if node == "a" { "b" } else { "a" }));
        assert_eq!((own, other), (format!("{name} running\n"), String::new()));
        let there = inspect(&nodes, node, name);
        let host = &there["HostConfig"];
        assert_eq!((&host["Memory"], &host["MemorySwap"]), (&json!(bytes), &json!(swap)), "{host}");
        assert_eq!(
            (&host["CpusetCpus"], &host["MemoryReservation"]),
            (&json!("0"), &json!(32 << 20)),
            "{host}"
        );
        let shares = host["CpuShares"].as_u64().unwrap();
        // Weights of cgroup version 2 are coarser.
        assert!((512..540).contains(&shares), "{host}");
        match is_docker {
            true => {
                assert_eq!(host["NanoCpus"], json!(quota * 10_000), "{host}");
                assert_eq!((shares, &host["PidsLimit"]), (512, &json!(100)), "{host}");
                wait_for("its restart policy", || {
                    let now = inspect(&nodes, node, name)["HostConfig"]["RestartPolicy"].clone();
                    (now == json!({ "Name": "on-failure", "MaximumRetryCount": 3 })).then_some(())
                });
            }
            false => assert_eq!(
                (&host["CpuQuota"], &host["CpuPeriod"]),
                (&json!(quota), &json!(100_000)),
                "{host}"
            ),
        }
        assert_eq!(limit_of(&there), bytes);
        assert_eq!(nodes.is_shown(node, "running")["memory_bytes"].as_u64(), Some(bytes));
    };
    change("a", ("cache", "store"), SECOND, "0.5");
    assert_eq!(nodes.bed.check("a", &["cache", "--to", "b"]).code, 0);
    nodes.bed.migrate("cache", "a", "b");
    has("b", "store", SECOND, 160 << 20, 50_000);
    lasting.call(&["PING"]).unwrap();
    // The same of one that has come.
    change("b", ("store", "cache"), THIRD, "0.75");
    nodes.bed.migrate("cache", "b", "a");
    has("a", "cache", THIRD, 256 << 20, 75_000);
    lasting.call(&["PING"]).unwrap();
    nodes.down();
}
