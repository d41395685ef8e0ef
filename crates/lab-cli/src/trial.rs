//! Moves of a Redis under load in a lab: what the demo shows and the benchmark measures.

use std::{
    net::{Ipv4Addr, SocketAddrV4},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail, ensure};
use godwit_api::v1::{MigrateRequest, MigrationReport, RunRequest, migration_event, run_request::Source};
use godwit_cli::{
    client::Connection,
    global::Global,
    migration::{self, How, Mode, Outcome},
    output,
    progress::Progress,
};
use godwit_lab::{
    Lab,
    workload::{Answers, ClosedLoop, LoadReport, Preset, RedisClient, RedisLoad, Timeline, Workload, Writes},
};
use tokio::task::spawn_blocking;

use crate::iperf;

/// The nodes of a trial's lab.
pub(crate) const SOURCE: &str = "a";
pub(crate) const DESTINATION: &str = "b";
/// The service that moves.
pub(crate) const SERVICE: &str = "redis";
pub(crate) const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 88, 0, 10);
/// How long the client is watched before and after the move, so that both sides of it are seen.
const WATCHED: Duration = Duration::from_secs(2);
/// How long Redis may take to answer its first request.
const START: Duration = Duration::from_secs(10);

/// What shall be moved, and how.
#[derive(Debug, Clone)]
pub(crate) struct Job {
    /// Data in the Redis, bytes.
    pub(crate) memory: u64,
    /// Its client's requests a second, each of which writes somewhere in the data.
    pub(crate) rate: u32,
    /// How its memory moves.
    pub(crate) mode: Mode,
    pub(crate) how: How,
    /// Whether it moves back after that.
    pub(crate) back: bool,
    /// Whether one more client asks for as much as it can get.
    pub(crate) busy: bool,
}

/// What came of it: the migration's report, and what the client saw.
pub(crate) struct Seen {
    pub(crate) report: MigrationReport,
    pub(crate) client: LoadReport,
    /// What left the host that the service left, with all headers; the client's part is in it.
    link_bytes: u64,
    moments: Moments,
    /// 99 of 100 of the client's requests took no longer, before the move and while memory was copied.
    p99_ms: [Option<f64>; 2],
    /// Requests a second that a client got answered who asked for all it could get, in the same times.
    answered_s: [Option<f64>; 2],
    /// The same while iperf3 sent over the same link, and when that was.
    answered_iperf_s: Option<f64>,
    iperf: Option<(Instant, Instant)>,
}

/// When a move did what, as the client's clock has it.
#[derive(Clone, Copy)]
pub(crate) struct Moments {
    begun: Instant,
    /// The first round of copying began, and ended before the freeze, if there were any.
    copying: Option<(Instant, Option<Instant>)>,
    /// The most that a round sent, bytes of pages per second.
    pub(crate) bandwidth: f64,
}

impl Seen {
    /// Nothing was lost and the service is where it should be; else why not.
    pub(crate) fn verdict(&self) -> Result<(), String> {
        let Self { report, client, .. } = self;
        if let Some(failure) = migration::failure(report) {
            return Err(failure);
        }
        client.loss().map_or(Ok(()), |loss| Err(format!("the client {loss}")))
    }

    /// The report with what a benchmark adds to it.
    pub(crate) fn json(&self, series: &str) -> serde_json::Result<serde_json::Value> {
        let mut value = serde_json::to_value(&self.report)?;
        value["series"] = series.into();
        value["downtime_ms"] = self.client.downtime_ms.into();
        value["lost_ops"] = (self.client.lost_ops + self.client.wrong).into();
        value["reconnects"] = self.client.reconnects.into();
        value["requests"] = self.client.sent.into();
        value["link_bytes"] = self.link_bytes.into();
        let [before, copying] = self.p99_ms;
        value["p99_before_ms"] = before.into();
        value["p99_copy_ms"] = copying.into();
        if let [Some(before), copying] = self.answered_s {
            value["answered_before_s"] = before.into();
            value["answered_copy_s"] = copying.into();
            value["answered_iperf_s"] = self.answered_iperf_s.into();
            value["throughput_ratio"] = copying.map(|copying| copying / before).into();
            value["throughput_ratio_iperf"] = self.answered_iperf_s.map(|iperf| iperf / before).into();
        }
        Ok(value)
    }

    /// Fills in what can be told when the clients have ended.
    fn look(&mut self, timeline: &Timeline, answers: Option<&Answers>) {
        let Moments { begun, copying, .. } = self.moments;
        let before = begun.checked_sub(WATCHED).map(|from| (from, begun));
        let copying = copying.and_then(|(from, to)| Some((from, to?)));
        let p99 = |(from, to)| Some(timeline.quantile(from, to, 0.99)?.as_secs_f64() * 1e3);
        self.p99_ms = [before, copying].map(|window| p99(window?));
        let rate = |(from, to)| answers?.rate(from, to);
        self.answered_s = [before, copying].map(|window| rate(window?));
        self.answered_iperf_s = self.iperf.and_then(rate);
    }
}

/// The clients of one Redis: one that filled it and will check the data, one that keeps it busy.
pub(crate) struct Clients {
    lab: Lab,
    data: RedisClient,
    load: RedisLoad,
    busy: Option<ClosedLoop>,
    memory: u64,
}

impl Clients {
    /// Fills the Redis and keeps it busy; returns when it has been watched for a while.
    pub(crate) async fn start(
        lab: &Lab,
        redis: SocketAddrV4,
        (memory, rate): (u64, u32),
        say: impl Fn(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<Self> {
        say(&format!("filling it with {}", output::bytes(memory)))?;
        let data = unhurried(lab, move |lab| {
            let mut data = RedisClient::connect(lab, "client", redis, START)?;
            data.fill(memory)?;
            Ok(data)
        })
        .await
        .context("Redis could not be filled")?;
        let often = match rate {
            1000 => "a request each millisecond".to_owned(),
            rate => format!("{rate} requests a second"),
        };
        say(&format!("a client on another host sends {often} over one connection"))?;
        let there = lab.clone();
        let load = move || Ok(RedisLoad::start_writing(&there, "client", redis, rate, memory)?);
        let load = blocking(load).await?;
        tokio::time::sleep(WATCHED).await;
        Ok(Self { lab: lab.clone(), data, load, busy: None, memory })
    }

    /// Watches for a while longer; what the client saw since the start, or since this was asked last.
    pub(crate) async fn watch(self) -> anyhow::Result<(Self, LoadReport)> {
        tokio::time::sleep(WATCHED).await;
        blocking(move || {
            let report = self.load.lap()?;
            Ok((self, report))
        })
        .await
    }

    /// Watches for a while longer, and checks the data over the connection that wrote it.
    pub(crate) async fn finish(
        self,
        say: impl Fn(&str) -> std::io::Result<()>,
    ) -> anyhow::Result<LoadReport> {
        let Self { lab, mut data, load, memory, .. } = self;
        tokio::time::sleep(WATCHED).await;
        let mut report = blocking(move || Ok(load.stop()?)).await?;
        if report.broken.is_none() {
            say("reading all data back from where it is now, over the connection that wrote it")?;
            let writes = report.writes.take().unwrap_or_else(|| Writes::new(0));
            unhurried(&lab, move |_| Ok(data.check_written(memory, &writes)?)).await?;
        }
        Ok(report)
    }
}

/// Runs Redis on the source of a lab with daemons, fills it, and moves it with godwit: once, or there
/// and back again. A migration that was aborted is the last.
pub(crate) async fn with_godwit(
    lab: &Lab,
    job: &Job,
    global: &Global,
    say: impl Fn(&str) -> std::io::Result<()>,
) -> anyhow::Result<Vec<Seen>> {
    let connection = connect(lab, SOURCE).await?;
    say(&format!("running the distribution's Redis on {SOURCE} as {ADDRESS}"))?;
    let directory = lab.state(SOURCE)?.with_file_name("trial-redis");
    let preset = blocking(move || Ok(Workload::Redis.build(directory)?)).await?;
    start(&connection, &preset, SERVICE, ADDRESS).await?;
    let mut clients = Clients::start(lab, preset.at(ADDRESS), (job.memory, job.rate), &say).await?;
    let mut iperf = None;
    if job.busy {
        let (there, redis, memory) = (lab.clone(), preset.at(ADDRESS), job.memory);
        let start = move || Ok(ClosedLoop::start(&there, "client", redis, memory)?);
        clients.busy = Some(blocking(start).await?);
        tokio::time::sleep(WATCHED).await;
        // What any bulk of the same rate takes from it, on this machine and link.
        let (there, streams) = (lab.clone(), job.how.streams());
        let measure = move || iperf::measure(&there, (SOURCE, DESTINATION), streams);
        iperf = Some(blocking(measure).await?.window);
        tokio::time::sleep(WATCHED).await;
    }
    let mut all = Vec::new();
    let ways = [(SOURCE, DESTINATION), (DESTINATION, SOURCE)];
    for (from, to) in ways.into_iter().take(if job.back { 2 } else { 1 }) {
        say(&format!("godwit migrate {SERVICE} --to {to}"))?;
        let before = left(lab, from).await?;
        let (report, moments) = moved(&connection, job, SERVICE, to, global).await?;
        let link_bytes = left(lab, from).await?.saturating_sub(before);
        let client;
        (clients, client) = clients.watch().await?;
        let failed = Outcome::of(&report) != Outcome::Moved;
        all.push(Seen {
            report,
            client,
            link_bytes,
            moments,
            p99_ms: [None; 2],
            answered_s: [None; 2],
            answered_iperf_s: None,
            iperf,
        });
        if failed {
            break;
        }
    }
    let answers = match clients.busy.take() {
        Some(busy) => Some(blocking(move || Ok(busy.stop()?)).await?),
        None => None,
    };
    let total = clients.finish(&say).await?;
    for seen in &mut all {
        seen.look(&total.timeline, answers.as_ref());
    }
    // What went wrong after the last look belongs to the last move.
    if let Some(last) = all.last_mut()
        && last.client.is_clean()
        && !total.is_clean()
    {
        last.client = total;
    }
    Ok(all)
}

/// The daemon of a lab's node.
pub(crate) async fn connect(lab: &Lab, node: &str) -> anyhow::Result<Connection> {
    let there =
        Global { json: false, socket: Some(lab.socket(node)?), node: None, lab: lab.name().to_owned() };
    Ok(Connection::open(&there).await?)
}

/// The flags of a move in a lab of which nothing is shown on the way.
pub(crate) fn quiet(lab: &Lab) -> Global {
    Global { json: true, socket: None, node: None, lab: lab.name().to_owned() }
}

/// Runs a service of the distribution's on a node.
pub(crate) async fn start(
    node: &Connection,
    preset: &Preset,
    name: &str,
    address: Ipv4Addr,
) -> anyhow::Result<()> {
    let request = RunRequest {
        name: name.to_owned(),
        address: address.to_string(),
        source: Some(Source::Rootfs(preset.rootfs.to_string_lossy().into_owned())),
        command: preset.command.clone(),
        env: preset.env.clone(),
        user: preset.user.clone().unwrap_or_default(),
        ..RunRequest::default()
    };
    node.node.clone().run(request).await.map_err(|status| node.explain(&status))?;
    Ok(())
}

/// Bytes that a host has put on its link so far.
pub(crate) async fn left(lab: &Lab, host: &'static str) -> anyhow::Result<u64> {
    let lab = lab.clone();
    blocking(move || {
        let figures = lab.figures()?.into_iter().find(|figures| figures.host == host);
        Ok(figures.map_or(0, |figures| figures.counters.bytes_in))
    })
    .await
}

/// One move of a service, and when it did what.
pub(crate) async fn moved(
    connection: &Connection,
    job: &Job,
    service: &str,
    to: &str,
    global: &Global,
) -> anyhow::Result<(MigrationReport, Moments)> {
    asked(connection, job.how.request(job.mode, service, to), global).await
}

/// One move as a request says.
pub(crate) async fn asked(
    connection: &Connection,
    request: MigrateRequest,
    global: &Global,
) -> anyhow::Result<(MigrationReport, Moments)> {
    let service = request.name.clone();
    let mut moments = Moments { begun: Instant::now(), copying: None, bandwidth: 0.0 };
    let mut events = migration::start(connection.clone(), request);
    let mut progress = Progress::new(&service, global.json);
    let outcome = loop {
        match events.recv().await {
            Some(Ok(migration_event::Kind::Progress(step))) => {
                moments.see(&step.phase);
                moments.bandwidth = moments.bandwidth.max(step.bandwidth);
                progress.show(&step);
            }
            Some(Ok(migration_event::Kind::Report(report))) => break Some(Ok(report)),
            Some(Err(error)) => break Some(Err(error)),
            None => break None,
        }
    };
    progress.end();
    match outcome {
        Some(outcome) => Ok((outcome?, moments)),
        None => bail!("godwitd ended the migration of {service} without a report"),
    }
}

/// One move as a request says, which must end at the destination.
pub(crate) async fn moves(
    connection: &Connection,
    request: MigrateRequest,
    global: &Global,
) -> anyhow::Result<MigrationReport> {
    let (report, _) = asked(connection, request, global).await?;
    let MigrationReport { name, outcome, reason, .. } = &report;
    ensure!(Outcome::of(&report) == Outcome::Moved, "the move of {name} ended as {outcome}: {reason}");
    Ok(report)
}

impl Moments {
    /// A phase is reported a moment after it began: requests of the last moment before the freeze are
    /// left out, since they may have waited through it.
    fn see(&mut self, phase: &str) {
        const MARGIN: Duration = Duration::from_millis(50);
        let now = Instant::now();
        match (phase, &mut self.copying) {
            ("copy", copying @ None) => *copying = Some((now, None)),
            ("copy", _) | (_, None) => {}
            (_, Some((_, end))) => {
                end.get_or_insert(now.checked_sub(MARGIN).unwrap_or(now));
            }
        }
    }
}

/// Does what belongs to no measurement, over links without limits: at 1 Gbit/s the link would make most of
/// the time that filling and reading back of some gigabytes takes.
async fn unhurried<T: Send + 'static>(
    lab: &Lab,
    work: impl FnOnce(&Lab) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let lab = lab.clone();
    blocking(move || {
        let link = lab.config().link;
        if link.is_some() {
            lab.set_link(None)?;
        }
        let value = work(&lab)?;
        if link.is_some() {
            lab.set_link(link)?;
        }
        Ok(value)
    })
    .await
}

/// The lab's functions block, so they run on a thread that may.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    spawn_blocking(work).await?
}
