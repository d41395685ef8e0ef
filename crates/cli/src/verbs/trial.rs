//! One move of a Redis under load in a lab: what the demo shows and the benchmark measures.

use std::{net::Ipv4Addr, time::Duration};

use anyhow::{Context as _, bail};
use godwit_api::v1::{MigrationReport, RunRequest, migration_event, run_request::Source};
use godwit_lab::{
    Lab,
    workload::{LoadReport, Preset, RedisClient, RedisLoad, Workload},
};
use tokio::task::spawn_blocking;

use crate::{
    cli::Global,
    client::Connection,
    output,
    verbs::{migrate, progress::Progress},
};

/// The nodes of a trial's lab.
pub(crate) const SOURCE: &str = "a";
pub(crate) const DESTINATION: &str = "b";
/// The service that moves.
pub(crate) const SERVICE: &str = "redis";
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// A request each millisecond.
const RATE: u32 = 1000;
/// How long the client is watched before and after the move, so that both sides of it are seen.
const WATCHED: Duration = Duration::from_secs(2);
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);

/// What came of it: the migration's report, and what the client saw.
pub(crate) struct Seen {
    pub(crate) report: MigrationReport,
    pub(crate) client: LoadReport,
}

impl Seen {
    /// Nothing was lost and the service is where it should be; else why not.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let Self { report, client } = self;
        if report.outcome != "moved" {
            return Err(format!("{} was kept on {}: {}", report.name, report.source, report.reason));
        }
        if client.is_clean() {
            return Ok(());
        }
        let broken = client.broken.as_ref().map(|reason| format!(", and its connection broke: {reason}"));
        Err(format!(
            "the client lost {} answers and got {} wrong ones{}",
            client.lost_ops,
            client.wrong,
            broken.unwrap_or_default()
        ))
    }

    /// The report with what a benchmark adds to it.
    pub(crate) fn json(&self, series: &str) -> serde_json::Result<serde_json::Value> {
        let mut value = serde_json::to_value(&self.report)?;
        value["series"] = series.into();
        value["downtime_ms"] = self.client.downtime_ms.into();
        value["lost_ops"] = (self.client.lost_ops + self.client.wrong).into();
        value["reconnects"] = self.client.reconnects.into();
        value["requests"] = self.client.sent.into();
        Ok(value)
    }
}

/// The clients of one Redis: one that filled it and will check the data, one that keeps it busy.
pub(crate) struct Clients {
    data: RedisClient,
    load: RedisLoad,
    memory: u64,
}

impl Clients {
    /// Fills the Redis and keeps it busy; returns when it has been watched for a while.
    pub(crate) async fn start(
        lab: &Lab,
        preset: &Preset,
        memory: u64,
        say: impl Fn(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<Self> {
        let redis = preset.at(ADDRESS);
        say(&format!("filling it with {}", output::bytes(memory)))?;
        let there = lab.clone();
        let data = blocking(move || {
            let mut data = RedisClient::connect(&there, "client", redis, START)?;
            data.fill(memory)?;
            Ok(data)
        })
        .await
        .context("Redis could not be filled")?;
        say("a client on another host sends a request each millisecond over one connection")?;
        let there = lab.clone();
        let load = blocking(move || Ok(RedisLoad::start(&there, "client", redis, RATE)?)).await?;
        tokio::time::sleep(WATCHED).await;
        Ok(Self { data, load, memory })
    }

    /// Watches for a while longer, and checks the data over the connection that wrote it.
    pub(crate) async fn finish(
        self,
        say: impl Fn(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<LoadReport> {
        let Self { mut data, load, memory } = self;
        tokio::time::sleep(WATCHED).await;
        let report = blocking(move || Ok(load.stop()?)).await?;
        if report.broken.is_none() {
            say("reading all data back from where it is now, over the connection that wrote it")?;
            blocking(move || Ok(data.check_fill(memory)?)).await?;
        }
        Ok(report)
    }
}

/// Runs Redis on the source of a lab with daemons, fills it, and moves it with godwit.
pub(crate) async fn with_godwit(
    lab: &Lab,
    memory: u64,
    how: &migrate::How,
    global: &Global,
    say: impl Fn(&str) -> std::io::Result<()>,
) -> anyhow::Result<Seen> {
    let there = Global {
        json: global.json,
        socket: Some(lab.socket(SOURCE)?),
        node: None,
        lab: lab.name().to_owned(),
    };
    let mut connection = Connection::open(&there).await?;
    say(&format!("running the distribution's Redis on {SOURCE} as {ADDRESS}"))?;
    let directory = lab.state(SOURCE)?.with_file_name("trial-redis");
    let preset = blocking(move || Ok(Workload::Redis.build(directory)?)).await?;
    let request = RunRequest {
        name: SERVICE.to_owned(),
        address: ADDRESS.to_string(),
        source: Some(Source::Rootfs(preset.rootfs.to_string_lossy().into_owned())),
        command: preset.command.clone(),
        env: preset.env.clone(),
        user: preset.user.clone().unwrap_or_default(),
        ..RunRequest::default()
    };
    connection.node.run(request).await.map_err(|status| connection.explain(&status))?;
    let clients = Clients::start(lab, &preset, memory, &say).await?;
    say(&format!("godwit migrate {SERVICE} --to {DESTINATION}"))?;
    let report = moved(&connection, how, global).await?;
    let client = clients.finish(&say).await?;
    Ok(Seen { report, client })
}

async fn moved(
    connection: &Connection,
    how: &migrate::How,
    global: &Global,
) -> anyhow::Result<MigrationReport> {
    let mut events = migrate::start(connection.clone(), how.request(SERVICE, DESTINATION));
    let mut progress = Progress::new(SERVICE, global.json);
    let outcome = loop {
        match events.recv().await {
            Some(Ok(migration_event::Kind::Progress(step))) => progress.show(&step),
            Some(Ok(migration_event::Kind::Report(report))) => break Some(Ok(report)),
            Some(Err(error)) => break Some(Err(error)),
            None => break None,
        }
    };
    progress.end();
    match outcome {
        Some(outcome) => Ok(outcome?),
        None => bail!("godwitd ended the migration of {SERVICE} without a report"),
    }
}

/// The lab's functions block, so they run on a thread that may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(work).await?
}
