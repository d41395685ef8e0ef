//! Why a service stays at its source.

use godwit_engine::{EngineError, tree};

use super::{dump, pages};
use crate::link::LinkError;
use crate::resources::{ClusterError, LocalError, from_local_causes};
use crate::{hooks, images};

/// Why a service stayed at the source.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    /// Nothing was touched.
    #[error("{}", .0.join("; "))]
    NotEligible(Vec<String>),
    /// The destination said no.
    #[error("node {node} refuses: {}", .reasons.join("; "))]
    Refused {
        /// The destination.
        node: String,
        /// All its reasons.
        reasons: Vec<String>,
    },
    /// The conversation broke.
    #[error(transparent)]
    Link(#[from] LinkError),
    /// This node could not do its part.
    #[error(transparent)]
    Local(#[from] LocalError),
    /// CRIU could not dump.
    #[error(transparent)]
    Criu(#[from] godwit_criu::CriuError),
    /// The same, and it is known what stood in the way.
    #[error(
        "{}; CRIU said: {reason}{}; its log is {}",
        .obstacles.join("; "),
        .hint.map(|hint| format!(" ({hint})")).unwrap_or_default(),
        .log.display()
    )]
    Obstructed {
        /// A sentence for each kind of obstacle.
        obstacles: Vec<String>,
        /// The first error in CRIU's log.
        reason: String,
        /// What this means and what to do, when it is a known case.
        hint: Option<&'static str>,
        /// CRIU's log.
        log: std::path::PathBuf,
    },
    /// CRIU hangs.
    #[error("the dump took longer than {} s", dump::DUMP_LIMIT.as_secs())]
    Slow,
    /// The destination lives, but makes no progress.
    #[error(
        "node {node} made no progress for {seconds:.0} s when it was to {work}; look there for a disk or a process that hangs (godwitd serve --patience is the limit)"
    )]
    Standstill {
        /// The destination.
        node: String,
        /// What it was to do.
        work: &'static str,
        /// For how long nothing came of it.
        seconds: f64,
    },
    /// Processes that are to go on under other executables do not come to rest.
    #[error("{0}")]
    NotAtRest(String),
    /// CRIU cannot dump what is in no process.
    #[error(
        "{connections} connections to port {port} wait for the service to accept them, which it does not do; it can move when none wait"
    )]
    NotAccepted {
        /// The port.
        port: u16,
        /// How many wait there.
        connections: u32,
    },
    /// The memory could not be sent.
    #[error(transparent)]
    Pages(#[from] pages::PagesError),
    /// The user's limits cannot be met.
    #[error("{0}")]
    NotWorthIt(String),
    /// Changed files could not be read.
    #[error("the changed files of the service cannot be sent")]
    Tree(#[from] tree::TreeError),
    /// The operator's pre-freeze hook.
    #[error(transparent)]
    Hook(#[from] hooks::HookError),
    /// The user or the daemon's shutdown.
    #[error("it was cancelled")]
    Cancelled,
    /// Nothing of what was sent ahead could be retained.
    #[error("node {node} has no room to retain its pages (godwitd serve --retained-memory)")]
    NoRoom {
        /// The destination.
        node: String,
    },
}

impl SourceError {
    /// Whether it only says that a connection has ended; what is read next says why.
    pub(super) fn is_of_closing(&self) -> bool {
        if let Self::Link(error) = self
            && error.is_of_closing()
        {
            return true;
        }
        matches!(
            self,
            Self::Link(LinkError::Closed(_))
                | Self::Local(LocalError::Images(images::ImagesError::Closed))
                | Self::Pages(pages::PagesError::Closed)
                | Self::Tree(_)
        )
    }
}

from_local_causes!(
    SourceError:
    godwit_engine::image::DigestError,
    EngineError,
    godwit_network::NetworkError,
    godwit_engine::image::ImageError,
    images::ImagesError,
    crate::journal::JournalError,
    ClusterError,
    tokio::task::JoinError
);
