//! The source's side of a migration.
//!
//! Everything up to the destination's `Restored` can be cancelled and undone: [`undo::put_back`]
//! opens the port, thaws, and the service goes on with its connections. Then the journal's
//! `committed` is written (`serving` where pages stay behind), and from there on there is only
//! forward.
//!
//! - [`prepare`]: whether the service can move and may come; its layers and files.
//! - [`obstacles`]: what of it CRIU cannot dump.
//! - [`copy`]: rounds of memory while the service runs.
//! - [`frozen`]: the stretch in which it does not; [`deadline`]: how long it waits there for the destination.
//! - [`files`], [`logs`]: changed files and the log, in both.
//! - [`serve`]: pages that follow after the commit.
//! - [`rest`]: what is left to do on this node.
//! - [`undo`]: the way back, before the commit.
//! - [`pages`], [`streams`], [`pace`], [`governor`]: what these send memory with.

mod accept_queue;
mod answer;
mod copy;
mod deadline;
mod files;
mod frozen;
mod governor;
mod jobs;
mod logs;
mod obstacles;
pub mod pace;
pub(crate) mod pages;
mod prepare;
mod residual;
mod rest;
mod serve;
pub(crate) mod streams;
mod undo;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_engine::EngineError;
use godwit_engine::tree;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::failpoint;
use crate::hooks;
use crate::images;
use crate::journal::{Beginning, Commit, Role, Stage};
use crate::link::{Link, LinkError};
use crate::local::{HostError, Local, LocalError, from_local_causes};
use crate::message::{Message, Reason};
use crate::options::Options;
use crate::report::{Outcome, PhaseClock, Report, ms_since};
use crate::service::Service;
use answer::Answering;
use jobs::Jobs;
use pages::Pages;
use prepare::Prepared;
pub use rest::Rest;
use rest::{Left, acknowledged, retain};
pub(crate) use rest::{go_on_serving, let_go};
use streams::{StreamTraffic, Streams};
use undo::note_reason;
pub(crate) use undo::{put_back, tell_hook};

/// How long the destination may take to say why it gave up.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How far a migration has come, for people who wait.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// `reserve`, `layers`, `files`, `copy`, `freeze`, `dump`, `transfer`, `restore`, `pages`, `commit`,
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
    /// CRIU hangs.
    #[error("the dump took longer than {} s", frozen::DUMP_LIMIT.as_secs())]
    Slow,
    /// The destination lives, and does not do its work.
    #[error(
        "node {node} brought the service no further for {seconds:.0} s, when it was to {work}; look there for a disk or a process that hangs (godwitd serve --patience says how long that may last)"
    )]
    Standstill {
        /// The destination.
        node: String,
        /// What it was to do.
        work: &'static str,
        /// For how long nothing came of it.
        seconds: f64,
    },
    /// CRIU cannot dump what is in no process.
    #[error(
        "{connections} connections to port {port} wait for the service to accept them, which it does not do; a service moves when none wait"
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
    /// The operator's program for the moment before the freeze.
    #[error(transparent)]
    Hook(#[from] hooks::HookError),
    /// The user or the daemon's shutdown.
    #[error("it was cancelled")]
    Cancelled,
}

impl SourceError {
    /// Whether it says no more than that a connection has ended; what is read next tells why.
    fn is_of_closing(&self) -> bool {
        if let Self::Link(LinkError::Broken(error)) = self {
            return error.is_closed();
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
    HostError,
    tokio::task::JoinError
);

/// One migration away from this node.
pub struct Source {
    local: Arc<Local>,
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
}

/// A copy at the destination that only waits for the commit.
struct Restored {
    streams: Streams,
    /// Pages that have stayed here.
    residual: Answering,
    /// What followed the pages.
    pages: Pages,
}

impl Source {
    /// A migration of `service` to `destination`, under the given id.
    #[must_use]
    pub fn new(
        local: Arc<Local>,
        service: Service,
        id: String,
        destination: String,
        options: Options,
        progress: watch::Sender<Progress>,
        cancel: CancellationToken,
    ) -> Self {
        let (stream_traffic, jobs) = (Mutex::default(), Jobs::default());
        Self { local, service, id, destination, options, progress, cancel, stream_traffic, jobs }
    }

    /// Moves the service. The report says how it ended; it is an error only when the service could neither be
    /// moved nor put back. What could not be done at once on this node is the rest.
    pub async fn run(self) -> (Result<Report, LocalError>, Option<Rest>) {
        let start = Instant::now();
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
        if let Err(error) = self.local.journal.begin(&new) {
            // Nothing was touched.
            report.reason = crate::error_chain(&error);
            return (Ok(report), None);
        }
        let mut link = None;
        let mut clock = None;
        let attempt = async {
            self.check_eligible().await?;
            report.criu = self.local.criu.version().await?.to_string();
            self.step("reserve", 0, 0);
            let connection = self.local.host.connect(&self.destination).await.map_err(|e| {
                SourceError::NotEligible(vec![format!(
                    "node {} cannot be reached: {}",
                    self.destination,
                    crate::error_chain(&e)
                )])
            })?;
            let link = link.insert(Link::new(connection));
            self.until_restored(link, &mut report, &mut clock).await
        };
        let ended = tokio::select! {
            ended = attempt => ended,
            () = self.cancel.cancelled() => Err(SourceError::Cancelled),
        };
        let mut attempted = false;
        let outcome = match ended {
            Ok(restored) => {
                // The commit point.
                attempted = true;
                let stage = if restored.residual.leaves() { Stage::Serving } else { Stage::Committed };
                match self.local.journal.commit(&self.id, stage) {
                    Commit::Written => Ok(restored),
                    Commit::NotWritten(error) => Err(SourceError::Local(error.into())),
                    Commit::Unknown(source) => {
                        let service = self.service.name.clone();
                        return self.undecided(LocalError::Undecided { service, source }, link);
                    }
                }
            }
            Err(error) => Err(error),
        };
        let rest = match (outcome, link) {
            (Ok(restored), Some(link)) => {
                self.local.standstills.forget(&self.service);
                self.release(link, restored, &mut report, &mut clock, start).await
            }
            (Ok(_), None) => unreachable!("only an attempt with a link succeeds"),
            (Err(error), link) => {
                match self.give_up(&error, link, attempted, &mut report, &mut clock).await {
                    Ok(rest) => rest,
                    Err((error, link)) if matches!(error, LocalError::Undecided { .. }) => {
                        return self.undecided(error, link);
                    }
                    Err((error, _)) => {
                        return (
                            Err(error),
                            Some(self.rest(Left::PutBack { reason: report.reason, attempted })),
                        );
                    }
                }
            }
        };
        if let Some(clock) = clock {
            report.frozen_ms = clock.total_ms();
            report.phases = clock.phases();
        }
        if report.total_ms == 0.0 {
            report.total_ms = ms_since(start);
        }
        (Ok(report), rest)
    }

    /// The service stays, for this reason.
    async fn give_up(
        &self,
        error: &SourceError,
        mut link: Option<Link>,
        attempted: bool,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
    ) -> Result<Option<Rest>, (LocalError, Option<Link>)> {
        let mut reason = crate::error_chain(error);
        tracing::warn!(migration = %self.id, service = %self.service.name, %reason, "the migration is aborted");
        report.reason.clone_from(&reason);
        // What still works on its memory must not meet it when it runs, nor another migration of it.
        self.jobs.end().await;
        let put_back = match put_back(&self.local, &self.service, &self.id, &reason, attempted).await {
            Ok(put_back) => put_back,
            Err(error) => return Err((error, link)),
        };
        if let Some(clock) = clock {
            // What follows is done while it runs.
            clock.end_at("undo", put_back.went_on.unwrap_or_else(Instant::now));
        }
        // Only now: what the other side says of it is worth waiting for, but not frozen.
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
            report.memory_wire_bytes = self.streams_sent();
            report.wire_bytes = link.bytes_sent() + report.memory_wire_bytes;
            let abort = Message::Abort(Reason { reason: reason.clone() });
            // The other side also sees the connection close; the word only makes it sooner.
            let _ = link.sender().try_send(abort);
            link.close().await;
        }
        report.reason.clone_from(&reason);
        Ok(put_back.noted.err().map(|error| {
            tracing::error!(migration = %self.id, error = %crate::error_chain(&error), "cannot record in the journal that the migration is aborted; trying again");
            self.rest(Left::PutBack { reason, attempted })
        }))
    }

    /// Nobody knows whether it has committed: the service stays frozen, and the next life of this daemon reads
    /// what the disk has. The destination is told nothing: it asks.
    fn undecided(&self, error: LocalError, link: Option<Link>) -> (Result<Report, LocalError>, Option<Rest>) {
        tracing::error!(migration = %self.id, service = %self.service.name, error = %crate::error_chain(&error), "godwitd ends");
        self.local.fatal.send_replace(Some(crate::error_chain(&error)));
        drop(link);
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

    async fn until_restored(
        &self,
        link: &mut Link,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
    ) -> Result<Restored, SourceError> {
        let mut prepared = self.prepare(link, report).await?;
        let frozen = self.frozen(link, report, clock, &mut prepared).await;
        let Prepared { room, copied, .. } = prepared;
        room.close(frozen.is_ok())?;
        let mut streams = copied.streams;
        match frozen {
            Ok((residual, pages)) => Ok(Restored { streams, residual, pages }),
            Err(error) if error.is_of_closing() => Err(match streams.why_closed().await {
                Some(why) => why.into(),
                None => error,
            }),
            Err(error) => Err(error),
        }
    }

    /// After the commit: tells the destination, serves what has stayed here, then lets go of
    /// everything. No error ends it early: what fails is tried again.
    async fn release(
        &self,
        mut link: Link,
        restored: Restored,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
        started: Instant,
    ) -> Option<Rest> {
        failpoint::point("source.committed").await;
        let Restored { streams, residual, pages } = restored;
        let mut pages = Some(pages);
        self.step("commit", 0, 0);
        let told = link.send(Message::Commit).await;
        // Beside all that follows: the destination must not wait for this node's books.
        let mut releasing = JoinSet::new();
        let released = match failpoint::fails("source.releasing") {
            true => Err(HostError("a fault is injected".into())),
            false => self.local.host.release(&self.service, &self.destination).await,
        };
        if let Err(error) = released {
            let (local, service) = (Arc::clone(&self.local), self.service.clone());
            let (id, to) = (self.id.clone(), self.destination.clone());
            let mut failed = Err(LocalError::from(error));
            releasing.spawn(async move {
                let mut again = local.again(&id, "the books do not take that the service has left");
                while let Err(error) = &failed {
                    if !again.after(error).await {
                        return;
                    }
                    failed = local.host.release(&service, &to).await.map_err(LocalError::from);
                }
            });
        }
        let running = match told {
            Ok(()) => tokio::select! {
                running = link.receive() => running,
                () = self.local.ending.cancelled() => Err(LinkError::Closed(self.destination.clone())),
            },
            Err(error) => Err(link.why_closed().await.unwrap_or(error)),
        };
        if let Some(clock) = clock {
            report.resume_ms += clock.end("commit");
        }
        report.outcome = Outcome::Moved;
        match running {
            Ok(Message::Running(there)) => {
                self.acknowledged();
                report.cutover_ms += f64::from(there.cutover_us) / 1e3;
                (report.held_frames, report.held_dropped) = (there.held_frames, there.held_dropped);
            }
            Ok(other) => {
                tracing::warn!(migration = %self.id, got = other.name(), "the destination did not confirm the resume")
            }
            Err(LinkError::Aborted { reason, .. }) => {
                // After `Restored` it gives up for one reason only.
                report.outcome = Outcome::Lost;
                report.reason = format!("its memory is not complete: {reason}");
            }
            Err(error) => {
                // The destination owns it and asks until it hears so; this node answers from its journal.
                report.reason = format!(
                    "it is committed, but node {} has not confirmed that it runs ({}); it asks for the decision by itself as soon as it reaches this node",
                    self.destination,
                    crate::error_chain(&error)
                );
            }
        }
        report.dump_bytes += residual.count();
        if !residual.leaves() {
            // Threads that push wait at it for more, and the streams cannot be closed before these.
            drop(residual);
            report.memory_wire_bytes = self.streams_sent();
            report.wire_bytes = link.bytes_sent() + report.memory_wire_bytes;
            link.close().await;
            streams.close().await;
        } else {
            // What it takes is better used otherwise, for as long as this may last.
            let pages = pages.take();
            tokio::task::spawn_blocking(move || drop(pages));
            let serving_since = Instant::now();
            let conversation = serve::Conversation { link, streams, residual };
            let serving = serve::Serving {
                local: &self.local,
                id: &self.id,
                destination: &self.destination,
                options: self.options.serving(),
                progress: Some(&self.progress),
            };
            let Some(served) = serving.run(Some(conversation), &self.service).await else {
                report.reason = format!(
                    "it runs on node {}, which still needs pages from here: godwitd on node {} ends, and serves them when it is started again",
                    self.destination, self.local.node
                );
                return None;
            };
            self.acknowledged();
            // Whatever had been heard before of its running there.
            (report.outcome, report.reason) = match served.lost {
                None => (Outcome::Moved, String::new()),
                Some(why) => (Outcome::Lost, why),
            };
            report.faulted_transfer_ms = ms_since(serving_since);
            report.faulted_bytes = served.bytes;
            report.faults = served.faults;
            report.memory_wire_bytes = served.memory_wire_bytes;
            report.wire_bytes = served.wire_bytes;
            report.page_bytes += served.page_bytes;
        }
        self.step("release", 0, 0);
        report.total_ms = ms_since(started);
        retain(&self.local, &self.service).await;
        // It is part of what follows.
        drop(releasing);
        let gone = let_go(&self.local, &self.service, &self.id, &self.destination, &report.reason).await;
        // With the processes gone there is no memory left to walk over.
        tokio::task::spawn_blocking(move || drop(pages));
        let error = gone.err()?;
        let why = crate::error_chain(&error);
        let rest = self.rest(Left::LetGo(report.reason.clone()));
        if report.outcome == Outcome::Moved {
            report.reason = format!(
                "it moved, but node {} could not let go of all it held yet, and tries again: {why}",
                self.local.node
            );
        }
        Some(rest)
    }

    /// The destination has it on its disk that the service is its own. If this cannot be noted, the entry only
    /// stays longer.
    fn acknowledged(&self) {
        acknowledged(&self.local, &self.id, &self.destination);
    }

    /// Bytes that the streams have put on the wire.
    fn streams_sent(&self) -> u64 {
        // It is replaced in one step.
        self.stream_traffic.lock().unwrap_or_else(PoisonError::into_inner).sent()
    }
}
