//! `godwit prepare`: send a service's layers, files and memory ahead, so that its move takes less.

use std::{process::ExitCode, time::Duration};

use godwit_api::v1::{MigrateRequest, MigrationReport, migration_event};
use tokio::time::MissedTickBehavior;
use tonic::Code;

use crate::{
    client::{ClientError, Connection},
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    migration::{self, Outcome},
    output,
    progress::Progress,
    values,
};

/// Send a service's image layers, files and memory ahead, so that its move takes less
///
/// The service runs on and stays where it is. The destinations retain its pages in memory and its changed files and volumes on
/// disk (`godwitd serve --retained-memory` and `--retained-files` are the bounds), and a move to one of them sends only what
/// differs. Shared memory crosses with the move. A move of the service, or a check, ends a preparation that is under way.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  godwit prepare redis --to b
  godwit prepare redis --to b,c --every 30s --max-bandwidth 100mbit")]
pub(crate) struct Args {
    /// The service
    name: String,
    /// The nodes that it may move to
    #[arg(long, value_name = "NODE", value_delimiter = ',', required = true)]
    to: Vec<String>,
    /// Do it again and again, in this time (10s at least), until Ctrl-C
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    every: Option<Duration>,
    /// Most bandwidth for its layers, its files and its memory, such as 50MB/s or 400mbit
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    max_bandwidth: Option<u64>,
    /// Network namespace at the destination, as for `migrate`
    #[arg(long, value_name = "ns:PATH")]
    network: Option<String>,
    /// What becomes of a bind mount or an engine's volume, by its target, as for `migrate`: a destination refuses what it refuses then
    #[arg(long, value_name = "TARGET=WHAT", value_parser = values::on_move)]
    mount: Vec<(String, String)>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let mut interrupts = Interrupts::new()?;
    let Some(every) = args.every else {
        let connection = Connection::open(global).await?;
        return Ok(match prepare_all(&args, &connection, global, &mut interrupts).await? {
            None => ExitCode::from(INTERRUPTED),
            Some(Ended { all: true, .. }) => ExitCode::SUCCESS,
            Some(_) => ExitCode::FAILURE,
        });
    };
    let mut clock = tokio::time::interval(every.max(SHORTEST));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = clock.tick() => {}
            () = interrupts.next() => return Ok(ExitCode::SUCCESS),
        }
        // godwitd may be upgraded meanwhile.
        let ended = match Connection::open(global).await {
            Ok(connection) => prepare_all(&args, &connection, global, &mut interrupts).await,
            Err(error) => Err(error),
        };
        match ended {
            Ok(None) => return Ok(ExitCode::SUCCESS),
            Ok(Some(Ended { hopeless: true, .. })) => return Ok(ExitCode::FAILURE),
            Ok(Some(_)) => {}
            Err(error) => output::note(&format!("Warning: {error}")),
        }
    }
}

/// The shortest time between two preparations.
const SHORTEST: Duration = Duration::from_secs(10);

/// How the preparations for all nodes have ended.
#[derive(Default)]
struct Ended {
    /// All nodes are prepared.
    all: bool,
    /// There is no such service, or none of the nodes.
    hopeless: bool,
}

/// Prepares the move to each node; `None`: the user interrupted it.
async fn prepare_all(
    args: &Args,
    connection: &Connection,
    global: &Global,
    interrupts: &mut Interrupts,
) -> Result<Option<Ended>, ClientError> {
    let mut ended = Ended { all: true, hopeless: true };
    for to in &args.to {
        let request = MigrateRequest {
            name: args.name.clone(),
            to: to.clone(),
            max_bandwidth: args.max_bandwidth.unwrap_or(0),
            network: args.network.clone().unwrap_or_default(),
            mounts: args.mount.iter().cloned().collect(),
            ..MigrateRequest::default()
        };
        match prepare(connection, request, global, interrupts).await {
            Ok(None) => return Ok(None),
            Ok(Some(report)) => {
                ended.all &= tell(&report, global);
                ended.hopeless = false;
            }
            // One node that is not prepared does not keep others from it.
            Err(ClientError::Refused { code, message }) => {
                output::note(&format!("Error: {message}"));
                ended.all = false;
                ended.hopeless &= code == Code::NotFound;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(Some(ended))
}

/// Prepares one move, and returns its report.
async fn prepare(
    connection: &Connection,
    request: MigrateRequest,
    global: &Global,
    interrupts: &mut Interrupts,
) -> Result<Option<MigrationReport>, ClientError> {
    let (name, to) = (request.name.clone(), request.to.clone());
    let mut progress = Progress::preparing(&name, global.json);
    // godwitd ends it when these are dropped.
    let mut events = migration::prepare(connection.clone(), request);
    let ended = loop {
        tokio::select! {
            biased;
            event = events.recv() => match event {
                Some(Ok(migration_event::Kind::Progress(step))) => progress.show(&step),
                Some(Ok(migration_event::Kind::Report(report))) => break Ok(Some(report)),
                Some(Err(error)) => break Err(error),
                None => {
                    let cause = format!("it ended the preparation of {name} for {to} without a report");
                    break Err(ClientError::Lost { socket: connection.socket().to_owned(), cause });
                }
            },
            () = interrupts.next() => break Ok(None),
        }
    };
    progress.end();
    ended
}

/// Says how it ended, and whether it is prepared.
fn tell(report: &MigrationReport, global: &Global) -> bool {
    let is_prepared = Outcome::of(report) == Outcome::Prepared;
    let (name, to) = (&report.name, &report.destination);
    if global.json {
        // A reader that has gone does not stop what others may count on.
        let _ = output::json(report);
    } else if is_prepared {
        let _ = output::line(&format!(
            "{name} can move to {to}: {} of its memory and {} of its files are there, {} were sent in {}",
            output::bytes(report.retained_bytes),
            output::bytes(report.retained_file_bytes),
            output::bytes(report.wire_bytes),
            output::millis(report.total_ms),
        ));
    }
    if report.not_retained_bytes > 0 {
        output::note(&format!(
            "Warning: node {to} has no room for {} more of {name} (godwitd serve --retained-memory there): they cross with the move",
            output::bytes(report.not_retained_bytes)
        ));
    }
    if is_prepared && !report.files_stay.is_empty() {
        output::note(&format!(
            "Warning: the files of {name} cross with the move to {to}: {}",
            report.files_stay
        ));
    }
    if !is_prepared {
        output::note(&format!("Error: {name} is not prepared for {to}: {}", report.reason));
    }
    is_prepared
}
