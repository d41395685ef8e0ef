//! Whether a service could move, and what that would be like, without moving it: its obstacles, the destination's answer,
//! and a forecast from a second of its writes and a part of a second of the link.
//!
//! What a migration checks is checked by the same code. The service runs on; the tracker costs it as much as a round of a
//! migration does.

use std::time::{Duration, Instant};

use bytes::Bytes;
use godwit_criu::obstacles::Obstacle;
use godwit_engine::ContainerConfig;
use godwit_memory::tracker::{Backend, TrackError, Tracker};
use godwit_memory::{PAGE_SIZE, shared};
use godwit_policy::Mode;
use godwit_policy::converge::Goals;
use godwit_policy::curve::{Curve, Look};
use godwit_policy::files::Files;
use godwit_policy::outlook::{Known, Outlook, foresee};

use super::file_looks::{Changing, FileLooks};
use super::layers::Lacking;
use super::pages::{Kinds, PagesError};
use super::plan::Plan;
use super::reserve::chosen;
use super::{Source, SourceError};
use crate::databases;
use crate::link::Link;
use crate::message::{Accepted, Message, Versions};

/// How long a service that has just come may take to have all of its pages.
const ARRIVAL: Duration = Duration::from_secs(5);

/// How long a service is looked at, and how long again.
const LOOKS: [Duration; 2] = [Duration::from_millis(250), Duration::from_secs(1)];

/// How long the destination may take to answer: it may wait for its CRIU, and for what is ending there.
const ANSWER: Duration = Duration::from_secs(60);

/// How long the link may take to be measured.
const MEASURING: Duration = Duration::from_secs(20);

/// A burst that takes so long, beside the round trip, shows the bandwidth.
const TELLING: Duration = Duration::from_millis(200);

/// The first burst, bytes: 10 kbit/s carry it before the other side gives the link up. Each one is twice the one before.
const FIRST_BURST: usize = 4 << 10;

/// The largest burst, bytes.
const LARGEST_BURST: usize = 128 << 20;

/// Of a burst so much is one message, bytes.
const PIECE: usize = 256 << 10;

/// Round trips, of which the shortest counts.
const ROUND_TRIPS: usize = 3;

/// Shared memory of less than this crosses within what dump and restore take, bytes.
const NOTICED: u64 = 8 << 20;

/// A frozen time that users of most services notice.
const LONG: Duration = Duration::from_secs(1);

/// What a check has found.
#[derive(Debug, Default)]
pub struct Findings {
    /// What of its processes cannot be moved.
    pub obstacles: Vec<Obstacle>,
    /// Every other reason why it cannot move, as sentences.
    pub objections: Vec<String>,
    /// What does not prevent a move and lengthens it, or makes the forecast worse, as sentences.
    pub warnings: Vec<String>,
    /// What a move would be like, of a service that can move.
    pub forecast: Option<Forecast>,
    /// The figures of that, where a destination was named and answered, and the link to it could be measured.
    pub measured: Option<Measured>,
}

/// What a service writes to its memory and its files, seen by looks, and its databases: the same for all destinations.
#[derive(Debug)]
pub struct Seen {
    looks: Option<Vec<Look>>,
    changing: Changing,
    databases: databases::Look,
}

/// What a move to a destination is thought through with.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Bytes of memory.
    pub memory: u64,
    /// What it writes; none where the kernel cannot tell.
    pub writes: Option<Curve>,
    /// Its files.
    pub files: Files,
    /// Bytes of layers that the destination lacks.
    pub layers: u64,
    /// The link.
    pub link: LinkFigures,
    /// What the service would be frozen for beside pages and files, and how much longer nine of ten moves are at most.
    pub fixed: (Duration, Duration),
    /// Whether the destination restores before all pages are there.
    pub userfaultfd: bool,
}

/// What a move would be like, as far as it can be told.
#[derive(Debug, Clone)]
pub struct Forecast {
    /// How its memory would move.
    pub mode: &'static str,
    /// Why so; empty where the user named the mode.
    pub why: String,
    /// The memory that it needs, bytes.
    pub memory_bytes: u64,
    /// Bytes of pages that it writes in a second; none where the kernel cannot tell.
    pub written_bytes_per_second: Option<f64>,
    /// Layers that the destination lacks, bytes.
    pub layer_bytes: u64,
    /// Changed files, bytes; without what the destination has of them by a preparation.
    pub file_bytes: u64,
    /// Bytes of files and log that change in a second; none where that was not looked at.
    pub file_bytes_per_second: Option<f64>,
    /// The link, where a destination was named and answered.
    pub link: Option<LinkFigures>,
    /// The times, where the link and the writes are known.
    pub outlook: Option<Times>,
}

/// What was measured of a link.
#[derive(Debug, Clone, Copy)]
pub struct LinkFigures {
    /// To the destination and back.
    pub round_trip: Duration,
    /// Bytes per second.
    pub bandwidth: f64,
}

/// The times of a move.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Rounds of copying.
    pub rounds: u32,
    /// Bytes that would cross, without compression.
    pub bytes: u64,
    /// From the request until the source holds nothing that the destination needs.
    pub total: Duration,
    /// The frozen time.
    pub frozen: Duration,
}

/// A destination that accepts.
struct Answered {
    link: Link,
    accepted: Accepted,
    /// What it lacks.
    layers: Lacking,
}

impl Source {
    /// Finds out whether it could move, and what that would be like. With an empty name as destination nothing is asked of
    /// another node.
    ///
    /// # Errors
    /// This node cannot find out.
    pub async fn check(self) -> Result<Findings, SourceError> {
        self.check_again(&mut None).await
    }

    /// The same for one of several destinations: what does not depend on them is seen once, and kept in `seen`.
    ///
    /// # Errors
    /// This node cannot find out.
    pub async fn check_again(self, seen: &mut Option<Seen>) -> Result<Findings, SourceError> {
        let mut findings = Findings::default();
        let ended = self.unless_cancelled(self.find(&mut findings, seen)).await;
        // The tracker must be gone before the service moves.
        self.jobs.end().await;
        match ended {
            Ok(()) => {}
            Err(SourceError::NotEligible(reasons)) => findings.objections.extend(reasons),
            Err(SourceError::Refused { node, reasons }) => {
                findings
                    .objections
                    .extend(reasons.into_iter().map(|reason| format!("node {node}: {reason}")));
            }
            Err(error) => return Err(error),
        }
        Ok(findings)
    }

    async fn find(&self, findings: &mut Findings, seen: &mut Option<Seen>) -> Result<(), SourceError> {
        let name = &self.service.name;
        if tokio::time::timeout(ARRIVAL, self.local.arrivals.settled(name)).await.is_err() {
            findings.objections.push(format!(
                "service {name} cannot leave yet: pages of its last move are still on their way"
            ));
            return Ok(());
        }
        (findings.objections, findings.obstacles) = self.look_for_obstacles().await?;
        if !findings.objections.is_empty() {
            return Ok(());
        }
        let config = self.local.config(&self.service);
        let memory = self.memory(&config).await?;
        let plan = self.plan(memory)?;
        self.check_volumes().await?;
        findings.warnings.extend(self.copies()?);
        let (tree, round) = self.file_looks().await?;
        let mut file_bytes = round.changes.bytes();
        let answered = match self.destination.as_str() {
            "" => None,
            _ => self.ask(&config, (memory, file_bytes), findings).await?,
        };
        let plan = match &answered {
            Some(answered) => plan.with(answered.accepted.userfaultfd, &self.destination)?,
            None => plan,
        };
        if let Some(answered) = &answered
            && let Some(lent) = self.lent(&answered.accepted.files, &tree)
        {
            file_bytes = self.find_lacking(lent, true).await?.1.bytes;
        }
        if let Some(answered) = &answered
            && self.crosses(&answered.accepted)?.is_some()
        {
            match self.check_not_stopped(&config).await {
                Err(SourceError::NotAtRest(why)) => findings.objections.push(why),
                other => other?,
            }
        }
        // A service that cannot move need not be measured.
        if !findings.objections.is_empty() || !findings.obstacles.is_empty() {
            return Ok(());
        }
        // A cold move freezes the service for all of its memory, which the forecast counts.
        if let Some(Answered { accepted, .. }) = &answered
            && plan.mode != Mode::Cold
        {
            let kinds = self.kinds(accepted, plan.mode).await?;
            self.warn_of_shared_memory(kinds, findings).await?;
        }
        // One that has not answered is taken for one of this version.
        let corrects = answered.as_ref().is_none_or(|answered| answered.accepted.corrects);
        let (fixed, margin) = self.corrected(self.fixed(memory).await?);
        let goals = Goals { margin, ..plan.goals };
        let (layer_bytes, link, userfaultfd) = match answered {
            Some(Answered { link, layers, accepted }) => (layers.bytes(), Some(link), accepted.userfaultfd),
            None => (0, None, false),
        };
        let (Seen { looks, changing, databases }, link) = match seen {
            Some(seen) => (&*seen, measure(link).await),
            None => {
                let files = FileLooks::new(tree, round, self.logs().await?);
                let (new, link) = tokio::join!(self.see(&plan, files, &mut findings.warnings), measure(link));
                (&*seen.insert(new?), link)
            }
        };
        findings.warnings.extend(databases.clone().found(corrects).warnings);
        let populated = memory / PAGE_SIZE;
        let writes = looks.as_ref().map(|looks| Curve::fit(looks, populated));
        let written = writes.as_ref().filter(|_| plan.needs_writes()).map(Curve::bytes_per_second);
        let link = match link {
            Ok(link) => link,
            Err(why) => {
                findings
                    .warnings
                    .push(format!("the link to node {} cannot be measured: {why}", self.destination));
                None
            }
        };
        let files = changing.files(file_bytes);
        findings.measured = link.map(|link| Measured {
            memory,
            writes: writes.clone().filter(|_| plan.backend != Backend::None),
            files: files.clone(),
            layers: layer_bytes,
            link,
            fixed: (fixed, margin),
            userfaultfd,
        });
        let outlook = writes.zip(link).map(|(writes, link)| {
            let bandwidth = self.allowed(link.bandwidth);
            let file_bandwidth = link.bandwidth;
            foresee(&Known {
                mode: plan.mode,
                goals,
                populated,
                writes,
                files,
                file_bandwidth,
                bandwidth,
                fixed,
            })
        });
        if let Some(outlook) = &outlook {
            tell_of(outlook, &plan, findings);
            if outlook.kept.is_some() {
                return Ok(());
            }
        }
        findings.forecast = Some(Forecast {
            mode: outlook.as_ref().map_or(plan.mode, |outlook| outlook.mode).name(),
            why: plan.why().to_owned(),
            memory_bytes: memory,
            written_bytes_per_second: written,
            layer_bytes,
            file_bytes,
            file_bytes_per_second: changing.bytes_per_second(),
            link,
            outlook: outlook
                .zip(link)
                .map(|(outlook, link)| times(&outlook, layer_bytes, self.allowed(link.bandwidth))),
        });
        Ok(())
    }

    /// What memory and layers may take of a link that carries so many bytes a second.
    fn allowed(&self, bandwidth: f64) -> f64 {
        self.options.max_bandwidth.map_or(bandwidth, |most| bandwidth.min(most as f64))
    }

    /// Asks the destination; none where it refuses or cannot be asked, which is noted.
    async fn ask(
        &self,
        config: &ContainerConfig,
        (memory, file_bytes): (u64, u64),
        findings: &mut Findings,
    ) -> Result<Option<Answered>, SourceError> {
        let node = &self.destination;
        let connection = match self.local.cluster.connect(node).await {
            Ok(connection) => connection,
            Err(error) => {
                let why = crate::error_chain(&error);
                findings.objections.push(format!("node {node} cannot be reached: {why}"));
                return Ok(None);
            }
        };
        let mut link = Link::new(connection);
        let _marks = self.put_marks().await?;
        let offer = self.offer(config, memory, (file_bytes, 0)).await?;
        let offered: Vec<_> = offer.all_layers().cloned().collect();
        link.send(Message::Ask(offer)).await?;
        let Ok(answer) = tokio::time::timeout(ANSWER, link.receive()).await else {
            findings.objections.push(format!("node {node} did not answer within {} s", ANSWER.as_secs()));
            return Ok(None);
        };
        let accepted = match answer {
            Ok(Message::Accepted(accepted)) => accepted,
            Ok(Message::Refused(refused)) => {
                let reasons = refused.reasons.into_iter().map(|reason| format!("node {node}: {reason}"));
                findings.objections.extend(reasons);
                return Ok(None);
            }
            Ok(other) => return Err(link.unexpected(&other, "Accepted or Refused").into()),
            Err(error) if error.is_of_closing() => {
                findings.warnings.push(format!(
                    "node {node} ({}) closed the connection without an answer, as an older godwit does: whether it refuses is not known",
                    self.godwit_there()
                ));
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        chosen(node, Versions::OWN, accepted.protocol)?;
        self.check_version(&accepted).await?;
        findings.obstacles.extend(self.not_restored(config, &accepted).await?);
        let layers = Lacking::of(node, &accepted, &offered)?;
        Ok(Some(Answered { link, accepted, layers }))
    }

    /// Shared memory that CRIU would dump while the service is frozen, and writes to it, which no sample shows.
    async fn warn_of_shared_memory(&self, kinds: Kinds, findings: &mut Findings) -> Result<(), SourceError> {
        let pids = self.pids().await?;
        let finding = self.jobs.run(move |_| {
            let (mut carried, mut left) = (0_u64, 0_u64);
            for segment in shared::find(&pids).map_err(PagesError::from)? {
                // One that cannot be asked has just gone.
                let bytes = segment.allocated().unwrap_or(0);
                let to = if kinds.has(segment.kind()) { &mut carried } else { &mut left };
                *to = to.saturating_add(bytes);
            }
            Ok::<_, PagesError>((carried, left))
        });
        let (carried, left) = finding.await??;
        if left > NOTICED {
            findings.warnings.push(format!(
                "{} MiB of shared memory cross while it is frozen, which the forecast does not count: that they move before takes CRIU with our patches on both nodes",
                left >> 20
            ));
        }
        if carried > NOTICED {
            findings.warnings.push(format!(
                "{} MiB are shared memory: what it writes there is not measured, and crosses as well",
                carried >> 20
            ));
        }
        Ok(())
    }

    /// Looks at what the service writes to its memory and its files. What cannot be seen is noted.
    async fn see(
        &self,
        plan: &Plan,
        files: FileLooks,
        warnings: &mut Vec<String>,
    ) -> Result<Seen, SourceError> {
        // Not beside the others: it reads all of the memory.
        let databases = self.databases().await?;
        let (looks, changing) = tokio::join!(self.looks(plan), self.changing(files));
        let (looks, warning) = looks?;
        warnings.extend(warning);
        let changing = changing.unwrap_or_else(|error| {
            warnings.push(format!(
                "what of its files changes is not in the forecast: {}",
                crate::error_chain(&error)
            ));
            Changing::unknown()
        });
        if let Some(bytes) = changing.unread {
            warnings.push(format!(
                "files of {} MiB change, too much to look at: what of them crosses while it is frozen is not in the forecast",
                bytes >> 20
            ));
        }
        Ok(Seen { looks, changing, databases })
    }

    /// Looks at what the service writes, where that matters; none where the kernel cannot tell, which is noted.
    async fn looks(&self, plan: &Plan) -> Result<(Option<Vec<Look>>, Option<String>), SourceError> {
        if !plan.needs_writes() {
            return Ok((Some(Vec::new()), None));
        }
        if plan.backend == Backend::None {
            let why = format!(
                "node {} cannot tell which pages are written, so that no time is predicted; `godwit doctor` there says why",
                self.local.node
            );
            return Ok((None, Some(why)));
        }
        let (mut tracker, ..) = self.track(Tracker::new(plan.backend)).await?;
        let (mut looks, mut unwatched) = (Vec::new(), None);
        let mut scanned = Instant::now();
        for time in LOOKS {
            tokio::time::sleep(time).await;
            let pages;
            (tracker, pages, unwatched) = self.track(tracker).await?;
            looks.push(Look { pages, time: scanned.elapsed() });
            scanned = Instant::now();
        }
        Ok((Some(looks), unwatched))
    }

    /// One scan: how many pages were written since the one before, and a process of which that cannot be told.
    async fn track(&self, mut tracker: Tracker) -> Result<(Tracker, u64, Option<String>), SourceError> {
        let pids = self.pids().await?;
        let scanning = self.jobs.run(move |_| {
            let round = tracker.round(&pids, false)?;
            let written = round.spaces.iter().flat_map(|space| &space.written);
            let pages = written.map(|range| (range.end - range.start) / PAGE_SIZE).sum();
            let unwatched = round.spaces.iter().find_map(|space| {
                let why = space.unwatched.as_ref()?;
                Some(format!(
                    "writes of the process with PID {} in the service cannot be noticed: {why}; all of its pages count as written",
                    space.space
                ))
            });
            Ok::<_, TrackError>((tracker, pages, unwatched))
        });
        Ok(scanning.await?.map_err(PagesError::from)?)
    }
}

/// Says what of a move would be unwelcome.
fn tell_of(outlook: &Outlook, plan: &Plan, findings: &mut Findings) {
    let frozen = outlook.frozen.as_millis();
    let limit = plan.goals.max_frozen.filter(|limit| outlook.frozen > *limit);
    if let Some(why) = &outlook.kept {
        findings.objections.push(why.clone());
    } else if let Some(limit) = limit {
        findings.warnings.push(format!(
            "it would be frozen for {frozen} ms, more than {} ms, which mode {} does not heed",
            limit.as_millis(),
            outlook.mode.name()
        ));
    } else if outlook.frozen > LONG {
        // What would shorten it depends on what takes the most of it: files do not follow after the resume.
        let why = if outlook.frozen_by_files > outlook.frozen / 2 {
            format!(
                "most of that for {:.1} MB of changed files and log; have it write less to files, take a faster link, or leave out a bind mount that need not move (--mount TARGET=skip)",
                outlook.frozen_file_bytes as f64 / 1e6
            )
        } else {
            "in mode hybrid, or with --allow postcopy, memory follows after the resume".to_owned()
        };
        findings.warnings.push(format!("it would be frozen for {frozen} ms; {why}"));
    }
}

fn times(outlook: &Outlook, layers: u64, bandwidth: f64) -> Times {
    let before = Duration::from_secs_f64((layers as f64 / bandwidth.max(1.0)).min(1e9));
    let pages = outlook.pages.saturating_mul(PAGE_SIZE);
    Times {
        rounds: outlook.rounds,
        bytes: pages.saturating_add(outlook.file_bytes).saturating_add(layers),
        total: before + outlook.copying + outlook.frozen + outlook.following,
        frozen: outlook.frozen,
    }
}

/// Measures the link to a destination that has answered, and lets it go; else why that cannot be done.
async fn measure(link: Option<Link>) -> Result<Option<LinkFigures>, String> {
    let Some(mut link) = link else { return Ok(None) };
    let measured = match tokio::time::timeout(MEASURING, fill(&mut link)).await {
        Ok(Ok(figures)) => Ok(Some(figures)),
        Ok(Err(error)) => Err(crate::error_chain(&error)),
        Err(_) => Err(format!("that took longer than {} s", MEASURING.as_secs())),
    };
    link.close().await;
    measured
}

/// Sends bursts that grow until one fills the link for long enough to tell.
async fn fill(link: &mut Link) -> Result<LinkFigures, SourceError> {
    let mut round_trip = Duration::MAX;
    for _ in 0..ROUND_TRIPS {
        let begun = Instant::now();
        probed(link).await?;
        round_trip = round_trip.min(begun.elapsed());
    }
    // Nothing on the way can make it smaller.
    let mut state = 1_u64;
    let noise: Bytes = std::iter::repeat_with(|| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    })
    .take(PIECE)
    .collect();
    let mut burst = FIRST_BURST;
    loop {
        let mut took = send_burst(link, burst, &noise).await?.saturating_sub(round_trip);
        // A machine that stands still for a moment is no slow link.
        if took >= TELLING {
            took = took.min(send_burst(link, burst, &noise).await?.saturating_sub(round_trip));
        }
        if took >= TELLING || burst >= LARGEST_BURST {
            let seconds = took.max(Duration::from_millis(1)).as_secs_f64();
            return Ok(LinkFigures { round_trip, bandwidth: burst as f64 / seconds });
        }
        burst *= 2;
    }
}

/// Sends so many bytes; the time until all of them have come.
async fn send_burst(link: &mut Link, burst: usize, noise: &Bytes) -> Result<Duration, SourceError> {
    let begun = Instant::now();
    for sent in (0..burst).step_by(PIECE) {
        link.send(Message::Probe(noise.slice(..PIECE.min(burst - sent)))).await?;
    }
    probed(link).await?;
    Ok(begun.elapsed())
}

/// Waits until all that was sent has come.
async fn probed(link: &mut Link) -> Result<(), SourceError> {
    link.send(Message::ProbeEnd).await?;
    match link.receive().await? {
        Message::ProbeEnd => Ok(()),
        other => Err(link.unexpected(&other, "ProbeEnd").into()),
    }
}
