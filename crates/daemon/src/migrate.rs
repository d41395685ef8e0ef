//! Migrations that users ask of this node: started here, or passed on to the node that has the service.

use std::sync::Arc;

use godwit_api::innermost;
use godwit_api::v1::{self as api, MigrateRequest, MigrationEvent, migration_event::Kind};
use godwit_migration::source::is_committed;
use godwit_migration::{LocalError, Outcome, Progress, Service, Source, error_chain};
use godwit_names::ServiceName;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tonic::Status;

use crate::convert;
use crate::directory::{elsewhere, too_old};
use crate::engine_changes;
use crate::node::{Migrating, Node};
use crate::plain::{plain_progress, plain_report};
use crate::status::internal;

/// Progress that waits for a slow reader; more is merged, only the report must not be lost.
pub(crate) const QUEUE: usize = 64;

/// Events of a migration for the user who asked.
pub(crate) type Stream = mpsc::Receiver<Result<MigrationEvent, Status>>;

/// A service of this node that runs, and may leave it for another node, if one is named.
pub(crate) fn leaving(node: &Node, name: &ServiceName, to: Option<&str>) -> Result<Service, Status> {
    let owned = crate::services::owned(node, name)?;
    if let Some(to) = to {
        is_another(node, &format!("service {name}"), to)?;
    }
    if owned.exit_code.is_some() {
        return Err(Status::failed_precondition(format!(
            "service {name} is stopped; only a service that runs can be moved"
        )));
    }
    Ok(owned.service)
}

/// A service that is about to leave, as its engine has it now, which is recorded: it stays so where the move is aborted. Nobody
/// else changes it meanwhile.
async fn as_it_is_now(node: &Node, name: &ServiceName, to: &str) -> Result<Service, Status> {
    let before = leaving(node, name, Some(to))?;
    let now = engine_changes::taken_over(node, before.clone()).await?;
    if now != before && !node.state.change_service(&now).map_err(internal)? {
        return Err(Status::aborted(format!("service {name} has changed meanwhile; try again")));
    }
    Ok(now)
}

/// Refuses a destination that is this node, where `what` is, or none.
pub(crate) fn is_another(node: &Node, what: &str, to: &str) -> Result<(), Status> {
    if to == node.name {
        return Err(Status::invalid_argument(format!(
            "{what} is on node {to} already; name another node (`godwit nodes` lists them)"
        )));
    }
    match node.member_address(to).map_err(internal)? {
        Some(_) => Ok(()),
        None => Err(Status::not_found(format!("there is no node {to}; `godwit nodes` lists all nodes"))),
    }
}

/// Starts a migration of a service of this node. It continues even when the stream is not read.
pub(crate) async fn start(
    node: &Arc<Node>,
    name: ServiceName,
    request: &MigrateRequest,
) -> Result<Stream, Status> {
    let options = convert::options(request).map_err(Status::invalid_argument)?;
    node.settle(&name).await;
    leaving(node, &name, Some(&request.to))?;
    let id = ulid::Ulid::new().to_string();
    let cancel = CancellationToken::new();
    let (end, ended) = watch::channel(());
    let (progress, watching) = watch::channel(Progress::default());
    let migrating = Migrating {
        id: id.clone(),
        to: request.to.clone(),
        cancel: cancel.clone(),
        progress: watching.clone(),
        ended,
    };
    node.begin_migration(&name, migrating)
        .await
        .map_err(|doing| Status::aborted(format!("service {name} {doing}")))?;
    // Whoever asked may leave.
    let entered = Entered { node: Arc::clone(node), name: name.clone() };
    // Those that are entered when godwitd begins to end are cancelled then.
    if node.local().ending.is_cancelled() {
        return Err(Status::aborted("godwitd ends"));
    }
    let service = as_it_is_now(node, &name, &request.to).await?;
    let moving = Moving { id: id.clone(), to: request.to.clone(), image: service.image.clone() };
    let mode = options.mode;
    let source = Source::new(
        Arc::clone(node.local()),
        service,
        id.clone(),
        request.to.clone(),
        options,
        progress,
        cancel,
    );
    let (finish, finished) = oneshot::channel();
    let (to, local) = (request.to.clone(), node.local());
    let node = Arc::clone(node);
    local.spawn(|_| async move {
        let entered = entered;
        node.events.tell("migration", "started", &name, &format!("to node {to}"));
        let (report, rest) = source.run().await;
        // While there is a rest.
        let end = rest.is_some().then_some((entered, end));
        let answer = match report {
            Ok(report) => {
                node.counters.moved(&report);
                let detail = match report.outcome {
                    Outcome::Moved => {
                        format!("to node {to}, {}, frozen {:.0} ms", report.mode, report.frozen_ms)
                    }
                    Outcome::Aborted => report.reason.clone(),
                    Outcome::Prepared | Outcome::Lost => format!("on node {to}: {}", report.reason),
                };
                node.events.tell("migration", report.outcome.name(), &name, &detail);
                Ok(convert::report(report))
            }
            Err(error) => {
                node.counters.failed(mode);
                let why = error_chain(&error);
                node.events.tell("migration", "failed", &name, &why);
                if matches!(error, LocalError::Undecided { .. }) {
                    Err(Status::unavailable(why))
                } else {
                    Err(Status::internal(format!(
                        "service {name} could be neither moved nor rolled back: {why}; godwitd keeps trying to roll it back; see `godwit inspect {name}` and godwitd's log"
                    )))
                }
            }
        };
        // The one who asked may have gone; the events tell the same.
        let _ = finish.send(answer);
        if let Some(rest) = rest {
            rest.end().await;
        }
        drop(end);
    });
    // It goes on where nobody reads.
    Ok(stream(moving, watching, finished, CancellationToken::new()))
}

/// A migration that is entered at its node, until this is dropped.
struct Entered {
    node: Arc<Node>,
    name: ServiceName,
}

impl Drop for Entered {
    fn drop(&mut self) {
        self.node.end_migration(&self.name);
    }
}

/// What moves, for the user who asked.
pub(crate) struct Moving {
    /// The migration.
    pub(crate) id: String,
    /// The destination.
    pub(crate) to: String,
    /// Where the service's image came from.
    pub(crate) image: String,
}

/// The events of a migration for the user who asked. `left` is cancelled when the user has gone.
pub(crate) fn stream(
    moving: Moving,
    mut watching: watch::Receiver<Progress>,
    mut finished: oneshot::Receiver<Result<api::MigrationReport, Status>>,
    left: CancellationToken,
) -> Stream {
    let (events, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        loop {
            tokio::select! {
                biased;
                ended = &mut finished => {
                    let last = match ended {
                        Ok(Ok(report)) => Ok(MigrationEvent { kind: Some(Kind::Report(report)) }),
                        Ok(Err(status)) => Err(status),
                        Err(_) => Err(Status::internal("the migration's task failed; see godwitd's log")),
                    };
                    // A reader that has gone needs no report.
                    let _ = events.send(last).await;
                    return;
                }
                () = events.closed(), if !left.is_cancelled() => left.cancel(),
                Ok(()) = watching.changed() => {
                    let now = watching.borrow_and_update().clone();
                    let progress = api::MigrationProgress {
                        id: moving.id.clone(),
                        phase: now.phase.into(),
                        bytes_done: now.bytes_done,
                        bytes_total: now.bytes_total,
                        round: now.round,
                        dirty_pages_per_second: now.dirty_pages_per_second,
                        bandwidth: now.bandwidth,
                        predicted_frozen_ms: convert::to_microseconds(now.predicted_frozen_ms),
                        faults: now.faults,
                        lacking: now.lacking.map(|lacking| convert::lacking(lacking, &moving.to, &moving.image)),
                    };
                    // Progress may be skipped for a slow reader; the report may not.
                    let _ = events.try_send(Ok(MigrationEvent { kind: Some(Kind::Progress(progress)) }));
                }
            }
        }
    });
    stream
}

/// Starts a migration here or at the node that has the service.
pub(crate) async fn start_anywhere(node: &Arc<Node>, request: MigrateRequest) -> Result<Stream, Status> {
    let name = convert::service_name(&request.name)?;
    let mut there = elsewhere(node, &name)?;
    if there.as_ref().is_some_and(|(owner, _)| *owner == request.to) {
        // It may have arrived here just now, and not be in the state yet.
        node.settle(&name).await;
        there = elsewhere(node, &name)?;
    }
    let Some((owner, address)) = there else { return start(node, name, &request).await };
    if owner == request.to {
        return Err(Status::invalid_argument(format!(
            "service {name} is on node {owner} already; name another node (`godwit nodes` lists them)"
        )));
    }
    // Release 0.2.0 would pass over it, and move the service another way. It is the one that tells no versions.
    if !request.mounts.is_empty() && node.last_seen(&owner).is_some_and(|info| info.newest_protocol == 0) {
        return Err(too_old(node, &name, &owner, "does not know what becomes of mounts (--mount)"));
    }
    let to = request.to.clone();
    let asked = node.peers.get_patient(&owner, &address).migrate(request).await;
    let mut incoming = match asked {
        Ok(answer) => answer.into_inner(),
        Err(error) => return Err(broken(node, &owner, (&name, &to), false, error).await),
    };
    let node = Arc::clone(node);
    let (events, stream) = mpsc::channel(QUEUE);
    tokio::spawn(async move {
        let mut committed = false;
        loop {
            let event = match incoming.message().await {
                Ok(Some(mut event)) => {
                    match &mut event.kind {
                        Some(Kind::Progress(step)) => {
                            plain_progress(step);
                            committed |= is_committed(&step.phase);
                        }
                        Some(Kind::Report(report)) => plain_report(report),
                        None => {}
                    }
                    Ok(event)
                }
                Ok(None) => return,
                Err(error) => Err(broken(&node, &owner, (&name, &to), committed, error).await),
            };
            let last = event.is_err();
            if events.send(event).await.is_err() || last {
                return;
            }
        }
    });
    Ok(stream)
}

/// What is known of a migration whose source does not answer any more, in a sentence; its own words where it gave
/// an answer.
async fn broken(
    node: &Node,
    owner: &str,
    (name, to): (&ServiceName, &str),
    committed: bool,
    error: Status,
) -> Status {
    let Some(cause) = innermost(&error) else { return error };
    let arrived = to == node.name && node.state.service(name).is_ok_and(|owned| owned.is_some());
    let known = match arrived {
        true => match node.local().waits.of(name).await {
            Some(wait) => format!("service {name} runs on this node, node {to}; {}", wait.sentence(name)),
            None => format!("service {name} is on this node, node {to}, and has all of its memory"),
        },
        false if committed => format!(
            "the migration had committed: service {name} is on node {to}; `godwit inspect {name}` there shows whether it waits for pages of node {owner}"
        ),
        false => format!(
            "this node does not know whether service {name} has moved to node {to}; `godwit ps -a` on node {to} shows whether it has arrived, and on node {owner}, when that is back, whether it is still there"
        ),
    };
    Status::unavailable(format!("node {owner}, which moves the service, does not answer ({cause}): {known}"))
}

/// Cancels a migration from this node, and waits until the service runs here again, or has moved.
pub(crate) async fn cancel(node: &Arc<Node>, name: &ServiceName) -> Result<api::CancelResponse, Status> {
    let Some(mut migrating) = node.migration(name) else {
        crate::services::owned(node, name)?;
        let reason = format!("no migration of service {name} is under way");
        return Ok(api::CancelResponse { cancelled: false, reason });
    };
    migrating.cancel.cancel();
    tokio::select! {
        // An error means that the sender is gone, which is what is waited for.
        _ = migrating.ended.changed() => {}
        // Its end may be far: pages may follow for a long time.
        Ok(_) = migrating.progress.wait_for(Progress::is_committed) => {}
    }
    let entry = node.local().journal.get(&migrating.id).map_err(internal)?;
    let aborted = entry.is_some_and(|entry| entry.stage == godwit_migration::journal::Stage::Aborted);
    let reason = if aborted {
        format!("service {name} runs on node {} as before", node.name)
    } else {
        format!("the migration of service {name} to node {} had committed", migrating.to)
    };
    Ok(api::CancelResponse { cancelled: aborted, reason })
}

/// Cancels a migration here or at the node that has the service.
pub(crate) async fn cancel_anywhere(
    node: &Arc<Node>,
    name: &ServiceName,
) -> Result<api::CancelResponse, Status> {
    // A service that has just committed is for a short time in no node's state, but its migration is here.
    if node.migration(name).is_some() {
        return cancel(node, name).await;
    }
    match elsewhere(node, name)? {
        None => cancel(node, name).await,
        Some((owner, address)) => {
            let request = api::ServiceRequest { name: name.to_string() };
            Ok(node.peers.get_patient(&owner, &address).cancel(request).await?.into_inner())
        }
    }
}
