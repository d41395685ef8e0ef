//! `godwit bench cutover`: what clients notice of the pause, when frames are held and when they are
//! dropped.
//!
//! ```text
//!   for each run ─▶ each load ─▶ hold, drop     (a lab each)
//!
//!   idle   one connection; a request every half a second, and one as soon as the freeze is heard of
//!   busy   one connection, a thousand requests a second
//!   small  one connection, a thousand requests a second, each answered by two small writes (Nagle's algorithm)
//!   doubt  as small, and the client's host hears nothing from the last round of memory until the restore begins
//!   many   so many connections, a thousand requests a second over all of them in turn
//! ```
//!
//! The service is this program itself ([`super::echo`]), and its client tells every byte that is lost,
//! repeated or mixed up ([`godwit_lab::workload::echo`]). Ways that the load does not take are tried once in
//! the pause ([`super::probes`]). What the pause costs those who send is told by
//! the kernel's counters, before and after.

use std::{net::SocketAddrV4, path::PathBuf, process::ExitCode, time::Duration};

use anyhow::bail;
use clap::ValueEnum;
use godwit_api::v1::{MigrationReport, ServiceRequest, migration_event};
use godwit_cli::{
    client::Connection,
    global::Global,
    migration::{self, How, Mode, Outcome},
    output::{self, Table},
};
use godwit_lab::{
    Lab, Link, NetworkBackend, TcpCounters,
    workload::{EchoLoad, EchoReport},
};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use serde_json::{Value, json};

use super::{
    Bed,
    deafness::Deafness,
    hold::Hold,
    probes::Probes,
    results::Results,
    service::{self, Service},
};
use crate::trial::{ADDRESS, DESTINATION, SOURCE, blocking};

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
    /// The nodes' switch; several take turns
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel")]
    network_backend: Vec<NetworkBackend>,
    /// How its memory moves
    #[arg(long, value_enum, default_value_t = Mode::Precopy)]
    mode: Mode,
    /// Rate and one-way delay of each host's link
    #[arg(long, value_name = "RATE[,DELAY]", default_value = "1gbit,1ms")]
    link: Link,
    /// Hold each move so long before the commit, so that the pause is longer; several take turns
    #[arg(long, value_name = "MILLISECONDS", value_delimiter = ',', default_value = "0")]
    pause: Vec<u32>,
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
    /// More words to the service.
    more: &'static [&'static str],
    /// Whether the client does not hear what the service says last: it is in doubt at the freeze.
    doubt: bool,
}

/// Requests a second of an idle connection.
const IDLE: u32 = 2;
const NAME: &str = "echo";
const PORT: u16 = 7010;
const SERVICE: Service = Service { name: NAME, address: ADDRESS, port: PORT, published: None };
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
            for (cutover, backend, pause) in args.pauses() {
                let mut row = match one(args, load, cutover, backend, pause, lab).await {
                    Ok(row) => row,
                    Err(error) => {
                        let reason = format!("{error:#}");
                        output::note(&format!("Error: run {run} of {}: {reason}", load.series));
                        json!({ "outcome": "failed", "reason": reason })
                    }
                };
                row["network_backend"] = backend.to_string().into();
                let clean = row["outcome"] == "moved" && row["lost_ops"] == 0 && row["broken"] == 0;
                good &= clean || cutover == Cutover::Drop;
                row["bench"] = "cutover".into();
                row["series"] = load.series.into();
                row["cutover"] = cutover.as_str().into();
                row["pause_ms"] = pause.into();
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
    /// What becomes of frames, and by which switch, in turns.
    fn pauses(&self) -> impl Iterator<Item = (Cutover, NetworkBackend, u32)> {
        self.cutover.iter().flat_map(move |cutover| {
            self.network_backend
                .iter()
                .flat_map(move |backend| self.pause.iter().map(|pause| (*cutover, *backend, *pause)))
        })
    }

    fn loads(&self) -> Vec<Load> {
        let mut loads = Vec::new();
        for &connections in &self.connections {
            if connections == 1 {
                let busy = Load { series: "busy", connections, rate: self.rate, more: &[], doubt: false };
                let small = Load { series: "small", more: &["--halves"], ..busy };
                loads.push(Load { series: "idle", rate: IDLE, ..busy });
                loads.extend([busy, small, Load { series: "doubt", doubt: true, ..small }]);
            } else {
                loads.push(Load { series: "many", connections, rate: self.rate, more: &[], doubt: false });
            }
        }
        loads
    }
}

/// One move in a lab of its own.
async fn one(
    args: &Args,
    load: Load,
    cutover: Cutover,
    network_backend: NetworkBackend,
    pause: u32,
    lab: &str,
) -> anyhow::Result<Value> {
    let hold = Hold::new(lab, Duration::from_millis(pause.into()))?;
    let daemon_environment = hold.iter().map(Hold::environment).collect();
    let daemon_arguments = ["--cutover", cutover.as_str()].map(str::to_owned).to_vec();
    let bed = Bed {
        name: lab.to_owned(),
        link: Some(args.link),
        network_backend,
        daemon_arguments,
        daemon_environment,
    };
    bed.lab(true, async |lab| {
        let connection = service::start(lab, SERVICE, load.more).await?;
        let there = lab.clone();
        let begin = move || {
            let service = SocketAddrV4::new(ADDRESS, PORT);
            Ok(EchoLoad::start(&there, "client", service, load.connections, load.rate)?)
        };
        let client = blocking(begin).await?;
        let there = lab.clone();
        let probes = blocking(move || Probes::prepare(&there, SERVICE)).await?;
        tokio::time::sleep(WATCHED).await;
        let before = Counters::read(lab).await?;
        let deafness = load.doubt.then(|| Deafness::of(lab, PORT));
        let held = async {
            if let Some(hold) = &hold {
                hold.hold().await?;
            }
            // The move's end is waited for.
            std::future::pending::<anyhow::Result<std::convert::Infallible>>().await
        };
        let (report, client, deaf_ms) = tokio::select! {
            moved = moved(&connection, args.mode, client, &probes, deafness) => moved?,
            failed = held => match failed? {},
        };
        tokio::time::sleep(WATCHED).await;
        let client = blocking(move || Ok(client.stop()?)).await?;
        let after = Counters::read(lab).await?;
        let service = match Outcome::of(&report) {
            Outcome::Moved => Some(of_service(lab).await?),
            Outcome::Aborted | Outcome::Lost | Outcome::Prepared => None,
        };
        let row = serde_json::to_value(&report)?;
        let mut row = blocking(move || {
            let mut row = row;
            probes.finish(&mut row)?;
            Ok(row)
        })
        .await?;
        seen(&mut row, &client);
        row["beyond_ms"] = (client.downtime_ms - report.frozen_ms - deaf_ms).into();
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

/// Moves the service. An idle client would mostly not meet so short a pause, so one request more is sent
/// when the freeze is heard of; and whatever else is to be tried in it.
async fn moved(
    connection: &Connection,
    mode: Mode,
    client: EchoLoad,
    probes: &Probes,
    mut deafness: Option<Deafness>,
) -> anyhow::Result<(MigrationReport, EchoLoad, f64)> {
    let request = How::plain(STREAMS).request(mode, NAME, DESTINATION);
    let mut events = migration::start(connection.clone(), request);
    let mut frozen = false;
    let mut deaf_ms = 0.0;
    loop {
        match events.recv().await {
            Some(Ok(migration_event::Kind::Progress(step))) => {
                if let Some(deafness) = &mut deafness {
                    match step.phase.as_str() {
                        "copy" if step.round > 1 => deafness.begin().await?,
                        "freeze" => deaf_ms = deafness.lasts_ms(),
                        "restore" => deafness.end().await?,
                        _ => {}
                    }
                }
                if step.phase == "freeze" && !frozen {
                    frozen = true;
                    client.now()?;
                    probes.go()?;
                }
            }
            Some(Ok(migration_event::Kind::Report(report))) => return Ok((report, client, deaf_ms)),
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
    let mut connection = service::connect(lab, DESTINATION).await?;
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
        "SWITCH",
        "OUTCOME",
        "DOWNTIME",
        "FROZEN",
        "BEYOND",
        "CUT-OVER",
        "NEW",
        "OUTGOING",
        "DATAGRAM",
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
            text("network_backend"),
            text("outcome"),
            time("downtime_ms"),
            time("frozen_ms"),
            time("beyond_ms"),
            time("cutover_ms"),
            time("new_ms"),
            time("outgoing_ms"),
            time("datagram_ms"),
            count("timeouts"),
            count("retransmissions"),
            count("lost_ops"),
        ]);
    }
    table
}
