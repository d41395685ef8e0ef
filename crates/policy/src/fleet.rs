//! All nodes of a large cluster, and the few of them that are worth a closer look.
//!
//! Each figure of a node has an array of its own, and each property is a bit set over all nodes. So ten thousand
//! nodes are gone through in well below a millisecond (`cargo bench -p godwit-policy`). Clients that are alike form a
//! zone, of at most 64; the latency from each zone to each node is a row of `f32`.
//!
//! What is found here is no decision: [`crate::decide`] looks at each node that was found with its full model. What a
//! move costs is not known here. So nodes that kept pages of the service, and those that have a debt, deserve a closer
//! look even if they were not found.

use std::time::Duration;

use crate::constraint::{BUSIEST, HEARD_WITHIN, needed};
use crate::loss::{Host, Prices, Target, Usage};
use crate::quantity::{Moment, Speed, Weight, bounded};
use crate::state::NodeId;

/// Most zones.
pub const ZONES: usize = 64;

/// Nodes that get a closer look.
pub const BEST: usize = 16;

/// Nodes that are ruled out and would be among the best, which an explanation names.
pub const NAMED: usize = 4;

/// Nodes whose losses are summed up at a time.
const TILE: usize = 1024;

/// A property of nodes that the caller has numbered: an instruction set, a CPU feature, a CRIU that is new enough, a label.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Property(pub u16);

/// Clients that are alike.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Zone {
    /// Which row of latencies is theirs.
    pub row: usize,
    /// What they count for.
    pub weight: Weight,
    /// Their target.
    pub target: Target,
}

/// What is sought.
#[derive(Debug, Clone, Copy)]
pub struct Query<'a> {
    /// Where the service is.
    pub node: NodeId,
    /// The speed of that node's cores.
    pub speed: Speed,
    /// What the service uses there.
    pub usage: Usage,
    /// What resources are worth.
    pub prices: Prices,
    /// Its clients.
    pub zones: &'a [Zone],
    /// Properties that a node must have.
    pub all: &'a [Property],
    /// Properties of which a node must have one, unless there are none.
    pub any: &'a [Property],
    /// Now.
    pub now: Moment,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Found {
    /// The best nodes, best first, with what would be lost there in a second.
    pub best: Vec<(NodeId, f32)>,
    /// Better nodes than the last of them, or than all others, that are ruled out; best first.
    pub refused: Vec<(NodeId, f32)>,
    /// Nodes that are not ruled out and lose more than those.
    pub more: usize,
    /// Nodes that are ruled out.
    pub ruled_out: usize,
}

/// All nodes, by their numbers from 0.
#[derive(Debug, Clone, PartialEq)]
pub struct Fleet {
    nodes: usize,
    /// One row after the other, seconds. A latency that is not known is infinite.
    latencies: Vec<f32>,
    properties: Vec<Vec<u64>>,
    load: Vec<f32>,
    cores: Vec<f32>,
    speed: Vec<f32>,
    memory: Vec<f32>,
    used: Vec<f32>,
    free: Vec<u64>,
    /// Milliseconds since the caller's epoch.
    heard: Vec<u64>,
}

impl Fleet {
    /// So many nodes, of which nothing is known, with so many zones and properties.
    #[must_use]
    pub fn new(nodes: u32, zones: usize, properties: u16) -> Self {
        let nodes = usize::try_from(nodes).unwrap_or(usize::MAX);
        Self {
            nodes,
            latencies: vec![f32::INFINITY; nodes * zones.min(ZONES)],
            properties: vec![vec![0; nodes.div_ceil(64)]; usize::from(properties)],
            load: vec![1.0; nodes],
            cores: vec![1.0; nodes],
            speed: vec![1.0; nodes],
            memory: vec![1.0; nodes],
            used: vec![1.0; nodes],
            free: vec![0; nodes],
            heard: vec![0; nodes],
        }
    }

    /// Notes the latency from a zone to a node; false if there is no such zone or node.
    pub fn set_latency(&mut self, row: usize, node: NodeId, latency: Option<Duration>) -> bool {
        let latency = latency.map_or(f32::INFINITY, |latency| bounded(latency).as_secs_f32());
        let Some(node) = self.place(node) else { return false };
        let place = row.checked_mul(self.nodes).and_then(|start| self.latencies.get_mut(start + node));
        place.map(|place| *place = latency).is_some()
    }

    /// Notes whether a node has a property; false if there is no such property or node.
    pub fn set_property(&mut self, property: Property, node: NodeId, has: bool) -> bool {
        let Some(node) = self.place(node) else { return false };
        let set = self.properties.get_mut(usize::from(property.0));
        let Some(word) = set.and_then(|set| set.get_mut(node / 64)) else { return false };
        let bit = 1 << (node % 64);
        *word = if has { *word | bit } else { *word & !bit };
        true
    }

    /// Notes what a node said of its cores and memory, and when; false if there is no such node.
    pub fn set_host(&mut self, node: NodeId, host: &Host, heard: Moment) -> bool {
        let Some(node) = self.place(node) else { return false };
        let used = host.memory.saturating_sub(host.free);
        let figures = [
            (&mut self.load, host.load.get()),
            (&mut self.cores, host.cores.get().max(1e-3)),
            (&mut self.speed, host.speed.get()),
            (&mut self.memory, (host.memory as f64).max(1.0)),
            (&mut self.used, used as f64),
        ];
        for (of, figure) in figures {
            if let Some(place) = of.get_mut(node) {
                *place = narrow(figure);
            }
        }
        if let (Some(free), Some(last)) = (self.free.get_mut(node), self.heard.get_mut(node)) {
            (*free, *last) = (host.free, milliseconds(heard.0));
        }
        true
    }

    fn place(&self, node: NodeId) -> Option<usize> {
        usize::try_from(node.0).ok().filter(|node| *node < self.nodes)
    }

    /// Finds the best nodes.
    #[must_use]
    pub fn find(&self, query: &Query) -> Found {
        let losses = self.losses(query);
        let allowed = self.allowed(query);
        let mut found = Found::default();
        let (mut count, here) = (0, self.place(query.node));
        for (node, (loss, id)) in losses.iter().zip(0_u32..).enumerate() {
            if Some(node) == here {
                continue;
            }
            match allowed.get(node / 64).is_some_and(|word| word >> (node % 64) & 1 == 1) {
                true => {
                    count += 1;
                    keep(&mut found.best, BEST, (NodeId(id), *loss));
                }
                false => {
                    found.ruled_out += 1;
                    keep(&mut found.refused, NAMED, (NodeId(id), *loss));
                }
            }
        }
        found.more = count - found.best.len();
        // A node that is ruled out and would not be looked at anyway is not worth a word.
        if let Some((_, worst)) = found.best.last().filter(|_| found.more > 0).copied() {
            found.refused.retain(|(_, loss)| *loss <= worst);
        }
        found
    }

    /// What would be lost in a second at each node.
    fn losses(&self, query: &Query) -> Vec<f32> {
        let Query { usage, prices, .. } = query;
        let from = narrow(query.speed.get());
        let request = bounded(usage.request.unwrap_or_default()).as_secs_f32() * from;
        let requests: Vec<f32> = self.speed.iter().map(|speed| request / speed).collect();
        let mut losses = self.rents(query, from, prices);
        let rows: Vec<_> = query.zones.iter().map(|zone| (self.row(zone.row), Line::of(zone))).collect();
        // A few nodes at a time, whose losses stay in the processor's first cache.
        for (tile, (losses, requests)) in losses.chunks_mut(TILE).zip(requests.chunks(TILE)).enumerate() {
            for (row, line) in &rows {
                match row.and_then(|row| row.get(tile * TILE..)) {
                    Some(row) => line.add(losses, row, requests),
                    // Nothing is known of it: it loses all, wherever the service is.
                    None => losses.iter_mut().for_each(|loss| *loss += line.weight),
                }
            }
        }
        losses
    }

    /// A zone's latencies to all nodes.
    fn row(&self, row: usize) -> Option<&[f32]> {
        let start = row.checked_mul(self.nodes)?;
        self.latencies.get(start..start.checked_add(self.nodes)?)
    }

    /// What CPU and memory are worth at each node.
    fn rents(&self, query: &Query, from: f32, prices: &Prices) -> Vec<f32> {
        let cores = narrow(query.usage.cores.get()) * from;
        let bytes = narrow(query.usage.memory as f64);
        let (core, byte) =
            (narrow(prices.core_second.get()) * cores, narrow(prices.byte_second.get()) * bytes);
        let scarce = |used: f32| {
            let left = 1.0 - used.clamp(0.0, 0.95);
            1.0 / (left * left)
        };
        let hosts = self.load.iter().zip(&self.cores).zip(&self.speed).zip(&self.used).zip(&self.memory);
        hosts
            .map(|((((load, count), speed), used), memory)| {
                core / speed * scarce(load + cores / (speed * count)) + byte * scarce((used + bytes) / memory)
            })
            .collect()
    }

    /// Which nodes nothing rules out that is known here.
    fn allowed(&self, query: &Query) -> Vec<u64> {
        let words = self.nodes.div_ceil(64);
        let set = |property: &Property| self.properties.get(usize::from(property.0));
        let mut allowed = vec![u64::MAX; words];
        for property in query.all {
            match set(property) {
                Some(set) => allowed.iter_mut().zip(set).for_each(|(word, has)| *word &= has),
                None => allowed.fill(0),
            }
        }
        if !query.any.is_empty() {
            let mut any = vec![0; words];
            for set in query.any.iter().filter_map(set) {
                any.iter_mut().zip(set).for_each(|(word, has)| *word |= has);
            }
            allowed.iter_mut().zip(any).for_each(|(word, has)| *word &= has);
        }
        let (now, within) = (milliseconds(query.now.0), milliseconds(HEARD_WITHIN));
        let wanted = needed(query.usage.memory);
        let cores = narrow(query.usage.cores.get() * query.speed.get());
        let busiest = narrow(BUSIEST);
        let hosts = self.load.chunks(64).zip(self.cores.chunks(64)).zip(self.speed.chunks(64));
        let others = self.free.chunks(64).zip(self.heard.chunks(64));
        for ((word, ((load, count), speed)), (free, heard)) in allowed.iter_mut().zip(hosts).zip(others) {
            let mut fits = 0;
            let busy = load
                .iter()
                .zip(count)
                .zip(speed)
                .map(|((load, count), speed)| load + cores / (speed * count));
            for (bit, ((busy, free), heard)) in busy.zip(free).zip(heard).enumerate() {
                let fit = busy <= busiest && *free >= wanted && now.saturating_sub(*heard) <= within;
                fits |= u64::from(fit) << bit;
            }
            *word &= fits;
        }
        allowed
    }
}

/// A zone's loss is linear in its latency, from nothing to all of its weight.
struct Line {
    weight: f32,
    /// By the target.
    factor: f32,
}

impl Line {
    fn of(zone: &Zone) -> Self {
        Self { weight: narrow(zone.weight.get()), factor: 1.0 / zone.target.get().as_secs_f32() }
    }

    /// Adds what is lost with these latencies and request times.
    fn add(&self, losses: &mut [f32], latencies: &[f32], requests: &[f32]) {
        for ((loss, latency), request) in losses.iter_mut().zip(latencies).zip(requests) {
            *loss += self.weight * ((latency + request) * self.factor - 1.0).clamp(0.0, 1.0);
        }
    }
}

/// Puts a node among the best so far, of which there are at most so many.
fn keep(best: &mut Vec<(NodeId, f32)>, most: usize, node: (NodeId, f32)) {
    if best.len() >= most {
        match best.last() {
            Some((_, worst)) if node.1 < *worst => best.pop(),
            _ => return,
        };
    }
    let place = best.partition_point(|(_, loss)| *loss <= node.1);
    best.insert(place, node);
}

fn milliseconds(time: Duration) -> u64 {
    u64::try_from(bounded(time).as_millis()).unwrap_or(u64::MAX)
}

#[allow(clippy::cast_possible_truncation)] // all quantities are far below what an f32 can be
fn narrow(number: f64) -> f32 {
    number as f32
}
