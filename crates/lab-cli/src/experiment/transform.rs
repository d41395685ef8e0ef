//! `hcontainer-transform`: what it adds to a move that the service goes on under other executables, by its processes, threads
//! and connections.
//!
//! The paper adds 10 to 100 ms (figures 14 and 15, and section 7). Both nodes here have one instruction set: the work is that
//! of a crossing, and the time is that of real processors.

use std::path::Path;

use godwit_cli::migration::Mode;
use serde_json::Value;

use super::{
    Args, Lines, Verdict, milliseconds,
    picture::{Paper, Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    picture::{BLUE, ORANGE},
    sums::{self, Shape},
};

const RUNS: u32 = 10;
/// What is judged: the time at rest and for rewriting, and what the frozen time is longer.
const GOAL_MS: f64 = 10.0;
const PAPER: Paper = Paper { label: "the paper: crossing adds 10 to 100 ms", from: 10.0, to: 100.0 };

/// One of them grows at a time.
fn shapes() -> Vec<Shape> {
    let one = Shape::default();
    let processes = [8, 64].map(|processes| Shape { processes, ..one });
    let threads = [8, 64].map(|threads| Shape { threads, ..one });
    let connections = [100, 1000, 10_000].map(|connections| Shape { connections, ..one });
    [vec![one], processes.to_vec(), threads.to_vec(), connections.to_vec()].concat()
}

/// What it has more of than the smallest.
fn label(shape: Shape) -> String {
    let one = Shape::default();
    match shape {
        Shape { processes, .. } if processes != one.processes => format!("{processes} processes"),
        Shape { threads, .. } if threads != one.threads => format!("{threads} threads"),
        Shape { connections, .. } if connections != one.connections => {
            format!("{connections} connections more")
        }
        _ => "one process, thread and connection".to_owned(),
    }
}

fn like(shape: Shape, series: &str) -> [(&'static str, Value); 4] {
    [
        ("processes", shape.processes.into()),
        ("threads", shape.threads.into()),
        ("connections", shape.connections.into()),
        ("series", series.into()),
    ]
}

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let runs = if args.quick { 1 } else { RUNS };
    // Else pages that a node has kept from the move before would not cross at all.
    let daemon_arguments = ["--retained-memory", "0"].map(str::to_owned).to_vec();
    let bed = Bed { name: args.name.clone(), daemon_arguments, ..Bed::default() };
    for shape in shapes() {
        let mut add = |mut row: Value| {
            row["experiment"] = "hcontainer-transform".into();
            // What rest and rewriting take together.
            let part = |field: &str| row[field].as_f64().unwrap_or_default();
            row["transform_ms"] = (part("park_ms") + part("rewrite_ms")).into();
            lines.add(row)
        };
        bed.lab(true, async |lab| {
            sums::there_and_back(lab, &args.compiler, shape, Mode::Precopy, runs, &mut add).await
        })
        .await?;
    }
    Ok(())
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let (mut drawn, mut verdicts) = (Vec::new(), Vec::new());
    for shape in shapes() {
        let label = label(shape);
        let frozen = |series: &str| values(rows, &like(shape, series), "frozen_ms");
        for (series, colour) in [("plain", BLUE), ("crossing", ORANGE)] {
            drawn.extend(Row::of(format!("{label}, {series}"), colour, &frozen(series)));
        }
        let median = |found: Vec<f64>| quantile(&found, 0.5);
        let added =
            median(frozen("crossing")).zip(median(frozen("plain"))).map(|(with, without)| with - without);
        let transform = median(values(rows, &like(shape, "crossing"), "transform_ms"));
        for (what, found) in [("longer frozen", added), ("rest and rewriting", transform)] {
            verdicts.push(Verdict {
                what: format!("{label}: {what}"),
                goal: format!("below {GOAL_MS} ms"),
                found: milliseconds(found),
                holds: found.is_some_and(|found| found < GOAL_MS),
            });
        }
    }
    let picture = Picture {
        title: "Frozen time of a move, as it is and crossing: shortest, median, longest",
        unit: "ms",
        rows: drawn,
        paper: Some(PAPER),
        goal: None,
    };
    picture.draw(path)?;
    Ok(verdicts)
}
