//! What rules out a node as the destination of a service: a list of refusals, each with its figures.
//!
//! This is what is known from afar. The reservation at the destination decides in the end.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::loss::{Host, Usage};

/// A node that was not heard of for longer is taken to be down.
pub const HEARD_WITHIN: Duration = Duration::from_secs(5);

/// The busiest that a service may make a node.
pub const BUSIEST: f64 = 0.85;

/// Moves that a node takes at once.
pub const TAKES: u32 = 2;

/// An instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum InstructionSet {
    /// x86-64.
    X86_64,
    /// arm64.
    Arm64,
}

/// Major, minor and patch number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32, pub u32);

/// What a service needs of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Needs {
    /// Instruction sets that it is built for.
    pub instruction_sets: BTreeSet<InstructionSet>,
    /// The one that it runs on now.
    pub running: InstructionSet,
    /// CPU features that it was started with there.
    pub features: BTreeSet<String>,
    /// The CRIU that writes its images. An older one does not read them.
    pub criu: Version,
    /// The MTU that its connections use.
    pub mtu: u32,
    /// Mounts that no move brings along.
    pub mounts: BTreeSet<String>,
    /// Labels that the user wants its node to have.
    pub labels: BTreeSet<String>,
}

/// What is known of a node.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Its instruction set.
    pub instruction_set: InstructionSet,
    /// Its CPU features.
    pub features: BTreeSet<String>,
    /// Its CRIU.
    pub criu: Version,
    /// Its MTU.
    pub mtu: u32,
    /// Mounts that it has.
    pub mounts: BTreeSet<String>,
    /// Its labels.
    pub labels: BTreeSet<String>,
    /// How long ago it was heard of.
    pub heard: Duration,
    /// Its cores and memory, without what is promised to other services.
    pub host: Host,
    /// Services that are on their way to it.
    pub taking: u32,
    /// Whether its operator lets it take no more services.
    pub cordoned: bool,
}

/// Why a service cannot move to a node.
#[derive(Debug, Clone, PartialEq)]
pub enum Refusal {
    /// The service is not built for the node's instruction set.
    InstructionSet {
        /// The node's.
        has: InstructionSet,
        /// Those of the service.
        built: BTreeSet<InstructionSet>,
    },
    /// The node's CPU lacks features that the service may use.
    Features {
        /// Which.
        missing: BTreeSet<String>,
    },
    /// The node's CRIU is too old.
    Criu {
        /// The node's.
        has: Version,
        /// The oldest that would do.
        needed: Version,
    },
    /// The node's network has smaller packets.
    Mtu {
        /// The node's, in bytes.
        has: u32,
        /// The service's, in bytes.
        needed: u32,
    },
    /// The node lacks mounts.
    Mounts {
        /// Which.
        missing: BTreeSet<String>,
    },
    /// The node lacks memory.
    Memory {
        /// Bytes that are free.
        free: u64,
        /// Bytes that are needed.
        needed: u64,
    },
    /// The node would be too busy.
    Cpu {
        /// The busy share of its cores, with the service.
        after: f64,
        /// The most that is allowed.
        most: f64,
    },
    /// The node lacks labels.
    Labels {
        /// Which.
        missing: BTreeSet<String>,
    },
    /// The node was not heard of lately.
    Silent {
        /// For how long.
        heard: Duration,
        /// The longest that is allowed.
        most: Duration,
    },
    /// The node's operator lets it take no more services.
    Cordoned,
    /// Other services are on their way to the node.
    Taking {
        /// How many.
        now: u32,
        /// The most at once.
        most: u32,
    },
    /// No mode keeps the service's limit on the frozen time.
    Frozen {
        /// The frozen time that nine of ten moves would not exceed, in the best mode.
        upper: Duration,
        /// The most that is allowed.
        limit: Duration,
    },
    /// The service allows no mode of moving.
    NoMode,
    /// A move to the node was given up; it is tried again later.
    Waits {
        /// In what time.
        left: Duration,
    },
}

/// Bytes of free memory that a service of this size needs.
#[must_use]
pub fn needed(memory: u64) -> u64 {
    memory.saturating_add(memory.div_ceil(10))
}

/// All that rules out a node for a service that is on the host `from` now.
#[must_use]
pub fn refusals(needs: &Needs, usage: &Usage, from: &Host, node: &Facts) -> Vec<Refusal> {
    let missing = |wanted: &BTreeSet<String>, has: &BTreeSet<String>| -> Option<BTreeSet<String>> {
        let missing: BTreeSet<_> = wanted.difference(has).cloned().collect();
        (!missing.is_empty()).then_some(missing)
    };
    let built = &needs.instruction_sets;
    let same = node.instruction_set == needs.running;
    let (free, wanted) = (node.host.free, needed(usage.memory));
    let after = node.host.load_with(&usage.moved(from, &node.host));
    let all = [
        (!built.contains(&node.instruction_set))
            .then(|| Refusal::InstructionSet { has: node.instruction_set, built: built.clone() }),
        // On another instruction set it is started with the features of that one.
        same.then(|| missing(&needs.features, &node.features))
            .flatten()
            .map(|missing| Refusal::Features { missing }),
        (node.criu < needs.criu).then_some(Refusal::Criu { has: node.criu, needed: needs.criu }),
        (node.mtu < needs.mtu).then_some(Refusal::Mtu { has: node.mtu, needed: needs.mtu }),
        missing(&needs.mounts, &node.mounts).map(|missing| Refusal::Mounts { missing }),
        (free < wanted).then_some(Refusal::Memory { free, needed: wanted }),
        (after > BUSIEST).then_some(Refusal::Cpu { after, most: BUSIEST }),
        missing(&needs.labels, &node.labels).map(|missing| Refusal::Labels { missing }),
        (node.heard > HEARD_WITHIN).then_some(Refusal::Silent { heard: node.heard, most: HEARD_WITHIN }),
        node.cordoned.then_some(Refusal::Cordoned),
        (node.taking >= TAKES).then_some(Refusal::Taking { now: node.taking, most: TAKES }),
    ];
    all.into_iter().flatten().collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::quantity::{Cores, Share, Speed};

    fn set(names: &[&str]) -> BTreeSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    fn needs() -> Needs {
        Needs {
            instruction_sets: [InstructionSet::X86_64].into(),
            running: InstructionSet::X86_64,
            features: set(&["avx2"]),
            criu: Version(4, 2, 1),
            mtu: 1400,
            mounts: set(&["/srv/data"]),
            labels: set(&["zone=edge"]),
        }
    }

    fn host() -> Host {
        Host {
            cores: Cores::new(4.0).unwrap(),
            speed: Speed::REFERENCE,
            load: Share::new(0.2).unwrap(),
            memory: 8 << 30,
            free: 1100,
        }
    }

    fn node() -> Facts {
        Facts {
            instruction_set: InstructionSet::X86_64,
            features: set(&["avx2", "aes"]),
            criu: Version(4, 2, 1),
            mtu: 1500,
            mounts: set(&["/srv/data"]),
            labels: set(&["zone=edge", "ssd"]),
            heard: Duration::from_secs(5),
            host: host(),
            taking: 1,
            cordoned: false,
        }
    }

    const USAGE: Usage = Usage { cores: Cores::LEAST, memory: 1000, request: None };

    fn found(node: &Facts) -> Vec<Refusal> {
        let usage = Usage { cores: Cores::new(1.0).unwrap(), ..USAGE };
        refusals(&needs(), &usage, &host(), node)
    }

    #[test]
    fn a_node_that_has_just_enough_of_everything_is_not_refused() {
        assert_eq!(found(&node()), []);
    }

    #[test]
    fn each_refusal_has_its_figures() {
        let base = node();
        let arm = Facts { instruction_set: InstructionSet::Arm64, features: set(&[]), ..base.clone() };
        let built = [InstructionSet::X86_64].into();
        assert_eq!(found(&arm), [Refusal::InstructionSet { has: InstructionSet::Arm64, built }]);
        let old = Facts { features: set(&["aes"]), criu: Version(4, 1, 9), ..base.clone() };
        assert_eq!(
            found(&old),
            [
                Refusal::Features { missing: set(&["avx2"]) },
                Refusal::Criu { has: Version(4, 1, 9), needed: Version(4, 2, 1) }
            ]
        );
        let bare = Facts { mtu: 1399, mounts: set(&[]), labels: set(&["ssd"]), ..base.clone() };
        assert_eq!(
            found(&bare),
            [
                Refusal::Mtu { has: 1399, needed: 1400 },
                Refusal::Mounts { missing: set(&["/srv/data"]) },
                Refusal::Labels { missing: set(&["zone=edge"]) }
            ]
        );
        let cordoned = Facts { cordoned: true, ..base.clone() };
        assert_eq!(found(&cordoned), [Refusal::Cordoned]);
        let late = Facts { heard: Duration::from_millis(5001), taking: 2, ..base.clone() };
        assert_eq!(
            found(&late),
            [
                Refusal::Silent { heard: Duration::from_millis(5001), most: HEARD_WITHIN },
                Refusal::Taking { now: 2, most: TAKES }
            ]
        );
        let full = Facts { host: Host { free: 1099, ..host() }, ..base };
        assert_eq!(found(&full), [Refusal::Memory { free: 1099, needed: 1100 }]);
    }

    #[test]
    fn a_service_that_is_built_for_both_needs_no_features_of_the_other_instruction_set() {
        let arm = Facts { instruction_set: InstructionSet::Arm64, features: set(&[]), ..node() };
        let both = [InstructionSet::X86_64, InstructionSet::Arm64].into();
        let needs = Needs { instruction_sets: both, ..needs() };
        assert_eq!(refusals(&needs, &USAGE, &host(), &arm), []);
        let bare = Facts { features: set(&[]), ..node() };
        let missing = set(&["avx2"]);
        assert_eq!(refusals(&needs, &USAGE, &host(), &bare), [Refusal::Features { missing }]);
    }

    #[test]
    fn a_slow_node_becomes_busier_than_a_fast_one() {
        let with = |speed| Facts { host: Host { speed: Speed::new(speed).unwrap(), ..host() }, ..node() };
        assert_eq!(found(&with(0.5)), [], "0.2 and 2 of 4 cores");
        let refused = found(&with(0.25));
        assert!(
            matches!(refused[..], [Refusal::Cpu { after, .. }] if (after - 1.2).abs() < 1e-9),
            "{refused:?}"
        );
    }
}
