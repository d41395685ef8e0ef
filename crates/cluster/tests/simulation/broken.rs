//! Ways to break the store, the rules and the nodes. Each must be found by the simulation.

use std::collections::BTreeMap;
use std::sync::Mutex;

use async_trait::async_trait;
use godwit_cluster::cluster::Rules;
use godwit_cluster::record::{NodeRecord, ServiceRecord, State};
use godwit_cluster::rules::{self, LeaseRequest, Refusal, Request, Step};
use godwit_cluster::store::{
    Entry, Folder, Key, Page, ReadError, Revision, Store, Swap, SwapError, Swapped, Watch, WatchError,
};

use crate::model::Memory;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Broken {
    /// The store writes without a comparison.
    NoCompare,
    /// The store compares only the first key of a swap.
    FirstKeyOnly,
    /// The store acknowledges each tenth swap without a write.
    LostWrite,
    /// The store compares with what a key had before its last change, too.
    StaleCompare,
    /// The store reads what a key had before its last change, now and then.
    StaleRead,
    /// The store takes a request that arrives again for a new one that fits.
    DoneTwice,
    /// A rule confirms any move, whichever is under way.
    ConfirmsAnyMove,
    /// A rule lets the source withdraw a move that is confirmed.
    WithdrawsConfirmed,
    /// A take-over has no proof of leases, so that its swap does not compare them.
    NoCounter,
    /// A take-over during a move needs the source's lease alone to stand still.
    IgnoresDestination,
    /// A rule lets an earlier life of a node renew its lease.
    StaleLife,
    /// A node takes over long before the limit.
    EarlyTakeOver,
    /// A node takes no answer for a refusal.
    SilenceIsRefusal,
    /// A source goes on when the commit has no answer.
    RollsBackOnSilence,
    /// A source forgets that it has asked for the commit before, and rolls back when the store gets nothing the second time.
    RollsBackOnNotDone,
    /// A strict service goes forward when the commit has no answer.
    StrictGoesForward,
    /// A strict service runs on when the lease lapses.
    RunsOnAfterLapse,
    /// A strict service runs again after a renewal, without a look at its record.
    RunsUnverified,
    /// A strict service runs again after its node has started, without a look at its record.
    StartsUnverified,
    /// An owner runs on when it reads that another node has taken its service over.
    RunsOnWhenLost,
    /// A node counts its lease from the answer.
    LeaseFromAnswer,
}

impl Broken {
    /// All of them.
    pub(crate) const ALL: [Self; 21] = [
        Self::NoCompare,
        Self::FirstKeyOnly,
        Self::LostWrite,
        Self::StaleCompare,
        Self::StaleRead,
        Self::DoneTwice,
        Self::ConfirmsAnyMove,
        Self::WithdrawsConfirmed,
        Self::NoCounter,
        Self::IgnoresDestination,
        Self::StaleLife,
        Self::EarlyTakeOver,
        Self::SilenceIsRefusal,
        Self::RollsBackOnSilence,
        Self::RollsBackOnNotDone,
        Self::StrictGoesForward,
        Self::RunsOnAfterLapse,
        Self::RunsUnverified,
        Self::StartsUnverified,
        Self::RunsOnWhenLost,
        Self::LeaseFromAnswer,
    ];
}

/// The rules, one of which may be broken.
pub(crate) fn broken_rules(broken: Option<Broken>) -> Rules {
    match broken {
        Some(Broken::ConfirmsAnyMove) => Rules { service: confirms_any_move, ..Rules::default() },
        Some(Broken::WithdrawsConfirmed) => Rules { service: withdraws_confirmed, ..Rules::default() },
        Some(Broken::IgnoresDestination) => Rules { service: ignores_destination, ..Rules::default() },
        Some(Broken::NoCounter) => Rules { service: takes_over_without_proof, ..Rules::default() },
        Some(Broken::StaleLife) => Rules { lease: renews_any_life, ..Rules::default() },
        _ => Rules::default(),
    }
}

fn confirms_any_move(
    record: Option<&ServiceRecord>,
    request: &Request,
) -> Result<Step<ServiceRecord>, Refusal> {
    let moving = record.map(|record| (record, &record.state));
    if let (Request::Confirm { id, .. }, Some((record, State::Moving { to, .. }))) = (request, moving) {
        let (owner, epoch) = (to.clone(), record.epoch + 1);
        let record = ServiceRecord { owner, epoch, begun: *id, state: State::Owned, ..record.clone() };
        return Ok(Step::Write(record));
    }
    rules::service(record, request)
}

fn withdraws_confirmed(
    record: Option<&ServiceRecord>,
    request: &Request,
) -> Result<Step<ServiceRecord>, Refusal> {
    if let (Request::Withdraw { by, epoch, id }, Some(record)) = (request, record)
        && record.begun == *id
    {
        let (owner, epoch) = (by.clone(), *epoch);
        return Ok(Step::Write(ServiceRecord { owner, epoch, state: State::Owned, ..record.clone() }));
    }
    rules::service(record, request)
}

fn takes_over_without_proof(
    record: Option<&ServiceRecord>,
    request: &Request,
) -> Result<Step<ServiceRecord>, Refusal> {
    match (rules::service(record, request), request, record) {
        (Err(Refusal::Alive(_)), Request::TakeOver { by, id, .. }, Some(record)) => {
            let (owner, epoch) = (by.clone(), record.epoch + 1);
            let record = ServiceRecord { owner, epoch, begun: *id, state: State::Owned, ..record.clone() };
            Ok(Step::Write(record))
        }
        (answer, _, _) => answer,
    }
}

fn ignores_destination(
    record: Option<&ServiceRecord>,
    request: &Request,
) -> Result<Step<ServiceRecord>, Refusal> {
    match (request, record.map(|record| (record, &record.state))) {
        (Request::TakeOver { .. }, Some((record, State::Moving { .. }))) => {
            rules::service(Some(&ServiceRecord { state: State::Owned, ..record.clone() }), request)
        }
        _ => rules::service(record, request),
    }
}

fn renews_any_life(record: Option<&NodeRecord>, request: &LeaseRequest) -> Result<Step<NodeRecord>, Refusal> {
    match (request, record) {
        (LeaseRequest::Renew { .. }, Some(record)) => {
            rules::lease(Some(record), &LeaseRequest::Renew { life: record.life })
        }
        (request, record) => rules::lease(record, request),
    }
}

/// A store that may be broken.
pub(crate) struct Breaking {
    memory: Memory,
    broken: Option<Broken>,
    past: Mutex<Past>,
}

#[derive(Default)]
struct Past {
    calls: u32,
    /// What keys had before their last change.
    before: BTreeMap<Key, Option<Entry>>,
    done: Vec<Swap>,
}

impl Breaking {
    /// Broken in this way, if it is one of the store.
    pub(crate) fn new(broken: Option<Broken>) -> Self {
        Self { memory: Memory::default(), broken, past: Mutex::default() }
    }

    fn fits(&self, swap: &Swap, past: &Past) -> bool {
        let revision = |entry: Option<&Entry>| entry.map_or(Revision::NONE, |entry| entry.revision);
        let compared = match self.broken {
            Some(Broken::NoCompare) => 0,
            Some(Broken::FirstKeyOnly) => 1,
            _ => swap.compares().len(),
        };
        let fits = swap.compares()[..compared].iter().all(|compare| {
            let before = past.before.get(&compare.key);
            let stale = self.broken == Some(Broken::StaleCompare)
                && before.is_some_and(|before| revision(before.as_ref()) == compare.revision);
            stale || revision(self.memory.entry(&compare.key).as_ref()) == compare.revision
        });
        fits || (self.broken == Some(Broken::DoneTwice) && past.done.contains(swap))
    }
}

#[async_trait]
impl Store for Breaking {
    async fn get(&self, key: &Key) -> Result<Option<Entry>, ReadError> {
        let mut past = self.past.lock().unwrap();
        past.calls += 1;
        if self.broken == Some(Broken::StaleRead)
            && past.calls.is_multiple_of(10)
            && let Some(before) = past.before.get(key)
        {
            return Ok(before.clone());
        }
        Ok(self.memory.entry(key))
    }

    async fn range(&self, folder: Folder, after: Option<&str>, limit: usize) -> Result<Page, ReadError> {
        self.memory.range(folder, after, limit).await
    }

    async fn swap(&self, swap: &Swap) -> Result<Swapped, SwapError> {
        let mut past = self.past.lock().unwrap();
        if !self.fits(swap, &past) {
            let there = swap.compares().iter().map(|compare| self.memory.entry(&compare.key));
            return Ok(Swapped::Differs(there.collect()));
        }
        past.calls += 1;
        if self.broken == Some(Broken::LostWrite) && past.calls.is_multiple_of(10) {
            let newest = swap.compares().iter().map(|compare| compare.revision.0).max().unwrap_or(0);
            return Ok(Swapped::Done(Revision(newest + 1)));
        }
        if self.broken == Some(Broken::DoneTwice) {
            past.done.push(swap.clone());
        }
        for write in swap.writes() {
            past.before.insert(write.key().clone(), self.memory.entry(write.key()));
        }
        Ok(Swapped::Done(self.memory.write(swap)))
    }

    async fn watch(&self, folder: Folder, after: Revision) -> Result<Box<dyn Watch>, WatchError> {
        self.memory.watch(folder, after).await
    }
}
