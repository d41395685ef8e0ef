//! A node that is to become empty: it takes no more services, and those that it has move away, one after the other, each to
//! the node where it is best for its clients.
//!
//! ```text
//!   cordon ──▶ the largest that runs ──▶ place ──▶ move, or the next best node ──▶ … ──▶ nothing leaves any more
//!                 ▲                                   └──▶ it stays, and why        │
//!                 └──────────── what was on its way here, and has come ◀────────────┘
//! ```
//! The largest goes first, since it finds room the hardest. A node sends one service at once.

use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use godwit_api::v1 as api;
use godwit_api::v1::drain_event::Kind;
use godwit_api::v1::{DrainEvent, DrainRequest, MigrateRequest, migration_event, place_reason};
use godwit_migration::{Outcome, Service};
use godwit_names::{ServiceName, is_name};
use godwit_policy::assess::Cause;
use tokio::sync::{OwnedMutexGuard, mpsc};
use tonic::{Code, Status};

use crate::check::plain;
use crate::migrate::{self, QUEUE, is_another, plain_progress, plain_report};
use crate::node::Node;
use crate::place::{self, told};
use crate::status::internal;
use crate::{convert, cordon};

/// What happens, for the user who asked.
pub(crate) type Stream = mpsc::Receiver<Result<DrainEvent, Status>>;

/// Drains a node.
pub(crate) async fn anywhere(node: &Arc<Node>, request: DrainRequest) -> Result<Stream, Status> {
    let Some((name, address)) = cordon::elsewhere(node, &request.node)? else {
        return here(node, request, None).await;
    };
    let not_asked =
        |node: &Node, name: &str, status| cordon::not_asked(node, name, "cannot be drained", status);
    let asked = node.peers.get_patient(name, &address).drain(request.clone()).await;
    let mut incoming = asked.map_err(|status| not_asked(node, name, status))?.into_inner();
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
                    Err(status) => Err(not_asked(&node, &name, status)),
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
    let is_sound = match event.kind.as_mut()? {
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
        events,
        seen: HashSet::new(),
        drained: api::Drained { node: node.name.clone(), ..api::Drained::default() },
        _turn: turn,
    };
    node.checks.spawn(async move {
        let ending = drain.node.local().ending.clone();
        let events = drain.events.clone();
        tokio::select! {
            biased;
            () = events.closed() => tracing::info!("whoever drains this node has left"),
            () = ending.cancelled() => drop(events.try_send(Err(Status::aborted("godwitd ends")))),
            ended = drain.run(cordoned) => if let Err(status) = ended {
                // Whoever asked may have left.
                let _ = events.send(Err(status)).await;
            },
        }
    });
    Ok(stream)
}

/// What has become of a service.
enum Became {
    Moved,
    Stays,
    Lost,
    /// It does not run any more, or is not here.
    Gone,
}

struct Drain {
    node: Arc<Node>,
    how: MigrateRequest,
    events: mpsc::Sender<Result<DrainEvent, Status>>,
    /// Services that it was the turn of, by id.
    seen: HashSet<String>,
    drained: api::Drained,
    _turn: OwnedMutexGuard<()>,
}

impl Drain {
    async fn run(mut self, cordoned: api::CordonResponse) -> Result<(), Status> {
        self.tell("", Kind::Cordoned(cordoned)).await;
        loop {
            while !self.is_uncordoned()?
                && let Some(service) = self.next().await?
            {
                self.seen.insert(service.id.clone());
                let list = match self.one(&service).await? {
                    Became::Moved => &mut self.drained.moved,
                    Became::Stays => &mut self.drained.stay,
                    Became::Lost => &mut self.drained.lost,
                    Became::Gone => continue,
                };
                list.push(service.name.to_string());
            }
            if self.is_uncordoned()? || !self.waits_for_others().await? {
                break;
            }
        }
        self.drained.uncordoned = self.is_uncordoned()?;
        self.ends().await
    }

    fn is_uncordoned(&self) -> Result<bool, Status> {
        Ok(!self.node.state.is_cordoned().map_err(internal)?)
    }

    /// Tells what has become of all services.
    async fn ends(mut self) -> Result<(), Status> {
        let mut drained = std::mem::take(&mut self.drained);
        for doubt in self.node.local().doubts.all() {
            let name = doubt.service.name.to_string();
            self.tell(&name, Kind::Stays(doubt.sentence())).await;
            drained.stay.push(name);
        }
        for owned in self.node.state.services().map_err(internal)? {
            let Service { id, name, .. } = owned.service;
            if owned.exit_code.is_none() {
                if drained.uncordoned && !self.seen.contains(&id) {
                    drained.stay.push(name.to_string());
                }
            } else if self.node.due(&id).is_some() {
                let why =
                    format!("it has ended, and is about to be started again: `godwit stop {name}` ends that");
                self.tell(&name, Kind::Stays(why)).await;
                drained.stay.push(name.to_string());
            } else {
                drained.stopped.push(name.to_string());
            }
        }
        let count = |of: &[String]| of.len();
        let (moved, stay, lost) = (count(&drained.moved), count(&drained.stay), count(&drained.lost));
        let detail = format!("{moved} services moved, {stay} stay, {lost} lost");
        self.node.events.tell("node", "drained", &self.node.name, &detail);
        self.tell("", Kind::Drained(drained)).await;
        Ok(())
    }

    async fn tell(&self, name: &str, kind: Kind) {
        // That nobody reads is noticed where it counts.
        let _ = self.events.send(Ok(DrainEvent { name: name.to_owned(), kind: Some(kind) })).await;
    }

    /// The largest service that runs here and that it was not the turn of.
    async fn next(&self) -> Result<Option<Service>, Status> {
        let node = &self.node;
        let mut largest: Option<(u64, Service)> = None;
        for owned in node.state.services().map_err(internal)? {
            if owned.exit_code.is_some() || self.seen.contains(&owned.service.id) {
                continue;
            }
            let usage = node.local().engine.usage(&node.local().config(&owned.service)).await;
            // It may have ended meanwhile, or be about to leave: then that is found when it is its turn.
            let memory = usage.ok().and_then(|usage| usage.memory).unwrap_or(0);
            if largest.as_ref().is_none_or(|(most, _)| memory > *most) {
                largest = Some((memory, owned.service));
            }
        }
        Ok(largest.map(|(_, service)| service))
    }

    /// Waits for what is on its way here, and for pages that others still fetch from here; whether there was any of that.
    async fn waits_for_others(&self) -> Result<bool, Status> {
        let node = &self.node;
        for name in node.reserved() {
            if node.state.service(&name).map_err(internal)?.is_none() {
                let why = format!("it is on its way to node {}, or is being removed there", node.name);
                self.tell(&name, Kind::Waits(why)).await;
                node.until_free(&name).await;
                return Ok(true);
            }
        }
        Ok(self.waits_for_a_move().await)
    }

    /// Waits for the end of a move from here; whether there was one.
    async fn waits_for_a_move(&self) -> bool {
        let Some((name, leaving)) = self.node.a_migration() else { return false };
        self.tell(&name, Kind::Waits(format!("it is on its way to node {}", leaving.to))).await;
        self.node.until_free(&name).await;
        true
    }

    /// Moves a service away, or says why it stays.
    async fn one(&self, service: &Service) -> Result<Became, Status> {
        let name = &service.name;
        loop {
            while self.waits_for_a_move().await {}
            if self.node.is_busy(name) {
                self.tell(name, Kind::Waits("something else is being done with it".into())).await;
                self.node.until_free(name).await;
                continue;
            }
            match self.node.state.service(name).map_err(internal)? {
                Some(owned) if owned.service.id == service.id && owned.exit_code.is_none() => {}
                // Somebody else has moved, stopped or removed it.
                _ => return Ok(Became::Gone),
            }
            let placed = match place::here_for(&self.node, &self.request(service), Cause::Draining).await {
                Ok(placed) => placed,
                Err(status) => return Ok(self.stays(name, status.message().to_owned()).await),
            };
            if sends_others(&placed) {
                continue;
            }
            self.tell(name, Kind::Placed(placed.clone())).await;
            if placed.to.is_empty() {
                // What was told says why.
                return Ok(Became::Stays);
            }
            return Ok(self.go(service, placed).await);
        }
    }

    async fn stays(&self, name: &ServiceName, why: String) -> Became {
        self.tell(name, Kind::Stays(why)).await;
        Became::Stays
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

    /// Moves it to the best node that takes it.
    async fn go(&self, service: &Service, placed: api::PlaceResponse) -> Became {
        let name = &service.name;
        let asked = self.request(service).r#move.unwrap_or_default();
        let mut why = String::new();
        for to in std::iter::once(placed.to).chain(placed.then) {
            let request = MigrateRequest { to, mode: placed.mode.clone(), ..asked.clone() };
            match self.attempt(name, &request).await {
                Ok(report) if report.outcome == Outcome::Moved.name() => return Became::Moved,
                Ok(report) if report.outcome == Outcome::Lost.name() => return Became::Lost,
                Ok(report) if report.refused => why = report.reason,
                Ok(report) => return self.stays(name, report.reason).await,
                Err(status) if status.code() == Code::Aborted => why = status.message().to_owned(),
                Err(status) => return self.stays(name, status.message().to_owned()).await,
            }
        }
        self.stays(name, why).await
    }

    /// One move, to its end.
    async fn attempt(
        &self,
        name: &ServiceName,
        request: &MigrateRequest,
    ) -> Result<api::MigrationReport, Status> {
        let mut stream = migrate::start(&self.node, name.clone(), request).await?;
        while let Some(event) = stream.recv().await {
            match event?.kind {
                Some(migration_event::Kind::Progress(progress)) => {
                    // Steps may be skipped for a slow reader.
                    let event = DrainEvent { name: name.to_string(), kind: Some(Kind::Progress(progress)) };
                    let _ = self.events.try_send(Ok(event));
                }
                Some(migration_event::Kind::Report(report)) => {
                    self.tell(name, Kind::Report(report.clone())).await;
                    return Ok(report);
                }
                None => {}
            }
        }
        Err(Status::unavailable("its migration ended without a report; see godwitd's log"))
    }
}

/// Whether it stays for now, since this node sends other services.
fn sends_others(placed: &api::PlaceResponse) -> bool {
    let sending = |why: &api::PlaceReason| matches!(why.kind, Some(place_reason::Kind::Sending(_)));
    placed.to.is_empty() && !placed.reasons.is_empty() && placed.reasons.iter().all(sending)
}
