//! A client that walks between two nodes for hours: a service follows it where that pays, and never to and fro.

#![allow(clippy::unwrap_used)]

mod world;

use std::time::Duration;

use godwit_policy::decide::Decision;
use godwit_policy::dwell::Watch;
use godwit_policy::quantity::Moment;
use godwit_policy::state::{Made, NodeId, State};
use proptest::prelude::*;
use world::{World, clients, estimate, other};

/// How long a walk takes, seconds.
const TIME: u64 = 2 * 3600;

/// Numbers from 0 to 1, the same for each seed.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / (1_u64 << 24) as f64
    }
}

/// One service that follows one client. Node 0 of the world is where the service is, node 1 is the other of both.
struct Walk {
    world: World,
    state: State,
    noise: Noise,
    /// The last five latencies to both nodes, milliseconds: what is measured is their median.
    last: [[f64; 5]; 2],
    /// The latency to a node that is near and to one that is far, milliseconds.
    near: f64,
    far: f64,
    /// How long a node stays the best.
    watch: Watch,
    /// Milliseconds since it began.
    now: u64,
    /// Whether it is at the second node.
    second: bool,
    /// What was lost by latency and place while it stayed, in all and since the last move.
    suffered: f64,
    since: f64,
    /// What its moves were predicted to cost, and what they did cost.
    predicted: f64,
    cost: f64,
    moves: Vec<Made>,
}

impl Walk {
    fn new(seed: u64) -> Self {
        Self {
            world: World::example(),
            state: State::default(),
            noise: Noise(seed),
            last: [[5.0; 5], [45.0; 5]],
            near: 5.0,
            far: 45.0,
            watch: Watch::default(),
            now: 0,
            second: false,
            suffered: 0.0,
            since: 0.0,
            predicted: 0.0,
            cost: 0.0,
            moves: Vec::new(),
        }
    }

    /// A second with the client at this place between both nodes, 0 to 1.
    fn step(&mut self, place: f64, weight: u32) {
        self.now += 1000;
        let measured: Vec<_> = [place, 1.0 - place]
            .into_iter()
            .zip(&mut self.last)
            .map(|(far, last)| {
                last.rotate_left(1);
                last[4] = (self.near + (self.far - self.near) * far) * (0.9 + 0.2 * self.noise.next());
                let mut sorted = *last;
                sorted.sort_by(f64::total_cmp);
                micros(sorted[2] * 1e3)
            })
            .collect();
        let [first, second] = measured[..] else { panic!() };
        let (here, there) = if self.second { (second, first) } else { (first, second) };
        let moment = Moment(Duration::from_millis(self.now));
        self.watch.see(NodeId(u32::from(second < first)), moment);
        self.world.dwell = self.watch.mean(Duration::from_secs(60));
        self.world.clients = vec![clients(weight, 20, Some(0))];
        let as_measured = |expected| Some(godwit_policy::latency::Estimate { expected, ..estimate(0, 2) });
        self.world.clients[0].here = as_measured(here);
        self.world.others = vec![other(&[])];
        self.world.others[0].there = vec![as_measured(there)];
        let verdict = self.world.decide(&mut self.state, moment);
        let losses = &verdict.suffering.losses;
        self.suffered += losses.clients + losses.residence;
        self.since += losses.clients + losses.residence;
        let Decision::Move { to, .. } = verdict.decision else { return };
        assert_eq!(to, NodeId(1));
        let priced = verdict.best.unwrap().priced;
        let predicted = priced.cost.total();
        assert!(predicted <= 2.0 * self.since + 1e-9, "{predicted} is more than twice {}", self.since);
        self.since = 0.0;
        // A move is not quite what was predicted.
        let took = priced.forecast.total.mul_f64(0.7 + 0.6 * self.noise.next());
        self.predicted += predicted;
        self.cost += predicted * (0.7 + 0.6 * self.noise.next());
        self.now += u64::try_from(took.as_millis()).unwrap();
        let made = Made { at: Moment(Duration::from_millis(self.now)), frozen: priced.forecast.frozen, took };
        self.state.moved(to, made);
        self.moves.push(made);
        self.second = !self.second;
    }

    fn done(&self) -> bool {
        self.now >= TIME * 1000
    }

    /// What all moves cost was suffered before, at least half of it, and no two of them are too close.
    fn check(&self) -> Result<(), TestCaseError> {
        prop_assert!(self.predicted <= 2.0 * self.suffered + 1e-6, "{} {}", self.predicted, self.suffered);
        prop_assert!(self.cost <= 1.3 * 2.0 * self.suffered + 1e-6, "{} {}", self.cost, self.suffered);
        for pair in self.moves.windows(2) {
            prop_assert!(pair[1].at.since(pair[0].at) >= pair[0].took * 10, "{pair:?}");
        }
        for hour in self.moves.windows(7) {
            prop_assert!(hour[6].at.since(hour[0].at) >= Duration::from_secs(3590), "{hour:?}");
        }
        Ok(())
    }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)] // a test's own numbers
fn micros(number: f64) -> Duration {
    Duration::from_micros(number as u64)
}

proptest! {
    // Each case is two hours of decisions, one each second.
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn however_a_client_walks_its_moves_are_paid_for(
        seed in any::<u64>(),
        speed in 0.001_f64..0.2,
        weight in 1_u32..20,
    ) {
        let mut walk = Walk::new(seed);
        let mut place = 0.5;
        while !walk.done() {
            place = (place + speed * (walk.noise.next() - 0.5)).clamp(0.0, 1.0);
            walk.step(place, weight);
        }
        walk.check()?;
    }

    #[test]
    fn a_client_that_runs_away_from_its_service_gains_nothing_by_it(
        seed in any::<u64>(),
        weight in 1_u32..4,
        wait in 0_u64..120,
        far in 22.5_f64..30.0,
    ) {
        // It goes to the far side as soon as the service has come, or some time after that.
        let mut walk = Walk::new(seed);
        walk.far = far;
        let (mut side, mut since) = (1.0, 0);
        while !walk.done() {
            let before = walk.moves.len();
            walk.step(side, weight);
            since += 1;
            if walk.moves.len() > before {
                since = 0;
            }
            let with_it = walk.second == (side > 0.5);
            if with_it && since >= wait {
                side = 1.0 - side;
            }
        }
        walk.check()?;
        prop_assert!(walk.moves.len() <= 13, "{}", walk.moves.len());
    }

    #[test]
    fn a_client_at_the_border_is_hardly_followed_once_its_ways_are_known(
        seed in any::<u64>(),
        weight in 1_u32..20,
    ) {
        let mut walk = Walk::new(seed);
        while !walk.done() {
            let place = 0.5 + 0.04 * (walk.noise.next() - 0.5);
            walk.step(place, weight);
        }
        walk.check()?;
        prop_assert!(walk.cost <= 0.01 * walk.suffered, "{} {}", walk.cost, walk.suffered);
        let late = walk.moves.iter().filter(|made| made.at > Moment(Duration::from_secs(1200))).count();
        prop_assert!(late <= 4, "{late}");
    }

    #[test]
    fn a_commuter_is_followed_once_each_way(seed in any::<u64>(), weight in 1_u32..20) {
        let mut walk = Walk::new(seed);
        while !walk.done() {
            let second = walk.now / 1000 % 2400;
            let place = if second < 1200 { 0.1 } else { 0.9 };
            walk.step(place, weight);
        }
        walk.check()?;
        // At 1200, 2400, 3600, 4800 and 6000 s; before that it is where the service is.
        prop_assert_eq!(walk.moves.len(), 5);
    }
}
