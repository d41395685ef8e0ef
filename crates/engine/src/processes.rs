//! The processes of a container, whatever engine has started them: in which cgroup they are, how they are frozen for a
//! dump and continued after a restore, what memory they have.
//!
//! All is asked of the kernel. The container's directory ([`ContainerConfig::directory`]) has notes for the next life of
//! the caller:
//!
//! | file | what |
//! |---|---|
//! | `stopped.json` | processes that were stopped when it was frozen, see [`freeze`] |
//! | `stop-signals.json` | by which signals they were stopped, see [`stop`] |

pub(crate) mod cgroup;
mod freeze;
pub(crate) mod limits;
pub(crate) mod mounts;
pub(crate) mod process;
pub(crate) mod stop;
pub(crate) mod tmpfs;
mod usage;

use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::time::Duration;

use crate::container::{ContainerConfig, EngineError, Tmpfs, Usage, io_error};
use cgroup::Cgroup;
use process::{Handle, ProcessStatus};

/// How long killed processes may take to end. Only uninterruptible sleep takes longer than a moment.
const KILL_LIMIT: Duration = Duration::from_secs(20);

/// How often, and how long after, what looks like a command from outside is looked at again.
const LOOKS_AGAIN: usize = 3;
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What godwit does with processes of containers.
#[derive(Debug, Clone)]
pub(crate) struct Processes {
    /// The CRIU that dumps and restores them.
    pub(crate) criu: PathBuf,
}

impl Processes {
    pub(crate) fn cgroup(&self, config: &ContainerConfig) -> Result<Cgroup, EngineError> {
        Cgroup::new(&config.cgroup).map_err(|source| io_error(&config.name, "use its cgroup".into(), source))
    }

    /// The members of its cgroup.
    pub(crate) fn members(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        let members = self.cgroup(config)?.members();
        members.map_err(|source| io_error(&config.name, "list its processes".into(), source))
    }

    /// How many commands from outside run in the container with this main process.
    pub(crate) fn sessions(&self, config: &ContainerConfig, main: u32) -> Result<usize, EngineError> {
        let mut found = self.first_of_commands(config, main)?;
        for _ in 0..LOOKS_AGAIN {
            if found.is_empty() {
                break;
            }
            // There is no event for the end of a process's parent.
            std::thread::sleep(LOOK_AGAIN);
            let again = self.first_of_commands(config, main)?;
            found.retain(|pid| again.contains(pid));
        }
        Ok(found.len())
    }

    /// Processes whose parent is outside the container: the first ones of commands; and, for a moment, those whose parent
    /// ends, which leaves its cgroup before its children have another parent.
    fn first_of_commands(&self, config: &ContainerConfig, main: u32) -> Result<Vec<u32>, EngineError> {
        let members = self.members(config)?;
        let statuses = statuses(config, members.clone())?;
        let from_outside = |status: &&ProcessStatus| status.pid != main && !members.contains(&status.parent);
        Ok(statuses.iter().filter(from_outside).map(|status| status.pid).collect())
    }

    /// The tmpfs of the container with this main process that a restorer can bring now.
    pub(crate) async fn tmpfs(&self, config: &ContainerConfig, main: u32) -> Result<Vec<Tmpfs>, EngineError> {
        let (members, of) = (self.members(config)?, config.clone());
        let finding = tokio::task::spawn_blocking(move || tmpfs::find(&of, main, &members));
        finding
            .await
            .map_err(io::Error::other)
            .and_then(|found| found)
            .map_err(|source| io_error(&config.name, "examine its tmpfs".into(), source))
    }

    /// Gives it this much CPU, in thousandths; 0 for no limit.
    pub(crate) fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        let limited = self.cgroup(config)?.limit_cpu(millis);
        limited.map_err(|source| io_error(&config.name, "limit its CPU".into(), source))
    }

    /// Gives it the limits that its definition has.
    pub(crate) async fn limit(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let cgroup = self.cgroup(config)?;
        let (memory, processes, cpu) =
            (config.memory_bytes, config.confinement.pids_limit, config.cpu_millis);
        let limit = move || {
            cgroup.limit_processes(processes).map_err(|error| ("processes", error))?;
            cgroup.limit_cpu(cpu).map_err(|error| ("CPU", error))?;
            // A kernel with cgroups of version 2 would kill a process for what a lower limit does not hold.
            if let Some(needed) =
                usage::needed_memory(&cgroup).filter(|needed| memory != 0 && *needed > memory)
            {
                let why = format!("{needed} bytes are in use, which a limit of {memory} cannot hold");
                return Err(("memory", io::Error::other(why)));
            }
            // It reclaims at once what it can.
            cgroup.limit_memory(memory).map_err(|error| ("memory", error))
        };
        let limited = tokio::task::spawn_blocking(limit).await;
        limited
            .unwrap_or_else(|error| Err(("resources", io::Error::other(error))))
            .map_err(|(what, source)| io_error(&config.name, format!("limit its {what}"), source))
    }

    /// What it uses, with the network of its main process.
    pub(crate) fn usage(&self, config: &ContainerConfig, main: u32) -> Result<Usage, EngineError> {
        Ok(usage::of(&self.cgroup(config)?, main))
    }

    /// Memory that is charged to it, in bytes.
    pub(crate) fn memory(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        if let Some(bytes) = self.cgroup(config)?.memory() {
            return Ok(bytes);
        }
        let statuses = statuses(config, self.members(config)?)?;
        Ok(statuses.iter().map(|status| status.anonymous_bytes + status.shared_bytes).sum())
    }

    /// Bytes that its processes need after a move.
    pub(crate) async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        let charged = self.memory(config)?;
        let (members, of) = (self.members(config)?, config.clone());
        // A service may have thousands of processes.
        let read = tokio::task::spawn_blocking(move || statuses(&of, members));
        let statuses = read.await.map_err(|error| {
            io_error(&config.name, "examine its processes".into(), io::Error::other(error))
        })??;
        Ok(process::unshared_bytes(&statuses, charged))
    }

    /// Kills all members, frozen or not, and waits until there are none.
    pub(crate) async fn kill(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let killed = tokio::time::timeout(KILL_LIMIT, kill_members(&self.cgroup(config)?)).await;
        killed
            .unwrap_or_else(|_| Err(io::Error::new(ErrorKind::TimedOut, "a killed process does not end")))
            .map_err(|source| io_error(&config.name, "kill its processes".into(), source))
    }
}

/// What the processes of a container look like now.
fn statuses(config: &ContainerConfig, members: Vec<u32>) -> Result<Vec<ProcessStatus>, EngineError> {
    process::statuses(members)
        .map_err(|source| io_error(&config.name, "examine its processes".into(), source))
}

async fn kill_members(cgroup: &Cgroup) -> io::Result<()> {
    loop {
        let members = cgroup.members()?;
        if members.is_empty() {
            return Ok(());
        }
        let mut handles = Vec::new();
        for pid in members {
            handles.extend(Handle::open(pid)?);
        }
        for handle in &handles {
            handle.kill()?;
        }
        // Frozen processes die of a pending SIGKILL when they are thawed, before they run.
        match cgroup.thaw() {
            // Its members were the last ones, and whoever made it has removed it.
            Err(error) if !cgroup::is_gone(&error) => return Err(error),
            _ => {}
        }
        for handle in &handles {
            handle.ended().await?;
        }
        // An ended process stays a member until its parent has reaped it.
        tokio::task::yield_now().await;
    }
}
