//! [`Engines`]: each container by the engine that keeps it.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use tokio::sync::mpsc;

use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, Copied, DumpTarget, Engine, EngineError, Keeper, Kept,
    LogFiles, Mount, OutputPipes, RestoreRequest, Tmpfs, Usage, VolumePlace,
};
use crate::docker::{self, Docker};
use crate::exec::{ExecIo, ExecRequest};
use crate::foreign::Adopts;
use crate::foreign::making::Makes;
use crate::image::Pinned;
use crate::podman::{self, Podman};
use crate::runc::Runc;
use crate::sessions::Session;

/// The engines of a node.
#[derive(Debug, Clone)]
pub struct Engines {
    /// For containers that godwit makes itself.
    pub runc: Runc,
    /// For those of Podman.
    pub podman: Podman,
    /// For those of Docker.
    pub docker: Docker,
}

impl Engines {
    fn of(&self, config: &ContainerConfig) -> &dyn Engine {
        match config.kept.as_ref().map(|kept| kept.keeper) {
            None => &self.runc,
            Some(Keeper::Podman) => &self.podman,
            Some(Keeper::Docker) => &self.docker,
        }
    }

    /// How containers of an engine of others come into godwit's care.
    #[must_use]
    pub fn adopts(&self, keeper: Keeper) -> &dyn Adopts {
        match keeper {
            Keeper::Podman => &self.podman,
            Keeper::Docker => &self.docker,
        }
    }

    /// What an engine of others makes a container from that has volumes of the engine's in the place of what it has of its node
    /// at these targets.
    ///
    /// # Errors
    /// Its definition is not understood.
    pub fn with_volumes(kept: &Kept, volumes: &[Copied]) -> io::Result<Kept> {
        let definition = match kept.keeper {
            Keeper::Podman => podman::with_volumes(&kept.definition, volumes)?,
            Keeper::Docker => docker::with_volumes(&kept.definition, volumes)?,
        };
        Ok(Kept { definition, ..kept.clone() })
    }

    /// The volumes that an engine of others has for a container: the name and the place of each, and whether writes are refused.
    ///
    /// # Errors
    /// Its definition is not understood.
    pub fn volumes(kept: &Kept) -> io::Result<Vec<Mount>> {
        match kept.keeper {
            Keeper::Podman => podman::volumes(&kept.definition),
            Keeper::Docker => docker::volumes(&kept.definition),
        }
    }

    /// Where a container that an engine of others keeps has files that came with it, in volumes of the engine's.
    ///
    /// # Errors
    /// Its definition is not understood.
    pub fn files(kept: &Kept) -> io::Result<Vec<PathBuf>> {
        match kept.keeper {
            Keeper::Podman => podman::files(&kept.definition),
            Keeper::Docker => docker::files(&kept.definition),
        }
    }

    /// How an engine of others makes containers for godwit.
    #[must_use]
    pub fn makes(&self, keeper: Keeper) -> &dyn Makes {
        match keeper {
            Keeper::Podman => &self.podman,
            Keeper::Docker => &self.docker,
        }
    }
}

#[async_trait]
impl Engine for Engines {
    async fn objections(&self, config: &ContainerConfig) -> Vec<String> {
        self.of(config).objections(config).await
    }

    async fn volume_place(
        &self,
        config: &ContainerConfig,
        volume: &str,
    ) -> Result<Option<VolumePlace>, EngineError> {
        self.of(config).volume_place(config, volume).await
    }

    async fn against_taking(
        &self,
        config: &ContainerConfig,
        volume: &str,
    ) -> Result<Vec<String>, EngineError> {
        self.of(config).against_taking(config, volume).await
    }

    async fn storage(&self, config: &ContainerConfig) -> Result<Option<PathBuf>, EngineError> {
        self.of(config).storage(config).await
    }

    async fn log_files(&self, config: &ContainerConfig) -> Result<Option<LogFiles>, EngineError> {
        self.of(config).log_files(config).await
    }

    async fn load_profile(&self, config: &ContainerConfig, profile: &str) -> Result<(), EngineError> {
        self.of(config).load_profile(config, profile).await
    }

    async fn image_bytes(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.of(config).image_bytes(config).await
    }

    async fn against_files_in(
        &self,
        config: &ContainerConfig,
        directory: &Path,
    ) -> Result<Option<String>, EngineError> {
        self.of(config).against_files_in(config, directory).await
    }

    async fn lacks_image(&self, config: &ContainerConfig) -> Result<Option<Vec<String>>, EngineError> {
        self.of(config).lacks_image(config).await
    }

    async fn fetch_image(&self, config: &ContainerConfig, reference: &Pinned) -> Result<(), EngineError> {
        self.of(config).fetch_image(config, reference).await
    }

    async fn send_image(
        &self,
        config: &ContainerConfig,
        without: Vec<String>,
        to: mpsc::Sender<Bytes>,
    ) -> Result<(), EngineError> {
        self.of(config).send_image(config, without, to).await
    }

    async fn take_image(
        &self,
        config: &ContainerConfig,
        from: mpsc::Receiver<Bytes>,
    ) -> Result<(), EngineError> {
        self.of(config).take_image(config, from).await
    }

    async fn expect(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).expect(config).await
    }

    fn changed_files(&self, config: &ContainerConfig) -> Result<PathBuf, EngineError> {
        self.of(config).changed_files(config)
    }

    async fn run(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        self.of(config).run(config).await
    }

    async fn state(&self, config: &ContainerConfig) -> Result<ContainerState, EngineError> {
        self.of(config).state(config).await
    }

    async fn wait(&self, config: &ContainerConfig) -> Result<i32, EngineError> {
        self.of(config).wait(config).await
    }

    async fn started_again(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).started_again(config).await
    }

    async fn signal(&self, config: &ContainerConfig, signal: i32) -> Result<(), EngineError> {
        self.of(config).signal(config, signal).await
    }

    async fn stop(&self, config: &ContainerConfig, limit: Duration) -> Result<(), EngineError> {
        self.of(config).stop(config, limit).await
    }

    async fn freeze(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).freeze(config).await
    }

    async fn recover(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).recover(config).await
    }

    async fn thaw(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).thaw(config).await
    }

    async fn settle_log(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).settle_log(config).await
    }

    async fn dump_target(&self, config: &ContainerConfig) -> Result<DumpTarget, EngineError> {
        self.of(config).dump_target(config).await
    }

    async fn tmpfs(&self, config: &ContainerConfig) -> Result<Vec<Tmpfs>, EngineError> {
        self.of(config).tmpfs(config).await
    }

    async fn restore_stopped(&self, request: &RestoreRequest) -> Result<ContainerState, EngineError> {
        self.of(&request.config).restore_stopped(request).await
    }

    async fn output_pipes(&self, config: &ContainerConfig) -> Result<OutputPipes, EngineError> {
        self.of(config).output_pipes(config).await
    }

    async fn begin_restore(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        self.of(&request.config).begin_restore(request.clone(), pipes).await
    }

    async fn cont(&self, config: &ContainerConfig, keep_stopped: &[u32]) -> Result<(), EngineError> {
        self.of(config).cont(config, keep_stopped).await
    }

    async fn stopped_processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.of(config).stopped_processes(config).await
    }

    async fn departed(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).departed(config).await
    }

    async fn delete(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).delete(config).await
    }

    async fn exec(&self, config: &ContainerConfig, request: &ExecRequest) -> Result<ExecIo, EngineError> {
        self.of(config).exec(config, request).await
    }

    async fn exec_sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        self.of(config).exec_sessions(config).await
    }

    async fn start_session(
        &self,
        config: &ContainerConfig,
        request: &ExecRequest,
    ) -> Result<Option<Arc<Session>>, EngineError> {
        self.of(config).start_session(config, request).await
    }

    async fn sessions(&self, config: &ContainerConfig) -> Result<usize, EngineError> {
        self.of(config).sessions(config).await
    }

    fn attach(&self, config: &ContainerConfig, token: &str) -> Option<Arc<Session>> {
        self.of(config).attach(config, token)
    }

    fn detach(&self, config: &ContainerConfig, token: &str) {
        self.of(config).detach(config, token);
    }

    async fn hold_sessions(
        &self,
        config: &ContainerConfig,
    ) -> Result<Option<(String, Vec<u8>)>, EngineError> {
        self.of(config).hold_sessions(config).await
    }

    async fn release_sessions(&self, config: &ContainerConfig) {
        self.of(config).release_sessions(config).await;
    }

    fn sessions_left(&self, config: &ContainerConfig, node: &str) {
        self.of(config).sessions_left(config, node);
    }

    async fn processes(&self, config: &ContainerConfig) -> Result<Vec<u32>, EngineError> {
        self.of(config).processes(config).await
    }

    async fn limit_cpu(&self, config: &ContainerConfig, millis: u32) -> Result<(), EngineError> {
        self.of(config).limit_cpu(config, millis).await
    }

    async fn limit(&self, config: &ContainerConfig) -> Result<(), EngineError> {
        self.of(config).limit(config).await
    }

    async fn usage(&self, config: &ContainerConfig) -> Result<Usage, EngineError> {
        self.of(config).usage(config).await
    }

    async fn memory_current(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.of(config).memory_current(config).await
    }

    async fn memory_unshared(&self, config: &ContainerConfig) -> Result<u64, EngineError> {
        self.of(config).memory_unshared(config).await
    }
}
