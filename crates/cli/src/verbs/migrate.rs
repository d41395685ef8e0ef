//! `godwit migrate`: move a service to another node, show how it goes, report.
//!
//! Ctrl-C does not abandon the migration: it asks the daemon to cancel it and then still waits
//! for the report, which tells whether the request came before the commit.

use std::process::ExitCode;

use clap::ValueEnum;
use godwit_api::v1::{
    CancelResponse, MigrateRequest, MigrationEvent, MigrationProgress, MigrationReport, ServiceRequest,
    migration_event,
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    task::JoinSet,
};

use crate::{
    cli::Global,
    client::{ClientError, Connection},
    output::{self, Table},
    values,
    verbs::progress::Progress,
};

/// Exit code after Ctrl-C, as shells have it.
pub(crate) const INTERRUPTED: u8 = 130;
/// Exit code for a service that is no more: neither where it was nor where it was to go.
const LOST: u8 = 3;

/// Move a service to another node, with its memory and open connections
///
/// Any node can be asked. Ctrl-C cancels a migration that has not committed yet; the service
/// then goes on at its source. With --json each step is a line, {"event":"progress",…}, and the last
/// line is the report. Ends with 1 (130 after Ctrl-C) when it was aborted, and with 3 when it
/// was lost: pages that had stayed at the source were gone before they could follow.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The service
    name: String,
    /// Where it shall go
    #[arg(long, value_name = "NODE")]
    to: String,
    /// How its memory moves
    #[arg(long, value_enum, default_value_t)]
    mode: Mode,
    /// Where the network namespace is at the destination, for a service in one of yours [default: where it
    /// is at the source]
    #[arg(long, value_name = "ns:PATH")]
    network: Option<String>,
    #[command(flatten)]
    how: How,
}

/// How the memory moves, beside the mode.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct How {
    /// Longest frozen time in milliseconds; the migration is aborted when more is predicted
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    max_frozen_ms: Option<u32>,
    /// Most rounds of copying while it runs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_rounds: Option<u32>,
    /// Most bandwidth for its memory, such as 50MB/s or 400mbit
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    max_bandwidth: Option<u64>,
    /// Whether its memory is compressed on the wire
    #[arg(long, value_enum, default_value_t)]
    compress: Compress,
    /// What may be done to a service that writes faster than the link carries
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    allow: Vec<Allow>,
    /// Connections for its memory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    streams: Option<u32>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Mode {
    /// As what is measured suggests
    #[default]
    Auto,
    /// Freeze, move everything, resume
    Cold,
    /// Copy in rounds while it runs, freeze for the rest
    Precopy,
    /// Freeze, resume at the destination, and let the memory follow
    Postcopy,
    /// Copy once while it runs; what was written meanwhile follows after the resume
    Hybrid,
}

impl Mode {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cold => "cold",
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Compress {
    /// Where the link is slower than the compressor
    #[default]
    Auto,
    /// Never
    Off,
    /// Always, fast
    Lz4,
    /// Always, small
    Zstd,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Allow {
    /// It may be given less CPU until it has moved
    Throttle,
    /// Pages may follow after the commit: losing the source meanwhile loses the service
    Postcopy,
}

impl How {
    /// Over this many connections, and without compression: what a link carries shall be seen.
    pub(crate) fn plain(streams: u32) -> Self {
        Self { streams: Some(streams), compress: Compress::Off, ..Self::default() }
    }

    /// Connections for memory: two where nothing else was asked for.
    pub(crate) fn streams(&self) -> u32 {
        self.streams.unwrap_or(2)
    }

    /// The request that moves a service so.
    pub(crate) fn request(&self, mode: Mode, name: &str, to: &str) -> MigrateRequest {
        let compress = match self.compress {
            Compress::Auto => "auto",
            Compress::Off => "off",
            Compress::Lz4 => "lz4",
            Compress::Zstd => "zstd",
        };
        MigrateRequest {
            name: name.to_owned(),
            to: to.to_owned(),
            mode: mode.as_str().to_owned(),
            max_frozen_ms: self.max_frozen_ms.unwrap_or(0),
            max_rounds: self.max_rounds.unwrap_or(0),
            max_bandwidth: self.max_bandwidth.unwrap_or(0),
            compress: compress.to_owned(),
            allow_throttle: self.allow.contains(&Allow::Throttle),
            allow_postcopy: self.allow.contains(&Allow::Postcopy),
            streams: self.streams.unwrap_or(0),
            network: String::new(),
        }
    }
}

pub(crate) async fn run(args: Args, global: &Global) -> anyhow::Result<ExitCode> {
    let connection = Connection::open(global).await?;
    let mut interrupts = Interrupts::new()?;
    let mut progress = Progress::events(&args.name, global.json);
    let mut request = args.how.request(args.mode, &args.name, &args.to);
    request.network = args.network.unwrap_or_default();
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
                    if matches!(error, ClientError::Lost { .. }) {
                        anyhow::bail!("{error}{}", known(&last, &args.name, &args.to));
                    }
                    return Err(error.into());
                }
                None => {
                    progress.end();
                    anyhow::bail!(
                        "godwitd on {} ended the migration of {} without a report; `godwit inspect {}` tells how it stands",
                        connection.socket().display(), args.name, args.name
                    );
                }
            },
            () = interrupts.next() => {
                if interrupted {
                    progress.end();
                    output::note(&format!(
                        "Error: left while the migration of {0} was being cancelled; `godwit inspect {0}` tells how it ends",
                        args.name
                    ));
                    return Ok(ExitCode::from(INTERRUPTED));
                }
                interrupted = true;
                progress.say(&format!("cancelling the migration of {}; Ctrl-C again leaves it to godwitd", args.name));
                cancelling.spawn(cancel(connection.clone(), args.name.clone()));
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
    finish(&report, global, interrupted)
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
            "; the migration had committed: {name} is on node {to}, and {} of {} of its memory that was still to follow had been sent; `godwit inspect {name}` on node {to} tells whether it waits for the rest, which comes when this godwitd runs again",
            output::bytes(last.bytes_done),
            output::bytes(last.bytes_total),
        ),
        phase => format!(
            "; the migration of {name} to node {to} was in its phase {phase:?} and had not committed as far as is known here: if it had not, {name} goes on where it was when this godwitd runs again"
        ),
    }
}

/// Runs the call in a task of its own, so that Ctrl-C is heard at every moment of it.
pub(crate) fn start(
    mut connection: Connection,
    request: MigrateRequest,
) -> mpsc::UnboundedReceiver<Result<migration_event::Kind, ClientError>> {
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut stream = match connection.node.migrate(request).await {
            Ok(answer) => answer.into_inner(),
            Err(status) => {
                let _ = sender.send(Err(connection.explain(&status)));
                return;
            }
        };
        loop {
            let message = match stream.message().await {
                Ok(Some(MigrationEvent { kind: Some(kind) })) => Ok(kind),
                Ok(Some(MigrationEvent { kind: None })) => continue,
                Ok(None) => return,
                Err(status) => Err(connection.explain(&status)),
            };
            let last = message.is_err();
            if sender.send(message).is_err() || last {
                return;
            }
        }
    });
    receiver
}

async fn cancel(mut connection: Connection, name: String) -> Result<CancelResponse, ClientError> {
    let answer = connection.node.cancel(ServiceRequest { name }).await;
    answer.map(tonic::Response::into_inner).map_err(|status| connection.explain(&status))
}

/// SIGINT and SIGTERM: both ask for an orderly end.
pub(crate) struct Interrupts {
    interrupt: Signal,
    terminate: Signal,
}

impl Interrupts {
    pub(crate) fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
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
                "{name} runs in the network namespace {there} on {to} now. Its addresses are yours to move: \
                 give them to an interface there and announce them, and take them from the one on {from}, \
                 which stays silent until a service runs in it again",
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
    Ok(match (report.outcome.as_str(), interrupted) {
        ("moved", _) => ExitCode::SUCCESS,
        ("lost", _) => ExitCode::from(LOST),
        (_, true) => ExitCode::from(INTERRUPTED),
        (_, false) => ExitCode::FAILURE,
    })
}

/// In a sentence, why a service is not where it was to go; nothing when it is.
pub(crate) fn failure(report: &MigrationReport) -> Option<String> {
    let MigrationReport { name, source, destination, reason, .. } = report;
    match report.outcome.as_str() {
        "moved" => None,
        "lost" => Some(format!("{name} was lost on {destination}: {reason}")),
        _ => Some(format!("migration of {name} aborted, it stays on {source}: {reason}")),
    }
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
