//! The stretch in which the service does not run: kernel state through CRIU, the last pages beside it.
//!
//! ```text
//! freeze ─ last look ─┬─ CRIU dump ─ images ─ destination restores ─┬─ commit
//!                     └─ pages written last, over the streams ────────┘
//! ```
//! A destination that gets no further meanwhile is not waited for: [`deadline`](super::deadline).

use std::time::{Duration, Instant};

use godwit_criu::{DumpOptions, Memory, MemoryWay};
use godwit_engine::{DumpTarget, tree};
use godwit_memory::PAGE_SIZE;
use godwit_memory::tracker::Backend;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::answer::Answering;
use super::copy::Copied;
use super::deadline::{Deadline, patience};
use super::files::{next_round, send_round};
use super::pages::{Found, Pages, State};
use super::prepare::Prepared;
use super::residual::Residual;
use super::{Source, SourceError};
use crate::checkpoint::Dump;
use crate::failpoint;
use crate::hooks::{self, HookPoint};
use crate::images;
use crate::journal::Stage;
use crate::link::Link;
use crate::local::LocalError;
use crate::message::{ImagesEnd, Message};
use crate::report::{PhaseClock, Report, ms_since};

/// Longest dump: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
pub(super) const DUMP_LIMIT: Duration = Duration::from_secs(120);

/// A frozen service, and what was found of it.
struct Frozen {
    criu: Box<dyn Dump>,
    target: DumpTarget,
    keep_stopped: Vec<u32>,
    pages: Pages,
    found: Found,
    tree: tree::Source,
    /// The last round of files.
    last: tree::Round,
}

impl Source {
    /// The part during which the service does not run. What followed its pages is returned, as it
    /// takes a moment to let go: a walk over all of the service's memory as long as that is there.
    pub(super) async fn frozen(
        &self,
        link: &mut Link,
        report: &mut Report,
        clock: &mut Option<PhaseClock>,
        prepared: &mut Prepared,
    ) -> Result<(Answering, Pages), SourceError> {
        let config = self.local.config(&self.service);
        // From here on there is something to undo, also after a crash: the service is about to be frozen,
        // and others are told so.
        self.local.journal.set(&self.id, Stage::Frozen, "")?;
        let ends = (self.id.as_str(), self.local.node.as_str(), self.destination.as_str());
        hooks::run(&self.local, &self.service, HookPoint::PreFreeze, ends).await?;
        // Its start is nothing that a frozen service should wait for.
        let criu = self.local.criu.prepare()?;
        let listeners = self.listeners(&config).await?;
        let listeners = listeners.as_ref();
        self.local.standstills.stand_ready(&self.service).await?;
        self.local.network.bar_newcomers(&self.service).await?;
        self.settle_openings(&config, listeners).await?;
        self.step("freeze", 0, report.memory_bytes);
        let clock = clock.insert(PhaseClock::start());
        self.local.engine.freeze(&config).await?;
        // From here nothing is acknowledged to clients that the dump would not hold; what they send
        // waits at the destination, so that they need not wait out a retransmission.
        let cutting = Instant::now();
        self.local.network.steer(&self.service, prepared.vtep).await?;
        report.cutover_ms = ms_since(cutting);
        self.accept_waiting(&config, listeners).await?;
        let keep_stopped = self.local.engine.stopped_processes(&config).await?;
        let target = self.local.engine.dump_target(&config).await?;
        for (name, content) in &target.extra_files {
            let path = prepared.room.images().join(name);
            std::fs::write(&path, content).map_err(|source| LocalError::Io {
                action: "write",
                path,
                source,
            })?;
        }
        // Before the dump: CRIU makes directories in the container's /tmp for a moment.
        let tree = prepared.copied.files.take_tree();
        let looking = self.look(self.take_pages(prepared), true);
        let ((pages, found), (tree, last)) = tokio::try_join!(looking, next_round(tree, true))?;
        report.memory_bytes = found.populated * 4096;
        clock.end("freeze");
        failpoint::point("source.frozen").await;

        let patience = patience(self.local.patience, report.memory_bytes, last.changes.bytes());
        let deadline = Deadline::new(&self.destination, patience);
        let frozen = Frozen { criu, target, keep_stopped, pages, found, tree, last };
        tokio::select! {
            handed = self.hand_over(link, report, clock, prepared, frozen, &deadline) => handed,
            error = deadline.passed() => Err(error),
        }
    }

    /// Dumps the service and has the destination restore it, up to the copy that only waits for the commit.
    async fn hand_over(
        &self,
        link: &mut Link,
        report: &mut Report,
        clock: &mut PhaseClock,
        prepared: &mut Prepared,
        frozen: Frozen,
        deadline: &Deadline,
    ) -> Result<(Answering, Pages), SourceError> {
        let Frozen { criu, target, keep_stopped, pages, found, tree, last } = frozen;
        let Copied { leave, waits, .. } = prepared.copied;
        let config = self.local.config(&self.service);
        deadline.watch(link);
        for stream in prepared.copied.streams.pages() {
            deadline.watch(stream);
        }
        self.step("dump", 0, report.memory_bytes);
        // The destination's sockets go on with the clocks (TCP timestamps) that the dump finds. CRIU leaves
        // the sockets here with a probe to their other ends, each with a later time: if these heard it, they
        // would take nothing from the destination that seems to be older (PAWS, RFC 7323).
        let cutting = Instant::now();
        self.local.standstills.stand(&self.service)?;
        self.local.network.close(&self.service).await?;
        report.cutover_ms += ms_since(cutting);
        let options = DumpOptions {
            external_mounts: target.external_mounts,
            external_network: Some(target.network_namespace.1),
            freezer: Some(target.freezer),
            memory: Memory::Lazy,
            tcp_inline: prepared.tcp_inline,
            ..DumpOptions::new(target.pid, target.root, prepared.room.images(), prepared.room.work())
        };
        // Dropping the handle does not end CRIU, which must put the processes back itself:
        // `Engine::thaw` waits for that.
        let mut dump = AbortOnDropHandle::new(tokio::spawn(async move {
            let started = Instant::now();
            criu.dump(options).await.map(|result| (result, ms_since(started)))
        }));
        deadline.awaits("note which pages are still to come");
        let (pages, mut residual) = self.announce(link, pages, prepared, leave).await?;
        deadline.watch_faults(residual.asked(found.populated));
        let streams = &mut prepared.copied.streams;
        let (dumped, arrived, restored) =
            (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
        let sending = async {
            let (mut pages, mut sent) = self.send(pages, streams, State::Dumping).await?;
            if leave {
                // What has vanished must be known there before the service goes on, and is on its way
                // ahead of what is pushed.
                streams.arrived().await?;
                residual.push(streams, self.options.compress, self.options.max_bandwidth);
            }
            tokio::select! {
                () = dumped.cancelled() => {}
                error = residual.failed() => return Err(error),
            }
            // CRIU is out of the processes: what it may have changed for a moment is as it was.
            residual.dumped();
            if !leave {
                let last;
                (pages, last) = self.send(pages, streams, State::Frozen).await?;
                sent.add(last);
                streams.arrived().await?;
            }
            arrived.cancel();
            tokio::select! {
                () = restored.cancelled() => Ok((pages, sent)),
                error = residual.failed() => Err(error),
            }
        };

        let logging = async {
            // The service is worth more than its last lines: clients wait, and the shim may wait for a disk.
            if let Err(error) = self.local.engine.settle_log(&config).await {
                tracing::warn!(service = %self.service.name, error = %crate::error_chain(&error), "its last output may not go along");
            }
        };
        let kernel = async {
            deadline.awaits("take the files that changed last");
            let (_, sent) = send_round(link, tree, last).await?;
            let working = deadline.works();
            report.dump_bytes += sent;
            report.file_bytes += sent;
            let unheard = |_| ();
            let mut images = images::Sender::new(&prepared.room.images(), link.sender(), &unheard);
            let ended = {
                let following = images.follow();
                tokio::pin!(following);
                tokio::select! {
                    (dumped, ()) = async { tokio::join!(&mut dump, logging) } => dumped,
                    () = tokio::time::sleep(DUMP_LIMIT) => return Err(SourceError::Slow),
                    // A piece being sent when the dump ends is sent again from its start by `finish`,
                    // which is why `follow` advances its offset only after a piece is queued.
                    failed = &mut following => match failed { Ok(never) => match never {}, Err(e) => return Err(e.into()) },
                }
            };
            let (result, took) = ended??;
            drop(working);
            dumped.cancel();
            report.dump_ms = took;
            if result.way == MemoryWay::Untouched {
                report.criu.push_str("+lazy-pages-external");
            }
            if prepared.tcp_inline {
                report.criu.push_str("+tcp-inline");
            }
            clock.end("dump");
            self.step("transfer", 0, 0);
            deadline.awaits("take the images of the kernel's state");
            let sent = prepared.copied.files.send_log(link).await?;
            report.dump_bytes += sent;
            report.file_bytes += sent;
            let files = images.finish().await?;
            report.dump_bytes += images.bytes();
            drop(images);
            link.send(Message::ImagesEnd(ImagesEnd { files, keep_stopped })).await?;
            match link.receive().await? {
                Message::ImagesReceived => {}
                other => return Err(link.unexpected(&other, "ImagesReceived").into()),
            }
            report.dump_transfer_ms = clock.end("transfer");
            deadline.awaits("restore the service");
            if waits {
                // It restores nothing before all pages are there.
                self.step("pages", 0, 0);
                arrived.cancelled().await;
                report.dump_transfer_ms += clock.end("pages");
            }
            self.step("restore", 0, 0);
            match link.receive().await? {
                Message::Restored => {}
                other => return Err(link.unexpected(&other, "Restored").into()),
            }
            report.resume_ms = clock.end("restore");
            restored.cancel();
            if !arrived.is_cancelled() {
                self.step("pages", 0, 0);
            }
            Ok(())
        };
        let ((pages, sent), ()) = tokio::try_join!(sending, kernel)?;
        report.dump_bytes += sent.bytes;
        report.page_bytes += sent.found * PAGE_SIZE;
        if !waits {
            // The restore is done, and the last pages were still on their way.
            report.dump_transfer_ms += clock.end("pages");
        }
        Ok((residual, pages))
    }

    /// The pages, which go through threads that may block and come back.
    fn take_pages(&self, prepared: &mut Prepared) -> Pages {
        std::mem::replace(
            &mut prepared.copied.pages,
            Pages::new(Backend::None, 1, self.options.compress, None, 0),
        )
    }

    /// Names the pages that are still to come and were not named before, so that none is taken for empty;
    /// from here on those that the restore or a process waits for are answered.
    async fn announce(
        &self,
        link: &mut Link,
        mut pages: Pages,
        prepared: &mut Prepared,
        leave: bool,
    ) -> Result<(Pages, Answering), SourceError> {
        name(link, &mut pages).await?;
        let processes = pages.processes();
        let residual = match leave {
            true => Residual::new(processes, pages.leave()),
            false => Residual::of_others(processes),
        };
        Ok((pages, Answering::start(residual, prepared.copied.streams.take_faults())))
    }
}

/// Tells the destination of pages that are to come, and that it has not been told of.
pub(super) async fn name(link: &mut Link, pages: &mut Pages) -> Result<(), SourceError> {
    for ranges in pages.unnamed().messages() {
        link.send(Message::Pending(ranges)).await?;
    }
    link.send(Message::PendingEnd).await?;
    match link.receive().await? {
        Message::PendingEnd => Ok(()),
        other => Err(link.unexpected(&other, "PendingEnd").into()),
    }
}
