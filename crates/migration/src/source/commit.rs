//! Last: the destination owns the service. Nothing is undone from here on, and work that fails is tried again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;

use super::answer::Answering;
use super::dump::Restored;
use super::pages::Pages;
use super::recorder::Recorder;
use super::rest::{Left, Rest, acknowledged, let_go, retain};
use super::streams::Streams;
use super::{Source, serve};
use crate::crossing::REWRITING;
use crate::failpoint;
use crate::link::{Link, LinkError};
use crate::message::Message;
use crate::report::{Outcome, ms_since};
use crate::resources::{ClusterError, LocalError};

/// A service that is the destination's, of which pages may have stayed here.
pub(super) struct Committed {
    streams: Streams,
    residual: Answering,
    pages: Pages,
    releasing: Releasing,
}

/// Work beside the rest: it records in this node's state that the service has left. It ends when it is dropped.
struct Releasing(#[expect(dead_code, reason = "it is held")] JoinSet<()>);

/// A service of which the destination needs nothing any more.
pub(super) struct Gone {
    /// What has followed the pages.
    pages: Pages,
    releasing: Releasing,
}

impl Source {
    /// Tells the destination that it owns the service, and waits until it says that the service runs.
    pub(super) async fn commit(
        &self,
        link: &mut Link,
        restored: Restored,
        recorder: &mut Recorder,
    ) -> Committed {
        failpoint::point("source.committed").await;
        let Restored { streams, residual, pages, tmpfs } = restored;
        self.step("commit", 0, 0);
        let told = link.send(Message::Commit).await;
        // Beside all that follows: the destination must not wait for this node's state.
        let releasing = self.begin_release().await;
        self.tell_of_copies().await;
        self.local.engine.sessions_left(&self.local.config(&self.service), &self.destination);
        let running = match told {
            Ok(()) => tokio::select! {
                running = link.receive() => running,
                () = self.local.ending.cancelled() => Err(LinkError::Closed(self.destination.clone())),
            },
            Err(error) => Err(link.why_closed().await.unwrap_or(error)),
        };
        self.timeline.tells();
        let took = recorder.end("commit");
        let report = &mut recorder.report;
        report.resume_ms += took;
        report.outcome = Outcome::Moved;
        match running {
            Ok(Message::Running(there)) => {
                self.acknowledged();
                report.cutover_ms += f64::from(there.cutover_us) / 1e3;
                (report.held_frames, report.held_dropped) = (there.held_frames, there.held_dropped);
                let timeline = there.timeline.unwrap_or_default();
                let rewriting = timeline.spans.iter().find(|span| span.what == REWRITING);
                let rewriting = rewriting.map(|span| Duration::from_micros(span.us));
                report.rewrite_ms = rewriting.unwrap_or_default().as_secs_f64() * 1e3;
                recorder.there = timeline;
                recorder.confirmed = true;
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
                    "it is committed, but node {} has not confirmed that it runs ({}); that node asks for the decision itself as soon as it reaches this one",
                    self.destination,
                    crate::error_chain(&error)
                );
            }
        }
        report.dump_bytes += residual.count();
        tmpfs.try_to_close();
        Committed { streams, residual, pages, releasing }
    }

    /// Records that the service has left; what fails is tried again.
    async fn begin_release(&self) -> Releasing {
        let mut releasing = JoinSet::new();
        let released = match failpoint::fails("source.releasing") {
            true => Err(ClusterError("a fault is injected".into())),
            false => self.local.cluster.release(&self.service, &self.destination).await,
        };
        if let Err(error) = released {
            let (local, service) = (Arc::clone(&self.local), self.service.clone());
            let (id, to) = (self.id.clone(), self.destination.clone());
            let mut failed = Err(LocalError::from(error));
            releasing.spawn(async move {
                let mut again = local.again(&id, "cannot record that the service has left");
                while let Err(error) = &failed {
                    if !again.after(error).await {
                        return;
                    }
                    failed = local.cluster.release(&service, &to).await.map_err(LocalError::from);
                }
            });
        }
        Releasing(releasing)
    }

    /// Serves the pages that have stayed here. None where this daemon ends before the destination has all.
    pub(super) async fn serve(
        &self,
        link: Link,
        committed: Committed,
        recorder: &mut Recorder,
    ) -> Option<Gone> {
        let Committed { streams, residual, pages, releasing } = committed;
        let report = &mut recorder.report;
        if !residual.leaves() {
            // Threads that push wait at it for more, and the streams cannot be closed before these.
            drop(residual);
            report.memory_wire_bytes = self.streams_sent();
            report.wire_bytes = link.bytes_sent() + report.memory_wire_bytes;
            link.close().await;
            streams.close().await;
            return Some(Gone { pages, releasing });
        }
        let serving_since = Instant::now();
        let conversation = serve::Conversation { link, streams, residual };
        let serving = serve::Serving {
            local: &self.local,
            id: &self.id,
            destination: &self.destination,
            options: self.options.serving(),
            progress: Some(&self.progress),
        };
        // What has followed the pages stays until all are read: the kernel lets no page of a process be read while it takes
        // the marks off its memory, some 25 ms for each GiB.
        let Some(served) = serving.run(Some(conversation), &self.service).await else {
            tokio::task::spawn_blocking(move || drop(pages));
            report.reason = format!(
                "it runs on node {}, which still needs pages from here: godwitd on node {} ends, and serves them when it is started again",
                self.destination, self.local.node
            );
            return None;
        };
        self.acknowledged();
        // Whether or not the destination had confirmed the resume.
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
        Some(Gone { pages, releasing })
    }

    /// Removes what this node still holds of the service.
    pub(super) async fn leave(&self, gone: Gone, recorder: &mut Recorder) -> Option<Rest> {
        let Gone { pages, releasing } = gone;
        self.step("release", 0, 0);
        recorder.nothing_is_needed();
        let report = &mut recorder.report;
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
                "it moved, but node {} has not removed all that it had of the service yet, and tries again: {why}",
                self.local.node
            );
        }
        Some(rest)
    }

    /// The destination has acknowledged the commit. If that cannot be recorded, the entry only stays longer.
    fn acknowledged(&self) {
        acknowledged(&self.local, &self.id, &self.destination);
    }
}
