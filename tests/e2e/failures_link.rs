//! What users see while the link between the nodes is cut around the commit, and the client's own
//! stays up. The link cut at every step is in `failures_matrix`. Needs root.

use godwit_tests::victim::Victim;

#[test]
fn cut_when_the_copy_is_complete_leaves_a_doubt_that_ends_with_the_cut() {
    let victim = Victim::up("cut-doubt");
    let attempt = victim.begin_and_hold("destination.restored");
    victim.bed.lab().cut("a", "b").unwrap();
    attempt.aborted();
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
