//! Whether and how a service follows its clients: told, changed, and recorded.

use std::sync::Arc;
use std::time::Duration;

use godwit_api::v1::{self as api, policy_request::Change};
use godwit_migration::Follows;
use godwit_names::ServiceName;
use godwit_policy::loss::Target;
use tonic::Status;

use crate::convert;
use crate::directory::{elsewhere, too_old};
use crate::node::Node;
use crate::place::{LATENCY, told};
use crate::services::{occupied, owned};
use crate::status::internal;
use crate::verbs;

/// Tells or changes the policy of a service, wherever it is.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    request: api::PolicyRequest,
) -> Result<api::PolicyResponse, Status> {
    let name = convert::service_name(&request.name)?;
    let Some((owner, address)) = elsewhere(node, &name)? else { return here(node, request).await };
    let answer = node.peers.get_patient(&owner, &address).policy(request).await;
    let answer = answer.map_err(|status| match verbs::is_unknown(&status) {
        true => too_old(node, &name, &owner, "has no policies"),
        false => status,
    });
    let answer = answer?.into_inner();
    if answer.name == name.as_str() && answer.node == owner && answer.last.iter().all(told::is_plain) {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {owner} returned an invalid answer about service {name}")))
}

/// The same of a service of this node.
pub(crate) async fn here(
    node: &Arc<Node>,
    request: api::PolicyRequest,
) -> Result<api::PolicyResponse, Status> {
    let name = convert::service_name(&request.name)?;
    match request.change {
        Some(Change::Set(policy)) => {
            let wanted = wanted(&policy)?;
            change(node, &name, Some(wanted)).await?;
        }
        Some(Change::Clear(true)) => change(node, &name, None).await?,
        Some(Change::Clear(false)) | None => {}
    }
    let service = owned(node, &name)?.service;
    // A decision that is under way may be noted after the policy has gone.
    let decision = service.follows.as_ref().and_then(|_| node.decision(&service.id));
    let (decided_ms, last) = decision.unzip();
    Ok(api::PolicyResponse {
        name: request.name,
        node: node.name.clone(),
        policy: service.follows.as_ref().map(convert::policy),
        last,
        decided_ms: decided_ms.unwrap_or_default(),
    })
}

fn wanted(policy: &api::Policy) -> Result<Follows, Status> {
    let latency = match policy.latency_us {
        0 => LATENCY,
        us => Duration::from_micros(us),
    };
    if Target::new(latency).is_none() {
        return Err(Status::invalid_argument("no client has a latency of more than a day"));
    }
    Ok(Follows::new(latency, policy.max_frozen_ms, policy.allow_postcopy))
}

async fn change(node: &Arc<Node>, name: &ServiceName, wanted: Option<Follows>) -> Result<(), Status> {
    owned(node, name)?;
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let mut service = owned(node, name)?.service;
    let action = if wanted.is_some() { "set" } else { "cleared" };
    service.follows = wanted.map(|wanted| match &service.follows {
        Some(before) => before.changed(wanted),
        None => wanted,
    });
    if !node.state.change_service(&service).map_err(internal)? {
        return Err(Status::aborted(format!("service {name} has changed meanwhile; try again")));
    }
    node.forget_decision(&service.id);
    node.events.tell("policy", action, name, "");
    Ok(())
}

/// Changes what is remembered of a service that follows its clients, if it still does, and by this policy, if one is given.
pub(super) async fn record(
    node: &Arc<Node>,
    (name, id): (&ServiceName, &str),
    by: Option<&Follows>,
    change: impl FnOnce(&mut Follows),
) -> Result<(), Status> {
    let _occupied = node.reserve_soon(name).await.ok_or_else(|| occupied(name))?;
    let mut service = owned(node, name)?.service;
    let follows =
        service.follows.as_mut().filter(|now| service.id == id && by.is_none_or(|by| now.is_like(by)));
    let gone =
        || Status::aborted(format!("service {name} follows its clients by another policy, or not at all"));
    change(follows.ok_or_else(gone)?);
    match node.state.change_service(&service).map_err(internal)? {
        true => Ok(()),
        false => Err(Status::aborted(format!("service {name} has changed meanwhile"))),
    }
}
