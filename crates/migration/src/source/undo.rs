//! The way back before the commit: the service goes on here, with its connections.

use godwit_engine::{ContainerStatus, EngineError};

use super::Source;
use crate::images;
use crate::journal::Stage;
use crate::local::{Local, LocalError};
use crate::service::Service;

impl Source {
    /// Before the commit: the service goes on here as if nothing had been.
    pub(super) async fn undo(&self, reason: &str) -> Result<(), LocalError> {
        put_back(&self.local, &self.service, &self.id, reason).await
    }
}

/// Undoes a migration that did not commit: in the same life of the daemon, or after a crash.
pub(crate) async fn put_back(
    local: &Local,
    service: &Service,
    id: &str,
    reason: &str,
) -> Result<(), LocalError> {
    let entry = local.journal.get(id)?;
    if entry.is_some_and(|e| e.stage == Stage::Frozen) && lives(local, service).await? {
        // The port first: what came in the meantime waits in their sockets while the processes thaw.
        local.open_network(service).await?;
        match local.engine.thaw(&local.config(service)).await {
            Err(EngineError::NotFound(_)) => {}
            done => done?,
        }
    }
    // It may have been slowed to make copying converge.
    local.engine.limit_cpu(&local.config(service), service.cpu_millis).await?;
    images::remove(&local.layout.migration(id))?;
    local.journal.set(id, Stage::Kept, reason)?;
    Ok(())
}

/// Whether there is anything to thaw: the service may have been killed, or the machine restarted,
/// which its watcher, or the daemon's start, tells.
async fn lives(local: &Local, service: &Service) -> Result<bool, LocalError> {
    match local.engine.state(&local.config(service)).await {
        Ok(state) => Ok(state.status != ContainerStatus::Stopped),
        Err(EngineError::NotFound(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
