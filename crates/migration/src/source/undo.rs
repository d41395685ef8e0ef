//! The way back before the commit: the service goes on here, with its connections.

use godwit_engine::{ContainerStatus, EngineError};

use crate::hooks::{self, Moment};
use crate::images;
use crate::journal::Stage;
use crate::local::{Local, LocalError};
use crate::service::Service;

/// Undoes a migration that did not commit: in the same life of the daemon, or after a crash. Says whether
/// the service had come so far that others were told: then they are to be told with [`tell_hook`] too.
pub(crate) async fn put_back(
    local: &Local,
    service: &Service,
    id: &str,
    reason: &str,
) -> Result<bool, LocalError> {
    let entry = local.journal.get(id)?;
    let frozen = entry.is_some_and(|e| e.stage == Stage::Frozen) && lives(local, service).await?;
    if frozen {
        local.admit_newcomers(service).await?;
        // The port first: what came in the meantime waits in their sockets while the processes thaw.
        local.open_network(service).await?;
        local.speak(service).await?;
        local.say_again(service);
        match local.engine.thaw(&local.config(service)).await {
            Err(EngineError::NotFound(_)) => {}
            done => done?,
        }
        local.stand_down(service).await;
    }
    local.standstills.forget(service);
    // It may have been slowed to make copying converge.
    local.engine.limit_cpu(&local.config(service), service.cpu_millis).await?;
    images::remove(&local.layout.migration(id))?;
    local.journal.set(id, Stage::Kept, reason)?;
    Ok(frozen)
}

/// Runs the operator's program for a service that stays where it was. The reason of that, and of its
/// failure.
pub(crate) async fn tell_hook(
    local: &Local,
    service: &Service,
    id: &str,
    destination: &str,
    reason: String,
) -> Result<String, LocalError> {
    let ends = (id, local.node.as_str(), destination);
    let Err(error) = hooks::run(local, service, Moment::Kept, ends).await else { return Ok(reason) };
    let error = crate::error_chain(&error);
    tracing::error!(migration = %id, %error, "a hook failed");
    let reason = format!("{reason}; and {error}");
    local.journal.set(id, Stage::Kept, &reason)?;
    Ok(reason)
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
