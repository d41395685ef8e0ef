//! A cluster that is upgraded from the last release to the present one, node by node, while its services run and move.
//! Needs root. The last release is built where it is not there, so the tests run in `make test-full` only.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
};

use godwit_lab::{
    Lab, LabConfig,
    workload::{RedisClient, RedisLoad, Workload},
};
use godwit_migration::message::{OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION};
use godwit_tests::{
    Bed, CLIENT, MODES, PATIENCE, release, tier,
    victim::{Attempt, NAME, UNKNOWN, Victim},
    wait_for,
};
use serde_json::Value;

const NODES: [&str; 3] = ["a", "b", "c"];
/// Of the Redis that moves.
const MOVES: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// Data in it.
const FILL: u64 = 16 << 20;
/// Requests of its client, a second.
const RATE: u32 = 250;
/// Of the Redis that stays on its node until all are upgraded, and the port by which it is published.
const STAYS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 11);
const PUBLISHED: u16 = 16379;
/// Pages follow a service that runs at the destination.
const PUSHING: &str = "source.pushing";

/// These programs on the given nodes.
pub(crate) fn install(config: &mut LabConfig, nodes: &[&str], programs: &Path) {
    let of_nodes = nodes.iter().map(|node| ((*node).to_owned(), programs.to_owned()));
    config.programs.of_nodes.extend(of_nodes);
}

/// The program that a node's daemon was started from.
pub(crate) fn daemon(lab: &Lab, node: &str) -> PathBuf {
    let status = Lab::status(lab.name()).unwrap();
    let daemon = status.hosts.into_iter().find(|host| host.name == node).and_then(|host| host.daemon);
    fs::read_link(format!("/proc/{}/exe", daemon.unwrap())).unwrap()
}

/// Puts the present programs in the place of a node's, as the manual says: with its services running.
pub(crate) fn upgrade(bed: &mut Bed, node: &str) {
    let before = daemon(bed.lab(), node);
    bed.install(node, None);
    bed.lab().restart_node(node).unwrap();
    assert_ne!(daemon(bed.lab(), node), before, "node {node} runs another program");
    for asked in bed.lab().config().nodes.clone() {
        wait_for(&format!("node {asked} to see all nodes ready"), || {
            let nodes: Vec<Value> = bed.json(&asked, &["nodes"]);
            nodes.iter().all(|node| node["state"] == "ready").then_some(())
        });
    }
}

/// What a node says of one of its own services.
pub(crate) fn inspect(bed: &Bed, node: &str, name: &str) -> Value {
    bed.json(node, &["inspect", name])
}

/// A Redis with a client that has one connection and never renews it.
struct Moving {
    data: RedisClient,
    load: RedisLoad,
    on: &'static str,
    moves: usize,
}

impl Moving {
    /// Moves it, each time in another mode; its client notices nothing.
    fn to(&mut self, bed: &Bed, node: &'static str) {
        let mode = MODES[self.moves % MODES.len()];
        bed.knows(self.on, "moves");
        bed.migrate_so("moves", self.on, node, &["--mode", mode]);
        println!("moved from {} to {node} ({mode})", self.on);
        (self.on, self.moves) = (node, self.moves + 1);
        self.is_content("a move");
        self.data.check_fill(FILL).unwrap();
    }

    fn is_content(&self, after: &str) {
        let lap = self.load.lap().unwrap();
        assert!(lap.is_clean() && lap.reconnects == 0, "{after}: {lap:?}");
    }
}

#[test]
fn a_cluster_of_the_last_release_is_upgraded_node_by_node_under_load() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let mut bed = Bed::up_with("upgrade", |config| {
        config.nodes.push("c".to_owned());
        install(config, &NODES, &old);
    });
    for node in NODES {
        assert!(daemon(bed.lab(), node).starts_with(&old));
    }
    let preset = bed.build(Workload::Redis);
    assert_eq!(bed.done("a", &["network", "create", "back"]), "back\n");
    bed.run(
        "b",
        "stays",
        STAYS,
        &preset,
        &["--publish", &format!("{PUBLISHED}:6379"), "--restart", "always"],
    );
    bed.run("a", "moves", MOVES, &preset, &[]);
    let connect = |at| RedisClient::connect(bed.lab(), CLIENT, at, PATIENCE).unwrap();
    let mut stays = connect(preset.at(STAYS));
    stays.fill(FILL).unwrap();
    let mut data = connect(preset.at(MOVES));
    data.fill(FILL).unwrap();
    let load = RedisLoad::start(bed.lab(), CLIENT, preset.at(MOVES), RATE).unwrap();
    let mut moving = Moving { data, load, on: "a", moves: 0 };
    let before = inspect(&bed, "b", "stays");
    // Pages that it leaves behind are retained by a daemon that is upgraded meanwhile.
    moving.to(&bed, "b");
    moving.to(&bed, "a");

    // Between the releases, in each mode and in both directions.
    upgrade(&mut bed, "c");
    moving.is_content("the upgrade of c");
    for _ in MODES {
        moving.to(&bed, "c");
        moving.to(&bed, "a");
    }
    // One upgraded node has services, which go on with the shims that they have.
    upgrade(&mut bed, "b");
    moving.is_content("the upgrade of b");
    let after = inspect(&bed, "b", "stays");
    for same in ["state", "pid", "id", "epoch", "address", "mac", "restart", "created_ms", "published"] {
        assert_eq!(after[same], before[same], "{same}");
    }
    moving.to(&bed, "b");
    // 0.2.0 cannot be asked.
    let asked = bed.godwit("b", &["check", "moves", "--to", "a"]);
    assert!(asked.code == 2 && asked.stdout.contains("as an older godwit does"), "{asked:?}");
    for node in ["a", "c", "b", "c", "a"] {
        moving.to(&bed, node);
    }
    // The last one, with the service under load on it.
    upgrade(&mut bed, "a");
    moving.is_content("the upgrade of a");
    for node in ["b", "c", "a"] {
        moving.to(&bed, node);
    }

    // What was begun with the old release is whole, and is the new one's to move, publish and end.
    stays.check_fill(FILL).unwrap();
    for node in NODES {
        let networks: Value = bed.json(node, &["network", "ls"]);
        assert_eq!(networks[1]["network"]["name"], "back", "{networks}");
        drop(bed.connect(SocketAddrV4::new(bed.lab().address(node).unwrap(), PUBLISHED)));
    }
    bed.migrate("stays", "b", "c");
    stays.check_fill(FILL).unwrap();
    let report = moving.load.stop().unwrap();
    assert!(report.is_clean() && report.reconnects == 0, "{report:?}");
    assert_eq!(report.sent, report.answered);
    println!("{} moves, {} requests", moving.moves, report.sent);
    for (node, name) in [("a", "moves"), ("c", "stays")] {
        bed.done(node, &["stop", name]);
        assert_eq!(inspect(&bed, node, name)["state"], "stopped");
        bed.done(node, &["rm", name]);
    }
}

#[test]
fn nodes_of_both_releases_join_each_others_clusters() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    for (test, of_the_old) in [("join-old", "a"), ("join-new", "b")] {
        let bed = Bed::up_with(test, |config| install(config, &[of_the_old], &old));
        let new = if of_the_old == "a" { "b" } else { "a" };
        for node in bed.json::<Vec<Value>>(new, &["nodes"]) {
            // Release 0.2.0 speaks 3, and does not tell.
            let range =
                if node["name"] == new { [OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION] } else { [3, 3] };
            let shown = ["oldest_protocol", "newest_protocol"].map(|end| node[end].as_u64().unwrap());
            assert_eq!(shown, range.map(u64::from), "{node}");
        }
        let preset = bed.build(Workload::Busybox);
        bed.run("a", "moves", MOVES, &preset, &[]);
        bed.migrate("moves", "a", "b");
        bed.knows("b", "moves");
        bed.migrate("moves", "b", "a");
    }
}

/// A service that runs on `b` while `a` has sent only the first of its pages; both are of the last release.
fn served(test: &str, old: &Path) -> (Victim, Attempt) {
    let victim = Victim::up_with(test, |config, _| install(config, &["a", "b"], old), |_| Vec::new());
    let attempt = victim.begin_with_and_hold("a", "b", &["--mode", "postcopy"], PUSHING);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.node == "b"));
    (victim, attempt)
}

#[test]
fn a_pager_of_the_last_release_is_served_to_its_end() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let (mut victim, attempt) = served("upgrade-dest", &old);
    let pagers = victim.pagers("b");
    assert!(!pagers.is_empty(), "it awaits pages");
    upgrade(&mut victim.bed, "b");
    assert_eq!(victim.pagers("b"), pagers, "they are those of before");
    victim.let_go(PUSHING);
    attempt.moved_well();
    victim.has_its_data();
    victim.ends_at_b();
}

#[test]
fn a_source_of_the_last_release_that_is_upgraded_serves_the_pages_that_it_owes() {
    if !tier::is_full() {
        return;
    }
    let old = release::last();
    let (mut victim, attempt) = served("upgrade-src", &old);
    upgrade(&mut victim.bed, "a");
    victim.let_go(PUSHING);
    // The daemon that was asked has ended.
    assert_eq!(attempt.end().code, UNKNOWN);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.reason.is_empty()));
    victim.has_its_data();
    upgrade(&mut victim.bed, "b");
    victim.bed.migrate(NAME, "b", "a");
    victim.ends_at_a();
}
