//! The policy's decision about a service, with what was measured.

use std::collections::BTreeMap;
use std::time::Duration;

use godwit_migration::Options;
use godwit_migration::source::Measured;
use godwit_policy::assess::{Candidate, Cause, Situation};
use godwit_policy::cost::{Allowed, Prospect};
use godwit_policy::curve::Curve;
use godwit_policy::decide::{Verdict, decide};
use godwit_policy::degradation::Behaviour;
use godwit_policy::fixed::Parts;
use godwit_policy::latency::Estimate;
use godwit_policy::loss::{Host, Prices, Target, Usage};
use godwit_policy::predict::{Cargo, Link, Steps};
use godwit_policy::quantity::{Bandwidth, Moment, WireRatio};
use godwit_policy::rules::Rules;
use godwit_policy::state::{NodeId, State};

use super::clients::{self, Client, Echoes};
use super::facts;
use super::survey::Place;

/// CRIU's images, of most services, bytes.
const IMAGES: u64 = 1 << 20;

const PAGE: u64 = 4096;

/// This node, among those that the policy numbers.
pub(crate) const HERE: NodeId = NodeId(u32::MAX);

/// What a decision rests on.
pub(crate) struct Matter<'a> {
    pub(crate) cause: Cause,
    pub(crate) options: &'a Options,
    pub(crate) target: Target,
    /// How long a node stays the best one.
    pub(crate) dwell: Duration,
    pub(crate) usage: Usage,
    /// This node, and how many services it sends now.
    pub(crate) host: Host,
    pub(crate) sending: u32,
    pub(crate) clients: &'a [Client],
    pub(crate) from_here: &'a Echoes,
    /// How old the echoes are.
    pub(crate) echoed: Duration,
    pub(crate) places: &'a [Place],
}

impl Matter<'_> {
    pub(crate) fn decide(&self, state: &mut State, now: Moment) -> Verdict {
        let nothing = Curve::fit(&[], self.usage.memory / PAGE);
        let there: BTreeMap<NodeId, Vec<Option<Estimate>>> = self
            .places
            .iter()
            .map(|place| (place.id, place.there(self.clients, self.from_here, self.echoed)))
            .collect();
        let candidates: Vec<_> = self
            .places
            .iter()
            .filter(|place| place.words.is_empty())
            .filter_map(|place| {
                let prospect = self.prospect(place.measured.as_ref()?, &nothing);
                Some(Candidate {
                    node: place.id,
                    facts: &place.facts,
                    there: there.get(&place.id)?,
                    prospect,
                })
            })
            .collect();
        let tracks = self
            .places
            .iter()
            .filter_map(|place| place.measured.as_ref())
            .all(|measured| measured.writes.is_some());
        let Options { postcopy, throttle, max_frozen, max_rounds, .. } = *self.options;
        let situation = Situation {
            node: HERE,
            host: self.host,
            sending: self.sending,
            cause: self.cause,
            needs: &facts::needs(),
            usage: self.usage,
            behaviour: Behaviour::default(),
            allowed: Allowed {
                cold: true,
                precopy: tracks,
                postcopy,
                hybrid: postcopy && tracks,
                throttle,
                max_frozen,
                max_rounds,
            },
            clients: &clients::counted(self.clients, self.target),
            candidates: &candidates,
            dwell: self.dwell,
            prices: Prices::default(),
        };
        decide(&situation, &Rules::default(), state, now)
    }

    /// The move to a place.
    fn prospect<'a>(&self, measured: &'a Measured, nothing: &'a Curve) -> Prospect<'a> {
        let (fixed, margin) = measured.fixed;
        let bandwidth = Bandwidth::clamped(measured.link.bandwidth);
        let most = self.options.max_bandwidth.map(|most| Bandwidth::clamped(most as f64));
        Prospect {
            cargo: Cargo {
                pages: measured.memory / PAGE,
                kept: 0,
                images: IMAGES,
                layers: measured.layers,
                files: &measured.files,
                writes: measured.writes.as_ref().unwrap_or(nothing),
            },
            link: Link {
                bandwidth,
                of_pages: most.filter(|most| *most < bandwidth).unwrap_or(bandwidth),
                ratio: WireRatio::clamped(1.0),
                round_trip: measured.link.round_trip,
            },
            steps: Steps { fixed: Parts::of(measured.memory, 0).corrected(fixed), ..Steps::default() },
            margin,
            userfaultfd: measured.userfaultfd,
        }
    }
}
