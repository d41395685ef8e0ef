//! Which record may follow which: pure functions of a record and a request.
//!
//! ```text
//!              claim                  hand over                 confirm (the commit)
//!  nothing │ Left ──────► Owned(a, 1) ──────────► Moving(a ► b, 1) ──────────► Owned(b, 2)
//!                          │    ▲                  │   │
//!                  release │    └──── withdraw ────┘   │ take over by c: the leases of all who may run it stand still
//!                          ▼                           ▼
//!                         Left                        Owned(c, 2)
//! ```
//! The epoch rises with each owner. A request has an id of its own, or the epoch that it is about. So a request that is
//! repeated finds itself done ([`Step::Already`]), and one of an earlier epoch is refused. A withdrawal alone writes even
//! then: the new revision makes void what is on its way of the hand-over.

use godwit_names::NodeName;
use ulid::Ulid;

use crate::lease::Still;
use crate::promise::Settings;
use crate::record::{MAX_COUNT, NodeRecord, ServiceRecord, State};

/// What a node asks for of a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// A new service, on this node.
    Claim {
        /// The node that will run it.
        by: NodeName,
        /// The service.
        service: Ulid,
        /// The claim: made anew for each.
        id: Ulid,
        /// What the service promises.
        settings: Settings,
    },
    /// The owner begins to move it.
    HandOver {
        /// The owner.
        by: NodeName,
        /// Its epoch.
        epoch: u64,
        /// The destination.
        to: NodeName,
        /// The move: made anew for each.
        id: Ulid,
    },
    /// The owner ends the move before the commit, and still owns it. Afterwards no hand-over that is on its way is done.
    Withdraw {
        /// The owner.
        by: NodeName,
        /// Its epoch.
        epoch: u64,
        /// The move.
        id: Ulid,
    },
    /// The commit: the destination becomes the owner. The source asks for it. The destination repeats it, if the source
    /// could not reach the store and went forward by its journal. It must not ask before the source has told it of that
    /// decision: the source could still roll back, and both would run the service.
    Confirm {
        /// The source or the destination.
        by: NodeName,
        /// The source's epoch.
        epoch: u64,
        /// The move.
        id: Ulid,
    },
    /// The owner has removed it.
    Release {
        /// The owner.
        by: NodeName,
        /// Its epoch.
        epoch: u64,
    },
    /// Another node becomes the owner, since those who may run it are lost.
    TakeOver {
        /// The node that will run it.
        by: NodeName,
        /// The lost owner's epoch.
        epoch: u64,
        /// The take-over: made anew for each.
        id: Ulid,
        /// The leases that have stood still. The swap compares them, so that none has moved since.
        still: Vec<Still>,
    },
}

impl Request {
    /// What must stand still until it is done.
    #[must_use]
    pub fn still(&self) -> &[Still] {
        if let Self::TakeOver { still, .. } = self { still } else { &[] }
    }

    /// The epoch that it is about; none for a claim.
    #[must_use]
    pub fn epoch(&self) -> Option<u64> {
        match self {
            Self::Claim { .. } => None,
            Self::HandOver { epoch, .. }
            | Self::Withdraw { epoch, .. }
            | Self::Confirm { epoch, .. }
            | Self::Release { epoch, .. }
            | Self::TakeOver { epoch, .. } => Some(*epoch),
        }
    }

    /// The epoch of the record that it makes; none where that depends on the record before.
    #[must_use]
    pub fn makes(&self) -> Option<u64> {
        let begins = matches!(self, Self::Confirm { .. } | Self::TakeOver { .. });
        self.epoch().map(|epoch| epoch.saturating_add(u64::from(begins)))
    }
}

/// What a node asks for of its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseRequest {
    /// The daemon has started: its earlier lives can no longer renew. It does not count as a renewal.
    Begin {
        /// Its life: made anew at each start.
        life: Ulid,
    },
    /// The counter is raised, even if an earlier renewal without an answer has raised it: the others may have seen that
    /// one for a while already.
    Renew {
        /// The daemon's life.
        life: Ulid,
    },
}

/// What is to be done for a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step<R> {
    /// It is done already, by an earlier call.
    Already,
    /// This record is written.
    Write(R),
}

/// Why a request is not fulfilled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no record.
    #[error("the store does not have it; look with `godwit ps` where it runs")]
    Missing,
    /// The name is another service's.
    #[error("node {owner} has a service of this name (epoch {epoch}); choose another name")]
    Exists {
        /// Its owner.
        owner: NodeName,
        /// Its epoch.
        epoch: u64,
    },
    /// The node that asks does not own it, or not in that epoch any more.
    #[error("node {owner} owns the service since epoch {epoch}; ask that node")]
    NotOwner {
        /// The owner.
        owner: NodeName,
        /// Its epoch.
        epoch: u64,
    },
    /// The node that asks knows a later epoch than the store, which has lost what it had acknowledged.
    #[error(
        "this node knows epoch {known} of the service, and the store has epoch {found}: the store was put back from an older copy; no node acts on it until its record is put right"
    )]
    Behind {
        /// That of the record.
        found: u64,
        /// That of the request.
        known: u64,
    },
    /// It is moving, and a move has to end first.
    #[error("the service is moving to node {to} (move {id}); wait for its end")]
    Moving {
        /// The destination.
        to: NodeName,
        /// The move.
        id: Ulid,
    },
    /// It is not moving, or this is another move.
    #[error("the service is not in this move any more: node {owner} has it (epoch {epoch})")]
    NotMoving {
        /// The owner.
        owner: NodeName,
        /// Its epoch.
        epoch: u64,
    },
    /// It was removed.
    #[error("the service was removed from node {owner} (epoch {epoch})")]
    Left {
        /// The last owner.
        owner: NodeName,
        /// Its epoch.
        epoch: u64,
    },
    /// Source and destination are the same.
    #[error("the service is on node {0} already")]
    ToItself(NodeName),
    /// Its settings do not allow another node to start it.
    #[error(
        "the service waits for node {0}: it is not restarted from a checkpoint or its image on another node"
    )]
    Waits(NodeName),
    /// A node that may run it was not seen to stand still, or has renewed its lease since.
    #[error("node {0} may still run the service: its lease has not stood still for the limit")]
    Alive(NodeName),
    /// The daemon has started anew since.
    #[error("another godwitd has begun a later life of this node; end one of the two")]
    OtherLife,
    /// No higher number is allowed.
    #[error(
        "a counter in the record is at its highest value, which no node counts to; remove the record if nothing runs under its name"
    )]
    Exhausted,
}

fn next(count: u64) -> Result<u64, Refusal> {
    if count < MAX_COUNT { Ok(count + 1) } else { Err(Refusal::Exhausted) }
}

/// A record in a new epoch, of another owner.
fn owned_by(by: &NodeName, begun: Ulid, record: &ServiceRecord) -> Result<Step<ServiceRecord>, Refusal> {
    let epoch = next(record.epoch)?;
    Ok(Step::Write(ServiceRecord { owner: by.clone(), epoch, begun, state: State::Owned, ..record.clone() }))
}

/// What follows a service's record.
///
/// # Errors
/// Why nothing does.
pub fn service(record: Option<&ServiceRecord>, request: &Request) -> Result<Step<ServiceRecord>, Refusal> {
    let Some(record) = record else {
        let Request::Claim { by, service, id, settings } = request else { return Err(Refusal::Missing) };
        return Ok(Step::Write(ServiceRecord {
            id: *service,
            owner: by.clone(),
            epoch: 1,
            begun: *id,
            state: State::Owned,
            settings: *settings,
        }));
    };
    if let Some(known) = request.epoch().filter(|known| *known > record.epoch) {
        return Err(Refusal::Behind { found: record.epoch, known });
    }
    match request {
        Request::Claim { by, service, id, settings } => claim(record, by, *service, *id, *settings),
        Request::HandOver { by, epoch, to, id } => hand_over(record, by, *epoch, to, *id),
        Request::Withdraw { by, epoch, id } => withdraw(record, by, *epoch, *id),
        Request::Confirm { by, epoch, id } => confirm(record, by, *epoch, *id),
        Request::Release { by, epoch } => release(record, by, *epoch),
        Request::TakeOver { by, epoch, id, still } => take_over(record, by, *epoch, *id, still),
    }
}

fn claim(
    record: &ServiceRecord,
    by: &NodeName,
    service: Ulid,
    id: Ulid,
    settings: Settings,
) -> Result<Step<ServiceRecord>, Refusal> {
    if record.begun == id {
        return Ok(Step::Already);
    }
    if record.state != State::Left {
        return Err(Refusal::Exists { owner: record.owner.clone(), epoch: record.epoch });
    }
    owned_by(by, id, &ServiceRecord { id: service, settings, ..record.clone() })
}

/// The node that asks must be the owner, in the epoch that it believes in.
fn is_owners(record: &ServiceRecord, by: &NodeName, epoch: u64) -> Result<(), Refusal> {
    let (owner, current) = (record.owner.clone(), record.epoch);
    if (&owner, current) == (by, epoch) { Ok(()) } else { Err(Refusal::NotOwner { owner, epoch: current }) }
}

fn left(record: &ServiceRecord) -> Refusal {
    Refusal::Left { owner: record.owner.clone(), epoch: record.epoch }
}

fn hand_over(
    record: &ServiceRecord,
    by: &NodeName,
    epoch: u64,
    to: &NodeName,
    id: Ulid,
) -> Result<Step<ServiceRecord>, Refusal> {
    is_owners(record, by, epoch)?;
    match &record.state {
        _ if to == by => Err(Refusal::ToItself(to.clone())),
        State::Owned => {
            Ok(Step::Write(ServiceRecord { state: State::Moving { to: to.clone(), id }, ..record.clone() }))
        }
        State::Moving { to: other, id: same } if *same == id && other == to => Ok(Step::Already),
        State::Moving { to, id } => Err(Refusal::Moving { to: to.clone(), id: *id }),
        State::Left => Err(left(record)),
    }
}

fn withdraw(
    record: &ServiceRecord,
    by: &NodeName,
    epoch: u64,
    id: Ulid,
) -> Result<Step<ServiceRecord>, Refusal> {
    is_owners(record, by, epoch)?;
    match &record.state {
        State::Moving { id: moving, .. } if *moving == id => {
            Ok(Step::Write(ServiceRecord { state: State::Owned, ..record.clone() }))
        }
        // Written again: a hand-over without an answer compares the present revision, and could be done later.
        State::Owned => Ok(Step::Write(record.clone())),
        State::Moving { to, id } => Err(Refusal::Moving { to: to.clone(), id: *id }),
        State::Left => Err(left(record)),
    }
}

fn confirm(
    record: &ServiceRecord,
    by: &NodeName,
    epoch: u64,
    id: Ulid,
) -> Result<Step<ServiceRecord>, Refusal> {
    if record.begun == id {
        return Ok(Step::Already);
    }
    match &record.state {
        State::Moving { to, id: moving }
            if *moving == id && record.epoch == epoch && (by == to || *by == record.owner) =>
        {
            owned_by(to, id, record)
        }
        State::Left => Err(left(record)),
        _ => Err(Refusal::NotMoving { owner: record.owner.clone(), epoch: record.epoch }),
    }
}

fn release(record: &ServiceRecord, by: &NodeName, epoch: u64) -> Result<Step<ServiceRecord>, Refusal> {
    is_owners(record, by, epoch)?;
    match &record.state {
        State::Owned => Ok(Step::Write(ServiceRecord { state: State::Left, ..record.clone() })),
        State::Left => Ok(Step::Already),
        State::Moving { to, id } => Err(Refusal::Moving { to: to.clone(), id: *id }),
    }
}

fn take_over(
    record: &ServiceRecord,
    by: &NodeName,
    epoch: u64,
    id: Ulid,
    still: &[Still],
) -> Result<Step<ServiceRecord>, Refusal> {
    if record.begun == id {
        return Ok(Step::Already);
    }
    if record.epoch != epoch || record.owner == *by {
        return Err(Refusal::NotOwner { owner: record.owner.clone(), epoch: record.epoch });
    }
    // During a move the destination may have gone forward by the source's journal.
    let destination = match &record.state {
        State::Owned => None,
        State::Moving { to, .. } => Some(to),
        State::Left => return Err(left(record)),
    };
    if !record.settings.promise().taken_over {
        return Err(Refusal::Waits(record.owner.clone()));
    }
    for node in [Some(&record.owner), destination].into_iter().flatten().filter(|node| *node != by) {
        if !still.iter().any(|still| still.node() == node) {
            return Err(Refusal::Alive(node.clone()));
        }
    }
    owned_by(by, id, record)
}

/// What follows a node's record.
///
/// # Errors
/// Why nothing does.
pub fn lease(record: Option<&NodeRecord>, request: &LeaseRequest) -> Result<Step<NodeRecord>, Refusal> {
    match (request, record) {
        (LeaseRequest::Begin { life }, Some(record)) if record.life == *life => Ok(Step::Already),
        (LeaseRequest::Begin { life }, record) => {
            let counter = next(record.map_or(0, |record| record.counter))?;
            Ok(Step::Write(NodeRecord { life: *life, counter }))
        }
        (LeaseRequest::Renew { .. }, None) => Err(Refusal::Missing),
        (LeaseRequest::Renew { life }, Some(record)) if record.life != *life => Err(Refusal::OtherLife),
        (LeaseRequest::Renew { life }, Some(record)) => {
            Ok(Step::Write(NodeRecord { life: *life, counter: next(record.counter)? }))
        }
    }
}

#[cfg(test)]
#[path = "rules/tests.rs"]
mod tests;
