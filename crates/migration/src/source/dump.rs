//! Fifth: the kernel's state through CRIU and the last pages beside it, until the destination has restored the service.
//!
//! ```text
//! freeze ─┬─ CRIU dump ─ images ─ destination restores ─┬─ commit
//!         └─ pages written last, over the streams ──────┘
//! ```
//! A destination that makes no progress meanwhile is given up: [`deadline`](super::deadline).

use std::sync::Arc;
use std::time::{Duration, Instant};

use godwit_criu::{CriuError, DumpOptions, DumpResult, EXTERNAL_FILE_PAGES, MemoryWay};
use godwit_memory::PAGE_SIZE;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use super::answer::Answering;
use super::deadline::{Deadline, patience};
use super::files::{send_names, send_round};
use super::freeze::{Frozen, KernelState, LastFiles, Memory};
use super::pages::{Names, Pages, Part, Sent, State};
use super::precopy::tell_segments;
use super::recorder::Recorder;
use super::residual::Residual;
use super::streams::Streams;
use super::{Source, SourceError};
use crate::checkpoint::Dump;
use crate::crossing::AtRest;
use crate::databases::Remembered;
use crate::failpoint;
use crate::images::{self, ImageTmpfs};
use crate::link::Link;
use crate::message::{ImagesEnd, Message};
use crate::report::ms_since;

/// Longest dump: what CRIU needs for some 100 GiB. One that hangs must not freeze the service for good.
pub(super) const DUMP_LIMIT: Duration = Duration::from_secs(120);

/// A copy at the destination that only waits for the commit.
pub(super) struct Restored {
    pub(super) streams: Streams,
    /// Pages that have stayed here.
    pub(super) residual: Answering,
    /// What followed the pages. Dropping it takes some time: a walk over all of the service's memory, as long as
    /// that is there.
    pub(super) pages: Pages,
    /// Of the images. Unmounting may wait for the kernel for milliseconds, so that it comes after the commit.
    pub(super) tmpfs: ImageTmpfs,
}

/// A dump under way, with how long it took, milliseconds.
type Dumping = AbortOnDropHandle<Result<(DumpResult, f64), CriuError>>;

/// What the destination is told of processes beside CRIU's images.
struct Processes {
    keep_stopped: Vec<u32>,
    at_rest: Vec<AtRest>,
    remembered: Vec<Remembered>,
}

/// What the two tasks that work side by side, for the pages and for the kernel's state, tell each other.
#[derive(Debug, Default)]
struct Milestones {
    /// CRIU has let go of the service.
    dumped: CancellationToken,
    /// What a restore needs from its beginning is at the destination: copies of files' pages, which it puts into the
    /// images, and which pages are gone. A page that it has is in its place soon after, and stays there.
    needed: CancellationToken,
    /// All pages are at the destination, but those that stay here.
    arrived: CancellationToken,
    /// The destination has restored the service.
    restored: CancellationToken,
}

impl Source {
    /// Dumps the service and has the destination restore it.
    pub(super) async fn dump_and_send(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        frozen: Frozen,
    ) -> Result<Restored, SourceError> {
        let Frozen { tmpfs, mut streams, memory, files, kernel, waits } = frozen;
        let patience =
            patience(self.local.patience, recorder.report.memory_bytes, files.round.changes.bytes());
        let deadline = Deadline::new(&self.destination, patience);
        deadline.watch(link);
        streams.pages().iter().for_each(|stream| deadline.watch(stream));
        let handing = Handing { source: self, tmpfs: &tmpfs, deadline: &deadline, waits };
        let handed = tokio::select! {
            handed = handing.hand_over(link, recorder, &mut streams, memory, files, kernel) => handed,
            error = deadline.passed() => Err(error),
        };
        let error = match handed {
            Ok((residual, pages)) => return Ok(Restored { streams, residual, pages, tmpfs }),
            Err(error) => error,
        };
        tmpfs.close(false)?;
        Err(streams.explain(error).await)
    }
}

/// How a frozen service is handed to its copy.
struct Handing<'a> {
    source: &'a Source,
    tmpfs: &'a ImageTmpfs,
    deadline: &'a Deadline,
    waits: bool,
}

impl Handing<'_> {
    async fn hand_over(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        streams: &mut Streams,
        memory: Memory,
        files: LastFiles,
        kernel: KernelState,
    ) -> Result<(Answering, Pages), SourceError> {
        let source = self.source;
        source.step("dump", 0, recorder.report.memory_bytes);
        // The destination's sockets go on with the clocks (TCP timestamps) that the dump finds. CRIU leaves
        // the sockets here with a probe to their peers, each with a later time: if the peers received it, they would
        // refuse the destination's packets as older (PAWS, RFC 7323).
        let cutting = Instant::now();
        source.local.standstills.stand(&source.service)?;
        source.local.network.close(&source.service).await?;
        recorder.report.cutover_ms += ms_since(cutting);
        source.timeline.note("close port", cutting);
        let KernelState { criu, mut options, keep_stopped, at_rest, remembered, shared } = kernel;
        let processes = Processes { keep_stopped, at_rest, remembered };
        let Memory { mut pages, found, leave } = memory;
        let (segments, names) = (pages.tell(), pages.names());
        for (patch, external) in pages.external_segments() {
            if !external.is_empty() {
                recorder.report.criu.push('+');
                recorder.report.criu.push_str(patch);
            }
            options.external.extend(external);
        }
        if !names.is_empty() {
            recorder.report.criu.push_str("+external-tmpfs");
        }
        let milestones = Milestones::default();
        if !pages.follows_copied() && !pages.has_gone() {
            milestones.needed.cancel();
        }
        if pages.follows_copied() {
            options.external.push(EXTERNAL_FILE_PAGES.to_owned());
            recorder.report.criu.push_str("+external-file-pages");
        }
        let tcp_inline = options.tcp_inline;
        let dump = self.begin_dump(criu, options);
        self.deadline.awaits("note which pages are still to come");
        tell_segments(link, segments).await?;
        name(link, &mut pages).await?;
        recorder.report.shared_left_bytes = pages.shared_that_stays() * PAGE_SIZE;
        let owners = pages.owners();
        let residual = match leave {
            true => Residual::new(owners, pages.leave()),
            false => Residual::of_others(owners),
        };
        let mut residual = Answering::start(residual, streams.take_faults());
        self.deadline.watch_faults(residual.asked(found.populated));
        let ((pages, sent), (), ()) = tokio::try_join!(
            self.send_pages(streams, pages, (leave, shared), &mut residual, &milestones),
            self.send_kernel_state(
                link,
                recorder,
                (files, names),
                (dump, processes, tcp_inline),
                &milestones
            ),
            source.sync_storage(),
        )?;
        recorder.report.dump_bytes += sent.bytes;
        recorder.report.page_bytes += sent.found * PAGE_SIZE;
        recorder.report.shared_dump_bytes += sent.shared * PAGE_SIZE;
        if !self.waits {
            // The restore is done, and the last pages were still on their way.
            recorder.report.dump_transfer_ms += recorder.end("pages");
        }
        Ok((residual, pages))
    }

    fn begin_dump(&self, criu: Box<dyn Dump>, options: DumpOptions) -> Dumping {
        // Dropping the handle does not end CRIU, which must put the processes back itself:
        // `Engine::thaw` waits for that.
        let timeline = Arc::clone(&self.source.timeline);
        AbortOnDropHandle::new(tokio::spawn(async move {
            let started = Instant::now();
            let dumped = criu.dump(options).await;
            timeline.note("dump", started);
            dumped.map(|result| (result, ms_since(started)))
        }))
    }

    /// Sends the pages that do not stay here; returns when the destination has restored the service.
    async fn send_pages(
        &self,
        streams: &mut Streams,
        mut pages: Pages,
        (leave, shared): (bool, bool),
        residual: &mut Answering,
        milestones: &Milestones,
    ) -> Result<(Pages, Sent), SourceError> {
        let source = self.source;
        let begun = Instant::now();
        let mut sent = Sent::default();
        if !milestones.needed.is_cancelled() {
            (pages, _) = source.compare_shared(pages, Part::Copied, true).await?;
            (pages, sent) = source.send(pages, streams, State::Needed).await?;
            streams.arrived().await?;
            milestones.needed.cancel();
            source.timeline.note("copies of files' pages", begun);
        }
        failpoint::point("source.needed").await;
        let comparing = Instant::now();
        if shared {
            let all;
            (pages, all) = source.compare_shared(pages, Part::Others, true).await?;
            let what = if all { "compare all shared memory" } else { "compare shared memory" };
            source.timeline.note(what, comparing);
        }
        let (mut pages, more) = source.send(pages, streams, State::Dumping).await?;
        sent.add(more);
        if leave {
            // It goes ahead of what is pushed.
            streams.arrived().await?;
            residual.push(streams, source.options.compress, source.options.max_bandwidth);
        }
        tokio::select! {
            () = milestones.dumped.cancelled() => {}
            error = residual.failed() => return Err(error),
        }
        // CRIU is out of the processes: what it may have changed for a moment is as it was.
        residual.dumped();
        if !leave {
            let last;
            (pages, last) = source.send(pages, streams, State::Frozen).await?;
            sent.add(last);
            streams.arrived().await?;
        }
        source.timeline.note("last pages", begun);
        milestones.arrived.cancel();
        tokio::select! {
            () = milestones.restored.cancelled() => Ok((pages, sent)),
            error = residual.failed() => Err(error),
        }
    }

    /// Sends files, images and log; returns when the destination has restored the service.
    async fn send_kernel_state(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        (files, names): (LastFiles, Vec<Names>),
        (dump, processes, tcp_inline): (Dumping, Processes, bool),
        milestones: &Milestones,
    ) -> Result<(), SourceError> {
        let (source, deadline) = (self.source, self.deadline);
        let LastFiles { tree, round, log } = files;
        deadline.awaits("take the files that changed last");
        let begun = Instant::now();
        let (_, sent) = send_round(link, tree, round).await?;
        recorder.report.dump_bytes += sent;
        recorder.report.file_bytes += sent;
        let ignore = |_| ();
        source.timeline.note("last files", begun);
        deadline.awaits("take the names in each tmpfs");
        for names in names {
            recorder.report.dump_bytes += send_names(link, names).await?;
        }
        let mut images = images::Sender::new(&self.tmpfs.images(), link.sender(), &ignore);
        let (result, took) = self.dumped(dump, &mut images).await?;
        milestones.dumped.cancel();
        recorder.report.dump_ms = took;
        if result.way == MemoryWay::Untouched {
            recorder.report.criu.push_str("+lazy-pages-external");
        }
        if tcp_inline {
            recorder.report.criu.push_str("+tcp-inline");
        }
        recorder.end("dump");
        source.step("transfer", 0, 0);
        deadline.awaits("take the images of the kernel's state");
        let begun = Instant::now();
        let (_, sent) = log.send(link).await?;
        recorder.report.dump_bytes += sent;
        recorder.report.file_bytes += sent;
        milestones.needed.cancelled().await;
        let files = images.finish().await?;
        recorder.report.dump_bytes += images.bytes();
        drop(images);
        let Processes { keep_stopped, at_rest, remembered } = processes;
        link.send(Message::ImagesEnd(ImagesEnd { files, keep_stopped, at_rest, remembered })).await?;
        match link.receive().await? {
            Message::ImagesReceived => source.timeline.tells(),
            other => return Err(link.unexpected(&other, "ImagesReceived").into()),
        }
        source.timeline.note("last images", begun);
        recorder.report.dump_transfer_ms = recorder.end("transfer");
        deadline.awaits("restore the service");
        if self.waits {
            // It restores nothing before all pages are there.
            source.step("pages", 0, 0);
            milestones.arrived.cancelled().await;
            recorder.report.dump_transfer_ms += recorder.end("pages");
        }
        source.step("restore", 0, 0);
        match link.receive().await? {
            Message::Restored => source.timeline.tells(),
            other => return Err(link.unexpected(&other, "Restored").into()),
        }
        recorder.report.resume_ms = recorder.end("restore");
        milestones.restored.cancel();
        if !milestones.arrived.is_cancelled() {
            source.step("pages", 0, 0);
        }
        Ok(())
    }

    /// The end of CRIU's dump. Images go while they are written, and the last output of the service gets into its log.
    async fn dumped(
        &self,
        mut dump: Dumping,
        images: &mut images::Sender<'_>,
    ) -> Result<(DumpResult, f64), SourceError> {
        let source = self.source;
        let _working = self.deadline.works();
        let config = source.local.config(&source.service);
        let logging = async {
            // The service matters more than its last lines: clients wait, and the shim may wait for a disk.
            let begun = Instant::now();
            let settled = source.local.engine.settle_log(&config).await;
            source.timeline.note("settle log", begun);
            if let Err(error) = settled {
                tracing::warn!(service = %source.service.name, error = %crate::error_chain(&error), "its last output may not move with it");
            }
        };
        let following = images.follow();
        tokio::pin!(following);
        let ended = tokio::select! {
            (dumped, ()) = async { tokio::join!(&mut dump, logging) } => dumped,
            () = tokio::time::sleep(DUMP_LIMIT) => return Err(SourceError::Slow),
            // A piece being sent when the dump ends is sent again from its start by `finish`,
            // which is why `follow` advances its offset only after a piece is queued.
            failed = &mut following => match failed { Ok(never) => match never {}, Err(e) => return Err(e.into()) },
        };
        Ok(ended??)
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
