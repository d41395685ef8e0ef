//! `godwit lab demo crossing`: a Redis changes its instruction set while a client uses it, and comes back.
//!
//! ```text
//!   a: this machine                                     b: an emulated machine of the other set
//!   Redis, built by godwit-cc ── godwit migrate ─────▶  goes on under the executables of its image for b
//!                             ◀───── godwit migrate ──
//!   client ────────────── one connection, never renewed ──────────────▶
//! ```

use std::{
    path::PathBuf,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{bail, ensure};
use godwit_api::v1::{MigrationReport, NodesRequest, run_request::Source};
use godwit_cli::{
    client::Connection,
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    migration::{self, How, Mode, Outcome},
    output::{self, Table},
    values,
};
use godwit_lab::{Lab, LabConfig, workload::LoadReport};

use crate::{
    redis,
    stage::{godwit, in_lab},
    trial::{self, ADDRESS, Clients, DESTINATION, SERVICE, SOURCE, blocking},
};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the demo's lab; one that a demo left behind under it is taken down first
    #[arg(long, value_name = "NAME", default_value = "crossing")]
    name: String,
    /// Directory of the images of services for both instruction sets, as `make base-image` builds them
    #[arg(long, value_name = "DIR", default_value = "target/base")]
    images: PathBuf,
    /// Directory of godwit's packages, which the machine installs
    #[arg(long, value_name = "DIR", env = "GODWIT_PACKAGES", default_value = "target/packages")]
    packages: PathBuf,
    /// How much data Redis holds
    #[arg(long, value_name = "SIZE", default_value = "16MiB", value_parser = values::size)]
    memory: u64,
    /// How its memory moves
    #[arg(long, value_enum, default_value_t)]
    mode: Mode,
    /// Its client's requests a second
    #[arg(long, value_name = "NUMBER", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
}

/// What the other node is.
const MACHINE: &str = if cfg!(target_arch = "aarch64") { "debian12/amd64" } else { "arm64" };
/// How long an emulated processor may take to let all threads come to a poll.
const PARK_MS: u32 = 60_000;
/// How long the machine may take until it is a node of the cluster.
const READY: Duration = Duration::from_secs(240);
/// Between two looks at that.
const PAUSE: Duration = Duration::from_millis(200);

/// What came of the demo.
struct Seen {
    /// Each move, and what `uname -m` says in the service after it.
    moves: Vec<(MigrationReport, String)>,
    client: LoadReport,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    let image = redis::image(&args.images)?;
    let say = |text: &str| if global.json { Ok(()) } else { output::line(&format!("==> {text}")) };
    say(&format!("bringing up a lab: node a, node b as an emulated machine ({MACHINE}), and a client host"))?;
    let mut config = LabConfig::new(args.name.clone(), [SOURCE, DESTINATION]);
    config.packages = Some(args.packages.clone());
    config.machines.insert(DESTINATION.to_owned(), MACHINE.parse()?);
    let outcome = in_lab(config, false, async |lab| {
        let outcome = tokio::select! {
            outcome = there_and_back(lab, &args, image, global, say) => outcome.map(Some),
            () = interrupts.next() => Ok(None),
        };
        say("taking the lab down")?;
        outcome
    });
    let Some(seen) = outcome.await? else {
        output::note("Error: ended by Ctrl-C before the demo was over");
        return Ok(ExitCode::from(INTERRUPTED));
    };
    if global.json {
        for (report, machine) in &seen.moves {
            let mut row = serde_json::to_value(report)?;
            row["uname"] = machine.as_str().into();
            row["lost_ops"] = (seen.client.lost_ops + seen.client.wrong).into();
            row["reconnects"] = seen.client.reconnects.into();
            output::json(&row)?;
        }
    } else {
        moves(&seen).print()?;
        client(&seen).print()?;
    }
    match seen.client.loss() {
        None => Ok(ExitCode::SUCCESS),
        Some(loss) => bail!("the client {loss}"),
    }
}

async fn there_and_back(
    lab: &Lab,
    args: &Args,
    image: Source,
    global: &Global,
    say: impl Fn(&str) -> std::io::Result<()>,
) -> anyhow::Result<Seen> {
    let connection = trial::connect(lab, SOURCE).await?;
    both_ready(&connection).await?;
    say(&format!("running on a, as {ADDRESS}, the Redis of {}", args.images.join("redis.tar").display()))?;
    let listens = redis::run(&connection, &image, &[]).await?;
    let mut clients = Clients::start(lab, listens, (args.memory, args.rate), &say).await?;
    let mut at = SOURCE;
    say(&format!("godwit exec {SERVICE} uname -m: {}", machine(lab, at).await?))?;
    let mut moves = Vec::new();
    for to in [DESTINATION, SOURCE] {
        say(&format!("godwit migrate {SERVICE} --to {to}"))?;
        let mut request = How::default().request(args.mode, SERVICE, to);
        request.max_park_ms = PARK_MS;
        let (report, _) = trial::asked(&connection, request, global).await?;
        if let Some(failure) = migration::failure(&report) {
            bail!("the move to {to}: {failure}");
        }
        ensure!(
            Outcome::of(&report) == Outcome::Moved,
            "the move to {to} was {}: {}",
            report.outcome,
            report.reason
        );
        at = to;
        let machine = machine(lab, at).await?;
        say(&format!("godwit exec {SERVICE} uname -m: {machine}"))?;
        moves.push((report, machine));
        (clients, _) = clients.watch().await?;
    }
    ensure!(moves[0].1 != moves[1].1, "uname -m is {} on both nodes", moves[0].1);
    Ok(Seen { moves, client: clients.finish(&say).await? })
}

/// Waits until both nodes are there for services.
async fn both_ready(connection: &Connection) -> anyhow::Result<()> {
    let deadline = Instant::now() + READY;
    loop {
        let answer = connection.node.clone().nodes(NodesRequest::default()).await;
        let nodes = answer.map_err(|status| connection.explain(&status))?.into_inner().nodes;
        if nodes.iter().filter(|node| node.state == "ready").count() == 2 {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "node {DESTINATION} is not ready after {} s", READY.as_secs());
        // No event tells it.
        tokio::time::sleep(PAUSE).await;
    }
}

/// What the kernel says to a process of the service that its machine is.
async fn machine(lab: &Lab, node: &'static str) -> anyhow::Result<String> {
    let lab = lab.clone();
    blocking(move || godwit(&lab, node, &["exec", SERVICE, "uname", "-m"])).await
}

fn moves(seen: &Seen) -> Table {
    let mut table =
        Table::new(["FROM", "TO", "GOES ON AS", "MODE", "FROZEN", "OF IT REST", "REWRITING", "ON THE WIRE"]);
    for (report, machine) in &seen.moves {
        table.row([
            report.source.clone(),
            report.destination.clone(),
            machine.clone(),
            report.mode.clone(),
            output::millis(report.frozen_ms),
            output::millis(report.park_ms),
            output::millis(report.rewrite_ms),
            output::bytes(report.wire_bytes),
        ]);
    }
    table
}

fn client(Seen { client, .. }: &Seen) -> Table {
    let mut table = Table::plain();
    let mut row = |name: &str, value: String| table.row([format!("    {name}"), value]);
    row("requests sent over one connection", client.sent.to_string());
    row("lost answers", client.lost_ops.to_string());
    row("wrong answers", client.wrong.to_string());
    row("reconnects", client.reconnects.to_string());
    table
}
