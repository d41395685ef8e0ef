//! What CRIU cannot dump of the service, found before the destination is even asked; and what the destination cannot
//! restore, found as soon as it has said what it can do, before anything is sent.
//!
//! Much of it passes by itself: data that is held back, a connection not yet accepted, a process that is
//! ending. So what the first check finds must be found by each of the next ones.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use godwit_criu::obstacles::{self, Obstacle, Restores, Subject, UnixSockets};
use godwit_criu::{CriuError, Places};
use godwit_engine::{ContainerConfig, ContainerStatus, EngineError};

use super::{Source, SourceError};
use crate::databases;
use crate::message::Accepted;
use crate::storage;

/// How often to check before a service is refused. One without obstacles is checked once.
const CHECKS: usize = 6;
/// How long to look for what CRIU could not dump: the service is frozen meanwhile.
const LOOK: Duration = Duration::from_millis(300);
/// Between two checks: there is no event for an obstacle that has passed.
const PAUSE: Duration = Duration::from_millis(50);

/// The first series of our patches with `ctty-of-any-end`: before it, CRIU dumped no process that has /dev/tty open where
/// the other end of its terminal is dumped, too.
const FINDS_TERMINALS_SINCE: u32 = 10;

/// Whether a process has the terminal of its session open as such.
fn has_tty_open(pid: u32) -> bool {
    let Ok(open) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
    open.flatten()
        .any(|entry| std::fs::read_link(entry.path()).is_ok_and(|path| path == Path::new("/dev/tty")))
}

/// Whether a process is the leader of its session (proc_pid_stat(5)).
fn leads_session(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let session = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(3)?.parse().ok());
    session == Some(pid)
}

impl Source {
    /// Every reason why the service cannot be moved as it is now, before anything is touched.
    pub(super) async fn check_eligible(&self) -> Result<(), SourceError> {
        let (mut reasons, obstacles) = self.look_for_obstacles().await?;
        reasons.extend(obstacles::sentences(&obstacles));
        if reasons.is_empty() { Ok(()) } else { Err(SourceError::NotEligible(reasons)) }
    }

    /// The databases that its processes have open.
    pub(super) async fn databases(&self) -> Result<databases::Look, SourceError> {
        let pids = self.pids().await?;
        Ok(self.jobs.run(move |wanted| databases::look(&pids, &|| wanted.is())).await?)
    }

    /// The reasons that lie in no process, as sentences; and, where there are none, those that do.
    pub(super) async fn look_for_obstacles(&self) -> Result<(Vec<String>, Vec<Obstacle>), SourceError> {
        // Pages of its last move may still be on their way into its processes.
        let cannot_leave = tokio::select! {
            settled = self.local.arrivals.settled(&self.service.name) => settled.err().map(|why| {
                format!("service {} cannot leave yet: {why}", self.service.name)
            }),
            why = self.local.waits.unreachable(&self.service.name) => {
                Some(format!("service {} {why}", self.service.name))
            }
        };
        if let Some(reason) = cannot_leave {
            return Ok((vec![reason], Vec::new()));
        }
        if let Err(error @ (CriuError::Filtered { .. } | CriuError::Old { .. })) =
            self.local.criu.version().await
        {
            return Ok((vec![error.to_string()], Vec::new()));
        }
        let config = self.local.config(&self.service);
        let mut reasons = Vec::new();
        let state = self.local.engine.state(&config).await?;
        if state.status != ContainerStatus::Running {
            reasons.push(format!("service {} is not running", self.service.name));
        }
        match self.service_said() {
            Ok(said) => {
                reasons.extend(storage::objections(&said, &self.destination));
                if reasons.is_empty()
                    && let Err(SourceError::NotEligible(why)) = self.copied().await
                {
                    reasons.extend(why);
                }
            }
            Err(SourceError::NotEligible(why)) => reasons.extend(why),
            Err(error) => return Err(error),
        }
        let commands = self.local.engine.exec_sessions(&config).await?;
        if commands > 0 {
            reasons.push(format!(
                "{commands} command(s) that cannot move, started by `godwit exec` without a terminal or by its engine, still run in service {}; end them first",
                self.service.name
            ));
        }
        if self.local.engine.sessions(&config).await? > 0 {
            reasons.extend(self.terminals_in_the_way(&config).await?);
        }
        let obstacles = match reasons.as_slice() {
            [] => self.obstacles(&config, state.pid).await?,
            _ => Vec::new(),
        };
        Ok((reasons, obstacles))
    }

    /// Which processes have /dev/tty open in a way that CRIU cannot dump.
    async fn terminals_in_the_way(&self, config: &ContainerConfig) -> Result<Vec<String>, SourceError> {
        let finds_all = self.local.criu.version().await?.series >= FINDS_TERMINALS_SINCE;
        let processes = self.local.engine.processes(config).await?;
        let look = move || {
            let in_the_way = |pid: &u32| has_tty_open(*pid) && !(finds_all && leads_session(*pid));
            processes.into_iter().filter(in_the_way).collect::<Vec<_>>()
        };
        let found = tokio::task::spawn_blocking(look).await?;
        let remedy = match finds_all {
            true => "end the shell in the shell",
            false => {
                "end the shell, or let scripts/setup-criu --build-series build a CRIU with godwit's patches"
            }
        };
        let sentence = |pid| format!("process {pid} has /dev/tty open, which CRIU cannot dump so; {remedy}");
        Ok(found.into_iter().map(sentence).collect())
    }

    /// Every reason that lies in the service's processes.
    pub(super) async fn obstacles(
        &self,
        config: &ContainerConfig,
        main: u32,
    ) -> Result<Vec<Obstacle>, SourceError> {
        let unix = self.unix_sockets(main).await?;
        let mut found = None;
        for _ in 0..CHECKS {
            let now = self.check_once(config, main, unix.clone()).await?;
            let still = match found.take() {
                None => now,
                Some(before) => obstacles::still_there(before, &now),
            };
            if still.is_empty() {
                return Ok(Vec::new());
            }
            found = Some(still);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(found.unwrap_or_default())
    }

    async fn unix_sockets(&self, main: u32) -> Result<Option<Arc<UnixSockets>>, SourceError> {
        Ok(match self.local.network.unix_sockets(&self.service, main).await? {
            Ok(sockets) => Some(Arc::new(sockets)),
            Err(error) => {
                tracing::warn!(service = %self.service.name, %error, "cannot list its unix sockets");
                None
            }
        })
    }

    async fn check_once(
        &self,
        config: &ContainerConfig,
        main: u32,
        unix: Option<Arc<UnixSockets>>,
    ) -> Result<Vec<Obstacle>, SourceError> {
        let looks_at_memory = !self.local.criu.lazy_external().await?;
        // As CRIU is told them.
        let places = match self.local.engine.dump_target(config).await {
            Ok(target) => {
                let target = self.with_copies(target)?;
                Some(Places::new(&target.root, &target.volumes))
            }
            // A command that has just begun, as of a health check, ends by itself.
            Err(EngineError::Occupied { .. }) => None,
            Err(error) => return Err(error.into()),
        };
        let processes = self.local.engine.processes(config).await?;
        let check = move || {
            let proc = Path::new("/proc");
            let (processes, unix, places) = (&processes, unix.as_deref(), places.as_ref());
            Subject { proc, main, processes, unix, places, looks_at_memory }.check()
        };
        Ok(tokio::task::spawn_blocking(check).await?)
    }

    /// Why CRIU could not dump the service, which is frozen: what came into the way after it was checked, if that is found.
    pub(super) async fn explained(&self, error: CriuError) -> SourceError {
        let CriuError::Dump { pid, reason, hint, log } = &error else { return error.into() };
        let look = async {
            let unix = self.unix_sockets(*pid).await?;
            self.check_once(&self.local.config(&self.service), *pid, unix).await
        };
        // A filesystem whose server is frozen, too, may not answer.
        match tokio::time::timeout(LOOK, look).await {
            Ok(Ok(found)) if !found.is_empty() => SourceError::Obstructed {
                obstacles: obstacles::sentences(&found),
                reason: reason.clone(),
                hint: *hint,
                log: log.clone(),
            },
            Ok(Ok(_)) => error.into(),
            Ok(Err(failed)) => {
                tracing::debug!(service = %self.service.name, %failed, "cannot look for what CRIU could not dump");
                error.into()
            }
            Err(_) => error.into(),
        }
    }

    /// Refuses for the destination what it could not restore.
    pub(super) async fn check_reservations(
        &self,
        config: &ContainerConfig,
        accepted: &Accepted,
    ) -> Result<(), SourceError> {
        let found = self.not_restored(config, accepted).await?;
        if found.is_empty() {
            return Ok(());
        }
        Err(SourceError::Refused { node: self.destination.clone(), reasons: obstacles::sentences(&found) })
    }

    /// What a destination that has answered so could not restore.
    pub(super) async fn not_restored(
        &self,
        config: &ContainerConfig,
        accepted: &Accepted,
    ) -> Result<Vec<Obstacle>, SourceError> {
        let restores = Restores { most: accepted.most_at_once, keeps_rights: accepted.keeps_rights };
        if restores.most == 0 {
            return Ok(Vec::new());
        }
        let processes = self.local.engine.processes(config).await?;
        let check = move || obstacles::not_restored(Path::new("/proc"), &processes, restores);
        Ok(tokio::task::spawn_blocking(check).await?)
    }
}
