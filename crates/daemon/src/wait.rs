//! Waiting until a service does not run: on this node, and on the nodes to which it moves meanwhile.

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_api::v1 as api;
use godwit_migration::Backoff;
use godwit_names::ServiceName;
use tokio::sync::broadcast::error::RecvError;
use tonic::{Code, Status};

use crate::directory::{elsewhere, too_old};
use crate::node::{End, Node};
use crate::services::owned;
use crate::status::internal;
use crate::verbs;

/// How long no node may have the service, or its node may be silent: a move's frozen time, and a broken link that mends.
const SILENCE: Duration = Duration::from_secs(60);

/// The pauses between two questions where the service is.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));

/// The longest reason taken of a peer, bytes.
const LONGEST_REASON: usize = 1024;

/// Waits for the end of a service, wherever it is.
pub(crate) async fn anywhere(node: &Arc<Node>, name: &ServiceName) -> Result<api::WaitResponse, Status> {
    let mut pauses = PAUSES;
    let mut heard = Instant::now();
    // The node that had it last, of those that were asked.
    let mut last: Option<(String, String)> = None;
    // Another one may have its name later.
    let id = match node.state.service(name).map_err(internal)? {
        Some(owned) => owned.service.id,
        None => node.placement(name).map_err(internal)?.map(|placement| placement.id).unwrap_or_default(),
    };
    loop {
        let asked = Instant::now();
        let listed = node.placement(name).map_err(internal)?;
        if listed.is_some_and(|listed| !id.is_empty() && listed.id != id) {
            return Err(removed(name));
        }
        let owner = elsewhere(node, name)?;
        let trouble = match owner.clone().or_else(|| last.clone().filter(|_| is_not_here(node, name))) {
            None => match here(node, name, &id).await? {
                Some(ended) => return Ok(ended),
                None => format!("service {name} has left node {}", node.name),
            },
            Some((of, address)) => {
                // It may take as long as the service lives.
                let mut client = node.peers.get_patient(&of, &address);
                match client.wait(api::WaitRequest { name: name.to_string(), id: id.clone() }).await {
                    Ok(ended) => return Ok(plain(ended.into_inner())),
                    // Neither is it on the cluster's list any more.
                    Err(status) if owner.is_none() && status.code() == Code::NotFound => return Err(status),
                    Err(status) if verbs::is_unknown(&status) => {
                        return Err(too_old(node, name, &of, "cannot be waited at"));
                    }
                    Err(status) => match status.code() {
                        // It has moved on, or comes there now, or that node is away.
                        Code::FailedPrecondition
                        | Code::NotFound
                        | Code::Unavailable
                        | Code::Cancelled
                        | Code::Unknown => {
                            last = Some((of.clone(), address));
                            format!(
                                "node {of}, which has service {name}, does not answer: {}",
                                status.message()
                            )
                        }
                        _ => return Err(status),
                    },
                }
            }
        };
        if asked.elapsed() > SILENCE {
            // It was waited for meanwhile.
            (pauses, heard) = (PAUSES, Instant::now());
        }
        if heard.elapsed() > SILENCE {
            return Err(Status::unavailable(format!(
                "{trouble}; `godwit ps` shows where the service is, and `godwit wait {name}` waits again"
            )));
        }
        pauses.wait().await;
    }
}

/// Neither is it this node's, nor about to be.
fn is_not_here(node: &Node, name: &ServiceName) -> bool {
    matches!(node.state.service(name), Ok(None)) && !node.is_arriving(name)
}

/// Waits for the end of a service of this node; nothing if it leaves, or is on its way.
/// `id` says which service is meant, if it is not empty.
pub(crate) async fn here(
    node: &Node,
    name: &ServiceName,
    id: &str,
) -> Result<Option<api::WaitResponse>, Status> {
    let is_meant = |of: &str| id.is_empty() || of == id;
    // Both before the first look, so that nothing is missed.
    let (mut ends, mut events) = (node.ends(), node.events.listen());
    let begin = match owned(node, name) {
        Ok(begin) if is_meant(&begin.service.id) => begin,
        Ok(_) => return Err(removed(name)),
        Err(status) => {
            // Who has lost the connection to this node asks late.
            let listed = node.placement(name).map_err(internal)?;
            let end = node.removed_at_end(name).filter(|end| is_meant(&end.id));
            if let Some(end) = end.filter(|end| listed.is_none_or(|listed| listed.id == end.id)) {
                return Ok(Some(shown(end)));
            }
            return if is_between(node, name)? { Ok(None) } else { Err(status) };
        }
    };
    loop {
        let now = node.state.service(name).map_err(internal)?;
        match now.filter(|now| now.service.id == begin.service.id) {
            None if is_between(node, name)? => return Ok(None),
            None => return Err(removed(name)),
            Some(now) => {
                if let Some(exit_code) = now.exit_code {
                    return Ok(Some(api::WaitResponse { exit_code, reason: now.reason }));
                }
            }
        }
        // Until something has happened to it, or what has happened was too much to be told.
        loop {
            tokio::select! {
                // An end comes before the removal that may follow at once.
                biased;
                end = ends.recv() => match end {
                    Ok(end) if end.id == begin.service.id => return Ok(Some(shown(end))),
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return Err(Status::unavailable("godwitd ends")),
                },
                event = events.recv() => match event {
                    Ok(event) if event.name != name.as_str() => {}
                    Ok(_) | Err(RecvError::Lagged(_)) => break,
                    Err(RecvError::Closed) => return Err(Status::unavailable("godwitd ends")),
                },
            }
        }
    }
}

/// A service that is not this node's now is on its way here or from here, or on another node.
fn is_between(node: &Node, name: &ServiceName) -> Result<bool, Status> {
    let placement = node.placement(name).map_err(internal)?.filter(|placement| placement.node != node.name);
    let owner =
        placement.map(|placement| node.member_address(&placement.node).map_err(internal)).transpose()?;
    Ok(node.is_arriving(name) || node.migration(name).is_some() || owner.flatten().is_some())
}

fn removed(name: &ServiceName) -> Status {
    Status::not_found(format!("service {name} was removed, and how it ended is not known"))
}

fn shown(End { exit_code, reason, .. }: End) -> api::WaitResponse {
    api::WaitResponse { exit_code, reason }
}

/// What a peer has answered, in words that do a terminal no harm.
fn plain(mut ended: api::WaitResponse) -> api::WaitResponse {
    ended.reason.retain(|letter| !letter.is_control());
    while ended.reason.len() > LONGEST_REASON {
        ended.reason.pop();
    }
    ended
}
