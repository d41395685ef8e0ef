//! The link between the nodes cut at every step of a migration, while the client's own stays up.
//! Needs root.
#![allow(clippy::unwrap_used)]

use godwit_tests::victim::Victim;

/// The link is cut at `point`, before the commit.
fn cut_at(victim: &Victim, point: &str) {
    let attempt = victim.begin_patiently_and_hold(point);
    victim.bed.lab().cut("a", "b").unwrap();
    if point.starts_with("source") {
        // The silence is noticed by whoever waits for the other side.
        victim.let_go(point);
    }
    let reason = attempt.kept();
    assert!(reason.contains("node `b`"), "{point}: {reason}");
    victim.let_go(point);
    victim.bed.lab().heal("a", "b").unwrap();
    victim.is_as_before();
}

#[test]
fn cut_while_the_service_still_runs() {
    let victim = Victim::up("cut-early");
    cut_at(&victim, "destination.reserved");
    cut_at(&victim, "destination.prepared");
    victim.moves_in_the_end();
}

#[test]
fn cut_while_images_are_dumped_and_sent() {
    let victim = Victim::up("cut-images");
    cut_at(&victim, "source.frozen");
    cut_at(&victim, "destination.receiving");
    victim.moves_in_the_end();
}

#[test]
fn cut_around_the_restore() {
    let victim = Victim::up("cut-restore");
    cut_at(&victim, "destination.received");
    cut_at(&victim, "destination.restoring");
    victim.moves_in_the_end();
}

#[test]
fn cut_when_the_copy_is_complete_leaves_a_doubt_that_ends_with_the_cut() {
    let victim = Victim::up("cut-doubt");
    let attempt = victim.begin_and_hold("destination.restored");
    victim.bed.lab().cut("a", "b").unwrap();
    attempt.kept();
    victim.runs_at_a_whatever_b_says();
    victim.let_go("destination.restored");
    victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    victim.bed.lab().heal("a", "b").unwrap();
    victim.is_as_before();
    victim.moves_in_the_end();
}

#[test]
fn cut_after_the_commit_the_service_waits_for_the_link_and_godwit_says_so() {
    let victim = Victim::up("cut-commit");
    let attempt = victim.begin_and_hold("source.committed");
    victim.bed.lab().cut("a", "b").unwrap();
    victim.let_go("source.committed");
    let reason = attempt.moved();
    assert!(reason.contains("node b has not confirmed that it runs"), "{reason}");
    let doubt = victim.shown("b", |shown| shown.is_some_and(|shown| shown.state == "in-doubt"));
    assert!(doubt.unwrap().reason.contains("node a"));
    victim.bed.lab().heal("a", "b").unwrap();
    victim.ends_at_b();
}
