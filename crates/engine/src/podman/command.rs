//! Calls of Podman, each with a limit of time: an engine that hangs must not keep a service from going on.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use godwit_names::ServiceName;
use serde::Deserialize;
use tokio::process::Command;

use super::Podman;
use super::adoption::driver_objection;
use crate::container::{EngineError, Keeper};
use crate::foreign::fitness::PATIENCE;
use crate::foreign::is_short_id;
use crate::foreign::{Fitness, Look, SHORT};
use crate::processes::process::KilledOnDrop;

/// A container as `podman container inspect` tells it.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Inspected {
    pub(super) id: String,
    pub(super) name: String,
    pub(super) state: InspectedState,
    #[serde(rename = "OCIRuntime")]
    pub(super) runtime: String,
    #[serde(default)]
    pub(super) static_dir: PathBuf,
    pub(super) graph_driver: GraphDriver,
    pub(super) host_config: HostConfig,
    #[serde(default)]
    pub(super) config: InspectedConfig,
    #[serde(default)]
    pub(super) network_settings: NetworkSettings,
    #[serde(default)]
    resolv_conf_path: PathBuf,
    #[serde(default)]
    pub(super) mounts: Vec<InspectedMount>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct InspectedState {
    pub(super) running: bool,
    pub(super) paused: bool,
    #[serde(default)]
    pub(super) restarting: bool,
    pub(super) pid: u32,
    #[serde(default)]
    pub(super) conmon_pid: u32,
    pub(super) exit_code: i32,
}

impl Inspected {
    pub(super) fn look(&self) -> Look {
        Look {
            id: self.id.clone(),
            running: self.state.running,
            restarting: self.state.restarting,
            exit_code: self.state.exit_code,
            pid: self.state.pid,
            reader: self.state.conmon_pid,
            upper: self.graph_driver.data.upper_dir.clone(),
            merged: self.graph_driver.data.merged_dir.clone(),
            networks: self.networks(),
            resolver: self.resolver(),
        }
    }

    /// See [`Look::resolver`].
    fn resolver(&self) -> Option<PathBuf> {
        let of_user = self.host_config.dns.iter().flatten().next().is_some();
        let is_own = self.resolv_conf_path.ends_with(format!("{}/userdata/resolv.conf", self.id));
        (!of_user && is_own && self.resolv_conf_path.is_absolute()).then(|| self.resolv_conf_path.clone())
    }

    /// The names that it has on its networks.
    pub(super) fn aliases(&self) -> Vec<String> {
        let networks = self.network_settings.networks.iter().flatten();
        networks.flat_map(|(_, network)| self.aliases_on(network)).collect()
    }

    /// Those on one, but for its ID, which Podman gives it as one.
    fn aliases_on(&self, network: &InspectedNetwork) -> Vec<String> {
        let all = network.aliases.iter().flatten();
        all.filter(|alias| !alias.is_empty() && !is_short_id(alias, &self.id)).cloned().collect()
    }

    /// The networks that it is on, and its address and names on each, with blanks between them.
    pub(super) fn networks(&self) -> Vec<(String, String)> {
        let networks = self.network_settings.networks.iter().flatten();
        // Since release 5 how it has none, or whose namespace it is in, is told as one.
        let networks = networks.filter(|(name, _)| *name != "none" && !name.contains(':'));
        let how = |network: &InspectedNetwork| {
            let names = self.aliases_on(network);
            std::iter::once(network.address.clone()).chain(names).collect::<Vec<_>>().join(" ")
        };
        networks.map(|(name, network)| (name.clone(), how(network))).collect()
    }

    /// The names of its volumes.
    pub(super) fn volumes(&self) -> impl Iterator<Item = &str> {
        self.mounts.iter().filter(|mount| mount.kind == "volume").map(|mount| mount.name.as_str())
    }
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct InspectedMount {
    #[serde(rename = "Type")]
    pub(super) kind: String,
    pub(super) name: String,
}

/// A volume as `podman volume inspect` tells it.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct InspectedVolume {
    pub(super) name: String,
    pub(super) driver: String,
    pub(super) options: BTreeMap<String, String>,
    pub(super) anonymous: bool,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) mountpoint: PathBuf,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct NetworkSettings {
    pub(super) networks: Option<BTreeMap<String, InspectedNetwork>>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub(super) struct InspectedNetwork {
    #[serde(rename = "IPAddress")]
    pub(super) address: String,
    #[serde(rename = "Aliases")]
    aliases: Option<Vec<String>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct GraphDriver {
    pub(super) name: String,
    #[serde(default)]
    pub(super) data: GraphData,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct GraphData {
    pub(super) upper_dir: PathBuf,
    pub(super) merged_dir: PathBuf,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct InspectedConfig {
    pub(super) healthcheck: Option<Healthcheck>,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase", default)]
pub(super) struct Healthcheck {
    pub(super) test: Option<Vec<String>>,
    /// Nanoseconds.
    pub(super) interval: i64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct HostConfig {
    pub(super) auto_remove: bool,
    #[serde(default)]
    dns: Option<Vec<String>>,
}

/// Has Podman tell what [`Storage::parse`] reads.
const STORAGE: &str =
    "{{.Host.CgroupManager}}\n{{.Store.GraphDriverName}}\n{{.Store.GraphRoot}}\n{{.Store.VolumePath}}";

/// Where Podman keeps containers, and how it makes their cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Storage {
    pub(super) driver: String,
    pub(super) root: PathBuf,
    /// Where volumes are, which may be elsewhere.
    pub(super) volumes: PathBuf,
    pub(super) by_systemd: bool,
}

impl Storage {
    /// Where the files of a volume of Podman's own driver are.
    pub(super) fn place_of(&self, volume: &str) -> PathBuf {
        self.volumes.join(volume).join("_data")
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let (by_systemd, driver) = (lines.next()? == "systemd", lines.next()?.to_owned());
        let (root, volumes) = (PathBuf::from(lines.next()?), PathBuf::from(lines.next()?));
        (root.is_absolute() && volumes.is_absolute()).then_some(Self { driver, root, volumes, by_systemd })
    }
}

/// A call of Podman.
pub(super) struct Call<'a> {
    pub(super) name: &'a ServiceName,
    /// What Podman is asked to do, for the reader of an error.
    pub(super) action: &'static str,
    pub(super) words: Vec<&'a OsStr>,
    /// Settings in place of the node's.
    pub(super) settings: Option<&'a Path>,
}

impl Podman {
    /// A call that is not under way yet.
    pub(super) fn command(&self, call: &Call<'_>) -> Command {
        let mut command = self.in_its_settings();
        command.args(&call.words);
        if let Some(settings) = call.settings {
            command.env("CONTAINERS_CONF", settings);
        }
        command
    }

    /// Podman, with the programs that it is to find, and nothing to read.
    pub(super) fn in_its_settings(&self) -> Command {
        let mut podman = Command::new(&self.config.podman);
        podman.env("PATH", &self.path_variable).stdin(Stdio::null());
        podman
    }

    /// Why a call could not be made.
    pub(super) fn not_started(&self, call: &Call<'_>, error: &std::io::Error) -> EngineError {
        let program = self.config.podman.display();
        failed(call, format!("cannot run {program}: {error}; install Podman on this node"))
    }

    /// Why a call has not done what it was to do, in Podman's words.
    pub(super) fn has_failed(&self, call: &Call<'_>, output: &Output) -> EngineError {
        failed(call, self.care.with_place(said(&output.stderr)))
    }

    /// Makes a call, and waits for its end.
    pub(super) async fn call(&self, call: &Call<'_>, limit: Duration) -> Result<Output, EngineError> {
        self.end(call, self.command(call), limit).await
    }

    /// Waits for the end of a call that is made by this command.
    pub(super) async fn end(
        &self,
        call: &Call<'_>,
        mut command: Command,
        limit: Duration,
    ) -> Result<Output, EngineError> {
        let under_way = command.kill_on_drop(true).output();
        match tokio::time::timeout(limit, under_way).await {
            Ok(Ok(output)) if output.status.success() => Ok(output),
            Ok(Ok(output)) => Err(self.has_failed(call, &output)),
            Ok(Err(error)) => Err(self.not_started(call, &error)),
            Err(_) => Err(failed(call, format!("it has not answered for {} s", limit.as_secs()))),
        }
    }

    /// Makes a call, and reads as much of its output as `read` wants. What comes of the call after that is nothing to anybody.
    pub(super) async fn first_of<T: Send + 'static>(
        &self,
        call: &Call<'_>,
        read: impl FnOnce(std::process::ChildStdout) -> std::io::Result<T> + Send + 'static,
    ) -> Result<T, EngineError> {
        let mut command = self.command(call).into_std();
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(|error| self.not_started(call, &error))?;
        let unless_wanted = KilledOnDrop::new(&mut child).map_err(|error| failed(call, error.to_string()))?;
        let reading = tokio::task::spawn_blocking(move || {
            let read = match child.stdout.take() {
                Some(output) => read(output),
                None => Err(std::io::ErrorKind::BrokenPipe.into()),
            };
            Ok::<_, std::io::Error>((read, child.wait_with_output()?))
        });
        let ended = match tokio::time::timeout(SHORT, reading).await {
            Ok(ended) => ended.map_err(std::io::Error::other).and_then(|ended| ended),
            Err(_) => {
                return Err(failed(call, format!("it has not answered for {} s", SHORT.as_secs())));
            }
        };
        drop(unless_wanted);
        match ended {
            Ok((Ok(read), _)) => Ok(read),
            Ok((Err(_), output)) if !output.status.success() => Err(failed(call, said(&output.stderr))),
            Ok((Err(error), _)) | Err(error) => Err(failed(call, error.to_string())),
        }
    }

    /// Whether Podman has a container of this ID or name, or one that only its storage knows.
    pub(super) async fn has_container(
        &self,
        name: &ServiceName,
        container: &str,
    ) -> Result<bool, EngineError> {
        let words = ["container", "exists", "--external", "--", container].map(OsStr::new).to_vec();
        let call = Call { name, action: "look for", words, settings: None };
        self.exists(&call).await
    }

    /// Asks by a call whether there is something.
    pub(super) async fn exists(&self, call: &Call<'_>) -> Result<bool, EngineError> {
        let mut command = self.command(call);
        let under_way = command.kill_on_drop(true).output();
        match tokio::time::timeout(SHORT, under_way).await {
            Ok(Ok(output)) => match output.status.code() {
                Some(0) => Ok(true),
                Some(1) => Ok(false),
                _ => Err(self.has_failed(call, &output)),
            },
            Ok(Err(error)) => Err(self.not_started(call, &error)),
            Err(_) => Err(failed(call, format!("it has not answered for {} s", SHORT.as_secs()))),
        }
    }

    /// What Podman knows of a container, by its ID or a name of its; nothing where there is none.
    pub(super) async fn inspect(
        &self,
        name: &ServiceName,
        container: &str,
    ) -> Result<Option<Inspected>, EngineError> {
        let words = ["container", "inspect", "--", container].map(OsStr::new).to_vec();
        let call = Call { name, action: "inspect", words, settings: None };
        let output = match self.call(&call, SHORT).await {
            Ok(output) => output,
            Err(EngineError::Keeper { reason, .. }) if reason.contains("no such container") => {
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let unclear =
            |error: serde_json::Error| failed(&call, format!("its answer is not understood: {error}"));
        let found: Vec<Inspected> = serde_json::from_slice(&output.stdout).map_err(unclear)?;
        Ok(found.into_iter().next())
    }

    /// Podman's storage, which it is asked for once: while it imports a container it does not answer.
    pub(super) async fn storage(&self, name: &ServiceName) -> Result<&Storage, EngineError> {
        self.storage.get_or_try_init(|| self.ask_for_storage(name)).await
    }

    /// Whether this Podman is such that its containers can move and come here.
    pub async fn fitness(&self) -> Fitness {
        let format = format!("{{{{.Version.Version}}}}\n{STORAGE}");
        let mut command = self.in_its_settings();
        let under_way = command.args(["info", "--format", &format]).kill_on_drop(true).output();
        let found = match tokio::time::timeout(PATIENCE, under_way).await {
            Ok(Ok(output)) if output.status.success() => output,
            Ok(Err(error)) if error.kind() == ErrorKind::NotFound => return Fitness::Absent,
            Ok(Ok(output)) => return Fitness::unfit(said(&output.stderr), "`podman info` has to work"),
            Ok(Err(error)) => {
                let program = self.config.podman.display();
                return Fitness::unfit(format!("cannot run {program}: {error}"), "`podman info` has to work");
            }
            Err(_) => return Fitness::silent(),
        };
        let told = String::from_utf8_lossy(&found.stdout);
        let read = told.split_once('\n').and_then(|(version, rest)| Some((version, Storage::parse(rest)?)));
        let Some((version, storage)) = read else {
            return Fitness::unfit(
                format!("its answer is not understood: {told:?}"),
                "`podman info` has to work",
            );
        };
        match driver_objection(&storage.driver) {
            Some(objection) => Fitness::unfit(objection, "its containers do not move; see docs/podman.md"),
            None => Fitness::Fit(version.to_owned()),
        }
    }

    async fn ask_for_storage(&self, name: &ServiceName) -> Result<Storage, EngineError> {
        let words = ["info", "--format", STORAGE].map(OsStr::new).to_vec();
        let call = Call { name, action: "tell its storage for", words, settings: None };
        let output = self.call(&call, SHORT).await?;
        let told = String::from_utf8_lossy(&output.stdout);
        let told = Storage::parse(&told)
            .ok_or_else(|| failed(&call, format!("its answer is not understood: {told:?}")))?;
        self.care.storage.get_or_init(|| told.root.clone());
        Ok(told)
    }

    /// What Podman knows of volumes, all of which it has.
    pub(super) async fn volumes(
        &self,
        name: &ServiceName,
        volumes: &[&str],
    ) -> Result<Vec<InspectedVolume>, EngineError> {
        if volumes.is_empty() {
            return Ok(Vec::new());
        }
        let words = ["volume", "inspect", "--"].iter().chain(volumes).map(OsStr::new).collect();
        let call = Call { name, action: "inspect the volumes of", words, settings: None };
        let output = self.call(&call, SHORT).await?;
        let unclear =
            |error: serde_json::Error| failed(&call, format!("its answer is not understood: {error}"));
        serde_json::from_slice(&output.stdout).map_err(unclear)
    }

    /// Whether Podman has a volume of this name.
    pub(super) async fn has_volume(&self, name: &ServiceName, volume: &str) -> Result<bool, EngineError> {
        match self.volumes(name, &[volume]).await {
            Ok(found) => Ok(found.iter().any(|found| found.name == volume)),
            // The second: it is the beginning of several names.
            Err(EngineError::Keeper { reason, .. })
                if reason.contains("no such volume") || reason.contains("more than one result") =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// How many containers use a volume.
    pub(super) async fn users_of_volume(
        &self,
        name: &ServiceName,
        volume: &str,
    ) -> Result<usize, EngineError> {
        let filter = format!("volume={volume}");
        let words = ["ps", "--all", "--quiet", "--filter", &filter].map(OsStr::new).to_vec();
        let call = Call { name, action: "list who shares a volume with", words, settings: None };
        let output = self.call(&call, SHORT).await?;
        Ok(String::from_utf8_lossy(&output.stdout).lines().count())
    }

    /// Whether Podman has an image of this ID.
    pub(super) async fn has_image(&self, name: &ServiceName, id: &str) -> Result<bool, EngineError> {
        let words = ["image", "inspect", "--format", "{{.Id}}", "--", id].map(OsStr::new).to_vec();
        let call = Call { name, action: "find the image of", words, settings: None };
        match self.call(&call, SHORT).await {
            Ok(output) => Ok(String::from_utf8_lossy(&output.stdout).trim() == id),
            Err(EngineError::Keeper { reason, .. })
                if reason.contains("image not known") || reason.contains("no such image") =>
            {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }
}

/// The error of a call.
pub(super) fn failed(call: &Call<'_>, reason: String) -> EngineError {
    EngineError::Keeper {
        keeper: Keeper::Podman.title(),
        action: call.action,
        name: call.name.clone(),
        reason,
    }
}

/// The error in what Podman said: its last line that is one.
pub(super) fn said(output: &[u8]) -> String {
    let text = String::from_utf8_lossy(output);
    let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
    let error = lines().rev().find_map(|line| line.strip_prefix("Error: ")).or_else(|| lines().next_back());
    error.unwrap_or("it gave no reason").to_owned()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_storage_has_a_manager_and_a_directory() {
        let found = Storage::parse("systemd\noverlay\n/my storage\n/my storage/volumes\n").unwrap();
        let (root, volumes) = ("/my storage".into(), "/my storage/volumes".into());
        assert_eq!(found, Storage { driver: "overlay".into(), root, volumes, by_systemd: true });
        assert!(!Storage::parse("cgroupfs\nvfs\n/s\n/v").unwrap().by_systemd);
        for text in ["", "systemd", "systemd\noverlay\n/s", "systemd\noverlay\ns\n/v"] {
            assert_eq!(Storage::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_reason_is_the_error_among_warnings() {
        let text = b"time=\"x\" level=warning msg=\"a\"\nError: no such container web\n\n";
        assert_eq!(said(text), "no such container web");
        assert_eq!(said(b"\n"), "it gave no reason");
    }
}
