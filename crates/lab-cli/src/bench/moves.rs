//! `godwit bench migrate`: the same service moved in each way that was asked for, in turn.
//!
//! ```text
//!   for each size of memory ─▶ for each run ─▶ godwit in each mode, each baseline     (a lab each)
//! ```
//!
//! In turn, so that what else the machine does falls on all alike.

use std::process::ExitCode;

use clap::ValueEnum;
use godwit_cli::{
    global::Global,
    migration::{How, Mode},
    output::{self, Table},
    values,
};
use godwit_lab::Link;
use serde_json::{Value, json};

use super::{
    Bed, plot,
    results::{Results, page_ratio},
    stock::{self, Stock},
    stock_lazy,
};
use crate::trial::{self, Job, blocking};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// The service
    #[arg(long, value_enum, default_value_t = Workload::Redis)]
    workload: Workload,
    /// How much data it holds; several sizes are measured one after the other
    #[arg(long, value_name = "SIZE", value_delimiter = ',', default_value = "256MiB", value_parser = values::size)]
    memory: Vec<u64>,
    /// Its client's requests a second, each of which writes a page somewhere in the data
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// How its memory moves; several modes take turns
    #[arg(long, value_enum, value_delimiter = ',', default_value = "auto")]
    mode: Vec<Mode>,
    #[command(flatten)]
    how: How,
    /// Move it back after each move of godwit, and report that too
    #[arg(long = "return")]
    back: bool,
    /// Add a client that reads as fast as it is answered, to measure what the copying takes from the service
    #[arg(long)]
    busy: bool,
    /// Measure each mode without godwit's patches to CRIU, too
    #[arg(long)]
    stock_criu: bool,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Baseline to measure as well; may be given several times
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME")]
    baseline: Vec<Baseline>,
    /// Leave out stock-lazy with more data than this: under load it moves a few megabytes a second
    #[arg(long, value_name = "SIZE", value_parser = values::size)]
    stock_lazy_max: Option<u64>,
    /// Draw what both nodes did in the frozen time, for the usual run of each series, into this file (SVG)
    #[arg(long, value_name = "FILE")]
    timeline: Option<std::path::PathBuf>,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<std::path::PathBuf>,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Workload {
    /// Redis with a client that sends requests over one connection
    Redis,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Baseline {
    /// runc checkpoint, a copy of the images over the link, runc restore
    StockCold,
    /// runc checkpoint --lazy-pages, a copy of the images, criu lazy-pages and runc restore
    StockLazy,
    /// runc checkpoint and restore of an idle container of 1 MB, nothing sent
    Floor,
    /// criu dump and criu restore of an idle process that is in no container
    Bare,
}

/// What takes its turn in each run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Turn {
    Godwit(Mode),
    /// The same with a CRIU without patches.
    StockCriu(Mode),
    Baseline(Baseline),
}

impl Turn {
    fn all(args: &Args) -> Vec<Self> {
        let mut turns = Vec::new();
        let modes = args.mode.iter().copied().map(Self::Godwit);
        let stock = args.mode.iter().copied().filter(|_| args.stock_criu).map(Self::StockCriu);
        let baselines = args.baseline.iter().copied().map(Self::Baseline);
        for turn in modes.chain(stock).chain(baselines) {
            if !turns.contains(&turn) {
                turns.push(turn);
            }
        }
        turns
    }

    /// Whether it takes part with so much data.
    fn fits(self, memory: u64, args: &Args) -> bool {
        self != Self::Baseline(Baseline::StockLazy) || args.stock_lazy_max.is_none_or(|most| memory <= most)
    }

    /// The name of its results; of one mode alone nobody needs to be told which.
    fn series(self, alone: bool, busy: bool) -> String {
        let busy = if busy { "-busy" } else { "" };
        match self {
            Self::Godwit(_) if alone => format!("godwit{busy}"),
            Self::Godwit(mode) => format!("godwit-{}{busy}", mode.as_str()),
            Self::StockCriu(mode) => format!("godwit-{}-stock-criu{busy}", mode.as_str()),
            Self::Baseline(Baseline::StockCold) => "stock-cold".to_owned(),
            Self::Baseline(Baseline::StockLazy) => "stock-lazy".to_owned(),
            Self::Baseline(Baseline::Floor) => "floor".to_owned(),
            Self::Baseline(Baseline::Bare) => "bare".to_owned(),
        }
    }
}

pub(super) async fn measure(args: &Args, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    let Workload::Redis = args.workload;
    let turns = Turn::all(args);
    let bed = Bed { name: lab.to_owned(), link: args.link, ..Bed::default() };
    let modes = turns.iter().filter(|turn| matches!(turn, Turn::Godwit(_))).count();
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    let mut good = true;
    for &memory in &args.memory {
        for run in 1..=args.runs {
            for turn in turns.iter().filter(|turn| turn.fits(memory, args)) {
                let series = turn.series(modes == 1 && !args.stock_criu, args.busy);
                let rows = match take(*turn, &series, memory, (args, &bed), global).await {
                    Ok((rows, clean)) => {
                        good &= clean;
                        rows
                    }
                    Err(error) => {
                        let reason = format!("{error:#}");
                        output::note(&format!("Error: run {run} of {series}: {reason}"));
                        good &= matches!(turn, Turn::Baseline(_));
                        vec![json!({ "series": series, "outcome": "failed", "reason": reason })]
                    }
                };
                for mut row in rows {
                    row["run"] = run.into();
                    row["workload"] = "redis".into();
                    row["memory"] = memory.into();
                    row["rate"] = args.rate.into();
                    row["link"] = args.link.map(|link| link.to_string()).into();
                    results.add(row)?;
                }
            }
        }
    }
    if !global.json {
        table(&results.rows).print()?;
    }
    if let Some(path) = &args.timeline {
        plot::timeline(std::mem::take(&mut results.rows), path)?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One turn: its results, and whether no answer of a service that godwit moved was lost.
async fn take(
    turn: Turn,
    series: &str,
    memory: u64,
    (args, bed): (&Args, &Bed),
    global: &Global,
) -> anyhow::Result<(Vec<Value>, bool)> {
    let stock = Stock { memory, rate: args.rate };
    Ok(match turn {
        Turn::Godwit(mode) | Turn::StockCriu(mode) => {
            let mut bed = bed.clone();
            if matches!(turn, Turn::StockCriu(_)) {
                bed.daemon_arguments = ["--criu-patches", "off"].map(str::to_owned).to_vec();
            }
            let job = Job {
                memory,
                rate: args.rate,
                mode,
                how: args.how.clone(),
                back: args.back,
                busy: args.busy,
            };
            let all = bed
                .lab(true, async |lab| trial::with_godwit(lab, &job, &quiet(global), |_| Ok(())).await)
                .await?;
            let (mut rows, mut clean) = (Vec::new(), true);
            for (seen, suffix) in all.iter().zip(["", "-return"]) {
                let series = format!("{series}{suffix}");
                if let Err(reason) = seen.verdict() {
                    output::note(&format!("Error: {series}: {reason}"));
                    clean = false;
                }
                rows.push(seen.json(&series)?);
            }
            (rows, clean)
        }
        Turn::Baseline(Baseline::Floor) => (vec![blocking(stock::floor).await?], true),
        Turn::Baseline(Baseline::Bare) => (vec![blocking(stock::bare).await?], true),
        Turn::Baseline(Baseline::StockCold) => {
            (vec![bed.lab(false, async |lab| stock.cold(lab).await).await?], true)
        }
        Turn::Baseline(Baseline::StockLazy) => {
            (vec![bed.lab(false, async |lab| stock_lazy::run(&stock, lab).await).await?], true)
        }
    })
}

/// The same flags, with nothing shown on the way.
fn quiet(global: &Global) -> Global {
    Global { json: true, socket: None, node: None, lab: global.lab.clone() }
}

fn table(rows: &[Value]) -> Table {
    let mut table = Table::new([
        "MEMORY",
        "RUN",
        "SERIES",
        "OUTCOME",
        "DOWNTIME",
        "FROZEN",
        "TOTAL",
        "ON THE WIRE",
        "OF IT MEMORY",
        "÷ PAGES",
        "LOST",
        "RECONNECTS",
    ]);
    for row in rows {
        let time = |field: &str| row[field].as_f64().map(output::millis).unwrap_or_default();
        let size = |field: &str| row[field].as_u64().map(output::bytes).unwrap_or_default();
        let count = |field: &str| row[field].as_u64().map(|count| count.to_string()).unwrap_or_default();
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        table.row([
            size("memory"),
            count("run"),
            text("series"),
            text("outcome"),
            time("downtime_ms"),
            time("frozen_ms"),
            time("total_ms"),
            size("wire_bytes"),
            size("memory_wire_bytes"),
            page_ratio(row).map(|ratio| format!("{ratio:.3}")).unwrap_or_default(),
            count("lost_ops"),
            count("reconnects"),
        ]);
    }
    table
}
