//! The switch between the wires: ports, learned addresses, ways with conditions of their own, cuts and
//! figures.

use std::{
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

use serde::{Deserialize, Serialize};

use super::{
    frame,
    way::{Admitted, Way},
    wire::{Nanos, Shape, Wire},
};
use crate::conditions::{Conditions, Step};

/// Where frames come out.
pub(crate) trait Output {
    /// Hands a frame (with its virtio header) to the host at `port`; false if the host took it not.
    fn deliver(&mut self, port: usize, packet: &[u8]) -> bool;
}

/// What passed a port since it exists.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counters {
    /// Frames the host sent.
    pub frames_in: u64,
    /// Bytes the host sent, on the wire.
    pub bytes_in: u64,
    /// Frames handed to the host.
    pub frames_out: u64,
    /// Bytes handed to the host, on the wire.
    pub bytes_out: u64,
    /// Frames dropped because a queue of this port was full.
    pub dropped_full: u64,
    /// Frames from this host dropped by a cut.
    pub dropped_cut: u64,
    /// Frames from this host lost on a way that loses some.
    pub dropped_lost: u64,
    /// Frames that the host's interface did not take.
    pub dropped_refused: u64,
    /// Nanoseconds by which frames of a shaped link were handed to the host later than the link says,
    /// because the link program had to wait for the processor: the sum over all frames.
    pub late_total_ns: u64,
    /// The longest of these.
    pub late_longest_ns: u64,
}

#[derive(Debug)]
struct UnderWay {
    packet: Rc<[u8]>,
    size: frame::WireSize,
}

#[derive(Debug, Default)]
struct Port {
    up: Wire<UnderWay>,
    down: Wire<UnderWay>,
    counters: Counters,
}

/// A learning switch with shaped ports.
#[derive(Debug)]
pub(crate) struct Fabric {
    shape: Shape,
    ports: Vec<Port>,
    places: HashMap<[u8; 6], usize>,
    /// What lies between two ports, from the one to the other, where that is not nothing.
    ways: BTreeMap<(usize, usize), Way<UnderWay>>,
    /// `cut[a * n + b]`: nothing passes from a to b.
    cut: Vec<bool>,
}

impl Fabric {
    pub(crate) fn new(ports: usize, shape: Shape) -> Self {
        Self {
            shape,
            ports: (0..ports).map(|_| Port::default()).collect(),
            places: HashMap::new(),
            ways: BTreeMap::new(),
            cut: vec![false; ports * ports],
        }
    }

    /// Cuts or heals the way between two ports, in both directions.
    pub(crate) fn set_cut(&mut self, a: usize, b: usize, cut: bool) {
        let count = self.ports.len();
        for index in [a * count + b, b * count + a] {
            if let Some(entry) = self.cut.get_mut(index) {
                *entry = cut;
            }
        }
    }

    /// The pairs of ports that are cut, each once.
    pub(crate) fn cuts(&self) -> Vec<(usize, usize)> {
        let ports = 0..self.ports.len();
        let pairs = ports.clone().flat_map(|a| ports.clone().skip(a + 1).map(move |b| (a, b)));
        pairs.filter(|(a, b)| self.is_cut(*a, *b)).collect()
    }

    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.get(from * self.ports.len() + to).copied().unwrap_or(true)
    }

    /// Gives the way between two ports conditions of its own, in both directions; without any step it has
    /// none any more.
    pub(crate) fn set_way(&mut self, now: Nanos, a: usize, b: usize, steps: &[Step]) {
        for (from, to) in [(a, b), (b, a)] {
            if steps.is_empty() {
                let mut way = self.ways.remove(&(from, to));
                // What is under way arrives all the same.
                while let Some((at, frame)) = way.as_mut().and_then(|way| way.take_due(Nanos::MAX)) {
                    self.arrive(at, to, frame);
                }
            } else {
                let seed = (from * self.ports.len() + to) as u64;
                self.ways.entry((from, to)).or_insert_with(|| Way::new(seed)).begin(now, steps);
            }
        }
    }

    /// More of the trace that [`Fabric::set_way`] began.
    pub(crate) fn extend_way(&mut self, a: usize, b: usize, steps: &[Step]) {
        for pair in [(a, b), (b, a)] {
            if let Some(way) = self.ways.get_mut(&pair) {
                way.extend(steps);
            }
        }
    }

    /// The ways that have conditions of their own, each once, with what they are.
    pub(crate) fn ways(&self) -> impl Iterator<Item = (usize, usize, Conditions)> {
        let once = self.ways.iter().filter(|((a, b), _)| a < b);
        once.map(|((a, b), way)| (*a, *b, way.conditions()))
    }

    /// Whether what the host at `port` sends is treated frame by frame, so that it has to come so.
    pub(crate) fn is_by_frame(&self, port: usize) -> bool {
        self.ways.iter().any(|((from, _), way)| *from == port && way.is_by_frame())
    }

    pub(crate) fn set_shape(&mut self, now: Nanos, shape: Shape) {
        self.shape = shape;
        for port in &mut self.ports {
            port.up.reshape(now, shape.patience);
            port.down.reshape(now, shape.patience);
        }
    }

    pub(crate) fn counters(&self, port: usize) -> Counters {
        self.ports.get(port).map(|port| port.counters).unwrap_or_default()
    }

    /// When the next frame has to move on.
    pub(crate) fn next(&self) -> Option<Nanos> {
        let ports = self.ports.iter().flat_map(|port| [port.up.next(), port.down.next()]);
        ports.chain(self.ways.values().map(Way::next)).flatten().min()
    }

    /// Takes a frame that the host at `port` sent.
    pub(crate) fn receive(&mut self, now: Nanos, port: usize, packet: &[u8], output: &mut impl Output) {
        let Some(size) = frame::wire_size(packet) else { return };
        let shape = self.shape;
        let Some(from) = self.ports.get_mut(port) else { return };
        from.counters.frames_in += 1;
        from.counters.bytes_in += size.total as u64;
        if shape.is_open() && self.ways.is_empty() && self.next().is_none() {
            return self.switch(now, port, packet, size, None, output);
        }
        let Some(from) = self.ports.get_mut(port) else { return };
        let Some(start) = from.up.admit(now, shape.wire_time(size.total as u64), shape.patience) else {
            from.counters.dropped_full += 1;
            return;
        };
        // The segments follow each other: the first can go on as soon as it is here.
        let at = start + shape.wire_time(size.first as u64);
        from.up.send(at, UnderWay { packet: packet.into(), size });
    }

    /// Moves every frame on whose time has come.
    pub(crate) fn advance(&mut self, now: Nanos, output: &mut impl Output) {
        for way in self.ways.values_mut() {
            way.follow(now);
        }
        // Frames of several hosts meet in the down wires in the order of their arrival.
        loop {
            match (self.earliest_up(now), self.earliest_way(now)) {
                (Some((up, port)), way) if way.is_none_or(|(at, _)| up <= at) => {
                    let due = self.ports.get_mut(port).and_then(|from| from.up.take_due(now));
                    if let Some((at, UnderWay { packet, size })) = due {
                        self.switch(at, port, &packet, size, Some(&packet), output);
                    }
                }
                (_, Some((_, pair))) => {
                    if let Some((at, frame)) = self.ways.get_mut(&pair).and_then(|way| way.take_due(now)) {
                        self.arrive(at, pair.1, frame);
                    }
                }
                _ => break,
            }
        }
        for port in 0..self.ports.len() {
            while let Some((at, UnderWay { packet, size })) =
                self.ports.get_mut(port).and_then(|to| to.down.take_due(now))
            {
                self.hand_over(port, &packet, size, now - at, output);
            }
        }
    }

    fn earliest_up(&self, now: Nanos) -> Option<(Nanos, usize)> {
        let times = self.ports.iter().enumerate().filter_map(|(port, from)| Some((from.up.next()?, port)));
        times.min().filter(|(at, _)| *at <= now)
    }

    fn earliest_way(&self, now: Nanos) -> Option<(Nanos, (usize, usize))> {
        let times = self.ways.iter().filter_map(|(pair, way)| Some((way.next_frame()?, *pair)));
        times.min().filter(|(at, _)| *at <= now)
    }

    /// A frame that has crossed a way with conditions of its own is before the host's own link. Its
    /// segments have come one after the other: only the last is still to cross that.
    fn arrive(&mut self, at: Nanos, to: usize, frame: UnderWay) {
        let shape = self.shape;
        let Some(port) = self.ports.get_mut(to) else { return };
        let wire = shape.wire_time(frame.size.first as u64);
        match port.down.admit(at, wire, shape.patience) {
            Some(start) => port.down.send(start + wire, frame),
            None => port.counters.dropped_full += 1,
        }
    }

    /// Sends a frame that came from `from` at `at` on to where it belongs.
    fn switch(
        &mut self,
        at: Nanos,
        from: usize,
        packet: &[u8],
        size: frame::WireSize,
        shared: Option<&Rc<[u8]>>,
        output: &mut impl Output,
    ) {
        let Some((destination, source)) = frame::addresses(packet) else { return };
        if source[0] & 1 == 0 {
            self.places.insert(source, from);
        }
        let known = if destination[0] & 1 == 0 { self.places.get(&destination).copied() } else { None };
        let targets = known.map_or(0..self.ports.len(), |port| port..port + 1);
        for to in targets {
            if to == from {
                continue;
            }
            if self.is_cut(from, to) {
                self.count(from, |counters| counters.dropped_cut += 1);
                continue;
            }
            let shape = self.shape;
            let Some(shared) = shared else {
                self.hand_over(to, packet, size, 0, output);
                continue;
            };
            if let Some(way) = self.ways.get_mut(&(from, to)) {
                match way.admit(at, size, UnderWay { packet: Rc::clone(shared), size }) {
                    Admitted::At(_) => {}
                    Admitted::Lost => self.count(from, |counters| counters.dropped_lost += 1),
                    Admitted::Full => self.count(to, |counters| counters.dropped_full += 1),
                }
                continue;
            }
            let Some(port) = self.ports.get_mut(to) else { continue };
            let wire = shape.wire_time(size.total as u64);
            match port.down.admit(at, wire, shape.patience) {
                Some(start) => {
                    port.down.send(start + wire + shape.delay, UnderWay { packet: Rc::clone(shared), size });
                }
                None => port.counters.dropped_full += 1,
            }
        }
    }

    fn count(&mut self, port: usize, change: impl FnOnce(&mut Counters)) {
        if let Some(port) = self.ports.get_mut(port) {
            change(&mut port.counters);
        }
    }

    fn hand_over(
        &mut self,
        to: usize,
        packet: &[u8],
        size: frame::WireSize,
        late: Nanos,
        output: &mut impl Output,
    ) {
        let taken = output.deliver(to, packet);
        if let Some(port) = self.ports.get_mut(to) {
            port.counters.late_total_ns += late;
            port.counters.late_longest_ns = port.counters.late_longest_ns.max(late);
            if taken {
                port.counters.frames_out += 1;
                port.counters.bytes_out += size.total as u64;
            } else {
                port.counters.dropped_refused += 1;
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Seen(Vec<(usize, Vec<u8>)>);

    impl Output for Seen {
        fn deliver(&mut self, port: usize, packet: &[u8]) -> bool {
            self.0.push((port, packet.to_vec()));
            true
        }
    }

    impl Seen {
        fn ports(&mut self) -> Vec<usize> {
            self.0.drain(..).map(|(port, _)| port).collect()
        }
    }

    const BROADCAST: u8 = 0xff;

    fn packet(to: u8, from: u8, length: usize) -> Vec<u8> {
        let mut packet = vec![0; frame::HEADER + length];
        packet[frame::HEADER..frame::HEADER + 6].fill(to);
        packet[frame::HEADER + 6..frame::HEADER + 12].fill(from);
        packet
    }

    fn open() -> Fabric {
        Fabric::new(3, Shape::default())
    }

    #[test]
    fn unknown_and_group_addresses_reach_all_others_and_known_ones_one() {
        let (mut fabric, mut seen) = (open(), Seen::default());
        fabric.receive(0, 0, &packet(BROADCAST, 2, 60), &mut seen);
        assert_eq!(seen.ports(), [1, 2]);
        fabric.receive(0, 1, &packet(4, 6, 60), &mut seen);
        assert_eq!(seen.ports(), [0, 2]);
        fabric.receive(0, 2, &packet(2, 8, 60), &mut seen);
        assert_eq!(seen.ports(), [0]);
        fabric.receive(0, 0, &packet(2, 4, 60), &mut seen);
        assert_eq!(seen.ports(), Vec::<usize>::new(), "a frame never goes back");
    }

    #[test]
    fn an_address_that_moves_is_followed() {
        let (mut fabric, mut seen) = (open(), Seen::default());
        fabric.receive(0, 0, &packet(BROADCAST, 2, 60), &mut seen);
        fabric.receive(0, 1, &packet(BROADCAST, 2, 60), &mut seen);
        seen.0.clear();
        fabric.receive(0, 2, &packet(2, 8, 60), &mut seen);
        assert_eq!(seen.ports(), [1]);
    }

    #[test]
    fn a_cut_stops_both_directions_of_one_pair_until_healed() {
        let (mut fabric, mut seen) = (open(), Seen::default());
        fabric.set_cut(0, 1, true);
        fabric.receive(0, 0, &packet(BROADCAST, 2, 60), &mut seen);
        assert_eq!(seen.ports(), [2]);
        fabric.receive(0, 1, &packet(2, 4, 60), &mut seen);
        assert_eq!(seen.ports(), Vec::<usize>::new());
        assert_eq!(fabric.counters(1).dropped_cut, 1);
        assert_eq!(fabric.cuts(), [(0, 1)]);
        fabric.set_cut(1, 0, false);
        fabric.receive(0, 1, &packet(2, 4, 60), &mut seen);
        assert_eq!(seen.ports(), [0]);
    }

    #[test]
    fn a_frame_takes_its_wire_time_and_the_delay() {
        // 1 Mbit/s: 8 µs a byte. 976 bytes and 24 of framing take 8 ms on each of the two links.
        let shape = Shape { rate: 1_000_000, delay: 5_000_000, patience: 100_000_000 };
        let (mut fabric, mut seen) = (Fabric::new(2, shape), Seen::default());
        fabric.receive(0, 0, &packet(BROADCAST, 2, 976), &mut seen);
        fabric.receive(0, 0, &packet(BROADCAST, 2, 976), &mut seen);
        let mut times = Vec::new();
        while let Some(next) = fabric.next() {
            fabric.advance(next, &mut seen);
            times.extend(seen.ports().iter().map(|_| next));
        }
        assert_eq!(times, [21_000_000, 29_000_000]);
    }

    #[test]
    fn a_host_that_is_served_late_does_not_keep_others_waiting() {
        // Port 0 has a backlog of 8 ms a frame; what port 2 sends meanwhile goes in between.
        let shape = Shape { rate: 1_000_000, delay: 0, patience: 100_000_000 };
        let (mut fabric, mut seen) = (Fabric::new(3, shape), Seen::default());
        for _ in 0..4 {
            fabric.receive(0, 0, &packet(BROADCAST, 2, 976), &mut seen);
        }
        fabric.receive(0, 2, &packet(BROADCAST, 6, 976), &mut seen);
        let mut at_one = Vec::new();
        while let Some(next) = fabric.next() {
            fabric.advance(next, &mut seen);
            for (port, packet) in seen.0.drain(..) {
                if port == 1 {
                    at_one.push((next / 1_000_000, packet[frame::HEADER + 6]));
                }
            }
        }
        assert_eq!(at_one, [(16, 2), (24, 6), (32, 2), (40, 2), (48, 2)]);
    }

    fn times(fabric: &mut Fabric, seen: &mut Seen) -> Vec<(Nanos, usize)> {
        let mut times = Vec::new();
        while let Some(next) = fabric.next() {
            fabric.advance(next, seen);
            times.extend(seen.ports().into_iter().map(|port| (next, port)));
        }
        times
    }

    fn step(rate: u64, delay_ms: u64, loss: f64) -> [Step; 1] {
        let delay = std::time::Duration::from_millis(delay_ms);
        let conditions = Conditions { rate: Some(rate), delay, loss, ..Conditions::default() };
        [Step { at: std::time::Duration::ZERO, conditions }]
    }

    #[test]
    fn a_way_of_its_own_takes_the_place_of_the_delay_and_concerns_one_pair() {
        // 8 ms for a frame on the hosts' own links, 80 ms on the way between 0 and 1.
        let shape = Shape { rate: 1_000_000, delay: 5_000_000, patience: 1_000_000_000 };
        let (mut fabric, mut seen) = (Fabric::new(3, shape), Seen::default());
        fabric.set_way(0, 0, 1, &step(100_000, 25, 0.0));
        fabric.receive(0, 0, &packet(BROADCAST, 2, 976), &mut seen);
        assert_eq!(times(&mut fabric, &mut seen), [(21_000_000, 2), (121_000_000, 1)]);
        let listed: Vec<_> = fabric.ways().map(|(a, b, conditions)| (a, b, conditions.rate)).collect();
        assert_eq!(listed, [(0, 1, Some(100_000))]);
        // The other way it is the same, and then as before.
        let now = 1_000_000_000;
        fabric.receive(now, 1, &packet(2, 4, 976), &mut seen);
        fabric.set_way(now, 0, 1, &[]);
        fabric.receive(now, 1, &packet(2, 4, 976), &mut seen);
        assert_eq!(times(&mut fabric, &mut seen), [(now + 21_000_000, 0), (now + 29_000_000, 0)]);
    }

    #[test]
    fn what_is_lost_is_counted_and_the_sender_has_to_cut_its_frames_up() {
        let (mut fabric, mut seen) = (open(), Seen::default());
        assert!(!fabric.is_by_frame(0));
        fabric.set_way(0, 0, 1, &step(1_000_000, 0, 1.0));
        assert!(fabric.is_by_frame(0) && fabric.is_by_frame(1) && !fabric.is_by_frame(2));
        fabric.receive(0, 0, &packet(BROADCAST, 2, 976), &mut seen);
        assert_eq!(times(&mut fabric, &mut seen), [(0, 2)]);
        assert_eq!(fabric.counters(0).dropped_lost, 1);
    }
}
