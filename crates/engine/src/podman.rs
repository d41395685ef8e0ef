//! [`Podman`]: containers that Podman keeps.
//!
//! [`adoption`] finds a container and has Podman describe it ([`definition`]), [`arrival`] has Podman import it as a
//! checkpoint, and [`image`] moves its image. [`making`] has Podman make a container, and [`health`] looks after one that has come.
//! Podman is called by its [`command`], since it needs no service to run for that.

mod adoption;
mod arrival;
mod binds;
mod command;
mod copies;
pub(crate) mod definition;
mod health;
mod image;
mod limits;
mod making;
mod profile;
mod settings;

use std::ffi::{OsStr, OsString};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::ServiceName;
use tokio::sync::{OnceCell, mpsc};

use crate::container::{
    BegunRestore, ContainerConfig, Copied, EngineError, Keeper, Kept, Mount, OnMove, OutputPipes,
    RestoreRequest, VolumePlace, io_error,
};
use crate::foreign::limits::Changes;
use crate::foreign::making::{Wanted, WantedImage};
use crate::foreign::record::{Record, Volume};
use crate::foreign::{ARRIVAL_LABEL, Beside, Care, Found, Inside, Keeps, LONG, Look, Renewed, SHORT};
use crate::processes::Processes;
use crate::runc::path_variable;
use command::{Call, Storage, failed};
use definition::Definition;

/// The runtime under which containers come to a node, whatever they ran under before: crun cannot restore where it is not
/// built for that, as in Debian.
const RUNTIME: &str = "runc";

/// After so long Podman is helped to end a container: by then it has begun to.
const HELP: Duration = Duration::from_secs(5);

/// Which programs to use, and where.
#[derive(Debug, Clone)]
pub struct PodmanConfig {
    /// The podman binary, or what stands for it with options of its own.
    pub podman: PathBuf,
    /// The `godwit-runtime` binary.
    pub runtime: PathBuf,
    /// The runc binary.
    pub runc: PathBuf,
    /// The CRIU binary that runc shall restore with.
    pub criu: PathBuf,
    /// Where CRIU shall look first for the programs that it starts.
    pub programs: Option<PathBuf>,
    /// Directory for what calls of Podman are given; on a file system that a reboot empties.
    pub run: PathBuf,
    /// The cgroup below which containers are put that come here, where Podman makes cgroups itself; systemd's are in its slices.
    pub cgroup_parent: String,
}

/// Containers of Podman.
#[derive(Debug, Clone)]
pub struct Podman {
    config: PodmanConfig,
    path_variable: OsString,
    care: Care,
    storage: Arc<OnceCell<Storage>>,
    profile_loads: Arc<profile::Attempts>,
}

impl Podman {
    /// Containers by these programs.
    #[must_use]
    pub fn new(config: PodmanConfig) -> Self {
        let path_variable = path_variable(&config.criu, config.programs.as_deref());
        let processes = Processes { criu: config.criu.clone() };
        let care = Care::new(Keeper::Podman, config.run.clone(), processes);
        let profile_loads = Arc::default();
        Self { config, path_variable, care, storage: Arc::default(), profile_loads }
    }

    /// What a configuration says of a container in Podman.
    fn kept<'a>(&self, config: &'a ContainerConfig) -> Result<(&'a Kept, Definition), EngineError> {
        let kept = self.care.kept(config)?;
        let definition = Definition::told(&kept.definition)
            .map_err(|source| io_error(&config.name, "understand its definition".into(), source))?;
        Ok((kept, definition.of_no_node()))
    }

    /// A call about a container, which is named last.
    async fn about(
        &self,
        (config, id): (&ContainerConfig, &str),
        action: &'static str,
        words: &[&str],
        limit: Duration,
    ) -> Result<std::process::Output, EngineError> {
        let words = words.iter().copied().chain([id]).map(OsStr::new).collect();
        self.call(&Call { name: &config.name, action, words, settings: None }, limit).await
    }
}

/// What is passed on to Podman of a definition that another node has told, of the container with this ID; nothing of one that
/// there is an objection to.
///
/// # Errors
/// It is not understood.
pub fn passed_on(definition: &serde_json::Value, id: &str) -> io::Result<Option<serde_json::Value>> {
    let told = Definition::told(definition)?;
    Ok(told.objections(id, &[]).is_empty().then(|| told.of_no_node().value()))
}

/// A definition with volumes of Podman's in the place of what it has of a node at these targets.
///
/// # Errors
/// It is not understood.
pub fn with_volumes(definition: &serde_json::Value, volumes: &[Copied]) -> io::Result<serde_json::Value> {
    Ok(Definition::told(definition)?.of_no_node().with_volumes(volumes).value())
}

/// The volumes of a definition, as mounts of which nothing has been said.
///
/// # Errors
/// It is not understood.
pub fn volumes(definition: &serde_json::Value) -> io::Result<Vec<Mount>> {
    Ok(Definition::told(definition)?.volume_mounts())
}

/// Where a definition has files that have come with the container.
///
/// # Errors
/// It is not understood.
pub fn files(definition: &serde_json::Value) -> io::Result<Vec<PathBuf>> {
    Ok(Definition::told(definition)?.files.into_iter().map(|of| of.target.into()).collect())
}

#[async_trait]
impl Keeps for Podman {
    fn care(&self) -> &Care {
        &self.care
    }

    fn keeps_ids(&self) -> bool {
        true
    }

    fn inside(&self, config: &ContainerConfig) -> Result<Inside, EngineError> {
        let (_, definition) = self.kept(config)?;
        let volumes = definition.volumes_and_targets();
        let bound = definition.binds().into_iter().map(|mount| mount.target).collect();
        let masked = definition.masked().into_iter().map(str::to_owned).collect();
        Ok(Inside { volumes, files: definition.files, bound, masked })
    }

    async fn find_one(
        &self,
        name: &ServiceName,
        container: &str,
        leaves_networks: bool,
        beside: Beside<'_>,
    ) -> Result<Found, EngineError> {
        self.find(name, container, leaves_networks, beside).await
    }

    async fn have_image(&self, name: &ServiceName, image: &WantedImage) -> Result<String, EngineError> {
        self.obtain_image(name, image).await
    }

    async fn speaks_against_new(
        &self,
        name: &ServiceName,
        volumes: &[String],
        users: usize,
    ) -> Result<Vec<String>, EngineError> {
        self.against_new(name, volumes, users).await
    }

    async fn make_it(
        &self,
        config: &ContainerConfig,
        wanted: &Wanted,
        token: &str,
    ) -> Result<String, EngineError> {
        self.create(config, wanted, token).await
    }

    async fn unmake(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        self.undo_creation(config, record).await
    }

    async fn last_words(&self, config: &ContainerConfig, id: &str) -> Result<String, EngineError> {
        self.end_of_log(config, id).await
    }

    async fn speaks_against(
        &self,
        config: &ContainerConfig,
        is_new: bool,
    ) -> Result<Vec<String>, EngineError> {
        let (kept, definition) = self.kept(config)?;
        let mut found = definition.objections(&kept.id, &config.mounts);
        if !is_new {
            return Ok(found);
        }
        for container in [kept.id.as_str(), definition.name()] {
            if self.has_container(&config.name, container).await? {
                found.push(format!(
                    "Podman has a container {container} there already; `podman rm` removes it"
                ));
            }
        }
        found.extend(definition.against_places());
        let storage = self.storage(&config.name).await?;
        for (volume, _) in &definition.volumes_and_targets() {
            let place = self.place_of_volume(&config.name, volume).await?;
            match (config.stays(volume), place) {
                (None, Some(_)) => found.push(format!(
                    "Podman has a volume {volume} there already; `podman volume rm` removes it"
                )),
                (Some(_), Some(VolumePlace { path: place, .. })) if place != storage.place_of(volume) => {
                    found.push(format!(
                        "Podman has its volume {volume} outside of its storage there, in {}",
                        place.display()
                    ))
                }
                _ => {}
            }
            if !storage.volumes.starts_with(&storage.root) {
                found.push(format!(
                    "Podman has its volumes outside of its storage there, in {}",
                    storage.volumes.display()
                ));
            }
        }
        Ok(found)
    }

    async fn look(&self, name: &ServiceName, id: &str) -> Result<Option<Look>, EngineError> {
        Ok(self.inspect(name, id).await?.map(|inspected| inspected.look()))
    }

    async fn against_volumes(
        &self,
        name: &ServiceName,
        volumes: &[String],
        users: usize,
    ) -> Result<Vec<String>, EngineError> {
        let root = self.storage(name).await?.root.clone();
        let volumes: Vec<_> = volumes.iter().map(String::as_str).collect();
        self.volume_objections(name, &volumes, &root, users).await
    }

    async fn place_of_volume(
        &self,
        name: &ServiceName,
        volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError> {
        if !self.has_volume(name, volume).await? {
            return Ok(None);
        }
        let found = self.volumes(name, &[volume]).await?.into_iter().next();
        let place = |found: command::InspectedVolume| VolumePlace {
            mounted_in_use: !found.options.is_empty(),
            path: found.mountpoint,
        };
        Ok(found.map(place))
    }

    async fn volumes_of(&self, name: &ServiceName, id: &str) -> Result<Vec<Volume>, EngineError> {
        let inspected = self.inspect(name, id).await?.ok_or_else(|| EngineError::NotFound(name.clone()))?;
        let names: Vec<_> = inspected.volumes().collect();
        let volumes = self.volumes(name, &names).await?.into_iter().map(|volume| Volume {
            name: volume.name,
            files: volume.mountpoint,
            anonymous: volume.anonymous,
        });
        Ok(volumes.collect())
    }

    async fn storage_of(&self, name: &ServiceName) -> Result<PathBuf, EngineError> {
        Ok(self.storage(name).await?.root.clone())
    }

    async fn load_own_profile(&self, name: &ServiceName, profile: &str) -> Result<(), EngineError> {
        match profile.starts_with(profile::OWN) {
            true => self.load_profile(name).await,
            false => Ok(()),
        }
    }

    async fn make_volumes(&self, config: &ContainerConfig, token: &str) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        for (volume, _) in &definition.volumes_and_targets() {
            if let Some(on_move) = config.stays(volume) {
                match (self.has_volume(&config.name, volume).await?, on_move) {
                    (true, _) if config.may_have.contains(volume) => continue,
                    // Somebody has made it meanwhile, and nobody has asked whether this container may have it.
                    (true, _) => return Err(self.care.new_volume(config, volume)),
                    (false, OnMove::Skip) => {}
                    (false, _) => return Err(self.care.no_volume(config, volume)),
                }
            }
            let label = format!("{ARRIVAL_LABEL}={token}");
            let words = ["volume", "create", "--label", &label, "--", volume].map(OsStr::new).to_vec();
            let call = Call { name: &config.name, action: "make a volume of", words, settings: None };
            self.call(&call, SHORT).await?;
        }
        for of in &definition.files {
            let place = self.storage(&config.name).await?.place_of(&of.volume);
            of.make(&place).map_err(|source| {
                io_error(&config.name, format!("make a file in {}", place.display()), source)
            })?;
        }
        Ok(())
    }

    async fn made_volumes(&self, config: &ContainerConfig, token: &str) -> Result<Vec<String>, EngineError> {
        let Ok((_, definition)) = self.kept(config) else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for (volume, _) in &definition.volumes_and_targets() {
            if self.has_volume(&config.name, volume).await? {
                let found = self.volumes(&config.name, &[volume]).await?;
                let made = found
                    .iter()
                    .any(|found| found.labels.get(ARRIVAL_LABEL).is_some_and(|label| label == token));
                names.extend(made.then(|| volume.to_owned()));
            }
        }
        Ok(names)
    }

    async fn remove_volume(&self, config: &ContainerConfig, volume: &str) -> Result<(), EngineError> {
        // Podman takes the beginning of a name for it where there is one such volume.
        if !self.has_volume(&config.name, volume).await? {
            return Ok(());
        }
        let words = ["volume", "rm", "--", volume].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "remove a volume of", words, settings: None };
        match self.call(&call, SHORT).await {
            Ok(_) => {}
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such volume") => {}
            Err(EngineError::Keeper { reason, .. }) if reason.contains("being used") => {
                tracing::warn!(container = %config.name, volume, reason, "a volume is left here");
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    async fn leave(&self, config: &ContainerConfig, id: &str, network: &str) -> Result<(), EngineError> {
        let words = ["network", "disconnect", "--", network];
        self.about((config, id), "take off its network", &words, SHORT).await.map(drop)
    }

    async fn join(
        &self,
        config: &ContainerConfig,
        id: &str,
        network: &str,
        how: &str,
    ) -> Result<(), EngineError> {
        let mut words = vec!["network", "connect"];
        // An older version has noted the address alone.
        let (address, names) = how.split_once(' ').unwrap_or((how, ""));
        if !address.is_empty() {
            words.extend(["--ip", address]);
        }
        for name in names.split_whitespace() {
            words.extend(["--alias", name]);
        }
        words.extend(["--", network]);
        self.about((config, id), "put back on its network", &words, SHORT).await.map(drop)
    }

    async fn set_policy(&self, _: &ContainerConfig, _: &str) -> Result<(), EngineError> {
        // It has come with its description.
        Ok(())
    }

    async fn change_it(
        &self,
        config: &ContainerConfig,
        id: &str,
        changes: &Changes,
    ) -> Result<serde_json::Value, EngineError> {
        self.change_limits(config, id, changes).await
    }

    async fn renew_it(&self, config: &ContainerConfig, id: &str) -> Result<Option<Renewed>, EngineError> {
        self.as_it_is_now(config, id).await
    }

    async fn hold_limits(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        // One that does not run has them at its next start.
        match self.look(&config.name, id).await? {
            Some(look) if look.running => self.update(config, id, &definition).await,
            _ => Ok(()),
        }
    }

    fn prepare_starts(&self, _: &ContainerConfig, _: &Record) -> Result<(), EngineError> {
        // Its description names the namespace.
        Ok(())
    }

    async fn start_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        self.about((config, id), "start", &["container", "start", "--"], LONG).await.map(drop)
    }

    async fn signal_it(&self, config: &ContainerConfig, id: &str, signal: i32) -> Result<(), EngineError> {
        let number = signal.to_string();
        let words = ["container", "kill", "--signal", &number, "--"];
        self.about((config, id), "signal", &words, SHORT).await.map(drop)
    }

    async fn stop_it(&self, config: &ContainerConfig, id: &str, limit: Duration) -> Result<(), EngineError> {
        let seconds = limit.as_secs().to_string();
        let words = ["container", "stop", "--time", &seconds, "--"];
        self.about((config, id), "stop", &words, limit + LONG).await.map(drop)
    }

    async fn until_it_runs(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let words = ["wait", "--condition", "running", "--", id].map(OsStr::new).to_vec();
        let call = Call { name: &config.name, action: "tell the next start of", words, settings: None };
        let mut command = self.command(&call);
        let output = command.kill_on_drop(true).output().await;
        let output = output.map_err(|error| self.not_started(&call, &error))?;
        if output.status.success() {
            return Ok(());
        }
        match self.inspect(&config.name, id).await? {
            None => Err(EngineError::NotFound(config.name.clone())),
            Some(_) => Err(failed(&call, command::said(&output.stderr))),
        }
    }

    async fn look_after(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        self.check_again_and_again(config, id).await
    }

    fn program(&self) -> tokio::process::Command {
        self.in_its_settings()
    }

    async fn begin_arrival(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        self.begin(request, pipes).await
    }

    async fn end_arrival(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        self.end_import(config, record).await
    }

    async fn remove_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let words = ["container", "rm", "--force", "--time", "0", "--ignore", "--"];
        // Podman notes that it ends the container before it does, and so starts it no more by its policy.
        let removing = self.about((config, id), "remove", &words, LONG);
        tokio::pin!(removing);
        let removed = match tokio::time::timeout(HELP, &mut removing).await {
            Ok(removed) => removed,
            Err(_) => {
                // Not every runtime kills what is frozen.
                if let Some(life) = Record::read(config)?.and_then(|record| record.life) {
                    let placed = ContainerConfig { cgroup: life.cgroup, ..config.clone() };
                    self.care.processes.kill(&placed).await?;
                }
                removing.await
            }
        };
        match removed {
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such container") => Ok(()),
            removed => removed.map(drop),
        }
    }

    async fn size_of_image(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.bytes_of_image(config).await
    }

    async fn lacking(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        self.layers_here(config).await
    }

    async fn save(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        self.save_image(config, without, to).await
    }

    async fn load(&self, config: &ContainerConfig, from: mpsc::Receiver<Bytes>) -> Result<(), EngineError> {
        self.load_image(config, from).await
    }
}
