//! Migrations that are cancelled, by `godwit cancel` and by Ctrl-C, at every step. Needs root.

use godwit_tests::{
    hold::POINTS,
    victim::{NAME, Victim},
};
use rustix::process::Signal;

/// The steps before the commit.
fn before_the_commit() -> impl Iterator<Item = &'static str> {
    POINTS.into_iter().take_while(|point| *point != "source.committed")
}

#[test]
fn godwit_cancel_before_the_commit_puts_the_service_back() {
    let victim = Victim::up("cancel");
    for point in before_the_commit() {
        let attempt = victim.begin_and_hold(point);
        // Any node can be asked.
        let node = if point.starts_with("source") { "a" } else { "b" };
        let said = victim.bed.godwit(node, &["cancel", NAME]);
        assert_eq!(said.code, 0, "{point}: {said:?}");
        let reason = attempt.aborted();
        assert!(reason.contains("it was cancelled"), "{point}: {reason}");
        victim.let_go(point);
        victim.is_as_before();
    }
    victim.moves_in_the_end();
}

#[test]
fn ctrl_c_before_the_commit_puts_the_service_back() {
    let victim = Victim::up("ctrl-c");
    for point in before_the_commit() {
        let attempt = victim.begin_and_hold(point);
        attempt.signal(Signal::INT);
        let reason = attempt.kept_with(130);
        assert!(reason.contains("it was cancelled"), "{point}: {reason}");
        victim.let_go(point);
        victim.is_as_before();
    }
    victim.moves_in_the_end();
}

#[test]
fn the_next_migration_waits_for_what_the_destination_still_puts_away() {
    let victim = Victim::up("cancel-again");
    let attempt = victim.begin_and_hold("destination.prepared");
    victim.hold("destination.dropping");
    let said = victim.bed.godwit("a", &["cancel", NAME]);
    assert_eq!(said.code, 0, "{said:?}");
    assert!(attempt.aborted().contains("it was cancelled"));
    victim.let_go("destination.prepared");
    victim.reached("destination.dropping");
    // The source has put the service back and takes the next order; node b is not ready for it yet.
    let again = victim.begin("a", "b");
    victim.let_go("destination.dropping");
    again.moved_well();
    victim.ends_at_b();
}

#[test]
fn after_the_commit_it_is_too_late_and_godwit_says_so() {
    let victim = Victim::up("cancel-late");
    let attempt = victim.begin_and_hold("source.committed");
    attempt.signal(Signal::INT);
    let mut cancel = victim.bed.command("a", &["cancel", NAME]);
    let cancel =
        cancel.stderr(std::process::Stdio::piped()).stdout(std::process::Stdio::piped()).spawn().unwrap();
    victim.let_go("source.committed");
    let said = cancel.wait_with_output().unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&said.stdout), String::from_utf8_lossy(&said.stderr));
    assert!(!said.status.success(), "{text}");
    assert!(
        text.contains("committed") || text.contains("no migration of service redis is under way"),
        "{text}"
    );
    attempt.moved_well();
    victim.ends_at_b();
}

#[test]
fn what_is_not_under_way_cannot_be_cancelled() {
    let victim = Victim::up("cancel-none");
    let said = victim.bed.godwit("a", &["cancel", NAME]);
    assert_eq!(said.code, 1, "{said:?}");
    assert!(said.stderr.contains("no migration of service redis is under way"), "{said:?}");
    let said = victim.bed.godwit("b", &["cancel", "nothing"]);
    assert_eq!(said.code, 1, "{said:?}");
    victim.moves_in_the_end();
}
