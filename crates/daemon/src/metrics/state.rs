//! What this node knows of itself, of other nodes, and of moves that are under way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use godwit_api::PROTOCOL_VERSION;
use godwit_migration::error_chain;
use godwit_migration::journal::{Role, Stage};

use super::series::Series;
use crate::counters::catalog as of;
use crate::directory::{UNREACHABLE_MS, own_info};
use crate::node::Node;
use crate::state::now_ms;

/// The stages in which a migration has not ended, by the node's role.
const OPEN: [(Role, &str, &[Stage]); 2] = [
    (
        Role::Source,
        "source",
        &[Stage::Started, Stage::Frozen, Stage::Undoing, Stage::Committed, Stage::Serving],
    ),
    (Role::Destination, "destination", &[Stage::Reserved, Stage::Restored, Stage::Committed]),
];

/// All of it.
pub(super) fn collect(node: &Arc<Node>, series: &mut Series) -> Result<(), String> {
    own(node, series)?;
    disk(node, series)?;
    peers(node, series)?;
    moves(node, series)
}

fn own(node: &Node, series: &mut Series) -> Result<(), String> {
    let own = own_info(node).map_err(|error| error_chain(&error))?;
    series.is(of::BUILD, &[&own.version, &PROTOCOL_VERSION.to_string()], true);
    series.is(of::NODE, &[&own.name, &own.arch, &own.kernel, &own.criu], true);
    series.is(of::CORDONED, &[], own.cordoned);
    if let Some(permille) = own.busy_permille {
        series.put(of::BUSY, &[], f64::from(permille) / 1e3);
    }
    series.count(of::AVAILABLE, &[], own.memory_available_bytes);
    let expires = node.peers.identity().expires();
    series.put(of::CERTIFICATE, &[], since_1970(expires));
    Ok(())
}

fn since_1970(time: SystemTime) -> f64 {
    time.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn disk(node: &Node, series: &mut Series) -> Result<(), String> {
    let local = node.local();
    let state = &local.layout.state;
    let found = nix::sys::statvfs::statvfs(state)
        .map_err(|error| format!("the file system of {} cannot be looked at: {error}", state.display()))?;
    series.count(of::DISK_SIZE, &[], found.blocks().saturating_mul(found.fragment_size()));
    series.count(of::DISK_FREE, &[], found.blocks_available().saturating_mul(found.fragment_size()));
    let layers = local.store.layers().map_err(|error| error_chain(&error))?;
    series.put(of::LAYERS, &[], layers.len() as f64);
    series.count(of::LAYER_BYTES, &[], layers.iter().map(|layer| layer.bytes).fold(0, u64::saturating_add));
    series.count(of::RETAINED_MEMORY, &[], local.retention.bytes());
    series.count(of::RETAINED_FILES, &[], local.kept_files.taken().1);
    Ok(())
}

fn peers(node: &Node, series: &mut Series) -> Result<(), String> {
    for member in node.state.members().map_err(|error| error_chain(&error))? {
        let peer = member.name.as_str();
        if peer == node.name {
            continue;
        }
        let heard = node.last_seen(peer);
        let is_up =
            heard.as_ref().is_some_and(|info| now_ms().saturating_sub(info.last_seen_ms) <= UNREACHABLE_MS);
        series.is(of::PEER_UP, &[peer], is_up);
        let Some(info) = heard else { continue };
        series.is(of::PEER, &[peer, &info.version], true);
        series.put(of::PEER_HEARD, &[peer], info.last_seen_ms as f64 / 1e3);
        series.put(of::PEER_CLOCK, &[peer], info.clock_ahead_ms as f64 / 1e3);
        series.is(of::PEER_CORDONED, &[peer], info.cordoned);
    }
    Ok(())
}

fn moves(node: &Node, series: &mut Series) -> Result<(), String> {
    let local = node.local();
    let entries = local.journal.unfinished().map_err(|error| error_chain(&error))?;
    for (role, name, stages) in OPEN {
        let mut counts: BTreeMap<_, u64> = stages.iter().map(|stage| (stage.name(), 0)).collect();
        for entry in entries.iter().filter(|entry| entry.role == role) {
            *counts.entry(entry.stage.name()).or_default() += 1;
        }
        for (stage, count) in counts {
            series.count(of::UNFINISHED, &[name, stage], count);
        }
    }
    let doubts = local.doubts.all();
    series.put(of::IN_DOUBT, &[], doubts.len() as f64);
    series.put(of::TO_RESOLVE, &[], doubts.iter().filter(|doubt| doubt.stuck.is_some()).count() as f64);
    let unserved = node.migrations().into_iter().map(|migrating| {
        let progress = migrating.progress.borrow();
        match progress.phase {
            "serve" => progress.bytes_total.saturating_sub(progress.bytes_done),
            _ => 0,
        }
    });
    series.count(of::UNSERVED, &[], unserved.fold(0, u64::saturating_add));
    series.put(of::PREPARING, &[], node.preparations() as f64);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_in_which_something_is_to_be_done_has_a_series() {
        for stage in Stage::ALL {
            let listed = OPEN.iter().any(|(_, _, stages)| stages.contains(&stage));
            assert_eq!(listed, stage.is_open(), "{stage:?}");
        }
    }
}
