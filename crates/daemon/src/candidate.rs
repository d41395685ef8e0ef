//! A container of another engine before it is adopted: whether it can be, and could move then.
//!
//! What an adoption notes of a container is noted under the name that its service would have, and removed in the end. Nothing
//! else of an adoption is done: the container, its networks and its files stay as they are. What godwitd leaves that is killed
//! meanwhile its next life removes, as it does for an adoption.

use std::sync::Arc;

use godwit_api::v1::{self as api, AdoptRequest, MigrateRequest};
use godwit_engine::foreign::{Found, on_networks};
use godwit_engine::{EngineError, Keeper};
use godwit_migration::source::Findings;
use godwit_migration::{Attachment, Options, Service, Source, error_chain};
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status};

use crate::adopt::{
    as_found, describe, in_care, like, note, of_engine, published, refused, say_of_mounts, staying,
};
use crate::check::{anywhere, asked, of_service, source, told_of};
use crate::convert;
use crate::migrate::is_another;
use crate::node::Node;
use crate::plain::plain;
use crate::services::reserve;
use crate::status::internal;

/// Who an engine's errors are about before the name of a service is known.
const NEW: &str = "new";

/// Whether a service could move, wherever it is; or whether a container of this node could be adopted and could move.
pub(crate) async fn or_service(
    node: &Arc<Node>,
    request: api::CheckMoveRequest,
) -> Result<api::CheckMoveResponse, Status> {
    let asked = asked(&request)?;
    match of_engine(&asked.name) {
        Some(container) => check(node, container, asked).await,
        None => anywhere(node, request).await,
    }
}

/// The same of a container. One in godwit's care is checked as its service.
async fn check(
    node: &Arc<Node>,
    (keeper, container): (Keeper, &str),
    request: &MigrateRequest,
) -> Result<api::CheckMoveResponse, Status> {
    let options = convert::options(request).map_err(Status::invalid_argument)?;
    if !request.to.is_empty() {
        is_another(node, &format!("container {container}"), &request.to)?;
    }
    let found = node.engines().adopts(keeper).id_of(&convert::service_name(NEW)?, container).await;
    if let Some(id) = found.map_err(refused)?
        && let Some(service) = in_care(node, keeper, &id)?
    {
        let of_its_service = MigrateRequest { name: service.name.to_string(), ..request.clone() };
        return of_service(node, &of_its_service).await;
    }
    let cancel = node.local().ending.child_token();
    // Whoever asked may leave: then it ends, and with it what is noted.
    let _leaving = cancel.clone().drop_guard();
    let (looking, asked) = (Arc::clone(node), request.clone());
    // In a task of its own, to its end: neither the tracker nor the note must be left.
    let checking = node.checks.spawn(async move { look(&looking, &asked, options, cancel).await });
    let findings = checking.await.map_err(internal)??;
    told_of(node, plain(&request.name), &request.to, findings)
}

/// What speaks against an adoption; and, where nothing does, what a move would find.
async fn look(
    node: &Arc<Node>,
    request: &MigrateRequest,
    options: Options,
    cancel: CancellationToken,
) -> Result<Findings, Status> {
    let mut findings = Findings::default();
    let Some((keeper, container)) = of_engine(&request.name) else {
        return Err(Status::invalid_argument(format!(
            "{:?} is not a container of another engine",
            request.name
        )));
    };
    // Neither is it adopted meanwhile, nor checked twice.
    let _alone = node.adopting.lock().await;
    let (engine, stay) = (node.engines().adopts(keeper), staying(&request.mounts));
    let found = match engine.find(&convert::service_name(NEW)?, container, true, &stay).await {
        Ok(found) => found,
        Err(EngineError::Unfit { reasons, .. }) => {
            findings.objections = reasons;
            return Ok(findings);
        }
        Err(error) => return Err(refused(error)),
    };
    if in_care(node, keeper, &found.kept.id)?.is_some() {
        return Err(Status::aborted(format!("container {container} has just been adopted; try again")));
    }
    let mut adoption = AdoptRequest {
        container: request.name.clone(),
        mounts: request.mounts.clone(),
        ..Default::default()
    };
    if !found.networks.is_empty() {
        findings.warnings.push(on_networks(keeper, &found.networks));
        match published(&found) {
            Ok(ports) => adoption.publish = ports,
            Err(why) => findings.warnings.push(why.message().to_owned()),
        }
    }
    let name = match convert::service_name(&found.name) {
        Ok(name) => name,
        Err(why) => {
            findings.objections.push(another_name(why.message()));
            return Ok(findings);
        }
    };
    let ports = convert::ports(&adoption.publish)?;
    let (network, addresses, occupied) = match reserve(node, &name, &like(&name, &adoption), ports).await {
        Ok(reserved) => reserved,
        Err(why) if why.code() == Code::AlreadyExists => {
            let taken = node.placement(&name).map_err(internal)?.is_some_and(|placement| !placement.removed);
            findings.objections.push(match taken {
                true => another_name(why.message()),
                false => why.message().to_owned(),
            });
            return Ok(findings);
        }
        Err(why) => return Err(why),
    };
    if network != Attachment::Overlay {
        return Err(Status::internal(
            "a container that is checked has another network than one that is adopted",
        ));
    }
    let mut service = as_found(describe(node, name, &adoption, &addresses)?, found.clone());
    say_of_mounts(&mut service, &adoption)?;
    let moves = source(node, service.clone(), &request.to, options, cancel);
    let checked = noted(node, &service, &found, moves).await;
    let forgotten = node.local().clear(&service).await;
    drop(occupied);
    let Findings { obstacles, objections, warnings, forecast, .. } = checked?;
    forgotten.map_err(internal)?;
    findings.objections.extend(objections);
    findings.warnings.extend(warnings);
    Ok(Findings { obstacles, forecast, ..findings })
}

async fn noted(node: &Node, service: &Service, found: &Found, moves: Source) -> Result<Findings, Status> {
    note(node, service, found).await?;
    let unclear = |error| {
        let why = plain(&error_chain(&error));
        Status::unavailable(format!("container {} cannot be checked: {why}", found.name))
    };
    moves.check().await.map_err(unclear)
}

/// A service cannot have the container's name.
fn another_name(why: &str) -> String {
    format!("{why}; `godwit adopt --name` gives its service another name")
}
