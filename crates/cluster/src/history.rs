//! What nodes asked the store for and were answered, which copies ran, and whether that keeps the promises.
//!
//! Three things are checked. The answers about each record must be linearizable by a specification that is written apart from
//! the rules ([`crate::specification`]). No two copies of a service run at one instant, except as the service's settings
//! allow. And no service is taken over from a node whose lease was renewed within its limit.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::hash::Hash;
use std::time::Duration;

use godwit_names::{NodeName, ServiceName};
use ulid::Ulid;

use crate::lease::held_for;
use crate::linear::{self, Specification, Timed};
use crate::promise::{Copies, Settings};
use crate::record::{NodeRecord, ServiceRecord};
use crate::rules::{LeaseRequest, Request};
use crate::specification::{Answer, Asked, LeaseOperation, Leases, Operation, ServiceOperation, Services};

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

/// What is asked of nodes, in the time of the one who observes.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// From an answer that shows a node that it has lost a service, to the end of its copy.
    pub acts: Duration,
    /// From a renewal of a node's lease to its next question about each of its services.
    pub looks: Duration,
    /// The limit of leases.
    pub limit: Duration,
}

/// All that happened, in one order.
#[derive(Debug)]
pub struct History {
    bounds: Bounds,
    /// When each thing happened; its place here is its number in the order.
    times: Vec<Duration>,
    asked: usize,
    services: BTreeMap<ServiceName, Vec<Timed<ServiceOperation>>>,
    leases: BTreeMap<NodeName, Vec<Timed<LeaseOperation>>>,
    runs: BTreeMap<ServiceName, Vec<Run>>,
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
    /// A service was taken over, although a node that might run it had renewed its lease.
    #[error("service {service} was taken over from node {node}, which held its lease:\n{}", piece.join("\n"))]
    TakenFromLiving {
        /// The service.
        service: ServiceName,
        /// The node.
        node: NodeName,
        /// The renewal and the take-over.
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
    /// Nothing has happened yet.
    #[must_use]
    pub fn new(bounds: Bounds) -> Self {
        Self {
            bounds,
            times: Vec::new(),
            asked: 0,
            services: BTreeMap::new(),
            leases: BTreeMap::new(),
            runs: BTreeMap::new(),
        }
    }

    fn tick(&mut self, at: Duration) -> usize {
        self.times.push(at);
        self.times.len() - 1
    }

    /// When it happened; what has not happened yet is later than all.
    fn at(&self, tick: usize) -> Duration {
        self.times.get(tick).copied().unwrap_or(Duration::MAX)
    }

    /// A node asks about a service. The number is for the answer.
    pub fn ask(&mut self, name: &ServiceName, by: &NodeName, asked: Asked<Request>, at: Duration) -> usize {
        self.asked += 1;
        let (called, operation) = (self.tick(at), Operation { by: by.clone(), asked, answer: None, at });
        let operations = self.services.entry(name.clone()).or_default();
        operations.push(Timed { called, returned: None, operation });
        operations.len() - 1
    }

    /// It is answered; one whose outcome is unknown is not.
    pub fn answer(&mut self, name: &ServiceName, number: usize, answer: Answer<ServiceRecord>, at: Duration) {
        let at = self.tick(at);
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
        let (called, operation) = (self.tick(at), Operation { by: by.clone(), asked, answer: None, at });
        let operations = self.leases.entry(of.clone()).or_default();
        operations.push(Timed { called, returned: None, operation });
        operations.len() - 1
    }

    /// It is answered; one whose outcome is unknown is not.
    pub fn answer_lease(&mut self, of: &NodeName, number: usize, answer: Answer<NodeRecord>, at: Duration) {
        let at = self.tick(at);
        if let Some(timed) = self.leases.get_mut(of).and_then(|operations| operations.get_mut(number)) {
            timed.returned = Some(at);
            timed.operation.answer = Some(answer);
        }
    }

    /// A copy runs on a node from now on.
    pub fn runs(&mut self, name: &ServiceName, node: &NodeName, epoch: u64, since: Duration) {
        let from = self.tick(since);
        let run = Run { node: node.clone(), epoch, from, to: usize::MAX, since };
        self.runs.entry(name.clone()).or_default().push(run);
    }

    /// The copy on a node has stopped: frozen, removed, or lost with its node.
    pub fn stops(&mut self, name: &ServiceName, node: &NodeName, at: Duration) {
        let to = self.tick(at);
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
            self.check_take_overs(service, operations, &begun)?;
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
        let copies = begun.settings(new.epoch).map(|settings| settings.promise().copies);
        copies == Some(Copies::OneInReach)
            && begun.taken_over(lost, lost) == 1
            && self.at(old.to.min(new.to)) <= self.must_end(service, &old.node, lost)
    }

    /// When the copy of a node that lost the service at this epoch must have ended. The node reaches the store again when
    /// it is answered a question that it asked after the epoch had begun. If that was a renewal of its lease, it must look
    /// at the record soon; as long as that has no answer, it may run on.
    fn must_end(&self, service: &ServiceName, node: &NodeName, lost: u64) -> Duration {
        let operations = self.services.get(service).map_or(&[][..], Vec::as_slice);
        let shown = operations.iter().filter_map(|timed| match &timed.operation.answer {
            Some(Answer::Is(Some(record))) if record.epoch >= lost => timed.returned,
            _ => None,
        });
        let Some(begun) = shown.min() else { return Duration::MAX };
        let own: Vec<_> = operations.iter().filter(|timed| timed.operation.by == *node).collect();
        let heard = own.iter().filter(|timed| timed.called > begun).filter_map(|timed| {
            let says = matches!(timed.operation.answer, Some(Answer::Is(_) | Answer::Refused));
            timed.returned.filter(|_| says).map(|at| self.at(at).saturating_add(self.bounds.acts))
        });
        let renewed =
            self.renewals(node).filter(|(called, _)| *called > begun).filter_map(|(_, returned)| {
                let until = self.at(returned).saturating_add(self.bounds.looks);
                let looks = own.iter().any(|timed| timed.called > returned && self.at(timed.called) <= until);
                (!looks).then_some(until)
            });
        heard.chain(renewed).min().unwrap_or(Duration::MAX)
    }

    /// When a node's renewals that were answered were called, and when they returned.
    fn renewals(&self, node: &NodeName) -> impl Iterator<Item = (usize, usize)> {
        self.leases.get(node).into_iter().flatten().filter_map(|timed| {
            match (&timed.operation.asked, &timed.operation.answer) {
                (Asked::Change(LeaseRequest::Renew { .. }), Some(Answer::Is(_))) => {
                    timed.returned.map(|returned| (timed.called, returned))
                }
                _ => None,
            }
        })
    }

    /// A take-over compares other records than the service's, which no check of one record sees. So none of the nodes that
    /// might run the service has renewed its lease for the time that it holds it, before the take-over was asked for.
    fn check_take_overs(
        &self,
        service: &ServiceName,
        operations: &[Timed<ServiceOperation>],
        begun: &Begun,
    ) -> Result<(), Violation> {
        for (epoch, id, taken) in operations.iter().filter_map(|timed| match &timed.operation.asked {
            Asked::Change(Request::TakeOver { epoch, id, .. }) => Some((*epoch, *id, timed)),
            _ => None,
        }) {
            if !begun.epochs.values().any(|record| record.begun == id) {
                continue;
            }
            let owner = begun.epochs.get(&epoch).map(|record| record.owner.clone());
            let nodes = owner.into_iter().chain(destination(operations, epoch, taken));
            for node in &nodes.filter(|node| *node != taken.operation.by).collect::<Vec<_>>() {
                let mut renewals = self.renewals(node);
                let held = renewals.find(|(called, returned)| {
                    let lapses = self.at(*called).saturating_add(held_for(self.bounds.limit));
                    *returned < taken.called && lapses > self.at(taken.called)
                });
                if let Some((called, returned)) = held {
                    let renewal = format!("  {:?} ({called}..{returned}) {node} renewed", self.at(called));
                    let piece = vec![renewal, line(taken)];
                    let (service, node) = (service.clone(), node.clone());
                    return Err(Violation::TakenFromLiving { service, node, piece });
                }
            }
        }
        Ok(())
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

/// Where the service was certainly moving when it was taken over: the hand-over had been answered, and was not withdrawn.
fn destination(
    operations: &[Timed<ServiceOperation>],
    of: u64,
    taken: &Timed<ServiceOperation>,
) -> Option<NodeName> {
    let mut begins =
        operations.iter().filter_map(|timed| match (&timed.operation.asked, &timed.operation.answer) {
            (Asked::Change(Request::HandOver { epoch, to, id, .. }), Some(Answer::Is(_))) if *epoch == of => {
                timed.returned.filter(|returned| *returned < taken.called).map(|_| (to, *id))
            }
            _ => None,
        });
    let is_withdrawn = |move_id: Ulid| {
        operations.iter().any(|timed| {
            let withdraws = matches!(&timed.operation.asked,
                Asked::Change(Request::Withdraw { id, .. }) if *id == move_id);
            withdraws && taken.returned.is_none_or(|returned| timed.called < returned)
        })
    };
    begins.rfind(|(_, id)| !is_withdrawn(*id)).map(|(to, _)| to.clone())
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
