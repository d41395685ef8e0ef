//! What the checker allows, and what it finds.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::promise::{Fence, RestartFrom};
use crate::record::State;

const BOUNDS: Bounds =
    Bounds { acts: Duration::ZERO, looks: Duration::from_secs(5), limit: Duration::from_secs(10) };

/// A history of one service, each step of which takes a second.
struct Told {
    history: History,
    service: ServiceName,
    settings: Settings,
    now: Duration,
}

impl Told {
    fn new(fence: Fence, restart_from: RestartFrom) -> Self {
        let (service, settings) = ("web".parse().unwrap(), Settings { fence, restart_from });
        let mut told = Self { history: History::new(BOUNDS), service, settings, now: Duration::ZERO };
        let claim = Request::Claim { by: node("a"), service: Ulid(1), id: Ulid(10), settings };
        told.change("a", claim, "a", 1, 10);
        told.runs("a", 1);
        told
    }

    fn pass(&mut self, seconds: u64) -> Duration {
        self.now += Duration::from_secs(seconds);
        self.now
    }

    fn record(&self, owner: &str, epoch: u64, begun: u128) -> ServiceRecord {
        let (id, begun, state) = (Ulid(1), Ulid(begun), State::Owned);
        ServiceRecord { id, owner: node(owner), epoch, begun, state, settings: self.settings }
    }

    fn runs(&mut self, by: &str, epoch: u64) {
        let now = self.pass(1);
        self.history.runs(&self.service, &node(by), epoch, now);
    }

    fn stops(&mut self, by: &str) {
        self.history.stops(&self.service, &node(by), self.now);
    }

    fn ask(&mut self, by: &str, asked: Asked<Request>) -> usize {
        let now = self.pass(1);
        self.history.ask(&self.service, &node(by), asked, now)
    }

    fn answer(&mut self, number: usize, record: ServiceRecord) {
        let now = self.pass(1);
        self.history.answer(&self.service, number, Answer::Is(Some(record)), now);
    }

    fn change(&mut self, by: &str, request: Request, owner: &str, epoch: u64, begun: u128) {
        let record = self.record(owner, epoch, begun);
        let number = self.ask(by, Asked::Change(request));
        self.answer(number, record);
    }

    fn hand_over(&mut self, to: &str) {
        let (id, to) = (Ulid(15), node(to));
        let request = Request::HandOver { by: node("a"), epoch: 1, to: to.clone(), id };
        let record = ServiceRecord { state: State::Moving { to, id }, ..self.record("a", 1, 10) };
        let number = self.ask("a", Asked::Change(request));
        self.answer(number, record);
    }

    fn take_over(&mut self, by: &str, epoch: u64) {
        let id = 20 + u128::from(epoch);
        let request = Request::TakeOver { by: node(by), epoch, id: Ulid(id), still: Vec::new() };
        self.change(by, request, by, epoch + 1, id);
        self.runs(by, epoch + 1);
    }

    fn look(&mut self, by: &str) {
        let record = self.record("b", 2, 21);
        let number = self.ask(by, Asked::Look);
        self.answer(number, record);
    }

    fn renew(&mut self, by: &str, counter: u64) {
        let (life, of) = (Ulid(7), node(by));
        for request in [LeaseRequest::Begin { life }, LeaseRequest::Renew { life }] {
            let at = self.now;
            let counter = counter + u64::from(matches!(request, LeaseRequest::Renew { .. }));
            let number = self.history.ask_lease(&of, &of, Asked::Change(request), at);
            let record = NodeRecord { life, counter };
            self.history.answer_lease(&of, number, Answer::Is(Some(record)), at);
        }
    }

    fn has_two_copies(&self) -> bool {
        match self.history.check() {
            Ok(_) => false,
            Err(Violation::TwoCopies { .. }) => true,
            Err(other) => panic!("{other}"),
        }
    }
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

#[test]
fn after_a_take_over_the_old_copy_of_a_default_service_may_run_until_its_node_hears_of_it() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    assert!(!told.has_two_copies(), "it has not heard");
    told.ask("a", Asked::Look);
    assert!(!told.has_two_copies(), "it has no answer");
    told.look("a");
    assert!(told.has_two_copies(), "it has heard, and runs on");
    told.stops("a");
    assert!(!told.has_two_copies(), "it stops at once");
}

#[test]
fn a_node_that_acts_late_or_is_refused_without_an_act_is_found() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    let request = Request::Release { by: node("a"), epoch: 1 };
    let (number, now) = (told.ask("a", Asked::Change(request)), told.pass(1));
    told.history.answer(&told.service, number, Answer::Refused, now);
    told.pass(1);
    told.stops("a");
    assert!(told.has_two_copies());
}

#[test]
fn a_node_that_reaches_the_store_and_does_not_look_is_found() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    told.renew("a", 1);
    let renewed = told.now;
    told.ask("a", Asked::Look);
    told.pass(20);
    told.stops("a");
    assert!(!told.has_two_copies(), "it looked, and the store was silent");
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    told.renew("a", 1);
    assert_eq!(told.now, renewed);
    told.pass(6);
    told.ask("a", Asked::Look);
    told.stops("a");
    assert!(told.has_two_copies(), "it looked too late");
}

#[test]
fn what_was_moved_away_is_not_excused_by_a_later_take_over() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.hand_over("b");
    let confirm = Request::Confirm { by: node("a"), epoch: 1, id: Ulid(15) };
    told.change("a", confirm, "b", 2, 15);
    told.take_over("c", 2);
    assert!(told.has_two_copies(), "the copy of epoch 1 was not taken over");
}

#[test]
fn a_take_over_from_a_node_that_holds_its_lease_is_found_even_if_only_the_destination_does() {
    let taken = |moves: bool, renews: &str, pause| {
        let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
        if moves {
            told.hand_over("b");
        }
        told.stops("a");
        told.renew(renews, 1);
        told.pass(pause);
        told.take_over("c", 1);
        told.history.check().err().map(|violation| match violation {
            Violation::TakenFromLiving { node, .. } => node.to_string(),
            other => panic!("{other}"),
        })
    };
    assert_eq!(taken(false, "a", 6).as_deref(), Some("a"));
    assert_eq!(taken(true, "b", 6).as_deref(), Some("b"));
    assert_eq!(taken(true, "b", 7), None, "its lease has lapsed");
    assert_eq!(taken(false, "b", 6), None, "it may not run the service");
    assert_eq!(taken(true, "c", 6), None, "it is the one that takes over");
}

#[test]
fn a_node_that_stops_its_copy_when_it_hears_keeps_the_promise() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    told.look("a");
    told.stops("a");
    let checked = told.history.check().unwrap();
    assert_eq!(checked, Checked { operations: 3, unknown: 0, epochs: 2, taken_over: 1, runs: 2 });
}

#[test]
fn a_strict_service_never_runs_twice_and_a_default_one_not_without_a_take_over() {
    let mut told = Told::new(Fence::Strict, RestartFrom::Checkpoint);
    told.take_over("b", 1);
    assert!(told.has_two_copies());
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.runs("b", 2);
    assert!(told.has_two_copies());
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.stops("a");
    told.runs("b", 2);
    assert!(!told.has_two_copies(), "one after the other");
}

#[test]
fn an_owner_that_nobody_made_contradicts_what_was_answered() {
    let mut told = Told::new(Fence::Default, RestartFrom::None);
    told.look("b");
    let violation = told.history.check().unwrap_err();
    assert!(matches!(&violation, Violation::Contradiction { piece, .. } if piece.len() == 2), "{violation}");
}

#[test]
fn a_move_that_a_third_node_confirms_contradicts_the_specification() {
    for (by, allowed) in [("a", true), ("b", true), ("c", false)] {
        let mut told = Told::new(Fence::Default, RestartFrom::None);
        told.hand_over("b");
        told.stops("a");
        told.change(by, Request::Confirm { by: node(by), epoch: 1, id: Ulid(15) }, "b", 2, 15);
        assert_eq!(told.history.check().is_ok(), allowed, "{by}");
    }
}
