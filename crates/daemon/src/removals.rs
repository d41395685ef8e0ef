//! Nodes that were removed from the cluster: by this node's user, or as another node tells.
//!
//! The CA signs a removal, so that every node passes it on and nobody can make one up. A node that hears of
//! one refuses the removed node's certificate, ends its connections, lets its packets through no more, and
//! forgets where it was. Its services stay known, as services on a removed node, until somebody forgets them.

use std::sync::Arc;

use godwit_api::v1::{self as api, Placement};
use godwit_migration::error_chain;
use godwit_names::ServiceName;
use godwit_transfer::removal::MAX_SIGNATURE;
use godwit_transfer::{ClusterAuthority, NodeName, Removal};
use tonic::Status;

use crate::network::{forward, overlay as network};
use crate::node::Node;
use crate::peers::IDENTITY;
use crate::state::{State, StateError};
use crate::status::internal;

/// Refuses from the start on what an earlier life has heard of.
pub(crate) fn load(state: &State, identity: &godwit_transfer::Identity) -> Result<(), StateError> {
    for removal in state.removals()? {
        match removal.check(identity.ca()) {
            Ok(()) => drop(identity.removals().add(&removal)),
            Err(error) => tracing::warn!(%error, "the state has an invalid removal"),
        }
    }
    Ok(())
}

/// All removals, for another node.
pub(crate) fn told(state: &State) -> Result<Vec<api::Removal>, StateError> {
    let told = |removal: Removal| api::Removal {
        node: removal.node.to_string(),
        until: removal.until,
        signature: removal.signature.into(),
    };
    Ok(state.removals()?.into_iter().map(told).collect())
}

/// Whether a node has been removed since this was asked for.
pub(crate) fn is_removed_from_now_on(node: &Node, name: &str) -> impl Fn(&Node) -> bool + Send + use<> {
    let name = NodeName::new(name).ok();
    let until = move |node: &Node| name.as_ref().and_then(|name| node.peers.identity().removals().of(name));
    let now = until(node);
    move |node| until(node) != now
}

/// Takes over what another node says of removed ones, where the CA says it too. For who holds
/// [`Node::applying_removals`].
pub(crate) async fn learn(node: &Arc<Node>, told: &[api::Removal]) -> Result<(), StateError> {
    for removal in told {
        let Ok(name) = NodeName::new(&removal.node) else { continue };
        let identity = node.peers.identity();
        let known = identity.removals().of(&name).is_some_and(|until| until >= removal.until);
        if known || removal.signature.len() > MAX_SIGNATURE {
            continue;
        }
        let removal = Removal { node: name, until: removal.until, signature: removal.signature.to_vec() };
        match removal.check(identity.ca()) {
            Ok(()) => apply(node, &removal).await?,
            Err(error) => tracing::warn!(%error, "a peer sent an invalid removal"),
        }
    }
    Ok(())
}

/// For who holds [`Node::applying_removals`].
async fn apply(node: &Arc<Node>, removal: &Removal) -> Result<(), StateError> {
    // First: what is in force is what is kept.
    node.state.put_removal(removal)?;
    node.peers.identity().removals().add(removal);
    node.news.notify_one();
    let name = removal.node.as_str();
    if name == node.name {
        node.events.tell("node", "removed", name, "the other nodes refuse this node's earlier certificate");
        return Ok(());
    }
    if !node.state.remove_member(name)? {
        return Ok(());
    }
    node.forget(name);
    network::guard(node).await?;
    for placement in node.state.placements()?.iter().filter(|placement| placement.node == name) {
        forward::forward(node, placement).await?;
    }
    node.events.tell("node", "removed", name, "its certificate is refused");
    Ok(())
}

/// Takes back the certificates of a name that is no member: it is about to be granted another one.
pub(crate) fn take_back(
    node: &Node,
    authority: &ClusterAuthority,
    name: &NodeName,
) -> Result<Removal, String> {
    let removal = authority.remove(name).map_err(|error| error_chain(&error))?;
    node.state.put_removal(&removal).map_err(|error| error_chain(&error))?;
    node.peers.identity().removals().add(&removal);
    node.news.notify_one();
    Ok(removal)
}

/// The key of the CA, on the node that has it.
pub(crate) fn authority(node: &Node) -> Result<ClusterAuthority, Status> {
    ClusterAuthority::load(&node.local().layout.state.join(IDENTITY)).map_err(|_| {
        Status::failed_precondition(format!(
            "node {} has no key of the cluster's CA; ask the node that founded the cluster",
            node.name
        ))
    })
}

/// Removes a node from the cluster; the services that were there.
pub(crate) async fn remove(node: &Arc<Node>, name: &str) -> Result<Vec<String>, Status> {
    let parsed = NodeName::new(name).map_err(|error| Status::invalid_argument(error_chain(&error)))?;
    let authority = authority(node)?;
    if name == node.name {
        return Err(Status::invalid_argument(format!(
            "node {name} has the key of the cluster's CA, and cannot be removed"
        )));
    }
    let is_member = node.member_address(name).map_err(internal)?.is_some();
    if !is_member && node.state.granted(name).map_err(internal)?.is_none() {
        return Err(Status::not_found(format!("there is no node {name}; `godwit nodes` lists all nodes")));
    }
    let removal = authority.remove(&parsed).map_err(internal)?;
    let _alone = node.applying_removals.lock().await;
    apply(node, &removal).await.map_err(internal)?;
    node.state.remove_member(name).map_err(internal)?;
    let placements = node.state.placements().map_err(internal)?;
    let there = placements.into_iter().filter(|placement| placement.node == name && !placement.removed);
    Ok(there.map(|placement| placement.service).collect())
}

/// Why nothing is to be expected of the node that a service is placed on, if that was removed.
pub(crate) fn gone(node: &Node, name: &str) -> Result<Option<String>, StateError> {
    let was_removed =
        NodeName::new(name).is_ok_and(|name| node.peers.identity().removals().of(&name).is_some());
    if !was_removed || name == node.name || node.member_address(name)?.is_some() {
        return Ok(None);
    }
    Ok(Some(format!("node {name} was removed from the cluster; `godwit rm` forgets the service")))
}

/// Forgets a service on a removed node; whether there was one.
pub(crate) async fn forget_service(node: &Arc<Node>, name: &ServiceName) -> Result<bool, StateError> {
    let Some(placement) = node.placement(name)? else { return Ok(false) };
    if gone(node, &placement.node)?.is_none() {
        return Ok(false);
    }
    let forgotten = Placement { removed: true, ..placement };
    node.state.replace_placement(&forgotten)?;
    forward::forward(node, &forgotten).await?;
    node.news.notify_one();
    node.events.tell("service", "removed", name, "its node was removed from the cluster");
    Ok(true)
}
