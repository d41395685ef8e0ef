//! What the README shows first: the demo, also on a machine with cgroup version 2 alone. Needs root.

use std::process::{Command, Output};

use godwit_tests::{BUSY, TRIES, leftovers, programs, tier};
use serde_json::Value;

/// Data in Redis: enough for several pages files, little enough to be quick.
const MEMORY: &str = "24MiB";

fn demo(lab: &str, program: &str, before: &[&str]) -> Output {
    let godwit = programs().join("godwit");
    Command::new(program)
        .args(before)
        .arg(godwit)
        .args(["lab", "demo", "--name", lab, "--memory", MEMORY])
        .output()
        .unwrap()
}

/// Tries again where the move was aborted only because the machine is busy.
fn patiently(run: impl Fn() -> Output) -> Output {
    let mut tries = 1..TRIES;
    loop {
        let output = run();
        let is_busy = BUSY.iter().any(|busy| String::from_utf8_lossy(&output.stderr).contains(busy));
        if !is_busy || tries.next().is_none() {
            return output;
        }
    }
}

fn assert_moved(lab: &str, output: &Output) {
    let said = String::from_utf8_lossy(&output.stdout);
    let complaints = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaints}");
    for line in [&["outcome", "moved from a to b"], &["lost answers", "0"], &["reconnects", "0"]] {
        let shown = said.lines().any(|l| l.trim().starts_with(line[0]) && l.trim().ends_with(line[1]));
        assert!(shown, "{line:?} is not in:\n{said}");
    }
    assert!(said.contains("downtime as the client saw it"), "{said}");
    let left = leftovers::of(lab);
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn the_demo_moves_a_busy_redis_and_leaves_nothing() {
    let lab = format!("demo{}", std::process::id());
    let output = patiently(|| demo(&lab, "env", &[]));
    assert_moved(&lab, &output);
}

/// A mount namespace in which `/sys/fs/cgroup` is version 2, whatever this machine has mounted there.
#[test]
fn the_demo_works_with_cgroup_version_2_alone() {
    let lab = format!("demo2-{}", std::process::id());
    let script = "umount -R /sys/fs/cgroup; mount -t cgroup2 none /sys/fs/cgroup && exec \"$@\"";
    let before = ["--mount", "--propagation", "private", "sh", "-c", script, "sh"];
    let output = patiently(|| demo(&lab, "unshare", &before));
    assert_moved(&lab, &output);
}

/// No answer is lost by any of them. On a busy machine services may move too late for a short trip.
#[test]
fn three_services_show_what_following_a_client_means() {
    let lab = format!("demo3-{}", std::process::id());
    let directory = tempfile::tempdir().unwrap();
    let picture = directory.path().join("follow.svg");
    let trip = if tier::is_full() { "120s" } else { "20s" };
    let output = Command::new(programs().join("godwit"))
        .args(["--json", "lab", "demo", "follow", "--name", &lab, "--memory", "4MiB", "--for", trip, "--out"])
        .arg(&picture)
        .output()
        .unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{complaints}");
    let all: Vec<Value> = said.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let services: Vec<_> = all.iter().map(|seen| seen["service"].as_str().unwrap()).collect();
    assert_eq!(services, ["following", "fixed", "threshold"]);
    for seen in &all {
        let windows = seen["windows"].as_array().unwrap().len();
        assert!(seen["lost_ops"] == 0 && seen["requests"].as_u64() > Some(500) && windows > 40, "{seen}");
    }
    let figure = |at: usize, name: &str| all[at]["figures"][name].as_f64().unwrap();
    assert!(all[1]["moves"].as_array().unwrap().is_empty());
    // It is nowhere near its client for two thirds of the trip.
    assert!(figure(1, "average_ms") > 20.0, "{said}");
    if tier::is_full() {
        let moves = |at: usize| all[at]["moves"].as_array().unwrap().len();
        assert!(moves(0) > 0 && moves(2) > 0, "{said}");
        assert!(figure(0, "lost_s") < figure(1, "lost_s"), "{said}");
    }
    let drawn = std::fs::read_to_string(&picture).unwrap();
    assert!(drawn.contains("<svg") && services.iter().all(|rule| drawn.contains(&format!("{rule}: "))));
    assert!(leftovers::of(&lab).is_empty());
}

#[test]
fn a_picture_that_cannot_be_drawn_is_told_before_the_client_sets_out() {
    let lab = format!("demo4-{}", std::process::id());
    let output = Command::new(programs().join("godwit"))
        .args(["lab", "demo", "follow", "--name", &lab, "--out", "/nowhere/follow.svg"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && said.contains("/nowhere is no directory"), "{said}");
    assert!(leftovers::of(&lab).is_empty());
}
