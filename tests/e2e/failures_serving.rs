//! What happens to a service while pages of it are still at its source: commands for it, daemons that
//! are told to end, pages that are lost at the source or on their way. Needs root.

use godwit_tests::victim::{Attempt, NAME, UNKNOWN, Victim};
use godwit_tests::{hold::inject, wait_for};

const POSTCOPY: [&str; 2] = ["--mode", "postcopy"];
const POINT: &str = "source.pushing";

/// A service that runs on `b`, as `b` says, while `a` has sent only the first of its pages and is held.
fn served(test: &str) -> (Victim, Attempt) {
    let victim = Victim::up(test);
    let attempt = victim.begin_with_and_hold("a", "b", &POSTCOPY, POINT);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.node == "b"));
    (victim, attempt)
}

#[test]
fn it_is_too_late_to_cancel_and_godwit_says_so_at_once() {
    let (victim, attempt) = served("serve-cancel");
    let said = victim.bed.godwit("a", &["cancel", NAME]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.contains("to node b had committed"), "{said:?}");
    victim.let_go(POINT);
    attempt.moved_well();
    victim.ends_at_b();
}

#[test]
fn a_source_that_is_told_to_end_serves_on_when_it_is_started_again() {
    let (victim, attempt) = served("serve-term");
    victim.terminate("a");
    // The daemon may hang up before its report is out.
    let said = attempt.end();
    assert!(said.code == UNKNOWN || said.stdout.contains("serves them when it is started again"), "{said:?}");
    victim.let_go(POINT);
    victim.has_ended("a");
    victim.bed.lab().start_node("a").unwrap();
    victim.ends_at_b();
}

#[test]
fn a_destination_that_is_told_to_end_goes_on_when_it_is_started_again() {
    let (victim, attempt) = served("fill-term");
    victim.terminate("b");
    victim.has_ended("b");
    victim.let_go(POINT);
    victim.bed.lab().start_node("b").unwrap();
    attempt.moved_well();
    victim.ends_at_b();
}

#[test]
fn a_service_that_is_removed_is_let_go_by_its_source_too() {
    let (victim, attempt) = served("serve-rm");
    victim.bed.done("b", &["rm", "--force", NAME]);
    // Nobody waits for the pages that are left.
    attempt.moved_well();
    victim.let_go(POINT);
    victim.is_gone();
}

#[test]
fn a_service_that_is_stopped_is_let_go_by_its_source_too() {
    let (victim, attempt) = served("serve-stop");
    victim.bed.done("b", &["stop", NAME]);
    attempt.moved_well();
    victim.let_go(POINT);
    let shown = victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "stopped"));
    assert!(shown.unwrap().reason.contains("godwit stop"));
    victim.bed.done("b", &["rm", NAME]);
    victim.is_gone();
}

#[test]
fn a_service_that_is_removed_while_its_source_is_away_is_let_go_when_that_is_back() {
    let (victim, attempt) = served("rm-away");
    victim.bed.lab().stop_node("a").unwrap();
    assert_eq!(attempt.end().code, UNKNOWN);
    victim.let_go(POINT);
    victim.bed.done("b", &["rm", "--force", NAME]);
    victim.bed.lab().start_node("a").unwrap();
    victim.is_gone();
}

#[test]
fn the_next_migration_waits_until_the_service_is_complete() {
    let (victim, attempt) = served("serve-next");
    let next = victim.begin_and_watch("b", "a", "destination.reserved");
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "migrating"));
    assert!(!victim.has_reached("destination.reserved"));
    victim.let_go(POINT);
    attempt.moved_well();
    victim.reached("destination.reserved");
    victim.let_go("destination.reserved");
    next.moved_well();
    victim.ends_at_a();
}

#[test]
fn a_service_that_is_lost_is_started_from_its_files_once_its_migration_is_over() {
    let always = ["--restart", "always"].map(str::to_owned).to_vec();
    let victim = Victim::up_with("lost-again", |_, _| {}, |_| always);
    let attempt = victim.begin_with_and_hold("a", "b", &POSTCOPY, POINT);
    victim.hold("destination.lost");
    for pager in victim.pagers("b") {
        rustix::process::kill_process(pager, rustix::process::Signal::KILL).unwrap();
    }
    victim.reached("destination.lost");
    // The state says that it has ended, and its processes are about to be killed.
    wait_for("node b to put the start off", || {
        let log = std::fs::read_to_string(victim.bed.lab().log("b").unwrap()).unwrap();
        log.contains("it is not started yet").then_some(())
    });
    victim.let_go("destination.lost");
    victim.let_go(POINT);
    assert!(attempt.lost().contains("its memory is not complete"));
    wait_for("the start from its files", || {
        let text = victim.bed.done("b", &["events"]);
        text.lines().any(|line| line.contains("restarted") && line.contains("not complete")).then_some(())
    });
    // What ended its last life does not end this one.
    wait_for("it to be let go by node a", || {
        let shown: serde_json::Value = victim.bed.json("a", &["inspect", NAME]);
        (shown["state"] == "remote").then_some(())
    });
    let shown: serde_json::Value = victim.bed.json("b", &["inspect", NAME]);
    assert_eq!((shown["state"].as_str(), shown["restarts"].as_u64()), (Some("running"), Some(1)), "{shown}");
    victim.never_ran_twice();
    victim.bed.done("b", &["rm", "--force", NAME]);
    victim.is_gone();
}

#[test]
fn whoever_looks_is_told_that_a_service_waits_for_pages_of_a_node_that_is_away() {
    let victim = Victim::up("wait-told");
    victim.hold(POINT);
    // Asked at the destination, whose connection to the source breaks.
    let attempt = Attempt::begin(&victim.bed, NAME, "b", "b", &POSTCOPY);
    victim.reached(POINT);
    victim.shown("b", |shown| {
        shown.is_some_and(|s| s.state == "running" && s.reason.contains("follow from there"))
    });
    victim.bed.lab().cut("a", "b").unwrap();
    let waits = |text: &str| {
        text.contains("waits for pages of node a (")
            && text.contains("unreachable")
            && text.contains(&format!("godwit rm --force {NAME}"))
    };
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && waits(&shown.reason)));
    assert!(victim.bed.done("b", &["ps"]).contains("waits for a, which has"));
    wait_for("an event", || victim.bed.done("b", &["events"]).lines().any(waits).then_some(()));
    let next = Attempt::begin(&victim.bed, NAME, "b", "a", &[]).end();
    assert!(next.code == 1 && waits(&next.stderr), "{next:?}");
    let said = attempt.end();
    assert!(said.code == 1 && said.stderr.contains("runs on this node") && waits(&said.stderr), "{said:?}");
    victim.bed.lab().heal("a", "b").unwrap();
    victim.let_go(POINT);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "running" && shown.reason.is_empty()));
    assert!(victim.bed.done("b", &["events"]).contains("node a is back"));
    victim.ends_at_b();
}

/// What the events of a node say of migrations that lost the service.
fn losses(victim: &Victim, node: &str) -> Vec<String> {
    let text = victim.bed.done(node, &["--json", "events"]);
    let events = text.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let lost = events.filter(|event| event["subject"] == "migration" && event["action"] == "lost");
    lost.map(|event| event["detail"].as_str().unwrap().to_owned()).collect()
}

/// The service has ended on `b` for this reason, and whoever looks is told so.
fn is_lost(victim: Victim, reason: &str, words: &str) {
    assert!(reason.contains("its memory is not complete") && reason.contains(words), "{reason}");
    let shown = victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "stopped"));
    assert_eq!(shown.unwrap().reason, reason);
    assert_eq!(losses(&victim, "b"), [reason]);
    wait_for("an event at the source", || (!losses(&victim, "a").is_empty()).then_some(()));
    assert_eq!(losses(&victim, "a"), [format!("on node b: {reason}")]);
    victim.bed.done("b", &["rm", NAME]);
    victim.is_gone();
}

#[test]
fn a_service_whose_pages_are_killed_at_the_source_is_lost_and_godwit_ends_with_that() {
    let (victim, attempt) = served("lost-source");
    victim.kill_processes("a");
    victim.let_go(POINT);
    let reason = attempt.lost();
    is_lost(victim, &reason, "on node a are gone");
}

#[test]
fn a_service_whose_pager_is_killed_is_lost_and_godwit_ends_with_that() {
    let (victim, attempt) = served("lost-pager");
    for pager in victim.pagers("b") {
        rustix::process::kill_process(pager, rustix::process::Signal::KILL).unwrap();
    }
    victim.let_go(POINT);
    let reason = attempt.lost();
    is_lost(victim, &reason, "pager");
}

#[test]
fn a_source_that_has_lost_the_pages_says_so_and_the_service_does_not_run_on_without_them() {
    let (victim, attempt) = served("serve-lost");
    victim.bed.lab().stop_node("a").unwrap();
    assert_eq!(attempt.end().code, UNKNOWN);
    victim.let_go(POINT);
    victim.kill_processes("a");
    victim.bed.lab().start_node("a").unwrap();
    let shown = victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "stopped"));
    let reason = shown.unwrap().reason;
    assert!(
        reason.contains("its memory is not complete") && reason.contains("on node a are gone"),
        "{reason}"
    );
    victim.bed.done("b", &["rm", NAME]);
    victim.is_gone();
}

#[test]
fn a_service_is_lost_when_its_source_cannot_read_a_page_of_it_any_more() {
    let victim =
        Victim::up_with("serve-unread", |config, _| inject(config, "source.reading"), |_| Vec::new());
    let reason = victim.begin_with("a", "b", &POSTCOPY).lost();
    is_lost(victim, &reason, "exists and cannot be read");
}

#[test]
fn a_source_whose_state_fails_at_the_commit_serves_the_pages_all_the_same() {
    let victim =
        Victim::up_with("serve-state", |config, _| inject(config, "source.releasing"), |_| Vec::new());
    victim.begin_with("a", "b", &POSTCOPY).moved_well();
    victim.ends_at_b();
}
