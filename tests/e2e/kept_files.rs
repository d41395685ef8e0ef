//! Files that a node keeps of a service for when it comes: of a move that was aborted, and of a service that has left. The
//! next move sends only what differs. Needs root.

use std::{fs, net::SocketAddrV4};

use godwit_lab::workload::RedisClient;
use godwit_tests::{Bed, CLIENT, PATIENCE, hold::Points, victim::Attempt, wait_for};

use crate::prepare::{
    ADDRESS, FEW, are_gone, change, contents, kept_on, noise, prepared, volume, with_files,
};

const FILL: u64 = 64 << 20;

/// Aborts a move of the service at a point, from outside.
fn abort_at(bed: &Bed, points: &Points, point: &str) {
    let attempt = Attempt::held(points, point, || Attempt::begin(bed, "redis", "a", "b", &[]));
    bed.done("a", &["cancel", "redis"]);
    assert!(attempt.aborted().contains("it was cancelled"), "{point}");
    points.let_go(point);
}

#[test]
fn a_move_that_is_aborted_leaves_what_came_for_the_next_one() {
    const PLACES: [&str; 2] = ["destination.prepared", "destination.restored"];
    let mut points = None;
    let bed = Bed::up_with("keptabort", |config| points = Some(Points::among(config, &PLACES)));
    let points = points.unwrap();
    let all = with_files(&bed);
    let address = SocketAddrV4::new(ADDRESS, 6379);
    let mut data = RedisClient::connect(bed.lab(), CLIENT, address, PATIENCE).unwrap();
    data.fill(FILL).unwrap();
    // While it ran, and with all that a restore does to files.
    for (nth, point) in PLACES.into_iter().enumerate() {
        abort_at(&bed, &points, point);
        data.check_fill(FILL).unwrap();
        // Its source waits for no word of the destination.
        wait_for(&format!("no volume on b after {point}"), || {
            let listed: serde_json::Value = bed.json("b", &["volume", "ls"]);
            listed.as_array().unwrap().is_empty().then_some(())
        });
        fs::write(volume(&bed, "a").join("between"), format!("{nth}")).unwrap();
    }
    // What a preparation brings is not lost with the next attempt, either.
    let ahead = prepared(&bed, "a", "b");
    assert!(ahead.file_bytes < FEW && ahead.retained_file_bytes >= all, "{ahead:?}");
    abort_at(&bed, &points, "destination.restored");
    change(&volume(&bed, "a"));
    let expected = contents(&volume(&bed, "a"));
    let report = bed.migrate_so("redis", "a", "b", &["--mode", "precopy"]);
    assert!(report.file_bytes < FEW && report.retained_file_bytes >= all / 2, "{report:?}");
    assert!(report.memory_wire_bytes < FILL / 4, "{report:?}");
    assert_eq!(contents(&volume(&bed, "b")), expected);
    data.check_fill(FILL).unwrap();
    are_gone(&bed, "b");
}

#[test]
fn a_service_that_goes_to_and_fro_sends_only_what_differs_of_its_files() {
    let bed = Bed::up("kepthome");
    let all = with_files(&bed);
    assert!(bed.migrate("redis", "a", "b").file_bytes >= all);
    assert_eq!(kept_on(&bed, "a"), 1);
    let shown = bed.godwit("a", &["doctor"]).stdout;
    assert!(shown.contains("of disk for files of 1 (--retained-files)"), "{shown}");
    for (from, to, name) in [("b", "a", "there"), ("a", "b", "back")] {
        match name {
            "there" => change(&volume(&bed, from)),
            name => noise(&volume(&bed, from).join(name), 100_000),
        }
        let expected = contents(&volume(&bed, from));
        let report = bed.migrate("redis", from, to);
        assert!(report.file_bytes < FEW && report.retained_file_bytes >= all / 2, "{report:?}");
        assert_eq!(contents(&volume(&bed, to)), expected);
        assert_eq!((kept_on(&bed, from), kept_on(&bed, to)), (1, 0));
        let listed: serde_json::Value = bed.json(from, &["volume", "ls"]);
        assert_eq!(listed.as_array().map(Vec::len), Some(0), "{listed}");
    }
    // It is no more.
    bed.done("b", &["rm", "--force", "redis"]);
    are_gone(&bed, "a");
}

#[test]
fn a_node_whose_operator_wants_no_files_keeps_none() {
    let bed = Bed::up_with("keptnone", |config| {
        config.programs.serve_arguments.extend(["--retained-files", "0"].map(str::to_owned));
    });
    let all = with_files(&bed);
    for (from, to) in [("a", "b"), ("b", "a")] {
        let report = bed.migrate("redis", from, to);
        assert!(report.file_bytes >= all && report.retained_file_bytes == 0, "{report:?}");
        assert_eq!(kept_on(&bed, from), 0);
    }
}
