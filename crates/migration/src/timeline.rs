//! What both nodes did in the frozen time, and when: side by side, where the phases of the report are one after the
//! other.
//!
//! Each node notes spans by its own clock. The destination's begin counts from the moment in which it had all images, and
//! the source adds the moment in which it heard so: they are late by the way of one message.

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

/// A span of the destination, as the source is told of it.
#[derive(Clone, PartialEq, prost::Message)]
pub struct SpanThere {
    /// What it did: lower-case letters and spaces.
    #[prost(string, tag = "1")]
    pub what: String,
    /// When it began, microseconds from the moment in which it had all images.
    #[prost(sint64, tag = "2")]
    pub start_us: i64,
    /// How long it took, microseconds.
    #[prost(uint64, tag = "3")]
    pub us: u64,
}

/// The notes of one node.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    spans: Mutex<Vec<(&'static str, Instant, Instant)>>,
    /// When all images had arrived: at the destination, and as the source heard it.
    images: Mutex<Option<Instant>>,
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

    /// All images have arrived now.
    pub(crate) fn has_images(&self) {
        *self.images.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn images(&self) -> Option<Instant> {
        *self.images.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn taken(&self) -> Vec<(&'static str, Instant, Instant)> {
        std::mem::take(&mut *self.spans.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A destination's notes for the source.
    pub(crate) fn for_source(&self) -> Vec<SpanThere> {
        let Some(images) = self.images() else { return Vec::new() };
        let told = self.taken().into_iter().map(|(what, begun, ended)| SpanThere {
            what: what.into(),
            start_us: signed_us(images, begun),
            us: u64::try_from(signed_us(begun, ended)).unwrap_or(0),
        });
        told.take(MOST_SPANS).collect()
    }

    /// A source's notes of itself since the freeze, and those of the destination, by their beginning.
    pub(crate) fn since(&self, frozen: Instant, here: &str, there: (&str, &[SpanThere])) -> Vec<Span> {
        let own =
            self.taken().into_iter().filter(|(_, _, ended)| *ended > frozen).map(|(what, begun, ended)| {
                Span {
                    node: here.into(),
                    what: what.into(),
                    start_ms: to_ms(signed_us(frozen, begun)),
                    ms: to_ms(signed_us(begun, ended)),
                }
            });
        let (node, told) = there;
        let is_name = |what: &str| {
            !what.is_empty()
                && what.len() <= LONGEST_NAME
                && what.bytes().all(|b| b.is_ascii_lowercase() || b == b' ')
        };
        let heard = self.images().map(|heard| signed_us(frozen, heard));
        let told = told.iter().take(MOST_SPANS).filter(|span| is_name(&span.what));
        let others = told.filter_map(|span| {
            Some(Span {
                node: node.into(),
                what: span.what.clone(),
                start_ms: to_ms(heard?.saturating_add(span.start_us)),
                ms: to_ms(i64::try_from(span.us).unwrap_or(i64::MAX)),
            })
        });
        let mut all: Vec<_> = own.chain(others).collect();
        all.sort_by(|a, b| a.start_ms.total_cmp(&b.start_ms));
        all
    }
}

#[cfg(test)]
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
        destination.has_images();
        source.has_images();
        destination.note("restore", Instant::now());
        let told = destination.for_source();
        let spans = source.since(frozen, "a", ("b", &told));
        let names: Vec<_> = spans.iter().map(|span| (span.node.as_str(), span.what.as_str())).collect();
        assert_eq!(names, [("a", "dump"), ("b", "restore")], "what ended before the freeze is left out");
        assert!(spans.iter().all(|span| span.start_ms >= 0.0 && span.ms >= 0.0), "{spans:?}");
    }

    #[test]
    fn what_another_node_tells_is_bounded() {
        let source = Timeline::default();
        let frozen = Instant::now();
        source.has_images();
        let mut told = vec![there("x\n<script>", 0, 1), there(&"x".repeat(33), 0, 1), there("", 0, 1)];
        told.extend((0..1000).map(|_| there("restore", i64::MAX, u64::MAX)));
        let spans = source.since(frozen, "a", ("b", &told));
        assert_eq!(spans.len(), MOST_SPANS - 3);
        assert!(spans.iter().all(|span| span.what == "restore"));
    }

    #[test]
    fn a_destination_without_images_tells_nothing() {
        let destination = Timeline::default();
        destination.note("restore", Instant::now());
        assert_eq!(destination.for_source(), []);
    }
}
