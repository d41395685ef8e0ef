//! What a service loses by where it is, in lost client-seconds (lcs) per second.
//!
//! One lcs is one client without its service for a second. A client whose latency is above its target loses a part of
//! each second: all of it at twice the target. Beside that a node's CPU and memory have a price, the dearer the
//! fuller the node is.
//!
//! ```text
//!  ℓ(m) = Σ w·min(1, max(0, (latency + x·speed_n/speed_m)/target − 1))        x: service time of a request at n
//!  κ(m) = price·cores/(1 − load)² + price·bytes/(1 − memory)²                 both with the service at m
//! ```

use std::time::Duration;

use crate::latency::Estimate;
use crate::quantity::{Cores, Price, Share, Speed, Weight, bounded};

/// A client counts only if it sent something within this time.
const ACTIVE: Duration = Duration::from_secs(10);

/// A node is never taken to be fuller than this: the price has to be a number.
const FULLEST: f64 = 0.95;

/// What resources are worth, in lost client-seconds. The defaults take 0.001 € for one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prices {
    /// A byte sent. Links between nodes are scarce.
    pub byte_sent: Price,
    /// A core for a second.
    pub core_second: Price,
    /// A byte of memory for a second.
    pub byte_second: Price,
    /// The probability, per second in which pages follow, that the source fails and the service is lost.
    pub failure: Share,
    /// How long each client is without a service that is lost.
    pub outage: Duration,
}

impl Default for Prices {
    fn default() -> Self {
        Self {
            byte_sent: Price::clamped(1e-8),
            core_second: Price::clamped(3e-4),
            byte_second: Price::clamped(3e-14),
            failure: Share::clamped(1e-7),
            outage: Duration::from_secs(3600),
        }
    }
}

/// The longest latency that a client is content with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target(Duration);

impl Target {
    /// This latency, unless it is shorter than 1 µs or longer than a day.
    #[must_use]
    pub fn new(latency: Duration) -> Option<Self> {
        let possible = Duration::from_micros(1)..=Duration::from_secs(24 * 3600);
        possible.contains(&latency).then_some(Self(latency))
    }

    /// The latency.
    #[must_use]
    pub fn get(self) -> Duration {
        self.0
    }
}

/// Clients that are alike: of one place, with one target.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clients {
    /// How many are active.
    pub count: u32,
    /// What they count for together.
    pub weight: Weight,
    /// Their target.
    pub target: Target,
    /// Their latency with the service where it is. None: it was not measured, and they have no say in where it goes.
    pub here: Option<Estimate>,
}

/// What one client counts for: the label's weight if it sent something lately, else nothing.
#[must_use]
pub fn weight(sent: Option<Duration>, label: Weight) -> Weight {
    match sent {
        Some(ago) if ago <= ACTIVE => label,
        Some(_) | None => Weight::LEAST,
    }
}

/// What clients lose in a second at this latency, by weight; the service time is part of it.
#[must_use]
pub fn lost(weight: Weight, target: Target, latency: Duration) -> f64 {
    let beyond = bounded(latency).as_secs_f64() / target.0.as_secs_f64() - 1.0;
    weight.get() * beyond.clamp(0.0, 1.0)
}

/// What a service uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Usage {
    /// CPU, in cores of the node where it is.
    pub cores: Cores,
    /// Bytes of memory.
    pub memory: u64,
    /// How long a request takes there. None: not measured, and left out on every node.
    pub request: Option<Duration>,
}

/// What a node has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Host {
    /// Cores.
    pub cores: Cores,
    /// The speed of one.
    pub speed: Speed,
    /// The busy share of all of them.
    pub load: Share,
    /// Bytes of memory.
    pub memory: u64,
    /// How many of them are free and not promised.
    pub free: u64,
}

impl Usage {
    /// The same at another node: its cores are slower or faster.
    #[must_use]
    pub fn moved(&self, from: &Host, to: &Host) -> Self {
        let factor = from.speed.get() / to.speed.get();
        Self {
            cores: Cores::clamped(self.cores.get() * factor),
            memory: self.memory,
            request: self.request.map(|time| crate::quantity::seconds(bounded(time).as_secs_f64() * factor)),
        }
    }
}

impl Host {
    /// The busy share of its cores with this service in addition. It may exceed 1.
    #[must_use]
    pub fn load_with(&self, usage: &Usage) -> f64 {
        self.load.get() + usage.cores.get() / self.cores.get().max(1e-3)
    }

    /// The used share of its memory with this service in addition. It may exceed 1.
    fn memory_with(&self, usage: &Usage) -> f64 {
        let used = self.memory.saturating_sub(self.free) as f64 + usage.memory as f64;
        used / (self.memory as f64).max(1.0)
    }

    /// What a service costs here in a second that is here already.
    #[must_use]
    pub fn residence(&self, usage: &Usage, prices: &Prices) -> f64 {
        let nothing = Usage { cores: Cores::LEAST, memory: 0, request: None };
        rent(usage, self.load.get(), self.memory_with(&nothing), prices)
    }

    /// What a service would cost here in a second that comes in addition.
    #[must_use]
    pub fn residence_with(&self, usage: &Usage, prices: &Prices) -> f64 {
        rent(usage, self.load_with(usage), self.memory_with(usage), prices)
    }
}

fn rent(usage: &Usage, load: f64, memory: f64, prices: &Prices) -> f64 {
    let scarce = |used: f64| (1.0 - used.clamp(0.0, FULLEST)).powi(-2);
    prices.core_second.get() * usage.cores.get() * scarce(load)
        + prices.byte_second.get() * usage.memory as f64 * scarce(memory)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn host(load: f64, speed: f64) -> Host {
        Host {
            cores: Cores::new(4.0).unwrap(),
            speed: Speed::new(speed).unwrap(),
            load: Share::new(load).unwrap(),
            memory: 8 << 30,
            free: 4 << 30,
        }
    }

    const USAGE: Usage = Usage { cores: Cores::LEAST, memory: 1 << 30, request: None };

    #[test]
    fn a_client_loses_nothing_at_its_target_and_everything_at_twice_of_it() {
        let (two, target) = (Weight::new(2.0).unwrap(), Target::new(ms(20)).unwrap());
        let close = |latency, wanted: f64| (lost(two, target, latency) - wanted).abs() < 1e-9;
        assert!(close(ms(20), 0.0) && close(ms(1), 0.0) && close(ms(30), 1.0) && close(ms(40), 2.0));
        assert!(close(Duration::MAX, 2.0));
        assert_eq!((Target::new(Duration::ZERO), Target::new(Duration::MAX)), (None, None));
    }

    #[test]
    fn a_client_that_is_silent_counts_for_nothing() {
        let label = Weight::new(3.0).unwrap();
        assert_eq!(weight(Some(ms(10_000)), label), label);
        assert_eq!(weight(Some(ms(10_001)), label), Weight::LEAST);
        assert_eq!(weight(None, label), Weight::LEAST);
    }

    #[test]
    fn a_full_node_is_dearer_and_a_slow_one_too() {
        let usage = Usage { cores: Cores::new(1.0).unwrap(), request: Some(ms(2)), ..USAGE };
        let prices = Prices::default();
        let at = |load| host(load, 1.0).residence_with(&usage, &prices);
        assert!(at(0.0) < at(0.5) && at(0.5) < at(0.7));
        // 3e-4 / 0.25, and 2^30 · 3e-14 / (3/8)².
        assert!((at(0.25) - 1.429e-3).abs() < 1e-6, "{}", at(0.25));
        assert!(at(1.0).is_finite());
        let slow = usage.moved(&host(0.0, 1.0), &host(0.0, 0.5));
        assert_eq!((slow.cores.get(), slow.request), (2.0, Some(ms(4))));
        assert!((host(0.1, 0.5).load_with(&slow) - 0.6).abs() < 1e-9);
        // Where it is already its own load is in what is measured.
        assert!(host(0.25, 1.0).residence(&usage, &prices) < at(0.25));
    }
}
