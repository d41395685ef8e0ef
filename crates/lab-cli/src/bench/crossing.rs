//! `godwit bench crossing`: what it adds to a move that the service goes on under the destination's executables.
//!
//! ```text
//!   for each number of threads ─▶ a lab, the service, a client ─▶ for each run ─▶ there and back: plain, then with --cross
//! ```
//!
//! Both kinds take turns in one lab, with one service and one connection, so that what else the machine does falls on both.
//! Both nodes have one instruction set: the work is that of a crossing, and the time is that of real processors.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use godwit_cli::{
    global::Global,
    migration::Mode,
    output::{self, Table},
    values,
};
use godwit_lab::Link;
use serde_json::Value;

use super::{Bed, plot::data::median, results::Results};
use crate::sums::{self, Shape};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// Threads of the service; several numbers are measured one after the other
    #[arg(long, value_name = "NUMBER", value_delimiter = ',', default_value = "1,8,64", value_parser = clap::value_parser!(u32).range(1..=200))]
    threads: Vec<u32>,
    /// How much memory it holds
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = values::size)]
    memory: u64,
    /// How its memory moves
    #[arg(long, value_enum, default_value = "precopy")]
    mode: Mode,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// How often it moves there and back in each way
    #[arg(long, value_name = "NUMBER", default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// The compiler that builds the service
    #[arg(long, value_name = "PROGRAM", default_value = "godwit-cc")]
    compiler: PathBuf,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

pub(super) async fn measure(args: &Args, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    // Else pages that a node has kept from the move before would not cross at all.
    let daemon_arguments = ["--retained-memory", "0"].map(str::to_owned).to_vec();
    let bed = Bed { name: lab.to_owned(), link: args.link, daemon_arguments, ..Bed::default() };
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    for &threads in &args.threads {
        let shape = Shape { threads, memory: args.memory, ..Shape::default() };
        let mut add = |mut row: Value| {
            row["bench"] = "crossing".into();
            row["link"] = args.link.map(|link| link.to_string()).into();
            results.add(row)
        };
        bed.lab(true, async |lab| {
            sums::there_and_back(lab, &args.compiler, shape, args.mode, args.runs, &mut add).await
        })
        .await?;
    }
    if !global.json {
        table(&results.rows).print()?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Medians of both kinds by number of threads, and what crossing adds.
fn table(rows: &[Value]) -> Table {
    let mut table = Table::new([
        "THREADS",
        "SERIES",
        "FROZEN",
        "ADDED",
        "LONGEST WAIT",
        "REST",
        "REWRITING",
        "ON THE WIRE",
    ]);
    let mut groups: BTreeMap<(u64, bool), Vec<&Value>> = BTreeMap::new();
    for row in rows {
        let key = (row["threads"].as_u64().unwrap_or(0), row["series"] == "crossing");
        groups.entry(key).or_default().push(row);
    }
    for (&(threads, cross), rows) in &groups {
        let of = |cross: bool, field: &str| of_all(groups.get(&(threads, cross))?, field);
        let time = |field: &str| of_all(rows, field).map(output::millis).unwrap_or_default();
        let added = of(true, "frozen_ms").zip(of(false, "frozen_ms")).map(|(with, without)| with - without);
        table.row([
            threads.to_string(),
            if cross { "crossing" } else { "plain" }.to_owned(),
            time("frozen_ms"),
            added.filter(|_| cross).map(|added| format!("{added:+.1} ms")).unwrap_or_default(),
            time("longest_wait_ms"),
            if cross { time("park_ms") } else { String::new() },
            if cross { time("rewrite_ms") } else { String::new() },
            of_all(rows, "wire_bytes").map(|bytes| format!("{:.1} MB", bytes / 1e6)).unwrap_or_default(),
        ]);
    }
    table
}

fn of_all(rows: &[&Value], field: &str) -> Option<f64> {
    median(rows.iter().filter_map(|row| row[field].as_f64()).collect())
}
