//! A migration as a client asks for it and follows it: its flags, its request, its events, its outcome.

use clap::ValueEnum;
use godwit_api::v1::{MigrateRequest, MigrationEvent, MigrationReport, migration_event};
use tokio::sync::mpsc;
use tonic::{Response, Status, Streaming};

use crate::{
    client::{ClientError, Connection},
    values,
};

/// How the memory moves, beside the mode.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct How {
    /// Longest frozen time in milliseconds; the migration is aborted when more is predicted
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    max_frozen_ms: Option<u32>,
    /// Most rounds of copying while it runs
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_rounds: Option<u32>,
    /// Most bandwidth for its memory and its image's layers, such as 50MB/s or 400mbit
    #[arg(long, value_name = "RATE", value_parser = values::rate)]
    max_bandwidth: Option<u64>,
    /// Whether its memory is compressed on the wire
    #[arg(long, value_enum, default_value_t)]
    compress: Compress,
    /// What may be done to a service that writes faster than the link carries
    #[arg(long, value_enum, value_delimiter = ',', value_name = "WHAT")]
    allow: Vec<Allow>,
    /// What becomes of a bind mount or an engine's volume, by its target: `skip` for what the destination has under the same path, `shared` for
    /// storage that both nodes have, which is tried, `copy` for its files to go with the service, as a volume
    #[arg(long, value_name = "TARGET=WHAT", value_parser = values::on_move)]
    mount: Vec<(String, String)>,
    /// Connections for its memory
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=8))]
    streams: Option<u32>,
    /// Go on under the executables of the destination's image, which godwit-cc built, even where its instruction set is the same
    #[arg(long)]
    cross: bool,
    /// Longest time in milliseconds in which its processes come to rest for that; else the migration is aborted
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u32).range(1..))]
    max_park_ms: Option<u32>,
}

/// How the memory of a service moves.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Mode {
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
    /// Its name in the API.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Cold => "cold",
            Self::Precopy => "precopy",
            Self::Postcopy => "postcopy",
            Self::Hybrid => "hybrid",
        }
    }
}

/// Whether memory is compressed on the wire.
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

impl Compress {
    /// Its name in the API.
    fn as_str(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Off => "off",
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// What may be done to a service beside copying it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Allow {
    /// It may be given less CPU until it has moved
    Throttle,
    /// Pages may follow after the commit: losing the source meanwhile loses the service
    Postcopy,
}

impl How {
    /// Over this many connections, and without compression: what a link carries shall be seen.
    #[must_use]
    pub fn plain(streams: u32) -> Self {
        Self { streams: Some(streams), compress: Compress::Off, ..Self::default() }
    }

    /// Connections for memory: two where nothing else was asked for.
    #[must_use]
    pub fn streams(&self) -> u32 {
        self.streams.unwrap_or(2)
    }

    /// The request that moves a service so.
    #[must_use]
    pub fn request(&self, mode: Mode, name: &str, to: &str) -> MigrateRequest {
        MigrateRequest {
            name: name.to_owned(),
            to: to.to_owned(),
            mode: mode.as_str().to_owned(),
            max_frozen_ms: self.max_frozen_ms.unwrap_or(0),
            max_rounds: self.max_rounds.unwrap_or(0),
            max_bandwidth: self.max_bandwidth.unwrap_or(0),
            compress: self.compress.as_str().to_owned(),
            allow_throttle: self.allow.contains(&Allow::Throttle),
            allow_postcopy: self.allow.contains(&Allow::Postcopy),
            streams: self.streams.unwrap_or(0),
            network: String::new(),
            mounts: self.mount.iter().cloned().collect(),
            cross: self.cross,
            max_park_ms: self.max_park_ms.unwrap_or(0),
        }
    }
}

/// Runs the call in a task of its own, so that Ctrl-C is heard at every moment of it.
pub fn start(connection: Connection, request: MigrateRequest) -> Events {
    let mut node = connection.node.clone();
    follow(connection, async move { node.migrate(request).await })
}

/// The same for a preparation.
pub(crate) fn prepare(connection: Connection, request: MigrateRequest) -> Events {
    let mut node = connection.node.clone();
    follow(connection, async move { node.prepare(request).await })
}

/// The events of a migration, the last of which is its report or an error.
pub type Events = mpsc::UnboundedReceiver<Result<migration_event::Kind, ClientError>>;

fn follow(
    connection: Connection,
    call: impl Future<Output = Result<Response<Streaming<MigrationEvent>>, Status>> + Send + 'static,
) -> Events {
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let mut stream = match call.await {
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

/// How a migration ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The destination owns the service.
    Moved,
    /// The source still owns it, and it runs there.
    Aborted,
    /// The destination owned it, and pages that it still needed are gone.
    Lost,
    /// The source still owns it, and the destination has what makes its move shorter.
    Prepared,
}

impl Outcome {
    /// The outcome that a report tells. A word that this version does not know is not a move.
    #[must_use]
    pub fn of(report: &MigrationReport) -> Self {
        match report.outcome.as_str() {
            "moved" => Self::Moved,
            "lost" => Self::Lost,
            "prepared" => Self::Prepared,
            _ => Self::Aborted,
        }
    }
}

/// In a sentence, why a service is not where it was to go; nothing when it is.
#[must_use]
pub fn failure(report: &MigrationReport) -> Option<String> {
    let MigrationReport { name, source, destination, reason, .. } = report;
    match Outcome::of(report) {
        Outcome::Moved | Outcome::Prepared => None,
        Outcome::Lost => Some(format!("{name} was lost on {destination}: {reason}")),
        Outcome::Aborted => Some(format!("migration of {name} aborted, it stays on {source}: {reason}")),
    }
}
