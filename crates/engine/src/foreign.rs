//! Containers that engines of others keep, and godwit moves: what is alike whatever the engine. Nothing of an engine is
//! changed.
//!
//! ```text
//!  source                                              destination
//!  the engine describes the container  ──────────────▶ the engine makes it, and has its runtime start it ([`landing`])
//!  cgroup, freezer, CRIU: by godwit, as for its own ──▶ the runtime restores what godwit has
//!  the engine removes it, after the commit             ps, logs, exec, stop, … as if it had been started there
//! ```
//! An engine can also make a container for godwit, which is then like one that was adopted: [`making`].
//!
//! What each engine does in its own way is behind [`Keeps`]; whoever does that is an [`Engine`], and [`Adopts`]. What godwit
//! knows of a container is in its [`record`]; a container without one is none of godwit's business, whatever its name or ID.

pub(crate) mod archive;
pub(crate) mod files;
pub(crate) mod landing;
pub mod making;
pub(crate) mod output;
pub(crate) mod record;

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::ServiceName;
use tokio::sync::{Mutex, mpsc};

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, ContainerStatus, DumpTarget, Engine, EngineError, Keeper,
    Kept, OutputPipes, RestoreRequest, Tmpfs, Usage, User, io_error,
};
use crate::exec::{self, ExecIo, ExecRequest};
use crate::files::place_of;
use crate::processes::{Processes, cgroup, process, stop};
use crate::runc::{NETWORK_KEY, restore};
use making::{Wanted, WantedImage};
use record::{Life, Record, Volume};

/// How long a call of an engine may take that only asks, or changes a record.
pub(crate) const SHORT: Duration = Duration::from_secs(20);

/// How long an engine may take to start a container, or to end one.
pub(crate) const LONG: Duration = Duration::from_secs(30);

/// The label of what was made here for a container, with the [token](Record::token) of that.
pub(crate) const ARRIVAL_LABEL: &str = "godwit.arrival";

/// How long an engine may take to see that a container has ended, and how often to look.
const END_SEEN: Duration = Duration::from_secs(10);
const END_LOOK: Duration = Duration::from_millis(100);

/// How long commands in a container are waited for that its engine may have begun, as for health checks, and how often to
/// look.
const SESSIONS_LIMIT: Duration = Duration::from_secs(3);
const SESSIONS_LOOK: Duration = Duration::from_millis(20);

/// The pauses before an engine is told again how to restart a container.
const POLICY_PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(30)];

/// A number that nobody can guess, another at each look.
const UUID: &str = "/proc/sys/kernel/random/uuid";

/// Where a container sees cgroups.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

/// What engines bind into containers.
const BOUND: &[&str] = &["/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv"];

/// Paths that no container sees, whatever the engine.
pub(crate) const MASKED: &[&str] = &["/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"];

/// Paths that no container writes to.
pub(crate) const READ_ONLY: &[&str] =
    &["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

/// A container of another engine that godwit is to move.
#[derive(Debug, Clone)]
pub struct Found {
    /// What makes it that engine's.
    pub kept: Kept,
    /// Its name there.
    pub name: String,
    /// Name of its image.
    pub image: String,
    /// ID of its image, `sha256:…`.
    pub image_id: String,
    /// Its main process.
    pub pid: u32,
    /// Command with arguments.
    pub command: Vec<String>,
    /// `NAME=VALUE` pairs.
    pub env: Vec<String>,
    /// Host name inside.
    pub hostname: String,
    /// Who runs it.
    pub user: User,
    /// Working directory inside.
    pub workdir: PathBuf,
    /// Memory limit in bytes; 0 for none.
    pub memory_bytes: u64,
    /// CPU limit in thousandths; 0 for none.
    pub cpu_millis: u32,
    /// The engine's networks that it is on, and what it takes to put it on each again.
    pub networks: Vec<(String, String)>,
    /// Ports of the node that the engine has lead into it over them.
    pub ports: Vec<Port>,
}

/// A port of the node that leads into a container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// The only address of the node that it is on; empty for all.
    pub address: String,
    /// That of the node.
    pub node: u16,
    /// That of the container.
    pub container: u16,
    /// `tcp`, `udp` or `sctp`.
    pub protocol: String,
}

/// How containers come into godwit's care.
#[async_trait]
pub trait Adopts: Send + Sync {
    /// Finds a container by name or ID that runs and that godwit can move. Where it is on networks of its engine's, it must be
    /// one that leaves them.
    ///
    /// # Errors
    /// The engine has no such container, it does not run, or something speaks against moving it: all that does.
    async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
    ) -> Result<Found, EngineError>;
    /// Notes what this node has to know of a container to move it. It stays what it is, whatever becomes of a service that is
    /// being made of it, until [`Adopts::own`].
    async fn take(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError>;
    /// Takes a container off networks of its engine's: their interfaces go, and the ports that lead into it over them. It is
    /// put back on them when it is removed from godwit's care before [`Adopts::own`].
    async fn leave_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError>;
    /// What an earlier life of godwit has noted of a container, which it has forgotten, is no reason to remove it.
    fn disown(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// A container is this node's, and is removed with its service.
    fn settle(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// The same, and its engine is told how to restart it, where it does not know yet.
    fn own(&self, config: &ContainerConfig) -> Result<(), EngineError>;
    /// The ID of a container in this node's engine; nothing where it is not here.
    fn id_here(&self, config: &ContainerConfig) -> Result<Option<String>, EngineError>;
}

/// A container as its engine tells it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Look {
    pub(crate) id: String,
    pub(crate) running: bool,
    /// Its engine is about to start it again.
    pub(crate) restarting: bool,
    pub(crate) exit_code: i32,
    /// The main process.
    pub(crate) pid: u32,
    /// The process that reads what it writes.
    pub(crate) reader: u32,
    /// The upper directory of its root filesystem.
    pub(crate) upper: PathBuf,
    /// Its root filesystem, as the node has it mounted.
    pub(crate) merged: PathBuf,
    /// The engine's networks that it is on, and what it takes to put it on each again.
    pub(crate) networks: Vec<(String, String)>,
}

/// What there is to know of a container's definition for a dump.
#[derive(Debug, Clone, Default)]
pub(crate) struct Inside {
    /// Its volumes, by name and place.
    pub(crate) volumes: Vec<(String, String)>,
    /// Paths that it does not see.
    pub(crate) masked: Vec<String>,
}

/// What godwit has for the containers of an engine.
#[derive(Debug, Clone)]
pub(crate) struct Care {
    pub(crate) keeper: Keeper,
    /// Directory for what the engine is given; on a file system that a reboot empties.
    pub(crate) run: PathBuf,
    pub(crate) processes: Processes,
    /// Held while an engine is told how to restart a container.
    pub(crate) telling: Arc<Mutex<()>>,
}

impl Care {
    pub(crate) fn new(keeper: Keeper, run: PathBuf, processes: Processes) -> Self {
        Self { keeper, run, processes, telling: Arc::default() }
    }

    /// What a configuration says of a container of this engine's.
    pub(crate) fn kept<'a>(&self, config: &'a ContainerConfig) -> Result<&'a Kept, EngineError> {
        let kept = config.kept.as_ref().filter(|kept| kept.keeper == self.keeper && is_id(&kept.id));
        kept.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    /// Where the files of a container that is here are bound into one tree.
    fn tree(&self, config: &ContainerConfig) -> PathBuf {
        self.run.join(format!("files-{}", config.name))
    }

    /// Where its restore finds the cgroup that a container is to see.
    fn own_cgroup(&self, config: &ContainerConfig) -> PathBuf {
        self.run.join(format!("cgroup-{}", config.name))
    }

    /// Where the runtime finds what it is to do for a container with this ID.
    pub(crate) fn place(&self, id: &str) -> PathBuf {
        self.run.join(id)
    }

    /// The configuration with the cgroup that the container is in now.
    fn placed(&self, config: &ContainerConfig) -> Result<(ContainerConfig, Life), EngineError> {
        let record = Record::of(config)?;
        let life = record.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        Ok((ContainerConfig { cgroup: life.cgroup.clone(), ..config.clone() }, life))
    }

    /// What there is to know of a main process.
    fn life(
        &self,
        config: &ContainerConfig,
        (pid, reader): (u32, u32),
        root: PathBuf,
    ) -> Result<Life, EngineError> {
        let io = |what: &str| {
            let (name, action) = (config.name.clone(), format!("find {what} of process {pid}"));
            move |source| io_error(&name, action, source)
        };
        let gone = || self.failed(&config.name, "reach", "its main process has ended");
        let start = process::start_time(pid).ok_or_else(gone)?;
        let cgroup = cgroup::of_process(pid).map_err(io("the cgroup"))?;
        let pipes = output::pipes(pid, reader).map_err(io("the output"))?;
        let reader_start = process::start_time(reader).ok_or_else(gone)?;
        Ok(Life { pid, start, cgroup, pipes, reader, reader_start, root })
    }

    /// An error of the engine.
    pub(crate) fn failed(
        &self,
        name: &ServiceName,
        action: &'static str,
        reason: impl ToString,
    ) -> EngineError {
        EngineError::Keeper {
            keeper: self.keeper.title(),
            action,
            name: name.clone(),
            reason: reason.to_string(),
        }
    }
}

/// What an engine of others does in its own way. A container is named by its ID in the engine.
#[async_trait]
pub(crate) trait Keeps: Send + Sync {
    fn care(&self) -> &Care;

    /// Whether a container has the ID here that it was adopted with.
    fn keeps_ids(&self) -> bool;

    /// What there is to know of a container's definition.
    fn inside(&self, config: &ContainerConfig) -> Result<Inside, EngineError>;

    /// A container that runs, and that can move; see [`Adopts::find`]. It may be in this network namespace, which is godwit's.
    async fn find_one(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        namespace: Option<&Path>,
    ) -> Result<Found, EngineError>;

    /// Has the engine have an image; what that knows it by.
    async fn have_image(&self, name: &ServiceName, image: &WantedImage) -> Result<String, EngineError>;

    /// Has the engine make a container that does not run yet, and its volumes that are not there; all of it has
    /// [`ARRIVAL_LABEL`]. It has no network but that of the configuration's namespace. Its ID.
    async fn make_it(
        &self,
        config: &ContainerConfig,
        wanted: &Wanted,
        token: &str,
    ) -> Result<String, EngineError>;

    /// Removes what was made so.
    async fn unmake(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError>;

    /// The end of what a container has written.
    async fn last_words(&self, config: &ContainerConfig, id: &str) -> Result<String, EngineError>;

    /// What speaks against taking a container; `is_new` says that nothing of it has been made here.
    async fn speaks_against(
        &self,
        config: &ContainerConfig,
        is_new: bool,
    ) -> Result<Vec<String>, EngineError>;

    /// What the engine knows of a container; nothing where it has none of this ID.
    async fn look(&self, name: &ServiceName, id: &str) -> Result<Option<Look>, EngineError>;

    /// The volumes of a container.
    async fn volumes_of(&self, name: &ServiceName, id: &str) -> Result<Vec<Volume>, EngineError>;

    /// Where the engine keeps root filesystems and volumes.
    async fn storage_of(&self, name: &ServiceName) -> Result<PathBuf, EngineError>;

    /// Makes the volumes of a container on its way here, with [`ARRIVAL_LABEL`]. One that is there already is an error.
    async fn make_volumes(&self, config: &ContainerConfig, token: &str) -> Result<(), EngineError>;

    /// Those of its volumes that were made so, and that are here.
    async fn made_volumes(&self, config: &ContainerConfig, token: &str) -> Result<Vec<String>, EngineError>;

    /// Removes a volume, if it is there and nobody uses it.
    async fn remove_volume(&self, config: &ContainerConfig, volume: &str) -> Result<(), EngineError>;

    async fn leave(&self, config: &ContainerConfig, id: &str, network: &str) -> Result<(), EngineError>;

    /// Puts a container on a network again; see [`Look::networks`].
    async fn join(
        &self,
        config: &ContainerConfig,
        id: &str,
        network: &str,
        how: &str,
    ) -> Result<(), EngineError>;

    /// Tells the engine how to restart a container that has come here and is here for good, where it does not know yet.
    async fn set_policy(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    async fn start_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    async fn signal_it(&self, config: &ContainerConfig, id: &str, signal: i32) -> Result<(), EngineError>;

    async fn stop_it(&self, config: &ContainerConfig, id: &str, limit: Duration) -> Result<(), EngineError>;

    /// Returns when the engine has a container run.
    async fn until_it_runs(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    /// The engine's command for a command in a container.
    fn command_in(
        &self,
        config: &ContainerConfig,
        id: &str,
        request: &ExecRequest,
    ) -> tokio::process::Command;

    async fn begin_arrival(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError>;

    /// Ends a restore that waits for its images, and removes what it has made.
    async fn end_arrival(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError>;

    /// Removes a container and not its volumes, whether it is frozen or not; nothing happens where it is not there. It must not
    /// be started again by the engine's policy meanwhile.
    async fn remove_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    async fn size_of_image(&self, config: &ContainerConfig) -> Result<u64, EngineError>;

    /// See [`Engine::lacks_image`].
    async fn lacking(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError>;

    async fn save(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError>;

    async fn load(&self, config: &ContainerConfig, from: mpsc::Receiver<Bytes>) -> Result<(), EngineError>;
}

/// Whether this can be an ID of a container; it becomes a part of paths.
pub(crate) fn is_id(id: &str) -> bool {
    id.len() == 64 && id.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// Whether this can be a volume's name; it becomes a part of paths.
pub(crate) fn is_volume(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_.-".contains(&byte);
    name.len() <= 255
        && name.bytes().all(allowed)
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
}

/// Whether something can be mounted there in a container.
pub(crate) fn is_target(path: &str) -> bool {
    path.starts_with('/') && path.split('/').skip(1).all(|part| !matches!(part, "" | "." | ".."))
}

/// What a user is told whose container is on its engine's networks.
pub(crate) fn on_networks(keeper: Keeper, networks: &[(String, String)]) -> String {
    let names: Vec<_> = networks.iter().map(|(name, _)| name.as_str()).collect();
    format!(
        "it is on {}'s network {}, whose addresses do not move; with --leave-networks it gets an address of godwit's in their place, and connections that are open end",
        keeper.title(),
        names.join(", ")
    )
}

/// Notes the life that a container has now.
async fn note(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
    look: &Look,
) -> Result<(), EngineError> {
    let care = keeps.care();
    let life = match look.running {
        true => Some(care.life(config, (look.pid, look.reader), look.merged.clone())?),
        false => None,
    };
    let of = care.kept(config)?.id.clone();
    let volumes = keeps.volumes_of(&config.name, &look.id).await?;
    let begin = || Record { of, id: look.id.clone(), ..Record::default() };
    let record = Record::change_or_begin(config, begin, |record| {
        (record.life, record.upper, record.volumes) = (life, look.upper.clone(), volumes);
        (record.import, record.waiting, record.landing) = (None, None, None);
        // What runs here is here for good.
        record.settled = true;
    })?;
    forget_files(config, &record);
    Ok(())
}

/// Removes what an engine had made where files have come. Nobody waits for it; what is not removed goes with the container.
fn forget_files(config: &ContainerConfig, record: &Record) {
    let Some(left) = record.left.clone() else { return };
    let config = config.clone();
    tokio::task::spawn_blocking(move || {
        let forget = |record: &mut Record| record.left = record.left.take().filter(|other| *other != left);
        let forgotten = match fs::remove_dir_all(&left) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error.to_string()),
            _ => Record::change(&config, forget).map(drop).map_err(|error| error.to_string()),
        };
        if let Err(error) = forgotten {
            tracing::debug!(container = %config.name, path = %left.display(), error, "what was left is not removed yet");
        }
    });
}

/// Tells an engine how to restart a container, again until it succeeds. The container's record says so until then.
fn tell_policy<K: Keeps + Clone + 'static>(keeps: &K, config: &ContainerConfig, token: String) {
    let (keeps, config) = (keeps.clone(), config.clone());
    tokio::spawn(async move {
        let [mut pause, longest] = POLICY_PAUSES;
        loop {
            {
                let _alone = keeps.care().telling.lock().await;
                let Ok(Some(record)) = Record::read(&config) else { return };
                // Another arrival tells by itself.
                if !record.owes_policy || !record.settled || record.departed || record.token != token {
                    return;
                }
                let told = match keeps.set_policy(&config, &record.id).await {
                    Ok(()) => Record::change(&config, |record| record.owes_policy = false).map(drop),
                    Err(error) => Err(error),
                };
                let Err(error) = told else { return };
                tracing::warn!(container = %config.name, %error, "its engine does not know yet how to restart it");
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(longest);
        }
    });
}

/// How many commands from outside run in a container. Those that its engine has begun end soon, unless they are frozen.
async fn sessions(care: &Care, placed: &ContainerConfig, main: u32) -> Result<usize, EngineError> {
    let begin = Instant::now();
    loop {
        let commands = care.processes.sessions(placed, main)?;
        if commands == 0 || begin.elapsed() > SESSIONS_LIMIT || care.processes.cgroup(placed)?.is_frozen() {
            return Ok(commands);
        }
        tokio::time::sleep(SESSIONS_LOOK).await;
    }
}

/// The configuration of a container whose main process must live.
async fn living(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
) -> Result<(ContainerConfig, Life), EngineError> {
    if state(keeps, config).await?.status == ContainerStatus::Stopped {
        return Err(keeps.care().failed(&config.name, "reach", "its main process has ended"));
    }
    keeps.care().placed(config)
}

async fn state(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
) -> Result<ContainerState, EngineError> {
    let record = Record::of(config)?;
    let Some(life) = record.life else { return Err(EngineError::NotFound(config.name.clone())) };
    if process::lives(life.pid, life.start) {
        let (config, _) = keeps.care().placed(config)?;
        let status = match keeps.care().processes.cgroup(&config)?.is_frozen() {
            true => ContainerStatus::Paused,
            false => ContainerStatus::Running,
        };
        return Ok(ContainerState { status, pid: life.pid, exit_code: None });
    }
    let look = keeps.look(&config.name, &record.id).await?;
    let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
    let exit_code = (!look.running && !look.restarting).then_some(look.exit_code);
    Ok(ContainerState { status: ContainerStatus::Stopped, pid: 0, exit_code })
}

#[async_trait]
impl<K: Keeps + Clone + 'static> Adopts for K {
    async fn find(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
    ) -> Result<Found, EngineError> {
        self.find_one(name, container, leaves_networks, None).await
    }

    async fn take(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        let kept = self.care().kept(config)?;
        let record = Record::read(config)?;
        let id = record.as_ref().map_or(&kept.id, |record| &record.id);
        let look = self.look(&config.name, id).await?;
        let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        // Its engine may have put it on them again when it started it.
        if record.as_ref().is_some_and(|record| record.leaves) {
            for (network, _) in &look.networks {
                self.leave(config, id, network).await?;
            }
        }
        note(self, config, &look).await?;
        state(self, config).await
    }

    async fn leave_networks(
        &self,
        config: &ContainerConfig,
        networks: &[(String, String)],
    ) -> Result<(), EngineError> {
        if networks.is_empty() {
            return Ok(());
        }
        let record = Record::change(config, |record| {
            (record.networks, record.leaves) = (networks.to_vec(), true);
        })?;
        for (network, _) in networks {
            self.leave(config, &record.id, network).await?;
        }
        Ok(())
    }

    fn disown(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let is_here = Record::read(config)?.is_some_and(|record| record.waiting.is_none());
        if is_here {
            Record::change(config, |record| (record.ours, record.networks) = (false, Vec::new()))?;
        }
        Ok(())
    }

    fn settle(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        match Record::read(config)? {
            Some(record) if !record.ours || !record.settled || record.making => {
                let settled = Record::change(config, |record| {
                    (record.ours, record.settled, record.networks) = (true, true, Vec::new());
                    record.making = false;
                })?;
                forget_files(config, &settled);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn own(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.settle(config)?;
        if let Some(record) = Record::read(config)?.filter(|record| record.owes_policy) {
            tell_policy(self, config, record.token);
        }
        Ok(())
    }

    fn id_here(&self, config: &ContainerConfig) -> Result<Option<String>, EngineError> {
        Ok(Record::read(config)?.map(|record| record.id).filter(|id| !id.is_empty()))
    }
}

#[async_trait]
impl<K: Keeps + Clone + 'static> Engine for K {
    async fn objections(&self, config: &ContainerConfig) -> Vec<String> {
        let asking = async { self.speaks_against(config, Record::read(config)?.is_none()).await };
        asking.await.unwrap_or_else(|error: EngineError| vec![error.to_string()])
    }

    async fn image_bytes(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        // What an engine counts may be 0, which means that there is nothing to send.
        Ok(self.size_of_image(config).await?.max(1))
    }

    async fn lacks_image(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        self.lacking(config).await
    }

    async fn send_image(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        self.save(config, without, to).await
    }

    async fn take_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        self.load(config, from).await
    }

    async fn expect(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let kept = self.care().kept(config)?;
        let token = fs::read_to_string(UUID).map(|text| text.trim().to_owned());
        let token = token.map_err(|source| io_error(&config.name, format!("read {UUID}"), source))?;
        let waiting = landing::waiting_in(&self.storage_of(&config.name).await?, &token);
        let id = if self.keeps_ids() { kept.id.clone() } else { String::new() };
        let of = kept.id.clone();
        let record =
            Record { of, id, token, ours: true, waiting: Some(waiting.clone()), ..Record::default() };
        // First, so that what is made is removed.
        record.begin(config)?;
        fs::create_dir_all(&waiting)
            .map_err(|source| io_error(&config.name, format!("create {}", waiting.display()), source))?;
        // The engine would take a volume of that name for it that somebody makes until it does.
        self.make_volumes(config, &record.token).await
    }

    fn changed_files(&self, config: &ContainerConfig) -> Result<PathBuf, EngineError> {
        let record = Record::of(config)?;
        let tree = self.care().tree(config);
        if let Some(waiting) = record.waiting {
            return Ok(waiting);
        }
        let failed =
            |source| io_error(&config.name, format!("bind its files into {}", tree.display()), source);
        files::bind(&record, &tree).map_err(failed)?;
        Ok(tree)
    }

    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        self.start_it(config, &Record::of(config)?.id).await?;
        self.take(config).await
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        state(self, config).await
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        let io = |source| io_error(&config.name, "wait for its end".into(), source);
        let life = Record::of(config)?.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        if let Some(main) =
            process::Handle::open(life.pid).map_err(io)?.filter(|_| process::lives(life.pid, life.start))
        {
            main.ended().await.map_err(io)?;
        }
        // Its engine is told a moment later.
        let begin = Instant::now();
        loop {
            let look = self.look(&config.name, &Record::of(config)?.id).await?;
            let look = look.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
            // One that has been started again has had an end, whose code the engine keeps until the next.
            if !look.running || look.pid != life.pid || begin.elapsed() > END_SEEN {
                return Ok(look.exit_code);
            }
            tokio::time::sleep(END_LOOK).await;
        }
    }

    async fn started_again(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.until_it_runs(config, &Record::of(config)?.id).await
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        self.signal_it(config, &Record::of(config)?.id, signal).await
    }

    async fn stop(&self, config: &ContainerConfig, limit: Duration) -> Result<(), EngineError> {
        self.stop_it(config, &Record::of(config)?.id, limit).await
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.freeze(&self.care().placed(config)?.0).await
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.recover(&self.care().placed(config)?.0).await
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.care().processes.thaw(&self.care().placed(config)?.0).await
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        let (_, life) = self.care().placed(config)?;
        let read = output::is_read(life.reader, life.pipes).await;
        read.map_err(|source| io_error(&config.name, "have its last output read".into(), source))
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        let (placed, life) = living(self, config).await?;
        let processes = &self.care().processes;
        let commands = sessions(self.care(), &placed, life.pid).await?;
        if commands > 0 {
            return Err(EngineError::Occupied { name: config.name.clone(), commands });
        }
        let io = |path: &Path| {
            let action = format!("read {}", path.display());
            move |source| io_error(&config.name, action, source)
        };
        let path = PathBuf::from(format!("/proc/{}/mountinfo", life.pid));
        let mounts = fs::read_to_string(&path).map_err(io(&path))?;
        let inside = self.inside(config)?;
        let failed = |source| io_error(&config.name, "find the places of its volumes".into(), source);
        let places = places(&life.root, &inside.volumes).map_err(failed)?;
        let external = external_mounts(&mounts, &places).into_iter();
        let mut external_mounts: Vec<_> = external.map(|place| (place.clone(), place)).collect();
        let volumes = Record::of(config)?.volumes.into_iter().filter_map(|volume| {
            let named = |(name, _): &&(String, String)| *name == volume.name;
            let at = inside.volumes.iter().position(|known| named(&known))?;
            Some((places.get(at)?.into(), volume.files))
        });
        let volumes = volumes.collect();
        for path in inside.masked {
            let there = PathBuf::from(format!("/proc/{}/root{path}", life.pid));
            if fs::symlink_metadata(there).is_ok_and(|metadata| !metadata.is_dir()) {
                external_mounts.push((path, "/dev/null".to_owned()));
            }
        }
        let mut extra_files = vec![(restore::DESCRIPTORS.to_owned(), restore::descriptors(life.pipes))];
        let signals = config.directory.join(stop::FILE);
        match fs::read(&signals) {
            Ok(text) => extra_files.push((stop::FILE.to_owned(), text)),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(io(&signals)(error)),
        }
        Ok(DumpTarget {
            volumes,
            pid: life.pid,
            root: life.root,
            external_mounts,
            network_namespace: (config.network_namespace.clone(), NETWORK_KEY.to_owned()),
            freezer: processes.cgroup(&placed)?.freezer(),
            extra_files,
        })
    }

    async fn tmpfs(&self, config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        let (placed, life) = living(self, config).await?;
        self.care().processes.tmpfs(&placed, life.pid).await
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        // A source that knows of other engines' containers tells of their output in advance.
        Err(request.refused("its source has not told of its standard streams"))
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        Ok(self.care().placed(config)?.1.pipes)
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        self.begin_arrival(request, pipes).await
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.care().processes.cont(&self.care().placed(config)?.0, keep_stopped).await?;
        // It runs, whatever comes of this, which the next life of godwitd does otherwise.
        if let Err(error) = self.own(config) {
            tracing::warn!(container = %config.name, %error, "it is not noted that it has come");
        }
        Ok(())
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.care().processes.stopped(&self.care().placed(config)?.0)
    }

    async fn departed(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        if Record::read(config)?.is_some_and(|record| !record.departed) {
            Record::change(config, |record| record.departed = true)?;
        }
        Ok(())
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        remove(self, config).await
    }

    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError> {
        let record = Record::of(config)?;
        let command = self.command_in(config, &record.id, request);
        let program = command.as_std().get_program().to_string_lossy().into_owned();
        exec::start(command, request.terminal).map_err(|error| {
            self.care().failed(&config.name, "run a command in", format!("cannot run {program}: {error}"))
        })
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        let (placed, life) = living(self, config).await?;
        sessions(self.care(), &placed, life.pid).await
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        match self.care().placed(config) {
            Ok((placed, _)) => self.care().processes.members(&placed),
            Err(EngineError::NotFound(_)) => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        match self.care().placed(config) {
            Ok((placed, _)) => self.care().processes.limit_cpu(&placed, millis),
            Err(EngineError::NotFound(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn usage(&self, config: &ContainerConfig) -> Result<Usage, EngineError> {
        let (placed, life) = living(self, config).await?;
        self.care().processes.usage(&placed, life.pid)
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.care().processes.memory(&self.care().placed(config)?.0)
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.care().processes.memory_unshared(&self.care().placed(config)?.0).await
    }
}

/// Ends a container and removes what belongs to it, or gives back one that has not become a service.
async fn remove(keeps: &(impl Keeps + ?Sized), config: &ContainerConfig) -> Result<(), EngineError> {
    let Some(record) = Record::read(config)? else { return Ok(()) };
    let care = keeps.care();
    let tree = care.tree(config);
    let io = |path: &Path| {
        let action = format!("remove {}", path.display());
        move |source| io_error(&config.name, action, source)
    };
    if !record.ours {
        for (network, how) in &record.networks {
            if let Err(error) = keeps.join(config, &record.id, network, how).await {
                tracing::error!(container = %config.name, network, %error, "it is not put back on its network");
            }
        }
        files::unbind(&record, &tree).map_err(io(&tree))?;
        return Record::remove(config);
    }
    match record.making {
        true => keeps.unmake(config, &record).await?,
        false => keeps.end_arrival(config, &record).await?,
    }
    let record = {
        // What its engine is being told is told by then, and nothing more is.
        let _alone = care.telling.lock().await;
        Record::change(config, |record| record.owes_policy = false)?
    };
    let own_cgroup = care.own_cgroup(config);
    landing::unbind_cgroup(&own_cgroup).map_err(io(&own_cgroup))?;
    if !record.id.is_empty() {
        keeps.remove_it(config, &record.id).await?;
    }
    // What an engine has forgotten, too.
    let lives = record.life.iter().map(|life| &life.cgroup);
    for cgroup in lives.chain(&record.landing) {
        care.processes.kill(&ContainerConfig { cgroup: cgroup.clone(), ..config.clone() }).await?;
    }
    files::unbind(&record, &tree).map_err(io(&tree))?;
    remove_volumes(keeps, config, &record).await?;
    // What has one of their names from here on is another's, however often the rest is tried.
    let record = Record::change(config, |record| (record.volumes, record.departed) = (Vec::new(), false))?;
    let place = (!record.id.is_empty()).then(|| care.place(&record.id));
    for path in record.waiting.iter().chain(&record.left).chain(&place) {
        let removed = path.clone();
        let removed = tokio::task::spawn_blocking(move || fs::remove_dir_all(removed)).await;
        match removed.map_err(io::Error::other).and_then(|removed| removed) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(path)(error)),
            _ => {}
        }
    }
    Record::remove(config)
}

/// Removes the volumes of a container that is not here any more, as far as they go with it: all of one that runs on another
/// node with them, of others those without a name of their user's choice. One that another container uses stays.
async fn remove_volumes(
    keeps: &(impl Keeps + ?Sized),
    config: &ContainerConfig,
    record: &Record,
) -> Result<(), EngineError> {
    let of_container = record.volumes.iter().filter(|volume| record.departed || volume.anonymous);
    let mut names: Vec<_> = of_container.map(|volume| volume.name.clone()).collect();
    // Those that were made for an arrival which comes to nothing.
    if !record.settled && !record.token.is_empty() {
        names.extend(keeps.made_volumes(config, &record.token).await?);
    }
    for name in names {
        keeps.remove_volume(config, &name).await?;
    }
    Ok(())
}

/// Where volumes are in a root filesystem that is mounted. Those are their keys, too: runc follows links in targets, where it
/// finds the root filesystem mounted.
fn places(root: &Path, volumes: &[(String, String)]) -> io::Result<Vec<String>> {
    let place = |(_, target): &(String, String)| place_of(root, Path::new(target));
    volumes.iter().map(|volume| Ok(place(volume)?.to_string_lossy().into_owned())).collect()
}

/// Mounts of a container that its restore brings: its volumes, what its engine binds into it, and cgroups: each hierarchy of
/// version 1, as runc has it, and that of version 2. `/dev/shm` may be bound, too, but is a tmpfs of the container alone: it
/// moves as one.
fn external_mounts(mountinfo: &str, volumes: &[String]) -> Vec<String> {
    let mut found = Vec::new();
    for line in mountinfo.lines() {
        let Some((mounted, filesystem)) = line.split_once(" - ") else { continue };
        let target = mounted.split(' ').nth(4).unwrap_or_default();
        let is_cgroup = filesystem.starts_with("cgroup ") && target.starts_with("/sys/fs/cgroup/")
            || filesystem.starts_with("cgroup2 ") && target == CGROUPS;
        if is_cgroup || BOUND.contains(&target) || volumes.iter().any(|volume| volume == target) {
            found.push(target.to_owned());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_becomes_a_path_is_an_id() {
        assert!(is_id(&"0a".repeat(32)));
        for id in ["", "../x", &"0A".repeat(32), &"0".repeat(63), &"/".repeat(64)] {
            assert!(!is_id(id), "{id}");
        }
    }

    #[test]
    fn what_is_bound_is_brought_and_what_moves_is_not() {
        let text = "1 0 0:1 / / rw - overlay overlay rw\n\
                    2 1 0:2 /x /etc/hosts rw - tmpfs tmpfs rw\n\
                    3 1 0:3 / /dev/shm rw - tmpfs shm rw\n\
                    4 1 0:4 /c /sys/fs/cgroup/pids ro - cgroup cgroup rw,pids\n\
                    5 1 0:5 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
                    6 1 0:6 /v /data rw - ext4 /dev/x rw\n";
        assert_eq!(
            external_mounts(text, &["/data".to_owned()]),
            ["/etc/hosts", "/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/data"]
        );
    }
}
