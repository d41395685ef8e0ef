//! `godwit lab experiment`: measurements of published work, done again with godwit.
//!
//! ```text
//!   park.rs         hcontainer-park         ─┐
//!   transform.rs    hcontainer-transform     │
//!   live.rs         hcontainer-live          │
//!   returns.rs      hcontainer-return        ├─▶ NAME.jsonl, NAME.svg with the paper's values beside, and what is judged
//!   latency.rs      hcontainer-latency       │
//!   payload.rs      hcontainer-payload       │
//!   follow.rs       hcontainer-follow        │
//!   compute.rs      hcontainer-compute       │
//!   kernels.rs      hcontainer-overhead      │
//!                   hcontainer-emulation     │
//!   persistence.rs  hcontainer-persistence  ─┘
//!
//!   throughput.rs   the closed loop of latency and payload
//!   journey.rs      a client on its way, of follow and compute
//!   stores.rs       services that write themselves to the disk
//!   picture.rs      a picture of ranges      curves.rs   a picture over time
//! ```
//!
//! H-Container: T. Xing, A. Barbalace, P. Olivier, M. L. Karaoui, W. Wang, B. Ravindran, "H-Container: Enabling
//! Heterogeneous-ISA Container Migration in Edge Computing", ACM Transactions on Computer Systems 39, 2022.

mod compute;
mod curves;
mod follow;
mod journey;
mod kernels;
mod latency;
mod live;
mod park;
mod payload;
mod persistence;
mod picture;
mod returns;
mod stores;
mod throughput;
mod transform;

use std::{
    fs::{self, File},
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context as _;
use clap::ValueEnum as _;
use godwit_cli::{
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output::{self, Table},
};
use serde_json::Value;

use crate::{stage::remove_lab, trial::blocking};

#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Args {
    /// Which one
    #[arg(value_enum)]
    experiment: Experiment,
    /// Take a tenth of the samples; of moves the least
    #[arg(long)]
    quick: bool,
    /// Name of the lab; one that an experiment left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "experiment")]
    name: String,
    /// The compiler that builds services
    #[arg(long, value_name = "PROGRAM", default_value = "godwit-cc")]
    compiler: PathBuf,
    /// Directory of the images of services, as `make base-image` builds them
    #[arg(long, value_name = "DIR", default_value = "target/base")]
    images: PathBuf,
    /// Directory for what was measured and its picture
    #[arg(long, value_name = "DIR", default_value = "target/experiments")]
    out: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Experiment {
    /// How long processes take to come to rest (H-Container, figure 13)
    #[value(name = "hcontainer-park")]
    Park,
    /// What crossing adds to a move, by processes, threads and connections (figures 14 and 15)
    #[value(name = "hcontainer-transform")]
    Transform,
    /// The downtime of a Redis in each mode, crossing and not (figures 26 and 27)
    #[value(name = "hcontainer-live")]
    Live,
    /// The bytes that cross when a Redis goes there and back ten times
    #[value(name = "hcontainer-return")]
    Return,
    /// What a Redis answers, by the latency of its client (figure 1)
    #[value(name = "hcontainer-latency")]
    Latency,
    /// What a Redis answers, by the size of the value (figures 17 to 19, right)
    #[value(name = "hcontainer-payload")]
    Payload,
    /// What a client is answered that goes to another node, by where the Redis is (figures 17 to 21, and 28)
    #[value(name = "hcontainer-follow")]
    Follow,
    /// The same of services that compute, by the size of what they are asked (figures 22 to 25)
    #[value(name = "hcontainer-compute")]
    Compute,
    /// What it costs kernels to be able to cross, beside clang's builds (figures 10 and 11)
    #[value(name = "hcontainer-overhead")]
    Overhead,
    /// The same kernels, emulated and crossing (figure 12)
    #[value(name = "hcontainer-emulation")]
    Emulation,
    /// How a Redis and an SQLite save and load by themselves, beside a checkpoint and a restore (figures 2 to 4)
    #[value(name = "hcontainer-persistence")]
    Persistence,
}

/// What is measured goes here, a line each.
struct Lines {
    file: File,
    shown: bool,
    rows: Vec<Value>,
}

impl Lines {
    fn add(&mut self, row: Value) -> io::Result<()> {
        self.file.write_all(format!("{row}\n").as_bytes())?;
        if self.shown {
            output::json(&row)?;
        }
        self.rows.push(row);
        Ok(())
    }
}

/// What an experiment is judged by.
struct Verdict {
    what: String,
    goal: String,
    found: String,
    holds: bool,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    let name =
        args.experiment.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
    fs::create_dir_all(&args.out).with_context(|| format!("{} cannot be made", args.out.display()))?;
    let path = args.out.join(format!("{name}.jsonl"));
    let file = File::create(&path).with_context(|| format!("{} cannot be written", path.display()))?;
    let mut lines = Lines { file, shown: global.json, rows: Vec::new() };
    let work = async {
        match args.experiment {
            Experiment::Park => park::measure(&args, &mut lines).await,
            Experiment::Transform => transform::measure(&args, &mut lines).await,
            Experiment::Live => live::measure(&args, &mut lines).await,
            Experiment::Return => returns::measure(&args, &mut lines).await,
            Experiment::Latency => latency::measure(&args, &mut lines).await,
            Experiment::Payload => payload::measure(&args, &mut lines).await,
            Experiment::Follow => follow::measure(&args, &mut lines).await,
            Experiment::Compute => compute::measure(&args, &mut lines).await,
            Experiment::Overhead => kernels::measure(&args, &mut lines, &kernels::OVERHEAD).await,
            Experiment::Emulation => kernels::measure(&args, &mut lines, &kernels::EMULATION).await,
            Experiment::Persistence => persistence::measure(&args, &mut lines).await,
        }
    };
    let outcome = tokio::select! {
        outcome = work => outcome.map(Some),
        () = interrupts.next() => Ok(None),
    };
    let lab = args.name.clone();
    let removed = blocking(move || remove_lab(&lab)).await;
    let outcome = outcome?;
    removed?;
    if outcome.is_none() {
        output::note("Error: ended by Ctrl-C before all was measured");
        return Ok(ExitCode::from(INTERRUPTED));
    }
    let drawn = args.out.join(format!("{name}.svg"));
    let verdicts = match args.experiment {
        Experiment::Park => park::tell(&lines.rows, &drawn),
        Experiment::Transform => transform::tell(&lines.rows, &drawn),
        Experiment::Live => live::tell(&lines.rows, &drawn),
        Experiment::Return => returns::tell(&lines.rows, &drawn),
        Experiment::Latency => latency::tell(&lines.rows, &drawn),
        Experiment::Payload => payload::tell(&lines.rows, &drawn),
        Experiment::Follow => follow::tell(&lines.rows, &drawn),
        Experiment::Compute => compute::tell(&lines.rows, &drawn),
        Experiment::Overhead => kernels::tell(&lines.rows, &drawn, &kernels::OVERHEAD),
        Experiment::Emulation => kernels::tell(&lines.rows, &drawn, &kernels::EMULATION),
        Experiment::Persistence => persistence::tell(&lines.rows, &drawn),
    }?;
    let holds = verdicts.iter().all(|verdict| verdict.holds);
    if !global.json {
        table(verdicts).print()?;
    }
    for written in [&path, &drawn] {
        output::note(&written.display().to_string());
    }
    Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(verdicts: Vec<Verdict>) -> Table {
    let mut table = Table::new(["WHAT", "GOAL", "FOUND", "HOLDS"]);
    for Verdict { what, goal, found, holds } in verdicts {
        table.row([what, goal, found, if holds { "yes" } else { "no" }.to_owned()]);
    }
    table
}

/// The values of a field in those rows that have these values in other fields, in order.
fn values(rows: &[Value], like: &[(&str, Value)], field: &str) -> Vec<f64> {
    let is_one = |row: &&Value| like.iter().all(|(field, value)| row[*field] == *value);
    let mut values: Vec<f64> = rows.iter().filter(is_one).filter_map(|row| row[field].as_f64()).collect();
    values.sort_by(f64::total_cmp);
    values
}

/// The value below which this part of ordered values is.
fn quantile(values: &[f64], part: f64) -> Option<f64> {
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss)]
    let at = (values.len() as f64 * part) as usize;
    values.get(at.min(values.len().checked_sub(1)?)).copied()
}

/// A new directory for what an experiment builds, which goes with it.
fn scratch() -> anyhow::Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("godwit-experiment").tempdir().context("making a directory for programs")
}

fn milliseconds(value: Option<f64>) -> String {
    value.map(output::millis).unwrap_or_else(|| "nothing".to_owned())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn values_are_of_the_rows_that_are_alike_and_in_order() {
        let rows = [
            json!({"threads": 1, "load": "idle", "ms": 3}),
            json!({"threads": 1, "load": "idle", "ms": 1.5}),
            json!({"threads": 2, "load": "idle", "ms": 7}),
            json!({"threads": 1, "load": "idle"}),
        ];
        let found = values(&rows, &[("threads", 1.into()), ("load", "idle".into())], "ms");
        assert_eq!(found, [1.5, 3.0]);
        assert_eq!(
            (quantile(&found, 0.0), quantile(&found, 0.99), quantile(&[], 0.5)),
            (Some(1.5), Some(3.0), None)
        );
        let hundred: Vec<f64> = (0..100).map(f64::from).collect();
        assert_eq!((quantile(&hundred, 0.5), quantile(&hundred, 0.99)), (Some(50.0), Some(99.0)));
    }
}
