//! Another certificate for this node, before the one it has ends.
//!
//! The node with the CA's key issues its own; the others ask it over a connection with their present certificate.
//! Connections that are up stay as they are.

use std::time::{Duration, SystemTime};

use godwit_api::v1::RenewRequest;
use godwit_migration::error_chain;
use godwit_transfer::{ClusterAuthority, Identity, NodeName};
use tonic::Status;

use crate::node::Node;
use crate::peers::IDENTITY;
use crate::status::{internal, status};

/// Longest pause between two readings of the clock, which may be set meanwhile.
const INTERVAL: Duration = Duration::from_secs(600);
/// Between two attempts.
const AGAIN: Duration = Duration::from_secs(5);

/// Renews the certificate whenever it is time, for as long as the node lives.
pub(crate) async fn run(node: &Node) {
    let mut said = String::new();
    loop {
        let due = node.peers.identity().renew_at();
        if let Ok(wait) = due.duration_since(SystemTime::now()) {
            tokio::time::sleep(wait.min(INTERVAL)).await;
            continue;
        }
        match renew(node).await {
            Ok(()) => {
                said.clear();
                node.events.tell("node", "renewed", &node.name, "its certificate");
            }
            Err(reason) if reason != said => {
                tracing::warn!(%reason, "the certificate of this node cannot be renewed yet");
                said = reason;
            }
            Err(_) => {}
        }
        tokio::time::sleep(AGAIN).await;
    }
}

async fn renew(node: &Node) -> Result<(), String> {
    let identity = node.peers.identity();
    let directory = node.local().layout.state.join(IDENTITY);
    let request =
        Identity::renewal_request(&directory, identity.node()).map_err(|error| error_chain(&error))?;
    let certificate = match ClusterAuthority::load(&directory) {
        Ok(authority) => sign(node, authority, identity.node(), &request),
        Err(_) => ask(node, request).await,
    };
    let certificate = certificate.map_err(|status| status.message().to_owned())?;
    let renewed = identity.renew(&directory, &certificate).map_err(|error| error_chain(&error))?;
    node.peers.set_identity(renewed);
    Ok(())
}

async fn ask(node: &Node, request: String) -> Result<String, Status> {
    let members = node.state.members().map_err(internal)?;
    let has_key = |name: &str| node.last_seen(name).is_some_and(|info| info.authority);
    let holder = members.into_iter().find(|member| has_key(&member.name)).ok_or_else(|| {
        Status::unavailable("the node with the key of the cluster's CA has not been heard from; start it")
    })?;
    let answer = node.peers.get(&holder.name, &holder.address).renew(RenewRequest { request }).await?;
    Ok(answer.into_inner().certificate)
}

/// Gives a node another certificate.
pub(crate) fn grant(node: &Node, from: &str, request: &str) -> Result<String, Status> {
    let name = NodeName::new(from).map_err(|error| status(Status::invalid_argument, &error))?;
    sign(node, crate::removals::authority(node)?, &name, request)
}

fn sign(node: &Node, authority: ClusterAuthority, name: &NodeName, request: &str) -> Result<String, Status> {
    let after = node.peers.identity().removals().of(name).unwrap_or(0);
    let issued = node.lasting(authority).issue_after(name, request, after);
    issued.map_err(|error| status(Status::invalid_argument, &error))
}
