//! The latency that a client would have with the service at a node: the best evidence there is.
//!
//! | evidence, best first | how sure |
//! |---|---|
//! | connections that this client has to that node now | its own deviation |
//! | probes of the client by both nodes: `r(c,n) − probe(n) + probe(m)` | the deviations of all three |
//! | through an entry node `e` of published ports: `r(c,n) − r(n,e) + r(e,m)` | the deviations of all three |
//! | what other clients of its prefix have at that node, the median | how far they are apart |
//! | the triangle inequality: `abs(r(c,n) − r(n,m))` to `r(c,n) + r(n,m)` | as if all between were alike likely |
//!
//! What a client's connections show has delays of the client in it that a probe has not. A probe by that node alone would make
//! each node seem nearer than the one where the service is. Delayed acknowledgements, the most of them, are no latency: a
//! probe of the client by the node where the service is tells them ([`Reading::beside`]).
//!
//! Evidence that is too old is no evidence. Until then its deviation grows.

use std::time::Duration;

use crate::quantity::{bounded, median, seconds};

/// The most that is taken to be the delay of a client's acknowledgements: Linux sends them within 40 ms. (Others wait for up to
/// 200 ms.)
const ACKNOWLEDGED: Duration = Duration::from_millis(40);

/// One measured latency.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reading {
    /// The round trip.
    pub latency: Duration,
    /// Its standard deviation.
    pub deviation: Duration,
    /// How long ago it was measured.
    pub age: Duration,
}

impl Reading {
    /// What connections show, beside an echo of the same path. What is beyond the echo is taken to be delayed acknowledgements:
    /// a client that asks, thinks and asks again acknowledges an answer with its next question. For its answers it does not
    /// wait for that. The delay changes with the latency, so an echo counts for a few seconds only.
    #[must_use]
    pub fn beside(self, echo: Self) -> Self {
        let least = self.latency.saturating_sub(ACKNOWLEDGED);
        if echo.latency >= self.latency {
            self
        } else if echo.latency >= least {
            echo
        } else {
            Self { latency: least, ..self }
        }
    }
}

/// A part of the path that is another one if the service moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// To where the service is.
    pub here: Reading,
    /// To where it would be.
    pub there: Reading,
}

/// What is known of a client's latency to a node where the service is not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Evidence {
    /// The client's latency to where the service is.
    pub here: Option<Reading>,
    /// Its own connections to that node.
    pub own: Option<Reading>,
    /// Probes of it by both nodes.
    pub probe: Option<Part>,
    /// From the entry node in its path to both nodes.
    pub entry: Option<Part>,
    /// Others of its prefix, as [`prefix`] sums them up.
    pub prefix: Option<Reading>,
    /// Between both nodes.
    pub between: Option<Reading>,
}

/// Where an estimate is from, best first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The client's own connections.
    Own,
    /// Probes.
    Probe,
    /// The path through an entry node.
    Entry,
    /// Other clients of its prefix.
    Prefix,
    /// The triangle inequality.
    Bounds,
}

/// What a latency is expected to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Estimate {
    /// The expected round trip.
    pub expected: Duration,
    /// Its standard deviation.
    pub deviation: Duration,
    /// How old the oldest part of its evidence is.
    pub age: Duration,
    /// What evidence it is from.
    pub from: Origin,
}

impl Estimate {
    /// The latency if it is one deviation worse than expected.
    #[must_use]
    pub fn worse(&self) -> Duration {
        bounded(bounded(self.expected) + bounded(self.deviation))
    }

    /// The latency if it is one deviation better.
    #[must_use]
    pub fn better(&self) -> Duration {
        self.expected.saturating_sub(self.deviation)
    }
}

impl Origin {
    /// Evidence older than this is not used. Probes are made twice a minute at least while clients lose; a prefix stays where it is for
    /// longer than a client.
    #[must_use]
    pub fn lasts(self) -> Duration {
        Duration::from_secs(match self {
            Self::Own | Self::Entry => 30,
            Self::Probe | Self::Bounds => 60,
            Self::Prefix => 600,
        })
    }
}

/// The latency at the node where the service is, from the client's connections to it.
#[must_use]
pub fn here(own: Reading) -> Option<Estimate> {
    of(Origin::Own, &[own], seconds_of(own.latency), seconds_of(own.deviation))
}

/// The latency at another node, from the best evidence that is not too old; none if there is no such evidence.
#[must_use]
pub fn estimate(evidence: &Evidence) -> Option<Estimate> {
    let reading = |from, reading: Option<Reading>| {
        reading.and_then(|reading| {
            of(from, &[reading], seconds_of(reading.latency), seconds_of(reading.deviation))
        })
    };
    reading(Origin::Own, evidence.own)
        .or_else(|| instead(Origin::Probe, evidence.here?, evidence.probe?))
        .or_else(|| instead(Origin::Entry, evidence.here?, evidence.entry?))
        .or_else(|| reading(Origin::Prefix, evidence.prefix))
        .or_else(|| bounds(evidence.here?, evidence.between?))
}

/// What other clients of a prefix have at a node: their median, how far half of them are from it, and the age of the oldest.
/// None without any that is young enough.
#[must_use]
pub fn prefix(readings: &[Reading]) -> Option<Reading> {
    let young: Vec<_> = readings.iter().filter(|reading| reading.age <= Origin::Prefix.lasts()).collect();
    let latency = median(young.iter().map(|reading| bounded(reading.latency)).collect())?;
    let apart = median(young.iter().map(|reading| reading.latency.abs_diff(latency)).collect())?;
    let own = median(young.iter().map(|reading| reading.deviation).collect())?;
    let age = young.iter().map(|reading| reading.age).max()?;
    // One client says nothing of how far others are apart: half of its latency.
    let apart = if young.len() < 3 { apart.max(latency / 2) } else { apart };
    // The median distance times 1.48 is the deviation of a normal distribution.
    let deviation = hypotenuse(&[seconds_of(apart) * 1.48, seconds_of(own)]);
    Some(Reading { latency, deviation: seconds(deviation), age })
}

/// With one part of the path in place of the other.
fn instead(from: Origin, client: Reading, part: Part) -> Option<Estimate> {
    let all = [client, part.here, part.there];
    let [to_client, here, there] = all.map(|reading| seconds_of(reading.latency));
    // The part is one of the path, whatever the measurements say of it.
    let expected = (to_client - here).max(0.0) + there;
    of(from, &all, expected, hypotenuse(&all.map(|reading| seconds_of(reading.deviation))))
}

fn bounds(here: Reading, between: Reading) -> Option<Estimate> {
    let (client, nodes) = (seconds_of(here.latency), seconds_of(between.latency));
    // Between |a − b| and a + b: the middle is the larger of the two, and half of the width is the smaller.
    let even = client.min(nodes) / 3.0_f64.sqrt();
    let deviation = hypotenuse(&[even, seconds_of(here.deviation), seconds_of(between.deviation)]);
    of(Origin::Bounds, &[here, between], client.max(nodes), deviation)
}

/// The estimate from these readings, unless one is too old.
fn of(from: Origin, readings: &[Reading], expected: f64, deviation: f64) -> Option<Estimate> {
    let age = readings.iter().map(|reading| reading.age).max()?;
    if age > from.lasts() {
        return None;
    }
    // At its oldest it counts as if it were measured with a deviation √2 times as large.
    let widened = deviation * (1.0 + age.as_secs_f64() / from.lasts().as_secs_f64()).sqrt();
    Some(Estimate { expected: seconds(expected), deviation: seconds(widened), age, from })
}

fn seconds_of(time: Duration) -> f64 {
    bounded(time).as_secs_f64()
}

fn hypotenuse(sides: &[f64]) -> f64 {
    sides.iter().map(|side| side * side).sum::<f64>().sqrt()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use proptest::option;
    use proptest::prelude::*;

    use super::*;

    fn reading(ms: u64, deviation: u64, age: u64) -> Reading {
        Reading {
            latency: Duration::from_millis(ms),
            deviation: Duration::from_millis(deviation),
            age: Duration::from_secs(age),
        }
    }

    fn all() -> Evidence {
        Evidence {
            here: Some(reading(30, 1, 1)),
            own: Some(reading(10, 1, 1)),
            probe: Some(Part { here: reading(22, 1, 1), there: reading(3, 1, 1) }),
            entry: Some(Part { here: reading(20, 1, 1), there: reading(4, 1, 1) }),
            prefix: Some(reading(13, 1, 1)),
            between: Some(reading(8, 1, 1)),
        }
    }

    fn ms(time: Duration) -> u128 {
        time.as_millis()
    }

    #[test]
    fn the_best_evidence_that_there_is_decides() {
        let mut evidence = all();
        let from = |evidence: &Evidence| estimate(evidence).map(|found| (found.from, ms(found.expected)));
        assert_eq!(from(&evidence), Some((Origin::Own, 10)));
        evidence.own = None;
        assert_eq!(from(&evidence), Some((Origin::Probe, 11)), "30 − 22 + 3");
        evidence.probe = None;
        assert_eq!(from(&evidence), Some((Origin::Entry, 14)), "30 − 20 + 4");
        evidence.entry = None;
        assert_eq!(from(&evidence), Some((Origin::Prefix, 13)));
        evidence.prefix = None;
        assert_eq!(from(&evidence), Some((Origin::Bounds, 30)), "the middle of 22 and 38");
        evidence.here = None;
        assert_eq!(from(&evidence), None);
    }

    #[test]
    fn what_a_connection_shows_beyond_an_echo_is_delay_up_to_40_ms() {
        let shown = reading(50, 1, 1);
        assert_eq!(shown.beside(reading(30, 3, 2)), reading(30, 3, 2));
        assert_eq!(shown.beside(reading(2, 1, 2)), reading(10, 1, 1), "no acknowledgement takes so long");
        assert_eq!(shown.beside(reading(80, 8, 2)), shown, "an echo may take longer");
        assert_eq!(reading(15, 1, 1).beside(reading(0, 0, 0)), reading(0, 0, 0));
    }

    #[test]
    fn old_evidence_is_less_sure_and_then_none() {
        let with = |age| Evidence { own: Some(reading(10, 4, age)), probe: None, ..all() };
        let (young, old) = (estimate(&with(0)).unwrap(), estimate(&with(30)).unwrap());
        assert!(young.deviation < old.deviation && old.from == Origin::Own, "{young:?} {old:?}");
        assert_eq!(estimate(&with(31)).unwrap().from, Origin::Entry);
        assert_eq!(here(reading(10, 4, 31)), None);
    }

    #[test]
    fn bounds_are_as_wide_as_the_nodes_are_apart() {
        let near = Evidence {
            here: Some(reading(30, 0, 0)),
            between: Some(reading(3, 0, 0)),
            ..Evidence::default()
        };
        let far = Evidence { between: Some(reading(200, 0, 0)), ..near };
        assert!(estimate(&near).unwrap().deviation < Duration::from_millis(2));
        let far = estimate(&far).unwrap();
        assert_eq!(ms(far.expected), 200);
        assert!(far.better() >= Duration::from_millis(170) && far.worse() <= Duration::from_millis(230));
    }

    #[test]
    fn a_prefix_is_the_median_of_its_clients_and_one_client_is_hardly_a_prefix() {
        let many =
            prefix(&[reading(10, 1, 1), reading(12, 1, 1), reading(11, 1, 1), reading(500, 1, 2)]).unwrap();
        assert_eq!((ms(many.latency), many.age), (12, Duration::from_secs(2)));
        assert!(many.deviation < Duration::from_millis(4), "{many:?}");
        assert!(prefix(&[reading(12, 1, 1)]).unwrap().deviation > Duration::from_millis(5));
        assert_eq!(prefix(&[]), None);
        assert_eq!(prefix(&[reading(12, 1, 601)]), None);
    }

    #[test]
    fn a_path_is_no_shorter_than_its_part_behind_the_entry_node() {
        let odd = Evidence {
            here: Some(reading(5, 0, 0)),
            entry: Some(Part { here: reading(20, 0, 0), there: reading(4, 0, 0) }),
            ..Evidence::default()
        };
        assert_eq!(ms(estimate(&odd).unwrap().expected), 4);
    }

    fn readings() -> impl Strategy<Value = Option<Reading>> {
        let time = || prop_oneof![(0_u64..1_000_000).prop_map(Duration::from_micros), Just(Duration::MAX)];
        option::of((time(), time(), 0_u64..100).prop_map(|(latency, deviation, age)| Reading {
            latency,
            deviation,
            age: Duration::from_secs(age),
        }))
    }

    proptest! {
        #[test]
        fn no_evidence_makes_an_endless_latency(
            (here, own) in (readings(), readings()),
            (probe, entry) in (option::of((readings(), readings())), option::of((readings(), readings()))),
            (prefix, between) in (readings(), readings()),
        ) {
            let part = |found: Option<(Option<Reading>, Option<Reading>)>| {
                found.and_then(|(here, there)| Some(Part { here: here?, there: there? }))
            };
            let (probe, entry) = (part(probe), part(entry));
            let evidence = Evidence { here, own, probe, entry, prefix, between };
            if let Some(found) = estimate(&evidence) {
                prop_assert!(found.age <= found.from.lasts());
                prop_assert!(found.better() <= found.expected && found.expected <= found.worse());
                prop_assert!(found.worse() <= crate::quantity::LONGEST);
            }
        }
    }
}
