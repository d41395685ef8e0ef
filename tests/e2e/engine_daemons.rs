//! What may happen to Docker's daemons, dockerd and containerd, while a container of theirs moves: the service is in one place,
//! and the other node has nothing of it. Needs root and Docker.

use godwit_lab::workload::Workload;
use godwit_tests::docker::Dockers;
use godwit_tests::{tier, wait_for};
use rustix::process::Signal;

use crate::engine_faults::start_with;
use crate::engine_nodes::{self, COPIED, Nodes, RECEIVED};

/// A dockerd without `live-restore` ends what has run before it.
#[test]
fn a_service_is_in_one_place_where_a_dockerd_is_killed_and_comes_back_as_it_moves() {
    let mut nodes = Nodes::up("docker", "killed", Workload::Redis, &[]);
    start_with(&nodes, "always");
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();
    for (node, live_restore, point) in [
        ("b", false, COPIED),
        ("b", false, RECEIVED),
        ("b", true, COPIED),
        ("b", true, RECEIVED),
        ("a", true, COPIED),
        ("a", true, RECEIVED),
        ("a", false, COPIED),
        ("a", false, RECEIVED),
    ] {
        // The short run has the second moment alone.
        if point == COPIED && !tier::is_full() {
            continue;
        }
        let deed = format!("{point}, {node}, live-restore {live_restore}");
        let moving = engine_nodes::begin(&nodes.bed, &nodes.points, point, &["--mode", "precopy"]);
        let before = nodes.pid("a");
        nodes.kill_dockerd(node, live_restore);
        // Where a frozen process does not die, dockerd waits for its end before it answers.
        if point == COPIED {
            nodes.dockers().answers(node);
        }
        let kills = node == "a" && !live_restore;
        if kills && point == COPIED {
            wait_for("dockerd to end it", || (nodes.pid("a") != before).then_some(()));
        }
        nodes.points.let_go(point);
        let said = moving.wait_with_output().unwrap();
        println!("{deed}: {said:?}");
        let codes: &[i32] = match (node, live_restore) {
            ("b", _) => &[1],
            (_, true) => &[0],
            // It may all have left before.
            _ => &[0, 1],
        };
        assert!(said.status.code().is_some_and(|code| codes.contains(&code)), "{deed}: {said:?}");
        nodes.dockers().answers(node);
        let here = if said.status.success() { "b" } else { "a" };
        if kills && here == "a" {
            wait_for("dockerd to end it", || (nodes.pid("a") != before).then_some(()));
            // One of release 20.10 takes it for stopped by its user then.
            nodes.own("a", &["start", "cache"]);
            lasting = nodes.connect();
        }
        nodes.is_at(here, "running");
        nodes.is_shown(here, "running");
        lasting.call(&["PING"]).unwrap();
        if here == "b" {
            nodes.bed.migrate("cache", "b", "a");
        }
    }
    nodes.down();
}

#[test]
fn a_service_goes_on_where_a_containerd_hangs_that_has_dockers_images() {
    let release = Dockers::new().release();
    if release < 29 {
        eprintln!("skipped: Docker {release} has its images in its own store");
        return;
    }
    let nodes = Nodes::up("docker", "below", Workload::Redis, &[]);
    let dockers = nodes.dockers();
    start_with(&nodes, "no");
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();
    for (node, point) in [("b", COPIED), ("a", COPIED), ("b", RECEIVED)] {
        let moving = engine_nodes::begin(&nodes.bed, &nodes.points, point, &["--mode", "precopy"]);
        dockers.signal_containerd(node, Signal::STOP);
        nodes.points.let_go(point);
        let said = moving.wait_with_output().unwrap();
        println!("{node}, {point}: {said:?}");
        // It waits for nobody where it is.
        lasting.call(&["PING"]).unwrap();
        dockers.signal_containerd(node, Signal::CONT);
        assert!(matches!(said.status.code(), Some(0 | 1)), "{node}, {point}: {said:?}");
        let here = if said.status.success() { "b" } else { "a" };
        nodes.is_at(here, "running");
        nodes.is_shown(here, "running");
        lasting.call(&["PING"]).unwrap();
        if here == "b" {
            nodes.bed.migrate("cache", "b", "a");
        }
    }
    nodes.down();
}
