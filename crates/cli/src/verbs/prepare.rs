//! `godwit prepare`: send a service's layers and memory ahead, so that its move takes less.

use std::{process::ExitCode, time::Duration};

use godwit_api::v1::{MigrateRequest, MigrationReport, ServiceRequest, migration_event};
use tokio::time::MissedTickBehavior;

use crate::{
    client::{ClientError, Connection},
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    migration::{self, Outcome, failure},
    output,
    progress::Progress,
    values,
};

/// Send a service's image layers and memory ahead, so that its move takes less
///
/// The service runs on and stays where it is. The destinations keep its pages in memory (`godwitd serve --retained-memory`
/// is the bound), and a move to one of them sends only those that differ. Files and volumes are not kept: they cross with
/// the move.
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
    /// Do it again and again, in this time, until Ctrl-C
    #[arg(long, value_name = "DURATION", value_parser = values::duration)]
    every: Option<Duration>,
    /// Most bandwidth for its memory, such as 50MB/s or 400mbit
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    max_bandwidth: Option<u64>,
    /// What becomes of a bind mount, by its target, as for `migrate`: a destination refuses what it refuses then
    #[arg(long, value_name = "TARGET=WHAT", value_parser = values::on_move)]
    mount: Vec<(String, String)>,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    let Some(every) = args.every else {
        let prepared = prepare_all(&args, &connection, global, &mut interrupts).await?;
        return Ok(prepared.unwrap_or(ExitCode::from(INTERRUPTED)));
    };
    let mut clock = tokio::time::interval(every.max(Duration::from_secs(1)));
    clock.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = clock.tick() => {}
            () = interrupts.next() => return Ok(ExitCode::SUCCESS),
        }
        match prepare_all(&args, &connection, global, &mut interrupts).await {
            Ok(Some(_)) => {}
            Ok(None) => return Ok(ExitCode::SUCCESS),
            // It may just be moving, or a node may be away.
            Err(error @ ClientError::Refused { .. }) => output::note(&format!("Warning: {error}")),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Prepares the move to each node; `None`: the user interrupted it.
async fn prepare_all(
    args: &Args,
    connection: &Connection,
    global: &Global,
    interrupts: &mut Interrupts,
) -> Result<Option<ExitCode>, ClientError> {
    let mut code = ExitCode::SUCCESS;
    for to in &args.to {
        let request = MigrateRequest {
            name: args.name.clone(),
            to: to.clone(),
            max_bandwidth: args.max_bandwidth.unwrap_or(0),
            mounts: args.mount.iter().cloned().collect(),
            ..MigrateRequest::default()
        };
        let Some(report) = prepare(connection, request, global, interrupts).await? else { return Ok(None) };
        if !tell(&report, global) {
            code = ExitCode::FAILURE;
        }
    }
    Ok(Some(code))
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
    let mut events = migration::prepare(connection.clone(), request);
    let ended = loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(Ok(migration_event::Kind::Progress(step))) => progress.show(&step),
                Some(Ok(migration_event::Kind::Report(report))) => break Ok(Some(report)),
                Some(Err(error)) => break Err(error),
                None => {
                    let cause = format!("it ended the preparation of {name} for {to} without a report");
                    break Err(ClientError::Lost { socket: connection.socket().to_owned(), cause });
                }
            },
            () = interrupts.next() => {
                let mut connection = connection.clone();
                // The service runs on whatever the answer is.
                let cancelled = connection.node.cancel(ServiceRequest { name: name.clone() }).await;
                break match cancelled {
                    Ok(_) => Ok(None),
                    Err(status) => Err(connection.explain(&status)),
                };
            }
        }
    };
    progress.end();
    ended
}

/// Says how it ended, and whether it is prepared.
fn tell(report: &MigrationReport, global: &Global) -> bool {
    let is_prepared = Outcome::of(report) == Outcome::Prepared;
    if global.json {
        // A reader that has gone does not stop what others may count on.
        let _ = output::json(report);
    } else if is_prepared {
        let _ = output::line(&format!(
            "{} can move to {}: {} of its memory are there, {} were sent in {}",
            report.name,
            report.destination,
            output::bytes(report.retained_bytes),
            output::bytes(report.wire_bytes),
            output::millis(report.total_ms),
        ));
    }
    if let Some(failure) = failure(report) {
        output::note(&format!("Error: {failure}"));
    }
    is_prepared
}
