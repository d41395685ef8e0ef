//! The source's side of a migration: a line of phases, each of which consumes the result of the one before.
//!
//! | phase | result | the service |
//! |---|---|---|
//! | [`reserve`] | `Reserved`: it may come | runs |
//! | [`root`] | `Prepared`: its layers and files are there | runs |
//! | [`precopy`] | `Copied`: its memory, as far as that pays | runs |
//! | [`freeze`] | `Frozen`: what is left to send | is frozen |
//! | [`dump`] | `Restored`: a copy that only waits for the commit | is frozen |
//! | [`commit`] | `Committed`, then the report | runs at the destination |
//!
//! Everything up to `Restored` can be cancelled and rolled back: [`undo::put_back`] opens the port and thaws, and the
//! service continues with its connections. Then the journal's `committed` is written (`serving` where pages stay
//! behind). From there on nothing is undone.
//!
//! - [`prepare`]: layers, files and pages are sent ahead, and the service stays.
//! - [`park`]: its processes come to rest, where they go on under other executables.
//! - [`plan`]: which mode; [`obstacles`]: what of the service cannot move. [`check`]: both, and a forecast, without a move.
//! - [`copies`]: the tree that its files are, with those of directories of this node that go with it.
//! - [`files`], [`logs`]: changed files and the log, while it runs and at the end; [`ahead`]: files ahead of the move.
//! - [`deadline`]: how long a frozen service waits for the destination.
//! - [`serve`]: pages that follow after the commit; [`rest`]: what is left to do on this node.
//! - [`pages`], [`streams`], [`pace`], [`governor`]: what these send memory with.
//! - [`recorder`]: what becomes the report.

mod accept_queue;
mod ahead;
mod answer;
mod check;
mod commit;
mod copies;
mod deadline;
mod dump;
mod error;
mod file_looks;
mod files;
mod freeze;
mod governor;
mod jobs;
mod layers;
mod logs;
mod obstacles;
pub mod pace;
pub(crate) mod pages;
mod park;
mod plan;
mod precopy;
mod prepare;
mod recorder;
mod reserve;
mod residual;
mod rest;
mod root;
mod serve;
pub(crate) mod streams;
mod undo;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::failpoint;
use crate::journal::{Beginning, Commit, Role, Stage};
use crate::link::Link;
use crate::message::{Message, Reason};
use crate::options::Options;
use crate::report::Report;
use crate::resources::{LocalError, NodeResources};
use crate::service::Service;
use crate::storage;
use crate::timeline::Timeline;
pub use check::{Findings, Forecast, LinkFigures, Measured, Seen, Times};
use dump::Restored;
pub use error::SourceError;
use jobs::Jobs;
use recorder::Recorder;
use rest::Left;
pub use rest::Rest;
pub(crate) use rest::{go_on_serving, let_go};
use streams::StreamTraffic;
use undo::note_reason;
pub(crate) use undo::{put_back, tell_hook};

/// How long the destination may take to say why it gave up.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How a migration ended: its report, or why the service could be neither moved nor rolled back; and what is left to do
/// on this node.
pub type Ended = (Result<Report, LocalError>, Option<Rest>);

/// How far a migration has come, for users who wait.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// `reserve`, `layers`, `files`, `copy`, `rest`, `freeze`, `dump`, `transfer`, `restore`, `pages`, `commit`,
    /// `serve`, `release`.
    pub phase: &'static str,
    /// Bytes sent.
    pub bytes_done: u64,
    /// Bytes expected; 0 while unknown.
    pub bytes_total: u64,
    /// Round of copying, from 1; 0 outside of it.
    pub round: u32,
    /// Pages that the last round found written, per second.
    pub dirty_pages_per_second: f64,
    /// Bytes of pages per second that the last round moved.
    pub bandwidth: f64,
    /// The frozen time if it were frozen now, milliseconds; 0 while unknown.
    pub predicted_frozen_ms: f64,
    /// Pages asked for since the service runs at the destination.
    pub faults: u64,
    /// What the destination lacked of the image, once it has answered.
    pub lacking: Option<LackingLayers>,
}

impl Progress {
    /// Whether it is too late to cancel.
    #[must_use]
    pub fn is_committed(&self) -> bool {
        is_committed(self.phase)
    }
}

/// Whether a migration in this phase has committed.
#[must_use]
pub fn is_committed(phase: &str) -> bool {
    matches!(phase, "commit" | "serve" | "release")
}

/// What a destination lacks of an image, before it is sent.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LackingLayers {
    /// How many layers; 0 of an image that another engine keeps.
    pub layers: usize,
    /// Of how many; 0 of an image that another engine keeps.
    pub of: usize,
    /// Bytes of their blobs.
    pub bytes: u64,
    /// Whether the destination asks the image's registry first.
    pub asks_registry: bool,
}

/// One migration away from this node.
pub struct Source {
    local: Arc<NodeResources>,
    service: Service,
    id: String,
    destination: String,
    options: Options,
    progress: watch::Sender<Progress>,
    cancel: CancellationToken,
    /// Of the connections for pages, as soon as there are any.
    stream_traffic: Mutex<StreamTraffic>,
    /// What works on its memory.
    jobs: Jobs,
    /// What it does in the frozen time.
    timeline: Arc<Timeline>,
    /// What is said to be storage of both nodes, once it has been found.
    shared_storage: OnceLock<Vec<storage::Shared>>,
    /// For how long it is to be frozen beside its pages, without regard to past moves.
    foreseen: Mutex<Option<Duration>>,
}

impl Source {
    /// A migration of `service` to `destination`, under the given id.
    #[must_use]
    pub fn new(
        local: Arc<NodeResources>,
        service: Service,
        id: String,
        destination: String,
        options: Options,
        progress: watch::Sender<Progress>,
        cancel: CancellationToken,
    ) -> Self {
        let (stream_traffic, jobs, timeline) = (Mutex::default(), Jobs::default(), Arc::default());
        // Also in the journal: whoever removes it here later leaves what stays.
        let service = reserve::with_engine_volumes(service, &options.binds);
        let (shared_storage, foreseen) = (OnceLock::new(), Mutex::default());
        Self {
            local,
            service,
            id,
            destination,
            options,
            progress,
            cancel,
            stream_traffic,
            jobs,
            timeline,
            shared_storage,
            foreseen,
        }
    }

    /// Moves the service.
    pub async fn run(self) -> Ended {
        let mut report = Report::begin(&self.id, &self.service.name, &self.local.node, &self.destination);
        report.mode = self.options.mode.name().into();
        let new = Beginning {
            id: &self.id,
            role: Role::Source,
            peer: &self.destination,
            peer_journal: "",
            service: &self.service,
            serving: Some(self.options.serving()),
        };
        let mut recorder = Recorder::new(report, Arc::clone(&self.timeline));
        if let Err(error) = self.local.journal.begin(&new) {
            // Nothing was touched.
            recorder.report.reason = crate::error_chain(&error);
            return (Ok(recorder.finish()), None);
        }
        let mut link = match self.unless_cancelled(self.connect(&mut recorder)).await {
            Ok(link) => link,
            Err(error) => return self.stay(error, None, false, recorder).await,
        };
        let restored = match self.unless_cancelled(self.until_restored(&mut link, &mut recorder)).await {
            Ok(restored) => restored,
            Err(error) => return self.stay(error, Some(link), false, recorder).await,
        };
        // The commit point.
        let stage = if restored.residual.leaves() { Stage::Serving } else { Stage::Committed };
        let committing = Instant::now();
        let commit = self.local.journal.commit(&self.id, stage);
        self.timeline.note("journal", committing);
        match commit {
            Commit::Written => {}
            Commit::NotWritten(error) => {
                let Restored { tmpfs, .. } = restored;
                tmpfs.try_to_close();
                return self.stay(LocalError::from(error).into(), Some(link), true, recorder).await;
            }
            Commit::Unknown(source) => {
                let service = self.service.name.clone();
                return self.undecided(LocalError::Undecided { service, source });
            }
        }
        self.local.standstills.forget(&self.service);
        let committed = self.commit(&mut link, restored, &mut recorder).await;
        let rest = match self.serve(link, committed, &mut recorder).await {
            Some(gone) => self.leave(gone, &mut recorder).await,
            None => None,
        };
        let confirmed = recorder.confirmed;
        let report = recorder.finish();
        if confirmed {
            self.learn(&report).await;
        }
        (Ok(report), rest)
    }

    /// Connects to the destination, if the service can move as it is now.
    async fn connect(&self, recorder: &mut Recorder) -> Result<Link, SourceError> {
        self.check_eligible().await?;
        recorder.report.criu = self.local.criu.version().await?.to_string();
        self.step("reserve", 0, 0);
        match self.local.cluster.connect(&self.destination).await {
            Ok(connection) => Ok(Link::new(connection)),
            Err(error) => Err(SourceError::NotEligible(vec![format!(
                "node {} cannot be reached: {}",
                self.destination,
                crate::error_chain(&error)
            )])),
        }
    }

    /// All that can be undone.
    async fn until_restored(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
    ) -> Result<Restored, SourceError> {
        let reserved = self.reserve(link, recorder).await?;
        let prepared = self.send_root(link, recorder, reserved).await?;
        // Before the rounds: what is written while their memory is read is not left for the frozen time.
        let databases = self.databases().await?;
        let copied = self.precopy(link, recorder, prepared).await?;
        let frozen = self.freeze(recorder, copied, databases).await?;
        match self.dump_and_send(link, recorder, frozen).await {
            Err(SourceError::Criu(error)) => Err(self.explained(error).await),
            Err(error) => Err(error),
            Ok(restored) => {
                failpoint::point("source.restored").await;
                Ok(restored)
            }
        }
    }

    async fn unless_cancelled<T>(
        &self,
        attempt: impl Future<Output = Result<T, SourceError>>,
    ) -> Result<T, SourceError> {
        tokio::select! {
            ended = attempt => ended,
            () = self.cancel.cancelled() => Err(SourceError::Cancelled),
        }
    }

    /// The service stays, for this reason. The commit may have been `attempted`.
    async fn stay(
        &self,
        error: SourceError,
        link: Option<Link>,
        attempted: bool,
        mut recorder: Recorder,
    ) -> Ended {
        let mut reason = crate::error_chain(&error);
        recorder.report.refused = matches!(error, SourceError::Refused { .. } | SourceError::NoRoom { .. });
        tracing::warn!(migration = %self.id, service = %self.service.name, %reason, "the migration is aborted");
        // What still works on its memory must not meet it when it runs, nor another migration of it.
        self.jobs.end().await;
        let put_back = match put_back(&self.local, &self.service, &self.id, &reason, attempted).await {
            Ok(put_back) => put_back,
            Err(error @ LocalError::Undecided { .. }) => return self.undecided(error),
            Err(error) => return (Err(error), Some(self.rest(Left::PutBack { reason, attempted }))),
        };
        // What follows is done while it runs.
        recorder.end_at("undo", put_back.went_on.unwrap_or_else(Instant::now));
        let mut link = link;
        // Only now: the other side's reason is worth waiting for, but not with a frozen service.
        if let Some(link) = &mut link
            && error.is_of_closing()
        {
            let closed = link.why_closed().await;
            let why = if closed.is_some() { closed } else { link.last_words(LAST_WORDS).await };
            if let Some(why) = why {
                reason = crate::error_chain(&why);
                note_reason(&self.local, &self.id, &reason);
            }
        }
        if put_back.told {
            reason = tell_hook(&self.local, &self.service, &self.id, &self.destination, reason).await;
        }
        if let Some(link) = link {
            recorder.report.memory_wire_bytes = self.streams_sent();
            recorder.report.wire_bytes = link.bytes_sent() + recorder.report.memory_wire_bytes;
            let abort = Message::Abort(Reason { reason: reason.clone() });
            // The other side also sees the connection close; the message is only faster.
            let _ = link.sender().try_send(abort);
            link.close().await;
        }
        recorder.report.reason.clone_from(&reason);
        let rest = put_back.noted.err().map(|error| {
            tracing::error!(migration = %self.id, error = %crate::error_chain(&error), "cannot record in the journal that the migration is aborted; trying again");
            self.rest(Left::PutBack { reason, attempted })
        });
        (Ok(recorder.finish()), rest)
    }

    /// It is unknown whether it has committed: the service stays frozen, and the next start of this daemon reads the
    /// disk. The destination is told nothing: it asks.
    fn undecided(&self, error: LocalError) -> Ended {
        tracing::error!(migration = %self.id, service = %self.service.name, error = %crate::error_chain(&error), "godwitd ends");
        self.local.fatal.send_replace(Some(crate::error_chain(&error)));
        (Err(error), None)
    }

    fn rest(&self, left: Left) -> Rest {
        Rest {
            local: Arc::clone(&self.local),
            service: self.service.clone(),
            id: self.id.clone(),
            destination: self.destination.clone(),
            left,
        }
    }

    fn step(&self, phase: &'static str, bytes_done: u64, bytes_total: u64) {
        self.progress.send_modify(|progress| {
            *progress = Progress { phase, bytes_done, bytes_total, ..progress.clone() };
        });
    }

    /// Bytes that the streams have put on the wire.
    fn streams_sent(&self) -> u64 {
        // It is replaced in one step.
        self.stream_traffic.lock().unwrap_or_else(PoisonError::into_inner).sent()
    }
}
