//! What each engine does in its own way, [`Keeps`], and what godwit has for the containers of each, [`Care`].

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::ServiceName;
use tokio::sync::{Mutex, mpsc};
use tokio_util::task::TaskTracker;

use super::adopts::Found;
use super::file::FileOfVolume;
use super::limits::Changes;
use super::making::{Wanted, WantedImage};
use super::output;
use super::record::{Life, Record, Volume};
use super::renewed::Renewed;
use super::{SHORT, is_id};
use crate::container::{
    BegunRestore, ContainerConfig, EngineError, Keeper, Kept, OutputPipes, RestoreRequest, VolumePlace,
    io_error,
};
use crate::processes::{Processes, cgroup, process};

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
    /// The node's file that it has as `/etc/resolv.conf`; none where its user has named name servers, or it has no such file.
    pub(crate) resolver: Option<PathBuf>,
}

/// What is known of a container before it is found.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Beside<'a> {
    /// The network namespace of godwit's that it is in.
    pub(crate) namespace: Option<&'a Path>,
    /// Where it has volumes that do not go with it, and may be whatever its engine has.
    pub(crate) stay: Option<&'a BTreeSet<PathBuf>>,
}

impl Beside<'_> {
    /// Whether what is mounted there does not go along.
    pub(crate) fn stays(self, target: &str) -> bool {
        self.stay.is_some_and(|stay| stay.contains(Path::new(target)))
    }
}

/// What there is to know of a container's definition for a dump.
#[derive(Debug, Clone, Default)]
pub(crate) struct Inside {
    /// Its volumes, by name and place.
    pub(crate) volumes: Vec<(String, String)>,
    /// Those of them of which it has a file.
    pub(crate) files: Vec<FileOfVolume>,
    /// Where it has files or directories of the node.
    pub(crate) bound: Vec<PathBuf>,
    /// Paths that it does not see.
    pub(crate) masked: Vec<String>,
}

impl Inside {
    /// The same where a volume that does not go along is what the node has.
    pub(super) fn for_this_move(mut self, config: &ContainerConfig) -> Self {
        let (stay, go) = self.volumes.into_iter().partition(|(name, _)| config.stays(name).is_some());
        self.volumes = go;
        self.bound.extend(stay.into_iter().map(|(_, target): (String, String)| PathBuf::from(target)));
        self
    }
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
    /// Where the engine keeps root filesystems and volumes, once it has said so.
    pub(crate) storage: Arc<OnceLock<PathBuf>>,
    /// What puts logs into their places. It is closed, so that it can be waited for.
    pub(crate) logging: TaskTracker,
}

impl Care {
    pub(crate) fn new(keeper: Keeper, run: PathBuf, processes: Processes) -> Self {
        let logging = TaskTracker::new();
        logging.close();
        Self { keeper, run, processes, telling: Arc::default(), storage: Arc::default(), logging }
    }

    /// Waits until no log is being put into its place, of whatever container; not for ever, since a disk may hang.
    pub(super) async fn logs_are_put(&self, name: &ServiceName) {
        if tokio::time::timeout(SHORT, self.logging.wait()).await.is_err() {
            tracing::warn!(container = %name, "the log of a container that came is still being written; this goes on without");
        }
    }

    /// What a configuration says of a container of this engine's.
    pub(crate) fn kept<'a>(&self, config: &'a ContainerConfig) -> Result<&'a Kept, EngineError> {
        let kept = config.kept.as_ref().filter(|kept| kept.keeper == self.keeper && is_id(&kept.id));
        kept.ok_or_else(|| EngineError::NotFound(config.name.clone()))
    }

    /// Where the files of a container that is here are bound into one tree.
    pub(super) fn tree(&self, config: &ContainerConfig) -> PathBuf {
        self.run.join(format!("files-{}", config.name))
    }

    /// Where its restore finds the cgroup that a container is to see.
    pub(super) fn own_cgroup(&self, config: &ContainerConfig) -> PathBuf {
        self.run.join(format!("cgroup-{}", config.name))
    }

    /// Where the runtime finds what it is to do for a container with this ID.
    pub(crate) fn place(&self, id: &str) -> PathBuf {
        self.run.join(id)
    }

    /// The configuration with the cgroup that the container is in now.
    pub(crate) fn placed(&self, config: &ContainerConfig) -> Result<(ContainerConfig, Life), EngineError> {
        let record = Record::of(config)?;
        let life = record.life.ok_or_else(|| EngineError::NotFound(config.name.clone()))?;
        Ok((ContainerConfig { cgroup: life.cgroup.clone(), ..config.clone() }, life))
    }

    /// What there is to know of a main process.
    pub(super) fn life(
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

    /// A volume that a container is to have as it is here is not here.
    pub(crate) fn no_volume(&self, config: &ContainerConfig, volume: &str) -> EngineError {
        let reason =
            format!("it has no volume {volume}, which is to be shared with the node that it comes from");
        self.failed(&config.name, "give its volumes to", reason)
    }

    /// A volume that was not here when its container was admitted is here now.
    pub(crate) fn new_volume(&self, config: &ContainerConfig, volume: &str) -> EngineError {
        let reason = format!("somebody has made a volume {volume} meanwhile; try again");
        self.failed(&config.name, "give its volumes to", reason)
    }

    /// A container cannot come into godwit's care.
    pub(crate) fn unfit(&self, name: &ServiceName, reasons: Vec<String>) -> EngineError {
        EngineError::Unfit { keeper: self.keeper.title(), name: name.clone(), reasons }
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
            reason: self.with_place(reason.to_string()),
        }
    }

    /// What an engine says that has no room, with the file system that has none: it names a file of its own, or nothing.
    pub(crate) fn with_place(&self, reason: String) -> String {
        let Some(storage) = self.storage.get().filter(|_| is_of_room(&reason)) else { return reason };
        let keeper = self.keeper.title();
        match file_system_of(storage) {
            Some(place) => format!(
                "{reason}; the file system at {}, which has {keeper}'s storage {}, is full",
                place.display(),
                storage.display()
            ),
            None => reason,
        }
    }
}

/// Whether an engine has no room for what it is to do.
fn is_of_room(reason: &str) -> bool {
    let reason = reason.to_lowercase();
    ["no space left on device", "disk quota exceeded", "database or disk is full"]
        .iter()
        .any(|words| reason.contains(words))
}

/// Where the file system is mounted that a path is on.
fn file_system_of(path: &Path) -> Option<PathBuf> {
    let device = |path: &Path| std::fs::metadata(path).map(|found| found.dev()).ok();
    let own = device(path)?;
    path.ancestors().take_while(|above| device(above) == Some(own)).last().map(Path::to_owned)
}

/// What an engine of others does in its own way. A container is named by its ID in the engine.
#[async_trait]
pub(crate) trait Keeps: Send + Sync {
    fn care(&self) -> &Care;

    /// Whether a container has the ID here that it was adopted with.
    fn keeps_ids(&self) -> bool;

    /// What there is to know of a container's definition.
    fn inside(&self, config: &ContainerConfig) -> Result<Inside, EngineError>;

    /// A container that runs, and that can move; see [`Adopts::find`].
    async fn find_one(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        beside: Beside<'_>,
    ) -> Result<Found, EngineError>;

    /// Has the engine have an image; what that knows it by.
    async fn have_image(&self, name: &ServiceName, image: &WantedImage) -> Result<String, EngineError>;

    /// What speaks against a new container with these volumes, before it runs: the storage of the engine, and those of the
    /// volumes that are here already and that could not move, or that more containers have than `users`.
    async fn speaks_against_new(
        &self,
        name: &ServiceName,
        volumes: &[String],
        users: usize,
    ) -> Result<Vec<String>, EngineError>;

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

    /// What speaks against moving volumes, those that are here, of which each may have so many users.
    async fn against_volumes(
        &self,
        name: &ServiceName,
        volumes: &[String],
        users: usize,
    ) -> Result<Vec<String>, EngineError>;

    /// Where a volume has its files; nothing where the engine has none of that name.
    async fn place_of_volume(
        &self,
        name: &ServiceName,
        volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError>;

    /// The volumes of a container.
    async fn volumes_of(&self, name: &ServiceName, id: &str) -> Result<Vec<Volume>, EngineError>;

    /// Where the engine keeps root filesystems and volumes.
    async fn storage_of(&self, name: &ServiceName) -> Result<PathBuf, EngineError>;

    /// Loads this AppArmor profile, if it is the one that the engine gives containers, and loads when it makes the first one.
    async fn load_own_profile(&self, _name: &ServiceName, _profile: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// Makes the volumes of a container on its way here, with [`ARRIVAL_LABEL`]. One that is there already is an error, unless
    /// it is one that the container is to have as it is here.
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

    /// See [`Adopts::change`](super::Adopts::change).
    async fn change_it(
        &self,
        config: &ContainerConfig,
        id: &str,
        changes: &Changes,
    ) -> Result<serde_json::Value, EngineError>;

    /// See [`Adopts::renewed`](super::Adopts::renewed); nothing where the engine has none of this ID.
    async fn renew_it(&self, config: &ContainerConfig, id: &str) -> Result<Option<Renewed>, EngineError>;

    /// Has a container have the limits of its definition again, and its policy where the engine changes that: its engine has
    /// started it with others, or was told others. Those that the definition has not cannot be lifted.
    async fn hold_limits(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    /// Has the next starts of a container that was made here, or has come here, be in godwit's network namespace.
    fn prepare_starts(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError>;

    async fn start_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    async fn signal_it(&self, config: &ContainerConfig, id: &str, signal: i32) -> Result<(), EngineError>;

    async fn stop_it(&self, config: &ContainerConfig, id: &str, limit: Duration) -> Result<(), EngineError>;

    /// Returns when the engine has a container run.
    async fn until_it_runs(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError>;

    /// Does what the engine does for a container that it has started and not for one that has come here, as long as that lives.
    async fn look_after(&self, _config: &ContainerConfig, _id: &str) -> Result<(), EngineError> {
        Ok(())
    }

    /// The engine's program, for words that a user would type.
    fn program(&self) -> tokio::process::Command;

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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_without_room_is_told_with_the_file_system_that_has_none() {
        let processes = Processes { criu: PathBuf::new() };
        let care = Care::new(Keeper::Docker, PathBuf::new(), processes);
        let full = "write /x.json: no space left on device";
        assert_eq!(care.with_place(full.to_owned()), full, "its storage is not known");
        // On every machine it is a file system of its own.
        care.storage.set("/proc/self/net".into()).unwrap();
        let told = care.with_place(full.to_owned());
        let place = "; the file system at /proc, which has Docker's storage /proc/self/net, is full";
        assert_eq!(told, format!("{full}{place}"));
        // In the words of Podman's database.
        assert!(care.with_place("beginning transaction: database or disk is full".into()).ends_with(place));
        assert_eq!(care.with_place("no such image".into()), "no such image");
    }
}
