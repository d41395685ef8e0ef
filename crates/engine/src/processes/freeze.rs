//! Freezing, thawing and continuing the processes of a container: the parts of [`Processes`] around a
//! dump and after a restore.
//!
//! A process that is stopped by a signal sleeps in another place than the v1 freezer's, and
//! attaching to it there blocks until the freezer is thawed. CRIU would wait for ever, as it thaws
//! after it has attached. So when a container is frozen, its stopped processes are noted in a file
//! and told to continue: they are frozen and do not run, and CRIU finds them like the others. Before
//! the thaw they are told to stop again, by the signal that had stopped them ([`stop`](super::stop)). On cgroup
//! v2 none of this is needed or done.
//!
//! A process that waits in vfork(2) for its child cannot be dumped: CRIU would hold the child, and
//! then wait in vain for the parent. Such a wait is short, so the container runs on for a moment and
//! is frozen again.

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::cgroup::{Cgroup, is_gone};
use super::process::{self, Handle, ProcessStatus, Sleeping};
use super::stop::{self, StopSignals};
use super::{Processes, tmpfs};
use crate::container::{ContainerConfig, EngineError, io_error};

/// How often to check, while waiting for CRIU, whether it can only continue after a thaw.
const CRIU_LOOK: Duration = Duration::from_millis(500);

/// How long CRIU may continue a dump that is no longer wanted: 60 s are enough for some 60 GiB. A
/// container that stays frozen for good is worse than what a killed CRIU may leave.
const CRIU_LIMIT: Duration = Duration::from_secs(60);

/// The same for one that traces no process: killing it harms nothing.
const IDLE_CRIU_LIMIT: Duration = Duration::from_secs(5);

/// How long a frozen container that has a process in vfork runs on before it is frozen again.
const VFORK_LOOK: Duration = Duration::from_millis(1);

/// How long a process may take to stop by a signal when it is thawed. No event tells that it has.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// Between two checks whether it has: a matter of microseconds.
const STOP_LOOK: Duration = Duration::from_micros(200);

/// How long to try to meet a container when none of its processes is in vfork. A child is out of it
/// as soon as its program is loaded.
const VFORK_LIMIT: Duration = Duration::from_secs(2);

impl Processes {
    /// Freezes, in a way that CRIU can dump.
    pub(crate) async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let cgroup = self.cgroup(config)?;
        let io = |source| io_error(&config.name, "freeze its processes".into(), source);
        let begin = Instant::now();
        // In a frozen cgroup they could not be asked.
        if !cgroup.is_frozen() {
            let mut statuses = cgroup.members().and_then(process::statuses).map_err(io)?;
            statuses.retain(|status| status.state == 'T');
            StopSignals::of(config).note(&stop::ask(statuses)).map_err(io)?;
        }
        loop {
            cgroup.freeze().await.map_err(|error| match is_gone(&error) {
                true => EngineError::NotFound(config.name.clone()),
                false => io(error),
            })?;
            let members = cgroup.members().map_err(io)?;
            let sleeping: Vec<_> = members.into_iter().map(|pid| (pid, Sleeping::of(pid))).collect();
            let Some(&(pid, _)) = sleeping.iter().find(|(_, sleeping)| sleeping.in_vfork) else {
                let stopped = sleeping.iter().filter(|(_, sleeping)| sleeping.stopped).map(|(pid, _)| *pid);
                return Stopped::of(config).note_and_continue(stopped.collect()).map_err(io);
            };
            cgroup.thaw().map_err(io)?;
            if begin.elapsed() > VFORK_LIMIT {
                return Err(EngineError::Vfork { name: config.name.clone(), pid });
            }
            tokio::time::sleep(VFORK_LOOK).await;
        }
    }

    /// PIDs in the container's PID namespace of the processes that are stopped.
    pub(crate) fn stopped(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        let cgroup = self.cgroup(config)?;
        let noted = match cgroup.is_frozen() {
            true => Stopped::of(config).noted().map_err(|source| {
                io_error(&config.name, "read which processes are stopped".into(), source)
            })?,
            false => Vec::new(),
        };
        let stopped =
            |status: &ProcessStatus| status.state == 'T' || noted.iter().any(|(pid, _)| *pid == status.pid);
        let statuses = cgroup
            .members()
            .and_then(process::statuses)
            .map_err(|source| io_error(&config.name, "examine its processes".into(), source))?;
        Ok(statuses.into_iter().filter(stopped).map(|status| status.inner_pid).collect())
    }

    /// Sends SIGCONT to all members but those that were stopped before the dump; these are stopped by the
    /// signal by which they were then.
    pub(crate) async fn cont(
        &self,
        config: &ContainerConfig,
        keep_stopped: &[u32],
    ) -> Result<(), EngineError> {
        let members = self.members(config)?;
        if members.is_empty() {
            return Err(EngineError::NotFound(config.name.clone()));
        }
        let statuses = process::statuses(members)
            .map_err(|source| io_error(&config.name, "examine its processes".into(), source))?;
        tmpfs::limit(config, &statuses);
        self.stop_as_before(config, keep_stopped, &statuses).await?;
        let parent = |pid: u32| statuses.iter().find(|s| s.pid == pid).map(|s| s.parent);
        let depth =
            |pid: u32| std::iter::successors(Some(pid), |&pid| parent(pid)).take(statuses.len()).count();
        let mut order: Vec<_> = statuses.iter().filter(|s| !keep_stopped.contains(&s.inner_pid)).collect();
        // Children first: a parent that waits for stopped children must not see them so.
        order.sort_by_key(|status| std::cmp::Reverse(depth(status.pid)));
        for status in order {
            send(status.pid, Signal::SIGCONT).map_err(|source| {
                io_error(&config.name, format!("continue process {}", status.pid), source)
            })?;
        }
        Ok(())
    }

    /// Gives those that are to stay stopped, which the restore has stopped by SIGSTOP, the stop that they had:
    /// before any other process runs, which could see them in between.
    async fn stop_as_before(
        &self,
        config: &ContainerConfig,
        keep_stopped: &[u32],
        statuses: &[ProcessStatus],
    ) -> Result<(), EngineError> {
        let io = |source| io_error(&config.name, "stop its processes as they were".into(), source);
        let note = StopSignals::of(config);
        let signals = note.noted().map_err(io)?;
        let others: Vec<(&ProcessStatus, Signal)> = statuses
            .iter()
            .filter(|status| status.state == 'T' && keep_stopped.contains(&status.inner_pid))
            .filter_map(|status| Some((status, *signals.get(&status.inner_pid)?)))
            .filter(|(status, signal)| stop::stops(*signal, status, statuses))
            .collect();
        if !others.is_empty() {
            let cgroup = self.cgroup(config)?;
            cgroup.freeze().await.map_err(io)?;
            let sent = others.iter().try_for_each(|(status, signal)| {
                send(status.pid, Signal::SIGCONT)?;
                send(status.pid, *signal)
            });
            cgroup.thaw().map_err(io)?;
            sent.map_err(io)?;
            let begun = Instant::now();
            for (status, signal) in others {
                while process::statuses([status.pid]).map_err(io)?.iter().any(|now| now.state != 'T') {
                    if begun.elapsed() > STOP_LIMIT {
                        tracing::warn!(container = %config.name, pid = status.pid, %signal, "a process does not stop on the signal that had stopped it; SIGSTOP stops it");
                        send(status.pid, Signal::SIGSTOP).map_err(io)?;
                        break;
                    }
                    tokio::time::sleep(STOP_LOOK).await;
                }
            }
        }
        // What is continued from now on is the service's business.
        note.forget().map_err(io)
    }

    /// Thaws, but not before a CRIU that still works on the container has ended: it would put the
    /// freezer back to frozen afterwards.
    pub(crate) async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let name = &config.name;
        let cgroup = self.cgroup(config)?;
        let tracer = || self.tracing_criu(&cgroup);
        let io = |source| io_error(name, "thaw its processes".into(), source);
        // This daemon's own CRIU, which may not have begun to trace yet, and an earlier daemon's.
        let criu_ended = async {
            for pid in cgroup.members()? {
                godwit_criu::settled(pid).await;
            }
            while let Some(pid) = tracer()? {
                if let Some(criu) = Handle::open(pid)? {
                    tracing::info!(container = %name, criu = pid, "waiting for CRIU to end before thawing");
                    criu.ended().await?;
                }
            }
            Ok(())
        };
        tokio::pin!(criu_ended);
        let begun = Instant::now();
        loop {
            match tokio::time::timeout(CRIU_LOOK, &mut criu_ended).await {
                Ok(ended) => break ended.map_err(io)?,
                // When it ends it puts the freezer back to frozen; the last thaw comes then.
                Err(_) if tracer().map_err(io)?.is_some_and(process::waits_to_attach) => {
                    cgroup.thaw().map_err(io)?
                }
                Err(_) => {}
            }
            let traced_by = tracer().map_err(io)?;
            if begun.elapsed() > traced_by.map_or(IDLE_CRIU_LIMIT, |_| CRIU_LIMIT) {
                tracing::error!(container = %name, "CRIU hangs and is killed: the container must not stay frozen");
                cgroup.members().map_err(io)?.into_iter().for_each(godwit_criu::kill);
                if let Some(criu) = traced_by.map(Handle::open).transpose().map_err(io)?.flatten() {
                    criu.kill().map_err(io)?;
                }
            }
        }
        // It may have been killed only now.
        match self.recover(config).await {
            // They must not stay frozen for what is left in them.
            Err(error) if !matches!(error, EngineError::NotFound(_)) => {
                tracing::error!(container = %name, error = &error as &dyn std::error::Error, "connections of the container may be broken")
            }
            done => done?,
        }
        Stopped::of(config).stop_again(&StopSignals::of(config), &cgroup).map_err(io)?;
        match cgroup.thaw() {
            Err(error) if is_gone(&error) => Err(EngineError::NotFound(name.clone())),
            result => result.map_err(io),
        }
    }

    /// A CRIU that was killed leaves the freezer open, which it opened for its own code. So where it is closed
    /// there is nothing to do.
    pub(crate) async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let cgroup = self.cgroup(config)?;
        let io = |source: io::Error| match is_gone(&source) {
            true => EngineError::NotFound(config.name.clone()),
            false => io_error(&config.name, "repair its processes after a killed CRIU".into(), source),
        };
        if cgroup.is_frozen() || self.tracing_criu(&cgroup).map_err(io)?.is_some() {
            return Ok(());
        }
        cgroup.freeze().await.map_err(io)?;
        let members = cgroup.members().map_err(io)?;
        let clear = tokio::task::spawn_blocking(move || godwit_criu::remains::clear(&members));
        match clear.await.map_err(|error| io(io::Error::other(error)))?.map_err(io)? {
            0 => {}
            connections => {
                tracing::warn!(container = %config.name, connections, "a killed CRIU has left connections in repair mode; they are taken out of it")
            }
        }
        Ok(())
    }

    /// The CRIU that traces a process of these, if one does.
    fn tracing_criu(&self, cgroup: &Cgroup) -> io::Result<Option<u32>> {
        let criu_name: Option<String> =
            self.criu.file_name().map(|name| name.to_string_lossy().chars().take(15).collect());
        let statuses = cgroup.members().and_then(process::statuses)?;
        let mut tracers = statuses.iter().map(|status| status.tracer);
        Ok(tracers.find(|&pid| pid != 0 && process::command_name(pid) == criu_name))
    }
}

/// The note of the processes that were stopped when the container was frozen: their PIDs in the
/// node's namespace, and when they began.
struct Stopped {
    path: PathBuf,
}

impl Stopped {
    fn of(config: &ContainerConfig) -> Self {
        Self { path: config.directory.join("stopped.json") }
    }

    fn noted(&self) -> io::Result<Vec<(u32, u64)>> {
        match std::fs::read(&self.path) {
            Ok(text) => Ok(serde_json::from_slice(&text)?),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Notes frozen processes that are stopped, beside those noted before, and tells them to
    /// continue.
    fn note_and_continue(&self, stopped: Vec<u32>) -> io::Result<()> {
        if stopped.is_empty() {
            return Ok(());
        }
        let mut all = self.noted()?;
        all.extend(stopped.iter().filter_map(|&pid| Some((pid, process::start_time(pid)?))));
        all.sort_unstable();
        all.dedup();
        // The note comes first: after a crash in between, a process is told to stop that is stopped.
        std::fs::write(&self.path, serde_json::to_vec(&all)?)?;
        stopped.into_iter().try_for_each(|pid| send(pid, Signal::SIGCONT))
    }

    /// Tells the noted processes to stop, by the signals by which they were stopped, and forgets them.
    fn stop_again(&self, signals: &StopSignals, cgroup: &Cgroup) -> io::Result<()> {
        let noted = self.noted()?;
        if noted.is_empty() {
            return Ok(());
        }
        let signals = signals.noted()?;
        let statuses = process::statuses(cgroup.members()?)?;
        for (pid, start) in noted {
            if process::lives(pid, start) {
                let status = statuses.iter().find(|status| status.pid == pid);
                let signal = status.and_then(|status| {
                    let signal = *signals.get(&status.inner_pid)?;
                    stop::stops(signal, status, &statuses).then_some(signal)
                });
                send(pid, signal.unwrap_or(Signal::SIGSTOP))?;
            }
        }
        match std::fs::remove_file(&self.path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }
}

/// Sends a signal; no error when the process is gone.
fn send(pid: u32, signal: Signal) -> io::Result<()> {
    let pid = i32::try_from(pid).map_err(io::Error::other)?;
    match kill(Pid::from_raw(pid), signal) {
        Ok(()) | Err(nix::Error::ESRCH) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
