//! A small cluster for tests of decisions: a service at node 0, its clients, and other nodes.

#![allow(dead_code, clippy::unwrap_used)] // each test uses a part of it

use std::time::Duration;

use godwit_policy::assess::{Candidate, Cause, Situation};
use godwit_policy::constraint::{Facts, InstructionSet, Needs, Version};
use godwit_policy::cost::{Allowed, Prospect};
use godwit_policy::curve::{Curve, Look};
use godwit_policy::decide::{Verdict, decide};
use godwit_policy::degradation::Behaviour;
use godwit_policy::files::Files;
use godwit_policy::fixed::Parts;
use godwit_policy::latency::{Estimate, Origin};
use godwit_policy::loss::{Clients, Host, Prices, Target, Usage};
use godwit_policy::predict::{Cargo, Link, Steps};
use godwit_policy::quantity::{Bandwidth, Cores, Moment, Share, Speed, Weight, WireRatio};
use godwit_policy::rules::Rules;
use godwit_policy::state::{NodeId, State};

/// Another node.
#[derive(Debug, Clone)]
pub(crate) struct Other {
    pub(crate) facts: Facts,
    pub(crate) there: Vec<Option<Estimate>>,
    pub(crate) kept: u64,
}

/// All of it.
#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) needs: Needs,
    pub(crate) usage: Usage,
    pub(crate) host: Host,
    pub(crate) sending: u32,
    pub(crate) cause: Cause,
    pub(crate) behaviour: Behaviour,
    pub(crate) allowed: Allowed,
    pub(crate) clients: Vec<Clients>,
    pub(crate) others: Vec<Other>,
    pub(crate) dwell: Duration,
    pub(crate) rules: Rules,
    /// Pages of the service, and what it writes.
    pub(crate) pages: u64,
    pub(crate) writes: Curve,
    pub(crate) files: Files,
    pub(crate) link: Link,
    pub(crate) margin: Duration,
}

pub(crate) fn at(seconds: u64) -> Moment {
    Moment(Duration::from_secs(seconds))
}

pub(crate) fn estimate(ms: u64, deviation: u64) -> Estimate {
    let [expected, deviation] = [ms, deviation].map(Duration::from_millis);
    Estimate { expected, deviation, age: Duration::from_secs(2), from: Origin::Own }
}

pub(crate) fn clients(count: u32, target: u64, here: Option<u64>) -> Clients {
    Clients {
        count,
        weight: Weight::new(count.into()).unwrap(),
        target: Target::new(Duration::from_millis(target)).unwrap(),
        here: here.map(|ms| estimate(ms, 1)),
    }
}

pub(crate) fn host() -> Host {
    Host {
        cores: Cores::new(4.0).unwrap(),
        speed: Speed::REFERENCE,
        load: Share::new(0.2).unwrap(),
        memory: 8 << 30,
        free: 4 << 30,
    }
}

pub(crate) fn other(latencies: &[Option<u64>]) -> Other {
    let facts = Facts {
        instruction_set: InstructionSet::X86_64,
        features: ["avx2".to_owned()].into(),
        criu: Version(4, 2, 1),
        mtu: 1400,
        mounts: [].into(),
        labels: [].into(),
        heard: Duration::from_secs(1),
        host: host(),
        taking: 0,
        cordoned: false,
    };
    Other { facts, there: latencies.iter().map(|ms| ms.map(|ms| estimate(ms, 3))).collect(), kept: 0 }
}

/// A service that writes so many pages in a second.
pub(crate) fn curve(pages: u64, most: u64) -> Curve {
    let look = |pages, ms| Look { pages, time: Duration::from_millis(ms) };
    Curve::fit(&[look(pages / 4, 250), look(pages, 1000)], most)
}

impl World {
    /// The design's example: four clients, three of them over 20 ms at node 0, and all at 12 ms at node 1.
    pub(crate) fn example() -> Self {
        let pages = 65_800;
        Self {
            needs: Needs {
                instruction_sets: [InstructionSet::X86_64].into(),
                running: InstructionSet::X86_64,
                features: ["avx2".to_owned()].into(),
                criu: Version(4, 2, 0),
                mtu: 1400,
                mounts: [].into(),
                labels: [].into(),
            },
            usage: Usage { cores: Cores::new(0.1).unwrap(), memory: 257 << 20, request: None },
            host: host(),
            sending: 0,
            cause: Cause::Watched,
            behaviour: Behaviour { throughput: Share::new(1.0), ..Behaviour::default() },
            allowed: Allowed {
                cold: true,
                precopy: true,
                postcopy: true,
                hybrid: true,
                throttle: false,
                max_frozen: Some(Duration::from_millis(200)),
                max_rounds: 20,
            },
            clients: [31, 28, 24, 9].map(|ms| clients(1, 20, Some(ms))).to_vec(),
            others: vec![other(&[Some(12); 4])],
            dwell: Duration::from_secs(40),
            rules: Rules::default(),
            pages,
            writes: curve(600, pages),
            // A log of 16 kB in a second.
            files: Files { bytes: 1 << 20, writes: curve(4, 256), comparing: Duration::from_millis(2) },
            link: Link {
                bandwidth: Bandwidth::new(98e6).unwrap(),
                of_pages: Bandwidth::new(98e6).unwrap(),
                ratio: WireRatio::new(1.0).unwrap(),
                round_trip: Duration::from_millis(2),
            },
            margin: Duration::from_millis(30),
        }
    }

    /// Decides.
    pub(crate) fn decide(&self, state: &mut State, now: Moment) -> Verdict {
        let prospect = |other: &Other| Prospect {
            cargo: Cargo {
                pages: self.pages,
                kept: other.kept,
                images: 1 << 20,
                layers: 1 << 20,
                files: &self.files,
                writes: &self.writes,
            },
            link: self.link,
            steps: Steps {
                reserve: Duration::from_millis(50),
                look: Duration::from_millis(5),
                fixed: Parts::of(self.usage.memory, 4),
            },
            margin: self.margin,
            userfaultfd: true,
        };
        let candidates: Vec<_> = (1..)
            .map(NodeId)
            .zip(&self.others)
            .map(|(node, other)| Candidate {
                node,
                facts: &other.facts,
                there: &other.there,
                prospect: prospect(other),
            })
            .collect();
        let situation = Situation {
            node: NodeId(0),
            host: self.host,
            sending: self.sending,
            cause: self.cause,
            needs: &self.needs,
            usage: self.usage,
            behaviour: self.behaviour,
            allowed: self.allowed,
            clients: &self.clients,
            candidates: &candidates,
            dwell: self.dwell,
            prices: Prices::default(),
        };
        decide(&situation, &self.rules, state, now)
    }

    /// Decides each second from one to another; the first of them at which it moves.
    pub(crate) fn until_it_moves(&self, state: &mut State, from: u64, to: u64) -> Option<(u64, Verdict)> {
        (from..to).find_map(|second| {
            let verdict = self.decide(state, at(second));
            let moves = matches!(verdict.decision, godwit_policy::decide::Decision::Move { .. });
            moves.then_some((second, verdict))
        })
    }
}
