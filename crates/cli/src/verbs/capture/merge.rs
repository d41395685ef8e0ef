//! One order of time out of the packets of several nodes.
//!
//! Each node says up to which moment it has told everything. A packet is let out when no node can still
//! tell an older one; it waits neither for a node that is silent nor longer than memory allows, as order
//! is worth less than the packet.

use std::{
    cmp::{Ordering, Reverse},
    collections::{BinaryHeap, HashMap},
    time::{Duration, Instant},
};

use godwit_api::v1::CapturedPacket;

/// How long a packet waits for others that may be older: a node tells something five times a second.
/// Also where a node's clock is so wrong that its packets never seem to be told.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);
/// Bytes that may wait.
const MOST: usize = 64 << 20;
/// What a packet costs beside its bytes.
const OVERHEAD: usize = 128;

/// Packets that wait for their turn.
#[derive(Default)]
pub(super) struct Merge {
    nodes: HashMap<String, Told>,
    waiting: BinaryHeap<Reverse<Waiting>>,
    bytes: usize,
    /// Packets taken in: those of the same time keep their order.
    count: u64,
}

struct Told {
    up_to_ns: i64,
    heard: Instant,
}

struct Waiting {
    time_ns: i64,
    number: u64,
    since: Instant,
    interface: u32,
    packet: CapturedPacket,
}

impl Merge {
    /// A node of which something will be heard.
    pub(super) fn expect(&mut self, node: &str, now: Instant) {
        self.nodes.insert(node.to_owned(), Told { up_to_ns: i64::MIN, heard: now });
    }

    /// The node has told everything up to this moment.
    pub(super) fn told(&mut self, node: &str, up_to_ns: i64, now: Instant) {
        self.nodes.insert(node.to_owned(), Told { up_to_ns, heard: now });
    }

    /// Nothing more is expected of the node, until it tells something again.
    pub(super) fn leave(&mut self, node: &str) {
        self.nodes.remove(node);
    }

    /// Takes a packet in.
    pub(super) fn add(&mut self, interface: u32, packet: CapturedPacket, now: Instant) {
        self.count += 1;
        self.bytes += packet.data.len() + OVERHEAD;
        let time_ns = packet.time_ns;
        self.waiting.push(Reverse(Waiting { time_ns, number: self.count, since: now, interface, packet }));
    }

    /// The moment up to which all nodes that are not silent have told everything.
    pub(super) fn horizon(&self, now: Instant) -> i64 {
        let speaking = self.nodes.values().filter(|told| now.duration_since(told.heard) < PATIENCE);
        speaking.map(|told| told.up_to_ns).min().unwrap_or(i64::MAX)
    }

    /// The next packet whose turn has come, and its interface; with `all`, whether it has or not.
    pub(super) fn next(&mut self, all: bool, now: Instant) -> Option<(u32, CapturedPacket)> {
        let Reverse(first) = self.waiting.peek()?;
        let ready = all
            || first.time_ns <= self.horizon(now)
            || now.duration_since(first.since) >= PATIENCE
            || self.bytes > MOST;
        if !ready {
            return None;
        }
        let Reverse(first) = self.waiting.pop()?;
        self.bytes -= first.packet.data.len() + OVERHEAD;
        Some((first.interface, first.packet))
    }
}

impl Ord for Waiting {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.time_ns, self.number).cmp(&(other.time_ns, other.number))
    }
}

impl PartialOrd for Waiting {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Waiting {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Waiting {}

#[cfg(test)]
mod tests {
    use super::*;

    fn packet(time_ns: i64, bytes: usize) -> CapturedPacket {
        CapturedPacket { time_ns, data: vec![0; bytes].into(), ..CapturedPacket::default() }
    }

    fn out(merge: &mut Merge, now: Instant) -> Vec<i64> {
        std::iter::from_fn(|| merge.next(false, now)).map(|(_, packet)| packet.time_ns).collect()
    }

    #[test]
    fn a_packet_waits_for_nodes_that_may_have_an_older_one() {
        let now = Instant::now();
        let mut merge = Merge::default();
        merge.expect("a", now);
        merge.expect("b", now);
        merge.add(0, packet(30, 1), now);
        merge.add(0, packet(10, 1), now);
        merge.told("a", 40, now);
        assert_eq!(out(&mut merge, now), [0; 0], "b has told nothing");
        merge.add(1, packet(20, 1), now);
        merge.told("b", 25, now);
        assert_eq!(out(&mut merge, now), [10, 20]);
        merge.leave("b");
        assert_eq!(out(&mut merge, now), [30]);
    }

    #[test]
    fn a_silent_node_is_not_waited_for() {
        let now = Instant::now();
        let mut merge = Merge::default();
        merge.told("b", 5, now);
        merge.told("a", 5, now);
        let later = now + PATIENCE;
        merge.told("a", 50, later);
        merge.add(0, packet(30, 1), later);
        assert_eq!(merge.horizon(later), 50);
        assert_eq!(out(&mut merge, later), [30]);
    }

    #[test]
    fn a_clock_that_is_wrong_and_a_full_memory_hold_nothing_up() {
        let now = Instant::now();
        let mut merge = Merge::default();
        merge.told("a", 5, now);
        merge.add(0, packet(30, 1), now);
        let later = now + PATIENCE;
        merge.told("a", 6, later);
        assert_eq!(out(&mut merge, later), [30], "it has waited long enough");
        merge.add(0, packet(50, MOST), later);
        merge.add(0, packet(40, 1), later);
        assert_eq!(out(&mut merge, later), [40, 50]);
        merge.add(0, packet(60, 1), later);
        assert_eq!(out(&mut merge, later), [0; 0]);
        assert!(merge.next(true, later).is_some());
    }
}
