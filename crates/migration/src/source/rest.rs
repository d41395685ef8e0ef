//! After the commit, or the rollback: what is left to do on this node, until it is done.

use std::sync::Arc;

use godwit_database::blocking::off_worker;

use super::park::forget_rest;
use super::serve;
use super::undo::put_back;
use crate::images;
use crate::options::ServeOptions;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;

/// Retains the service's pages for when it comes back, within the bound.
pub(super) async fn retain(local: &Arc<NodeResources>, service: &Service) {
    let config = local.config(service);
    // It may have no cgroup of its own any more.
    let bytes = local.engine.memory_current(&config).await.unwrap_or(0);
    let pids = match local.engine.processes(&config).await {
        Ok(pids) => pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect::<Vec<_>>(),
        Err(error) => return not_retained(&error),
    };
    let (retaining, id) = (Arc::clone(local), service.id.clone());
    let copying = tokio::task::spawn_blocking(move || retaining.retention.copy(&id, &pids, bytes));
    match copying.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => not_retained(&error),
        Err(ended) => not_retained(&ended),
    }
}

/// It has moved, and will cross whole when it comes back.
fn not_retained(error: &(dyn std::error::Error + 'static)) {
    tracing::warn!(error = %crate::error_chain(error), "its pages are not retained");
}

/// Records that the destination has acknowledged the commit. If that fails, the entry only stays longer.
pub(super) fn acknowledged(local: &NodeResources, id: &str, destination: &str) {
    if let Err(error) = local.journal.acknowledge(id, destination) {
        tracing::warn!(migration = %id, error = %crate::error_chain(&error), "cannot record that the destination has acknowledged the commit");
    }
}

/// After the commit: removes all that this node still holds of the service, but for the files that make its way back
/// shorter, and records that in its state. Safe to do again.
pub(crate) async fn let_go(
    local: &NodeResources,
    service: &Service,
    id: &str,
    destination: &str,
    reason: &str,
) -> Result<(), LocalError> {
    local.cluster.release(service, destination).await?;
    local.engine.departed(&local.config(service)).await?;
    off_worker(|| local.mark_volumes(service))?;
    // When it comes back, it has moved twice.
    local.clear_copy(service, (destination, service.epoch.saturating_add(2))).await?;
    images::remove(local.mounts.as_ref(), &local.layout.migration(id))?;
    forget_rest(local, id)?;
    Ok(local.journal.let_go(id, reason)?)
}

/// What a migration from this node still has to do here. It keeps the service's name until it is done.
#[must_use]
pub struct Rest {
    pub(super) local: Arc<NodeResources>,
    pub(super) service: Service,
    pub(super) id: String,
    pub(super) destination: String,
    pub(super) left: Left,
}

/// Each with the reason for the journal.
pub(super) enum Left {
    LetGo(String),
    PutBack { reason: String, attempted: bool },
}

impl Rest {
    /// Does it; returns when it is done, or when this daemon ends.
    pub async fn end(self) {
        let Self { local, service, id, destination, left } = &self;
        let failed = match left {
            Left::LetGo(_) => "the source's cleanup failed",
            Left::PutBack { .. } => "the service cannot be rolled back",
        };
        let mut again = local.again(id, failed);
        loop {
            let done = match left {
                Left::LetGo(reason) => let_go(local, service, id, destination, reason).await,
                Left::PutBack { reason, attempted } => {
                    match put_back(local, service, id, reason, *attempted).await {
                        Ok(put_back) => put_back.noted,
                        Err(error) => Err(error),
                    }
                }
            };
            match done {
                Ok(()) => break,
                Err(error) if again.after(&error).await => {}
                Err(_) => return,
            }
        }
        tracing::info!(migration = %id, service = %service.name, "the rest of a migration is done");
    }
}

/// After a restart: serves the pages that the destination still lacks, then releases the service.
pub(crate) async fn go_on_serving(
    local: &Arc<NodeResources>,
    service: &Service,
    id: &str,
    destination: &str,
) {
    let options = local.journal.serving(id).unwrap_or_else(|error| {
        tracing::error!(migration = %id, error = %crate::error_chain(&error), "cannot read the options for sending its pages; using the defaults");
        ServeOptions::default()
    });
    let serving = serve::Serving { local, id, destination, options, progress: None };
    // Nothing: this daemon ends before all is served.
    let Some(served) = serving.run(None, service).await else { return };
    acknowledged(local, id, destination);
    let reason =
        served.lost.as_deref().unwrap_or("godwitd was restarted while it served the service's pages");
    let mut again = local.again(id, "the source's cleanup failed");
    while let Err(error) = let_go(local, service, id, destination, reason).await {
        if !again.after(&error).await {
            return;
        }
    }
}
