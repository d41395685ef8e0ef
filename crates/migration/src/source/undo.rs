//! The rollback before the commit: the service continues here, with its connections.

use std::time::Instant;

use godwit_engine::{ContainerStatus, EngineError};

use super::park::{forget_rest, may_rest, tell_all, until_all_go_on};
use crate::hooks::{self, HookPoint};
use crate::images;
use crate::journal::Stage;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;

/// A service that continues where it was.
pub(crate) struct PutBack {
    /// The pre-freeze hook had run: then [`tell_hook`] is to be called too.
    pub(crate) told: bool,
    /// When it was thawed, if it was frozen.
    pub(crate) went_on: Option<Instant>,
    /// Whether the journal has recorded it; if not, the rollback is to be done again.
    pub(crate) noted: Result<(), LocalError>,
}

/// Rolls back a migration that did not commit, at once or after a crash. Where the commit was `attempted`, and may be on
/// the disk, the service continues only when the disk says that it stays; otherwise the error is
/// [`LocalError::Undecided`].
pub(crate) async fn put_back(
    local: &NodeResources,
    service: &Service,
    id: &str,
    reason: &str,
    attempted: bool,
) -> Result<PutBack, LocalError> {
    if !local.holds(service)? {
        local.engine.release_sessions(&local.config(service)).await;
        let noted = local.journal.set(id, Stage::Aborted, reason).map_err(LocalError::from);
        return Ok(PutBack { told: false, went_on: None, noted });
    }
    let stage = local.journal.get(id).map(|entry| entry.map(|entry| entry.stage));
    // To thaw what was not frozen does no harm.
    let frozen = !matches!(stage, Ok(Some(Stage::Started))) && lives(local, service).await?;
    if frozen || attempted {
        match local.journal.set(id, Stage::Undoing, reason) {
            Ok(()) => {}
            Err(source) if attempted => {
                return Err(LocalError::Undecided { service: service.name.clone(), source });
            }
            // What the disk has says that it stays, too: a service is not kept frozen for a full disk.
            Err(error) => {
                tracing::error!(migration = %id, error = %crate::error_chain(&error), "the service runs again, but the journal cannot record it");
            }
        }
    }
    let (mut went_on, may_rest) = (None, may_rest(local, id));
    if frozen {
        // Before anything reaches its sockets.
        match local.engine.recover(&local.config(service)).await {
            Ok(()) | Err(EngineError::NotFound(_)) => {}
            // It is not kept frozen for that.
            Err(error) => {
                tracing::error!(migration = %id, error = %crate::error_chain(&error), "connections of the service may be broken");
            }
        }
        local.network.admit_newcomers(service).await?;
        // The port first: what came meanwhile waits in the sockets while the processes thaw.
        local.network.open(service).await?;
        local.standstills.speak(service).await?;
        local.standstills.say_again(service);
        local.engine.release_sessions(&local.config(service)).await;
        if may_rest {
            // Those that cannot be told now are told when they run.
            tell_all(local, service).await;
        }
        match local.engine.thaw(&local.config(service)).await {
            Err(EngineError::NotFound(_)) => {}
            done => done?,
        }
        went_on = Some(Instant::now());
        local.standstills.stand_down(service).await;
        if may_rest && let Err(error) = until_all_go_on(local, service).await {
            return Ok(PutBack { told: frozen, went_on, noted: Err(error) });
        }
    } else {
        // Users at the terminals of what has been killed hear of it.
        local.engine.release_sessions(&local.config(service)).await;
    }
    local.standstills.forget(service);
    // It may have been slowed to make copying converge.
    local.engine.limit_cpu(&local.config(service), service.cpu_millis).await?;
    images::remove(local.mounts.as_ref(), &local.layout.migration(id))?;
    forget_rest(local, id)?;
    let noted = local.journal.set(id, Stage::Aborted, reason).map_err(LocalError::from);
    Ok(PutBack { told: frozen, went_on, noted })
}

/// Runs the operator's hook for a service that stays where it was. Returns the reason of that, with the hook's failure.
pub(crate) async fn tell_hook(
    local: &NodeResources,
    service: &Service,
    id: &str,
    destination: &str,
    reason: String,
) -> String {
    let ends = (id, local.node.as_str(), destination);
    let Err(error) = hooks::run(local, service, HookPoint::Aborted, ends).await else { return reason };
    let error = crate::error_chain(&error);
    tracing::error!(migration = %id, %error, "a hook failed");
    let reason = format!("{reason}; and {error}");
    note_reason(local, id, &reason);
    reason
}

/// Records a better reason of a migration that was rolled back, for users; it changes nothing else.
pub(super) fn note_reason(local: &NodeResources, id: &str, reason: &str) {
    if let Err(error) = local.journal.set(id, Stage::Aborted, reason) {
        tracing::warn!(migration = %id, error = %crate::error_chain(&error), "cannot record the reason");
    }
}

/// Whether there is anything to thaw: the service may have been killed, or the machine restarted,
/// which its watcher, or the daemon's start, tells.
async fn lives(local: &NodeResources, service: &Service) -> Result<bool, LocalError> {
    match local.engine.state(&local.config(service)).await {
        Ok(state) => Ok(state.status != ContainerStatus::Stopped),
        Err(EngineError::NotFound(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
