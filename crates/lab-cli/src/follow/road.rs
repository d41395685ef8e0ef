//! Where a client is, and what lies between it and each node.
//!
//! Nodes are at 0, 1 and 2 of a road. In the demo the client stays at the first, goes on to the second and the third, and
//! then walks to and fro at the border between the second and the third:
//!
//! ```text
//!   2  c                        ________
//!                              /        \/\/\/\
//!   1  b          ____________/
//!                /
//!   0  a  ______/
//! ```

use std::time::Duration;

use godwit_lab::{
    Lab,
    conditions::{Conditions, Step},
    config::CLIENT,
};

/// The nodes, in the order of the road.
pub(super) const NODES: [&str; 3] = ["a", "b", "c"];

/// Where the client of the demo is at parts of its way.
const STATIONS: [(f64, f64); 15] = [
    (0.0, 0.0),
    (0.10, 0.0),
    (0.16, 1.0),
    (0.36, 1.0),
    (0.42, 2.0),
    (0.66, 2.0),
    (0.70, 1.5),
    (0.73, 1.3),
    (0.77, 1.7),
    (0.81, 1.3),
    (0.85, 1.7),
    (0.89, 1.3),
    (0.93, 1.7),
    (0.97, 1.3),
    (1.0, 1.5),
];

/// How often what lies between changes.
const TICK: Duration = Duration::from_millis(200);

/// A road, and how long the client takes for all of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Road {
    pub(crate) takes: Duration,
    /// Where the client is at parts of its way; between two of them it goes evenly.
    pub(crate) stations: &'static [(f64, f64)],
    /// Milliseconds, one way: at a node's own place, and for each unit of the road.
    pub(crate) near: f64,
    pub(crate) slope: f64,
}

impl Road {
    /// That of the demo.
    pub(super) const fn demo(takes: Duration) -> Self {
        Self { takes, stations: &STATIONS, near: 1.0, slope: 12.0 }
    }

    /// Where the client is so long after it has begun.
    pub(super) fn place(self, at: Duration) -> f64 {
        let part = (at.as_secs_f64() / self.takes.as_secs_f64()).clamp(0.0, 1.0);
        for pair in self.stations.windows(2) {
            if let [(from, begin), (to, end)] = pair
                && part <= *to
            {
                return begin + (end - begin) * (part - from) / (to - from);
            }
        }
        self.stations.last().map_or(0.0, |(_, place)| *place)
    }

    /// Number of the node that is nearest then.
    pub(super) fn nearest(self, at: Duration) -> usize {
        let place = self.place(at);
        usize::from(place > 0.5) + usize::from(place > 1.5)
    }

    /// What the way between the client and a node is like, all the time.
    fn trace(self, node: usize) -> Vec<Step> {
        let mut steps: Vec<Step> = Vec::new();
        let mut at = Duration::ZERO;
        while at <= self.takes {
            let conditions = Conditions { delay: self.delay(node, at), ..Conditions::default() };
            if steps.last().is_none_or(|last| last.conditions != conditions) {
                steps.push(Step { at, conditions });
            }
            at += TICK;
        }
        steps
    }

    /// Has the client set out, past these nodes. Blocks.
    pub(crate) fn begin(self, lab: &Lab, nodes: &[&str]) -> anyhow::Result<()> {
        for (number, node) in nodes.iter().enumerate() {
            lab.set_way(node, CLIENT, &self.trace(number))?;
        }
        Ok(())
    }

    fn delay(self, node: usize, at: Duration) -> Duration {
        let site = f64::from(u32::try_from(node).unwrap_or(u32::MAX));
        let far = (self.place(at) - site).abs();
        Duration::from_secs_f64((self.near + self.slope * far) / 1e3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROAD: Road = Road::demo(Duration::from_secs(60));

    #[test]
    fn the_client_comes_to_each_node_and_ends_at_a_border() {
        let seen: Vec<usize> =
            (0..=600).map(|tenth| ROAD.nearest(Duration::from_millis(tenth * 100))).collect();
        let mut stays = seen.clone();
        stays.dedup();
        assert!(stays.starts_with(&[0, 1, 2]), "{stays:?}");
        let returns = stays.len() - 3;
        assert!(returns >= 6 && stays.iter().skip(2).all(|node| *node > 0), "{stays:?}");
        assert!((ROAD.place(Duration::from_secs(90)) - 1.5).abs() < 1e-9);
    }

    #[test]
    fn a_trace_has_the_delay_of_the_place_and_changes_only_with_it() {
        for node in 0..NODES.len() {
            let steps = ROAD.trace(node);
            assert_eq!(steps.first().map(|step| step.at), Some(Duration::ZERO));
            assert!(
                steps
                    .windows(2)
                    .all(|pair| pair[0].at < pair[1].at && pair[0].conditions != pair[1].conditions)
            );
            for step in steps {
                assert_eq!(step.conditions.delay, ROAD.delay(node, step.at));
                assert!(step.conditions.delay >= Duration::from_millis(1));
            }
        }
        assert_eq!(ROAD.delay(0, Duration::ZERO), Duration::from_millis(1));
        assert_eq!(ROAD.delay(2, Duration::ZERO), Duration::from_millis(25));
        assert_eq!(ROAD.delay(2, Duration::from_secs(30)), Duration::from_millis(1));
    }
}
