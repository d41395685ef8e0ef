//! How nodes keep each other informed: every node exchanges all it knows with every other, once a
//! second and at once when there is news. Full exchange is right for the tens of nodes that this
//! version is for; what is newer is told by revisions and epochs, not by clocks.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::join_all;
use godwit_api::v1::{Member, NodeInfo, SyncMessage};
use godwit_migration::error_chain;

use crate::node::Node;
use crate::state::{StateError, now_ms};
use crate::{forward, keys, network, networks};

/// Between two exchanges when there is no news.
const PERIOD: Duration = Duration::from_secs(1);

/// Between two looks at all forwarding entries: what somebody else changed, or what could not be
/// set while a service was arriving, is put right.
const PUT_RIGHT: Duration = Duration::from_secs(10);

/// A peer not heard of for this long is shown as unreachable.
const UNREACHABLE_MS: i64 = 5_000;

/// Exchanges with all peers for as long as the node lives.
pub(crate) async fn run(node: Arc<Node>) {
    let mut put_right = Instant::now();
    loop {
        if put_right.elapsed() >= PUT_RIGHT {
            put_right = Instant::now();
            put_right_all(&node).await;
        }
        if let Err(error) = exchange(&node).await {
            tracing::error!(error = %error_chain(&error), "the cluster cannot be told what this node knows");
        }
        // Either the period ends or there is news; both mean another round.
        let _ = tokio::time::timeout(PERIOD, node.news.notified()).await;
    }
}

/// Puts right what somebody else changed of this node's network.
async fn put_right_all(node: &Arc<Node>) {
    if let Err(error) = network::guard(node).await {
        tracing::error!(error = %error_chain(&error), "who may send to the overlay cannot be told");
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
    let rounds = others.into_iter().map(|member| {
        let (node, message) = (Arc::clone(node), message.clone());
        async move {
            match node.peers.get(&member.name, &member.address).sync(message).await {
                Ok(answer) => {
                    if let Err(error) = take_in(&node, answer.into_inner()).await {
                        tracing::error!(error = %error_chain(&error), "news cannot be kept");
                    }
                    keys::exchange(&node, &member).await;
                }
                Err(status) => tracing::debug!(peer = %member.name, %status, "no exchange"),
            }
        }
    });
    join_all(rounds).await;
    Ok(())
}

/// Everything this node can tell.
pub(crate) fn what_we_know(node: &Node) -> Result<SyncMessage, StateError> {
    Ok(SyncMessage {
        info: Some(own_info(node)?),
        members: node.state.members()?,
        placements: node.state.placements()?,
        networks: node.state.networks()?,
    })
}

/// Takes over what is newer in a peer's message.
pub(crate) async fn take_in(node: &Arc<Node>, message: SyncMessage) -> Result<(), StateError> {
    if let Some(info) = message.info {
        // On its way it says when it was sent.
        let now = now_ms();
        let clock_ahead_ms = info.last_seen_ms.saturating_sub(now);
        node.hear(NodeInfo { last_seen_ms: now, is_self: false, clock_ahead_ms, ..info });
    }
    for member in message.members {
        // A node speaks for itself: nobody else knows its address better.
        if member.name != node.name && node.state.put_member(&member)? {
            network::guard(node).await?;
            node.events.tell("node", "joined", &member.name, &member.address);
            for placement in node.state.placements()?.iter().filter(|p| p.node == member.name) {
                forward::forward(node, placement).await?;
            }
        }
    }
    networks::learn(node, &message.networks).await?;
    for placement in &message.placements {
        forward::learn(node, placement).await?;
    }
    Ok(())
}

/// What this node tells of itself.
pub(crate) fn own_info(node: &Node) -> Result<NodeInfo, StateError> {
    let uname = nix::sys::utsname::uname();
    let release = uname.map(|u| u.release().to_string_lossy().into_owned()).unwrap_or_default();
    Ok(NodeInfo {
        name: node.name.clone(),
        address: node.member_address(&node.name)?.unwrap_or_default(),
        state: "ready".into(),
        reason: String::new(),
        version: env!("CARGO_PKG_VERSION").into(),
        arch: std::env::consts::ARCH.into(),
        kernel: release,
        memory_bytes: total_memory(),
        memory_available_bytes: godwit_migration::local::available_memory(),
        cpus: std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(u32::MAX)),
        services: u32::try_from(node.state.services()?.len()).unwrap_or(u32::MAX),
        last_seen_ms: now_ms(),
        is_self: true,
        network: Some(network::own(node)),
        clock_ahead_ms: 0,
        criu: node.local().criu.known_version().map(|version| version.to_string()).unwrap_or_default(),
    })
}

/// All nodes as this one sees them.
pub(crate) fn nodes(node: &Node) -> Result<Vec<NodeInfo>, StateError> {
    node.state
        .members()?
        .into_iter()
        .map(|member| {
            if member.name == node.name {
                return own_info(node);
            }
            let silent = NodeInfo { name: member.name.clone(), ..NodeInfo::default() };
            let mut info = node.heard(&member.name).unwrap_or(silent);
            info.address = member.address;
            let age = now_ms() - info.last_seen_ms;
            if info.last_seen_ms == 0 {
                info.state = "unreachable".into();
                info.reason = "never heard of since godwitd was started".into();
            } else if age > UNREACHABLE_MS {
                info.state = "unreachable".into();
                info.reason = format!("last heard of {} s ago", age / 1000);
            }
            Ok(info)
        })
        .collect()
}

pub(crate) fn total_memory() -> u64 {
    nix::sys::sysinfo::sysinfo().map_or(0, |info| info.ram_total())
}
