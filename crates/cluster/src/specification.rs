//! What the records of services and nodes mean, written apart from the rules: what an answer says of them, and what it leaves.

use std::time::Duration;

use godwit_names::NodeName;
use ulid::Ulid;

use crate::linear::Specification;
use crate::record::{NodeRecord, ServiceRecord, State};
use crate::rules::{LeaseRequest, Request};

/// What a client asked for.
#[derive(Debug, Clone)]
pub enum Asked<Q> {
    /// A change.
    Change(Q),
    /// The record.
    Look,
}

/// What it was answered.
#[derive(Debug, Clone)]
pub enum Answer<R> {
    /// The change is done, or the look: what the record is.
    Is(Option<R>),
    /// It is certain that nothing is changed, since the record does not allow it.
    Refused,
    /// It is certain that nothing is changed, for another reason.
    NotDone,
}

/// A question of a client with its answer, if there is one.
#[derive(Debug, Clone)]
pub struct Operation<Q, R> {
    /// The client.
    pub by: NodeName,
    /// What it asked.
    pub asked: Asked<Q>,
    /// None: the outcome is unknown.
    pub answer: Option<Answer<R>>,
    /// When it asked, for people.
    pub at: Duration,
}

/// Of a service.
pub type ServiceOperation = Operation<Request, ServiceRecord>;

/// Of a node.
pub type LeaseOperation = Operation<LeaseRequest, NodeRecord>;

/// What the records of services mean.
#[derive(Debug)]
pub struct Services;

/// What a request makes of a record, if it is in order.
fn effect(record: Option<&ServiceRecord>, request: &Request) -> Option<ServiceRecord> {
    let owned_in = |by: &NodeName, epoch: u64, state: &State| {
        record.filter(|record| record.owner == *by && record.epoch == epoch && record.state == *state)
    };
    match request {
        Request::Claim { by, service, id, settings } => {
            let epoch = match record {
                None => 1,
                Some(ServiceRecord { state: State::Left, epoch, .. }) => epoch + 1,
                Some(_) => return None,
            };
            let (owner, state) = (by.clone(), State::Owned);
            Some(ServiceRecord { id: *service, owner, epoch, begun: *id, state, settings: *settings })
        }
        Request::HandOver { by, epoch, to, id } => {
            let state = State::Moving { to: to.clone(), id: *id };
            owned_in(by, *epoch, &State::Owned).map(|record| ServiceRecord { state, ..record.clone() })
        }
        Request::Release { by, epoch } => owned_in(by, *epoch, &State::Owned)
            .map(|record| ServiceRecord { state: State::Left, ..record.clone() }),
        Request::Withdraw { by, epoch, id } => match record {
            Some(ServiceRecord {
                state: State::Moving { id: moving, .. }, owner, epoch: current, ..
            }) if (moving, owner, current) == (id, by, epoch) => {
                record.map(|record| ServiceRecord { state: State::Owned, ..record.clone() })
            }
            _ => None,
        },
        Request::Confirm { by, epoch, id } => match &record?.state {
            State::Moving { to, id: moving } if moving == id && record?.epoch == *epoch => {
                let is_theirs = by == to || *by == record?.owner;
                if is_theirs { next_epoch(record?, to, *id) } else { None }
            }
            _ => None,
        },
        Request::TakeOver { by, epoch, id, .. } => {
            let allowed = record?.epoch == *epoch
                && record?.state != State::Left
                && record?.settings.promise().taken_over;
            if allowed { next_epoch(record?, by, *id) } else { None }
        }
    }
}

fn next_epoch(record: &ServiceRecord, owner: &NodeName, begun: Ulid) -> Option<ServiceRecord> {
    let epoch = record.epoch + 1;
    Some(ServiceRecord { owner: owner.clone(), epoch, begun, state: State::Owned, ..record.clone() })
}

/// Whether a record shows that a request was done before.
fn shows(record: &ServiceRecord, request: &Request) -> bool {
    match request {
        Request::Claim { id, .. } | Request::Confirm { id, .. } | Request::TakeOver { id, .. } => {
            record.begun == *id
        }
        Request::HandOver { id, .. } => {
            matches!(&record.state, State::Moving { id: moving, .. } if moving == id)
        }
        Request::Withdraw { by, epoch, .. } => {
            (&record.owner, record.epoch, &record.state) == (by, *epoch, &State::Owned)
        }
        Request::Release { by, epoch } => {
            (&record.owner, record.epoch, &record.state) == (by, *epoch, &State::Left)
        }
    }
}

impl Specification for Services {
    type State = Option<ServiceRecord>;
    type Operation = ServiceOperation;

    fn initial(&self) -> Self::State {
        None
    }

    fn step(&self, state: &Self::State, operation: &Self::Operation, unknown: bool) -> Option<Self::State> {
        let record = state.as_ref();
        match (&operation.asked, &operation.answer) {
            (Asked::Look, Some(Answer::Is(found))) => (found == state).then(|| state.clone()),
            (Asked::Change(request), _) if unknown => effect(record, request).map(Some),
            // What it found is a look of its own: a change without an answer is read back, and others may follow it before.
            (Asked::Change(request), Some(Answer::Is(_))) => {
                let shown = record.is_some_and(|record| shows(record, request));
                if shown { Some(state.clone()) } else { effect(record, request).map(Some) }
            }
            // A take-over is refused for what another record has, too.
            (Asked::Change(Request::TakeOver { .. }), Some(Answer::Refused)) => Some(state.clone()),
            (Asked::Change(request), Some(Answer::Refused)) => {
                let refused =
                    record.is_none_or(|record| !shows(record, request)) && effect(record, request).is_none();
                refused.then(|| state.clone())
            }
            // A look without an answer says nothing.
            (_, Some(Answer::NotDone) | None) | (Asked::Look, _) => (!unknown).then(|| state.clone()),
        }
    }
}

/// What the records of nodes mean. A renewal without an answer can have raised the counter more than once, so a look that
/// finds it higher is in order. What counts: it never falls, and only the present life is told that it renewed.
#[derive(Debug)]
pub struct Leases;

impl Specification for Leases {
    type State = Option<NodeRecord>;
    type Operation = LeaseOperation;

    fn initial(&self) -> Self::State {
        None
    }

    fn step(&self, state: &Self::State, operation: &Self::Operation, unknown: bool) -> Option<Self::State> {
        let counter = state.as_ref().map_or(0, |record| record.counter);
        let is_present = |life: &Ulid| state.as_ref().is_some_and(|record| record.life == *life);
        match (&operation.asked, &operation.answer) {
            (Asked::Change(LeaseRequest::Begin { life }), _) if unknown => {
                (!is_present(life)).then_some(Some(NodeRecord { life: *life, counter: counter + 1 }))
            }
            (_, _) if unknown => None,
            (Asked::Look, Some(Answer::Is(None))) => state.is_none().then_some(None),
            (Asked::Look, Some(Answer::Is(Some(found)))) => {
                (is_present(&found.life) && found.counter >= counter).then(|| Some(found.clone()))
            }
            (Asked::Change(request), Some(Answer::Is(Some(found)))) => {
                let (life, allowed) = match request {
                    LeaseRequest::Begin { life } => (life, true),
                    LeaseRequest::Renew { life } => (life, is_present(life) && found.counter > counter),
                };
                (allowed && found.life == *life && found.counter >= counter).then(|| Some(found.clone()))
            }
            (Asked::Change(LeaseRequest::Renew { life }), Some(Answer::Refused)) => {
                (!is_present(life)).then(|| state.clone())
            }
            _ => Some(state.clone()),
        }
    }
}
