//! A container comes to this node's Podman: Podman imports it as a checkpoint ([`landing`]).

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use serde_json::Value;
use tokio::process::Command;

use super::command::{Call, said};
use super::definition::{Definition, Here};
use super::{Podman, RUNTIME, settings};
use crate::container::{
    BegunRestore, ContainerConfig, ContainerState, EngineError, Keeper, LogFiles, OutputPipes,
    RestoreRequest, io_error,
};
use crate::foreign::landing::{self, Landing, Prepared};
use crate::foreign::log;
use crate::foreign::record::Record;
use crate::foreign::{Keeps, LONG, SHORT, instructions, is_id};
use crate::processes::process;

/// Podman waits four minutes for its runtime. So long godwit does.
const PATIENCE: Duration = Duration::from_secs(180);

/// How often to look whether an import has ended that is not waited for.
const IMPORT_LOOK: Duration = Duration::from_millis(20);

/// The name under which Podman calls the runtime, beside its instructions.
const LINK: &str = "runtime";

/// The settings of such a call.
pub(super) const SETTINGS: &str = "containers.conf";

/// A restore that waits for its inventory.
struct Begun {
    podman: Podman,
    definition: Definition,
    importing: Importing,
    landing: Landing,
    /// Podman's log of it, if that is in a file.
    log: Option<LogFiles>,
}

/// A call of Podman that imports a checkpoint.
struct Importing(tokio::task::JoinHandle<io::Result<Output>>);

impl Importing {
    async fn ended(&mut self) -> io::Result<Output> {
        (&mut self.0).await.map_err(io::Error::other)?
    }
}

impl Podman {
    /// Makes a directory from which a call of Podman's takes its runtime.
    pub(super) fn step_in(
        &self,
        place: &Path,
        (id, runtime_name, standard): (&str, &str, bool),
        task: &Value,
    ) -> io::Result<()> {
        let mut settings = settings::of_node()?;
        let runtime = self.runtime_of(&settings, runtime_name);
        instructions::instruct(place, (&runtime, &self.path_variable), id, task)?;
        let link = place.join(LINK);
        symlink(&self.config.runtime, &link)?;
        settings::add_runtime(&mut settings, runtime_name, &link, standard);
        fs::write(place.join(SETTINGS), settings::text(&settings)?)
    }

    /// The program that Podman has for a runtime.
    fn runtime_of(&self, settings: &toml::Table, name: &str) -> PathBuf {
        settings::runtime(settings, name).unwrap_or_else(|| match name {
            RUNTIME => self.config.runc.clone(),
            other => other.into(),
        })
    }

    /// Has Podman begin the import.
    pub(super) async fn begin(
        &self,
        request: RestoreRequest,
        pipes: OutputPipes,
    ) -> Result<Box<dyn BegunRestore>, EngineError> {
        let config = &request.config;
        let (kept, definition) = self.kept(config)?;
        let place = self.care.place(&kept.id);
        self.end_import(config, &Record::of(config)?).await?;
        let task = Prepared::task(&place, &request, None);
        self.step_in(&place, (&kept.id, RUNTIME, true), &task)
            .map_err(request.io("prepare Podman's restore in", &place))?;
        let prepared = Prepared::new(&self.care, &place, &request, pipes)?;
        let storage = self.storage(&config.name).await?;
        let parent = format!("{}/podman", self.config.cgroup_parent.trim_end_matches('/'));
        let here = Here {
            network_namespace: &config.network_namespace,
            name_server: config.name_server,
            cgroup_parent: (!storage.by_systemd).then_some(parent.as_str()),
            image: &self.image_name(config).await?,
            volumes: &storage.volumes,
        };
        let archive = place.join("checkpoint.tar");
        let written = File::create(&archive).and_then(|file| definition.write_archive(&here, file));
        written.map_err(request.io("write", &archive))?;

        let words = ["container", "restore", "--tcp-established", "--file-locks", "--ignore-static-ip"];
        let more = ["--ignore-static-mac", "--ignore-volumes", "--import"];
        let mut words: Vec<&OsStr> = words.iter().chain(&more).map(OsStr::new).collect();
        words.push(archive.as_os_str());
        let settings = place.join(SETTINGS);
        let call = Call { name: &config.name, action: "restore", words, settings: Some(&settings) };
        let mut command = self.command(&call);
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let child = child.map_err(|error| self.not_started(&call, &error))?;
        if let Some(import) = child.id().and_then(|pid| Some((pid, process::start_time(pid)?))) {
            Record::change(config, |record| record.import = Some(import))?;
        }
        // It ends by itself once the gate is closed.
        let mut importing = Importing(tokio::spawn(child.wait_with_output()));
        let ended = async {
            match importing.ended().await {
                Ok(output) => landing::failed(&request, self.has_failed(&call, &output)),
                Err(error) => self.not_started(&call, &error),
            }
        };
        let volumes = definition.volumes_and_targets();
        let landing = prepared
            .opened((&self.care, &request, &storage.root), (&volumes, &definition.files), ended)
            .await?;
        let log = log::of(Keeper::Podman, &kept.id, &storage.root);
        Ok(Box::new(Begun { podman: self.clone(), definition, importing, landing, log }))
    }

    /// Ends an import that is under way, and removes what it has made.
    pub(super) async fn end_import(
        &self,
        config: &ContainerConfig,
        record: &Record,
    ) -> Result<(), EngineError> {
        let Some((pid, start)) = record.import else { return Ok(()) };
        let io = |source| io_error(&config.name, "end its import".into(), source);
        let begin = Instant::now();
        while process::lives(pid, start) {
            landing::end_waiting(&self.care.place(&record.id)).map_err(io)?;
            if begin.elapsed() > LONG {
                return Err(io(io::ErrorKind::TimedOut.into()));
            }
            tokio::time::sleep(IMPORT_LOOK).await;
        }
        self.remove_it(config, &record.id).await?;
        self.forget_in_runtime(config, &record.id).await
    }

    /// Has the runtime forget a container. Without room for what it notes, Podman 5 does not know that there is one, and the
    /// next import would find its ID taken.
    async fn forget_in_runtime(&self, config: &ContainerConfig, id: &str) -> Result<(), EngineError> {
        let failed = |reason: String| self.care.failed(&config.name, "have its runtime forget", reason);
        if !is_id(id) {
            return Ok(());
        }
        let settings = settings::of_node().map_err(|error| failed(error.to_string()))?;
        let runtime = self.runtime_of(&settings, RUNTIME);
        let call = async |words: &[&str]| {
            let mut command = Command::new(&runtime);
            command.args(words).args(["--", id]).env("PATH", &self.path_variable).stdin(Stdio::null());
            let output = tokio::time::timeout(SHORT, command.kill_on_drop(true).output()).await;
            let output = output.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
            output.map_err(|error| failed(format!("{}: {error}", runtime.display())))
        };
        let known = call(&["state"]).await?;
        if !known.status.success() {
            return Ok(());
        }
        // The ID is another node's choice, and this runtime has containers of others, too.
        let known: Value = serde_json::from_slice(&known.stdout)
            .map_err(|error| failed(format!("its answer is not understood: {error}")))?;
        let bundle = Path::new(known["bundle"].as_str().unwrap_or_default());
        let storage = self.storage_of(&config.name).await?;
        let real = fs::canonicalize(&storage).unwrap_or_else(|_| storage.clone());
        if !(bundle.starts_with(&storage) || bundle.starts_with(&real)) {
            tracing::warn!(container = %config.name, id, bundle = %bundle.display(), "the runtime has a container of this ID that is not Podman's; it stays");
            return Ok(());
        }
        let deleted = call(&["delete", "--force"]).await?;
        match deleted.status.success() {
            true => Ok(()),
            false => Err(failed(said(&deleted.stderr))),
        }
    }
}

#[async_trait]
impl BegunRestore for Begun {
    fn charge(&self, pid: u32) -> Result<(), EngineError> {
        self.landing.charge(pid)
    }

    fn patience(&self) -> Option<Duration> {
        Some(PATIENCE)
    }

    async fn finish(self: Box<Self>) -> Result<ContainerState, EngineError> {
        let Self { podman, definition, mut importing, landing, log } = *self;
        let request = landing.request().clone();
        if importing.0.is_finished() {
            // It waits for its runtime for four minutes.
            return Err(request.refused("Podman has not waited for it"));
        }
        let (kept, _) = podman.kept(&request.config)?;
        let settings = podman.care.place(&kept.id).join(SETTINGS);
        // conmon appends to it what the container writes from here on.
        drop(landing.put_log(log).await);
        let landed = landing.go_on(Some(definition.spec()))?;
        let name = &request.config.name;
        let call = Call { name, action: "restore", words: Vec::new(), settings: Some(&settings) };
        let output = importing.ended().await.map_err(|error| podman.not_started(&call, &error))?;
        landed.put_away()?;
        if !output.status.success() {
            return Err(landing::failed(&request, podman.has_failed(&call, &output)));
        }
        // For conmon, whose calls of Podman need no other runtime.
        let plain = settings::of_node().and_then(|of_node| settings::text(&of_node));
        plain.and_then(|text| fs::write(&settings, text)).map_err(request.io("write", &settings))?;
        landed.done().await
    }
}
