//! A node: its lease, what it sees of the others' leases, its journal on disk, and its copies of services.
//!
//! Each service has a task on each node, so a node does one thing at a time about a service. The disk survives a crash.

mod leases;
mod moves;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc::UnboundedReceiver;
use futures::future::{Either, select};
use godwit_cluster::clock::BootTime;
use godwit_cluster::cluster::{ChangeError, Cluster, Earlier, Held};
use godwit_cluster::lease::{Observed, OwnLease, Term};
use godwit_cluster::promise::{Promise, Settings, Silence};
use godwit_cluster::record::{ServiceRecord, State};
use godwit_cluster::rules::Request;
use godwit_cluster::specification::{Answer, Asked};
use godwit_names::{NodeName, ServiceName};
use ulid::Ulid;

use crate::broken::{Broken, broken_rules};
use crate::world::{LIMIT, Link, Message, World};

/// How fast clocks go: slow ones hold a lease for longest, and quick ones wait least. The lease allows for a fifth.
const RATES: [f64; 3] = [0.91, 1.0, 1.09];

/// What a node's disk has of a service.
#[derive(Debug, Clone)]
struct Local {
    /// That of its copy.
    epoch: u64,
    settings: Settings,
    phase: Phase,
}

#[derive(Debug, Clone, PartialEq)]
enum Phase {
    /// It runs the service.
    Owner,
    /// It removes it, which is not certain yet.
    Releasing,
    /// It moves the service, and has frozen it. `decided`: the commit may be made.
    Source { to: NodeName, id: Ulid, decided: bool },
    /// It has a copy that does not run before the commit.
    Arrived { id: Ulid },
    /// It runs the copy by the source's journal; the store does not know of the commit.
    Forward { id: Ulid },
}

/// What a crash takes.
struct Life {
    id: Ulid,
    lease: OwnLease,
    observed: Observed,
    running: BTreeSet<ServiceName>,
    /// Services whose record was seen to be this node's since the node started, and the term of the lease then.
    verified: BTreeMap<ServiceName, Option<Term>>,
}

impl Life {
    fn new(id: Ulid) -> Self {
        Self {
            id,
            lease: OwnLease::new(LIMIT),
            observed: Observed::default(),
            running: BTreeSet::new(),
            verified: BTreeMap::new(),
        }
    }
}

/// A node.
pub(crate) struct Node {
    /// Its name.
    pub name: NodeName,
    others: Vec<NodeName>,
    /// How fast its clock goes.
    rate: f64,
    world: World,
    cluster: Cluster<Link>,
    broken: Option<Broken>,
    disk: RefCell<BTreeMap<ServiceName, Local>>,
    /// The highest epochs that the disk has had of services, those of copies that are gone among them.
    highest: RefCell<BTreeMap<ServiceName, u64>>,
    life: RefCell<Life>,
}

/// When a question was asked: the term of the lease, if it was held.
type Since = Option<Term>;

impl Node {
    /// A node that has not started yet.
    pub(crate) fn new(world: &World, name: &NodeName, all: &[NodeName], broken: Option<Broken>) -> Rc<Self> {
        Rc::new(Self {
            name: name.clone(),
            others: all.iter().filter(|other| *other != name).cloned().collect(),
            rate: RATES[world.random(|random| random.usize(..RATES.len()))],
            cluster: Cluster::with_rules(world.link(name), broken_rules(broken)),
            world: world.clone(),
            broken,
            disk: RefCell::default(),
            highest: RefCell::default(),
            life: RefCell::new(Life::new(Ulid::nil())),
        })
    }

    fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }

    fn clock(&self) -> BootTime {
        BootTime::since_boot(self.world.now().mul_f64(self.rate))
    }

    async fn sleep(&self, time: Duration) {
        self.world.sleep(time.div_f64(self.rate)).await;
    }

    fn chance(&self, percent: u32) -> bool {
        self.world.random(|random| random.u32(..100) < percent)
    }

    fn pause(&self, milliseconds: std::ops::Range<u64>) -> Duration {
        Duration::from_millis(self.world.random(|random| random.u64(milliseconds)))
    }

    /// The machine starts.
    pub(crate) fn start(&self) {
        *self.life.borrow_mut() = Life::new(self.world.id());
    }

    /// The present life.
    pub(crate) fn life(&self) -> Ulid {
        self.life.borrow().id
    }

    /// The machine loses all but its disk.
    pub(crate) fn crash(&self) {
        let now = self.world.now();
        for service in std::mem::take(&mut self.life.borrow_mut().running) {
            self.world.history(|history| history.stops(&service, &self.name, now));
        }
    }

    /// Whether it runs a copy.
    pub(crate) fn runs(&self, service: &ServiceName) -> bool {
        self.life.borrow().running.contains(service)
    }

    // The store.

    fn since(&self) -> Since {
        self.life.borrow().lease.term(self.clock())
    }

    async fn look(&self, service: &ServiceName) -> (Since, Option<Option<ServiceRecord>>) {
        let at = self.world.now();
        let number = self.world.history(|history| history.ask(service, &self.name, Asked::Look, at));
        let since = self.since();
        let found = self.cluster.service(service).await.ok().map(|held| held.map(|held| held.record));
        let answer = found.clone().map_or(Answer::NotDone, Answer::Is);
        let at = self.world.now();
        self.world.history(|history| history.answer(service, number, answer, at));
        (since, found)
    }

    async fn change(
        &self,
        service: &ServiceName,
        request: Request,
    ) -> (Since, Result<ServiceRecord, Change>) {
        self.ask(service, request, Earlier::None).await
    }

    async fn ask(
        &self,
        service: &ServiceName,
        request: Request,
        earlier: Earlier,
    ) -> (Since, Result<ServiceRecord, Change>) {
        let (at, asked) = (self.world.now(), Asked::Change(request.clone()));
        let number = self.world.history(|history| history.ask(service, &self.name, asked, at));
        let since = self.since();
        let result = self.cluster.change(service, &request, earlier).await;
        let mut answer = answer(&result);
        if answer.is_none() && self.is(Broken::SilenceIsRefusal) {
            answer = Some(Answer::Refused);
        }
        let result = match (result, &answer) {
            (Ok(held), _) => Ok(held.record),
            // The record has gone on: a look says how.
            (Err(ChangeError::Superseded { .. }), _) | (Err(_), Some(Answer::Refused)) => {
                Err(Change::Refused)
            }
            (Err(_), Some(Answer::NotDone)) => Err(Change::NotDone),
            (Err(_), _) => Err(Change::Silent),
        };
        if let Some(answer) = answer {
            let at = self.world.now();
            self.world.history(|history| history.answer(service, number, answer, at));
        }
        (since, result)
    }

    /// The store has shown that the service is this node's. Without a lease at both ends that says nothing about now.
    fn verify(&self, service: &ServiceName, since: Since) {
        let promise = self.local(service).map(|local| local.settings.promise());
        let needs_lease = promise.is_some_and(|promise| promise.lapse == Silence::Wait);
        let held = since.is_some() && self.since() == since;
        if held || !needs_lease {
            self.life.borrow_mut().verified.insert(service.clone(), since);
        }
    }

    fn is_verified(&self, service: &ServiceName, promise: Promise) -> bool {
        let found = self.life.borrow().verified.get(service).copied();
        let in_term = |term: Since| term.is_some() && term == self.since();
        match found {
            _ if promise.lapse == Silence::GoOn => found.is_some(),
            Some(term) => in_term(term) || self.is(Broken::RunsUnverified),
            None => self.is(Broken::StartsUnverified),
        }
    }

    // Copies.

    fn local(&self, service: &ServiceName) -> Option<Local> {
        self.disk.borrow().get(service).cloned()
    }

    fn put(&self, service: &ServiceName, epoch: u64, settings: Settings, phase: Phase) {
        self.disk.borrow_mut().insert(service.clone(), Local { epoch, settings, phase });
        let mut highest = self.highest.borrow_mut();
        let known = highest.entry(service.clone()).or_default();
        *known = epoch.max(*known);
    }

    fn forget(&self, service: &ServiceName) {
        self.stop(service);
        self.disk.borrow_mut().remove(service);
        self.life.borrow_mut().verified.remove(service);
    }

    fn stop(&self, service: &ServiceName) {
        let now = self.world.now();
        if self.life.borrow_mut().running.remove(service) {
            self.world.history(|history| history.stops(service, &self.name, now));
        }
    }

    /// Runs the copy, if what was promised allows that now.
    fn run(&self, service: &ServiceName) {
        let Some(local) = self.local(service) else { return };
        let promise @ Promise { lapse, start, .. } = local.settings.promise();
        let verified = self.is_verified(service, promise);
        let held = self.life.borrow().lease.holds(self.clock()) || self.is(Broken::RunsOnAfterLapse);
        let waits = (start == Silence::Wait && !verified) || (lapse == Silence::Wait && !held);
        // A strict service has no such phase, and it needs no lease in it.
        let may = match local.phase {
            Phase::Owner => !waits,
            Phase::Forward { .. } => start == Silence::GoOn || verified,
            _ => false,
        };
        if may && self.life.borrow_mut().running.insert(service.clone()) {
            let now = self.world.now();
            self.world.history(|history| history.runs(service, &self.name, local.epoch, now));
        }
    }

    /// Whether a copy of this epoch is not one of a move that ended before.
    fn is_new(&self, service: &ServiceName, epoch: u64) -> bool {
        let known = self.highest.borrow().get(service).copied().unwrap_or_default();
        epoch >= known
    }

    /// This node has become the owner by a move, as the store has said, and may have gone on since.
    fn own_moved(&self, service: &ServiceName, record: &ServiceRecord, since: Since) {
        match record.state {
            State::Owned => self.own(service, record, since),
            // The next look withdraws it.
            State::Moving { .. } => {
                self.stop(service);
                self.put(service, record.epoch, record.settings, Phase::Owner);
            }
            State::Left => self.forget(service),
        }
    }

    /// This node is the owner, as the store has said.
    fn own(&self, service: &ServiceName, record: &ServiceRecord, since: Since) {
        if self.local(service).is_some_and(|local| local.epoch != record.epoch) {
            self.stop(service);
        }
        self.put(service, record.epoch, record.settings, Phase::Owner);
        self.verify(service, since);
        self.run(service);
    }

    // What a node does about a service.

    /// Does what is due about a service, for as long as the node lives.
    pub(crate) async fn keep_service(self: Rc<Self>, service: ServiceName, settings: Settings) {
        let mut inbox = self.world.inbox(&self.name, &service);
        loop {
            let pause = self.pause(200..2500);
            let due = Box::pin(self.sleep(pause));
            match select(inbox.next(), due).await {
                Either::Left((Some(message), _)) => self.hear(&service, message).await,
                Either::Left((None, _)) => return,
                Either::Right(_) => self.tick(&service, settings, &mut inbox).await,
            }
        }
    }

    async fn tick(&self, service: &ServiceName, settings: Settings, inbox: &mut UnboundedReceiver<Message>) {
        let local = self.local(service);
        match local.as_ref().map(|local| (local.epoch, local.settings, local.phase.clone())) {
            None => self.have_nothing(service, settings).await,
            Some((epoch, _, Phase::Owner)) => self.own_it(service, epoch, inbox).await,
            Some((epoch, settings, Phase::Releasing)) => self.release(service, epoch, settings).await,
            Some((epoch, settings, Phase::Source { id, decided: false, .. })) => {
                self.put(service, epoch, settings, Phase::Owner);
                self.withdraw(service, epoch, id).await;
            }
            Some((epoch, settings, Phase::Source { to, id, decided: true })) => {
                if settings.promise().commit == Silence::Wait && self.chance(40) {
                    self.withdraw(service, epoch, id).await;
                } else {
                    // It may have asked before, and this life of the node does not know.
                    self.commit(service, (epoch, settings), &to, id, Earlier::Unknown).await;
                }
            }
            Some((epoch, _, Phase::Arrived { id })) => self.wait_for_commit(service, epoch, id).await,
            Some((epoch, _, Phase::Forward { id })) => self.confirm_forward(service, epoch, id).await,
        }
    }

    async fn have_nothing(&self, service: &ServiceName, settings: Settings) {
        if self.chance(30) {
            return;
        }
        let (since, found) = self.look(service).await;
        let free = match &found {
            Some(None) => true,
            Some(Some(record)) => record.state == State::Left,
            None => return,
        };
        if free {
            let (by, id) = (self.name.clone(), self.world.id());
            let request = Request::Claim { by, service: self.world.id(), id, settings };
            let (since, claimed) = self.change(service, request).await;
            if let Ok(record) = claimed {
                self.own_if_ours(service, &record, since);
            }
        } else if let Some(Some(record)) = found {
            // A claim or a take-over without an answer was done.
            self.own_if_ours(service, &record, since);
            self.take_over(service, &record).await;
        }
    }

    fn own_if_ours(&self, service: &ServiceName, record: &ServiceRecord, since: Since) {
        if record.owner == self.name && record.state == State::Owned {
            self.own(service, record, since);
        }
    }

    async fn take_over(&self, service: &ServiceName, record: &ServiceRecord) {
        if record.owner == self.name || record.state == State::Left || !record.settings.promise().taken_over {
            return;
        }
        let limit = if self.is(Broken::EarlyTakeOver) { LIMIT / 8 } else { LIMIT };
        let mut nodes = vec![&record.owner];
        if let State::Moving { to, .. } = &record.state
            && !self.is(Broken::IgnoresDestination)
        {
            nodes.extend(Some(to).filter(|to| **to != self.name));
        }
        let stood = |node: &&NodeName| self.life.borrow().observed.stood_still(node, limit);
        let Some(mut still) = nodes.iter().map(stood).collect::<Option<Vec<_>>>() else { return };
        if self.is(Broken::NoCounter) {
            still.clear();
        }
        let (by, id) = (self.name.clone(), self.world.id());
        let request = Request::TakeOver { by, epoch: record.epoch, id, still };
        if let (since, Ok(record)) = self.change(service, request).await {
            self.own_if_ours(service, &record, since);
        }
    }

    async fn own_it(&self, service: &ServiceName, epoch: u64, inbox: &mut UnboundedReceiver<Message>) {
        self.run(service);
        let (since, found) = self.look(service).await;
        let Some(found) = found else { return };
        match found {
            Some(record) if record.owner == self.name && record.epoch == epoch => match record.state {
                State::Owned => {
                    self.own(service, &record, since);
                    match self.world.random(|random| random.u32(..100)) {
                        _ if self.world.is_calm() => {}
                        0..30 => self.move_it(service, &record, inbox).await,
                        30..34 => self.release(service, epoch, record.settings).await,
                        _ => {}
                    }
                }
                State::Moving { id, .. } => self.withdraw(service, epoch, id).await,
                State::Left => self.forget(service),
            },
            _ if self.is(Broken::RunsOnWhenLost) => {}
            _ => self.forget(service),
        }
    }

    /// It does not run again until it is certain that it is not released.
    async fn release(&self, service: &ServiceName, epoch: u64, settings: Settings) {
        self.stop(service);
        self.put(service, epoch, settings, Phase::Releasing);
        match self.change(service, Request::Release { by: self.name.clone(), epoch }).await.1 {
            Ok(_) => self.forget(service),
            Err(Change::Refused) => self.resolve(service, epoch, settings).await,
            Err(Change::NotDone | Change::Silent) => {}
        }
    }

    /// What has become of a service that the store does not know as this node does. It does not run until that is known.
    async fn resolve(&self, service: &ServiceName, epoch: u64, settings: Settings) {
        self.stop(service);
        self.life.borrow_mut().verified.remove(service);
        let (since, found) = self.look(service).await;
        match found {
            None => {}
            Some(Some(record)) if record.owner == self.name && record.epoch == epoch => {
                let releasing = self.local(service).is_some_and(|local| local.phase == Phase::Releasing);
                if record.state == State::Owned {
                    self.own(service, &record, since);
                } else if releasing {
                    // A move that has no end holds the release up: the next look withdraws it.
                    self.put(service, epoch, settings, Phase::Owner);
                }
            }
            Some(_) => self.forget(service),
        }
    }
}

/// Why a change has no record.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Change {
    Refused,
    /// It is certain that it is not done, since nothing of it has left the node.
    NotDone,
    Silent,
}

/// A result as history has it; none where the outcome is unknown.
fn answer<R: Clone>(result: &Result<Held<R>, ChangeError>) -> Option<Answer<R>> {
    match result {
        Ok(held) => Some(Answer::Is(Some(held.record.clone()))),
        Err(ChangeError::Refused { .. }) => Some(Answer::Refused),
        Err(error) => error.is_certain().then_some(Answer::NotDone),
    }
}
