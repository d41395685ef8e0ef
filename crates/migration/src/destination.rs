//! The destination's side of a migration.
//!
//! Until the source has committed, nothing that arrives here runs: the restored processes are
//! stopped and the port is closed. When the connection ends between `Restored` and the decision,
//! the migration is in doubt and this node asks the source until it is told ([`resolve`]).
//!
//! The service's pages come over connections of their own into its [`page_receiver`]. After the commit they
//! are put in place while the service runs, and those that have stayed at the source follow.
//!
//! - [`mod@admit`]: whether it may come; [`ask`]: the same where a source only asks.
//! - [`mod@layers`]: the layers that are missing here.
//! - [`receive`]: all else that comes, and the restore.
//! - [`cross`]: its processes go on under executables of this node.
//! - [`own`]: the service is this node's.
//! - [`prepared`]: it stays where it is, and what comes is for a move that may follow.
//! - [`foreign`]: a pager of a version with which this one cannot speak.
//! - [`recover`]: what goes on without the conversation in which it began.

mod admit;
mod announced;
mod ask;
mod cross;
mod foreign;
mod layers;
mod log;
mod own;
pub(crate) mod page_receiver;
mod plain;
mod prepared;
mod receive;
mod recover;
mod room;

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_database::blocking::off_worker;
use godwit_engine::tree;

use crate::ahead::Held;
use crate::arrivals::FurtherConnection;
use crate::failpoint;
use crate::images::{self, ImageTmpfs};
use crate::journal::Stage;
use crate::link::{Link, LinkError};
use crate::message::{Message, Open, Purpose, Reason, Refused, Running};
use crate::resources::{ArrivalEnd, Decision, LocalError, NodeResources, from_local_causes};
use crate::service::Service;
use admit::{Admitted, Coming, accept, admit};
use foreign::Foreign;
use own::{adopt, fill, start};
use page_receiver::{PageReceiver, PageReceiverError};
use receive::{RESTORE_LIMIT, until_restored};
use recover::answer_resume;
pub(crate) use recover::{Asked, reattach, resolve, take_over};

/// Why the copy here was given up.
#[derive(Debug, thiserror::Error)]
pub enum DestinationError {
    /// This node said no, for these reasons.
    #[error("refused: {}", .0.join("; "))]
    Refused(Vec<String>),
    /// The conversation broke.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// This node could not do its part.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// Pages could not be taken.
    #[error(transparent)]
    Receiver(#[from] PageReceiverError),
    /// Pages could be taken at first, and then no longer.
    #[error("{0}")]
    Pages(String),
    /// Files could not be written.
    #[error("the service's changed files cannot be written on this node")]
    Tree(#[from] tree::TreeError),
    /// There is no memory for what comes beyond what was announced.
    #[error("{0}")]
    Memory(String),
    /// A preparation holds memory and disk for too long.
    #[error(
        "the preparation has taken {} minutes, more than 64 KiB each second need for what was announced; allow it more of the link (--max-bandwidth)",
        .0.as_secs() / 60
    )]
    Trickles(Duration),
    /// CRIU hangs.
    #[error("the restore took longer than {} s", RESTORE_LIMIT.as_secs())]
    Slow,
    /// The description of the service or its name is not valid.
    #[error("the source sent a service that cannot be read")]
    Service(#[source] serde_json::Error),
    /// The source broke the rules of the conversation.
    #[error("the source sent {0}")]
    Protocol(&'static str),
}

from_local_causes!(
    DestinationError:
    godwit_engine::image::DigestError,
    godwit_engine::EngineError,
    godwit_network::NetworkError,
    godwit_engine::image::ImageError,
    images::ImagesError,
    crate::journal::JournalError,
    crate::resources::ClusterError,
    tokio::task::JoinError
);

/// The memory of a service that has been restored here.
pub(crate) enum Memory {
    /// In place.
    Whole,
    /// In place, restored from images; its pager and its streams are still there.
    Spare(PageReceiver),
    /// On its way into place.
    Filling(PageReceiver),
    /// In a pager with which this version cannot speak, and which works alone.
    Foreign(Foreign),
    /// What only its pager had is gone, for this reason.
    Lost(String),
}

impl Memory {
    /// Pends until pages are lost; then why.
    fn loss(&self) -> impl Future<Output = String> + Send + use<> {
        let loss = match self {
            Self::Filling(receiver) => Some(receiver.failure()),
            Self::Whole | Self::Spare(_) | Self::Foreign(_) | Self::Lost(_) => None,
        };
        async move {
            match loss {
                Some(loss) => loss.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Before the service runs: this node has nothing of its shared memory open any more.
    fn let_shared_go(&self) {
        if let Self::Spare(receiver) | Self::Filling(receiver) = self {
            receiver.shared().let_go();
        }
    }

    /// Why pages are lost, if they are, as far as is known now.
    fn lost(&mut self) -> Option<String> {
        if let Self::Filling(receiver) = self
            && let Some(reason) = receiver.failed()
        {
            *self = Self::Lost(reason);
        }
        match self {
            Self::Lost(reason) => Some(reason.clone()),
            Self::Whole | Self::Spare(_) | Self::Filling(_) | Self::Foreign(_) => None,
        }
    }
}

/// Serves one incoming data connection to its end. Errors are told to the source, and logged here.
pub async fn serve(local: Arc<NodeResources>, mut link: Link) {
    let source = link.node().to_string();
    let further = match link.receive().await {
        Ok(Message::Open(open)) => return migrate(&local, link, open).await,
        Ok(Message::Ask(open)) => return ask::answer(&local, link, open).await,
        Ok(Message::Join(join)) => {
            let purpose = Purpose::try_from(join.purpose).unwrap_or(Purpose::Unknown);
            local.arrivals.give(&join.migration, &source, FurtherConnection::Stream(purpose, link))
        }
        Ok(Message::Resume(resume)) => {
            match local.arrivals.give(&resume.migration, &source, FurtherConnection::Resumed(link)) {
                Some(FurtherConnection::Resumed(link)) => {
                    answer_resume(&local, link, &resume.migration).await;
                    return;
                }
                other => other,
            }
        }
        Ok(other) => {
            tracing::warn!(%source, got = other.name(), "a data connection violated the protocol");
            return;
        }
        Err(error) => {
            tracing::warn!(%source, error = %crate::error_chain(&error), "a data connection did not begin");
            return;
        }
    };
    if further.is_some() {
        tracing::warn!(%source, "a connection came for a migration that is not under way");
    }
}

/// What a source is told whose request could not be accepted.
fn answer_to_failed(error: &DestinationError) -> Message {
    match error {
        DestinationError::Refused(reasons) => Message::Refused(Refused { reasons: reasons.clone() }),
        error => Message::Abort(Reason { reason: crate::error_chain(error) }),
    }
}

/// One migration to this node, from its request to its end.
async fn migrate(local: &Arc<NodeResources>, mut link: Link, open: Open) {
    let source = link.node().to_string();
    match admit(local, &mut link, open).await {
        // From here on there is a journal entry and a name that must be given up on failure.
        Ok((admitted, coming)) => local.guard(arrive(local, link, admitted, coming)).await,
        Err(error) => {
            local.cluster.arrival_ended(match error {
                DestinationError::Refused(_) => ArrivalEnd::Refused,
                _ => ArrivalEnd::Aborted,
            });
            // The connection's end tells the source the same, less well.
            let _ = link.send(answer_to_failed(&error)).await;
            tracing::info!(%source, reason = %crate::error_chain(&error), "a migration was not accepted");
            link.close().await;
        }
    }
}

/// One that was admitted.
async fn arrive(local: &Arc<NodeResources>, mut link: Link, admitted: Admitted, coming: Coming) {
    let id = &admitted.id;
    tracing::info!(migration = %id, service = %admitted.service.name, source = link.node(), "a service is on its way here");
    let (mut receiver, files) = match take_in(local, &mut link, &admitted, coming).await {
        Ok(taken) => taken,
        // One that did not start may have left something.
        Err(error) => return give_up(local, link, admitted, Memory::Lost(String::new()), error).await,
    };
    let failure = receiver.failure();
    let restored = tokio::select! {
        restored = until_restored(local, &mut link, &admitted, &mut receiver, files) => restored,
        reason = failure => Err(DestinationError::Pages(reason)),
    };
    let (keep_stopped, tmpfs) = match restored {
        Ok(restored) => restored,
        Err(error) => return give_up(local, link, admitted, Memory::Filling(receiver), error).await,
    };
    let mut memory = match admitted.userfaultfd {
        true => Memory::Filling(receiver),
        // The source may still wait for the message that its streams have brought all.
        false => Memory::Spare(receiver),
    };
    let decided = tokio::select! {
        decided = decision(&mut link) => decided,
        reason = memory.loss() => {
            // Perhaps this arrives in time; if not, the source says that it has committed.
            let _ = link.send(Message::Abort(Reason { reason: reason.clone() })).await;
            memory = Memory::Lost(reason);
            None
        }
    };
    let restored = Restored { admitted, keep_stopped, memory, tmpfs };
    match decided {
        Some(Decision::Committed) => restored.commit(local, link).await,
        Some(Decision::Aborted(reason)) => restored.abort(local, link, reason).await,
        Some(Decision::Pending | Decision::Unknown(_)) | None => restored.ask(local, link).await,
    }
}

/// Says that it may come, and begins to take its pages. What goes wrong from here on is told to the source, and ends
/// with an entry that says so.
async fn take_in(
    local: &Arc<NodeResources>,
    link: &mut Link,
    admitted: &Admitted,
    coming: Coming,
) -> Result<(PageReceiver, Option<Held>), DestinationError> {
    let Coming { arrival, retained, files } = coming;
    accept(link, admitted, retained.as_deref(), files.as_ref()).await?;
    // What an earlier attempt may have left must not mix with what comes now.
    local.make_room(&admitted.service).await?;
    // That gives back volumes that were no copy.
    for name in admitted.service.volumes() {
        if off_worker(|| local.volume(name))?.is_some() {
            let user = format!("`godwit volume rm {name}` removes it there");
            return Err(LocalError::VolumeExists { name: name.clone(), user }.into());
        }
    }
    // Pages may be sent again and again while the service runs, but each is held once.
    let most = admitted.memory_bytes.saturating_mul(2).saturating_add(images::KERNEL_STATE_BYTES);
    let most = most.min(local.promised.limit());
    Ok((PageReceiver::start(local, &admitted.id, most, retained, arrival).await?, files))
}

/// The copy cannot be completed, for this reason.
async fn give_up(
    local: &NodeResources,
    link: Link,
    admitted: Admitted,
    memory: Memory,
    error: DestinationError,
) {
    let (service, id) = (admitted.service.clone(), admitted.id.clone());
    let reason = crate::error_chain(&error);
    tracing::warn!(migration = %id, service = %service.name, %reason, "the copy is dropped");
    // First the reason, for the user: the source does not wait long for it once it sees the streams
    // close.
    let _ = link.send(Message::Abort(Reason { reason: reason.clone() })).await;
    let dropped = drop_copy(local, &service, (&id, link.node()), &reason, memory).await;
    // A copy that cannot be dropped yet keeps its name, but its source need not wait for that.
    let place = dropped.is_err().then_some(admitted);
    let source = link.node().to_owned();
    link.close().await;
    drop_in_the_end(local, &service, (&id, &source), &reason, dropped).await;
    drop(place);
}

/// A copy that waits for the source's decision, or has heard it.
struct Restored {
    admitted: Admitted,
    keep_stopped: Vec<u32>,
    memory: Memory,
    tmpfs: ImageTmpfs,
}

impl Restored {
    /// The source has committed.
    async fn commit(self, local: &Arc<NodeResources>, link: Link) {
        let Self { admitted, keep_stopped, mut memory, tmpfs } = self;
        let (service, id) = (admitted.service.clone(), admitted.id.clone());
        let source = link.node().to_string();
        // The source sends the last pages when it gets this message. It would also learn of the resume from the closed
        // connection, but later and with less certainty.
        let resuming = Instant::now();
        match start(local, &service, &id, &keep_stopped, &mut memory).await {
            Ok(mut running) => {
                admitted.timeline.note("resume", resuming);
                admitted.timeline.tells();
                running.timeline = Some(admitted.timeline.for_source());
                let _ = link.send(word(&mut memory, running)).await;
                adopt(local, &service, &id, &keep_stopped, &mut memory, Ok(())).await;
            }
            Err(error) => {
                adopt(local, &service, &id, &keep_stopped, &mut memory, Err(error)).await;
                let _ = link.send(word(&mut memory, Running::default())).await;
            }
        }
        tmpfs.try_to_close();
        // From here on the service itself has the name and the memory.
        drop(admitted);
        let telling = own::tell_hook(local, &service, &id, &source);
        tokio::join!(fill(local, &service, (&id, &source), memory, Some(link)), telling);
    }

    /// The source has given up, for this reason.
    async fn abort(self, local: &NodeResources, link: Link, reason: String) {
        let Self { admitted, memory, tmpfs, .. } = self;
        let source = link.node().to_owned();
        link.close().await;
        tmpfs.try_to_close();
        let of = (admitted.id.as_str(), source.as_str());
        let dropped = drop_copy(local, &admitted.service, of, &reason, memory).await;
        drop_in_the_end(local, &admitted.service, of, &reason, dropped).await;
    }

    /// The conversation ended before the decision.
    async fn ask(self, local: &Arc<NodeResources>, link: Link) {
        let Self { admitted, keep_stopped, memory, tmpfs } = self;
        tmpfs.try_to_close();
        let source = link.node().to_string();
        tracing::warn!(migration = %admitted.id, %source, "the conversation ended before the decision; asking for it");
        link.close().await;
        local.cluster.in_doubt(&admitted.service, &source).await;
        let from = Asked { source: &source, journal: &admitted.source_journal };
        resolve(local, &admitted.service, &admitted.id, from, &keep_stopped, memory).await;
    }
}

/// What the source hears of a service that is this node's.
fn word(memory: &mut Memory, running: Running) -> Message {
    match memory.lost() {
        None => Message::Running(running),
        Some(reason) => Message::Abort(Reason { reason }),
    }
}

/// The source's decision, or nothing when the connection ended without one.
async fn decision(link: &mut Link) -> Option<Decision> {
    match link.receive().await {
        Ok(Message::Commit) => Some(Decision::Committed),
        Err(LinkError::Aborted { reason, .. }) => Some(Decision::Aborted(reason)),
        Ok(other) => {
            tracing::warn!(got = other.name(), "the source sent something other than its decision");
            None
        }
        Err(error) => {
            tracing::debug!(error = %crate::error_chain(&error), "no decision on the connection");
            None
        }
    }
}

/// A copy that could not be dropped yet, and what is left of its memory.
pub(crate) struct NotDropped {
    pub(crate) error: LocalError,
    memory: Memory,
}

/// Removes everything that came here of a service that stays where it was, but for what makes the next attempt shorter. Safe
/// to do again.
pub(crate) async fn drop_copy(
    local: &NodeResources,
    service: &Service,
    (id, source): (&str, &str),
    reason: &str,
    memory: Memory,
) -> Result<(), NotDropped> {
    failpoint::point("destination.dropping").await;
    let cleared = async {
        local.clear_copy(service, (source, service.epoch)).await?;
        local.network.hold_no_more(service).await?;
        Ok::<_, LocalError>(images::remove(local.mounts.as_ref(), &local.layout.migration(id))?)
    };
    if let Err(error) = cleared.await {
        return Err(NotDropped { error, memory });
    }
    let (discarded, left) = match memory {
        Memory::Whole => (Ok(()), Memory::Whole),
        Memory::Spare(receiver) | Memory::Filling(receiver) => {
            (receiver.abandon(local, id).await, Memory::Lost(String::new()))
        }
        Memory::Foreign(_) | Memory::Lost(_) => {
            (page_receiver::discard(local, id).await, Memory::Lost(String::new()))
        }
    };
    let noted = match discarded {
        Ok(()) => local.journal.set(id, Stage::Dropped, reason).map_err(LocalError::from),
        Err(error) => Err(error.into()),
    };
    noted.map_err(|error| NotDropped { error, memory: left })?;
    local.cluster.arrival_ended(ArrivalEnd::Aborted);
    Ok(())
}

/// What [`drop_copy`] could not do is tried again until it is done.
async fn drop_in_the_end(
    local: &NodeResources,
    service: &Service,
    (id, source): (&str, &str),
    reason: &str,
    mut dropped: Result<(), NotDropped>,
) {
    let mut again = local.again(id, "cannot drop a copy that is no longer needed");
    while let Err(NotDropped { error, memory }) = dropped {
        if !again.after(&error).await {
            return;
        }
        dropped = drop_copy(local, service, (id, source), reason, memory).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_that_is_not_accepted_is_told_why_whatever_the_reason() {
        let refused = answer_to_failed(&DestinationError::Refused(vec!["no room".into()]));
        assert_eq!(refused, Message::Refused(Refused { reasons: vec!["no room".into()] }));
        let failed = DestinationError::from(crate::journal::JournalError::Injected);
        let Message::Abort(Reason { reason }) = answer_to_failed(&failed) else {
            panic!("it is not told why")
        };
        assert!(reason.contains("the disk does not take the journal's entry"), "{reason}");
    }
}
