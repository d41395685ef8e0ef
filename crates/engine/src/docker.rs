//! [`Docker`]: containers that Docker keeps.
//!
//! Images and root filesystems are in its own storage driver or in [`containerd`].
//!
//! [`adoption`] finds a container, and what Docker makes it from ([`definition`]). [`arrival`] has Docker create and start it,
//! and [`image`] moves its image. [`making`] has Docker make a container. Docker is asked by its API ([`api`]), over the socket of dockerd.
//!
//! Docker gives a container that it creates a new ID. Its runtime is [`RUNTIME`]: godwit-runtime, which stands for runc, and
//! restores where godwit has something for a container. An operator names it in dockerd's settings once.

mod adoption;
mod api;
mod arrival;
mod containerd;
mod definition;
mod image;
mod limits;
mod making;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use godwit_names::ServiceName;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::{Mutex, mpsc};

use crate::container::{
    BegunRestore, ContainerConfig, Copied, EngineError, Keeper, Kept, Mount, OnMove, OutputPipes,
    RestoreRequest, VolumePlace, io_error,
};
use crate::foreign::fitness::PATIENCE;
use crate::foreign::limits::Changes;
use crate::foreign::making::{Wanted, WantedImage};
use crate::foreign::record::{Record, Volume};
use crate::foreign::{
    ARRIVAL_LABEL, Beside, Care, Fitness, Found, Inside, Keeps, LONG, Look, Renewed, SHORT,
};
use crate::processes::{Processes, process};
use crate::runc::path_variable;
use crate::view::are_joined;
use api::{Api, ApiError, encoded, filtered};
use containerd::Containerd;
use definition::{Definition, ImageStore};

/// The name under which dockerd knows godwit-runtime.
pub const RUNTIME: &str = "godwit";

/// Which programs to use, and where.
#[derive(Debug, Clone)]
pub struct DockerConfig {
    /// The socket of dockerd.
    pub socket: PathBuf,
    /// The docker binary, for commands in containers.
    pub docker: PathBuf,
    /// The runc binary.
    pub runc: PathBuf,
    /// The CRIU binary that runc shall restore with.
    pub criu: PathBuf,
    /// Where CRIU shall look first for the programs that it starts.
    pub programs: Option<PathBuf>,
    /// The `godwit-runtime` binary, which dockerd is to be told of.
    pub runtime: PathBuf,
    /// Directory for what godwit-runtime is given; on a file system that a reboot empties.
    pub run: PathBuf,
}

/// Containers of Docker.
#[derive(Debug, Clone)]
pub struct Docker {
    config: DockerConfig,
    path_variable: OsString,
    api: Api,
    care: Care,
    /// Held while a container is created.
    creating: Arc<Mutex<()>>,
}

/// What dockerd says of itself.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Info {
    docker_root_dir: PathBuf,
    driver: String,
    /// Pairs of what is told of it.
    #[serde(default)]
    driver_status: Option<Vec<(String, String)>>,
    #[serde(default)]
    containerd: Option<Containerd>,
    #[serde(default)]
    server_version: String,
    #[serde(default)]
    runtimes: BTreeMap<String, RuntimeOf>,
    #[serde(default)]
    security_options: Option<Vec<String>>,
}

/// A runtime that dockerd knows.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeOf {
    path: PathBuf,
    runtime_args: Option<Vec<String>>,
}

/// A volume as dockerd tells it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InspectedVolume {
    driver: String,
    mountpoint: PathBuf,
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
    #[serde(default)]
    options: Option<BTreeMap<String, String>>,
}

impl Docker {
    /// Containers by these programs.
    #[must_use]
    pub fn new(config: DockerConfig) -> Self {
        let processes = Processes { criu: config.criu.clone() };
        let care = Care::new(Keeper::Docker, config.run.clone(), processes);
        let path_variable = path_variable(&config.criu, config.programs.as_deref());
        Self { api: Api::new(&config.socket), path_variable, config, care, creating: Arc::default() }
    }

    fn failed(&self, name: &ServiceName, action: &'static str) -> impl Fn(ApiError) -> EngineError {
        let (care, name) = (self.care.clone(), name.clone());
        move |error| care.failed(&name, action, error)
    }

    /// What dockerd says of itself.
    async fn info(&self, name: &ServiceName) -> Result<Info, EngineError> {
        let info: Info = self.api.get("/info").await.map_err(self.failed(name, "tell its storage for"))?;
        self.care.storage.get_or_init(|| info.docker_root_dir.clone());
        Ok(info)
    }

    /// Whether this dockerd is such that its containers can move and come here.
    pub async fn fitness(&self) -> Fitness {
        let info: Info = match tokio::time::timeout(PATIENCE, self.api.get("/info")).await {
            Ok(Ok(info)) => info,
            Ok(Err(ApiError::Unreachable { source, .. })) if source.kind() == ErrorKind::NotFound => {
                return Fitness::Absent;
            }
            Ok(Err(error)) => return Fitness::unfit(error.to_string(), "start Docker, or look into its log"),
            Err(_) => return Fitness::silent(),
        };
        if let Some(objection) = info.objection() {
            return Fitness::unfit(objection, "its containers do not move; see docs/docker.md");
        }
        match info.apart(false).await {
            Ok(None) => {}
            Ok(Some(objection)) => {
                return Fitness::unfit(objection, "put both on one filesystem; see docs/docker.md");
            }
            Err(reason) => return Fitness::unfit(reason, "start Docker, or look into its log"),
        }
        match info.runtime_objection(&self.config.runtime, &self.care.run) {
            Some((found, advice)) => Fitness::unfit(format!("{found}: no container can come here"), advice),
            None => Fitness::Fit(info.server_version),
        }
    }

    /// What of a container is where nothing can be renamed to from Docker's storage, as a sentence.
    async fn apart(
        &self,
        name: &ServiceName,
        info: &Info,
        has_volumes: bool,
    ) -> Result<Option<String>, EngineError> {
        let apart = info.apart(has_volumes).await;
        apart.map_err(|reason| self.care.failed(name, "find the storage for", reason))
    }

    /// Where dockerd has the volumes of its own driver.
    async fn volumes_in(&self, name: &ServiceName) -> Result<PathBuf, EngineError> {
        Ok(self.info(name).await?.docker_root_dir.join("volumes"))
    }

    /// What a configuration says of a container in Docker.
    fn kept<'a>(&self, config: &'a ContainerConfig) -> Result<(&'a Kept, Definition), EngineError> {
        let kept = self.care.kept(config)?;
        let definition = Definition::told(&kept.definition)
            .map_err(|source| io_error(&config.name, "understand its definition".into(), source))?;
        Ok((kept, definition.of_no_node()))
    }

    /// Removes a container, and with it, if wanted, its volumes without a name of their user's choice.
    async fn remove_container(
        &self,
        config: &ContainerConfig,
        id: &str,
        with_anonymous: bool,
    ) -> Result<(), EngineError> {
        let (failed, anonymous) = (self.failed(&config.name, "remove"), u8::from(with_anonymous));
        // What is killed is not to be started again before it is removed.
        let never = json!({ "RestartPolicy": { "Name": "no" } });
        match self.api.post(&format!("/containers/{id}/update"), Some(&never), SHORT).await {
            Err(error) if error.is_missing() => return Ok(()),
            // It is on its way out.
            Err(ApiError::Refused { message, .. }) => {
                tracing::debug!(container = %config.name, message, "its restart policy is not changed");
            }
            Err(error) => return Err(failed(error)),
            Ok(_) => {}
        }
        // It may be frozen, of which Docker does not know.
        let life = Record::read(config)?.filter(|record| record.id == id).and_then(|record| record.life);
        if let Some(life) = life {
            let placed = ContainerConfig { cgroup: life.cgroup, ..config.clone() };
            self.care.processes.kill(&placed).await?;
        }
        self.api.delete(&format!("/containers/{id}?force=1&v={anonymous}"), LONG).await.map_err(failed)
    }

    async fn volume(&self, name: &ServiceName, volume: &str) -> Result<Option<InspectedVolume>, EngineError> {
        let path = format!("/volumes/{}", encoded(volume));
        self.api.find(&path).await.map_err(self.failed(name, "inspect a volume of"))
    }

    /// Whether a volume was made for this arrival.
    async fn has_made(
        &self,
        config: &ContainerConfig,
        volume: &str,
        token: &str,
    ) -> Result<bool, EngineError> {
        let labels = self.volume(&config.name, volume).await?.and_then(|found| found.labels);
        Ok(labels.is_some_and(|labels| labels.get(ARRIVAL_LABEL).is_some_and(|label| label == token)))
    }

    /// A request about a container.
    async fn about(
        &self,
        config: &ContainerConfig,
        action: &'static str,
        path: &str,
        document: Option<&Value>,
        limit: Duration,
    ) -> Result<(), EngineError> {
        let told = self.api.post(path, document, limit).await;
        told.map(drop).map_err(self.failed(&config.name, action))
    }
}

/// What is passed on to Docker of a definition that another node has told; nothing of one that there is an objection to.
///
/// # Errors
/// It is not understood.
pub fn passed_on(definition: &Value) -> std::io::Result<Option<Value>> {
    let told = Definition::told(definition)?.of_no_node();
    Ok(told
        .objections(&[])
        .is_empty()
        .then(|| told.to_create((&told.image.0, None), (RUNTIME, ""), Path::new("/volumes"))))
}

/// A definition with volumes of Docker's in the place of what it has of a node at these targets.
///
/// # Errors
/// It is not understood.
pub fn with_volumes(definition: &Value, volumes: &[Copied]) -> std::io::Result<Value> {
    Ok(Definition::told(definition)?.with_volumes(volumes).value())
}

/// The volumes of a definition, as mounts of which nothing has been said.
///
/// # Errors
/// It is not understood.
pub fn volumes(definition: &Value) -> std::io::Result<Vec<Mount>> {
    Ok(Definition::told(definition)?.volume_mounts())
}

/// Where a definition has files that have come with the container.
///
/// # Errors
/// It is not understood.
pub fn files(definition: &Value) -> std::io::Result<Vec<PathBuf>> {
    Ok(Definition::told(definition)?.files.into_iter().map(|of| of.target.into()).collect())
}

#[async_trait]
impl Keeps for Docker {
    fn care(&self) -> &Care {
        &self.care
    }

    fn keeps_ids(&self) -> bool {
        false
    }

    fn inside(&self, config: &ContainerConfig) -> Result<Inside, EngineError> {
        let (_, definition) = self.kept(config)?;
        let volumes = definition.volumes_and_targets();
        let bound = definition.binds.iter().map(|bound| bound.target.clone().into()).collect();
        Ok(Inside { volumes, bound, masked: definition.masked(), files: definition.files })
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
        let info = self.info(name).await?;
        let objection = match info.objection() {
            None => info.apart(!volumes.is_empty()).await.unwrap_or_else(Some),
            objection => objection,
        };
        let volumes = self.volume_objections(name, volumes, users).await?;
        Ok(objection.into_iter().chain(volumes).collect())
    }

    async fn make_it(
        &self,
        config: &ContainerConfig,
        wanted: &Wanted,
        token: &str,
    ) -> Result<String, EngineError> {
        self.make_new(config, wanted, token).await
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
        let (_, definition) = self.kept(config)?;
        let mut found = definition.objections(&config.mounts);
        let info = self.info(&config.name).await?;
        let runtime = info.runtime_objection(&self.config.runtime, &self.care.run);
        found.extend(runtime.map(|(wrong, mend)| format!("{wrong}; {mend}")));
        let objection = info.objection();
        let is_fit = objection.is_none();
        found.extend(objection);
        if !is_new {
            return Ok(found);
        }
        if self.inspect(&config.name, &definition.name).await?.is_some() {
            let name = &definition.name;
            found.push(format!("Docker has a container {name} there already; `docker rm` removes it"));
        }
        for (volume, _) in definition.volumes_and_targets() {
            if config.stays(&volume).is_none() && self.volume(&config.name, &volume).await?.is_some() {
                found.push(format!(
                    "Docker has a volume {volume} there already; `docker volume rm` removes it"
                ));
            }
        }
        found.extend(info.store_objection(&definition));
        let has_volumes = !definition.volumes.is_empty() || !definition.files.is_empty();
        if is_fit {
            found.extend(info.apart(has_volumes).await.unwrap_or_else(Some));
        }
        Ok(found)
    }

    async fn look(&self, name: &ServiceName, id: &str) -> Result<Option<Look>, EngineError> {
        match self.inspect(name, id).await? {
            Some(inspected) => self.look_at(name, &inspected).await.map(Some),
            None => Ok(None),
        }
    }

    async fn against_volumes(
        &self,
        name: &ServiceName,
        volumes: &[String],
        users: usize,
    ) -> Result<Vec<String>, EngineError> {
        self.volume_objections(name, volumes, users).await
    }

    async fn place_of_volume(
        &self,
        name: &ServiceName,
        volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError> {
        let place = |found: InspectedVolume| VolumePlace {
            mounted_in_use: found.options.is_some_and(|options| !options.is_empty()),
            path: found.mountpoint,
        };
        Ok(self.volume(name, volume).await?.map(place))
    }

    async fn volumes_of(&self, name: &ServiceName, id: &str) -> Result<Vec<Volume>, EngineError> {
        let inspected = self.inspect(name, id).await?.ok_or_else(|| EngineError::NotFound(name.clone()))?;
        Ok(inspected.volumes())
    }

    async fn storage_of(&self, name: &ServiceName) -> Result<PathBuf, EngineError> {
        Ok(self.info(name).await?.docker_root_dir.clone())
    }

    async fn make_volumes(&self, config: &ContainerConfig, token: &str) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        for (volume, _) in definition.volumes_and_targets() {
            if let Some(on_move) = config.stays(&volume) {
                match (self.volume(&config.name, &volume).await?, on_move) {
                    (Some(_), _) if config.may_have.contains(&volume) => continue,
                    // Somebody has made it meanwhile, and nobody has asked whether this container may have it.
                    (Some(_), _) => return Err(self.care.new_volume(config, &volume)),
                    (None, OnMove::Skip) => {}
                    (None, _) => return Err(self.care.no_volume(config, &volume)),
                }
            }
            let made = json!({ "Name": volume, "Labels": { ARRIVAL_LABEL: token } });
            self.about(config, "make a volume of", "/volumes/create", Some(&made), SHORT).await?;
            // Docker says the same of one that somebody has.
            if !self.has_made(config, &volume, token).await? {
                let reason = format!("it has a volume {volume} there already; `docker volume rm` removes it");
                return Err(self.care.failed(&config.name, "make a volume of", reason));
            }
        }
        for of in &definition.files {
            let place = definition::place_of(&self.volumes_in(&config.name).await?, &of.volume);
            of.make(&place).map_err(|source| {
                io_error(&config.name, format!("make a file in {}", place.display()), source)
            })?;
        }
        Ok(())
    }

    async fn made_volumes(&self, config: &ContainerConfig, token: &str) -> Result<Vec<String>, EngineError> {
        let Ok((_, definition)) = self.kept(config) else { return Ok(Vec::new()) };
        let mut names = Vec::new();
        for (volume, _) in definition.volumes_and_targets() {
            if self.has_made(config, &volume, token).await? {
                names.push(volume);
            }
        }
        Ok(names)
    }

    async fn remove_volume(&self, config: &ContainerConfig, volume: &str) -> Result<(), EngineError> {
        match self.api.delete(&format!("/volumes/{}", encoded(volume)), SHORT).await {
            Err(error) if error.is_conflict() => {
                tracing::warn!(container = %config.name, volume, %error, "a volume is left here");
                Ok(())
            }
            removed => removed.map_err(self.failed(&config.name, "remove a volume of")),
        }
    }

    async fn leave(&self, config: &ContainerConfig, id: &str, network: &str) -> Result<(), EngineError> {
        let path = format!("/networks/{}/disconnect", encoded(network));
        let document = json!({ "Container": id });
        self.about(config, "take off its network", &path, Some(&document), SHORT).await
    }

    async fn join(
        &self,
        config: &ContainerConfig,
        id: &str,
        network: &str,
        how: &str,
    ) -> Result<(), EngineError> {
        let path = format!("/networks/{}/connect", encoded(network));
        let how: Value = serde_json::from_str(how).unwrap_or_default();
        let document = json!({ "Container": id, "EndpointConfig": how });
        self.about(config, "put back on its network", &path, Some(&document), SHORT).await
    }

    async fn set_policy(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let (_, definition) = self.kept(config)?;
        let policy = json!({ "RestartPolicy": definition.restart_policy() });
        let path = format!("/containers/{id}/update");
        match self.api.post(&path, Some(&policy), SHORT).await {
            Err(error) if error.is_missing() => Ok(()),
            told => told.map(drop).map_err(self.failed(&config.name, "set the restart policy of")),
        }
    }

    async fn change_it(
        &self,
        config: &ContainerConfig,
        id: &str,
        changes: &Changes,
    ) -> Result<Value, EngineError> {
        self.change_limits(config, id, changes).await
    }

    async fn renew_it(&self, config: &ContainerConfig, id: &str) -> Result<Option<Renewed>, EngineError> {
        self.as_it_is_now(config, id).await
    }

    async fn hold_limits(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        self.change_limits_back(config, id).await
    }

    fn prepare_starts(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        // One that was adopted has another runtime.
        match record.token.is_empty() || record.id.is_empty() {
            true => Ok(()),
            false => self.instruct_starts(config, &record.id),
        }
    }

    async fn start_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        self.about(config, "start", &format!("/containers/{id}/start"), None, LONG).await
    }

    async fn signal_it(&self, config: &ContainerConfig, id: &str, signal: i32) -> Result<(), EngineError> {
        self.about(config, "signal", &format!("/containers/{id}/kill?signal={signal}"), None, SHORT).await
    }

    async fn stop_it(&self, config: &ContainerConfig, id: &str, limit: Duration) -> Result<(), EngineError> {
        let path = format!("/containers/{id}/stop?t={}", limit.as_secs());
        self.about(config, "stop", &path, None, limit + LONG).await
    }

    async fn until_it_runs(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let failed = self.failed(&config.name, "tell the next start of");
        // Before it is looked at, so that nothing happens unseen in between.
        let mut events =
            self.api.stream(&filtered("/events?", "container", id), SHORT).await.map_err(&failed)?;
        loop {
            let inspected = self.inspect(&config.name, id).await?;
            if inspected.ok_or_else(|| EngineError::NotFound(config.name.clone()))?.is_running() {
                return Ok(());
            }
            if events.next().await.map_err(&failed)?.is_none() {
                return Err(failed(ApiError::Broken("dockerd has ended".into())));
            }
        }
    }

    fn program(&self) -> tokio::process::Command {
        let mut program = tokio::process::Command::new(&self.config.docker);
        program.arg("--host").arg(format!("unix://{}", self.api.socket().display()));
        program
    }

    async fn begin_arrival(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        self.begin(request, pipes).await
    }

    async fn end_arrival(&self, config: &ContainerConfig, record: &Record) -> Result<(), EngineError> {
        self.end_start(config, record).await
    }

    async fn remove_it(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        self.remove_container(config, id, false).await
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

/// The first release that writes an image that containerd has under the ID that it has.
const WRITES_BY_ID: u32 = 26;

/// Where godwit-runtime looks for instructions unless it is told otherwise.
const STATE: &str = "/run/godwit/docker";

impl Info {
    /// What is wrong with the runtime that restores, of which there is one at this path, and which looks for instructions in
    /// a directory; and what to do.
    fn runtime_objection(&self, program: &Path, run: &Path) -> Option<(String, String)> {
        let told = self.runtimes.get(RUNTIME);
        let found = match told {
            None => format!("Docker does not know the runtime {RUNTIME}"),
            Some(RuntimeOf { path, .. }) if path.is_absolute() && !path.is_file() => {
                format!("Docker knows a runtime {RUNTIME} that is not at {}", path.display())
            }
            Some(of) => {
                let looks_in = match of.runtime_args.as_deref().unwrap_or_default() {
                    [] => Some(STATE),
                    [option, state] if option == "--state" => Some(state.as_str()),
                    _ => None,
                };
                if looks_in.is_some_and(|state| Path::new(state) == run) {
                    return None;
                }
                format!("Docker has another directory for the runtime {RUNTIME}")
            }
        };
        let program = program.display();
        let arguments = match Path::new(STATE) == run {
            true => String::new(),
            false => format!(", \"runtimeArgs\": [\"--state\", \"{}\"]", run.display()),
        };
        let mend = format!(
            "put {{\"runtimes\": {{\"{RUNTIME}\": {{\"path\": \"{program}\"{arguments}}}}}}} into /etc/docker/daemon.json, and `systemctl reload docker`"
        );
        Some((found, mend))
    }

    /// Where it has its images.
    fn image_store(&self) -> ImageStore {
        match self.driver_status.as_deref().is_some_and(containerd::is_snapshotter) {
            true => ImageStore::Containerd,
            false => ImageStore::Docker,
        }
    }

    /// Bytes that there is room for where it has images.
    fn room(&self) -> std::io::Result<u64> {
        let stat = rustix::fs::statvfs(&self.docker_root_dir)?;
        Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
    }

    fn containerd(&self) -> Containerd {
        self.containerd.clone().unwrap_or_default()
    }

    /// Where root filesystems are.
    async fn roots(&self) -> Result<PathBuf, ApiError> {
        match self.image_store() {
            ImageStore::Docker => Ok(self.docker_root_dir.join("overlay2")),
            ImageStore::Containerd => self.containerd().root().await,
        }
    }

    /// Where nothing can be renamed to from Docker's storage, as a sentence; or why that is not known.
    async fn apart(&self, has_volumes: bool) -> Result<Option<String>, String> {
        let storage = &self.docker_root_dir;
        let mut places = vec![self.roots().await.map_err(|error| error.to_string())?];
        if has_volumes {
            places.push(storage.join("volumes"));
        }
        for place in places {
            let (shown, other) = (place.display(), storage.display());
            match are_joined(storage, &place) {
                Ok(true) => {}
                Ok(false) => {
                    return Ok(Some(format!(
                        "Docker has {shown} on another filesystem than {other}, or on another mount of it; see docs/docker.md"
                    )));
                }
                Err(error) => {
                    return Err(format!(
                        "the filesystems of {shown} and {other} cannot be compared: {error}"
                    ));
                }
            }
        }
        Ok(None)
    }

    /// What speaks against an image of a Docker that may have its images elsewhere.
    fn store_objection(&self, definition: &Definition) -> Option<String> {
        let (own, of) = (self.image_store(), definition.store);
        (own != of && definition.configuration.is_none()).then(|| {
            format!(
                "Docker has images in {own} there, and in {of} where the container is, an image has another ID in each, and what both know it by is not told; godwit tells it from release 0.3.0 on"
            )
        })
    }

    /// Its major number; 0 where it is not told.
    fn release(&self) -> u32 {
        self.server_version.split('.').next().and_then(|major| major.parse().ok()).unwrap_or(0)
    }

    /// What speaks against moving containers of this dockerd.
    fn objection(&self) -> Option<String> {
        let option = |name: &str| {
            let options = self.security_options.iter().flatten();
            options.into_iter().any(|option| option.split(',').any(|part| part == name))
        };
        let driver = match self.image_store() {
            ImageStore::Docker => "overlay2",
            ImageStore::Containerd => containerd::SNAPSHOTTER,
        };
        // Older ones write an image under another ID than it has.
        if self.image_store() == ImageStore::Containerd && self.release() < WRITES_BY_ID {
            return Some(format!(
                "Docker {} has images in containerd's store; godwit moves those of release {WRITES_BY_ID} and later",
                self.server_version
            ));
        }
        if self.driver != driver {
            return Some(format!("the storage driver of Docker is {}; godwit moves {driver}", self.driver));
        }
        ["name=userns", "name=rootless"]
            .into_iter()
            .find(|name| option(name))
            .map(|name| format!("Docker maps users ({name})"))
    }
}

/// The parent of a process, which reads what it writes.
fn shim_of(pid: u32) -> u32 {
    process::parent(pid).unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_container_stays_where_the_other_docker_does_not_know_its_image_by_what_is_told() {
        let info = |driver: &str, status: &str| -> Info {
            let text = format!(
                "{{\"DockerRootDir\": \"/\", \"Driver\": \"{driver}\", \"DriverStatus\": {status}, \"ServerVersion\": \"29.1\"}}"
            );
            serde_json::from_str(&text).unwrap()
        };
        let own = info("overlay2", r#"[["Backing Filesystem", "extfs"]]"#);
        let containerds = info("overlayfs", r#"[["driver-type", "io.containerd.snapshotter.v1"]]"#);
        let definition = |store: &str, configuration: Option<&str>| {
            let told = json!({
                "name": "web", "image": ["web:1", "sha256:1"], "store": store, "configuration": configuration,
                "config": {}, "host": {}, "volumes": [],
            });
            Definition::told(&told).unwrap()
        };
        for (docker, store) in [(&own, "docker"), (&containerds, "containerd")] {
            assert_eq!(docker.objection(), None);
            assert_eq!(docker.store_objection(&definition(store, None)), None);
        }
        let told = own.store_objection(&definition("containerd", None)).unwrap();
        assert!(told.contains("in its own store there, and in containerd's image store where"), "{told}");
        assert!(containerds.store_objection(&definition("docker", None)).is_some());
        assert_eq!(containerds.store_objection(&definition("docker", Some("sha256:2"))), None);
        for (driver, status) in
            [("overlayfs", "null"), ("stargz", r#"[["driver-type", "io.containerd.snapshotter.v1"]]"#)]
        {
            assert!(info(driver, status).objection().unwrap().contains(driver));
        }
    }

    #[test]
    fn a_docker_that_writes_images_under_other_ids_is_refused() {
        let info = |version: &str| -> Info {
            let text = format!(
                "{{\"DockerRootDir\": \"/\", \"Driver\": \"overlayfs\", \"ServerVersion\": \"{version}\", \"DriverStatus\": [[\"driver-type\", \"io.containerd.snapshotter.v1\"]]}}"
            );
            serde_json::from_str(&text).unwrap()
        };
        assert!(info("25.0.3").objection().unwrap().contains("release 26"));
        assert_eq!(info("26.1.5+dfsg1").objection(), None);
    }

    #[test]
    fn what_dockerd_has_to_be_told_is_what_it_then_agrees_to() {
        let program = std::env::current_exe().unwrap();
        let info = |runtimes: &str| -> Info {
            let text =
                format!("{{\"DockerRootDir\": \"/\", \"Driver\": \"overlay2\", \"Runtimes\": {runtimes}}}");
            serde_json::from_str(&text).unwrap()
        };
        for run in [STATE, "/elsewhere/docker"] {
            let objection = |runtimes: &str| {
                let (found, mend) = info(runtimes).runtime_objection(&program, Path::new(run))?;
                Some(format!("{found}; {mend}"))
            };
            let asked = objection(r#"{"runc": {"path": "runc"}}"#).unwrap();
            assert!(asked.starts_with("Docker does not know the runtime godwit; put {"), "{asked}");
            let put = asked.split_once("put {\"runtimes\": ").unwrap().1;
            let runtimes = put.split_once("} into /etc/docker/daemon.json").unwrap().0;
            assert_eq!(objection(runtimes), None, "{runtimes}");
            let gone = objection(r#"{"godwit": {"path": "/nowhere/godwit-runtime"}}"#).unwrap();
            assert!(gone.contains("not at /nowhere/godwit-runtime; put {"), "{gone}");
            let other = r#"{"godwit": {"path": "/bin/sh", "runtimeArgs": ["--state", "/other"]}}"#;
            assert!(objection(other).unwrap().contains("has another directory"));
        }
    }
}
