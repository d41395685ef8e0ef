//! `godwit node`: a node takes no more services, and those that it has leave it. Needs root.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use godwit_lab::workload::{Preset, Workload};
use godwit_tests::hold::Points;
use godwit_tests::{Bed, Said, is_passing, wait_for};
use serde_json::Value;

use crate::place::{Client, NAME, start};

/// Three nodes.
fn bed(lab: &str, flags: &[&str], change: impl FnOnce(&mut godwit_lab::LabConfig)) -> Bed {
    Bed::up_with(lab, |config| {
        config.nodes.push("c".into());
        // That keeps no service on a node that is to become empty.
        let arguments = ["--busy-permille", "990"].iter().chain(flags).map(ToString::to_string);
        config.programs.serve_arguments.extend(arguments);
        change(config);
    })
}

/// What does nothing.
fn idle(bed: &Bed) -> Preset {
    let mut preset = bed.build(Workload::Busybox);
    preset.command = ["sh", "-c", "exec sleep 100000"].map(str::to_owned).to_vec();
    preset
}

fn at(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 88, 0, last)
}

/// Drains a node, once no other node was silent for too long, as on a busy machine.
fn drained(bed: &Bed, node: &str, more: &[&str]) -> Said {
    wait_for("a drain among nodes that are heard of", || {
        let said = bed.godwit(node, &[&["node", "drain", node], more].concat());
        let all = format!("{}{}", said.stdout, said.stderr);
        (!all.contains("last heard from") && !is_passing(&all)).then_some(said)
    })
}

/// Waits until a node takes another one for cordoned, or not.
fn knows(bed: &Bed, node: &str, of: &str, cordoned: bool) {
    wait_for("news of a node", || {
        let nodes = bed.json::<Vec<Value>>(node, &["nodes"]);
        nodes.iter().any(|told| told["name"] == of && told["cordoned"] == cordoned).then_some(())
    });
}

fn is_on(bed: &Bed, name: &str) -> String {
    wait_for("the place of a service", || {
        let told: Value = serde_json::from_str(&bed.godwit("a", &["--json", "inspect", name]).stdout).ok()?;
        Some(told["node"].as_str()?.to_owned())
    })
}

fn refused(said: &Said, node: &str) {
    let why = format!("node {node} is cordoned: it takes no services until `godwit node uncordon {node}`");
    assert!(said.code != 0 && format!("{}{}", said.stdout, said.stderr).contains(&why), "{said:?}");
}

#[test]
fn a_node_is_drained_and_takes_nothing_until_it_is_uncordoned() {
    let bed = bed("drain", &["--verbs-from", "none"], |_| {});
    let storage = bed.scratch().join("storage");
    std::fs::create_dir(&storage).unwrap();
    start(&bed);
    let idle = idle(&bed);
    bed.run("a", "small", at(81), &idle, &[]);
    bed.run("a", "old", at(82), &idle, &[]);
    let mount = format!("type=bind,src={},dst=/bound", storage.display());
    bed.run("a", "binds", at(83), &idle, &["--mount", &mount]);
    bed.done("a", &["stop", "--time", "0", "old"]);
    let client = Client::of(&bed);

    // A node that is cordoned takes nothing, and keeps what it has.
    bed.run("c", "stays", at(84), &idle, &[]);
    let said = bed.done("c", &["node", "cordon", "c"]);
    assert_eq!(said, "c is cordoned: it takes no more services, and 1 is on it\n");
    assert!(bed.done("c", &["node", "cordon", "c"]).contains("cordoned already"));
    knows(&bed, "a", "c", true);
    let table = bed.done("a", &["nodes"]);
    assert!(table.lines().any(|line| line.starts_with("c ") && line.contains("ready, cordoned")), "{table}");
    let run = ["run", "--name", "new", "--rootfs", idle.rootfs.to_str().unwrap(), "--", "true"];
    refused(&bed.godwit("c", &run), "c");
    refused(&bed.godwit("a", &["migrate", "small", "--to", "c"]), "c");
    refused(&bed.check("a", &["small", "--to", "c"]), "c");
    bed.done("c", &["restart", "--time", "0", "stays"]);
    // No node is asked to do this by another one's user, unless its operator allows that.
    let not_let = bed.godwit("b", &["node", "drain", "a"]);
    let words = ["node a does not accept `node drain` from node b", "--verbs-from b"];
    assert!(not_let.code == 1 && words.iter().all(|word| not_let.stderr.contains(word)), "{not_let:?}");
    knows(&bed, "b", "a", false);

    // What can leave does: to the one node that takes it.
    let first = drained(&bed, "a", &[]);
    assert_eq!(first.code, 1, "{first:?}");
    let stays = "its bind mount /bound";
    assert!(
        first.stdout.contains("binds cannot leave a:") && first.stdout.contains("/bound"),
        "{first:?} {stays}"
    );
    assert!(first.stdout.contains("not running, and still on a: old\n"), "{first:?}");
    assert!(first.stdout.contains("1 service stays (binds)"), "{first:?}");
    for name in [NAME, "small"] {
        assert_eq!(is_on(&bed, name), "b", "{name}: {first:?}");
    }
    refused(&bed.godwit("b", &["migrate", "small", "--to", "a"]), "a");
    let placed: Value = bed.json("b", &["place", "small", "--dry-run"]);
    for other in placed["others"].as_array().unwrap() {
        let kinds: Vec<_> = other["refusals"].as_array().unwrap().iter().map(|why| &why["kind"]).collect();
        assert!(kinds.iter().any(|kind| kind["cordoned"] == true), "{placed}");
    }
    bed.done("a", &["rm", "--force", "binds"]);
    let second = drained(&bed, "a", &[]);
    assert_eq!(second.code, 0, "{second:?}");
    assert!(second.stdout.ends_with("a is drained: 0 services have moved\n"), "{second:?}");

    // That lasts.
    bed.lab().restart_node("a").unwrap();
    refused(&bed.godwit("a", &run), "a");
    assert_eq!(bed.done("a", &["node", "uncordon", "a"]), "a takes services\n");
    knows(&bed, "b", "a", false);
    bed.migrate("small", "b", "a");
    let events = bed.done("a", &["events"]);
    for event in ["node a cordoned", "node a drained: 0 services moved, 0 stay", "node a uncordoned"] {
        assert!(events.contains(event), "{event}: {events}");
    }
    assert!(client.leaves() > 10);
}

/// A drain that goes on, and what it has said so far.
struct Drain {
    child: Child,
    said: std::io::Lines<BufReader<std::process::ChildStderr>>,
}

impl Drain {
    fn begin(bed: &Bed, on: &str, node: &str) -> Self {
        let mut command = bed.command(on, &["node", "drain", node]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.take().unwrap()).lines();
        Self { child, said }
    }

    /// Returns when it says this.
    fn says(&mut self, what: &str) {
        let mut all = Vec::new();
        for line in self.said.by_ref() {
            let line = line.unwrap();
            if line.contains(what) {
                return;
            }
            all.push(line);
        }
        panic!("it has not said {what:?}: {all:?}");
    }

    fn ends(self) -> (i32, String, String) {
        let rest: Vec<_> = self.said.map(Result::unwrap).collect();
        let output = self.child.wait_with_output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap(), rest.join("\n"))
    }
}

#[test]
fn what_is_on_its_way_to_a_node_that_is_drained_moves_on() {
    let mut points = None;
    let bed = bed("drain-coming", &["--verbs-from", "all"], |config| {
        points = Some(Points::among(config, &["destination.reserved"]));
    });
    let points = points.unwrap();
    let idle = idle(&bed);
    bed.run("a", "first", at(85), &idle, &[]);
    bed.knows("b", "first");
    points.hold("destination.reserved");
    let mut moving = bed.command("a", &["migrate", "first", "--to", "b"]);
    let mut moving = moving.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    points.reached("destination.reserved");

    // Any node may be asked here.
    let mut drain = Drain::begin(&bed, "c", "b");
    drain.says("waiting for first: it is on its way to this node");
    let twice = bed.godwit("b", &["node", "drain", "b"]);
    assert!(twice.code == 1 && twice.stderr.contains("node b is being drained already"), "{twice:?}");
    points.let_go("destination.reserved");
    assert_eq!(moving.wait().unwrap().code(), Some(0));
    let (code, said, _) = drain.ends();
    assert_eq!(code, 0, "{said}");
    assert!(said.contains("first moved to "), "{said}");
    let there = is_on(&bed, "first");
    assert_ne!(there, "b", "{said}");

    // Who lets a node take services again ends its drain.
    bed.done("a", &["node", "uncordon", "b"]);
    let from = there.as_str();
    knows(&bed, from, "b", false);
    bed.migrate("first", from, "b");
    bed.run("b", "second", at(86), &idle, &[]);
    points.hold("destination.reserved");
    let drain = Drain::begin(&bed, "b", "b");
    points.reached("destination.reserved");
    bed.done("a", &["node", "uncordon", "b"]);
    points.let_go("destination.reserved");
    let (code, said, errors) = drain.ends();
    assert!(code == 1 && said.matches(" moved to ").count() == 1, "{said}{errors}");
    assert!(errors.contains("node b was uncordoned while it was drained"), "{said}{errors}");
}
