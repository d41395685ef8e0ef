//! `godwit prepare`: the move that follows sends only what differs; until then the service stays where it is. Needs root.

use std::{
    fs,
    io::{self, BufRead, BufReader, Lines, Read},
    net::Ipv4Addr,
    process::{Child, ChildStdout, Stdio},
};

use godwit_lab::workload::{RedisClient, Workload, resp::Reply};
use godwit_tests::{Bed, CLIENT, PATIENCE, Report, victim::programs_of, wait_for};

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 84);
const FILL: u64 = 64 << 20;
/// The root filesystem has more, and what else crosses of a small service has less.
const FILES: u64 = 4 << 20;
/// A file in a volume.
const LARGE: u64 = 32 << 20;

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
    bed.run("a", "redis", ADDRESS, &preset, &["-v", "data:/srv"]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    let large = bed.scratch().join("large");
    let mut noise = fs::File::open("/dev/urandom").unwrap().take(LARGE);
    io::copy(&mut noise, &mut fs::File::create(&large).unwrap()).unwrap();
    bed.done("a", &["cp", large.to_str().unwrap(), "redis:/srv"]);
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

    // Before anything was written, all is there already. Files wait for the move.
    let again = prepared(&bed, "a", "b");
    assert!(again.memory_wire_bytes < FILL / 10 && again.file_bytes == 0, "{again:?}");
    let report = bed.migrate_so("redis", "a", "b", &["--mode", "precopy", "--compress", "off"]);
    assert!(report.memory_wire_bytes * 20 < report.page_bytes, "{report:?}");
    assert!(report.page_bytes >= FILL, "{report:?}");
    assert!((LARGE..LARGE + FILES).contains(&report.file_bytes), "{report:?}");
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

/// A preparation that takes a minute.
fn slow(bed: &Bed) -> (Child, Lines<BufReader<ChildStdout>>) {
    let arguments = ["--json", "prepare", "redis", "--to", "b", "--max-bandwidth", "1MB/s"];
    let mut child = bed.command("a", &arguments).stdout(Stdio::piped()).spawn().unwrap();
    let mut events = BufReader::new(child.stdout.take().unwrap()).lines();
    events.find(|line| line.as_ref().unwrap().contains(r#""phase":"copy""#)).expect("it copies").unwrap();
    (child, events)
}

/// How a preparation ended that was ended by something else.
fn reason((mut child, events): (Child, Lines<BufReader<ChildStdout>>)) -> String {
    let last = events.last().unwrap().unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{last}");
    let report: Report = serde_json::from_str(&last).unwrap();
    assert_eq!(report.outcome, "aborted", "{last}");
    report.reason
}

/// What node b has of a preparation.
fn left_on_b(bed: &Bed) -> usize {
    let pagers = std::path::Path::new("/run/godwit/labs").join(bed.lab().name()).join("b/pagers");
    let directories = fs::read_dir(&pagers).map_or(0, Iterator::count);
    directories + programs_of(bed, "b", "godwit-pager").len()
}

#[test]
fn a_preparation_ends_with_whoever_asked_for_it_and_gives_way_to_a_move() {
    let bed = Bed::up("prepint");
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, preset.at(ADDRESS), PATIENCE).unwrap();
    data.fill(FILL).unwrap();

    let (mut child, _events) = slow(&bed);
    assert!(left_on_b(&bed) > 0);
    // The service is as free as before, but for a second preparation.
    assert_eq!(bed.done("a", &["exec", "redis", "--", "redis-cli", "ping"]), "PONG\n");
    let refused = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("is being prepared already"), "{refused:?}");
    let id = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(id, rustix::process::Signal::INT).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_for("the preparation to end", || (left_on_b(&bed) == 0).then_some(()));
    data.check_fill(FILL).unwrap();

    // The destination's daemon dies: the next one ends what was left to it.
    let preparation = slow(&bed);
    bed.lab().stop_node("b").unwrap();
    let why = reason(preparation);
    println!("b died: {why}");
    bed.lab().start_node("b").unwrap();
    wait_for("the pager to end", || (left_on_b(&bed) == 0).then_some(()));
    bed.knows("b", "redis");

    // What needs the service's memory for itself ends a preparation.
    let preparation = slow(&bed);
    let file = bed.scratch().join("redis.tar.zst");
    bed.done("a", &["checkpoint", "redis", "-R", "--tcp-established", "-o", file.to_str().unwrap()]);
    assert!(reason(preparation).contains("cancelled"));
    data.check_fill(FILL).unwrap();

    let preparation = slow(&bed);
    bed.migrate("redis", "a", "b");
    assert!(reason(preparation).contains("cancelled"));
    data.check_fill(FILL).unwrap();
    // Where it is already it cannot be prepared for; nor for a node that there is not.
    for (to, words) in [("b", "is on node b already"), ("nix", "no node nix")] {
        let refused = bed.godwit("b", &["prepare", "redis", "--to", to]);
        assert!(refused.code == 1 && refused.stderr.contains(words), "{refused:?}");
    }
}

#[test]
fn where_there_is_no_room_nothing_is_prepared() {
    let bed = Bed::up_with("prepnone", |config| {
        config.programs.serve_arguments.extend(["--retained-memory", "0"].map(str::to_owned));
    });
    let preset = bed.build(Workload::Redis);
    bed.run("a", "redis", ADDRESS, &preset, &[]);
    let refused = bed.godwit("a", &["prepare", "redis", "--to", "b"]);
    assert!(refused.code == 1 && refused.stderr.contains("node b has no room"), "{refused:?}");
    bed.migrate("redis", "a", "b");
}
