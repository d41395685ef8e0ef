//! What both nodes did in the frozen time, and when: side by side, where the phases of the report are one after the
//! other.
//!
//! Each node notes spans by its own clock. Three messages of the destination tie the clocks together: that it has all images,
//! that it has restored the service, that this runs. Both nodes note when they send or receive one. A message arrives after
//! it was sent: of the three differences of the clocks the least is the closest, and late by the way of that message.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use serde::{Deserialize, Serialize};

/// Most spans that are taken from another node, and longest name of one.
const MOST_SPANS: usize = 64;
const LONGEST_NAME: usize = 32;

/// What a node did for a while.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The node.
    pub node: String,
    /// What it did.
    pub what: String,
    /// When it began, milliseconds from the freeze.
    pub start_ms: f64,
    /// How long it took, milliseconds.
    pub ms: f64,
}

/// A span of the destination.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SpanThere {
    /// What it did: lower-case letters and spaces.
    #[prost(string, tag = "1")]
    pub what: String,
    /// When it began, microseconds from the first message that ties the clocks together.
    #[prost(sint64, tag = "2")]
    pub start_us: i64,
    /// How long it took, microseconds.
    #[prost(uint64, tag = "3")]
    pub us: u64,
}

/// What the destination did, as the source is told of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct TimelineThere {
    /// What it did.
    #[prost(message, repeated, tag = "1")]
    pub spans: Vec<SpanThere>,
    /// When it sent each of the messages that tie the clocks together, microseconds from the first.
    #[prost(sint64, repeated, tag = "2")]
    pub told_us: Vec<i64>,
}

/// The notes of one node.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    spans: Mutex<Vec<(&'static str, Instant, Instant)>>,
    /// When the messages that tie the clocks together were sent, at the destination, or received, at the source.
    told: Mutex<Vec<Instant>>,
}

fn signed_us(from: Instant, to: Instant) -> i64 {
    let us =
        |from: Instant, to: Instant| i64::try_from(to.duration_since(from).as_micros()).unwrap_or(i64::MAX);
    if to >= from { us(from, to) } else { -us(to, from) }
}

#[allow(clippy::cast_precision_loss)]
fn to_ms(us: i64) -> f64 {
    us as f64 / 1e3
}

impl Timeline {
    /// Notes what was begun then and has just ended.
    pub(crate) fn note(&self, what: &'static str, begun: Instant) {
        let mut spans = self.spans.lock().unwrap_or_else(PoisonError::into_inner);
        spans.push((what, begun, Instant::now()));
    }

    /// The destination tells the source now that it has all images, has restored the service, or runs it.
    pub(crate) fn tells(&self) {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).push(Instant::now());
    }

    fn told(&self) -> Vec<Instant> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn taken(&self) -> Vec<(&'static str, Instant, Instant)> {
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A destination's notes for the source.
    pub(crate) fn for_source(&self) -> TimelineThere {
        let told = self.told();
        let Some(&first) = told.first() else { return TimelineThere::default() };
        let spans = self.taken().into_iter().map(|(what, begun, ended)| SpanThere {
            what: what.into(),
            start_us: signed_us(first, begun),
            us: u64::try_from(signed_us(begun, ended)).unwrap_or(0),
        });
        TimelineThere {
            spans: spans.take(MOST_SPANS).collect(),
            told_us: told.iter().map(|sent| signed_us(first, *sent)).collect(),
        }
    }

    /// A source's notes of itself since the freeze, and those of the destination, by their beginning.
    pub(crate) fn since(
        &self,
        frozen: Instant,
        here: &str,
        (node, there): (&str, &TimelineThere),
    ) -> Vec<Span> {
        let own =
            self.taken().into_iter().filter(|(_, _, ended)| *ended > frozen).map(|(what, begun, ended)| {
                Span {
                    node: here.into(),
                    what: what.into(),
                    start_ms: to_ms(signed_us(frozen, begun)),
                    ms: to_ms(signed_us(begun, ended)),
                }
            });
        let is_name = |what: &str| {
            !what.is_empty()
                && what.len() <= LONGEST_NAME
                && what.bytes().all(|b| b.is_ascii_lowercase() || b == b' ')
        };
        // When the destination sent the first message.
        let heard = self.told().into_iter().map(|heard| signed_us(frozen, heard));
        let first = heard.zip(&there.told_us).map(|(heard, sent)| heard.saturating_sub(*sent)).min();
        let told = there.spans.iter().take(MOST_SPANS).filter(|span| is_name(&span.what));
        let others = told.filter_map(|span| {
            Some(Span {
                node: node.into(),
                what: span.what.clone(),
                start_ms: to_ms(first?.saturating_add(span.start_us)),
                ms: to_ms(i64::try_from(span.us).unwrap_or(i64::MAX)),
            })
        });
        let mut all: Vec<_> = own.chain(others).collect();
        all.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
        all
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn there(what: &str, start_us: i64, us: u64) -> SpanThere {
        SpanThere { what: what.into(), start_us, us }
    }

    #[test]
    fn both_nodes_spans_are_on_one_axis() {
        let (source, destination) = (Timeline::default(), Timeline::default());
        let before = Instant::now();
        source.note("copy", before);
        std::thread::sleep(Duration::from_millis(2));
        let frozen = Instant::now();
        source.note("dump", frozen);
        destination.tells();
        source.tells();
        destination.note("restore", Instant::now());
        let told = destination.for_source();
        let spans = source.since(frozen, "a", ("b", &told));
        let names: Vec<_> = spans.iter().map(|span| (span.node.as_str(), span.what.as_str())).collect();
        assert_eq!(names, [("a", "dump"), ("b", "restore")], "what ended before the freeze is left out");
        assert!(spans.iter().all(|span| span.start_ms >= 0.0 && span.ms >= 0.0), "{spans:?}");
    }

    /// A source that is not scheduled when a message arrives moves nothing out of the frozen time.
    #[test]
    fn the_quickest_message_ties_the_clocks() {
        let source = Timeline::default();
        let frozen = Instant::now();
        let ms = |ms: u64| frozen + Duration::from_millis(ms);
        *source.told.lock().unwrap() = vec![ms(130), ms(142), ms(165)];
        let spans = vec![there("restore", 1_000, 35_000), there("resume", 42_000, 8_000)];
        let told = TimelineThere { spans, told_us: vec![0, 41_000, 50_000] };
        let spans = source.since(frozen, "a", ("b", &told));
        let placed: Vec<_> = spans.iter().map(|span| (span.start_ms, span.ms)).collect();
        assert_eq!(placed, [(102.0, 35.0), (143.0, 8.0)]);
    }

    #[test]
    fn what_another_node_tells_is_bounded() {
        let source = Timeline::default();
        let frozen = Instant::now();
        source.tells();
        let mut told = vec![there("x\n<script>", 0, 1), there(&"x".repeat(33), 0, 1), there("", 0, 1)];
        told.extend((0..1000).map(|_| there("restore", i64::MAX, u64::MAX)));
        let told = TimelineThere { spans: told, told_us: vec![i64::MIN; 1000] };
        let spans = source.since(frozen, "a", ("b", &told));
        assert_eq!(spans.len(), MOST_SPANS - 3);
        assert!(spans.iter().all(|span| span.what == "restore"));
    }

    #[test]
    fn a_destination_without_images_tells_nothing() {
        let destination = Timeline::default();
        destination.note("restore", Instant::now());
        assert_eq!(destination.for_source(), TimelineThere::default());
    }
}
