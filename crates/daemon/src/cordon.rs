//! Whether a node takes services: whoever has work to do on it cordons it. What is on it stays, and starts again there.

use std::sync::{Arc, PoisonError};

use godwit_api::v1 as api;
use godwit_names::is_name;
use tonic::Status;

use crate::directory::release_of;
use crate::node::Node;
use crate::plain::plain_status;
use crate::state::StateError;
use crate::status::internal;
use crate::verbs;

/// Most services of another node that are passed on.
const MOST: usize = 10_000;

/// Why this node takes no services, in a sentence, if it takes none. Who reserves a name asks under [`Node::claiming`].
pub(crate) fn objection(node: &Node) -> Result<Option<String>, StateError> {
    let here = &node.name;
    let sentence =
        || format!("node {here} is cordoned: it takes no services until `godwit node uncordon {here}`");
    Ok(node.state.is_cordoned()?.then(sentence))
}

/// The address of the node that is meant; none where it is this one.
pub(crate) fn elsewhere<'a>(node: &Node, name: &'a str) -> Result<Option<(&'a str, String)>, Status> {
    if name.is_empty() || name == node.name {
        return Ok(None);
    }
    match node.member_address(name).map_err(internal)? {
        Some(address) => Ok(Some((name, address))),
        None => Err(Status::not_found(format!("there is no node {name}; `godwit nodes` lists all nodes"))),
    }
}

/// What a peer answers that does not know the verb, and all others.
pub(crate) fn not_asked(node: &Node, of: &str, lacks: &str, status: &Status) -> Status {
    if !verbs::is_unknown(status) {
        return plain_status(status);
    }
    let release = release_of(node, of).map(|release| format!(" {release}")).unwrap_or_default();
    Status::failed_precondition(format!(
        "godwitd{release} of node {of} is older and {lacks}: install the same release on both nodes"
    ))
}

/// Has a node take no more services, or take them again.
pub(crate) async fn anywhere(
    node: &Arc<Node>,
    request: api::CordonRequest,
) -> Result<api::CordonResponse, Status> {
    let Some((name, address)) = elsewhere(node, &request.node)? else {
        return here(node, request.lift, None);
    };
    let answer = node.peers.get(name, &address).cordon(request.clone()).await;
    let answer = answer.map_err(|status| not_asked(node, name, "cannot be cordoned", &status))?.into_inner();
    if answer.node == name && is_plain(&answer) {
        return Ok(answer);
    }
    Err(Status::internal(format!("node {name} returned an invalid answer")))
}

/// Whether the words of another node are those of a node.
pub(crate) fn is_plain(answer: &api::CordonResponse) -> bool {
    is_name(&answer.node) && answer.services.len() <= MOST && answer.services.iter().all(|name| is_name(name))
}

/// The same of this node, for its own user or one of node `from`.
pub(crate) fn here(node: &Arc<Node>, lift: bool, from: Option<&str>) -> Result<api::CordonResponse, Status> {
    let changed = {
        // What was admitted before is known by now, and nothing is from here on.
        let _alone = node.claiming.lock().unwrap_or_else(PoisonError::into_inner);
        node.state.set_cordoned(!lift).map_err(internal)?
    };
    if changed {
        let action = if lift { "uncordoned" } else { "cordoned" };
        let detail = from.map(|from| format!("by a user of node {from}")).unwrap_or_default();
        node.events.tell("node", action, &node.name, &detail);
        node.news.notify_one();
        node.look_again();
    }
    let services = node.state.services().map_err(internal)?;
    Ok(api::CordonResponse {
        node: node.name.clone(),
        cordoned: !lift,
        changed,
        services: services.into_iter().map(|owned| owned.service.name.to_string()).collect(),
    })
}
