//! Third: the service's memory, in rounds while it runs, until a freeze is due.

use std::ops::ControlFlow;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};
use std::{fs, io};

use godwit_engine::Tmpfs;
use godwit_memory::PAGE_SIZE;
use godwit_memory::tracker::Backend;
use godwit_policy::Mode;
use godwit_policy::converge::{self, Next, Round};
use godwit_policy::fixed::fixed;

use super::dump::name;
use super::files::{Ahead, Files};
use super::pages::{Found, Pages, PagesError, Part, Sent, State};
use super::plan::Plan;
use super::recorder::Recorder;
use super::reserve::Agreed;
use super::root::{Prepared, count};
use super::streams::Streams;
use super::{Source, SourceError};
use crate::failpoint;
use crate::link::Link;
use crate::message::{Message, Segments};
use crate::page_hash::EarlierVisit;
use crate::report::{Outcome, Phase, Report, ms_since};

/// Rounds with fewer pages show the round trip, not the bandwidth.
const TELLING: u64 = 1024;

/// Where pages stay at the source: how long the service runs between the last two scans. The pages that it writes in
/// that time are likely to be needed first, and cross first. In a shorter time it would write only some of its working
/// set; a longer one only takes longer.
const SAMPLE: Duration = Duration::from_millis(400);

/// How often shared memory is sent at most where the rest of the memory follows after the commit: what the service writes
/// to it meanwhile crosses while it is frozen.
const SHARED_PASSES: u32 = 4;

/// A comparison of files that took longer than that leaves pages that the last scan has not found.
const LONG: Duration = Duration::from_millis(100);

/// So many pages cross in less time than a sample of them takes.
const FEW: u64 = 512;

const PAGE: f64 = 4096.0;

/// A service that is to be frozen, and what has been sent of it.
pub(super) struct Copied {
    pub(super) agreed: Agreed,
    pub(super) pages: Pages,
    pub(super) streams: Streams,
    /// Whether what is not sent yet stays here for after the commit.
    pub(super) leave: bool,
    pub(super) files: Files,
}

/// How far the rounds have come.
struct Rounds {
    plan: Plan,
    pages: Pages,
    files: Files,
    agreed: Agreed,
    /// How long the last comparison of it took.
    comparing: Duration,
    all: Vec<Round>,
    /// Of its CPU that the service has, in thousandths.
    share: u32,
}

impl Rounds {
    /// How long the service is frozen beside its pages and files, where it would be for so long without comparisons.
    fn fixed(&self, before: Duration) -> Duration {
        // What is frozen is compared once more: both at a time, beside the dump and the restore.
        before + self.comparing.max(self.files.comparing()).saturating_sub(before / 2)
    }
}

impl Source {
    /// Connects the streams, and copies while the service runs until a freeze is due.
    pub(super) async fn precopy(
        &self,
        link: &mut Link,
        recorder: &mut Recorder,
        prepared: Prepared,
    ) -> Result<Copied, SourceError> {
        let Prepared { agreed, plan, visit, files } = prepared;
        let mut pages = self.pages(&plan, visit);
        if agreed.shared_stays {
            pages.let_shared_stay();
        }
        let sampled = plan.mode == Mode::Postcopy && plan.backend == Backend::Uffd;
        if sampled {
            (pages, _) = self.scan(pages, false).await?;
        }
        let mut streams =
            Streams::open(self.local.cluster.as_ref(), &self.destination, &self.id, self.options.streams)
                .await?;
        *self.stream_traffic.lock().unwrap_or_else(PoisonError::into_inner) = streams.traffic().clone();
        let (comparing, report) = (Duration::ZERO, &mut recorder.report);
        let rounds = Rounds { plan, pages, files, agreed, comparing, all: Vec::new(), share: 1000 };
        match self.copy(link, &mut streams, report, rounds, sampled).await {
            Ok((pages, files, leave)) => Ok(Copied { agreed, pages, streams, leave, files }),
            Err(error) => Err(streams.explain(error).await),
        }
    }

    /// The service's pages, of which nothing is sent yet.
    pub(super) fn pages(&self, plan: &Plan, visit: EarlierVisit) -> Pages {
        let mut pages = Pages::new(
            plan.backend,
            self.options.streams,
            self.options.compress,
            self.options.max_bandwidth,
            self.local.delta_cache,
        );
        pages.know_retained(visit);
        if self.service.memory_bytes != 0 {
            pages.spare_page_tables();
        }
        pages
    }

    /// Copies while the service runs, as its mode has it. The pages and files that are left, and whether what is left of
    /// the pages stays here for after the commit.
    async fn copy(
        &self,
        link: &mut Link,
        streams: &mut Streams,
        report: &mut Report,
        rounds: Rounds,
        sampled: bool,
    ) -> Result<(Pages, Files, bool), SourceError> {
        let mode = rounds.plan.mode;
        if matches!(mode, Mode::Precopy | Mode::Hybrid) {
            return self.rounds(link, streams, report, rounds).await;
        }
        let Rounds { mut pages, files, agreed, .. } = rounds;
        let files = send_all_ahead(link, report, files).await?;
        if agreed.sends_shared() {
            pages = self.send_shared(link, streams, report, (pages, agreed)).await?;
        }
        // The more of them are named by now, the less is left to name while it is frozen; and the destination makes pages
        // of shared memory when it is told of them, which takes a while.
        let sample = tokio::time::sleep(SAMPLE);
        if sampled || agreed.shared_stays {
            name(link, &mut pages).await?;
        }
        if sampled {
            sample.await;
        }
        Ok((pages, files, mode == Mode::Postcopy))
    }

    /// Copies in rounds.
    async fn rounds(
        &self,
        link: &mut Link,
        streams: &mut Streams,
        report: &mut Report,
        mut rounds: Rounds,
    ) -> Result<(Pages, Files, bool), SourceError> {
        loop {
            let scanning = Instant::now();
            let mut found;
            (rounds.pages, found) = self.scan(rounds.pages, false).await?;
            if rounds.agreed.sends_shared() {
                let comparing = Instant::now();
                rounds.pages = self.scan_shared(link, rounds.pages, rounds.agreed).await?;
                rounds.comparing = comparing.elapsed();
                found = rounds.pages.with_shared(found);
            }
            let foreseen = self.fixed(found.populated * PAGE_SIZE).await?;
            let before;
            (before, rounds.plan.goals.margin) = self.corrected(foreseen);
            let fixed = rounds.fixed(before);
            report.pre_dump_ms += ms_since(scanning);
            report.memory_bytes = found.populated * 4096;
            rounds.all.push(Round {
                found_pages: found.pages,
                since: found.since,
                bandwidth: None,
                files: 0,
            });
            self.show(&rounds.all, &found, fixed);
            let next = converge::decide(&rounds.all, fixed, &rounds.plan.goals);
            match next {
                Next::Copy => {}
                Next::Throttle => {
                    rounds.share = (rounds.share / 2).max(converge::SLOWEST);
                    self.throttle(rounds.share).await?;
                }
                Next::Freeze | Next::Hybrid => {
                    let leave = rounds.plan.mode == Mode::Hybrid || next == Next::Hybrid;
                    let ahead;
                    (rounds.files, ahead) = rounds.files.send_ahead(link).await?;
                    match ahead {
                        Ahead::Left(bytes) => {
                            if rounds.files.comparing() > LONG && !leave {
                                rounds = self.catch_up(streams, report, rounds).await?;
                            }
                            if let Some(last) = rounds.all.last_mut() {
                                last.files = bytes;
                            }
                            let fixed = rounds.fixed(before);
                            self.is_worth_it(&rounds, fixed, leave, report)?;
                            // Where other things take as long, or it has less CPU, it tells nothing of other moves.
                            let rest = report.predicted_frozen_ms / 1e3 - before.as_secs_f64();
                            let tells = rounds.share == 1000 && rest <= before.as_secs_f64();
                            *self.foreseen.lock().unwrap_or_else(PoisonError::into_inner) =
                                tells.then_some(foreseen);
                            if rounds.agreed.sends_shared() && leave {
                                let pages = (rounds.pages, rounds.agreed);
                                rounds.pages = self.send_shared(link, streams, report, pages).await?;
                            }
                            if next == Next::Hybrid && found.pages > FEW {
                                tokio::time::sleep(SAMPLE).await;
                            }
                            if next == Next::Hybrid && rounds.plan.mode != Mode::Hybrid {
                                report.mode = Mode::Hybrid.name().into();
                                report.why = converge::why_hybrid(&rounds.all);
                            } else if let Some(why) =
                                converge::why_frozen(&rounds.all, fixed, &rounds.plan.goals)
                            {
                                report.why = why;
                            }
                            return Ok((rounds.pages, rounds.files, leave));
                        }
                        Ahead::Sent(bytes) => count(report, bytes),
                    }
                    if leave {
                        // What the service writes meanwhile would cross a third time.
                        continue;
                    }
                }
                Next::Keep(predicted) => {
                    return Err(SourceError::NotWorthIt(converge::advice(
                        &rounds.all,
                        predicted,
                        fixed,
                        &rounds.plan.goals,
                    )));
                }
            }
            rounds = self.send_round(streams, report, rounds).await?;
            failpoint::point("source.copied").await;
        }
    }

    /// Sends what the service has written while its files were compared, and looks at its memory once more.
    async fn catch_up(
        &self,
        streams: &mut Streams,
        report: &mut Report,
        mut rounds: Rounds,
    ) -> Result<Rounds, SourceError> {
        for sends in [true, false] {
            let found;
            (rounds.pages, found) = self.scan(rounds.pages, false).await?;
            let found = rounds.pages.with_shared(found);
            rounds.all.push(Round {
                found_pages: found.pages,
                since: found.since,
                bandwidth: None,
                files: 0,
            });
            if sends {
                rounds = self.send_round(streams, report, rounds).await?;
            }
        }
        Ok(rounds)
    }

    /// Sends what the last scan has found, and waits until it is there.
    async fn send_round(
        &self,
        streams: &mut Streams,
        report: &mut Report,
        mut rounds: Rounds,
    ) -> Result<Rounds, SourceError> {
        let sending = Instant::now();
        let sent;
        (rounds.pages, sent) = self.send(rounds.pages, streams, State::Running).await?;
        streams.arrived().await?;
        let took = sending.elapsed();
        report.pre_dump_transfer_ms += took.as_secs_f64() * 1e3;
        report.pre_dump_bytes += sent.bytes;
        report.page_bytes += sent.found * PAGE_SIZE;
        report.shared_bytes += sent.shared * PAGE_SIZE;
        report.rounds += 1;
        let first = rounds.all.iter().all(|round| round.bandwidth.is_none());
        if let Some(round) = rounds.all.last_mut()
            && (sent.pages >= TELLING || (first && sent.pages > 0))
        {
            round.bandwidth = Some(sent.pages as f64 * PAGE / took.as_secs_f64());
        }
        Ok(rounds)
    }

    /// Records how long the service would be frozen now, and fails where that is too long.
    fn is_worth_it(
        &self,
        rounds: &Rounds,
        fixed: Duration,
        leave: bool,
        report: &mut Report,
    ) -> Result<(), SourceError> {
        let predicted = converge::predict_all(&rounds.all, fixed, leave, rounds.files.bandwidth());
        let Some(predicted) = predicted else { return Ok(()) };
        report.predicted_frozen_ms = predicted.as_secs_f64() * 1e3;
        self.progress.send_modify(|progress| progress.predicted_frozen_ms = report.predicted_frozen_ms);
        let goals = &rounds.plan.goals;
        match goals.max_frozen {
            Some(limit) if predicted + goals.margin > limit => {
                let predicted = predicted + goals.margin;
                Err(SourceError::NotWorthIt(converge::advice(&rounds.all, predicted, fixed, goals)))
            }
            _ => Ok(()),
        }
    }

    /// The service's processes, in the node's PID namespace.
    pub(super) async fn pids(&self) -> Result<Vec<i32>, SourceError> {
        let pids = self.local.engine.processes(&self.local.config(&self.service)).await?;
        Ok(pids.into_iter().filter_map(|pid| i32::try_from(pid).ok()).collect())
    }

    /// Scans the memory on a thread that may block.
    pub(super) async fn scan(&self, mut pages: Pages, frozen: bool) -> Result<(Pages, Found), SourceError> {
        let pids = self.pids().await?;
        let scanning = self.jobs.run(move |_| {
            let found = pages.scan(&pids, frozen)?;
            Ok::<_, PagesError>((pages, found))
        });
        Ok(scanning.await??)
    }

    /// Tells the destination of the segments of shared memory that there are now, and looks for what changed in them.
    async fn scan_shared(
        &self,
        link: &mut Link,
        mut pages: Pages,
        agreed: Agreed,
    ) -> Result<Pages, SourceError> {
        let (pids, tmpfs) = (self.pids().await?, self.tmpfs(agreed).await?);
        let finding = self.jobs.run(move |_| {
            let segments = pages.find_shared(&pids, agreed.kinds, tmpfs)?;
            Ok::<_, PagesError>((pages, segments))
        });
        let (pages, segments) = finding.await??;
        tell_segments(link, segments).await?;
        Ok(self.compare_shared(pages, Part::All, false).await?.0)
    }

    /// Each tmpfs whose files go over the streams, if that is agreed.
    pub(super) async fn tmpfs(&self, agreed: Agreed) -> Result<Vec<Tmpfs>, SourceError> {
        match agreed.tmpfs {
            true => Ok(self.local.engine.tmpfs(&self.local.config(&self.service)).await?),
            false => Ok(Vec::new()),
        }
    }

    /// Looks for what changed in the segments that the destination was told of; whether all had to be compared.
    pub(super) async fn compare_shared(
        &self,
        mut pages: Pages,
        part: Part,
        frozen: bool,
    ) -> Result<(Pages, bool), SourceError> {
        let pids = self.pids().await?;
        let scanning = self.jobs.run(move |_| {
            let all = pages.scan_shared(&pids, part, frozen)?;
            Ok::<_, PagesError>((pages, all))
        });
        Ok(scanning.await??)
    }

    /// Sends shared memory alone, until little of it changes meanwhile.
    async fn send_shared(
        &self,
        link: &mut Link,
        streams: &mut Streams,
        report: &mut Report,
        (mut pages, agreed): (Pages, Agreed),
    ) -> Result<Pages, SourceError> {
        for _ in 0..SHARED_PASSES {
            let scanning = Instant::now();
            pages = self.scan_shared(link, pages, agreed).await?;
            report.pre_dump_ms += ms_since(scanning);
            if pages.shared_pages() <= FEW {
                break;
            }
            let sending = Instant::now();
            let sent;
            (pages, sent) = self.send(pages, streams, State::Shared).await?;
            streams.arrived().await?;
            report.pre_dump_transfer_ms += ms_since(sending);
            report.pre_dump_bytes += sent.bytes;
            report.page_bytes += sent.found * PAGE_SIZE;
            report.shared_bytes += sent.shared * PAGE_SIZE;
        }
        Ok(pages)
    }

    /// Sends what was found on threads that may block.
    pub(super) async fn send(
        &self,
        mut pages: Pages,
        streams: &Streams,
        state: State,
    ) -> Result<(Pages, Sent), SourceError> {
        let senders = streams.senders();
        let progress = self.progress.clone();
        let sending = self.jobs.run(move |wanted| {
            let on_progress = |bytes| {
                progress.send_modify(|progress| progress.bytes_done += bytes);
                if wanted.is() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
            };
            let sent = pages.send(&senders, state, &on_progress)?;
            Ok::<_, PagesError>((pages, sent))
        });
        Ok(sending.await??)
    }

    async fn throttle(&self, share: u32) -> Result<(), SourceError> {
        let all = match self.service.cpu_millis {
            0 => {
                std::thread::available_parallelism().map_or(1, |n| u32::try_from(n.get()).unwrap_or(1)) * 1000
            }
            millis => millis,
        };
        let millis = (u64::from(all) * u64::from(share) / 1000).max(1);
        tracing::info!(migration = %self.id, service = %self.service.name, cpu_millis = millis, "it writes faster than the link carries, and is slowed");
        let config = self.local.config(&self.service);
        Ok(self.local.engine.limit_cpu(&config, u32::try_from(millis).unwrap_or(u32::MAX)).await?)
    }

    /// How long a service with so many bytes of memory is frozen beside its pages and files, without regard to past moves.
    pub(super) async fn fixed(&self, memory: u64) -> Result<Duration, SourceError> {
        let processes = self.local.engine.processes(&self.local.config(&self.service)).await?;
        let connections = match processes.first().map(|pid| connections_of(*pid)) {
            Some(Ok(connections)) => connections,
            // Another task watches whether it lives.
            Some(Err(error)) => {
                tracing::debug!(service = %self.service.name, %error, "its connections cannot be counted");
                0
            }
            None => 0,
        };
        Ok(fixed(memory, connections))
    }

    /// The same by what past moves took: what is to be expected, and how much longer nine of ten moves are at most.
    pub(super) fn corrected(&self, fixed: Duration) -> (Duration, Duration) {
        let belief = self.local.past_moves.belief(&self.destination, &self.service.id);
        (belief.expected(fixed), belief.margin(fixed))
    }

    /// Notes how long a service was frozen beside the pages and files that were sent meanwhile, if that was foreseen.
    pub(super) async fn learn(&self, report: &Report) {
        let foreseen = self.foreseen.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(foreseen) = foreseen.filter(|_| report.outcome == Outcome::Moved) else { return };
        // The phase of the dump has the last files in it, too.
        let is_its =
            |phase: &&Phase| matches!(phase.phase.as_str(), "freeze" | "transfer" | "restore" | "commit");
        let others: f64 = report.phases.iter().filter(is_its).map(|phase| phase.ms).sum();
        let measured = Duration::from_secs_f64((others + report.dump_ms).max(0.0) / 1e3);
        let (local, to, service) =
            (Arc::clone(&self.local), self.destination.clone(), self.service.id.clone());
        let noting = move || local.past_moves.learn((&to, &service), foreseen, measured);
        if let Err(error) = tokio::task::spawn_blocking(noting).await {
            tracing::error!(migration = %self.id, %error, "what it took is not noted");
        }
    }

    fn show(&self, rounds: &[Round], found: &Found, fixed: Duration) {
        let predicted = converge::predict(rounds, fixed).map_or(0.0, |time| time.as_secs_f64() * 1e3);
        let rate = match found.since.as_secs_f64() {
            0.0 => 0.0,
            since => found.pages as f64 / since,
        };
        self.progress.send_modify(|progress| {
            progress.phase = "copy";
            progress.round = u32::try_from(rounds.len()).unwrap_or(u32::MAX);
            progress.bytes_done = 0;
            progress.bytes_total = found.pages * 4096;
            progress.dirty_pages_per_second = rate;
            progress.bandwidth = rounds.iter().rev().find_map(|round| round.bandwidth).unwrap_or(0.0);
            progress.predicted_frozen_ms = predicted;
        });
    }
}

/// Tells the destination which segments of shared memory there are, if that has changed.
pub(super) async fn tell_segments(link: &mut Link, segments: Option<Segments>) -> Result<(), SourceError> {
    let Some(segments) = segments else { return Ok(()) };
    link.send(Message::Segments(segments)).await?;
    match link.receive().await? {
        Message::SegmentsMade => Ok(()),
        other => Err(link.unexpected(&other, "SegmentsMade").into()),
    }
}

/// How many TCP sockets there are in the network namespace of this process.
fn connections_of(pid: u32) -> io::Result<u32> {
    let mut all = 0;
    for file in ["sockstat", "sockstat6"] {
        all += in_use(&fs::read_to_string(format!("/proc/{pid}/net/{file}"))?);
    }
    Ok(all)
}

/// The TCP sockets in use, of a file as the kernel writes it.
fn in_use(sockstat: &str) -> u32 {
    let line = sockstat.lines().find_map(|line| line.strip_prefix("TCP: ").or(line.strip_prefix("TCP6: ")));
    let count = line.and_then(|line| line.strip_prefix("inuse ")?.split(' ').next());
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Sends files and log as far as that pays.
async fn send_all_ahead(link: &mut Link, report: &mut Report, files: Files) -> Result<Files, SourceError> {
    let (mut files, mut ahead) = files.send_ahead(link).await?;
    while let Ahead::Sent(bytes) = ahead {
        count(report, bytes);
        (files, ahead) = files.send_ahead(link).await?;
    }
    Ok(files)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::process::CommandExt;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A process in a network namespace of its own, with this many TCP sockets of each family; it ends with its input.
    fn with_sockets(of_each_family: usize) -> Child {
        let mut program = Command::new("cat");
        // SAFETY: between fork and exec there are system calls only.
        unsafe {
            program.stdin(Stdio::piped()).stdout(Stdio::null()).pre_exec(move || {
                let user = if libc::geteuid() == 0 { 0 } else { libc::CLONE_NEWUSER };
                if libc::unshare(user | libc::CLONE_NEWNET) != 0 {
                    return Err(io::Error::last_os_error());
                }
                for family in [libc::AF_INET, libc::AF_INET6] {
                    for _ in 0..of_each_family {
                        let socket = libc::socket(family, libc::SOCK_STREAM, 0);
                        if socket < 0 || libc::listen(socket, 1) != 0 {
                            return Err(io::Error::last_os_error());
                        }
                    }
                }
                Ok(())
            });
        }
        program.spawn().unwrap()
    }

    #[test]
    fn connections_are_counted_in_both_families() {
        let mut process = with_sockets(50);
        assert_eq!(connections_of(process.id()).unwrap(), 100);
        drop(process.stdin.take());
        assert!(process.wait().unwrap().success());
    }

    #[test]
    fn what_is_no_count_counts_for_nothing() {
        assert_eq!(
            in_use("sockets: used 280\nTCP: inuse 12 orphan 0 tw 3 alloc 14 mem 1\nUDP: inuse 2 mem 0\n"),
            12
        );
        assert_eq!(in_use("TCP6: inuse 7\nUDP6: inuse 3\n"), 7);
        for nothing in ["", "TCP: ", "TCP: inuse many", "UDP: inuse 3"] {
            assert_eq!(in_use(nothing), 0, "{nothing:?}");
        }
    }
}
