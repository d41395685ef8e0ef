//! `godwit lab demo`: the whole of godwit in a minute, in a lab of its own that is gone afterwards.
//!
//! ```text
//!   lab up ─▶ Redis on a, filled ─▶ client busy ─▶ migrate to b ─▶ client goes on ─▶ lab down
//!                                   │◀──── one connection, a request each millisecond ────▶│
//! ```

use std::{net::Ipv4Addr, process::ExitCode, time::Duration};

use anyhow::{Context as _, bail, ensure};
use godwit_api::v1::{
    MigrateRequest, MigrationReport, RunRequest, Service, migration_event, run_request::Source,
};
use godwit_lab::{
    Lab, LabConfig, Link,
    workload::{LoadReport, RedisClient, RedisLoad, Workload},
};
use tokio::task::spawn_blocking;

use crate::{
    cli::Global,
    client::Connection,
    output::{self, Table},
    values,
    verbs::{
        migrate::{self, Interrupts},
        progress::Progress,
    },
};

const SOURCE: &str = "a";
const DESTINATION: &str = "b";
const SERVICE: &str = "redis";
const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// A request each millisecond.
const RATE: u32 = 1000;
/// How long the client is watched before and after the move, so that both sides of it are seen.
const WATCHED: Duration = Duration::from_secs(2);
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the demo's lab; one that a demo left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "demo")]
    name: String,
    /// How much data Redis holds
    #[arg(long, value_name = "SIZE", default_value = "200MiB", value_parser = values::size)]
    memory: u64,
    /// Rate and one-way delay of each host's link: 1gbit,1ms [default: unshaped]
    #[arg(long, value_name = "RATE[,DELAY]")]
    link: Option<Link>,
    /// Leave the lab up afterwards
    #[arg(long)]
    keep: bool,
}

/// What the demo shows: the migration's report, and what the client saw of it.
struct Seen {
    report: MigrationReport,
    client: LoadReport,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let Args { name, memory, link, keep } = args;
    let mut interrupts = Interrupts::new()?;
    let step = |text: &str| if global.json { Ok(()) } else { output::line(&format!("==> {text}")) };

    step("bringing up a lab: nodes a and b, and a client host")?;
    let lab = blocking(move || {
        if Lab::list().contains(&name) {
            Lab::down(&name)?;
        }
        let mut config = LabConfig::new(name, [SOURCE, DESTINATION]);
        config.link = link;
        Ok(Lab::up(&config)?)
    })
    .await?;
    let outcome = tokio::select! {
        outcome = show(&lab, memory, global) => outcome.map(Some),
        () = interrupts.next() => Ok(None),
    };
    if keep {
        step(&format!("the lab stays up: godwit lab down {}", lab.name()))?;
    } else {
        step("taking the lab down")?;
        blocking(move || Ok(Lab::down(lab.name())?)).await?;
    }
    let Some(Seen { report, client }) = outcome? else {
        output::note("Error: ended by Ctrl-C before the demo was over");
        return Ok(ExitCode::from(migrate::INTERRUPTED));
    };
    ensure!(report.outcome == "moved", "redis was kept on {}: {}", report.source, report.reason);
    ensure!(
        client.is_clean(),
        "the client lost {} answers, got {} wrong ones{}",
        client.lost_ops,
        client.wrong,
        client.broken.map(|reason| format!(", and its connection broke: {reason}")).unwrap_or_default()
    );
    Ok(ExitCode::SUCCESS)
}

/// Everything between the lab's coming up and its going down.
async fn show(lab: &Lab, memory: u64, global: &Global) -> anyhow::Result<Seen> {
    let step = |text: &str| if global.json { Ok(()) } else { output::line(&format!("==> {text}")) };
    let global_of =
        |socket| Global { json: global.json, socket: Some(socket), node: None, lab: lab.name().to_owned() };
    let mut connection = Connection::open(&global_of(lab.socket(SOURCE)?)).await?;

    step(&format!("running the distribution's Redis on {SOURCE} as {ADDRESS}"))?;
    let directory = lab.state(SOURCE)?.with_file_name("demo-redis");
    let preset = blocking(move || Ok(Workload::Redis.build(directory)?)).await?;
    let redis = preset.at(ADDRESS);
    let service = start(&mut connection, preset).await?;

    step(&format!("filling it with {}", output::bytes(memory)))?;
    let there = lab.clone();
    let mut data = blocking(move || {
        let mut data = RedisClient::connect(&there, "client", redis, START)?;
        data.fill(memory)?;
        Ok(data)
    })
    .await
    .with_context(|| format!("{} could not be filled", service.name))?;

    step("a client on another host sends a request each millisecond over one connection")?;
    let there = lab.clone();
    let load = blocking(move || Ok(RedisLoad::start(&there, "client", redis, RATE)?)).await?;
    tokio::time::sleep(WATCHED).await;

    step(&format!("godwit migrate {SERVICE} --to {DESTINATION}"))?;
    let report = migrate(&connection, global).await?;
    tokio::time::sleep(WATCHED).await;
    let client = blocking(move || Ok(load.stop()?)).await?;

    step("reading all data back from where it is now, over the connection that wrote it")?;
    blocking(move || Ok(data.check_fill(memory)?)).await?;
    let seen = Seen { report, client };
    print(&seen, global)?;
    Ok(seen)
}

async fn start(connection: &mut Connection, preset: godwit_lab::workload::Preset) -> anyhow::Result<Service> {
    let request = RunRequest {
        name: SERVICE.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Rootfs(preset.rootfs.to_string_lossy().into_owned())),
        command: preset.command,
        env: preset.env,
        user: preset.user.unwrap_or_default(),
        ..RunRequest::default()
    };
    let answer = connection.node.run(request).await;
    Ok(answer.map_err(|status| connection.explain(&status))?.into_inner())
}

async fn migrate(connection: &Connection, global: &Global) -> anyhow::Result<MigrationReport> {
    let request =
        MigrateRequest { name: SERVICE.to_owned(), to: DESTINATION.to_owned(), mode: "cold".to_owned() };
    let mut events = migrate::start(connection.clone(), request);
    let mut progress = Progress::new(SERVICE, global.json);
    loop {
        match events.recv().await {
            Some(Ok(migration_event::Kind::Progress(step))) => progress.show(&step),
            Some(Ok(migration_event::Kind::Report(report))) => {
                progress.end();
                return Ok(report);
            }
            Some(Err(error)) => {
                progress.end();
                return Err(error.into());
            }
            None => {
                progress.end();
                bail!("godwitd ended the migration without a report");
            }
        }
    }
}

fn print(Seen { report, client }: &Seen, global: &Global) -> anyhow::Result<()> {
    if global.json {
        let mut value = serde_json::to_value(report)?;
        value["downtime_ms"] = client.downtime_ms.into();
        value["lost_ops"] = (client.lost_ops + client.wrong).into();
        value["reconnects"] = client.reconnects.into();
        return Ok(output::json(&value)?);
    }
    let mut table = Table::plain();
    let mut row = |name: &str, value: String| table.row([format!("    {name}"), value]);
    row("outcome", format!("{} from {} to {}", report.outcome, report.source, report.destination));
    row("frozen time", output::millis(report.frozen_ms));
    row("downtime as the client saw it", output::millis(client.downtime_ms));
    row("total time", output::millis(report.total_ms));
    row("memory of the service", output::bytes(report.memory_bytes));
    row("bytes on the wire", output::bytes(report.wire_bytes));
    row("requests sent", client.sent.to_string());
    row("lost answers", client.lost_ops.to_string());
    row("wrong answers", client.wrong.to_string());
    row("reconnects", client.reconnects.to_string());
    Ok(table.print()?)
}

/// The lab's functions block, so they run on a thread that may.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(work).await?
}
