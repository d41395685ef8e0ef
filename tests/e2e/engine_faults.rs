//! What may happen to a container of Podman or Docker, and to these, while the container moves: the service is in one
//! place, and the other node has nothing of it. Needs root, Podman and Docker.

use std::cell::Cell;
use std::process::Child;

use godwit_lab::workload::Workload;
use godwit_tests::disks::Small;
use godwit_tests::wait_for;
use rustix::process::{Pid, Signal};
use serde_json::Value;

use crate::engine_nodes::{self, COPIED, IMAGE, Nodes, RECEIVED, is_tried};

/// Starts Redis as service `cache` on node a.
fn start(nodes: &Nodes) {
    start_with(nodes, "no");
}

/// The same with this restart policy.
pub(crate) fn start_with(nodes: &Nodes, policy: &str) {
    let mut more = vec!["--restart", policy];
    more.extend(nodes.preset.env.iter().flat_map(|entry| ["--env", entry]));
    more.extend(nodes.preset.user.iter().flat_map(|user| ["--user", user]));
    let command: Vec<_> = nodes.preset.command.iter().map(String::as_str).collect();
    nodes.bed.done("a", &nodes.words(IMAGE, &more, &command));
}

/// Begins to move it to node b, up to the moment at which its memory has been copied and it still runs.
fn begin(nodes: &Nodes) -> Child {
    engine_nodes::begin(&nodes.bed, &nodes.points, COPIED, &["--mode", "precopy"])
}

/// Lets the move go on, which must end without success.
fn ends_in_vain(nodes: &Nodes, moving: Child, deed: &str) -> String {
    nodes.points.let_go(COPIED);
    let said = moving.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(1), "{deed}: {said:?}");
    String::from_utf8_lossy(&said.stderr).into_owned()
}

fn is_not_on_b(nodes: &Nodes, deed: &str) {
    wait_for(&format!("node b to have nothing after {deed}"), || nodes.listed("b").is_empty().then_some(()));
}

#[test]
fn a_container_of_podmans_ends_is_restarted_or_removed_on_its_way() {
    on_its_way("podman");
}

#[test]
fn a_container_of_dockers_ends_is_restarted_or_removed_on_its_way() {
    on_its_way("docker");
}

fn on_its_way(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let nodes = Nodes::up(engine, "way", Workload::Redis, &[]);
    start(&nodes);

    let moving = begin(&nodes);
    let pid = nodes.bed.pid("a", "cache");
    nodes.own("a", &["restart", "--time", "0", "cache"]);
    ends_in_vain(&nodes, moving, "restart");
    is_not_on_b(&nodes, "restart");
    nodes.is_at("a", "running");
    wait_for("its next life", || (![0, pid].contains(&nodes.bed.pid("a", "cache"))).then_some(()));
    nodes.connect().fill(1 << 20).unwrap();

    let moving = begin(&nodes);
    nodes.own("a", &["kill", "cache"]);
    let said = ends_in_vain(&nodes, moving, "kill");
    assert!(said.contains("cache"), "{said}");
    is_not_on_b(&nodes, "kill");
    nodes.is_at("a", "exited");
    nodes.is_shown("a", "stopped");
    nodes.own("a", &["start", "cache"]);
    nodes.is_shown("a", "running");
    nodes.connect();

    let moving = begin(&nodes);
    nodes.own("a", &["rm", "--force", "cache"]);
    ends_in_vain(&nodes, moving, "rm");
    is_not_on_b(&nodes, "rm");
    wait_for("godwit to know", || {
        let shown: Value = nodes.bed.json("a", &["inspect", "cache"]);
        shown["reason"].as_str().unwrap().contains("removed").then_some(())
    });
    nodes.bed.done("a", &["rm", "cache"]);

    // Nothing of all that is in the way of another.
    start(&nodes);
    nodes.bed.migrate("cache", "a", "b");
    nodes.is_at("b", "running");
    nodes.connect();
    nodes.down();
}

#[test]
fn a_container_that_podman_starts_again_by_its_policy_on_its_way_stays() {
    is_started_again("podman");
}

#[test]
fn a_container_that_docker_starts_again_by_its_policy_on_its_way_stays() {
    is_started_again("docker");
}

fn is_started_again(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let nodes = Nodes::up(engine, "again", Workload::Redis, &[]);
    start_with(&nodes, "always");
    let moving = begin(&nodes);
    let before = nodes.pid("a");
    kill(before);
    let pid = nodes.next_life("a", before);
    let reason = ends_in_vain(&nodes, moving, "its next life");
    assert!(reason.contains("container cache: its main process has ended"), "{reason}");
    is_not_on_b(&nodes, "its next life");
    nodes.is_at("a", "running");
    nodes.is_shown("a", "running");
    wait_for("godwit to follow", || (nodes.bed.pid("a", "cache") == pid).then_some(()));
    assert_eq!(nodes.pid("a"), pid, "it is left alone");
    nodes.connect().fill(1 << 20).unwrap();

    // It is frozen, and all of it has come to node b. Where a frozen process does not die, its engine learns of it later.
    let moving = engine_nodes::begin(&nodes.bed, &nodes.points, RECEIVED, &["--mode", "precopy"]);
    kill(pid);
    nodes.points.let_go(RECEIVED);
    let said = moving.wait_with_output().unwrap();
    println!("{said:?}");
    assert!(matches!(said.status.code(), Some(0 | 1)), "{said:?}");
    let here = if said.status.success() { "b" } else { "a" };
    nodes.is_at(here, "running");
    nodes.is_shown(here, "running");
    wait_for("godwit to follow", || (nodes.bed.pid(here, "cache") == nodes.pid(here)).then_some(()));
    nodes.connect();
    if here == "b" {
        nodes.bed.migrate("cache", "b", "a");
    }
    nodes.bed.migrate("cache", "a", "b");
    nodes.is_at("b", "running");
    nodes.connect();
    nodes.down();
}

fn kill(pid: u64) {
    let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
    rustix::process::kill_process(pid, Signal::KILL).unwrap();
}

#[test]
fn a_service_goes_on_where_a_dockerd_hangs_while_it_moves() {
    goes_on("docker");
}

#[test]
fn a_service_goes_on_where_podman_hangs_while_it_moves() {
    goes_on("podman");
}

fn goes_on(engine: &str) {
    if !is_tried(engine, "docker") {
        return;
    }
    let nodes = Nodes::up(engine, "hangs", Workload::Redis, &[]);
    start(&nodes);
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();
    for node in ["b", "a"] {
        let moving = begin(&nodes);
        nodes.hang(node, true);
        nodes.points.let_go(COPIED);
        let said = moving.wait_with_output().unwrap();
        // It waits for nobody where it is.
        lasting.call(&["PING"]).unwrap();
        nodes.hang(node, false);
        assert!(matches!(said.status.code(), Some(0 | 1)), "{node}: {said:?}");
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

#[test]
fn a_service_stays_where_the_storage_of_a_dockerd_fills_up_on_its_way() {
    fills_up("docker");
}

#[test]
fn a_service_stays_where_the_storage_of_podman_fills_up_on_its_way() {
    fills_up("podman");
}

/// The storage of node b's engine, bytes; an image is a tenth of it.
const SMALL: u64 = 768 << 20;

fn fills_up(engine: &str) {
    let mut small = None;
    let nodes = Nodes::up_on(engine, "full", Workload::Redis, &[], |engine| {
        small = Some(Small::at(&engine.disk("b"), SMALL));
    });
    let small = small.unwrap();
    start(&nodes);
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();
    let pid = nodes.bed.pid("a", "cache");
    let storage = nodes.engine.storage("b");
    // Podman 5 says nothing at all while its database has no room, not even where its storage is.
    let is_mute = Cell::new(false);
    let is_named = |said: &str, deed: &str| {
        if said.contains("node b refuses: Podman cannot") && said.contains("database or disk is full") {
            is_mute.set(true);
            return;
        }
        for words in ["node b", &storage.to_str().unwrap().to_lowercase()] {
            assert!(said.to_lowercase().contains(words), "{deed}: {words}: {said}");
        }
        // Before anything comes, or by the engine.
        let full = ["mib are needed", "no space left on device"];
        assert!(full.iter().any(|words| said.to_lowercase().contains(words)), "{deed}: {said}");
    };
    let mut is_as_before = |deed: &str| {
        nodes.is_at("a", "running");
        assert_eq!(nodes.bed.pid("a", "cache"), pid, "{deed}");
        lasting.call(&["PING"]).unwrap();
        wait_for(&format!("node b to have nothing after {deed}"), || {
            let waits = std::fs::read_dir(storage.join("godwit")).map_or(0, Iterator::count);
            let volumes = nodes.own("b", &["volume", "ls", "--quiet"]);
            (nodes.listed("b").is_empty() && volumes.is_empty() && waits == 0).then_some(())
        });
    };

    // The image has no room.
    let full = small.fill();
    let said = nodes.bed.godwit("a", &["migrate", "cache", "--to", "b"]);
    assert_eq!(said.code, 1, "{said:?}");
    is_named(&said.stderr, "an image");
    drop(full);
    is_as_before("an image");
    assert_eq!(nodes.own("b", &["images", "--all", "--quiet"]), "");

    // It has room, and the files that the service has changed meanwhile have none.
    let moving = begin(&nodes);
    let write = "/bin/busybox dd if=/dev/urandom of=/changed bs=1M count=8 2>/dev/null";
    nodes.own("a", &["exec", "cache", "/bin/sh", "-c", write]);
    let full = small.fill();
    let said = ends_in_vain(&nodes, moving, "files");
    is_named(&said, "files");
    if is_mute.get() {
        drop(full);
        is_as_before("files");
    } else {
        // It is put away without room, too.
        is_as_before("files");
        drop(full);
    }

    // It is a filesystem of its own, in which nothing can get a name that waits in godwitd's state.
    let prepared = nodes.bed.godwit("a", &["prepare", "cache", "--to", "b"]);
    let said = format!("storage {} is on another filesystem than", storage.display());
    assert!(prepared.code == 0 && prepared.stderr.contains(&said), "{prepared:?}");

    // All of it has come, and what its engine writes as it restores it has no room. Not every release writes anything then.
    let moving = engine_nodes::begin(&nodes.bed, &nodes.points, RECEIVED, &["--mode", "precopy"]);
    let full = small.fill();
    nodes.points.let_go(RECEIVED);
    let said = moving.wait_with_output().unwrap();
    println!("restore: {said:?}");
    if said.status.success() {
        lasting.call(&["PING"]).unwrap();
        drop(full);
    } else {
        assert_eq!(said.status.code(), Some(1), "{said:?}");
        drop(full);
        is_as_before("restore");
        nodes.bed.migrate("cache", "a", "b");
    }
    nodes.is_at("b", "running");
    nodes.connect();
    nodes.down();
}

#[test]
fn a_service_goes_on_where_the_disks_of_its_dockerd_and_its_godwitd_fill_up_as_it_leaves() {
    fills_up_at_the_source("docker");
}

#[test]
fn a_service_goes_on_where_the_disks_of_its_podman_and_its_godwitd_fill_up_as_it_leaves() {
    fills_up_at_the_source("podman");
}

fn fills_up_at_the_source(engine: &str) {
    if !is_tried(engine, "podman") {
        return;
    }
    let mut storage = None;
    let nodes = Nodes::up_on(engine, "fullfrom", Workload::Redis, &[], |engine| {
        storage = Some(Small::at(&engine.disk("a"), SMALL));
    });
    let state = Small::of(&nodes.bed, "a", SMALL);
    start(&nodes);
    let mut lasting = nodes.connect();
    lasting.fill(1 << 20).unwrap();
    for (disk, what) in [(&storage.unwrap(), "storage"), (&state, "state")] {
        for point in [COPIED, RECEIVED] {
            let moving = engine_nodes::begin(&nodes.bed, &nodes.points, point, &["--mode", "precopy"]);
            let full = disk.fill();
            nodes.points.let_go(point);
            let said = moving.wait_with_output().unwrap();
            println!("{what}, {point}: {said:?}");
            assert!(matches!(said.status.code(), Some(0 | 1)), "{what}, {point}: {said:?}");
            lasting.call(&["PING"]).unwrap();
            drop(full);
            let here = if said.status.success() { "b" } else { "a" };
            // What could not be put away without room is put away now.
            nodes.is_at(here, "running");
            nodes.is_shown(here, "running");
            lasting.call(&["PING"]).unwrap();
            if here == "b" {
                nodes.bed.migrate("cache", "b", "a");
            }
        }
    }
    nodes.down();
}
