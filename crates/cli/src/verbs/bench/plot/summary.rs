//! The table: medians and ratios, in Markdown.

use std::fmt::Write as _;

use super::data::Data;
use crate::output;

/// All results as a page of Markdown.
pub(super) fn text(data: &Data) -> String {
    let mut page = String::from(
        "# Results\n\nWhat each figure means: docs/measuring.md. Times and bytes are medians.\n",
    );
    for memory in data.sizes() {
        let _ = write!(
            page,
            "\n## Redis with {}\n\n\
             | series | runs | downtime | ÷ floor | frozen | total | on the wire | ÷ memory | lost | p99 before → copying |\n\
             |---|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n",
            output::bytes(memory)
        );
        for group in data.groups.iter().filter(|group| group.memory == memory) {
            let time = |field| group.median(field).map(output::millis);
            let floor = data.floor(memory).filter(|_| group.series != "floor");
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
                (group.runs() > 0).then(|| group.sum("lost_ops").to_string()),
                time("p99_before_ms").and_then(|before| Some(format!("{before} → {}", time("p99_copy_ms")?))),
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
    if !data.parts.is_empty() {
        page.push_str("\n## Parts\n\n| what | figure | value |\n|---|---|---:|\n");
        for part in &data.parts {
            let Some(fields) = part.as_object() else { continue };
            let name = part["series"].as_str().unwrap_or_default();
            for (field, value) in fields.iter().filter(|(_, value)| value.is_number()) {
                let value = value.as_f64().unwrap_or_default();
                let value = if value.fract() == 0.0 { format!("{value}") } else { format!("{value:.3}") };
                let _ = writeln!(page, "| {name} | {field} | {value} |");
            }
        }
    }
    page
}

fn bytes(value: f64) -> String {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    output::bytes(value as u64)
}
