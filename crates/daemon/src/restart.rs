//! Services of this node that have ended and are started again, from their files, by a user or by their policy
//! ([`godwit_migration::restart`]).
//!
//! ```text
//!                     ┌──────────── godwit start ───────────┐
//!   running ── end ──▶ stopped ── policy: pause ──▶ may it? ──▶ running
//!                                    ▲      not yet │ no └─▶ stays stopped, and an event says why
//!                                    └──────────────┘
//! ```
//! The policy of a container that another engine keeps is that engine's: godwit follows it, and gives the container the
//! service's address again.
//!
//! A service is started only by a task that has reserved its name, so that no migration, stop or removal runs beside it;
//! and only if it is this node's beyond doubt ([`objection`]): it runs on one node at most.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1 as api;
use godwit_database::blocking::off_worker;
use godwit_engine::{ContainerStatus, EngineError};
use godwit_migration::{Backoff, LocalError, Service, error_chain};
use godwit_names::ServiceName;
use tonic::Status;

use crate::cluster;
use crate::network::joined::join;
use crate::network::names;
use crate::node::Node;
use crate::services;
use crate::state::{Owned, StateError, now_ms};
use crate::status::internal;

/// The pauses between checks whether a migration of a service has come to its end.
const CHECKS: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(5));

/// Why a service is not started.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Objection {
    /// For now.
    NotYet(String),
    /// It is not this node's.
    Elsewhere(String),
}

impl Objection {
    fn sentence(self) -> String {
        match self {
            Self::NotYet(why) | Self::Elsewhere(why) => why,
        }
    }
}

/// Starts a service that has ended, with its files; one that runs is left alone.
pub(crate) async fn start(node: &Arc<Node>, name: &ServiceName) -> Result<api::Service, Status> {
    node.settle(name).await;
    services::owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| services::occupied(name))?;
    start_ended(node, services::owned(node, name)?).await
}

/// Ends a service, if it runs, and starts it with its files.
pub(crate) async fn restart(
    node: &Arc<Node>,
    name: &ServiceName,
    timeout: Duration,
) -> Result<api::Service, Status> {
    node.settle(name).await;
    services::owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| services::occupied(name))?;
    let owned = services::owned(node, name)?;
    if owned.exit_code.is_none() {
        // Before the service is stopped in vain.
        refuse(node, &owned.service).await?;
        services::end(node, &owned.service, timeout).await?;
    }
    start_ended(node, services::owned(node, name)?).await
}

/// The caller has the name.
async fn start_ended(node: &Arc<Node>, owned: Owned) -> Result<api::Service, Status> {
    if owned.exit_code.is_some() {
        refuse(node, &owned.service).await?;
        node.forget_pause(&owned.service.id);
        node.end_plan(&owned.service.id);
        live(node, &owned, 0).await.map_err(internal)?;
        node.events.tell("service", "started", &owned.service.name, "again, with its files");
    }
    services::show(node, services::owned(node, &owned.service.name)?).await
}

async fn refuse(node: &Arc<Node>, service: &Service) -> Result<(), Status> {
    match objection(node, service).await.map_err(internal)? {
        None => Ok(()),
        Some(objection) => Err(Status::failed_precondition(objection.sentence())),
    }
}

/// What speaks against starting a service here, as far as this node and the nodes that answer know.
async fn objection(node: &Arc<Node>, service: &Service) -> Result<Option<Objection>, LocalError> {
    let (local, name) = (node.local(), &service.name);
    if local.doubts.has(name) || !local.journal.unfinished_of(&service.id)?.is_empty() {
        return Ok(Some(Objection::NotYet(format!(
            "a migration of service {name} has not ended on node {}; `godwit inspect {name}` shows its state",
            node.name
        ))));
    }
    let elsewhere = |where_it_is: &str| {
        Some(Objection::Elsewhere(format!(
            "service {name} is not started on node {}, as it is {where_it_is}: the files here are from before it left; `godwit rm --force {name}` removes them, and keeps volumes",
            node.name
        )))
    };
    if local.cluster.known(service)?.elsewhere.is_some_and(|epoch| epoch >= service.epoch) {
        return Ok(elsewhere("on another node, or was removed there"));
    }
    if node.has_run(&service.id) {
        // So this disk is not older than a move of the service, and nodes that do not answer need not be waited for.
        return Ok(None);
    }
    let failed = |error: StateError| LocalError::Cluster(godwit_migration::ClusterError(error_chain(&error)));
    Ok(cluster::claimed(node, service)
        .await
        .map_err(failed)?
        .and_then(|other| elsewhere(&format!("on node {other}"))))
}

/// Starts a service of this node that has ended. The caller has its name. If it fails, the service stays ended, and
/// the reason is recorded.
async fn live(node: &Arc<Node>, owned: &Owned, restarts: u32) -> Result<(), LocalError> {
    let failed = |error: StateError| LocalError::Cluster(godwit_migration::ClusterError(error_chain(&error)));
    let mut service = owned.service.clone();
    service.started_ms = now_ms();
    let _starting = node.starting(&service.id);
    // First in the state: the next start of this daemon finds a service that should run and does not.
    if !node.state.set_started(&service, restarts).map_err(failed)? {
        return Err(LocalError::Cluster(godwit_migration::ClusterError(format!(
            "service {} has changed meanwhile; try again",
            service.name
        ))));
    }
    let begun = async {
        let local = node.local();
        local.lay_out_again(&service).await?;
        // Open before the first instruction, so that a program that connects at once gets through.
        local.network.open(&service).await?;
        names::try_out(node, &service).await;
        let (config, _checked) = off_worker(|| local.config_to_start(&service))?;
        let state = local.engine.run(&config).await?;
        join(node, &service, state.pid).await
    };
    if let Err(error) = begun.await {
        if let Err(error) = node.local().network.close(&service).await {
            tracing::warn!(service = %service.name, error = %error_chain(&error), "its port cannot be closed");
        }
        let reason = format!("it could not be started again: {}", error_chain(&error));
        let code = owned.exit_code.unwrap_or(-1);
        node.state.set_exit(&service, code, &reason).map_err(failed)?;
        if owned.stopped {
            node.state.set_stopped(&service).map_err(failed)?;
        }
        return Err(error);
    }
    node.watch(&service);
    Ok(())
}

/// Starts a service again that has ended after so long, if its policy wants that, and after a pause.
pub(crate) fn by_policy(node: &Arc<Node>, service: &Service, ran: Duration) {
    if service.kept.is_some() {
        follow_engine(node, service);
        return;
    }
    if service.remove {
        remove_ended(node, service);
        return;
    }
    if wanted(node, service).is_none() {
        return;
    }
    let Some(pause) = node.plan_start(&service.id, ran) else { return };
    let (node, service) = (Arc::clone(node), service.clone());
    tokio::spawn(async move {
        tokio::time::sleep(pause).await;
        if follow_policy(&node, &service).await == Followed::OrNot {
            // It could not be started, or has ended since this was looked at.
            by_policy(&node, &service, Duration::ZERO);
        }
    });
}

/// Removes a service that has ended, and was to be removed then.
fn remove_ended(node: &Arc<Node>, service: &Service) {
    let (node, service) = (Arc::clone(node), service.clone());
    tokio::spawn(async move {
        let mut checks = CHECKS;
        loop {
            let occupied = node.wait_to_occupy(&service.name).await;
            let trouble = match removed(&node, &service).await {
                Ok(None) => return,
                Ok(Some(Objection::NotYet(why))) => why,
                Ok(Some(Objection::Elsewhere(why))) => {
                    node.events.tell("service", "not removed", &service.name, &why);
                    return;
                }
                Err(error) => error.message().to_owned(),
            };
            tracing::warn!(service = %service.name, %trouble, "it has ended, and is not removed yet");
            drop(occupied);
            checks.wait().await;
        }
    });
}

/// Removes it, unless it has been started or removed since; or says what speaks against that. The caller has its name.
async fn removed(node: &Arc<Node>, service: &Service) -> Result<Option<Objection>, Status> {
    let Some(owned) = node.state.service(&service.name).map_err(internal)? else {
        let listed = node.placement(&service.name).map_err(internal)?;
        if listed.is_some_and(|listed| listed.id == service.id && listed.node == node.name) {
            // It was removed but for that.
            services::unlist(node, service).await?;
        }
        return Ok(None);
    };
    let same = owned.service.id == service.id && owned.service.epoch == service.epoch;
    if !same || owned.exit_code.is_none() || !owned.service.remove {
        return Ok(None);
    }
    // As files of a service that runs elsewhere stay for a user to decide on.
    if let Some(objection) = objection(node, &owned.service).await.map_err(internal)? {
        return Ok(Some(objection));
    }
    services::remove_reserved(node, &owned).await.map(|()| None)
}

/// Waits until the engine that keeps a service's container starts that again, by the engine's own policy or for its user.
fn follow_engine(node: &Arc<Node>, service: &Service) {
    let (node, service) = (Arc::clone(node), service.clone());
    tokio::spawn(async move {
        let _alone = node.following(&service.id).await;
        let ended = |owned: &Owned| owned.service.id == service.id && owned.exit_code.is_some();
        let mut again = ENGINE_AGAIN;
        while let Ok(Some(owned)) = node.state.service(&service.name)
            && ended(&owned)
        {
            match follow_once(&node, &owned.service).await {
                Ok(()) => return,
                Err(LocalError::Engine(EngineError::NotFound(_))) if !matches!(node.state.service(&service.name), Ok(Some(owned)) if ended(&owned)) =>
                {
                    // It was removed by godwit.
                    return;
                }
                Err(LocalError::Engine(EngineError::NotFound(_))) => {
                    let reason = "its engine has removed its container";
                    node.events.tell("service", "died", &service.name, reason);
                    let code = owned.exit_code.unwrap_or(-1);
                    if let Err(error) = node.state.set_exit(&owned.service, code, reason) {
                        tracing::error!(service = %service.name, error = %error_chain(&error), "cannot record that it is gone");
                    }
                    return;
                }
                Err(error) => {
                    tracing::warn!(service = %service.name, error = %error_chain(&error), "cannot follow its engine");
                    again.wait().await;
                }
            }
        }
    });
}

async fn follow_once(node: &Arc<Node>, service: &Service) -> Result<(), LocalError> {
    let local = node.local();
    {
        let Some(_occupied) = node.occupy_for_a_look(&service.name) else {
            return Err(failed_by("it is in use"));
        };
        // A container that has come here is started in this namespace.
        local.network.plug(service).await?;
    }
    local.engine.started_again(&local.config(service)).await?;
    let Some(_occupied) = node.occupy(&service.name) else {
        // It is being started or removed by godwit.
        return Err(failed_by("it is in use"));
    };
    let Ok(Some(owned)) = node.state.service(&service.name) else { return Ok(()) };
    if owned.service.id != service.id || owned.service.epoch != service.epoch || owned.exit_code.is_none() {
        return Ok(());
    }
    let Some(kept) = &service.kept else { return Err(failed_by("no engine keeps it")) };
    let state = node.keeper(kept).take(&local.config(service)).await?;
    if state.status == ContainerStatus::Stopped {
        return Err(failed_by("it has ended again"));
    }
    let mut service = owned.service.clone();
    service.started_ms = now_ms();
    join(node, &service, state.pid).await?;
    let recorded = node.state.set_started(&service, owned.restarts.saturating_add(1));
    if !recorded.map_err(|error| failed_by(&error_chain(&error)))? {
        return Err(failed_by("it has changed meanwhile"));
    }
    node.watch(&service);
    node.events.tell("service", "started", &service.name, "by its engine");
    Ok(())
}

fn failed_by(reason: &str) -> LocalError {
    LocalError::Cluster(godwit_migration::ClusterError(reason.to_owned()))
}

/// The pauses before an engine is asked again that could not be followed.
const ENGINE_AGAIN: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(4));

/// The service as it is in the state, if it is this life of it, has ended, and its policy wants it to be started.
fn wanted(node: &Node, service: &Service) -> Option<(Owned, i32)> {
    let owned = match node.state.service(&service.name) {
        Ok(owned) => owned?,
        Err(error) => {
            tracing::error!(service = %service.name, error = %error_chain(&error), "cannot tell whether to start it again");
            return None;
        }
    };
    let code = owned.exit_code?;
    let same = owned.service.id == service.id && owned.service.epoch == service.epoch;
    let wants = owned.service.restart.wants(code, owned.restarts, owned.stopped);
    (same && wants).then_some((owned, code))
}

/// What became of a planned start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Followed {
    /// The service is another node's, and is not started here.
    Never,
    /// It was started, or could not be, or need not be any more.
    OrNot,
}

async fn follow_policy(node: &Arc<Node>, service: &Service) -> Followed {
    let name = &service.name;
    let mut checks = CHECKS;
    let (_occupied, owned, code) = loop {
        let occupied = node.wait_to_occupy(name).await;
        // The task that had the name may have started, stopped, moved or removed it.
        let Some((owned, code)) = wanted(node, service) else {
            node.end_plan(&service.id);
            return Followed::OrNot;
        };
        match objection(node, service).await {
            Ok(None) => break (occupied, owned, code),
            Ok(Some(Objection::Elsewhere(why))) => {
                node.end_plan(&service.id);
                node.events.tell("service", "not restarted", name, &why);
                return Followed::Never;
            }
            Ok(Some(Objection::NotYet(why))) => {
                tracing::info!(service = %name, %why, "it is not started yet");
            }
            Err(error) => {
                tracing::error!(service = %name, error = %error_chain(&error), "it is not started yet");
            }
        }
        drop(occupied);
        checks.wait().await;
    };
    // It may end at once: that end is to be planned for.
    node.end_plan(&service.id);
    let restarts = owned.restarts.saturating_add(1);
    let ended = if owned.reason.is_empty() { format!("exit code {code}") } else { owned.reason.clone() };
    match live(node, &owned, restarts).await {
        Ok(()) => {
            let detail = format!("after {ended} (--restart {}, start {restarts})", owned.service.restart);
            node.events.tell("service", "restarted", name, &detail);
        }
        Err(error) => node.events.tell("service", "not restarted", name, &error_chain(&error)),
    }
    Followed::OrNot
}
