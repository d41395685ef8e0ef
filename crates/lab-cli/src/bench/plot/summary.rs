//! The table: medians and ratios, in Markdown.

use std::fmt::Write as _;

use godwit_cli::output;
use serde_json::Value;

use super::{
    data::{Data, median},
    goals,
};

/// All results as a page of Markdown.
pub(super) fn text(data: &Data) -> String {
    let mut page = String::from(
        "# Results\n\nWhat each figure means: docs/measuring.md. Times and bytes are medians.\n",
    );
    goals::write(data, &mut page);
    for memory in data.sizes() {
        let _ = write!(
            page,
            "\n## Redis with {}\n\n\
             | series | runs | downtime | ÷ floor | frozen | total | on the wire | ÷ memory | of it memory | ÷ pages | lost | p99 before → copying | answered a second | copying ÷ before (iperf3 ÷ before) |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
            output::bytes(memory)
        );
        for group in data.groups.iter().filter(|group| group.memory == memory) {
            let time = |field| group.median(field).map(output::millis);
            let floor = data.floor("floor", memory).filter(|_| group.series != "floor");
            let cells = [
                Some(group.series.clone()),
                Some(match group.failures.len() {
                    0 => group.runs().to_string(),
                    failed => format!("{} ({failed} failed)", group.runs()),
                }),
                time("downtime_ms"),
                floor.and_then(|floor| Some(format!("{:.2}", group.median("downtime_ms")? / floor))),
                time("frozen_ms"),
                time("total_ms"),
                group.median("wire_bytes").map(bytes),
                group.bytes_ratio(data).map(|ratio| format!("{ratio:.3}")),
                group.median("memory_wire_bytes").map(bytes),
                group.page_ratio().map(|ratio| format!("{ratio:.3}")),
                (group.runs() > 0).then(|| group.sum("lost_ops").to_string()),
                time("p99_before_ms").and_then(|before| Some(format!("{before} → {}", time("p99_copy_ms")?))),
                group.median("answered_before_s").and_then(|before| {
                    Some(format!("{before:.0} → {:.0}", group.median("answered_copy_s")?))
                }),
                group.median("throughput_ratio").map(|ratio| match group.median("throughput_ratio_iperf") {
                    Some(iperf) => format!("{ratio:.2} ({iperf:.2})"),
                    None => format!("{ratio:.2}"),
                }),
            ];
            let cells: Vec<_> = cells.into_iter().map(Option::unwrap_or_default).collect();
            let _ = writeln!(page, "| {} |", cells.join(" | "));
        }
        for group in data.groups.iter().filter(|group| group.memory == memory) {
            let mut failures = group.failures.clone();
            failures.sort();
            failures.dedup();
            for reason in failures {
                let _ = write!(page, "\n{} failed: {reason}\n", group.series);
            }
        }
    }
    cutovers(data, &mut page);
    parts(data, &mut page);
    page
}

/// Pauses with frames held, and dropped.
fn cutovers(data: &Data, page: &mut String) {
    if data.cutovers.is_empty() {
        return;
    }
    page.push_str(
        "\n## Cut-over\n\nTimes are medians, counts those of the run that had most: the client's, and the service's since the resume.\n\n\
         | load | frames | runs | downtime | frozen | cut-over | round trip | a new connection | the service's own | a datagram | time-outs | probes | retransmissions | by the service | lost |\n\
         |---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    for cutover in &data.cutovers {
        let time = |field| cutover.median(field).map(output::millis).unwrap_or_default();
        let tried = |field| cutover.median(field).map_or_else(|| "no answer".to_owned(), output::millis);
        let count = |field| cutover.most(field).map(|most| most.to_string()).unwrap_or_default();
        let runs = match cutover.failures.len() {
            0 => cutover.runs().to_string(),
            failed => format!("{} ({failed} failed)", cutover.runs()),
        };
        let cells = [
            cutover.name(),
            if cutover.frames == "hold" { "held" } else { "dropped" }.to_owned(),
            runs,
            time("downtime_ms"),
            time("frozen_ms"),
            time("cutover_ms"),
            time("usual_ms"),
            tried("new_ms"),
            tried("outgoing_ms"),
            tried("datagram_ms"),
            count("timeouts"),
            count("loss_probes"),
            count("retransmissions"),
            count("service_retransmissions"),
            cutover.sum("lost_ops").to_string(),
        ];
        let _ = writeln!(page, "| {} |", cells.join(" | "));
    }
    for cutover in &data.cutovers {
        let mut failures: Vec<_> = cutover.failures.iter().collect();
        failures.sort();
        failures.dedup();
        for reason in failures {
            let _ = write!(page, "\n{}, frames {}: {reason}\n", cutover.name(), cutover.frames);
        }
    }
}

/// The figures of each benchmark of a part: field, name, unit.
const FIGURES: [(&str, &str, &str); 17] = [
    ("iperf_mb_s", "iperf3", "MB/s"),
    ("pages_mb_s", "pages", "MB/s"),
    ("share_of_iperf", "pages ÷ iperf3", ""),
    ("cpu_ns_per_byte", "CPU time of both ends for a byte", "ns"),
    ("round_trip_ms", "round trip", "ms"),
    ("stream_mb_s", "one stream, given back", "MB/s"),
    ("fault_p50_ms", "a fault, median", "ms"),
    ("fault_p99_ms", "a fault, 99 of 100", "ms"),
    ("fault_max_ms", "a fault, the longest", "ms"),
    ("faults_timed", "faults", ""),
    ("populated_pages", "pages scanned", ""),
    ("written_pages", "pages found written", ""),
    ("first_wire_bytes", "first move", "bytes"),
    ("return_wire_bytes", "return", "bytes"),
    ("share_of_first", "return ÷ first move", ""),
    ("cpu_ms", "CPU time of a scan", "ms"),
    ("wall_ms", "time of a scan", "ms"),
];

fn parts(data: &Data, page: &mut String) {
    let mut names: Vec<_> = data.parts.iter().map(part_name).collect();
    names.sort();
    names.dedup();
    if !names.is_empty() {
        page.push_str("\n## Parts\n\n| benchmark | runs | figure | median |\n|---|---:|---|---:|\n");
    }
    for name in names {
        let rows: Vec<_> = data.parts.iter().filter(|part| part_name(part) == name).collect();
        for (field, figure, unit) in FIGURES {
            let Some(value) = median(rows.iter().filter_map(|row| row[field].as_f64()).collect()) else {
                continue;
            };
            let places = if value.fract() == 0.0 { 0 } else { 3 };
            let _ = writeln!(page, "| {name} | {} | {figure} | {value:.places$} {unit} |", rows.len());
        }
    }
}

/// What was measured, with what.
fn part_name(part: &Value) -> String {
    let memory = part["memory"].as_u64().map(output::bytes);
    let words = [part["series"].as_str(), memory.as_deref(), part["link"].as_str()];
    words.into_iter().flatten().collect::<Vec<_>>().join(", ")
}

fn bytes(value: f64) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    output::bytes(value as u64)
}
