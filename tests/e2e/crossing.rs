//! Services of programs that godwit-cc built go on under the destination's executables (`--cross`). Needs root, and what
//! `scripts/setup --isa` installs.

use std::fs;

use godwit_isa_programs::catalogue::Kind;
use godwit_lab::workload::Workload;
use godwit_tests::{
    Bed, Report, TRIES,
    again::groups,
    hold::Points,
    ledger::{ADDRESS, Client, Load, NAME, preset, run},
    tier::is_full,
    victim::{Attempt, UNKNOWN},
    wait_for,
};

const MODES: [&str; 4] = ["precopy", "cold", "postcopy", "hybrid"];

/// How to cross; a busy machine takes longer than the default to let all threads poll.
const CROSS: [&str; 3] = ["--cross", "--max-park-ms", "20000"];

fn crosses(bed: &Bed, name: &str, from: &str, to: &str, mode: &str) -> Report {
    let report = bed.migrate_so(name, from, to, &[&["--mode", mode], &CROSS[..]].concat());
    assert_eq!(report.set, std::env::consts::ARCH, "{report:?}");
    assert!(report.park_ms > 0.0 && report.rewrite_ms > 0.0, "{report:?}");
    report
}

#[test]
fn a_service_under_load_crosses_in_every_mode() {
    let bed = Bed::up("cross");
    run(&bed, "a");
    let mut load = Load::start(Client::connect(&bed));
    for (mode, (from, to)) in MODES.into_iter().zip([("a", "b"), ("b", "a")].into_iter().cycle()) {
        let report = crosses(&bed, NAME, from, to, mode);
        let (frozen, park, rewrite) = (report.frozen_ms, report.park_ms, report.rewrite_ms);
        println!("{mode}: frozen {frozen:.1} ms, rest {park:.1}, rewriting {rewrite:.2}");
        load = Load::start(load.stop());
    }
    let mut client = load.stop();
    for _ in 0..200 {
        client.asks().unwrap();
    }
}

/// What goes wrong while a migration is held, and is mended after that.
#[derive(Clone, Copy, Debug)]
enum Fault {
    Cut,
    Source,
    Destination,
}

#[test]
fn whatever_fails_while_processes_rest_or_images_are_rewritten_the_service_stays() {
    const POINTS: [&str; 3] = ["source.asked", "source.frozen", "destination.rewriting"];
    let mut points = None;
    let bed = Bed::up_with("cross-faults", |config| points = Some(Points::among(config, &POINTS)));
    let points = points.unwrap();
    run(&bed, "a");
    let mut client = Client::connect(&bed);
    for point in POINTS {
        for fault in [Fault::Cut, Fault::Source, Fault::Destination] {
            println!("{point}: {fault:?}");
            let load = Load::start(client);
            let attempt = Attempt::held(&points, point, || Attempt::begin(&bed, NAME, "a", "b", &CROSS));
            match fault {
                Fault::Cut => {
                    bed.lab().cut("a", "b").unwrap();
                    points.let_go(point);
                    attempt.aborted();
                    bed.lab().heal("a", "b").unwrap();
                }
                Fault::Source => {
                    bed.lab().stop_node("a").unwrap();
                    assert_eq!(attempt.end().code, UNKNOWN);
                    points.let_go(point);
                    bed.lab().start_node("a").unwrap();
                }
                Fault::Destination => {
                    bed.lab().stop_node("b").unwrap();
                    points.let_go(point);
                    attempt.aborted();
                    bed.lab().start_node("b").unwrap();
                }
            }
            client = load.stop();
            client.asks().unwrap();
        }
    }
    crosses(&bed, NAME, "a", "b", "precopy");
    client.asks().unwrap();
}

#[test]
fn a_destination_that_dies_after_the_commit_has_the_service_when_it_is_back() {
    const POINT: &str = "destination.committing";
    let mut points = None;
    let bed = Bed::up_with("cross-commit", |config| points = Some(Points::among(config, &[POINT])));
    let points = points.unwrap();
    run(&bed, "a");
    let mut client = Client::connect(&bed);
    client.asks().unwrap();
    for mode in ["precopy", "postcopy"] {
        let (from, to) = if mode == "precopy" { ("a", "b") } else { ("b", "a") };
        let flags = [&["--mode", mode], &CROSS[..]].concat();
        bed.knows(from, NAME);
        let load = Load::start(client);
        let attempt = Attempt::held(&points, POINT, || Attempt::begin(&bed, NAME, from, to, &flags));
        bed.lab().stop_node(to).unwrap();
        points.let_go(POINT);
        bed.lab().start_node(to).unwrap();
        attempt.moved();
        client = load.stop();
        client.asks().unwrap();
    }
}

/// Why a move of a service is refused.
fn refused(bed: &Bed, name: &str, how: &[&str]) -> String {
    let mut tries = 1..TRIES;
    loop {
        let attempt = Attempt::begin(bed, name, "a", "b", how);
        let reason = attempt.aborted();
        if !godwit_tests::is_passing(&reason) || tries.next().is_none() {
            return reason;
        }
    }
}

#[test]
fn what_cannot_cross_is_refused_by_name_and_runs_on() {
    let bed = Bed::up("cross-refused");
    let busybox = bed.build(Workload::Busybox);
    bed.run(
        "a",
        "shell",
        ADDRESS,
        &godwit_lab::workload::Preset {
            command: ["/bin/sh", "-c", "while sleep 0.1; do echo more; done"].map(str::to_owned).into(),
            ..busybox
        },
        &[],
    );
    let reason = refused(&bed, "shell", &CROSS);
    let checked = bed.godwit("a", &[&["check", "shell", "--to", "b"], &CROSS[..]].concat());
    assert_eq!(checked.code, 1, "{checked:?}");
    assert!(checked.stdout.contains("was not built by godwit-cc for x86-64"), "{checked:?}");
    // Before its layers have been sent.
    assert!(reason.starts_with("node b refuses: "), "{reason}");
    assert!(
        reason.contains("process 1 (/usr/bin/busybox) was not built by godwit-cc for x86-64"),
        "{reason}"
    );
    let lines = |name: &str| bed.done("a", &["logs", name]).lines().count();
    let before = lines("shell");
    wait_for("the shell to go on", || (lines("shell") > before).then_some(()));
    bed.done("a", &["rm", "-f", "shell"]);

    let stuck = preset(&bed, "stuck", &[]);
    bed.run("a", "stuck", ADDRESS, &stuck, &[]);
    wait_for("the handler of a fault", || {
        bed.done("a", &["logs", "stuck"]).contains("in the handler").then_some(())
    });
    let reason = refused(&bed, "stuck", &["--cross"]);
    assert!(
        reason.contains(
            "process 1 (/bin/stuck) has not come to rest within 100 ms (--max-park-ms): its thread 1 "
        ),
        "{reason}"
    );
    let state = bed.done("a", &["ps", "-q"]);
    assert_eq!(state.trim(), "stuck");
    bed.done("a", &["rm", "-f", "stuck"]);

    run(&bed, "a");
    let mut client = Client::connect(&bed);
    client.asks().unwrap();
    // A file of the same contents is another file than the image's.
    let copy = bed.scratch().join("copy");
    fs::copy(bed.scratch().join("ledger/bin/ledger"), &copy).unwrap();
    bed.done("a", &["cp", copy.to_str().unwrap(), &format!("{NAME}:/bin/ledger")]);
    let reason = refused(&bed, NAME, &CROSS);
    assert!(reason.contains("process 1 (/bin/ledger"), "{reason}");
    client.asks().unwrap();
}

#[test]
fn children_that_have_ended_and_memory_that_processes_share_go_along() {
    let bed = Bed::up("cross-family");
    bed.run("a", "family", ADDRESS, &preset(&bed, "family", &[]), &[]);
    let turns = |node: &str| {
        let log = bed.done(node, &["logs", "family"]);
        assert!(!log.contains("wrong"), "{log}");
        log.lines().count()
    };
    let goes_on = |node: &str| {
        let before = turns(node);
        wait_for("two turns", || (turns(node) >= before + 2).then_some(()));
    };
    goes_on("a");
    bed.done("a", &["kill", "-s", "USR1", "family"]);
    wait_for("the child to be stopped", || {
        let said = bed.godwit("a", &[&["check", "family", "--to", "b"], &CROSS[..]].concat());
        (said.code == 1 && said.stdout.contains("is stopped by a signal")).then_some(())
    });
    let reason = refused(&bed, "family", &CROSS);
    assert!(reason.contains("is stopped by a signal, and cannot come to rest"), "{reason}");
    bed.done("a", &["kill", "-s", "USR2", "family"]);
    goes_on("a");
    for (mode, (from, to)) in MODES.into_iter().zip([("a", "b"), ("b", "a")].into_iter().cycle()) {
        crosses(&bed, "family", from, to, mode);
        goes_on(to);
    }
}

#[test]
fn programs_for_the_language_do_not_tell_that_they_crossed() {
    stress("cross-language", Kind::Language);
}

#[test]
fn programs_with_threads_do_not_tell_that_they_crossed() {
    stress("cross-threads", Kind::Threads);
}

#[test]
fn programs_with_signals_do_not_tell_that_they_crossed() {
    stress("cross-signals", Kind::Signals);
}

/// The polls at which programs are met are random: they run without a pause, and moves take as long as they do.
fn stress(name: &str, kind: Kind) {
    let bed = Bed::up(name);
    let groups = groups(&bed, &[kind]);
    let crossings = if is_full() { 334 } else { 4 };
    let each = crossings / groups.len() + 1;
    println!("{} services, {each} crossings of each", groups.len());
    let mut modes = MODES.into_iter().cycle();
    for group in groups {
        bed.run("a", &group.name, ADDRESS, &group.preset(&bed), &[]);
        group.goes_on(&bed, "a");
        let mut at = "a";
        for mode in modes.by_ref().take(each) {
            let to = if at == "a" { "b" } else { "a" };
            crosses(&bed, &group.name, at, to, mode);
            at = to;
            group.is_right(&bed, at);
        }
        group.goes_on(&bed, at);
        bed.done(at, &["rm", "-f", &group.name]);
    }
}

#[test]
fn processes_that_fork_and_execute_without_a_pause_come_to_rest() {
    const ASKED: &str = "source.asked";
    let mut points = None;
    let bed = Bed::up_with("cross-restless", |config| points = Some(Points::among(config, &[ASKED])));
    let points = points.unwrap();
    bed.run("a", "restless", ADDRESS, &preset(&bed, "restless", &[]), &[]);
    let turns = |node: &str| {
        let log = bed.done(node, &["logs", "restless"]);
        assert!(!log.contains("wrong"), "{log}");
        log.lines().count()
    };
    let goes_on = |node: &str| {
        let before = turns(node);
        wait_for("some turns", || (turns(node) > before).then_some(()));
    };
    goes_on("a");
    // Whatever it does when it has been asked, it goes on.
    for _ in 0..3 {
        let attempt = Attempt::held(&points, ASKED, || Attempt::begin(&bed, "restless", "a", "b", &CROSS));
        attempt.signal(rustix::process::Signal::INT);
        points.let_go(ASKED);
        attempt.end();
        goes_on("a");
    }
    let attempt = Attempt::held(&points, ASKED, || Attempt::begin(&bed, "restless", "a", "b", &CROSS));
    bed.lab().stop_node("a").unwrap();
    assert_eq!(attempt.end().code, UNKNOWN);
    points.let_go(ASKED);
    bed.lab().start_node("a").unwrap();
    goes_on("a");
    for (from, to) in [("a", "b"), ("b", "a"), ("a", "b")] {
        crosses(&bed, "restless", from, to, "precopy");
        goes_on(to);
    }
}
