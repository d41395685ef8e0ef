//! Both daemons killed during a migration, and what a doubt looks like to users: the service is at
//! exactly one node in the end, and its client has lost nothing. One daemon killed at every step is in
//! `failures_matrix`. Needs root.

use godwit_tests::victim::{UNKNOWN, Victim};

#[test]
fn a_copy_whose_source_is_gone_is_in_doubt_until_the_source_is_back() {
    let victim = Victim::up("doubt-kept");
    let attempt = victim.begin_and_hold("destination.restored");
    victim.bed.lab().stop_node("a").unwrap();
    victim.let_go("destination.restored");
    assert_eq!(attempt.end().code, UNKNOWN);
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
