//! `godwit node`: a node takes no more services, and those that it has leave it. Needs root.

use std::io::{BufRead as _, BufReader};
use std::net::Ipv4Addr;
use std::process::{Child, Stdio};

use godwit_lab::workload::{Preset, Workload};
use godwit_tests::hold::Points;
use godwit_tests::victim::{Attempt, HELD};
use godwit_tests::{AGAIN, Bed, Said, TRIES, is_passing, wait_for, wait_for_within};
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

/// Whether a drain did less than it should for no other reason than a busy machine.
fn is_held_up(said: &Said) -> bool {
    let all = format!("{}{}", said.stdout, said.stderr);
    all.contains("last heard from") || is_passing(&all)
}

/// Drains a node, once no other node was silent for too long, as on a busy machine.
fn drained(bed: &Bed, node: &str) -> Said {
    wait_for_within(AGAIN, "a drain among nodes that are heard of", || {
        let said = bed.godwit(node, &["node", "drain", node]);
        (!is_held_up(&said)).then_some(said)
    })
}

/// Waits until a node takes another one for cordoned, or not.
fn knows(bed: &Bed, node: &str, of: &str, cordoned: bool) {
    wait_for("news of a node", || {
        let nodes = bed.json::<Vec<Value>>(node, &["nodes"]);
        nodes.iter().any(|told| told["name"] == of && told["cordoned"] == cordoned).then_some(())
    });
}

/// Waits until node a, which may hear of it a little later, knows a service on a node.
fn is_on(bed: &Bed, name: &str, node: &str) {
    wait_for(&format!("service {name} on node {node}"), || {
        let told: Value = serde_json::from_str(&bed.godwit("a", &["--json", "inspect", name]).stdout).ok()?;
        (told["node"] == node).then_some(())
    });
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
    is_on(&bed, "stays", "c");
    // No node is asked to do this by another one's user, unless its operator allows that.
    let not_let = bed.godwit("b", &["node", "drain", "a"]);
    let words = ["node a does not accept `node drain` from node b", "--verbs-from b"];
    assert!(not_let.code == 1 && words.iter().all(|word| not_let.stderr.contains(word)), "{not_let:?}");
    knows(&bed, "a", "a", false);

    // What can leave does: to the one node that takes it.
    let first = drained(&bed, "a");
    assert_eq!(first.code, 1, "{first:?}");
    let stays = "its bind mount /bound";
    assert!(
        first.stdout.contains("binds cannot leave a:") && first.stdout.contains("/bound"),
        "{first:?} {stays}"
    );
    assert!(first.stdout.contains("not running, and still on a: old\n"), "{first:?}");
    assert!(first.stdout.contains("1 service stays (binds)"), "{first:?}");
    for name in [NAME, "small"] {
        is_on(&bed, name, "b");
    }
    refused(&bed.godwit("b", &["migrate", "small", "--to", "a"]), "a");
    let placed: Value = wait_for("an answer about a service that rests", || {
        let said = bed.godwit("b", &["--json", "place", "small", "--dry-run"]);
        (!said.stderr.contains("try again")).then(|| serde_json::from_str(&said.stdout).unwrap())
    });
    let others = placed["others"].as_array().unwrap();
    assert_eq!(others.len(), 2, "{placed}");
    for other in others {
        let kinds: Vec<_> = other["refusals"].as_array().unwrap().iter().map(|why| &why["kind"]).collect();
        assert!(kinds.iter().any(|kind| kind["cordoned"] == true), "{placed}");
    }
    bed.done("a", &["rm", "--force", "binds"]);
    let second = drained(&bed, "a");
    assert_eq!(second.code, 0, "{second:?}");
    assert!(second.stdout.ends_with("a is drained: 0 services have moved\n"), "{second:?}");

    // That lasts.
    bed.lab().restart_node("a").unwrap();
    refused(&bed.godwit("a", &run), "a");
    assert_eq!(bed.done("a", &["node", "uncordon", "a"]), "a takes services\n");
    knows(&bed, "b", "a", false);
    bed.migrate("small", "b", "a");
    let events = bed.done("a", &["events"]);
    for event in ["node a cordoned", "node a drained: 0 services moved, 0 stay, 0 lost", "node a uncordoned"]
    {
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

    fn ends(self) -> Said {
        let rest: Vec<_> = self.said.map(Result::unwrap).collect();
        let output = self.child.wait_with_output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        Said { code: output.status.code().unwrap(), stdout, stderr: rest.join("\n") }
    }

    /// One whose first move is held at a point when this returns.
    fn held(bed: &Bed, node: &str, (points, point): (&Points, &str)) -> Self {
        points.hold(point);
        for _ in 0..TRIES {
            let mut drain = Self::begin(bed, node, node);
            let is_held = wait_for_within(HELD, "the first move of a drain, or its end", || {
                let has_ended = drain.child.try_wait().unwrap().is_some();
                (has_ended || points.has_reached(point)).then_some(!has_ended)
            });
            if is_held {
                return drain;
            }
            let said = drain.ends();
            assert!(is_held_up(&said), "{said:?}");
        }
        panic!("no service has left node {node} in {TRIES} drains")
    }
}

#[test]
fn what_is_on_its_way_to_a_node_that_is_drained_moves_on() {
    const POINT: &str = "destination.reserved";
    let mut points = None;
    let bed = bed("drain-coming", &["--verbs-from", "all"], |config| {
        points = Some(Points::among(config, &[POINT]));
    });
    let points = points.unwrap();
    let idle = idle(&bed);
    bed.run("a", "first", at(85), &idle, &[]);
    bed.knows("b", "first");
    let move_it = || Attempt::of(bed.command("a", &["--json", "migrate", "first", "--to", "b"]));
    let moving = Attempt::held(&points, POINT, move_it);

    // Any node may be asked here.
    let mut drain = Drain::begin(&bed, "c", "b");
    drain.says("waiting for first: it is on its way to node b");
    let twice = bed.godwit("b", &["node", "drain", "b"]);
    assert!(twice.code == 1 && twice.stderr.contains("node b is being drained already"), "{twice:?}");
    points.let_go(POINT);
    moving.moved();
    let mut said = drain.ends();
    if is_held_up(&said) {
        let more = drained(&bed, "b");
        said = Said { stdout: said.stdout + &more.stdout, ..more };
    }
    assert_eq!(said.code, 0, "{said:?}");
    let there = if said.stdout.contains("first moved to a:") { "a" } else { "c" };
    assert!(said.stdout.contains(&format!("first moved to {there}: ")), "{said:?}");
    is_on(&bed, "first", there);

    // Who lets a node take services again ends its drain, and who cancels a move wants it to stay.
    for lifts in [true, false] {
        bed.done("a", &["node", "uncordon", "b"]);
        let from = bed.json::<Value>("a", &["inspect", "first"])["node"].as_str().unwrap().to_owned();
        if from != "b" {
            knows(&bed, &from, "b", false);
            bed.migrate("first", &from, "b");
        }
        if lifts {
            bed.run("b", "second", at(86), &idle, &[]);
        }
        let drain = Drain::held(&bed, "b", (&points, POINT));
        let expected = match lifts {
            true => {
                bed.done("a", &["node", "uncordon", "b"]);
                ["b was uncordoned while it was drained", "1 service stays ("]
            }
            false => {
                let cancel = |name: &&str| bed.godwit("b", &["cancel", name]).code == 0;
                assert!(["first", "second"].iter().any(cancel));
                ["stays: it was cancelled", "b is not drained: "]
            }
        };
        points.let_go(POINT);
        let said = drain.ends();
        assert_eq!(said.code, 1, "{said:?}");
        assert!(expected.iter().all(|words| said.stdout.contains(words)), "{expected:?}: {said:?}");
        if lifts {
            wait_for("both services on nodes that node a knows", || {
                let nodes = ["first", "second"]
                    .map(|name| bed.json::<Value>("a", &["inspect", name])["node"].clone());
                (nodes.iter().filter(|node| **node == "b").count() == 1).then_some(())
            });
        }
    }
}

#[test]
fn pages_that_are_on_their_way_to_a_node_that_is_drained_are_waited_for() {
    const POINT: &str = "source.pushing";
    let mut points = None;
    let bed = bed("drain-pages", &[], |config| points = Some(Points::among(config, &[POINT])));
    let points = points.unwrap();
    start(&bed);
    let idle = idle(&bed);
    // What its policy starts again would do so here.
    let fails = Preset { command: ["sh", "-c", "exit 1"].map(str::to_owned).to_vec(), ..idle };
    bed.run("b", "fails", at(87), &fails, &["--restart", "always"]);
    let moving = Attempt::held(&points, POINT, || {
        Attempt::of(bed.command("a", &["--json", "migrate", NAME, "--to", "b", "--mode", "postcopy"]))
    });
    let mut drain = Drain::begin(&bed, "b", "b");
    drain.says(&format!("waiting for {NAME}: pages of its last move are still on their way here"));
    points.let_go(POINT);
    moving.moved();
    let mut said = drain.ends();
    if is_held_up(&said) {
        let more = drained(&bed, "b");
        said = Said { stdout: said.stdout + &more.stdout, ..more };
    }
    assert!(said.stdout.contains(&format!("{NAME} moved to ")), "{said:?}");
    assert!(said.code == 1 && said.stdout.contains("1 service stays (fails)"), "{said:?}");
}
