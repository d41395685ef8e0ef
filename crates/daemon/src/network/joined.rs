//! The network namespaces that engines of others make for their containers.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_engine::Kept;
use godwit_migration::{LocalError, Service, error_chain};

use super::names;
use crate::node::Node;

/// Ends connections by addresses of its engine's networks: all of them before it leaves those, and after that what began
/// meanwhile. Without this its programs, and those at the other ends, would wait until they give up by themselves.
pub(crate) async fn end_connections(service: &Service, pid: u32, all: bool) {
    let namespace = PathBuf::from(format!("/proc/{pid}/ns/net"));
    if let Err(error) = godwit_network::connections::end(&namespace, all).await {
        tracing::warn!(service = %service.name, error = %error_chain(&error), "connections by its engine's networks end by time-outs alone");
    }
}

/// Has a container of another engine ask its network's DNS server for names. What fails is said: the container runs, and asks
/// whom it has asked before.
pub(crate) async fn tell_names(node: &Arc<Node>, service: &Service, kept: &Kept) {
    if !names::gets_through(node, service).await {
        return;
    }
    if let Err(error) = node.keeper(kept).tell_names(&node.local().config(service)).await {
        tracing::warn!(service = %service.name, error = %error_chain(&error), "it does not ask godwit for names");
    }
}

/// Has several containers ask for names, beside what else this node does: each waits for seconds where a firewall drops what it
/// asks.
pub(crate) fn tell_names_of(node: &Arc<Node>, services: Vec<Service>) {
    let node = Arc::clone(node);
    tokio::spawn(async move {
        for service in services {
            if let Some(kept) = &service.kept {
                tell_names(&node, &service, kept).await;
            }
        }
    });
}

/// Gives a service that its engine has started the address that it has, where the engine has made it another network namespace,
/// and has it ask for names.
pub(crate) async fn join(node: &Arc<Node>, service: &Service, pid: u32) -> Result<(), LocalError> {
    let Some(kept) = &service.kept else { return Ok(()) };
    join_silently(node, service, pid).await?;
    tell_names(node, service, kept).await;
    Ok(())
}

/// The same without its names.
pub(crate) async fn join_silently(node: &Node, service: &Service, pid: u32) -> Result<(), LocalError> {
    if service.kept.is_none() {
        return Ok(());
    }
    let network = &node.local().network;
    let is_new = network.join(service, pid).await?;
    network.plug(service).await?;
    network.open(service).await?;
    if is_new {
        // Its engine may have put it on its networks for a moment.
        end_connections(service, pid, false).await;
    }
    Ok(())
}
