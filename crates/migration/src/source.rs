//! The source's side of a migration.
//!
//! Everything up to the destination's `Restored` can be cancelled and undone: [`undo::put_back`]
//! opens the port, thaws, and the service goes on with its connections. Then the journal's
//! `committed` is written (`serving` where pages stay behind), and from there on there is only
//! forward.
//!
//! - [`prepare`]: whether the service can move and may come; its layers and files.
//! - [`copy`]: rounds of memory while the service runs.
//! - [`frozen`]: the stretch in which it does not.
//! - [`serve`]: pages that follow after the commit.
//! - [`undo`]: the way back, before the commit.
//! - [`pages`], [`lanes`], [`pace`], [`queue`]: what these send memory with.

mod accept;
mod answer;
mod copy;
mod frozen;
pub(crate) mod lanes;
pub mod pace;
pub(crate) mod pages;
mod prepare;
mod queue;
mod serve;
mod stock;
mod undo;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use godwit_engine::EngineError;
use godwit_engine::tree;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::fault;
use crate::hooks;
use crate::images;
use crate::journal::{Role, Stage};
use crate::kept::Kept;
use crate::link::{Link, LinkError};
use crate::local::{Local, LocalError, from_local_causes};
use crate::message::{Message, Reason};
use crate::options::Options;
use crate::report::{Outcome, PhaseClock, Report, ms_since};
use crate::service::Service;
use answer::Answering;
use lanes::{LaneTraffic, Lanes};
use pages::Pages;
use prepare::Prepared;
pub(crate) use undo::{put_back, tell_hook};

/// How long the destination may take to say why it gave up.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How far a migration has come, for people who wait.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// `reserve`, `layers`, `files`, `copy`, `freeze`, `dump`, `transfer`, `restore`, `commit`,
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
        matches!(self.phase, "commit" | "serve" | "release")
    }
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
    crate::local::HostError,
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
    lane_traffic: Mutex<LaneTraffic>,
}

/// A copy at the destination that only waits for the commit.
struct Restored {
    lanes: Lanes,
    /// Pages that have stayed here.
    stock: Answering,
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
        let lane_traffic = Mutex::default();
        Self { local, service, id, destination, options, progress, cancel, lane_traffic }
    }

    /// Moves the service. The report says how it ended; an error is returned only when the service
    /// could neither be moved nor put back.
    pub async fn run(self) -> Result<Report, LocalError> {
        let start = Instant::now();
        let mut report = Report::begin(&self.id, &self.service.name, &self.local.node, &self.destination);
        report.mode = self.options.mode.name().into();
        self.local.journal.begin(&self.id, Role::Source, &self.destination, &self.service)?;
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
        let outcome = match ended {
            Ok(restored) => {
                // The commit point. An error here leaves the service at the source.
                let stage = if restored.stock.leaves() { Stage::Serving } else { Stage::Committed };
                match self.local.journal.set(&self.id, stage, "") {
                    Ok(()) => Ok(restored),
                    Err(error) => Err(SourceError::Local(error.into())),
                }
            }
            Err(error) => Err(error),
        };
        match (outcome, link) {
            (Ok(restored), Some(link)) => {
                self.local.standstills.forget(&self.service);
                if let Err(error) = self.release(link, restored, &mut report, &mut clock, start).await {
                    // Committed is committed: what is left here is let go at the next start.
                    let why = crate::error_chain(&error);
                    tracing::error!(migration = %self.id, error = %why, "the source cannot let go");
                    report.reason = format!(
                        "it moved, but node {} could not let go of all it held: {why}",
                        self.local.node
                    );
                }
            }
            (Ok(_), None) => unreachable!("only an attempt with a link succeeds"),
            (Err(error), mut link) => {
                let mut reason = crate::error_chain(&error);
                tracing::warn!(migration = %self.id, service = %self.service.name, %reason, "the service is kept");
                let told = put_back(&self.local, &self.service, &self.id, &reason).await?;
                if let Some(clock) = &mut clock {
                    clock.end("undo");
                }
                // Only now: what the other side says of it is worth waiting for, but not frozen.
                if let Some(link) = &mut link
                    && error.is_of_closing()
                {
                    let closed = link.why_closed().await;
                    let why = if closed.is_some() { closed } else { link.last_words(LAST_WORDS).await };
                    if let Some(why) = why {
                        reason = crate::error_chain(&why);
                        self.local.journal.set(&self.id, Stage::Kept, &reason)?;
                    }
                }
                if told {
                    reason =
                        tell_hook(&self.local, &self.service, &self.id, &self.destination, reason).await?;
                }
                if let Some(link) = link {
                    report.memory_wire_bytes = self.lanes_sent();
                    report.wire_bytes = link.bytes_sent() + report.memory_wire_bytes;
                    let abort = Message::Abort(Reason { reason: reason.clone() });
                    // The other side also sees the connection close; the word only makes it sooner.
                    let _ = link.sender().try_send(abort);
                    link.close().await;
                }
                report.reason = reason;
            }
        }
        if let Some(clock) = clock {
            report.frozen_ms = clock.total_ms();
            report.phases = clock.phases();
        }
        if report.total_ms == 0.0 {
            report.total_ms = ms_since(start);
        }
        Ok(report)
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
        let mut lanes = copied.lanes;
        match frozen {
            Ok((stock, pages)) => Ok(Restored { lanes, stock, pages }),
            Err(error) if error.is_of_closing() => Err(match lanes.why_closed().await {
                Some(why) => why.into(),
                None => error,
            }),
            Err(error) => Err(error),
        }
    }

    /// After the commit: tells the destination, serves what has stayed here, then lets go of
    /// everything.
    async fn release(
        &self,
        mut link: Link,
        restored: Restored,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
        started: Instant,
    ) -> Result<(), LocalError> {
        fault::point("source.committed").await;
        let Restored { lanes, stock, pages } = restored;
        let mut pages = Some(pages);
        self.step("commit", 0, 0);
        let told = link.send(Message::Commit).await;
        self.local.host.release(&self.service, &self.destination).await?;
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
                report.cutover_ms += f64::from(there.cutover_us) / 1e3;
                (report.held_frames, report.held_dropped) = (there.held_frames, there.held_dropped);
            }
            Ok(other) => {
                tracing::warn!(migration = %self.id, got = other.name(), "no word that the service runs")
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
        report.dump_bytes += stock.count();
        if !stock.leaves() {
            report.memory_wire_bytes = self.lanes_sent();
            report.wire_bytes = link.bytes_sent() + report.memory_wire_bytes;
            link.close().await;
            lanes.close().await;
        } else {
            // What it takes is better used otherwise, for as long as this may last.
            let pages = pages.take();
            tokio::task::spawn_blocking(move || drop(pages));
            let serving_since = Instant::now();
            let conversation = serve::Conversation { link, lanes, stock };
            let serving = serve::Serving {
                local: &self.local,
                id: &self.id,
                destination: &self.destination,
                compress: self.options.compress,
                max_bandwidth: self.options.max_bandwidth,
                progress: Some(&self.progress),
            };
            let Some(served) = serving.run(Some(conversation), &self.service).await? else {
                report.reason = format!(
                    "it runs on node {}, which still needs pages from here: godwitd on node {} ends, and serves them when it is started again",
                    self.destination, self.local.node
                );
                return Ok(());
            };
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
        keep(&self.local, &self.service).await;
        self.local.clear(&self.service).await?;
        // With the processes gone there is no memory left to walk over.
        tokio::task::spawn_blocking(move || drop(pages));
        self.local.journal.set(&self.id, Stage::Done, &report.reason)?;
        Ok(())
    }

    /// Bytes that the lanes have put on the wire.
    fn lanes_sent(&self) -> u64 {
        // It is replaced in one step.
        self.lane_traffic.lock().unwrap_or_else(PoisonError::into_inner).sent()
    }
}

/// Keeps the service's pages for when it comes back, as far as there is room.
async fn keep(local: &Local, service: &Service) {
    let kept = async {
        let room = local.keeper.room();
        let pids = local.engine.processes(&local.config(service)).await?;
        let pids: Vec<i32> = pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect();
        let kept = tokio::task::spawn_blocking(move || Kept::copy(&pids, room)).await?;
        Ok::<_, LocalError>(kept)
    };
    match kept.await {
        Ok(Ok(kept)) => local.keeper.keep(&service.id, kept),
        // It has moved, and will cross whole when it comes back.
        Ok(Err(error)) => tracing::warn!(error = %crate::error_chain(&error), "its pages are not kept"),
        Err(error) => tracing::warn!(error = %crate::error_chain(&error), "its pages are not kept"),
    }
}

/// After a restart: serves the pages that the destination still lacks, then lets go.
pub(crate) async fn go_on_serving(local: &Arc<Local>, service: &Service, id: &str, destination: &str) {
    let serving = serve::Serving {
        local,
        id,
        destination,
        compress: pace::Compress::Auto,
        max_bandwidth: None,
        progress: None,
    };
    let ended = match serving.run(None, service).await {
        Ok(Some(served)) => {
            async {
                local.clear(service).await?;
                images::remove(&local.layout.migration(id))?;
                let reason = "godwitd was restarted while it served the service's pages";
                let reason = served.lost.as_deref().unwrap_or(reason);
                Ok::<_, LocalError>(local.journal.set(id, Stage::Done, reason)?)
            }
            .await
        }
        // Once more a next life of this daemon.
        Ok(None) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = ended {
        tracing::error!(migration = %id, error = %crate::error_chain(&error), "the source cannot let go");
    }
}
