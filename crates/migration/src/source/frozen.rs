//! The stretch in which the service does not run: kernel state through CRIU, the last pages beside it.
//!
//! ```text
//! freeze ─ last look ─┬─ CRIU dump ─ images ─ destination restores ─┬─ commit
//!                     └─ pages written last, over the lanes ────────┘
//! ```

use std::path::Path;
use std::time::{Duration, Instant};

use godwit_criu::{DumpOptions, Memory, MemoryWay};
use godwit_engine::tree;
use godwit_memory::PAGE_SIZE;
use godwit_memory::tracker::Backend;
use tokio_util::task::AbortOnDropHandle;

use super::answer::Answering;
use super::copy::Copied;
use super::pages::{Pages, State};
use super::prepare::{CHUNK, Prepared, next_round, send_round};
use super::stock::Stock;
use super::{Source, SourceError};
use crate::fault;
use crate::hooks::{self, Moment};
use crate::images;
use crate::journal::Stage;
use crate::link::Link;
use crate::local::LocalError;
use crate::message::{ImagesEnd, Message};
use crate::report::{PhaseClock, Report, ms_since};

/// Longest dump: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
pub(super) const DUMP_LIMIT: Duration = Duration::from_secs(120);

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
        hooks::run(&self.local, &self.service, Moment::PreFreeze, ends).await?;
        // Its start is nothing that a frozen service should wait for.
        let criu = self.local.criu.prepare()?;
        let listeners = self.listeners(&config).await?;
        self.local.stand_ready(&self.service).await?;
        self.local.bar_newcomers(&self.service).await?;
        self.settle_openings(&config, &listeners).await?;
        self.step("freeze", 0, report.memory_bytes);
        let clock = clock.insert(PhaseClock::start());
        self.local.engine.freeze(&config).await?;
        // From here nothing is acknowledged to clients that the dump would not hold; what they send
        // waits at the destination, so that they need not wait out a retransmission.
        let cutting = Instant::now();
        self.local.steer(&self.service, prepared.vtep).await?;
        report.cutover_ms = ms_since(cutting);
        self.accept_waiting(&config, &listeners).await?;
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
        let Copied { leave, .. } = prepared.copied;
        // Before the dump: CRIU makes directories in the container's /tmp for a moment.
        let tree = std::mem::replace(&mut prepared.tree, tree::Source::new(Path::new("/")));
        let looking = self.look(self.take_pages(prepared), true);
        let ((pages, found), (tree, last)) = tokio::try_join!(looking, next_round(tree, true))?;
        report.memory_bytes = found.populated * 4096;
        clock.end("freeze");
        fault::point("source.frozen").await;

        self.step("dump", 0, report.memory_bytes);
        // The destination's sockets go on with the clocks (TCP timestamps) that the dump finds. CRIU leaves
        // the sockets here with a probe to their other ends, each with a later time: if these heard it, they
        // would take nothing from the destination that seems to be older (PAWS, RFC 7323).
        let cutting = Instant::now();
        self.local.stand(&self.service)?;
        self.local.close_network(&self.service).await?;
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
        let (pages, mut stock) = self.announce(link, pages, prepared, leave).await?;
        let lanes = &mut prepared.copied.lanes;
        let sending = async {
            let sent = self.send(pages, lanes, State::Dumping).await?;
            if leave {
                // What has vanished must be known there before the service goes on, and is on its way
                // ahead of what is pushed.
                lanes.arrived().await?;
                stock.push(lanes, self.options.compress, self.options.max_bandwidth);
            }
            Ok::<_, SourceError>(sent)
        };

        let logging = async {
            // The service is worth more than its last lines: clients wait, and the shim may wait for a disk.
            if let Err(error) = self.local.engine.settle_log(&config).await {
                tracing::warn!(service = %self.service.name, error = %crate::error_chain(&error), "its last output may not go along");
            }
        };
        let kernel = async {
            let (_, sent) = send_round(link, tree, last).await?;
            report.dump_bytes += sent;
            report.file_bytes += sent;
            let unheard = |_| ();
            let mut images = images::Sender::new(&prepared.room.images(), link.sender(), &unheard);
            let dumped = {
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
            let (result, took) = dumped??;
            report.dump_ms = took;
            if result.way == MemoryWay::Untouched {
                report.criu.push_str("+lazy-pages-external");
            }
            if prepared.tcp_inline {
                report.criu.push_str("+tcp-inline");
            }
            clock.end("dump");
            self.step("transfer", 0, 0);
            let sent = self.send_log(link).await?;
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
            self.step("restore", 0, 0);
            Ok(())
        };
        let ((pages, sent), ()) = tokio::try_join!(sending, kernel)?;
        report.dump_bytes += sent.bytes;
        report.page_bytes += sent.found * PAGE_SIZE;
        // CRIU is out of the processes: what it may have changed for a moment is as it was.
        stock.dumped();
        let mut pages = pages;
        if !leave {
            let sent;
            (pages, sent) = self.send(pages, lanes, State::Frozen).await?;
            report.dump_bytes += sent.bytes;
            report.page_bytes += sent.found * PAGE_SIZE;
        }
        let arriving = async { if leave { Ok(()) } else { Ok::<_, SourceError>(lanes.arrived().await?) } };
        let restoring = async {
            match link.receive().await? {
                Message::Restored => {}
                other => return Err(link.unexpected(&other, "Restored").into()),
            }
            report.resume_ms = clock.end("restore");
            Ok(())
        };
        let ready = async { tokio::try_join!(arriving, restoring) };
        tokio::select! {
            ready = ready => drop(ready?),
            error = stock.failed() => return Err(error),
        }
        clock.end("pages");
        Ok((stock, pages))
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
        let stock = match leave {
            true => Stock::new(processes, pages.leave()),
            false => Stock::of_others(processes),
        };
        Ok((pages, Answering::start(stock, prepared.copied.lanes.take_faults())))
    }

    async fn send_log(&self, link: &Link) -> Result<u64, SourceError> {
        let mut sent = 0;
        let [older, log] = self.local.log_files(&self.service);
        for (old, path) in [(true, older), (false, log)] {
            let data = match std::fs::read(&path) {
                Ok(data) => data,
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
                Err(source) => return Err(LocalError::Io { action: "read", path, source }.into()),
            };
            for piece in data.chunks(CHUNK) {
                let piece = bytes::Bytes::copy_from_slice(piece);
                link.send(if old { Message::OldLogData(piece) } else { Message::LogData(piece) }).await?;
            }
            sent += data.len() as u64;
        }
        Ok(sent)
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
