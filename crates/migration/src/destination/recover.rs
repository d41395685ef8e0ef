//! What goes on without the conversation in which it began: after a crash of this daemon, or when the
//! connection ended before the decision or while pages followed.

use std::sync::Arc;

use super::intake::Intake;
use super::own::{ASK_FIRST, ASK_LAST, adopt, fill, start, tell_hook};
use super::{Memory, drop_copy, log_end};
use crate::arrivals::Arrival;
use crate::journal::Role;
use crate::link::Link;
use crate::local::{Decision, Local};
use crate::message::{Message, Reason};
use crate::service::Service;

/// The source still has pages of a migration that no task here waits for.
pub(super) async fn answer_resume(local: &Local, link: Link, id: &str) {
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

/// All of it, for a migration whose source has said that it committed.
pub(crate) async fn take_over(
    local: &Local,
    service: &Service,
    id: &str,
    source: &str,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let memory = own(local, service, id, keep_stopped, memory).await;
    tokio::join!(fill(local, service, id, memory, None), tell_hook(local, service, id, source));
}

async fn own(local: &Local, service: &Service, id: &str, keep_stopped: &[u32], memory: Memory) -> Memory {
    let mut memory = memory;
    let started = start(local, service, id, keep_stopped, &mut memory).await.map(drop);
    adopt(local, service, id, keep_stopped, &mut memory, started).await;
    memory
}

/// The memory of a service that arrived in an earlier life of this daemon.
pub(crate) async fn reattach(local: &Local, id: &str, arrival: Arrival) -> Memory {
    match Intake::attach(local, id, arrival).await {
        Ok(Some(intake)) => Memory::Filling(intake),
        Ok(None) => Memory::Whole,
        Err(error) => Memory::Lost(crate::error_chain(&error)),
    }
}

/// Asks the source of a migration that is said to be in doubt until it answers, and does what it says.
pub(crate) async fn resolve(
    local: &Arc<Local>,
    service: &Service,
    id: &str,
    source: &str,
    keep_stopped: &[u32],
    memory: Memory,
) {
    let mut pause = ASK_FIRST;
    let ended = loop {
        match local.host.decision(source, id).await {
            Ok(Decision::Committed) => {
                let memory = own(local, service, id, keep_stopped, memory).await;
                // Not before it is this node's own in the books: somebody might point the network at
                // its source meanwhile.
                local.host.in_doubt(service, source, false).await;
                let telling = tell_hook(local, service, id, source);
                tokio::join!(fill(local, service, id, memory, None), telling);
                return;
            }
            Ok(Decision::Kept(reason)) => break drop_copy(local, service, id, &reason, memory).await,
            Ok(Decision::Pending) => {}
            Err(error) => tracing::debug!(migration = %id, %source, %error, "the source does not answer"),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(ASK_LAST);
    };
    local.host.in_doubt(service, source, false).await;
    log_end(id, ended);
}
