//! A node that is to become empty: it takes no more services, and those that it has move away, one after the other, each to
//! the node where it is best for its clients.
//!
//! ```text
//!   cordon ──▶ the largest that can be moved now ──▶ place ──▶ move, or the next best node, or it stays
//!                 ▲                                                            │
//!                 ├────────────────────────────────────────────────────────────┘
//!                 └── wait for what is on its way here, is sent, or is kept busy by others ──▶ nothing is left
//! ```
//! The largest goes first, since it finds room the hardest. A node sends one service at once. What has become of all services
//! is what the state says at the end, whoever has moved them.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use godwit_api::v1 as api;
use godwit_api::v1::drain_event::Kind;
use godwit_api::v1::{DrainEvent, DrainRequest, MigrateRequest, migration_event, place_reason};
use godwit_migration::{Outcome, Service};
use godwit_names::{ServiceName, is_name};
use godwit_policy::assess::Cause;
use tokio::sync::{OwnedMutexGuard, mpsc};
use tokio::time::Instant;
use tonic::{Code, Status};

use crate::migrate::{self, QUEUE, is_another};
use crate::node::Node;
use crate::place::{self, told};
use crate::plain::{plain, plain_progress, plain_report};
use crate::status::internal;
use crate::{convert, cordon};

/// How often a service is looked at that another operation keeps from moving, or that runs again after it has ended.
const TRIES: u32 = 3;

/// The same where no node takes it: one may not have been heard of for a moment.
const ROUNDS: u32 = 2;

/// Before a service is tried again.
const PAUSE: Duration = Duration::from_secs(3);

/// Between two looks at what is waited for: that a move commits, that pages have come, or that a doubt begins is no change of
/// what is being done with a service.
const LOOK: Duration = Duration::from_millis(500);

/// What happens, for the user who asked.
pub(crate) type Stream = mpsc::Receiver<Result<DrainEvent, Status>>;

/// Drains a node.
pub(crate) async fn anywhere(node: &Arc<Node>, request: DrainRequest) -> Result<Stream, Status> {
    let Some((name, address)) = cordon::elsewhere(node, &request.node)? else {
        return here(node, request, None).await;
    };
    let not_asked =
        |node: &Node, name: &str, status: &Status| cordon::not_asked(node, name, "cannot be drained", status);
    let asked = node.peers.get_patient(name, &address).drain(request.clone()).await;
    let mut incoming = asked.map_err(|status| not_asked(node, name, &status))?.into_inner();
    let (node, name) = (Arc::clone(node), name.to_owned());
    let (events, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                // Dropped with this, the other node's stream has no reader either.
                () = events.closed() => return,
                event = incoming.message() => match event {
                    Ok(Some(event)) => passed_on(event).ok_or_else(|| {
                        Status::internal(format!("node {name} returned an invalid answer while it was drained"))
                    }),
                    Ok(None) => return,
                    Err(status) => Err(not_asked(&node, &name, &status)),
                },
            };
            let last = event.is_err();
            if events.send(event).await.is_err() || last {
                return;
            }
        }
    });
    Ok(stream)
}

/// Another node's words, as far as they are those of a node, and as they do a terminal no harm.
fn passed_on(mut event: DrainEvent) -> Option<DrainEvent> {
    let names = |names: &[String]| names.iter().all(|name| is_name(name));
    // One of a newer release.
    let Some(kind) = event.kind.as_mut() else { return Some(event) };
    let is_sound = match kind {
        Kind::Placed(placed) => told::is_plain(placed),
        Kind::Cordoned(cordoned) => cordon::is_plain(cordoned),
        Kind::Drained(drained) => {
            is_name(&drained.node)
                && [&drained.moved, &drained.stay, &drained.stopped, &drained.lost]
                    .into_iter()
                    .all(|each| names(each))
        }
        Kind::Progress(progress) => {
            plain_progress(progress);
            true
        }
        Kind::Report(report) => {
            plain_report(report);
            true
        }
        Kind::Waits(words) | Kind::Stays(words) => {
            *words = plain(words);
            true
        }
    };
    (is_sound && (event.name.is_empty() || is_name(&event.name))).then_some(event)
}

/// Drains this node, for its own user or one of node `from`.
pub(crate) async fn here(
    node: &Arc<Node>,
    request: DrainRequest,
    from: Option<&str>,
) -> Result<Stream, Status> {
    let how = request.r#move.unwrap_or_default();
    convert::options(&MigrateRequest { mode: String::new(), ..how.clone() })
        .map_err(Status::invalid_argument)?;
    if !how.to.is_empty() {
        is_another(node, "what is to be drained", &how.to)?;
    }
    let Ok(turn) = Arc::clone(&node.draining).try_lock_owned() else {
        let here = &node.name;
        return Err(Status::failed_precondition(format!(
            "node {here} is being drained already; `godwit --node {here} events -f` shows what moves"
        )));
    };
    let cordoned = cordon::here(node, false, from)?;
    let (events, stream) = mpsc::channel(QUEUE);
    let drain = Drain {
        node: Arc::clone(node),
        how,
        events: events.clone(),
        seen: BTreeMap::new(),
        told: HashSet::new(),
        _turn: turn,
    };
    let node = Arc::clone(node);
    let ending = node.local().ending.clone();
    node.checks.clone().spawn(async move {
        let ended = tokio::select! {
            biased;
            () = events.closed() => Err(Status::cancelled("whoever asked has left")),
            () = ending.cancelled() => Err(Status::aborted("godwitd ends")),
            ended = drain.run(cordoned) => ended,
        };
        if let Err(status) = ended {
            let detail =
                format!("{}; what has not moved stays, and the node stays cordoned", status.message());
            node.events.tell("node", "drain ended", &node.name, &detail);
            // Who does not read learns of the end by that of the stream.
            let _ = events.try_send(Err(status));
        }
    });
    Ok(stream)
}

/// A service that has run here since the drain began.
struct Seen {
    name: ServiceName,
    /// Bytes, when it was seen first.
    memory: u64,
    /// How often it was its turn, and when last.
    tries: u32,
    tried: Option<Instant>,
    fate: Fate,
}

/// What is to become of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It is to move, if it is here and runs.
    Open,
    /// It cannot leave.
    Stays,
    Lost,
}

/// What is next.
enum Next {
    Move(Box<Service>),
    /// Something is waited for; these are told, each with the reason.
    Wait(BTreeMap<ServiceName, String>),
    Nothing,
}

/// How an attempt to move a service has ended.
enum Ended {
    With(Fate),
    /// Something else is done with it.
    Occupied(String),
    /// No node takes it: what is told of it.
    Nowhere(Box<Kind>),
}

struct Drain {
    node: Arc<Node>,
    how: MigrateRequest,
    events: mpsc::Sender<Result<DrainEvent, Status>>,
    /// By id.
    seen: BTreeMap<String, Seen>,
    /// What was said that is waited for.
    told: HashSet<(ServiceName, String)>,
    _turn: OwnedMutexGuard<()>,
}

impl Drain {
    async fn run(mut self, cordoned: api::CordonResponse) -> Result<(), Status> {
        self.tell("", Kind::Cordoned(cordoned)).await;
        let node = Arc::clone(&self.node);
        loop {
            let changes = node.changes();
            tokio::pin!(changes);
            // From here on no change is missed.
            changes.as_mut().enable();
            if self.is_uncordoned()? {
                break;
            }
            match self.next().await? {
                Next::Move(service) => self.turn_of(&service).await?,
                Next::Wait(reasons) => {
                    for (name, why) in reasons {
                        if self.told.insert((name.clone(), why.clone())) {
                            self.tell(&name, Kind::Waits(why)).await;
                        }
                    }
                    tokio::select! {
                        () = changes => {}
                        () = tokio::time::sleep(LOOK) => {}
                    }
                }
                Next::Nothing => break,
            }
        }
        self.ends().await
    }

    fn is_uncordoned(&self) -> Result<bool, Status> {
        Ok(!self.node.state.is_cordoned().map_err(internal)?)
    }

    async fn tell(&self, name: &str, kind: Kind) {
        // That nobody reads ends the drain.
        let _ = self.events.send(Ok(DrainEvent { name: name.to_owned(), kind: Some(kind) })).await;
    }

    /// The largest service that can be moved now, of those that were tried the least.
    async fn next(&mut self) -> Result<Next, Status> {
        let node = Arc::clone(&self.node);
        let leaving: HashMap<_, _> = node.migrating().into_iter().collect();
        let reserved: HashSet<_> = node.reserved().into_iter().collect();
        let (mut waits, mut sends, mut later) = (BTreeMap::new(), false, false);
        for (name, migrating) in &leaving {
            let why = if migrating.progress.borrow().is_committed() {
                format!("node {} has it, and may still need pages of this node", migrating.to)
            } else if migrating.sends() {
                sends = true;
                format!("it is on its way to node {}", migrating.to)
            } else if self.seen.values().any(|seen| seen.name == *name && seen.fate != Fate::Open) {
                // It stays in any case.
                continue;
            } else {
                "it is being put back on this node".into()
            };
            waits.insert(name.clone(), why);
        }
        let mut best: Option<(Reverse<u32>, u64, Service)> = None;
        let mut known = HashSet::new();
        for owned in node.state.services().map_err(internal)? {
            let service = owned.service;
            known.insert(service.name.clone());
            if owned.exit_code.is_some() {
                if reserved.contains(&service.name) {
                    waits.insert(service.name, "something else is being done with it".into());
                }
                continue;
            }
            if !self.seen.contains_key(&service.id) {
                let usage = node.local().engine.usage(&node.local().config(&service)).await;
                let memory = usage.ok().and_then(|usage| usage.memory).unwrap_or(0);
                let seen =
                    Seen { name: service.name.clone(), memory, tries: 0, tried: None, fate: Fate::Open };
                self.seen.insert(service.id.clone(), seen);
            }
            let Some(seen) = self.seen.get(&service.id) else { continue };
            if seen.fate != Fate::Open || leaving.contains_key(&service.name) {
                continue;
            }
            if reserved.contains(&service.name) {
                waits.insert(service.name.clone(), "something else is being done with it".into());
            } else if self.is_arriving(&service.name) {
                waits.insert(
                    service.name.clone(),
                    "pages of its last move are still on their way here".into(),
                );
            } else if seen.tried.is_some_and(|at| at.elapsed() < PAUSE) {
                later = true;
            } else if best
                .as_ref()
                .is_none_or(|(tries, memory, _)| (Reverse(seen.tries), seen.memory) > (*tries, *memory))
            {
                best = Some((Reverse(seen.tries), seen.memory, service));
            }
        }
        for name in reserved.difference(&known).filter(|name| !node.local().doubts.has(name)) {
            let why = format!("it is on its way to node {}, or is being removed there", node.name);
            waits.entry(name.clone()).or_insert(why);
        }
        Ok(match best {
            Some((.., service)) if !sends => Next::Move(Box::new(service)),
            _ if waits.is_empty() && !later => Next::Nothing,
            _ => Next::Wait(waits),
        })
    }

    fn is_arriving(&self, name: &ServiceName) -> bool {
        self.node.local().arrivals.settled(name).now_or_never().is_none()
    }

    /// It is the turn of a service.
    async fn turn_of(&mut self, service: &Service) -> Result<(), Status> {
        let ended = self.moves(service).await;
        let Some(seen) = self.seen.get_mut(&service.id) else { return Ok(()) };
        seen.tries += 1;
        seen.tried = Some(Instant::now());
        let tries = seen.tries;
        let told = match ended {
            Ended::With(fate) => {
                seen.fate = fate;
                return Ok(());
            }
            Ended::Occupied(why) => (tries >= TRIES).then_some(Kind::Stays(why)),
            Ended::Nowhere(told) => (tries >= ROUNDS).then_some(*told),
        };
        if let Some(told) = told {
            seen.fate = Fate::Stays;
            // It may have ended meanwhile.
            if self.runs_here(service)? {
                self.tell(&service.name, told).await;
            }
        }
        Ok(())
    }

    fn runs_here(&self, service: &Service) -> Result<bool, Status> {
        let owned = self.node.state.service(&service.name).map_err(internal)?;
        Ok(owned.is_some_and(|owned| owned.service.id == service.id && owned.exit_code.is_none()))
    }

    /// How a service may move: as the user says, and as its policy where he says nothing.
    fn request(&self, service: &Service) -> api::PlaceRequest {
        let mut asked = MigrateRequest { name: service.name.to_string(), ..self.how.clone() };
        // What it does not have at all would be a mistake in a request for it alone.
        asked.mounts.retain(|target, _| service.mounts.iter().any(|mount| mount.target == Path::new(target)));
        let mut latency_us = 0;
        if let Some(follows) = &service.follows {
            latency_us = follows.latency_us;
            asked.allow_postcopy |= follows.postcopy;
            if asked.max_frozen_ms == 0 {
                asked.max_frozen_ms = follows.max_frozen_ms;
            }
        }
        api::PlaceRequest { r#move: Some(asked), latency_us, stay_ms: 0 }
    }

    /// Moves a service to the best node that takes it.
    async fn moves(&self, service: &Service) -> Ended {
        let request = self.request(service);
        let placed = match place::here_for(&self.node, &request, Cause::Draining).await {
            Ok(placed) => placed,
            Err(status) => return Ended::Occupied(plain(status.message())),
        };
        if sends_others(&placed) {
            return Ended::Occupied("this node sends another service".into());
        }
        if !(placed.objections.is_empty() && placed.obstacles.is_empty()) {
            self.tell(&service.name, Kind::Placed(placed)).await;
            return Ended::With(Fate::Stays);
        }
        if placed.to.is_empty() {
            return Ended::Nowhere(Box::new(Kind::Placed(placed)));
        }
        self.tell(&service.name, Kind::Placed(placed.clone())).await;
        let asked = request.r#move.unwrap_or_default();
        let (mut why, mut mode) = (String::new(), placed.mode);
        for to in std::iter::once(placed.to).chain(placed.then) {
            let request = MigrateRequest { to, mode: mode.clone(), ..asked.clone() };
            match self.attempt(&service.name, &request).await {
                Ok(report) if report.outcome == Outcome::Moved.name() => return Ended::With(Fate::Open),
                Ok(report) if report.outcome == Outcome::Lost.name() => return Ended::With(Fate::Lost),
                // What has frozen it in vain is not done again and again.
                Ok(report) if report.frozen_ms > 0.0 => {
                    self.tell(&service.name, Kind::Stays(report.reason)).await;
                    return Ended::With(Fate::Stays);
                }
                Ok(report) => why = report.reason,
                Err(Failed::Cancelled(reason)) => {
                    self.tell(&service.name, Kind::Stays(reason)).await;
                    return Ended::With(Fate::Stays);
                }
                Err(Failed::NotBegun(status)) if status.code() == Code::Aborted => {
                    return Ended::Occupied(plain(status.message()));
                }
                Err(Failed::NotBegun(status)) => why = plain(status.message()),
                Err(Failed::Unknown(status)) => {
                    self.tell(&service.name, Kind::Stays(plain(status.message()))).await;
                    return Ended::With(Fate::Stays);
                }
            }
            // That of the first was chosen for that one.
            "auto".clone_into(&mut mode);
        }
        Ended::Nowhere(Box::new(Kind::Stays(why)))
    }

    /// One move, to its end.
    async fn attempt(
        &self,
        name: &ServiceName,
        request: &MigrateRequest,
    ) -> Result<api::MigrationReport, Failed> {
        let started = migrate::start(&self.node, name.clone(), request).await;
        let mut stream = started.map_err(Failed::NotBegun)?;
        let cancel = self.node.migration(name).map(|migrating| migrating.cancel);
        while let Some(event) = stream.recv().await {
            match event.map_err(Failed::Unknown)?.kind {
                Some(migration_event::Kind::Progress(progress)) => {
                    // Steps may be skipped for a slow reader.
                    let event = DrainEvent { name: name.to_string(), kind: Some(Kind::Progress(progress)) };
                    let _ = self.events.try_send(Ok(event));
                }
                Some(migration_event::Kind::Report(report)) => {
                    let is_cancelled = report.outcome == Outcome::Aborted.name()
                        && cancel.is_some_and(|cancel| cancel.is_cancelled());
                    if is_cancelled {
                        return Err(Failed::Cancelled(report.reason));
                    }
                    self.tell(name, Kind::Report(report.clone())).await;
                    return Ok(report);
                }
                None => {}
            }
        }
        Err(Failed::Unknown(Status::unavailable("its migration ended without a report; see godwitd's log")))
    }

    /// Tells what has become of all services.
    async fn ends(mut self) -> Result<(), Status> {
        let node = Arc::clone(&self.node);
        let uncordoned = self.is_uncordoned()?;
        let mut drained = api::Drained { node: node.name.clone(), uncordoned, ..api::Drained::default() };
        for doubt in node.local().doubts.all() {
            self.tell(&doubt.service.name, Kind::Stays(doubt.sentence())).await;
            drained.stay.push(doubt.service.name.to_string());
        }
        for owned in node.state.services().map_err(internal)? {
            let Service { id, name, restart, .. } = owned.service;
            let fate = self.seen.remove(&id).map(|seen| seen.fate);
            let why = match owned.exit_code {
                None if fate == Some(Fate::Stays) || uncordoned => None,
                None => Some("it was started while the node was drained".to_owned()),
                Some(code) if node.is_starting(&id) || restart.wants(code, owned.restarts, owned.stopped) => {
                    Some(format!(
                        "it has ended, and is about to be started again: `godwit stop {name}` ends that"
                    ))
                }
                Some(_) => {
                    drained.stopped.push(name.to_string());
                    continue;
                }
            };
            if let Some(why) = why {
                self.tell(&name, Kind::Stays(why)).await;
            }
            drained.stay.push(name.to_string());
        }
        // The others have left, or were removed.
        for (id, Seen { name, fate, .. }) in &self.seen {
            let placement = node.placement(name).map_err(internal)?;
            let is_elsewhere = placement.is_some_and(|at| at.id == *id && at.node != node.name);
            match fate {
                Fate::Lost => drained.lost.push(name.to_string()),
                Fate::Open | Fate::Stays if is_elsewhere => drained.moved.push(name.to_string()),
                Fate::Open | Fate::Stays => {}
            }
        }
        for list in [&mut drained.moved, &mut drained.stay, &mut drained.stopped, &mut drained.lost] {
            list.sort();
        }
        let [moved, stay, lost] = [&drained.moved, &drained.stay, &drained.lost].map(Vec::len);
        let detail = format!("{moved} services moved, {stay} stay, {lost} lost");
        node.events.tell("node", "drained", &node.name, &detail);
        self.tell("", Kind::Drained(drained)).await;
        Ok(())
    }
}

/// Why a move has no report, or not one of its own making.
enum Failed {
    NotBegun(Status),
    /// By a user, for this reason.
    Cancelled(String),
    /// What has become of it is not known.
    Unknown(Status),
}

/// Whether it stays for now, since this node sends other services.
fn sends_others(placed: &api::PlaceResponse) -> bool {
    let sending = |why: &api::PlaceReason| matches!(why.kind, Some(place_reason::Kind::Sending(_)));
    placed.to.is_empty() && placed.reasons.iter().any(sending)
}
