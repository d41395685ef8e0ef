//! What goes on without the conversation in which it began: after a crash of this daemon, or when the
//! connection ended before the decision or while pages followed.

use std::path::PathBuf;
use std::sync::Arc;

use godwit_database::blocking::off_worker;

use super::foreign::Foreign;
use super::own::{PAUSES, adopt, fill, start, tell_hook};
use super::page_receiver::{self, PageReceiver};
use super::{Memory, drop_copy, drop_in_the_end};
use crate::arrivals::Arrival;
use crate::doubt::Verdict;
use crate::journal::Role;
use crate::link::Link;
use crate::message::{Message, Reason};
use crate::resources::{Decision, NodeResources};
use crate::service::Service;

/// The source still has pages of a migration that no task here waits for.
pub(super) async fn answer_resume(local: &NodeResources, link: Link, id: &str) {
    let entry = local.journal.get(id).ok().flatten();
    let own = entry.filter(|entry| entry.role == Role::Destination && entry.peer == link.node());
    if let Some(entry) = own.filter(|entry| entry.stage.is_final()) {
        // Its own attempt to say so had failed, or the service is lost. A lost answer is asked for again.
        let answer = match entry.reason {
            reason if reason.is_empty() => Message::Received,
            reason => Message::Abort(Reason { reason }),
        };
        let _ = link.send(answer).await;
    }
    // Else this daemon has just started, and the source tries again in a moment.
    link.close().await;
}

/// Takes the service over, for a migration whose source has said that it committed.
pub(crate) async fn take_over(
    local: &NodeResources,
    service: &Service,
    id: &str,
    source: &str,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let memory = own(local, service, id, keep_stopped, memory).await;
    acknowledge(local, id, source).await;
    tokio::join!(fill(local, service, (id, source), memory, None), tell_hook(local, service, id, source));
}

/// Acknowledges the commit, so that the source may forget it. If that fails, the source remembers it.
async fn acknowledge(local: &NodeResources, id: &str, source: &str) {
    if let Err(error) = local.cluster.acknowledge(source, id).await {
        tracing::debug!(migration = %id, %source, %error, "cannot acknowledge the commit to the source");
    }
}

async fn own(
    local: &NodeResources,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: Memory,
) -> Memory {
    let mut memory = memory;
    let started = start(local, service, id, keep_stopped, &mut memory).await.map(drop);
    adopt(local, service, id, keep_stopped, &mut memory, started).await;
    memory
}

/// The memory of a service that arrived in an earlier life of this daemon.
pub(crate) async fn reattach(local: &NodeResources, id: &str, arrival: Arrival) -> Memory {
    memory_in(page_receiver::directory(local, id), arrival).await
}

/// The memory whose pager is in a directory, if it has one.
pub(super) async fn memory_in(directory: PathBuf, arrival: Arrival) -> Memory {
    match PageReceiver::find(directory.clone()).await {
        Ok(Some(found)) => Memory::Filling(PageReceiver::attach(found, arrival)),
        Ok(None) => Memory::Whole,
        Err(error) if error.is_of_version() => {
            Memory::Foreign(Foreign::new(directory, arrival, crate::error_chain(&error)))
        }
        Err(error) => Memory::Lost(crate::error_chain(&error)),
    }
}

/// The node that is asked for the decision.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    /// The source.
    pub(crate) source: &'a str,
    /// The identity of the journal in which the migration began there; empty where it did not tell.
    pub(crate) journal: &'a str,
}

/// Asks the source of a migration that is said to be in doubt until it answers, and does what it says. Where it
/// cannot answer any more, an operator decides; nothing is guessed.
pub(crate) async fn resolve(
    local: &Arc<NodeResources>,
    service: &Service,
    id: &str,
    Asked { source, journal }: Asked<'_>,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let mut verdict = local.doubts.begin(service, id, source);
    let mut pauses = PAUSES;
    let mut dropped = false;
    let aborted = loop {
        if dropped {
            // The volumes may be the last ones, and stay.
            match off_worker(|| local.unmark_volumes(service)) {
                Ok(()) => break Some("an operator decided that it is not this node's".to_owned()),
                Err(error) => {
                    let error = crate::error_chain(&error);
                    tracing::error!(migration = %id, service = %service.name, %error, "its volumes cannot be kept; trying again");
                }
            }
            pauses.wait().await;
            continue;
        }
        let stuck = match local.cluster.decision(source, id, journal).await {
            Ok(Decision::Committed) => break None,
            // Also after an operator's decision that was not carried out to its end.
            Ok(Decision::Aborted(reason)) => match off_worker(|| local.mark_volumes(service)) {
                Ok(()) => break Some(reason),
                Err(error) => Some(crate::error_chain(&error)),
            },
            Ok(Decision::Pending) => None,
            Ok(Decision::Unknown(why)) => Some(format!("node {source} answers that {why}")),
            Err(error) => Some(format!("node {source} does not answer ({error})")),
        };
        if local.doubts.note(&service.name, stuck.clone())
            && let Some(why) = stuck
        {
            let doubt = local.doubts.all().into_iter().find(|doubt| doubt.migration == id);
            let sentence = doubt.map_or(why, |doubt| doubt.sentence());
            tracing::warn!(migration = %id, service = %service.name, %sentence, "in doubt");
            local.cluster.told(service, &sentence).await;
        }
        let decided = tokio::select! {
            () = pauses.wait() => None,
            Ok(()) = verdict.changed() => *verdict.borrow_and_update(),
        };
        match decided {
            None => {}
            Some(Verdict::Own) => {
                local.cluster.told(service, "it is this node's, as an operator decided").await;
                break None;
            }
            Some(Verdict::Drop) => dropped = true,
        }
    };
    match aborted {
        None => {
            let memory = own(local, service, id, keep_stopped, memory).await;
            // Not before the state says that it is this node's own: somebody might point the network at
            // its source meanwhile.
            local.doubts.end(&service.name);
            acknowledge(local, id, source).await;
            let telling = tell_hook(local, service, id, source);
            tokio::join!(fill(local, service, (id, source), memory, None), telling);
        }
        Some(reason) => {
            let dropped = drop_copy(local, service, (id, source), &reason, memory).await;
            drop_in_the_end(local, service, (id, source), &reason, dropped).await;
            local.doubts.end(&service.name);
        }
    }
}
