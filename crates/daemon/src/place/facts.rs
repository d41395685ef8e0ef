//! What nodes tell of themselves, as the policy takes it. What only a destination knows it says itself when it is asked: its
//! CPU's features, its CRIU, its networks and mounts.

use std::collections::BTreeSet;
use std::time::Duration;

use godwit_api::v1::NodeInfo;
use godwit_policy::constraint::{Facts, InstructionSet, Needs, Version};
use godwit_policy::loss::Host;
use godwit_policy::quantity::{Cores, Share, Speed};

use crate::state::now_ms;

/// How busy a node is taken to be that does not say.
const BUSY: f64 = 0.5;

/// What a service needs of a node, as far as that is known from afar.
pub(super) fn needs() -> Needs {
    let running = instruction_set(std::env::consts::ARCH);
    Needs {
        instruction_sets: BTreeSet::from([running]),
        running,
        features: BTreeSet::new(),
        criu: Version(0, 0, 0),
        mtu: 0,
        mounts: BTreeSet::new(),
        labels: BTreeSet::new(),
    }
}

/// What is known of a node.
pub(super) fn of(info: &NodeInfo) -> Facts {
    let heard = match info.last_seen_ms {
        0 => Duration::MAX,
        at => Duration::from_millis(now_ms().saturating_sub(at).try_into().unwrap_or(0)),
    };
    Facts {
        instruction_set: instruction_set(&info.arch),
        features: BTreeSet::new(),
        criu: Version(0, 0, 0),
        mtu: u32::MAX,
        mounts: BTreeSet::new(),
        labels: BTreeSet::new(),
        heard,
        host: host(info),
        taking: 0,
        cordoned: info.cordoned,
    }
}

/// This node's processors and memory.
pub(crate) fn own(infos: &[NodeInfo], name: &str) -> Host {
    let own = infos.iter().find(|info| info.name == name);
    host(own.unwrap_or(&NodeInfo::default()))
}

/// A node's processors and memory.
fn host(info: &NodeInfo) -> Host {
    Host {
        cores: Cores::clamped(info.cpus.into()),
        speed: Speed::REFERENCE,
        load: Share::clamped(info.busy_permille.map_or(BUSY, |busy| f64::from(busy) / 1000.0)),
        memory: info.memory_bytes,
        free: info.memory_available_bytes.min(info.memory_bytes),
    }
}

/// There are godwits of two; a node of which nothing was heard is ruled out by that.
fn instruction_set(arch: &str) -> InstructionSet {
    match arch {
        "aarch64" => InstructionSet::Arm64,
        _ => InstructionSet::X86_64,
    }
}

#[cfg(test)]
mod tests {
    use godwit_policy::constraint::{HEARD_WITHIN, Refusal, refusals};
    use godwit_policy::loss::Usage;

    use super::*;

    #[test]
    fn what_a_node_says_of_itself_cannot_make_it_better_than_a_node_can_be() {
        let absurd = NodeInfo {
            arch: std::env::consts::ARCH.into(),
            memory_bytes: 1 << 30,
            memory_available_bytes: u64::MAX,
            cpus: u32::MAX,
            busy_permille: Some(u32::MAX),
            last_seen_ms: i64::MAX,
            ..NodeInfo::default()
        };
        let facts = of(&absurd);
        assert_eq!((facts.host.free, facts.host.load), (1 << 30, Share::MOST));
        assert_eq!(facts.heard, Duration::ZERO, "it is from tomorrow");
        assert!(of(&NodeInfo::default()).heard > HEARD_WITHIN, "it was never heard of");
        assert_eq!(host(&NodeInfo::default()).load, Share::clamped(BUSY));
    }

    #[test]
    fn a_node_of_another_instruction_set_without_memory_or_cordoned_is_ruled_out() {
        let other = if std::env::consts::ARCH == "aarch64" { "x86_64" } else { "aarch64" };
        let info = NodeInfo {
            arch: other.into(),
            memory_bytes: 1 << 30,
            memory_available_bytes: 1 << 20,
            cpus: 2,
            cordoned: true,
            last_seen_ms: now_ms(),
            busy_permille: Some(0),
            ..NodeInfo::default()
        };
        let usage = Usage { cores: Cores::LEAST, memory: 1 << 20, request: None };
        let found = refusals(&needs(), &usage, &host(&info), &of(&info));
        assert!(
            matches!(found[..], [Refusal::InstructionSet { .. }, Refusal::Memory { .. }, Refusal::Cordoned]),
            "{found:?}"
        );
    }
}
