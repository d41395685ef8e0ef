//! How much a Redis answers in a closed loop, by what lies between it and its client, and by the size of the value: what
//! `hcontainer-latency` and `hcontainer-payload` measure.

use std::{
    net::SocketAddrV4,
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::ensure;
use godwit_lab::{
    Lab,
    conditions::{Conditions, Step},
    config::CLIENT,
    workload::Repeated,
};
use plotters::style::RGBColor;
use serde_json::{Value, json};

use super::{
    Args, Lines,
    picture::{Paper, Picture, Row},
    quantile, values,
};
use crate::{
    bench::Bed,
    redis,
    trial::{self, SOURCE, blocking},
};

/// As many as redis-benchmark makes; over each one request is under way.
pub(super) const CONNECTIONS: u32 = 50;
pub(super) const UNIT: &str = "req/s";
const RUNS: u32 = 10;
/// Until all requests that were out under other conditions are answered.
const WARM_UP: Duration = Duration::from_millis(500);
/// How long answers are counted.
const WINDOW: Duration = Duration::from_secs(2);

/// What a sample is taken under.
#[derive(Clone, Copy, Debug)]
pub(super) struct Setting {
    /// What the link adds to the round trip.
    pub(super) added_ms: u32,
    pub(super) value_bytes: usize,
}

/// Takes samples under all settings, in turns, so that what else the machine does falls on all.
pub(super) async fn measure(
    args: &Args,
    lines: &mut Lines,
    experiment: &str,
    settings: &[Setting],
) -> anyhow::Result<()> {
    let runs = if args.quick { 1 } else { RUNS };
    let image = redis::image(&args.images)?;
    let bed = Bed { name: args.name.clone(), ..Bed::default() };
    bed.lab(true, async |lab| {
        let node = trial::connect(lab, SOURCE).await?;
        let at = redis::run(&node, &image, &redis::WITHOUT_SNAPSHOTS).await?;
        for run in 1..=runs {
            for setting in settings {
                let Setting { added_ms, value_bytes } = *setting;
                lines.add(json!({
                    "experiment": experiment, "run": run, "connections": CONNECTIONS, "added_ms": added_ms,
                    "value_bytes": value_bytes, "requests_s": rate(lab, at, *setting).await?,
                }))?;
            }
        }
        Ok(())
    })
    .await
}

/// Requests a second that are answered.
async fn rate(lab: &Lab, redis: SocketAddrV4, setting: Setting) -> anyhow::Result<f64> {
    let lab = lab.clone();
    blocking(move || {
        let gets = Repeated::gets(&lab, CLIENT, redis, CONNECTIONS, setting.value_bytes)?;
        // Half of it in each direction.
        let delay = Duration::from_millis(setting.added_ms.into()) / 2;
        let conditions = Conditions { delay, ..Conditions::default() };
        lab.set_way(SOURCE, CLIENT, &[Step { at: Duration::ZERO, conditions }])?;
        thread::sleep(WARM_UP);
        let (begun, before) = (Instant::now(), gets.answered());
        thread::sleep(WINDOW);
        let rate = (gets.answered() - before) as f64 / begun.elapsed().as_secs_f64();
        let report = gets.stop()?;
        ensure!(report.is_clean(), "the client of the Redis at {redis} saw what must not be: {report:?}");
        Ok(rate)
    })
    .await
}

/// The median of the samples under a setting.
pub(super) fn median(rows: &[Value], setting: Setting) -> Option<f64> {
    quantile(&samples(rows, setting), 0.5)
}

fn samples(rows: &[Value], Setting { added_ms, value_bytes }: Setting) -> Vec<f64> {
    let like = [("added_ms", added_ms.into()), ("value_bytes", value_bytes.into())];
    values(rows, &like, "requests_s")
}

/// Draws a row for each setting.
pub(super) fn draw(
    path: &Path,
    title: &str,
    rows: &[Value],
    settings: impl IntoIterator<Item = (String, RGBColor, Setting)>,
    paper: Option<Paper>,
) -> anyhow::Result<()> {
    let drawn = settings
        .into_iter()
        .filter_map(|(label, colour, setting)| Row::of(label, colour, &samples(rows, setting)));
    Picture { title, unit: UNIT, rows: drawn.collect(), paper, goal: None }.draw(path)
}
