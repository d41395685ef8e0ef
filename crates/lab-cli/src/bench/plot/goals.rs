//! What godwit sets itself, beside what was measured: what holds, by how much the rest is missed, and
//! where the time goes.

use std::fmt::Write as _;

use godwit_cli::output;
use serde_json::Value;

use super::data::{Cutover, Data, Group, median};

/// Downtime ÷ floor in precopy and hybrid, with so much data at most.
const DOWNTIME: [(u64, f64); 3] = [(256 << 20, 0.4), (1 << 30, 0.45), (u64::MAX, 0.6)];
/// The same in postcopy.
const POSTCOPY: f64 = 1.2;
/// Downtime ÷ bare floor, with so much data at most.
const BARE: (u64, f64) = (256 << 20, 3.0);
/// The longest frozen time of so many moves ÷ their median.
const WORST: (usize, f64) = (20, 1.5);
/// What memory may take on the wire, for each byte of the pages that had to cross.
const PAGES: f64 = 1.02;
/// What a CRIU without patches may cost more, milliseconds for each GiB of the service's memory.
const STOCK_CRIU: f64 = 200.0;

/// What a client may wait beyond the frozen time and a round trip when frames are held, milliseconds.
const HELD: f64 = 2.0;
/// Frozen time with so many connections ÷ that with one.
const CONNECTIONS: [(u64, f64); 2] = [(1000, 1.3), (10_000, 3.0)];

/// What stands before a page that is waited for: in round trips, the pages that follow the one before it, and the queue
/// that the push may have; and milliseconds (docs/measuring.md).
const AHEAD: (f64, f64) = (0.75, 0.3);

const GIB: f64 = (1u64 << 30) as f64;

/// One goal and its figure.
struct Goal {
    what: String,
    figure: f64,
    limit: Limit,
    unit: &'static str,
}

#[derive(Clone, Copy)]
enum Limit {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    fn at_most(what: String, figure: f64, limit: f64, unit: &'static str) -> Self {
        Self { what, figure, limit: Limit::AtMost(limit), unit }
    }

    fn at_least(what: String, figure: f64, limit: f64, unit: &'static str) -> Self {
        Self { what, figure, limit: Limit::AtLeast(limit), unit }
    }

    fn holds(&self) -> bool {
        match self.limit {
            Limit::AtMost(most) => self.figure <= most,
            Limit::AtLeast(least) => self.figure >= least,
        }
    }

    fn line(&self) -> String {
        let Self { what, figure, limit, unit } = self;
        let (word, limit) = match *limit {
            Limit::AtMost(most) => ("at most", most),
            Limit::AtLeast(least) => ("at least", least),
        };
        let verdict = match self.holds() {
            true => "yes".to_owned(),
            false if limit == 0.0 => "missed".to_owned(),
            false => format!("missed by {:.1} %", (figure / limit - 1.0).abs() * 100.0),
        };
        format!("| {what} | {word} {}{unit} | {}{unit} | {verdict} |\n", number(limit), number(*figure))
    }
}

/// With as many places as tell something.
fn number(value: f64) -> String {
    match value {
        0.0 => "0".to_owned(),
        value if value.abs() >= 100.0 => format!("{value:.0}"),
        value if value.abs() >= 10.0 => format!("{value:.1}"),
        value if value.abs() >= 0.1 => format!("{value:.3}"),
        value => format!("{value:.4}"),
    }
}

/// The table of goals, and where the time goes; nothing where nothing was measured that has a goal.
pub(super) fn write(data: &Data, page: &mut String) {
    let mut goals: Vec<Goal> = data.groups.iter().flat_map(|group| of_moves(data, group)).collect();
    goals.extend(data.cutovers.iter().flat_map(of_cutover));
    goals.extend(of_connections(data));
    goals.extend(of_parts(data));
    if goals.is_empty() {
        return;
    }
    page.push_str("\n## Goals\n\n| what | goal | measured | holds |\n|---|---:|---:|---|\n");
    for goal in goals {
        page.push_str(&goal.line());
    }
    times(data, page);
}

/// Most downtime ÷ floor of moves in which memory crosses while the service runs.
fn most_downtime(series: &str, memory: u64) -> Option<f64> {
    match series {
        "godwit-precopy" | "godwit-hybrid" => {
            DOWNTIME.iter().find(|(most, _)| memory <= *most).map(|(_, limit)| *limit)
        }
        "godwit-postcopy" => Some(POSTCOPY),
        _ => None,
    }
}

fn of_moves(data: &Data, group: &Group) -> Vec<Goal> {
    let mut goals = Vec::new();
    let size = output::bytes(group.memory);
    let what = |what: &str| format!("{}, {size}: {what}", group.series);
    let ours = group.series.starts_with("godwit");
    let downtime = group.median("downtime_ms");
    let live = |series: &str| most_downtime(series, group.memory);
    let floor = data.floor("floor", group.memory);
    if let (Some(limit), Some(downtime), Some(floor)) = (live(&group.series), downtime, floor) {
        goals.push(Goal::at_most(what("downtime ÷ floor"), downtime / floor, limit, ""));
    }
    let bare = data.floor("bare", group.memory).filter(|_| group.memory <= BARE.0);
    if let (Some(_), Some(downtime), Some(bare)) = (live(&group.series), downtime, bare) {
        goals.push(Goal::at_most(what("downtime ÷ bare"), downtime / bare, BARE.1, ""));
    }
    if let Some(worst) = group.worst("frozen_ms").filter(|_| ours && group.runs() >= WORST.0) {
        goals.push(Goal::at_most(what("longest frozen time ÷ median"), worst, WORST.1, ""));
    }
    let patched = group.series.strip_suffix("-stock-criu");
    // A cold move's dump has all of the memory in it, with patches or without.
    let patched = patched.filter(|name| live(name).is_some());
    let patched = patched.and_then(|name| data.group(name, group.memory));
    if let (Some(patched), Some(downtime)) =
        (patched.and_then(|patched| patched.median("downtime_ms")), downtime)
    {
        let memory = data.resident(group.memory).unwrap_or(group.memory as f64);
        let most = STOCK_CRIU * memory / GIB;
        goals.push(Goal::at_most(
            what("downtime more than with the patches"),
            downtime - patched,
            most,
            " ms",
        ));
    }
    let stock = data.group("stock-cold", group.memory).and_then(|stock| stock.median("downtime_ms"));
    if let (Some(stock), Some(downtime)) = (stock.filter(|_| group.series == "godwit-cold"), downtime) {
        goals.push(Goal::at_most(what("downtime ÷ stock-cold's"), downtime / stock, 1.0, ""));
    }
    if let Some(ratio) = group.page_ratio().filter(|_| ours && !group.series.ends_with("-return")) {
        goals.push(Goal::at_most(what("memory on the wire ÷ pages"), ratio, PAGES, ""));
    }
    if let Some(ratio) = group.median("throughput_ratio") {
        goals.push(Goal::at_least(what("answers a second while copying ÷ before"), ratio, 0.95, ""));
        if let Some(iperf) = group.median("throughput_ratio_iperf") {
            let beside = what("the same ÷ beside iperf3 on this link");
            goals.push(Goal::at_least(beside, ratio / iperf, 0.95, ""));
        }
    }
    goals
}

/// Only held frames have goals: what dropping them costs is there to compare with.
fn of_cutover(cutover: &Cutover) -> Vec<Goal> {
    let mut goals = Vec::new();
    let what = |what: &str| format!("cut-over, {}: {what}", cutover.name());
    let figures = ["downtime_ms", "frozen_ms", "usual_ms"].map(|field| cutover.median(field));
    if let ("hold", [Some(downtime), Some(frozen), Some(usual)]) = (cutover.frames.as_str(), figures) {
        // Where a run tells it, without the wait of a client that heard nothing even before the freeze.
        let beyond = cutover.median("beyond_ms").unwrap_or(downtime - frozen);
        let words = what("downtime beyond the frozen time, beside 2 ms + a round trip");
        goals.push(Goal::at_most(words, beyond, HELD + usual, " ms"));
        // The worst run, as one is too many. A pause that is made longer than TCP waits is no fault of the cut-over's.
        let timeouts = (cutover.pause_ms == 0).then_some(("timeouts", "time-outs"));
        for (field, words) in timeouts.into_iter().chain([("lost_ops", "answers lost")]) {
            if let Some(most) = cutover.most(field) {
                goals.push(Goal::at_most(what(words), most as f64, 0.0, ""));
            }
        }
    }
    goals
}

fn of_connections(data: &Data) -> Vec<Goal> {
    let held = || data.cutovers.iter().filter(|cutover| cutover.frames == "hold" && cutover.pause_ms == 0);
    let Some(one) =
        held().find(|cutover| cutover.load == "busy").and_then(|cutover| cutover.median("frozen_ms"))
    else {
        return Vec::new();
    };
    let goal = |cutover: &Cutover| {
        let (_, limit) = CONNECTIONS.into_iter().find(|(count, _)| *count == cutover.connections)?;
        let what = format!("cut-over, {}: frozen time ÷ one connection's", cutover.name());
        Some(Goal::at_most(what, cutover.median("frozen_ms")? / one, limit, ""))
    };
    held().filter_map(goal).collect()
}

fn of_parts(data: &Data) -> Vec<Goal> {
    let of = |series: &str, field: &str, over: Option<bool>| {
        let veth = |row: &&Value| over.is_none_or(|veth| (row["link"] == "veth") == veth);
        let rows = data.parts.iter().filter(|row| row["series"] == series).filter(veth);
        median(rows.filter_map(|row| row[field].as_f64()).collect())
    };
    let mut goals = Vec::new();
    for mode in ["precopy", "postcopy"] {
        if let Some(share) = of(&format!("wire-{mode}"), "share_of_iperf", Some(false)) {
            goals.push(Goal::at_least(format!("wire-{mode}: pages ÷ iperf3"), share, 0.9, ""));
        }
    }
    if let Some(rate) = of("streams-plain", "pages_mb_s", None) {
        goals.push(Goal::at_least(
            "streams-plain: pages over a veth, without TLS".into(),
            rate,
            1500.0,
            " MB/s",
        ));
    }
    if let Some(share) = of("faults", "share_of_iperf", Some(false)) {
        goals.push(Goal::at_least("faults: the push beside them ÷ iperf3".into(), share, 0.8, ""));
    }
    let round_trip = of("faults", "round_trip_ms", Some(false));
    if let (Some(p99), Some(round_trip)) = (of("faults", "fault_p99_ms", Some(false)), round_trip) {
        goals.push(Goal::at_most("faults: 99 of 100".into(), p99, 2.0 * round_trip, " ms"));
    }
    if let (Some(longest), Some(round_trip)) = (of("faults", "fault_max_ms", Some(false)), round_trip) {
        let bound = 2.0 * (round_trip + AHEAD.0 * round_trip + AHEAD.1);
        goals.push(Goal::at_most("faults: the longest".into(), longest, bound, " ms"));
    }
    if let Some(cpu) = of("scan", "cpu_ms", None) {
        goals.push(Goal::at_most("scan: CPU time of a scan".into(), cpu, 20.0, " ms"));
    }
    for mode in ["precopy", "postcopy"] {
        if let Some(share) = of(&format!("return-{mode}"), "share_of_first", None) {
            goals.push(Goal::at_most(format!("return-{mode}: bytes ÷ the first move's"), share, 0.03, ""));
        }
    }
    goals
}

/// The frozen time by phase, and what a client waited beyond it.
fn times(data: &Data, page: &mut String) {
    let groups: Vec<_> = data.groups.iter().map(|group| (group, group.phases())).collect();
    let groups: Vec<_> = groups.into_iter().filter(|(_, phases)| !phases.is_empty()).collect();
    let mut names: Vec<&str> = Vec::new();
    for (name, _) in groups.iter().flat_map(|(_, phases)| phases) {
        if !names.contains(&name.as_str()) {
            names.push(name);
        }
    }
    if names.is_empty() {
        return;
    }
    page.push_str("\n## Where the time goes\n\nThe frozen time by phase, and what a client waited beyond it; milliseconds.\n\n");
    let _ = writeln!(page, "| series | data | {} | frozen | beyond |", names.join(" | "));
    let _ = writeln!(page, "|---|---:|{}---:|---:|", "---:|".repeat(names.len()));
    for (group, phases) in &groups {
        let ms = |ms: Option<f64>| ms.map(|ms| format!("{ms:.1}")).unwrap_or_default();
        let of = |name: &&str| ms(phases.iter().find(|(known, _)| known == name).map(|(_, ms)| *ms));
        let frozen = group.median("frozen_ms");
        let beyond = group.median("downtime_ms").and_then(|downtime| Some(downtime - frozen?));
        let cells: Vec<_> = names.iter().map(of).collect();
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} | {} |",
            group.series,
            output::bytes(group.memory),
            cells.join(" | "),
            ms(frozen),
            ms(beyond)
        );
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use serde_json::json;

    use super::*;

    fn page(rows: Vec<Value>) -> String {
        let mut page = String::new();
        write(&Data::new(rows), &mut page);
        page
    }

    #[test]
    fn what_holds_is_said_and_by_how_much_the_rest_is_missed() {
        let gib = 1u64 << 30;
        let row = |series: &str, downtime: f64| {
            json!({"series": series, "memory": gib, "outcome": "moved", "downtime_ms": downtime,
                "frozen_ms": downtime - 10.0, "phases": [{"phase": "freeze", "ms": 1.5}]})
        };
        let part = |series: &str, field: &str, value: f64| json!({"bench": "part", "series": series, "link": "1gbit,1ms", field: value, "round_trip_ms": 2.0});
        let page = page(vec![
            row("floor", 100.0),
            row("bare", 20.0),
            row("godwit-precopy", 36.0),
            row("godwit-hybrid", 90.0),
            row("godwit-precopy-stock-criu", 246.0),
            row("godwit-cold", 450.0),
            row("stock-cold", 900.0),
            part("wire-precopy", "share_of_iperf", 0.95),
            part("faults", "fault_p99_ms", 4.4),
            part("faults", "fault_max_ms", 7.0),
            part("scan", "cpu_ms", 6.4),
            part("return-postcopy", "share_of_first", 0.016),
        ]);
        for line in [
            "| godwit-precopy, 1.0 GiB: downtime ÷ floor | at most 0.450 | 0.360 | yes |",
            "| godwit-hybrid, 1.0 GiB: downtime ÷ floor | at most 0.450 | 0.900 | missed by 100.0 % |",
            "| godwit-precopy-stock-criu, 1.0 GiB: downtime more than with the patches | at most 200 ms | 210 ms | missed by 5.0 % |",
            "| godwit-cold, 1.0 GiB: downtime ÷ stock-cold's | at most 1.000 | 0.500 | yes |",
            "| wire-precopy: pages ÷ iperf3 | at least 0.900 | 0.950 | yes |",
            "| faults: 99 of 100 | at most 4.000 ms | 4.400 ms | missed by 10.0 % |",
            "| faults: the longest | at most 7.600 ms | 7.000 ms | yes |",
            "| scan: CPU time of a scan | at most 20.0 ms | 6.400 ms | yes |",
            "| return-postcopy: bytes ÷ the first move's | at most 0.0300 | 0.0160 | yes |",
            "| godwit-hybrid | 1.0 GiB | 1.5 | 80.0 | 10.0 |",
        ] {
            assert!(page.lines().any(|there| there == line), "no {line:?} in\n{page}");
        }
    }

    #[test]
    fn small_services_are_judged_by_the_bare_floor_and_many_moves_by_the_longest() {
        let row = |series: &str, run: u32, ms: f64| {
            json!({"series": series, "memory": 256 << 20, "run": run, "outcome": "moved", "downtime_ms": ms,
                "frozen_ms": ms})
        };
        let moves = (1..=20).map(|run| row("godwit-precopy", run, if run == 7 { 90.0 } else { 50.0 }));
        let page = page(moves.chain([row("bare", 1, 20.0)]).collect());
        for line in [
            "| godwit-precopy, 256.0 MiB: downtime ÷ bare | at most 3.000 | 2.500 | yes |",
            "| godwit-precopy, 256.0 MiB: longest frozen time ÷ median | at most 1.500 | 1.800 | missed by 20.0 % |",
        ] {
            assert!(page.lines().any(|there| there == line), "no {line:?} in\n{page}");
        }
        assert!(!page.contains("÷ floor |"), "{page}");
    }

    #[test]
    fn held_frames_are_judged_by_the_frozen_time_and_a_round_trip() {
        let row = |cutover: &str, downtime: f64, timeouts: u64| {
            json!({"bench": "cutover", "series": "busy", "connections": 1, "cutover": cutover, "lost_ops": 0,
                "outcome": "moved", "downtime_ms": downtime, "frozen_ms": 40.0, "usual_ms": 2.5,
                "timeouts": timeouts})
        };
        let page = page(vec![
            row("hold", 42.0, 0),
            row("hold", 43.0, 1),
            row("hold", 44.0, 0),
            row("drop", 250.0, 3),
            json!({"bench": "cutover", "series": "many", "connections": 1000, "cutover": "hold", "outcome": "moved",
                "frozen_ms": 80.0}),
            // The client had waited before the freeze; and time-outs are due in such a pause.
            json!({"bench": "cutover", "series": "doubt", "connections": 1, "cutover": "hold", "outcome": "moved",
                "pause_ms": 100, "downtime_ms": 160.0, "frozen_ms": 140.0, "beyond_ms": 1.5, "usual_ms": 4.3,
                "timeouts": 9}),
        ]);
        for line in [
            "| cut-over, one busy connection: downtime beyond the frozen time, beside 2 ms + a round trip | at most 4.500 ms | 3.000 ms | yes |",
            "| cut-over, one connection in doubt, held 100.0 ms: downtime beyond the frozen time, beside 2 ms + a round trip | at most 6.300 ms | 1.500 ms | yes |",
            "| cut-over, one busy connection: time-outs | at most 0 | 1.000 | missed |",
            "| cut-over, one busy connection: answers lost | at most 0 | 0 | yes |",
            "| cut-over, 1000 connections: frozen time ÷ one connection's | at most 1.300 | 2.000 | missed by 53.8 % |",
        ] {
            assert!(page.lines().any(|there| there == line), "no {line:?} in\n{page}");
        }
        assert!(!page.contains("250") && !page.contains("in doubt, held 100.0 ms: time-outs"), "{page}");
    }

    #[test]
    fn what_was_not_measured_is_not_judged() {
        assert_eq!(page(vec![json!({"series": "stock-cold", "memory": 1, "outcome": "moved"})]), "");
    }
}
