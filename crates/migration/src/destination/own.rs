//! After the commit: the service is this node's. It is resumed, recorded in journal, state and placements, and waited for
//! until its memory is complete; one whose memory never will be is ended.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use godwit_database::blocking::off_worker;
use godwit_engine::{ContainerStatus, EngineError};

use super::page_receiver::Talk;
use super::{Memory, page_receiver};
use crate::backoff::Backoff;
use crate::failpoint;
use crate::hooks::{self, HookPoint};
use crate::images;
use crate::journal::Stage;
use crate::link::Link;
use crate::message::Running;
use crate::resources::{ArrivalEnd, LocalError, NodeResources};
use crate::service::Service;
use crate::waits::{UNREACHABLE, Waiting};

/// The pauses between questions to a source that does not answer, and between tries to start what is this node's.
pub(super) const PAUSES: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(2));

/// The service is this node's: opens the port and lets it run; what the network did. Safe to do again
/// after a crash.
pub(super) async fn start(
    local: &NodeResources,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: &mut Memory,
) -> Result<Running, LocalError> {
    failpoint::point("destination.committing").await;
    let running = match memory.lost() {
        // It is this node's to end.
        Some(_) => Running::default(),
        None => {
            memory.let_shared_go();
            let_run(local, service, keep_stopped).await?
        }
    };
    off_worker(|| local.unmark_volumes(service))?;
    // Not before it runs: the source's journal says that it is this node's, and this node asks it again if it fails
    // first.
    local.journal.set(id, Stage::Committed, "")?;
    failpoint::point("destination.committed").await;
    Ok(running)
}

async fn let_run(
    local: &NodeResources,
    service: &Service,
    keep_stopped: &[u32],
) -> Result<Running, LocalError> {
    // A daemon that continues from here has all of it.
    local.retention.forget(&service.id);
    local.kept_files.forget(&service.id);
    let config = local.config(service);
    // Its sockets take the held frames before the processes run. The processes' first answers, to what was unread when
    // they were frozen, find the port open.
    let begun = Instant::now();
    let handed = match local.network.open(service).await {
        Ok(handed) => handed,
        Err(error) => {
            return match local.engine.state(&config).await {
                // The machine was restarted since, and has no network of it: it has ended, too.
                Err(EngineError::NotFound(_)) => Ok(Running::default()),
                Ok(state) if state.status == ContainerStatus::Stopped => Ok(Running::default()),
                _ => Err(error.into()),
            };
        }
    };
    local.standstills.speak(service).await?;
    let took = begun.elapsed();
    match local.engine.cont(&config, keep_stopped).await {
        // The machine was restarted since: the service is this node's, and has ended.
        Ok(()) | Err(EngineError::NotFound(_)) => {
            local.standstills.resend(service);
            Ok(Running {
                cutover_us: u32::try_from(took.as_micros()).unwrap_or(u32::MAX),
                held_frames: handed.frames,
                held_dropped: handed.dropped,
                timeline: None,
            })
        }
        Err(error) => Err(error.into()),
    }
}

/// Records this node as the owner in the journal, the state and the placements. It is the owner whatever fails: what
/// failed is logged, and tried again until it is done.
pub(super) async fn adopt(
    local: &NodeResources,
    service: &Service,
    id: &str,
    keep_stopped: &[u32],
    memory: &mut Memory,
    started: Result<(), LocalError>,
) {
    let mut started = started;
    let mut pauses = PAUSES;
    if started.is_ok() {
        local.standstills.stand_down(service).await;
    }
    loop {
        let adopted = match started {
            Ok(()) => local.cluster.adopt(service).await.map_err(LocalError::from),
            Err(error) => Err(error),
        };
        let Err(error) = adopted else { return };
        tracing::error!(
            migration = %id,
            service = %service.name,
            error = %crate::error_chain(&error),
            "the service is committed to this node, which cannot start it; trying again"
        );
        pauses.wait().await;
        started = start(local, service, id, keep_stopped, memory).await.map(drop);
        if started.is_ok() {
            local.standstills.stand_down(service).await;
        }
    }
}

/// Runs the operator's hook for a service that has arrived and runs; after a crash perhaps a second time.
pub(super) async fn tell_hook(local: &NodeResources, service: &Service, id: &str, source: &str) {
    if let Err(error) = hooks::run(local, service, HookPoint::PostResume, (id, source, &local.node)).await {
        tracing::error!(migration = %id, service = %service.name, error = %crate::error_chain(&error), "a hook failed");
        local.cluster.told(service, &format!("it runs here, but {}", crate::error_chain(&error))).await;
    }
}

/// After the commit: waits until the service has all of its pages, and finishes the journal's entry.
pub(super) async fn fill(
    local: &NodeResources,
    service: &Service,
    (id, source): (&str, &str),
    memory: Memory,
    link: Option<Link>,
) {
    let mut reason = String::new();
    let mut pager = None;
    let memory = match memory {
        Memory::Foreign(foreign) => foreign.wait(local, service, id).await,
        memory => memory,
    };
    match memory {
        Memory::Whole => {}
        Memory::Spare(receiver) => pager = Some(receiver),
        // It has ended, and its pager has not.
        Memory::Foreign(_) => page_receiver::end(local, id, None).await,
        Memory::Lost(why) => {
            reason = kill_incomplete(local, service, id, &why).await;
            page_receiver::end(local, id, None).await;
        }
        Memory::Filling(mut receiver) => {
            if let Some(link) = link {
                receiver.converse(link).await;
            }
            let waiting = local.waits.begin(&service.name, id, source, receiver.pager());
            let talk = receiver.talk();
            let filled = async {
                failpoint::point("destination.filling").await;
                receiver.complete().await
            };
            tokio::select! {
                never = tell_silence(local, service, source, &waiting, talk) => match never {},
                filled = filled => if let Err(why) = filled {
                    reason = kill_incomplete(local, service, id, &why).await;
                },
                () = ended(local, service) => {
                    tracing::info!(migration = %id, service = %service.name, "it has ended, and needs no more pages");
                }
            }
            pager = Some(receiver);
        }
    }
    // First the journal: as long as the pager is there, the next start of this daemon finds it complete.
    // An entry that stays open would have the service taken over again, wherever it is then.
    let mut again = local.again(id, "cannot record the end of a migration");
    let done = || {
        images::remove(local.mounts.as_ref(), &local.layout.migration(id))?;
        Ok::<_, LocalError>(local.journal.set(id, Stage::Done, &reason)?)
    };
    while let Err(error) = done() {
        if !again.after(&error).await {
            return;
        }
    }
    local.cluster.arrival_ended(if reason.is_empty() { ArrivalEnd::Moved } else { ArrivalEnd::Lost });
    if pager.is_some() {
        page_receiver::end(local, id, pager).await;
    }
}

/// Says when the source, which still has pages, has not talked for a while, and when it talks again.
async fn tell_silence(
    local: &NodeResources,
    service: &Service,
    source: &str,
    waiting: &Waiting<'_>,
    mut talk: Talk,
) -> Infallible {
    loop {
        talk.until(false).await;
        waiting.talks(false);
        let back = tokio::time::timeout(UNREACHABLE, talk.until(true)).await;
        if back.is_err() {
            waiting.raise();
            if let Some(wait) = local.waits.of(&service.name).await {
                let sentence = wait.sentence(&service.name);
                tracing::warn!(service = %service.name, %sentence, "no pages come from the source");
                local.cluster.told(service, &sentence).await;
            }
            talk.until(true).await;
            let sentence = format!("node {source} is back, and the rest of its memory follows");
            local.cluster.told(service, &sentence).await;
        }
        waiting.talks(true);
    }
}

/// Returns when the service has ended, for whatever reason.
pub(super) async fn ended(local: &NodeResources, service: &Service) {
    let config = local.config(service);
    if local.engine.wait(&config).await.is_err()
        && let Ok(state) = local.engine.state(&config).await
        && state.status != ContainerStatus::Stopped
    {
        // It cannot be watched; then it is taken to live.
        std::future::pending().await
    }
}

/// Kills a service whose memory is incomplete: it must not run on with holes that read as zero. Returns the reason for
/// the report.
async fn kill_incomplete(local: &NodeResources, service: &Service, id: &str, why: &str) -> String {
    let reason = format!("it was killed, as its memory is not complete: {why}");
    tracing::error!(migration = %id, service = %service.name, %reason, "the service is lost");
    local.cluster.lost(service, &reason).await;
    failpoint::point("destination.lost").await;
    if let Err(error) = local.engine.signal(&local.config(service), libc::SIGKILL).await {
        tracing::error!(migration = %id, error = %crate::error_chain(&error), "it cannot be killed");
    }
    // Until its processes are gone the pager's guard must not be.
    ended(local, service).await;
    reason
}
