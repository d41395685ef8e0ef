//! `hcontainer-live`: how long a Redis cannot be reached while it moves, in each mode, as it is and crossing.
//!
//! The paper compares the checkpoint of a Redis of 185, 350 and 638 MB, which takes 3 to 5 times as long as its live migration
//! (figures 26 and 27). Its live migration is pre-copy; it has no post-copy.

use std::path::Path;

use anyhow::ensure;
use godwit_api::v1::run_request::Source;
use godwit_cli::migration::{How, Mode};
use godwit_lab::Lab;
use serde_json::Value;

use super::{
    Args, Lines, Verdict,
    picture::{Paper, Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    picture::{BLUE, GREEN, GREY, PURPLE},
    redis,
    trial::{self, Clients, DESTINATION, SERVICE, SOURCE},
};

const RUNS: u32 = 5;
const SIZES: [u64; 3] = [185, 350, 638];
/// The writer's requests a second, sent at their times whether answers come or not.
const RATE: u32 = 1000;
const MODES: [(Mode, &str); 4] = [
    (Mode::Cold, "cold"),
    (Mode::Precopy, "precopy"),
    (Mode::Hybrid, "hybrid"),
    (Mode::Postcopy, "postcopy"),
];
/// What is judged: how many times longer cold is than precopy, and how many more bytes cross.
const GOAL_RATIO: f64 = 5.0;
const GOAL_BYTES: f64 = 0.01;
const PAPER: Paper = Paper { label: "the paper, live: below 1 s", from: 0.0, to: 1000.0 };

pub(super) async fn measure(args: &Args, lines: &mut Lines) -> anyhow::Result<()> {
    let runs = if args.quick { 1 } else { RUNS };
    let image = redis::image(&args.images)?;
    let daemon_arguments = ["--retained-memory", "0"].map(str::to_owned).to_vec();
    let bed = Bed { name: args.name.clone(), daemon_arguments, ..Bed::default() };
    for megabytes in SIZES {
        bed.lab(true, async |lab| of_size(lab, &image, megabytes, runs, lines).await).await?;
    }
    Ok(())
}

async fn of_size(
    lab: &Lab,
    image: &Source,
    megabytes: u64,
    runs: u32,
    lines: &mut Lines,
) -> anyhow::Result<()> {
    let connection = trial::connect(lab, SOURCE).await?;
    let at = redis::run(&connection, image, &redis::WITHOUT_SNAPSHOTS).await?;
    let quiet = trial::quiet(lab);
    let load = (megabytes * 1_000_000, RATE);
    let mut clients = Clients::start(lab, at, load, |_| Ok(())).await?;
    for run in 0..=runs {
        for (mode, name) in MODES {
            for (series, cross) in [("plain", false), ("crossing", true)] {
                for to in [DESTINATION, SOURCE] {
                    let mut request = How::default().request(mode, SERVICE, to);
                    request.cross = cross;
                    let report = trial::moves(&connection, request, &quiet).await?;
                    let seen;
                    (clients, seen) = clients.watch().await?;
                    ensure!(seen.is_clean(), "the client {}", seen.loss().unwrap_or_default());
                    let mut row = serde_json::to_value(&report)?;
                    row["experiment"] = "hcontainer-live".into();
                    row["megabytes"] = megabytes.into();
                    row["asked"] = name.into();
                    row["series"] = series.into();
                    row["run"] = run.into();
                    row["downtime_ms"] = seen.downtime_ms.into();
                    // The first moves bring its files.
                    if run > 0 {
                        lines.add(row)?;
                    }
                }
            }
        }
    }
    let seen = clients.finish(|_| Ok(())).await?;
    ensure!(seen.is_clean(), "the client {}", seen.loss().unwrap_or_default());
    Ok(())
}

fn like(megabytes: u64, mode: &str, series: &str) -> [(&'static str, Value); 3] {
    [("megabytes", megabytes.into()), ("asked", mode.into()), ("series", series.into())]
}

pub(super) fn tell(rows: &[Value], path: &Path) -> anyhow::Result<Vec<Verdict>> {
    let (mut drawn, mut verdicts) = (Vec::new(), Vec::new());
    for megabytes in SIZES {
        let of = |mode: &str, series: &str, field: &str| values(rows, &like(megabytes, mode, series), field);
        let median = |mode: &str, series: &str, field: &str| quantile(&of(mode, series, field), 0.5);
        for ((_, mode), colour) in MODES.into_iter().zip([GREY, BLUE, PURPLE, GREEN]) {
            for series in ["plain", "crossing"] {
                let label = format!("{megabytes} MB, {mode}, {series}");
                drawn.extend(Row::of(label, colour, &of(mode, series, "downtime_ms")));
            }
            let bytes = median(mode, "crossing", "wire_bytes").zip(median(mode, "plain", "wire_bytes"));
            let more = bytes.map(|(with, without)| with / without - 1.0);
            verdicts.push(Verdict {
                what: format!("{megabytes} MB, {mode}: bytes that crossing adds"),
                goal: format!("at most {:.0} %", GOAL_BYTES * 100.0),
                found: more.map(|more| format!("{:+.2} %", more * 100.0)).unwrap_or_default(),
                holds: more.is_some_and(|more| more <= GOAL_BYTES),
            });
        }
        let times =
            median("cold", "crossing", "downtime_ms").zip(median("precopy", "crossing", "downtime_ms"));
        let ratio = times.map(|(cold, live)| cold / live);
        verdicts.push(Verdict {
            what: format!("{megabytes} MB, crossing: downtime of cold by that of precopy"),
            goal: format!("at least {GOAL_RATIO}"),
            found: ratio.map(|ratio| format!("{ratio:.1}")).unwrap_or_default(),
            holds: ratio.is_some_and(|ratio| ratio >= GOAL_RATIO),
        });
    }
    let picture = Picture {
        title: "Downtime of a Redis as its client sees it: shortest, median, longest",
        unit: "ms",
        rows: drawn,
        paper: Some(PAPER),
        goal: None,
    };
    picture.draw(path)?;
    Ok(verdicts)
}
