//! `godwit lab demo follow`: a client goes from node to node, and three services show what that means for it.
//!
//! ```text
//!   client ──▶ following   godwit policy set --follow-clients
//!          ──▶ fixed       stays where it was started
//!          ──▶ threshold   moves whenever the latency is too long (threshold.rs)
//!
//!   road.rs: where the client is, and what lies between it and the nodes
//!   seen.rs: figures of what it saw          picture.rs: the picture of them
//! ```
//!
//! Each service has a connection of its own, over which requests go out on schedule, at the same time.

mod picture;
pub(crate) mod road;
mod seen;
mod threshold;

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, bail};
use godwit_api::v1::{EventsRequest, Policy, PolicyRequest, policy_request::Change};
use godwit_cli::{
    client::Connection,
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    output::{self, Table},
    values,
};
use godwit_lab::{
    Lab, LabConfig,
    config::CLIENT,
    workload::{RedisClient, RedisLoad, Workload},
};

use self::{
    road::{NODES, Road},
    seen::{Move, Seen},
    threshold::Threshold,
};
use crate::{
    stage::in_lab,
    trial::{blocking, connect, start},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the demo's lab; one that a demo left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "follow")]
    name: String,
    /// How long the client is on its way
    #[arg(long = "for", value_name = "TIME", default_value = "60s", value_parser = trip)]
    takes: Duration,
    /// The longest round trip with which the client is content
    #[arg(long, value_name = "TIME", default_value = "10ms", value_parser = values::latency)]
    latency: Duration,
    /// How much data each Redis holds
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = values::size)]
    memory: u64,
    /// File for the picture
    #[arg(long, value_name = "FILE", default_value = "follow.svg")]
    out: PathBuf,
}

/// A trace has no more steps than the lab takes.
const LONGEST: Duration = Duration::from_secs(2 * 60 * 60);

fn trip(text: &str) -> Result<Duration, String> {
    let takes = values::some_time(text).map_err(|error| error.to_string())?;
    if takes > LONGEST { Err("two hours are the most: 2h".to_owned()) } else { Ok(takes) }
}

const FOLLOWING: &str = "following";
const FIXED: &str = "fixed";
const THRESHOLD: &str = "threshold";
/// The services, named after what decides where they are.
const RULES: [(&str, Ipv4Addr); 3] = [
    (FOLLOWING, Ipv4Addr::new(10, 88, 0, 10)),
    (FIXED, Ipv4Addr::new(10, 88, 0, 11)),
    (THRESHOLD, Ipv4Addr::new(10, 88, 0, 12)),
];

/// Requests a second to each service.
const RATE: u32 = 50;
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);
/// What each node is said to have busy of its processors, in thousandths: they share those of this machine.
const BUSY: &str = "100";

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    // Before a minute is spent on it.
    let directory =
        args.out.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if !directory.is_dir() {
        bail!("{} is no directory: name with --out a file in one that exists", directory.display());
    }
    let say = |text: &str| if global.json { Ok(()) } else { output::line(&format!("==> {text}")) };
    say("bringing up a lab: nodes a, b and c, and a client host")?;
    let mut config = LabConfig::new(args.name.clone(), NODES);
    config.programs.serve_arguments = ["--busy-permille", BUSY].map(str::to_owned).to_vec();
    let outcome = in_lab(config, false, async |lab| {
        let outcome = tokio::select! {
            outcome = travel(lab, &args, say) => outcome.map(Some),
            () = interrupts.next() => Ok(None),
        };
        say("taking the lab down")?;
        outcome
    });
    let Some(all) = outcome.await? else {
        output::note("Error: ended by Ctrl-C before the demo was over");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let road = Road::demo(args.takes);
    picture::draw(&args.out, &all, road, args.latency)
        .with_context(|| format!("the picture {} cannot be drawn", args.out.display()))?;
    if global.json {
        for seen in &all {
            output::json(&json(seen))?;
        }
    } else {
        table(&all, args.latency).print()?;
        output::line(&format!("the picture is in {}", args.out.display()))?;
    }
    match all.iter().find_map(|seen| seen.verdict().err()) {
        None => Ok(ExitCode::SUCCESS),
        Some(reason) => bail!(reason),
    }
}

/// The client's way, from the start of its services to what it saw of each.
async fn travel(
    lab: &Lab,
    args: &Args,
    say: impl Fn(&str) -> std::io::Result<()>,
) -> anyhow::Result<Vec<Seen>> {
    let Args { takes, latency, memory, .. } = *args;
    let road = Road::demo(takes);
    let first = connect(lab, NODES[0]).await?;
    let directory = lab.state(NODES[0])?.with_file_name("demo-redis");
    let preset = blocking(move || Ok(Workload::Redis.build(directory)?)).await?;
    say(&format!("running three Redis on a, each with {}", output::bytes(memory)))?;
    let mut data = Vec::new();
    for (rule, address) in RULES {
        start(&first, &preset, rule, address).await?;
        let (lab, at) = (lab.clone(), preset.at(address));
        data.push(blocking(move || filled(&lab, at, memory)).await?);
    }
    say("godwit policy set following --follow-clients")?;
    follow_clients(&first, latency).await?;

    say(&format!(
        "a client sends each {RATE} requests a second, and is on its way for {} s",
        takes.as_secs()
    ))?;
    let mut loads = Vec::new();
    for (_, address) in RULES {
        let (lab, at) = (lab.clone(), preset.at(address));
        loads.push(Arc::new(blocking(move || Ok(RedisLoad::start(&lab, CLIENT, at, RATE)?)).await?));
    }
    let (begun, began) = (Instant::now(), SystemTime::now());
    let there = lab.clone();
    blocking(move || road.begin(&there, &NODES)).await?;
    let until = begun + takes;
    if let Some(load) = loads.last() {
        let rule = Threshold { lab: lab.clone(), latency };
        rule.run(Arc::clone(load), first.clone(), until).await?;
    }
    tokio::time::sleep_until(until.into()).await;

    say("reading all data back from where it is now, over the connections that wrote it")?;
    let mut ending = Vec::new();
    for (load, mut data) in loads.into_iter().zip(data) {
        let load = Arc::into_inner(load).context("a client is still in use")?;
        ending.push(tokio::spawn(blocking(move || {
            let report = load.stop()?;
            data.check_fill(memory)?;
            Ok(report)
        })));
    }
    let mut all = Vec::new();
    for ((rule, _), ended) in RULES.into_iter().zip(ending) {
        let report = ended.await??;
        all.push(Seen::new(rule, report, moves(lab, rule, (began, takes)).await?, (begun, takes, latency)));
    }
    Ok(all)
}

fn filled(lab: &Lab, redis: SocketAddrV4, memory: u64) -> anyhow::Result<RedisClient> {
    let mut data = RedisClient::connect(lab, CLIENT, redis, START)?;
    data.fill(memory)?;
    Ok(data)
}

async fn follow_clients(first: &Connection, latency: Duration) -> anyhow::Result<()> {
    let policy = Policy { latency_us: u64::try_from(latency.as_micros())?, ..Policy::default() };
    let request = PolicyRequest { name: FOLLOWING.to_owned(), change: Some(Change::Set(policy)) };
    first.node.clone().policy(request).await.map_err(|status| first.explain(&status))?;
    Ok(())
}

/// The moves of a service on a trip, as the nodes say to which it came.
async fn moves(
    lab: &Lab,
    service: &str,
    (since, takes): (SystemTime, Duration),
) -> anyhow::Result<Vec<Move>> {
    let since_ms = i64::try_from(since.duration_since(UNIX_EPOCH)?.as_millis())?;
    let mut all = Vec::new();
    for node in NODES {
        let mut connection = connect(lab, node).await?;
        let events = connection.node.events(EventsRequest { follow: false, since_ms }).await;
        let mut events = events.map_err(|status| connection.explain(&status))?.into_inner();
        while let Some(event) = events.message().await.map_err(|status| connection.explain(&status))? {
            if event.name == service && event.subject == "migration" && event.action == "arrived" {
                let at = Duration::from_millis(u64::try_from(event.time_ms - since_ms).unwrap_or(0));
                all.push(Move { at, to: event.node });
            }
        }
    }
    // What comes later, while data is read back, is not of the trip.
    all.retain(|made| made.at < takes);
    all.sort_by_key(|made| made.at);
    Ok(all)
}

fn table(all: &[Seen], latency: Duration) -> Table {
    let mut table = Table::new(["", FOLLOWING, FIXED, THRESHOLD]);
    let mut row = |name: String, value: fn(&Seen) -> String| {
        table.row(std::iter::once(format!("    {name}")).chain(all.iter().map(value)));
    };
    row("moves".to_owned(), |seen| seen.moves.len().to_string());
    row("average wait of an answer".to_owned(), |seen| output::millis(seen.figures.average_ms));
    row(format!("time over {} ms", latency.as_secs_f64() * 1e3), |seen| {
        format!("{:.1} s", seen.figures.over_s)
    });
    row("time of service lost".to_owned(), |seen| format!("{:.1} s", seen.figures.lost_s));
    row("longest wait".to_owned(), |seen| output::millis(seen.figures.longest_ms));
    row("requests sent".to_owned(), |seen| seen.report.sent.to_string());
    row("lost answers".to_owned(), |seen| (seen.report.lost_ops + seen.report.wrong).to_string());
    table
}

fn json(seen: &Seen) -> serde_json::Value {
    let moves = seen.moves.iter();
    serde_json::json!({
        "service": seen.rule,
        "moves": moves.map(|made| serde_json::json!({ "at_s": made.at.as_secs_f64(), "to": made.to })).collect::<Vec<_>>(),
        "figures": seen.figures,
        "requests": seen.report.sent,
        "lost_ops": seen.report.lost_ops + seen.report.wrong,
        "windows": seen.windows.iter().map(|window| [window.at, window.median_ms, window.most_ms]).collect::<Vec<_>>(),
    })
}
