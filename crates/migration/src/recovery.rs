//! What a daemon does with the migrations that its last life left unfinished.
//!
//! | role, stage | what it means | what is done |
//! |---|---|---|
//! | source `started`, `frozen` | not committed | port opened, thawed, `kept` |
//! | source `committed` | the destination owns it | everything here is let go, `done` |
//! | source `serving` | the destination owns it, and needs pages from here | they are served, in the background |
//! | destination `reserved` | the source cannot have committed | copy dropped |
//! | destination `restored` | in doubt | the source is asked, in the background |
//! | destination `committed` | owned, perhaps not running yet, or not complete | taken over again, `done` |
//!
//! Pagers outlive the daemon: they are attached to again, and those that nobody needs are ended.

use std::sync::Arc;

use crate::destination::{self, intake};
use crate::journal::{Entry, Role, Stage};
use crate::local::{Decision, Local, LocalError};
use crate::source;

/// Brings every unfinished migration of this node to its end. Returns when nothing of this node's
/// own services is in the wrong state; those in doubt go on in tasks of their own. What cannot be
/// ended now is logged and tried again at the next start: the other services need their daemon.
pub async fn recover(local: &Arc<Local>) -> Result<(), LocalError> {
    crate::images::prune_logs(&local.layout.state.join("criu-logs"))?;
    if let Err(error) = intake::end_idle(local).await {
        tracing::error!(error = %crate::error_chain(&error), "pagers that nobody needs cannot be ended");
    }
    for entry in local.journal.unfinished()? {
        let (id, service) = (entry.id.clone(), entry.service.name.clone());
        tracing::info!(migration = %id, %service, role = ?entry.role, stage = ?entry.stage, "an unfinished migration is found");
        if let Err(error) = end(local, entry).await {
            let error = crate::error_chain(&error);
            tracing::error!(migration = %id, %service, %error, "an unfinished migration cannot be ended yet");
        }
    }
    Ok(())
}

async fn end(local: &Arc<Local>, entry: Entry) -> Result<(), LocalError> {
    let Entry { id, role, peer, stage, service, keep_stopped, .. } = entry;
    match (role, stage) {
        (Role::Source, Stage::Committed) => {
            local.host.release(&service, &peer).await?;
            local.clear(&service).await?;
            crate::images::remove(&local.layout.migration(&id))?;
            local.journal.set(&id, Stage::Done, "godwitd was restarted after the commit")?;
        }
        (Role::Source, Stage::Serving) => {
            local.host.release(&service, &peer).await?;
            let place = local.host.serves(&service, &id, &peer)?;
            let local = Arc::clone(local);
            tokio::spawn(async move {
                source::go_on_serving(&local, &service, &id, &peer).await;
                drop(place);
            });
        }
        (Role::Source, _) => {
            let reason = "godwitd was restarted before the commit";
            if source::put_back(local, &service, &id, reason).await? {
                source::tell_hook(local, &service, &id, &peer, reason.to_owned()).await?;
            }
        }
        (Role::Destination, Stage::Committed) => {
            // Its own in the books first, so that nobody points the network elsewhere meanwhile.
            local.host.adopt(&service).await?;
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            let local = Arc::clone(local);
            tokio::spawn(async move {
                let memory = destination::reattach(&local, &id, arrival).await;
                destination::take_over(&local, &service, &id, &peer, &keep_stopped, memory).await;
            });
        }
        (Role::Destination, Stage::Restored) => {
            local.host.in_doubt(&service, &peer, true).await;
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            let local = Arc::clone(local);
            tokio::spawn(async move {
                let memory = destination::reattach(&local, &id, arrival).await;
                destination::resolve(&local, &service, &id, &peer, &keep_stopped, memory).await;
            });
        }
        (Role::Destination, _) => {
            let reason = "godwitd was restarted before the service was complete";
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            let memory = destination::reattach(local, &id, arrival).await;
            destination::drop_copy(local, &service, &id, reason, memory).await?;
        }
    }
    Ok(())
}

/// What this node, as the source, answers to [`Decision`] questions. A migration it never heard
/// of was never committed; one that is not final is still being decided.
pub fn decision(local: &Local, id: &str, asker: &str) -> Result<Decision, LocalError> {
    Ok(match local.journal.get(id)? {
        Some(entry) if entry.role == Role::Source && entry.peer == asker => match entry.stage {
            Stage::Committed | Stage::Serving | Stage::Done => Decision::Committed,
            Stage::Kept => Decision::Kept(entry.reason),
            _ => Decision::Pending,
        },
        _ => Decision::Kept("the source knows of no such migration".into()),
    })
}
