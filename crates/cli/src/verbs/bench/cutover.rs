//! `godwit bench cutover`: what clients notice of the pause, when frames are held and when they are
//! dropped.
//!
//! ```text
//!   for each run ─▶ each load ─▶ hold, drop     (a lab each)
//!
//!   idle   one connection; a request every half a second, and one as soon as the freeze is heard of
//!   busy   one connection, a thousand requests a second
//!   many   so many connections, a thousand requests a second over all of them in turn
//! ```
//!
//! The service is this program itself ([`super::echo`]), and its client tells every byte that is lost,
//! repeated or mixed up ([`godwit_lab::workload::echo`]). What the pause costs those who send is told by
//! the kernel's counters, before and after.

use std::{
    net::{SocketAddrV4, TcpStream},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context as _, bail};
use clap::ValueEnum;
use godwit_api::v1::{MigrationReport, RunRequest, ServiceRequest, migration_event, run_request::Source};
use godwit_lab::{
    Lab, Link, TcpCounters,
    workload::{EchoLoad, EchoReport, Rootfs},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::{Bed, parts::Orders, results::Results};
use crate::{
    cli::Global,
    client::Connection,
    output::{self, Table},
    verbs::{
        migrate::{self, How, Mode},
        trial::{ADDRESS, DESTINATION, SOURCE, blocking},
    },
};

#[derive(Debug, Clone, clap::Args)]
pub(super) struct Args {
    /// How many connections the service has; 1 is measured twice, idle and busy
    #[arg(
        long, value_name = "NUMBER", value_delimiter = ',', default_value = "1,1000,10000",
        value_parser = clap::value_parser!(u32).range(1..=28_000)
    )]
    connections: Vec<u32>,
    /// Requests a second, over all connections in turn
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    rate: u32,
    /// What becomes of frames for the service during the pause; both take turns
    #[arg(long, value_enum, value_delimiter = ',', default_value = "hold,drop")]
    cutover: Vec<Cutover>,
    /// How its memory moves
    #[arg(long, value_enum, default_value_t = Mode::Precopy)]
    mode: Mode,
    /// Rate and one-way delay of each host's link
    #[arg(long, value_name = "RATE[,DELAY]", default_value = "1gbit,1ms")]
    link: Link,
    /// How often
    #[arg(long, value_name = "NUMBER", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Write the lines into this file too; one that is there is replaced
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What becomes of frames for the service while it is frozen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Cutover {
    /// They are held, and handed in after the resume
    Hold,
    /// They are dropped, as stock programs do
    Drop,
}

impl Cutover {
    fn as_str(self) -> &'static str {
        match self {
            Self::Hold => "hold",
            Self::Drop => "drop",
        }
    }
}

/// What the client does.
#[derive(Debug, Clone, Copy)]
struct Load {
    series: &'static str,
    connections: u32,
    rate: u32,
}

/// Requests a second of an idle connection.
const IDLE: u32 = 2;
const NAME: &str = "echo";
const PORT: u16 = 7010;
/// How long the client is watched before and after the move: what was lost in the pause is sent again
/// within this time.
const WATCHED: Duration = Duration::from_secs(2);
/// Connections for memory.
const STREAMS: u32 = 2;

pub(super) async fn measure(args: &Args, lab: &str, global: &Global) -> anyhow::Result<ExitCode> {
    // The client's connections are files of this process.
    let (_, most) = getrlimit(Resource::RLIMIT_NOFILE)?;
    setrlimit(Resource::RLIMIT_NOFILE, most, most)?;
    let mut results = Results::new(args.out.as_deref(), global.json)?;
    let mut good = true;
    for run in 1..=args.runs {
        for load in args.loads() {
            for &cutover in &args.cutover {
                let mut row = match one(args, load, cutover, lab).await {
                    Ok(row) => row,
                    Err(error) => {
                        let reason = format!("{error:#}");
                        output::note(&format!("Error: run {run} of {}: {reason}", load.series));
                        json!({ "outcome": "failed", "reason": reason })
                    }
                };
                let clean = row["outcome"] == "moved" && row["lost_ops"] == 0 && row["broken"] == 0;
                good &= clean || cutover == Cutover::Drop;
                row["bench"] = "cutover".into();
                row["series"] = load.series.into();
                row["cutover"] = cutover.as_str().into();
                row["connections"] = load.connections.into();
                row["run"] = run.into();
                row["rate"] = load.rate.into();
                row["link"] = args.link.to_string().into();
                results.add(row)?;
            }
        }
    }
    if !global.json {
        table(&results.rows).print()?;
    }
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

impl Args {
    fn loads(&self) -> Vec<Load> {
        let mut loads = Vec::new();
        for &connections in &self.connections {
            if connections == 1 {
                loads.push(Load { series: "idle", connections, rate: IDLE });
                loads.push(Load { series: "busy", connections, rate: self.rate });
            } else {
                loads.push(Load { series: "many", connections, rate: self.rate });
            }
        }
        loads
    }
}

/// One move in a lab of its own.
async fn one(args: &Args, load: Load, cutover: Cutover, lab: &str) -> anyhow::Result<Value> {
    let daemon_arguments = ["--cutover", cutover.as_str()].map(str::to_owned).to_vec();
    let bed = Bed { name: lab.to_owned(), link: Some(args.link), daemon_arguments };
    bed.lab(true, async |lab| {
        let connection = start(lab).await?;
        let there = lab.clone();
        let begin = move || {
            let service = SocketAddrV4::new(ADDRESS, PORT);
            Ok(EchoLoad::start(&there, "client", service, load.connections, load.rate)?)
        };
        let client = blocking(begin).await?;
        tokio::time::sleep(WATCHED).await;
        let before = Counters::read(lab).await?;
        let (report, client) = moved(&connection, args.mode, client).await?;
        tokio::time::sleep(WATCHED).await;
        let client = blocking(move || Ok(client.stop()?)).await?;
        let after = Counters::read(lab).await?;
        let service = match report.outcome.as_str() {
            "moved" => Some(of_service(lab).await?),
            _ => None,
        };
        let mut row = serde_json::to_value(&report)?;
        seen(&mut row, &client);
        counted(&mut row, "", &after.client.since(&before.client));
        counted(&mut row, "node_", &after.node.since(&before.node));
        if let Some(service) = &service {
            // Its namespace there is new: all of it is of this move.
            counted(&mut row, "service_", service);
        }
        Ok(row)
    })
    .await
}

/// Runs the service on the source; returns when it answers.
async fn start(lab: &Lab) -> anyhow::Result<Connection> {
    let mut connection = connect(lab, SOURCE).await?;
    let directory = lab.state(SOURCE)?.with_file_name("echo");
    let program = std::env::current_exe()?;
    let copied = program.clone();
    let rootfs = blocking(move || Ok(Rootfs::new(directory)?.binary(copied)?.path().to_owned())).await?;
    let program = program.to_string_lossy().into_owned();
    let request = RunRequest {
        name: NAME.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Rootfs(rootfs.to_string_lossy().into_owned())),
        command: [program.as_str(), "bench", "echo", "--port", &PORT.to_string()].map(str::to_owned).to_vec(),
        ..RunRequest::default()
    };
    connection.node.run(request).await.map_err(|status| connection.explain(&status))?;
    let there = lab.clone();
    let asked = blocking(move || {
        let orders = SocketAddrV4::new(ADDRESS, PORT + 2);
        let connect = || Ok(there.inside("client", || TcpStream::connect(orders))??);
        Orders::connect(connect)?.give("count")
    });
    asked.await.context("the service does not start")?;
    Ok(connection)
}

async fn connect(lab: &Lab, node: &str) -> anyhow::Result<Connection> {
    let there =
        Global { json: true, socket: Some(lab.socket(node)?), node: None, lab: lab.name().to_owned() };
    Ok(Connection::open(&there).await?)
}

/// Moves the service. An idle client would mostly not meet so short a pause, so one request more is sent
/// when the freeze is heard of.
async fn moved(
    connection: &Connection,
    mode: Mode,
    client: EchoLoad,
) -> anyhow::Result<(MigrationReport, EchoLoad)> {
    let request = How::plain(STREAMS).request(mode, NAME, DESTINATION);
    let mut events = migrate::start(connection.clone(), request);
    let mut frozen = false;
    loop {
        match events.recv().await {
            Some(Ok(migration_event::Kind::Progress(step))) => {
                if step.phase == "freeze" && !frozen {
                    frozen = true;
                    client.now()?;
                }
            }
            Some(Ok(migration_event::Kind::Report(report))) => return Ok((report, client)),
            Some(Err(error)) => return Err(error.into()),
            None => bail!("godwitd ended the migration without a report"),
        }
    }
}

/// What is counted where something is sent to the service, or from its node.
struct Counters {
    client: TcpCounters,
    node: TcpCounters,
}

impl Counters {
    async fn read(lab: &Lab) -> anyhow::Result<Self> {
        let lab = lab.clone();
        blocking(move || Ok(Self { client: lab.tcp_counters("client")?, node: lab.tcp_counters(SOURCE)? }))
            .await
    }
}

/// What the service itself sent again since it is at the destination.
async fn of_service(lab: &Lab) -> anyhow::Result<TcpCounters> {
    let mut connection = connect(lab, DESTINATION).await?;
    let answer = connection.node.inspect(ServiceRequest { name: NAME.to_owned() }).await;
    let pid = answer.map_err(|status| connection.explain(&status))?.into_inner().pid;
    blocking(move || Ok(TcpCounters::of_process(pid)?)).await
}

fn seen(row: &mut Value, client: &EchoReport) {
    row["downtime_ms"] = client.downtime_ms.into();
    row["usual_ms"] = client.usual_ms.into();
    row["requests"] = client.sent.into();
    row["lost_ops"] = client.lost_ops.into();
    row["broken"] = client.broken.into();
    if let Some(first) = &client.first_broken {
        row["first_broken"] = first.as_str().into();
    }
}

fn counted(row: &mut Value, who: &str, counters: &TcpCounters) {
    row[format!("{who}timeouts")] = counters.timeouts.into();
    row[format!("{who}retransmissions")] = counters.retransmissions.into();
    row[format!("{who}loss_probes")] = counters.loss_probes.into();
}

fn table(rows: &[Value]) -> Table {
    let mut table = Table::new([
        "RUN",
        "LOAD",
        "CONNECTIONS",
        "FRAMES",
        "OUTCOME",
        "DOWNTIME",
        "FROZEN",
        "TIME-OUTS",
        "RETRANSMISSIONS",
        "LOST",
    ]);
    for row in rows {
        let time = |field: &str| row[field].as_f64().map(output::millis).unwrap_or_default();
        let count = |field: &str| row[field].as_u64().map(|count| count.to_string()).unwrap_or_default();
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        table.row([
            count("run"),
            text("series"),
            count("connections"),
            text("cutover"),
            text("outcome"),
            time("downtime_ms"),
            time("frozen_ms"),
            count("timeouts"),
            count("retransmissions"),
            count("lost_ops"),
        ]);
    }
    table
}
