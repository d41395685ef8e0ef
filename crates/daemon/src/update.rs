//! Limits and restart policy of a service, changed while it runs or after it has ended.

use std::sync::Arc;

use godwit_api::v1::{self as api, UpdateRequest};
use godwit_engine::foreign::limits::Changes;
use godwit_engine::{EngineError, Kept};
use godwit_migration::{Restart, Service, error_chain};
use tonic::Status;

use crate::adopt::refused;
use crate::convert;
use crate::made_by::wanted_restart;
use crate::node::Node;
use crate::services::{occupied, owned, show};
use crate::state::Owned;
use crate::status::{internal, status};

/// Changes what the request has.
pub(crate) async fn update(node: &Arc<Node>, request: UpdateRequest) -> Result<api::Service, Status> {
    let name = convert::service_name(&request.name)?;
    let restart = request.restart.as_deref().map(convert::restart).transpose()?;
    owned(node, &name)?;
    let _occupied = node.reserve_soon(&name).await.ok_or_else(|| occupied(&name))?;
    let before = owned(node, &name)?;
    let mut service = before.service.clone();
    service.memory_bytes = request.memory_bytes.unwrap_or(service.memory_bytes);
    service.cpu_millis = request.cpu_millis.unwrap_or(service.cpu_millis);
    service.confinement.pids_limit = request.pids_limit.unwrap_or(service.confinement.pids_limit);
    service.restart = restart.unwrap_or(service.restart);
    convert::check_limits(&service)?;
    if service.remove && service.restart != Restart::No {
        return Err(convert::removed_or_restarted());
    }
    if let Some(kept) = &mut service.kept {
        change_kept(node, &before, kept, &request, restart).await?;
        // Its engine has it.
        service.restart = before.service.restart;
        service.confinement.clone_from(&before.service.confinement);
    } else if before.exit_code.is_none() {
        if service.memory_bytes != 0 && service.memory_bytes != before.service.memory_bytes {
            fits(node, &service).await?;
        }
        let engine = &node.local().engine;
        let limit = async |service: &Service| engine.limit(&node.local().config(service)).await;
        if let Err(error) = limit(&service).await {
            // One that was changed may have been the first of them.
            if let Err(left) = limit(&before.service).await {
                tracing::error!(service = %name, error = %left, "it has other limits than are recorded");
            }
            if owned(node, &name)?.exit_code.is_none() {
                return Err(status(Status::failed_precondition, &error));
            }
            // It has just ended: the limits are for its next start.
        }
    }
    // A move takes from here what the destination gives it.
    let recorded = match node.state.change_service(&service) {
        Ok(true) => Ok(()),
        Ok(false) => Err(Status::aborted(format!("service {name} has changed meanwhile; try again"))),
        Err(error) => Err(internal(error)),
    };
    if let Err(error) = recorded {
        change_back(node, &before, &service).await;
        return Err(error);
    }
    node.events.tell("service", "updated", &name, "");
    show(node, owned(node, &name)?).await
}

/// Has the engine that keeps a container change it.
async fn change_kept(
    node: &Node,
    before: &Owned,
    kept: &mut Kept,
    request: &UpdateRequest,
    restart: Option<Restart>,
) -> Result<(), Status> {
    let old = &before.service;
    if let Some(memory_bytes) = request.memory_bytes.filter(|bytes| *bytes != 0 && *bytes != old.memory_bytes)
        && before.exit_code.is_none()
    {
        fits(node, &Service { memory_bytes, ..old.clone() }).await?;
    }
    let changes = Changes {
        memory_bytes: request.memory_bytes,
        cpu_millis: request.cpu_millis,
        pids_limit: request.pids_limit,
        restart: restart.map(wanted_restart),
    };
    kept.definition = match node.keeper(kept).change(&node.local().config(old), &changes).await {
        Err(EngineError::NotFound(name)) => {
            return Err(Status::failed_precondition(format!(
                "{} has no such container any more; `godwit rm {name}` removes what is left of service {name}",
                kept.keeper.title()
            )));
        }
        changed => changed.map_err(refused)?,
    };
    Ok(())
}

/// Has the engine that keeps a container go back to what is recorded of it: what it was changed to is not.
async fn change_back(node: &Node, before: &Owned, changed: &Service) {
    let old = &before.service;
    let Some(kept) = &old.kept else { return };
    // What is recorded may be another thing by now.
    let recorded = match owned(node, &old.name) {
        Ok(recorded) if recorded.service.id == old.id => recorded.service,
        Ok(_) => return,
        Err(error) => {
            tracing::error!(service = %old.name, error = error.message(), "its limits may be others than are recorded");
            return;
        }
    };
    if let Err(error) = node.keeper(kept).change_back(&node.local().config(&recorded)).await {
        tracing::error!(service = %old.name, error = %error_chain(&error), "it has other limits than are recorded");
    }
    let stays = |recorded: bool, changed: bool| !recorded && changed;
    if stays(recorded.memory_bytes != 0, changed.memory_bytes != 0)
        || stays(recorded.cpu_millis != 0, changed.cpu_millis != 0)
    {
        tracing::error!(service = %old.name, "it has a limit that is not recorded, which its engine cannot lift");
    }
}

/// What a service uses fits into its memory limit; a kernel with cgroups of version 2 would kill one that does not.
async fn fits(node: &Node, service: &Service) -> Result<(), Status> {
    let (name, limit) = (&service.name, service.memory_bytes);
    if let Some(wait) = node.local().waits.of(name).await {
        return Err(Status::failed_precondition(format!(
            "service {name} waits for pages that are still on node {}; change its memory limit when they have come",
            wait.source
        )));
    }
    let usage = node.local().engine.usage(&node.local().config(service)).await.map_err(internal)?;
    match usage.needed_memory {
        Some(used) if used > limit => Err(Status::failed_precondition(format!(
            "service {name} has {used} bytes of memory in use, which a limit of {limit} cannot hold"
        ))),
        _ => Ok(()),
    }
}
