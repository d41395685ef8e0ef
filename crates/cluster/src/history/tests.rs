//! What the checker allows, and what it finds.
#![allow(clippy::unwrap_used)]

use super::*;
use crate::promise::{Fence, RestartFrom};

/// A history of one service, whose nodes are never late.
struct Told {
    history: History,
    service: ServiceName,
    settings: Settings,
}

impl Told {
    fn new(fence: Fence, restart_from: RestartFrom) -> Self {
        let (service, settings) = ("web".parse().unwrap(), Settings { fence, restart_from });
        let mut told = Self { history: History::default(), service, settings };
        let claim = Request::Claim { by: node("a"), service: Ulid(1), id: Ulid(10), settings };
        told.change("a", claim, "a", 1, 10);
        told.history.runs(&told.service, &node("a"), 1, Duration::ZERO);
        told
    }

    fn record(&self, owner: &str, epoch: u64, begun: u128) -> ServiceRecord {
        let (id, begun, state) = (Ulid(1), Ulid(begun), State::Owned);
        ServiceRecord { id, owner: node(owner), epoch, begun, state, settings: self.settings }
    }

    fn change(&mut self, by: &str, request: Request, owner: &str, epoch: u64, begun: u128) {
        let found = Answer::Is(Some(self.record(owner, epoch, begun)));
        let number = self.history.ask(&self.service, &node(by), Asked::Change(request), Duration::ZERO);
        self.history.answer(&self.service, number, found);
    }

    fn take_over(&mut self) {
        let request = Request::TakeOver { by: node("b"), epoch: 1, id: Ulid(20), still: Vec::new() };
        self.change("b", request, "b", 2, 20);
        self.history.runs(&self.service, &node("b"), 2, Duration::ZERO);
    }

    fn look(&mut self, by: &str) -> usize {
        let number = self.history.ask(&self.service, &node(by), Asked::Look, Duration::ZERO);
        self.history.answer(&self.service, number, Answer::Is(Some(self.record("b", 2, 20))));
        number
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
    told.take_over();
    assert!(!told.has_two_copies(), "it has not heard");
    let number = told.look("a");
    assert!(!told.has_two_copies(), "it has not acted yet");
    told.history.acted_on(&told.service, number);
    assert!(told.has_two_copies(), "it has heard, and runs on");
}

#[test]
fn a_node_that_stops_its_copy_when_it_hears_keeps_the_promise() {
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.take_over();
    let number = told.look("a");
    told.history.stops(&told.service, &node("a"));
    told.history.acted_on(&told.service, number);
    let checked = told.history.check().unwrap();
    assert_eq!(checked, Checked { operations: 3, unknown: 0, epochs: 2, taken_over: 1, runs: 2 });
}

#[test]
fn a_strict_service_never_runs_twice_and_a_default_one_not_without_a_take_over() {
    let mut told = Told::new(Fence::Strict, RestartFrom::Checkpoint);
    told.take_over();
    assert!(told.has_two_copies());
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.history.runs(&told.service, &node("b"), 2, Duration::ZERO);
    assert!(told.has_two_copies());
    let mut told = Told::new(Fence::Default, RestartFrom::Checkpoint);
    told.history.stops(&told.service, &node("a"));
    told.history.runs(&told.service, &node("b"), 2, Duration::ZERO);
    assert!(!told.has_two_copies(), "one after the other");
}

#[test]
fn an_owner_that_nobody_made_contradicts_what_was_answered() {
    let mut told = Told::new(Fence::Default, RestartFrom::None);
    told.look("b");
    let violation = told.history.check().unwrap_err();
    assert!(matches!(&violation, Violation::Contradiction { piece, .. } if piece.len() == 2), "{violation}");
}
