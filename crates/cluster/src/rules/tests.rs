//! Each rule: what it allows, what a repetition finds, and what it refuses.
#![allow(clippy::unwrap_used)]

use std::time::Duration;

use super::*;
use crate::clock::BootTime;
use crate::lease::Observed;
use crate::promise::{Fence, RestartFrom};
use crate::store::Revision;

const RESTARTS: Settings = Settings { fence: Fence::Strict, restart_from: RestartFrom::Checkpoint };

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn claim_by(name: &str, id: u128) -> Request {
    Request::Claim { by: node(name), service: Ulid(1), id: Ulid(id), settings: RESTARTS }
}

fn hand_over_to(name: &str, id: u128) -> Request {
    Request::HandOver { by: node("a"), epoch: 1, to: node(name), id: Ulid(id) }
}

fn confirm_by(name: &str, epoch: u64, id: u128) -> Request {
    Request::Confirm { by: node(name), epoch, id: Ulid(id) }
}

fn withdraw_by(name: &str, id: u128) -> Request {
    Request::Withdraw { by: node(name), epoch: 1, id: Ulid(id) }
}

fn take_over_by(name: &str, still: &[&str]) -> Request {
    let mut observed = Observed::default();
    let still = still.iter().map(|name| {
        observed.see(&node(name), None, Revision::NONE, BootTime::since_boot(Duration::ZERO));
        observed.stood_still(&node(name), Duration::ZERO).unwrap()
    });
    Request::TakeOver { by: node(name), epoch: 1, id: Ulid(90), still: still.collect() }
}

/// What is there after these requests, each of which is done, and finds itself done when it is repeated.
fn after(requests: &[Request]) -> ServiceRecord {
    let mut record = None;
    for request in requests {
        let Step::Write(next) = service(record.as_ref(), request).unwrap() else {
            panic!("{request:?} is done already");
        };
        let again = match request {
            Request::Withdraw { .. } => Step::Write(next.clone()),
            _ => Step::Already,
        };
        assert_eq!(service(Some(&next), request), Ok(again), "{request:?}");
        record = Some(next);
    }
    record.unwrap()
}

fn refused(record: &ServiceRecord, request: &Request) -> Refusal {
    service(Some(record), request).unwrap_err()
}

fn not_owner(owner: &str, epoch: u64) -> Refusal {
    Refusal::NotOwner { owner: node(owner), epoch }
}

fn not_moving(owner: &str, epoch: u64) -> Refusal {
    Refusal::NotMoving { owner: node(owner), epoch }
}

#[test]
fn a_name_belongs_to_the_first_who_claims_it_until_it_is_released() {
    let owned = after(&[claim_by("a", 10)]);
    assert_eq!((owned.owner.as_str(), owned.epoch, &owned.state), ("a", 1, &State::Owned));
    assert_eq!(refused(&owned, &claim_by("b", 11)), Refusal::Exists { owner: node("a"), epoch: 1 });
    let release = Request::Release { by: node("a"), epoch: 1 };
    let left = after(&[claim_by("a", 10), release.clone()]);
    for request in
        [hand_over_to("b", 12), withdraw_by("a", 12), confirm_by("a", 1, 12), take_over_by("b", &["a"])]
    {
        assert_eq!(refused(&left, &request), Refusal::Left { owner: node("a"), epoch: 1 }, "{request:?}");
    }
    let again = after(&[claim_by("a", 10), release.clone(), claim_by("b", 11)]);
    assert_eq!((again.owner.as_str(), again.epoch), ("b", 2), "the epoch goes on");
    assert_eq!(refused(&again, &release), not_owner("b", 2));
}

#[test]
fn a_move_makes_the_destination_the_owner_once() {
    let moved = after(&[claim_by("a", 10), hand_over_to("b", 20), confirm_by("a", 1, 20)]);
    assert_eq!((moved.owner.as_str(), moved.epoch, &moved.state), ("b", 2, &State::Owned));
    assert_eq!(
        service(Some(&moved), &confirm_by("b", 1, 20)),
        Ok(Step::Already),
        "the destination asks, too"
    );
    assert_eq!(refused(&moved, &withdraw_by("a", 20)), not_owner("b", 2), "too late");
    assert_eq!(refused(&moved, &hand_over_to("c", 21)), not_owner("b", 2));
    let back = Request::HandOver { by: node("b"), epoch: 2, to: node("a"), id: Ulid(30) };
    let next = after(&[claim_by("a", 10), hand_over_to("b", 20), confirm_by("b", 1, 20), back]);
    assert_eq!(
        service(Some(&next), &confirm_by("a", 1, 20)),
        Ok(Step::Already),
        "it is done, whatever came next"
    );
}

#[test]
fn only_the_move_that_is_under_way_is_confirmed_and_only_by_its_two_nodes() {
    let moving = after(&[claim_by("a", 10), hand_over_to("b", 20)]);
    assert_eq!(refused(&moving, &hand_over_to("c", 21)), Refusal::Moving { to: node("b"), id: Ulid(20) });
    assert_eq!(refused(&moving, &hand_over_to("a", 20)), Refusal::ToItself(node("a")));
    for request in [confirm_by("a", 1, 21), confirm_by("c", 1, 20)] {
        assert_eq!(refused(&moving, &request), not_moving("a", 1), "{request:?}");
    }
    assert!(matches!(refused(&moving, &withdraw_by("a", 21)), Refusal::Moving { .. }));
    assert_eq!(refused(&moving, &withdraw_by("b", 20)), not_owner("a", 1));
    assert!(matches!(
        refused(&moving, &Request::Release { by: node("a"), epoch: 1 }),
        Refusal::Moving { .. }
    ));
    let kept = after(&[claim_by("a", 10), hand_over_to("b", 20), withdraw_by("a", 20)]);
    assert_eq!(kept.epoch, 1);
    assert_eq!(refused(&kept, &confirm_by("b", 1, 20)), not_moving("a", 1));
}

#[test]
fn a_take_over_needs_the_leases_of_all_who_may_run_it_to_stand_still_and_settings_that_allow_it() {
    let owned = after(&[claim_by("a", 10)]);
    assert_eq!(refused(&owned, &take_over_by("b", &[])), Refusal::Alive(node("a")));
    assert_eq!(refused(&owned, &take_over_by("b", &["c"])), Refusal::Alive(node("a")));
    assert_eq!(refused(&owned, &take_over_by("a", &["a"])), not_owner("a", 1));
    let taken = after(&[claim_by("a", 10), take_over_by("b", &["a"])]);
    assert_eq!((taken.owner.as_str(), taken.epoch), ("b", 2));
    assert_eq!(refused(&taken, &Request::Release { by: node("a"), epoch: 1 }), not_owner("b", 2));

    let moving = after(&[claim_by("a", 10), hand_over_to("b", 20)]);
    assert_eq!(refused(&moving, &take_over_by("c", &["a"])), Refusal::Alive(node("b")));
    assert!(service(Some(&moving), &take_over_by("c", &["b", "a"])).is_ok());
    assert!(
        service(Some(&moving), &take_over_by("b", &["a"])).is_ok(),
        "the destination knows that it lives"
    );
    let taken = after(&[claim_by("a", 10), hand_over_to("b", 20), take_over_by("c", &["a", "b"])]);
    assert_eq!(refused(&taken, &confirm_by("a", 1, 20)), not_moving("c", 2));

    let waits = ServiceRecord { settings: Settings::default(), ..owned };
    assert_eq!(refused(&waits, &take_over_by("b", &["a"])), Refusal::Waits(node("a")));
}

#[test]
fn a_record_of_an_earlier_epoch_than_the_asker_knows_is_a_refusal_of_its_own() {
    let owned = after(&[claim_by("a", 10)]);
    let (by, epoch) = (node("a"), 3);
    for request in [
        Request::HandOver { by: by.clone(), epoch, to: node("b"), id: Ulid(20) },
        Request::Withdraw { by: by.clone(), epoch, id: Ulid(20) },
        Request::Confirm { by: by.clone(), epoch, id: Ulid(20) },
        Request::Release { by, epoch },
        Request::TakeOver { by: node("b"), epoch, id: Ulid(20), still: Vec::new() },
    ] {
        assert_eq!(refused(&owned, &request), Refusal::Behind { found: 1, known: 3 }, "{request:?}");
    }
}

#[test]
fn what_is_not_there_is_refused_and_no_number_wraps() {
    for request in
        [hand_over_to("b", 1), confirm_by("a", 1, 1), withdraw_by("a", 1), take_over_by("b", &["a"])]
    {
        assert_eq!(service(None, &request), Err(Refusal::Missing));
    }
    let last = ServiceRecord { epoch: MAX_COUNT, state: State::Left, ..after(&[claim_by("a", 10)]) };
    assert_eq!(refused(&last, &claim_by("b", 11)), Refusal::Exhausted);
    let lease_at = |counter| NodeRecord { life: Ulid(1), counter };
    let renew = LeaseRequest::Renew { life: Ulid(1) };
    assert_eq!(lease(Some(&lease_at(MAX_COUNT)), &renew), Err(Refusal::Exhausted));
}

#[test]
fn a_lease_is_renewed_by_the_present_life_alone_and_each_renewal_raises_it() {
    let begin = |life| LeaseRequest::Begin { life: Ulid(life) };
    let renew = |life| LeaseRequest::Renew { life: Ulid(life) };
    assert_eq!(lease(None, &renew(1)), Err(Refusal::Missing));
    let at = |life, counter| NodeRecord { life: Ulid(life), counter };
    assert_eq!(lease(None, &begin(1)), Ok(Step::Write(at(1, 1))));
    assert_eq!(lease(Some(&at(1, 1)), &begin(1)), Ok(Step::Already));
    assert_eq!(lease(Some(&at(1, 1)), &renew(1)), Ok(Step::Write(at(1, 2))));
    assert_eq!(lease(Some(&at(1, 2)), &renew(1)), Ok(Step::Write(at(1, 3))));
    assert_eq!(lease(Some(&at(1, 3)), &begin(2)), Ok(Step::Write(at(2, 4))), "the counter never falls");
    assert_eq!(lease(Some(&at(2, 4)), &renew(1)), Err(Refusal::OtherLife));
}
