//! Daemons killed at every step of a migration: the service is at exactly one node in the end, and
//! its client has lost nothing. Needs root.
#![allow(clippy::unwrap_used)]

use godwit_tests::victim::Victim;

/// The daemon of `b` is killed at `point`, before the commit.
fn destination_dies_at(victim: &Victim, point: &str) {
    let attempt = victim.begin_and_hold(point);
    victim.bed.lab().stop_node("b").unwrap();
    victim.let_go(point);
    let reason = attempt.kept();
    assert!(reason.contains("node `b`"), "{point}: {reason}");
    victim.bed.lab().start_node("b").unwrap();
    victim.is_as_before();
}

#[test]
fn the_destinations_daemon_dies_before_anything_is_there_to_restore() {
    let victim = Victim::up("dst-early");
    for point in ["destination.reserved", "destination.prepared", "destination.receiving"] {
        destination_dies_at(&victim, point);
    }
    victim.moves_in_the_end();
}

#[test]
fn the_destinations_daemon_dies_while_it_restores() {
    let victim = Victim::up("dst-restore");
    for point in ["destination.received", "destination.restoring", "destination.restored"] {
        destination_dies_at(&victim, point);
    }
    victim.moves_in_the_end();
}

/// The daemon of `b` is killed at `point`, after the commit: `b` owns the service, and says so as
/// soon as it is back.
fn destination_dies_after_the_commit_at(point: &str, test: &str) {
    let victim = Victim::up(test);
    let attempt = victim.begin_and_hold(point);
    victim.bed.lab().stop_node("b").unwrap();
    victim.let_go(point);
    let reason = attempt.moved();
    assert!(reason.contains("node b has not confirmed that it runs"), "{point}: {reason}");
    victim.bed.lab().start_node("b").unwrap();
    victim.ends_at_b();
}

#[test]
fn the_destinations_daemon_dies_before_it_has_noted_the_commit() {
    destination_dies_after_the_commit_at("destination.committing", "dst-commit");
}

#[test]
fn the_destinations_daemon_dies_when_it_has_noted_the_commit() {
    destination_dies_after_the_commit_at("destination.committed", "dst-done");
}

/// The daemon of `a` is killed while `b` or `a` is held at `point`, before the commit.
fn source_dies_at(victim: &Victim, point: &str) {
    let attempt = victim.begin_and_hold(point);
    victim.bed.lab().stop_node("a").unwrap();
    let said = attempt.end();
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.starts_with("Error: ") && said.stderr.lines().count() == 1, "{said:?}");
    victim.let_go(point);
    victim.bed.lab().start_node("a").unwrap();
    victim.is_as_before();
}

#[test]
fn the_sources_daemon_dies_before_the_commit() {
    let victim = Victim::up("src-early");
    for point in ["destination.reserved", "destination.prepared", "source.frozen", "destination.receiving"] {
        source_dies_at(&victim, point);
    }
    victim.moves_in_the_end();
}

#[test]
fn the_sources_daemon_dies_while_the_destination_restores() {
    let victim = Victim::up("src-late");
    for point in ["destination.received", "destination.restoring"] {
        source_dies_at(&victim, point);
    }
    victim.moves_in_the_end();
}

#[test]
fn a_copy_whose_source_is_gone_is_in_doubt_until_the_source_is_back() {
    let victim = Victim::up("doubt-kept");
    let attempt = victim.begin_and_hold("destination.restored");
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("destination.restored");
    assert_eq!(attempt.end().code, 1);
    let shown = victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    assert!(shown.unwrap().reason.contains("node a"));
    // The doubt outlives the daemon that has it.
    victim.bed.lab().restart_node("b").unwrap();
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    victim.bed.lab().start_node("a").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn a_source_that_dies_after_its_commit_still_gives_the_service_away() {
    let victim = Victim::up("doubt-moved");
    let attempt = victim.begin_and_hold("source.committed");
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("source.committed");
    assert_eq!(attempt.end().code, 1);
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    victim.bed.lab().start_node("a").unwrap();
    victim.ends_at_b();
}

#[test]
fn both_daemons_die_before_the_commit() {
    let victim = Victim::up("both-early");
    let attempt = victim.begin_and_hold("destination.restored");
    victim.bed.lab().stop_node("b").unwrap();
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("destination.restored");
    attempt.end();
    victim.bed.lab().start_node("b").unwrap();
    victim.bed.lab().start_node("a").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn both_daemons_die_after_the_commit() {
    let victim = Victim::up("both-late");
    let attempt = victim.begin_and_hold("source.committed");
    victim.bed.lab().stop_node("a").unwrap();
    victim.bed.lab().stop_node("b").unwrap();
    victim.let_go("source.committed");
    attempt.end();
    victim.bed.lab().start_node("a").unwrap();
    victim.bed.lab().start_node("b").unwrap();
    victim.ends_at_b();
}
