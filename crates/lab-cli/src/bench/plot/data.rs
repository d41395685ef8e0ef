//! Results grouped by series and memory, and the medians of each group.

use std::collections::BTreeMap;

use godwit_cli::output;
use serde_json::Value;

use crate::bench::results::page_ratio;

/// The runs of one series with one size of memory.
#[derive(Debug)]
pub(super) struct Group {
    pub(super) series: String,
    /// Data of the service, bytes.
    pub(super) memory: u64,
    /// Those that moved; only they have figures.
    rows: Vec<Value>,
    /// Why the others did not.
    pub(super) failures: Vec<String>,
}

/// The runs of one load with frames held or dropped.
#[derive(Debug)]
pub(super) struct Cutover {
    /// `idle`, `busy`, `small`, `doubt` or `many`.
    pub(super) load: String,
    /// How long each move was held before its commit, milliseconds.
    pub(super) pause_ms: u64,
    pub(super) connections: u64,
    /// `hold` or `drop`.
    pub(super) frames: String,
    /// The nodes' switch, where it is not the kernel's bridge.
    switch: Option<String>,
    /// Those that moved; only they have figures.
    rows: Vec<Value>,
    /// Why the others did not.
    pub(super) failures: Vec<String>,
}

impl Cutover {
    /// The load in words.
    pub(super) fn name(&self) -> String {
        let load = match self.connections {
            1 => match self.load.as_str() {
                "small" => "one connection, small answers".to_owned(),
                "doubt" => "one connection in doubt".to_owned(),
                load => format!("one {load} connection"),
            },
            connections => format!("{connections} connections"),
        };
        let held = (self.pause_ms > 0).then(|| format!("held {}", output::millis(self.pause_ms as f64)));
        [Some(load), self.switch.clone(), held].into_iter().flatten().collect::<Vec<_>>().join(", ")
    }

    /// Runs that moved.
    pub(super) fn runs(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn median(&self, field: &str) -> Option<f64> {
        median(self.rows.iter().filter_map(|row| row[field].as_f64()).collect())
    }

    /// The most of any run.
    pub(super) fn most(&self, field: &str) -> Option<u64> {
        self.rows.iter().filter_map(|row| row[field].as_u64()).max()
    }

    pub(super) fn sum(&self, field: &str) -> u64 {
        self.rows.iter().filter_map(|row| row[field].as_u64()).sum()
    }
}

/// All that was measured.
#[derive(Debug, Default)]
pub(super) struct Data {
    /// Moves, by memory and then in the order of [`rank`].
    pub(super) groups: Vec<Group>,
    /// Pauses with frames held and dropped: by connections, load (the idle first) and length, `hold` before `drop`.
    pub(super) cutovers: Vec<Cutover>,
    /// Benchmarks of parts, as they came.
    pub(super) parts: Vec<Value>,
}

impl Data {
    pub(super) fn new(rows: Vec<Value>) -> Self {
        let mut groups = BTreeMap::new();
        let mut cutovers = BTreeMap::new();
        let mut parts = Vec::new();
        for row in rows {
            let Some(series) = row["series"].as_str().map(str::to_owned) else { continue };
            if row["bench"] == "cutover" {
                let connections = row["connections"].as_u64().unwrap_or_default();
                let frames = row["cutover"].as_str().unwrap_or_default().to_owned();
                let switch = row["network_backend"].as_str().filter(|switch| *switch != "kernel");
                let switch = switch.map(str::to_owned);
                let pause_ms = row["pause_ms"].as_u64().unwrap_or_default();
                let order = ["idle", "busy", "small", "doubt"].iter().position(|load| *load == series);
                let place = (connections, order, pause_ms, switch.clone(), frames != "hold");
                let (rows, failures) = (Vec::new(), Vec::new());
                let cutover = cutovers.entry(place);
                let cutover = cutover.or_insert_with(|| Cutover {
                    load: series,
                    pause_ms,
                    connections,
                    frames,
                    switch,
                    rows,
                    failures,
                });
                sort_in(row, &mut cutover.rows, &mut cutover.failures);
                continue;
            }
            let Some(memory) = row["memory"].as_u64().filter(|_| row["bench"].is_null()) else {
                parts.push(row);
                continue;
            };
            let group = groups.entry((memory, rank(&series), series.clone())).or_insert_with(|| Group {
                series,
                memory,
                rows: Vec::new(),
                failures: Vec::new(),
            });
            sort_in(row, &mut group.rows, &mut group.failures);
        }
        Self { groups: groups.into_values().collect(), cutovers: cutovers.into_values().collect(), parts }
    }

    /// Whether there is nothing.
    pub(super) fn is_empty(&self) -> bool {
        self.groups.is_empty() && self.cutovers.is_empty() && self.parts.is_empty()
    }

    /// The sizes of memory, the smallest first.
    pub(super) fn sizes(&self) -> Vec<u64> {
        let mut sizes: Vec<_> = self.groups.iter().map(|group| group.memory).collect();
        sizes.dedup();
        sizes
    }

    /// The series, in their order.
    pub(super) fn series(&self) -> Vec<&str> {
        let mut series: Vec<_> = self.groups.iter().map(|group| group.series.as_str()).collect();
        series.sort_by_key(|series| (rank(series), *series));
        series.dedup();
        series
    }

    pub(super) fn group(&self, series: &str, memory: u64) -> Option<&Group> {
        self.groups.iter().find(|group| group.series == series && group.memory == memory)
    }

    /// What freezing and restoring takes on the machine by that baseline, beside that size.
    pub(super) fn floor(&self, baseline: &str, memory: u64) -> Option<f64> {
        self.group(baseline, memory)?.median("downtime_ms")
    }

    /// Memory of the service with this much data, which stock programs do not tell.
    pub(super) fn resident(&self, memory: u64) -> Option<f64> {
        let groups = self.groups.iter().filter(|group| group.memory == memory);
        median(groups.filter_map(|group| group.median("memory_bytes")).collect())
    }
}

impl Group {
    /// Runs that moved.
    pub(super) fn runs(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn median(&self, field: &str) -> Option<f64> {
        median(self.rows.iter().filter_map(|row| row[field].as_f64()).collect())
    }

    pub(super) fn sum(&self, field: &str) -> u64 {
        self.rows.iter().filter_map(|row| row[field].as_u64()).sum()
    }

    /// The most of any run ÷ the median.
    pub(super) fn worst(&self, field: &str) -> Option<f64> {
        let most = self.rows.iter().filter_map(|row| row[field].as_f64()).max_by(f64::total_cmp)?;
        Some(most / self.median(field)?)
    }

    /// The run whose figure is in the middle, or the lower of the two there.
    pub(super) fn usual(&self, field: &str) -> Option<&Value> {
        let figure = |row: &&Value| row[field].as_f64();
        let mut known: Vec<_> = self.rows.iter().filter_map(|row| Some((figure(&row)?, row))).collect();
        known.sort_by(|a, b| a.0.total_cmp(&b.0));
        known.get(known.len().checked_sub(1)? / 2).map(|(_, row)| *row)
    }

    /// Bytes on the wire for each byte of memory.
    pub(super) fn bytes_ratio(&self, data: &Data) -> Option<f64> {
        Some(self.median("wire_bytes")? / data.resident(self.memory)?)
    }

    /// What memory took on the wire for each byte of the pages that had to cross; stock programs tell
    /// neither.
    pub(super) fn page_ratio(&self) -> Option<f64> {
        median(self.rows.iter().filter_map(page_ratio).collect())
    }

    /// The median of each phase of the frozen time, in order.
    pub(super) fn phases(&self) -> Vec<(String, f64)> {
        let mut all: Vec<(String, Vec<f64>)> = Vec::new();
        for phase in self.rows.iter().filter_map(|row| row["phases"].as_array()).flatten() {
            let (Some(name), Some(ms)) = (phase["phase"].as_str(), phase["ms"].as_f64()) else { continue };
            match all.iter_mut().find(|(known, _)| known == name) {
                Some((_, times)) => times.push(ms),
                None => all.push((name.to_owned(), vec![ms])),
            }
        }
        all.into_iter().filter_map(|(name, times)| Some((name, median(times)?))).collect()
    }
}

/// A move that succeeded has figures; of one that did not, the reason counts.
fn sort_in(row: Value, moved: &mut Vec<Value>, failures: &mut Vec<String>) {
    if row["outcome"] == "moved" {
        moved.push(row);
    } else {
        failures.push(row["reason"].as_str().unwrap_or("no reason was given").to_owned());
    }
}

/// The one in the middle, or the mean of the two there.
pub(in crate::bench) fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() % 2 {
        1 => values.get(half).copied(),
        _ => Some((values.get(half.checked_sub(1)?)? + values.get(half)?) / 2.0),
    }
}

/// What is known comes in this order, and the rest after it.
const ORDER: [&str; 10] = [
    "bare",
    "floor",
    "godwit",
    "godwit-auto",
    "godwit-precopy",
    "godwit-hybrid",
    "godwit-postcopy",
    "godwit-cold",
    "stock-lazy",
    "stock-cold",
];

/// Its place in all pictures and tables; a return comes after its move.
fn rank(series: &str) -> (usize, bool) {
    let base = series.strip_suffix("-return").unwrap_or(series);
    let base = base.strip_suffix("-busy").unwrap_or(base);
    let back = base != series;
    (ORDER.iter().position(|known| *known == base).unwrap_or(ORDER.len()), back)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn medians_are_of_the_runs_that_moved() {
        let row = |ms: f64, outcome: &str| {
            json!({"series": "godwit", "memory": 1024, "outcome": outcome, "reason": "why",
                "downtime_ms": ms, "phases": [{"phase": "freeze", "ms": ms / 2.0}]})
        };
        let data =
            Data::new(vec![row(4.0, "moved"), row(100.0, "aborted"), row(2.0, "moved"), row(9.0, "moved")]);
        let group = data.group("godwit", 1024).unwrap();
        assert_eq!(group.median("downtime_ms"), Some(4.0));
        assert_eq!(group.phases(), [("freeze".to_owned(), 2.0)]);
        assert_eq!((group.runs(), group.failures.len()), (3, 1));
        assert_eq!(group.median("nothing"), None);
        assert_eq!(median(vec![3.0, 1.0]), Some(2.0));
    }

    #[test]
    fn the_usual_run_is_the_one_in_the_middle() {
        let run = |ms: f64, id: &str| json!({"series": "godwit", "memory": 1, "outcome": "moved", "frozen_ms": ms, "id": id});
        let data = Data::new(vec![run(9.0, "c"), run(1.0, "a"), run(5.0, "b"), run(50.0, "d")]);
        assert_eq!(data.groups[0].usual("frozen_ms").unwrap()["id"], "b");
        assert!(data.groups[0].usual("nothing").is_none());
    }

    #[test]
    fn memory_on_the_wire_is_judged_run_by_run_by_the_pages_that_had_to_cross() {
        let row = |wire: u64, pages: u64| json!({"series": "godwit", "memory": 1, "outcome": "moved", "memory_wire_bytes": wire, "page_bytes": pages});
        let data = Data::new(vec![row(101, 100), row(204, 200), row(330, 300), row(5, 0)]);
        assert_eq!(data.group("godwit", 1).unwrap().page_ratio(), Some(1.02));
        let stock = json!({"series": "stock-cold", "memory": 1, "outcome": "moved", "wire_bytes": 10});
        assert_eq!(Data::new(vec![stock]).group("stock-cold", 1).unwrap().page_ratio(), None);
    }

    #[test]
    fn pauses_are_grouped_by_load_and_by_what_becomes_of_frames() {
        let row = |series: &str, connections: u64, cutover: &str, timeouts: u64| {
            json!({"bench": "cutover", "series": series, "connections": connections, "cutover": cutover,
                "outcome": "moved", "timeouts": timeouts})
        };
        let data = Data::new(vec![
            row("many", 1000, "drop", 7),
            row("busy", 1, "hold", 0),
            row("idle", 1, "drop", 1),
            row("many", 1000, "drop", 9),
            row("idle", 1, "hold", 0),
            json!({"bench": "cutover", "series": "many", "connections": 1000, "cutover": "hold",
                "outcome": "aborted", "reason": "why"}),
        ]);
        let seen: Vec<_> = data.cutovers.iter().map(|one| (one.name(), one.frames.as_str())).collect();
        let idle = "one idle connection".to_owned();
        let (busy, many) = ("one busy connection".to_owned(), "1000 connections".to_owned());
        let expected =
            [(idle.clone(), "hold"), (idle, "drop"), (busy, "hold"), (many.clone(), "hold"), (many, "drop")];
        assert_eq!(seen, expected);
        let last = &data.cutovers[4];
        assert_eq!((last.runs(), last.most("timeouts"), last.median("timeouts")), (2, Some(9), Some(8.0)));
        assert_eq!((data.cutovers[3].runs(), &data.cutovers[3].failures[..]), (0, &["why".to_owned()][..]));
        assert!(data.groups.is_empty() && data.parts.is_empty() && !data.is_empty());
    }

    #[test]
    fn pauses_by_another_switch_are_a_group_of_their_own() {
        let row = |switch: &str, cutover_ms: f64| {
            json!({"bench": "cutover", "series": "idle", "connections": 1, "cutover": "hold",
                "outcome": "moved", "network_backend": switch, "cutover_ms": cutover_ms})
        };
        let data = Data::new(vec![row("openvswitch", 2.0), row("kernel", 1.0), row("openvswitch", 4.0)]);
        let seen: Vec<_> =
            data.cutovers.iter().map(|one| (one.name(), one.median("cutover_ms").unwrap())).collect();
        let expected = [("one idle connection", 1.0), ("one idle connection, openvswitch", 3.0)];
        assert_eq!(seen, expected.map(|(name, median)| (name.to_owned(), median)));
    }

    #[test]
    fn pauses_of_each_length_and_load_are_groups_of_their_own() {
        let row = |series: &str, pause_ms: u64| {
            json!({"bench": "cutover", "series": series, "connections": 1, "cutover": "hold",
                "outcome": "moved", "pause_ms": pause_ms})
        };
        let data = Data::new(vec![row("doubt", 0), row("small", 100), row("small", 0), row("small", 0)]);
        let seen: Vec<_> = data.cutovers.iter().map(|one| (one.name(), one.runs())).collect();
        let (small, doubt) = ("one connection, small answers", "one connection in doubt");
        let held = format!("{small}, held 100.0 ms");
        assert_eq!(seen, [(small.to_owned(), 2), (held, 1), (doubt.to_owned(), 1)]);
    }

    #[test]
    fn series_have_one_order_whatever_was_measured_first() {
        let row = |series: &str, memory: u64| json!({"series": series, "memory": memory, "outcome": "moved"});
        let data = Data::new(vec![
            row("stock-cold", 2),
            row("godwit-precopy-return", 2),
            row("godwit-precopy", 1),
            row("floor", 1),
        ]);
        assert_eq!(data.series(), ["floor", "godwit-precopy", "godwit-precopy-return", "stock-cold"]);
        assert_eq!(data.sizes(), [1, 2]);
    }
}
