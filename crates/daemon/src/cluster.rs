//! How nodes keep each other informed: every node exchanges all it knows with every other, once a
//! second and at once when there is news. Full exchange is right for the tens of nodes that this
//! version is for; what is newer is told by revisions and epochs, not by clocks. Each node speaks for
//! itself ([`trust`]).

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::future::join_all;
use godwit_api::v1::{Member, NodeInfo, Placement, SyncMessage};
use godwit_migration::journal::Stage;
use godwit_migration::{Service, error_chain};
use godwit_names::ServiceName;
use prost::Message as _;

use crate::directory::{UNREACHABLE_MS, own_info};
use crate::network::{cluster_networks as networks, forward, overlay as network};
use crate::node::{Claim, Conflict, Node};
use crate::peers::MAX_SYNC;
use crate::removals;
use crate::state::{StateError, now_ms};
use crate::trust::{self, Belief, MAX_MEMBERS, MAX_SERVICES, Placements};

/// Between two exchanges when there is no news.
const PERIOD: Duration = Duration::from_secs(1);

/// Between two looks at all forwarding entries: what somebody else changed, or what could not be
/// set while a service was arriving, is put right.
const PUT_RIGHT: Duration = Duration::from_secs(10);

/// Exchanges with all peers for as long as the node lives.
pub(crate) async fn run(node: Arc<Node>) {
    let mut put_right = Instant::now();
    loop {
        if put_right.elapsed() >= PUT_RIGHT {
            put_right = Instant::now();
            put_right_all(&node).await;
        }
        if let Err(error) = exchange(&node).await {
            tracing::error!(error = %error_chain(&error), "gossip with the cluster failed");
        }
        // Either the period ends or there is news; both mean another round.
        let _ = tokio::time::timeout(PERIOD, node.news.notified()).await;
    }
}

/// Puts right what somebody else changed of this node's network.
async fn put_right_all(node: &Arc<Node>) {
    if let Err(error) = network::guard(node).await {
        tracing::error!(error = %error_chain(&error), "cannot update the overlay's list of allowed senders");
    }
    if let Err(error) = networks::keep(node).await {
        tracing::error!(error = %error_chain(&error), "the cluster's networks cannot be looked up");
    }
    if let Err(reason) = network::mend(node).await {
        tracing::error!(%reason, "the overlay is broken");
    }
    if let Err(error) = forward::forward_all(node).await {
        tracing::error!(error = %error_chain(&error), "the overlay cannot be put right");
    }
}

/// Tells all peers and listens to them, once.
pub(crate) async fn exchange(node: &Arc<Node>) -> Result<(), StateError> {
    let others: Vec<Member> = node.state.members()?.into_iter().filter(|m| m.name != node.name).collect();
    let message = what_we_know(node)?;
    if let Some(sentence) = too_much(&message, MAX_SYNC) {
        // Nobody would take it, and nobody says so to a user.
        tracing::error!(%sentence, "cannot send the cluster what this node knows");
        if !node.told_too_much.swap(true, Ordering::Relaxed) {
            node.events.tell("node", "too much", &node.name, &sentence);
        }
        return Ok(());
    }
    node.told_too_much.store(false, Ordering::Relaxed);
    let known: HashSet<_> = others.iter().map(|m| (m.name.clone(), m.address.clone())).collect();
    let tried = node.introduced.take().into_iter().filter(|tried| !known.contains(tried));
    let tried = tried.map(|(name, address)| Member { name, address, ..Member::default() });
    let rounds = others.into_iter().chain(tried).map(|member| {
        let (node, message) = (Arc::clone(node), message.clone());
        async move {
            let is_refused = removals::is_removed_from_now_on(&node, &member.name);
            match node.peers.get(&member.name, &member.address).sync(message).await {
                Ok(answer) => {
                    let answer = answer.into_inner();
                    if let Err(error) = take_in_whole(&node, &member.name, is_refused, answer).await {
                        tracing::error!(error = %error_chain(&error), "cannot record news of the cluster");
                    }
                    if let Some(keys) = node.network.keys() {
                        keys.exchange(node.peers.get(&member.name, &member.address), &member).await;
                    }
                }
                Err(status) => {
                    tracing::debug!(peer = %member.name, %status, "no exchange");
                    let is_it = |m: &Member| m.name == member.name && m.address == member.address;
                    if !node.state.members().is_ok_and(|members| members.iter().any(is_it)) {
                        // Only somebody else said that it is there.
                        node.peers.forget(&member.name);
                    }
                }
            }
        }
    });
    join_all(rounds).await;
    node.tombstones.collect(&node.name, &node.state, node.local())
}

/// Why a message cannot be sent, if it is too large.
fn too_much(message: &SyncMessage, most: usize) -> Option<String> {
    let bytes = message.encoded_len();
    (bytes > most).then(|| {
        let removed = message.placements.iter().filter(|placement| placement.removed).count();
        format!(
            "what it knows of the cluster takes {bytes} bytes, and nodes take {most} of each other: {} services, of \
             which {removed} were removed and are remembered for members that are away; start godwitd on those, or \
             remove them with `godwit cluster remove`",
            message.placements.len()
        )
    })
}

/// Exchanges with one node; whether it answered.
pub(crate) async fn hear(node: &Arc<Node>, from: &str) -> Result<bool, StateError> {
    let Some(address) = node.member_address(from)? else { return Ok(false) };
    let is_refused = removals::is_removed_from_now_on(node, from);
    match node.peers.get(from, &address).sync(what_we_know(node)?).await {
        Ok(answer) => take_in_whole(node, from, is_refused, answer.into_inner()).await.map(|()| true),
        Err(status) => {
            tracing::debug!(peer = %from, %status, "no exchange");
            Ok(false)
        }
    }
}

/// What [`Node::conflict`] says, where another node is asked first that is said to have what is in the way: news of what it has
/// removed may be on its way here.
pub(crate) async fn settled_conflict(
    node: &Arc<Node>,
    name: &ServiceName,
    claim: &Claim,
    id: &str,
    asker: &str,
) -> Result<Option<Conflict>, StateError> {
    let conflict = node.conflict(name, claim, id, asker)?;
    match conflict.as_ref().and_then(|conflict| conflict.node.as_ref()) {
        Some(other) if hear(node, other).await? => node.conflict(name, claim, id, asker),
        _ => Ok(conflict),
    }
}

/// The node of the cluster, if one says so that answers, that has a service of this node at a later epoch: this
/// node's disk is one of before the service left.
pub(crate) async fn claimed(node: &Arc<Node>, service: &Service) -> Result<Option<String>, StateError> {
    let message = what_we_know(node)?;
    let others = node.state.members()?.into_iter().filter(|member| member.name != node.name);
    let asked = others.map(|member| {
        let (node, message) = (Arc::clone(node), message.clone());
        async move {
            let answer = node.peers.get(&member.name, &member.address).sync(message).await.ok()?.into_inner();
            let has = |placement: &Placement| {
                placement.id == service.id && placement.node == member.name && placement.epoch > service.epoch
            };
            answer.placements.iter().any(has).then_some(member.name)
        }
    });
    Ok(join_all(asked).await.into_iter().flatten().next())
}

/// Everything this node can tell.
pub(crate) fn what_we_know(node: &Node) -> Result<SyncMessage, StateError> {
    Ok(SyncMessage {
        info: Some(own_info(node)?),
        members: node.state.members()?,
        placements: placements(node)?,
        networks: node.state.networks()?,
        removals: removals::told(&node.state)?,
    })
}

/// Where all services are. Of one that has committed to go elsewhere, and whose pages are still being
/// fetched from here, that is its new node: others take it of this node only.
fn placements(node: &Node) -> Result<Vec<Placement>, StateError> {
    let mut placements = node.state.placements()?;
    for placement in placements.iter_mut().filter(|p| p.node == node.name && !p.removed) {
        let Some(leaving) = node.migration(&placement.service) else { continue };
        let entry = node.local().journal.get(&leaving.id).ok().flatten();
        if entry.is_some_and(|entry| matches!(entry.stage, Stage::Committed | Stage::Serving)) {
            placement.node = leaving.to;
            placement.epoch = placement.epoch.saturating_add(1);
        }
    }
    Ok(placements)
}

/// Takes over what is newer in the message of a member, of what it has a say in ([`trust`]). It does so to the end even if
/// its caller is dropped, as it is when a peer cancels its request: what is recorded as known is not acted on again.
///
/// Nothing is taken over of a node that was removed since it sent this, as `is_refused` says.
pub(crate) async fn take_in_whole(
    node: &Arc<Node>,
    from: &str,
    is_refused: impl Fn(&Node) -> bool + Send + 'static,
    message: SyncMessage,
) -> Result<(), StateError> {
    let (node, from) = (Arc::clone(node), from.to_owned());
    match tokio::spawn(async move { take_in(&node, &from, is_refused, message).await }).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => std::panic::resume_unwind(panic),
            // Only the end of the daemon cancels it.
            Err(_) => Ok(()),
        },
    }
}

async fn take_in(
    node: &Arc<Node>,
    from: &str,
    is_refused: impl Fn(&Node) -> bool + Send + 'static,
    message: SyncMessage,
) -> Result<(), StateError> {
    // Who tells of a removal that is known waits for whoever acts on it: it says to its user then that the node is removed.
    let applying = node.applying_removals.lock().await;
    if is_refused(node) {
        tracing::debug!(from, "was removed meanwhile, and is not heard");
        return Ok(());
    }
    node.tombstones.hear(from, &message);
    removals::learn(node, &message.removals).await?;
    let mut members = node.state.members()?;
    for member in message.members.into_iter().take(MAX_MEMBERS) {
        if member.name == node.name {
            continue;
        }
        if let Some(fault) = trust::member_fault(&member, now_ms()) {
            tracing::debug!(from, %fault, "a peer sent an invalid member");
        } else if member.name != from {
            introduce(node, &members, &member);
        } else {
            take_member(node, &members, &member).await?;
            members = node.state.members()?;
        }
    }
    drop(applying);
    if !members.iter().any(|member| member.name == from) {
        tracing::debug!(from, "the sender is not known yet; its message is ignored");
        return Ok(());
    }
    if let Some(info) = message.info.filter(|info| info.name == from && trust::is_plain(info)) {
        // On its way it says when it was sent.
        let now = now_ms();
        let clock_ahead_ms = info.last_seen_ms.saturating_sub(now);
        node.hear(NodeInfo { last_seen_ms: now, is_self: false, clock_ahead_ms, ..info });
    }
    networks::learn(node, &message.networks).await?;
    let known = Placements::new(&node.name, &members, node.state.placements()?);
    let mut room = MAX_SERVICES.saturating_sub(known.of(from));
    for told in message.placements.iter().filter(|told| !known.knows(told) && trust::is_sound(told)) {
        if !known.has(&told.service) {
            // There is nothing to remove, and what others still have to hear of would never end.
            if told.removed || room == 0 {
                continue;
            }
            room -= 1;
        }
        match known.belief(from, told) {
            Belief::None => {}
            Belief::IfNewer => forward::learn(node, told).await?,
            Belief::Always => {
                node.state.replace_placement(told)?;
                forward::forward(node, told).await?;
            }
        }
    }
    Ok(())
}

/// A member that somebody else tells of is asked itself, where it is not known or does not answer.
fn introduce(node: &Node, members: &[Member], told: &Member) {
    let silent = |name: &str| {
        node.last_seen(name).is_none_or(|info| now_ms().saturating_sub(info.last_seen_ms) > UNREACHABLE_MS)
    };
    match members.iter().find(|member| member.name == told.name) {
        Some(known) if known.address == told.address || !silent(&known.name) => {}
        _ => node.introduced.hear(told),
    }
}

/// What a member tells of itself.
async fn take_member(node: &Arc<Node>, members: &[Member], member: &Member) -> Result<(), StateError> {
    let known = members.iter().any(|other| other.name == member.name);
    if !known && members.len() >= MAX_MEMBERS {
        tracing::warn!(node = member.name, "a cluster can have {MAX_MEMBERS} members; remove some");
        return Ok(());
    }
    let same = |other: &&Member| {
        other.name != member.name && (other.address == member.address || other.vtep == member.vtep)
    };
    if let Some(other) = members.iter().find(same) {
        tracing::warn!(
            node = member.name,
            other = other.name,
            "a node has the address of another one; if that one is gone, remove it with `godwit cluster remove`"
        );
        return Ok(());
    }
    if node.state.put_member(member)? {
        network::guard(node).await?;
        node.events.tell("node", "joined", &member.name, &member.address);
        for placement in node.state.placements()?.iter().filter(|p| p.node == member.name) {
            forward::forward(node, placement).await?;
        }
    }
    Ok(())
}

/// The services that run here are here, whatever an earlier version has believed.
pub(crate) fn put_own_right(node: &Node) -> Result<(), StateError> {
    let placements = node.state.placements()?;
    for owned in node.state.services()? {
        let service = owned.service;
        let right = |p: &Placement| service.name == *p.service && p.id == service.id && p.node == node.name;
        if !placements.iter().any(|placement| right(placement) && !placement.removed) {
            node.state.forget_placement(&service.name)?;
            node.place(&service, &node.name, service.epoch, false)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn more_than_a_peer_takes_is_said_and_not_sent() {
        let placement = |removed| Placement { service: "x".repeat(63), removed, ..Placement::default() };
        let message =
            SyncMessage { placements: vec![placement(false), placement(true)], ..SyncMessage::default() };
        assert_eq!(too_much(&message, 1000), None);
        let sentence = too_much(&message, 100).unwrap();
        assert!(sentence.contains("2 services, of which 1 were removed"), "{sentence}");
    }
}
