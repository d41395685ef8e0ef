//! `godwit prepare`: the move that follows sends only what differs; until then the service stays where it is. Needs root.

use std::{
    io::{BufRead, BufReader},
    net::Ipv4Addr,
    process::Stdio,
};

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, PATIENCE, Report, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 84);
const FILL: u64 = 64 << 20;
/// The root filesystem has more, and what else crosses of a small service has less.
const FILES: u64 = 4 << 20;

fn three(name: &str) -> Bed {
    Bed::up_with(name, |config| {
        config.nodes.push("c".into());
        config.programs.serve_arguments.extend(["--verbs-from", "all"].map(str::to_owned));
    })
}

fn prepared(bed: &Bed, node: &str, to: &str) -> Report {
    let text = bed.done(node, &["--json", "prepare", "redis", "--to", to]);
    let report: Report = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(report.outcome, "prepared", "{report:?}");
    report
}

#[test]
fn a_move_that_was_prepared_sends_only_what_differs() {
    let bed = three("prepare");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let said = bed.done("a", &["prepare", "redis", "--to", "b,c"]);
    let lines: Vec<_> = said.lines().collect();
    assert!(
        lines[0].starts_with("redis can move to b: ") && lines[1].starts_with("redis can move to c: "),
        "{said}"
    );
    // It has stayed, with its name and address, and nothing keeps it from being used.
    data.check_fill(FILL).unwrap();
    assert_eq!(bed.done("a", &["exec", "redis", "--", "redis-cli", "ping"]), "PONG\n");
    for node in ["b", "c"] {
        let seen: serde_json::Value = bed.json(node, &["ps", "-a"]);
        assert_eq!(
            (seen[0]["node"].as_str(), seen[0]["state"].as_str()),
            (Some("a"), Some("remote")),
            "{seen}"
        );
    }

    // Before anything was written, all is there already.
    let again = prepared(&bed, "a", "b");
    assert!(again.memory_wire_bytes < FILL / 10 && again.file_bytes < FILES, "{again:?}");
    let report = bed.migrate_so("redis", "a", "b", &["--mode", "precopy", "--compress", "off"]);
    assert!(report.memory_wire_bytes * 20 < report.page_bytes, "{report:?}");
    assert!(report.page_bytes >= FILL && report.file_bytes < FILES, "{report:?}");
    data.check_fill(FILL).unwrap();

    // Any node can be asked. What has been written since it was prepared the first time crosses, and only that.
    data.call(&["SET", "later", &"x".repeat(8 << 20)]).unwrap();
    let fresh = prepared(&bed, "a", "c");
    assert_eq!((fresh.source.as_str(), fresh.destination.as_str()), ("b", "c"));
    assert!(fresh.memory_wire_bytes < FILL / 4, "{fresh:?}");
    let report = bed.migrate_so("redis", "b", "c", &["--mode", "postcopy", "--compress", "off"]);
    assert!(report.memory_wire_bytes * 20 < report.page_bytes, "{report:?}");
    data.check_fill(FILL).unwrap();
    assert_eq!(data.call(&["STRLEN", "later"]).unwrap(), Reply::Integer(8 << 20));
}

#[test]
fn a_preparation_that_is_interrupted_leaves_nothing() {
    let bed = Bed::up("prepint");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let mut command =
        bed.command("a", &["--json", "prepare", "redis", "--to", "b", "--max-bandwidth", "1MB/s"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut events = BufReader::new(child.stdout.take().unwrap()).lines();
    events.find(|line| line.as_ref().unwrap().contains(r#""phase":"copy""#)).expect("it copies").unwrap();
    // A second one is not begun beside it.
    let refused = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("redis"), "{refused:?}");
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    data.check_fill(FILL).unwrap();
    // The destination drops what it had of it, and takes it when it comes.
    wait_for("the move", || (bed.godwit("a", &["migrate", "redis", "--to", "b"]).code == 0).then_some(()));
    data.check_fill(FILL).unwrap();
    // Where it is already it cannot be prepared for; nor for a node that there is not.
    for (to, words) in [("b", "is on node b already"), ("nix", "no node nix")] {
        let refused = bed.godwit("b", &["prepare", "redis", "--to", to]);
        assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
    }
}
