//! `godwit migrate`: move a service to another node, show how it goes, report.
//!
//! Ctrl-C does not abandon the migration: it asks the daemon to cancel it and then still waits
//! for the report, which tells whether the request came before the commit.

use std::process::ExitCode;

use godwit_api::v1::{
    CancelResponse, MigrateRequest, MigrationProgress, MigrationReport, ServiceRequest, migration_event,
};
use tokio::task::JoinSet;

use crate::{
    client::{ClientError, Connection},
    global::Global,
    interrupts::{INTERRUPTED, Interrupts},
    migration::{How, Mode, Outcome, failure, start},
    output::{self, Table},
    progress::Progress,
};

/// Exit code for a service that is no more: neither where it was nor where it was to go.
const LOST: u8 = 3;
/// Exit code where godwitd ended before it could tell the outcome.
const UNKNOWN: u8 = 4;

/// Move a service to another node, with its memory and open connections
///
/// Any node can be asked. Ctrl-C cancels a migration that has not committed yet; the service
/// then goes on at its source. With --json each step is a line, {"event":"progress",…}, and the last
/// line is the report. The exit code is 1 (130 after Ctrl-C) when it was aborted, 3 when it was lost
/// (pages that had stayed at the source were gone before they could follow), and 4 when the connection
/// to godwitd broke before the report: the message tells what is known, such as that it had committed.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
    /// The node to move it to
    #[arg(long, value_name = "NODE")]
    to: String,
    /// How its memory moves
    #[arg(long, value_enum, default_value_t)]
    mode: Mode,
    /// Network namespace at the destination, for a service in a namespace of yours [default: the same path
    /// as at the source]
    #[arg(long, value_name = "ns:PATH")]
    network: Option<String>,
    #[command(flatten)]
    how: How,
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let connection = Connection::open(global).await?;
    let mut request = args.how.request(args.mode, &args.name, &args.to);
    request.network = args.network.unwrap_or_default();
    Ok(carry_out(&connection, request, global).await?.code)
}

/// How a migration has ended, as far as it is known.
pub(crate) struct Ended {
    pub(crate) code: ExitCode,
    /// The destination has not taken the service, and another one may.
    pub(crate) is_refused: bool,
}

/// Carries a migration out, shows how it goes, and prints its report.
pub(crate) async fn carry_out(
    connection: &Connection,
    request: MigrateRequest,
    global: &Global,
) -> anyhow::Result<Ended> {
    let MigrateRequest { name, to, .. } = request.clone();
    let mut interrupts = Interrupts::new()?;
    let mut progress = Progress::events(&name, global.json);
    let mut events = start(connection.clone(), request);
    let mut cancelling = JoinSet::new();
    let mut interrupted = false;
    let mut last = MigrationProgress::default();
    let report = loop {
        tokio::select! {
            event = events.recv() => match event {
                Some(Ok(migration_event::Kind::Progress(step))) => {
                    progress.show(&step);
                    last = step;
                }
                Some(Ok(migration_event::Kind::Report(report))) => break report,
                Some(Err(error)) => {
                    progress.end();
                    if !matches!(error, ClientError::Lost { .. }) {
                        return Err(error.into());
                    }
                    output::note(&format!("Error: {error}{}", known(&last, &name, &to)));
                    return Ok(Ended { code: ExitCode::from(UNKNOWN), is_refused: false });
                }
                None => {
                    progress.end();
                    output::note(&format!(
                        "Error: godwitd on {} ended the migration of {name} without a report; `godwit inspect {name}` shows its state",
                        connection.socket().display()
                    ));
                    return Ok(Ended { code: ExitCode::from(UNKNOWN), is_refused: false });
                }
            },
            () = interrupts.next() => {
                if interrupted {
                    progress.end();
                    output::note(&format!(
                        "Error: left while the migration of {name} was being cancelled; `godwit inspect {name}` shows how it ends"
                    ));
                    return Ok(Ended { code: ExitCode::from(INTERRUPTED), is_refused: false });
                }
                interrupted = true;
                progress.say(&format!("cancelling the migration of {name}; Ctrl-C again leaves it to godwitd"));
                cancelling.spawn(cancel(connection.clone(), name.clone()));
            },
            Some(answer) = cancelling.join_next() => match answer {
                Ok(Ok(answer)) if answer.cancelled => progress.say("cancelled"),
                Ok(Ok(answer)) => progress.say(&format!("not cancelled: {}", answer.reason)),
                Ok(Err(error)) => progress.say(&format!("not cancelled: {error}")),
                Err(_) => progress.say("not cancelled: the request failed"),
            },
        }
    };
    progress.end();
    let is_refused = Outcome::of(&report) == Outcome::Aborted && report.refused && !interrupted;
    Ok(Ended { code: finish(&report, global, interrupted)?, is_refused })
}

/// What is known of a migration whose daemon has gone.
fn known(last: &MigrationProgress, name: &str, to: &str) -> String {
    match last.phase.as_str() {
        "" => String::new(),
        "commit" | "release" => {
            format!(
                "; the migration had committed: {name} is on node {to}, where `godwit inspect {name}` shows it"
            )
        }
        "serve" => format!(
            "; the migration had committed: {name} is on node {to}, and {} of {} of its memory that was still to follow had been sent; `godwit inspect {name}` on node {to} shows whether it waits for the rest, which follows once this godwitd runs again",
            output::bytes(last.bytes_done),
            output::bytes(last.bytes_total),
        ),
        phase => format!(
            "; the migration of {name} to node {to} was in phase {phase:?} and had not committed as far as this node knows: if so, {name} continues where it was once this godwitd runs again"
        ),
    }
}

async fn cancel(mut connection: Connection, name: String) -> Result<CancelResponse, ClientError> {
    let answer = connection.node.cancel(ServiceRequest { name }).await;
    answer.map(tonic::Response::into_inner).map_err(|status| connection.explain(&status))
}

fn finish(report: &MigrationReport, global: &Global, interrupted: bool) -> anyhow::Result<ExitCode> {
    let failure = failure(report);
    if global.json {
        output::json(report)?;
    } else if failure.is_none() {
        output::line(&format!("{} moved from {} to {}", report.name, report.source, report.destination))?;
        table(report).print()?;
        if !report.network_namespace.is_empty() {
            output::note(&format!(
                "{name} runs in the network namespace {there} on {to} now. Its addresses are yours to move: add them to an interface there and announce them, and remove them from the one on {from}, which stays silent until a service runs in it again",
                name = report.name,
                there = report.network_namespace,
                to = report.destination,
                from = report.source,
            ));
        }
    }
    if let Some(failure) = failure {
        output::note(&format!("Error: {failure}"));
    }
    Ok(match (Outcome::of(report), interrupted) {
        (Outcome::Moved, _) => ExitCode::SUCCESS,
        (Outcome::Lost, _) => ExitCode::from(LOST),
        (Outcome::Aborted | Outcome::Prepared, true) => ExitCode::from(INTERRUPTED),
        (Outcome::Aborted | Outcome::Prepared, false) => ExitCode::FAILURE,
    })
}

/// What a reader wants to know first; `--json` has every field.
fn table(report: &MigrationReport) -> Table {
    let mut table = Table::plain();
    let mut row = |name: &str, value: String| table.row([format!("  {name}"), value]);
    row(
        "mode",
        match report.why.as_str() {
            "" => report.mode.clone(),
            why => format!("{} ({why})", report.mode),
        },
    );
    row(
        "frozen time",
        match report.predicted_frozen_ms {
            0.0 => output::millis(report.frozen_ms),
            predicted => {
                format!("{} ({} predicted)", output::millis(report.frozen_ms), output::millis(predicted))
            }
        },
    );
    for phase in &report.phases {
        row(&format!("  {}", phase.phase), output::millis(phase.ms));
    }
    if !report.set.is_empty() {
        row("goes on by code for", report.set.clone());
        row("  rewriting its images", output::millis(report.rewrite_ms));
    }
    row("network's part", output::millis(report.cutover_ms));
    if report.held_frames > 0 || report.held_dropped > 0 {
        let dropped = match report.held_dropped {
            0 => String::new(),
            dropped => format!(", {dropped} more had no room and were dropped"),
        };
        row("frames that waited", format!("{}{dropped}", report.held_frames));
    }
    row("total time", output::millis(report.total_ms));
    if report.rounds > 0 {
        row("rounds", report.rounds.to_string());
        row("sent before the freeze", output::bytes(report.pre_dump_bytes));
    }
    row("sent while frozen", output::bytes(report.dump_bytes));
    if report.faulted_bytes > 0 {
        row("sent after the resume", output::bytes(report.faulted_bytes));
        row("  in", output::millis(report.faulted_transfer_ms));
        row("  pages waited for", format!("{}, beside the frozen time", report.faults));
    }
    row("on the wire", output::bytes(report.wire_bytes));
    row("  memory", output::bytes(report.memory_wire_bytes));
    row("  files", output::bytes(report.file_bytes));
    if report.retained_file_bytes > 0 {
        row("files that were sent ahead", output::bytes(report.retained_file_bytes));
    }
    if report.layers_from_registry_bytes > 0 {
        row("layers from their registry", output::bytes(report.layers_from_registry_bytes));
        row("layers from the source", output::bytes(report.layers_from_source_bytes));
    }
    if report.shared_bytes > 0 || report.shared_dump_bytes > 0 {
        row("  shared memory before the freeze", output::bytes(report.shared_bytes));
        row("  shared memory while frozen", output::bytes(report.shared_dump_bytes));
    }
    if report.shared_left_bytes > 0 {
        row("  shared memory that followed", output::bytes(report.shared_left_bytes));
    }
    row("memory of the service", output::bytes(report.memory_bytes));
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_known_of_a_migration_whose_daemon_has_gone_depends_on_how_far_it_was() {
        let told = |phase: &str| {
            let last = MigrationProgress {
                phase: phase.into(),
                bytes_done: 33 << 20,
                bytes_total: 41 << 20,
                ..MigrationProgress::default()
            };
            known(&last, "redis", "b")
        };
        assert_eq!(told(""), "");
        assert!(told("dump").contains("had not committed"));
        assert!(told("commit").contains("had committed: redis is on node b"));
        let serving = told("serve");
        assert!(
            serving.contains("33.0 MiB of 41.0 MiB") && serving.contains("`godwit inspect redis` on node b"),
            "{serving}"
        );
    }
}
