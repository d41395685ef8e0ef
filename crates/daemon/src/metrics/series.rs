//! Series as they are collected for one answer, by metric.

use std::collections::BTreeMap;

use prometheus::proto::{Counter, Gauge, LabelPair, Metric as Sample, MetricFamily, MetricType};

use crate::counters::catalog::{Kind, Metric};

/// What was collected.
#[derive(Default)]
pub(super) struct Series(BTreeMap<&'static str, MetricFamily>);

impl Series {
    /// A value of a metric, with the values of its labels in their order.
    pub(super) fn put(&mut self, metric: Metric, labels: &[&str], value: f64) {
        debug_assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
        let pairs = metric.labels.iter().zip(labels).map(|(name, value)| {
            let mut pair = LabelPair::default();
            pair.set_name((*name).to_owned());
            pair.set_value((*value).to_owned());
            pair
        });
        let mut sample = Sample::from_label(pairs.collect());
        let family = self.0.entry(metric.name).or_insert_with(|| family(metric));
        if metric.kind == Kind::Counter {
            let mut counter = Counter::default();
            counter.set_value(value);
            sample.set_counter(counter);
        } else {
            let mut gauge = Gauge::default();
            gauge.set_value(value);
            sample.set_gauge(gauge);
        }
        family.mut_metric().push(sample);
    }

    /// The same for a number of things or bytes. Above 2^53 it is rounded.
    pub(super) fn count(&mut self, metric: Metric, labels: &[&str], value: u64) {
        self.put(metric, labels, value as f64);
    }

    /// The same where it is known.
    pub(super) fn known(&mut self, metric: Metric, labels: &[&str], value: Option<u64>) {
        if let Some(value) = value {
            self.count(metric, labels, value);
        }
    }

    /// 1 for yes.
    pub(super) fn is(&mut self, metric: Metric, labels: &[&str], value: bool) {
        self.put(metric, labels, if value { 1.0 } else { 0.0 });
    }

    /// Beside these, by name.
    pub(super) fn with(self, mut others: Vec<MetricFamily>) -> Vec<MetricFamily> {
        others.extend(self.0.into_values());
        others.sort_by(|a, b| a.name().cmp(b.name()));
        others
    }
}

fn family(metric: Metric) -> MetricFamily {
    let mut family = MetricFamily::default();
    family.set_name(metric.name.to_owned());
    family.set_help(metric.help.to_owned());
    family.set_field_type(match metric.kind {
        Kind::Counter => MetricType::COUNTER,
        // Histograms are counted, not collected.
        Kind::Gauge | Kind::Histogram(_) => MetricType::GAUGE,
    });
    family
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::counters::catalog::{CORDONED, PEER, RESTARTS};

    #[test]
    fn what_is_collected_is_told_by_name_with_its_kind_and_escaped_labels() {
        let mut series = Series::default();
        series.count(RESTARTS, &["redis"], 3);
        series.is(CORDONED, &[], true);
        series.is(PEER, &["b", "a \"quoted\"\\\nversion"], true);
        series.known(RESTARTS, &["web"], None);
        let text = prometheus::TextEncoder::new().encode_to_string(&series.with(Vec::new())).unwrap();
        let cordoned = "# TYPE godwit_node_cordoned gauge\ngodwit_node_cordoned 1\n";
        let restarts = "# TYPE godwit_service_restarts_total counter\ngodwit_service_restarts_total{service=\"redis\"} 3\n";
        assert!(text.find(cordoned).unwrap() < text.find(restarts).unwrap(), "{text}");
        assert!(text.contains(r#"{peer="b",version="a \"quoted\"\\\nversion"} 1"#), "{text}");
        assert!(!text.contains("web"), "{text}");
    }
}
