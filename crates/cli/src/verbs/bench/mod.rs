//! `godwit bench`: measure a migration, beside the same job done with stock programs.

mod stock;

use std::process::ExitCode;

use anyhow::Context as _;
use clap::{Subcommand, ValueEnum};
use godwit_lab::{Lab, LabConfig, Link, workload::LoadReport};
use serde_json::Value;

use crate::{
    cli::Global,
    output::{self, Table},
    values,
    verbs::{
        migrate::{How, INTERRUPTED, Interrupts},
        trial::{self, DESTINATION, SOURCE, blocking},
    },
};

/// Measure migrations in a lab, beside stock programs
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    verb: BenchVerb,
}

#[derive(Debug, Subcommand)]
enum BenchVerb {
    /// Move a service under load, and report what it and its client noticed
    ///
    /// With --json each run is a line: the report's fields, and series, run, downtime_ms, lost_ops
    /// and reconnects. Baselines take turns with godwit, run by run. Ends with 1 if an answer of a
    /// service that godwit moved was lost.
    Migrate(Migrate),
}

#[derive(Debug, Clone, clap::Args)]
struct Migrate {
    /// The service
    #[arg(long, value_enum, default_value_t = Workload::Redis)]
    workload: Workload,
    /// How much data it holds
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = values::size)]
    memory: u64,
    #[command(flatten)]
    how: How,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// What else does the same job; may be given several times
    #[arg(long, value_enum, value_name = "NAME")]
    baseline: Vec<Baseline>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Workload {
    /// Redis with a client that sends a request each millisecond over one connection
    Redis,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Baseline {
    /// runc checkpoint, a copy of the images over the link, runc restore
    StockCold,
    /// runc checkpoint and restore of an idle container of 1 MB, nothing sent
    Floor,
}

/// Name of the lab of the runs, apart from any that a user has.
const LAB: &str = "bench";

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let BenchVerb::Migrate(args) = args.verb;
    let mut interrupts = Interrupts::new()?;
    let outcome = tokio::select! {
        outcome = measure(&args, global) => outcome.map(Some),
        () = interrupts.next() => Ok(None),
    };
    // What a run that failed or was interrupted left.
    blocking(|| {
        if Lab::list().iter().any(|lab| lab == LAB) {
            Lab::down(LAB)?;
        }
        Ok(())
    })
    .await?;
    Ok(outcome?.unwrap_or_else(|| {
        output::note("Error: ended by Ctrl-C before all runs were done");
        ExitCode::from(INTERRUPTED)
    }))
}

async fn measure(args: &Migrate, global: &Global) -> anyhow::Result<ExitCode> {
    let Workload::Redis = args.workload;
    let mut baselines = args.baseline.clone();
    baselines.dedup();
    let (mut rows, mut lost) = (Vec::new(), false);
    for run in 1..=args.runs {
        let seen = in_lab(args, true, async |lab| {
            trial::with_godwit(lab, args.memory, &args.how, &quiet(global), |_| Ok(())).await
        })
        .await?;
        if let Err(reason) = seen.verdict() {
            output::note(&format!("Error: run {run}: {reason}"));
            lost = true;
        }
        record(seen.json("godwit")?, run, args, global, &mut rows)?;
        for baseline in &baselines {
            let report = match baseline {
                Baseline::Floor => blocking(stock::floor).await?,
                Baseline::StockCold => {
                    in_lab(args, false, async |lab| stock::cold(lab, args.memory).await).await?
                }
            };
            record(report, run, args, global, &mut rows)?;
        }
    }
    if !global.json {
        table(&rows).print()?;
    }
    Ok(if lost { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

/// A lab of its own for each run: no run sees what another left behind.
async fn in_lab<T>(
    args: &Migrate,
    daemons: bool,
    work: impl AsyncFnOnce(&Lab) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let link = args.link;
    let lab = blocking(move || {
        if Lab::list().iter().any(|lab| lab == LAB) {
            Lab::down(LAB)?;
        }
        let mut config = LabConfig::new(LAB, [SOURCE, DESTINATION]);
        (config.link, config.daemons) = (link, daemons);
        Ok(Lab::up(&config)?)
    })
    .await?;
    let outcome = work(&lab).await;
    blocking(|| Ok(Lab::down(LAB)?)).await.context("the lab of this run could not be taken down")?;
    outcome
}

/// The same flags, with nothing shown on the way.
fn quiet(global: &Global) -> Global {
    Global { json: true, socket: None, node: None, lab: global.lab.clone() }
}

/// Adds what the runs have in common, and prints the line where lines are wanted.
fn record(
    mut report: Value,
    run: u32,
    args: &Migrate,
    global: &Global,
    rows: &mut Vec<Value>,
) -> std::io::Result<()> {
    report["run"] = run.into();
    report["workload"] = "redis".into();
    report["filled_bytes"] = args.memory.into();
    report["link"] = args.link.map(|link| link.to_string()).into();
    if global.json {
        output::json(&report)?;
    } else {
        output::note(&format!("run {run}: {} done", report["series"].as_str().unwrap_or_default()));
    }
    rows.push(report);
    Ok(())
}

/// The fields of a baseline's report: those of ours that it has.
fn baseline_report(series: &str, frozen_ms: f64, client: Option<&LoadReport>) -> Value {
    let downtime_ms = client.map_or(frozen_ms, |client| client.downtime_ms);
    serde_json::json!({
        "series": series,
        "mode": "cold",
        "outcome": "moved",
        "frozen_ms": frozen_ms,
        "downtime_ms": downtime_ms,
        "lost_ops": client.map_or(0, |client| client.lost_ops + client.wrong),
        "reconnects": client.map_or(0, |client| client.reconnects),
    })
}

fn table(rows: &[Value]) -> Table {
    let mut table =
        Table::new(["RUN", "SERIES", "DOWNTIME", "FROZEN", "TOTAL", "ON THE WIRE", "LOST", "RECONNECTS"]);
    for row in rows {
        let time = |field: &str| row[field].as_f64().map(output::millis).unwrap_or_default();
        table.row([
            row["run"].to_string(),
            row["series"].as_str().unwrap_or_default().to_owned(),
            time("downtime_ms"),
            time("frozen_ms"),
            time("total_ms"),
            row["wire_bytes"].as_u64().map(output::bytes).unwrap_or_default(),
            row["lost_ops"].to_string(),
            row["reconnects"].to_string(),
        ]);
    }
    table
}
