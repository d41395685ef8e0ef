//! What nodes asked the store for and were answered, which copies ran, and whether that keeps the promises.
//!
//! Two things are checked. The answers about each record must be linearizable by a specification that is written apart from
//! the rules ([`Services`], [`Leases`]). And no two copies of a service run at one instant, except as the service's
//! settings allow.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::Hash;
use std::time::Duration;

use godwit_names::{NodeName, ServiceName};
use ulid::Ulid;

use crate::linear::{self, Specification, Timed};
use crate::promise::{Copies, Settings};
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
        Request::Confirm { epoch, id, .. } => match &record?.state {
            State::Moving { to, id: moving } if moving == id && record?.epoch == *epoch => {
                next_epoch(record?, to, *id)
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

/// A copy of a service that ran.
#[derive(Debug, Clone)]
pub struct Run {
    /// Where.
    pub node: NodeName,
    /// In which epoch, as its node believed.
    pub epoch: u64,
    from: usize,
    to: usize,
    since: Duration,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, epoch, from, to, since } = self;
        write!(f, "node {node} ran epoch {epoch} since {since:?} ({from}..")?;
        if *to == usize::MAX { f.write_str("and runs)") } else { write!(f, "{to})") }
    }
}

/// A node has read a service's record, and has done what follows from it.
#[derive(Debug)]
struct Heard {
    node: NodeName,
    called: usize,
    acted: usize,
}

/// All that happened, in one order.
#[derive(Debug, Default)]
pub struct History {
    clock: usize,
    asked: usize,
    services: BTreeMap<ServiceName, Vec<Timed<ServiceOperation>>>,
    leases: BTreeMap<NodeName, Vec<Timed<LeaseOperation>>>,
    runs: BTreeMap<ServiceName, Vec<Run>>,
    heard: BTreeMap<ServiceName, Vec<Heard>>,
}

/// What is not as it was promised.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// No order of the operations explains the answers.
    #[error("the answers about {about} contradict each other:\n{}", piece.join("\n"))]
    Contradiction {
        /// The record.
        about: String,
        /// The shortest piece of the history that shows it.
        piece: Vec<String>,
    },
    /// Two copies ran at once.
    #[error("two copies of service {service} ran at once:\n{}", piece.join("\n"))]
    TwoCopies {
        /// The service.
        service: ServiceName,
        /// The two, and what was asked and answered from the beginning of the first to that of the second.
        piece: Vec<String>,
    },
}

/// What was checked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Checked {
    /// Questions to the store.
    pub operations: usize,
    /// Those without an answer.
    pub unknown: usize,
    /// Epochs that began.
    pub epochs: usize,
    /// Of these, by a take-over.
    pub taken_over: usize,
    /// Copies that ran.
    pub runs: usize,
}

impl History {
    fn tick(&mut self) -> usize {
        self.clock += 1;
        self.clock
    }

    /// A node asks about a service. The number is for the answer.
    pub fn ask(&mut self, name: &ServiceName, by: &NodeName, asked: Asked<Request>, at: Duration) -> usize {
        self.asked += 1;
        let (called, operation) = (self.tick(), Operation { by: by.clone(), asked, answer: None, at });
        let operations = self.services.entry(name.clone()).or_default();
        operations.push(Timed { called, returned: None, operation });
        operations.len() - 1
    }

    /// It is answered; one whose outcome is unknown is not.
    pub fn answer(&mut self, name: &ServiceName, number: usize, answer: Answer<ServiceRecord>) {
        let at = self.tick();
        let Some(operations) = self.services.get_mut(name) else { return };
        let Some(timed) = operations.get_mut(number) else { return };
        timed.returned = Some(at);
        timed.operation.answer = Some(answer);
        if matches!(
            (&timed.operation.asked, &timed.operation.answer),
            (Asked::Change(_), Some(Answer::Is(_)))
        ) {
            let look = Operation { asked: Asked::Look, ..timed.operation.clone() };
            let look = Timed { operation: look, ..*timed };
            operations.push(look);
        }
    }

    /// A node asks about a lease. The number is for the answer.
    pub fn ask_lease(
        &mut self,
        of: &NodeName,
        by: &NodeName,
        asked: Asked<LeaseRequest>,
        at: Duration,
    ) -> usize {
        self.asked += 1;
        let (called, operation) = (self.tick(), Operation { by: by.clone(), asked, answer: None, at });
        let operations = self.leases.entry(of.clone()).or_default();
        operations.push(Timed { called, returned: None, operation });
        operations.len() - 1
    }

    /// It is answered; one whose outcome is unknown is not.
    pub fn answer_lease(&mut self, of: &NodeName, number: usize, answer: Answer<NodeRecord>) {
        let at = self.tick();
        if let Some(timed) = self.leases.get_mut(of).and_then(|operations| operations.get_mut(number)) {
            timed.returned = Some(at);
            timed.operation.answer = Some(answer);
        }
    }

    /// A node has done what follows from the answer of that number. It must come after [`Self::stops`], if that follows.
    pub fn acted_on(&mut self, name: &ServiceName, number: usize) {
        let acted = self.tick();
        let timed = self.services.get(name).and_then(|operations| operations.get(number));
        if let Some(timed) = timed {
            let heard = Heard { node: timed.operation.by.clone(), called: timed.called, acted };
            self.heard.entry(name.clone()).or_default().push(heard);
        }
    }

    /// A copy runs on a node from now on.
    pub fn runs(&mut self, name: &ServiceName, node: &NodeName, epoch: u64, since: Duration) {
        let from = self.tick();
        let run = Run { node: node.clone(), epoch, from, to: usize::MAX, since };
        self.runs.entry(name.clone()).or_default().push(run);
    }

    /// The copy on a node has stopped: frozen, removed, or lost with its node.
    pub fn stops(&mut self, name: &ServiceName, node: &NodeName) {
        let to = self.tick();
        let runs = self.runs.get_mut(name).into_iter().flatten();
        for run in runs.filter(|run| run.node == *node && run.to == usize::MAX) {
            run.to = to;
        }
    }

    /// Checks all of it.
    ///
    /// # Errors
    /// The first promise that is not kept, with the shortest piece of history that shows it.
    pub fn check(&self) -> Result<Checked, Violation> {
        let mut checked = Checked { operations: self.asked, ..Checked::default() };
        for (node, operations) in &self.leases {
            explained(&Leases, format!("node {node}"), operations)?;
            checked.unknown += operations.iter().filter(|timed| timed.returned.is_none()).count();
        }
        for (service, operations) in &self.services {
            explained(&Services, format!("service {service}"), operations)?;
            let begun = Begun::of(operations);
            self.check_copies(service, &begun)?;
            checked.unknown += operations.iter().filter(|timed| timed.returned.is_none()).count();
            checked.epochs += begun.epochs.len();
            checked.taken_over += begun.taken_over(0, u64::MAX);
            checked.runs += self.runs.get(service).map_or(0, Vec::len);
        }
        Ok(checked)
    }

    fn check_copies(&self, service: &ServiceName, begun: &Begun) -> Result<(), Violation> {
        let runs = self.runs.get(service).map_or(&[][..], Vec::as_slice);
        for (index, later) in runs.iter().enumerate() {
            for earlier in &runs[..index] {
                if earlier.to > later.from && !self.may_overlap(service, earlier, later, begun) {
                    return Err(self.two_copies(service, earlier, later));
                }
            }
        }
        Ok(())
    }

    /// Whether the settings allow two runs at once: the older one was taken over, and its node has not heard of it.
    fn may_overlap(&self, service: &ServiceName, one: &Run, other: &Run, begun: &Begun) -> bool {
        // A copy may have gone forward by the source's journal into an epoch that another node began in the store.
        let place = |run: &Run| (run.epoch, begun.is_owner(run));
        let (old, new) = if place(one) <= place(other) { (one, other) } else { (other, one) };
        let lost = if begun.is_owner(old) { old.epoch + 1 } else { old.epoch };
        let (from, to) = (old.from.max(new.from), old.to.min(new.to));
        let mut heard = self.heard.get(service).into_iter().flatten();
        let has_heard = heard.any(|heard| heard.node == old.node && heard.called > from && heard.acted < to);
        let copies = begun.settings(new.epoch).map(|settings| settings.promise().copies);
        copies == Some(Copies::OneInReach) && begun.taken_over(lost, new.epoch) > 0 && !has_heard
    }

    fn two_copies(&self, service: &ServiceName, earlier: &Run, later: &Run) -> Violation {
        let mut piece = vec![format!("  {earlier}"), format!("  {later}")];
        let operations = self.services.get(service).map_or(&[][..], Vec::as_slice);
        let between = operations.iter().filter(|timed| {
            let changes = matches!(timed.operation.asked, Asked::Change(_));
            changes
                && timed.called < later.from
                && timed.returned.is_none_or(|returned| returned > earlier.from)
        });
        piece.extend(between.map(line));
        Violation::TwoCopies { service: service.clone(), piece }
    }
}

/// How epochs began, as the answers show.
#[derive(Default)]
struct Begun {
    epochs: BTreeMap<u64, ServiceRecord>,
    take_overs: BTreeSet<Ulid>,
}

impl Begun {
    fn of(operations: &[Timed<ServiceOperation>]) -> Self {
        let mut begun = Self::default();
        for Timed { operation, .. } in operations {
            if let Asked::Change(Request::TakeOver { id, .. }) = &operation.asked {
                begun.take_overs.insert(*id);
            }
            if let Some(Answer::Is(Some(record))) = &operation.answer {
                begun.epochs.insert(record.epoch, record.clone());
            }
        }
        begun
    }

    fn settings(&self, epoch: u64) -> Option<Settings> {
        self.epochs.range(..=epoch).next_back().map(|(_, record)| record.settings)
    }

    /// Whether the store has the node of this run as the owner in its epoch.
    fn is_owner(&self, run: &Run) -> bool {
        self.epochs.get(&run.epoch).is_some_and(|record| record.owner == run.node)
    }

    /// How many of these epochs a take-over began.
    fn taken_over(&self, first: u64, last: u64) -> usize {
        let within = self.epochs.values().filter(|record| (first..=last).contains(&record.epoch));
        within.filter(|record| self.take_overs.contains(&record.begun)).count()
    }
}

fn explained<S, Q: fmt::Debug, R: fmt::Debug + Clone + Eq + Hash>(
    specification: &S,
    about: String,
    operations: &[Timed<Operation<Q, R>>],
) -> Result<(), Violation>
where
    S: Specification<Operation = Operation<Q, R>, State = Option<R>>,
{
    let changes = |operation: &Operation<Q, R>| {
        let has_effect = !matches!(operation.answer, Some(Answer::Refused | Answer::NotDone));
        matches!(operation.asked, Asked::Change(_)) && has_effect
    };
    let found = operations.iter().filter_map(|timed| match &timed.operation.answer {
        Some(Answer::Is(found)) => Some(found.clone()),
        _ => None,
    });
    let shown: Vec<_> = found.collect::<HashSet<_>>().into_iter().collect();
    match linear::shortest(specification, operations, &shown, changes) {
        None => Ok(()),
        Some(needed) => {
            let piece = needed.into_iter().map(|index| line(&operations[index])).collect();
            Err(Violation::Contradiction { about, piece })
        }
    }
}

/// An operation as a line for people.
fn line<Q: fmt::Debug, R: fmt::Debug>(timed: &Timed<Operation<Q, R>>) -> String {
    let Operation { by, asked, answer, at } = &timed.operation;
    let until = timed.returned.map_or("?".to_owned(), |returned| returned.to_string());
    let answer = answer.as_ref().map_or("no answer".to_owned(), |answer| format!("{answer:?}"));
    format!("  {at:?} ({}..{until}) {by}: {asked:?} -> {answer}", timed.called)
}

#[cfg(test)]
#[path = "history/tests.rs"]
mod tests;
