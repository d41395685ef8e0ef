//! Fourth: the service stops. What is needed to move the rest is found, and nothing is sent yet.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use godwit_criu::{DumpOptions, Memory as DumpMemory};
use godwit_crossing::Set;
use godwit_engine::{ContainerConfig, ContainerStatus, DumpTarget, EngineError, Tmpfs, tree};
use godwit_memory::mappings;

use super::files::{Log, next_round};
use super::pages::{Found, Kinds, Pages, PagesError};
use super::precopy::Copied;
use super::recorder::Recorder;
use super::reserve::Agreed;
use super::streams::Streams;
use super::{Source, SourceError};
use crate::checkpoint::Dump;
use crate::crossing::AtRest;
use crate::databases::{Look, Remembered};
use crate::failpoint;
use crate::hooks::{self, HookPoint};
use crate::images::ImageTmpfs;
use crate::journal::Stage;
use crate::listeners::Listening;
use crate::report::ms_since;
use crate::resources::LocalError;

/// How often, and for how long at most, a service is frozen for a moment at which it is alone.
const FREEZES: u32 = 10;
const FREEZING: Duration = Duration::from_secs(5);

/// How long it may take to run again after a try, and how often to look.
const THAWING: Duration = Duration::from_secs(2);
const THAWED_LOOK: Duration = Duration::from_millis(2);

/// A frozen service, and what is left to send of it.
pub(super) struct Frozen {
    pub(super) tmpfs: ImageTmpfs,
    pub(super) streams: Streams,
    pub(super) memory: Memory,
    pub(super) files: LastFiles,
    pub(super) kernel: KernelState,
    /// Whether the destination restores nothing before all pages are there.
    pub(super) waits: bool,
}

/// The last pages.
pub(super) struct Memory {
    pub(super) pages: Pages,
    pub(super) found: Found,
    /// Whether they stay here for after the commit.
    pub(super) leave: bool,
}

/// The last round of files, and the rest of the log.
pub(super) struct LastFiles {
    pub(super) tree: tree::TreeSender,
    pub(super) round: tree::Round,
    pub(super) log: Log,
}

/// What CRIU is to dump.
pub(super) struct KernelState {
    pub(super) criu: Box<dyn Dump>,
    pub(super) options: DumpOptions,
    pub(super) keep_stopped: Vec<u32>,
    /// All processes, where they go on under other executables.
    pub(super) at_rest: Vec<AtRest>,
    /// What its processes remember of files of databases.
    pub(super) remembered: Vec<Remembered>,
    /// Whether shared memory goes over the streams.
    pub(super) shared: bool,
}

impl Source {
    /// Freezes the service.
    pub(super) async fn freeze(
        &self,
        recorder: &mut Recorder,
        copied: Copied,
        databases: Look,
    ) -> Result<Frozen, SourceError> {
        let Copied { agreed, pages, streams, leave, files } = copied;
        let tmpfs = ImageTmpfs::open(
            &self.local.mounts,
            &self.local.layout.migration(&self.id),
            &self.local.layout.criu_logs(&self.id),
            agreed.images,
        )?;
        let (tree, log) = files.split();
        match self.stand_still(recorder, &tmpfs, agreed, (pages, tree, databases)).await {
            Ok((kernel, (pages, found), (tree, round))) => Ok(Frozen {
                tmpfs,
                streams,
                memory: Memory { pages, found, leave },
                files: LastFiles { tree, round, log },
                kernel,
                waits: agreed.waits,
            }),
            Err(error) => {
                tmpfs.close(false)?;
                Err(error)
            }
        }
    }

    async fn stand_still(
        &self,
        recorder: &mut Recorder,
        tmpfs: &ImageTmpfs,
        agreed: Agreed,
        (pages, tree, databases): (Pages, tree::TreeSender, Look),
    ) -> Result<(KernelState, (Pages, Found), (tree::TreeSender, tree::Round)), SourceError> {
        let config = self.local.config(&self.service);
        // From here on there is something to roll back, even after a crash: the service is about to be frozen, and hooks
        // and the network are told so.
        self.local.journal.set(&self.id, Stage::Frozen, "")?;
        let ends = (self.id.as_str(), self.local.node.as_str(), self.destination.as_str());
        hooks::run(&self.local, &self.service, HookPoint::PreFreeze, ends).await?;
        // What it can do alone is nothing that a frozen service should wait for.
        let mut criu = self.local.criu.prepare()?;
        let mappings = self.prepare_mappings(tmpfs).await?;
        let mappings = mappings.as_deref();
        let target = self.with_copies(self.local.engine.dump_target(&config).await?)?;
        criu.ready(&dump_options(&target, (tmpfs, &pages), agreed.tcp_inline, mappings)).await?;
        let listeners = self.listeners(&config).await?;
        let listeners = listeners.as_ref();
        self.local.standstills.stand_ready(&self.service).await?;
        self.local.network.bar_newcomers(&self.service).await?;
        let freezing = self.freeze_alone(recorder, &config, (listeners, agreed.crosses));
        let (target, mut at_rest) = freezing.await?;
        let target = self.with_copies(target)?;
        // From here nothing is acknowledged to clients that the dump would not hold; what they send
        // waits at the destination, so that they need not wait out a retransmission.
        let cutting = Instant::now();
        self.local.network.steer(&self.service, agreed.vtep).await?;
        recorder.report.cutover_ms = ms_since(cutting);
        self.timeline.note("steer frames", cutting);
        self.accept_waiting(&config, listeners, (agreed.crosses, &mut at_rest)).await?;
        let keep_stopped = self.local.engine.stopped_processes(&config).await?;
        let sessions = self.local.engine.hold_sessions(&config).await?;
        for (name, content) in target.extra_files.iter().chain(&sessions) {
            let path = tmpfs.images().join(name);
            std::fs::write(&path, content).map_err(|source| LocalError::Io {
                action: "write",
                path,
                source,
            })?;
        }
        // Before the dump: a CRIU without our patches makes directories in the container's /tmp for a short time.
        let begun = Instant::now();
        let settled = async { Ok(self.jobs.run(|_| databases.settled()).await?.found(agreed.corrects)) };
        let (memory, files, told, found, databases) = tokio::try_join!(
            self.scan(pages, true),
            next_round(tree, true),
            self.tell_mappings(mappings),
            self.tmpfs(agreed),
            settled
        )?;
        for warning in databases.warnings {
            self.local.cluster.told(&self.service, &warning).await;
        }
        let memory = (self.settle_shared(memory.0, agreed.kinds, found).await?, memory.1);
        if told {
            recorder.report.criu.push_str("+external-smaps");
        }
        self.timeline.note("scan", begun);
        recorder.report.memory_bytes = memory.0.with_shared(memory.1).populated * 4096;
        recorder.end("freeze");
        failpoint::point("source.frozen").await;
        let options = dump_options(&target, (tmpfs, &memory.0), agreed.tcp_inline, mappings);
        let shared = agreed.sends_shared();
        let kernel =
            KernelState { criu, options, keep_stopped, at_rest, remembered: databases.remembered, shared };
        Ok((kernel, memory, files))
    }

    /// Freezes it at a moment at which no command from outside runs in it: another engine begins one for each of its health
    /// checks, and does not ask.
    async fn freeze_alone(
        &self,
        recorder: &mut Recorder,
        config: &ContainerConfig,
        (listeners, crosses): (&dyn Listening, Option<Set>),
    ) -> Result<(DumpTarget, Vec<AtRest>), SourceError> {
        let (mut tries, trying) = (0, Instant::now());
        loop {
            tries += 1;
            self.settle_openings(config, listeners).await?;
            recorder.freezes();
            let begun = Instant::now();
            let at_rest = self.stop(recorder, config, crosses).await?;
            let target = self.local.engine.dump_target(config).await;
            self.timeline.note("stop", begun);
            let again = tries < FREEZES && trying.elapsed() < FREEZING;
            if again && matches!(target, Err(EngineError::Occupied { .. })) {
                self.let_run(config, crosses).await?;
                self.until_thawed(config).await?;
                recorder.thaws();
                // Whoever wants to connect need not wait as long as that takes.
                self.local.network.admit_newcomers(&self.service).await?;
                self.local.network.open(&self.service).await?;
                // Waits for what has just begun, and fails where that does not end.
                self.local.engine.dump_target(config).await?;
                self.local.network.bar_newcomers(&self.service).await?;
                continue;
            }
            return Ok((target?, at_rest));
        }
    }

    /// cgroups of version 2 are frozen until one of their members has run.
    async fn until_thawed(&self, config: &ContainerConfig) -> Result<(), SourceError> {
        let begun = Instant::now();
        while self.local.engine.state(config).await?.status == ContainerStatus::Paused
            && begun.elapsed() < THAWING
        {
            tokio::time::sleep(THAWED_LOOK).await;
        }
        Ok(())
    }

    /// A directory in which CRIU is told the mappings of the processes, if it can be.
    async fn prepare_mappings(&self, images: &ImageTmpfs) -> Result<Option<PathBuf>, SourceError> {
        if !self.local.criu.mappings_external().await? {
            return Ok(None);
        }
        let path = images.mappings();
        std::fs::create_dir(&path).map_err(|source| LocalError::Io {
            action: "create",
            path: path.clone(),
            source,
        })?;
        tokio::task::spawn_blocking(mappings::prepare).await?;
        Ok(Some(path))
    }

    /// Tells CRIU the mappings of the frozen processes; of whom it is not told, it looks itself, and at all pages. Whether
    /// it is told of any.
    async fn tell_mappings(&self, directory: Option<&Path>) -> Result<bool, SourceError> {
        let Some(directory) = directory else { return Ok(false) };
        let (pids, path) = (self.pids().await?, directory.to_owned());
        let telling = self.jobs.run(move |_| mappings::write(&pids, &path));
        let told = telling.await?.map_err(|source| LocalError::Io {
            action: "write the mappings of its processes into",
            path: directory.to_owned(),
            source,
        })?;
        Ok(told > 0)
    }

    /// Looks at the sizes of shared memory once more, at which processes there are, and at all of each tmpfs.
    async fn settle_shared(
        &self,
        mut pages: Pages,
        kinds: Kinds,
        tmpfs: Vec<Tmpfs>,
    ) -> Result<Pages, SourceError> {
        let pids = self.pids().await?;
        let settling = self.jobs.run(move |_| {
            pages.settle_shared(&pids, kinds, tmpfs)?;
            Ok::<_, PagesError>(pages)
        });
        Ok(settling.await??)
    }
}

fn dump_options(
    target: &DumpTarget,
    (images, pages): (&ImageTmpfs, &Pages),
    tcp_inline: bool,
    mappings: Option<&Path>,
) -> DumpOptions {
    DumpOptions {
        external: mappings.map(godwit_criu::external_mappings_in).into_iter().collect(),
        external_mounts: [target.external_mounts.clone(), pages.external_tmpfs()].concat(),
        volumes: target.volumes.clone(),
        external_network: Some(target.network_namespace.1.clone()),
        freezer: Some(target.freezer.clone()),
        memory: DumpMemory::Lazy,
        tcp_inline,
        ..DumpOptions::new(target.pid, &target.root, images.images(), images.work())
    }
}
