//! What a daemon does at its start with the migrations that are unfinished.
//!
//! A journal entry is a promise about one incarnation of a service, its id and epoch. Before the daemon acts on it, it
//! compares it with what this node has now ([`Known`]). Where the service has come back since, or moved on, the entry
//! is about another incarnation, and only the entry ends.
//!
//! | role, stage | what it means | the state | what is done |
//! |---|---|---|---|
//! | source `started`, `frozen`, `undoing` | not committed | here with another epoch | `aborted` |
//! | | | else | port opened, thawed, `aborted` |
//! | source `committed` | the destination owns it | here with a higher epoch | `done` |
//! | | | else | everything of it here is let go, `released` |
//! | source `serving` | the destination owns it, and needs pages from here | here with a higher epoch | `done` |
//! | | | else | they are served, in the background |
//! | destination `reserved` | the source cannot have committed | here with this epoch or a higher one | `dropped` |
//! | | | else | copy dropped |
//! | destination `restored` | in doubt | here with this epoch | taken over |
//! | | | here with a higher epoch | `done` |
//! | | | else | the source is asked, in the background |
//! | destination `committed` | owned, perhaps not running yet, or not complete | gone on, or removed | `done` |
//! | | | else | taken over again, `done` |
//!
//! What cannot be done at once is tried again in the background, and keeps the service's name meanwhile.
//! Pagers outlive the daemon: it attaches to them again, and ends those that are no longer needed.
//!
//! The rules are functions of plain values, [`act`] and [`answer`]; `tests/protocol.rs` checks them against all
//! orders in which nodes can fail.

use std::sync::Arc;

use crate::destination::{self, page_receiver};
use crate::journal::{Entry, Role, Stage};
use crate::resources::{Decision, Known, LocalError, NodeResources, Place};
use crate::source;

/// What is done with an unfinished entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// The service goes on here.
    PutBack,
    /// Everything of it here is let go.
    LetGo,
    /// Its pages are served.
    Serve,
    /// The copy is dropped.
    Drop,
    /// The source is asked.
    Ask,
    /// The service is this node's, and runs.
    TakeOver,
    /// The entry is about an incarnation that is not here any more.
    End(Stage),
}

/// The table above.
#[must_use]
pub fn act(role: Role, stage: Stage, epoch: u64, known: Known) -> Act {
    let here = |than: fn(&u64, &u64) -> bool| known.here.is_some_and(|known| than(&known, &epoch));
    let gone_on = known.elsewhere.is_some_and(|known| known >= epoch) && known.here != Some(epoch);
    match (role, stage) {
        (_, Stage::Aborted | Stage::Dropped | Stage::Done | Stage::Released) => Act::End(stage),
        (Role::Source, Stage::Committed | Stage::Serving) if here(u64::gt) => Act::End(Stage::Done),
        (Role::Source, Stage::Committed) => Act::LetGo,
        (Role::Source, Stage::Serving) => Act::Serve,
        (Role::Source, _) if here(u64::ne) => Act::End(Stage::Aborted),
        (Role::Source, _) => Act::PutBack,
        (Role::Destination, Stage::Committed) if here(u64::gt) || gone_on => Act::End(Stage::Done),
        (Role::Destination, Stage::Committed) => Act::TakeOver,
        (Role::Destination, Stage::Restored) if here(u64::gt) => Act::End(Stage::Done),
        (Role::Destination, Stage::Restored) if here(u64::eq) => Act::TakeOver,
        (Role::Destination, Stage::Restored) => Act::Ask,
        (Role::Destination, _) if here(u64::ge) => Act::End(Stage::Dropped),
        (Role::Destination, _) => Act::Drop,
    }
}

/// What this node answers, as the source, to a destination in doubt. It says "aborted" only if its journal says so: a
/// journal that does not have the migration, or is not the one in which it began, cannot tell.
#[must_use]
pub fn answer(entry: Option<&Entry>, asker: &str, asked: &str, own: &str) -> Decision {
    if !asked.is_empty() && asked != own {
        return Decision::Unknown(
            "its journal is not the one in which the migration began, so its disk was replaced or its journal was removed".into(),
        );
    }
    match entry.filter(|entry| entry.role == Role::Source && entry.peer == asker) {
        None => Decision::Unknown("its journal has no such migration".into()),
        Some(entry) if entry.stage.is_committed() => Decision::Committed,
        Some(entry) if matches!(entry.stage, Stage::Undoing | Stage::Aborted) => {
            Decision::Aborted(entry.reason.clone())
        }
        Some(_) => Decision::Pending,
    }
}

/// The answer to the node `asker`, which asks for a migration that began in the journal `asked`.
pub fn decision(local: &NodeResources, id: &str, asker: &str, asked: &str) -> Result<Decision, LocalError> {
    if local.journal.is_undecided() {
        return Ok(Decision::Pending);
    }
    let entry = local.journal.get(id)?;
    Ok(answer(entry.as_ref(), asker, asked, local.journal.identity()))
}

/// Finishes or undoes every unfinished migration of this node. Returns when none of this node's own services is in a
/// wrong state; tasks go on with those in doubt, and with what cannot be ended now.
pub async fn recover(local: &Arc<NodeResources>) -> Result<(), LocalError> {
    crate::images::prune_logs(&local.layout.state.join("criu-logs"))?;
    local.kept_files.clear_left()?;
    if let Err(error) = page_receiver::end_idle(local).await {
        tracing::error!(error = %crate::error_chain(&error), "cannot end pagers that are no longer needed");
    }
    for entry in local.journal.unfinished()? {
        let (id, service) = (entry.id.clone(), entry.service.name.clone());
        tracing::info!(migration = %id, %service, role = ?entry.role, stage = ?entry.stage, "found an unfinished migration");
        if let Err(error) = end(local, &entry).await {
            // The other services need their daemon.
            let place = local.cluster.occupy(&service);
            local.spawn(|local| end_later(local, entry, error, place));
        }
    }
    Ok(())
}

async fn end_later(local: Arc<NodeResources>, entry: Entry, error: LocalError, place: Option<Place>) {
    let mut again = local.again(&entry.id, "cannot finish or undo a migration yet");
    let mut failed = Err(error);
    while let Err(error) = &failed {
        if !again.after(error).await {
            return;
        }
        failed = end(&local, &entry).await;
    }
    drop(place);
}

async fn end(local: &Arc<NodeResources>, entry: &Entry) -> Result<(), LocalError> {
    let Entry { id, role, peer, stage, service, keep_stopped, peer_journal, .. } = entry.clone();
    match act(role, stage, service.epoch, local.cluster.known(&service)?) {
        Act::End(stage) => {
            tracing::warn!(migration = %id, service = %service.name, "the entry is older than the service that is here: only the entry ends");
            local.journal.set(&id, stage, "the service has come back or gone on since")?;
        }
        Act::LetGo => {
            source::let_go(local, &service, &id, &peer, "godwitd was restarted after the commit").await?
        }
        Act::Serve => {
            local.cluster.release(&service, &peer).await?;
            let place = local.cluster.serves(&service, &id, &peer)?;
            local.spawn(|local| async move {
                source::go_on_serving(&local, &service, &id, &peer).await;
                drop(place);
            });
        }
        Act::PutBack => {
            let reason = "godwitd was restarted before the commit";
            let put_back = source::put_back(local, &service, &id, reason, false).await?;
            put_back.noted?;
            if put_back.told {
                source::tell_hook(local, &service, &id, &peer, reason.to_owned()).await;
            }
        }
        Act::TakeOver => {
            // First the state says that it is this node's own, so that nothing points the network elsewhere meanwhile.
            local.journal.set(&id, Stage::Committed, "")?;
            local.cluster.adopt(&service).await?;
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            local.spawn(|local| async move {
                let memory = destination::reattach(&local, &id, arrival).await;
                destination::take_over(&local, &service, &id, &peer, &keep_stopped, memory).await;
            });
        }
        Act::Ask => {
            local.cluster.in_doubt(&service, &peer).await;
            local.doubts.begin(&service, &id, &peer);
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            local.spawn(|local| async move {
                let memory = destination::reattach(&local, &id, arrival).await;
                let from = destination::Asked { source: &peer, journal: &peer_journal };
                destination::resolve(&local, &service, &id, from, &keep_stopped, memory).await;
            });
        }
        Act::Drop => {
            let reason = "godwitd was restarted before the service was complete";
            let arrival = local.arrivals.expect(&id, &peer, &service.name);
            let memory = destination::reattach(local, &id, arrival).await;
            let dropped = destination::drop_copy(local, &service, (&id, &peer), reason, memory).await;
            dropped.map_err(|not_dropped| not_dropped.error)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::service::tests::service;

    const NOWHERE: Known = Known { here: None, elsewhere: None };

    fn here(epoch: u64) -> Known {
        Known { here: Some(epoch), elsewhere: None }
    }

    #[test]
    fn a_service_that_has_come_back_is_not_let_go_for_an_old_entry() {
        for stage in [Stage::Committed, Stage::Serving] {
            assert_eq!(act(Role::Source, stage, 3, here(5)), Act::End(Stage::Done));
        }
        assert_eq!(act(Role::Source, Stage::Committed, 3, here(3)), Act::LetGo);
        assert_eq!(act(Role::Source, Stage::Committed, 3, NOWHERE), Act::LetGo);
        assert_eq!(act(Role::Source, Stage::Serving, 3, NOWHERE), Act::Serve);
    }

    #[test]
    fn a_service_that_came_at_a_later_attempt_is_not_dropped_for_an_old_entry() {
        assert_eq!(act(Role::Destination, Stage::Reserved, 4, here(4)), Act::End(Stage::Dropped));
        assert_eq!(act(Role::Destination, Stage::Reserved, 4, here(6)), Act::End(Stage::Dropped));
        assert_eq!(act(Role::Destination, Stage::Reserved, 4, here(2)), Act::Drop);
        assert_eq!(act(Role::Destination, Stage::Reserved, 4, NOWHERE), Act::Drop);
    }

    #[test]
    fn a_service_that_has_gone_on_or_was_removed_is_not_taken_over_again() {
        let at = |here, elsewhere| act(Role::Destination, Stage::Committed, 4, Known { here, elsewhere });
        assert_eq!(at(None, Some(5)), Act::End(Stage::Done));
        assert_eq!(at(None, Some(4)), Act::End(Stage::Done), "removed here");
        assert_eq!(at(Some(6), None), Act::End(Stage::Done));
        assert_eq!(at(None, Some(3)), Act::TakeOver, "where it was before it came");
        assert_eq!(at(Some(4), None), Act::TakeOver);
        assert_eq!(at(None, None), Act::TakeOver);
    }

    #[test]
    fn a_service_is_put_back_only_as_what_it_was() {
        for stage in [Stage::Started, Stage::Frozen, Stage::Undoing] {
            assert_eq!(act(Role::Source, stage, 3, here(3)), Act::PutBack);
            assert_eq!(act(Role::Source, stage, 3, here(5)), Act::End(Stage::Aborted));
        }
    }

    #[test]
    fn aborted_is_answered_only_from_the_journal_that_says_so() {
        let entry = |stage| Entry {
            id: "01A".into(),
            role: Role::Source,
            peer: "b".into(),
            peer_journal: String::new(),
            stage,
            service: service(),
            keep_stopped: Vec::new(),
            reason: "cancelled".into(),
        };
        let asked = |stage| answer(Some(&entry(stage)), "b", "mine", "mine");
        for stage in [Stage::Committed, Stage::Serving, Stage::Released, Stage::Done] {
            assert_eq!(asked(stage), Decision::Committed);
        }
        for stage in [Stage::Undoing, Stage::Aborted] {
            assert_eq!(asked(stage), Decision::Aborted("cancelled".into()));
        }
        assert_eq!(asked(Stage::Frozen), Decision::Pending);
        let unknown = [
            answer(None, "b", "mine", "mine"),
            answer(Some(&entry(Stage::Aborted)), "b", "mine", "a journal that was made anew"),
            answer(Some(&entry(Stage::Aborted)), "c", "mine", "mine"),
            answer(Some(&Entry { role: Role::Destination, ..entry(Stage::Dropped) }), "b", "", "mine"),
        ];
        for answer in unknown {
            assert!(matches!(answer, Decision::Unknown(_)), "{answer:?}");
        }
        // A destination of an older version names no journal.
        assert_eq!(answer(Some(&entry(Stage::Done)), "b", "", "mine"), Decision::Committed);
    }
}
